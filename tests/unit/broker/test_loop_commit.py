"""Syncs on the event loop: on a fast disk by the loop, on a slow one by the thread, and no sync is missing."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from basaltmq.errors import StorageError, StoreClosedError
from basaltmq.store.batch import Batch
from basaltmq.store.families import Family
from basaltmq.store.open import open_store
from basaltmq.store.rocks import RocksStore
from basaltmq.store.sync.loop_commit import LoopCommit
from basaltmq.store.sync.loop_sync import AWAY_MIN

WAIT_S = 30.0


class Watched:
    """A store whose syncs are counted, by the thread that made them."""

    def __init__(self, store: RocksStore) -> None:
        self.store = store
        self.threads: list[str] = []
        self.slow_s = 0.0
        self.error: Exception | None = None

    def sync(self) -> None:
        self.threads.append(threading.current_thread().name)
        if self.slow_s:
            time.sleep(self.slow_s)
        if self.error is not None:
            raise self.error
        self.store.sync()

    def poison(self, error: BaseException) -> None:
        self.store.poison(error)

    def write(self, batch: Batch, *, wal: bool = True, wait_ms: int | None = None) -> None:
        self.store.write(batch, wal=wal, wait_ms=wait_ms)


@pytest.fixture
def watched(tmp_path: Path) -> Iterator[Watched]:
    store = open_store(tmp_path / "store")
    assert isinstance(store, RocksStore)
    yield Watched(store)
    store.close()


def commit_of(watched: Watched, here_s_max: float = WAIT_S) -> LoopCommit:
    return LoopCommit(watched, here_s_max=here_s_max)


def here() -> str:
    return threading.current_thread().name


@pytest.mark.promise("P1")
def test_requests_of_one_turn_share_a_sync_on_the_loop(watched: Watched) -> None:
    async def work() -> None:
        commit = commit_of(watched)
        futures = [commit.durable() for _ in range(5)]
        assert watched.threads == []
        await asyncio.wait_for(asyncio.gather(*futures), WAIT_S)
        assert watched.threads == [here()]
        await asyncio.wait_for(commit.durable(), WAIT_S)
        assert watched.threads == [here()] * 2
        commit.close()

    asyncio.run(work())


def test_after_a_slow_sync_the_thread_does_the_next_ones_and_then_the_loop_tries_again(watched: Watched) -> None:
    async def work() -> None:
        commit = commit_of(watched, here_s_max=0.0)
        while watched.threads.count(here()) < 3:
            await asyncio.wait_for(commit.durable(), WAIT_S)
        assert watched.threads == [
            here(),
            *["basalt-sync"] * AWAY_MIN,
            here(),
            *["basalt-sync"] * 2 * AWAY_MIN,
            here(),
        ]
        commit.close()

    asyncio.run(work())


@pytest.mark.parametrize("here_s_max", [WAIT_S, 0.0])
def test_callbacks_scheduled_in_the_turn_run_before_the_sync(watched: Watched, here_s_max: float) -> None:
    """Connections write their deliveries in the next turn. A consumer must not wait for the disk."""

    async def work() -> None:
        commit = commit_of(watched, here_s_max)
        loop = asyncio.get_running_loop()
        for number in range(AWAY_MIN):
            done = commit.durable()
            synced_before: list[int] = []

            def write(before: list[int] = synced_before) -> None:
                before.append(len(watched.threads))

            loop.call_soon(write)
            await asyncio.wait_for(done, WAIT_S)
            assert synced_before == [number]
        commit.close()

    asyncio.run(work())


@pytest.mark.promise("P1")
def test_a_request_during_a_sync_is_confirmed_by_the_next_sync(watched: Watched) -> None:
    async def work() -> None:
        commit = commit_of(watched)
        reported: list[str] = []

        def again(_done: asyncio.Future[None]) -> None:
            reported.append("first")
            commit.durable().add_done_callback(lambda _: reported.append("second"))

        commit.durable().add_done_callback(again)
        until = time.monotonic() + WAIT_S
        while len(reported) < 2 and time.monotonic() < until:  # noqa: ASYNC110
            await asyncio.sleep(0.001)
        assert reported == ["first", "second"]
        assert watched.threads == [here()] * 2
        commit.close()

    asyncio.run(work())


@pytest.mark.promise("P1")
def test_a_second_loop_in_a_thread_is_notified_too(watched: Watched) -> None:
    def commit_some(commit: LoopCommit, number: int) -> None:
        async def work() -> None:
            for each in range(20):
                batch = Batch()
                batch.put(Family.VERSION, b"%d-%d" % (number, each), b"\0\0\0\1")
                watched.write(batch)
                await asyncio.wait_for(commit.durable(), WAIT_S)

        asyncio.run(work())

    async def work() -> None:
        commit = commit_of(watched)
        loop = asyncio.get_running_loop()
        threads = [loop.run_in_executor(None, commit_some, commit, number) for number in range(3)]
        done = asyncio.gather(*threads)
        while not done.done():
            await asyncio.wait_for(commit.durable(), WAIT_S)
        await done
        commit.close()

    asyncio.run(asyncio.wait_for(work(), WAIT_S))
    assert all(watched.store.get(Family.VERSION, b"%d-19" % number) for number in range(3))


@pytest.mark.promise("P1")
def test_closing_before_the_end_of_the_turn_syncs_waiting_requests(watched: Watched) -> None:
    async def work() -> None:
        commit = commit_of(watched)
        future = commit.durable()
        commit.close()
        await asyncio.wait_for(future, WAIT_S)
        assert watched.threads == [here()]
        with pytest.raises(StoreClosedError):
            commit.durable()

    asyncio.run(work())


@pytest.mark.promise("P1")
def test_a_failed_sync_confirms_nothing_and_poisons_the_store(watched: Watched) -> None:
    async def work() -> None:
        commit = commit_of(watched)
        watched.error = OSError("the disk is gone")
        with pytest.raises(StorageError, match="the disk is gone"):
            await asyncio.wait_for(commit.durable(), WAIT_S)
        commit.close()

    asyncio.run(work())
    with pytest.raises(StorageError):
        watched.store.sync()


@pytest.mark.promise("P13")
def test_a_large_sync_runs_in_a_thread_and_the_next_on_the_loop(watched: Watched) -> None:
    async def work() -> None:
        commit = commit_of(watched)
        commit.sync_in_thread()
        await asyncio.wait_for(commit.durable(), WAIT_S)
        await asyncio.wait_for(commit.durable(), WAIT_S)
        await asyncio.to_thread(commit.close)
        assert watched.threads[0] != here()
        assert watched.threads[1] == here()

    asyncio.run(work())
