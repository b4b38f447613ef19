"""Lost records: recreated topics, lower ends, lost beginnings, deleted topics."""

from __future__ import annotations

import logging
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql.streaming.datasource import ReadAllAvailable, ReadMaxRows

import basaltmq
from basaltmq.errors import DataLossError
from basaltmq.streams.adapter import ShardInfo
from basaltmq.streams.topics import Topic
from basaltmq.streams.view import StreamView
from pyspark_basalt import source, views
from pyspark_basalt.options import parse
from pyspark_basalt.plan import Piece
from pyspark_basalt.rows import read_piece
from pyspark_basalt.source import BatchReader, StreamReader

pytestmark = pytest.mark.spec("F1")

ALL = ReadAllAvailable()
Json = dict[str, Any]


def reader(path: Path, **given: str) -> StreamReader:
    options = {"path": str(path), "startingOffsets": "earliest", **given}
    options.setdefault("subscribe", "orders")
    if "subscribePattern" in options:
        del options["subscribe"]
    return StreamReader(parse(options, is_streaming=True))


def lenient(path: Path, **given: str) -> StreamReader:
    return reader(path, failOnDataLoss="false", **given)


def batch(found: StreamReader, start: Json, end: Json) -> list[bytes]:
    """Return the records of the batch from `start` to `end`."""
    rows = [row for part in found.partitions(start, end) for each in found.read(part) for row in each.to_pylist()]
    return [row["value"] for row in rows]


def first_batch(found: StreamReader) -> Json:
    return found.latestOffset(found.initialOffset(), ALL)


@pytest.fixture
def recreated(tmp_path: Path) -> tuple[Path, Json]:
    """A store and the position of a query. It read 100 records; then the topic was recreated with 180."""
    with basaltmq.open(tmp_path / "data") as db:
        db.topic("orders").append([b"old"] * 100)
    end = first_batch(reader(tmp_path / "data"))
    with basaltmq.open(tmp_path / "data") as db:
        db.delete_topic("orders")
        db.topic("orders").append([b"new %d" % at for at in range(180)])
    return tmp_path / "data", end


def test_recreated_topic_is_an_error_with_both_ids(recreated: tuple[Path, Json]) -> None:
    path, end = recreated
    with StreamView.open(path) as view:
        actual = view.topic("orders").id
    expected = end["@topics"]["orders"]
    with pytest.raises(DataLossError, match=rf"orders\[0\].*expected topic id {expected}, found {actual}"):
        reader(path).latestOffset(end, ALL)


@pytest.mark.parametrize("limit", [ALL, ReadMaxRows(7)])
def test_recreated_topic_is_read_from_its_beginning_if_losses_are_accepted(
    recreated: tuple[Path, Json], caplog: pytest.LogCaptureFixture, limit: Any
) -> None:
    path, end = recreated
    found = lenient(path)
    read: list[bytes] = []
    with caplog.at_level(logging.WARNING, "basaltmq.spark"):
        while (after := found.latestOffset(end, limit)) is not end:
            read += batch(found, end, after)
            end = after
    assert read == [b"new %d" % at for at in range(180)]
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert "deleted and created again" in caplog.text


def test_checkpoints_without_topic_ids_load(tmp_path: Path) -> None:
    with basaltmq.open(tmp_path) as db:
        db.topic("orders").append([b"a", b"b", b"c"])
    old: Json = {"orders": {"0": 1}}
    found = reader(tmp_path)
    end: Json = found.latestOffset(old, ALL)
    assert batch(found, old, end) == [b"b", b"c"]
    assert set(end["@topics"]) == {"orders"}
    with pytest.raises(DataLossError, match=r"orders\[0\] ends at offset 3, expected 5 or more"):
        found.latestOffset({"orders": {"0": 5}}, ALL)


def test_lower_end_offset_is_an_error_or_the_new_position(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    data, copy = tmp_path / "data", tmp_path / "copy"
    with basaltmq.open(data) as db:
        db.topic("orders").append([b"x"] * 5)
    shutil.copytree(data, copy)
    with basaltmq.open(data) as db:
        db.topic("orders").append([b"x"] * 4)
    end = first_batch(reader(data))
    with pytest.raises(DataLossError, match=r"orders\[0\] ends at offset 5, expected 9 or more"):
        reader(copy).latestOffset(end, ALL)
    # Not delayed: the topic could grow past the old position before the new one is stored.
    found = lenient(copy, minOffsetsPerTrigger="1000")
    with caplog.at_level(logging.WARNING, "basaltmq.spark"):
        after = found.latestOffset(end, ALL)
    assert "continues at offset 5" in caplog.text
    assert after["orders"] == {"0": 5}
    assert batch(found, end, after) == []
    with basaltmq.open(copy) as db:
        db.topic("orders").append([b"after %d" % at for at in range(20)])
    found = lenient(copy)
    last = found.latestOffset(after, ALL)
    assert batch(found, after, last) == [b"after %d" % at for at in range(20)]


def test_lost_beginning_of_a_new_partition_is_an_error_or_skipped(tmp_path: Path) -> None:
    with basaltmq.open(tmp_path) as db:
        db.topic("orders").append([b"x"])
    end = first_batch(reader(tmp_path, subscribePattern="orders.*"))
    with basaltmq.open(tmp_path) as db:
        later = db.topic("orders-2")
        later.append([b"%d" % at for at in range(10)])
        later.delete_before(0, 4)
    with pytest.raises(DataLossError, match=r"orders-2\[0\] is new .* begins at offset 4, expected 0"):
        reader(tmp_path, subscribePattern="orders.*").latestOffset(end, ALL)
    found = lenient(tmp_path, subscribePattern="orders.*")
    after = found.latestOffset(end, ALL)
    assert batch(found, end, after) == [b"%d" % at for at in range(4, 10)]
    # The beginning was deleted between planning and reading.
    with pytest.raises(DataLossError, match=r"orders-2\[0\] begins at offset 4, expected 0"):
        reader(tmp_path, subscribePattern="orders.*").partitions(end, after)


def test_deleted_topic_of_a_pattern_does_not_stop_a_query(tmp_path: Path) -> None:
    with basaltmq.open(tmp_path) as db:
        for name in ("orders", "orders-2"):
            db.topic(name).append([b"x"] * 3)
    found = reader(tmp_path, subscribePattern="orders.*")
    end = first_batch(found)
    with basaltmq.open(tmp_path) as db:
        db.delete_topic("orders-2")
        db.topic("orders").append([b"y"])
    after = found.latestOffset(end, ALL)
    assert batch(found, end, after) == [b"y"]
    assert found.latestOffset(after, ALL) is after
    # Recreated: another topic id than the query has stored.
    with basaltmq.open(tmp_path) as db:
        db.topic("orders-2").append([b"z"] * 9)
    with pytest.raises(DataLossError, match=r"orders-2\[0\].*expected topic id"):
        found.latestOffset(after, ALL)


def test_planned_range_of_a_deleted_topic_is_lost(tmp_path: Path) -> None:
    with basaltmq.open(tmp_path) as db:
        for name in ("orders", "orders-2"):
            db.topic(name).append([b"x"] * 3)
    found = reader(tmp_path, subscribePattern="orders.*")
    start = found.initialOffset()
    end = found.latestOffset(start, ALL)
    (gone,) = [each for each in found.partitions(start, end) if each.value.topic == "orders-2"]
    with basaltmq.open(tmp_path) as db:
        db.delete_topic("orders-2")
    reported = r"orders-2\[0\] was deleted: expected offsets 0 to 2, found no topic"
    with pytest.raises(DataLossError, match=reported):
        found.partitions(start, end)
    views._open_view.cache_clear()
    with pytest.raises(DataLossError, match=reported):
        list(found.read(gone))
    accepting = lenient(tmp_path, subscribePattern="orders.*")
    assert batch(accepting, start, end) == [b"x"] * 3
    assert list(accepting.read(gone)) == []


def test_topic_recreated_after_planning_is_not_read(recreated: tuple[Path, Json]) -> None:
    path, end = recreated
    options = parse({"path": str(path), "subscribe": "orders"})
    piece = Piece("orders", 0, 0, 100, None, end["@topics"]["orders"])
    with StreamView.open(path) as view:
        with pytest.raises(DataLossError, match="expected topic id"):
            list(read_piece(view, piece, options))
        accepting = parse({"path": str(path), "subscribe": "orders", "failOnDataLoss": "false"})
        assert list(read_piece(view, piece, accepting)) == []
    start: Json = {"orders": {"0": 0}, "@topics": end["@topics"]}
    with pytest.raises(DataLossError, match="expected topic id"):
        reader(path).partitions(start, end)
    assert lenient(path).partitions(start, end) == []


class Deleting:
    """A view whose topic is deleted right after the topics were listed."""

    def __init__(self, path: Path, name: str) -> None:
        self._view = StreamView.open(path)
        self._path = path
        self._name = name

    def topics(self) -> Iterator[Topic]:
        listed = list(self._view.topics())
        with basaltmq.open(self._path) as db:
            db.delete_topic(self._name)
        self._view.refresh()
        return iter(listed)

    def topic(self, name: str) -> Topic:
        return self._view.topic(name)

    def info(self, name: str, partition: int) -> ShardInfo:
        return self._view.info(name, partition)

    def offset_at(self, name: str, partition: int, timestamp_ms: int) -> int:
        return self._view.offset_at(name, partition, timestamp_ms)

    def refresh(self) -> None:
        self._view.refresh()

    def close(self) -> None:
        self._view.close()


@pytest.mark.parametrize("is_streaming", [True, False])
def test_topic_deleted_during_planning_is_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_streaming: bool
) -> None:
    with basaltmq.open(tmp_path) as db:
        for name in ("orders", "orders-2"):
            db.topic(name, partitions=2).append([b"x"] * 3, partition=0)
    view = Deleting(tmp_path, "orders-2")
    monkeypatch.setattr(source, "topics_at", lambda *_, **__: view)
    try:
        if is_streaming:
            offset = reader(tmp_path, subscribePattern="orders.*").initialOffset()
            assert offset["orders"] == {"0": 0, "1": 0}
            assert "orders-2" not in offset
        else:
            options = parse({"path": str(tmp_path), "subscribePattern": "orders.*"})
            planned = [part.value for part in BatchReader(options).partitions()]
            assert [(each.topic, each.begin, each.end) for each in planned] == [("orders", 0, 3)]
    finally:
        view.close()


def test_offsets_of_a_recreated_topic_are_not_committed_to_the_group(recreated: tuple[Path, Json]) -> None:
    path, end = recreated
    found = lenient(path, commitGroup="reports")
    after = found.latestOffset(end, ReadMaxRows(30))
    with StreamView.open(path) as view:
        assert "reports" not in list(view.groups())
    found.latestOffset(after, ALL)
    with StreamView.open(path) as view:
        assert [each.committed for each in view.lag("reports")] == [30]
