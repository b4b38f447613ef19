"""`basaltmq.open`: opening, topics with settings, closing during use, maintenance."""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import basaltmq
from basaltmq.embedded import database
from basaltmq.embedded.database import Basalt, Settings
from basaltmq.errors import (
    BasaltError,
    CorruptionError,
    InvalidArgumentError,
    InvalidConfigError,
    StorageError,
    StoreClosedError,
    StoreLockedError,
    StoreNotFoundError,
    TopicNotFoundError,
)
from basaltmq.streams import stored
from basaltmq.streams.engines.segment.engine import SegmentEngine
from basaltmq.streams.plane import OffsetStrategy
from basaltmq.streams.shards import Engine
from basaltmq.streams.view import StreamView


@pytest.fixture
def db(tmp_path: Path) -> Iterator[Basalt]:
    with basaltmq.open(tmp_path / "data") as opened:
        yield opened


@pytest.mark.promise("P1")
def test_records_survive_reopening(tmp_path: Path) -> None:
    for engine in ("segment", "rocksdb"):
        with basaltmq.open(str(tmp_path / "data")) as db:
            db.topic(engine, engine=engine).append([b"one", b"two"])
        with basaltmq.open(tmp_path / "data", create=False) as db:
            assert [record.value for record in db.topic(engine).read()] == [b"one", b"two"]
            assert db.topic(engine).append(b"three").offset == 2


def test_second_open_is_refused_and_create_false_creates_nothing(tmp_path: Path) -> None:
    with pytest.raises(StoreNotFoundError):
        basaltmq.open(tmp_path / "data", create=False)
    assert not (tmp_path / "data").exists()
    with basaltmq.open(tmp_path / "data"), pytest.raises(StoreLockedError):
        basaltmq.open(tmp_path / "data")


def test_topic_is_created_once(db: Basalt) -> None:
    made = db.topic("orders", partitions=4, retention_records=10, durability="written")
    again = db.topic("orders")
    assert again.config == made.config
    assert (again.partitions, again.config.retention_records) == (4, 10)
    assert repr(again) == "<topic 'orders'>"
    db.topic("orders", partitions=4, engine="segment", durability="written", retention_records=10)
    with pytest.raises(InvalidConfigError, match=r"exists with partitions=4, not 5; .* alter"):
        db.topic("orders", partitions=5)
    with pytest.raises(InvalidConfigError, match="durability=written, not synced"):
        db.topic("orders", durability="synced")
    assert db.topic("orders").alter(retention_records=20).retention_records == 20
    with pytest.raises(TopicNotFoundError):
        db.topic("other", create=False)
    assert [each.name for each in db.topics()] == ["orders"]


@pytest.mark.parametrize(
    "settings",
    [
        {"engine": "paper"},
        {"durability": "hopeful"},
        {"partitions": 0},
        {"partitions": "four"},
        {"retention_ms": -1},
        {"colour": "red"},
        {"engine": "memory", "durability": "synced"},
        {"compact": True, "index_keys": False, "engine": "rocksdb"},
        {"retention_bytes": object()},
    ],
)
def test_invalid_topic_settings_are_refused(db: Basalt, settings: dict[str, Any]) -> None:
    with pytest.raises(InvalidConfigError):
        db.topic("orders", **settings)
    assert list(db.topics()) == []


@pytest.mark.parametrize("name", ["", 7, None, b"orders", "x" * 100_000, "\ud800"])
def test_invalid_topic_names_are_refused(db: Basalt, name: Any) -> None:
    with pytest.raises(BasaltError):
        db.topic(name)
    assert list(db.topics()) == []


def test_threads_that_open_one_topic_share_it(db: Basalt) -> None:
    failures: list[BaseException] = []

    def ask() -> None:
        try:
            db.topic("orders", partitions=3).append(b"x")
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=ask) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert failures == []
    assert sum(db.topic("orders").info(partition).records for partition in range(3)) == 8


@pytest.mark.promise("P10")
def test_recreated_topic_is_empty(db: Basalt) -> None:
    topic = db.topic("orders")
    topic.append(b"old")
    list(topic.consume("g", wait=0))
    db.delete_topic("orders")
    with pytest.raises(TopicNotFoundError):
        topic.append(b"late")
    with pytest.raises(TopicNotFoundError):
        db.delete_topic("orders")
    assert list(db.topic("orders").read()) == []
    topic.append(b"new")
    assert [each.value for each in db.topic("orders").consume("g", wait=0)] == [b"new"]


def test_topics_are_listed_in_order(db: Basalt, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(database, "PAGE", 3)
    names = [f"t{at}" for at in range(8)]
    for name in names:
        db.topic(name, engine="rocksdb")
    assert [each.name for each in db.topics()] == names


def test_calls_after_close_are_refused_and_close_is_repeatable(tmp_path: Path) -> None:
    db = basaltmq.open(tmp_path / "data")
    topics = {engine: db.topic(engine, engine=engine) for engine in ("segment", "rocksdb", "memory")}
    for topic in topics.values():
        topic.append(b"x")
    consumer = topics["segment"].consume("g")
    db.close()
    db.close()
    for topic in topics.values():
        with pytest.raises(StoreClosedError):
            topic.append(b"y")
        with pytest.raises(StoreClosedError):
            list(topic.read())
    with pytest.raises(StoreClosedError):
        consumer.poll()
    with pytest.raises(StorageError):
        db.topic("another")
    with pytest.raises(StorageError):
        list(db.topics())
    with pytest.raises(StorageError):
        db.delete_topic("segment")


def test_close_ends_waiting_readers_and_consumers(tmp_path: Path) -> None:
    db = basaltmq.open(tmp_path / "data")
    topic = db.topic("orders")
    topic.append(b"one")
    got: dict[str, list[bytes]] = {"read": [], "consume": []}
    waiting = threading.Barrier(3)
    failures: list[BaseException] = []

    def run(what: str) -> None:
        source: Any = topic.read(wait=None) if what == "read" else topic.consume("g", wait=None)
        try:
            for each in source:
                got[what].append(each.value)
                waiting.wait(30)
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=run, args=(what,)) for what in got]
    for thread in threads:
        thread.start()
    waiting.wait(30)
    db.close()
    for thread in threads:
        thread.join(30)
        assert not thread.is_alive()
    assert got == {"read": [b"one"], "consume": [b"one"]}
    # A reader may also find the store closed. Both end it.
    assert all(isinstance(failure, StoreClosedError) for failure in failures)


@pytest.mark.promise("P1")
def test_appends_during_close_are_durable_or_refused(tmp_path: Path) -> None:
    db = basaltmq.open(tmp_path / "data")
    topic = db.topic("orders")
    confirmed: list[int] = []
    began = threading.Event()
    failures: list[BaseException] = []

    def write() -> None:
        try:
            while True:
                confirmed.append(topic.append(b"x").offset)
                began.set()
        except StoreClosedError:
            pass
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=write) for _ in range(4)]
    for thread in threads:
        thread.start()
    assert began.wait(30)
    db.close()
    for thread in threads:
        thread.join(30)
        assert not thread.is_alive()
    assert failures == []
    with basaltmq.open(tmp_path / "data") as again:
        kept = [record.offset for record in again.topic("orders").read()]
    assert set(confirmed) <= set(kept)
    assert kept == list(range(len(kept)))


def test_maintenance_applies_retention_and_reports_a_failure_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    settings = Settings(maintenance_interval_s=0.01)
    with basaltmq.open(tmp_path / "data", settings=settings) as db:
        topic = db.topic("orders", retention_records=5)
        for at in range(20):
            topic.append(b"%d" % at)
        tick = threading.Event()
        for _ in range(3000):
            if topic.info().records == 5 or tick.wait(0.01):
                break
        assert topic.info().start_offset == 15
        calls = threading.Semaphore(0)

        def fail(now_ms: int) -> int:
            calls.release()
            raise CorruptionError("the disk hums")

        with caplog.at_level(logging.ERROR, "basaltmq"):
            db.streams.engines.retain = fail  # type: ignore[method-assign]
            for _ in range(5):
                assert calls.acquire(timeout=30)
    assert [record.getMessage() for record in caplog.records] == ["retention failed: the disk hums"]


@pytest.mark.promise("P9")
def test_index_is_checkpointed_as_the_log_grows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stored, "CHECKPOINT_LOG_BYTES", 100_000)
    flushed = threading.Event()
    real = SegmentEngine.checkpoint

    def checkpoint(self: SegmentEngine) -> None:
        real(self)
        flushed.set()

    monkeypatch.setattr(SegmentEngine, "checkpoint", checkpoint)
    with basaltmq.open(tmp_path / "data", settings=Settings(maintenance_interval_s=0.01)) as db:
        topic = db.topic("orders")
        topic.append(b"x" * 10)
        assert not flushed.wait(0.1)
        topic.append(b"x" * 200_000)
        assert flushed.wait(30)
        with StreamView.open(tmp_path / "data") as view:
            assert view._stores is not None
            assert view._stores.frames == 0
            assert view.info("orders", 0).records == 2


@pytest.mark.promise("P7")
def test_log_losses_are_reported_at_open(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with basaltmq.open(tmp_path / "data") as db:
        topic = db.topic("orders")
        for at in range(3):
            topic.append(b"%d" % at * 100)
    segment = next((tmp_path / "data" / "log" / "0000").glob("*.log"))
    raw = bytearray(segment.read_bytes())
    raw[len(raw) // 2] ^= 1
    segment.write_bytes(raw)
    # Without the index, the whole log is read.
    with basaltmq.open(tmp_path / "data") as db:
        engine = db.streams.engines.get(Engine.SEGMENT)
        assert isinstance(engine, SegmentEngine)
        engine.index.wipe()
        db.store.flush()
        engine._closed = True
    with caplog.at_level(logging.ERROR, "basaltmq"), basaltmq.open(tmp_path / "data") as db:
        assert [record.offset for record in db.topic("orders").read()] == [0, 2]
    assert any("lost offsets 1 to 1" in record.getMessage() for record in caplog.records)


def test_cached_offsets_are_written_at_close(tmp_path: Path) -> None:
    settings = Settings(offsets=OffsetStrategy.CACHED)
    with basaltmq.open(tmp_path / "data", settings=settings) as db:
        topic = db.topic("orders")
        topic.append([b"one", b"two"])
        assert len(list(topic.consume("g", wait=0))) == 2
    with basaltmq.open(tmp_path / "data", settings=settings) as db:
        assert list(db.topic("orders").consume("g", wait=0)) == []
        assert db.topic("orders").lag("g")[0].lag == 0


def test_open_of_a_wrong_path_is_refused_and_releases_resources(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    with pytest.raises(StorageError):
        basaltmq.open(tmp_path / "file")
    with basaltmq.open(tmp_path / "data") as db:
        db.topic("orders").append(b"x")
    lane = tmp_path / "data" / "log" / "0000"
    for name in ("LANE", "LANE.copy"):
        (lane / name).rename(tmp_path / name)
    with pytest.raises(CorruptionError, match="neither LANE nor"):
        basaltmq.open(tmp_path / "data")
    for name in ("LANE", "LANE.copy"):
        (tmp_path / name).rename(lane / name)
    with basaltmq.open(tmp_path / "data") as db:
        assert len(list(db.topic("orders").read())) == 1
    with pytest.raises((InvalidArgumentError, TypeError)):
        basaltmq.open(7)  # type: ignore[arg-type]
