"""Enqueues in the tick: one write for many calls, one sync, and a separate error for each call."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import pytest
from tests.unit.broker.rig import BrokenStore, FakePublisher, publish, settlement, until

from basaltmq.broker.message.operations import Enqueue
from basaltmq.broker.publishing.gathered import BATCH_MESSAGES_MAX, TURN_BYTES_MAX
from basaltmq.broker.publishing.tick import GATHER_BYTES_MAX, GATHER_TURNS_MAX
from basaltmq.broker.vhost import VHost
from basaltmq.durability import Durability
from basaltmq.errors import (
    BasaltError,
    InvalidArgumentError,
    QueueFullError,
    QueueNotFoundError,
    StorageError,
    VHostDownError,
)
from basaltmq.queues.config import Overflow, QueueConfig
from basaltmq.queues.draft import Draft
from basaltmq.store.sync.group_commit import Synced, call_all


class ManualSync:
    """Syncs of a virtual host that the test completes."""

    def __init__(self, vhost: VHost) -> None:
        self.waiting: list[Synced] = []
        self._commit = vhost.commit
        vhost.commit.after_sync = self._wait  # type: ignore[method-assign]

    def _wait(self, loop: asyncio.AbstractEventLoop, callbacks: list[Synced]) -> None:
        self.waiting += callbacks

    def __call__(self, error: BasaltError | None = None) -> None:
        waiting, self.waiting = self.waiting, []
        call_all(waiting, error)

    def end(self) -> None:
        del self._commit.after_sync
        self()


class Bench:
    """A virtual host with the queues `a` and `b`."""

    def __init__(self) -> None:
        self.store = BrokenStore()
        self.vhost = VHost("/", self.store)
        self.vhost.start()
        self.plane = self.vhost.plane
        for name in ("a", "b"):
            self.create(QueueConfig(name=name))
        self.sync = ManualSync(self.vhost)

    def create(self, config: QueueConfig) -> None:
        self.vhost.queues.adopt(config)

    def enqueue(self, queue: str, *drafts: Draft | bytes) -> asyncio.Future[list[bytes]]:
        future: asyncio.Future[list[bytes]] = asyncio.get_running_loop().create_future()
        size_bytes = sum(len(each.payload) if isinstance(each, Draft) else len(each) for each in drafts)
        self.vhost.enqueue(Enqueue(queue, drafts, size_bytes, future))
        return future

    def ready(self, queue: str) -> int:
        return self.plane.stats(queue)["ready"]

    def writes(self) -> int:
        return len(self.store.batches)


def run(test: Callable[[Bench], Awaitable[None]]) -> None:
    async def inside() -> None:
        bench = Bench()
        try:
            await asyncio.wait_for(test(bench), 30)
        finally:
            bench.sync.end()
            await bench.vhost.close()

    asyncio.run(inside())


async def turn() -> None:
    """Wait until everything gathered is written."""
    for _ in range(4):
        await asyncio.sleep(0)


@pytest.mark.spec("C6")
def test_calls_of_one_turn_share_one_write_and_one_sync() -> None:
    async def test(bench: Bench) -> None:
        before = bench.writes()
        calls = [bench.enqueue("a" if i % 2 else "b", b"%d" % i) for i in range(50)]
        await turn()
        assert bench.writes() == before + 1
        assert len(bench.sync.waiting) == 1
        assert not any(call.done() for call in calls)
        bench.sync()
        ids = [message_id for call in calls for message_id in await call]
        assert len(set(ids)) == 50
        assert bench.ready("a") == 25

    run(test)


def test_calls_during_a_sync_share_the_next_write() -> None:
    async def test(bench: Bench) -> None:
        first = bench.enqueue("a", b"1")
        await turn()
        before = bench.writes()
        later = []
        for i in range(10):
            later.append(bench.enqueue("a", b"later %d" % i))
            await turn()
        assert bench.writes() == before
        bench.sync()
        assert first.done(), "who waited is answered before the next write"
        assert bench.writes() == before
        await turn()
        assert bench.writes() == before + 1
        bench.sync()
        assert len({(await call)[0] for call in later}) == 10

    run(test)


def test_calls_of_consecutive_turns_share_a_write_for_a_bounded_time() -> None:
    async def test(bench: Bench) -> None:
        before = bench.writes()
        for i in range(GATHER_TURNS_MAX):
            bench.enqueue("a", b"%d" % i)
            await asyncio.sleep(0)
            assert bench.writes() == before
        await turn()
        assert bench.writes() == before + 1
        bench.sync()
        before = bench.writes()
        for i in range(2 * GATHER_TURNS_MAX):
            bench.enqueue("a", b"%d" % i)
            await asyncio.sleep(0)
        assert bench.writes() == before + 1, "it was written while others came"

    run(test)


def test_a_full_batch_does_not_wait_for_the_sync() -> None:
    async def test(bench: Bench) -> None:
        bench.enqueue("a", b"1")
        await turn()
        before = bench.writes()
        large = bench.enqueue("a", bytes(GATHER_BYTES_MAX + 1))
        await turn()
        assert bench.writes() == before + 1
        bench.sync()
        await large

    run(test)


def test_an_invalid_call_fails_alone() -> None:
    async def test(bench: Bench) -> None:
        good = [bench.enqueue("a", b"1"), bench.enqueue("b", b"2"), bench.enqueue("a", b"3")]
        missing = bench.enqueue("missing", b"")
        bad = bench.enqueue("a", Draft(payload=b"", delay_ms=-1))
        await turn()
        bench.sync()
        assert len([await call for call in good]) == 3
        with pytest.raises(QueueNotFoundError):
            await missing
        with pytest.raises(InvalidArgumentError):
            await bad
        assert bench.ready("a") == 2

    run(test)


def test_a_full_queue_refuses_only_its_own_calls() -> None:
    async def test(bench: Bench) -> None:
        bench.create(QueueConfig(name="short", length_max=2, overflow=Overflow.REJECT_PUBLISH))
        calls = [bench.enqueue("short", b"%d" % i) for i in range(4)]
        other = bench.enqueue("a", b"x")
        await turn()
        bench.sync()
        await other
        verdicts = await asyncio.gather(*calls, return_exceptions=True)
        assert [isinstance(each, QueueFullError) for each in verdicts] == [False, False, True, True]
        assert bench.ready("short") == 2

    run(test)


def test_refused_messages_are_dead_lettered_once() -> None:
    async def test(bench: Bench) -> None:
        bench.create(
            QueueConfig(
                name="short",
                length_max=2,
                overflow=Overflow.REJECT_PUBLISH_DEAD_LETTER,
                dead_letter_queue="dead",
            )
        )
        calls = [bench.enqueue("short", b"%d" % i) for i in range(4)]
        await turn()
        bench.sync()
        verdicts = await asyncio.gather(*calls, return_exceptions=True)
        assert [isinstance(each, QueueFullError) for each in verdicts] == [False, False, True, True]
        assert (bench.ready("short"), bench.ready("dead")) == (2, 2)

    run(test)


@pytest.mark.promise("P1")
def test_a_failed_sync_fails_every_waiting_call() -> None:
    async def test(bench: Bench) -> None:
        calls = [bench.enqueue("a", b"1"), bench.enqueue("b", b"2")]
        await turn()
        bench.sync(StorageError("the disk is gone"))
        for call in calls:
            with pytest.raises(StorageError, match="gone"):
                await call

    run(test)


def test_calls_to_queues_of_lower_durability_complete_after_the_write() -> None:
    async def test(bench: Bench) -> None:
        bench.create(QueueConfig(name="fast", durability=Durability.WRITTEN))
        call = bench.enqueue("fast", b"1")
        await turn()
        assert not bench.sync.waiting
        assert len(await call) == 1

    run(test)


def test_a_cancelled_caller_does_not_affect_others() -> None:
    async def test(bench: Bench) -> None:
        gone, stays = bench.enqueue("a", b"1"), bench.enqueue("a", b"2")
        gone.cancel()
        await turn()
        bench.sync()
        await stays
        assert bench.ready("a") == 2, "it is written all the same"

    run(test)


def test_every_call_ends_after_an_internal_error() -> None:
    async def test(bench: Bench) -> None:
        def broken(name: str) -> QueueConfig:
            raise RuntimeError("a bug")

        bench.plane.get = broken  # type: ignore[method-assign]
        call = bench.enqueue("a", b"")
        with pytest.raises(RuntimeError, match="a bug"):
            await call

    run(test)


@pytest.mark.promise("P2")
def test_publishes_enqueues_and_settlements_of_one_turn_are_one_batch() -> None:
    async def test(bench: Bench) -> None:
        bench.vhost.declare_queue("q", durable=True)
        publisher = FakePublisher()
        publish(bench.vhost, publisher, "q", b"first")
        await turn()
        bench.sync()
        got = bench.vhost.get("q")
        assert got is not None
        before = bench.writes()
        bench.vhost.settle([settlement("q", got[0])])
        publish(bench.vhost, publisher, "q", b"second", first=2)
        call = bench.enqueue("a", b"x")
        await asyncio.sleep(0)
        assert bench.writes() == before + 1, "an enqueue does not delay a publish, and is written with it"
        assert (bench.ready("q"), bench.ready("a"), len(bench.sync.waiting)) == (1, 1, 1)
        assert publisher.numbers() == [1]
        bench.sync()
        assert publisher.numbers() == [1, 2]
        assert len(await call) == 1

    run(test)


def test_a_publish_does_not_wait_for_a_running_sync_and_takes_the_waiting_enqueues_along() -> None:
    async def test(bench: Bench) -> None:
        bench.vhost.declare_queue("q", durable=True)
        bench.enqueue("a", b"1")
        await turn()
        bench.enqueue("a", b"2")
        await turn()
        assert (bench.ready("a"), len(bench.sync.waiting)) == (1, 1)
        publish(bench.vhost, FakePublisher(), "q", b"x")
        await asyncio.sleep(0)
        assert (bench.ready("q"), bench.ready("a"), len(bench.sync.waiting)) == (1, 2, 2)

    run(test)


def test_a_dead_lettered_refusal_is_reported_beside_calls_to_other_queues() -> None:
    async def test(bench: Bench) -> None:
        overflow = Overflow.REJECT_PUBLISH_DEAD_LETTER
        bench.create(QueueConfig(name="short", length_max=1, overflow=overflow, dead_letter_queue="dead"))
        taken = bench.enqueue("short", b"1")
        await turn()
        bench.sync()
        await taken
        refused, other = bench.enqueue("short", b"2"), bench.enqueue("a", b"x")
        await turn()
        bench.sync()
        await other
        with pytest.raises(QueueFullError):
            await refused
        assert (bench.ready("short"), bench.ready("dead")) == (1, 1)

    run(test)


def test_a_bad_call_among_many_operations_costs_few_writes() -> None:
    async def test(bench: Bench) -> None:
        bench.vhost.declare_queue("q", durable=True)
        publisher = FakePublisher()
        before = bench.writes()
        publish(bench.vhost, publisher, "q", *[b"%d" % i for i in range(1000)])
        calls = [bench.enqueue("a", b"%d" % i) for i in range(500)]
        bad = bench.enqueue("a", Draft(payload=b"", delay_ms=-1))
        calls += [bench.enqueue("a", b"%d" % i) for i in range(500, 1000)]
        await turn()
        assert bench.writes() - before <= 12, "one for the publishes, and one for each halving of the calls"
        bench.sync()
        await asyncio.gather(*calls)
        with pytest.raises(InvalidArgumentError):
            await bad
        assert publisher.numbers() == [*range(1, 1001)]
        found = [each.payload for each in bench.plane.lease("a", 1000)]
        assert found == [b"%d" % i for i in range(1000)], "in the order of arrival, each once"

    run(test)


@pytest.mark.promise("P8")
def test_calls_wait_while_the_store_is_stalled_and_are_written_once() -> None:
    async def test(bench: Bench) -> None:
        bench.create(QueueConfig(name="short", length_max=9, overflow=Overflow.REJECT_PUBLISH))
        stalls: list[bool] = []
        bench.vhost.tick.on_stalled = stalls.append
        bench.store.stall = True
        calls = [bench.enqueue(queue, b"1") for queue in ("a", "short", "b", "short")]
        await turn()
        assert stalls == [True]
        assert not any(call.done() for call in calls)
        bench.store.stall = False
        await until(lambda: len(bench.sync.waiting) > 0)
        bench.sync()
        await asyncio.gather(*calls)
        assert stalls == [True, False]
        assert [bench.ready(queue) for queue in ("a", "b", "short")] == [1, 1, 2]

    run(test)


def test_calls_that_still_wait_when_the_virtual_host_closes_get_an_error() -> None:
    async def test(bench: Bench) -> None:
        bench.store.stall = True
        call = bench.enqueue("a", b"1")
        await turn()
        closing = asyncio.ensure_future(bench.vhost.close())
        with pytest.raises(VHostDownError, match="closing"):
            await call
        bench.store.stall = False
        await closing
        with pytest.raises(VHostDownError):
            bench.enqueue("a", b"2")

    run(test)


@pytest.mark.promise("P11")
def test_a_failed_write_fails_the_virtual_host_and_every_caller() -> None:
    async def test(bench: Bench) -> None:
        failed: list[BaseException] = []
        bench.vhost.on_failed = failed.append
        synced_later = bench.enqueue("a", b"1")
        await turn()
        waits = bench.enqueue("a", b"2")
        bench.store.fail_write = True
        written = bench.enqueue("b", bytes(GATHER_BYTES_MAX))
        await turn()
        for call in (waits, written):
            with pytest.raises(StorageError):
                await call
        assert len(failed) == 1
        assert not synced_later.done()
        bench.sync(StorageError("poisoned"))
        with pytest.raises(StorageError, match="poisoned"):
            await synced_later

    run(test)


@pytest.mark.promise("P13")
def test_large_enqueues_and_publishes_share_the_bytes_of_a_turn() -> None:
    async def test(bench: Bench) -> None:
        bench.vhost.declare_queue("q", durable=True)
        body = bytes(TURN_BYTES_MAX // 4)
        publish(bench.vhost, FakePublisher(), "q", *[body] * 5)
        calls = [bench.enqueue("a", body) for _ in range(5)]
        await asyncio.sleep(0)
        assert (bench.ready("q"), bench.ready("a")) == (2, 2)
        await turn()
        bench.sync()
        await asyncio.gather(*calls)
        assert (bench.ready("q"), bench.ready("a")) == (5, 5)

    run(test)


def test_more_messages_than_fit_a_batch_are_several_batches() -> None:
    async def test(bench: Bench) -> None:
        before = bench.writes()
        calls = [bench.enqueue("a", *[b"x"] * 1000) for _ in range(2 * BATCH_MESSAGES_MAX // 1000)]
        bench.vhost.tick.flush()
        assert bench.writes() == before + 2
        bench.sync()
        assert {len(await call) for call in calls} == {1000}

    run(test)


@pytest.mark.promise("P11")
def test_a_queue_that_cannot_be_read_from_a_broken_disk_fails_the_virtual_host() -> None:
    async def test(bench: Bench) -> None:
        def broken(name: str, *rest: object, **more: object) -> QueueConfig:
            raise StorageError("the disk is gone")

        bench.plane.get = broken  # type: ignore[method-assign]
        bench.plane.enqueue = broken  # type: ignore[assignment, method-assign]
        call = bench.enqueue("a", b"1")
        with pytest.raises(StorageError, match="gone"):
            await call
        assert isinstance(bench.vhost.error, StorageError)

    run(test)
