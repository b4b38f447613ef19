"""The queue plane: batches, lifecycle of queues, waiting, unloading."""

from __future__ import annotations

import threading
from collections.abc import Callable

import pytest
from tests.unit.queues.conftest import Clock, Planes, TestStore, payloads, settle

from basaltmq.durability import Durability
from basaltmq.errors import (
    InvalidArgumentError,
    InvalidConfigError,
    QueueExistsError,
    QueueNotFoundError,
    StoreClosedError,
    StoreStalledError,
    TransactionError,
)
from basaltmq.queues.config import Overflow, QueueConfig
from basaltmq.queues.draft import Draft
from basaltmq.queues.plane import QueuePlane
from basaltmq.store.families import Family
from basaltmq.store.keys.queues import transient_counts_key

KEPT = {Family.VERSION, Family.QUEUES, Family.QUEUE_STATS, Family.TIMERS}


def left(store: TestStore) -> list[tuple[str, bytes]]:
    return [(family.label, key) for family in Family if family not in KEPT for key in store.rows(family)]


@pytest.mark.spec("C9")
def test_queue_and_its_dead_letter_queue_are_created_in_one_batch(
    plane: QueuePlane, store: TestStore, make: Callable[..., str]
) -> None:
    before = len(store.batches)
    make("work", dead_letter_queue="dead")
    assert len(store.batches) == before + 1
    assert [config.name for config in plane.configs()] == ["dead", "work"]
    with pytest.raises(QueueExistsError):
        make("work")


@pytest.mark.spec("C6")
@pytest.mark.promise("P2")
def test_queue_whose_write_failed_does_not_exist(plane: QueuePlane, store: TestStore) -> None:
    store.refuse = 1
    with pytest.raises(StoreStalledError):
        plane.create(QueueConfig(name="q"))
    with pytest.raises(QueueNotFoundError):
        plane.enqueue("q", [b"x"])
    assert plane.configs() == []


@pytest.mark.spec("C6")
@pytest.mark.promise("P2")
@pytest.mark.parametrize("size", [1, 100])
def test_every_operation_is_one_batch(plane: QueuePlane, store: TestStore, make: Callable[..., str], size: int) -> None:
    queue = make(dead_letter_queue="dead")
    drafts: list[Draft | bytes] = [Draft(payload=b"x" * 5000, ttl_ms=1000) for _ in range(size)]

    def batches(work: Callable[[], object]) -> int:
        before = len(store.batches)
        work()
        return len(store.batches) - before

    assert batches(lambda: plane.enqueue(queue, drafts)) == 1
    held = plane.lease(queue, size)
    assert batches(lambda: plane.nack(queue, held[0].token)) == 1
    held = plane.lease(queue, size)
    assert batches(lambda: plane.nack(queue, held[0].token, reject=True)) == 1
    assert plane.stats("dead")["ready"] == size
    assert batches(lambda: plane.redrive("dead")) == 1
    held = plane.lease(queue, size)
    assert batches(lambda: plane.ack(queue, held[0].token)) == 1
    assert left(store) == []


@pytest.mark.spec("C13")
@pytest.mark.promise("P10")
def test_deleted_queue_loses_all_data(
    planes: Planes, plane: QueuePlane, store: TestStore, make: Callable[..., str], clock: Clock
) -> None:
    queue = make(dedup_window_ms=10_000, ttl_ms=60_000)
    make("q2")
    plane.enqueue("q2", [b"other"])
    plane.enqueue(queue, [Draft(payload=b"x" * size, fairness_key=str(size), ttl_ms=50_000) for size in (0, 10, 9000)])
    plane.enqueue(queue, [Draft(payload=b"d" * 9000, delay_ms=5000), Draft(payload=b"e", dedup_id=b"1")])
    plane.enqueue(queue, [Draft(payload=b"t", transient=True)])
    plane.publish([queue, "q2"], b"s" * 5000)
    plane.lease(queue, 3)
    plane.delete(queue)
    with pytest.raises(QueueNotFoundError):
        plane.stats(queue)
    remaining = {label for label, _ in left(store)}
    assert remaining <= {"messages", "message_content", "content_refs"}
    assert payloads(plane, "q2") == [b"other", b"s" * 5000]
    assert left(store) == []
    for again in (plane, planes.open()):
        again.create(QueueConfig(name=queue))
        assert again.stats(queue)["messages"] == again.stats(queue)["enqueued"] == 0
        clock.pass_ms(100_000)
        settle(again, clock)
        assert again.lease(queue) == []
        again.delete(queue)


@pytest.mark.spec("C13")
def test_deleting_a_queue_fails_its_waiting_consumer(plane: QueuePlane, make: Callable[..., str]) -> None:
    queue = make()
    errors: list[BaseException] = []

    def wait() -> None:
        try:
            plane.lease(queue, wait_ms=60_000)
        except QueueNotFoundError as error:
            errors.append(error)

    thread = threading.Thread(target=wait)
    thread.start()
    until_waiting(plane, queue)
    plane.delete(queue)
    thread.join(30)
    assert len(errors) == 1


def until_waiting(plane: QueuePlane, queue: str) -> None:
    """Wait until a consumer has found no message and waits."""
    for _ in range(1_000_000):
        with plane._lock:
            if queue in plane._waiters:
                return
    raise AssertionError("nobody waits")


@pytest.mark.parametrize("how", ["enqueue", "release", "delay", "expiry"])
def test_every_operation_that_makes_messages_ready_wakes_a_consumer(
    plane: QueuePlane, make: Callable[..., str], clock: Clock, how: str
) -> None:
    queue = make(visibility_timeout_ms=100)
    held = []
    if how == "delay":
        plane.enqueue(queue, [Draft(payload=b"x", delay_ms=50)])
    elif how != "enqueue":
        plane.enqueue(queue, [b"x"])
        held = plane.lease(queue)
    got: list[bytes] = []
    thread = threading.Thread(target=lambda: got.extend(d.payload for d in plane.lease(queue, wait_ms=60_000)))
    thread.start()
    until_waiting(plane, queue)
    if how == "enqueue":
        plane.enqueue(queue, [b"x"])
    elif how == "release":
        plane.release(queue, held[0].token)
    else:
        clock.pass_ms(200)
        settle(plane, clock)
    thread.join(30)
    assert got == [b"x"]


def test_wait_ends_at_its_timeout(plane: QueuePlane, make: Callable[..., str]) -> None:
    queue = make()
    assert plane.lease(queue, wait_ms=5) == []
    assert queue not in plane._waiters


def test_ready_callback_is_called_once(plane: QueuePlane, make: Callable[..., str]) -> None:
    queue = make()
    calls: list[int] = []
    stop = plane.on_ready(queue, lambda: calls.append(1))
    stop()
    plane.enqueue(queue, [b"a"])
    assert calls == []
    plane.on_ready(queue, lambda: calls.append(2))
    assert calls == [2]
    payloads(plane, queue)
    plane.on_ready(queue, lambda: calls.append(3))
    plane.enqueue(queue, [b"b"])
    plane.enqueue(queue, [b"c"])
    assert calls == [2, 3]


@pytest.mark.spec("A5", "C6")
@pytest.mark.promise("P2")
def test_operations_in_a_change_are_one_batch_or_none(
    plane: QueuePlane, store: TestStore, make: Callable[..., str]
) -> None:
    source, target = make("in"), make("out")
    plane.enqueue(source, [b"a"])
    held = plane.lease(source)
    before = len(store.batches)
    with plane.change():
        plane.ack(source, held[0].token)
        plane.enqueue(target, [b"done"])
        assert plane.lease(target) == []
    assert len(store.batches) == before + 1
    assert plane.stats(source)["messages"] == 0
    held = plane.lease(target)

    def stop_inside() -> None:
        with plane.change():
            plane.ack(target, held[0].token)
            plane.enqueue(source, [b"no"])
            raise RuntimeError("stop")

    with pytest.raises(RuntimeError, match="stop"):
        stop_inside()
    assert plane.stats(target)["leased"] == 1
    assert plane.stats(source)["messages"] == 0
    store.refuse = 1
    with pytest.raises(StoreStalledError), plane.change():
        plane.ack(target, held[0].token)
    assert plane.ack(target, held[0].token) == 1


def test_change_with_a_caught_error_does_nothing(plane: QueuePlane, make: Callable[..., str]) -> None:
    queue = make()

    def catch_inside() -> None:
        with plane.change():
            plane.enqueue(queue, [b"a"])
            with pytest.raises(QueueNotFoundError):
                plane.enqueue("missing", [b"b"])

    with pytest.raises(TransactionError):
        catch_inside()
    assert plane.stats(queue)["enqueued"] == 0
    with pytest.raises(TransactionError), plane.change():
        plane.purge(queue)


@pytest.mark.spec("E4")
def test_ack_before_the_write_cancels_the_write(plane: QueuePlane, store: TestStore, make: Callable[..., str]) -> None:
    queue = make()
    plane.enqueue(queue, [b"first"])
    assert payloads(plane, queue) == [b"first"]
    with plane.change():
        held = plane.deliver(queue, [b"x" * 10_000, b"y"], consumer="c")
        assert [d.payload[:1] for d in held] == [b"x", b"y"]
        plane.ack(queue, held[0].token)
    written = {op[1] for op in store.batches[-1].ops if op[0] == 0}
    assert written == {Family.QUEUE_STATS}
    assert left(store) == []
    assert plane.stats(queue)["acked"] == 3
    with plane.change():
        held = plane.deliver(queue, [b"x" * 10_000, b"y"], consumer="c")
        plane.ack(queue, held[0].token, [held[0].id])
    assert plane.stats(queue)["leased"] == 1
    plane.release(queue, held[0].token)
    assert payloads(plane, queue) == [b"y"]
    assert left(store) == []


@pytest.mark.promise("P1")
@pytest.mark.parametrize(
    ("level", "asked", "syncs"),
    [
        (Durability.SYNCED, None, 1),
        (Durability.WRITTEN, None, 0),
        (Durability.WRITTEN, Durability.SYNCED, 1),
        (Durability.SYNCED, Durability.WRITTEN, 0),
    ],
)
def test_publish_returns_at_the_requested_durability(
    planes: Planes, monkeypatch: pytest.MonkeyPatch, level: Durability, asked: Durability | None, syncs: int
) -> None:
    plane = planes.open()
    plane.create(QueueConfig(name="q", durability=level))
    synced: list[int] = []
    real = planes.store.sync

    def sync() -> None:
        synced.append(len(planes.store.batches))
        real()

    monkeypatch.setattr(planes.store, "sync", sync)
    plane.enqueue("q", [b"x"], durability=asked)
    assert len(synced) == syncs
    if syncs:
        assert synced == [len(planes.store.batches)]


@pytest.mark.promise("P8")
@pytest.mark.spec("E10")
def test_unloading_idle_queues_loses_nothing(planes: Planes) -> None:
    plane = planes.open(loaded_max=3)
    names = [f"q{number}" for number in range(20)]
    for name in names:
        plane.create(QueueConfig(name=name, durability=Durability.WRITTEN))
        plane.enqueue(name, [name.encode(), b"x" * 9000])
    assert len(plane._loaded) <= 3
    assert plane._shared.budget.used_bytes < 20_000
    held = plane.lease("q0")
    for name in names[1:]:
        assert payloads(plane, name) == [name.encode(), b"x" * 9000]
    assert plane.ack("q0", held[0].token) == 1
    assert payloads(plane, "q0") == [b"x" * 9000]
    assert len(plane._loaded) <= 3


def mixed(name: str, count: int) -> list[Draft | bytes]:
    """Enqueue transient and persistent messages of several fairness keys, priorities and sizes."""
    return [
        Draft(
            payload=b"%s %d " % (name.encode(), number) + b"x" * (9000 if number % 5 == 0 else 0),
            transient=number % 3 != 0,
            fairness_key=f"k{number % 2}",
            priority=number % 4,
        )
        for number in range(count)
    ]


@pytest.mark.promise("P8", "P3")
@pytest.mark.spec("E2", "E10")
@pytest.mark.parametrize("priorities_max", [0, 9])
def test_unloading_queues_with_transient_messages_loses_nothing(planes: Planes, priorities_max: int) -> None:
    control = planes.open()
    control.create(QueueConfig(name="q", durability=Durability.WRITTEN, priorities_max=priorities_max))
    control.enqueue("q", mixed("q", 40))
    expected = payloads(control, "q")
    control.delete("q")
    control.close()
    plane = planes.open(loaded_max=1)
    names = [f"q{number}" for number in range(6)]
    for name in names:
        plane.create(QueueConfig(name=name, durability=Durability.WRITTEN, priorities_max=priorities_max))
        plane.enqueue(name, [Draft(payload=b"gone", transient=True)])
        plane.ack(name, plane.lease(name)[0].token)
        plane.enqueue(name, mixed(name, 40))
        before = plane.stats(name)
        assert before["transient"] == 26
    assert len(plane._loaded) == 1
    for name in names:
        after = plane.stats(name)
        assert (after["ready"], after["ready_bytes"], after["transient"]) == (40, before["ready_bytes"], 26)
        returned = plane.lease(name, 7)
        plane.release(name, returned[0].token)
    for name in reversed(names):
        plane.enqueue(name, [Draft(payload=b"last", transient=True, fairness_key="z")])
        assert [each.payload for each in plane.browse(name, 100)].count(b"last") == 1
    for name in names[1:]:
        found = payloads(plane, name, 1)
        assert sorted(found) == sorted([*(each.replace(b"q ", name.encode() + b" ") for each in expected), b"last"])
        assert plane.stats(name)["ready"] == 0
    assert plane.purge(names[0]) == 41
    plane.stats(names[1])
    assert payloads(plane, names[0]) == []
    plane.stats(names[1])
    assert planes.store.rows(Family.TRANSIENT) == []


@pytest.mark.promise("P8")
def test_number_of_loaded_queues_is_limited(planes: Planes) -> None:
    plane = planes.open(loaded_max=3)
    names = [f"q{number}" for number in range(20)]
    for name in names:
        plane.create(QueueConfig(name=name, durability=Durability.WRITTEN))
        plane.enqueue(name, [name.encode()])
    for name in names:
        assert plane.stats(name)["ready"] == 1
        assert plane.get(name).name == name
        assert [each.payload for each in plane.browse(name)] == [name.encode()]
        assert len(plane._loaded) <= 4
    held = [plane.lease(name, visibility_ms=0)[0].token for name in names[:2]]
    for name in names[2:]:
        # Queues that cannot be unloaded must not cause the unloading of the one in use.
        assert plane.stats(name)["ready"] == 1
        assert [each.payload for each in plane.browse(name)] == [name.encode()]
        assert len(plane._loaded) <= 4
    for name, token in zip(names, held, strict=False):
        plane.release(name, token)
    with plane.change():
        for name in names:
            plane.enqueue(name, [b"more"])
            assert plane.stats(name)["ready"] == 2
    assert [plane.stats(name)["ready"] for name in names] == [2] * 20


@pytest.mark.promise("P8", "P10")
def test_queue_that_cannot_spill_stays_loaded_and_a_deleted_one_is_unloaded(
    planes: Planes,
) -> None:
    plane = planes.open(loaded_max=1)
    for name in ("a", "b"):
        plane.create(QueueConfig(name=name, durability=Durability.WRITTEN))
        plane.enqueue(name, [Draft(payload=name.encode(), transient=True)])
    planes.store.refuse_unlogged = True
    plane.stats("a")
    plane.enqueue("b", [b"p"])
    planes.store.refuse_unlogged = False
    assert payloads(plane, "a") == [b"a"]
    assert payloads(plane, "b") == [b"b", b"p"]
    plane.enqueue("a", [Draft(payload=b"t", transient=True)])
    plane.enqueue("b", [b"x"])
    assert plane._loaded.peek("a") is None
    plane.delete("a")
    plane.create(QueueConfig(name="a", durability=Durability.WRITTEN))
    plane.stats("b")
    assert plane.stats("a")["ready"] == 0
    assert payloads(plane, "a") == []
    plane.create(QueueConfig(name="c", durability=Durability.WRITTEN))
    plane.enqueue("c", [Draft(payload=b"t", transient=True)])
    held = plane.lease("b", visibility_ms=0)
    # The deleted queue is the one that would be unloaded.
    plane.delete("c")
    assert planes.store.get(Family.TRANSIENT, transient_counts_key("c")) is None
    plane.create(QueueConfig(name="c", durability=Durability.WRITTEN))
    plane.stats("a")
    assert plane.stats("c")["ready"] == 0
    assert plane._loaded.peek("b") is not None
    assert plane.ack("b", held[0].token) == 1


@pytest.mark.spec("E10")
def test_restart_drops_only_transient_messages(planes: Planes) -> None:
    from basaltmq.queues.ready.budget import PagingLimits

    plane = planes.open(paging=PagingLimits(resident_max=2, read_ahead=2))
    plane.create(QueueConfig(name="q"))
    plane.enqueue("q", [Draft(payload=b"%d" % n, transient=bool(n % 2)) for n in range(20)])
    assert planes.store.rows(Family.TRANSIENT)
    again = planes.open()
    assert planes.store.rows(Family.TRANSIENT) == []
    assert again.stats("q")["ready"] == 10
    assert payloads(again, "q") == [b"%d" % n for n in range(0, 20, 2)]


@pytest.mark.promise("P3")
def test_order_is_kept_when_the_clock_is_set_back(plane: QueuePlane, make: Callable[..., str], clock: Clock) -> None:
    queue = make()
    for number in range(10):
        plane.enqueue(queue, [b"%d" % number])
        clock.pass_ms(-1000)
    assert payloads(plane, queue, 3) == [b"%d" % number for number in range(10)]


def test_purge_keeps_leased_and_delayed_messages(
    planes: Planes, plane: QueuePlane, make: Callable[..., str], store: TestStore, clock: Clock
) -> None:
    for size in (10, 9000):
        queue = make(f"q{size}")
        body = bytes(size)
        plane.enqueue(queue, [Draft(payload=body + b"%d" % n, ttl_ms=100_000) for n in range(10)])
        plane.enqueue(queue, [Draft(payload=b"later", delay_ms=10)])
        held = plane.lease(queue, 2)
        assert plane.purge(queue) == 8
        assert plane.stats(queue)["messages"] == 2
        assert planes.open().stats(queue)["messages"] == 2
        plane.release(queue, held[0].token)
        clock.pass_ms(10)
        settle(plane, clock)
        assert [p[size:] or p for p in payloads(plane, queue)] == [b"0", b"1", b"later"]
        clock.pass_ms(100_000)
        settle(plane, clock)
        assert left(store) == []


def test_move_takes_matching_messages_and_keeps_ids(plane: QueuePlane, make: Callable[..., str]) -> None:
    a, b = make("a"), make("b", priorities_max=5)
    ids = plane.enqueue(a, [Draft(payload=b"%d" % n + bytes(n * 1000), priority=n % 3) for n in range(12)])
    assert plane.move(a, b, wanted=lambda m: m.payload[:1] in b"02468", count=4) == 4
    moved = plane.lease(b, 10)
    assert [d.payload[:1] for d in moved] == [b"2", b"4", b"0", b"6"]
    assert {d.id for d in moved} < set(ids)
    assert plane.move(a, b) == 8
    assert plane.stats(a)["messages"] == 0
    with pytest.raises(InvalidArgumentError):
        plane.move(b, b)


def test_priorities_cannot_be_disabled_while_messages_exist(plane: QueuePlane, make: Callable[..., str]) -> None:
    queue = make(priorities_max=3)
    plane.enqueue(queue, [b"x"])
    with pytest.raises(InvalidConfigError):
        plane.update(QueueConfig(name=queue))
    payloads(plane, queue)
    plane.update(QueueConfig(name=queue, ttl_ms=5))
    assert plane.get(queue).ttl_ms == 5
    plane.enqueue(queue, [b"y"])
    assert payloads(plane, queue) == [b"y"]


@pytest.mark.spec("E7")
def test_lowered_limit_drops_the_head_only_in_drop_head_queues(plane: QueuePlane, make: Callable[..., str]) -> None:
    dropping, refusing = make("dropping"), make("refusing")
    for queue in (dropping, refusing):
        plane.enqueue(queue, [b"%d" % each for each in range(5)])
    plane.update(QueueConfig(name=dropping, length_max=2))
    plane.update(QueueConfig(name=refusing, length_max=2, overflow=Overflow.REJECT_PUBLISH))
    assert payloads(plane, dropping) == [b"3", b"4"]
    assert len(payloads(plane, refusing)) == 5


def test_invalid_arguments_are_refused_without_loss(plane: QueuePlane, make: Callable[..., str]) -> None:
    queue = make()
    for refused in (
        lambda: plane.lease(queue, 0),
        lambda: plane.lease(queue, visibility_ms=-1),
        lambda: plane.nack(queue, 1, delay_ms=-1),
        lambda: plane.enqueue(queue, ["text"]),  # type: ignore[list-item]
        lambda: plane.enqueue(queue, [Draft(payload=b"", priority=300)]),
        lambda: plane.enqueue(queue, [Draft(payload=b"", delay_ms=-5)]),
        lambda: plane.enqueue(queue, [Draft(payload=b"", dedup_id=b"x" * 300)]),
        lambda: plane.redrive(queue, rate_per_s=0),
        lambda: plane.publish([queue, queue], b"x"),
    ):
        with pytest.raises(InvalidArgumentError):
            refused()
    assert plane.stats(queue)["enqueued"] == 0


def test_closed_plane_refuses_calls_and_wakes_waiters(plane: QueuePlane, make: Callable[..., str]) -> None:
    queue = make()
    errors: list[BaseException] = []

    def wait() -> None:
        try:
            plane.lease(queue, wait_ms=60_000)
        except StoreClosedError as error:
            errors.append(error)

    thread = threading.Thread(target=wait)
    thread.start()
    until_waiting(plane, queue)
    plane.close()
    thread.join(30)
    assert len(errors) == 1


def test_plane_is_thread_safe(plane: QueuePlane, make: Callable[..., str]) -> None:
    queue = make()
    got: list[bytes] = []

    def work(number: int) -> None:
        for step in range(50):
            plane.enqueue(queue, [b"%d.%d" % (number, step)])
            deliveries = plane.lease(queue, 2)
            if deliveries:
                got.extend(d.payload for d in deliveries)
                plane.ack(queue, deliveries[0].token)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    got += payloads(plane, queue)
    assert sorted(got) == sorted(b"%d.%d" % (n, s) for n in range(4) for s in range(50))
