"""What the queue plane stores (SPEC C1, C2): messages, leases, queue configurations, runtime state.

`Storage` is the interface, `StoreStorage` its implementation on any `Store`, so on disk and in memory alike. Writes
go as typed operations, many in one batch; the single-row methods are the same with one operation. All writes survive
a process crash on return; whoever confirms one to a client waits for the store's sync (`batch_of` and a group commit).
Lists are iterators from a cursor: they hold one row, see the moment they began, and never start at tombstones that
the caller's cursor has passed. Rules above single rows (does the queue exist, is the token the current one) are the
plane's. Safe to share between threads.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Final, Protocol

from basaltmq.errors import CorruptionError, InvalidArgumentError, QueueNotFoundError
from basaltmq.queues import upgrade
from basaltmq.queues.config import QueueConfig, decode_config
from basaltmq.queues.lease import Lease, decode_lease
from basaltmq.queues.message import Message, decode_row
from basaltmq.queues.operations import (
    DeleteLease,
    DeleteMessage,
    DeleteState,
    Operation,
    PutLease,
    PutMessage,
    PutQueue,
    PutState,
)
from basaltmq.store import keys
from basaltmq.store.api import Store
from basaltmq.store.batch import Batch
from basaltmq.store.families import Family
from basaltmq.store.versions import bring_up_to_date

CONTENT: Final = "queue_storage"
VERSION: Final = 2
FAMILIES: Final = (Family.MESSAGES, Family.LEASES, Family.LEASE_EXPIRY, Family.QUEUES, Family.STATE)


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

    def get_lease(self, queue: str, message_id: bytes) -> Lease | None: ...

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

    def put_state(self, name: str, value: bytes) -> None: ...

    def get_state(self, name: str) -> bytes | None: ...

    def delete_state(self, name: str) -> None: ...

    def list_state(self, prefix: str = "") -> Iterator[tuple[str, bytes]]: ...


class StoreStorage:
    """`Storage` on a store."""

    def __init__(self, store: Store) -> None:
        self._store = store

    @classmethod
    def open(cls, store: Store) -> StoreStorage:
        """Bring what is stored up to date, and open it."""
        bring_up_to_date(store, CONTENT, VERSION, {1: upgrade.from_version_1}, FAMILIES)
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
        return None if row is None else decode_row(key, row)

    def get_messages(self, message_keys: list[bytes]) -> list[Message | None]:
        rows = self._store.get_many(Family.MESSAGES, message_keys)
        return [None if row is None else decode_row(key, row) for key, row in zip(message_keys, rows, strict=True)]

    def delete_message(self, key: bytes) -> None:
        self.write_batch((DeleteMessage(key),))

    def list_messages(
        self, queue: str, fairness_key: str | None = None, *, after: bytes | None = None
    ) -> Iterator[Message]:
        prefix = keys.message_prefix(queue, fairness_key)
        start, end = keys.prefix_range(prefix)
        if after is not None:
            if not after.startswith(prefix):
                raise InvalidArgumentError(f"the cursor {after[:48].hex()} is of another queue or fairness key")
            start = after + b"\0"
        return (decode_row(key, row) for key, row in self._store.scan(Family.MESSAGES, start, end))

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
        row = self._store.get(Family.LEASES, keys.lease_key(queue, message_id))
        return None if row is None else decode_lease(queue, message_id, row)

    def delete_lease(self, lease: Lease) -> None:
        self.write_batch((DeleteLease(lease.queue, lease.message_id, lease.expires_ns),))

    def list_leases(self, queue: str) -> Iterator[Lease]:
        start, end = keys.prefix_range(keys.lp(queue))
        for key, row in self._store.scan(Family.LEASES, start, end):
            yield decode_lease(*keys.decode_lease_key(key), row)

    def list_expired(self, now_ns: int, *, from_ns: int = 0) -> Iterator[Lease]:
        start = keys.lease_expiry_bound(from_ns)
        end = keys.prefix_range(keys.lease_expiry_bound(now_ns))[1]
        for key, _ in self._store.scan(Family.LEASE_EXPIRY, start, end):
            expires_ns, queue, message_id = keys.decode_lease_expiry_key(key)
            lease = self.get_lease(queue, message_id)
            # The walk sees the moment it began; a lease that was answered or extended since is not expired.
            if lease is not None and lease.expires_ns == expires_ns:
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
        batch = Batch()
        for family in (Family.MESSAGES, Family.LEASES):
            start, end = keys.prefix_range(keys.lp(name))
            assert end is not None
            batch.delete_range(family, start, end)
        for expires_ns, message_id in self._lease_times(name):
            batch.delete(Family.LEASE_EXPIRY, keys.lease_expiry_key(expires_ns, name, message_id))
        batch.delete(Family.QUEUES, key)
        self._store.write(batch)

    def _lease_times(self, queue: str) -> Iterator[tuple[int, bytes]]:
        start, end = keys.prefix_range(keys.lp(queue))
        for key, row in self._store.scan(Family.LEASES, start, end):
            try:
                lease = decode_lease(*keys.decode_lease_key(key), row)
            except CorruptionError:
                # Its row goes with the range; its index row leads nowhere, and `list_expired` skips it.
                continue
            yield lease.expires_ns, lease.message_id

    def put_state(self, name: str, value: bytes) -> None:
        self.write_batch((PutState(name, value),))

    def get_state(self, name: str) -> bytes | None:
        return self._store.get(Family.STATE, keys.state_key(name))

    def delete_state(self, name: str) -> None:
        self.write_batch((DeleteState(name),))

    def list_state(self, prefix: str = "") -> Iterator[tuple[str, bytes]]:
        start, end = keys.prefix_range(keys.state_key(prefix))
        for key, value in self._store.scan(Family.STATE, start, end):
            yield keys.decode_state_key(key), value


def _above(prefix: bytes) -> bytes:
    """The first key behind everything that begins with `prefix`, which is never all 0xff: it begins with a length."""
    end = keys.prefix_range(prefix)[1]
    assert end is not None
    return end
