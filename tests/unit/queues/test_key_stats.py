"""Statistics by fairness and throttle key."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from basaltmq.durability import Durability
from basaltmq.queues.config import QueueConfig
from basaltmq.queues.draft import Draft
from basaltmq.queues.plane import QueuePlane
from basaltmq.queues.ready.budget import PagingLimits
from basaltmq.store.memory import MemoryStore
from basaltmq.store.sync.group_commit import GroupCommit

SECOND_NS = 1_000_000_000


class Clock:
    def __init__(self) -> None:
        self.now_ns = 1_000 * SECOND_NS

    def __call__(self) -> int:
        return self.now_ns


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def plane(clock: Clock) -> Iterator[QueuePlane]:
    store = MemoryStore()
    commit = GroupCommit(store)
    with QueuePlane(store, commit, clock_ns=clock, paging=PagingLimits(resident_max=4, read_ahead=4)) as opened:
        yield opened
    commit.close()


def fill(plane: QueuePlane, queue: str, counts: dict[str, int], **fields: Any) -> None:
    for key, count in counts.items():
        drafts = [Draft(payload=b"x" * 100, fairness_key=key, weight=len(key), **fields) for _ in range(count)]
        plane.enqueue(queue, drafts, durability=Durability.WRITTEN)


@pytest.mark.spec("C10")
@pytest.mark.parametrize("priorities_max", [0, 5])
def test_key_stats_count_ready_messages_only(plane: QueuePlane, priorities_max: int) -> None:
    plane.create(QueueConfig(name="q", priorities_max=priorities_max))
    fill(plane, "q", {"a": 5, "bb": 7})
    fill(plane, "q", {"a": 3}, priority=2)
    plane.lease("q", 3)
    active, keys = plane.fairness_keys("q")
    assert active == 2
    assert sum(key.pending for key in keys) == 12
    assert {key.key: key.weight for key in keys} == {"a": 1, "bb": 2}


@pytest.mark.spec("C11")
@pytest.mark.parametrize("look", ["fairness_keys", "browse"])
def test_reading_stats_does_not_take_a_waiting_consumer_token(plane: QueuePlane, clock: Clock, look: str) -> None:
    plane.create(QueueConfig(name="q"))
    plane.set_setting("throttle.api", "1,1")
    fill(plane, "q", {"a": 2}, throttle_keys=("api",))
    assert len(plane.lease("q", 2)) == 1
    woken: list[int] = []

    def wait() -> None:
        """Like a consumer: lease when woken, and wait again if there is no message."""
        woken.append(len(plane.lease("q")))
        if not woken[-1]:
            plane.on_ready("q", wait)

    wait()
    getattr(plane, look)("q")
    clock.now_ns += 2 * SECOND_NS
    plane.run_due()
    assert woken[-1] == 1


@pytest.mark.spec("C11")
def test_throttles_show_their_tokens(plane: QueuePlane, clock: Clock) -> None:
    plane.create(QueueConfig(name="q"))
    plane.set_setting("throttle.api", "1,3")
    fill(plane, "q", {"a": 2}, throttle_keys=("api",))
    plane.lease("q", 2)
    assert plane.throttle_keys() == [("api", 1, 1.0, 3)]
    clock.now_ns += SECOND_NS
    assert plane.throttle_keys() == [("api", 2, 1.0, 3)]
