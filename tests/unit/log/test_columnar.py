"""The columnar body: round trips, and invalid bytes."""

from __future__ import annotations

from struct import pack_into

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.unit.log.strategies import BATCHES

from basaltmq.errors import CorruptionError, LimitExceededError
from basaltmq.log.batches import columnar
from basaltmq.log.batches.columnar import ColumnBatch
from basaltmq.log.batches.record import RECORD_BYTES_MAX, UNSTAMPED, Record, StoredRecord, record_size_bytes


def stored(records: list[Record], base: int) -> list[StoredRecord]:
    return [
        StoredRecord(r.value, r.key, r.headers, r.tags, r.timestamp_ms, r.expire_at_ms, offset=base + at)
        for at, r in enumerate(records)
    ]


def sample() -> ColumnBatch:
    return ColumnBatch.from_records(
        [
            Record(b"one", b"k", (("h", b"1"), ("", b"")), (b"t\0", b"u"), 5, 9),
            Record(b"", None, (), (), 4),
            Record(b"three", b"", (("x", b"y"),), (b"",), 6),
        ],
        0,
    )


@pytest.mark.spec("B6")
@given(BATCHES, st.integers(0, 1 << 40))
def test_records_survive_a_round_trip(records: list[Record], base: int) -> None:
    batch = ColumnBatch.from_records(records, 0)
    again = ColumnBatch.decode(batch.body, verified=False)
    assert again.records(base) == batch.records(base) == stored(records, base)
    assert again.timestamp_min_ms == batch.timestamp_min_ms == min(r.timestamp_ms for r in records)
    assert again.timestamp_max_ms == batch.timestamp_max_ms == max(r.timestamp_ms for r in records)
    assert again.sizes() == [record_size_bytes(r) for r in records]
    assert again.distinct_keys() == {r.key for r in records if r.key is not None}
    assert again.distinct_tags() == {tag for r in records for tag in r.tags}
    assert all(begin % 8 == 0 for begin, _ in again.extents.values())
    assert len(batch.body) % 8 == 0


@given(BATCHES, st.data())
def test_a_selection_keeps_the_offsets_of_its_records(records: list[Record], data: st.DataObject) -> None:
    kept = data.draw(st.lists(st.booleans(), min_size=len(records), max_size=len(records)))
    chosen = ColumnBatch.from_records(records, 0).select(kept)
    expected = [record for record, keep in zip(stored(records, 7), kept, strict=True) if keep]
    if not expected:
        assert chosen is None
        return
    assert chosen is not None
    again = ColumnBatch.decode(chosen.body, verified=False)
    assert again.records(7) == expected
    assert again.last_delta == expected[-1].offset - 7


def test_records_without_a_time_get_the_stamp() -> None:
    batch = ColumnBatch.from_records([Record(b"a"), Record(b"b", timestamp_ms=3)], 77)
    assert list(batch.timestamps()) == [77, 3]
    assert UNSTAMPED not in batch.timestamps()


def test_absent_columns_use_no_bytes() -> None:
    batch = ColumnBatch.from_records([Record(b"abc", timestamp_ms=1)] * 3, 0)
    assert sorted(batch.extents) == [columnar.VALUE_OFFSETS, columnar.VALUE_DATA, columnar.TIMESTAMPS]


@pytest.mark.promise("P7")
def test_every_truncation_of_a_body_is_refused() -> None:
    body = sample().body
    for length in range(len(body)):
        with pytest.raises(CorruptionError):
            ColumnBatch.decode(body[:length], verified=False)
    with pytest.raises(CorruptionError):
        ColumnBatch.decode(body + bytes(8), verified=True)


@pytest.mark.promise("P7")
@settings(max_examples=300)
@given(st.data())
def test_invalid_bytes_raise_corruption_or_decode_within_the_body(data: st.DataObject) -> None:
    body = bytearray(sample().body)
    for _ in range(data.draw(st.integers(1, 4))):
        at = data.draw(st.integers(0, len(body) - 4))
        pack_into("<i", body, at, data.draw(st.integers(-(1 << 31), (1 << 31) - 1) | st.integers(0, 300)))
    try:
        batch = ColumnBatch.decode(bytes(body), verified=False)
        records = batch.records(0)
    except CorruptionError:
        return
    assert len(records) == batch.count
    assert sum(map(record_size_bytes, records)) <= len(body)


@pytest.mark.promise("P7")
@settings(max_examples=200)
@given(st.binary(max_size=200))
def test_random_bytes_are_refused(noise: bytes) -> None:
    with pytest.raises(CorruptionError):
        ColumnBatch.decode(noise, verified=False)


@pytest.mark.parametrize("kind", [columnar.VALUE_OFFSETS, columnar.TAG_LISTS, columnar.HEADER_NAME_OFFSETS])
def test_decreasing_offsets_are_refused(kind: int) -> None:
    batch = sample()
    body = bytearray(batch.body)
    pack_into("<i", body, batch.extents[kind][0] + 4, 1_000)
    with pytest.raises(CorruptionError, match="offsets decrease"):
        ColumnBatch.decode(bytes(body), verified=False)


def test_a_later_version_is_named() -> None:
    body = bytearray(sample().body)
    body[6] = 2
    with pytest.raises(CorruptionError, match="version 2"):
        ColumnBatch.decode(bytes(body), verified=True)


@pytest.mark.spec("B6")
@pytest.mark.promise("P8")
def test_empty_and_largest_records_fit_and_larger_ones_are_refused() -> None:
    empty = ColumnBatch.from_records([Record(b"", timestamp_ms=0)], 0)
    assert empty.records(0)[0].value == b""
    largest = ColumnBatch.from_records([Record(bytes(RECORD_BYTES_MAX)), Record(b"small")], 0)
    largest.check_sizes()
    with pytest.raises(LimitExceededError, match=rf"record 1 .*{RECORD_BYTES_MAX + 1}"):
        ColumnBatch.from_records([Record(b""), Record(bytes(RECORD_BYTES_MAX), b"k")], 0).check_sizes()
    with pytest.raises(LimitExceededError):
        ColumnBatch.from_records([], 0)
