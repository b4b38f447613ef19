"""Failed deliveries: retries, dead letters, expiry, limits."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from tests.unit.queues.conftest import MS, Clock, Planes, TestStore, payloads, settle

from basaltmq.errors import QueueFullError
from basaltmq.queues.config import Overflow, QueueConfig
from basaltmq.queues.draft import Draft
from basaltmq.queues.entries.backing import APART
from basaltmq.queues.lifecycle.dead_letters import Death, history_of, is_cycle
from basaltmq.queues.lifecycle.delays import RETURN_MAX
from basaltmq.queues.message import Message
from basaltmq.queues.plane import QueuePlane
from basaltmq.store.families import Family


@pytest.mark.spec("C8")
@pytest.mark.promise("P5")
@pytest.mark.parametrize("how", ["nack", "expiry"])
def test_nack_and_lease_expiry_are_handled_alike(
    plane: QueuePlane, make: Callable[..., str], clock: Clock, how: str
) -> None:
    queue = make(attempts_max=3, dead_letter_queue="dead", visibility_timeout_ms=100)
    ids = plane.enqueue(queue, [b"poison"])
    for attempt in range(3):
        held = plane.lease(queue)
        assert [(d.id, d.attempts) for d in held] == [(ids[0], attempt)]
        if how == "nack":
            plane.nack(queue, held[0].token, error="boom")
        else:
            clock.pass_ms(100)
            settle(plane, clock)
    assert plane.lease(queue) == []
    dead = plane.lease("dead")[0].message()
    assert dead.id == ids[0]
    assert dead.attempts == 0
    assert dead.headers["x-last-error"] == ("boom" if how == "nack" else "the lease expired")
    death = history_of(dead)[0]
    assert (death.queue, death.reason, death.count, death.attempts) == (queue, "delivery_limit", 1, 3)
    stats = plane.stats(queue)
    assert (stats["failed"], stats["dead_lettered"], stats["messages"]) == (3, 1, 0)


@pytest.mark.spec("C8")
@pytest.mark.promise("P5")
def test_delivery_that_kills_the_process_counts_as_an_attempt(planes: Planes, clock: Clock) -> None:
    plane = planes.open()
    plane.create(QueueConfig(name="q", attempts_max=2, dead_letter_queue="dead", visibility_timeout_ms=50))
    plane.enqueue("q", [b"poison"])
    for _ in range(2):
        assert plane.lease("q")
        plane = planes.open()
        clock.pass_ms(50)
        settle(plane, clock)
    assert plane.lease("q") == []
    assert payloads(plane, "dead") == [b"poison"]


@pytest.mark.spec("C8")
def test_message_without_dead_letter_queue_is_dropped_and_counted(
    plane: QueuePlane, make: Callable[..., str], store: TestStore
) -> None:
    queue = make(attempts_max=1)
    plane.enqueue(queue, [b"x" * 9000])
    plane.nack(queue, plane.lease(queue)[0].token)
    assert plane.stats(queue)["dropped"] == 1
    assert store.rows(Family.MESSAGE_CONTENT) == store.rows(Family.MESSAGES) == []


@pytest.mark.spec("C8")
@pytest.mark.promise("P3")
def test_delayed_retry_returns_to_its_place_after_a_restart(
    planes: Planes, plane: QueuePlane, make: Callable[..., str], clock: Clock
) -> None:
    queue = make()
    plane.enqueue(queue, [b"a" * 9000, b"b"])
    held = plane.lease(queue)
    plane.nack(queue, held[0].token, delay_ms=100)
    plane.enqueue(queue, [b"c"])
    assert plane.stats(queue)["delayed"] == 1
    plane = planes.open()
    assert plane.deadline_ns() == clock() + 100_000_000
    clock.pass_ms(99)
    settle(plane, clock)
    assert [d.payload[:1] for d in plane.lease(queue, 1)] == [b"b"]
    clock.pass_ms(1)
    assert settle(plane, clock) is not None
    assert [(d.payload[:1], d.attempts) for d in plane.lease(queue, 9)] == [(b"a", 1), (b"c", 0)]
    assert plane.stats(queue)["delayed"] == 0


@pytest.mark.spec("C8")
def test_delay_ends_at_most_one_millisecond_late_and_never_early(
    plane: QueuePlane, make: Callable[..., str], clock: Clock
) -> None:
    queue = make()
    clock.now_ns += 4
    plane.enqueue(queue, [Draft(payload=b"x", delay_ms=100)])
    clock.now_ns += 100 * MS - 1
    settle(plane, clock)
    assert plane.stats(queue)["ready"] == 0
    clock.now_ns += MS
    settle(plane, clock)
    assert plane.stats(queue)["ready"] == 1


@pytest.mark.spec("C8")
def test_many_due_messages_return_in_bounded_batches(plane: QueuePlane, make: Callable[..., str], clock: Clock) -> None:
    queue = make()
    total = 2 * RETURN_MAX + 5
    plane.enqueue(queue, [Draft(payload=b"%d" % n, delay_ms=10) for n in range(total)])
    clock.pass_ms(10)
    ready = []
    while True:
        deadline = plane.run_due(clock())
        ready.append(plane.stats(queue)["ready"])
        if deadline is None or deadline > clock():
            break
    assert ready == [RETURN_MAX, 2 * RETURN_MAX, total]
    assert payloads(plane, queue) == [b"%d" % n for n in range(total)]


@pytest.mark.spec("E7")
def test_message_expires_on_time_behind_one_with_a_longer_ttl(
    plane: QueuePlane, make: Callable[..., str], clock: Clock
) -> None:
    queue = make(dead_letter_queue="dead")
    plane.enqueue(queue, [Draft(payload=b"long", ttl_ms=1000), Draft(payload=b"short" * 1000, ttl_ms=10), b"never"])
    assert plane.deadline_ns() == clock() + 10_000_000
    clock.pass_ms(10)
    settle(plane, clock)
    assert plane.stats(queue)["ready"] == 2
    assert plane.stats(queue)["expired"] == 1
    dead = plane.lease("dead")[0]
    assert dead.payload == b"short" * 1000
    assert history_of(dead.message())[0].reason == "expired"
    clock.pass_ms(990)
    settle(plane, clock)
    assert payloads(plane, queue) == [b"never"]


@pytest.mark.spec("E7")
@pytest.mark.parametrize("resident_max", [2, 1000])
def test_queue_ttl_expires_messages_in_order_without_an_index(planes: Planes, clock: Clock, resident_max: int) -> None:
    from basaltmq.queues.ready.budget import PagingLimits

    plane = planes.open(paging=PagingLimits(resident_max=resident_max, read_ahead=2))
    plane.create(QueueConfig(name="q", ttl_ms=100))
    for number in range(10):
        plane.enqueue("q", [b"%d" % number])
        clock.pass_ms(10)
    assert planes.store.rows(Family.MESSAGE_EXPIRY) == []
    settle(plane, clock)
    assert plane.stats("q")["ready"] == 9
    plane = planes.open()
    clock.pass_ms(40)
    settle(plane, clock)
    assert plane.stats("q")["ready"] == 5
    assert payloads(plane, "q") == [b"%d" % number for number in range(5, 10)]


@pytest.mark.spec("E7")
def test_expired_message_is_not_delivered_even_before_its_timer_runs(
    plane: QueuePlane, make: Callable[..., str], clock: Clock
) -> None:
    queue = make(dead_letter_queue="dead")
    plane.enqueue(queue, [Draft(payload=b"a", ttl_ms=5), Draft(payload=b"b", transient=True, ttl_ms=5), b"c"])
    clock.pass_ms(5)
    assert [d.payload for d in plane.lease(queue, 5)] == [b"c"]
    assert payloads(plane, "dead") == [b"a", b"b"]


@pytest.mark.spec("E7")
def test_leased_message_expires_on_return(
    plane: QueuePlane, make: Callable[..., str], clock: Clock, store: TestStore
) -> None:
    queue = make(dead_letter_queue="dead")
    plane.enqueue(queue, [Draft(payload=b"a", ttl_ms=50), Draft(payload=b"b", ttl_ms=50)])
    held = plane.lease(queue, 2, visibility_ms=1000)
    clock.pass_ms(60)
    settle(plane, clock)
    assert plane.ack(queue, held[0].token, [held[0].id]) == 1
    plane.release(queue, held[0].token)
    assert plane.stats(queue)["ready"] == 0
    assert payloads(plane, "dead") == [b"b"]
    assert store.rows(Family.MESSAGE_EXPIRY) == []


@pytest.mark.spec("E7")
def test_death_history_counts_by_queue_and_reason(plane: QueuePlane, make: Callable[..., str]) -> None:
    a = make("a", dead_letter_queue="b")
    make("c")
    plane.enqueue(a, [b"x"])
    for _ in range(2):
        plane.nack(a, plane.lease(a)[0].token, reject=True)
        message = plane.lease("b")[0]
        assert plane.nack("b", message.token) == 1
        assert plane.move("b", a) == 1
    plane.nack(a, plane.lease(a)[0].token, reject=True)
    assert [(d.queue, d.reason, d.count) for d in history_of(plane.browse("b")[0])] == [("a", "rejected", 1)]


@pytest.mark.spec("E7")
def test_dead_letter_cycle_ends_unless_a_consumer_rejects(
    plane: QueuePlane, make: Callable[..., str], clock: Clock
) -> None:
    make("a", ttl_ms=10, dead_letter_queue="b")
    plane.update(QueueConfig(name="b", ttl_ms=10, dead_letter_queue="a"))
    plane.enqueue("a", [b"x"])
    for _ in range(5):
        clock.pass_ms(11)
        settle(plane, clock)
    assert plane.stats("a")["messages"] + plane.stats("b")["messages"] == 0
    assert plane.stats("a")["cycles"] + plane.stats("b")["cycles"] == 1
    plane.enqueue("a", [b"y"])
    for _ in range(3):
        plane.nack("a", plane.lease("a")[0].token, reject=True)
        plane.nack("b", plane.lease("b")[0].token, reject=True)
    assert payloads(plane, "a") == [b"y"]


def test_dead_letter_cycles_are_detected_by_the_history() -> None:
    def death(queue: str, reason: str) -> Death:
        return Death(queue, reason, 1, 0, 0)

    assert is_cycle([death("b", "expired"), death("a", "maxlen")], "a")
    assert not is_cycle([death("b", "rejected"), death("a", "expired")], "a")
    assert is_cycle([death("b", "expired"), death("a", "rejected")], "b")
    assert not is_cycle([death("b", "expired")], "a")


def test_history_header_of_a_publisher_is_ignored() -> None:
    for text in ("no json", "{}", '[{"queue": 5}]', "[1]"):
        message = Message(id=bytes(16), queue="q", payload=b"", enqueued_ns=0, headers={"x-death": text})
        assert history_of(message) == []


@pytest.mark.spec("C9")
def test_redrive_resets_attempts(plane: QueuePlane, make: Callable[..., str], clock: Clock) -> None:
    for name in ("a", "b"):
        make(name, attempts_max=1, dead_letter_queue="dead")
        plane.enqueue(name, [f"{name}{n}".encode() + bytes(n * 3000) for n in range(4)])
        plane.nack(name, plane.lease(name, 9)[0].token)
    assert plane.redrive("dead", wanted=lambda m: m.payload[1:2] in b"13", count=3) == 3
    assert [m.payload[:2] for m in plane.browse("a")] == [b"a1", b"a3"]
    assert [m.payload[:2] for m in plane.browse("b")] == [b"b1"]
    back = plane.browse("a")[0]
    assert back.attempts == 0
    assert back.headers == {}
    assert plane.redrive("dead", to="b", count=1) == 1
    assert plane.stats("dead")["ready"] == 4
    begin = clock()
    assert plane.redrive("dead", rate_per_s=10) == 4
    assert plane.stats("dead")["ready"] == 0
    assert plane.stats("a")["delayed"] + plane.stats("b")["delayed"] == 4
    clock.now_ns = begin + 200_000_000
    settle(plane, clock)
    assert plane.stats("a")["delayed"] + plane.stats("b")["delayed"] == 1


@pytest.mark.spec("C9")
def test_deleted_dead_letter_queue_is_recreated(plane: QueuePlane, make: Callable[..., str]) -> None:
    queue = make(dead_letter_queue="dead")
    plane.delete("dead")
    plane.enqueue(queue, [b"x"])
    plane.nack(queue, plane.lease(queue)[0].token, reject=True)
    assert payloads(plane, "dead") == [b"x"]


@pytest.mark.spec("E7")
def test_full_queue_drops_its_head(plane: QueuePlane, make: Callable[..., str]) -> None:
    queue = make(length_max=3, dead_letter_queue="dead")
    plane.enqueue(queue, [b"0", b"1"])
    held = plane.lease(queue)
    plane.enqueue(queue, [b"2", b"3", b"4"])
    assert [m.payload for m in plane.browse(queue)] == [b"2", b"3", b"4"]
    plane.enqueue(queue, [b"%d" % n for n in range(5, 10)])
    assert [m.payload for m in plane.browse(queue)] == [b"7", b"8", b"9"]
    assert payloads(plane, "dead") == [b"1", b"2", b"3", b"4", b"5", b"6"]
    plane.release(queue, held[0].token)
    assert [m.payload for m in plane.browse(queue)] == [b"7", b"8", b"9"]
    assert payloads(plane, "dead") == [b"0"], "a returned message counts towards the limit and is the head"


@pytest.mark.spec("E7")
@pytest.mark.promise("P8")
def test_returning_delayed_messages_respect_the_limits(
    plane: QueuePlane, make: Callable[..., str], clock: Clock
) -> None:
    queue = make(length_max=3, dead_letter_queue="dead")
    plane.enqueue(queue, [Draft(payload=b"%d" % n, delay_ms=100) for n in range(10)])
    clock.pass_ms(100)
    settle(plane, clock)
    assert [m.payload for m in plane.browse(queue)] == [b"7", b"8", b"9"]
    assert payloads(plane, "dead") == [b"%d" % n for n in range(7)]


@pytest.mark.spec("E7")
def test_queue_over_its_byte_limit_drops_its_head(plane: QueuePlane, make: Callable[..., str]) -> None:
    queue = make(bytes_max=10_000)
    plane.enqueue(queue, [b"a" * 4000, b"b" * 4000])
    plane.enqueue(queue, [b"c" * 5000])
    assert [m.payload[:1] for m in plane.browse(queue)] == [b"b", b"c"]
    plane.enqueue(queue, [b"d" * 10_001])
    assert plane.browse(queue) == []
    assert plane.stats(queue)["dropped"] == 4


@pytest.mark.spec("E7")
@pytest.mark.parametrize("overflow", [Overflow.REJECT_PUBLISH, Overflow.REJECT_PUBLISH_DEAD_LETTER])
def test_full_queue_refuses_a_whole_call(
    plane: QueuePlane, make: Callable[..., str], overflow: Overflow, store: TestStore
) -> None:
    queue = make(length_max=3, overflow=overflow, dead_letter_queue="dead")
    plane.enqueue(queue, [b"0", b"1"])
    with pytest.raises(QueueFullError, match="is full"):
        plane.enqueue(queue, [b"2", b"x" * 9000])
    assert [m.payload for m in plane.browse(queue)] == [b"0", b"1"]
    dead = payloads(plane, "dead")
    assert dead == ([] if overflow is Overflow.REJECT_PUBLISH else [b"2", b"x" * 9000])
    assert store.rows(Family.MESSAGE_CONTENT) == []
    plane.enqueue(queue, [b"2"])


@pytest.mark.spec("E7")
def test_dead_letters_do_not_exceed_the_limit_of_a_drop_head_queue(plane: QueuePlane, make: Callable[..., str]) -> None:
    make("dead", length_max=2)
    queue = make(dead_letter_queue="dead")
    plane.enqueue(queue, [b"%d" % n for n in range(5)])
    plane.nack(queue, plane.lease(queue, 5)[0].token, reject=True)
    assert [m.payload for m in plane.browse("dead")] == [b"3", b"4"]


@pytest.mark.spec("E7")
def test_only_unused_queues_expire(plane: QueuePlane, make: Callable[..., str], clock: Clock) -> None:
    queue = make(expires_ms=1000)
    plane.enqueue(queue, [b"a", b"b"])
    for _ in range(5):
        clock.pass_ms(600)
        settle(plane, clock)
        held = plane.lease(queue)
        plane.release(queue, held[0].token)
    plane.lease(queue)
    clock.pass_ms(1500)
    settle(plane, clock)
    assert plane.stats(queue)["leased"] == 1
    clock.pass_ms(30_000)
    settle(plane, clock)
    clock.pass_ms(2000)
    settle(plane, clock)
    assert plane.configs() == []


@pytest.mark.parametrize("size", [10, 9000])
def test_dedup_id_admits_one_message_per_window(
    planes: Planes, plane: QueuePlane, make: Callable[..., str], clock: Clock, store: TestStore, size: int
) -> None:
    queue = make(dedup_window_ms=5000)
    body = bytes(size)

    def publish(*names: bytes) -> list[bytes]:
        return plane.enqueue(queue, [Draft(payload=body + name, dedup_id=name) for name in names])

    first = publish(b"a", b"b", b"a")
    assert first[0] == first[2] != first[1]
    assert publish(b"b", b"c")[0] == first[1]
    assert plane.stats(queue)["duplicates"] == 2
    plane = planes.open()
    assert [p[size:] for p in payloads(plane, queue)] == [b"a", b"b", b"c"]
    assert publish(b"a")[0] == first[0]
    clock.pass_ms(5000)
    assert publish(b"a")[0] != first[0]
    clock.pass_ms(60_000)
    settle(plane, clock)
    assert store.rows(Family.DEDUP) == store.rows(Family.DEDUP_EXPIRY) == []
    assert len(payloads(plane, queue)) == 1


@pytest.mark.spec("E3", "E4")
def test_body_shared_by_100_queues_is_stored_once_and_deleted_with_the_last(
    planes: Planes, plane: QueuePlane, make: Callable[..., str], store: TestStore
) -> None:
    names = [make(f"q{n}", attempts_max=1, dead_letter_queue="dead") for n in range(100)]
    ids = plane.publish(names, b"x" * 1000)
    assert len(set(ids)) == 100
    assert len(store.rows(Family.MESSAGE_CONTENT)) == 1
    assert len(store.rows(Family.CONTENT_REFS)) == 100
    plane = planes.open()
    for name in names[:50]:
        held = plane.lease(name)
        assert held[0].payload == b"x" * 1000
        plane.ack(name, held[0].token)
    for name in names[50:60]:
        plane.nack(name, plane.lease(name)[0].token)
    for name in names[60:70]:
        plane.delete(name)
    for name in names[70:]:
        plane.purge(name)
    assert len(store.rows(Family.MESSAGE_CONTENT)) == 1
    assert payloads(plane, "dead") == [b"x" * 1000] * 10
    assert store.rows(Family.MESSAGE_CONTENT) == store.rows(Family.CONTENT_REFS) == []


@pytest.mark.spec("E3")
@pytest.mark.parametrize(("size", "apart"), [(0, False), (4096, False), (4097, True), (1 << 20, True)])
def test_small_bodies_are_inline_and_large_ones_separate(
    plane: QueuePlane, make: Callable[..., str], store: TestStore, size: int, apart: bool
) -> None:
    queue = make()
    plane.enqueue(queue, [b"x" * size])
    assert len(store.rows(Family.MESSAGE_CONTENT)) == apart
    entry = plane._queue(queue).backing.head()
    assert entry is not None
    assert bool(entry.flags & APART) == apart
    held = plane.lease(queue)
    before = len(store.batches)
    plane.nack(queue, held[0].token)
    assert not any(op[1] is Family.MESSAGE_CONTENT for op in store.batches[before].ops)
    assert payloads(plane, queue) == [b"x" * size]
    assert store.rows(Family.MESSAGE_CONTENT) == []


@pytest.mark.spec("E7")
def test_higher_priorities_are_first_and_requeue_keeps_the_priority(
    planes: Planes, plane: QueuePlane, make: Callable[..., str]
) -> None:
    queue = make(priorities_max=9)
    plane.enqueue(queue, [Draft(payload=b"%d" % n, priority=n) for n in (0, 5, 9, 5, 255, 1)])
    held = plane.lease(queue, 3)
    assert [d.payload for d in held] == [b"9", b"255", b"5"]
    plane.nack(queue, held[0].token)
    assert held[0].message().priority == 9
    plane = planes.open()
    assert payloads(plane, queue, 2) == [b"9", b"255", b"5", b"5", b"1", b"0"]


@pytest.mark.spec("C10", "E1")
def test_fairness_weights_survive_a_restart(planes: Planes, plane: QueuePlane, make: Callable[..., str]) -> None:
    queue = make()
    for key, weight in (("a", 1), ("b", 3)):
        plane.enqueue(queue, [Draft(payload=key.encode(), fairness_key=key, weight=weight) for _ in range(400)])
    for each in (plane, planes.open()):
        got = b"".join(d.payload for d in each.lease(queue, 200))
        assert abs(got.count(b"b") - 150) <= 2


@pytest.mark.spec("C10")
@pytest.mark.promise("P8")
def test_empty_fairness_key_is_removed(plane: QueuePlane, make: Callable[..., str]) -> None:
    queue = make()
    plane.enqueue(queue, [Draft(payload=b"x", fairness_key=f"k{n}") for n in range(500)])
    held = plane.lease(queue, 500)
    assert plane._queue(queue).backing.info().sub_queues == 0
    plane.release(queue, held[0].token)
    assert len(payloads(plane, queue)) == 500
