"""Workload of a child on streams until it is killed, and the checks afterwards.

Two writers append to the partitions of one topic, at `synced` and at `written`, while another thread commits offsets of
a group, trims a partition, runs retention, and creates and deletes topics. Lines to the parent:

    record p o v       after open: a record of partition p; then `bounds p start next`, `offset p o`, `topics ...`
                       and `opened`
    + p o v            the record at offset o of partition p was confirmed durable; `w p o v`: only written
    ? c p o, + c p o   a commit of the group's offset starts, was confirmed
    ? t p o, + t p o   partition p is being trimmed to o, was trimmed
    ? n name, + n name a topic is being created, was created; - n name: was deleted. The topics of a batch are named
                       `batch.number.of.size`: after a crash all of them exist or none
"""

from __future__ import annotations

import random
import threading
import time
from collections import Counter
from pathlib import Path
from typing import Any

from tests.crash.harness import Child, Emit, listen_and_kill

from basaltmq.durability import Durability
from basaltmq.errors import BasaltError
from basaltmq.log.batches.record import Record
from basaltmq.store.api import Store
from basaltmq.store.open import open_store
from basaltmq.streams.adapter import Clock, StorageAdapter
from basaltmq.streams.engines.segment.engine import SegmentEngine
from basaltmq.streams.leaders import Leaders
from basaltmq.streams.offsets import Offsets
from basaltmq.streams.plane import StreamPlane
from basaltmq.streams.shards import Engine, Shards
from basaltmq.streams.topics import NewTopic, Topic, TopicConfig

PARTITIONS = 2
TOPIC = "orders"


def _now_ms() -> int:
    return time.time_ns() // 1_000_000


def _open(path: Path) -> tuple[Any, StreamPlane]:
    opened = open_store(path)

    def segment(store: Store, shards: Shards, offsets: Offsets, clock_ms: Clock, leaders: Leaders) -> StorageAdapter:
        managed: Any = store
        return SegmentEngine(managed, shards, offsets, clock_ms, leaders, path=path / "log")

    return opened, StreamPlane(opened, _now_ms, makers={Engine.SEGMENT: segment})


def run(emit: Emit, path: str, engine: str, seed: int) -> None:
    """Open, dump, then work until killed, or for a while."""
    rng = random.Random(seed)
    store, plane = _open(Path(path))
    if plane.topics.find(TOPIC) is None:
        plane.topics.create(TOPIC, TopicConfig(partitions=PARTITIONS, engine=Engine(engine)))
    dump(emit, plane)
    stop = threading.Event()
    writers = [threading.Thread(target=_write, args=(emit, plane, stop, f"{seed}-{n}")) for n in range(2)]
    for writer in writers:
        writer.start()
    for number in range(rng.randint(5, 60)):
        _manage(emit, plane, rng, f"topic-{seed}-{number}", Engine(engine))
    stop.set()
    for writer in writers:
        writer.join()
    plane.close()
    store.close()


def check(emit: Emit, path: str) -> None:
    """Open, dump and close cleanly."""
    store, plane = _open(Path(path))
    dump(emit, plane)
    plane.close()
    store.close()


def dump(emit: Emit, plane: StreamPlane) -> None:
    topic = plane.topics.get(TOPIC)
    for partition in range(PARTITIONS):
        info = plane.drivers.info(TOPIC, partition)
        at = info.start_offset
        while at < info.high_watermark:
            batch = plane.drivers.read(TOPIC, partition, at)
            for record in batch.records():
                emit(f"record {partition} {record.offset} {(record.value or b'').decode()}")
            at = batch.next_offset
        emit(f"bounds {partition} {info.start_offset} {info.next_offset}")
    for (topic_id, partition), commit in plane.offsets.of_group("g").items():
        assert topic_id == topic.id
        emit(f"offset {partition} {commit.offset}")
    topics: list[Topic] = []
    after: str | None = None
    while after is not None or not topics:
        page = plane.topics.page(start_after=after)
        topics += page.topics
        after = page.next_after
    strays = {meta.topic_id for meta in plane.shards.listed()} - {each.id for each in topics}
    assert not strays, f"shards without a topic: {strays}"
    emit("topics " + " ".join(each.name for each in topics if each.name != TOPIC))
    emit("opened")


def _write(emit: Emit, plane: StreamPlane, stop: threading.Event, name: str) -> None:
    rng = random.Random(name)
    count = 0
    while not stop.is_set():
        level = rng.choice((Durability.SYNCED, Durability.SYNCED, Durability.WRITTEN))
        values = [f"{name}-{count + at}" for at in range(rng.randint(1, 5))]
        count += len(values)
        partition = rng.randrange(PARTITIONS)
        records = [Record(value.encode(), key=value[-2:].encode(), tags=(b"t",)) for value in values]
        append = plane.drivers.append_batch(TOPIC, records, partition=partition, durability=level)[0][1]
        if level is Durability.WRITTEN:
            for offset, value in enumerate(values, append.base_offset):
                emit(f"w {partition} {offset} {value}")
        else:
            plane.drivers.wait(append)
            for offset, value in enumerate(values, append.base_offset):
                emit(f"+ {partition} {offset} {value}")


def _manage(emit: Emit, plane: StreamPlane, rng: random.Random, name: str, engine: Engine) -> None:
    partition = rng.randrange(PARTITIONS)
    info = plane.drivers.info(TOPIC, partition)
    choice = rng.random()
    if choice < 0.4:
        offset = rng.randint(info.start_offset, info.high_watermark)
        emit(f"? c {partition} {offset}")
        plane.offsets.commit("g", {(plane.topics.get(TOPIC).id, partition): offset})
        emit(f"+ c {partition} {offset}")
    elif choice < 0.6:
        offset = max(info.start_offset, info.high_watermark - rng.randint(20, 60))
        emit(f"? t {partition} {offset}")
        plane.drivers.delete_records_before(TOPIC, partition, offset)
        emit(f"+ t {partition} {offset}")
    elif choice < 0.7:
        plane.engines.retain(_now_ms())
    else:
        count = rng.randint(1, 20)
        names = [f"{name}.{at}.of.{count}" for at in range(count)]
        for each in names:
            emit(f"? n {each}")
        config = TopicConfig(partitions=3, engine=engine)
        made = plane.topics.create_many([NewTopic(each, config) for each in names])
        assert not [each for each in made if isinstance(each, BasaltError)], made
        for each in names:
            emit(f"+ n {each}")
        if rng.random() < 0.5:
            for each in names:
                emit(f"? n {each}")
            assert plane.topics.delete_many(names) == [None] * count
            for each in names:
                emit(f"- n {each}")


class StreamExpectation:
    """The state that the parent expects."""

    def __init__(self, *, written_survives: bool) -> None:
        self.checks = 0
        self._written_survives = written_survives
        self._confirmed: dict[tuple[int, int], str] = {}
        self._starts = dict.fromkeys(range(PARTITIONS), 0)
        self._trims: dict[int, list[int]] = {partition: [] for partition in range(PARTITIONS)}
        self._commits: dict[int, int] = {}
        self._commit_doubts: dict[int, list[int]] = {}
        self._topics: set[str] = set()
        self._topic_doubts: set[str] = set()
        self._begin()

    def _begin(self) -> None:
        self._records: dict[int, dict[int, str]] = {partition: {} for partition in range(PARTITIONS)}
        self._bounds: dict[int, tuple[int, int]] = {}
        self._offsets: dict[int, int] = {}
        self._names: set[str] = set()

    def receive_line(self, line: str) -> None:
        kind, *rest = line.split(" ")
        if kind == "record":
            self._records[int(rest[0])][int(rest[1])] = rest[2]
        elif kind == "bounds":
            self._bounds[int(rest[0])] = (int(rest[1]), int(rest[2]))
        elif kind == "offset":
            self._offsets[int(rest[0])] = int(rest[1])
        elif kind == "topics":
            self._names = {name for name in rest if name}
        elif kind == "opened":
            self._check()
            self._begin()
            self.checks += 1
        elif rest[:1] and rest[0] in ("c", "t", "n"):
            self._change(kind, rest)
        elif kind == "+" or (kind == "w" and self._written_survives):
            self._confirmed[int(rest[0]), int(rest[1])] = rest[2]

    def _change(self, sign: str, rest: list[str]) -> None:
        if rest[0] == "n":
            if sign == "?":
                self._topic_doubts.add(rest[1])
                return
            self._topic_doubts.discard(rest[1])
            (self._topics.add if sign == "+" else self._topics.discard)(rest[1])
        elif rest[0] == "c":
            partition, offset = int(rest[1]), int(rest[2])
            if sign == "?":
                self._commit_doubts.setdefault(partition, []).append(offset)
            else:
                self._commit_doubts.pop(partition, None)
                self._commits[partition] = offset
        else:
            partition, offset = int(rest[1]), int(rest[2])
            if sign == "?":
                self._trims[partition].append(offset)
            else:
                self._starts[partition] = max(self._starts[partition], offset)

    def _check(self) -> None:
        for partition, (start, end) in self._bounds.items():
            records = self._records[partition]
            assert sorted(records) == list(range(start, end)), f"partition {partition} has holes or strays"
            assert start in {self._starts[partition], *self._trims[partition]}, (partition, start, self._starts)
            assert start >= self._starts[partition], "a trim was undone"
            self._starts[partition] = start
        for (partition, offset), value in self._confirmed.items():
            if offset >= self._starts[partition]:
                found = self._records[partition].get(offset)
                assert found == value, f"confirmed and lost: {partition} {offset} is {found}, not {value}"
        for partition, offset in self._commits.items():
            allowed = {offset, *self._commit_doubts.get(partition, [])}
            assert self._offsets.get(partition) in allowed, (partition, self._offsets, allowed)
        self._commits |= self._offsets
        self._commit_doubts.clear()
        for name in self._topics ^ self._names:
            assert name in self._topic_doubts, f"topic {name} is {'there' if name in self._names else 'lost'}"
        batches = Counter(name.split(".", 1)[0] for name in self._names)
        for name in self._names:
            prefix, _, _, count = name.split(".")
            assert batches[prefix] == int(count), f"{batches[prefix]} of the {count} topics of batch {prefix} are there"
        self._topics = set(self._names)
        self._topic_doubts.clear()
        # Visible records must stay from here on, because a reader may have used them.
        for partition, records in self._records.items():
            self._confirmed |= {(partition, offset): value for offset, value in records.items()}


def ride(child: Child, expectation: StreamExpectation, rng: random.Random, *, early: bool) -> None:
    """Read the lines of a child and kill it at a random time."""
    listen_and_kill(child, expectation.receive_line, rng, early=early, early_s=0.2, late_s=0.3)
