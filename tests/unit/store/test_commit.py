"""Group commit on a store whose syncs wait for the test."""

from __future__ import annotations

import asyncio
import random
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor

import pytest

from basaltmq.errors import DiskFullError, StorageError, StoreClosedError, StorePoisonedError
from basaltmq.store.batch import Batch
from basaltmq.store.families import Family
from basaltmq.store.memory import MemoryStore
from basaltmq.store.sync import group_commit as commit_module
from basaltmq.store.sync.group_commit import GroupCommit

WAIT_S = 30
F = Family.MESSAGES


class SlowDisk(MemoryStore):
    """Records writes and syncs in order. A sync signals its start, and returns when the test permits it."""

    def __init__(self) -> None:
        super().__init__()
        self.events: list[str] = []
        self.started = threading.Semaphore(0)
        self.allowed = threading.Semaphore(0)
        self.sync_errors: list[Exception] = []
        self.durable_keys: set[bytes] = set()

    def write(self, batch: Batch, *, wal: bool = True, wait_ms: int | None = None) -> None:
        super().write(batch, wal=wal, wait_ms=wait_ms)
        self.events.append("write")

    def sync(self) -> None:
        self.require_open()
        covered = {key for key, _ in self.scan(F)}
        self.events.append("sync starts")
        self.started.release()
        assert self.allowed.acquire(timeout=WAIT_S)
        if self.sync_errors:
            raise self.sync_errors.pop(0)
        self.durable_keys |= covered
        self.events.append("sync ends")

    def await_sync(self) -> None:
        assert self.started.acquire(timeout=WAIT_S), "no sync started"

    @property
    def syncs(self) -> int:
        return self.events.count("sync starts")


class FastDisk(SlowDisk):
    """A disk that permits every sync."""

    def sync(self) -> None:
        self.allowed.release()
        super().sync()


class Writers:
    """Writes rows from threads, each of which waits for durability."""

    def __init__(self, disk: SlowDisk, group: GroupCommit) -> None:
        self.disk = disk
        self.group = group
        self._pool = ThreadPoolExecutor(64)

    def start(self, *keys: bytes) -> list[Future[bool]]:
        """Write a row per key, and return when all their threads wait in the open group."""
        joined = len(self.group._group.threads)
        futures = []
        for key in keys:
            self.disk.write(batch_of(key))
            futures.append(self._pool.submit(self.group.wait_durable))
        until(lambda: len(self.group._group.threads) == joined + len(keys))
        return futures

    def start_one(self, key: bytes) -> Future[bool]:
        """Write a row, and return when its sync has started."""
        self.disk.write(batch_of(key))
        future = self._pool.submit(self.group.wait_durable)
        self.disk.await_sync()
        return future

    def close(self) -> None:
        self._pool.shutdown()


def until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + WAIT_S
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.0001)


@pytest.fixture
def disk() -> SlowDisk:
    return SlowDisk()


@pytest.fixture
def group(disk: SlowDisk) -> Iterator[GroupCommit]:
    commits = GroupCommit(disk)
    yield commits
    for _ in range(1000):
        disk.allowed.release()
    commits.close()


@pytest.fixture
def writers(disk: SlowDisk, group: GroupCommit) -> Iterator[Writers]:
    made = Writers(disk, group)
    yield made
    made.close()


def batch_of(*keys: bytes) -> Batch:
    batch = Batch()
    for key in keys:
        batch.put(F, key, b"v")
    return batch


@pytest.mark.spec("E6")
@pytest.mark.promise("P1")
def test_a_lone_write_is_synced_at_once_and_exactly_once(disk: SlowDisk, writers: Writers) -> None:
    waiting = writers.start_one(b"k")
    assert not waiting.done()
    disk.allowed.release()
    assert waiting.result(WAIT_S)
    assert disk.events == ["write", "sync starts", "sync ends"]


@pytest.mark.spec("E6")
@pytest.mark.promise("P1")
def test_one_sync_serves_all_writes_made_during_the_previous_sync(disk: SlowDisk, writers: Writers) -> None:
    first = writers.start_one(b"first")
    others = writers.start(*(b"%d" % n for n in range(32)))
    disk.allowed.release()
    first.result(WAIT_S)
    disk.await_sync()
    assert not any(each.done() for each in others)
    disk.allowed.release()
    for each in others:
        assert each.result(WAIT_S)
    assert disk.syncs == 2


@pytest.mark.promise("P1")
def test_a_write_made_during_a_sync_waits_for_the_next_sync(disk: SlowDisk, writers: Writers) -> None:
    """The running sync may have passed the position of the write in the log."""
    first = writers.start_one(b"1")
    (second,) = writers.start(b"2")
    disk.allowed.release()
    first.result(WAIT_S)
    disk.await_sync()
    assert not second.done()
    disk.allowed.release()
    second.result(WAIT_S)
    assert disk.syncs == 2


@pytest.mark.promise("P1")
def test_no_write_is_confirmed_before_its_sync_has_returned() -> None:
    """Threads and a loop write at random. Each checks at its confirm that a sync covers its write."""
    disk = FastDisk()
    group = GroupCommit(disk)
    seed = random.randrange(2**32)
    print("seed", seed)

    def write_from_thread(worker: int) -> None:
        rng = random.Random(seed + worker)
        for number in range(50):
            keys = [b"%d-%d-%d" % (worker, number, n) for n in range(rng.randint(1, 3))]
            disk.write(batch_of(*keys))
            assert group.wait_durable(WAIT_S)
            assert disk.durable_keys.issuperset(keys)

    async def write_from_loop() -> None:
        async def one(number: int) -> None:
            for turn in range(20):
                key = b"loop-%d-%d" % (number, turn)
                disk.write(batch_of(key))
                await asyncio.wait_for(group.durable(), WAIT_S)
                assert key in disk.durable_keys

        await asyncio.gather(*(one(number) for number in range(8)))

    with ThreadPoolExecutor(5) as pool:
        work: list[Future[None]] = [pool.submit(write_from_thread, worker) for worker in range(4)]
        work.append(pool.submit(asyncio.run, write_from_loop()))
        for each in work:
            each.result(WAIT_S * 2)
    group.close()
    assert disk.syncs <= 360


@pytest.mark.spec("E6")
@pytest.mark.promise("P1")
def test_the_writes_of_one_loop_turn_share_one_sync(disk: SlowDisk, group: GroupCommit) -> None:
    async def turn() -> None:
        futures = []
        for number in range(50):
            disk.write(batch_of(b"%d" % number))
            futures.append(group.durable())
        await asyncio.to_thread(disk.await_sync)
        disk.allowed.release()
        disk.allowed.release()
        await asyncio.wait_for(asyncio.gather(*futures), WAIT_S)

    asyncio.run(turn())
    assert disk.syncs <= 2


@pytest.mark.promise("P1")
def test_a_wait_with_a_timeout_reports_that_its_write_is_not_durable_yet(disk: SlowDisk, group: GroupCommit) -> None:
    disk.write(batch_of(b"k"))
    assert not group.wait_durable(0.01)
    disk.allowed.release()
    disk.allowed.release()
    assert group.wait_durable(WAIT_S)


@pytest.mark.promise("P1")
def test_threads_and_a_loop_share_one_sync(disk: SlowDisk, group: GroupCommit, writers: Writers) -> None:
    async def mixed() -> None:
        first = group.durable()
        await asyncio.to_thread(disk.await_sync)
        own = [group.durable() for _ in range(3)]
        others = await asyncio.to_thread(writers.start, b"1", b"2", b"3")
        disk.allowed.release()
        await asyncio.wait_for(first, WAIT_S)
        await asyncio.to_thread(disk.await_sync)
        disk.allowed.release()
        await asyncio.wait_for(asyncio.gather(*own, *map(asyncio.wrap_future, others)), WAIT_S)

    asyncio.run(mixed())
    assert disk.syncs == 2


@pytest.mark.promise("P1", "P11")
@pytest.mark.parametrize("failure", [DiskFullError("full"), OSError("I/O error")])
def test_a_failed_sync_fails_exactly_its_waiters_and_poisons_the_store(
    disk: SlowDisk, group: GroupCommit, writers: Writers, failure: Exception
) -> None:
    before = writers.start_one(b"before")
    waiting = writers.start(*(b"%d" % n for n in range(5)))
    disk.allowed.release()
    assert before.result(WAIT_S)
    disk.await_sync()
    (late,) = writers.start(b"late")
    disk.sync_errors.append(failure)
    disk.allowed.release()
    for each in waiting:
        error = each.exception(WAIT_S)
        assert isinstance(error, StorageError)
        assert str(failure) in str(error)
    with pytest.raises(StorePoisonedError, match=str(failure)):
        late.result(WAIT_S)
    with pytest.raises(StorePoisonedError, match=str(failure)):
        group.wait_durable(WAIT_S)
    assert disk.syncs == 2


@pytest.mark.promise("P1", "P11")
def test_a_failed_sync_fails_the_futures_of_a_loop_with_its_cause(disk: SlowDisk, group: GroupCommit) -> None:
    async def run() -> list[BaseException | None]:
        futures = [group.durable(), group.durable()]
        disk.sync_errors.append(DiskFullError("full"))
        await asyncio.to_thread(disk.await_sync)
        disk.allowed.release()
        disk.allowed.release()
        results = await asyncio.wait_for(asyncio.gather(*futures, return_exceptions=True), WAIT_S)
        with pytest.raises(StorePoisonedError):
            await group.durable()
        return list(results)

    assert all(isinstance(result, StorageError) for result in asyncio.run(run()))


def test_close_syncs_pending_writes_and_refuses_further_waits(disk: SlowDisk, writers: Writers) -> None:
    group = writers.group
    first = writers.start_one(b"first")
    (waiting,) = writers.start(b"waiting")
    with ThreadPoolExecutor(1) as pool:
        closing = pool.submit(group.close)
        disk.allowed.release()
        disk.allowed.release()
        closing.result(WAIT_S)
    assert first.result(WAIT_S)
    assert waiting.result(WAIT_S)
    with pytest.raises(StoreClosedError):
        group.wait_durable(WAIT_S)

    async def wait_on_loop() -> None:
        with pytest.raises(StoreClosedError):
            group.durable()

    asyncio.run(wait_on_loop())
    group.close()
    assert disk.syncs == 2


def test_close_reports_a_disk_that_does_not_respond(
    disk: SlowDisk, writers: Writers, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(commit_module, "CLOSE_WAIT_S", 0.01)
    waiting = writers.start_one(b"k")
    with pytest.raises(StorageError, match="does not respond"):
        writers.group.close()
    disk.allowed.release()
    assert waiting.result(WAIT_S)


def test_a_loop_closed_during_its_wait_does_not_disturb_others(
    disk: SlowDisk, group: GroupCommit, writers: Writers
) -> None:
    async def leave() -> None:
        group.durable()
        await asyncio.to_thread(disk.await_sync)

    asyncio.run(leave())
    (other,) = writers.start(b"other")
    disk.allowed.release()
    disk.allowed.release()
    assert other.result(WAIT_S)


def test_a_cancelled_future_does_not_disturb_others(disk: SlowDisk, group: GroupCommit) -> None:
    async def run() -> None:
        cancelled, kept = group.durable(), group.durable()
        await asyncio.to_thread(disk.await_sync)
        cancelled.cancel()
        disk.allowed.release()
        disk.allowed.release()
        await asyncio.wait_for(kept, WAIT_S)

    asyncio.run(run())


def test_two_loops_in_two_threads_are_both_notified() -> None:
    disk = FastDisk()
    group = GroupCommit(disk)

    async def work(name: bytes) -> None:
        for number in range(30):
            disk.write(batch_of(b"%s-%d" % (name, number)))
            await asyncio.wait_for(group.durable(), WAIT_S)

    with ThreadPoolExecutor(2) as pool:
        for each in [pool.submit(asyncio.run, work(name)) for name in (b"a", b"b")]:
            each.result(WAIT_S * 2)
    group.close()
    assert len(disk.durable_keys) == 60


def test_one_thread_can_run_several_loops_in_turn(disk: SlowDisk, group: GroupCommit) -> None:
    for _ in range(3):
        disk.allowed.release()

        async def once() -> None:
            await asyncio.wait_for(group.durable(), WAIT_S)

        asyncio.run(once())
    assert disk.syncs == 3
