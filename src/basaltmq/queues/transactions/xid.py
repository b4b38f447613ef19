"""The id of a branch of a distributed transaction (SPEC A6), and the states of its row."""

from __future__ import annotations

from typing import Final, NamedTuple

from basaltmq.errors import XaInvalidError
from basaltmq.store.keys import queues as queue_keys

XID_PART_BYTES_MAX: Final = 64
"""MAXGTRIDSIZE and MAXBQUALSIZE of X/Open."""

FORMAT_MIN: Final = 0
FORMAT_MAX: Final = (1 << 63) - 1
"""X/Open's `long`. -1 means "no xid"; lower values are not used."""

PREPARED: Final = 1
HEURISTICALLY_COMMITTED: Final = 2
HEURISTICALLY_ROLLED_BACK: Final = 3


class Xid(NamedTuple):
    """Identifies a branch of a distributed transaction."""

    format_id: int
    global_id: bytes
    branch_id: bytes

    def __str__(self) -> str:
        return f"{self.format_id}:{self.global_id.hex()}:{self.branch_id.hex()}"


def check_xid(xid: Xid) -> None:
    format_id, global_id, branch_id = xid
    if not isinstance(format_id, int) or not FORMAT_MIN <= format_id <= FORMAT_MAX:
        raise XaInvalidError(f"an xid's format must be {FORMAT_MIN} to {FORMAT_MAX}, not {format_id!r}")
    for name, part, least in (("global id", global_id, 1), ("branch id", branch_id, 0)):
        if not isinstance(part, bytes) or not least <= len(part) <= XID_PART_BYTES_MAX:
            raise XaInvalidError(f"an xid's {name} must be {least} to {XID_PART_BYTES_MAX} bytes, not {part!r:.200}")


def xid_key(xid: Xid) -> bytes:
    return queue_keys.xid_key(xid.format_id, xid.global_id, xid.branch_id)
