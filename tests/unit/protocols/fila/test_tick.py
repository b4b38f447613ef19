"""Enqueues gathered: one write for many calls, one sync, and everybody's errors apart."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import pytest

from basaltmq.durability import Durability
from basaltmq.errors import BasaltError, InvalidArgumentError, QueueFullError, QueueNotFoundError, StorageError
from basaltmq.protocols.grpc.services.tick import GATHERED_BYTES_MAX, TURNS_MAX, Tick
from basaltmq.queues.config import Overflow, QueueConfig
from basaltmq.queues.draft import Draft
from basaltmq.queues.plane import QueuePlane
from basaltmq.store.memory import MemoryStore
from basaltmq.store.sync.group_commit import GroupCommit, Synced, call_all


class ManualCommit(GroupCommit):
    """Syncs when told to."""

    def __init__(self, store: MemoryStore) -> None:
        super().__init__(store)
        self.waiting: list[Synced] = []

    def after_sync(self, loop: asyncio.AbstractEventLoop, callbacks: list[Synced]) -> None:
        self.waiting += callbacks

    def sync(self, error: BasaltError | None = None) -> None:
        waiting, self.waiting = self.waiting, []
        call_all(waiting, error)


class Bench:
    def __init__(self) -> None:
        self.store = MemoryStore()
        self.commit = ManualCommit(self.store)
        self.plane = QueuePlane(self.store, self.commit)
        self.plane._changes.sync = lambda: None  # type: ignore[method-assign]
        for name in ("a", "b"):
            self.plane.create(QueueConfig(name=name))
        self.tick = Tick(self.plane, self.commit, asyncio.get_running_loop())


def run(test: Callable[[Bench], Awaitable[None]]) -> None:
    async def inside() -> None:
        bench = Bench()
        try:
            await asyncio.wait_for(test(bench), 30)
        finally:
            bench.plane.close()
            bench.commit.close()

    asyncio.run(inside())


async def turn() -> None:
    """Long enough for what was gathered to be written."""
    for _ in range(4):
        await asyncio.sleep(0)


@pytest.mark.spec("C6")
def test_calls_of_one_turn_are_one_write_and_wait_for_one_sync() -> None:
    async def test(bench: Bench) -> None:
        before = bench.store.writes()
        calls = [bench.tick.enqueue("a" if i % 2 else "b", [b"%d" % i]) for i in range(50)]
        await turn()
        assert bench.store.writes() == before + 1
        assert len(bench.commit.waiting) == 1
        assert not any(call.done() for call in calls)
        bench.commit.sync()
        ids = [message_id for call in calls for message_id in await call]
        assert len(set(ids)) == 50
        assert bench.plane.stats("a")["ready"] == 25

    run(test)


def test_what_comes_while_the_disk_syncs_is_one_write_when_it_is_done() -> None:
    async def test(bench: Bench) -> None:
        first = bench.tick.enqueue("a", [b"1"])
        await turn()
        before = bench.store.writes()
        later = []
        for i in range(10):
            later.append(bench.tick.enqueue("a", [b"later %d" % i]))
            await turn()
        assert bench.store.writes() == before
        bench.commit.sync()
        assert first.done(), "who waited is answered before the next write"
        assert bench.store.writes() == before
        await turn()
        assert bench.store.writes() == before + 1
        bench.commit.sync()
        assert len({(await call)[0] for call in later}) == 10

    run(test)


def test_calls_that_come_turn_by_turn_are_one_write_but_not_for_ever() -> None:
    async def test(bench: Bench) -> None:
        before = bench.store.writes()
        for i in range(TURNS_MAX):
            bench.tick.enqueue("a", [b"%d" % i])
            await asyncio.sleep(0)
            assert bench.store.writes() == before
        await turn()
        assert bench.store.writes() == before + 1
        bench.commit.sync()
        before = bench.store.writes()
        for i in range(2 * TURNS_MAX):
            bench.tick.enqueue("a", [b"%d" % i])
            await asyncio.sleep(0)
        assert bench.store.writes() == before + 1, "it was written while others came"

    run(test)


def test_much_does_not_wait_for_the_sync() -> None:
    async def test(bench: Bench) -> None:
        bench.tick.enqueue("a", [b"1"])
        await turn()
        before = bench.store.writes()
        large = bench.tick.enqueue("a", [bytes(GATHERED_BYTES_MAX + 1)])
        await turn()
        assert bench.store.writes() == before + 1
        bench.commit.sync()
        await large

    run(test)


def test_only_the_culprit_fails() -> None:
    async def test(bench: Bench) -> None:
        good = [bench.tick.enqueue("a", [b"1"]), bench.tick.enqueue("b", [b"2"]), bench.tick.enqueue("a", [b"3"])]
        missing = bench.tick.enqueue("missing", [b""])
        bad = bench.tick.enqueue("a", [Draft(payload=b"", delay_ms=-1)])
        await turn()
        bench.commit.sync()
        assert len([await call for call in good]) == 3
        with pytest.raises(QueueNotFoundError):
            await missing
        with pytest.raises(InvalidArgumentError):
            await bad
        assert bench.plane.stats("a")["ready"] == 2

    run(test)


def test_a_queue_that_refuses_refuses_calls_and_not_their_neighbours() -> None:
    async def test(bench: Bench) -> None:
        bench.plane.create(QueueConfig(name="short", length_max=2, overflow=Overflow.REJECT_PUBLISH))
        calls = [bench.tick.enqueue("short", [b"%d" % i]) for i in range(4)]
        other = bench.tick.enqueue("a", [b"x"])
        await turn()
        bench.commit.sync()
        await other
        verdicts = await asyncio.gather(*calls, return_exceptions=True)
        assert [isinstance(each, QueueFullError) for each in verdicts] == [False, False, True, True]
        assert bench.plane.stats("short")["ready"] == 2

    run(test)


def test_what_a_queue_refuses_is_dead_lettered_once() -> None:
    async def test(bench: Bench) -> None:
        bench.plane.create(
            QueueConfig(
                name="short",
                length_max=2,
                overflow=Overflow.REJECT_PUBLISH_DEAD_LETTER,
                dead_letter_queue="dead",
            )
        )
        calls = [bench.tick.enqueue("short", [b"%d" % i]) for i in range(4)]
        await turn()
        bench.commit.sync()
        verdicts = await asyncio.gather(*calls, return_exceptions=True)
        assert [isinstance(each, QueueFullError) for each in verdicts] == [False, False, True, True]
        assert (bench.plane.stats("short")["ready"], bench.plane.stats("dead")["ready"]) == (2, 2)

    run(test)


@pytest.mark.promise("P1")
def test_a_failed_sync_is_told_to_everyone_who_waited() -> None:
    async def test(bench: Bench) -> None:
        calls = [bench.tick.enqueue("a", [b"1"]), bench.tick.enqueue("b", [b"2"])]
        await turn()
        bench.commit.sync(StorageError("the disk is gone"))
        for call in calls:
            with pytest.raises(StorageError, match="gone"):
                await call

    run(test)


def test_a_queue_that_promises_less_is_answered_after_the_write() -> None:
    async def test(bench: Bench) -> None:
        bench.plane.create(QueueConfig(name="fast", durability=Durability.WRITTEN))
        call = bench.tick.enqueue("fast", [b"1"])
        await turn()
        assert not bench.commit.waiting
        assert len(await call) == 1

    run(test)


def test_a_caller_that_goes_away_harms_nobody() -> None:
    async def test(bench: Bench) -> None:
        gone, stays = bench.tick.enqueue("a", [b"1"]), bench.tick.enqueue("a", [b"2"])
        gone.cancel()
        await turn()
        bench.commit.sync()
        await stays
        assert bench.plane.stats("a")["ready"] == 2, "it is written all the same"

    run(test)


def test_nobody_waits_for_ever_when_something_breaks() -> None:
    async def test(bench: Bench) -> None:
        def broken(name: str) -> QueueConfig:
            raise RuntimeError("a bug")

        bench.plane.get = broken  # type: ignore[method-assign]
        call = bench.tick.enqueue("a", [b""])
        with pytest.raises(RuntimeError, match="a bug"):
            await call

    run(test)


def test_a_closed_plane_refuses() -> None:
    async def test(bench: Bench) -> None:
        bench.plane.close()
        with pytest.raises(BasaltError):
            await bench.tick.enqueue("a", [b""])

    run(test)
