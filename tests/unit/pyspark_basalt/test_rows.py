"""Rows of pieces: each record once, within the piece, in batches of about the requested size."""

from __future__ import annotations

from pathlib import Path

import pyarrow as pa
import pytest

import basaltmq
from basaltmq.log.batches.record import Record
from basaltmq.streams.view import StreamView
from pyspark_basalt.memory import keep_freed
from pyspark_basalt.options import parse
from pyspark_basalt.plan import Piece
from pyspark_basalt.rows import ROWS_SLACK, read_piece

pytestmark = pytest.mark.spec("F1")

RECORDS = 3000
FRAME = 30


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write two partitions alternately, with records of varying size."""
    path = tmp_path_factory.mktemp("rows") / "data"
    with basaltmq.open(path) as db:
        topic = db.topic("orders", partitions=2, durability="written")
        for first in range(0, RECORDS, FRAME):
            size = 400 if 1000 <= first < 2000 else first % 7
            for partition in (0, 1):
                topic.append(
                    [
                        Record(b"%d" % at + bytes(size), b"k%d" % at, (("h", b"%d" % at),), timestamp_ms=1000 + at)
                        for at in range(first, first + FRAME)
                    ],
                    partition=partition,
                )
    return path


def read(data: Path, begin: int, end: int, **options: str) -> list[pa.RecordBatch]:
    chosen = parse({"path": str(data), "subscribe": "orders", **options})
    with StreamView.open(data) as view:
        return list(read_piece(view, Piece("orders", 1, begin, end), chosen))


@pytest.mark.parametrize(("begin", "end"), [(0, RECORDS), (1, 2), (29, 31), (995, 2011), (2999, 3000)])
@pytest.mark.parametrize("batch_rows", ["1", "100", "16384"])
def test_piece_is_read_from_its_first_to_its_last_offset(data: Path, begin: int, end: int, batch_rows: str) -> None:
    if batch_rows == "1":
        end = min(end, begin + 40)
    batches = read(data, begin, end, batchRows=batch_rows)
    table = pa.Table.from_batches(batches)
    assert table.column("offset").to_pylist() == list(range(begin, end))
    assert [int(value.rstrip(b"\0")) for value in table.column("value").to_pylist()] == list(range(begin, end))
    assert table.column("key").to_pylist() == [b"k%d" % at for at in range(begin, end)]
    assert [at.value for at in table.column("timestamp")] == [1000 * (1000 + at) for at in range(begin, end)]
    for name, value in (("topic", "orders"), ("partition", 1), ("timestampType", 0)):
        assert set(table.column(name).to_pylist()) == {value}
    assert all(batch.num_rows <= ROWS_SLACK * int(batch_rows) for batch in batches)
    assert all(batch.validate(full=True) is None for batch in batches)


def test_headers_are_optional(data: Path) -> None:
    table = pa.Table.from_batches(read(data, 10, 100, includeHeaders="true", batchRows="64"))
    assert table.column("headers").to_pylist() == [[{"key": "h", "value": b"%d" % at}] for at in range(10, 100)]


def test_malloc_is_configured_once_per_process() -> None:
    assert keep_freed() is keep_freed()
