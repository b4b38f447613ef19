"""Options of Spark's Kafka connector, in batches and streams."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from pyspark.sql.datasource import InputPartition
from pyspark.sql.streaming.datasource import ReadAllAvailable, ReadLimit, ReadMaxRows

import basaltmq
from basaltmq.errors import DataLossError, InvalidArgumentError, TopicNotFoundError
from basaltmq.log.batches.record import Record
from pyspark_basalt.options import parse
from pyspark_basalt.source import BatchReader, StreamReader

pytestmark = pytest.mark.spec("F1")

COUNT = 10
Rows = list[tuple[str, int, int]]


def fill(path: Path, *names: str, partitions: int = 2) -> None:
    with basaltmq.open(path) as db:
        for name in names:
            topic = db.topic(name, partitions=partitions)
            for partition in range(partitions):
                records = [Record(b"v", b"k", (("h", b"x"),), timestamp_ms=1000 * at) for at in range(COUNT)]
                topic.append(records, partition=partition)


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("options") / "data"
    fill(path, "a", "b")
    return path


def rows_of(reader: BatchReader | StreamReader, parts: list[InputPartition]) -> Rows:
    return sorted(
        (row["topic"], row["partition"], row["offset"])
        for part in parts
        for batch in reader.read(part)
        for row in batch.to_pylist()
    )


def batch(store: Path, **options: str) -> Rows:
    reader = BatchReader(parse({"path": str(store), **options}))
    return rows_of(reader, reader.partitions())


def batches(reader: StreamReader, start: dict[str, object] | None = None) -> Iterator[tuple[dict[str, object], Rows]]:
    """Run a query to the end. Return the ends of its batches and their records."""
    # Like Spark, which stores offsets in its log.
    at = json.loads(json.dumps(start or reader.initialOffset()))
    limit: ReadLimit = reader.getDefaultReadLimit()
    while (end := json.loads(json.dumps(reader.latestOffset(at, limit)))) != at:
        yield end, rows_of(reader, reader.partitions(at, end))
        at = end


def stream(store: Path, **options: str) -> Rows:
    reader = StreamReader(parse({"path": str(store), **options}, is_streaming=True))
    return sorted(row for _, rows in batches(reader) for row in rows)


def of(topic: str, partition: int, begin: int = 0, end: int = COUNT) -> Rows:
    return [(topic, partition, at) for at in range(begin, end)]


EARLIEST = {"startingOffsets": "earliest"}


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"subscribe": "a", **EARLIEST}, of("a", 0) + of("a", 1)),
        ({"subscribe": "a, b", **EARLIEST}, [row for t in "ab" for p in (0, 1) for row in of(t, p)]),
        ({"subscribePattern": "[b-z]", **EARLIEST}, of("b", 0) + of("b", 1)),
        ({"assign": '{"a": [1], "b": [0]}', **EARLIEST}, of("a", 1) + of("b", 0)),
        ({"assign": '{"a": [1]}', "startingOffsets": '{"a": {"1": 7}}'}, of("a", 1, 7)),
        ({"subscribe": "a", "startingOffsets": '{"a": {"0": -1, "1": -2}}'}, of("a", 1)),
        ({"subscribe": "a", "startingTimestamp": "6500"}, of("a", 0, 7) + of("a", 1, 7)),
        (
            {"subscribe": "a", "startingOffsetsByTimestamp": '{"a": {"0": 3000, "1": 9000}}'},
            of("a", 0, 3) + of("a", 1, 9),
        ),
        ({"subscribe": "a", "minPartitions": "7", **EARLIEST}, of("a", 0) + of("a", 1)),
    ],
)
def test_batches_and_streams_read_the_same_range(store: Path, options: dict[str, str], expected: Rows) -> None:
    assert batch(store, **options) == expected
    assert stream(store, **options) == expected


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"endingOffsets": "latest"}, of("a", 0) + of("a", 1)),
        ({"endingOffsets": '{"a": {"0": 3, "1": -1}}'}, of("a", 0, 0, 3) + of("a", 1)),
        ({"endingTimestamp": "4000"}, of("a", 0, 0, 4) + of("a", 1, 0, 4)),
        ({"endingTimestamp": "99000"}, of("a", 0) + of("a", 1)),
        ({"endingOffsetsByTimestamp": '{"a": {"0": 1000, "1": 2500}}'}, of("a", 0, 0, 1) + of("a", 1, 0, 3)),
        ({"startingTimestamp": "2000", "endingTimestamp": "4000"}, of("a", 0, 2, 4) + of("a", 1, 2, 4)),
    ],
)
def test_batch_ends_at_the_ending_offset(store: Path, options: dict[str, str], expected: Rows) -> None:
    assert batch(store, subscribe="a", **options) == expected


def test_min_partitions_is_respected(store: Path) -> None:
    options = {"path": str(store), "subscribe": "a", "minPartitions": "7", **EARLIEST}
    assert len(BatchReader(parse(options)).partitions()) >= 7
    reader = StreamReader(parse(options, is_streaming=True))
    start = reader.initialOffset()
    assert len(reader.partitions(start, reader.latestOffset(start, ReadAllAvailable()))) >= 7


def test_trigger_limit_is_respected_and_all_records_are_read(store: Path) -> None:
    options = {"path": str(store), "subscribe": "a", "maxOffsetsPerTrigger": "6", **EARLIEST}
    reader = StreamReader(parse(options, is_streaming=True))
    assert reader.getDefaultReadLimit() == ReadMaxRows(6)
    found = [rows for _, rows in batches(reader)]
    assert [len(rows) for rows in found] == [6, 6, 6, 2]
    assert sorted(row for rows in found for row in rows) == of("a", 0) + of("a", 1)


def test_include_headers_adds_a_column(store: Path) -> None:
    for with_headers in ("true", "false"):
        options = {"path": str(store), "assign": '{"a": [0]}', "includeHeaders": with_headers, **EARLIEST}
        found = BatchReader(parse(options))
        reader = StreamReader(parse(options, is_streaming=True))
        start = reader.initialOffset()
        parts = reader.partitions(start, reader.latestOffset(start, ReadAllAvailable()))
        for rows in (found.read(found.partitions()[0]), reader.read(parts[0])):
            for each in rows:
                assert ("headers" in each.schema.names) == (with_headers == "true")
                if with_headers == "true":
                    assert each.column("headers").to_pylist() == [[{"key": "h", "value": b"x"}]] * each.num_rows


def test_new_topic_of_a_pattern_is_read_from_its_beginning(tmp_path: Path) -> None:
    fill(tmp_path, "log-1", "other", partitions=1)
    options = {"path": str(tmp_path), "subscribePattern": "log-.*", "startingOffsets": "latest"}
    reader = StreamReader(parse(options, is_streaming=True))
    ((end, first),) = batches(reader)
    assert first == [], "existing records are older than the query"
    fill(tmp_path, "log-2", "another", partitions=1)
    ((end, second),) = batches(reader, end)
    assert second == of("log-2", 0)
    assert list(batches(reader, end)) == []


def test_losses_between_batches_fail_the_stream_or_are_skipped(tmp_path: Path) -> None:
    fill(tmp_path, "a", partitions=1)
    strict, lenient = (
        StreamReader(
            parse({"path": str(tmp_path), "subscribe": "a", "failOnDataLoss": loss, **EARLIEST}, is_streaming=True)
        )
        for loss in ("true", "false")
    )
    start = strict.initialOffset()
    end = strict.latestOffset(start, ReadMaxRows(3))
    with basaltmq.open(tmp_path) as db:
        db.topic("a").delete_before(0, 6)
    with pytest.raises(DataLossError, match=r"a\[0\] begins at offset 6, expected 3: offsets 3 to 5 were removed"):
        list(batches(strict, end))
    assert [rows for _, rows in batches(lenient, end)] == [of("a", 0, 6)]
    with basaltmq.open(tmp_path) as db:
        db.delete_topic("a")
        db.topic("a").append([b"other"])
    with pytest.raises(DataLossError, match=r"a\[0\].*expected topic id"):
        strict.latestOffset(end, ReadMaxRows(9))
    with pytest.raises(DataLossError, match=r"a\[0\] ends at offset 1, expected 10 or more"):
        strict.partitions({"a": {"0": 0}}, {"a": {"0": 10}})
    assert rows_of(lenient, lenient.partitions({"a": {"0": 0}}, {"a": {"0": 10}})) == of("a", 0, 0, 1)


@pytest.mark.parametrize("is_streaming", [False, True])
def test_missing_topics_and_partitions_are_reported_before_reading(store: Path, is_streaming: bool) -> None:
    def ask(**options: str) -> None:
        given = parse({"path": str(store), **options}, is_streaming=is_streaming)
        if is_streaming:
            StreamReader(given).initialOffset()
        else:
            BatchReader(given).partitions()

    with pytest.raises(TopicNotFoundError, match=r"there is no topic 'c' in .*; there are a, b"):
        ask(subscribe="c")
    with pytest.raises(InvalidArgumentError, match="has partitions 0 to 1, not 2"):
        ask(assign='{"a": [2]}')
    with pytest.raises(InvalidArgumentError, match=r"a\[0\] ends at offset 10; it cannot be read from offset 11"):
        ask(subscribe="a", startingOffsets='{"a": {"0": 11}}')
    with pytest.raises(InvalidArgumentError, match=r"partitions that are not read: b\[0\]"):
        ask(subscribe="a", startingOffsets='{"b": {"0": 1}}')
    with pytest.raises(InvalidArgumentError, match=r"a\[0\] has no record of 99000 ms or later; begin earlier"):
        ask(subscribe="a", startingTimestamp="99000")
