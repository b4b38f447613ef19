"""An unexpected error fails one queue. It is reloaded from disk; other queues continue."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from tests.unit.queues.conftest import Clock, TestStore, payloads, settle

from basaltmq.errors import QueueFailedError, QueueNotFoundError, StaleLeaseError
from basaltmq.queues.draft import Draft
from basaltmq.queues.plane import QueuePlane
from basaltmq.queues.recovery.failed import FAILURES_MAX, WINDOW_NS
from basaltmq.store.batch import Batch
from basaltmq.store.families import Family

Make = Callable[..., str]

pytestmark = pytest.mark.promise("P11")


def broken(*args: Any, **options: Any) -> Any:
    raise RuntimeError("a bug")


def break_queue(plane: QueuePlane, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Raise an unexpected error in a queue once."""
    queue = plane._loaded.require(name)
    with monkeypatch.context() as patched:
        patched.setattr(type(queue), "take_ready", broken)
        patched.setattr("basaltmq.queues.leases.granting.take_plain", lambda *args: None)
        with pytest.raises(QueueFailedError, match="a bug"):
            plane.lease(name)


def test_failed_queue_is_reloaded_from_disk_completely(
    plane: QueuePlane, make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    make("bad")
    make("good")
    plane.enqueue("bad", [b"1", b"2", b"3"])
    plane.enqueue("good", [b"x"])
    held = plane.lease("bad", visibility_ms=10_000)
    forever = plane.lease("bad", visibility_ms=0)
    break_queue(plane, "bad", monkeypatch)
    assert plane.damage.down() == []
    assert payloads(plane, "good") == [b"x"]
    again = plane.lease("bad", 9)
    assert [(d.payload, d.redelivered) for d in again] == [(b"2", True), (b"3", True)], "held messages are ready again"
    assert plane.ack("bad", held[0].token) == 1, "a lease with a row outlives the failure"
    with pytest.raises(StaleLeaseError):
        plane.ack("bad", forever[0].token)


def test_queue_that_fails_too_often_stays_down_until_restart(
    plane: QueuePlane, make: Make, monkeypatch: pytest.MonkeyPatch, clock: Clock
) -> None:
    make("bad")
    make("good")
    plane.enqueue("bad", [b"1", Draft(payload=b"later", delay_ms=1000)])
    for _ in range(FAILURES_MAX):
        break_queue(plane, "bad", monkeypatch)
    assert plane.damage.down() == ["bad"]
    assert plane.damage.error_of("bad") == "RuntimeError: a bug"
    assert plane.stats("bad")["ready"] == 1, "its counts are still available"
    for refused in (lambda: plane.lease("bad"), lambda: plane.enqueue("bad", [b"2"]), lambda: plane.browse("bad")):
        with pytest.raises(QueueFailedError, match="basalt queue restart bad"):
            refused()
    assert plane.enqueue("good", [b"y"]) != []
    clock.pass_ms(2000)
    deadline_ns = plane.run_due()
    assert (deadline_ns or 0) > clock(), "its due work is postponed"
    plane.damage.restart("bad")
    assert plane.damage.down() == []
    clock.pass_ms(2000)
    settle(plane, clock)
    assert payloads(plane, "bad") == [b"1", b"later"]
    assert payloads(plane, "good") == [b"y"]


def test_rare_failures_do_not_take_a_queue_down(
    plane: QueuePlane, make: Make, monkeypatch: pytest.MonkeyPatch, clock: Clock
) -> None:
    make("bad")
    for _ in range(2 * FAILURES_MAX):
        break_queue(plane, "bad", monkeypatch)
        clock.pass_ms(WINDOW_NS / 1e6)
    assert plane.damage.down() == []


def test_change_over_several_queues_fails_only_the_faulty_queue(
    plane: QueuePlane, make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    make("bad")
    make("good")
    with monkeypatch.context() as patched:
        patched.setattr("basaltmq.queues.lifecycle.entry_builder.build", broken)
        with pytest.raises(QueueFailedError, match="'bad' failed"), plane.change():
            plane.enqueue("bad", [b"1"])
    assert plane._loaded.peek("bad") is None
    assert plane._loaded.peek("good") is not None


def test_failure_after_the_write_keeps_the_message(
    plane: QueuePlane, make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    make("q")
    with monkeypatch.context() as patched:
        patched.setattr("basaltmq.queues.ready.fair_queue.FairQueue.append", broken)
        assert len(plane.enqueue("q", [b"1"])) == 1
    assert payloads(plane, "q") == [b"1"]


def test_error_of_a_caller_function_does_not_fail_the_queue(plane: QueuePlane, make: Make) -> None:
    make("q")
    make("other")
    plane.enqueue("q", [b"1"])
    with pytest.raises(RuntimeError, match="a bug"):
        plane.move("q", "other", wanted=broken)
    assert plane._loaded.peek("q") is not None
    assert payloads(plane, "q") == [b"1"]


def test_restart_recounts_from_disk(plane: QueuePlane, make: Make, store: TestStore) -> None:
    make("q")
    plane.enqueue("q", [b"12", b"345", b"6"])
    first = store.rows(Family.MESSAGES)[0]
    batch = Batch()
    batch.delete(Family.MESSAGES, first)
    store.write(batch)
    plane.damage.restart("q")
    counts = plane.stats("q")
    assert (counts["messages"], counts["size_bytes"], counts["enqueued"]) == (2, 4, 3)
    with pytest.raises(QueueNotFoundError):
        plane.damage.restart("nobody")


def test_quarantine_record_is_shown_and_deleted_with_its_body(plane: QueuePlane, make: Make, store: TestStore) -> None:
    make("q")
    plane.enqueue("q", [b"x" * 6000])
    (key,) = store.rows(Family.MESSAGE_CONTENT)
    batch = Batch()
    batch.put(Family.MESSAGE_CONTENT, key, b"x" * 5000)
    store.write(batch)
    assert plane.lease("q") == []
    (record,) = plane.damage.records("q")
    assert plane.damage.records("other") == []
    assert plane.damage.record(record.id) == record
    assert plane.stats("q")["quarantined"] == plane.damage.total() == 1
    assert store.rows(Family.MESSAGE_CONTENT) == [key], "the body is kept with its message"
    plane.damage.delete(record.id)
    assert plane.damage.records() == []
    assert store.rows(Family.MESSAGE_CONTENT) == []
    assert plane.stats("q")["quarantined"] == 0
