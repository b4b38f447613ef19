"""The storage adapter: what every stream engine does (SPEC B2).

One interface, three engines (`memory`, `rocksdb`, `segment`), one behaviour suite. The rules all of them keep:

- Offsets of a shard are dense at the moment of writing, ascend, and are never used twice: not after deletes, not after
  retention emptied the shard, not after a crash, not when the clock goes back.
- `write` and `batch_write` return when the batch is applied, as one. What it takes until the level asked for holds
  is `wait` (blocks a thread) or `confirmed` (a future of the running loop). At `synced`, nobody sees the records
  before somebody waited, and until then a crash of the process may take them: confirmation drives the sync.
- Readers see offsets below the high watermark only: the first offset of the oldest write that asked for `synced` and is
  not there yet; without such a write, the next offset.
- Reading before the start offset is an error that names what is kept; at or above the high watermark it is empty.
  Records deleted, compacted away or expired are skipped. `ReadBatch.next_offset` is where to go on, also when nothing
  was found: a read looks at a bounded number of records.
- The first record is returned even if it is larger than `max_bytes`.
- Two writers of one shard are serialised by the engine; every method may be called from any thread.
- A timestamp look-up gives the smallest offset whose record has a timestamp >= the one asked for, also when
  timestamps are not in order.

Shards are named by number here; names, topics and partitions are above (`shards`, `topics`). What a shard's `config`
says about retention is executed by `retain`, which does a bounded amount of work per call and has no timer of its own.
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
"""Records in one write: more gain nothing, and the batch is held in memory several times over."""

BATCH_BYTES_MAX: Final = 64 << 20
"""Bytes in one write: four of the largest records; with its index rows it fits the store's limit."""

READ_RECORDS_MAX: Final = 100_000
"""Records in one read, whatever is asked for."""

READ_BYTES_MAX: Final = 64 << 20
"""Bytes in one read, whatever is asked for; a single larger record is still returned."""

READ_RECORDS: Final = 1_000
READ_BYTES: Final = 1 << 20
"""What a read gives unless told."""

SCANNED_MAX: Final = 100_000
"""Records or frames one look-up passes over before it returns with `next_offset`, so that none takes for ever."""

SHARDS_LISTED_MAX: Final = 1_000
"""Shards in one page of a listing."""

Clock: TypeAlias = Callable[[], int]
"""Milliseconds since 1970."""

Records: TypeAlias = Sequence[Record] | ColumnBatch
"""What a writer may hand over: plain records, or columns (from Arrow: `log.arrow.from_arrow`)."""


class Otherwise(enum.StrEnum):
    """What a timestamp look-up answers when every record is older."""

    EARLIEST = "earliest"
    """The start offset."""
    LATEST = "latest"
    """The high watermark: what is written next."""


class Append(msgspec.Struct, frozen=True, gc=False):
    """A write that was applied."""

    shard: int
    base_offset: int
    last_offset: int
    durability: Durability
    """The level asked for, which `wait` and `confirmed` wait for."""
    sequence: int = 0
    """The engine's own: which sync covers it (a count of writes, a position in a lane)."""
    append_time_ms: int = -1
    """The time its records were given, where the shard gives them one."""

    @property
    def count(self) -> int:
        return self.last_offset - self.base_offset + 1


class ShardInfo(msgspec.Struct, frozen=True):
    """A shard as it is."""

    meta: ShardMeta
    start_offset: int
    high_watermark: int
    next_offset: int
    records: int
    """Records kept; where deletes leave holes, fewer than the offsets between start and next."""
    size_bytes: int


class ReadBatch(Protocol):
    """What a read found, as records or as Arrow; made without the one the caller does not ask for where possible."""

    @property
    def next_offset(self) -> int:
        """Where to read on."""
        ...

    @property
    def start_offset(self) -> int:
        """The shard's first offset kept, when this was read."""
        ...

    @property
    def high_watermark(self) -> int: ...

    def __len__(self) -> int: ...

    def records(self) -> list[StoredRecord]: ...

    def arrow(self) -> pa.RecordBatch:
        """With the schema of `log.arrow`; needs pyarrow."""
        ...


class StorageAdapter(Protocol):
    """An engine. `shard` is a shard's number."""

    def create_shard(self, spec: ShardSpec) -> ShardMeta:
        """Create a shard. Durable on return."""
        ...

    def place(self, spec: ShardSpec) -> ShardSpec:
        """The same with the engine's choices (a lane) filled in, for those who create shards in their own batch."""
        ...

    def delete_shard(self, shard: int) -> None:
        """Delete a shard and all it holds, for ever. Durable on return."""
        ...

    def plan_delete(self, batch: Batch, shard: int) -> None:
        """Add to `batch` the removal of a shard's rows, for those who delete it together with other things.

        From here on the shard takes no writes. When the batch is written call `forget`; if it is not, `revive`. Not to
        be called while `Shards.exclusive` is held. Reads go on until `forget`.
        """
        ...

    def forget(self, shard: int) -> None:
        """The shard's deletion is written: drop what is in memory or derived."""
        ...

    def revive(self, shard: int) -> None:
        """The shard's deletion was not written: take writes again."""
        ...

    def reconfigured(self, shard: int) -> None:
        """The shard's row has another config; what it indexes is the same."""
        ...

    def list_shard(self, after: int = 0, limit: int = SHARDS_LISTED_MAX) -> list[ShardInfo]:
        """A page of the engine's shards with numbers above `after`."""
        ...

    def shard_info(self, shard: int) -> ShardInfo: ...

    def write(self, shard: int, record: Record, durability: Durability | None = None) -> Append: ...

    def batch_write(self, shard: int, records: Records, durability: Durability | None = None) -> Append:
        """Append a batch as one. `durability` None: the shard's own."""
        ...

    def append_at(self, shard: int, records: Sequence[StoredRecord], next_offset: int) -> Append:
        """Append records at the offsets they have, holes allowed: for migration and import.

        Offsets ascend and lie at or above the shard's next offset and below `next_offset`, which becomes the shard's.
        """
        ...

    def wait(self, append: Append) -> None:
        """Return when the append is as durable as it asked to be."""
        ...

    def confirmed(self, append: Append) -> asyncio.Future[None]:
        """A future of the running loop that resolves when the append is as durable as it asked to be."""
        ...

    def read_by_offset(
        self, shard: int, offset: int, max_records: int = READ_RECORDS, max_bytes: int = READ_BYTES
    ) -> ReadBatch: ...

    def read_by_tag(
        self, shard: int, tag: bytes, offset: int, max_records: int = READ_RECORDS, max_bytes: int = READ_BYTES
    ) -> ReadBatch:
        """Records at or after `offset` that carry the tag."""
        ...

    def read_by_key(
        self, shard: int, key: bytes, offset: int, max_records: int = READ_RECORDS, max_bytes: int = READ_BYTES
    ) -> ReadBatch:
        """Records at or after `offset` with exactly this key."""
        ...

    def delete_by_key(self, shard: int, key: bytes) -> int:
        """Delete every record with this key below the high watermark; how many there were. Durable on return."""
        ...

    def delete_by_offset(self, shard: int, offsets: Sequence[int]) -> int:
        """Delete records below the high watermark; how many of the offsets held one. Durable on return."""
        ...

    def delete_records_before(self, shard: int, offset: int) -> int:
        """Move the start offset up to `offset`, at most to the high watermark; the start offset after it.

        Durable on return.
        """
        ...

    def get_offset_by_timestamp(self, shard: int, timestamp_ms: int, otherwise: Otherwise) -> int: ...

    def get_offset_by_group(self, group: str, shards: Sequence[int]) -> dict[int, int]:
        """What a group has committed, for those of the shards in which it has."""
        ...

    def commit_offset(self, group: str, offsets: Mapping[int, int]) -> None:
        """Remember, per shard, the offset a group reads next."""
        ...

    def retain(self, now_ms: int) -> int:
        """Do a bounded part of what retention, expiry and compaction ask for; how many records went."""
        ...

    def sync(self) -> None:
        """Return when everything written so far is durable and visible."""
        ...

    def close(self) -> None:
        """Make durable what waits, and let go. The store stays open. Closing twice is fine."""
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
        from basaltmq.log.batches.arrow import records_to_arrow

        return records_to_arrow(self._records)


class Budget:
    """How much a read may still return."""

    __slots__ = ("bytes_left", "records_left", "scans_left", "taken")

    def __init__(self, max_records: int, max_bytes: int) -> None:
        if max_records < 1 or max_bytes < 0:
            raise InvalidArgumentError(
                f"a read of {max_records} records and {max_bytes} bytes; ask for 1 and 0 at least"
            )
        self.records_left = min(max_records, READ_RECORDS_MAX)
        self.bytes_left = min(max_bytes, READ_BYTES_MAX)
        self.scans_left = SCANNED_MAX
        self.taken = 0

    def take(self, size_bytes: int) -> bool:
        """May a record of this size be returned too? The first always may."""
        if self.taken and size_bytes > self.bytes_left:
            return False
        self.taken += 1
        self.records_left -= 1
        self.bytes_left -= size_bytes
        return True

    def look(self) -> bool:
        """May one more record be looked at?"""
        if self.scans_left <= 0 or self.records_left <= 0:
            return False
        self.scans_left -= 1
        return True


def check_batch(records: Sequence[Record], record_bytes_max: int) -> int:
    """Refuse a batch that is empty, over a limit, or holds a record that is; its size in bytes."""
    if not records:
        raise InvalidArgumentError("an empty batch cannot be written; give at least one record")
    if len(records) > BATCH_RECORDS_MAX:
        raise LimitExceededError(
            f"a batch of {len(records)} records is over the limit of {BATCH_RECORDS_MAX}; write it in parts"
        )
    size_bytes = 0
    for record in records:
        size_bytes += check_record(record, record_bytes_max)
    if size_bytes > max(BATCH_BYTES_MAX, record_bytes_max):
        raise LimitExceededError(
            f"a batch of {size_bytes} bytes is over the limit of {BATCH_BYTES_MAX}; write it in parts"
        )
    return size_bytes


def check_placed(records: Sequence[StoredRecord], least: int, next_offset: int) -> None:
    """The rules of `append_at`."""
    for record in records:
        if record.offset < least:
            raise InvalidArgumentError(
                f"offset {record.offset} comes before {least}; records are placed in ascending order after the last"
            )
        least = record.offset + 1
    if not least <= next_offset <= OFFSET_MAX:
        raise InvalidArgumentError(f"the next offset {next_offset} must lie between {least} and {OFFSET_MAX}")


def check_offset(shard: int, offset: int, start_offset: int, high_watermark: int) -> None:
    """A reader's position."""
    if offset < 0:
        raise InvalidArgumentError(f"offset {offset} of shard {shard} is negative")
    if offset < start_offset:
        raise OffsetOutOfRangeError(shard, offset, start_offset, high_watermark)


def stamped(records: Sequence[Record], now_ms: int) -> Sequence[Record]:
    """The records with the engine's time where the producer gave none."""
    if all(record.timestamp_ms != UNSTAMPED for record in records):
        return records
    return [
        record if record.timestamp_ms != UNSTAMPED else msgspec.structs.replace(record, timestamp_ms=now_ms)
        for record in records
    ]


def is_expired(record: Record, now_ms: int) -> bool:
    return record.expire_at_ms != NEVER and record.expire_at_ms <= now_ms


def plain_records(records: Records) -> Sequence[Record]:
    """Records of a batch, whatever form it came in."""
    return records.records(0) if isinstance(records, ColumnBatch) else records


_HASH: Final = Layout(">Q")

HASH_BYTES: Final = 8
"""Of `hash64`, big-endian: as long as a number in a key."""


def hash64(raw: bytes) -> int:
    """A stable 64-bit hash for index rows; equal hashes are told apart by looking at the record."""
    number: int = _HASH.unpack(hashlib.blake2b(raw, digest_size=HASH_BYTES).digest())[0]
    return number
