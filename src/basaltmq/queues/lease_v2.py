"""A lease as version 2 of the queue storage kept it, one row per message; only the upgrade reads and writes it.

    | layout u8 | expires ns u64 | token u64 | enqueued ns u64 | consumer bytes u16 | fairness key bytes u16 |
    | consumer | fairness key |

Fairness key and time complete the message's key. The family `lease_expiry` held the same leases by time. Version 3
keeps leases per call (leases.py).
"""

from __future__ import annotations

import struct
from struct import Struct
from typing import Final

import msgspec

from basaltmq.errors import CorruptionError, InvalidArgumentError
from basaltmq.store.keys import queues as keys

LAYOUT: Final = 2
_HEAD: Final = Struct(">BQQQHH")


class Lease(msgspec.Struct, kw_only=True, frozen=True, gc=False):
    """Who has a message, until when."""

    queue: str
    message_id: bytes
    consumer: str
    expires_ns: int
    token: int
    fairness_key: str
    enqueued_ns: int

    def message_key(self) -> bytes:
        """Where the leased message is kept."""
        return keys.message_key(self.queue, self.fairness_key, self.enqueued_ns, self.message_id)


def encode_lease(lease: Lease) -> bytes:
    consumer = keys.lp(lease.consumer)[2:]
    fairness_key = keys.lp(lease.fairness_key)[2:]
    try:
        head = _HEAD.pack(LAYOUT, lease.expires_ns, lease.token, lease.enqueued_ns, len(consumer), len(fairness_key))
    except struct.error:
        raise InvalidArgumentError(
            f"the lease of message {lease.message_id.hex()} has a time or token outside 64 bits"
        ) from None
    return head + consumer + fairness_key


def decode_lease(queue: str, message_id: bytes, row: bytes) -> Lease:
    if len(row) < _HEAD.size or row[0] != LAYOUT:
        raise _damaged(queue, message_id, row)
    _, expires_ns, token, enqueued_ns, consumer_bytes, fairness_bytes = _HEAD.unpack_from(row)
    middle = _HEAD.size + consumer_bytes
    if middle + fairness_bytes != len(row):
        raise _damaged(queue, message_id, row)
    try:
        consumer = row[_HEAD.size : middle].decode()
        fairness_key = row[middle:].decode()
    except UnicodeDecodeError:
        raise _damaged(queue, message_id, row) from None
    return Lease(
        queue=queue,
        message_id=message_id,
        consumer=consumer,
        expires_ns=expires_ns,
        token=token,
        fairness_key=fairness_key,
        enqueued_ns=enqueued_ns,
    )


def _damaged(queue: str, message_id: bytes, row: bytes) -> CorruptionError:
    return CorruptionError(f"the lease of message {message_id.hex()} in queue {queue!r} is damaged ({len(row)} bytes)")
