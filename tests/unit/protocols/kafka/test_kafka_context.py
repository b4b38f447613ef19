"""Requests against a separate stream plane, without a broker."""

from __future__ import annotations

import asyncio
import struct
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import google_crc32c
import pytest
from tests.log_frames import encode_plain

from basaltmq.broker.auth.acls import Operation, Resource
from basaltmq.broker.vhost_streams import VHostStreams
from basaltmq.durability import Durability
from basaltmq.errors import CorruptionError, InvalidConfigError
from basaltmq.log.batches.kafka import KafkaHeader, read_header, records
from basaltmq.log.batches.record import Record
from basaltmq.protocols.kafka.admin.topic_settings import topic_config
from basaltmq.protocols.kafka.context import Client, Context, Response, Settings
from basaltmq.protocols.kafka.fetch import fetch
from basaltmq.protocols.kafka.fetch_state.deadline import Deadline
from basaltmq.protocols.kafka.transactions import producers as producers_module
from basaltmq.protocols.kafka.transactions.producers import Producers
from basaltmq.protocols.kafka.wire import api as k
from basaltmq.protocols.kafka.wire import errors as e
from basaltmq.protocols.kafka.wire.api import APIS, Request
from basaltmq.protocols.kafka.wire.errors import Refused
from basaltmq.store.batch import Batch
from basaltmq.store.families import Family
from basaltmq.store.keys import streams as stream_keys
from basaltmq.store.open import open_store
from basaltmq.store.rocks import RocksStore
from basaltmq.streams.engines.segment.engine import SegmentEngine
from basaltmq.streams.engines.segment.producers_row import (
    Known,
    Producer,
    decode_row,
    drop_lost_batches,
    encode_row,
    known_to,
    recover,
)


class AnyUser:
    """A client with all permissions."""

    client_id = host = "anybody"
    fetch_session = None

    def __init__(self) -> None:
        self.deadline = Deadline()

    def unsent_bytes(self) -> int | None:
        return 0

    def address(self) -> tuple[str, int]:
        return "localhost", 9092

    def check(
        self, kind: str, name: str, operation: Operation | None = None, resource: Resource = Resource.TOPIC
    ) -> None:
        return

    def may(
        self, kind: str, name: str, operation: Operation | None = None, resource: Resource = Resource.TOPIC
    ) -> bool:
        return True


class Harness:
    def __init__(self, path: Path) -> None:
        self.store: RocksStore = open_store(path)
        self.streams = VHostStreams(self.store, path, lambda: 1_700_000_000_000)
        vhost = SimpleNamespace(name="/", streams=self.streams, store=self.store, is_up=True)
        self.context = Context(cast(Any, None), cast(Any, vhost), Settings())

    def topic(self, name: str, *settings: tuple[str, str]) -> tuple[SegmentEngine, int]:
        self.context.plane.topics.create(name, topic_config(settings, 1, Durability.WRITTEN))
        return self.context.engine(self.context.topic(name), 0)

    def fetch(self, topic: str, offset: int, max_bytes: int = 1 << 20) -> dict[str, Any]:
        partition = {"partition": 0, "fetch_offset": offset, "partition_max_bytes": max_bytes}
        body = {
            "session_id": 0,
            "session_epoch": -1,
            "max_wait_ms": 0,
            "min_bytes": 1,
            "max_bytes": max_bytes,
            "isolation_level": 0,
            "topics": [{"topic": topic, "topic_id": None, "partitions": [partition]}],
            "forgotten_topics": [],
        }

        async def ask() -> Response:
            return fetch(self.context, cast(Client, AnyUser()), Request(APIS[k.FETCH], 12, 1, None, body))

        response = asyncio.run(ask())
        assert isinstance(response, dict)
        found: dict[str, Any] = response["topics"][0]["partitions"][0]
        return found

    def close(self) -> None:
        self.streams.close()
        self.store.close()


@pytest.fixture
def harness(tmp_path: Path) -> Iterator[Harness]:
    made = Harness(tmp_path / "store")
    yield made
    made.close()


def batch_of(*values: bytes, producer: tuple[int, int, int] | None = None, key: bytes | None = None) -> bytes:
    raw = encode_plain([Record(value, key, timestamp_ms=1_700_000_000_000) for value in values])
    if producer is None:
        return raw
    covered = raw[21:43] + struct.pack(">qhi", *producer) + raw[57:]
    return raw[:17] + struct.pack(">I", google_crc32c.value(covered)) + covered


def positions(harness: Harness, topic: str, offset: int, end: int) -> list[tuple[int, list[bytes]]]:
    """Return the positions of a consumer from batch to batch, with the records at or after each position."""
    steps = []
    while offset < end:
        found = harness.fetch(topic, offset, max_bytes=1)
        raw = b"".join(found["records"])
        header = read_header(raw)
        values = [each.value or b"" for each in records(raw) if each.offset >= offset]
        after = header.base_offset + header.last_offset_delta + 1
        assert after > offset, f"a consumer at {offset} would ask for ever"
        steps.append((after, values))
        offset = after
    return steps


def test_a_consumer_skips_deleted_records(harness: Harness) -> None:
    engine, shard = harness.topic("holes")
    for number in range(4):
        engine.append_kafka(shard, batch_of(*(b"%d%d" % (number, at) for at in range(3))))
    engine.delete_by_offset(shard, [1, 2, 3, 4, 5, 10, 11])
    walked = positions(harness, "holes", 0, 12)
    assert walked[-1][0] == 12
    assert [value for _, values in walked for value in values] == [b"00", b"20", b"21", b"22", b"30"]


def test_a_batch_is_stored_unchanged_except_for_its_offset(harness: Harness) -> None:
    engine, shard = harness.topic("same")
    engine.append_kafka(shard, batch_of(b"first"))
    raw = batch_of(b"a", b"b")
    engine.append_kafka(shard, raw)
    (found,) = harness.fetch("same", 1)["records"]
    assert found[8:] == raw[8:]
    assert read_header(found).base_offset == 1


def test_producer_state_of_earlier_processes_is_read_from_rows_and_log(
    harness: Harness, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(producers_module, "ROW_EVERY", 4)
    engine, shard = harness.topic("producers")
    first = Producers(harness.store)
    pid, is_written = first.next_id()
    assert is_written
    for sequence in range(10):
        raw = batch_of(b"%d" % sequence, producer=(pid, 0, sequence))
        assert first.check(engine, shard, read_header(raw)) is None
        first.appended(shard, read_header(raw), engine.append_kafka(shard, raw).base_offset)
    # The process is killed: the row has eight of the batches, the log all.
    row = harness.store.get(Family.PRODUCERS, stream_keys.producers_key(shard))
    assert row is not None
    assert decode_row(row)[0] == 8
    second = Producers(harness.store)
    assert second.next_id()[0] >= pid + producers_module.BLOCK
    assert second.check(engine, shard, read_header(batch_of(b"9", producer=(pid, 0, 9)))) == 9
    assert second.check(engine, shard, read_header(batch_of(b"5", producer=(pid, 0, 5)))) == 5
    assert second.check(engine, shard, read_header(batch_of(b"10", producer=(pid, 0, 10)))) is None
    with pytest.raises(Refused) as refused:
        second.check(engine, shard, read_header(batch_of(b"12", producer=(pid, 0, 12))))
    assert refused.value.code == e.OUT_OF_ORDER_SEQUENCE_NUMBER


def test_a_producer_row_ahead_of_the_log_is_ignored(harness: Harness) -> None:
    """A power loss may remove appended batches and keep the row that was written after them."""
    engine, shard = harness.topic("beyond")
    pid, _ = Producers(harness.store).next_id()
    for sequence in range(2):
        engine.append_kafka(shard, batch_of(b"%d" % sequence, producer=(pid, 0, sequence)))
    ahead = Producer(0)
    ahead.batches.extend((sequence, sequence, sequence) for sequence in range(5))
    batch = Batch()
    batch.put(Family.PRODUCERS, stream_keys.producers_key(shard), encode_row(5, Known({pid: ahead})))
    harness.store.write(batch)
    producers = Producers(harness.store)
    assert producers.check(engine, shard, read_header(batch_of(b"1", producer=(pid, 0, 1)))) == 1
    assert producers.check(engine, shard, read_header(batch_of(b"2", producer=(pid, 0, 2)))) is None, "it was lost"


@pytest.mark.promise("P1", "P2")
def test_duplicates_of_compacted_or_deleted_batches_are_detected_after_a_crash(harness: Harness) -> None:
    engine, shard = harness.topic("compacted", ("cleanup.policy", "compact"))
    producers = Producers(harness.store)
    pid, _ = producers.next_id()

    def sent(sequence: int) -> KafkaHeader:
        return read_header(batch_of(b"%d" % sequence, producer=(pid, 0, sequence), key=b"same"))

    def compact() -> list[bytes]:
        for _ in range(5):
            engine.retain(1_700_000_000_000)
        return [(record.value or b"") for record in engine.read_by_offset(shard, 0).records()]

    def is_known_after_a_crash() -> None:
        again = Producers(harness.store)
        assert [again.check(engine, shard, sent(sequence)) for sequence in (4, 5, 6)] == [4, 5, None]

    for sequence in range(6):
        raw = batch_of(b"%d" % sequence, producer=(pid, 0, sequence), key=b"same")
        assert producers.check(engine, shard, read_header(raw)) is None
        producers.appended(shard, read_header(raw), engine.append_kafka(shard, raw).base_offset)
    row = harness.store.get(Family.PRODUCERS, stream_keys.producers_key(shard))
    assert row is not None
    assert known_to(row) == 0
    engine.delete_by_offset(shard, [4])
    # Only the batch headers identify the producer, so compaction writes the row before it removes them.
    assert compact() == [b"5"]
    row = harness.store.get(Family.PRODUCERS, stream_keys.producers_key(shard))
    assert row is not None
    assert known_to(row) == 6
    is_known_after_a_crash()


@pytest.mark.spec("B10")
def test_a_topic_is_compacted_after_its_idempotent_producer_expired(harness: Harness) -> None:
    engine, shard = harness.topic("mixed", ("cleanup.policy", "compact"))
    producers = Producers(harness.store)
    pid, _ = producers.next_id()
    raw = batch_of(b"0", producer=(pid, 0, 0), key=b"same")
    assert producers.check(engine, shard, read_header(raw)) is None
    producers.appended(shard, read_header(raw), engine.append_kafka(shard, raw).base_offset)
    for value in (b"1", b"2", b"3"):
        engine.append_kafka(shard, batch_of(value, key=b"same"))
    for _ in range(5):
        engine.retain(1_700_000_000_000)
    assert [record.value for record in engine.read_by_offset(shard, 0).records()] == [b"3"]
    assert Producers(harness.store).check(engine, shard, read_header(raw)) == 0


def test_compaction_continues_once_producer_state_is_stored(harness: Harness) -> None:
    engine, shard = harness.topic("settled", ("cleanup.policy", "compact"))
    producers = Producers(harness.store)
    pid, _ = producers.next_id()
    sent(producers, engine, shard, pid, range(3))
    producers.settle(shard)
    assert row_end(harness, shard) == 3
    engine.retain(1_700_000_000_000)
    assert [record.value for record in engine.read_by_offset(shard, 0).records()] == [b"2"]


def sent(producers: Producers, engine: SegmentEngine, shard: int, pid: int, sequences: range) -> list[bytes]:
    """Append batches of one record, all with the same key."""
    batches = [batch_of(b"%d" % sequence, producer=(pid, 0, sequence), key=b"same") for sequence in sequences]
    for raw in batches:
        assert producers.check(engine, shard, read_header(raw)) is None
        producers.appended(shard, read_header(raw), engine.append_kafka(shard, raw).base_offset)
    return batches


def row_end(harness: Harness, shard: int) -> int:
    raw = harness.store.get(Family.PRODUCERS, stream_keys.producers_key(shard))
    assert raw is not None
    return known_to(raw)


@pytest.mark.spec("B10")
@pytest.mark.parametrize("how", ["retention", "delete"])
def test_a_producer_is_known_after_a_restart_although_its_records_are_deleted(harness: Harness, how: str) -> None:
    engine, shard = harness.topic("short", ("retention.bytes", "0"))
    producers = Producers(harness.store)
    pid, _ = producers.next_id()
    before = sent(producers, engine, shard, pid, range(7))
    engine.append_kafka(shard, batch_of(b"somebody else's"))
    assert row_end(harness, shard) == 0, "the row was written before the first batch, and is behind"
    if how == "retention":
        engine.retain(1_700_000_000_000)
    else:
        assert engine.delete_records_before(shard, 8) == 8
    assert engine.shard_info(shard).start_offset == 8
    # The state after a kill: the state in memory is not written.
    again = Producers(harness.store)
    assert [again.check(engine, shard, read_header(raw)) for raw in before[2:]] == [2, 3, 4, 5, 6]
    with pytest.raises(Refused):
        again.check(engine, shard, read_header(batch_of(b"9", producer=(pid, 0, 9))))
    assert again.check(engine, shard, read_header(batch_of(b"7", producer=(pid, 0, 7)))) is None


def test_deleting_records_keeps_the_stored_producer_state(harness: Harness) -> None:
    engine, shard = harness.topic("known")
    producers = Producers(harness.store)
    pid, _ = producers.next_id()
    sent(producers, engine, shard, pid, range(3))
    producers.settle(shard)
    row = harness.store.get(Family.PRODUCERS, stream_keys.producers_key(shard))
    assert engine.delete_records_before(shard, 2) == 2
    assert harness.store.get(Family.PRODUCERS, stream_keys.producers_key(shard)) == row


@pytest.mark.promise("P1")
def test_a_producer_row_ahead_of_its_log_keeps_the_batches_in_the_log(harness: Harness) -> None:
    engine, shard = harness.topic("ahead")
    producers = Producers(harness.store)
    pid, _ = producers.next_id()
    other, _ = producers.next_id()
    gone, _ = producers.next_id()
    batches = sent(producers, engine, shard, pid, range(6))
    end = engine.shard_info(shard).next_offset
    ahead = Known({pid: Producer(0), other: Producer(0), gone: Producer(0)})
    # Two lost batches have displaced older ones from the row. For another producer the row has lost batches only.
    ahead[pid].batches.extend([(3, 3, 3), (4, 4, 4), (5, 5, 5), (6, 6, 6), (7, 7, 7)])
    ahead[other].batches.extend([(0, 0, 8)])
    ahead[gone].batches.extend([(8, 8, end - 1), (9, 9, end)])
    batch = Batch()
    batch.put(Family.PRODUCERS, stream_keys.producers_key(shard), encode_row(9, ahead))
    harness.store.write(batch)
    drop_lost_batches(harness.store, shard, end)
    raw = harness.store.get(Family.PRODUCERS, stream_keys.producers_key(shard))
    assert raw is not None
    known = recover(engine, shard, raw)
    assert {number: list(each.batches) for number, each in known.items()} == {
        pid: [(at, at, at) for at in range(1, 6)],
        gone: [(8, 8, end - 1)],
    }
    again = Producers(harness.store)
    assert again.check(engine, shard, read_header(batches[1])) == 1
    assert again.check(engine, shard, read_header(batch_of(b"6", producer=(pid, 0, 6)))) is None
    drop_lost_batches(harness.store, shard, end)
    assert again.check(engine, shard, read_header(batch_of(b"6", producer=(pid, 0, 6)))) is None


def test_sequence_numbers_wrap_around_at_their_maximum(harness: Harness) -> None:
    engine, shard = harness.topic("round")
    producers = Producers(harness.store)
    last = read_header(batch_of(b"a", b"b", producer=(5, 0, 0x7FFFFFFE)))
    assert producers.check(engine, shard, last) is None
    producers.appended(shard, last, 0)
    assert producers.check(engine, shard, read_header(batch_of(b"c", producer=(5, 0, 0)))) is None


def test_producer_rows_round_trip() -> None:
    producer = Producer(3)
    producer.batches.extend([(0, 4, 100), (5, 5, 105)])
    next_offset, known = decode_row(encode_row(106, Known({7: producer, 9: Producer(0)})))
    assert next_offset == 106
    assert [(number, each.epoch, list(each.batches)) for number, each in known.items()] == [
        (7, 3, [(0, 4, 100), (5, 5, 105)]),
        (9, 0, []),
    ]


def test_a_truncated_producer_row_is_reported() -> None:
    producer = Producer(3)
    producer.batches.append((0, 4, 100))
    raw = encode_row(106, Known({7: producer}))
    for size in range(len(raw)):
        with pytest.raises(CorruptionError, match="producer state row"):
            decode_row(raw[:size])


def test_topic_settings_have_the_names_of_kafka() -> None:
    given = [
        ("retention.ms", "-1"),
        ("cleanup.policy", "compact,delete"),
        ("segment.bytes", "1000"),
        ("retention.bytes", "5"),
    ]
    config = topic_config(given, 3, Durability.SYNCED)
    assert (config.partitions, config.retention_ms, config.retention_bytes) == (3, None, 5)
    assert config.compact
    assert config.index_keys
    assert config.of_shard().retention_bytes == 5
    alone = topic_config([("retention.bytes", "5"), ("cleanup.policy", "compact")], 1, Durability.SYNCED)
    assert (alone.compact, alone.retention_bytes, alone.of_shard().retention_bytes) == (True, 5, None)
    assert not topic_config((), 1, Durability.WRITTEN).index_keys
    for name, value in (("no.such", "1"), ("retention.ms", "soon"), ("message.timestamp.type", "never")):
        with pytest.raises(InvalidConfigError, match=name):
            topic_config([(name, value)], 1, Durability.SYNCED)
