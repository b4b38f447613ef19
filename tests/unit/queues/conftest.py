"""Fixtures: a plane on a memory store, with a manual clock."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from basaltmq.durability import Durability
from basaltmq.errors import StoreStalledError
from basaltmq.queues.config import QueueConfig
from basaltmq.queues.plane import QueuePlane
from basaltmq.store.batch import Batch
from basaltmq.store.families import Family
from basaltmq.store.memory import MemoryStore
from basaltmq.store.sync.group_commit import GroupCommit

MS = 1_000_000
START_NS = 1_700_000_000_000_000_000


class Nowhere:
    """A quarantine for tests without damaged rows."""

    def note(self, family: Family, key: bytes, value: bytes | None, reason: str) -> None:
        raise AssertionError(f"a row of family {family.label} cannot be read: {reason}")


NOWHERE = Nowhere()


class Clock:
    """A manual clock in nanoseconds."""

    def __init__(self) -> None:
        self.now_ns = START_NS

    def __call__(self) -> int:
        return self.now_ns

    def pass_ms(self, ms: float) -> None:
        self.now_ns += int(ms * MS)


class TestStore(MemoryStore):
    """A memory store that can refuse writes and records its batches."""

    __test__ = False

    def __init__(self) -> None:
        super().__init__()
        self.refuse = 0
        self.refuse_unlogged = False
        self.batches: list[Batch] = []

    def write(self, batch: Batch, *, wal: bool = True, wait_ms: int | None = None) -> None:
        if self.refuse and wal:
            self.refuse -= 1
            raise StoreStalledError("the test refuses this write")
        if self.refuse_unlogged and not wal:
            raise StoreStalledError("the test refuses this write")
        if batch.ops:
            self.batches.append(batch)
        super().write(batch, wal=wal, wait_ms=wait_ms)

    def rows(self, family: Family) -> list[bytes]:
        return [key for key, _ in self.scan(family)]


class Planes:
    """Opens planes on one store. Opening again simulates a restart after a kill."""

    def __init__(self, store: TestStore, clock: Clock, commit: GroupCommit) -> None:
        self.store = store
        self.clock = clock
        self.commit = commit

    def open(self, **options: Any) -> QueuePlane:
        return QueuePlane(self.store, self.commit, clock_ns=self.clock, **options)


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def store() -> TestStore:
    return TestStore()


@pytest.fixture
def planes(store: TestStore, clock: Clock) -> Iterator[Planes]:
    commit = GroupCommit(store)
    yield Planes(store, clock, commit)
    commit.close()


@pytest.fixture
def plane(planes: Planes) -> QueuePlane:
    return planes.open()


@pytest.fixture
def make(plane: QueuePlane) -> Callable[..., str]:
    """Create a queue and return its name."""

    def create(name: str = "q", **fields: Any) -> str:
        plane.create(QueueConfig(name=name, durability=Durability.WRITTEN, **fields))
        return name

    return create


def payloads(plane: QueuePlane, queue: str, count: int = 1000) -> list[bytes]:
    """Drain a queue and return its payloads in order."""
    drained: list[bytes] = []
    while deliveries := plane.lease(queue, count):
        drained += [delivery.payload for delivery in deliveries]
        plane.ack(queue, deliveries[0].token)
    return drained


def settle(plane: QueuePlane, clock: Clock) -> int | None:
    """Run all due work."""
    for _ in range(10_000):
        deadline = plane.run_due(clock())
        if deadline is None or deadline > clock():
            return deadline
    raise AssertionError("run_due never comes to an end")
