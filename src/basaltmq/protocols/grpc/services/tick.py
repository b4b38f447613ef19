"""Enqueues of many callers as one write: what arrives while the disk syncs is one batch, and waits for the next sync.

    Enqueue, EnqueueBatch, Produce ─> gathered ─> one change of all queues ─> one sync ─> answers
                                         ^                                       │
                                         └────── the next batch is written when ─┘ it is done

There is no timer. A call that finds nothing under way is written in the first turn of the loop that brings no other,
`TURNS_MAX` later at most: callers that were answered together come back one by one, and a sync for the first of them
would leave the others to the next. One that comes while a sync runs could not be durable before the next sync whatever
was done with it, so it waits and shares its write with others that do; more than `GATHERED_BYTES_MAX` does not wait.
Those who waited for a sync are answered before the next one begins: their answers would otherwise lie here for as long
as it takes, and callers would come back in two groups of very different sizes.

Budget: a tick costs about 600 us of processor and disk beside its calls, a single Enqueue 50 us with everything in the
cache and twice that in a server that is busy; so what counts is how many calls share a tick (8 of 16 callers).

Calls stay apart in their errors. If the change of all is refused, each queue is tried alone, and then each call: only
the culprit fails. A queue that refuses what is over its limit gets its calls one by one from the start, because the
refusal is of the call.

A caller that goes away does not take its messages back: they are written, and nobody is told.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from functools import partial
from typing import Any, Final, NamedTuple, Protocol

from basaltmq.errors import BasaltError, LimitExceededError
from basaltmq.queues.config import Durability, Overflow
from basaltmq.queues.draft import Draft
from basaltmq.queues.plane import QueuePlane
from basaltmq.store.after_sync import AfterSync
from basaltmq.store.sync.group_commit import GroupCommit

GATHERED_BYTES_MAX: Final = 1 << 20
"""Payloads gathered before they are written without waiting for the sync that runs."""

MESSAGE_BYTES_MAX: Final = 16 << 20
"""One message, unless the settings say otherwise; they have the same default."""

TURNS_MAX: Final = 16
"""Turns of the loop that calls are gathered in as long as each brings another: of single messages a millisecond."""

GROUP_MAX: Final = 5_000
"""Messages of one queue written together: under what one call of the plane takes, and some tens of milliseconds."""


class Waiter(Protocol):
    """Whoever is told the ids, or why there are none. A future is one."""

    def done(self) -> bool: ...

    def set_result(self, result: list[bytes], /) -> None: ...

    def set_exception(self, error: BaseException, /) -> None: ...


class _Call(NamedTuple):
    drafts: Sequence[Draft | bytes]
    waiter: Waiter


class Tick:
    """Gathers enqueues of one loop."""

    def __init__(
        self,
        plane: QueuePlane,
        commit: GroupCommit,
        loop: asyncio.AbstractEventLoop,
        *,
        message_bytes_max: int = MESSAGE_BYTES_MAX,
    ) -> None:
        self._plane = plane
        self._commit = commit
        self._loop = loop
        self._message_bytes_max = message_bytes_max
        self._gathered: dict[str, list[_Call]] = {}
        self._gathered_bytes = 0
        self._is_scheduled = False
        self._turns = 0
        """That the scheduled write has let pass."""
        self._has_come = False
        """Whether there was another call in this one."""
        self._syncs = 0
        self.writes = 0
        """Times something was written."""

    def enqueue(self, queue: str, drafts: Sequence[Draft | bytes]) -> asyncio.Future[list[bytes]]:
        """Add messages; their ids once they are as durable as the queue promises. All or none."""
        future: asyncio.Future[list[bytes]] = self._loop.create_future()
        self.add(queue, drafts, future)
        return future

    def add(self, queue: str, drafts: Sequence[Draft | bytes], waiter: Waiter) -> None:
        """The same, for a waiter of the caller's own."""
        if {*map(type, drafts)} == {bytes}:
            payloads: Sequence[bytes] = drafts  # type: ignore[assignment]
            sizes_bytes = [*map(len, payloads)]
        else:
            sizes_bytes = [_size(each) for each in drafts]
        size_bytes = sum(sizes_bytes)
        if size_bytes > self._message_bytes_max and max(sizes_bytes) > self._message_bytes_max:
            raise LimitExceededError(
                f"a message of {max(sizes_bytes)} bytes for queue {queue!r} is over the limit of "
                f"{self._message_bytes_max} (limits.message_bytes_max)"
            )
        self._gathered.setdefault(queue, []).append(_Call(drafts, waiter))
        self._gathered_bytes += size_bytes
        self._has_come = True
        if not self._is_scheduled and (not self._syncs or self._gathered_bytes > GATHERED_BYTES_MAX):
            self._is_scheduled = True
            self._loop.call_soon(self._end)

    def _end(self) -> None:
        """Write what was gathered, if nobody else has come in this turn."""
        if self._has_come and self._turns < TURNS_MAX and self._gathered_bytes <= GATHERED_BYTES_MAX:
            self._has_come = False
            self._turns += 1
            self._loop.call_soon(self._end)
            return
        self._turns = 0
        self._is_scheduled = False
        gathered, self._gathered = self._gathered, {}
        self._gathered_bytes = 0
        try:
            self._write_gathered(gathered)
        except Exception as error:
            # Nobody may be left waiting; each of them reports it.
            for calls in gathered.values():
                _fail(calls, error)

    def _write_gathered(self, gathered: dict[str, list[_Call]]) -> None:
        self.writes += 1
        groups: list[tuple[str, list[_Call]]] = []
        levels: dict[str, Durability] = {}
        for queue, calls in gathered.items():
            try:
                config = self._plane.get(queue)
            except BasaltError as error:
                _fail(calls, error)
                continue
            # A queue of the broker's says when the broker is done with it, which is not when it is durable.
            levels[queue] = Durability.SYNCED if config.extra else config.durability
            is_refusing = config.overflow is not Overflow.DROP_HEAD
            groups += [(queue, part) for part in _parts(calls, 1 if is_refusing else GROUP_MAX)]
        self._answer(self._write(groups), levels)

    def _write(self, groups: list[tuple[str, list[_Call]]]) -> list[tuple[str, _Call, list[bytes]]]:
        """Write groups of calls, together if they can be; those written, with their ids."""
        if len(groups) > 1 and len({queue for queue, _ in groups}) == len(groups):
            try:
                with self._plane.change():
                    return [each for queue, calls in groups for each in self._enqueue(queue, calls)]
            except BasaltError:
                # Somebody's fault: each queue alone tells whose.
                pass
        written: list[tuple[str, _Call, list[bytes]]] = []
        for queue, calls in groups:
            try:
                written += self._enqueue(queue, calls)
            except BasaltError as error:
                if len(calls) == 1:
                    _fail(calls, error)
                else:
                    written += self._write([(queue, [call]) for call in calls])
        return written

    def _enqueue(self, queue: str, calls: list[_Call]) -> list[tuple[str, _Call, list[bytes]]]:
        if len(calls) == 1:
            drafts = calls[0].drafts
            return [(queue, calls[0], self._plane.enqueue(queue, drafts, durability=Durability.WRITTEN))]
        drafts = [draft for call in calls for draft in call.drafts]
        ids = self._plane.enqueue(queue, drafts, durability=Durability.WRITTEN)
        written: list[tuple[str, _Call, list[bytes]]] = []
        at = 0
        for call in calls:
            written.append((queue, call, ids[at : at + len(call.drafts)]))
            at += len(call.drafts)
        return written

    def _answer(self, written: list[tuple[str, _Call, list[bytes]]], levels: dict[str, Durability]) -> None:
        waiting: list[tuple[_Call, list[bytes]]] = []
        for queue, call, ids in written:
            if levels[queue] is Durability.SYNCED:
                waiting.append((call, ids))
            elif not call.waiter.done():
                call.waiter.set_result(ids)
        if not waiting:
            return
        self._syncs += 1
        after: Any = AfterSync(partial(self._tell, waiting))
        try:
            self._commit.resolve_durable(self._loop, [after])
        except BasaltError as error:
            self._syncs -= 1
            _fail([call for call, _ in waiting], error)

    def _tell(self, waiting: list[tuple[_Call, list[bytes]]], error: BaseException | None) -> None:
        """A sync is over: whom that concerns."""
        self._syncs -= 1
        for call, ids in waiting:
            if call.waiter.done():
                continue
            if error is None:
                call.waiter.set_result(ids)
            else:
                call.waiter.set_exception(error)
        if self._gathered and not self._syncs and not self._is_scheduled:
            # In the next turn, when the answers are on their way and what came during the sync has been read.
            self._is_scheduled = True
            self._loop.call_soon(self._end)


def _parts(calls: list[_Call], count_max: int) -> list[list[_Call]]:
    """Calls in groups of about so many messages."""
    parts: list[list[_Call]] = []
    room = 0
    for call in calls:
        if room < len(call.drafts) or not parts:
            parts.append([])
            room = count_max
        parts[-1].append(call)
        room -= max(1, len(call.drafts))
    return parts


def _size(draft: Draft | bytes) -> int:
    return len(draft.payload) if isinstance(draft, Draft) else len(draft)


def _fail(calls: Sequence[_Call], error: BaseException) -> None:
    for call in calls:
        if not call.waiter.done():
            call.waiter.set_exception(error)
