"""Listeners are called for every queue with new ready messages, after the write, once per change and queue."""

from __future__ import annotations

import threading
from collections.abc import Callable

import pytest
from tests.unit.queues.conftest import Clock, TestStore, payloads, settle

from basaltmq.errors import StoreStalledError
from basaltmq.queues.draft import Draft
from basaltmq.queues.plane import QueuePlane


def test_listener_is_called_once_per_change_and_queue(plane: QueuePlane, make: Callable[..., str]) -> None:
    a, b = make("a"), make("b")
    heard: list[str] = []
    stop = plane.listen(heard.append)
    plane.enqueue(a, [b"1", b"2"])
    assert heard == ["a"]
    with plane.change():
        plane.enqueue(b, [b"3"])
        plane.enqueue(a, [b"4"])
        plane.enqueue(b, [b"5"])
        assert heard == ["a"]
    assert heard == ["a", "b", "a"]
    plane.enqueue(a, [])
    payloads(plane, a)
    assert heard == ["a", "b", "a"]
    stop()
    plane.enqueue(a, [b"6"])
    assert heard == ["a", "b", "a"]


@pytest.mark.promise("P2")
def test_listener_is_not_called_for_a_failed_change(
    plane: QueuePlane, store: TestStore, make: Callable[..., str]
) -> None:
    queue = make()
    heard: list[str] = []
    plane.listen(heard.append)
    store.refuse = 1
    with pytest.raises(StoreStalledError):
        plane.enqueue(queue, [b"x"])
    assert heard == []


@pytest.mark.parametrize("how", ["release", "nack", "delay", "expiry", "dead letter", "move"])
def test_every_operation_that_makes_messages_ready_calls_the_listener(
    plane: QueuePlane, make: Callable[..., str], clock: Clock, how: str
) -> None:
    other = make("other")
    queue = make(dead_letter_queue="other")
    plane.enqueue(queue, [Draft(payload=b"x", delay_ms=10 if how == "delay" else 0)])
    held = plane.lease(queue)
    heard: list[str] = []
    plane.listen(heard.append)
    if how == "release":
        plane.release(queue, held[0].token)
    elif how == "nack":
        plane.nack(queue, held[0].token)
    elif how == "dead letter":
        plane.nack(queue, held[0].token, reject=True)
    elif how == "move":
        plane.release(queue, held[0].token)
        heard.clear()
        plane.move(queue, other)
    else:
        clock.pass_ms(60_000)
        settle(plane, clock)
    assert heard == [other if how in ("dead letter", "move") else queue]


@pytest.mark.spec("C11")
def test_listener_is_called_when_a_token_arrives(plane: QueuePlane, make: Callable[..., str], clock: Clock) -> None:
    queue = make()
    plane.set_setting("throttle.slow", "1,1")
    heard: list[str] = []
    plane.listen(heard.append)
    plane.enqueue(queue, [Draft(payload=b"%d" % n, throttle_keys=("slow",)) for n in range(3)])
    for number in range(3):
        heard.clear()
        assert [d.payload for d in plane.lease(queue, 10)] == [b"%d" % number]
        settle(plane, clock)
        assert heard == []
        clock.pass_ms(1000)
        settle(plane, clock)
        assert heard == ([queue] if number < 2 else [])
        assert plane.run_due(clock()) != 0


def test_interrupted_wait_removes_the_waiter(
    plane: QueuePlane, make: Callable[..., str], monkeypatch: pytest.MonkeyPatch
) -> None:
    queue = make()

    def interrupted(self: threading.Event, timeout: float | None = None) -> bool:
        raise KeyboardInterrupt

    monkeypatch.setattr(threading.Event, "wait", interrupted)
    with pytest.raises(KeyboardInterrupt):
        plane.lease(queue, wait_ms=60_000)
    assert queue not in plane._waiters
