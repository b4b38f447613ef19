"""The storage adapter: the interface of all stream engines (SPEC B2).

The engines `memory`, `rocksdb` and `segment` share one conformance suite. Rules for all of them:

- Offsets of a shard are consecutive when written, ascend, and are never reused: not after deletes, after retention
  emptied the shard, after a crash, or when the clock goes back.
- `write` and `batch_write` return when the batch is applied atomically. `wait` (blocks a thread) or `confirmed` (a
  future of the running loop) then waits for the requested durability. At `synced`, the wait triggers the sync. Until
  then the records are invisible, and a crash of the process may lose them.
- Readers see only offsets below the high watermark: the first offset of the oldest unsynced `synced` write, or the next
  offset if there is none.
- A read below the start offset raises an error with the available range. A read at or above the high watermark is
  empty. Deleted, compacted and expired records are skipped. `ReadBatch.next_offset` is where to continue, also after an
  empty read, because a read examines a bounded number of records.
- A read returns the first record even if it is larger than `max_bytes`.
- Engines serialize concurrent writers of a shard. Every method is thread-safe.
- A timestamp lookup returns the smallest offset whose record has a timestamp >= the given one, also when timestamps are
  out of order.

The adapter identifies shards by number. `shards` and `topics` handle names, topics and partitions. `retain` applies the
retention settings of a shard's `config`. It does a bounded amount of work per call and has no timer.
"""

from __future__ import annotations

import asyncio
import enum
import hashlib
from collections.abc import Callable, Mapping, Sequence
from struct import Struct as Layout
from typing import TYPE_CHECKING, Final, Protocol, TypeAlias

import msgspec

from basaltmq.durability import Durability
from basaltmq.errors import InvalidArgumentError, LimitExceededError, OffsetOutOfRangeError
from basaltmq.log.batches.columnar import ColumnBatch
from basaltmq.log.batches.record import NEVER, UNSTAMPED, Record, StoredRecord, check_record
from basaltmq.store.batch import Batch
from basaltmq.streams.shards import OFFSET_MAX, ShardMeta, ShardSpec

if TYPE_CHECKING:
    import pyarrow as pa

BATCH_RECORDS_MAX: Final = 100_000
"""Maximum records per write. Larger batches gain nothing, and a batch is held in memory several times."""

BATCH_BYTES_MAX: Final = 64 << 20
"""Maximum bytes per write: four of the largest records. With its index rows it fits the store's limit."""

READ_RECORDS_MAX: Final = 100_000
"""Maximum records per read, regardless of the request."""

READ_BYTES_MAX: Final = 64 << 20
"""Maximum bytes per read, regardless of the request. A single larger record is still returned."""

READ_RECORDS: Final = 1_000
READ_BYTES: Final = 1 << 20
"""Default limits of a read."""

SCANNED_MAX: Final = 100_000
"""Records or frames that a lookup examines before it returns with `next_offset`. Bounds the time of a lookup."""

SHARDS_LISTED_MAX: Final = 1_000
"""Maximum shards per page of a listing."""

Clock: TypeAlias = Callable[[], int]
"""Returns milliseconds since 1970."""

Records: TypeAlias = Sequence[Record] | ColumnBatch
"""Input of a write: plain records, or columns (from Arrow: `log.batches.arrow.from_arrow`)."""


class IfAllOlder(enum.StrEnum):
    """Result of a timestamp lookup when every record is older."""

    EARLIEST = "earliest"
    """The start offset."""
    LATEST = "latest"
    """The high watermark."""


class Append(msgspec.Struct, frozen=True, gc=False):
    """An applied write."""

    shard: int
    base_offset: int
    last_offset: int
    durability: Durability
    """The requested level. `wait` and `confirmed` wait for it."""
    sequence: int = 0
    """Engine-specific number of the sync that covers the write."""
    append_time_ms: int = -1
    """The timestamp that the broker gave to the records if the shard uses append time, else -1."""

    @property
    def count(self) -> int:
        return self.last_offset - self.base_offset + 1


class ShardInfo(msgspec.Struct, frozen=True):
    """Offsets and size of a shard."""

    meta: ShardMeta
    start_offset: int
    high_watermark: int
    next_offset: int
    records: int
    """Records kept. Fewer than the offsets between start and next if deletes left gaps."""
    size_bytes: int


class ReadBatch(Protocol):
    """The result of a read, as records or as Arrow. Converts on demand where possible."""

    @property
    def next_offset(self) -> int:
        """The offset at which to continue."""
        ...

    @property
    def start_offset(self) -> int:
        """The shard's log start offset at the time of the read."""
        ...

    @property
    def high_watermark(self) -> int: ...

    def __len__(self) -> int: ...

    def records(self) -> list[StoredRecord]: ...

    def arrow(self) -> pa.RecordBatch:
        """Return a record batch with the schema of `log.batches.arrow`. Needs pyarrow."""
        ...


class StorageAdapter(Protocol):
    """A storage engine. `shard` is a shard number."""

    def create_shard(self, spec: ShardSpec) -> ShardMeta:
        """Create a shard. Durable on return."""
        ...

    def place(self, spec: ShardSpec) -> ShardSpec:
        """Return the spec with the engine's choices (a lane), for callers that create shards in their own batch."""
        ...

    def delete_shard(self, shard: int) -> None:
        """Delete a shard with all its records. Durable on return."""
        ...

    def plan_delete(self, batch: Batch, shard: int) -> None:
        """Add to `batch` the deletion of a shard's rows, for callers that delete more in the same batch.

        The shard rejects writes from now on; reads work until `forget`. After writing the batch call `forget`. If the
        write failed, call `revive`. Do not call this under `Shards.exclusive`.
        """
        ...

    def forget(self, *shards: int) -> None:
        """Drop the in-memory and derived state of shards whose deletion was written."""
        ...

    def revive(self, shard: int) -> None:
        """Accept writes again after a deletion was not written."""
        ...

    def reconfigured(self, shard: int) -> None:
        """Apply a changed config in the shard's row. Its index settings never change."""
        ...

    def list_shard(self, after: int = 0, limit: int = SHARDS_LISTED_MAX) -> list[ShardInfo]:
        """Return a page of the engine's shards with numbers above `after`."""
        ...

    def shard_info(self, shard: int) -> ShardInfo: ...

    def write(self, shard: int, record: Record, durability: Durability | None = None) -> Append: ...

    def batch_write(self, shard: int, records: Records, durability: Durability | None = None) -> Append:
        """Append a batch atomically. `durability` None means the shard's own level."""
        ...

    def append_at(self, shard: int, records: Sequence[StoredRecord], next_offset: int) -> Append:
        """Append records at their existing offsets, with gaps, for migration and import.

        The offsets ascend, starting at or above the shard's next offset. `next_offset` is above all of them and becomes
        the shard's next offset.
        """
        ...

    def wait(self, append: Append) -> None:
        """Return when the append has its requested durability."""
        ...

    def confirmed(self, append: Append) -> asyncio.Future[None]:
        """Return a future of the running loop that resolves when the append has its requested durability."""
        ...

    def read_by_offset(
        self, shard: int, offset: int, max_records: int = READ_RECORDS, max_bytes: int = READ_BYTES
    ) -> ReadBatch: ...

    def read_by_tag(
        self, shard: int, tag: bytes, offset: int, max_records: int = READ_RECORDS, max_bytes: int = READ_BYTES
    ) -> ReadBatch:
        """Return records at or after `offset` that have the tag."""
        ...

    def read_by_key(
        self, shard: int, key: bytes, offset: int, max_records: int = READ_RECORDS, max_bytes: int = READ_BYTES
    ) -> ReadBatch:
        """Return records at or after `offset` with exactly this key."""
        ...

    def delete_by_key(self, shard: int, key: bytes) -> int:
        """Delete every record with this key below the high watermark. Return how many. Durable on return."""
        ...

    def delete_by_offset(self, shard: int, offsets: Sequence[int]) -> int:
        """Delete records below the high watermark. Return how many offsets held a record. Durable on return."""
        ...

    def delete_records_before(self, shard: int, offset: int) -> int:
        """Raise the log start offset to `offset`, at most to the high watermark. Return the new start offset.

        Durable on return.
        """
        ...

    def get_offset_by_timestamp(self, shard: int, timestamp_ms: int, otherwise: IfAllOlder) -> int: ...

    def get_offset_by_group(self, group: str, shards: Sequence[int]) -> dict[int, int]:
        """Return a group's committed offsets by shard, for the shards that have one."""
        ...

    def commit_offset(self, group: str, offsets: Mapping[int, int]) -> None:
        """Commit the next offset that a group reads, by shard."""
        ...

    def retain(self, now_ms: int) -> int:
        """Do a bounded part of retention, expiry and compaction. Return how many records were removed."""
        ...

    def sync(self) -> None:
        """Return when all writes so far are durable and visible."""
        ...

    def close(self) -> None:
        """Make pending writes durable and release resources. The store stays open. Idempotent."""
        ...


class RecordsRead:
    """A `ReadBatch` of plain records."""

    __slots__ = ("_records", "high_watermark", "next_offset", "start_offset")

    def __init__(self, records: list[StoredRecord], next_offset: int, start_offset: int, high_watermark: int) -> None:
        self._records = records
        self.next_offset = next_offset
        self.start_offset = start_offset
        self.high_watermark = high_watermark

    def __len__(self) -> int:
        return len(self._records)

    def records(self) -> list[StoredRecord]:
        return self._records

    def arrow(self) -> pa.RecordBatch:
        from basaltmq.log.arrow import records_to_arrow

        return records_to_arrow(self._records)


class Budget:
    """The remaining limits of a read."""

    __slots__ = ("bytes_left", "records_left", "scans_left", "taken")

    def __init__(self, max_records: int, max_bytes: int) -> None:
        if max_records < 1 or max_bytes < 0:
            raise InvalidArgumentError(
                f"a read of {max_records} records and {max_bytes} bytes is not possible; use at least 1 and 0"
            )
        self.records_left = min(max_records, READ_RECORDS_MAX)
        self.bytes_left = min(max_bytes, READ_BYTES_MAX)
        self.scans_left = SCANNED_MAX
        self.taken = 0

    def take(self, size_bytes: int) -> bool:
        """Whether a record of this size fits. The first record always fits."""
        if self.taken and size_bytes > self.bytes_left:
            return False
        self.taken += 1
        self.records_left -= 1
        self.bytes_left -= size_bytes
        return True

    def examine(self) -> bool:
        """Count one more examined record. Return False if the limits forbid it."""
        if self.scans_left <= 0 or self.records_left <= 0:
            return False
        self.scans_left -= 1
        return True


def check_batch(records: Sequence[Record], record_bytes_max: int) -> int:
    """Reject a batch that is empty or exceeds a limit. Return its size in bytes."""
    if not records:
        raise InvalidArgumentError("an empty batch cannot be written; pass at least one record")
    if len(records) > BATCH_RECORDS_MAX:
        raise LimitExceededError(
            f"a batch of {len(records)} records exceeds the limit of {BATCH_RECORDS_MAX}; split it"
        )
    size_bytes = 0
    for record in records:
        size_bytes += check_record(record, record_bytes_max)
    if size_bytes > max(BATCH_BYTES_MAX, record_bytes_max):
        raise LimitExceededError(f"a batch of {size_bytes} bytes exceeds the limit of {BATCH_BYTES_MAX}; split it")
    return size_bytes


def check_placed(records: Sequence[StoredRecord], least: int, next_offset: int) -> None:
    """Check the offsets of `append_at`."""
    for record in records:
        if record.offset < least:
            raise InvalidArgumentError(
                f"offset {record.offset} is below {least}; offsets must ascend from the shard's next offset"
            )
        least = record.offset + 1
    if not least <= next_offset <= OFFSET_MAX:
        raise InvalidArgumentError(f"the next offset {next_offset} must be between {least} and {OFFSET_MAX}")


def check_offset(shard: int, offset: int, start_offset: int, high_watermark: int) -> None:
    """Check the offset of a read."""
    if offset < 0:
        raise InvalidArgumentError(f"offset {offset} of shard {shard} is negative")
    if offset < start_offset:
        raise OffsetOutOfRangeError(shard, offset, start_offset, high_watermark)


def no_offsets_left(shard: int) -> InvalidArgumentError:
    return InvalidArgumentError(f"shard {shard} has no offsets left; the maximum is {OFFSET_MAX}")


def stamped(records: Sequence[Record], now_ms: int) -> Sequence[Record]:
    """Return the records, with `now_ms` as timestamp where the producer set none."""
    if all(record.timestamp_ms != UNSTAMPED for record in records):
        return records
    return [
        record if record.timestamp_ms != UNSTAMPED else msgspec.structs.replace(record, timestamp_ms=now_ms)
        for record in records
    ]


def is_expired(record: Record, now_ms: int) -> bool:
    return record.expire_at_ms != NEVER and record.expire_at_ms <= now_ms


def plain_records(records: Records) -> Sequence[Record]:
    """Return the batch as plain records."""
    return records.records(0) if isinstance(records, ColumnBatch) else records


_HASH: Final = Layout(">Q")

HASH_BYTES: Final = 8
"""Size of `hash64` in keys, big-endian."""


def hash64(raw: bytes) -> int:
    """Return a stable 64-bit hash for index rows. Readers compare the record itself, because hashes may collide."""
    number: int = _HASH.unpack(hashlib.blake2b(raw, digest_size=HASH_BYTES).digest())[0]
    return number
