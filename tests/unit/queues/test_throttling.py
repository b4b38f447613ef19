"""Throttles and scripts in queues."""

from __future__ import annotations

import threading
from collections.abc import Callable

import pytest
from tests.unit.queues.conftest import Clock, Planes, TestStore, payloads, settle
from tests.unit.queues.test_plane import until_waiting

from basaltmq.errors import InvalidConfigError, QueueNotFoundError, ScriptError, StoreStalledError
from basaltmq.queues.config import QueueConfig
from basaltmq.queues.draft import Draft
from basaltmq.queues.plane import QueuePlane


def throttled(name: str, *keys: str, fairness_key: str = "default") -> Draft:
    return Draft(payload=name.encode(), throttle_keys=keys, fairness_key=fairness_key)


def got(plane: QueuePlane, queue: str, count: int = 10) -> list[str]:
    return [delivery.payload.decode() for delivery in plane.lease(queue, count)]


@pytest.mark.spec("C11")
def test_throttled_message_does_not_block_others(plane: QueuePlane, make: Callable[..., str], clock: Clock) -> None:
    queue = make()
    plane.set_setting("throttle.slow", "1,1")
    plane.enqueue(queue, [throttled("a", "slow"), throttled("b", "slow"), throttled("c"), throttled("d", "other")])
    assert got(plane, queue) == ["a", "c", "d"]
    assert got(plane, queue) == []
    assert plane.stats(queue)["ready"] == 1
    clock.pass_ms(999)
    assert got(plane, queue) == []
    clock.pass_ms(1)
    assert got(plane, queue) == ["b"]


@pytest.mark.spec("C11")
def test_all_throttle_keys_need_a_token(plane: QueuePlane, make: Callable[..., str], clock: Clock) -> None:
    queue = make()
    plane.set_setting("throttle.x", "1,1")
    plane.set_setting("throttle.y", "10,1")
    plane.enqueue(queue, [throttled("a", "x", "y"), throttled("b", "y"), throttled("c", "x", "y")])
    assert got(plane, queue) == ["a"]
    clock.pass_ms(100)
    assert got(plane, queue) == ["b"]
    clock.pass_ms(900)
    assert got(plane, queue) == ["c"]


@pytest.mark.spec("C11")
def test_messages_over_the_parking_limit_stay_in_the_queue_in_order(
    plane: QueuePlane, make: Callable[..., str], clock: Clock
) -> None:
    queue = make()
    plane.set_setting("throttle.slow", "100,1")
    names = [f"{n:03d}" for n in range(400)]
    plane.enqueue(queue, [throttled(name, "slow") for name in names])
    plane.enqueue(queue, [throttled("free", fairness_key="other")])
    seen = got(plane, queue)
    assert seen == ["000", "free"] or seen == ["free", "000"]
    collected = ["000"]
    while len(collected) < 400:
        clock.pass_ms(10)
        collected += got(plane, queue)
    assert collected == names


@pytest.mark.spec("C11")
def test_waiting_consumer_is_woken_by_its_token(plane: QueuePlane, make: Callable[..., str], clock: Clock) -> None:
    queue = make()
    plane.set_setting("throttle.slow", "1,1")
    plane.enqueue(queue, [throttled("a", "slow"), throttled("b", "slow")])
    assert got(plane, queue) == ["a"]
    calls: list[int] = []
    plane.on_ready(queue, lambda: calls.append(1))
    assert calls == []
    seen: list[bytes] = []
    thread = threading.Thread(target=lambda: seen.extend(d.payload for d in plane.lease(queue, wait_ms=60_000)))
    thread.start()
    until_waiting(plane, queue)
    assert plane.deadline_ns() == clock() + 1_000_000_000
    clock.pass_ms(1000)
    plane.run_due(clock())
    assert calls == [1]
    plane.set_setting("throttle.slow", "1,5")
    plane.enqueue(queue, [throttled("c")])
    thread.join(30)
    assert len(seen) == 1


@pytest.mark.spec("C11")
def test_removed_or_raised_limit_releases_messages(planes: Planes, plane: QueuePlane, make: Callable[..., str]) -> None:
    queue = make()
    plane.set_setting("throttle.slow", "0,1")
    plane.enqueue(queue, [throttled(name, "slow") for name in "abc"])
    assert got(plane, queue) == []
    plane = planes.open()
    assert got(plane, queue) == []
    plane.delete_setting("throttle.slow")
    assert got(plane, queue) == ["a", "b", "c"]
    with pytest.raises(InvalidConfigError):
        plane.set_setting("throttle.slow", "fast")


@pytest.mark.spec("C11", "C6")
def test_failed_lease_returns_tokens_and_messages(
    plane: QueuePlane, make: Callable[..., str], store: TestStore
) -> None:
    queue = make()
    plane.set_setting("throttle.slow", "1,2")
    plane.enqueue(queue, [throttled(name, "slow") for name in "abc"])
    store.refuse = 1
    with pytest.raises(StoreStalledError):
        plane.lease(queue, 5)
    assert got(plane, queue) == ["a", "b"]
    assert plane.stats(queue)["ready"] == 1


@pytest.mark.spec("C11", "E7", "E11")
def test_parked_messages_are_browsed_purged_moved_and_expired(
    plane: QueuePlane, make: Callable[..., str], clock: Clock
) -> None:
    queue, other = make(dead_letter_queue="dead"), make("other")
    plane.set_setting("throttle.slow", "0,1")
    plane.enqueue(queue, [throttled(name, "slow") for name in "abc"])
    plane.enqueue(queue, [Draft(payload=b"short", throttle_keys=("slow",), ttl_ms=10)])
    assert got(plane, queue) == []
    assert [m.payload for m in plane.browse(queue)] == [b"a", b"b", b"c", b"short"]
    assert got(plane, queue) == []
    clock.pass_ms(10)
    settle(plane, clock)
    assert [m.payload for m in plane.browse("dead")] == [b"short"]
    assert got(plane, queue) == []
    assert plane.move(queue, other, count=1) == 1
    assert got(plane, queue) == []
    assert plane.purge(queue) == 2
    plane.delete_setting("throttle.slow")
    assert got(plane, queue) == []
    assert payloads(plane, other) == [b"a"]


ENQUEUE = """
function on_enqueue(msg)
  return {fairness_key = msg.headers.tenant, weight = tonumber(fila.get("weight") or "1"), throttle_keys = {"t"}}
end
"""
FAILURE = """
function on_failure(msg)
  if msg.error == "fatal" then return {action = "dlq"} end
  return {action = "retry", delay_ms = msg.attempts * 100}
end
"""


@pytest.mark.spec("C12")
def test_on_enqueue_sets_keys_and_weight(plane: QueuePlane, make: Callable[..., str]) -> None:
    queue = make(on_enqueue_script=ENQUEUE)
    plane.set_setting("weight", "7")
    plane.enqueue(queue, [Draft(payload=b"a", headers={"tenant": "blue"}), b"b"])
    first, second = sorted(plane.browse(queue), key=lambda m: m.payload)
    assert (first.fairness_key, first.weight, first.throttle_keys) == ("blue", 7, ("t",))
    assert (second.fairness_key, second.weight) == ("default", 7)
    assert plane.script_counters(queue)["on_enqueue"].runs == 2


@pytest.mark.spec("C8", "C12")
@pytest.mark.promise("P5")
@pytest.mark.parametrize("how", ["nack", "expiry"])
def test_on_failure_runs_for_nack_and_expiry(
    plane: QueuePlane, make: Callable[..., str], clock: Clock, how: str
) -> None:
    queue = make(on_failure_script=FAILURE, dead_letter_queue="dead", visibility_timeout_ms=1000)
    plane.enqueue(queue, [b"x"])
    for attempt in (1, 2):
        held = plane.lease(queue)
        if how == "nack":
            plane.nack(queue, held[0].token, error="no")
        else:
            clock.pass_ms(1000)
            settle(plane, clock)
        assert plane.stats(queue)["delayed"] == 1
        clock.pass_ms(attempt * 100)
        settle(plane, clock)
    held = plane.lease(queue)
    assert held[0].attempts == 2
    plane.nack(queue, held[0].token, error="fatal")
    assert payloads(plane, "dead") == [b"x"]


@pytest.mark.spec("C12")
def test_invalid_script_rejects_the_queue_and_a_failing_one_loses_nothing(
    plane: QueuePlane, make: Callable[..., str]
) -> None:
    with pytest.raises(ScriptError):
        make(on_enqueue_script="function on_enqueue(")
    with pytest.raises(QueueNotFoundError):
        plane.stats("q")
    queue = make(on_enqueue_script="function on_enqueue(m) error('bad') end")
    plane.enqueue(queue, [b"a", b"b"])
    assert plane.script_counters(queue)["on_enqueue"].failures == 2
    with pytest.raises(ScriptError):
        plane.update(QueueConfig(name=queue, on_failure_script="nonsense("))
    assert payloads(plane, queue) == [b"a", b"b"]


@pytest.mark.spec("C11")
def test_every_key_with_a_token_is_served_by_small_leases(
    plane: QueuePlane, make: Callable[..., str], clock: Clock
) -> None:
    queue = make()
    plane.set_setting("throttle.t", "2,2")
    plane.enqueue(queue, [throttled(f"{key}{at}", "t", fairness_key=key) for at in range(4) for key in "ab"])
    seen = got(plane, queue)
    assert len(seen) == 2
    for _ in range(3):
        clock.pass_ms(1000)
        calls = [got(plane, queue, 1) for _ in range(3)]
        assert [len(each) for each in calls] == [1, 1, 0]
        seen += [name for each in calls for name in each]
    assert sorted(seen) == [f"{key}{at}" for key in "ab" for at in range(4)]


@pytest.mark.spec("C11")
@pytest.mark.promise("P8")
def test_woken_messages_count_towards_the_byte_limit_of_a_lease(
    plane: QueuePlane, make: Callable[..., str], clock: Clock
) -> None:
    queue = make()
    plane.set_setting("throttle.t", "10,5")
    drafts = [Draft(payload=bytes([at]) * 1000, throttle_keys=("t",), fairness_key=f"k{at % 2}") for at in range(10)]
    plane.enqueue(queue, drafts)
    assert len(plane.lease(queue, 10)) == 5
    assert len(plane.lease(queue, 10)) == 0
    clock.pass_ms(1000)
    calls = [plane.lease(queue, 10, size_bytes_max=2500) for _ in range(4)]
    assert [len(each) for each in calls] == [2, 2, 1, 0]
    assert len({each.id for call in calls for each in call}) == 5
    plane.enqueue(queue, [b"x" * 2000, b"y" * 2000])
    assert [each.payload[:1] for each in plane.lease(queue, 10, size_bytes_max=2500)] == [b"x"]


@pytest.mark.spec("C11")
def test_large_parked_message_takes_no_bytes_from_later_ones(
    plane: QueuePlane, make: Callable[..., str], clock: Clock
) -> None:
    queue = make()
    plane.set_setting("throttle.t", "0.001,1")
    plane.enqueue(queue, [throttled("first", "t"), Draft(payload=b"w" * 9000, throttle_keys=("t",)), b"small", b"too"])
    assert got(plane, queue, 1) == ["first"]
    assert [each.payload for each in plane.lease(queue, 10, size_bytes_max=100)] == [b"small", b"too"]
    make("short", ttl_ms=10)
    plane.enqueue("short", [b"e" * 9000])
    clock.pass_ms(11)
    plane.enqueue("short", [b"live"])
    assert [each.payload for each in plane.lease("short", 10, size_bytes_max=100)] == [b"live"]
