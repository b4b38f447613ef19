"""Read-only views of streams next to the writing process."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.unit.streams.view_rig import START_MS, Writer, seen, values

from basaltmq.durability import Durability
from basaltmq.errors import (
    InvalidArgumentError,
    LimitExceededError,
    OffsetOutOfRangeError,
    StoreClosedError,
    TopicNotFoundError,
)
from basaltmq.log.batches.record import Record
from basaltmq.streams import view as view_module
from basaltmq.streams.engines.segment import cleaner as segment_cleaner
from basaltmq.streams.engines.segment.view import SegmentView
from basaltmq.streams.view import StreamView


@pytest.fixture
def writer(tmp_path: Path) -> Iterator[Writer]:
    made = Writer(tmp_path / "data")
    yield made
    made.close()


def open_view(writer: Writer) -> StreamView:
    return StreamView.open(writer.path, clock_ms=writer.clock_ms)


@pytest.mark.spec("B1")
@pytest.mark.promise("P3")
def test_a_view_shows_topics_records_and_groups_of_a_running_writer(writer: Writer) -> None:
    writer.create("orders", partitions=2)
    writer.create("rocks", engine="rocksdb")
    for at in range(20):
        writer.now_ms = START_MS + at
        key = b"even" if at % 2 == 0 else b"odd"
        record = Record(b"v%d" % at, key, (("h", b"x"),), (b"t%d" % (at % 5),))
        writer.put("orders", record, partition=at % 2)
        writer.put("rocks", record)
    writer.plane.offsets.commit("billing", {(writer.plane.topics.get("orders").id, 1): 4})
    with open_view(writer) as view:
        assert [topic.name for topic in view.topics()] == ["orders", "rocks"]
        assert [topic.name for topic in view.topics(after="orders")] == ["rocks"]
        assert view.topic("orders") == writer.plane.topics.get("orders")
        for topic, partition in (("orders", 0), ("orders", 1), ("rocks", 0)):
            assert seen(view, topic, partition) == writer.read_all(topic, partition)
            assert view.info(topic, partition) == writer.plane.drivers.info(topic, partition)
        for topic, partition, key in (("orders", 0, b"even"), ("rocks", 0, b"odd")):
            assert len(view.read(topic, partition, 0, key=key)) == 10
            assert len(view.read(topic, partition, 0, key=b"other")) == 0
            assert {record.tags for record in view.read(topic, 0, 0, tag=b"t2").records()} == {(b"t2",)}
        assert view.offset_at("orders", 0, START_MS + 7) == 4
        assert view.offset_at("orders", 0, START_MS + 700) == 10
        assert list(view.groups()) == ["billing"]
        [lag] = view.lag("billing")
        assert (lag.topic, lag.partition, lag.committed, lag.lag) == ("orders", 1, 4, 6)
        assert len(view.read("orders", 0, 0, max_records=3)) == 3
        assert view.read("orders", 0, 10).records() == []


@pytest.mark.promise("P3")
def test_unsynced_records_are_visible_in_written_topics_but_not_in_synced_ones(writer: Writer) -> None:
    writer.create("safe")
    writer.create("quick", durability="written")
    writer.put("safe", b"one")
    writer.put("safe", b"two", b"three", wait=False)
    writer.put("quick", b"fast", wait=False)
    with open_view(writer) as view:
        assert values(view, "safe") == [b"one"]
        info = view.info("safe", 0)
        assert (info.high_watermark, info.next_offset, info.records) == (1, 1, 1)
        assert values(view, "quick") == [b"fast"]
        # RocksDB may flush the index before the log is synced.
        writer.engine.index.flush_to_disk()
        view.refresh()
        assert values(view, "safe") == [b"one"]
        assert view.info("safe", 0).records == 1
        assert values(view, "quick") == [b"fast"]
        assert view.offset_at("safe", 0, START_MS) == 0
        assert len(view.read("safe", 0, 0, key=b"two")) == 0
        writer.engine.sync()
        view.refresh()
        assert values(view, "safe") == [b"one", b"two", b"three"]
        assert view.info("safe", 0).records == 3


@pytest.mark.promise("P3")
@pytest.mark.parametrize("is_flushed", [False, True])
def test_an_unsynced_synced_write_hides_itself_and_later_writes_in_a_written_topic(
    writer: Writer, is_flushed: bool
) -> None:
    writer.create("quick", durability="written")
    writer.put("quick", b"seen")
    shard = writer.plane.drivers.info("quick", 0).meta.number
    asked = writer.engine.batch_write(shard, [Record(b"awaited")], Durability.SYNCED)
    writer.put("quick", b"after")
    assert writer.read_all("quick")[-1].value == b"seen"
    if is_flushed:
        writer.engine.index.flush_to_disk()
    with open_view(writer) as view:
        assert values(view, "quick") == [b"seen"]
        assert view.info("quick", 0).records == 1
        writer.engine.wait(asked)
        view.refresh()
        assert values(view, "quick") == [b"seen", b"awaited", b"after"]


@pytest.mark.promise("P3")
def test_a_record_is_visible_only_after_its_sync(writer: Writer, monkeypatch: pytest.MonkeyPatch) -> None:
    writer.create("safe")
    writer.put("safe", b"one")
    entered, gate = threading.Event(), threading.Event()
    real = os.fdatasync

    def gated(fd: int) -> None:
        entered.set()
        assert gate.wait(30)
        real(fd)

    with open_view(writer) as view:
        monkeypatch.setattr(os, "fdatasync", gated)
        appending = threading.Thread(target=lambda: writer.put("safe", b"two"))
        appending.start()
        assert entered.wait(30)
        view.refresh()
        assert values(view, "safe") == [b"one"]
        gate.set()
        appending.join(30)
        view.refresh()
        assert values(view, "safe") == [b"one", b"two"]


@pytest.mark.promise("P3")
def test_copies_by_cleaning_are_visible_before_their_sync(writer: Writer, monkeypatch: pytest.MonkeyPatch) -> None:
    writer.create("kept")
    writer.create("gone")
    # All live frames are in the first segment, so the last frame is a copy too.
    for at in range(40):
        writer.put("kept" if at in (3, 7) else "gone", b"%d" % at * 100)
    before = values_of(writer, "kept")
    writer.plane.topics.delete("gone")
    monkeypatch.setattr(segment_cleaner, "RELOCATED_BYTES_PER_STEP", 1)
    cleaner = writer.engine._cleaner
    while len(writer.engine.lanes[0].log.segments()) > 1:
        assert cleaner.clean()
        entries = list(writer.engine.index.entries(writer.plane.topics.get("kept").shards[0], 0))
        if all(entry.position >= writer.engine.lanes[0].log.synced_position for entry in entries):
            break
    assert writer.engine.lanes[0].log.synced_position < writer.engine.lanes[0].log.end
    with open_view(writer) as view:
        assert values(view, "kept") == before
        writer.engine.index.flush_to_disk()
        view.refresh()
        assert values(view, "kept") == before
        assert view.info("kept", 0).records == len(before)


def values_of(writer: Writer, topic: str) -> list[bytes]:
    return [(record.value or b"") for record in writer.read_all(topic)]


def test_a_refresh_reads_only_new_frames(writer: Writer, monkeypatch: pytest.MonkeyPatch) -> None:
    frames: list[int] = []
    real = SegmentView.catch_up

    def counted(self: SegmentView, limits: Any, **how: Any) -> int:
        frames.append(real(self, limits, **how))
        return frames[-1]

    monkeypatch.setattr(SegmentView, "catch_up", counted)
    writer.create("orders")
    for at in range(30):
        writer.put("orders", b"%d" % at)
    with open_view(writer) as view:
        assert frames == [30]
        view.refresh()
        writer.put("orders", b"30")
        writer.put("orders", b"31")
        view.refresh()
        assert frames == [30, 0, 2]
        assert values(view, "orders") == [b"%d" % at for at in range(32)]
        # A change of the store without a flush reloads the store but not the log.
        writer.create("another")
        view.refresh()
        assert view.topic("another").name == "another"
        assert frames == [30, 0, 2, 0]


@pytest.mark.promise("P8")
def test_a_view_drops_its_index_overlay_when_the_writer_flushes_the_index(writer: Writer) -> None:
    writer.create("orders")
    with open_view(writer) as view:
        for at in range(5):
            for each in range(20):
                writer.put("orders", b"%d" % (20 * at + each), wait=False)
            writer.engine.checkpoint()
            writer.put("orders", b"tail")
            view.refresh()
            assert view._stores is not None
            assert view._stores.frames == 1
            assert view.info("orders", 0).records == 21 * (at + 1)


@pytest.mark.promise("P8")
def test_an_index_too_far_behind_is_refused_with_its_path(writer: Writer, monkeypatch: pytest.MonkeyPatch) -> None:
    writer.create("orders")
    for at in range(12):
        writer.put("orders", b"%d" % at)
    monkeypatch.setattr(view_module, "CAUGHT_UP_FRAMES_MAX", 10)
    with pytest.raises(LimitExceededError, match="behind its log; open the store for writing once"):
        open_view(writer)
    writer.engine.checkpoint()
    with open_view(writer) as view:
        assert len(values(view, "orders")) == 12


@pytest.mark.promise("P10")
def test_a_view_follows_created_deleted_and_recreated_topics(writer: Writer) -> None:
    writer.create("first")
    writer.put("first", b"a")
    with open_view(writer) as view:
        writer.create("second")
        writer.put("second", b"b")
        view.refresh()
        assert values(view, "second") == [b"b"]
        writer.plane.topics.delete("second")
        view.refresh()
        with pytest.raises(TopicNotFoundError):
            view.read("second", 0, 0)
        writer.create("second")
        view.refresh()
        assert values(view, "second") == []
        writer.put("second", b"c")
        view.refresh()
        assert values(view, "second") == [b"c"]
        assert [topic.name for topic in view.topics()] == ["first", "second"]


def test_a_shard_created_between_two_store_loads_is_not_skipped(writer: Writer) -> None:
    writer.create("first")
    with open_view(writer) as view:
        view._load_due_s = float("inf")
        writer.create("second")
        writer.put("second", b"b")
        assert view.wait(10)
        assert values(view, "second") == [b"b"]


def test_a_view_follows_deletes_trims_and_compaction(writer: Writer) -> None:
    writer.create("orders")
    writer.create("latest", compact=True)
    for at in range(30):
        writer.put("orders", Record(b"%d" % at, b"k%d" % (at % 3)), wait=False)
        writer.put("latest", Record(b"%d" % at, b"k%d" % (at % 3)), wait=False)
    writer.engine.sync()
    with open_view(writer) as view:
        writer.plane.drivers.delete_by_key("orders", 0, b"k1")
        writer.plane.drivers.delete_by_offset("orders", 0, [3, 5])
        view.refresh()
        assert seen(view, "orders") == writer.read_all("orders")
        assert view.info("orders", 0) == writer.plane.drivers.info("orders", 0)
        writer.plane.drivers.delete_records_before("orders", 0, 10)
        writer.clean()
        view.refresh()
        assert seen(view, "orders") == writer.read_all("orders")
        assert values(view, "latest") == [b"27", b"28", b"29"]
        for topic in ("orders", "latest"):
            assert view.info(topic, 0) == writer.plane.drivers.info(topic, 0)
        with pytest.raises(OffsetOutOfRangeError) as caught:
            view.read("orders", 0, 2)
        assert (caught.value.earliest, caught.value.latest) == (10, 30)


def test_a_view_follows_a_start_offset_raised_between_two_store_loads(writer: Writer) -> None:
    writer.create("orders")
    for at in range(10):
        writer.put("orders", b"%d" % at)
    with open_view(writer) as view:
        view._load_due_s = float("inf")
        writer.plane.drivers.delete_records_before("orders", 0, 6)
        writer.put("orders", b"10")
        assert view.wait(10)
        assert view.info("orders", 0).high_watermark == 11
        view.refresh()
        assert view.info("orders", 0) == writer.plane.drivers.info("orders", 0)
        assert seen(view, "orders") == writer.read_all("orders")


@pytest.mark.spec("E5")
def test_a_read_of_a_cleaned_segment_succeeds_without_a_refresh(writer: Writer) -> None:
    writer.create("kept")
    writer.create("gone")
    for at in range(60):
        writer.put("kept" if at % 6 == 0 else "gone", b"%d" % at * 100)
    expected = writer.read_all("kept")
    with open_view(writer) as view:
        first = view.read("kept", 0, 0, max_records=1)
        writer.plane.topics.delete("gone")
        starts = [segment.start for segment in writer.engine.lanes[0].log.segments()]
        writer.clean()
        left = [segment.start for segment in writer.engine.lanes[0].log.segments()]
        assert not set(starts[:-1]) & set(left)
        found = first.records()
        offset = first.next_offset
        while True:
            batch = view.read("kept", 0, offset, max_records=1)
            if batch.next_offset == offset:
                break
            found += batch.records()
            offset = batch.next_offset
        assert found == expected


def test_cleaning_between_the_reads_of_log_and_store_is_detected(
    writer: Writer, monkeypatch: pytest.MonkeyPatch
) -> None:
    writer.create("kept")
    writer.create("gone")
    for at in range(60):
        writer.put("kept" if at % 6 == 0 else "gone", b"%d" % at * 100)
    expected = writer.read_all("kept")
    real = StreamView._load_store
    cleaned: list[int] = []

    def gather(self: StreamView, stamp: Any) -> None:
        real(self, stamp)
        if not cleaned:
            cleaned.append(1)
            writer.plane.topics.delete("gone")
            writer.clean()

    monkeypatch.setattr(StreamView, "_load_store", gather)
    before = writer.engine.lanes[0].log.start
    with open_view(writer) as view:
        assert writer.engine.lanes[0].log.start > before
        assert seen(view, "kept") == expected
        assert [topic.name for topic in view.topics()] == ["kept"]


def test_memory_topics_are_listed_and_reading_them_raises_the_reason(writer: Writer) -> None:
    writer.create("ram", engine="memory")
    writer.put("ram", b"x")
    writer.plane.offsets.commit("g", {(writer.plane.topics.get("ram").id, 0): 1})
    with open_view(writer) as view:
        info = view.info("ram", 0)
        assert (info.records, info.size_bytes) == (0, 0)
        with pytest.raises(InvalidArgumentError, match="'ram' uses the memory engine"):
            view.read("ram", 0, 0)
        with pytest.raises(InvalidArgumentError, match="memory engine"):
            view.offset_at("ram", 0, 5)
        assert view.lag("g")[0].committed == 1


def test_a_view_follows_a_migration(writer: Writer) -> None:
    from basaltmq.streams.shards import Engine

    writer.create("orders")
    for at in range(10):
        writer.put("orders", b"%d" % at)
    with open_view(writer) as view:
        writer.plane.migration.run("orders", Engine.ROCKSDB)
        writer.put("orders", b"10")
        view.refresh()
        assert values(view, "orders") == [b"%d" % at for at in range(11)]
        writer.plane.migration.run("orders", Engine.SEGMENT)
        writer.put("orders", b"11")
        view.refresh()
        assert values(view, "orders") == [b"%d" % at for at in range(12)]


def test_several_lanes_are_caught_up_from_separate_positions(tmp_path: Path) -> None:
    writer = Writer(tmp_path / "data", lanes=3)
    writer.create("orders", partitions=12)
    with open_view(writer) as view:
        for at in range(120):
            writer.put("orders", b"%d" % at, partition=at % 12, wait=False)
        writer.engine.sync()
        view.refresh()
        for partition in range(12):
            assert values(view, "orders", partition) == [b"%d" % at for at in range(partition, 120, 12)]
    writer.close()


@pytest.mark.spec("D1")
def test_a_thousand_topics_are_listed_and_read(writer: Writer) -> None:
    names = [f"topic-{at:04d}" for at in range(1000)]
    writer.create(names[0])
    config = writer.plane.topics.get(names[0]).config
    for name in names[1:]:
        writer.plane.topics.create(name, config)
    for name in names:
        writer.put(name, name.encode(), wait=False)
    writer.engine.sync()
    with open_view(writer) as view:
        assert [topic.name for topic in view.topics()] == names
        assert all(view.info(name, 0).records == 1 for name in names)
        assert values(view, names[777]) == [names[777].encode()]


def test_a_wait_ends_at_a_change_a_timeout_or_close(writer: Writer) -> None:
    writer.create("orders")
    with open_view(writer) as view:
        assert not view.wait(0)
        assert not view.wait(0.05)
        writer.put("orders", b"one")
        assert view.wait(30)
        assert not view.wait(0)
        assert values(view, "orders") == [b"one"]
        found: list[bool] = []
        waiting = threading.Thread(target=lambda: found.append(view.wait(30)))
        waiting.start()
        writer.put("orders", b"two")
        waiting.join(30)
        assert found == [True]
        # The first change may be the write, before its sync.
        view.refresh()
        assert values(view, "orders") == [b"one", b"two"]
        waiting = threading.Thread(target=lambda: found.append(ended(view)))
        waiting.start()
    waiting.join(30)
    assert found == [True, False]
    for call in (view.refresh, lambda: view.wait(0), lambda: view.topic("orders"), lambda: list(view.topics())):
        with pytest.raises(StoreClosedError):
            call()
    view.close()


def ended(view: StreamView) -> bool:
    """Wait with a timeout that may pass first."""
    try:
        return view.wait(30)
    except StoreClosedError:
        return False


def test_invalid_requests_raise_clear_errors(writer: Writer) -> None:
    writer.create("orders")
    with open_view(writer) as view:
        with pytest.raises(InvalidArgumentError, match="a key or a tag"):
            view.read("orders", 0, 0, key=b"k", tag=b"t")
        with pytest.raises(InvalidArgumentError, match="no partition 7"):
            view.read("orders", 7, 0)
        with pytest.raises(InvalidArgumentError):
            view.read("orders", 0, -1)
        with pytest.raises(InvalidArgumentError):
            view.read("orders", 0, 0, max_records=0)


def test_threads_share_a_view(writer: Writer) -> None:
    writer.create("orders")
    for at in range(50):
        writer.put("orders", b"%d" % at, wait=False)
    writer.engine.sync()
    failures: list[BaseException] = []

    def work() -> None:
        try:
            for _ in range(20):
                assert len(values(view, "orders")) >= 50
                view.refresh()
        except BaseException as error:
            failures.append(error)

    with open_view(writer) as view:
        threads = [threading.Thread(target=work) for _ in range(4)]
        for thread in threads:
            thread.start()
        for at in range(20):
            writer.put("orders", b"more%d" % at)
        for thread in threads:
            thread.join(60)
    assert failures == []
