"""The waiters of one loop turn share a sync."""

from __future__ import annotations

import asyncio

import pytest

from basaltmq.errors import StorageError, StoreClosedError
from basaltmq.store.sync.group_commit import GroupCommit
from basaltmq.streams.engines.segment.tick import TickSync


class Target:
    def __init__(self) -> None:
        self.syncs = 0
        self.error: StorageError | None = None

    def sync(self) -> None:
        self.syncs += 1
        if self.error is not None:
            raise self.error

    def poison(self, error: BaseException) -> None: ...


@pytest.mark.promise("P1")
def test_sixteen_writers_that_wait_for_each_write_need_one_sync_per_round() -> None:
    target = Target()
    group = GroupCommit(target)
    tick = TickSync(group)

    async def write() -> None:
        for _ in range(10):
            await tick.durable()

    async def run() -> None:
        await asyncio.gather(*(write() for _ in range(16)))

    asyncio.run(run())
    asyncio.run(run())
    group.close()
    assert target.syncs == 20


@pytest.mark.promise("P1")
def test_callbacks_and_awaiters_share_a_sync_and_its_failure() -> None:
    target = Target()
    group = GroupCommit(target)
    tick = TickSync(group)
    reported: list[BaseException | None] = []

    async def run() -> None:
        before = len(reported)
        tick.call_when_durable(reported.append)
        waiting = tick.durable()
        tick.call_when_durable(reported.append)
        assert len(reported) == before
        await asyncio.wait_for(asyncio.wait([waiting]), 60)
        waiting.exception()

    asyncio.run(run())
    assert (reported, target.syncs) == ([None, None], 1)
    error = target.error = StorageError("gone")
    asyncio.run(run())
    assert reported[2:] == [error, error]
    group.close()
    asyncio.run(run())
    assert isinstance(reported[4], StoreClosedError)


@pytest.mark.promise("P1")
def test_a_failed_sync_or_a_closed_group_fails_all_waiters() -> None:
    target = Target()
    target.error = StorageError("gone")
    group = GroupCommit(target)
    tick = TickSync(group)

    async def run(error: type[Exception]) -> None:
        waiting = [tick.durable() for _ in range(3)]
        waiting[0].cancel()
        for each in waiting[1:]:
            with pytest.raises(error):
                await each

    asyncio.run(run(StorageError))
    group.close()
    asyncio.run(run(StoreClosedError))


def test_a_turn_that_never_ran_does_not_block_the_next_loop() -> None:
    target = Target()
    group = GroupCommit(target)
    tick = TickSync(group)

    async def leave() -> None:
        tick.durable()

    async def stay() -> None:
        await asyncio.wait_for(tick.durable(), 30)

    asyncio.run(leave())
    asyncio.run(stay())
    group.close()
