"""Committed offsets of consumer groups, by group, topic and partition (SPEC B7).

The rows are in the family `consumer_offsets`, with the WAL:

    lp(group) | topic uuid | partition u32
        ->  | version u8 | offset u64 | committed ms i64 | epoch i32 | metadata utf-8 to the end |

The family `topic_groups` has one empty row per (topic, group), so listing the groups of a topic needs no full scan.

Keys contain topic and partition, not the shard number. So a topic that migrates to another engine keeps its committed
offsets. A topic that is deleted and created again has a new id and does not inherit the old offsets.

There are two strategies. `PersistentOffsets.commit` returns when the commit is durable. `CachedOffsets.commit` returns
at once, and a thread writes in the background. A crash may lose its last commits; records are then read again, never
skipped. A failed flush keeps its entries, and a newer commit replaces the one being flushed.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from struct import Struct as Layout
from typing import Final, Protocol, TypeAlias
from uuid import UUID

import msgspec

from basaltmq.errors import BasaltError, CorruptionError, InvalidArgumentError, LimitExceededError, StoreClosedError
from basaltmq.store.api import Store
from basaltmq.store.batch import Batch
from basaltmq.store.families import Family
from basaltmq.store.keys import parts as key_parts
from basaltmq.store.keys import streams as stream_keys
from basaltmq.streams.shards import OFFSET_MAX
from basaltmq.streams.watermark import done

_ROW: Final = Layout(">BQqi")
ROW_VERSION: Final = 1

METADATA_BYTES_MAX: Final = 4096
"""Limit of the free text that a consumer stores with its offset. Kafka's default limit."""

GROUP_BYTES_MAX: Final = 1024
"""Limit of a group's name, which is part of every key of the group."""

DIRTY_MAX: Final = 100_000
"""Maximum unflushed offsets in memory, about 30 MB. The commit that exceeds it flushes."""

FLUSH_INTERVAL_MS: Final = 1_000
"""Interval between flushes of the cached strategy. A crash loses at most these commits."""

_ABOVE_KEYS: Final = b"\xff" * 2_048
"""Suffix of a key above all keys with a prefix, if no byte can be increased. It is longer than a group and a place."""

TopicPartition: TypeAlias = tuple[UUID, int]


class Commit(msgspec.Struct, frozen=True, gc=False):
    """A committed offset of a group in a partition."""

    offset: int
    """The next offset to read."""
    committed_ms: int = 0
    epoch: int = -1
    metadata: str = ""

    def encode(self) -> bytes:
        return _ROW.pack(ROW_VERSION, self.offset, self.committed_ms, self.epoch) + self.metadata.encode()

    @classmethod
    def decode(cls, raw: bytes) -> Commit:
        if len(raw) < _ROW.size:
            raise CorruptionError(f"a committed offset has {len(raw)} bytes, fewer than {_ROW.size}")
        version, offset, committed_ms, epoch = _ROW.unpack_from(raw)
        if version != ROW_VERSION:
            raise CorruptionError(f"a committed offset has version {version}, this Basalt reads {ROW_VERSION}")
        try:
            return cls(offset, committed_ms, epoch, raw[_ROW.size :].decode())
        except UnicodeDecodeError as error:
            raise CorruptionError(f"the metadata of a committed offset is not UTF-8: {error}") from error


class Durable(Protocol):
    """Waits until earlier writes are durable; implemented by `GroupCommit`."""

    def wait_durable(self, timeout_s: float = -1) -> bool: ...

    def durable(self) -> asyncio.Future[None]: ...


class Offsets(Protocol):
    """A strategy for storing committed offsets."""

    def commit(self, group: str, commits: Mapping[TopicPartition, int | Commit]) -> None:
        """Set the next offsets that the group reads. A lower offset than before rewinds the group."""
        ...

    def commit_async(self, group: str, commits: Mapping[TopicPartition, int | Commit]) -> asyncio.Future[None]:
        """As `commit`, but return a future of the running loop that resolves when `commit` would return."""
        ...

    def write(self, group: str, commits: Mapping[TopicPartition, int | Commit]) -> None:
        """As `commit`, without waiting for the sync."""
        ...

    def plan_commit(self, batch: Batch, group: str, commits: Mapping[TopicPartition, Commit]) -> None:
        """Commit with `batch`, or at once with the cached strategy."""
        ...

    def committed(self, group: str, partitions: Sequence[TopicPartition]) -> dict[TopicPartition, Commit]:
        """Return the commits of the given partitions that have one."""
        ...

    def of_group(self, group: str) -> dict[TopicPartition, Commit]:
        """Return all commits of a group."""
        ...

    def has_group(self, group: str) -> bool:
        """Return whether a group has commits."""
        ...

    def groups(self, after: str | None = None) -> Iterator[str]:
        """Yield every group with a committed offset, in key order: by length, then by bytes."""
        ...

    def groups_of(self, topic_id: UUID) -> list[str]:
        """Return the groups that have committed offsets in a topic."""
        ...

    def delete(self, group: str, partitions: Collection[TopicPartition] | None = None) -> int:
        """Delete the offsets of a group, or of some partitions. Durable on return. Return how many were deleted."""
        ...

    def plan_delete_topic(self, batch: Batch, topic_id: UUID) -> None:
        """Add to `batch` the deletion of every group's offsets and leases in a topic."""
        ...

    def flush(self) -> None:
        """Write and sync pending commits."""
        ...

    def close(self) -> None: ...


class PersistentOffsets:
    """Commits return when they are durable."""

    def __init__(self, store: Store, sync: Durable, clock_ms: Callable[[], int]) -> None:
        self._store = store
        self._sync = sync
        self._clock_ms = clock_ms

    def commit(self, group: str, commits: Mapping[TopicPartition, int | Commit]) -> None:
        self.write(group, commits)
        self._sync.wait_durable()

    def commit_async(self, group: str, commits: Mapping[TopicPartition, int | Commit]) -> asyncio.Future[None]:
        self.write(group, commits)
        return self._sync.durable()

    def committed(self, group: str, partitions: Sequence[TopicPartition]) -> dict[TopicPartition, Commit]:
        wanted = [stream_keys.consumer_offset_key(group, topic, partition) for topic, partition in partitions]
        rows = self._store.get_many(Family.CONSUMER_OFFSETS, wanted)
        return {at: Commit.decode(raw) for at, raw in zip(partitions, rows, strict=True) if raw is not None}

    def of_group(self, group: str) -> dict[TopicPartition, Commit]:
        found = {}
        for key, raw in self._store.scan(Family.CONSUMER_OFFSETS, *key_parts.prefix_range(key_parts.lp(group))):
            _, topic_id, partition = stream_keys.decode_consumer_offset_key(key)
            found[topic_id, partition] = Commit.decode(raw)
        return found

    def has_group(self, group: str) -> bool:
        rows = self._store.scan(Family.CONSUMER_OFFSETS, *key_parts.prefix_range(key_parts.lp(group)))
        return next(rows, None) is not None

    def groups(self, after: str | None = None) -> Iterator[str]:
        start: bytes | None = b"" if after is None else key_parts.prefix_range(key_parts.lp(after))[1]
        while start is not None:
            # One seek per group, so groups with many partitions cost no more than others.
            row = next(self._store.scan(Family.CONSUMER_OFFSETS, start), None)
            if row is None:
                return
            group = stream_keys.decode_consumer_offset_key(row[0])[0]
            yield group
            start = key_parts.prefix_range(key_parts.lp(group))[1]

    def groups_of(self, topic_id: UUID) -> list[str]:
        rows = self._store.scan(Family.TOPIC_GROUPS, *key_parts.prefix_range(stream_keys.topic_group_prefix(topic_id)))
        return [stream_keys.decode_topic_group_key(key)[1] for key, _ in rows]

    def delete(self, group: str, partitions: Collection[TopicPartition] | None = None) -> int:
        known = self.of_group(group)
        going = [at for at in known if partitions is None or at in partitions]
        staying = {topic_id for topic_id, _ in known.keys() - set(going)}
        batch = Batch()
        for topic_id, partition in going:
            batch.delete(Family.CONSUMER_OFFSETS, stream_keys.consumer_offset_key(group, topic_id, partition))
            if topic_id not in staying:
                batch.delete(Family.TOPIC_GROUPS, stream_keys.topic_group_key(topic_id, group))
        if going:
            self._store.write(batch)
            self._sync.wait_durable()
        return len(going)

    def plan_delete_topic(self, batch: Batch, topic_id: UUID) -> None:
        groups = self.groups_of(topic_id)
        if groups:
            first, above = key_parts.prefix_range(stream_keys.pop_lease_prefix(topic_id))
            batch.delete_range(Family.POP_LEASES, first, above or first + _ABOVE_KEYS)
        for group in groups:
            start, end = key_parts.prefix_range(key_parts.lp(group) + topic_id.bytes)
            for key, _ in self._store.scan(Family.CONSUMER_OFFSETS, start, end):
                batch.delete(Family.CONSUMER_OFFSETS, key)
            batch.delete(Family.TOPIC_GROUPS, stream_keys.topic_group_key(topic_id, group))

    def flush(self) -> None:
        """Do nothing: commits are never buffered."""

    def close(self) -> None:
        """Do nothing: commits are never buffered."""

    def write(self, group: str, commits: Mapping[TopicPartition, int | Commit]) -> None:
        batch = Batch()
        self.plan_commit(batch, group, checked_commits(group, commits, self._clock_ms()))
        self._store.write(batch)

    def plan_commit(self, batch: Batch, group: str, commits: Mapping[TopicPartition, Commit]) -> None:
        for (topic_id, partition), commit in commits.items():
            put_commit(batch, group, topic_id, partition, commit)


class CachedOffsets:
    """Commits return at once; a thread writes them in the background."""

    def __init__(
        self,
        store: Store,
        sync: Durable,
        clock_ms: Callable[[], int],
        *,
        flush_interval_ms: int | None = FLUSH_INTERVAL_MS,
        failed: Callable[[BasaltError], None] | None = None,
    ) -> None:
        """With `flush_interval_ms` None, only `flush` and `close` write. `failed` is called with each flush error."""
        self._below = PersistentOffsets(store, sync, clock_ms)
        self._store = store
        self._sync = sync
        self._clock_ms = clock_ms
        self._failed = failed
        self._lock = threading.Lock()
        self._dirty: dict[tuple[str, UUID, int], Commit] = {}
        self._flushing = threading.RLock()
        """Serializes flushes and deletes, so that a late flush cannot restore deleted rows."""
        self._closed = False
        self._wake = threading.Event()
        self._thread: threading.Thread | None = None
        if flush_interval_ms is not None:
            self._thread = threading.Thread(
                target=self._run, args=(flush_interval_ms / 1000,), name="basalt-offsets", daemon=True
            )
            self._thread.start()

    def commit(self, group: str, commits: Mapping[TopicPartition, int | Commit]) -> None:
        checked = checked_commits(group, commits, self._clock_ms())
        with self._lock:
            if self._closed:
                raise StoreClosedError("the offsets are closed; the commit was rejected")
            for (topic_id, partition), commit in checked.items():
                self._dirty[group, topic_id, partition] = commit
            full = len(self._dirty) > DIRTY_MAX
        if full:
            self.flush()

    write = commit

    def commit_async(self, group: str, commits: Mapping[TopicPartition, int | Commit]) -> asyncio.Future[None]:
        self.commit(group, commits)
        return done()

    def plan_commit(self, batch: Batch, group: str, commits: Mapping[TopicPartition, Commit]) -> None:
        self.commit(group, commits)

    def committed(self, group: str, partitions: Sequence[TopicPartition]) -> dict[TopicPartition, Commit]:
        with self._lock:
            dirty = {at: self._dirty.get((group, *at)) for at in partitions}
        found = self._below.committed(group, [at for at, commit in dirty.items() if commit is None])
        found.update({at: commit for at, commit in dirty.items() if commit is not None})
        return found

    def of_group(self, group: str) -> dict[TopicPartition, Commit]:
        # Read the dirty entries first. A concurrent flush then leaves an entry in both places, not in neither.
        with self._lock:
            dirty = {(topic, part): commit for (of, topic, part), commit in self._dirty.items() if of == group}
        return self._below.of_group(group) | dirty

    def has_group(self, group: str) -> bool:
        with self._lock:
            is_dirty = any(of == group for of, _, _ in self._dirty)
        return is_dirty or self._below.has_group(group)

    def groups(self, after: str | None = None) -> Iterator[str]:
        self.flush()
        return self._below.groups(after)

    def groups_of(self, topic_id: UUID) -> list[str]:
        with self._lock:
            dirty = {group for group, topic, _ in self._dirty if topic == topic_id}
        return sorted(dirty.union(self._below.groups_of(topic_id)))

    def delete(self, group: str, partitions: Collection[TopicPartition] | None = None) -> int:
        with self._flushing:
            self.flush()
            return self._below.delete(group, partitions)

    def plan_delete_topic(self, batch: Batch, topic_id: UUID) -> None:
        # Flush first, so that the rows are complete and no commit is lost if the batch is not written.
        with self._flushing:
            self.flush()
            self._below.plan_delete_topic(batch, topic_id)

    def flush(self) -> None:
        with self._flushing:
            with self._lock:
                taken = dict(self._dirty)
            if not taken:
                return
            batch = Batch()
            for (group, topic_id, partition), commit in taken.items():
                put_commit(batch, group, topic_id, partition, commit)
            self._store.write(batch)
            self._sync.wait_durable()
            with self._lock:
                for at, commit in taken.items():
                    if self._dirty.get(at) is commit:
                        del self._dirty[at]

    def close(self) -> None:
        """Flush, then stop the thread. If the flush fails, the entries stay dirty and `close` can be called again."""
        self.flush()
        with self._lock:
            self._closed = True
        self._wake.set()
        if self._thread is not None:
            self._thread.join()
        self.flush()

    def _run(self, interval_s: float) -> None:
        while not self._wake.wait(interval_s):
            try:
                self.flush()
            except BasaltError as error:
                if self._failed is not None:
                    self._failed(error)


def checked_commits(
    group: str, commits: Mapping[TopicPartition, int | Commit], now_ms: int
) -> dict[TopicPartition, Commit]:
    """Validate the commits and return them with a commit time."""
    if not group or len(group.encode()) > GROUP_BYTES_MAX:
        raise InvalidArgumentError(f"a group name must have 1 to {GROUP_BYTES_MAX} bytes of UTF-8, not {group!r:.80}")
    checked = {}
    for at, given in commits.items():
        commit = given if isinstance(given, Commit) else Commit(given)
        if not 0 <= commit.offset <= OFFSET_MAX:
            raise InvalidArgumentError(f"group {group!r}: offset {commit.offset} is out of range: 0 to {OFFSET_MAX}")
        if len(commit.metadata.encode()) > METADATA_BYTES_MAX:
            raise LimitExceededError(f"group {group!r}: the offset metadata exceeds {METADATA_BYTES_MAX} bytes")
        checked[at] = commit if commit.committed_ms else msgspec.structs.replace(commit, committed_ms=now_ms)
    return checked


def put_commit(batch: Batch, group: str, topic_id: UUID, partition: int, commit: Commit) -> None:
    batch.put(Family.CONSUMER_OFFSETS, stream_keys.consumer_offset_key(group, topic_id, partition), commit.encode())
    batch.put(Family.TOPIC_GROUPS, stream_keys.topic_group_key(topic_id, group), b"")
