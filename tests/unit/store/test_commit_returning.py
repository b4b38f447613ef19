"""A group waits, within limits, for the threads that the previous sync notified."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

import pytest

from basaltmq.store.sync import group_commit as commit_module
from basaltmq.store.sync.group_commit import GroupCommit

WAIT_S = 30


class Disk:
    """A sync signals its start, and returns when the test permits it."""

    def __init__(self) -> None:
        self.syncs = 0
        self.started = threading.Semaphore(0)
        self.allowed = threading.Semaphore(0)

    def sync(self) -> None:
        self.syncs += 1
        self.started.release()
        assert self.allowed.acquire(timeout=WAIT_S)

    def poison(self, error: BaseException) -> None: ...

    def await_sync(self) -> None:
        assert self.started.acquire(timeout=WAIT_S), "no sync started"


class SlowTime:
    """A clock by which every sync takes `WAIT_S`, so that the group may wait as long."""

    def __init__(self) -> None:
        self.now_s = 0.0

    def monotonic(self) -> float:
        self.now_s += WAIT_S
        return self.now_s


def until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + WAIT_S
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.0001)


@pytest.mark.promise("P1")
def test_threads_notified_together_share_the_next_sync(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(commit_module, "RETURN_WAIT_S_MAX", WAIT_S)
    monkeypatch.setattr(commit_module, "time", SlowTime())
    disk = Disk()
    group = GroupCommit(disk)
    again = threading.Semaphore(0)

    def work() -> None:
        group.wait_durable()
        assert again.acquire(timeout=WAIT_S)
        group.wait_durable()

    threads = [threading.Thread(target=group.wait_durable)]
    threads[0].start()
    disk.await_sync()
    for _ in range(3):
        threads.append(threading.Thread(target=work))
        threads[-1].start()
    until(lambda: len(group._group.threads) == 3)
    disk.allowed.release()
    disk.await_sync()
    disk.allowed.release()
    for back in range(1, 3):
        again.release()
        until(lambda back=back: len(group._group.threads) == back)  # type: ignore[misc]
        assert disk.syncs == 2, "a sync started before all notified threads had returned"
    again.release()
    disk.await_sync()
    disk.allowed.release()
    for thread in threads:
        thread.join(WAIT_S)
    assert disk.syncs == 3
    group.close()


@pytest.mark.promise("P1")
def test_a_thread_that_returns_alone_is_served_after_the_wait_for_the_others() -> None:
    disk = Disk()
    for _ in range(1000):
        disk.allowed.release()
    group = GroupCommit(disk)
    group._returning.notified(5, commit_module.RETURN_WAIT_S_MAX)
    group.wait_durable()
    group.wait_durable()
    assert disk.syncs == 2
    group.close()


def test_groups_skip_the_wait_after_threads_did_not_return() -> None:
    returning = commit_module._Returning()
    lock = threading.Lock()
    group = commit_module.Group()
    group.threads.append(commit_module._Thread())
    for missed in range(1, 9):
        returning._skips = 0
        returning.notified(5, 0.0)
        returning.wait(lock, group)
        assert returning._skips == min(1 << missed, commit_module.RETURN_WAITS_SKIPPED_MAX)
    before = returning._skips
    returning.wait(lock, group)
    assert (returning._skips, returning._wanted) == (before - 1, 0)
