"""Receipt handles: the place of a delivered record, with the token that fences it.

    base64url of | version u8 | hash of the group u64 | topic uuid (16) | partition u32 | offset u64 | token u64 |

Clients treat a handle as opaque. Its group and topic must be those of the call, so a handle of another group is refused
even if its numbers match.
"""

from __future__ import annotations

import base64
import binascii
import struct
from struct import Struct
from typing import Final, NamedTuple
from uuid import UUID

from basaltmq.protocols.rocketmq.rules.status import Refused
from basaltmq.streams.pop.lease import Lease, hash_of
from basaltmq.wire import rocketmq_wire_pb2 as wire

VERSION: Final = 1
_LAYOUT: Final = Struct(">BQ16sIQQ")
HANDLE_CHARACTERS_MAX: Final = 4 * ((_LAYOUT.size + 2) // 3)


class Handle(NamedTuple):
    """A decoded receipt handle."""

    partition: int
    offset: int
    token: int


def encode_handle(group: str, topic_id: UUID, lease: Lease) -> str:
    raw = _LAYOUT.pack(VERSION, hash_of(group), topic_id.bytes, lease.partition, lease.offset, lease.token)
    return base64.urlsafe_b64encode(raw).decode()


def decode_handle(text: str, group: str, topic_id: UUID) -> Handle:
    """Return the parts of a handle, or raise INVALID_RECEIPT_HANDLE."""
    if len(text) != HANDLE_CHARACTERS_MAX:
        raise Refused(wire.INVALID_RECEIPT_HANDLE, "the receipt handle is not one of this broker")
    try:
        raw = base64.b64decode(text, altchars=b"-_", validate=True)
        version, group_hash, topic, partition, offset, token = _LAYOUT.unpack(raw)
    except (binascii.Error, ValueError, struct.error) as error:
        raise Refused(wire.INVALID_RECEIPT_HANDLE, "the receipt handle is not one of this broker") from error
    if version != VERSION or group_hash != hash_of(group) or topic != topic_id.bytes:
        raise Refused(
            wire.INVALID_RECEIPT_HANDLE, f"the receipt handle belongs to another group or topic than group {group!r}"
        )
    return Handle(partition, offset, token)
