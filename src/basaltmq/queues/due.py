"""Runs due work in bounded steps: expired leases, timers, arrived throttle tokens, queues over their limits.

The caller provides the time: `run(now_ns)` does due work and returns when to call again. `on_deadline` is called when
the next deadline moves closer. Failed work stays due. Due work of a queue that is down or unreadable is retried after
`RETRY_NS`, and other work continues.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Final

from basaltmq.clock import NS_PER_MS
from basaltmq.errors import CorruptionError, QueueFailedError, QueueNotFoundError, StaleLeaseError
from basaltmq.queues.change import Change
from basaltmq.queues.change_runner import ChangeRunner
from basaltmq.queues.leases.waiters import Waiters
from basaltmq.queues.lifecycle import dedup, delays, limits, timers, ttl
from basaltmq.queues.lifecycle.failures import expire_lease
from basaltmq.queues.lifecycle.timers import Timer
from basaltmq.queues.loaded_queues import LoadedQueues
from basaltmq.queues.queue import PlaneContext
from basaltmq.store.families import Family
from basaltmq.store.keys.queues import lease_expiry_key

DUE_MAX: Final = 64
"""Leases and timers served by one `run`. Each is one batch."""

DUE_ROWS: Final = 2000
"""Rows after which a `run` stops: 1,000 returned messages, about 10 ms in which the plane is blocked."""

DUE_S: Final = 0.01
"""Seconds after which a `run` stops. Rows of dead letters take ten times as long as others."""

FOLLOW_UP_MAX: Final = 2
"""Batches per operation that trim other queues to their limits. The rest waits for `run`."""


RETRY_NS: Final = 1_000_000_000
"""Delay before due work is retried in a queue that is down or unreadable."""

_log: Final = logging.getLogger("basaltmq")


class Due:
    """The due work of a plane."""

    def __init__(
        self,
        shared: PlaneContext,
        changes: ChangeRunner,
        loaded: LoadedQueues,
        waiters: Waiters,
        *,
        wake: Callable[[str], None],
        delete: Callable[[str], None],
        on_deadline: Callable[[], None] | None,
        timer_s: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._timer_s = timer_s
        self._shared = shared
        self._changes = changes
        self._loaded = loaded
        self._waiters = waiters
        self._wake = wake
        self._delete = delete
        self._on_deadline = on_deadline
        self._announced_ns: int | None = None
        self._over_limit: dict[str, None] = {}

    def note_over_limit(self, name: str) -> None:
        """Note a queue that received messages without a check of its limits."""
        queue = self._loaded.peek(name)
        if queue is None or queue.config.length_max is not None or queue.config.bytes_max is not None:
            self._over_limit[name] = None

    def run(self, now_ns: int) -> int | None:
        """Do a bounded part of the due work. Return when to call again, None if nothing is scheduled."""
        until_s = self._timer_s() + DUE_S
        self.bring_back_to_limits()
        if self._shared.timers.rearm is not None:
            rearm = self._shared.timers.rearm
            self._changes.do(lambda change: rearm.step(self._shared.timers, change), now_ns)
        rows = served = 0
        while rows < DUE_ROWS and served < DUE_MAX and (not served or self._timer_s() < until_s):
            due = self._shared.lease_expiry.due(now_ns, 1)
            if not due:
                break
            expires_ns, name, token = due[0]
            try:
                rows += self._expire_lease(now_ns, expires_ns, name, token)
            except (QueueFailedError, CorruptionError) as error:
                _log.error("expiring a lease of queue %r failed, retrying in 1 s: %s", name, error)
                self._shared.lease_expiry.add(now_ns + RETRY_NS, name, token)
            except BaseException:
                self._shared.lease_expiry.add(expires_ns, name, token)
                raise
            served += 1
        # Timers get their share, however many leases are due.
        rows = 0
        for timer in self._shared.timers.due(now_ns, DUE_MAX):
            try:
                rows += self._serve(now_ns, timer)
            except (QueueFailedError, CorruptionError) as error:
                _log.error("due work of queue %r failed, retrying in 1 s: %s", timer.queue, error)
                rows += self._changes.do(partial(self._postpone, timer), now_ns)
            if rows >= DUE_ROWS or self._timer_s() >= until_s:
                break
        if self._shared.reclaim.is_pending:
            self._changes.do(self._shared.reclaim.step, now_ns)
        self._wake_for_tokens(now_ns)
        self._announced_ns = self.deadline_ns()
        return self._announced_ns

    def deadline_ns(self) -> int | None:
        """Return when work is due next."""
        if self._over_limit or self._shared.reclaim.is_pending or self._shared.timers.rearm is not None:
            return 0
        # Called with every change, so check leases and timers first: usually there is nothing else.
        first = self._shared.lease_expiry.deadline_ns()
        timer = self._shared.timers.deadline_ns()
        if first is None or (timer is not None and timer < first):
            first = timer
        for name in self._token_queues():
            token = self._token_ns(name)
            if first is None or (token is not None and token < first):
                first = token
        return first

    def announce_due(self) -> None:
        """Call `on_deadline` if work is due earlier than announced."""
        if self._on_deadline is not None:
            deadline = self.deadline_ns()
            if deadline is not None and (self._announced_ns is None or deadline < self._announced_ns):
                self._announced_ns = deadline
                self._on_deadline()

    def bring_back_to_limits(self) -> None:
        """Trim drop-head queues that received messages without a check of their limits."""
        for _ in range(FOLLOW_UP_MAX):
            if not self._over_limit or self._changes.is_open:
                break
            name = next(iter(self._over_limit))
            is_over = False
            with suppress(QueueNotFoundError, QueueFailedError):
                # Skip a deleted or failed queue. Its next message triggers another check.
                _, is_over = self._changes.run(partial(self._trim, name))
            if not is_over:
                self._over_limit.pop(name, None)

    def _trim(self, name: str, change: Change) -> bool:
        queue = self._loaded.require(name)
        change.at = name
        return limits.trim(queue, change)

    def _token_queues(self) -> list[str]:
        """Return the queues for which a consumer waits or listens for tokens."""
        waited_at = self._waiters.queues()
        if not self._waiters.has_listeners or not self._shared.parked:
            return waited_at
        return waited_at + [name for name in self._shared.parked if name not in self._waiters]

    def _token_ns(self, name: str) -> int | None:
        """Return when the next token arrives that a message of the queue waits for."""
        queue = self._loaded.peek(name)
        return None if queue is None or queue.throttling is None else queue.throttling.next_wake_ns()

    def _wake_for_tokens(self, now_ns: int) -> None:
        for name in self._token_queues():
            at_ns = self._token_ns(name)
            if at_ns is None or at_ns <= now_ns:
                # Notify once: a lease attempt that leaves messages parked registers the queue again.
                self._shared.parked.pop(name, None)
            if at_ns is not None and at_ns <= now_ns:
                self._wake(name)

    def _expire_lease(self, now_ns: int, expires_ns: int, name: str, token: int) -> int:
        """Expire a lease, and return the number of rows written."""

        def delete_index_row(change: Change) -> int:
            change.batch.delete(Family.LEASE_EXPIRY, lease_expiry_key(expires_ns, name, token))
            return 1

        def end(change: Change) -> int:
            change.at = name
            expire_lease(queue, change, token)
            return len(change.batch)

        if self._loaded.config(name) is None:
            return self._changes.do(delete_index_row, now_ns)
        queue = self._loaded.require(name)
        try:
            queue.leases.require(token)
        except StaleLeaseError:
            return self._changes.do(delete_index_row, now_ns)
        return self._changes.do(end, now_ns)

    def _serve(self, now_ns: int, timer: Timer) -> int:
        """Do the work of a timer, and return the number of rows written."""

        def serve(change: Change) -> int:
            more = False
            if self._loaded.config(timer.queue) is not None:
                more = self._fire(change, timer)
            if not more:
                self._shared.timers.clear(change, timer)
            return len(change.batch)

        if timer.kind == timers.UNUSED and self._is_unused(now_ns, timer.queue):
            self._delete(timer.queue)
        return self._changes.do(serve, now_ns)

    def _postpone(self, timer: Timer, change: Change) -> int:
        self._shared.timers.clear(change, timer)
        self._shared.timers.set(change, change.now_ns + RETRY_NS, timer.kind, timer.queue)
        return len(change.batch)

    def _fire(self, change: Change, timer: Timer) -> bool:
        queue = self._loaded.require(timer.queue)
        change.at = queue.name
        if timer.kind == timers.DELAYED:
            return delays.return_due(queue, change)
        if timer.kind == timers.EXPIRY:
            return ttl.expire_due(queue, change)
        if timer.kind == timers.DEDUP:
            return dedup.sweep(queue, change)
        if timer.kind == timers.UNUSED and queue.config.expires_ms is not None:
            self._shared.timers.set(
                change,
                max(queue.used_ns, change.now_ns) + queue.config.expires_ms * NS_PER_MS,
                timers.UNUSED,
                queue.name,
            )
        return False

    def _is_unused(self, now_ns: int, name: str) -> bool:
        if self._loaded.config(name) is None:
            return False
        queue = self._loaded.require(name)
        if queue.config.expires_ms is None or len(queue.leases) or name in self._waiters:
            return False
        if self._shared.holders(name):
            return False
        return queue.used_ns + queue.config.expires_ms * NS_PER_MS <= now_ns
