"""Prepared branches of distributed transactions as rows of `xids` (SPEC A6).

    | layout u8 | state u8 | decided at ms u64 | actions u32 | action ... |
    action  | kind u8 | queue id (16) | message id u64 |

The key is the xid. A row exists from prepare to commit, rollback or forget. What a heuristic decision leaves behind
has no actions: they are done or undone.
"""

from __future__ import annotations

from struct import Struct
from typing import Final, NamedTuple
from uuid import UUID

from basaltmq.errors import CorruptionError, XaInvalidError
from basaltmq.store.keys import queues as keys

LAYOUT: Final = 2
XID_PART_BYTES_MAX: Final = 64
"""MAXGTRIDSIZE and MAXBQUALSIZE of X/Open."""

FORMAT_MIN: Final = 0
FORMAT_MAX: Final = (1 << 63) - 1
"""X/Open's long; -1 means no xid, lower ones are not used."""

PREPARED: Final = 1
HEURISTICALLY_COMMITTED: Final = 2
HEURISTICALLY_ROLLED_BACK: Final = 3

ENQUEUE: Final = 1
"""Of a message the branch itself brought: a rollback removes the message."""
ENQUEUE_SHARED: Final = 2
"""Of a message that was stored before: a rollback leaves it."""
DEQUEUE: Final = 3

ACTIONS_MAX: Final = 1 << 16
"""Of one branch: a row of 1.6 MiB, and a commit's batch of twice that."""

_HEAD: Final = Struct(">BBQI")
_ACTION: Final = Struct(">B16sQ")


class Xid(NamedTuple):
    """Names a branch of a distributed transaction."""

    format_id: int
    global_id: bytes
    branch_id: bytes

    def __str__(self) -> str:
        return f"{self.format_id}:{self.global_id.hex()}:{self.branch_id.hex()}"


class Action(NamedTuple):
    """What a branch does to one queue."""

    kind: int
    queue_id: UUID
    message_id: int

    @property
    def entry(self) -> bytes:
        return keys.queue_entry_key(self.queue_id, self.message_id)


class PreparedBranch(NamedTuple):
    """A decoded row with its key."""

    xid: Xid
    state: int
    decided_ms: int
    actions: list[Action]


def check_xid(xid: Xid) -> None:
    format_id, global_id, branch_id = xid
    if not isinstance(format_id, int) or not FORMAT_MIN <= format_id <= FORMAT_MAX:
        raise XaInvalidError(f"an xid's format is {FORMAT_MIN} to {FORMAT_MAX}, not {format_id!r}")
    for name, part, least in (("global id", global_id, 1), ("branch id", branch_id, 0)):
        if not isinstance(part, bytes) or not least <= len(part) <= XID_PART_BYTES_MAX:
            raise XaInvalidError(f"an xid's {name} is {least} to {XID_PART_BYTES_MAX} bytes, not {part!r:.200}")


def xid_key(xid: Xid) -> bytes:
    return keys.xid_key(xid.format_id, xid.global_id, xid.branch_id)


def encode_branch(state: int, decided_ms: int, actions: list[Action]) -> bytes:
    assert len(actions) <= ACTIONS_MAX
    pack = _ACTION.pack
    head = _HEAD.pack(LAYOUT, state, decided_ms, len(actions))
    return head + b"".join([pack(kind, queue_id.bytes, message_id) for kind, queue_id, message_id in actions])


def decode_branch(key: bytes, raw: bytes) -> PreparedBranch:
    xid = Xid(*keys.decode_xid_key(key))
    if len(raw) < _HEAD.size:
        raise CorruptionError(f"the record of branch {xid} has {len(raw)} bytes, at least {_HEAD.size} needed")
    layout, state, decided_ms, count = _HEAD.unpack_from(raw)
    if layout != LAYOUT or not PREPARED <= state <= HEURISTICALLY_ROLLED_BACK:
        raise CorruptionError(f"the record of branch {xid} has layout {layout} and state {state}")
    if len(raw) != _HEAD.size + count * _ACTION.size:
        raise CorruptionError(f"the record of branch {xid} has {len(raw)} bytes for {count} actions")
    actions = [
        Action(kind, UUID(bytes=queue), message) for kind, queue, message in _ACTION.iter_unpack(raw[_HEAD.size :])
    ]
    if any(not ENQUEUE <= action.kind <= DEQUEUE for action in actions):
        raise CorruptionError(f"the record of branch {xid} has an action of unknown kind")
    return PreparedBranch(xid, state, decided_ms, actions)
