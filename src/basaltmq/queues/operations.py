"""The typed operations of a queue batch: each knows the rows it touches.

Operations read nothing. What a row's key needs (a message's place, the time a lease stood under) is in the operation,
because whoever makes it knows; so a batch of any operations is one write. Each index row is written and deleted by the
operation of the row it belongs to: nobody can forget one.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, TypeAlias

import msgspec

from basaltmq.queues.config import QueueConfig, encode_config
from basaltmq.queues.lease import Lease, encode_lease
from basaltmq.queues.message import Message, encode_row
from basaltmq.store.batch import DELETE, PUT, Batch
from basaltmq.store.families import Family
from basaltmq.store.keys import queues as keys

_MESSAGES: Final = Family.MESSAGES
"""An enum's member costs a lookup each time it is named; these two operations are the hot ones."""


class PutMessage(msgspec.Struct, frozen=True, gc=False):
    """Store a message, or what changed of it, at its place."""

    message: Message

    def add_to(self, batch: Batch) -> None:
        message = self.message
        key = keys.message_key(message.queue, message.fairness_key, message.enqueued_ns, message.id)
        batch.ops.append((PUT, _MESSAGES, key, encode_row(message)))


class PutMessages(msgspec.Struct, frozen=True):
    """Store many messages: the same as a `PutMessage` each, at less cost."""

    messages: Sequence[Message]

    def add_to(self, batch: Batch) -> None:
        messages = self.messages
        places = keys.message_keys(messages)
        rows = map(encode_row, messages)
        batch.put_many(_MESSAGES, places, list(rows))


class DeleteMessage(msgspec.Struct, frozen=True, gc=False):
    """Delete the row of a message whose body is in it, at a key (`Message.key`)."""

    key: bytes

    def add_to(self, batch: Batch) -> None:
        batch.ops.append((DELETE, _MESSAGES, self.key, b""))


class PutLease(msgspec.Struct, frozen=True, gc=False):
    """Store a lease; `replaces_expires_ns` is the time it stood under, if it did."""

    lease: Lease
    replaces_expires_ns: int | None = None

    def add_to(self, batch: Batch) -> None:
        lease = self.lease
        if self.replaces_expires_ns is not None:
            old = keys.lease_call_expiry_key(self.replaces_expires_ns, lease.queue, lease.token)
            batch.delete(Family.LEASE_CALL_EXPIRY, old)
        batch.put(Family.LEASE_CALLS, keys.lease_call_key(lease.queue, lease.token), encode_lease(lease))
        expiry = keys.lease_call_expiry_key(lease.expires_ns, lease.queue, lease.token)
        batch.put(Family.LEASE_CALL_EXPIRY, expiry, b"")


class DeleteLease(msgspec.Struct, frozen=True, gc=False):
    """Delete a lease, which stands under `expires_ns`. Its messages are ready again."""

    queue: str
    token: int
    expires_ns: int

    def add_to(self, batch: Batch) -> None:
        batch.delete(Family.LEASE_CALLS, keys.lease_call_key(self.queue, self.token))
        batch.delete(Family.LEASE_CALL_EXPIRY, keys.lease_call_expiry_key(self.expires_ns, self.queue, self.token))


class PutQueue(msgspec.Struct, frozen=True):
    """Store a queue's configuration."""

    config: QueueConfig

    def add_to(self, batch: Batch) -> None:
        batch.put(Family.QUEUES, keys.queue_key(self.config.name), encode_config(self.config))


class PutState(msgspec.Struct, frozen=True, gc=False):
    """Set a runtime value."""

    name: str
    value: bytes

    def add_to(self, batch: Batch) -> None:
        batch.put(Family.STATE, keys.state_key(self.name), self.value)


class DeleteState(msgspec.Struct, frozen=True, gc=False):
    """Delete a runtime value."""

    name: str

    def add_to(self, batch: Batch) -> None:
        batch.delete(Family.STATE, keys.state_key(self.name))


Operation: TypeAlias = (
    PutMessage | PutMessages | DeleteMessage | PutLease | DeleteLease | PutQueue | PutState | DeleteState
)
