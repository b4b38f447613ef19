"""Batches to and from Arrow."""

from __future__ import annotations

from struct import pack_into
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.unit.log.strategies import BATCHES
from tests.unit.log.test_columnar import sample, stored

from basaltmq.errors import CorruptionError, InvalidArgumentError, LimitExceededError
from basaltmq.log.batches import columnar
from basaltmq.log.batches.columnar import ColumnBatch
from basaltmq.log.batches.record import Record

pa = pytest.importorskip("pyarrow")
from basaltmq.log.arrow import OFFSETS_WINDOW, SCHEMA, concatenated, from_arrow, records_to_arrow, to_arrow  # noqa: E402


def rows(batch: Any) -> list[dict[str, Any]]:
    for name in ("timestamp", "expire_at"):
        at = batch.schema.get_field_index(name)
        batch = batch.set_column(at, name, batch.column(at).cast(pa.int64()))
    listed: list[dict[str, Any]] = batch.to_pylist()
    return listed


def expected(records: list[Record], base: int) -> list[dict[str, Any]]:
    return [
        {
            "offset": base + at,
            "timestamp": record.timestamp_ms,
            "key": record.key,
            "value": record.value,
            "headers": [{"key": name, "value": value} for name, value in record.headers],
            "tags": list(record.tags),
            "expire_at": record.expire_at_ms or None,
        }
        for at, record in enumerate(records)
    ]


@pytest.mark.spec("B6")
@given(BATCHES, st.integers(0, 1 << 40) | st.just(OFFSETS_WINDOW - 2))
def test_a_batch_is_the_same_in_arrow_and_back(records: list[Record], base: int) -> None:
    batch = ColumnBatch.from_records(records, 0)
    arrow = to_arrow(batch, base, verified=False)
    arrow.validate(full=True)
    assert arrow.schema == SCHEMA
    assert rows(arrow) == expected(records, base)
    assert from_arrow(arrow, 0).records(base) == stored(records, base)
    assert rows(records_to_arrow(stored(records, base))) == expected(records, base)


@given(BATCHES, BATCHES, st.data())
def test_slices_of_arrow_batches_are_moved_to_offset_0(
    first: list[Record], second: list[Record], data: st.DataObject
) -> None:
    whole = concatenated([to_arrow(ColumnBatch.from_records(each, 0), 0) for each in (first, second)])
    records = first + second
    begin = data.draw(st.integers(0, len(records) - 1))
    end = data.draw(st.integers(begin + 1, len(records)))
    batch = from_arrow(whole.slice(begin, end - begin), 0)
    assert ColumnBatch.decode(batch.body, verified=False).records(5) == stored(records[begin:end], 5)


def test_offset_deltas_become_offsets() -> None:
    chosen = sample().select([True, False, True])
    assert chosen is not None
    assert to_arrow(chosen, 100).column("offset").to_pylist() == [100, 102]


def test_other_arrow_types_are_cast_and_missing_times_are_set() -> None:
    batch = pa.RecordBatch.from_pydict(
        {
            "value": pa.array(["a", None, "c"], pa.large_string()),
            "timestamp": pa.array([1_000_000, None, 3_000_999], pa.timestamp("us")),
            "tags": pa.array([["x"], None, []], pa.list_(pa.string())),
        }
    )
    records = from_arrow(batch, 9).records(0)
    assert [record.value for record in records] == [b"a", None, b"c"]
    assert [record.timestamp_ms for record in records] == [1000, 9, 3000]
    assert [record.tags for record in records] == [(b"x",), (), ()]
    assert from_arrow(batch.select(["value"]), 9).timestamp_max_ms == 9


@pytest.mark.parametrize(
    "columns",
    [
        {"data": [b"x"]},
        {"value": [b"x"], "other": [1]},
        {"value": [{"a": 1}]},
        {"value": [b"x"], "tags": [[None]]},
        {"value": [b"x"], "headers": [[{"key": None, "value": b""}]]},
        {"value": [b"x"], "timestamp": [-5]},
        {"value": [b"x"], "timestamp": [1 << 60]},
        {"value": [b"x"], "expire_at": [1 << 60]},
        {"value": [b"x"], "expire_at": [-5]},
        {"value": [b"x"], "timestamp": ["noon"]},
    ],
)
def test_arrow_batches_with_another_schema_are_refused(columns: dict[str, Any]) -> None:
    with pytest.raises(InvalidArgumentError):
        from_arrow(pa.RecordBatch.from_pydict(columns), 0)


def test_an_empty_batch_is_refused_as_input_and_returned_as_output() -> None:
    with pytest.raises(LimitExceededError):
        from_arrow(pa.RecordBatch.from_pydict({"value": pa.array([], pa.binary())}), 0)
    assert records_to_arrow([]).num_rows == 0
    assert concatenated([]).schema == SCHEMA


@pytest.mark.promise("P7")
@settings(max_examples=300)
@given(st.data())
def test_invalid_bytes_are_rejected_before_arrow_reads_them(data: st.DataObject) -> None:
    body = bytearray(sample().body)
    for _ in range(data.draw(st.integers(1, 4))):
        at = data.draw(st.integers(0, len(body) - 4))
        pack_into("<i", body, at, data.draw(st.integers(-(1 << 31), (1 << 31) - 1) | st.integers(0, 300)))
    try:
        batch = ColumnBatch.decode(bytes(body), verified=False)
        arrow = to_arrow(batch, 0, verified=False)
    except CorruptionError:
        return
    arrow.validate(full=True)
    assert arrow.num_rows == batch.count
    assert columnar.VALUE_DATA in batch.extents
