"""Queue storage from version 1, the layout of its model, to version 2 (SPEC A9).

    version 1   message       key lp(queue) ':' lp(fairness key) ':' enqueued ns u64 ':' id (16)   value JSON
                lease         key lp(queue) ':' id (16)              value lp(consumer) ':' expires ns u64
                lease expiry  key expires ns u64 ':' lp(queue) ':' id (16)                         value empty
                queue         key name                               value JSON
                state         key name                               value as it is

No version row. The steps can be made again after a crash at any point: a message or queue of version 1 begins with a
brace, a lease has a key one byte longer than one of version 2, and the expiry index is made again from the leases.
A lease of version 1 has no token: it gets 0, which every later lease is above. One without its message is dropped.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final
from uuid import UUID

import msgspec

from basaltmq.errors import BasaltError, CorruptionError
from basaltmq.queues.config import QueueConfig, encode_config
from basaltmq.queues.lease import Lease, decode_lease, encode_lease
from basaltmq.queues.message import Message, check_message, encode_row
from basaltmq.store import keys
from basaltmq.store.api import Store
from basaltmq.store.batch import Batch
from basaltmq.store.families import Family

BATCH_BYTES: Final = 8 << 20
"""Rows of this size are written together: a few milliseconds each, and bounded memory."""

_BRACE: Final = b"{"
_COLON: Final = b":"


class _MessageV1(msgspec.Struct):
    """A message as version 1 wrote it; the payload is a list of numbers."""

    id: UUID
    queue_id: str
    payload: list[int]
    enqueued_at: int
    headers: dict[str, str] = {}
    fairness_key: str = "default"
    weight: int = 1
    throttle_keys: list[str] = []
    attempt_count: int = 0
    leased_at: int | None = None

    def upgraded(self) -> Message:
        return check_message(
            Message(
                id=self.id.bytes,
                queue=self.queue_id,
                payload=bytes(self.payload),
                enqueued_ns=self.enqueued_at,
                headers=self.headers,
                fairness_key=self.fairness_key,
                weight=max(1, self.weight),
                throttle_keys=tuple(self.throttle_keys),
                attempts=self.attempt_count,
                leased_ns=self.leased_at or 0,
            )
        )


class _QueueV1(msgspec.Struct):
    """A queue as version 1 wrote it."""

    name: str
    visibility_timeout_ms: int
    on_enqueue_script: str | None = None
    on_failure_script: str | None = None
    dlq_queue_id: str | None = None

    def upgraded(self) -> QueueConfig:
        return QueueConfig(
            name=self.name,
            visibility_timeout_ms=max(1, self.visibility_timeout_ms),
            on_enqueue_script=self.on_enqueue_script,
            on_failure_script=self.on_failure_script,
            dead_letter_queue=self.dlq_queue_id,
        )


def from_version_1(store: Store) -> Iterator[Batch]:
    # A batch is written when the next one is asked for: behind an empty one, all of those above it are.
    yield from _messages(store)
    yield Batch()
    yield from _leases_without_message(store)
    yield from _queues(store)
    yield Batch()
    yield from _expiry(store)


def _messages(store: Store) -> Iterator[Batch]:
    """Messages, each with its lease."""
    batch = Batch()
    size_bytes = 0
    for key, row in store.scan(Family.MESSAGES):
        if not row.startswith(_BRACE):
            continue
        message = _upgraded(_MessageV1, row, f"message {key.hex()}")
        batch.put(Family.MESSAGES, message.key(), encode_row(message))
        batch.delete(Family.MESSAGES, key)
        old_lease = keys.lp(message.queue) + _COLON + message.id
        lease = store.get(Family.LEASES, old_lease)
        if lease is not None:
            batch.put(Family.LEASES, keys.lease_key(message.queue, message.id), _lease(message, lease))
            batch.delete(Family.LEASES, old_lease)
        size_bytes += 2 * len(key) + len(row)
        if size_bytes >= BATCH_BYTES:
            yield batch
            batch, size_bytes = Batch(), 0
    yield batch


def _lease(message: Message, row: bytes) -> bytes:
    consumer, at = keys.take_lp(row, 0)
    if row[at : at + 1] != _COLON or len(row) != at + 9:
        raise CorruptionError(f"the lease of message {message.id.hex()} in queue {message.queue!r} is damaged")
    return encode_lease(
        Lease(
            queue=message.queue,
            message_id=message.id,
            consumer=consumer.decode(errors="replace"),
            expires_ns=int.from_bytes(row[at + 1 :], "big"),
            token=0,
            fairness_key=message.fairness_key,
            enqueued_ns=message.enqueued_ns,
        )
    )


def _leases_without_message(store: Store) -> Iterator[Batch]:
    batch = Batch()
    for key, _ in store.scan(Family.LEASES):
        if len(key) == keys.take_lp(key, 0)[1] + 17:
            batch.delete(Family.LEASES, key)
    yield batch


def _queues(store: Store) -> Iterator[Batch]:
    batch = Batch()
    for key, row in store.scan(Family.QUEUES):
        if row.startswith(_BRACE):
            batch.put(Family.QUEUES, key, encode_config(_upgraded(_QueueV1, row, f"queue {key!r}")))
    yield batch


def _expiry(store: Store) -> Iterator[Batch]:
    """The index from nothing, from the leases of version 2."""
    batch = Batch()
    batch.delete_range(Family.LEASE_EXPIRY, b"", b"\xff" * 9)
    yield batch
    batch = Batch()
    for key, row in store.scan(Family.LEASES):
        lease = decode_lease(*keys.decode_lease_key(key), row)
        batch.put(Family.LEASE_EXPIRY, keys.lease_expiry_key(lease.expires_ns, lease.queue, lease.message_id), b"")
    yield batch


def _upgraded(kind: type[Any], row: bytes, what: str) -> Any:
    try:
        return msgspec.json.decode(row, type=kind).upgraded()
    except (msgspec.DecodeError, BasaltError, ValueError) as error:
        raise CorruptionError(f"{what} of version 1 cannot be read: {error}; nothing of it was changed") from None
