"""Limits how long scripts may block the event loop, per call and over time.

One message may cost a script 100,000 instructions, and one call may carry 10,000 messages. Without a common limit one
call would block the event loop for seconds (P13). So scripts spend from an account that holds at most the time of one
call and refills with a share of the elapsed time. When it is empty, messages get the defaults and count as skipped, as
with an open breaker.

    account   |#####--------------|   40 ms at most; + half of the elapsed time, - CPU time of scripts

All queues of one event loop share one account. Script time is CPU time of the thread, so a busy machine does not use it
up.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Final

from basaltmq.clock import NS_PER_MS

CALL_MS: Final = 40
"""Time limit of one call. P13 allows a client 100 ms, which includes the work of the queue itself. The last message may
exceed it by its own limits."""

SHARE: Final = 0.5
"""Share of the elapsed time that scripts may use. The other half is for other work."""

EMBEDDED_CALL_MS: Final = 1_000
"""The limit in embedded mode, where only the calling program waits."""


class ScriptBudget:
    """An account of script time."""

    __slots__ = ("_clock_ns", "_cpu_ns", "_full_ns", "_left_ns", "_refilled_ns", "_share", "_started_ns")

    def __init__(
        self,
        call_ms: int = CALL_MS,
        share: float = SHARE,
        *,
        clock_ns: Callable[[], int] = time.monotonic_ns,
        cpu_ns: Callable[[], int] = time.thread_time_ns,
    ) -> None:
        """With a `share` of 1 or more, every call starts with a full account."""
        self._full_ns = call_ms * NS_PER_MS
        self._share = share
        self._clock_ns = clock_ns
        self._cpu_ns = cpu_ns
        self._left_ns = self._full_ns
        self._refilled_ns = clock_ns()
        self._started_ns = 0

    def begin(self) -> None:
        """Start a call."""
        now_ns = self._clock_ns()
        passed_ns = max(0, now_ns - self._refilled_ns)
        self._refilled_ns = now_ns
        if self._share >= 1:
            self._left_ns = self._full_ns
        else:
            # Cap the debt, so that it is repaid within the time of two calls.
            owed_ns = max(self._left_ns, -self._full_ns)
            self._left_ns = min(self._full_ns, owed_ns + int(passed_ns * self._share))
        self._started_ns = self._cpu_ns()

    def left_us(self) -> int:
        """Microseconds left for the current call."""
        return (self._left_ns - (self._cpu_ns() - self._started_ns)) // 1000

    def end(self) -> None:
        """End the call. Time beyond the account is deducted from the next calls."""
        self._left_ns -= self._cpu_ns() - self._started_ns
