"""Streaming queries: minimum offsets per trigger, group commits, start position."""

from __future__ import annotations

from pathlib import Path

import pytest
from pyspark.sql.streaming.datasource import ReadAllAvailable

import basaltmq
from basaltmq.errors import InvalidArgumentError, StoreLockedError
from basaltmq.streams.view import StreamView
from pyspark_basalt.options import parse
from pyspark_basalt.source import BatchReader, StreamReader

pytestmark = pytest.mark.spec("F1")

ALL = ReadAllAvailable()


class Clock:
    """A manual clock in seconds."""

    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


def reader(path: Path, clock: Clock | None = None, **given: str) -> StreamReader:
    options = {"path": str(path), "subscribe": "orders", "startingOffsets": "earliest", **given}
    return StreamReader(parse(options, is_streaming=True), clock or Clock())


def test_min_offsets_delays_a_batch_until_enough_or_timeout(tmp_path: Path) -> None:
    clock = Clock()
    with basaltmq.open(tmp_path) as db:
        orders = db.topic("orders")
        orders.append([b"x"] * 3)
        found = reader(tmp_path, clock, minOffsetsPerTrigger="10", maxTriggerDelay="1m")
        first = found.latestOffset(found.initialOffset(), ALL)
        # Empty, with the start of the query.
        assert found.partitions(found.initialOffset(), first) == []
        assert first["orders"] == {"0": 0}
        assert found.latestOffset(first, ALL) is first
        clock.now_s = 61
        waited = found.latestOffset(first, ALL)
        assert waited["orders"] == {"0": 3}
        orders.append([b"x"] * 9)
        assert found.latestOffset(waited, ALL) is waited
        orders.append([b"x"])
        assert found.latestOffset(waited, ALL)["orders"] == {"0": 13}


def test_available_now_ignores_min_offsets(tmp_path: Path) -> None:
    with basaltmq.open(tmp_path) as db:
        db.topic("orders").append([b"x"] * 3)
        found = reader(tmp_path, minOffsetsPerTrigger="10")
        found.prepareForTriggerAvailableNow()
        end = found.latestOffset(found.initialOffset(), ALL)
        assert end["orders"] == {"0": 3}
        assert found.latestOffset(end, ALL) is end


def test_finished_batches_are_committed_to_the_group(tmp_path: Path) -> None:
    with basaltmq.open(tmp_path) as db:
        db.topic("orders").append([b"x"] * 3)
    found = reader(tmp_path, commitGroup="reports")
    end = found.latestOffset(found.initialOffset(), ALL)
    # Planned but not finished: not committed yet.
    with StreamView.open(tmp_path) as view:
        assert [(each.committed, each.lag) for each in view.lag("reports")] == [(0, 3)]
    # Spark asks for more records after the finished batch. There are none, and it never calls `commit`.
    assert found.latestOffset(end, ALL) is end
    with StreamView.open(tmp_path) as view:
        assert [(each.topic, each.committed, each.lag) for each in view.lag("reports")] == [("orders", 3, 0)]
    with basaltmq.open(tmp_path) as db:
        db.topic("orders").append([b"y"])
        with pytest.raises(StoreLockedError, match="commitGroup with path needs write access"):
            reader(tmp_path, commitGroup="reports").latestOffset(end, ALL)


def test_start_time_after_the_last_record_is_an_error_or_the_end(tmp_path: Path) -> None:
    with basaltmq.open(tmp_path) as db:
        db.topic("orders").append([b"x"])
    far = {"path": str(tmp_path), "subscribe": "orders", "startingTimestamp": str(1 << 50)}
    assert BatchReader(parse(far | {"startingOffsetsByTimestampStrategy": "latest"})).partitions() == []
    with pytest.raises(
        InvalidArgumentError, match=r"orders\[0\] has no record of .* startingOffsetsByTimestampStrategy"
    ):
        BatchReader(parse(far)).partitions()
