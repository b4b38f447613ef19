"""Supervision: a failed virtual host is opened again, within the limits, without effect on others (SPEC E9)."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import pytest
from tests.unit.broker.rig import BrokenStore, FakePublisher, drain, publish, until

from basaltmq.broker.supervision import Supervised, VHostState
from basaltmq.broker.vhost import VHost
from basaltmq.errors import DiskFullError, StorageError, StorePoisonedError, VHostDownError
from basaltmq.store.memory import MemoryStore


class Rig:
    """A supervised virtual host whose store survives failures like a disk."""

    def __init__(self, *, restarts_max: int = 3, window_s: float = 300.0) -> None:
        self.now_s = 0.0
        self.opened = 0
        self.closed = 0
        self.refuse = 0
        self.opening: asyncio.Event | None = None
        """Opening waits until this is set."""
        self.refusal: BaseException = StorageError("the test does not open")
        self.full: list[str] = []
        self.gave_up: list[str] = []
        self.states: list[VHostState] = []
        self.store = BrokenStore()
        self.supervised = Supervised(
            "/",
            self._open,
            self._close,
            restarts_max=restarts_max,
            window_s=window_s,
            gave_up=lambda each: self.gave_up.append(each.name),
            changed=lambda each: self.states.append(each.state),
            disk_full=lambda each: self.full.append(each.name),
            clock_s=lambda: self.now_s,
            pause_s=0.0,
        )

    async def _open(self) -> VHost:
        self.opened += 1
        if self.opening is not None:
            await self.opening.wait()
        if self.refuse:
            self.refuse -= 1
            raise self.refusal
        rows = self.store._rows
        self.store = BrokenStore()
        self.store._rows = rows
        return VHost("/", self.store)

    async def _close(self, vhost: VHost) -> None:
        assert isinstance(vhost.store, MemoryStore)
        self.closed += 1

    async def fail(self) -> None:
        """Break the disk of the running virtual host, and wait until it was restarted or is down."""
        vhost = self.supervised.vhost()
        vhost.fail(StorageError("the test breaks the disk"))
        await until(lambda: self.supervised.state in (VHostState.RUNNING, VHostState.DOWN) and not self._is_busy(vhost))

    def _is_busy(self, failed: VHost) -> bool:
        return self.supervised.state is VHostState.RUNNING and self.supervised.vhost() is failed


def with_rig(test: Callable[[Rig], Awaitable[None]], rig: Callable[[], Rig] = Rig) -> None:
    async def whole() -> None:
        made = rig()
        await made.supervised.start()
        try:
            await test(made)
        finally:
            await made.supervised.stop()

    asyncio.run(whole())


@pytest.mark.spec("E9")
@pytest.mark.promise("P11")
def test_a_failed_vhost_restarts_with_all_confirmed_messages() -> None:
    async def test(rig: Rig) -> None:
        vhost = rig.supervised.vhost()
        vhost.declare_queue("q", durable=True)
        publisher = FakePublisher()
        publish(vhost, publisher, "q", b"kept")
        await until(lambda: publisher.numbers() == [1])
        await rig.fail()
        again = rig.supervised.vhost()
        assert again is not vhost
        assert [each.payload for each in drain(again, "q")] == [b"kept"]
        assert rig.supervised.restarts == 1
        with pytest.raises(VHostDownError):
            vhost.declare_queue("r")

    with_rig(test)


@pytest.mark.spec("E9")
def test_the_fourth_failure_within_the_window_keeps_it_down_until_an_operator_acts() -> None:
    async def test(rig: Rig) -> None:
        for _ in range(3):
            await rig.fail()
            assert rig.supervised.state is VHostState.RUNNING
            rig.now_s += 60
        await rig.fail()
        assert rig.supervised.state is VHostState.DOWN
        assert rig.gave_up == ["/"]
        with pytest.raises(VHostDownError, match="is down: the test breaks the disk"):
            rig.supervised.vhost()
        opened = rig.opened
        await rig.supervised.start()
        assert rig.supervised.vhost().is_up
        assert rig.opened == opened + 1
        await rig.fail()
        assert rig.supervised.vhost().is_up, "an operator's start begins a count of its own"

    with_rig(test)


@pytest.mark.spec("E9")
def test_failures_outside_the_window_are_not_counted() -> None:
    async def test(rig: Rig) -> None:
        for _ in range(10):
            await rig.fail()
            assert rig.supervised.state is VHostState.RUNNING
            rig.now_s += 101

    with_rig(test)


@pytest.mark.spec("E9")
def test_opening_a_vhost_is_retried_a_limited_number_of_times() -> None:
    def two() -> Rig:
        rig = Rig()
        rig.refuse = 2
        return rig

    async def recovers(rig: Rig) -> None:
        await until(lambda: rig.supervised.state is VHostState.RUNNING)
        assert rig.opened == 3
        assert rig.supervised.error is None

    def many() -> Rig:
        rig = Rig()
        rig.refuse = 100
        return rig

    async def stays_down(rig: Rig) -> None:
        await until(lambda: rig.supervised.state is VHostState.DOWN)
        assert rig.opened == 4
        assert rig.gave_up == ["/"]

    with_rig(recovers, two)
    with_rig(stays_down, many)


def test_stopping_cancels_a_running_restart() -> None:
    async def test(rig: Rig) -> None:
        rig.refuse = 100
        rig.supervised.vhost().fail(StorageError("gone"))
        await rig.supervised.stop()
        opened = rig.opened
        for _ in range(20):
            await asyncio.sleep(0)
        assert rig.opened == opened
        assert rig.supervised.state is VHostState.STOPPED

    with_rig(test)


@pytest.mark.spec("E9")
def test_a_failed_manual_restart_reports_its_reason() -> None:
    async def test(rig: Rig) -> None:
        rig.refuse = 100
        with pytest.raises(VHostDownError, match="is down: the test does not open; fix the cause, then start it"):
            await rig.supervised.restart_by_hand()
        assert rig.supervised.state is VHostState.DOWN
        with pytest.raises(VHostDownError, match="the test does not open"):
            await rig.supervised.start_by_hand()
        rig.refuse = 2
        await rig.supervised.restart_by_hand()
        assert rig.supervised.vhost().is_up, "it waits for restarts that are under way"

    with_rig(test)


@pytest.mark.spec("E9")
def test_a_start_that_times_out_is_an_error() -> None:
    async def test(rig: Rig) -> None:
        rig.opening = asyncio.Event()
        restarting = asyncio.create_task(rig.supervised.restart_by_hand())
        await until(lambda: rig.supervised.state is VHostState.STARTING)
        with pytest.raises(VHostDownError, match="is starting"):
            await rig.supervised.require_running(timeout_s=0.01)
        rig.opening.set()
        await restarting
        assert rig.supervised.vhost().is_up

    with_rig(test)


@pytest.mark.spec("E9")
@pytest.mark.promise("P11")
def test_stopping_while_a_restart_opens_the_store_leaves_nothing_open() -> None:
    async def test(rig: Rig) -> None:
        rig.opening = asyncio.Event()
        opened = rig.opened
        rig.supervised.vhost().fail(StorageError("gone"))
        await until(lambda: rig.opened == opened + 1)
        stopping = asyncio.create_task(rig.supervised.stop())
        await asyncio.sleep(0)
        rig.opening.set()
        await stopping
        assert rig.supervised.state is VHostState.STOPPED
        assert rig.closed == rig.opened, "what a thread opened meanwhile is closed again"

    with_rig(test)


def test_concurrent_manual_restarts_both_succeed() -> None:
    async def test(rig: Rig) -> None:
        await asyncio.gather(*(rig.supervised.restart_by_hand() for _ in range(3)))
        assert rig.supervised.vhost().is_up

    with_rig(test)


@pytest.mark.spec("E9")
@pytest.mark.promise("P11")
@pytest.mark.parametrize(
    "refusal",
    [
        DiskFullError("no space left for /data"),
        StorePoisonedError("the lane stopped after an I/O error: no space left", True),
        OSError(28, "No space left on device"),
    ],
)
def test_restarts_because_of_a_full_disk_are_not_limited(refusal: BaseException) -> None:
    async def test(rig: Rig) -> None:
        rig.refuse, rig.refusal = 8, refusal
        rig.supervised.vhost().fail(refusal)
        await until(lambda: rig.supervised.state is VHostState.RUNNING)
        assert rig.refuse == 0
        assert rig.gave_up == []
        assert VHostState.DOWN not in rig.states
        assert len(rig.full) == 9
        # Restarts for other reasons are counted from zero.
        rig.refusal = StorageError("the test does not open")
        for _ in range(3):
            await rig.fail()
            assert rig.supervised.state is VHostState.RUNNING
        await rig.fail()
        assert rig.supervised.state is VHostState.DOWN

    with_rig(test)
