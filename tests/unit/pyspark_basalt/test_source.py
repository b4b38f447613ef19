"""The stream reader, called like Spark calls it."""

from __future__ import annotations

from pathlib import Path

import pytest
from pyspark.sql.streaming.datasource import ReadAllAvailable, ReadMaxRows

import basaltmq
from basaltmq.embedded.database import Settings
from basaltmq.errors import DataLossError
from basaltmq.queues.events.topic import EventSettings
from basaltmq.streams.view import StreamView
from pyspark_basalt.events import SCHEMA as EVENTS
from pyspark_basalt.options import parse
from pyspark_basalt.plan import Piece
from pyspark_basalt.rows import read_piece
from pyspark_basalt.source import BatchReader, StreamReader
from pyspark_basalt.views import view_of

pytestmark = pytest.mark.spec("F1")


def reader(path: Path, **given: str) -> StreamReader:
    return StreamReader(parse({"path": str(path), "subscribe": "orders", **given}, is_streaming=True))


def test_repeated_first_batch_starts_at_the_same_offset(tmp_path: Path) -> None:
    with basaltmq.open(tmp_path) as db:
        orders = db.topic("orders")
        orders.append([b"before"])
        first = reader(tmp_path)
        start = first.initialOffset()
        orders.append([b"a", b"b"])
        end = first.latestOffset(start, ReadAllAvailable())
        orders.append([b"later"])
        again = reader(tmp_path)
        asked_again = again.initialOffset()
        assert asked_again != start
        assert [p.value for p in again.partitions(asked_again, end)] == [
            Piece("orders", 0, 1, 3, orders.info().meta.number, str(orders.info().meta.topic_id))
        ]


def test_limit_is_kept_and_new_partitions_start_at_their_beginning(tmp_path: Path) -> None:
    with basaltmq.open(tmp_path) as db:
        db.topic("orders").append([b"x"] * 10)
        db.topic("orders-2").append([b"y"] * 4)
        found = StreamReader(
            parse(
                {"path": str(tmp_path), "subscribePattern": "orders.*", "startingOffsets": "earliest"},
                is_streaming=True,
            )
        )
        start: dict[str, object] = {"orders": {"0": 2}}
        end = found.latestOffset(start, ReadMaxRows(6))
        pieces = [p.value for p in found.partitions(start, end)]
        assert sum(p.end - p.begin for p in pieces) <= 6
        assert {(p.topic, p.begin) for p in pieces} == {("orders", 2), ("orders-2", 0)}


def test_available_now_stops_at_the_existing_records(tmp_path: Path) -> None:
    with basaltmq.open(tmp_path) as db:
        orders = db.topic("orders")
        orders.append([b"x"] * 5)
        found = reader(tmp_path, startingOffsets="earliest")
        found.prepareForTriggerAvailableNow()
        orders.append([b"y"] * 5)
        assert found.latestOffset(found.initialOffset(), ReadAllAvailable())["orders"] == {"0": 5}
        assert found.reportLatestOffset() == {"orders": {"0": 10}}


def test_lifecycle_events_are_one_row_each(tmp_path: Path) -> None:
    with basaltmq.open(tmp_path, settings=Settings(events=EventSettings(gather_s=0))) as db:
        jobs = db.queue("jobs")
        for payload in (b"a", b"b"):
            jobs.enqueue(payload, fairness_key="tenant")
        jobs.ack(jobs.lease(1))
    found = BatchReader(parse({"path": str(tmp_path), "subscribe": "__events", "explodeEvents": "true"}))
    rows = [row for part in found.partitions() for batch in found.read(part) for row in batch.to_pylist()]
    assert [(row["kind"], row["queue"], row["fairnessKey"]) for row in rows] == [
        ("enqueued", "jobs", "tenant"),
        ("enqueued", "jobs", "tenant"),
        ("leased", "jobs", "tenant"),
        ("acked", "jobs", "tenant"),
    ]
    assert rows[2]["messageId"] == rows[3]["messageId"]
    assert [field.split()[0] for field in EVENTS.split(", ")] == list(rows[0])


def test_stale_view_is_refreshed(tmp_path: Path) -> None:
    with basaltmq.open(tmp_path) as db:
        db.topic("orders").append([b"old"] * 3)
        view = view_of(str(tmp_path))
        options = parse({"path": str(tmp_path), "subscribe": "orders"})
        db.delete_topic("orders")
        fresh = db.topic("orders", partitions=2)
        fresh.append([b"new"] * 2, partition=0)
        fresh.append([b"new"], partition=1)
        db.topic("later").append([b"new"])
        with StreamView.open(tmp_path) as planner:
            shards = {name: planner.topic(name).shards for name in ("orders", "later")}
        for name, partition, count in (("orders", 0, 2), ("orders", 1, 1), ("later", 0, 1)):
            piece = Piece(name, partition, 0, count, shards[name][partition])
            rows = [row for batch in read_piece(view, piece, options) for row in batch.to_pylist()]
            assert [row["value"] for row in rows] == [b"new"] * count


def test_unreadable_segment_is_reported_or_skipped(tmp_path: Path) -> None:
    with basaltmq.open(tmp_path) as db:
        orders = db.topic("orders")
        for at in range(4):
            orders.append([b"%d" % at * 1000])
    found = BatchReader(parse({"path": str(tmp_path), "subscribe": "orders"}))
    (part,) = found.partitions()
    segment = next(p for p in sorted((tmp_path / "log" / "0000").iterdir()) if b"2" * 1000 in p.read_bytes())
    raw = bytearray(segment.read_bytes())
    raw[raw.index(b"2" * 1000) + 500] ^= 1
    segment.write_bytes(raw)
    reported = r"orders\[0\], offsets 2 to 2, cannot be read: .* backup. With failOnDataLoss=false the query skips them"
    with pytest.raises(DataLossError, match=reported) as caught:
        list(found.read(part))
    assert "\n" not in str(caught.value)
    found = BatchReader(parse({"path": str(tmp_path), "subscribe": "orders", "failOnDataLoss": "false"}))
    assert [at for batch in found.read(part) for at in batch.column("offset").to_pylist()] == [0, 1, 3]
