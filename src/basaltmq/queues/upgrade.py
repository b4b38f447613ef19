"""Queue storage of earlier versions (SPEC A9).

    version 1   message       key lp(queue) ':' lp(fairness key) ':' enqueued ns u64 ':' id (16)   value JSON
                lease         key lp(queue) ':' id (16)              value lp(consumer) ':' expires ns u64
                lease expiry  key expires ns u64 ':' lp(queue) ':' id (16)                         value empty
                queue         key name                               value JSON
                state         key name                               value as it is
    version 2   leases in rows of their own, one per message (lease_v2.py); counts only where a plane had made them
    version 3   leases per call (leases.py); counts of every queue

Version 1 has no version row. The steps can be made again after a crash at any point: a message or queue of version 1
begins with a brace, a lease has a key one byte longer than one of version 2, and the expiry index is made again from
the leases. A lease of version 1 has no token: it gets 0, which every later lease is above. One without its message is
dropped. A lease of version 2 becomes a call of one message, with a token below those of any boot; the batch that puts
the one deletes the other.

A row that cannot be read goes to quarantine and does not stop the upgrade. Of a damaged lease the message is ready; a
queue whose configuration is damaged has the defaults.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any, Final
from uuid import UUID

import msgspec

from basaltmq.decoding import json_decoder
from basaltmq.errors import BasaltError, CorruptionError
from basaltmq.queues.config import QueueConfig, default_row, encode_config
from basaltmq.queues.lease_v2 import Lease, decode_lease, encode_lease
from basaltmq.queues.leases.table import LeaseCall, encode_lease_call
from basaltmq.queues.message import Message, check_message, encode_row
from basaltmq.queues.quarantine import Quarantine, Suspect, queue_of
from basaltmq.queues.ready.backing import Entry
from basaltmq.queues.recovery.recount import counted
from basaltmq.store.api import Store
from basaltmq.store.batch import Batch
from basaltmq.store.families import Family
from basaltmq.store.keys import queues as keys

BATCH_BYTES: Final = 8 << 20
"""Rows of this size are written together: a few milliseconds each, and bounded memory."""

FIRST_BOOT: Final = 1 << 40
"""The tokens of leases begin here (leases.py)."""

_BRACE: Final = b"{"
_COLON: Final = b":"

_log: Final = logging.getLogger("basaltmq")


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


_MESSAGE_V1: Final = json_decoder(_MessageV1)
_QUEUE_V1: Final = json_decoder(_QueueV1)


class _Aside:
    """Moves rows that cannot be read to quarantine."""

    def __init__(self, store: Store) -> None:
        self._quarantine = Quarantine(store, time.time_ns)

    def put(
        self, batch: Batch, family: Family, key: bytes, row: bytes, error: object, replacement: bytes | None = None
    ) -> None:
        _log.error("a row of family %s was moved to quarantine: %s", family.label, error)
        suspect = Suspect(family, key, row, str(error), replacement, queue_of(family, key), True)
        self._quarantine.put(batch, suspect)
        if replacement is None:
            batch.delete(family, key)
        else:
            batch.put(family, key, replacement)


def from_version_1(store: Store) -> Iterator[Batch]:
    aside = _Aside(store)
    # A batch is written when the next one is asked for: behind an empty one, all of those above it are.
    yield from _messages(store, aside)
    yield Batch()
    yield from _leases_without_message(store, aside)
    yield from _queues(store, aside)
    yield Batch()
    yield from _expiry(store, aside)


def _messages(store: Store, aside: _Aside) -> Iterator[Batch]:
    """Messages, each with its lease."""
    batch = Batch()
    size_bytes = 0
    for key, row in store.scan(Family.MESSAGES):
        if not row.startswith(_BRACE):
            continue
        try:
            message = _upgraded(_MESSAGE_V1, row, f"message {key.hex()}")
        except CorruptionError as error:
            aside.put(batch, Family.MESSAGES, key, row, error)
            continue
        batch.put(Family.MESSAGES, message.key(), encode_row(message))
        batch.delete(Family.MESSAGES, key)
        old_lease = keys.lp(message.queue) + _COLON + message.id
        lease = store.get(Family.LEASES, old_lease)
        if lease is not None:
            try:
                batch.put(Family.LEASES, keys.lease_key(message.queue, message.id), _lease(message, lease))
                batch.delete(Family.LEASES, old_lease)
            except CorruptionError as error:
                aside.put(batch, Family.LEASES, old_lease, lease, error)
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


def _leases_without_message(store: Store, aside: _Aside) -> Iterator[Batch]:
    batch = Batch()
    for key, row in store.scan(Family.LEASES):
        try:
            if len(key) == keys.take_lp(key, 0)[1] + 17:
                batch.delete(Family.LEASES, key)
        except CorruptionError as error:
            aside.put(batch, Family.LEASES, key, row, error)
    yield batch


def _queues(store: Store, aside: _Aside) -> Iterator[Batch]:
    batch = Batch()
    for key, row in store.scan(Family.QUEUES):
        if row.startswith(_BRACE):
            try:
                batch.put(Family.QUEUES, key, encode_config(_upgraded(_QUEUE_V1, row, f"queue {key!r}")))
            except CorruptionError as error:
                aside.put(batch, Family.QUEUES, key, row, error, default_row(key))
    yield batch


def _expiry(store: Store, aside: _Aside) -> Iterator[Batch]:
    """The index from nothing, from the leases of version 2."""
    batch = Batch()
    batch.delete_range(Family.LEASE_EXPIRY, b"", b"\xff" * 9)
    yield batch
    batch = Batch()
    for key, row in store.scan(Family.LEASES):
        try:
            lease = decode_lease(*keys.decode_lease_key(key), row)
        except CorruptionError as error:
            aside.put(batch, Family.LEASES, key, row, error)
            continue
        batch.put(Family.LEASE_EXPIRY, keys.lease_expiry_key(lease.expires_ns, lease.queue, lease.message_id), b"")
    yield batch


def from_version_2(store: Store) -> Iterator[Batch]:
    yield from _lease_calls(store, _Aside(store))
    batch = Batch()
    batch.delete_range(Family.LEASE_EXPIRY, b"", b"\xff" * 9)
    yield batch
    for key, _ in store.scan(Family.QUEUES):
        name = queue_of(Family.QUEUES, key)
        if name and store.get(Family.QUEUE_STATS, keys.queue_stats_key(name)) is None:
            batch = Batch()
            batch.put(Family.QUEUE_STATS, keys.queue_stats_key(name), counted(store, name).encode())
            yield batch
    yield Batch()


def _lease_calls(store: Store, aside: _Aside) -> Iterator[Batch]:
    token = _last_token(store)
    batch = Batch()
    for key, row in store.scan(Family.LEASES):
        try:
            old = decode_lease(*keys.decode_lease_key(key), row)
        except CorruptionError as error:
            aside.put(batch, Family.LEASES, key, row, error)
            continue
        batch.delete(Family.LEASES, key)
        message_key = old.message_key()
        if store.get(Family.MESSAGES, message_key) is not None:
            token += 1
            call = LeaseCall(token, old.consumer, 0, old.expires_ns, {old.message_id: Entry(message_key, b"", 0)})
            encoded = encode_lease_call(call, len(keys.lp(old.queue)))
            batch.put(Family.LEASE_CALLS, keys.lease_call_key(old.queue, token), encoded)
            batch.put(Family.LEASE_CALL_EXPIRY, keys.lease_call_expiry_key(old.expires_ns, old.queue, token), b"")
        if batch.size_bytes() >= BATCH_BYTES:
            yield batch
            batch = Batch()
    yield batch


def _last_token(store: Store) -> int:
    """The last token below those of any boot that was given out: tokens are of the whole store."""
    found: list[int] = []
    for key, _ in store.scan(Family.LEASE_CALLS):
        # Whoever loads the queue moves it to quarantine.
        with suppress(CorruptionError):
            found.append(keys.decode_lease_call_key(key)[1])
    return max((token for token in found if token < FIRST_BOOT), default=0)


def _upgraded(decode: Callable[[bytes], Any], row: bytes, what: str) -> Any:
    try:
        return decode(row).upgraded()
    except (msgspec.DecodeError, BasaltError, ValueError) as error:
        raise CorruptionError(f"{what} of version 1 cannot be read: {error}") from None
