"""Fair sharing of the event loop: limits how long each connection handles input per turn (P13).

A connection handles input until its share of the turn is used. Then it stops reading and continues in the next turn.
The connections with pending input split the time of a turn, so its length does not grow with their number. The minimum
share is `SHARE_S_MIN`: with 1000 busy connections a turn takes 0.2 s, which is overload.

    begin() ──> handle input until it ends or `is_over()` ──> end(has_more)

asyncio does not report turns. The first `begin` schedules a callback, which runs in the next turn and resets the used
time.

A fan-out (a message to many queues) is one batch and may take longer than a turn. Small batches are inefficient: the
first message costs four times as much per queue as the next. So fan-outs may use `FAN_OUT_S` at once, which becomes a
debt. Each turn reduces the debt by at most `REPAID_S`. Connections whose next message is a fan-out wait until the debt
is 0. An idle turn takes microseconds, so fan-outs are delayed only while other connections have work. Messages with
large headers are treated in the same way.

Some work is necessary once per connection, such as opening a session, and thousands of connections may need it in the
same turn. It waits in two lines, which get equal shares of `WORK_S` per turn:

    do                                  clients wait for it: opening a session, SUBSCRIBE
    clean_up, close_later, in_portions  closing sockets, cleaning up after lost connections, the checks of each second

Work runs at once while the turn has time for it and its line is empty. Later turns do the rest, in order.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from collections.abc import Callable, Iterator
from functools import partial
from typing import Final, TypeVar

Item = TypeVar("Item")

TURN_S: Final = 0.01
"""Time for input per turn. A reply takes two or three turns; within 100 ms this leaves time for their writes,
deliveries and syncs."""

SHARE_S_MIN: Final = 0.0002
"""Minimum share of a connection: a few requests, or a few dozen publishes."""

DRAFT_S: Final = 6e-6
"""Cost of writing one message to one queue in the turn's batch (`python -m bench broker`)."""

FAN_OUT_S: Final = 0.024
"""Time for fan-outs in one batch. On a busy machine a batch takes twice its estimate."""

REPAID_S: Final = 0.004
"""Debt that a turn compensates. A reply takes up to four turns, and the debt of a full batch lasts six. So a reply
waits for one batch, seldom for two."""

WORK_S: Final = 0.005
"""Time per turn for the work of both lines. The last piece may exceed it."""

CLOSE_S: Final = 30e-6
"""Cost of closing a socket later in the turn: the event loop calls `connection_lost`, then close(2)."""

PIECE_S: Final = 0.0005
"""Time for the steps that `in_portions` takes at once. Longer pieces would delay the work between them."""

FAN_OUT_QUEUE_S: Final = 15e-6
FAN_OUT_DRAFT_S: Final = 4e-6
"""Cost of a fan-out batch per queue, and of each of its messages per queue (queues/fanout.py)."""

FAN_OUT_DIRECT_S: Final = 1e-6
"""Cost of a message per connected client that needs no queue (consumers/direct.py)."""

_log: Final = logging.getLogger(__name__)


def taken(items: list[Item]) -> Iterator[Item]:
    """Yield the items of a list and remove them, so that an object that has no other user is freed at its turn.

    Freeing thousands of lost connections at once takes tens of milliseconds.
    """
    while items:
        yield items.pop()


class LoopShares:
    """Splits the time of turns among the connections of one loop."""

    __slots__ = (
        "_cleaning",
        "_clock_s",
        "_ends_s",
        "_in_line",
        "_is_scheduled",
        "_is_serving",
        "_started_s",
        "_used_s",
        "_work",
        "_worked_s",
        "behind",
        "owed_s",
    )

    def __init__(self, clock_s: Callable[[], float] = time.perf_counter) -> None:
        self.behind = 0
        """Number of connections with pending input."""
        self.owed_s = 0.0
        """Debt: fan-out time that later turns have not yet compensated."""
        self._in_line: deque[Callable[[], None]] = deque()
        self._work: deque[Callable[[], object]] = deque()
        self._cleaning: deque[Callable[[], object]] = deque()
        self._worked_s = 0.0
        self._clock_s = clock_s
        self._used_s = 0.0
        self._is_scheduled = self._is_serving = False
        self._started_s = self._ends_s = 0.0

    def begin(self, *, was_behind: bool) -> None:
        """Start the share of a connection."""
        if was_behind:
            self.behind -= 1
        self._schedule()
        share_s = (TURN_S - self._used_s) / (self.behind + 1)
        self._started_s = self._clock_s()
        self._ends_s = self._started_s + max(SHARE_S_MIN, share_s)

    def is_over(self, later_s: float = 0.0) -> bool:
        """Whether the share is used up. `later_s` charges it for work that the input causes later in the turn."""
        if later_s:
            self._ends_s -= later_s
        return self._clock_s() >= self._ends_s

    def end(self, *, has_more: bool) -> None:
        """End the share of a connection."""
        self._used_s += self._clock_s() - self._started_s
        if has_more:
            self.behind += 1

    def left(self) -> None:
        """Remove a closed connection that had pending input."""
        self.behind -= 1

    def has_room(self, fan_out_s: float) -> bool:
        """Whether a fan-out may join the batch of this turn. Without debt it may, whatever its cost.

        Small fan-outs do not overtake waiting ones: they would renew the debt every turn and starve them.
        """
        if not self.owed_s:
            return True
        return (self._is_serving or not self._in_line) and self.owed_s + fan_out_s <= FAN_OUT_S

    def add_debt(self, fan_out_s: float) -> None:
        """Add the cost of a fan-out to the debt."""
        self.owed_s += fan_out_s
        self._schedule()

    def call_without_debt(self, go_on: Callable[[], None]) -> None:
        """Call `go_on` in a turn without debt, in order of arrival."""
        self._in_line.append(go_on)
        self._schedule()

    def do(self, work: Callable[[], object]) -> None:
        """Call `work`, for which a client waits, now or in a later turn."""
        self._add(self._work, work)

    def clean_up(self, work: Callable[[], object]) -> None:
        """Call `work`, for which no client waits, now or in a later turn."""
        self._add(self._cleaning, work)

    def close_later(self, transport: asyncio.Transport | None) -> bool:
        """Close the socket of a client that has closed its side, now or in a later turn.

        For `eof_received`, whose result this is. TLS transports ignore it and close at once.
        """
        if transport is None or transport.get_extra_info("ssl_object") is not None:
            return False
        self.clean_up(partial(self._close, transport))
        return True

    def _close(self, transport: asyncio.Transport) -> None:
        transport.close()
        self._worked_s += CLOSE_S

    def in_portions(self, steps: Iterator[object], done: Callable[[], object]) -> None:
        """Take all steps, then call `done`, over as many turns as it takes. Other work runs in between.

        A step that fails does not end a `map`. It ends a generator.
        """

        self.clean_up(partial(self._piece, steps, done))

    def _piece(self, steps: Iterator[object], done: Callable[[], object]) -> None:
        until_s = self._clock_s() + PIECE_S
        try:
            next(steps)
            while self._clock_s() < until_s:
                next(steps)
        except StopIteration:
            done()
            return
        except Exception:
            _log.exception("a step for a connection failed")
        self._cleaning.append(partial(self._piece, steps, done))

    def _add(self, line: deque[Callable[[], object]], work: Callable[[], object]) -> None:
        if line or self._worked_s >= WORK_S:
            line.append(work)
        else:
            self._run(work)
        self._schedule()

    def _run(self, work: Callable[[], object]) -> None:
        began_s = self._clock_s()
        try:
            work()
        except Exception:
            _log.exception("the work of a connection failed")
        self._worked_s += self._clock_s() - began_s

    def _schedule(self) -> None:
        if not self._is_scheduled:
            self._is_scheduled = True
            asyncio.get_running_loop().call_soon(self._next_turn)

    def _next_turn(self) -> None:
        self._is_scheduled = False
        self._worked_s = 0.0
        while (self._work or self._cleaning) and self._worked_s < WORK_S:
            for line in (self._work, self._cleaning):
                if line:
                    self._run(line.popleft())
        self._used_s = self._worked_s
        self.owed_s = max(0.0, self.owed_s - REPAID_S)
        self._is_serving = True
        for _ in range(len(self._in_line)):
            if self.owed_s:
                break
            self._in_line.popleft()()
        self._is_serving = False
        if self.owed_s or self._in_line or self._work or self._cleaning:
            self._schedule()
