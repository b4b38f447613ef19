"""Idempotent producers: every batch once and in order, though clients send again what they heard no answer to.

A producer numbers its records by partition. For each the last batches are remembered, with their offsets: one of them
again is answered with the offset it has; one that does not follow the last is refused.

What is known is in memory. It outlives the process through the log itself, because the numbers are in the headers of
the batches, and through a row per shard that says where in the log to begin reading them:

    0      ->  | first id not given out u64 |
    shard  ->  see `streams.producers_row`

The row is written before a shard's first idempotent batch in a process, then every ROW_EVERY of them and before
records are deleted; it goes with its shard. Compaction and retention bring it up to date themselves. Ids are given out
in blocks, durable before use: none is given out twice.
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
from basaltmq.store.keys import queues as keys
from basaltmq.streams.engines.segment.engine import SegmentEngine
from basaltmq.streams.engines.segment.producers_row import SEQUENCE_MASK, Known, Producer, encode_row, recover

PRODUCERS_MAX: Final = 5_000
"""By shard; the one that was silent longest is forgotten."""

LOADED_MAX: Final = 100_000
"""In all shards that are loaded, some 100 MB with five batches each; the shard that was silent longest is let go of."""

ROW_EVERY: Final = 500
"""Batches of a shard between two rows: as many are read again after a crash."""

BLOCK: Final = 1_000
"""Producer ids made durable at once."""

NO_SHARD: Final = 0
"""Under it stands the first id that was not given out."""

_NEXT: Final = Layout(">Q")


class _Shard:
    """What is known of one shard's producers."""

    __slots__ = ("end", "engine", "known", "since_row")

    def __init__(self, engine: SegmentEngine, known: Known, end: int) -> None:
        self.engine = engine
        self.known = known
        self.end = end
        """Where the next batch of a producer can begin."""
        self.since_row = 0


class Producers:
    """The producers of one virtual host."""

    def __init__(self, store: Store) -> None:
        self._store = store
        raw = store.get(Family.PRODUCERS, keys.producers_key(NO_SHARD))
        self._next_id = self._block_end = self._first_id = _NEXT.unpack(raw)[0] if raw else 0
        self._shards: OrderedDict[int, _Shard] = OrderedDict()
        self._loaded = 0

    def next_id(self) -> tuple[int, bool]:
        """An id nobody had; and whether it may be used only when what was written is durable."""
        has_written = self._next_id >= self._block_end
        if has_written:
            self._block_end = self._next_id + BLOCK
            batch = Batch()
            batch.put(Family.PRODUCERS, keys.producers_key(NO_SHARD), _NEXT.pack(self._block_end))
            self._store.write(batch)
        self._next_id += 1
        return self._next_id - 1, has_written

    def check(self, engine: SegmentEngine, shard: int, header: KafkaHeader) -> int | None:
        """The offset of a batch that is there already; None for one to be appended; Refused for any other."""
        loaded = self._shards.get(shard)
        if loaded is None:
            loaded = self._opened(engine, shard, header)
        if header.base_sequence < 0 or header.producer_epoch < 0:
            raise Refused(e.INVALID_RECORD, "a batch of an idempotent producer has a sequence and an epoch")
        producer = loaded.known.get(header.producer_id)
        if producer is None:
            return None
        return _place_of(producer, header)

    def appended(self, shard: int, header: KafkaHeader, base_offset: int) -> None:
        """A batch that was checked has its offset."""
        loaded = self._shards[shard]
        known = loaded.known
        producer = known.get(header.producer_id)
        if producer is None:
            producer = known[header.producer_id] = Producer(header.producer_epoch)
            self._loaded += 1
            if len(known) > PRODUCERS_MAX:
                known.popitem(last=False)
                self._loaded -= 1
            self._make_room(shard)
        else:
            known.move_to_end(header.producer_id)
        producer.took(header, base_offset)
        loaded.end = base_offset + header.last_offset_delta + 1
        loaded.since_row += 1
        if loaded.since_row >= ROW_EVERY:
            self._write_row(shard, loaded)

    def known(self, engine: SegmentEngine, shard: int) -> Known:
        """Who appended to a shard lately."""
        loaded = self._shards.get(shard)
        if loaded is not None:
            return loaded.known
        raw = self._store.get(Family.PRODUCERS, keys.producers_key(shard))
        return Known() if raw is None else recover(engine, shard, raw)

    def settle(self, shard: int) -> None:
        """Write what is known of a shard, before something of it goes."""
        loaded = self._shards.get(shard)
        if loaded is not None and loaded.since_row:
            self._write_row(shard, loaded)

    def close(self) -> None:
        """Write the rows of shards that have gone on."""
        for shard, loaded in self._shards.items():
            if loaded.since_row:
                self._write_row(shard, loaded)

    def _write_row(self, shard: int, loaded: _Shard) -> None:
        loaded.since_row = 0
        batch = Batch()
        batch.put(Family.PRODUCERS, keys.producers_key(shard), encode_row(loaded.end, loaded.known))
        try:
            state = loaded.engine.state_of(shard)
            with state.lock:
                # The row goes with its shard; under the lock it cannot come after that.
                state.require()
                self._store.write(batch)
        except ShardNotFoundError:
            return

    def _make_room(self, shard: int) -> None:
        """Let go of shards that nobody wrote to for longest; the row and the log know what was known."""
        self._shards.move_to_end(shard)
        while self._loaded > LOADED_MAX and len(self._shards) > 1:
            number, oldest = next(iter(self._shards.items()))
            if oldest.since_row:
                self._write_row(number, oldest)
            del self._shards[number]
            self._loaded -= len(oldest.known)

    def _opened(self, engine: SegmentEngine, shard: int, header: KafkaHeader) -> _Shard:
        """What is known when a shard meets its first idempotent batch in this process."""
        raw = self._store.get(Family.PRODUCERS, keys.producers_key(shard))
        known = Known()
        if raw is not None or header.producer_id < self._first_id:
            known = recover(engine, shard, raw)
        loaded = _Shard(engine, known, engine.state_of(shard).high_watermark)
        # Before the batch, so that where there is one there is a row.
        self._write_row(shard, loaded)
        self._shards[shard] = loaded
        self._loaded += len(known)
        self._make_room(shard)
        return loaded


def _place_of(producer: Producer, header: KafkaHeader) -> int | None:
    if header.producer_epoch < producer.epoch:
        raise Refused(
            e.INVALID_PRODUCER_EPOCH, f"epoch {header.producer_epoch} of a producer that is at {producer.epoch}"
        )
    if header.producer_epoch > producer.epoch or not producer.batches:
        if header.base_sequence != 0 and header.producer_epoch > producer.epoch:
            raise Refused(e.OUT_OF_ORDER_SEQUENCE_NUMBER, "an epoch begins with sequence 0")
        return None
    last = (header.base_sequence + header.last_offset_delta) & SEQUENCE_MASK
    for first_kept, last_kept, offset in producer.batches:
        if (first_kept, last_kept) == (header.base_sequence, last):
            return offset
    expected = (producer.batches[-1][1] + 1) & SEQUENCE_MASK
    if header.base_sequence != expected:
        raise Refused(
            e.OUT_OF_ORDER_SEQUENCE_NUMBER,
            f"sequence {header.base_sequence} of producer {header.producer_id} where {expected} is next",
        )
    return None
