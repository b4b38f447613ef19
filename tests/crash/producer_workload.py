"""Steps of a process with one idempotent producer. The parent simulates a power loss after the last one.

The producer sends six batches of one record, all with the same key, to a topic with or without compaction. Unsynced
data is lost. Producer rows are in the store, batches in the log, and in each test one of them is ahead. Lines to the
parent: `id n` with the producer's id, `found offset|none ...` with the results of repeated batches, `values ...` with
the records of the topic, and `ready` before the power loss.
"""

from __future__ import annotations

import signal
from pathlib import Path

from tests.crash.harness import Emit
from tests.unit.protocols.kafka.test_kafka_context import Harness, batch_of

from basaltmq.log.batches.kafka import KafkaHeader, read_header
from basaltmq.protocols.kafka.transactions.producers import Producers
from basaltmq.streams.engines.segment.engine import SegmentEngine

TOPIC = "numbered"
BATCHES = 6
NOW_MS = 1_700_000_000_000
PASSES = 5


def begin(emit: Emit, path: str, is_compacted: int) -> None:
    """Create the topic and assign a producer id, durably."""
    harness = Harness(Path(path))
    harness.topic(TOPIC, *([("cleanup.policy", "compact")] if is_compacted else []))
    emit(f"id {harness.context.producers.next_id()[0]}")
    harness.store.sync()
    _await_the_end(emit)


def send(emit: Emit, path: str, producer: int, synced: str) -> None:
    """Send the batches and write the row. Only `synced` is durable: the log, or the rows."""
    harness = Harness(Path(path))
    engine, shard, producers = _sent(harness, producer)
    if synced == "rows":
        producers.settle(shard)
        harness.store.sync()
    else:
        _sync_log(engine)
    _await_the_end(emit)


def compact(emit: Emit, path: str, producer: int) -> None:
    """Send, write the row, compact. The log is durable, and the part of the store that compaction synced."""
    harness = Harness(Path(path))
    engine, shard, producers = _sent(harness, producer)
    producers.settle(shard)
    _compacted(emit, engine, shard)
    _sync_log(engine)
    _await_the_end(emit)


def compact_again(emit: Emit, path: str) -> None:
    """Start and compact, without a request of the producer."""
    harness = Harness(Path(path))
    engine, shard = _topic(harness)
    _compacted(emit, engine, shard)
    _sync_log(engine)
    _await_the_end(emit)


def others(emit: Emit, path: str) -> None:
    """Append without a producer id, which reuses the offsets of the lost batches."""
    harness = Harness(Path(path))
    engine, shard = _topic(harness)
    for number in range(2 * BATCHES):
        assert engine.append_kafka(shard, batch_of(b"other %d" % number)).base_offset == number
    _sync_log(engine)
    _await_the_end(emit)


def resend(emit: Emit, path: str, producer: int, first: int, last: int) -> None:
    """Send these batches again and report the results."""
    harness = Harness(Path(path))
    engine, shard = _topic(harness)
    reported = [
        harness.context.producers.check(engine, shard, _header(producer, each)) for each in range(first, last + 1)
    ]
    emit(" ".join(["found", *("none" if each is None else str(each) for each in reported)]))
    harness.close()


def _topic(harness: Harness) -> tuple[SegmentEngine, int]:
    return harness.context.engine(harness.context.topic(TOPIC), 0)


def _sent(harness: Harness, producer: int) -> tuple[SegmentEngine, int, Producers]:
    """Send the batches."""
    engine, shard = _topic(harness)
    producers = harness.context.producers
    for sequence in range(BATCHES):
        header = _header(producer, sequence)
        assert producers.check(engine, shard, header) is None
        raw = batch_of(b"%d" % sequence, producer=(producer, 0, sequence), key=b"same")
        producers.appended(shard, header, engine.append_kafka(shard, raw).base_offset)
    return engine, shard, producers


def _header(producer: int, sequence: int) -> KafkaHeader:
    return read_header(batch_of(b"%d" % sequence, producer=(producer, 0, sequence), key=b"same"))


def _compacted(emit: Emit, engine: SegmentEngine, shard: int) -> None:
    for _ in range(PASSES):
        engine.retain(NOW_MS)
    emit(" ".join(["values", *((each.value or b"").decode() for each in engine.read_by_offset(shard, 0).records())]))


def _sync_log(engine: SegmentEngine) -> None:
    for lane in engine.lanes:
        lane.log.sync()


def _await_the_end(emit: Emit) -> None:
    emit("ready")
    signal.pause()
