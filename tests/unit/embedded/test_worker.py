"""Workers: outcome of messages, and shutdown."""

from __future__ import annotations

import logging
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.unit.embedded.queue_rig import LONG_S, until, waiting

import basaltmq
import basaltmq.client
from basaltmq.embedded.database import Basalt
from basaltmq.embedded.leased import Leased
from basaltmq.embedded.queue import EmbeddedQueue
from basaltmq.embedded.worker import Reject
from basaltmq.errors import (
    InvalidArgumentError,
    QueueNotFoundError,
    StoreClosedError,
    StoreStalledError,
)
from basaltmq.queues.lifecycle.handler_failure import Backoff

pytestmark = pytest.mark.spec("C8")


@pytest.fixture
def db(tmp_path: Path) -> Iterator[Basalt]:
    with basaltmq.open(tmp_path / "data") as opened:
        yield opened


@pytest.fixture
def queue(db: Basalt) -> EmbeddedQueue:
    return db.queue("q", attempts_max=2, dead_letter_queue="dead", durability="written")


class Seen:
    """A handler that records its messages and returns on request."""

    def __init__(self, count: int = 1, *, hold: bool = False) -> None:
        self.payloads: list[bytes] = []
        self.begun = threading.Semaphore(0)
        self.may_end = threading.Event()
        self.enough = threading.Event()
        self._count = count
        if not hold:
            self.may_end.set()

    def __call__(self, message: Leased) -> None:
        self.payloads.append(message.payload)
        self.begun.release()
        assert self.may_end.wait(LONG_S)
        if len(self.payloads) >= self._count:
            self.enough.set()


def test_every_message_is_handled_once_and_acked(queue: EmbeddedQueue) -> None:
    seen = Seen(300)
    queue.enqueue([b"%d" % number for number in range(200)])
    with queue.worker(seen, concurrency=4, batch=7) as worker:
        queue.enqueue([b"%d" % number for number in range(200, 300)])
        assert seen.enough.wait(LONG_S)
    assert sorted(seen.payloads) == sorted(b"%d" % number for number in range(300))
    assert (worker.handled, worker.failed, worker.late) == (300, 0, 0)
    counts = queue.stats()
    assert (counts["messages"], counts["leased"], counts["acked"]) == (0, 0, 300)


def test_one_thread_handles_messages_in_order(queue: EmbeddedQueue) -> None:
    seen = Seen(50)
    queue.enqueue([b"%d" % number for number in range(50)])
    with queue.worker(seen, batch=8):
        assert seen.enough.wait(LONG_S)
    assert seen.payloads == [b"%d" % number for number in range(50)]


def test_waiting_worker_is_woken_by_a_message(db: Basalt, queue: EmbeddedQueue) -> None:
    seen = Seen()
    with queue.worker(seen):
        until(lambda: waiting(db, "q") == 1)
        queue.enqueue(b"x")
        assert seen.enough.wait(LONG_S)


@pytest.mark.spec("C9")
def test_exception_nacks_the_message_with_its_text(db: Basalt, queue: EmbeddedQueue) -> None:
    attempts: list[int] = []

    def fail(message: Leased) -> None:
        attempts.append(message.attempts)
        raise ValueError("no such customer" + "!" * 5_000)

    queue.enqueue(b"x")
    with queue.worker(fail) as worker:
        (dead,) = db.queue("dead").lease(wait=LONG_S)
    assert attempts == [0, 1]
    assert worker.failed == 2
    assert dead.headers["x-last-error"].startswith("ValueError: no such customer!")
    # A long text is cut to leave room for the location.
    assert dead.headers["x-last-error"].split("\n")[1].startswith(f"  {__file__}:")


class Unreadable(Exception):
    def __str__(self) -> str:
        raise RuntimeError("no text")


@pytest.mark.parametrize(
    ("error", "text"),
    [
        (FileNotFoundError("caf\udce9.csv"), "FileNotFoundError: caf\\udce9.csv"),
        (Unreadable(), "Unreadable: its text cannot be read"),
    ],
    ids=["surrogate", "unreadable"],
)
def test_exception_text_that_is_not_utf8_does_not_end_the_worker(
    db: Basalt, queue: EmbeddedQueue, error: Exception, text: str, caplog: pytest.LogCaptureFixture
) -> None:
    # xdist cannot send a captured log with surrogates.
    caplog.set_level(logging.CRITICAL, logger="basaltmq")

    def fail(_message: Leased) -> None:
        raise error

    queue.enqueue(b"x")
    with queue.worker(fail, retry_delay_ms=0) as worker:
        (dead,) = db.queue("dead").lease(wait=LONG_S)
    first, frame = dead.headers["x-last-error"].split("\n")[:2]
    assert (first, worker.failed) == (text, 2)
    assert frame.endswith(" in fail")


def test_failed_message_is_retried_after_the_delay(queue: EmbeddedQueue) -> None:
    again = threading.Event()

    def fail_once(message: Leased) -> None:
        if message.attempts:
            again.set()
        else:
            raise RuntimeError

    queue.enqueue(b"x")
    with queue.worker(fail_once, retry_delay_ms=20):
        assert again.wait(LONG_S)
    assert queue.stats()["messages"] == 0


@pytest.mark.spec("C9")
def test_rejected_message_is_dead_lettered_at_once(db: Basalt, queue: EmbeddedQueue) -> None:
    def reject(message: Leased) -> None:
        raise Reject("malformed")

    queue.enqueue(b"x")
    with queue.worker(reject, retry_delay_ms=60_000) as worker:
        (dead,) = db.queue("dead").lease(wait=LONG_S)
    assert worker.handled == 1
    assert "malformed" in dead.headers["x-last-error"]


def test_handler_may_settle_its_message(queue: EmbeddedQueue) -> None:
    done = threading.Event()

    def put_off(message: Leased) -> None:
        queue.nack(message, delay_ms=3_600_000)
        done.set()

    queue.enqueue(b"x")
    with queue.worker(put_off) as worker:
        assert done.wait(LONG_S)
    assert queue.stats()["delayed"] == 1
    assert (worker.handled, worker.failed, worker.late) == (1, 0, 0)


def test_stop_finishes_running_handlers_and_releases_unstarted_messages(queue: EmbeddedQueue) -> None:
    seen = Seen(hold=True)
    queue.enqueue([b"%d" % number for number in range(10)])
    worker = queue.worker(seen, concurrency=2, batch=4)
    worker.start()
    for _ in range(2):
        assert seen.begun.acquire(timeout=LONG_S)
    worker.stop()
    seen.may_end.set()
    worker.join()
    assert len(seen.payloads) == 2
    counts = queue.stats()
    assert (counts["acked"], counts["ready"], counts["leased"], counts["failed"]) == (2, 8, 0, 0)
    left = queue.lease(10)
    assert sorted([message.payload for message in left] + seen.payloads) == [b"%d" % number for number in range(10)]
    assert {message.attempts for message in left} == {0}


def test_waiting_worker_stops_at_once(db: Basalt, queue: EmbeddedQueue) -> None:
    worker = queue.worker(Seen(), concurrency=3)
    worker.start()
    until(lambda: waiting(db, "q") == 3)
    worker.stop()
    worker.join()
    assert waiting(db, "q") == 0


def test_handler_may_stop_its_worker(queue: EmbeddedQueue) -> None:
    queue.enqueue([b"one", b"two"])
    worker = queue.worker(lambda message: worker.stop(), batch=2)
    worker.run()
    counts = queue.stats()
    assert (counts["acked"], counts["ready"]) == (1, 1)


def test_wake_up_of_a_stopping_worker_is_passed_on(db: Basalt, queue: EmbeddedQueue) -> None:
    worker = queue.worker(Seen())
    worker.start()
    until(lambda: waiting(db, "q") == 1)
    results: list[list[Leased]] = []
    other = threading.Thread(target=lambda: results.append(queue.lease(wait=LONG_S)))
    other.start()
    until(lambda: waiting(db, "q") == 2)
    worker._stopping = True  # stop was requested before the worker handled its wake-up
    queue.enqueue(b"x")
    other.join(LONG_S)
    worker.stop()
    worker.join()
    assert [message.payload for message in results[0]] == [b"x"]


@pytest.mark.spec("C7")
def test_leases_are_extended_during_a_long_handler(queue: EmbeddedQueue) -> None:
    seen = Seen(2, hold=True)
    queue.enqueue([b"one", b"two"])
    with queue.worker(seen, batch=2, visibility_ms=1_000) as worker:
        assert seen.begun.acquire(timeout=LONG_S)
        assert queue.lease(wait=1.5) == []
        seen.may_end.set()
        assert seen.enough.wait(LONG_S)
    assert worker.late == 0
    assert queue.stats()["acked"] == 2


@pytest.mark.spec("C7")
def test_without_keep_alive_a_hanging_handler_loses_its_message(
    queue: EmbeddedQueue, caplog: pytest.LogCaptureFixture
) -> None:
    seen = Seen(hold=True)
    queue.enqueue(b"x")
    with queue.worker(seen, visibility_ms=20, keep_alive=False) as worker:
        assert seen.begun.acquire(timeout=LONG_S)
        (message,) = queue.lease(wait=LONG_S)
        seen.may_end.set()
        until(lambda: worker.late == 1)
    assert message.attempts == 1
    assert "after its lease expired" in caplog.text
    queue.ack(message)


def test_deleting_the_queue_ends_its_worker(db: Basalt, queue: EmbeddedQueue) -> None:
    worker = queue.worker(Seen(), concurrency=2)
    worker.start()
    until(lambda: waiting(db, "q") == 2)
    db.delete_queue("q")
    with pytest.raises(QueueNotFoundError):
        worker.join()


def test_closing_the_store_ends_a_worker_and_its_message_is_redelivered(tmp_path: Path) -> None:
    seen = Seen(hold=True)
    db = basaltmq.open(tmp_path / "data")
    queue = db.queue("q")
    queue.enqueue(b"x")
    worker = queue.worker(seen, visibility_ms=1_000)
    worker.start()
    assert seen.begun.acquire(timeout=LONG_S)
    db.close()
    seen.may_end.set()
    with pytest.raises(StoreClosedError):
        worker.join()
    with basaltmq.open(tmp_path / "data") as db:
        (message,) = db.queue("q").lease(wait=LONG_S)
        assert message.payload == b"x"


def test_handler_that_raises_system_exit_ends_the_worker_and_releases_its_message(queue: EmbeddedQueue) -> None:
    def leave(message: Leased) -> None:
        raise SystemExit(3)

    queue.enqueue([b"one", b"two"])
    with pytest.raises(SystemExit):
        queue.worker(leave, batch=2).run()
    counts = queue.stats()
    assert (counts["ready"], counts["failed"]) == (2, 0)


def test_retriable_error_is_retried(db: Basalt, queue: EmbeddedQueue, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("basaltmq.embedded.worker.RETRY_S", 0.01)
    plane, failures = db.queue_plane, 2
    lease = plane.lease

    def stalled(*args: Any, **options: Any) -> Any:
        nonlocal failures
        if failures:
            failures -= 1
            raise StoreStalledError("the test stalls")
        return lease(*args, **options)

    monkeypatch.setattr(plane, "lease", stalled)
    seen = Seen()
    queue.enqueue(b"x")
    with queue.worker(seen):
        assert seen.enough.wait(LONG_S)
    assert failures == 0


def test_worker_can_be_started_once(queue: EmbeddedQueue) -> None:
    worker = queue.worker(Seen())
    with worker:
        pass
    with pytest.raises(InvalidArgumentError, match="started before"):
        worker.start()


async def coroutine(message: Leased) -> None:
    """A coroutine function, which a worker refuses."""


@pytest.mark.parametrize(
    ("handler", "options"),
    [
        (None, {}),
        (coroutine, {}),
        (print, {"concurrency": 0}),
        (print, {"concurrency": 5_000}),
        (print, {"concurrency": 1.5}),
        (print, {"batch": 0}),
        (print, {"retry_delay_ms": -1}),
        (print, {"visibility_ms": 0}),
    ],
)
def test_invalid_worker_arguments_are_refused(queue: EmbeddedQueue, handler: Any, options: dict[str, Any]) -> None:
    with pytest.raises(InvalidArgumentError):
        queue.worker(handler, **options)


PROGRAM = """
import sys, time
import basaltmq

def handle(message):
    print("begun", message.text(), flush=True)
    sys.stdin.readline()

with basaltmq.open(sys.argv[1]) as db:
    queue = db.queue("q")
    queue.enqueue(["one", "two", "three"])
    queue.worker(handle, batch=3).run()
    print("stopped", flush=True)
"""


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_signal_stops_a_worker_gracefully(tmp_path: Path, number: signal.Signals) -> None:
    source = str(Path(basaltmq.__file__).parents[1])
    with subprocess.Popen(
        [sys.executable, "-c", PROGRAM, str(tmp_path / "data")],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env=os.environ | {"PYTHONPATH": source},
    ) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        assert process.stdout.readline() == "begun one\n"
        process.send_signal(number)
        # The worker waits for the running handler, which ends when it gets a line.
        with pytest.raises(subprocess.TimeoutExpired):
            process.wait(0.3)
        out, _ = process.communicate("\n", timeout=LONG_S)
    assert out == "stopped\n"
    assert process.returncode == 0
    with basaltmq.open(tmp_path / "data") as db:
        messages = db.queue("q").lease(10)
        assert [message.text() for message in messages] == ["two", "three"]
        assert {message.attempts for message in messages} == {0}


def test_retry_delay_grows_and_errors_are_logged(db: Basalt, caplog: pytest.LogCaptureFixture) -> None:
    queue = db.queue("poison", durability="written")
    failed = threading.Semaphore(0)

    def fail(message: Leased) -> None:
        failed.release()
        raise ValueError("no such customer")

    message_id = queue.enqueue(b"x")
    with queue.worker(fail, retry_delay_ms=200) as worker:
        assert failed.acquire(timeout=LONG_S)
        assert failed.acquire(timeout=LONG_S)
        until(lambda: queue.stats()["delayed"] == 1)
    assert worker.failed < 10, "a failure is not retried at once"
    (record, *_) = [each for each in caplog.records if "handler failed on message" in each.message]
    assert message_id.hex() in record.message
    assert "Traceback" in caplog.text
    assert "raise ValueError" in caplog.text


def test_attempts_are_limited_by_default(db: Basalt) -> None:
    limited = db.queue("limited", durability="written")
    assert limited.config.attempts_max == 20
    assert db.queue("for ever", attempts_max=None).config.attempts_max is None
    assert db.queue("zero", attempts_max=0).config.attempts_max is None

    def fail(message: Leased) -> None:
        raise ValueError("no such customer")

    limited.enqueue(b"x")
    with limited.worker(fail, retry_delay_ms=0):
        until(lambda: "limited.dlq" in [queue.name for queue in db.queues()])
    (parked,) = db.queue("limited.dlq").peek()
    assert (parked.payload, parked.headers["x-last-error"].split("\n")[0]) == (b"x", "ValueError: no such customer")
    assert limited.stats()["messages"] == 0
    assert db.queue("limited.dlq").redrive() == 1
    assert [message.payload for message in limited.peek()] == [b"x"]


def test_retry_delays_grow_to_a_maximum_with_jitter() -> None:
    backoff = Backoff(100, 5_000)
    for attempts, full_ms in ((0, 100), (1, 200), (5, 3_200), (6, 5_000), (1_000_000, 5_000)):
        waits = {backoff.delay_ms(attempts) for _ in range(200)}
        assert len(waits) > 5
        assert full_ms / 2 <= min(waits) <= max(waits) <= full_ms
    assert Backoff(0).delay_ms(7) == 0


def test_reject_is_one_class_everywhere() -> None:
    assert basaltmq.client.Reject is Reject is basaltmq.Reject


def test_settings_that_a_queue_would_ignore_are_refused(db: Basalt) -> None:
    queue = db.queue("q2")
    for fields, option in (({"dedup_id": "a"}, "dedup_window_ms"), ({"priority": 3}, "priorities_max")):
        with pytest.raises(InvalidArgumentError, match=f"'q2'.*{option}"):
            queue.enqueue(b"x", **fields)
        with pytest.raises(InvalidArgumentError, match=f"'q2'.*{option}"), db.transaction() as tx:
            tx.enqueue("q2", b"x", **fields)
    assert queue.stats()["messages"] == 0
    able = db.queue("able", dedup_window_ms=1000, priorities_max=9)
    able.enqueue(b"x", priority=3, dedup_id="a")
