"""What the queue plane stores (SPEC C1, C2), row by row: messages, leases, queue configurations, runtime state.

`Storage` is the interface, `StoreStorage` its implementation on any `Store`, so on disk and in memory alike. It is a
view of the rows the plane itself lives on: what the plane enqueues and leases is read here, bodies kept apart included,
and what is put here is there when the plane is opened. Writes go as typed operations, many in one batch; the single-row
methods are the same with one operation. All writes survive a process crash on return; whoever confirms one to a client
waits for the store's sync (`batch_of` and a group commit). Lists are iterators from a cursor: they hold one row, see
the moment they began, and never start at tombstones that the caller's cursor has passed.

Rules above single rows (does the queue exist, is the token the current one) are the plane's, and so are its counts: it
does not know of what is written here while it is open, and `recount` brings a queue's counts in line while it is not.
Safe to share between threads.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import suppress
from typing import Final, Protocol

import msgspec

from basaltmq.errors import CorruptionError, InvalidArgumentError, QueueNotFoundError
from basaltmq.queues import upgrade
from basaltmq.queues.change import Change
from basaltmq.queues.config import QueueConfig, decode_config
from basaltmq.queues.content import Content
from basaltmq.queues.lease import Lease, decode_lease
from basaltmq.queues.lifecycle.removal import BY_QUEUE
from basaltmq.queues.message import Message
from basaltmq.queues.operations import (
    DeleteLease,
    DeleteState,
    Operation,
    PutLease,
    PutMessage,
    PutQueue,
    PutState,
)
from basaltmq.queues.ready import rows
from basaltmq.queues.ready.backing import APART, TIMED, Entry
from basaltmq.queues.recovery.recount import counted, entries_of
from basaltmq.queues.stats import QueueStats
from basaltmq.store.api import Store
from basaltmq.store.batch import Batch
from basaltmq.store.families import Family
from basaltmq.store.keys import queues as keys
from basaltmq.store.versions import bring_up_to_date

CONTENT: Final = "queue_storage"
VERSION: Final = 3
FAMILIES: Final = (Family.MESSAGES, Family.LEASE_CALLS, Family.LEASE_CALL_EXPIRY, Family.QUEUES, Family.STATE)
_FOUND_IN: Final = (*FAMILIES, Family.LEASES, Family.LEASE_EXPIRY)
"""Families in which something is if the storage is not new, those of earlier versions included."""


class Storage(Protocol):
    """The queue plane's storage. Keys are those of `Message.key`; a missing row is None."""

    def write_batch(self, operations: Iterable[Operation]) -> None:
        """Apply operations together or not at all."""
        ...

    def batch_of(self, operations: Iterable[Operation]) -> Batch:
        """The rows of operations, to be written with others or by a group commit."""
        ...

    def put_message(self, message: Message) -> None: ...

    def get_message(self, key: bytes) -> Message | None: ...

    def get_messages(self, message_keys: list[bytes]) -> list[Message | None]: ...

    def delete_message(self, key: bytes) -> None: ...

    def list_messages(
        self, queue: str, fairness_key: str | None = None, *, after: bytes | None = None
    ) -> Iterator[Message]:
        """In order of time within a fairness key, from behind the key `after`."""
        ...

    def list_fairness_keys(self, queue: str, *, after: str | None = None) -> Iterator[str]:
        """Fairness keys that have a message, by one seek each."""
        ...

    def put_lease(self, lease: Lease, *, replaces_expires_ns: int | None = None) -> None: ...

    def get_lease(self, queue: str, message_id: bytes) -> Lease | None:
        """The lease a message is under. Looks through the leases of its queue."""
        ...

    def delete_lease(self, lease: Lease) -> None: ...

    def list_leases(self, queue: str) -> Iterator[Lease]: ...

    def list_expired(self, now_ns: int, *, from_ns: int = 0) -> Iterator[Lease]:
        """Leases that expire at or before `now_ns`, the earliest first; none before `from_ns` is looked at."""
        ...

    def put_queue(self, config: QueueConfig) -> None: ...

    def get_queue(self, name: str) -> QueueConfig | None: ...

    def list_queues(self, *, after: str | None = None) -> Iterator[QueueConfig]: ...

    def delete_queue(self, name: str) -> None:
        """Delete a queue with its messages, leases and configuration in one batch."""
        ...

    def recount(self, name: str) -> None:
        """Count what is in a queue anew, for the plane that is opened next."""
        ...

    def put_state(self, name: str, value: bytes) -> None: ...

    def get_state(self, name: str) -> bytes | None: ...

    def delete_state(self, name: str) -> None: ...

    def list_state(self, prefix: str = "") -> Iterator[tuple[str, bytes]]: ...


class StoreStorage:
    """`Storage` on a store."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._content = Content(store)

    @classmethod
    def open(cls, store: Store) -> StoreStorage:
        """Bring what is stored up to date, and open it."""
        upgrades = {1: upgrade.from_version_1, 2: upgrade.from_version_2}
        bring_up_to_date(store, CONTENT, VERSION, upgrades, _FOUND_IN)
        return cls(store)

    def write_batch(self, operations: Iterable[Operation]) -> None:
        self._store.write(self.batch_of(operations))

    def batch_of(self, operations: Iterable[Operation]) -> Batch:
        batch = Batch()
        for operation in operations:
            operation.add_to(batch)
        return batch

    def put_message(self, message: Message) -> None:
        self.write_batch((PutMessage(message),))

    def get_message(self, key: bytes) -> Message | None:
        row = self._store.get(Family.MESSAGES, key)
        return None if row is None else self._open(key, row)

    def get_messages(self, message_keys: list[bytes]) -> list[Message | None]:
        found = self._store.get_many(Family.MESSAGES, message_keys)
        return [None if row is None else self._open(key, row) for key, row in zip(message_keys, found, strict=True)]

    def _open(self, key: bytes, row: bytes) -> Message:
        entry = rows.read_entry(key, row)
        return rows.open_row(key, row, self._content.get(entry) if entry.flags & APART else None)

    def delete_message(self, key: bytes) -> None:
        row = self._store.get(Family.MESSAGES, key)
        if row is None:
            return
        change = Change(0)
        change.batch.delete(Family.MESSAGES, key)
        self._release(change, [rows.read_entry(key, row)])
        self._store.write(change.batch)

    def _release(self, change: Change, entries: Iterable[Entry]) -> None:
        """Delete what messages have beside their rows."""
        apart: list[tuple[bytes, bytes, int]] = []
        for entry in entries:
            if entry.flags & TIMED:
                change.batch.delete(Family.MESSAGE_EXPIRY, keys.timed_of(entry.key, entry.expires_ns))
            if entry.flags & APART:
                apart.append((rows.body_of(entry.row), entry.key[-16:], entry.flags))
        self._content.release(change, apart)

    def list_messages(
        self, queue: str, fairness_key: str | None = None, *, after: bytes | None = None
    ) -> Iterator[Message]:
        prefix = keys.message_prefix(queue, fairness_key)
        start, end = keys.prefix_range(prefix)
        if after is not None:
            if not after.startswith(prefix):
                raise InvalidArgumentError(f"the cursor {after[:48].hex()} is of another queue or fairness key")
            start = after + b"\0"
        return (self._open(key, row) for key, row in self._store.scan(Family.MESSAGES, start, end))

    def list_fairness_keys(self, queue: str, *, after: str | None = None) -> Iterator[str]:
        start, end = keys.prefix_range(keys.message_prefix(queue))
        if after is not None:
            start = _above(keys.message_prefix(queue, after))
        while True:
            row = next(iter(self._store.scan(Family.MESSAGES, start, end)), None)
            if row is None:
                return
            fairness_key = keys.decode_message_key(row[0])[1]
            yield fairness_key
            start = _above(keys.message_prefix(queue, fairness_key))

    def put_lease(self, lease: Lease, *, replaces_expires_ns: int | None = None) -> None:
        self.write_batch((PutLease(lease, replaces_expires_ns),))

    def get_lease(self, queue: str, message_id: bytes) -> Lease | None:
        for lease in self.list_leases(queue):
            if lease.has(message_id):
                return lease
        return None

    def delete_lease(self, lease: Lease) -> None:
        self.write_batch((DeleteLease(lease.queue, lease.token, lease.expires_ns),))

    def list_leases(self, queue: str) -> Iterator[Lease]:
        for key, row in self._store.scan(Family.LEASE_CALLS, *keys.prefix_range(keys.lease_call_prefix(queue))):
            yield self._lease(*keys.decode_lease_call_key(key), row)

    def _lease(self, queue: str, token: int, row: bytes) -> Lease:
        """A lease with those of its messages that are not done."""
        lease = decode_lease(queue, token, row)
        found = self._store.get_many(Family.MESSAGES, list(lease.message_keys))
        alive = tuple(key for key, each in zip(lease.message_keys, found, strict=True) if each is not None)
        return msgspec.structs.replace(lease, message_keys=alive)

    def list_expired(self, now_ns: int, *, from_ns: int = 0) -> Iterator[Lease]:
        start = keys.lease_expiry_bound(from_ns)
        end = keys.prefix_range(keys.lease_expiry_bound(now_ns))[1]
        for key, _ in self._store.scan(Family.LEASE_CALL_EXPIRY, start, end):
            expires_ns, queue, token = keys.decode_lease_call_expiry_key(key)
            row = self._store.get(Family.LEASE_CALLS, keys.lease_call_key(queue, token))
            if row is None:
                continue
            lease = self._lease(queue, token, row)
            # The walk sees the moment it began; a lease that was answered or extended since is not expired.
            if lease.expires_ns == expires_ns:
                yield lease

    def put_queue(self, config: QueueConfig) -> None:
        self.write_batch((PutQueue(config),))

    def get_queue(self, name: str) -> QueueConfig | None:
        row = self._store.get(Family.QUEUES, keys.queue_key(name))
        return None if row is None else decode_config(name, row)

    def list_queues(self, *, after: str | None = None) -> Iterator[QueueConfig]:
        start = b"" if after is None else keys.queue_key(after) + b"\0"
        for key, row in self._store.scan(Family.QUEUES, start):
            yield decode_config(keys.decode_queue_key(key), row)

    def delete_queue(self, name: str) -> None:
        key = keys.queue_key(name)
        if self._store.get(Family.QUEUES, key) is None:
            raise QueueNotFoundError(f"there is no queue {name!r}")
        change = Change(0)
        for family in (Family.MESSAGES, Family.DELAYED):
            entries = entries_of(self._store, name, family)
            self._release(change, [entry for entry in entries if entry.flags & APART])
        start, end = keys.prefix_range(keys.lp(name))
        assert end is not None
        for expires_ns, token in self._lease_times(name):
            change.batch.delete(Family.LEASE_CALL_EXPIRY, keys.lease_call_expiry_key(expires_ns, name, token))
        for family in BY_QUEUE:
            change.batch.delete_range(family, start, end)
        change.batch.delete(Family.QUEUE_STATS, keys.queue_stats_key(name))
        change.batch.delete(Family.QUEUES, key)
        self._store.write(change.batch)

    def _lease_times(self, queue: str) -> Iterator[tuple[int, int]]:
        for key, row in self._store.scan(Family.LEASE_CALLS, *keys.prefix_range(keys.lease_call_prefix(queue))):
            token = keys.decode_lease_call_key(key)[1]
            try:
                yield decode_lease(queue, token, row).expires_ns, token
            except CorruptionError:
                # Its row goes with the range; its index row leads nowhere, and `list_expired` skips it.
                continue

    def recount(self, name: str) -> None:
        row = self._store.get(Family.QUEUE_STATS, keys.queue_stats_key(name))
        before: QueueStats | None = None
        with suppress(CorruptionError):
            before = None if row is None else QueueStats.decode(name, row)
        batch = Batch()
        stats = counted(self._store, name, before=before)
        batch.put(Family.QUEUE_STATS, keys.queue_stats_key(name), stats.encode())
        self._store.write(batch)

    def put_state(self, name: str, value: bytes) -> None:
        self.write_batch((PutState(name, value),))

    def get_state(self, name: str) -> bytes | None:
        return self._store.get(Family.STATE, keys.state_key(name))

    def delete_state(self, name: str) -> None:
        self.write_batch((DeleteState(name),))

    def list_state(self, prefix: str = "") -> Iterator[tuple[str, bytes]]:
        start, end = keys.prefix_range(keys.state_key(prefix))
        for key, value in self._store.scan(Family.STATE, start, end):
            # A name that is no text was never set; it must not hide the others.
            with suppress(CorruptionError):
                yield keys.decode_state_key(key), value


def _above(prefix: bytes) -> bytes:
    """The first key behind everything that begins with `prefix`, which is never all 0xff: it begins with a length."""
    end = keys.prefix_range(prefix)[1]
    assert end is not None
    return end
