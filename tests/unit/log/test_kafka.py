"""Kafka record batches: checks, base offsets, and decoding."""

from __future__ import annotations

import gzip
import tracemalloc
from struct import pack, pack_into

import google_crc32c
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.log_frames import encode_plain

from basaltmq.errors import (
    CorruptionError,
    InvalidArgumentError,
    LimitExceededError,
    TimestampRangeError,
    UnsupportedCodecError,
)
from basaltmq.log.arrow import to_arrow
from basaltmq.log.batches import codecs, kafka
from basaltmq.log.batches.record import TIMESTAMP_MS_MAX, Record, StoredRecord

KNOWN = bytes.fromhex(
    "0000000000000000 0000003b 00000001 02 0318a270 0000 00000000 0000015dff7b063c 0000015dff7b063c"
    "ffffffffffffffff ffff ffffffff 00000001 12 00 00 00 01 06 313233 00"
)
"""One record with value 123 and no key, as sent by a Kafka client."""

RECORDS = st.lists(
    st.builds(
        Record,
        st.binary(max_size=200),
        st.none() | st.binary(max_size=20),
        st.lists(st.tuples(st.text(max_size=5), st.binary(max_size=9)), max_size=3).map(tuple),
        timestamp_ms=st.integers(0, 1 << 45),
    ),
    min_size=1,
    max_size=30,
)


def stored(records: list[Record], base: int = 0) -> list[StoredRecord]:
    return [
        StoredRecord(each.value, each.key, each.headers, (), each.timestamp_ms, 0, offset=base + at)
        for at, each in enumerate(records)
    ]


def compressed(codec: int, raw: bytes, content: bytes | None = None) -> bytes:
    """Return an uncompressed batch with its records, or `content`, as compressed data."""
    records = raw[kafka.HEADER_BYTES :]
    if content is None:
        if codec == codecs.NONE:
            content = records
        elif codec == codecs.GZIP:
            content = gzip.compress(records)
        else:
            pa = pytest.importorskip("pyarrow")
            content = pa.compress(records, codec={2: "snappy", 3: "lz4", 4: "zstd"}[codec], asbytes=True)
    batch = bytearray(raw[: kafka.HEADER_BYTES] + content)
    pack_into(">h", batch, 21, codec)
    return resealed(batch)


def resealed(batch: bytearray) -> bytes:
    """Return the batch with a correct length and checksum."""
    pack_into(">i", batch, 8, len(batch) - 12)
    pack_into(">I", batch, 17, google_crc32c.value(bytes(batch[21:])))
    return bytes(batch)


@pytest.mark.spec("B6")
def test_a_batch_from_a_kafka_client_is_read_and_written_byte_for_byte() -> None:
    header = kafka.check_batch(KNOWN)
    assert (header.records, header.max_timestamp_ms, header.size_bytes) == (1, 1503229838908, len(KNOWN))
    found = kafka.records(KNOWN)
    assert found == [StoredRecord(b"123", None, (), (), 1503229838908, 0, offset=0)]
    assert kafka.encode_records(found, leader_epoch=1) == KNOWN


@pytest.mark.spec("B6")
@given(RECORDS, st.integers(0, 1 << 50), st.sampled_from([0, codecs.GZIP]))
def test_records_with_any_content_survive_a_round_trip(records: list[Record], base: int, codec: int) -> None:
    raw = encode_plain(records)
    if codec:
        raw = compressed(codec, raw)
    batch = kafka.incoming(raw, 5).placed(base)
    assert kafka.records(batch.body) == stored(records, base)
    assert kafka.check_batch(batch.body).base_offset == base, "the checksum does not cover the base offset"
    columns = kafka.columns(batch.body)
    assert columns.records(base) == stored(records, base)
    assert batch.timestamp_max_ms == max(each.timestamp_ms for each in records)
    assert kafka.encode_records(kafka.records(batch.body)) == encode_plain(records, base)


@pytest.mark.parametrize("codec", [codecs.GZIP, codecs.SNAPPY, codecs.LZ4, codecs.ZSTD])
def test_every_kafka_codec_is_decompressed(codec: int) -> None:
    records = [Record(b"value %d" % at * 20, b"k", timestamp_ms=at) for at in range(300)]
    raw = encode_plain(records)
    small = compressed(codec, raw)
    assert len(small) < len(raw) // 3
    assert kafka.records(small) == stored(records)
    for content in (b"", b"no such thing", small[61:-3], b"\xff" * 40):
        with pytest.raises(CorruptionError):
            kafka.records(compressed(codec, raw, content))


def test_snappy_in_java_framing_is_decompressed() -> None:
    pa = pytest.importorskip("pyarrow")
    records = [Record(b"value" * 50, timestamp_ms=1)] * 20
    raw = encode_plain(records)
    content = b"\x82SNAPPY\x00" + pack(">ii", 1, 1)
    plain = raw[61:]
    for begin in range(0, len(plain), 700):
        block = pa.compress(plain[begin : begin + 700], codec="snappy", asbytes=True)
        content += pack(">i", len(block)) + block
    assert kafka.records(compressed(codecs.SNAPPY, raw, content)) == stored(records)
    for wrong in (content[:-1], content + b"\x00", content[:16] + pack(">i", -5), content[:16] + pack(">i", 9)):
        with pytest.raises(CorruptionError):
            kafka.records(compressed(codecs.SNAPPY, raw, wrong))


@pytest.mark.promise("P8")
@pytest.mark.parametrize("codec", [codecs.GZIP, codecs.SNAPPY, codecs.LZ4, codecs.ZSTD])
def test_a_batch_that_decompresses_beyond_the_limit_is_refused(codec: int, monkeypatch: pytest.MonkeyPatch) -> None:
    raw = encode_plain([Record(bytes(200_000), timestamp_ms=1)] * 10)
    bomb = compressed(codec, raw)
    monkeypatch.setattr(kafka, "DECOMPRESSED_BYTES_MIN", 1_000_000)
    with pytest.raises(LimitExceededError, match="1000000 bytes"):
        kafka.records(bomb, 300_000)
    monkeypatch.setattr(kafka, "DECOMPRESSED_BYTES_MIN", 3_000_000)
    with pytest.raises(LimitExceededError, match=r"offset 0 has 2000\d\d bytes"):
        kafka.records(bomb, 100_000)
    assert len(kafka.records(bomb, 2_000_000)) == 10
    assert len(kafka.records(raw, 1)) == 10, "an uncompressed batch has no limit here"


@pytest.mark.parametrize("codec", [codecs.GZIP, codecs.SNAPPY, codecs.LZ4, codecs.ZSTD])
@pytest.mark.promise("P8")
def test_a_decompression_bomb_uses_only_one_piece_of_memory(codec: int) -> None:
    raw = encode_plain([Record(b"x", timestamp_ms=1), Record(bytes(40 << 20), timestamp_ms=1)])
    bomb = compressed(codec, raw)
    del raw
    pa = pytest.importorskip("pyarrow")
    before = pa.default_memory_pool().max_memory()
    tracemalloc.start()
    try:
        with pytest.raises(LimitExceededError):
            kafka.columns(bomb)
        peak = tracemalloc.get_traced_memory()[1] + pa.default_memory_pool().max_memory() - before
    finally:
        tracemalloc.stop()
    assert peak < 4 << 20


@pytest.mark.parametrize("codec", [codecs.NONE, codecs.GZIP, codecs.SNAPPY, codecs.LZ4, codecs.ZSTD])
def test_a_reader_can_start_at_any_offset(codec: int) -> None:
    records = [Record(b"%d" % at * (at % 97), b"k" if at % 3 else None, timestamp_ms=at) for at in range(3000)]
    raw = kafka.incoming(compressed(codec, encode_plain(records)), 5).placed(1000).body
    expected = stored(records, 1000)
    for begin in (0, 1, 999, 2999, 3000, 4000):
        reader = kafka.RecordReader(raw)
        reader.skip_to(1000 + begin)
        assert list(reader) == expected[begin:]


def test_a_batch_over_the_record_limit_is_refused_and_a_stored_one_is_read() -> None:
    raw = encode_plain([Record(b"", timestamp_ms=1)] * (kafka.RECORDS_MAX + 1))
    with pytest.raises(InvalidArgumentError, match="100000"):
        kafka.check_batch(raw)
    assert len(kafka.records(raw)) == kafka.RECORDS_MAX + 1, "a stored batch over the limit is read"


def test_an_unknown_codec_is_named_in_the_error() -> None:
    with pytest.raises(UnsupportedCodecError, match="compression 6"):
        kafka.records(compressed(6, encode_plain([Record(b"x", timestamp_ms=1)]), b"?"))


@pytest.mark.promise("P7")
def test_every_changed_or_missing_byte_is_detected() -> None:
    raw = encode_plain([Record(b"value", b"key", (("h", b"v"),), timestamp_ms=7), Record(b"", timestamp_ms=3)])
    for at in range(len(raw)):
        changed = bytearray(raw)
        changed[at] ^= 0x11
        if at < 8 or 12 <= at < 16:
            # The broker sets the base offset and the leader epoch.
            assert kafka.incoming(bytes(changed), 0).count == 2
            continue
        with pytest.raises((CorruptionError, InvalidArgumentError)):
            kafka.incoming(bytes(changed), 0)
    for size in range(len(raw)):
        with pytest.raises((CorruptionError, InvalidArgumentError)):
            kafka.incoming(raw[:size], 0)
    with pytest.raises(CorruptionError):
        kafka.incoming(raw + b"\x00", 0)


@pytest.mark.promise("P7")
@given(st.data())
def test_inconsistent_records_raise_only_the_documented_errors(data: st.DataObject) -> None:
    raw = bytearray(encode_plain([Record(b"value", b"key", (("h", b"v"),), timestamp_ms=7)] * 3))
    for _ in range(data.draw(st.integers(1, 4))):
        raw[data.draw(st.integers(57, len(raw) - 1))] = data.draw(st.integers(0, 255))
    try:
        found = kafka.columns(resealed(raw))
    except CorruptionError:
        return
    except (InvalidArgumentError, LimitExceededError):
        return
    assert found.count >= 1


def test_wrong_counts_formats_and_times_are_refused() -> None:
    raw = encode_plain([Record(b"x", timestamp_ms=1)] * 2)
    for place, form, number in ((57, ">i", 0), (57, ">i", -1), (57, ">i", 9), (23, ">i", 7), (16, ">b", 1)):
        changed = bytearray(raw)
        pack_into(form, changed, place, number)
        with pytest.raises(InvalidArgumentError):
            kafka.incoming(resealed(changed), 0)
    for place, time_ms in ((27, -5), (35, -5), (27, TIMESTAMP_MS_MAX + 1), (35, 1 << 62)):
        changed = bytearray(raw)
        pack_into(">q", changed, place, time_ms)
        with pytest.raises(TimestampRangeError, match=f"timestamp {time_ms} of a record batch is out of range"):
            kafka.incoming(resealed(changed), 0)


def test_a_batch_with_a_time_outside_its_header_range_stays_readable() -> None:
    raw = bytearray(encode_plain([Record(b"x", timestamp_ms=1), Record(b"y", timestamp_ms=1 << 60)]))
    pack_into(">q", raw, 35, 1)
    batch = kafka.incoming(resealed(raw), 0)
    assert [record.timestamp_ms for record in kafka.records(batch.body)] == [1, TIMESTAMP_MS_MAX]
    assert to_arrow(kafka.columns(batch.body), 0).column("timestamp").cast("int64").to_pylist() == [1, TIMESTAMP_MS_MAX]


def test_null_values_and_headers_stay_null() -> None:
    plain = [Record(None, b"k", (("h", None), ("e", b"")), timestamp_ms=1), Record(b"", None, timestamp_ms=1)]
    raw = encode_plain(plain)
    assert [(each.value, each.key, each.headers) for each in kafka.records(raw)] == [
        (None, b"k", (("h", None), ("e", b""))),
        (b"", None, ()),
    ]
    rows = to_arrow(kafka.columns(raw), 0).to_pylist()
    assert [row["value"] for row in rows] == [None, b""]
    assert rows[0]["headers"] == [{"key": "h", "value": None}, {"key": "e", "value": b""}]


def test_log_append_time_sets_the_time_of_every_record_with_a_valid_checksum() -> None:
    raw = encode_plain([Record(b"x", timestamp_ms=1), Record(b"y", timestamp_ms=2)])
    batch = kafka.incoming(raw, 99, is_append_time=True)
    assert kafka.check_batch(batch.body).attributes & kafka.LOG_APPEND_TIME
    assert [record.timestamp_ms for record in kafka.records(batch.body)] == [99, 99]
    assert (batch.timestamp_min_ms, batch.timestamp_max_ms) == (99, 99)


def test_control_batches_use_offsets_and_have_no_records() -> None:
    raw = bytearray(encode_plain([Record(b"\x00\x00\x00\x00\x00\x00", b"\x00\x00\x00\x01", timestamp_ms=1)]))
    pack_into(">h", raw, 21, kafka.CONTROL | kafka.TRANSACTIONAL)
    batch = kafka.incoming(resealed(raw), 0)
    assert (batch.count, batch.offsets) == (0, 1)
