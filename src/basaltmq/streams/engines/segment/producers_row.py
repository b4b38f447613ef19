"""Row format and recovery of a shard's idempotent producer state.

    shard  ->  | version u8 | next offset u64 | count u32 | producer* |
               | producer id i64 | epoch i16 | batches u8 | (first sequence i32 | last sequence i32 | offset i64)* |

The row covers every batch below its next offset. Later batches are found by their headers in the log. Compaction writes
frames without such headers, and retention deletes them, so both first extend the row up to where they will go
(`known_to`). So a producer that resends a batch after a crash gets its offset, even if the batch was compacted. A
producer that continues is recognized, even if all its batches are deleted.

After a power loss the row may be behind or ahead of the log. A row that is behind, or lost, costs a scan of more
headers (`recover`), so it is synced before headers are deleted. A row that is ahead lists lost batches, whose offsets
may be assigned again. `drop_lost_batches` removes them durably when the shard is first used, before any append, because
later the row would look valid. Lost batches may have displaced older ones from the row, so recovery reads the headers
of the last UNKNOWN_REREAD offsets again.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from operator import itemgetter
from struct import Struct as Layout
from struct import error as struct_error
from typing import TYPE_CHECKING, Final

from basaltmq.errors import CorruptionError
from basaltmq.log.batches.kafka import KafkaHeader
from basaltmq.store.api import Store
from basaltmq.store.batch import Batch
from basaltmq.store.families import Family
from basaltmq.store.keys import streams as stream_keys
from basaltmq.streams.shards import OFFSET_MAX

if TYPE_CHECKING:
    from basaltmq.streams.engines.segment.reader import SegmentReader

BATCHES_KEPT: Final = 5
"""A producer has at most five requests in flight."""

UNKNOWN_REREAD: Final = 10_000
"""Maximum offsets to scan if the row is missing or was ahead of the log."""

SEQUENCE_MASK: Final = 0x7FFFFFFF
ROW_VERSION: Final = 1

_HEAD: Final = Layout(">BQI")
_PRODUCER: Final = Layout(">qhB")
_BATCH: Final = Layout(">iiq")


class Producer:
    """The state of one producer in one shard."""

    __slots__ = ("batches", "epoch")

    def __init__(self, epoch: int) -> None:
        self.epoch = epoch
        self.batches: deque[tuple[int, int, int]] = deque(maxlen=BATCHES_KEPT)
        """(first sequence, last sequence, offset), oldest first."""

    def took(self, header: KafkaHeader, base_offset: int) -> None:
        if header.producer_epoch != self.epoch:
            self.epoch = header.producer_epoch
            self.batches.clear()
        last = (header.base_sequence + header.last_offset_delta) & SEQUENCE_MASK
        self.batches.append((header.base_sequence, last, base_offset))

    def found(self, header: KafkaHeader) -> None:
        """Add a batch found in the log. It may be known already, or older than the known ones."""
        offset = header.base_offset
        if not self.batches or offset > self.batches[-1][2]:
            self.took(header, offset)
        elif header.producer_epoch == self.epoch and all(offset != known for _, _, known in self.batches):
            last = (header.base_sequence + header.last_offset_delta) & SEQUENCE_MASK
            known = sorted([*self.batches, (header.base_sequence, last, offset)], key=itemgetter(2))
            self.batches.clear()
            self.batches.extend(known)


Known = OrderedDict[int, Producer]


def encode_row(next_offset: int, known: Known) -> bytes:
    parts = [_HEAD.pack(ROW_VERSION, next_offset, len(known))]
    for producer_id, producer in known.items():
        parts.append(_PRODUCER.pack(producer_id, producer.epoch, len(producer.batches)))
        parts += (_BATCH.pack(*batch) for batch in producer.batches)
    return b"".join(parts)


def decode_row(raw: bytes) -> tuple[int, Known]:
    known = Known()
    next_offset, count = _head(raw)
    at = _HEAD.size
    try:
        for _ in range(count):
            producer_id, epoch, batches = _PRODUCER.unpack_from(raw, at)
            at += _PRODUCER.size
            producer = known[producer_id] = Producer(epoch)
            for _ in range(batches):
                producer.batches.append(_BATCH.unpack_from(raw, at))
                at += _BATCH.size
    except struct_error as error:
        raise CorruptionError(f"a producer state row cannot be decoded: {error}") from error
    return next_offset, known


def known_to(raw: bytes) -> int:
    """Return the offset below which a row covers all batches."""
    next_offset: int = _head(raw)[0]
    return next_offset


def recover(reader: SegmentReader, shard: int, raw: bytes | None, end: int = OFFSET_MAX) -> Known:
    """Return the producer state below `end`, from the row and the headers of later batches."""
    state = reader.state_of(shard)
    at, known = (0, Known()) if raw is None else decode_row(raw)
    if raw is None or at > state.next_offset:
        at, known = state.next_offset - UNKNOWN_REREAD, Known()
    for header in reader.producers_batches(shard, max(at, state.start_offset)):
        if header.base_offset >= end:
            break
        known.setdefault(header.producer_id, Producer(header.producer_epoch)).found(header)
    return known


def drop_lost_batches(store: Store, shard: int, next_offset: int) -> None:
    """Remove batches that a power loss removed from the log from a shard's row. Call before any append."""
    key = stream_keys.producers_key(shard)
    raw = store.get(Family.PRODUCERS, key)
    if raw is None or len(raw) < _HEAD.size or _HEAD.unpack_from(raw)[1] <= next_offset:
        return
    try:
        _, known = decode_row(raw)
    except CorruptionError:
        # Users of the row report the error.
        return
    for producer_id, producer in list(known.items()):
        while producer.batches and producer.batches[-1][2] >= next_offset:
            producer.batches.pop()
        if not producer.batches:
            del known[producer_id]
    batch = Batch()
    batch.put(Family.PRODUCERS, key, encode_row(max(0, next_offset - UNKNOWN_REREAD), known))
    store.write(batch)
    store.sync()


def _head(raw: bytes) -> tuple[int, int]:
    """Return (next offset, count)."""
    try:
        version, next_offset, count = _HEAD.unpack_from(raw)
    except struct_error as error:
        raise CorruptionError(f"a producer state row cannot be decoded: {error}") from error
    if version != ROW_VERSION:
        raise CorruptionError(f"a producer state row has version {version}, this Basalt reads {ROW_VERSION}")
    return next_offset, count
