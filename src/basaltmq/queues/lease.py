"""A lease as `Storage` shows it (SPEC C1, C2): the messages of one lease call, with whom they are, and until when.

The row is that of leases.py, which the plane writes: one per call, whatever the number of messages. A message that was
acked is gone from `messages` and stays named in the row; so the messages of a lease are those named that still exist.
What a consumer holds without a row (leases.py, FOREVER) is in the plane's memory only and not seen here.
"""

from __future__ import annotations

import msgspec

from basaltmq.queues.leases.table import LeaseCall, decode_lease_call, encode_lease_call
from basaltmq.queues.ready.backing import Entry
from basaltmq.store.keys import queues as keys


class Lease(msgspec.Struct, kw_only=True, frozen=True, gc=False):
    """Who has which messages of a queue, until when. `token` fences: it grows with every lease of the store."""

    queue: str
    token: int
    consumer: str
    leased_ns: int
    expires_ns: int
    message_keys: tuple[bytes, ...]

    def has(self, message_id: bytes) -> bool:
        return any(key[-16:] == message_id for key in self.message_keys)


def encode_lease(lease: Lease) -> bytes:
    entries = {key[-16:]: Entry(key, b"", 0) for key in lease.message_keys}
    call = LeaseCall(lease.token, lease.consumer, lease.leased_ns, lease.expires_ns, entries)
    return encode_lease_call(call, len(keys.lp(lease.queue)))


def decode_lease(queue: str, token: int, row: bytes) -> Lease:
    call, message_keys = decode_lease_call(queue, token, row)
    return Lease(
        queue=queue,
        token=token,
        consumer=call.consumer,
        leased_ns=call.leased_ns,
        expires_ns=call.expires_ns,
        message_keys=tuple(message_keys),
    )
