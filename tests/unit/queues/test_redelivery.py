"""The redelivered mark: exact while in memory, and conservative after a crash."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from tests.unit.queues.conftest import Clock, Planes, payloads, settle

from basaltmq.durability import Durability
from basaltmq.queues.config import QueueConfig
from basaltmq.queues.draft import Draft
from basaltmq.queues.plane import QueuePlane
from basaltmq.queues.ready.budget import PagingLimits
from basaltmq.store.batch import Batch
from basaltmq.store.families import Family


def marks(plane: QueuePlane, queue: str, count: int = 100) -> list[tuple[bytes, bool]]:
    """Lease all ready messages. Return their payloads with the redelivered mark."""
    found = plane.lease(queue, count, visibility_ms=0)
    return [(d.payload, d.redelivered) for d in found]


@pytest.mark.parametrize("how", ["release", "nack", "delay", "expiry"])
@pytest.mark.parametrize("transient", [False, True])
def test_only_returned_messages_are_marked_redelivered(
    plane: QueuePlane, make: Callable[..., str], clock: Clock, how: str, transient: bool
) -> None:
    queue = make(visibility_timeout_ms=100)
    plane.enqueue(queue, [Draft(payload=b"%d" % n, transient=transient) for n in range(4)])
    held = plane.lease(queue, 3, consumer="c")
    assert not any(d.redelivered for d in held)
    token, ids = held[0].token, [held[1].id]
    plane.ack(queue, token, [held[0].id])
    if how == "release":
        plane.release(queue, token, ids)
    elif how != "expiry":
        plane.nack(queue, token, ids, delay_ms=10 if how == "delay" else 0)
    if how in ("delay", "expiry"):
        clock.pass_ms(100 if how == "expiry" else 10)
        settle(plane, clock)
    assert marks(plane, queue) == [(b"1", True), *([(b"2", True)] if how == "expiry" else []), (b"3", False)]


def test_redelivered_mark_is_per_fairness_key(plane: QueuePlane, make: Callable[..., str]) -> None:
    queue = make()
    plane.enqueue(queue, [Draft(payload=b"a", fairness_key="a")])
    plane.enqueue(queue, [Draft(payload=b"b", fairness_key="b"), Draft(payload=b"b2", fairness_key="b")])
    held = plane.lease(queue, 2)
    plane.ack(queue, held[0].token, [held[0].id])
    plane.enqueue(queue, [Draft(payload=b"c", fairness_key="c")])
    plane.release(queue, held[0].token)
    assert sorted(marks(plane, queue)) == [(b"b", True), (b"b2", False), (b"c", False)]


def test_redelivered_mark_survives_paging_and_eviction(planes: Planes) -> None:
    plane = planes.open(paging=PagingLimits(resident_max=4, read_ahead=3), loaded_max=1)
    for name in ("q", "other"):
        plane.create(QueueConfig(name=name, durability=Durability.WRITTEN))
    for number in range(12):
        plane.enqueue("q", [b"%02d" % number])
    held = plane.lease("q", 6)
    plane.release("q", held[0].token)
    plane.enqueue("other", [b"x"])
    assert plane._loaded.peek("q") is None
    assert [again for _, again in marks(plane, "q")] == [True] * 6 + [False] * 6


def test_after_a_clean_shutdown_only_leased_messages_are_redelivered(planes: Planes) -> None:
    plane = planes.open()
    for name in ("held", "released", "untouched"):
        plane.create(QueueConfig(name=name, durability=Durability.WRITTEN))
        for number in range(3):
            plane.enqueue(name, [b"%d" % number])
    plane.lease("held", 2, visibility_ms=0)
    plane.release("released", plane.lease("released", 2)[0].token)
    plane.close()
    again = planes.open()
    assert [mark for _, mark in marks(again, "held")] == [True, True, False]
    assert [mark for _, mark in marks(again, "released")] == [True, True, False]
    assert [mark for _, mark in marks(again, "untouched")] == [False] * 3


def test_after_a_crash_all_older_messages_are_marked_redelivered(planes: Planes, clock: Clock) -> None:
    plane = planes.open()
    plane.create(QueueConfig(name="q", durability=Durability.WRITTEN))
    plane.enqueue("q", [b"before"])
    again = planes.open()
    clock.pass_ms(-5000)
    again.enqueue("q", [b"after"])
    assert marks(again, "q") == [(b"before", True), (b"after", False)]


@pytest.mark.parametrize("clean_ends", [1, 2])
def test_unknown_redelivery_stays_unknown_after_a_clean_shutdown(planes: Planes, clean_ends: int) -> None:
    plane = planes.open()
    plane.create(QueueConfig(name="q", durability=Durability.WRITTEN))
    plane.enqueue("q", [b"before"])
    plane.lease("q", visibility_ms=0)
    for number in range(clean_ends):
        again = planes.open()
        again.enqueue("q", [b"after %d" % number])
        again.close()
    afterwards = [(b"after %d" % number, False) for number in range(clean_ends)]
    assert marks(planes.open(), "q") == [(b"before", True), *afterwards]


def test_clean_shutdown_row_of_an_older_version_is_accepted(planes: Planes) -> None:
    plane = planes.open()
    plane.create(QueueConfig(name="q", durability=Durability.WRITTEN))
    plane.enqueue("q", [b"before"])
    plane.close()
    batch = Batch()
    batch.put(Family.VERSION, b"queue_clean", b"")
    planes.store.write(batch)
    assert marks(planes.open(), "q") == [(b"before", False)]


@pytest.mark.promise("P7")
def test_damaged_shutdown_row_counts_as_a_crash(planes: Planes) -> None:
    plane = planes.open()
    plane.create(QueueConfig(name="q"))
    plane.enqueue("q", [b"x"])
    plane.close()
    batch = Batch()
    batch.put(Family.VERSION, b"queue_clean", b"1234")
    planes.store.write(batch)
    plane = planes.open()
    assert [record.value for record in plane.damage.records()] == [b"1234"]
    assert [d.redelivered for d in plane.lease("q")] == [True]


@pytest.mark.promise("P3")
def test_order_is_kept_when_the_clock_is_set_back_across_a_restart(planes: Planes, clock: Clock) -> None:
    plane = planes.open()
    plane.create(QueueConfig(name="q", durability=Durability.WRITTEN))
    for number in range(6):
        plane.enqueue("q", [b"%d" % number])
        clock.pass_ms(-10_000)
        if number % 3 == 2:
            plane.close()
        plane = planes.open() if number % 2 else plane
        if number % 3 == 2:
            plane = planes.open()
    assert payloads(plane, "q", 2) == [b"%d" % number for number in range(6)]


@pytest.mark.spec("E7")
def test_delivery_of_a_priority_queue_has_the_publisher_fairness_key(
    plane: QueuePlane, make: Callable[..., str]
) -> None:
    queue = make(priorities_max=9)
    plane.enqueue(queue, [Draft(payload=b"x", fairness_key="tenant", priority=4)])
    assert plane.lease(queue)[0].message().fairness_key == "tenant"
