"""Embedded queues on a store on disk."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.unit.embedded.queue_rig import LONG_S, finish, in_background, payloads, until, waiting

import basaltmq
from basaltmq.durability import Durability
from basaltmq.embedded.database import Basalt, Settings
from basaltmq.embedded.queue import EmbeddedQueue
from basaltmq.errors import (
    InvalidArgumentError,
    InvalidConfigError,
    LimitExceededError,
    QueueFullError,
    QueueNotFoundError,
    StaleLeaseError,
    StoreClosedError,
    TransactionError,
)
from basaltmq.queues.config import Overflow
from basaltmq.queues.draft import Draft


@pytest.fixture
def db(tmp_path: Path) -> Iterator[Basalt]:
    with basaltmq.open(tmp_path / "data") as opened:
        yield opened


@pytest.fixture
def queue(db: Basalt) -> EmbeddedQueue:
    return db.queue("q")


@pytest.mark.spec("C7")
def test_messages_are_leased_in_order_and_deleted_by_ack(queue: EmbeddedQueue) -> None:
    first = queue.enqueue(b"one")
    rest = queue.enqueue(["two", Draft(payload=b"three", headers={"a": "b"})])
    messages = queue.lease(10)
    assert payloads(messages) == [b"one", b"two", b"three"]
    assert [message.id for message in messages] == [first, *rest]
    assert messages[1].text() == "two"
    assert messages[2].headers == {"a": "b"}
    assert queue.ack(messages[0]) == 1
    assert [message.settled for message in messages] == [True, False, False]
    assert queue.ack(messages[1:]) == 2
    assert queue.lease(10) == []
    counts = queue.stats()
    assert (counts["messages"], counts["enqueued"], counts["acked"], counts["leased"]) == (0, 3, 3, 0)


@pytest.mark.promise("P1")
def test_messages_survive_reopening(tmp_path: Path) -> None:
    with basaltmq.open(tmp_path / "data") as db:
        db.queue("q").enqueue([b"one", b"two"])
    with basaltmq.open(tmp_path / "data", create=False) as db:
        assert payloads(db.queue("q", create=False).lease(10)) == [b"one", b"two"]


@pytest.mark.promise("P1")
def test_only_synced_enqueues_wait_for_the_sync(
    db: Basalt, queue: EmbeddedQueue, monkeypatch: pytest.MonkeyPatch
) -> None:
    syncs: list[None] = []
    sync = db.store.sync

    def counted() -> None:
        syncs.append(None)
        sync()

    monkeypatch.setattr(db.store, "sync", counted)
    queue.enqueue(b"x", durability="written")
    assert len(syncs) == 0
    queue.enqueue(b"x")
    assert len(syncs) == 1
    asyncio.run(queue.enqueue_async(b"x"))
    assert len(syncs) == 2
    asyncio.run(queue.enqueue_async(b"x", durability=Durability.WRITTEN))
    assert len(syncs) == 2


def test_message_fields_are_stored(db: Basalt) -> None:
    queue = db.queue("p", priorities_max=9, dedup_window_ms=60_000)
    low = queue.enqueue("low", priority=1, headers={"h": "v"}, fairness_key="k", ttl_ms=60_000, dedup_id="a")
    high = queue.enqueue("high", priority=5, dedup_id=b"b")
    assert queue.enqueue("low again", dedup_id=b"a") == low
    messages = queue.lease(10)
    assert [message.id for message in messages] == [high, low]
    assert (messages[1].fairness_key, messages[1].priority, messages[1].headers) == ("k", 1, {"h": "v"})
    assert messages[1].message.expires_ns > messages[1].message.enqueued_ns
    assert queue.stats()["duplicates"] == 1


@pytest.mark.parametrize("wrong", [1, None, bytearray(b"x"), {"payload": "x"}, [b"x", 1], ["\ud800"], {b"x"}])
def test_invalid_messages_are_refused(queue: EmbeddedQueue, wrong: Any) -> None:
    with pytest.raises(InvalidArgumentError):
        queue.enqueue(wrong)
    assert queue.stats()["enqueued"] == 0


@pytest.mark.parametrize(
    "fields",
    [
        {"priority": 256},
        {"priority": "1"},
        {"ttl_ms": -1},
        {"delay_ms": 1.5},
        {"headers": {"a": 1}},
        {"headers": ["a"]},
        {"fairness_key": b"k"},
        {"dedup_id": 7},
        {"durability": "certain"},
        {"colour": "red"},
    ],
)
def test_field_of_the_wrong_type_is_refused(queue: EmbeddedQueue, fields: dict[str, Any]) -> None:
    with pytest.raises(InvalidArgumentError):
        queue.enqueue(b"x", **fields)
    assert queue.stats()["enqueued"] == 0


def test_each_draft_has_its_own_fields(queue: EmbeddedQueue) -> None:
    wrong: Any = {"headers": {"a": "b"}}
    with pytest.raises(InvalidArgumentError, match="headers: allowed for a single payload only"):
        queue.enqueue([b"x", b"y"], **wrong)
    with pytest.raises(InvalidArgumentError, match="set them on each Draft"):
        queue.enqueue(Draft(payload=b"x"), delay_ms=5)
    assert queue.enqueue([]) == []


def test_call_with_too_many_messages_is_refused(queue: EmbeddedQueue) -> None:
    with pytest.raises(LimitExceededError):
        queue.enqueue([b""] * 10_001)
    assert queue.stats()["messages"] == 0


@pytest.mark.parametrize("count", [0, -1, "1", 1.0, True, None])
def test_lease_with_invalid_count_is_refused(queue: EmbeddedQueue, count: Any) -> None:
    with pytest.raises(InvalidArgumentError, match="1 or more"):
        queue.lease(count)
    with pytest.raises(InvalidArgumentError):
        asyncio.run(queue.lease_async(count))
    with pytest.raises(InvalidArgumentError):
        queue.peek(count)


@pytest.mark.parametrize("wait", [-1, "1", float("nan"), True])
def test_invalid_wait_is_refused(queue: EmbeddedQueue, wait: Any) -> None:
    with pytest.raises(InvalidArgumentError, match="wait must be 0 seconds or more"):
        queue.lease(wait=wait)


@pytest.mark.spec("C7")
def test_acking_twice_is_refused(queue: EmbeddedQueue) -> None:
    queue.enqueue([b"one", b"two"])
    one, two = queue.lease(2)
    queue.ack(one)
    for settle in (queue.ack, queue.nack, queue.release, queue.extend):
        with pytest.raises(StaleLeaseError):
            settle(one)
    with pytest.raises(StaleLeaseError):
        queue.ack([two, two])
    assert queue.stats()["leased"] == 1
    queue.ack(two)


@pytest.mark.spec("C7")
@pytest.mark.promise("P4")
def test_ack_after_lease_expiry_is_refused(queue: EmbeddedQueue) -> None:
    queue.enqueue(b"x")
    (late,) = queue.lease(visibility_ms=1)
    (message,) = queue.lease(wait=LONG_S)
    assert message.id == late.id
    assert message.attempts == 1
    assert message.token != late.token
    for settle in (queue.ack, queue.nack, queue.release, queue.extend):
        with pytest.raises(StaleLeaseError):
            settle(late)
    assert not late.settled
    queue.ack(message)


@pytest.mark.spec("C7")
def test_settling_messages_of_several_leases_is_atomic(queue: EmbeddedQueue) -> None:
    queue.enqueue([b"one", b"two", b"three"])
    (one,), (two,), (three,) = queue.lease(), queue.lease(), queue.lease()
    queue.ack(two)
    with pytest.raises(StaleLeaseError):
        queue.ack([one, two, three])
    assert not one.settled
    assert queue.stats()["leased"] == 2
    assert queue.release([one, three]) == 2
    assert payloads(queue.lease(10)) == [b"one", b"three"]


def test_only_leased_messages_can_be_settled_in_their_queue(db: Basalt, queue: EmbeddedQueue) -> None:
    queue.enqueue(b"x")
    (message,) = queue.lease()
    wrong: list[Any] = [message.id, message.token, None, "x", [message, b"x"], {message: 1}]
    for each in wrong:
        with pytest.raises(InvalidArgumentError, match="pass what lease returned"):
            queue.ack(each)
    with pytest.raises(InvalidArgumentError, match="cannot be settled in queue 'other'"):
        db.queue("other").ack(message)
    assert queue.ack([]) == 0
    queue.ack(message)


@pytest.mark.spec("C8")
def test_nack_counts_an_attempt_and_release_does_not(queue: EmbeddedQueue) -> None:
    queue.enqueue(b"x")
    queue.release(queue.lease())
    (message,) = queue.lease()
    assert message.attempts == 0
    queue.nack(message, "it broke")
    (message,) = queue.lease()
    assert message.attempts == 1
    assert message.headers["x-last-error"] == "it broke"


@pytest.mark.spec("C8")
def test_delayed_nack_wakes_a_waiting_consumer(queue: EmbeddedQueue) -> None:
    queue.enqueue(b"x")
    queue.nack(queue.lease(), delay_ms=30)
    assert queue.lease() == []
    assert queue.stats()["delayed"] == 1
    assert payloads(queue.lease(wait=LONG_S)) == [b"x"]


def test_delayed_message_is_ready_on_time(queue: EmbeddedQueue) -> None:
    queue.enqueue(b"later", delay_ms=60)
    queue.enqueue(b"soon", delay_ms=20)
    assert payloads(queue.lease(wait=LONG_S) + queue.lease(wait=LONG_S)) == [b"soon", b"later"]


def test_message_expires_without_a_call(db: Basalt) -> None:
    queue = db.queue("q", dead_letter_queue="dead")
    queue.enqueue(b"x", ttl_ms=20)
    (message,) = db.queue("dead").lease(wait=LONG_S)
    assert message.payload == b"x"
    assert queue.stats()["expired"] == 1


@pytest.mark.spec("C7")
def test_extending_part_of_a_lease_lets_the_rest_expire(queue: EmbeddedQueue) -> None:
    queue.enqueue([b"one", b"two"])
    one, two = queue.lease(2, visibility_ms=1_000)
    queue.extend(one, 60_000)
    assert one.token != two.token
    assert payloads(queue.lease(2, wait=LONG_S)) == [b"two"]
    queue.ack(one)
    with pytest.raises(StaleLeaseError):
        queue.ack(two)


@pytest.mark.spec("C9")
def test_dead_letters_are_browsed_and_redriven(db: Basalt) -> None:
    queue = db.queue("q", attempts_max=1, dead_letter_queue="dead")
    queue.enqueue([b"one", b"two", b"three"])
    one, two, three = queue.lease(3)
    queue.nack([one, two], "no")
    queue.nack(three, reject=True)
    dead = db.queue("dead", create=False)
    assert [message.payload for message in dead.peek(2)] == [b"one", b"two"]
    assert dead.redrive(count=1) == 1
    assert dead.redrive(wanted=lambda message: message.payload == b"three") == 1
    assert dead.move("q") == 1
    assert payloads(queue.lease(10)) == [b"one", b"three", b"two"]


@pytest.mark.parametrize("settings", [{}, {"priorities_max": 3}])
def test_browse_yields_the_whole_queue_without_changes(db: Basalt, settings: dict[str, Any]) -> None:
    queue = db.queue("q", **settings)
    priorities = settings.get("priorities_max", 0) + 1
    queue.enqueue([Draft(payload=b"%d" % number, priority=number % priorities) for number in range(250)])
    held = queue.lease(10)
    before = queue.stats()
    seen = [message.payload for message in queue.browse()]
    assert sorted(seen + payloads(held)) == sorted(b"%d" % number for number in range(250))
    assert queue.stats() == before


def test_purge_deletes_only_ready_messages(queue: EmbeddedQueue) -> None:
    queue.enqueue([b"one", b"two", b"three"])
    held = queue.lease()
    assert queue.purge() == 2
    assert queue.purge() == 0
    queue.release(held)
    assert payloads(queue.lease(10)) == [b"one"]


def test_settings_must_match_an_existing_queue(db: Basalt) -> None:
    queue = db.queue("q", attempts_max=3, overflow="reject-publish", length_max=1)
    assert queue.config.overflow is Overflow.REJECT_PUBLISH
    assert db.queue("q", attempts_max=3, overflow=Overflow.REJECT_PUBLISH).name == "q"
    with pytest.raises(InvalidConfigError, match=r"exists with attempts_max=3, not 4; .* alter"):
        db.queue("q", attempts_max=4)
    with pytest.raises(InvalidConfigError, match="durability=synced, not written"):
        db.queue("q", durability="written")
    queue.enqueue(b"x")
    with pytest.raises(QueueFullError):
        queue.enqueue(b"y")
    assert queue.alter(length_max=2, durability="written").durability is Durability.WRITTEN
    queue.enqueue(b"y")
    assert db.queue("q", length_max=2).config.attempts_max == 3


@pytest.mark.parametrize(
    "settings",
    [{"attempts_max": -1}, {"attempts_max": "3"}, {"colour": "red"}, {"durability": "x"}, {"ttl_ms": object()}],
)
def test_invalid_settings_create_no_queue(db: Basalt, settings: dict[str, Any]) -> None:
    with pytest.raises(InvalidConfigError):
        db.queue("q", **settings)
    assert list(db.queues()) == []
    queue = db.queue("q")
    before = queue.config
    with pytest.raises(InvalidConfigError):
        queue.alter(**settings)
    with pytest.raises(InvalidConfigError, match="cannot be renamed"):
        queue.alter(name="other")
    assert queue.config == before


@pytest.mark.parametrize("name", ["", "x" * 256, 7, None, b"q"])
def test_invalid_queue_name_is_refused(db: Basalt, name: Any) -> None:
    with pytest.raises((InvalidConfigError, InvalidArgumentError)):
        db.queue(name)


def test_error_names_a_missing_queue(db: Basalt) -> None:
    with pytest.raises(QueueNotFoundError, match="'nowhere'"):
        db.queue("nowhere", create=False)
    with pytest.raises(QueueNotFoundError, match="'nowhere'"):
        db.delete_queue("nowhere")


@pytest.mark.spec("C13")
def test_queues_are_listed_by_name_and_a_recreated_one_is_empty(db: Basalt) -> None:
    for name in ("b", "a", "ä", "c"):
        db.queue(name).enqueue(b"x")
    assert [queue.name for queue in db.queues()] == ["a", "b", "c", "ä"]
    (held,) = db.queue("b").lease()
    db.delete_queue("b")
    with pytest.raises(QueueNotFoundError):
        db.queue("b", create=False)
    again = db.queue("b")
    with pytest.raises(StaleLeaseError):
        again.ack(held)
    assert again.stats()["messages"] == 0


def test_waiting_lease_is_woken_by_an_enqueue(db: Basalt, queue: EmbeddedQueue) -> None:
    thread, results = in_background(lambda: payloads(queue.lease(5, wait=None)))
    until(lambda: waiting(db, "q") == 1)
    queue.enqueue([b"one", b"two"])
    finish(thread)
    assert results == [[b"one", b"two"]]


def test_waiting_lease_ends_when_its_queue_is_deleted(db: Basalt, queue: EmbeddedQueue) -> None:
    thread, results = in_background(lambda: queue.lease(wait=LONG_S))
    until(lambda: waiting(db, "q") == 1)
    db.delete_queue("q")
    finish(thread)
    assert isinstance(results[0], QueueNotFoundError)


def test_waiting_lease_ends_when_the_store_is_closed(db: Basalt, queue: EmbeddedQueue) -> None:
    thread, results = in_background(lambda: queue.lease(wait=None))
    until(lambda: waiting(db, "q") == 1)
    db.close()
    finish(thread)
    assert isinstance(results[0], StoreClosedError)


def test_queue_calls_after_close_are_refused(db: Basalt, queue: EmbeddedQueue) -> None:
    queue.enqueue(b"x")
    (message,) = queue.lease()
    db.close()
    db.close()
    calls: list[Callable[[], Any]] = [
        lambda: queue.enqueue(b"x"),
        lambda: queue.lease(),
        lambda: queue.ack(message),
        lambda: queue.peek(),
        lambda: queue.stats(),
        lambda: db.queue("q"),
        lambda: db.queues(),
        lambda: db.delete_queue("q"),
    ]
    for call in calls:
        with pytest.raises(StoreClosedError):
            call()


def test_queue_plane_is_opened_on_first_use(tmp_path: Path) -> None:
    with basaltmq.open(tmp_path / "data") as db:
        db.topic("t")
        assert db._queues is None
        assert "basalt-queues" not in [thread.name for thread in threading.enumerate()]
        db.queue("q")
        assert "basalt-queues" in [thread.name for thread in threading.enumerate()]
    assert "basalt-queues" not in [thread.name for thread in threading.enumerate()]


def test_threads_that_create_one_queue_share_it(db: Basalt) -> None:
    begin = threading.Barrier(8)

    def make() -> bytes:
        begin.wait(LONG_S)
        return db.queue("same", attempts_max=2).enqueue(b"x")

    made = [in_background(make) for _ in range(8)]
    for thread, _ in made:
        finish(thread)
    assert len({results[0] for _, results in made}) == 8
    assert db.queue("same").stats()["messages"] == 8


def test_due_work_is_retried_after_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("basaltmq.embedded.queue_service.RETRY_S", 0.01)
    with basaltmq.open(tmp_path / "data") as db:
        queue = db.queue("q")
        plane = db.queue_plane
        run_due, failures = plane.run_due, 3

        def failing() -> int | None:
            nonlocal failures
            if failures:
                failures -= 1
                raise InvalidArgumentError("the test refuses")
            return run_due()

        monkeypatch.setattr(plane, "run_due", failing)
        queue.enqueue(b"x", delay_ms=10)
        assert payloads(queue.lease(wait=LONG_S)) == [b"x"]
    assert [record.exc_text is not None for record in caplog.records] == [True]


def test_clock_set_forward_is_detected(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("basaltmq.embedded.queue_service.CLOCK_LOOK_S", 0.01)
    now_ns = 1_700_000_000_000_000_000
    with basaltmq.open(tmp_path / "data", settings=Settings(clock_ns=lambda: now_ns)) as db:
        queue = db.queue("q")
        queue.enqueue(b"x", delay_ms=3_600_000)
        assert queue.lease() == []
        now_ns += 3_600_000_000_000
        assert payloads(queue.lease(wait=LONG_S)) == [b"x"]


def test_plane_change_spans_several_queues(db: Basalt, queue: EmbeddedQueue) -> None:
    queue.enqueue(b"in")
    (message,) = queue.lease()
    out = db.queue("out")
    with db.queue_plane.change():
        queue.ack(message)
        out.enqueue(b"out")
    assert queue.stats()["messages"] == 0
    assert payloads(out.lease()) == [b"out"]
    with pytest.raises(TransactionError), db.queue_plane.change():
        out.purge()


def test_repr_of_a_message(queue: EmbeddedQueue) -> None:
    queue.enqueue(b"\xff")
    (message,) = queue.lease()
    assert "leased by" in repr(message)
    queue.ack(message)
    assert repr(message).endswith("settled>")
    assert repr(queue) == "<queue 'q'>"
    with pytest.raises(UnicodeDecodeError):
        message.text()
