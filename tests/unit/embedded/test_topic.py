"""Embedded topics: append, read, consume, with concurrent changes."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

import basaltmq
from basaltmq.embedded.consumer import Consumer
from basaltmq.embedded.database import Basalt, Settings
from basaltmq.embedded.topic import Position
from basaltmq.errors import (
    InvalidArgumentError,
    LimitExceededError,
    OffsetOutOfRangeError,
    StaleMemberError,
    TopicNotFoundError,
)
from basaltmq.log.batches.columnar import ColumnBatch
from basaltmq.log.batches.record import Record


@pytest.fixture
def db(tmp_path: Path) -> Iterator[Basalt]:
    with basaltmq.open(tmp_path / "data", settings=Settings(maintenance_interval_s=3600)) as opened:
        yield opened


@pytest.mark.parametrize("engine", ["segment", "rocksdb", "memory"])
def test_all_forms_of_records_round_trip(db: Basalt, engine: str) -> None:
    topic = db.topic("orders", engine=engine)
    assert topic.append(b"bytes", key=b"k", headers={"a": b"1"}, tags=[b"t"], timestamp_ms=5) == Position(0, 0, 0)
    topic.append("text", key="k", headers={"a": "1"}, tags=["t"], timestamp_ms=5)
    topic.append(bytearray(b"array"))
    topic.append(memoryview(b"view"))
    assert topic.append(Record(b"record", b"k2")).offset == 4
    assert topic.append([b"many", "of", Record(b"them")]) == [Position(0, 5, 7)]
    assert topic.append((b"tuple",)) == [Position(0, 8, 8)]
    assert topic.append([]) == []
    assert topic.append(ColumnBatch.from_records([Record(b"columns")], 5))[0].offset == 9
    arrow = pa.table({"value": [b"arrow", b"two"], "key": [b"k", None]})
    assert topic.append(arrow) == [Position(0, 10, 11)]
    assert topic.append(arrow.to_batches()[0])[0].last_offset == 13
    got = list(topic.read())
    assert [record.value for record in got[:5]] == [b"bytes", b"text", b"array", b"view", b"record"]
    assert got[0].headers == got[1].headers == (("a", b"1"),)
    assert got[0].tags == got[1].tags == (b"t",)
    assert [record.offset for record in got] == list(range(14))
    assert [record.offset for record in topic.read(key="k")] == [0, 1, 10, 12]
    assert [record.offset for record in topic.read(tag="t")] == [0, 1]
    table = pa.Table.from_batches(topic.read_arrow())
    assert table["value"].to_pylist() == [record.value for record in got]


@pytest.mark.parametrize(
    ("value", "how"),
    [
        (7, {}),
        (None, {}),
        (object(), {}),
        ({"value": b"x"}, {}),
        ([7], {}),
        ([[b"x"]], {}),
        (b"x", {"key": 7}),
        (b"x", {"tags": b"tag"}),
        (b"x", {"tags": "tag"}),
        (b"x", {"tags": [7]}),
        (b"x", {"tags": 7}),
        (b"x", {"headers": [("a", b"1")]}),
        (b"x", {"headers": {"a": 7}}),
        (b"x", {"headers": {7: b"a"}}),
        (b"x", {"partition": 9}),
        (b"x", {"partition": -1}),
        (b"x", {"partition": "0"}),
        (b"x", {"partition": True}),
        (b"x", {"durability": "hopeful"}),
        (b"x", {"timestamp_ms": "now"}),
        (b"x", {"timestamp_ms": -5}),
        (b"x", {"expire_at_ms": 1.5}),
        ("\ud800", {}),
        ([b"a", b"b"], {"key": b"k"}),
        (Record(b"x"), {"tags": [b"t"]}),
        (Record("text"), {}),  # type: ignore[arg-type]
        (pa.table({"other": [1]}), {}),
    ],
)
def test_invalid_records_are_refused(db: Basalt, value: Any, how: dict[str, Any]) -> None:
    topic = db.topic("orders")
    with pytest.raises(InvalidArgumentError):
        topic.append(value, **how)
    assert topic.info().next_offset == 0


def test_records_over_the_limit_are_refused(db: Basalt) -> None:
    topic = db.topic("orders", record_bytes_max=100)
    with pytest.raises(LimitExceededError):
        topic.append(b"x" * 101)
    topic.append(b"x" * 100)


@pytest.mark.spec("B4")
def test_keys_select_partitions_and_positions_are_returned(db: Basalt) -> None:
    topic = db.topic("orders", partitions=4)
    places = {topic.append(b"x", key=b"same").partition for _ in range(5)}
    assert len(places) == 1
    assert {topic.append(b"x").partition for _ in range(4)} == {0, 1, 2, 3}
    assert topic.append(b"x", partition=2).partition == 2
    spread = topic.append([Record(b"x", b"k%d" % at) for at in range(40)])
    assert sum(place.last_offset - place.offset + 1 for place in spread) == 40


def test_read_by_offset_time_and_limit(db: Basalt) -> None:
    topic = db.topic("orders")
    for at in range(10):
        topic.append(b"%d" % at, timestamp_ms=1000 + at)
    assert [record.offset for record in topic.read(offset=7)] == [7, 8, 9]
    assert [record.offset for record in topic.read(since_ms=1005)] == [5, 6, 7, 8, 9]
    assert [record.offset for record in topic.read(since_ms=5000)] == []
    assert [record.offset for record in topic.read(limit=2)] == [0, 1]
    assert list(topic.read(limit=0)) == []
    assert list(topic.read(offset=100)) == []
    assert topic.delete_offsets(0, [3]) == 1
    assert topic.delete_before(0, 2) == 2
    assert topic.delete_key("none") == 0
    assert [record.offset for record in topic.read()] == [2, 4, 5, 6, 7, 8, 9]
    with pytest.raises(OffsetOutOfRangeError):
        list(topic.read(offset=0))


@pytest.mark.parametrize(
    "how",
    [
        {"partition": 5},
        {"partition": "0"},
        {"offset": "0"},
        {"offset": -1},
        {"offset": 1, "since_ms": 1},
        {"since_ms": "noon"},
        {"key": b"a", "tag": b"b"},
        {"key": 7},
        {"wait": -1},
        {"wait": "long"},
    ],
)
def test_invalid_reads_are_refused(db: Basalt, how: dict[str, Any]) -> None:
    topic = db.topic("orders")
    topic.append(b"x")
    with pytest.raises(InvalidArgumentError):
        list(topic.read(**how))


def test_waiting_reader_gets_records_of_other_threads(db: Basalt) -> None:
    topic = db.topic("orders")
    got: list[bytes] = []

    def read() -> None:
        got.extend((record.value or b"") for record in topic.read(wait=None, limit=5))

    reader = threading.Thread(target=read)
    reader.start()
    for at in range(5):
        topic.append(b"%d" % at)
    reader.join(30)
    assert got == [b"%d" % at for at in range(5)]


def test_records_of_other_topics_do_not_extend_a_wait(db: Basalt) -> None:
    quiet, busy = db.topic("quiet"), db.topic("busy", engine="memory")
    stop = threading.Event()

    def write() -> None:
        while not stop.is_set():
            busy.append(b"x")

    writer = threading.Thread(target=write)
    writer.start()
    done = threading.Event()

    def read() -> None:
        assert list(quiet.read(wait=0)) == []
        assert list(quiet.read(wait=0.05)) == []
        assert list(quiet.consume("g", wait=0.05)) == []
        done.set()

    reader = threading.Thread(target=read)
    reader.start()
    finished = done.wait(30)
    stop.set()
    writer.join(30)
    reader.join(30)
    assert finished


def test_reader_of_a_deleted_or_recreated_topic_gets_an_error(db: Basalt) -> None:
    topic = db.topic("orders")
    topic.append(b"old")
    reading = topic.read(wait=None)
    consuming = topic.consume("g", wait=None)
    assert next(reading).value == next(consuming).value == b"old"
    failures: list[BaseException] = []

    def go_on(source: Any) -> None:
        try:
            next(source)
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=go_on, args=(source,)) for source in (reading, consuming)]
    for thread in threads:
        thread.start()
    db.delete_topic("orders")
    db.topic("orders").append([b"new"] * 5)
    for thread in threads:
        thread.join(30)
        assert not thread.is_alive()
    assert [type(failure) for failure in failures] == [TopicNotFoundError] * 2
    assert [each.value for each in db.topic("orders").consume("g", wait=0)] == [b"new"] * 5


@pytest.mark.spec("B7")
def test_consumer_commits_delivered_records_at_the_next_fetch(db: Basalt) -> None:
    topic = db.topic("orders")
    topic.append([b"%d" % at for at in range(10)])
    consumer = topic.consume("g", wait=0, batch=4)
    assert [next(consumer).offset for _ in range(5)] == [0, 1, 2, 3, 4]
    assert topic.lag("g")[0].committed == 4
    consumer.close()
    assert [each.offset for each in topic.consume("g", wait=0)] == [4, 5, 6, 7, 8, 9]
    assert topic.lag("g")[0].lag == 0
    assert list(topic.consume("g", wait=0)) == []


def test_with_block_commits_exactly_the_delivered_records(db: Basalt) -> None:
    topic = db.topic("orders")
    topic.append([b"%d" % at for at in range(10)])
    with topic.consume("g", wait=0) as consumer:
        for each in consumer:
            if each.offset == 3:
                break
    assert topic.lag("g")[0].committed == 4

    def fail() -> None:
        with topic.consume("g", wait=0) as consumer:
            for each in consumer:
                if each.offset == 6:
                    raise RuntimeError

    with pytest.raises(RuntimeError):
        fail()
    assert topic.lag("g")[0].committed == 4


def test_commit_covers_exactly_the_delivered_records_of_all_partitions(db: Basalt) -> None:
    topic = db.topic("orders", partitions=2)
    for at in range(6):
        topic.append(b"%d" % at, partition=at % 2)
    consumer = topic.consume("g", wait=0, batch=6)
    taken = [next(consumer) for _ in range(4)]
    # All records of one partition and one record of the other were delivered.
    consumer.commit()
    committed = {each.partition: each.committed for each in topic.lag("g")}
    for partition in (0, 1):
        assert committed[partition] == sum(each.partition == partition for each in taken)
    rest = consumer.poll()
    assert len(rest) == 2
    consumer.commit()
    assert all(each.lag == 0 for each in topic.lag("g"))
    assert consumer.poll() == []


def test_poll_after_iteration_returns_the_rest_first(db: Basalt) -> None:
    topic = db.topic("orders")
    topic.append([b"%d" % at for at in range(5)])
    consumer = topic.consume("g", wait=0)
    assert next(consumer).offset == 0
    assert [each.offset for each in consumer.poll()] == [1, 2, 3, 4]
    with pytest.raises(StopIteration):
        next(consumer)
    assert topic.lag("g")[0].lag == 0


def test_ended_consumer_stays_ended_and_closed_one_raises(db: Basalt) -> None:
    topic = db.topic("orders")
    consumer = topic.consume("g", wait=0)
    assert list(consumer) == []
    topic.append(b"late")
    assert list(consumer) == []
    consumer.close()
    with pytest.raises(StaleMemberError):
        consumer.poll()
    with pytest.raises(StaleMemberError):
        consumer.commit()


def test_waiting_member_takes_over_partitions_of_a_leaving_one(db: Basalt) -> None:
    topic = db.topic("orders", partitions=2)
    first = topic.consume("g", wait=0)
    second = topic.consume("g", wait=30)
    topic.append(b"a", partition=0)
    topic.append(b"b", partition=1)
    [own] = first.poll()
    [other] = second.poll()
    assert {own.partition, other.partition} == {0, 1}
    second.commit()
    got: list[bytes] = []
    waiting = threading.Thread(target=lambda: got.extend((each.value or b"") for each in second.poll(30)))
    waiting.start()
    first.close()
    waiting.join(30)
    assert got == [own.value]
    second.close()


def test_added_partitions_are_consumed(db: Basalt) -> None:
    topic = db.topic("orders")
    with topic.consume("g", wait=0) as consumer:
        assert consumer.poll() == []
        topic.alter(partitions=3)
        for partition in range(3):
            topic.append(b"%d" % partition, partition=partition)
        assert sorted(each.partition for each in consumer.poll()) == [0, 1, 2]


def test_reset_latest_and_offsets_removed_by_retention(db: Basalt) -> None:
    topic = db.topic("orders")
    topic.append([b"%d" % at for at in range(5)])
    late = topic.consume("late", reset="latest", wait=0)
    early = topic.consume("early", wait=0)
    assert late.poll() == []
    assert len(early.poll()) == 5
    topic.append([b"%d" % at for at in range(5, 10)])
    assert [each.offset for each in late.poll()] == [5, 6, 7, 8, 9]
    topic.delete_before(0, 8)
    assert [each.offset for each in early.poll()] == [8, 9]


def test_empty_polls_write_nothing(db: Basalt, monkeypatch: pytest.MonkeyPatch) -> None:
    topic = db.topic("orders")
    topic.append(b"x")
    consumer = topic.consume("g", wait=0)
    assert len(consumer.poll()) == 1
    assert consumer.poll() == []
    writes: list[object] = []
    monkeypatch.setattr(db.streams.offsets, "commit", lambda *args: writes.append(args))
    for _ in range(5):
        assert consumer.poll() == []
    assert writes == []
    topic.append(b"y")
    assert len(consumer.poll()) == 1
    assert consumer.poll() == []
    assert len(writes) == 1


def test_consumer_skips_a_long_run_of_deleted_records(db: Basalt) -> None:
    topic = db.topic("orders", engine="rocksdb")
    topic.append([b"%d" % at for at in range(50)])
    topic.delete_offsets(0, list(range(49)))
    assert [each.offset for each in topic.consume("g", wait=0)] == [49]
    topic.append([b"x"] * 5)
    topic.delete_offsets(0, list(range(50, 55)))
    assert list(topic.consume("g", wait=0)) == []
    assert topic.lag("g")[0].lag == 0


@pytest.mark.parametrize(
    ("group", "how"),
    [
        ("", {}),
        (7, {}),
        ("g", {"reset": "sometime"}),
        ("g", {"batch": 0}),
        ("g", {"batch": "many"}),
        ("g", {"wait": -1}),
        ("g", {"wait": "long"}),
    ],
)
def test_invalid_consumers_are_refused(db: Basalt, group: Any, how: dict[str, Any]) -> None:
    topic = db.topic("orders")
    topic.append(b"x")
    with pytest.raises(InvalidArgumentError):
        topic.consume(group, **how)


def test_consumers_in_threads_deliver_every_record(db: Basalt) -> None:
    topic = db.topic("orders", partitions=4, durability="written")
    total = 400
    lock = threading.Lock()
    got: list[tuple[int, int]] = []
    enough = threading.Event()

    def consume() -> None:
        with topic.consume("g", wait=None, batch=7) as consumer:
            while not enough.is_set():
                for each in consumer.poll(0.05):
                    with lock:
                        got.append((each.partition, each.offset))
                        if len(set(got)) >= total:
                            enough.set()

    threads = [threading.Thread(target=consume) for _ in range(4)]
    for thread in threads:
        thread.start()
    for at in range(total):
        topic.append(b"%d" % at)
    assert enough.wait(60)
    for thread in threads:
        thread.join(30)
    # Redelivery happens only if a member joins or leaves while another has undelivered records.
    assert len(set(got)) == total
    assert all(each.lag == 0 for each in topic.lag("g"))


def test_partition_lost_while_leaving_does_not_block_other_commits(db: Basalt, monkeypatch: pytest.MonkeyPatch) -> None:
    topic = db.topic("orders", partitions=2, durability="written")
    for partition in (0, 1):
        topic.append([b"a", b"b"], partition=partition)
    joined: list[Consumer] = []
    with topic.consume("g", wait=0) as consumer:
        assert len(consumer.poll(0)) == 4
        commit = db.streams.group("g").commit

        def after_somebody_joined(member: int, places: Mapping[tuple[str, int], int]) -> None:
            if not joined:
                joined.append(topic.consume("g", wait=0))
            commit(member, places)

        monkeypatch.setattr(db.streams.group("g"), "commit", after_somebody_joined)
    assert [(each.lag, each.committed) for each in topic.lag("g")] == [(0, 2)], "the partition that the member kept"
    joined[0].close()
