"""Failure isolation of queues (P11): an unexpected error takes down one queue, and the others are served.

    loaded ─> (an unexpected error) ─> not in memory ─> (used again) ─> loaded from disk, as after a crash
                                            └─ `FAILURES_MAX` times within `WINDOW_NS` ─> failed ─> (restart) ─> loaded

A failure loses state in memory only: transient messages, and leases that last as long as their consumer. A failed queue
raises QueueFailedError for every operation until it is restarted or the plane is reopened.
"""

from __future__ import annotations

import logging
from typing import Final, NamedTuple

from basaltmq.errors import QueueFailedError

FAILURES_MAX: Final = 3
"""Failures within the window after which a queue stays down, because reloading it does not help."""

WINDOW_NS: Final = 60_000_000_000

_log: Final = logging.getLogger("basaltmq")


class Failure(NamedTuple):
    """The failures of a queue."""

    times_ns: tuple[int, ...]
    """Times of its failures within the window."""
    error: str
    is_down: bool


class FailedQueues:
    """Failures by queue. Not thread-safe: callers hold the plane's lock."""

    def __init__(self) -> None:
        self._by_name: dict[str, Failure] = {}

    def add(self, name: str, error: BaseException, now_ns: int) -> QueueFailedError:
        """Record an unexpected error of a queue. Return the error for callers."""
        before = self._by_name.get(name)
        recent = () if before is None else tuple(at_ns for at_ns in before.times_ns if at_ns > now_ns - WINDOW_NS)
        text = f"{type(error).__name__}: {error}"[:500]
        failure = self._by_name[name] = Failure((*recent, now_ns), text, len(recent) + 1 >= FAILURES_MAX)
        _log.error("queue %r failed and is %s", name, "down" if failure.is_down else "read again", exc_info=error)
        if failure.is_down:
            return self._refusal(name, failure)
        return QueueFailedError(f"queue {name!r} failed: {text}; it is reloaded from disk, retry the operation")

    def take_down(self, name: str, reason: str) -> None:
        """Refuse operations on a queue until `forget`."""
        self._by_name[name] = Failure((), reason, is_down=True)

    def require_up(self, name: str) -> None:
        failure = self._by_name.get(name)
        if failure is not None and failure.is_down:
            raise self._refusal(name, failure)

    def error_of(self, name: str) -> str | None:
        """Return why a queue is down; None if it is not."""
        failure = self._by_name.get(name)
        return failure.error if failure is not None and failure.is_down else None

    def down(self) -> list[str]:
        return sorted(name for name, failure in self._by_name.items() if failure.is_down)

    def forget(self, name: str) -> None:
        self._by_name.pop(name, None)

    def _refusal(self, name: str, failure: Failure) -> QueueFailedError:
        return QueueFailedError(
            f"queue {name!r} is down: {failure.error}; restart it with: basalt queue restart {name}"
        )
