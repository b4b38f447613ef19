"""Staging by tasks and import by the driver, without Spark."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path

import pyarrow as pa
import pytest

import basaltmq
from basaltmq.errors import InvalidArgumentError, LimitExceededError, TopicNotFoundError
from basaltmq.log.batches.record import Record
from basaltmq.streams.imports import stage
from basaltmq.streams.imports.imports import open_imports
from basaltmq.streams.imports.stage import CHUNK_BYTES, CHUNK_RECORDS
from basaltmq.streams.partitions import partition_of_key
from pyspark_basalt.chunks import ChunkSplitter
from pyspark_basalt.sink import Staged, stage_rows
from pyspark_basalt.views import view_of

pytestmark = pytest.mark.spec("F1", "F3")


def rows(**columns: Sequence[object]) -> pa.RecordBatch:
    return pa.RecordBatch.from_pydict({name: list(values) for name, values in columns.items()})


def write(path: Path, *batches: pa.RecordBatch, topic: str | None = "orders", run: str = "r") -> Staged:
    view = view_of(str(path), refresh=True)
    done = stage_rows(iter(batches), path, run, 0, 0, view, topic, clock_ms=lambda: 5000)
    with open_imports(path) as imports:
        imports.run(run, 0, [] if done.part is None else [done.part])
    return done


def test_keys_are_partitioned_like_the_embedded_api_in_order(tmp_path: Path) -> None:
    keys = [b"k%d" % (i % 7) for i in range(200)]
    values = [b"v%d" % i for i in range(200)]
    with basaltmq.open(tmp_path) as db:
        db.topic("orders", partitions=4)
        twin = db.topic("twin", partitions=4)
        twin.append([Record(value, key) for key, value in zip(keys, values, strict=True)])
    write(tmp_path, rows(key=keys[:90], value=values[:90]), rows(key=keys[90:], value=values[90:]))
    with basaltmq.open(tmp_path) as db:
        for partition in range(4):
            found, expected = ([(r.key, r.value) for r in db.topic(t).read(partition)] for t in ("orders", "twin"))
            assert found == expected


def test_columns_set_topic_partition_headers_and_time(tmp_path: Path) -> None:
    with basaltmq.open(tmp_path) as db:
        db.topic("a", partitions=3)
        db.topic("b", partitions=2)
    moment = datetime(2026, 11, 15, 12, 0, 0, 123456, tzinfo=UTC)
    write(
        tmp_path,
        pa.RecordBatch.from_arrays(
            [
                pa.array(["x", "y", None, "w"]),
                pa.array(["a", "b", "a", "a"]),
                pa.array([2, None, 0, None], pa.int32()),
                pa.array([None, "key", None, "key"]),
                pa.array([moment, None, moment, moment], pa.timestamp("us", tz="UTC")),
                pa.array(
                    [[{"key": "h", "value": b"1"}], None, [], None],
                    pa.list_(pa.struct([("key", pa.string()), ("value", pa.binary())])),
                ),
            ],
            names=["value", "topic", "partition", "key", "timestamp", "headers"],
        ),
        topic=None,
    )
    moment_ms = int(moment.timestamp() * 1000)
    with basaltmq.open(tmp_path) as db:
        (x,) = db.topic("a").read(2) if partition_of_key(b"key", 3) != 2 else list(db.topic("a").read(2))[:1]
        assert (x.value, x.headers, x.timestamp_ms) == (b"x", (("h", b"1"),), moment_ms)
        (y,) = db.topic("b").read(partition_of_key(b"key", 2))
        assert (y.value, y.key, y.timestamp_ms) == (b"y", b"key", 5000)
        assert None in [record.value for record in db.topic("a").read(0)]
        assert b"w" in [record.value for record in db.topic("a").read(partition_of_key(b"key", 3))]


def test_chunks_respect_their_limits() -> None:
    cutter = ChunkSplitter(lambda _: 1, "t", 0, 0)
    many = rows(value=[b"%d" % i for i in range(CHUNK_RECORDS * 2 + 5)])
    large = rows(value=[b"x" * (CHUNK_BYTES // 3)] * 7 + [b"y" * (CHUNK_BYTES + 1)])
    for batch in (many, large):
        found = list(cutter.chunks([batch]))
        assert [v for _, _, piece in found for v in piece.column("value").to_pylist()] == batch.column(0).to_pylist()
        for _, _, piece in found:
            assert piece.num_rows <= CHUNK_RECORDS
            assert piece.num_rows == 1 or piece.nbytes <= CHUNK_BYTES * 1.1


def test_records_without_a_key_are_distributed_round_robin(tmp_path: Path) -> None:
    cutter = ChunkSplitter(lambda _: 3, "t", 0, turn=4)
    found = [partition for i in range(4) for _, partition, _ in cutter.chunks([rows(value=[b"%d" % i])])]
    assert found == [1, 2, 0, 1]


@pytest.mark.parametrize(
    ("batch", "topic", "error"),
    [
        (rows(value=[b"x"]), "none", TopicNotFoundError),
        (rows(value=[b"x"], partition=[9]), "orders", InvalidArgumentError),
        (rows(value=[b"x"], partition=[-1]), "orders", InvalidArgumentError),
        (rows(value=[b"x" * 200]), "orders", LimitExceededError),
        (rows(value=[b"x", b"y"], topic=["orders", None]), None, InvalidArgumentError),
    ],
)
def test_invalid_rows_leave_no_staged_file(
    tmp_path: Path, batch: pa.RecordBatch, topic: str | None, error: type[Exception]
) -> None:
    with basaltmq.open(tmp_path) as db:
        db.topic("orders", record_bytes_max=100)
    with pytest.raises(error):
        write(tmp_path, batch, topic=topic)
    assert not list((tmp_path / stage.STAGING).rglob("*.arrow"))


def test_task_without_rows_stages_nothing(tmp_path: Path) -> None:
    with basaltmq.open(tmp_path) as db:
        db.topic("orders")
    assert write(tmp_path).part is None
    assert not (tmp_path / stage.STAGING).exists()
