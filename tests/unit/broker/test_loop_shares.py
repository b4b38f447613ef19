"""Work per connection: thousands of connections may cause it in one turn of the loop, which does a part of it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from functools import wraps
from typing import Any

import pytest

from basaltmq.broker.loop_shares import WORK_S, LoopShares


class Clock:
    """Seconds that pass while work is done."""

    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


def in_a_loop(test: Callable[..., Coroutine[Any, Any, None]]) -> Callable[..., None]:
    @wraps(test)
    def run(*args: Any, **kwargs: Any) -> None:
        asyncio.run(test(*args, **kwargs))

    return run


async def turn() -> None:
    await asyncio.sleep(0)


@pytest.mark.promise("P13")
@in_a_loop
async def test_a_turn_does_some_of_the_work_and_later_turns_the_rest_in_order() -> None:
    clock = Clock()
    shares = LoopShares(clock)
    done: list[int] = []

    def work(number: int) -> None:
        done.append(number)
        clock.now_s += WORK_S / 3

    for number in range(10):
        shares.do(lambda number=number: work(number))  # type: ignore[misc]
    counts = [len(done)]
    while len(done) < 10 and len(counts) < 20:
        await turn()
        counts.append(len(done))
    assert counts == [3, 6, 9, 10]
    assert done == list(range(10))


@in_a_loop
async def test_work_without_predecessors_is_done_at_once() -> None:
    shares = LoopShares(Clock())
    done: list[int] = []
    shares.do(lambda: done.append(1))
    assert done == [1]


@in_a_loop
async def test_work_that_fails_does_not_stop_what_follows(caplog: pytest.LogCaptureFixture) -> None:
    clock = Clock()
    shares = LoopShares(clock)
    done: list[int] = []

    def fail() -> None:
        clock.now_s += WORK_S
        raise ValueError("broken")

    shares.do(fail)
    shares.do(fail)
    shares.do(lambda: done.append(1))
    for _ in range(3):
        await turn()
    assert done == [1]
    assert caplog.text.count("ValueError: broken") == 2


@in_a_loop
async def test_work_takes_from_the_time_for_input() -> None:
    clock = Clock()
    shares = LoopShares(clock)

    def work() -> None:
        clock.now_s += WORK_S

    shares.do(work)
    shares.do(work)
    await turn()
    shares.begin(was_behind=False)
    assert not shares.is_over(WORK_S * 0.9)
    assert shares.is_over(WORK_S * 0.2)
