"""Work per connection: thousands of connections may cause it in one turn of the loop, which does a part of it."""

from __future__ import annotations

import asyncio
import weakref
from collections.abc import Callable, Coroutine, Iterator
from functools import wraps
from typing import Any

import pytest

from basaltmq.broker.scheduling.loop_shares import CLOSE_S, PIECE_S, WORK_S, LoopShares, taken


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
async def test_work_is_split_over_turns_in_order() -> None:
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
async def test_work_without_predecessors_runs_immediately() -> None:
    shares = LoopShares(Clock())
    done: list[int] = []
    shares.do(lambda: done.append(1))
    assert done == [1]


@in_a_loop
async def test_failed_work_does_not_stop_later_work(caplog: pytest.LogCaptureFixture) -> None:
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
async def test_queued_work_uses_the_time_share_of_input() -> None:
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


@pytest.mark.promise("P13")
@in_a_loop
async def test_a_client_that_waits_does_not_wait_for_all_of_the_cleaning_up() -> None:
    clock = Clock()
    shares = LoopShares(clock)
    done: list[str] = []

    def work(name: str) -> None:
        done.append(name)
        clock.now_s += WORK_S / 4

    for number in range(100):
        shares.clean_up(lambda number=number: work(f"lost {number}"))  # type: ignore[misc]
    for number in range(4):
        shares.do(lambda number=number: work(f"new {number}"))  # type: ignore[misc]
    await turn()
    await turn()
    assert done[4:12] == ["new 0", "lost 4", "new 1", "lost 5", "new 2", "lost 6", "new 3", "lost 7"]


@pytest.mark.promise("P13")
@in_a_loop
async def test_steps_run_in_portions_and_other_work_runs_in_between() -> None:
    clock = Clock()
    shares = LoopShares(clock)
    done: list[object] = []

    def step(number: int) -> None:
        done.append(number)
        clock.now_s += PIECE_S / 2

    shares.in_portions(map(step, range(50)), lambda: done.append("done"))
    first = len(done)
    assert 0 < first < 50
    shares.clean_up(lambda: done.append("other"))
    while "done" not in done:
        await turn()
    assert done.index("other") <= first + WORK_S / PIECE_S * 2 + 1
    assert [each for each in done if each != "other"] == [*range(50), "done"]


@in_a_loop
async def test_a_step_that_fails_ends_a_generator_but_no_map(caplog: pytest.LogCaptureFixture) -> None:
    shares = LoopShares(Clock())
    done: list[object] = []

    def fail(number: int) -> None:
        done.append(number)
        raise ValueError("broken")

    def failing() -> Iterator[None]:
        done.append("first")
        yield
        raise ValueError("broken")

    shares.in_portions(map(fail, range(3)), lambda: done.append("map done"))
    shares.in_portions(failing(), lambda: done.append("generator done"))
    for _ in range(5):
        await turn()
    assert sorted(map(str, done)) == ["0", "1", "2", "first", "generator done", "map done"]
    assert caplog.text.count("ValueError: broken") == 4


@pytest.mark.promise("P13")
@in_a_loop
async def test_lost_connections_are_freed_in_the_portions_that_check_them() -> None:
    class Connection:
        pass

    clock = Clock()
    shares = LoopShares(clock)
    connections = [Connection() for _ in range(50)]
    alive = weakref.WeakSet(connections)
    checked: list[None] = []

    def check(_: Connection) -> None:
        checked.append(None)
        clock.now_s += PIECE_S / 2

    steps = map(check, taken(connections))
    del connections
    shares.in_portions(steps, lambda: checked.append(None))
    del steps
    turns = 0
    while len(checked) < 51:
        assert len(alive) == 50 - len(checked)
        await turn()
        turns += 1
    assert turns > 1


class ClosingTransport(asyncio.Transport):
    """Counts closed sockets."""

    closed = 0

    def close(self) -> None:
        ClosingTransport.closed += 1


@pytest.mark.promise("P13")
@in_a_loop
async def test_thousands_of_clients_that_leave_at_once_are_closed_in_portions() -> None:
    ClosingTransport.closed = 0
    shares = LoopShares(Clock())
    count = int(3 * WORK_S / CLOSE_S)
    assert all(shares.close_later(ClosingTransport()) for _ in range(count)), "the transport must not close itself"
    seen = [ClosingTransport.closed]
    while ClosingTransport.closed < count:
        await turn()
        seen.append(ClosingTransport.closed)
    assert len(seen) in (3, 4), seen
    assert not shares.close_later(ClosingTransport({"ssl_object": object()})), "TLS closes at once"
