"""Rows of prepared branches over queues (SPEC A6).

    queue branch   key xid   | layout u8 | state u8 | decided ms u64 | drafts u32 | holds u32 | queues u32
                             | hold ...: lp(queue) | token u64 | messages u32 |
                             | queue ...: lp(queue) |
    branch draft   key xid, number u64   | lp(queue) | the draft as MessagePack |
      large        | lp(queue) | 0xc1 0xc1 | body id (16) | body bytes u32 | the draft as MessagePack, no payload |
      large, old   | lp(queue) | 0xc1 | body id (16) | the draft as MessagePack, without its payload |

A large payload is stored like the body of a message (`Content`), with a reference of the branch that has the body id as
its message id. A commit adds references of the messages and deletes that of the branch, so the body is written once.
Neither MessagePack nor an id starts with 0xc1 (ids start with a time).

`state` is prepared, or decided by an operator. Holds are the lease calls (`leases/prepared.py`) of the messages that a
commit acks. Drafts are what a commit enqueues, in the order of their numbers. Queues are those that must not be deleted
meanwhile. The record of an operator's decision has none of the three.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from struct import Struct
from struct import error as struct_error
from typing import Final, NamedTuple

import msgspec

from basaltmq.decoding import msgpack_decoder
from basaltmq.errors import CorruptionError
from basaltmq.ids import ID_BYTES, Ids
from basaltmq.queues.change import Change
from basaltmq.queues.content import INLINE_BYTES_MAX, Content
from basaltmq.queues.draft import Draft
from basaltmq.queues.entries import rows
from basaltmq.queues.entries.backing import APART, SHARED
from basaltmq.queues.entries.quarantine import Suspects
from basaltmq.queues.transactions.xid import HEURISTICALLY_ROLLED_BACK, PREPARED, Xid, xid_key
from basaltmq.store.api import Reader, Store
from basaltmq.store.batch import Batch
from basaltmq.store.families import Family
from basaltmq.store.keys.parts import lp, prefix_range, take_lp
from basaltmq.store.keys.queues import branch_draft_key, branch_draft_prefix, decode_xid_key

LAYOUT: Final = 1

_HEAD: Final = Struct(">BBQIII")
_HOLD: Final = Struct(">QI")
_APART_OLD: Final = b"\xc1"
_APART: Final = b"\xc1\xc1"
_SIZE: Final = Struct(">I")
_ENCODE_DRAFT: Final = msgspec.msgpack.Encoder().encode
_DECODE_DRAFT: Final = msgpack_decoder(Draft)


class Hold(NamedTuple):
    """Messages that a branch holds in one queue with one lease call."""

    queue: str
    token: int
    messages: int


class BranchRow(NamedTuple):
    """A decoded row with its key."""

    xid: Xid
    state: int
    decided_ms: int
    drafts: int
    holds: list[Hold]
    queues: list[str]


def encode_branch(row: BranchRow) -> bytes:
    parts = [_HEAD.pack(LAYOUT, row.state, row.decided_ms, row.drafts, len(row.holds), len(row.queues))]
    for hold in row.holds:
        parts += (lp(hold.queue), _HOLD.pack(hold.token, hold.messages))
    parts += map(lp, row.queues)
    return b"".join(parts)


def decode_branch(key: bytes, raw: bytes) -> BranchRow:
    xid = Xid(*decode_xid_key(key))
    try:
        layout, state, decided_ms, drafts, hold_count, queue_count = _HEAD.unpack_from(raw)
        if layout != LAYOUT or not PREPARED <= state <= HEURISTICALLY_ROLLED_BACK:
            raise ValueError
        at = _HEAD.size
        holds: list[Hold] = []
        for _ in range(hold_count):
            queue, at = take_lp(raw, at)
            holds.append(Hold(queue.decode(), *_HOLD.unpack_from(raw, at)))
            at += _HOLD.size
        queues: list[str] = []
        for _ in range(queue_count):
            queue, at = take_lp(raw, at)
            queues.append(queue.decode())
        if at != len(raw):
            raise ValueError
    except (struct_error, ValueError, CorruptionError):
        raise CorruptionError(f"the record of branch {xid} over queues is damaged ({len(raw)} bytes)") from None
    return BranchRow(xid, state, decided_ms, drafts, holds, queues)


def put_branch(batch: Batch, row: BranchRow) -> None:
    batch.put(Family.XIDS, xid_key(row.xid), encode_branch(row))


class KeptDraft(NamedTuple):
    """A message that a commit will enqueue."""

    queue: str
    draft: Draft
    body_id: bytes
    """Id of its payload, if that is stored outside the row."""
    body_bytes: int | None
    """Size of that payload, if known."""


def put_drafts(
    change: Change, content: Content, ids: Ids, xid: Xid, drafts: Sequence[tuple[str, Draft | bytes]]
) -> int:
    """Store the messages that a commit will enqueue, and return their number. A shared payload is stored once."""
    kept: dict[int, bytes] = {}
    for number, (queue, draft) in enumerate(drafts):
        whole = Draft(payload=draft) if isinstance(draft, bytes) else draft
        row = lp(queue)
        if len(whole.payload) > INLINE_BYTES_MAX:
            # Compare by identity, which is valid while the sequence holds all drafts.
            body_id = kept.get(id(whole.payload))
            if body_id is None:
                body_id = kept[id(whole.payload)] = ids.next()
                content.put(change, body_id, whole.payload)
                content.refer(change, body_id, body_id)
            row += _APART + body_id + _SIZE.pack(len(whole.payload))
            whole = msgspec.structs.replace(whole, payload=b"")
        change.batch.put(Family.BRANCH_DRAFTS, branch_draft_key(*xid, number), row + _ENCODE_DRAFT(whole))
    return len(drafts)


def delete_branch(batch: Batch, xid: Xid, drafts: int) -> None:
    batch.delete(Family.XIDS, xid_key(xid))
    delete_drafts(batch, xid, drafts)


def delete_drafts(batch: Batch, xid: Xid, drafts: int) -> None:
    for number in range(drafts):
        batch.delete(Family.BRANCH_DRAFTS, branch_draft_key(*xid, number))


def read_branches(store: Store, suspects: Suspects) -> Iterator[BranchRow]:
    """Yield the branches on disk. An unreadable one is noted with its drafts, and the messages it held are released."""
    for key, raw in store.scan(Family.XIDS):
        try:
            yield decode_branch(key, raw)
        except CorruptionError as error:
            suspects.note(Family.XIDS, key, raw, str(error))
            with suppress(CorruptionError):
                decode_xid_key(key)
                for draft_key, draft in store.scan(Family.BRANCH_DRAFTS, *prefix_range(key)):
                    suspects.note(Family.BRANCH_DRAFTS, draft_key, draft, str(error))


def read_drafts(
    store: Reader, row_xid: Xid, expected: int, damaged: Callable[[bytes, bytes | None, str], None]
) -> list[KeptDraft]:
    """Return the messages that a commit will enqueue, in order, without loading large payloads.

    `damaged` is called with key, row and reason of an unreadable draft. The others are still committed.
    """
    found: list[KeptDraft] = []
    numbers = {branch_draft_key(*row_xid, number) for number in range(expected)}
    for key, raw in store.scan(Family.BRANCH_DRAFTS, *prefix_range(branch_draft_prefix(*row_xid))):
        numbers.discard(key)
        try:
            found.append(decode_draft(raw))
        except CorruptionError as error:
            damaged(key, raw, f"a message of branch {row_xid} is damaged: {error}")
    for key in sorted(numbers):
        damaged(key, None, f"a message of branch {row_xid} is missing")
    return found


def decode_draft(raw: bytes) -> KeptDraft:
    """Decode a draft. Raises CorruptionError."""
    try:
        return _decode_draft(raw)
    except (msgspec.DecodeError, ValueError) as error:
        raise CorruptionError(f"a draft of {len(raw)} bytes cannot be read: {error}") from None


def _decode_draft(raw: bytes) -> KeptDraft:
    queue, at = take_lp(raw, 0)
    body_id, body_bytes = rows.NO_BODY, None
    if raw.startswith(_APART, at):
        at += len(_APART) + ID_BYTES
        body_id = raw[at - ID_BYTES : at]
        body_bytes = int.from_bytes(raw[at : at + _SIZE.size], "big")
        at += _SIZE.size
    elif raw.startswith(_APART_OLD, at):
        at += len(_APART_OLD) + ID_BYTES
        body_id = raw[at - ID_BYTES : at]
    return KeptDraft(queue.decode(), _DECODE_DRAFT(raw[at:]), body_id, body_bytes)


def release_bodies(change: Change, content: Content, drafts: Iterable[KeptDraft]) -> None:
    """Delete the branch's references to its payloads, and payloads without other references."""
    bodies = {each.body_id for each in drafts} - {rows.NO_BODY}
    content.release(change, [(body_id, body_id, APART | SHARED) for body_id in sorted(bodies)])
