"""Group enqueue: writes the enqueues of many callers as one change and answers them after one sync.

    Enqueue, EnqueueBatch, Produce ─> gathered ─> one change of all queues ─> one sync ─> answers
                                         ^                                       │
                                         └── the next batch is written when the ─┘ sync is done

There is no timer:

- No sync is running: the batch is written in the first loop turn that brings no further call, after at most `TURNS_MAX`
  turns. Callers that were answered together return one by one, and writing the first alone would delay the others.
- A sync is running: a new call cannot be durable before the next sync. It waits and shares the next write, unless more
  than `GATHERED_BYTES_MAX` are gathered.
- A sync is done: its callers are answered before the next sync starts. Otherwise their answers would wait for that
  sync, and the callers would return in two groups of very different sizes.

Cost: a tick takes about 600 us of CPU and disk time in addition to its calls. One Enqueue takes 50 us with warm caches
and twice that in a busy server. Throughput therefore depends on the calls per tick (8 with 16 callers).

Errors stay separate. If the combined change is refused, each queue is tried alone, and then each call, so only the
offending call fails. Queues that refuse messages over their limit get their calls one by one from the start, because
the refusal concerns one call.

A caller that disconnects does not withdraw its messages: they are still written.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from functools import partial
from typing import Final, NamedTuple, Protocol

from basaltmq.durability import Durability
from basaltmq.errors import BasaltError, LimitExceededError
from basaltmq.queues.config import Overflow
from basaltmq.queues.draft import Draft
from basaltmq.queues.plane import QueuePlane
from basaltmq.store.sync.group_commit import GroupCommit

GATHERED_BYTES_MAX: Final = 1 << 20
"""Gathered payload bytes above which a batch is written without waiting for the running sync."""

MESSAGE_BYTES_MAX: Final = 16 << 20
"""Default size limit of one message. The setting `limits.message_bytes_max` has the same default."""

TURNS_MAX: Final = 16
"""Loop turns in which calls are gathered while each turn brings another: about 1 ms for single messages."""

GROUP_MAX: Final = 5_000
"""Messages of one queue per write: below the limit of one plane call, and some tens of milliseconds of work."""


class Waiter(Protocol):
    """Receives the message ids, or the error. A future is one."""

    def done(self) -> bool: ...

    def set_result(self, result: list[bytes], /) -> None: ...

    def set_exception(self, error: BaseException, /) -> None: ...


class _Call(NamedTuple):
    drafts: Sequence[Draft | bytes]
    waiter: Waiter


class Tick:
    """Gathers the enqueues of one event loop."""

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
        """Loop turns that the scheduled write has been deferred."""
        self._has_come = False
        """Whether a call arrived in this loop turn."""
        self._syncs = 0
        self.writes = 0
        """Number of writes."""

    def enqueue(self, queue: str, drafts: Sequence[Draft | bytes]) -> asyncio.Future[list[bytes]]:
        """Add messages, all or none. The future returns their ids once they are as durable as the queue promises."""
        future: asyncio.Future[list[bytes]] = self._loop.create_future()
        self.add(queue, drafts, future)
        return future

    def add(self, queue: str, drafts: Sequence[Draft | bytes], waiter: Waiter) -> None:
        """Like `enqueue`, but report to the caller's own waiter."""
        if {*map(type, drafts)} == {bytes}:
            payloads: Sequence[bytes] = drafts  # type: ignore[assignment]
            sizes_bytes = [*map(len, payloads)]
        else:
            sizes_bytes = [_size(each) for each in drafts]
        size_bytes = sum(sizes_bytes)
        if size_bytes > self._message_bytes_max and max(sizes_bytes) > self._message_bytes_max:
            raise LimitExceededError(
                f"a message of {max(sizes_bytes)} bytes for queue {queue!r} exceeds the limit of "
                f"{self._message_bytes_max} bytes (limits.message_bytes_max)"
            )
        self._gathered.setdefault(queue, []).append(_Call(drafts, waiter))
        self._gathered_bytes += size_bytes
        self._has_come = True
        if not self._is_scheduled and (not self._syncs or self._gathered_bytes > GATHERED_BYTES_MAX):
            self._is_scheduled = True
            self._loop.call_soon(self._end)

    def _end(self) -> None:
        """Write the gathered calls, unless this loop turn brought another call."""
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
            # Every waiter must be resolved; each reports the error to its caller.
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
            # With `extra` the broker manages the queue. `durability` then says when the broker is done with a message,
            # not when the message is durable, so wait for the sync.
            levels[queue] = Durability.SYNCED if config.extra else config.durability
            is_refusing = config.overflow is not Overflow.DROP_HEAD
            groups += [(queue, part) for part in _parts(calls, 1 if is_refusing else GROUP_MAX)]
        self._answer(self._write(groups), levels)

    def _write(self, groups: list[tuple[str, list[_Call]]]) -> list[tuple[str, _Call, list[bytes]]]:
        """Write groups of calls, in one change if possible. Return the written calls with their ids."""
        if len(groups) > 1 and len({queue for queue, _ in groups}) == len(groups):
            try:
                with self._plane.change():
                    return [each for queue, calls in groups for each in self._enqueue(queue, calls)]
            except BasaltError:
                # Write each queue alone to find the offending one.
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
        try:
            self._commit.after_sync(self._loop, [partial(self._synced, waiting)])
        except BasaltError as error:
            self._syncs -= 1
            _fail([call for call, _ in waiting], error)

    def _synced(self, waiting: list[tuple[_Call, list[bytes]]], error: BaseException | None) -> None:
        """Answer the callers of a finished sync."""
        self._syncs -= 1
        for call, ids in waiting:
            if call.waiter.done():
                continue
            if error is None:
                call.waiter.set_result(ids)
            else:
                call.waiter.set_exception(error)
        if self._gathered and not self._syncs and not self._is_scheduled:
            # In the next turn: by then the answers are sent and the requests that arrived during the sync are read.
            self._is_scheduled = True
            self._loop.call_soon(self._end)


def _parts(calls: list[_Call], count_max: int) -> list[list[_Call]]:
    """Split calls into groups of about `count_max` messages."""
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
