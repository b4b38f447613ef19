"""Lifecycle events in the topic `__events`: off by default, written in batches, without blocking queues."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from tests.unit.embedded.queue_rig import until

import basaltmq
from basaltmq.embedded.database import Basalt, Settings
from basaltmq.errors import DiskFullError, InvalidConfigError
from basaltmq.queues.events.event import TOPIC, Event, Kind, decode_events
from basaltmq.queues.events.topic import EventSettings
from basaltmq.streams.shards import Engine


def open_with(path: Path, **options: Any) -> Basalt:
    return basaltmq.open(path / "data", settings=Settings(events=EventSettings(**options)))


def events(db: Basalt) -> list[Event]:
    return [event for record in db.topic(TOPIC, create=False).read() for event in decode_events(record.value or b"")]


def test_events_are_off_by_default(tmp_path: Path) -> None:
    with basaltmq.open(tmp_path / "data") as db:
        db.queue("q").enqueue(b"x")
        assert db.event_counters() == {}
        assert [topic.name for topic in db.topics()] == []


@pytest.mark.parametrize("engine", [Engine.SEGMENT, Engine.ROCKSDB])
def test_events_are_written_to_the_topic_and_survive_close(tmp_path: Path, engine: Engine) -> None:
    with open_with(tmp_path, gather_s=0.01, engine=engine) as db:
        queue = db.queue("q")
        ids = queue.enqueue([b"%d" % number for number in range(50)])
        until(lambda: db.event_counters()["written"] == 50)
        assert [event.message_id for event in events(db)] == ids
        queue.ack(queue.lease(50, consumer="me"))
    with basaltmq.open(tmp_path / "data") as db:
        found = events(db)
    assert [event.kind for event in found] == [Kind.ENQUEUED] * 50 + [Kind.LEASED] * 50 + [Kind.ACKED] * 50
    assert {event.consumer for event in found[50:]} == {"me"}


def test_many_events_are_written_before_the_flush_interval(tmp_path: Path) -> None:
    with open_with(tmp_path, gather_s=3600) as db:
        queue = db.queue("q", durability="written")
        for _ in range(14):
            queue.enqueue([b""] * 5000)
        until(lambda: db.event_counters()["written"] >= 5000)
        assert db.event_counters()["dropped"] == 0
        assert len(list(db.topic(TOPIC).read())) < 50
    with basaltmq.open(tmp_path / "data") as db:
        assert len(events(db)) == 70_000


def test_failing_events_topic_drops_only_events(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with open_with(tmp_path, gather_s=0) as db:
        queue = db.queue("q")

        def full(*given: Any, **options: Any) -> Any:
            raise DiskFullError("no space left on the device")

        with monkeypatch.context() as patched:
            patched.setattr(db.streams.drivers, "append_batch", full)
            queue.enqueue([b"a", b"b"])
            until(lambda: db.event_counters()["failed"] == 2)
        assert "lifecycle events are lost" in caplog.text
        queue.ack(queue.lease(2))
        until(lambda: db.event_counters()["written"] == 4)
        assert {event.kind for event in events(db)} == {Kind.LEASED, Kind.ACKED}


def test_flush_writes_all_events(tmp_path: Path) -> None:
    with open_with(tmp_path, gather_s=3600) as db:
        queue = db.queue("q")
        writer = db._open_queues().events
        assert writer is not None
        assert writer.flush(60)
        for number in range(1, 4):
            queue.enqueue([b"a", b"b"])
            assert writer.flush(60)
            assert len(events(db)) == 2 * number
        with db.queue_plane.change():
            queue.enqueue([b"c"])
            held = db.queue_plane.deliver("q", [b"d"], consumer="\ud800" * 70_000, visibility_ms=0)
            db.queue_plane.ack("q", held[0].token)
        assert writer.flush(60)
        found = events(db)[6:]
        assert [event.kind for event in found] == [Kind.ENQUEUED, Kind.ENQUEUED, Kind.LEASED, Kind.ACKED]
        assert found[2].consumer == "?" * 16_383


def test_invalid_event_settings_are_refused() -> None:
    for wrong in ({"sample": 0}, {"sample": 2}, {"gather_s": -1}):
        with pytest.raises(InvalidConfigError):
            EventSettings(**wrong)  # type: ignore[arg-type]
