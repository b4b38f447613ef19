"""Prepared branches over queues as rows (SPEC A6).

    queue branch   key xid   | layout u8 | state u8 | decided ms u64 | drafts u32 | holds u32 | queues u32
                             | hold ...: lp(queue) | token u64 | messages u32 |
                             | queue ...: lp(queue) |
    branch draft   key xid, number u64   | lp(queue) | the draft as MessagePack |

`state` is that of `messages.branches`: prepared, or decided by an operator. The holds are the lease calls (held.py)
under which the messages are that a commit acks; the drafts are what a commit enqueues, in the order of their numbers;
the queues are those that may not be deleted meanwhile. What a decision leaves behind has none of the three.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from struct import Struct
from struct import error as struct_error
from typing import Final, NamedTuple

import msgspec

from basaltmq.errors import CorruptionError
from basaltmq.messages.branches import HEURISTICALLY_ROLLED_BACK, PREPARED, Xid, xid_key
from basaltmq.queues.draft import Draft
from basaltmq.store.api import Store
from basaltmq.store.batch import Batch
from basaltmq.store.families import Family
from basaltmq.store.keys import branch_draft_key, branch_draft_prefix, decode_xid_key, lp, prefix_range, take_lp

LAYOUT: Final = 1

_HEAD: Final = Struct(">BBQIII")
_HOLD: Final = Struct(">QI")
_ENCODE_DRAFT: Final = msgspec.msgpack.Encoder().encode
_DECODE_DRAFT: Final = msgspec.msgpack.Decoder(Draft).decode


class Hold(NamedTuple):
    """Messages a branch holds in one queue under one lease call."""

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
    batch.put(Family.QUEUE_BRANCHES, xid_key(row.xid), encode_branch(row))


def put_drafts(batch: Batch, xid: Xid, drafts: Iterable[tuple[str, Draft | bytes]]) -> int:
    """Keep what a commit is to enqueue; how many."""
    number = 0
    for queue, draft in drafts:
        whole = Draft(payload=draft) if isinstance(draft, bytes) else draft
        batch.put(Family.BRANCH_DRAFTS, branch_draft_key(*xid, number), lp(queue) + _ENCODE_DRAFT(whole))
        number += 1
    return number


def delete_branch(batch: Batch, xid: Xid, drafts: int) -> None:
    batch.delete(Family.QUEUE_BRANCHES, xid_key(xid))
    delete_drafts(batch, xid, drafts)


def delete_drafts(batch: Batch, xid: Xid, drafts: int) -> None:
    for number in range(drafts):
        batch.delete(Family.BRANCH_DRAFTS, branch_draft_key(*xid, number))


def read_branches(store: Store) -> Iterator[BranchRow]:
    for key, raw in store.scan(Family.QUEUE_BRANCHES):
        yield decode_branch(key, raw)


def read_drafts(store: Store, row_xid: Xid, expected: int) -> list[tuple[str, Draft]]:
    """What a commit is to enqueue, in order; every one of them, or an error."""
    found: list[tuple[str, Draft]] = []
    for _, raw in store.scan(Family.BRANCH_DRAFTS, *prefix_range(branch_draft_prefix(*row_xid))):
        try:
            queue, at = take_lp(raw, 0)
            found.append((queue.decode(), _DECODE_DRAFT(raw[at:])))
        except (msgspec.DecodeError, ValueError, CorruptionError):
            raise CorruptionError(f"message {len(found)} of branch {row_xid} is damaged ({len(raw)} bytes)") from None
    if len(found) != expected:
        raise CorruptionError(f"branch {row_xid} is to enqueue {expected} messages, and {len(found)} are there")
    return found
