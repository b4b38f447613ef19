"""Long operations release the plane between pages. Deleted queues disappear at once."""

from __future__ import annotations

import threading
from collections.abc import Callable

import pytest
from tests.unit.queues.conftest import Clock, Planes, TestStore, payloads, settle

from basaltmq.durability import Durability
from basaltmq.errors import QueueNotFoundError, StaleLeaseError, StoreStalledError
from basaltmq.queues import long_operations, queue
from basaltmq.queues.config import QueueConfig
from basaltmq.queues.draft import Draft
from basaltmq.queues.lifecycle import reclaim, redrive, removal
from basaltmq.queues.plane import QueuePlane
from basaltmq.store.families import Family

KEPT = {Family.VERSION, Family.QUEUES, Family.QUEUE_STATS, Family.TIMERS}


def left(store: TestStore) -> list[tuple[str, bytes]]:
    return [(family.label, key) for family in Family if family not in KEPT for key in store.rows(family)]


@pytest.fixture(autouse=True)
def small_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(removal, "PAGE", 10)
    monkeypatch.setattr(redrive, "PAGE", 10)
    monkeypatch.setattr(long_operations, "PAGE", 10)
    monkeypatch.setattr(reclaim, "PAGE", 10)
    monkeypatch.setattr(long_operations, "RECLAIM_PAGES", 0)


@pytest.fixture
def between(monkeypatch: pytest.MonkeyPatch) -> Callable[[Callable[[], object]], list[int]]:
    """Run an operation in another thread between two pages. Return how often it ran."""

    def install(work: Callable[[], object]) -> list[int]:
        times: list[int] = []

        def breathe() -> None:
            thread = threading.Thread(target=work)
            thread.start()
            thread.join(20)
            assert not thread.is_alive(), "the plane is not released between pages"
            times.append(len(times))

        monkeypatch.setattr(long_operations, "_yield_lock", breathe)
        return times

    return install


@pytest.mark.promise("P8")
@pytest.mark.parametrize("keys", [["default"], ["a", "b", "c"]])
@pytest.mark.parametrize("priorities_max", [0, 3])
def test_purge_removes_existing_messages_between_other_work(
    plane: QueuePlane,
    store: TestStore,
    make: Callable[..., str],
    between: Callable[[Callable[[], object]], list[int]],
    keys: list[str],
    priorities_max: int,
) -> None:
    name = make(priorities_max=priorities_max)
    drafts = [Draft(payload=b"old" * 2000, fairness_key=keys[n % len(keys)], priority=n % 4) for n in range(60)]
    plane.enqueue(name, drafts)
    held = plane.lease(name, 5)
    times = between(lambda: plane.enqueue(name, [Draft(payload=b"new", fairness_key=keys[0])]))
    assert plane.purge(name) == 55
    assert 5 <= len(times) <= 7
    assert plane.stats(name)["ready"] == len(times)
    plane.ack(name, held[0].token)
    assert payloads(plane, name) == [b"new"] * len(times)
    assert left(store) == []


def test_queue_without_separate_bodies_is_purged_in_one_batch(
    plane: QueuePlane, store: TestStore, make: Callable[..., str]
) -> None:
    name = make()
    plane.enqueue(name, [b"x"] * 500)
    before = len(store.batches)
    assert plane.purge(name) == 500
    assert len(store.batches) == before + 1


@pytest.mark.parametrize("how", ["move", "redrive"])
def test_move_ends_despite_new_messages(
    plane: QueuePlane, make: Callable[..., str], between: Callable[[Callable[[], object]], list[int]], how: str
) -> None:
    source, target = make("source"), make("target")
    plane.enqueue(source, [Draft(payload=b"old", fairness_key=f"k{n % 3}") for n in range(45)])
    times = between(lambda: plane.enqueue(source, [Draft(payload=b"new", fairness_key=f"k{n % 3}") for n in range(30)]))
    moved = plane.move(source, target) if how == "move" else plane.redrive(source, to=target)
    assert moved == 45
    assert len(times) >= 5
    assert payloads(plane, target) == [b"old"] * 45
    assert set(payloads(plane, source)) == {b"new"}


def test_operation_reports_that_its_queue_was_deleted_meanwhile(
    plane: QueuePlane, store: TestStore, make: Callable[..., str], monkeypatch: pytest.MonkeyPatch
) -> None:
    name, target = make(), make("target")
    plane.enqueue(name, [b"x" * 5000] * 30)

    def breathe() -> None:
        if name in {config.name for config in plane.configs()}:
            plane.delete(name)

    monkeypatch.setattr(long_operations, "_yield_lock", breathe)
    with pytest.raises(QueueNotFoundError):
        plane.move(name, target)
    assert len(payloads(plane, target)) == 10
    make()
    plane.enqueue(name, [b"y" * 5000] * 30)
    with pytest.raises(QueueNotFoundError):
        plane.purge(name)


@pytest.mark.spec("C13")
@pytest.mark.promise("P10")
@pytest.mark.parametrize("crash", [False, True])
def test_recreated_queue_is_empty_while_old_rows_are_deleted(
    planes: Planes, store: TestStore, clock: Clock, crash: bool
) -> None:
    plane = planes.open()
    other = "other"
    plane.create(QueueConfig(name=other, durability=Durability.WRITTEN))

    def fill(body: bytes, count: int) -> None:
        plane.create(QueueConfig(name="q", durability=Durability.WRITTEN, dedup_window_ms=1000))
        for number in range(count):
            plane.enqueue("q", [Draft(payload=body * 5000, fairness_key=f"k{number % 3}", ttl_ms=3_600_000)])
            plane.enqueue("q", [Draft(payload=body * 5000, delay_ms=50), Draft(payload=body, dedup_id=b"%d" % number)])
        plane.publish(["q", other], body * 6000)

    fill(b"a", 20)
    held = plane.lease("q", 7)
    before = len(store.batches)
    plane.delete("q")
    assert len(store.batches) == before + 1
    with pytest.raises(QueueNotFoundError):
        plane.ack("q", held[0].token)
    assert plane.deadline_ns() == 0
    if crash:
        plane = planes.open()
    fill(b"b", 5)
    assert (plane.stats("q")["messages"], plane.stats("q")["delayed"]) == (11, 5)
    with pytest.raises(StaleLeaseError):
        plane.ack("q", held[0].token)
    plane.run_due(clock())
    if crash:
        plane = planes.open()
    clock.pass_ms(50)
    found = payloads(plane, "q", 3)
    settle(plane, clock)
    found += payloads(plane, "q")
    assert [body[:1] for body in found] == [b"b"] * 16
    assert sorted(body[:1] for body in payloads(plane, other)) == [b"a", b"b"]
    plane.delete("q")
    clock.pass_ms(10_000_000)
    settle(plane, clock)
    assert left(store) == []
    assert plane.run_due(clock()) is None


@pytest.mark.promise("P10")
def test_repeated_deletion_during_reclaim_leaves_the_queue_empty(
    plane: QueuePlane, store: TestStore, make: Callable[..., str], clock: Clock
) -> None:
    for number in range(5):
        name = make()
        assert plane.stats(name)["messages"] == 0
        plane.enqueue(name, [b"%d" % number * 5000] * 15)
        plane.run_due(clock())
        assert plane.lease(name)[0].payload[:1] == b"%d" % number
        plane.delete(name)
    settle(plane, clock)
    assert left(store) == []


@pytest.mark.promise("P2")
def test_failed_deletion_keeps_the_queue(plane: QueuePlane, store: TestStore, make: Callable[..., str]) -> None:
    name = make()
    plane.enqueue(name, [b"x" * 5000, b"y"])
    held = plane.lease(name)
    store.refuse = 1
    with pytest.raises(StoreStalledError):
        plane.delete(name)
    assert plane.ack(name, held[0].token) == 1
    assert payloads(plane, name) == [b"y"]
    assert left(store) == []


@pytest.mark.promise("P9")
def test_loading_a_queue_starts_after_acked_messages(
    planes: Planes, store: TestStore, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(queue, "FLOOR_EVERY", 20)
    plane = planes.open()
    plane.create(QueueConfig(name="q", durability=Durability.WRITTEN))
    plane.enqueue("q", [b"leased"])
    kept = plane.lease("q")
    plane.enqueue("q", [Draft(payload=b"delayed", delay_ms=1000)])
    for number in range(50):
        plane.enqueue("q", [b"%02d" % number])
    for _ in range(30):
        plane.ack("q", plane.lease("q")[0].token)
    assert plane._queue("q").stats.floor_ns == int.from_bytes(kept[0].key[-24:-16], "big")
    plane.ack("q", kept[0].token)
    for _ in range(15):
        plane.ack("q", plane.lease("q")[0].token)
    floor_ns = plane._queue("q").stats.floor_ns
    first = plane.lease("q")[0]
    assert kept[0].key[-24:-16] < floor_ns.to_bytes(8, "big") <= first.key[-24:-16]
    again = planes.open()
    starts: list[bytes] = []
    scan = store.scan

    def noted(family: Family, start: bytes = b"", end: bytes | None = None, *, reverse: bool = False) -> object:
        if family is Family.MESSAGES:
            starts.append(start)
        return scan(family, start, end, reverse=reverse)

    with monkeypatch.context() as patch:
        patch.setattr(store, "scan", noted)
        assert again.lease("q", visibility_ms=0)[0].payload == b"46"
    assert first.key[:-24] + floor_ns.to_bytes(8, "big") in starts
    assert not [
        start
        for start in starts
        if start.startswith(first.key[:-24]) and start < first.key[:-24] + floor_ns.to_bytes(8, "big")
    ]
    # Delayed messages return to a lower place, also after a restart.
    clock.pass_ms(1000)
    settle(again, clock)
    assert payloads(planes.open(), "q") == [b"delayed", b"46", b"47", b"48", b"49"]


@pytest.mark.promise("P13")
def test_redrive_without_matches_scans_page_by_page(planes: Planes) -> None:
    plane = planes.open()
    plane.create(QueueConfig(name="dead"))
    plane.enqueue("dead", [b"%d" % n for n in range(35)])
    assert list(plane.redriving("dead", wanted=lambda message: False)) == [0, 0, 0, 0]
    plane.create(QueueConfig(name="back"))
    assert list(plane.redriving("dead", to="back", count=25)) == [10, 10, 5]
    assert plane.stats("back")["messages"] == 25
