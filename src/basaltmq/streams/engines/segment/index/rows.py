"""Values of index rows: frame entries, segment stats, and the key and tag hashes of a frame.

    frame     | position u64 | base offset u64 | size u32 | records u32 | largest time i64 | store time i64 |
              | tag mask u64, or the producer id in a transaction | first expiry i64 | flags u8 |
    segment   | bytes u64 | frames u64 | garbage bytes u64 | least time i64 | largest time i64 |
              | least store time i64 | largest store time i64 |

Big-endian like the keys. The tag mask has one bit per tag hash, so that a scan without the tag index skips most frames
without the tag.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from struct import Struct as Layout
from typing import Final, NamedTuple

from basaltmq.errors import CorruptionError
from basaltmq.log.batches import kafka
from basaltmq.log.batches.columnar import ColumnBatch
from basaltmq.log.batches.record import NEVER
from basaltmq.log.frame import AWAITED, REWRITTEN, Header
from basaltmq.store.api import Reader
from basaltmq.store.batch import PUT, Batch
from basaltmq.store.families import Family
from basaltmq.store.keys import parts as key_parts
from basaltmq.store.keys import streams as stream_keys
from basaltmq.streams.adapter import hash64
from basaltmq.streams.shards import ShardConfig

FAMILY: Final = Family.STREAM_INDEX

HAS_KEYS: Final = 1
HAS_TAGS: Final = 2
IS_REWRITTEN: Final = 4
"""Compaction created the frame from the rest of other frames."""
IS_AWAITED: Final = 8
"""A view must not show the frame before it is durable, whatever the shard's level."""

IN_TRANSACTION: Final = 16
IS_MARKER: Final = 32
"""Ends a transaction. The tag mask holds the producer id."""
IS_COMMIT: Final = 64
OF_TRANSACTIONS: Final = IN_TRANSACTION | IS_MARKER | IS_COMMIT
INHERITED: Final = IS_REWRITTEN | IS_AWAITED | OF_TRANSACTIONS
"""Flags from the frame's header or body, independent of what is indexed."""

NO_TAGS: Final = 0
NO_FLAGS: Final = 0

ENTRY: Final = Layout(">QQIIqqQqB")
"""Layout of a frame row's value. The last offset is in the key."""
_SEGMENT: Final = Layout(">QQQqqqq")
_TIME_LOW: Final = -(1 << 63)
_TIME_HIGH: Final = (1 << 63) - 1


class Entry(NamedTuple):
    """The index entry of a frame."""

    last_offset: int
    base_offset: int
    position: int
    size_bytes: int
    records: int
    timestamp_max_ms: int
    store_time_ms: int
    tag_mask: int
    expire_min_ms: int
    """When the first live record expires; 0 for never."""
    flags: int

    def encode(self) -> bytes:
        _, base, position, size, records, time_ms, stored_ms, mask, expire_ms, flags = self
        return ENTRY.pack(position, base, size, records, time_ms, stored_ms, mask, expire_ms, flags)

    @classmethod
    def decode(cls, last_offset: int, raw: bytes) -> Entry:
        if len(raw) != ENTRY.size:
            raise CorruptionError(f"an index row of a frame has {len(raw)} bytes, not {ENTRY.size}")
        position, base, size, records, time_ms, stored_ms, mask, expire_ms, flags = ENTRY.unpack(raw)
        return cls(last_offset, base, position, size, records, time_ms, stored_ms, mask, expire_ms, flags)

    @property
    def is_dense(self) -> bool:
        return self.records == self.last_offset - self.base_offset + 1


def records_below(entry: Entry, offset: int, load: Callable[[Entry], ColumnBatch | None]) -> int:
    """Return how many records of a frame are below an offset."""
    if offset <= entry.base_offset or entry.records == 0:
        return 0
    if entry.is_dense:
        return min(entry.records, offset - entry.base_offset)
    batch = load(entry)
    return 0 if batch is None else batch.count_below(offset - entry.base_offset)


def put_entries(row_keys: list[bytes], row_values: list[bytes], entries: Mapping[int, list[Entry]]) -> None:
    """Add frame rows by shard, encoded as by `Entry.encode` but without a call per row."""
    put_key, put_value = row_keys.append, row_values.append
    frame_key, pack = stream_keys.frame_key, ENTRY.pack
    for number, some in entries.items():
        for last, base, position, size, records, time_ms, stored_ms, mask, expire_ms, flags in some:
            put_key(frame_key(number, last))
            put_value(pack(position, base, size, records, time_ms, stored_ms, mask, expire_ms, flags))


class SegmentStats:
    """Totals of the frames in one segment."""

    __slots__ = (
        "frames",
        "garbage_bytes",
        "size_bytes",
        "stored_max_ms",
        "stored_min_ms",
        "time_max_ms",
        "time_min_ms",
    )

    def __init__(self, raw: bytes | None = None) -> None:
        if raw is None:
            self.size_bytes = self.frames = self.garbage_bytes = 0
            self.time_min_ms = self.stored_min_ms = _TIME_HIGH
            self.time_max_ms = self.stored_max_ms = _TIME_LOW
            return
        if len(raw) != _SEGMENT.size:
            raise CorruptionError(f"an index row of a segment has {len(raw)} bytes, not {_SEGMENT.size}")
        (
            self.size_bytes,
            self.frames,
            self.garbage_bytes,
            self.time_min_ms,
            self.time_max_ms,
            self.stored_min_ms,
            self.stored_max_ms,
        ) = _SEGMENT.unpack(raw)

    def encode(self) -> bytes:
        return _SEGMENT.pack(
            self.size_bytes,
            self.frames,
            self.garbage_bytes,
            self.time_min_ms,
            self.time_max_ms,
            self.stored_min_ms,
            self.stored_max_ms,
        )

    def add(self, size_bytes: int, time_min_ms: int, time_max_ms: int, stored_ms: int) -> None:
        self.size_bytes += size_bytes
        self.frames += 1
        if time_min_ms < self.time_min_ms:
            self.time_min_ms = time_min_ms
        if time_max_ms > self.time_max_ms:
            self.time_max_ms = time_max_ms
        if stored_ms < self.stored_min_ms:
            self.stored_min_ms = stored_ms
        if stored_ms > self.stored_max_ms:
            self.stored_max_ms = stored_ms

    def merge(self, other: SegmentStats) -> None:
        """Add the totals of further frames."""
        self.size_bytes += other.size_bytes
        self.frames += other.frames
        self.garbage_bytes += other.garbage_bytes
        self.time_min_ms = min(self.time_min_ms, other.time_min_ms)
        self.time_max_ms = max(self.time_max_ms, other.time_max_ms)
        self.stored_min_ms = min(self.stored_min_ms, other.stored_min_ms)
        self.stored_max_ms = max(self.stored_max_ms, other.stored_max_ms)


class IndexTerms:
    """The key and tag hashes under which a frame is indexed."""

    __slots__ = ("flags", "key_hashes", "tag_hashes", "tag_mask")

    def __init__(self, batch: ColumnBatch | None, config: ShardConfig) -> None:
        self.key_hashes: Collection[int] = ()
        self.tag_hashes: Collection[int] = ()
        self.tag_mask = 0
        self.flags = 0
        if batch is None or len(batch.extents) <= 3:
            return
        if config.index_keys:
            found = batch.distinct_keys()
            if found:
                self.key_hashes = {hash64(key) for key in found}
                self.flags |= HAS_KEYS
        tags = batch.distinct_tags()
        if tags:
            hashes = {hash64(tag) for tag in tags}
            for hashed in hashes:
                self.tag_mask |= 1 << (hashed & 63)
            if config.index_tags:
                self.tag_hashes = hashes
                self.flags |= HAS_TAGS

    def put(self, batch: Batch, shard: int, last_offset: int) -> int:
        """Add the key, tag and transaction rows of a frame. Return how many."""
        put = batch.ops.append
        for hashed in self.key_hashes:
            put((PUT, FAMILY, stream_keys.stream_index_key(b"K", shard, hashed, last_offset), b""))
        for hashed in self.tag_hashes:
            put((PUT, FAMILY, stream_keys.stream_index_key(b"G", shard, hashed, last_offset), b""))
        if self.flags & OF_TRANSACTIONS:
            key, value = transaction_row(shard, last_offset, self.tag_mask, self.flags)
            put((PUT, FAMILY, key, value))
            return len(self.key_hashes) + 1
        return len(self.key_hashes) + len(self.tag_hashes)

    def delete(self, batch: Batch, shard: int, last_offset: int) -> None:
        """Add the deletion of the key and tag rows of a frame."""
        for kind, hashes in ((b"K", self.key_hashes), (b"G", self.tag_hashes)):
            for hashed in hashes:
                batch.delete(FAMILY, stream_keys.stream_index_key(kind, shard, hashed, last_offset))


NO_TERMS: Final = IndexTerms(None, ShardConfig())


def kafka_terms(raw: bytes, records: ColumnBatch | None, config: ShardConfig) -> IndexTerms:
    """Return the index terms of a Kafka record batch. `records` is None if its keys are not indexed."""
    header = kafka.read_header(raw)
    if not header.is_transactional:
        return NO_TERMS if records is None else IndexTerms(records, config)
    terms = IndexTerms(records, config)
    is_commit = kafka.read_marker(raw) if header.is_control else None
    if not header.is_control:
        terms.flags |= IN_TRANSACTION
    elif is_commit is not None:
        terms.flags |= IS_MARKER | (IS_COMMIT if is_commit else 0)
    terms.tag_mask = header.producer_id
    return terms


def transaction_row(shard: int, last_offset: int, producer_id: int, flags: int) -> tuple[bytes, bytes]:
    """Return the transaction row of a frame in a transaction or of a marker."""
    if flags & IS_MARKER:
        return stream_keys.stream_index_key(
            b"M", shard, producer_id, last_offset
        ), b"\1" if flags & IS_COMMIT else b"\0"
    return stream_keys.stream_index_key(b"Q", shard, producer_id, last_offset), b""


def delete_terms_of(store: Reader, batch: Batch, shard: int, unreadable: Collection[int]) -> None:
    """Delete the key and tag rows of unreadable frames by a scan over all such rows of the shard."""
    if not unreadable:
        return
    for kind in (b"K", b"G"):
        start, end = key_parts.prefix_range(stream_keys.stream_index_key(kind, shard, 0, 0)[:9])
        for key, _ in store.scan(FAMILY, start, end):
            if stream_keys.decode_stream_index_key(key)[3] in unreadable:
                batch.delete(FAMILY, key)


def first_expiry(batch: ColumnBatch | None, base_offset: int, start: int = 0, deleted: Collection[int] = ()) -> int:
    """Return when the first live record of a frame at or above `start` expires; 0 for never."""
    expiries = None if batch is None else batch.expiries()
    if batch is None or expiries is None:
        return NEVER
    if start > base_offset or deleted:
        deltas = batch.deltas()
        places = range(batch.count) if deltas is None else deltas
        expiries = [
            time_ms
            for time_ms, place in zip(expiries, places, strict=True)
            if base_offset + place >= start and base_offset + place not in deleted
        ]
    return min((time_ms for time_ms in expiries if time_ms != NEVER), default=NEVER)


def set_expiry(
    batch: Batch, shard: int, entry: Entry, start: int, deleted: Collection[int], records: ColumnBatch | None
) -> None:
    """Update the first expiry of a frame if it has changed."""
    expire_ms = first_expiry(records, entry.base_offset, start, deleted)
    if expire_ms != entry.expire_min_ms:
        batch.delete(FAMILY, stream_keys.stream_expiry_key(entry.expire_min_ms, shard, entry.last_offset))
        changed = entry._replace(expire_min_ms=expire_ms)
        batch.put(FAMILY, stream_keys.frame_key(shard, entry.last_offset), changed.encode())
        if expire_ms:
            batch.put(FAMILY, stream_keys.stream_expiry_key(expire_ms, shard, entry.last_offset), b"")


def entry_of(header: Header, position: int, terms: IndexTerms, expire_min_ms: int) -> Entry:
    return Entry(
        header.last_offset,
        header.base_offset,
        position,
        header.size_bytes,
        header.records,
        header.timestamp_max_ms,
        header.store_time_ms,
        terms.tag_mask,
        expire_min_ms,
        terms.flags | (IS_REWRITTEN if header.flags & REWRITTEN else 0) | (IS_AWAITED if header.flags & AWAITED else 0),
    )
