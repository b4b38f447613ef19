"""Helpers for tests of embedded queues: bounded waits for other threads."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

from basaltmq.embedded.database import Basalt
from basaltmq.embedded.leased import Leased
from basaltmq.errors import BasaltError

LONG_S = 30.0
"""Timeout of waits that an event ends. Reaching it fails the test."""


def payloads(messages: list[Leased]) -> list[bytes]:
    return [message.payload for message in messages]


def waiting(db: Basalt, name: str) -> int:
    """Return the number of waiters of a queue."""
    return len(db.queue_plane._waiters._by_queue.get(name, ()))


def in_background(work: Callable[[], Any]) -> tuple[threading.Thread, list[Any]]:
    """Run a blocking call in a thread. Its result or error is added to the list."""
    results: list[Any] = []

    def run() -> None:
        try:
            results.append(work())
        except BasaltError as error:
            results.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    return thread, results


def until(condition: Callable[[], bool]) -> None:
    """Poll until another thread has done something."""
    pause = threading.Event()
    for _ in range(int(LONG_S / 0.005)):
        if condition():
            return
        pause.wait(0.005)
    raise AssertionError("it never happened")


def finish(thread: threading.Thread) -> None:
    thread.join(LONG_S)
    assert not thread.is_alive()
