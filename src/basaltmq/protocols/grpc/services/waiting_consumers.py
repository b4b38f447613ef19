"""Who gets the next messages of a queue: consumers that wait, the least loaded first.

    take() ──> something is ready, nobody waits ──> leased at once
          └──> a turn in the queue's line ──> the plane says the queue has something ──> turns are served

A party is a consumer that takes again and again (a Consume stream). Its load is what it holds and has not answered for.
Turns are served by load, the longest waiting first among equals, so a consumer that is slow gets what the fast ones
leave. Past `LOAD_SOFT_MAX` a party gets nothing as long as another party of the queue is below it and takes what it is
sent: messages do not pile up with one consumer while others could have them. A consumer alone is not limited, because
on this wire it may collect as much as it likes before it answers.

Not thread-safe but for waking: everything runs on the loop that made it.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Final

from basaltmq.errors import BasaltError
from basaltmq.queues.leases.delivery import Delivery
from basaltmq.queues.plane import QueuePlane

LOAD_SOFT_MAX: Final = 256
"""Messages a consumer may hold before others go first: enough to keep a fast one busy over a network's round trip."""

RETRY_S: Final = 0.05
"""Before a queue is asked again that said it had something and gave nothing."""


class Party:
    """A consumer that takes again and again."""

    __slots__ = ("is_stalled", "load")

    def __init__(self) -> None:
        self.load = 0
        """Messages it holds."""
        self.is_stalled = False
        """It was sent something and does not take it."""


class _Turn:
    """Somebody who waits."""

    __slots__ = ("consumer", "count", "future", "party", "visibility_ms")

    def __init__(
        self,
        count: int,
        consumer: str,
        visibility_ms: int | None,
        party: Party | None,
        future: asyncio.Future[list[Delivery]],
    ) -> None:
        self.count = count
        self.consumer = consumer
        self.visibility_ms = visibility_ms
        self.party = party
        self.future = future

    @property
    def load(self) -> int:
        return 0 if self.party is None else self.party.load


class _Line:
    """Those who wait at one queue, and its parties."""

    def __init__(self, plane: QueuePlane, queue: str, loop: asyncio.AbstractEventLoop) -> None:
        self._plane = plane
        self._queue = queue
        self._loop = loop
        self._thread = threading.get_ident()
        self._stop: Callable[[], None] | None = None
        self._is_scheduled = False
        self.turns: list[_Turn] = []
        self.parties: set[Party] = set()

    def schedule(self, delay_s: float = 0.0) -> None:
        """Serve soon; many reasons in one turn of the loop are one."""
        if self._is_scheduled or not self.turns:
            return
        self._is_scheduled = True
        if delay_s:
            self._loop.call_later(delay_s, self._serve)
        else:
            self._loop.call_soon(self._serve)

    def _serve(self) -> None:
        self._is_scheduled = False
        while (turn := self._next()) is not None:
            try:
                found = self._plane.lease(
                    self._queue, self._share(turn), consumer=turn.consumer, visibility_ms=turn.visibility_ms
                )
                if not found:
                    self._arm()
                    return
            except BasaltError as error:
                self._fail(turn, error)
                continue
            self.turns.remove(turn)
            turn.future.set_result(found)
        self.rest()

    def _next(self) -> _Turn | None:
        """Whose turn it is; None if nobody waits, or those who do have to let others go first."""
        self.turns = [turn for turn in self.turns if not turn.future.done()]
        best: _Turn | None = None
        for turn in self.turns:
            load = turn.load
            if load == 0:
                return turn
            if (best is None or load < best.load) and (load < LOAD_SOFT_MAX or not self._another_has_room(turn.party)):
                best = turn
        return best

    def _another_has_room(self, party: Party | None) -> bool:
        return any(p.load < LOAD_SOFT_MAX and not p.is_stalled for p in self.parties if p is not party)

    def has_unloaded(self) -> bool:
        """Whether somebody waits whose turn is before that of a newcomer."""
        return any(turn.load == 0 for turn in self.turns)

    def _share(self, turn: _Turn) -> int:
        """What one of several waiting parties may take, so that all of them get something."""
        waiting = sum(1 for each in self.turns if each.party is not None)
        if turn.party is None or waiting < 2:
            return turn.count
        return max(1, min(turn.count, self._plane.stats(self._queue)["ready"] // waiting))

    def _fail(self, turn: _Turn, error: BasaltError) -> None:
        self.turns.remove(turn)
        turn.future.set_exception(error)

    def _arm(self) -> None:
        """Wait for the queue to have something."""
        if self._stop is not None:
            return
        is_woken = False

        def wake() -> None:
            nonlocal is_woken
            is_woken = True
            self._stop = None
            if threading.get_ident() == self._thread:
                self.schedule()
            else:
                with suppress(RuntimeError):
                    # A loop that was closed has nobody left to tell.
                    self._loop.call_soon_threadsafe(self.schedule)

        # Looked at again later if it is ready already: it said so before and had nothing to give.
        is_scheduled, self._is_scheduled = self._is_scheduled, True
        try:
            stop = self._plane.on_ready(self._queue, wake)
        except BasaltError as error:
            for turn in list(self.turns):
                self._fail(turn, error)
            return
        finally:
            self._is_scheduled = is_scheduled
        if is_woken:
            self.schedule(RETRY_S)
        else:
            self._stop = stop

    def rest(self) -> None:
        """Stop waiting for the queue if nobody is left who does."""
        if not self.turns and self._stop is not None:
            self._stop()
            self._stop = None


class Takers:
    """The lines of all queues."""

    def __init__(self, plane: QueuePlane, loop: asyncio.AbstractEventLoop) -> None:
        self._plane = plane
        self._loop = loop
        self._lines: dict[str, _Line] = {}

    def take_ready(
        self, queue: str, count: int, *, consumer: str, visibility_ms: int | None = None
    ) -> Sequence[Delivery]:
        """Up to `count` messages, leased, if there are some and nobody waits whose turn is before."""
        line = self._lines.get(queue)
        if line is not None and line.has_unloaded():
            return []
        return self._plane.lease_ready(queue, count, consumer=consumer, visibility_ms=visibility_ms)

    async def take(
        self,
        queue: str,
        count: int,
        *,
        consumer: str,
        visibility_ms: int | None = None,
        party: Party | None = None,
        timeout_s: float | None = None,
    ) -> list[Delivery]:
        """Up to `count` messages, leased; waits for the first, up to `timeout_s` (None: for ever).

        A caller that is cancelled has nothing: what it was given goes back.
        """
        line = self._lines.get(queue)
        if party is None and (line is None or not line.has_unloaded()):
            found = self._plane.lease(queue, count, consumer=consumer, visibility_ms=visibility_ms)
            if found or timeout_s == 0:
                return found
        elif timeout_s == 0:
            return []
        if line is None:
            line = self._lines[queue] = _Line(self._plane, queue, self._loop)
        turn = _Turn(count, consumer, visibility_ms, party, self._loop.create_future())
        line.turns.append(turn)
        line.schedule()
        try:
            async with asyncio.timeout(timeout_s):
                return await turn.future
        except TimeoutError:
            return _result(turn.future)
        except asyncio.CancelledError:
            for delivery in _result(turn.future)[:1]:
                with suppress(BasaltError):
                    self._plane.release(queue, delivery.token)
            raise
        finally:
            turn.future.cancel()
            if turn in line.turns:
                line.turns.remove(turn)
            self._tidy(queue, line)

    def join(self, queue: str, party: Party) -> None:
        line = self._lines.get(queue)
        if line is None:
            line = self._lines[queue] = _Line(self._plane, queue, self._loop)
        line.parties.add(party)

    def leave(self, queue: str, party: Party) -> None:
        line = self._lines[queue]
        line.parties.discard(party)
        line.schedule()
        self._tidy(queue, line)

    def refuse(self, queue: str, party: Party, error: BasaltError) -> None:
        """A party that waits gets an error instead of messages."""
        line = self._lines.get(queue)
        for turn in [] if line is None else line.turns:
            if turn.party is party and not turn.future.done():
                turn.future.set_exception(error)

    def lighter(self, queue: str) -> None:
        """A party of the queue holds less, or takes again: others may have to be served differently."""
        line = self._lines.get(queue)
        if line is not None:
            line.schedule()

    def parties(self, queue: str) -> int:
        line = self._lines.get(queue)
        return 0 if line is None else len(line.parties)

    def _tidy(self, queue: str, line: _Line) -> None:
        if not line.turns:
            line.rest()
            if not line.parties:
                self._lines.pop(queue, None)


def _result(future: asyncio.Future[list[Delivery]]) -> list[Delivery]:
    """What a turn was given, if it was."""
    if not future.done() or future.cancelled() or future.exception() is not None:
        return []
    return future.result()
