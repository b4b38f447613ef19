"""Syncs of a lane by the loop that asks: short ones in the call itself, everything else by the thread."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from basaltmq.errors import StorageError
from basaltmq.log.lane import Lane
from basaltmq.log.lane_sync import HERE_BYTES_MAX, LaneSync
from basaltmq.store.sync.loop_time import AWAY_MIN

WAIT_S = 30.0
THREAD = "basalt-sync"


class Watched:
    """A lane whose syncs are noted, by the thread that made them."""

    def __init__(self, path: Path) -> None:
        self.lane = Lane.open(path, clock_ms=lambda: 1_000_000, random_u32=lambda: 7)
        self.threads: list[str] = []
        self.tidied: list[str] = []
        self.error: Exception | None = None
        self.meanwhile: Callable[[], None] = lambda: None

    def group(self, here_s_max: float = WAIT_S) -> LaneSync:
        return LaneSync(self, self.lane, self.move_ring_frames, here_s_max=here_s_max)

    def append(self, size_bytes: int = 16) -> None:
        self.lane.append((bytes(size_bytes),), size_bytes, gather=True)

    def sync(self) -> None:
        self.threads.append(threading.current_thread().name)
        self.meanwhile()
        if self.error is not None:
            raise self.error
        self.lane.sync_through_ring()

    def move_ring_frames(self) -> None:
        self.tidied.append(threading.current_thread().name)
        self.lane.move_ring_frames()

    def poison(self, error: BaseException) -> None:
        self.lane.poison(error)


@pytest.fixture
def watched(tmp_path: Path) -> Iterator[Watched]:
    made = Watched(tmp_path / "lane")
    yield made
    made.meanwhile = lambda: None
    made.lane.close()


def here() -> str:
    return threading.current_thread().name


def spin_until(condition: Callable[[], bool]) -> None:
    until = time.monotonic() + WAIT_S
    while not condition():
        assert time.monotonic() < until
        time.sleep(0)


@pytest.mark.promise("P1")
def test_what_is_little_the_loop_syncs_and_tidies_in_the_call_that_asks(watched: Watched) -> None:
    async def work() -> None:
        group = watched.group()
        watched.append()
        future = group.durable()
        assert watched.threads == watched.tidied == [here()]
        assert watched.lane.synced_position == 16
        await asyncio.wait_for(future, WAIT_S)
        group.close()

    asyncio.run(work())


@pytest.mark.promise("P1")
def test_what_is_much_the_thread_syncs(watched: Watched) -> None:
    async def work() -> None:
        group = watched.group()
        watched.append(HERE_BYTES_MAX + 8)
        await asyncio.wait_for(group.durable(), WAIT_S)
        assert watched.threads == [THREAD]
        assert watched.lane.synced_position == watched.lane.end
        group.close()

    asyncio.run(work())


@pytest.mark.promise("P1")
def test_the_loop_goes_on_while_somebody_else_syncs_the_lane(watched: Watched) -> None:
    async def work() -> None:
        group = watched.group()
        watched.append()
        with watched.lane._sync_lock:
            future = group.durable()
            await asyncio.sleep(0)
            assert not future.done()
        await asyncio.wait_for(future, WAIT_S)
        assert watched.threads == [THREAD]
        group.close()

    asyncio.run(work())


def test_after_a_slow_sync_the_thread_does_the_next_ones_and_then_the_loop_tries_again(watched: Watched) -> None:
    async def work() -> None:
        group = watched.group(here_s_max=0.0)
        for _ in range(AWAY_MIN + 2):
            watched.append()
            await asyncio.wait_for(group.durable(), WAIT_S)
            # The thread tells before it sleeps, and only then the loop may take its place.
            while not group._idle:  # noqa: ASYNC110
                await asyncio.sleep(0)
        assert watched.threads == [here(), *[THREAD] * AWAY_MIN, here()]
        group.close()

    asyncio.run(asyncio.wait_for(work(), WAIT_S))


@pytest.mark.promise("P1")
def test_a_loop_that_waits_for_its_own_write_is_served_by_the_thread(watched: Watched) -> None:
    async def work() -> None:
        group = watched.group()
        watched.append()
        group.wait_durable()
        assert watched.threads == [THREAD]
        group.close()

    asyncio.run(work())


@pytest.mark.promise("P1")
def test_threads_that_come_while_the_loop_syncs_are_served_by_the_thread(watched: Watched) -> None:
    async def work() -> None:
        group = watched.group()
        waiter = threading.Thread(target=group.wait_durable)

        def join() -> None:
            watched.meanwhile = lambda: None
            waiter.start()
            spin_until(lambda: bool(group._group))

        watched.meanwhile = join
        watched.append()
        await asyncio.wait_for(group.durable(), WAIT_S)
        await asyncio.get_running_loop().run_in_executor(None, waiter.join, WAIT_S)
        assert not waiter.is_alive()
        assert watched.threads == [here(), THREAD]
        group.close()

    asyncio.run(asyncio.wait_for(work(), WAIT_S))


@pytest.mark.promise("P1")
def test_a_loop_that_ends_with_its_question_leaves_nothing_undone(watched: Watched) -> None:
    groups: list[LaneSync] = []

    async def ask() -> None:
        groups.append(watched.group())
        watched.append()
        groups[0].durable()

    asyncio.run(ask())
    assert watched.tidied == [here()]
    watched.append()
    groups[0].wait_durable()
    assert watched.lane.synced_position == 32
    groups[0].close()


def test_closing_while_the_loop_syncs_ends_the_thread(watched: Watched) -> None:
    async def work() -> None:
        group = watched.group()
        closer = threading.Thread(target=group.close)

        def close() -> None:
            watched.meanwhile = lambda: None
            closer.start()
            spin_until(lambda: group._closing)

        watched.meanwhile = close
        watched.append()
        await asyncio.wait_for(group.durable(), WAIT_S)
        await asyncio.get_running_loop().run_in_executor(None, closer.join, WAIT_S)
        assert not closer.is_alive()

    asyncio.run(asyncio.wait_for(work(), WAIT_S))


@pytest.mark.promise("P1")
def test_a_failed_sync_fails_its_waiters_and_poisons_the_lane(watched: Watched) -> None:
    async def work() -> None:
        group = watched.group()
        watched.error = OSError("the disk is gone")
        watched.append()
        with pytest.raises(StorageError, match="the disk is gone"):
            await asyncio.wait_for(group.durable(), WAIT_S)
        with pytest.raises(StorageError):
            watched.append()
        group.close()

    asyncio.run(work())
