"""Idempotent producers: each batch is appended once and in order, although clients retry unconfirmed batches.

A producer numbers its records per partition. For each producer and shard, the last batches and their offsets are
remembered. A repeated batch gets the offset of the first one. A batch out of sequence is rejected.

The state is in memory. It is recovered from the log, because batch headers carry the sequences, and from one row per
shard that says where in the log to start:

    0      ->  | first producer id not allocated u64 |
    shard  ->  see `streams/engines/segment/producers_row.py`

The row is written before a shard's first idempotent batch in a process, then every ROW_EVERY batches, and before
records are deleted. It is deleted with its shard. Compaction and retention update it. Producer ids are allocated in
blocks that are durable before use, so no id is allocated twice.
"""

from __future__ import annotations

from collections import OrderedDict
from struct import Struct as Layout
from typing import Final

from basaltmq.errors import ShardNotFoundError
from basaltmq.log.batches.kafka import KafkaHeader
from basaltmq.protocols.kafka.wire import errors as e
from basaltmq.protocols.kafka.wire.errors import Refused
from basaltmq.store.api import Store
from basaltmq.store.batch import Batch
from basaltmq.store.families import Family
from basaltmq.store.keys import streams as stream_keys
from basaltmq.streams.engines.segment.engine import SegmentEngine
from basaltmq.streams.engines.segment.producers_row import SEQUENCE_MASK, Known, Producer, encode_row, recover

PRODUCERS_MAX: Final = 5_000
"""Limit of producers per shard. The least recently used one is evicted."""

LOADED_MAX: Final = 100_000
"""Limit of producers in all loaded shards, about 100 MB with five batches each. The least recently used shard is
unloaded."""

ROW_EVERY: Final = 500
"""Batches of a shard between two row writes, and so the most batches that recovery reads after a crash."""

BLOCK: Final = 1_000
"""Producer ids per allocated block."""

NO_SHARD: Final = 0
"""Key of the row with the first producer id that is not allocated."""

_NEXT: Final = Layout(">Q")


class _Shard:
    """Producer state of one loaded shard."""

    __slots__ = ("end", "engine", "known", "since_row")

    def __init__(self, engine: SegmentEngine, known: Known, end: int) -> None:
        self.engine = engine
        self.known = known
        self.end = end
        """End offset after the last idempotent batch."""
        self.since_row = 0


class Producers:
    """The producers of one virtual host."""

    def __init__(self, store: Store) -> None:
        self._store = store
        raw = store.get(Family.PRODUCERS, stream_keys.producers_key(NO_SHARD))
        self._next_id = self._block_end = self._first_id = _NEXT.unpack(raw)[0] if raw else 0
        self._shards: OrderedDict[int, _Shard] = OrderedDict()
        self._loaded = 0

    def next_id(self) -> tuple[int, bool]:
        """Allocate a producer id. Also return whether the caller must wait until the store is durable."""
        has_written = self._next_id >= self._block_end
        if has_written:
            self._block_end = self._next_id + BLOCK
            batch = Batch()
            batch.put(Family.PRODUCERS, stream_keys.producers_key(NO_SHARD), _NEXT.pack(self._block_end))
            self._store.write(batch)
        self._next_id += 1
        return self._next_id - 1, has_written

    def check(self, engine: SegmentEngine, shard: int, header: KafkaHeader) -> int | None:
        """Return the offset of a repeated batch, or None for a batch to append. Raise Refused for any other."""
        loaded = self._shards.get(shard)
        if loaded is None:
            loaded = self._load(engine, shard, header)
        if header.base_sequence < 0 or header.producer_epoch < 0:
            raise Refused(e.INVALID_RECORD, "a batch of an idempotent producer needs a sequence and a producer epoch")
        producer = loaded.known.get(header.producer_id)
        if producer is None:
            return None
        return _repeated_offset(producer, header)

    def appended(self, shard: int, header: KafkaHeader, base_offset: int) -> None:
        """Record the offset of a batch that passed `check`."""
        loaded = self._shards[shard]
        known = loaded.known
        producer = known.get(header.producer_id)
        if producer is None:
            producer = known[header.producer_id] = Producer(header.producer_epoch)
            self._loaded += 1
            if len(known) > PRODUCERS_MAX:
                known.popitem(last=False)
                self._loaded -= 1
            self._evict(shard)
        else:
            known.move_to_end(header.producer_id)
        producer.took(header, base_offset)
        loaded.end = base_offset + header.last_offset_delta + 1
        loaded.since_row += 1
        if loaded.since_row >= ROW_EVERY:
            self._write_row(shard, loaded)

    def known(self, engine: SegmentEngine, shard: int) -> Known:
        """Return the recent producers of a shard."""
        loaded = self._shards.get(shard)
        if loaded is not None:
            return loaded.known
        raw = self._store.get(Family.PRODUCERS, stream_keys.producers_key(shard))
        return Known() if raw is None else recover(engine, shard, raw)

    def settle(self, shard: int) -> None:
        """Write a shard's row before some of its records are deleted."""
        loaded = self._shards.get(shard)
        if loaded is not None and loaded.since_row:
            self._write_row(shard, loaded)

    def close(self) -> None:
        """Write the rows of shards that have changed."""
        for shard, loaded in self._shards.items():
            if loaded.since_row:
                self._write_row(shard, loaded)

    def _write_row(self, shard: int, loaded: _Shard) -> None:
        loaded.since_row = 0
        batch = Batch()
        batch.put(Family.PRODUCERS, stream_keys.producers_key(shard), encode_row(loaded.end, loaded.known))
        try:
            state = loaded.engine.state_of(shard)
            with state.lock:
                # Deleting the shard deletes the row. The lock prevents a write after that.
                state.require()
                self._store.write(batch)
        except ShardNotFoundError:
            return

    def _evict(self, shard: int) -> None:
        """Unload the least recently used shards. The row and the log keep their state."""
        self._shards.move_to_end(shard)
        while self._loaded > LOADED_MAX and len(self._shards) > 1:
            number, oldest = next(iter(self._shards.items()))
            if oldest.since_row:
                self._write_row(number, oldest)
            del self._shards[number]
            self._loaded -= len(oldest.known)

    def _load(self, engine: SegmentEngine, shard: int, header: KafkaHeader) -> _Shard:
        """Load a shard at its first idempotent batch in this process."""
        raw = self._store.get(Family.PRODUCERS, stream_keys.producers_key(shard))
        known = Known()
        if raw is not None or header.producer_id < self._first_id:
            known = recover(engine, shard, raw)
        loaded = _Shard(engine, known, engine.state_of(shard).high_watermark)
        # Write the row before the batch, so that every shard with idempotent batches has a row.
        self._write_row(shard, loaded)
        self._shards[shard] = loaded
        self._loaded += len(known)
        self._evict(shard)
        return loaded


def _repeated_offset(producer: Producer, header: KafkaHeader) -> int | None:
    if header.producer_epoch < producer.epoch:
        raise Refused(
            e.INVALID_PRODUCER_EPOCH,
            f"producer epoch {header.producer_epoch} is fenced; the current is {producer.epoch}",
        )
    if header.producer_epoch > producer.epoch or not producer.batches:
        if header.base_sequence != 0 and header.producer_epoch > producer.epoch:
            raise Refused(e.OUT_OF_ORDER_SEQUENCE_NUMBER, "the first batch of a producer epoch must have sequence 0")
        return None
    last = (header.base_sequence + header.last_offset_delta) & SEQUENCE_MASK
    for first_kept, last_kept, offset in producer.batches:
        if (first_kept, last_kept) == (header.base_sequence, last):
            return offset
    expected = (producer.batches[-1][1] + 1) & SEQUENCE_MASK
    if header.base_sequence != expected:
        raise Refused(
            e.OUT_OF_ORDER_SEQUENCE_NUMBER,
            f"producer {header.producer_id} sent sequence {header.base_sequence}; expected {expected}",
        )
    return None
