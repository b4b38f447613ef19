"""Syncs of a lane: short ones run on the requesting loop, all others in the thread."""

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
from basaltmq.store.sync.loop_sync import AWAY_MIN

WAIT_S = 30.0
THREAD = "basalt-sync"


class Watched:
    """A lane that records the thread of each sync."""

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
def test_the_loop_syncs_little_data_in_the_requesting_call(watched: Watched) -> None:
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
def test_the_thread_syncs_large_data(watched: Watched) -> None:
    async def work() -> None:
        group = watched.group()
        watched.append(HERE_BYTES_MAX + 8)
        await asyncio.wait_for(group.durable(), WAIT_S)
        assert watched.threads == [THREAD]
        assert watched.lane.synced_position == watched.lane.end
        group.close()

    asyncio.run(work())


@pytest.mark.promise("P1")
def test_the_loop_does_not_wait_for_another_sync_of_the_lane(watched: Watched) -> None:
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


def test_after_a_slow_sync_the_thread_runs_the_next_ones_before_the_loop_tries_again(watched: Watched) -> None:
    async def work() -> None:
        group = watched.group(here_s_max=0.0)
        for _ in range(AWAY_MIN + 2):
            watched.append()
            await asyncio.wait_for(group.durable(), WAIT_S)
            # The loop may sync only after the thread has become idle.
            while not group._idle:  # noqa: ASYNC110
                await asyncio.sleep(0)
        assert watched.threads == [here(), *[THREAD] * AWAY_MIN, here()]
        group.close()

    asyncio.run(asyncio.wait_for(work(), WAIT_S))


@pytest.mark.promise("P1")
def test_the_thread_syncs_for_a_loop_that_blocks(watched: Watched) -> None:
    async def work() -> None:
        group = watched.group()
        watched.append()
        group.wait_durable()
        assert watched.threads == [THREAD]
        group.close()

    asyncio.run(work())


@pytest.mark.promise("P1")
def test_the_thread_serves_threads_that_wait_during_a_sync_of_the_loop(watched: Watched) -> None:
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
def test_a_loop_that_closes_after_its_request_leaves_no_work(watched: Watched) -> None:
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
