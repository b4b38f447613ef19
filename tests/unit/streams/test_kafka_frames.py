"""Kafka record batches in shards of the segment engine."""

from __future__ import annotations

import random
from pathlib import Path
from struct import pack_into

import pytest
from tests.log_frames import encode_plain
from tests.unit.log.strategies import transactional
from tests.unit.log.test_kafka import compressed, resealed
from tests.unit.streams.segment_rig import SegmentRig

from basaltmq.durability import Durability
from basaltmq.errors import (
    CorruptionError,
    DamagedFrameError,
    LimitExceededError,
    OffsetOutOfRangeError,
    UnsupportedCodecError,
)
from basaltmq.log.batches import codecs, kafka
from basaltmq.log.batches.record import Record
from basaltmq.log.kafka_run import LARGE_BYTES, PIECE_BYTES
from basaltmq.log.verify import verify_log
from basaltmq.streams.adapter import BATCH_BYTES_MAX, IfAllOlder
from basaltmq.streams.engines.segment.kafka import KafkaRead

SEED = 20_261_116


def batch(*values: bytes, key: bytes | None = None, time_ms: int = 1) -> bytes:
    return encode_plain([Record(value, key, timestamp_ms=time_ms) for value in values])


def control() -> bytes:
    raw = bytearray(batch(b"\x00\x00\x00\x00\x00\x00"))
    pack_into(">h", raw, 21, kafka.CONTROL | kafka.TRANSACTIONAL)
    return resealed(raw)


@pytest.mark.spec("B2", "B6")
def test_a_batch_is_readable_unchanged_as_records_and_as_arrow(tmp_path: Path) -> None:
    rig = SegmentRig(tmp_path)
    shard = rig.shard(index_keys=False)
    rig.put(shard, b"ours")
    sent = compressed(codecs.GZIP, batch(b"one", b"two"))
    append = rig.engine.append_kafka(shard, sent)
    assert (append.base_offset, append.last_offset) == (1, 2)
    found = rig.engine.read_kafka(shard, 0)
    ours, theirs = found.batches
    assert theirs[8:] == sent[8:], "only the base offset differs"
    assert kafka.check_batch(theirs).base_offset == 1
    assert [record.value for record in kafka.records(ours)] == [b"ours"]
    assert (found.next_offset, found.high_watermark) == (3, 3)
    read = rig.engine.read_by_offset(shard, 0)
    assert [(record.offset, record.value) for record in read.records()] == [(0, b"ours"), (1, b"one"), (2, b"two")]
    assert read.arrow().column("value").to_pylist() == [b"ours", b"one", b"two"]
    assert rig.engine.read_by_offset(shard, 2).records()[0].value == b"two"
    assert rig.engine.read_kafka(shard, 2).batches == [theirs], "a batch is never split"
    assert rig.engine.read_kafka(shard, 3) == KafkaRead([], 3, 0, 3)
    assert verify_log(tmp_path / "log") == []
    rig.close()


@pytest.mark.spec("B2")
def test_batches_are_returned_up_to_a_size_and_at_least_one(tmp_path: Path) -> None:
    rig = SegmentRig(tmp_path)
    shard = rig.shard(index_keys=False)
    sent = [batch(bytes(100) * (at + 1)) for at in range(6)]
    for each in sent:
        rig.engine.append_kafka(shard, each)
    at = 0
    seen: list[bytes] = []
    while (found := rig.engine.read_kafka(shard, at, 400)).batches:
        assert len(found.batches) == 1 or sum(map(len, found.batches)) <= 400
        seen += found.batches
        at = found.next_offset
    assert [each[8:] for each in seen] == [each[8:] for each in sent]
    rig.close()


@pytest.mark.promise("P3")
def test_records_at_or_above_the_high_watermark_are_not_read(tmp_path: Path) -> None:
    rig = SegmentRig(tmp_path)
    shard = rig.shard(index_keys=False)
    rig.engine.append_kafka(shard, batch(b"a"))
    waiting = rig.engine.append_kafka(shard, batch(b"b"), Durability.SYNCED)
    assert len(rig.engine.read_kafka(shard, 0).batches) == 1
    rig.engine.wait(waiting)
    assert len(rig.engine.read_kafka(shard, 0).batches) == 2
    rig.close()


@pytest.mark.spec("B2")
@pytest.mark.promise("P6")
@pytest.mark.parametrize("index_keys", [False, True])
def test_lookups_deletes_trims_and_rebuilds_work_on_kafka_batches(tmp_path: Path, index_keys: bool) -> None:
    rig = SegmentRig(tmp_path, segment_bytes=700)
    shard = rig.shard(index_keys=index_keys)
    for at in range(20):
        rig.engine.append_kafka(shard, batch(b"%d" % at, b"%d+" % at, key=b"k%d" % (at % 3), time_ms=1000 + at))
        if at % 5 == 0:
            rig.put(shard, Record(b"ours", b"k1", timestamp_ms=1))
            rig.engine.append_kafka(shard, control())
    by_key = rig.engine.read_by_key(shard, b"k1", 0).records()
    assert {record.key for record in by_key} == {b"k1"}
    assert len(by_key) == 14 + 4
    assert rig.engine.get_offset_by_timestamp(shard, 1003, IfAllOlder.LATEST) == 8
    assert rig.engine.delete_by_key(shard, b"k2") == 12
    assert rig.engine.delete_by_offset(shard, [0]) == 1
    first = rig.engine.read_kafka(shard, 0).batches[0]
    assert [(record.offset, record.value) for record in kafka.records(first)] == [(1, b"0+")]
    rig.engine.delete_records_before(shard, 9)
    with pytest.raises(OffsetOutOfRangeError):
        rig.engine.read_kafka(shard, 8)
    rig.clean()
    before = rig.rows()
    drained = rig.drained(shard)
    assert [record.offset for record in drained] == sorted(record.offset for record in drained)
    assert rig.rebuilt() == before
    assert rig.drained(shard) == drained
    through_kafka = [
        record
        for each in rig.engine.read_kafka(shard, 9, 1 << 20).batches
        if not kafka.read_header(each).is_control
        for record in kafka.records(each)
        if record.offset >= 9
    ]
    assert through_kafka == drained
    rig.close()


@pytest.mark.spec("B5")
@pytest.mark.promise("P6")
def test_compaction_keeps_the_latest_of_each_key(tmp_path: Path) -> None:
    rig = SegmentRig(tmp_path, segment_bytes=700)
    shard = rig.shard(compact=True)
    rng = random.Random(5)
    latest: dict[bytes, bytes] = {}
    for at in range(30):
        key = b"k%d" % rng.randrange(4)
        latest[key] = b"%d" % at
        rig.engine.append_kafka(shard, batch(latest[key], key=key))
    rig.put(shard, Record(b"end", b"end"))
    for _ in range(10):
        rig.now_ms += 10**9
        rig.engine.retain(rig.now_ms)
    kept: dict[bytes | None, bytes] = {}
    for record in rig.drained(shard):
        assert record.key not in kept or record.key == b"end"
        kept[record.key] = record.value or b""
    assert kept == {**latest, b"end": b"end"}
    before = rig.rows()
    assert rig.rebuilt() == before
    rig.close()


@pytest.mark.promise("P6", "P9")
def test_a_crash_loses_nothing_and_batches_are_not_decoded_without_a_key_index(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rig = SegmentRig(tmp_path, segment_bytes=700)
    shard = rig.shard(index_keys=False)
    monkeypatch.setattr(kafka, "RecordReader", lambda *_: pytest.fail("looked into a batch"))
    sent = [compressed(6, batch(b"opaque"), bytes(50 + at)) for at in range(12)]
    for each in sent:
        rig.engine.append_kafka(shard, each)
    rig.engine.delete_records_before(shard, 2)
    before = rig.rows()
    rig.crash()
    rig.open()
    assert rig.rebuilt() == before
    rig.engine.retain(rig.now_ms)
    assert [each[8:] for each in rig.engine.read_kafka(shard, 2, 1 << 20).batches] == [each[8:] for each in sent[2:]]
    assert verify_log(tmp_path / "log") == []
    rig.close()


def test_invalid_batches_are_refused_and_nothing_is_appended(tmp_path: Path) -> None:
    rig = SegmentRig(tmp_path)
    shard = rig.shard()
    good = batch(b"x")
    for raw, error in (
        (good[:-1], CorruptionError),
        (good[:-1] + b"?", CorruptionError),
        (compressed(6, good, b"??"), UnsupportedCodecError),
        (compressed(codecs.GZIP, good, b"??"), CorruptionError),
        (bytes(BATCH_BYTES_MAX + 1), LimitExceededError),
    ):
        with pytest.raises(error):
            rig.engine.append_kafka(shard, raw)
    assert rig.engine.shard_info(shard).next_offset == 0
    assert rig.engine.append_kafka(shard, good).base_offset == 0
    rig.close()


@pytest.mark.promise("P7")
def test_a_damaged_batch_is_named_and_its_neighbours_are_read(tmp_path: Path) -> None:
    rig = SegmentRig(tmp_path)
    shard = rig.shard(index_keys=False)
    for at in range(3):
        rig.engine.append_kafka(shard, batch(b"%d" % at))
    entry = next(rig.engine.index.entries(shard, 1))
    path = next((tmp_path / "log" / "0000").glob("*.log"))
    raw = bytearray(path.read_bytes())
    raw[entry.position + 100] ^= 1
    path.write_bytes(raw)
    found = rig.engine.read_kafka(shard, 0)
    assert (len(found.batches), found.next_offset) == (1, 1)
    with pytest.raises(DamagedFrameError, match="offsets 1 to 1"):
        rig.engine.read_kafka(shard, 1)
    assert len(rig.engine.read_kafka(shard, 2).batches) == 1
    rig.close()


@pytest.mark.promise("P7")
@pytest.mark.parametrize("damaged", [(0,), (1, 2), (3,), (0, 1, 2, 3)])
def test_damaged_batches_are_skipped_on_request_and_counted(tmp_path: Path, damaged: tuple[int, ...]) -> None:
    rig = SegmentRig(tmp_path)
    shard = rig.shard(index_keys=False)
    for at in range(4):
        rig.engine.append_kafka(shard, batch(b"%d" % at))
    path = next((tmp_path / "log" / "0000").glob("*.log"))
    raw = bytearray(path.read_bytes())
    for each in damaged:
        raw[next(rig.engine.index.entries(shard, each)).position + 100] ^= 1
    path.write_bytes(raw)
    found = []
    skipped: list[tuple[int, int]] = []
    at = 0
    while at < 4:
        read = rig.engine.read_kafka(shard, at, is_skipping=True)
        assert read.next_offset > at
        found += [each.offset for batch_ in read.batches for each in kafka.records(batch_)]
        skipped += read.skipped
        at = read.next_offset
    assert found == [each for each in range(4) if each not in damaged]
    assert skipped == [(each, each) for each in damaged]
    frames = rig.engine.damaged_frames.values()
    assert [(each.shard, each.base_offset, each.last_offset) for each in frames] == [(shard, *at) for at in skipped]
    rig.close()


@pytest.mark.promise("P7")
def test_a_batch_of_another_topic_at_an_indexed_position_is_damage(tmp_path: Path) -> None:
    rig = SegmentRig(tmp_path)
    shards = [rig.shard(index_keys=False) for _ in range(2)]
    for shard in shards:
        rig.engine.append_kafka(shard, batch(b"%d" % shard))
    ours, theirs = (next(rig.engine.index.entries(shard, 0)) for shard in shards)
    path = next((tmp_path / "log" / "0000").glob("*.log"))
    raw = path.read_bytes()
    frames = [raw[each.position : each.position + each.size_bytes] for each in (ours, theirs)]
    assert len(frames[0]) == len(frames[1])
    path.write_bytes(frames[1] + frames[0])
    with pytest.raises(DamagedFrameError, match="the index points to a different frame"):
        rig.engine.read_kafka(shards[0], 0)
    rig.close()


@pytest.mark.promise("P7")
def test_a_damaged_batch_does_not_hide_the_state_of_other_producers(tmp_path: Path) -> None:
    rig = SegmentRig(tmp_path)
    shard = rig.shard(index_keys=False)
    for producer in (1, 2, 3):
        rig.engine.append_kafka(shard, transactional(producer, 0, b"x"))
    path = next((tmp_path / "log" / "0000").glob("*.log"))
    raw = bytearray(path.read_bytes())
    raw[next(rig.engine.index.entries(shard, 1)).position + 100] ^= 1
    path.write_bytes(raw)
    assert [each.producer_id for each in rig.engine.producers_batches(shard, 0)] == [1, 3]
    assert len(rig.engine.damaged_frames) == 1
    rig.close()


@pytest.mark.spec("B2")
def test_every_batch_is_read_once_with_any_limits_and_sizes(tmp_path: Path) -> None:
    rng = random.Random(SEED)
    rig = SegmentRig(tmp_path, segment_bytes=1 << 20)
    shards = [rig.shard(index_keys=False), rig.shard(index_keys=False)]
    sent: dict[int, list[tuple[int, bytes]]] = {shard: [] for shard in shards}
    shard = shards[0]
    for _ in range(250):
        shard = rng.choice((shard, shard, shard, *shards))
        if rng.random() < 0.05:
            offset = rig.put(shard, Record(b"ours", timestamp_ms=1))
            sent[shard].append((offset, b"ours"))
            continue
        size = rng.choice((1, 50, 900, 900, LARGE_BYTES - 150, LARGE_BYTES, 3 * PIECE_BYTES))
        values = [rng.randbytes(1), bytes(size)]
        offset = rig.engine.append_kafka(shard, batch(*values)).base_offset
        sent[shard] += zip((offset, offset + 1), values, strict=True)
    for shard in shards:
        for bytes_max in (-1, 0, 61, 1_000, 2 * LARGE_BYTES, PIECE_BYTES + 77, 1 << 20, 64 << 20):
            at = 0
            found: list[tuple[int, bytes]] = []
            while (read := rig.engine.read_kafka(shard, at, bytes_max)).batches:
                size = sum(map(len, read.batches))
                assert len(read.batches) == 1 or size <= bytes_max, f"seed {SEED}: {size} bytes"
                found += [(each.offset, (each.value or b"")) for raw in read.batches for each in kafka.records(raw)]
                assert found[-1][0] == read.next_offset - 1, f"seed {SEED}"
                at = read.next_offset
            assert found == sent[shard], f"seed {SEED}, {bytes_max} bytes at once"
        inside = rng.randrange(len(sent[shard]))
        first = kafka.read_header(rig.engine.read_kafka(shard, inside).batches[0])
        assert first.base_offset <= inside <= first.base_offset + first.last_offset_delta, f"seed {SEED}"
    rig.close()


@pytest.mark.promise("P7")
@pytest.mark.parametrize("size", [10, 2 * LARGE_BYTES])
def test_damage_is_named_when_a_reader_continues_at_a_bookmark(tmp_path: Path, size: int) -> None:
    rig = SegmentRig(tmp_path, segment_bytes=1 << 20)
    shard = rig.shard(index_keys=False)
    for _ in range(4):
        rig.engine.append_kafka(shard, batch(bytes(size)))
    entry = next(rig.engine.index.entries(shard, 2))
    path = next((tmp_path / "log" / "0000").glob("*.log"))
    raw = bytearray(path.read_bytes())
    raw[entry.position + entry.size_bytes - 10] ^= 1
    path.write_bytes(raw)
    assert rig.engine.read_kafka(shard, 0, 1).next_offset == 1
    assert rig.engine.read_kafka(shard, 1, 1).next_offset == 2
    with pytest.raises(DamagedFrameError, match="offsets 2 to 2"):
        rig.engine.read_kafka(shard, 2, 1)
    assert rig.engine.read_kafka(shard, 3).next_offset == 4
    rig.close()
