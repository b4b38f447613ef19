"""Cursors into Kafka batches: small reads decode a batch once, and decompression bombs affect only their batch."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest
from tests.log_frames import encode_plain
from tests.unit.log.test_kafka import compressed
from tests.unit.streams.segment_rig import SegmentRig

from basaltmq.errors import DamagedFrameError, LimitExceededError
from basaltmq.log.batches import codecs, kafka
from basaltmq.log.batches.record import Record, StoredRecord
from basaltmq.streams import batch_cursor
from basaltmq.streams.adapter import IfAllOlder
from basaltmq.streams.batch_cursor import BatchCursor, Cursors

COUNT = 2_000
BOMB_BYTES = 40 << 20


def batch(count: int = COUNT, codec: int = codecs.GZIP) -> bytes:
    records = [Record(b"%d" % at, b"even" if at % 2 == 0 else b"odd", timestamp_ms=at) for at in range(count)]
    return compressed(codec, encode_plain(records))


def bomb() -> bytes:
    """Return a batch of 40 KB that decompresses to 40 MiB. Its first record is small."""
    return compressed(
        codecs.GZIP,
        encode_plain([Record(b"small", b"k", timestamp_ms=1), Record(bytes(BOMB_BYTES), b"k", timestamp_ms=1)]),
    )


@pytest.fixture
def decoded(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Count the decoded records."""
    seen: list[int] = []
    plain = kafka.RecordReader.__next__

    def counted(self: kafka.RecordReader) -> StoredRecord:
        record = plain(self)
        seen.append(record.offset)
        return record

    monkeypatch.setattr(kafka.RecordReader, "__next__", counted)
    return seen


@pytest.mark.parametrize("limit", [1, 7, 256])
def test_a_batch_is_decoded_once_for_reads_of_any_size(tmp_path: Path, decoded: list[int], limit: int) -> None:
    rig = SegmentRig(tmp_path)
    shard = rig.shard(index_keys=False)
    rig.engine.append_kafka(shard, batch())
    rig.engine.append_kafka(shard, batch(5))
    offset, found = 0, []
    while offset < COUNT + 5:
        read = rig.engine.read_by_offset(shard, offset, limit)
        found += [record.offset for record in read.records()]
        assert read.next_offset > offset
        offset = read.next_offset
    assert found == list(range(COUNT + 5))
    assert len(decoded) <= COUNT + 5 + 2
    decoded.clear()
    offset, values = 0, []
    while offset < COUNT:
        read = rig.engine.read_by_key(shard, b"odd", offset, limit)
        values += [record.offset for record in read.records()]
        offset = read.next_offset
    assert values[:1000] == list(range(1, COUNT, 2))
    assert len(decoded) <= COUNT + 10
    rig.close()


def test_concurrent_and_seeking_readers_see_the_same_records(tmp_path: Path) -> None:
    rig = SegmentRig(tmp_path)
    shard = rig.shard(index_keys=False)
    rig.engine.append_kafka(shard, batch())
    at = dict.fromkeys(range(5), 0)
    while any(offset < COUNT for offset in at.values()):
        for reader, offset in at.items():
            read = rig.engine.read_by_offset(shard, offset, 50 + reader)
            assert [record.value for record in read.records()] == [b"%d" % n for n in range(offset, read.next_offset)]
            at[reader] = read.next_offset
    for offset in (1999, 3, 1000, 4):
        assert rig.engine.read_by_offset(shard, offset, 1).records()[0].offset == offset
        arrow = rig.engine.read_by_offset(shard, offset, 3).arrow()
        assert arrow.column("offset").to_pylist() == list(range(offset, min(COUNT, offset + 3)))
    rig.engine.delete_by_offset(shard, [5, 7])
    assert [record.offset for record in rig.engine.read_by_offset(shard, 4, 3).records()] == [4, 6, 8]
    assert rig.engine.get_offset_by_timestamp(shard, 1234, IfAllOlder.LATEST) == 1234
    rig.close()


@pytest.mark.promise("P8")
def test_cursors_are_bounded_by_number_and_bytes() -> None:
    raw = batch(100)
    cursors = Cursors(count_max=3, bytes_max=1 << 30)
    for position in range(10):
        cursors.save(1, position, BatchCursor(raw, 1 << 20))
    assert [cursors.take(1, position, 0) is not None for position in range(10)] == [False] * 7 + [True] * 3
    assert cursors.take(1, 9, 0) is None, "a cursor has one reader"
    cursors = Cursors(bytes_max=2 * (len(raw) + batch_cursor.CURSOR_BYTES))
    for position in range(10):
        cursors.save(1, position, BatchCursor(raw, 1 << 20))
    assert sum(cursors.take(1, position, 0) is not None for position in range(10)) == 2


@pytest.mark.promise("P8")
def test_a_decompression_bomb_is_named_skipped_and_returned_unchanged_to_kafka_clients(tmp_path: Path) -> None:
    rig = SegmentRig(tmp_path)
    shard = rig.shard(index_keys=False, compact=True)
    rig.engine.append_kafka(shard, batch(3))
    sent = bomb()
    rig.engine.append_kafka(shard, sent)
    rig.engine.append_kafka(shard, batch(3))
    read = rig.engine.read_by_offset(shard, 0, 100)
    assert [record.offset for record in read.records()] == [0, 1, 2, 3]
    assert read.next_offset == 4
    with pytest.raises(
        DamagedFrameError, match=r"offset 4 has \d+ bytes when decompressed.*max\.message\.bytes"
    ) as caught:
        rig.engine.read_by_offset(shard, 4, 1)
    assert (caught.value.base_offset, caught.value.last_offset) == (4, 4)
    assert [record.offset for record in rig.engine.read_by_offset(shard, 5, 9).records()] == [5, 6, 7]
    assert [each[8:] for each in rig.engine.read_kafka(shard, 0, 1 << 30).batches][1] == sent[8:]
    with pytest.raises(DamagedFrameError):
        rig.engine.read_by_key(shard, b"k", 4, 1)
    assert rig.engine.get_offset_by_timestamp(shard, 1, IfAllOlder.LATEST) == 1
    rig.engine.delete_records_before(shard, 4)
    assert rig.engine.get_offset_by_timestamp(shard, 1, IfAllOlder.LATEST) == 4
    rig.engine.delete_by_offset(shard, [4])
    assert rig.engine.read_kafka(shard, 4, 1 << 30).batches[0][8:] == sent[8:]
    rig.close()


@pytest.mark.promise("P8")
def test_compaction_does_not_change_a_decompression_bomb(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    rig = SegmentRig(tmp_path)
    shard = rig.shard(index_keys=False, compact=True)
    for _ in range(3):
        rig.engine.append_kafka(shard, batch(3))
    rig.engine.append_kafka(shard, bomb())
    rig.engine.append_kafka(shard, batch(3))
    with caplog.at_level(logging.ERROR):
        for _ in range(20):
            rig.engine.retain(rig.now_ms)
    assert "compaction" in caplog.text
    assert len(rig.engine.read_kafka(shard, 9, 1 << 30).batches) == 2
    rig.close()


def test_a_decompression_bomb_is_refused_with_a_key_index(tmp_path: Path) -> None:
    rig = SegmentRig(tmp_path)
    shard = rig.shard(index_keys=True)
    with pytest.raises(LimitExceededError, match=r"max\.message\.bytes"):
        rig.engine.append_kafka(shard, bomb())
    assert rig.engine.append_kafka(shard, batch(3)).base_offset == 0
    rig.close()
