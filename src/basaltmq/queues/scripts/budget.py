"""How long scripts may hold the plane: in one call, and over time.

A message may cost a script 100,000 instructions, and a call may bring 10,000 messages. Without a limit for all of them
together one call would hold the event loop for seconds, and everybody else with it (P13). So scripts spend from an
account that holds at most the time of one call and refills with a share of the time that passes. When it is empty,
messages get the defaults and are counted as skipped, as behind an open breaker.

    account   |#####--------------|   40 ms at most; + half of the time that passes, - CPU time of scripts

One account serves all queues that share an event loop. Time of scripts is CPU time of the thread, so a machine that is
busy with other things does not take from it.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Final

CALL_MS: Final = 40
"""What one call may take: P13 allows a client 100 ms, of which a batch of messages needs its part. The last message may
go beyond it by its own limits."""

SHARE: Final = 0.5
"""Of the time that passes, for scripts. The other half is for everybody else."""

EMBEDDED_CALL_MS: Final = 1_000
"""The same for a program with queues of its own: the caller is the one who waits."""

_MS: Final = 1_000_000


class ScriptBudget:
    """One account."""

    __slots__ = ("_clock_ns", "_cpu_ns", "_full_ns", "_left_ns", "_refilled_ns", "_share", "_started_ns")

    def __init__(
        self,
        call_ms: int = CALL_MS,
        share: float = SHARE,
        *,
        clock_ns: Callable[[], int] = time.monotonic_ns,
        cpu_ns: Callable[[], int] = time.thread_time_ns,
    ) -> None:
        """`share` 1 or more: every call begins with a full account."""
        self._full_ns = call_ms * _MS
        self._share = share
        self._clock_ns = clock_ns
        self._cpu_ns = cpu_ns
        self._left_ns = self._full_ns
        self._refilled_ns = clock_ns()
        self._started_ns = 0

    def begin(self) -> None:
        """A call begins."""
        now_ns = self._clock_ns()
        passed_ns = max(0, now_ns - self._refilled_ns)
        self._refilled_ns = now_ns
        if self._share >= 1:
            self._left_ns = self._full_ns
        else:
            # A debt is paid off in the time of two calls at most.
            owed_ns = max(self._left_ns, -self._full_ns)
            self._left_ns = min(self._full_ns, owed_ns + int(passed_ns * self._share))
        self._started_ns = self._cpu_ns()

    def left_us(self) -> int:
        """What is left for the call that began."""
        return (self._left_ns - (self._cpu_ns() - self._started_ns)) // 1000

    def end(self) -> None:
        """The call is over; what it took beyond the account is taken from the next ones."""
        self._left_ns -= self._cpu_ns() - self._started_ns
