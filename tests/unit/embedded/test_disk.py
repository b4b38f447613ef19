"""An embedded store on a disk that becomes full."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from time import monotonic, sleep

import pytest
from tests.fixtures.small_disk import MIB, fill, small_disk_at

import basaltmq
from basaltmq.embedded.database import Basalt, Settings
from basaltmq.embedded.disk import DiskLimits
from basaltmq.embedded.queue import EmbeddedQueue
from basaltmq.embedded.topic import EmbeddedTopic
from basaltmq.errors import DiskFullError, InvalidConfigError, StoreOverfullError

WAIT_S = 30.0
pytestmark = [pytest.mark.spec("A11"), pytest.mark.promise("P8")]


def producers(db: Basalt) -> dict[str, Callable[[], object]]:
    """All operations of producers."""

    def in_transaction() -> None:
        with db.transaction() as work:
            work.enqueue("jobs", b"in a transaction")

    return {
        "topic": lambda: db.topic("events").append(b"record"),
        "queue": lambda: db.queue("jobs").enqueue(b"message"),
        "transaction": in_transaction,
    }


def eventually(is_so: Callable[[], bool], what: str) -> None:
    until = monotonic() + WAIT_S
    while not is_so():
        assert monotonic() < until, what
        sleep(0.02)


def fill_queue(queue: EmbeddedQueue) -> int:
    """Enqueue until the disk is low. Return the number of messages."""
    for count in range(1000):
        try:
            queue.enqueue(bytes([count % 256]) * (512 << 10))
        except DiskFullError:
            return count
    raise AssertionError("the disk never fills up")


def append_many(topic: EmbeddedTopic) -> None:
    for _ in range(1000):
        topic.append(bytes(256 << 10))
        # The size is measured every 20 ms.
        sleep(0.005)


def test_low_disk_refuses_producers_but_not_consumers(tmp_path: Path) -> None:
    limits = DiskLimits(free_min_bytes=16 * MIB)
    with (
        small_disk_at(tmp_path / "disk", 64 * MIB) as disk,
        basaltmq.open(disk / "store", settings=Settings(disk=limits)) as db,
    ):
        for produce in producers(db).values():
            produce()
        other = disk / "other"
        fill(other, leave_bytes=8 * MIB)
        sleep(0.05)
        for name, produce in producers(db).items():
            with pytest.raises(DiskFullError, match=r"low on disk: \d+ bytes are free .* then retry"):
                produce()
            assert DiskFullError.retriable, name
        leased = db.queue("jobs").lease(10)
        assert [each.payload for each in leased] == [b"message", b"in a transaction"]
        assert db.queue("jobs").ack(leased) == 2
        assert [each.value for each in db.topic("events").read(0)] == [b"record"]
        other.unlink()
        sleep(0.05)
        for produce in producers(db).values():
            produce()


def test_consuming_a_backlog_frees_space(tmp_path: Path) -> None:
    settings = Settings(disk=DiskLimits(free_min_bytes=40 * MIB), maintenance_interval_s=0.1)
    with (
        small_disk_at(tmp_path / "disk", 96 * MIB) as disk,
        basaltmq.open(disk / "store", settings=settings) as db,
    ):
        jobs = db.queue("jobs")
        added = fill_queue(jobs)
        while leased := jobs.lease(16):
            added -= jobs.ack(leased)
        assert added == 0

        def takes() -> bool:
            try:
                return bool(jobs.enqueue(b"more"))
            except DiskFullError:
                return False

        eventually(takes, "space comes back without a command")


def test_size_limit_counts_the_log_and_ends_when_records_are_deleted(tmp_path: Path) -> None:
    settings = Settings(disk=DiskLimits(size_max_bytes=8 * MIB), maintenance_interval_s=0.1)
    with basaltmq.open(tmp_path / "store", settings=settings) as db:
        with pytest.raises(StoreOverfullError, match=f"its limit is {8 * MIB}"):
            append_many(db.topic("events"))
        db.queue("jobs", create=True)
        db.delete_topic("events")

        def takes() -> bool:
            try:
                return bool(db.queue("jobs").enqueue(b"more"))
            except StoreOverfullError:
                return False

        eventually(takes, "the log is cleaned")


def test_negative_limits_are_refused(tmp_path: Path) -> None:
    for limits in (DiskLimits(free_min_bytes=-1), DiskLimits(size_max_bytes=-1)):
        with pytest.raises(InvalidConfigError, match="0 or more"):
            basaltmq.open(tmp_path / "store", settings=Settings(disk=limits))
    basaltmq.open(tmp_path / "store", settings=Settings(disk=DiskLimits(free_min_bytes=0))).close()
