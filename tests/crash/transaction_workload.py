"""Workload of a child with transactions until it is killed, and the checks afterwards.

Producers write to the partitions of two topics and commit an offset of a separate group, in one transaction at a time.
Most are committed, some aborted, some left open. Lines to the parent:

    begun             a child began
    seen when t v     what topic t shows of committed records: `first` after open, `then` when every producer came
                      back, which aborts what was open; then `offset p n`, where the group of p stands, and `opened`
    ? p n t:v ...     records of transaction n of producer p are on their way
    commit p n        the decision is being asked for; `committed p n`: it was confirmed
"""

from __future__ import annotations

import asyncio
import random
from pathlib import Path

from tests.crash.harness import Emit
from tests.unit.log.strategies import transactional
from tests.unit.protocols.kafka.test_kafka_transactions import TIMEOUT_MS, Harness

from basaltmq.durability import Durability
from basaltmq.protocols.kafka.admin.topic_settings import topic_config
from basaltmq.streams.offsets import Commit

TOPICS = ("t", "u")
PRODUCERS = ("a", "b", "c")
FIRST, THEN = "first", "then"


def run(emit: Emit, path: str, seed: int) -> None:
    """Open, dump, then work until killed."""

    async def whole() -> None:
        harness = await _opened(emit, path)
        await asyncio.gather(*(_produce(emit, harness, each, f"{seed}.{each}") for each in PRODUCERS))

    asyncio.run(whole())


def check(emit: Emit, path: str) -> None:
    """Open, dump and close cleanly."""

    async def whole() -> None:
        (await _opened(emit, path)).close()

    asyncio.run(whole())


async def _opened(emit: Emit, path: str) -> Harness:
    emit("begun")
    harness = Harness(Path(path))
    for name in TOPICS:
        if harness.context.plane.topics.find(name) is None:
            harness.context.plane.topics.create(name, topic_config((), 1, Durability.SYNCED))
    _dump(emit, harness, FIRST)
    for each in PRODUCERS:
        await harness.transactions.initialize(each, TIMEOUT_MS)
    _dump(emit, harness, THEN)
    for each in PRODUCERS:
        for commit in harness.context.plane.offsets.of_group(each).values():
            emit(f"offset {each} {commit.offset}")
    emit("opened")
    return harness


def _dump(emit: Emit, harness: Harness, when: str) -> None:
    for name in TOPICS:
        engine, shard = harness.context.engine(harness.context.topic(name), 0)
        at = 0
        while (batch := engine.read_by_offset(shard, at)).next_offset > at:
            for record in batch.records():
                emit(f"seen {when} {name} {(record.value or b'').decode()}")
            at = batch.next_offset


async def _produce(emit: Emit, harness: Harness, producer: str, seed: str) -> None:
    rng = random.Random(seed)
    pid, epoch = await harness.transactions.initialize(producer, TIMEOUT_MS)
    sequences = dict.fromkeys(TOPICS, 0)
    numbers = [each.offset for each in harness.context.plane.offsets.of_group(producer).values()]
    source = harness.context.topic(TOPICS[0]).id
    number = max(numbers, default=0) + rng.randrange(1000)
    while True:
        number += 1
        used = rng.sample(TOPICS, rng.randint(1, len(TOPICS)))
        values = {name: [f"{seed}.{number}.{at}" for at in range(rng.randint(1, 3))] for name in used}
        shards = frozenset(harness.context.topic(name).shards[0] for name in used)
        emit(" ".join(["?", producer, str(number), *(f"{name}:{each}" for name in used for each in values[name])]))
        await harness.transactions.add(producer, pid, epoch, shards=shards, groups=frozenset((producer,)))
        for name, each in values.items():
            raw = transactional(pid, sequences[name], *(value.encode() for value in each), epoch=epoch)
            assert await harness.produce(name, producer, raw) == 0
            sequences[name] += len(each)
        await harness.transactions.commit_offsets(producer, pid, epoch, producer, {(source, 0): Commit(number)})
        outcome_roll = rng.random()
        if outcome_roll < 0.2:
            await harness.transactions.end(producer, pid, epoch, False)
        elif outcome_roll < 0.3:
            # Like a restarted client: its open transaction is aborted, and a new epoch begins.
            pid, epoch = await harness.transactions.initialize(producer, TIMEOUT_MS)
            sequences = dict.fromkeys(TOPICS, 0)
        else:
            emit(f"commit {producer} {number}")
            await harness.transactions.end(producer, pid, epoch, True)
            emit(f"committed {producer} {number}")


class TransactionExpectation:
    """The reported steps, and checks of visible records."""

    def __init__(self) -> None:
        self.opened = 0
        self._labels: dict[tuple[str, int], list[str]] = {}
        self._asked: set[tuple[str, int]] = set()
        self.committed: list[tuple[str, int]] = []
        """Labels in the order of each producer."""
        self._seen: dict[str, list[str]] = {FIRST: [], THEN: []}
        self._offsets: dict[str, int] = {}

    def receive_line(self, line: str) -> None:
        kind, *rest = line.split(" ")
        if kind == "begun":
            # The previous child may have been killed during its dump.
            self._seen = {FIRST: [], THEN: []}
            self._offsets = {}
        elif kind == "seen":
            self._seen[rest[0]].append(f"{rest[1]}:{rest[2]}")
        elif kind == "offset":
            self._offsets[rest[0]] = int(rest[1])
        elif kind == "?":
            self._labels[rest[0], int(rest[1])] = rest[2:]
        elif kind == "commit":
            self._asked.add((rest[0], int(rest[1])))
        elif kind == "committed":
            self._asked.discard((rest[0], int(rest[1])))
            self.committed.append((rest[0], int(rest[1])))
        else:
            assert kind == "opened", line
            self._check()
            self.opened += 1

    def _check(self) -> None:
        then = self._seen[THEN]
        for key in sorted(self._asked):
            labels = self._labels[key]
            shown = [each for each in labels if each in then]
            assert shown in ([], labels), f"transaction {key} is partially visible: {shown} of {labels}"
            if shown:
                self.committed.append(key)
        self._asked.clear()
        allowed = {label for key in self.committed for label in self._labels[key]}
        assert set(self._seen[FIRST]) <= allowed, "an uncommitted record is visible"
        assert set(then) <= allowed, "an uncommitted record is visible"
        for producer in PRODUCERS:
            mine = [key for key in self.committed if key[0] == producer]
            for topic in TOPICS:
                wanted = [label for key in mine for label in self._labels[key] if label.startswith(f"{topic}:")]
                found = [label for label in then if label.startswith(f"{topic}:") and f".{producer}." in label]
                assert found == wanted, f"producer {producer} in {topic}"
            last = {producer: mine[-1][1]} if mine else {}
            assert self._offsets.items() >= last.items(), (self._offsets, last)
            assert mine or producer not in self._offsets
