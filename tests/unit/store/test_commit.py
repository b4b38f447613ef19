"""Group commit on a store whose sync waits for the test."""

from __future__ import annotations

import asyncio
import random
import threading
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor

import pytest

from basaltmq.errors import (
    BasaltError,
    DiskFullError,
    InvalidArgumentError,
    LimitExceededError,
    StorageError,
    StoreClosedError,
    StorePoisonedError,
    StoreStalledError,
)
from basaltmq.store.batch import Batch
from basaltmq.store.families import Family
from basaltmq.store.memory import MemoryStore
from basaltmq.store.sync import group_commit as commit_module
from basaltmq.store.sync.group_commit import GroupCommit, GroupSync

WAIT_S = 30
F = Family.MESSAGES
G = Family.LEASES


class SlowDisk(MemoryStore):
    """Records what happens in its order. A sync begins, says so, and returns when the test lets it."""

    def __init__(self) -> None:
        super().__init__()
        self.events: list[str] = []
        self.begun = threading.Semaphore(0)
        self.allowed = threading.Semaphore(0)
        self.sync_errors: list[Exception] = []
        self.write_errors: list[Exception] = []
        self.durable_keys: set[bytes] = set()

    def write(self, batch: Batch, *, wal: bool = True, wait_ms: int | None = None) -> None:
        self.require_open()
        if self.write_errors:
            raise self.write_errors.pop(0)
        super().write(batch, wal=wal, wait_ms=wait_ms)
        if len(batch):
            self.events.append(f"write {len(batch)}")

    def sync(self) -> None:
        self.require_open()
        covered = {key for key, _ in self.scan(F)}
        self.events.append("sync begins")
        self.begun.release()
        assert self.allowed.acquire(timeout=WAIT_S)
        if self.sync_errors:
            raise self.sync_errors.pop(0)
        self.durable_keys |= covered
        self.events.append("sync ends")

    def await_sync(self) -> None:
        assert self.begun.acquire(timeout=WAIT_S), "no sync began"

    @property
    def syncs(self) -> int:
        return self.events.count("sync begins")


class FreeDisk(SlowDisk):
    """A disk that lets every sync pass."""

    def sync(self) -> None:
        self.allowed.release()
        super().sync()


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


def batch_of(*keys: bytes) -> Batch:
    batch = Batch()
    for key in keys:
        batch.put(F, key, b"v")
    return batch


def bad_batch(key: bytes) -> Batch:
    batch = batch_of(key)
    batch.put(F, "not bytes", b"")  # type: ignore[arg-type]
    return batch


@pytest.mark.spec("E6")
@pytest.mark.promise("P1")
def test_a_lone_commit_is_synced_at_once_and_exactly_once(disk: SlowDisk, group: GroupCommit) -> None:
    future = group.submit(batch_of(b"k"))
    disk.await_sync()
    assert not future.done()
    disk.allowed.release()
    future.result(WAIT_S)
    assert disk.events == ["write 1", "sync begins", "sync ends"]


@pytest.mark.spec("E6")
@pytest.mark.promise("P1")
def test_one_sync_serves_all_commits_that_arrived_during_the_last(disk: SlowDisk, group: GroupCommit) -> None:
    first = group.submit(batch_of(b"first"))
    disk.await_sync()
    rest = [group.submit(batch_of(b"%d" % n)) for n in range(64)]
    disk.allowed.release()
    first.result(WAIT_S)
    disk.await_sync()
    assert not any(future.done() for future in rest)
    disk.allowed.release()
    for future in rest:
        future.result(WAIT_S)
    assert disk.events == ["write 1", "sync begins", "sync ends", "write 64", "sync begins", "sync ends"]


@pytest.mark.promise("P1")
def test_a_write_made_during_a_sync_waits_for_the_next(disk: SlowDisk, group: GroupCommit) -> None:
    """The sync under way may have passed the write's place in the log already."""
    first = group.submit(batch_of(b"1"))
    disk.await_sync()
    second = group.submit(batch_of(b"2"))
    disk.allowed.release()
    first.result(WAIT_S)
    disk.await_sync()
    assert not second.done()
    disk.allowed.release()
    second.result(WAIT_S)
    assert disk.syncs == 2


@pytest.mark.promise("P1")
def test_no_confirm_comes_before_its_sync_returned() -> None:
    """Threads and a loop commit at random; each checks at its confirm that a sync covers its write."""
    disk = FreeDisk()
    group = GroupCommit(disk)
    seed = random.randrange(2**32)
    print("seed", seed)

    def committer(worker: int) -> None:
        rng = random.Random(seed + worker)
        for number in range(50):
            batch = batch_of(*(b"%d-%d-%d" % (worker, number, n) for n in range(rng.randint(1, 3))))
            if rng.random() < 0.5:
                group.commit(batch)
            else:
                group.submit(batch).result(WAIT_S)
            assert disk.durable_keys.issuperset(key for _, _, key, _ in batch.ops)

    async def loop() -> None:
        async def one(number: int) -> None:
            for turn in range(20):
                key = b"loop-%d-%d" % (number, turn)
                await asyncio.wait_for(group.commit_async(batch_of(key)), WAIT_S)
                assert key in disk.durable_keys

        await asyncio.gather(*(one(number) for number in range(8)))

    with ThreadPoolExecutor(5) as pool:
        work: list[Future[None]] = [pool.submit(committer, worker) for worker in range(4)]
        work.append(pool.submit(asyncio.run, loop()))
        for each in work:
            each.result(WAIT_S * 2)
    group.close()
    assert disk.syncs <= 360


@pytest.mark.promise("P1")
def test_threads_block_until_their_commit_is_durable(disk: SlowDisk, group: GroupCommit) -> None:
    with ThreadPoolExecutor(8) as pool:
        first = pool.submit(group.commit, batch_of(b"first"))
        disk.await_sync()
        rest = [pool.submit(group.commit, batch_of(b"%d" % n)) for n in range(7)]
        disk.allowed.release()
        first.result(WAIT_S)
        disk.await_sync()
        for _ in range(8):
            disk.allowed.release()
        for each in rest:
            each.result(WAIT_S)
    assert len(list(disk.scan(F))) == 8


@pytest.mark.spec("E6")
@pytest.mark.promise("P1")
def test_one_turn_of_a_loop_is_one_write_and_one_sync(disk: SlowDisk, group: GroupCommit) -> None:
    async def turn() -> None:
        futures = [group.commit_async(batch_of(b"%d" % n)) for n in range(50)]
        assert disk.events == []
        await asyncio.to_thread(disk.await_sync)
        assert not any(future.done() for future in futures)
        disk.allowed.release()
        await asyncio.wait_for(asyncio.gather(*futures), WAIT_S)

    asyncio.run(turn())
    assert disk.events == ["write 50", "sync begins", "sync ends"]


@pytest.mark.promise("P1")
def test_durable_covers_what_planes_wrote_themselves(disk: SlowDisk, group: GroupCommit) -> None:
    async def plane() -> None:
        disk.write(batch_of(b"mine"))
        future = group.durable()
        await asyncio.to_thread(disk.await_sync)
        assert not future.done()
        disk.allowed.release()
        await asyncio.wait_for(future, WAIT_S)

    asyncio.run(plane())
    assert disk.events == ["write 1", "sync begins", "sync ends"]


@pytest.mark.promise("P1")
def test_wait_durable_blocks_a_thread_for_one_sync(disk: SlowDisk) -> None:
    sync = GroupSync(disk)
    disk.write(batch_of(b"mine"))
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(sync.wait_durable)
        disk.await_sync()
        assert not waiting.done()
        disk.allowed.release()
        waiting.result(WAIT_S)
    sync.close()
    assert disk.events == ["write 1", "sync begins", "sync ends"]


@pytest.mark.promise("P1")
def test_threads_and_a_loop_share_one_sync(disk: SlowDisk, group: GroupCommit) -> None:
    async def mixed() -> None:
        first = group.commit_async(batch_of(b"first"))
        await asyncio.to_thread(disk.await_sync)
        own = [group.commit_async(batch_of(b"a%d" % n)) for n in range(3)]
        await asyncio.sleep(0)
        others = [group.submit(batch_of(b"t%d" % n)) for n in range(3)]
        disk.allowed.release()
        await asyncio.wait_for(first, WAIT_S)
        await asyncio.to_thread(disk.await_sync)
        disk.allowed.release()
        await asyncio.wait_for(asyncio.gather(*own, *map(asyncio.wrap_future, others)), WAIT_S)

    asyncio.run(mixed())
    assert disk.syncs == 2


@pytest.mark.promise("P1", "P11")
@pytest.mark.parametrize("failure", [DiskFullError("full"), OSError("I/O error")])
def test_a_failed_sync_fails_exactly_those_who_waited_and_poisons(
    disk: SlowDisk, group: GroupCommit, failure: Exception
) -> None:
    fine = group.submit(batch_of(b"fine"))
    disk.await_sync()
    waiting = [group.submit(batch_of(b"%d" % n)) for n in range(5)]
    disk.allowed.release()
    fine.result(WAIT_S)
    disk.await_sync()
    disk.sync_errors.append(failure)
    late = group.submit(batch_of(b"late"))
    disk.allowed.release()
    for future in waiting:
        error = future.exception(WAIT_S)
        assert isinstance(error, StorageError)
        assert str(failure) in str(error)
    assert fine.exception() is None
    with pytest.raises(StorePoisonedError, match=str(failure)):
        late.result(WAIT_S)
    with pytest.raises(StorePoisonedError, match=str(failure)):
        group.commit(batch_of(b"later"))
    assert disk.syncs == 2


@pytest.mark.promise("P1", "P11")
def test_a_failed_sync_fails_awaiters_with_the_cause(disk: SlowDisk, group: GroupCommit) -> None:
    async def run() -> list[BaseException | None]:
        futures = [group.commit_async(batch_of(b"1")), group.commit_async(batch_of(b"2")), group.durable()]
        disk.sync_errors.append(DiskFullError("full"))
        await asyncio.to_thread(disk.await_sync)
        disk.allowed.release()
        disk.allowed.release()
        results = await asyncio.wait_for(asyncio.gather(*futures, return_exceptions=True), WAIT_S)
        with pytest.raises(StorePoisonedError):
            await group.commit_async(batch_of(b"3"))
        return list(results)

    assert all(isinstance(result, StorageError) for result in asyncio.run(run()))


@pytest.mark.spec("C6")
@pytest.mark.promise("P2")
def test_a_refused_batch_in_a_group_fails_alone_and_leaves_nothing(disk: SlowDisk, group: GroupCommit) -> None:
    first = group.submit(batch_of(b"first"))
    disk.await_sync()
    good = [group.submit(batch_of(b"good1")), group.submit(batch_of(b"good2"))]
    bad = group.submit(bad_batch(b"half"))
    good.append(group.submit(batch_of(b"good3")))
    disk.allowed.release()
    disk.allowed.release()
    first.result(WAIT_S)
    for future in good:
        future.result(WAIT_S)
    with pytest.raises(InvalidArgumentError):
        bad.result(WAIT_S)
    assert [key for key, _ in disk.scan(F)] == [b"first", b"good1", b"good2", b"good3"]
    assert disk.syncs == 2


@pytest.mark.spec("C6")
def test_a_refused_batch_in_a_turn_of_a_loop_fails_alone(disk: SlowDisk, group: GroupCommit) -> None:
    async def run() -> list[object]:
        disk.allowed.release()
        futures = [
            group.commit_async(batch_of(b"1")),
            group.commit_async(bad_batch(b"2")),
            group.commit_async(batch_of(b"3")),
        ]
        return await asyncio.wait_for(asyncio.gather(*futures, return_exceptions=True), WAIT_S)

    first, second, third = asyncio.run(run())
    assert (first, third) == (None, None)
    assert isinstance(second, InvalidArgumentError)
    assert [key for key, _ in disk.scan(F)] == [b"1", b"3"]


@pytest.mark.promise("P8")
def test_a_group_too_large_for_one_write_is_written_in_parts(
    disk: SlowDisk, group: GroupCommit, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("basaltmq.store.memory.BATCH_BYTES_MAX", 10)
    first = group.submit(batch_of(b"1"))
    disk.await_sync()
    fitting = [group.submit(batch_of(b"key-%d" % n)) for n in range(3)]
    too_large = group.submit(batch_of(b"a key of more than ten bytes"))
    disk.allowed.release()
    disk.allowed.release()
    first.result(WAIT_S)
    for future in fitting:
        future.result(WAIT_S)
    with pytest.raises(LimitExceededError):
        too_large.result(WAIT_S)


@pytest.mark.promise("P8")
def test_a_stall_fails_all_at_once_and_poisons_nothing(disk: SlowDisk, group: GroupCommit) -> None:
    first = group.submit(batch_of(b"first"))
    disk.await_sync()
    waiting = [group.submit(batch_of(b"%d" % n)) for n in range(3)]
    disk.write_errors.append(StoreStalledError("behind"))
    disk.allowed.release()
    first.result(WAIT_S)
    for future in waiting:
        with pytest.raises(StoreStalledError):
            future.result(WAIT_S)
    disk.allowed.release()
    group.submit(batch_of(b"again")).result(WAIT_S)
    assert [key for key, _ in disk.scan(F)] == [b"again", b"first"]


@pytest.mark.promise("P8")
def test_submit_pushes_back_when_too_much_waits(
    disk: SlowDisk, group: GroupCommit, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(commit_module, "GROUP_BYTES_MAX", 10)
    alone = group.submit(batch_of(b"a batch over the limit is taken when nothing waits"))
    disk.await_sync()
    taken = group.submit(batch_of(b"12345678"))
    with pytest.raises(StoreStalledError, match="9 bytes already wait"):
        group.submit(batch_of(b"9"))
    disk.allowed.release()
    disk.allowed.release()
    alone.result(WAIT_S)
    taken.result(WAIT_S)
    assert disk.get(F, b"9") is None


@pytest.mark.spec("C6")
@pytest.mark.promise("P1", "P2")
def test_a_write_that_fails_for_good_confirms_nobody(disk: SlowDisk, group: GroupCommit) -> None:
    disk.write_errors.append(RuntimeError("torn"))
    future = group.submit(batch_of(b"k"))
    with pytest.raises(StorageError, match="torn"):
        future.result(WAIT_S)
    with pytest.raises(StorePoisonedError, match="torn"):
        group.commit(batch_of(b"later"))
    assert disk.syncs == 0


@pytest.mark.spec("C6")
@pytest.mark.promise("P2")
def test_failures_injected_at_random_leave_every_change_whole_or_absent() -> None:
    """Each change has a row in two families; whatever fails, both are there or none, and the confirmed ones are."""
    seed = random.randrange(2**32)
    print("seed", seed)
    rng = random.Random(seed)
    for _ in range(40):
        disk = FreeDisk()
        group = GroupCommit(disk)
        futures: dict[bytes, Future[None]] = {}
        for number in range(60):
            key = b"%d" % number
            batch = bad_batch(key) if rng.random() < 0.1 else batch_of(key)
            batch.put(G, key, b"twin")
            if rng.random() < 0.05:
                disk.write_errors.append(rng.choice([StoreStalledError("behind"), LimitExceededError("large")]))
            if rng.random() < 0.005:
                disk.sync_errors.append(OSError("gone"))
            try:
                futures[key] = group.submit(batch)
            except BasaltError:
                continue
        group.close()
        disk._error = None
        mine, twins = ({key for key, _ in disk.scan(family)} for family in (F, G))
        assert mine == twins
        confirmed = {key for key, future in futures.items() if future.exception(WAIT_S) is None}
        assert confirmed <= mine


def test_close_syncs_what_waits_and_refuses_the_rest(disk: SlowDisk) -> None:
    group = GroupCommit(disk)
    first = group.submit(batch_of(b"first"))
    disk.await_sync()
    waiting = group.submit(batch_of(b"waiting"))
    with ThreadPoolExecutor(1) as pool:
        closing = pool.submit(group.close)
        disk.allowed.release()
        disk.allowed.release()
        closing.result(WAIT_S)
    first.result(WAIT_S)
    waiting.result(WAIT_S)
    for call in (group.commit, group.submit):
        with pytest.raises(StoreClosedError):
            call(batch_of(b"late"))
    group.close()
    assert disk.syncs == 2
    assert disk.get(F, b"late") is None


def test_close_leaves_what_a_loop_still_gathered_unwritten(disk: SlowDisk) -> None:
    group = GroupCommit(disk)

    async def run() -> None:
        future = group.commit_async(batch_of(b"gathered"))
        group.close()
        with pytest.raises(StoreClosedError, match="nothing was written"):
            await future
        with pytest.raises(StoreClosedError):
            await group.commit_async(batch_of(b"late"))
        with pytest.raises(StoreClosedError):
            group.durable()

    asyncio.run(run())
    assert disk.events == []


def test_close_says_when_the_disk_does_not_answer(disk: SlowDisk, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(commit_module, "CLOSE_WAIT_S", 0.01)
    group = GroupCommit(disk)
    future = group.submit(batch_of(b"k"))
    disk.await_sync()
    with pytest.raises(StorageError, match="does not respond"):
        group.close()
    disk.allowed.release()
    future.result(WAIT_S)


def test_a_loop_closed_while_it_waits_disturbs_nobody(disk: SlowDisk, group: GroupCommit) -> None:
    async def leave() -> None:
        group.commit_async(batch_of(b"left behind"))
        await asyncio.to_thread(disk.await_sync)

    asyncio.run(leave())
    other = group.submit(batch_of(b"other"))
    disk.allowed.release()
    disk.allowed.release()
    other.result(WAIT_S)
    assert [key for key, _ in disk.scan(F)] == [b"left behind", b"other"]


def test_a_cancelled_wait_leaves_the_batch_written_and_the_others_served(disk: SlowDisk, group: GroupCommit) -> None:
    async def run() -> None:
        cancelled, kept = group.commit_async(batch_of(b"cancelled")), group.commit_async(batch_of(b"kept"))
        await asyncio.to_thread(disk.await_sync)
        cancelled.cancel()
        disk.allowed.release()
        await asyncio.wait_for(kept, WAIT_S)
        early = group.commit_async(batch_of(b"cancelled early"))
        early.cancel()
        last = group.commit_async(batch_of(b"last"))
        disk.allowed.release()
        await asyncio.wait_for(last, WAIT_S)

    asyncio.run(run())
    assert {key for key, _ in disk.scan(F)} == {b"cancelled", b"kept", b"cancelled early", b"last"}


def test_two_loops_in_two_threads_each_get_their_answers() -> None:
    disk = FreeDisk()
    group = GroupCommit(disk)

    async def work(name: bytes) -> None:
        for number in range(30):
            await asyncio.wait_for(group.commit_async(batch_of(b"%s-%d" % (name, number))), WAIT_S)

    with ThreadPoolExecutor(2) as pool:
        for each in [pool.submit(asyncio.run, work(name)) for name in (b"a", b"b")]:
            each.result(WAIT_S * 2)
    group.close()
    assert len(list(disk.scan(F))) == 60


def test_the_same_thread_may_run_one_loop_after_another(disk: SlowDisk, group: GroupCommit) -> None:
    for number in range(3):
        disk.allowed.release()

        async def once(key: bytes) -> None:
            await asyncio.wait_for(group.commit_async(batch_of(key)), WAIT_S)

        asyncio.run(once(b"%d" % number))
    assert disk.syncs == 3


def test_a_callback_that_would_wait_for_its_own_thread_is_refused_and_the_group_goes_on() -> None:
    group = GroupCommit(MemoryStore())
    met: Future[BaseException | None] = Future()

    def commit_again(_: Future[None]) -> None:
        try:
            group.commit(Batch())
        except BasaltError as error:
            met.set_result(error)

    group.submit(Batch()).add_done_callback(commit_again)
    error = met.result(WAIT_S)
    assert isinstance(error, InvalidArgumentError)
    assert "use submit" in str(error)
    group.commit(Batch())
    group.close()
