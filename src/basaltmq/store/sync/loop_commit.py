"""Group commit for planes that are called from a loop: they never wait, whoever confirms asks for the sync.

Where the disk is fast the loop syncs by itself (see `store.loop_time`), at the end of the turn and after the turn's
answers and deliveries have gone out; what comes in meanwhile is the next, larger batch. Those who wait are told a turn
later, when what consumers answered has been read: a publisher that is told first runs ahead of them, and the queue it
builds is latency.
"""

from __future__ import annotations

import asyncio
import time

from basaltmq.errors import BasaltError
from basaltmq.store.api import Store
from basaltmq.store.sync.group_commit import Group, GroupCommit, resolve_all
from basaltmq.store.sync.loop_time import HERE_S_MAX, LoopTime


class LoopCommit(GroupCommit):
    """Syncs in the turn of the loop that asks, where the disk is fast."""

    def __init__(self, store: Store, *, here_s_max: float = HERE_S_MAX) -> None:
        self._time = LoopTime(here_s_max)
        self._is_due = False
        """Whether the loop has taken the thread's place and will sync soon."""
        self._here: asyncio.AbstractEventLoop | None = None
        """The loop that is syncing."""
        super().__init__(store)

    def wait_durable(self) -> None:
        """What was written is as durable as a write; the loop does not stand still for more."""

    def sync_in_thread(self) -> None:
        """Leave the next sync to the thread: there is much to write."""
        with self._lock:
            self._time.away = max(1, self._time.away)

    def resolve_durable(self, loop: asyncio.AbstractEventLoop, futures: list[asyncio.Future[None]]) -> None:
        with self._lock:
            self._require_open()
            self._group.futures.setdefault(loop, []).extend(futures)
            if not self._idle:
                return
            if self._time.away:
                self._wake_up()
                return
            # To others it looks as if the thread were at work: they join the group.
            self._idle = False
            self._is_due = True
        loop.call_soon(self._sync_here, loop)

    def close(self) -> None:
        self._sync_here(None)
        super().close()

    def _sync_here(self, loop: asyncio.AbstractEventLoop | None) -> None:
        """Sync for all who wait, and let the thread sleep on if nobody came meanwhile."""
        with self._lock:
            if not self._is_due:
                return
            self._is_due = False
            group, self._group = self._group, Group()
        started = time.monotonic()
        self._here = loop
        try:
            self._serve(group)
        finally:
            self._here = None
            self._time.took(time.monotonic() - started)
            self._go_on(loop)

    def _go_on(self, loop: asyncio.AbstractEventLoop | None) -> None:
        """Serve those who came during a sync; if there are none, the thread's place is free again."""
        with self._lock:
            self._idle = not self._group
            if self._idle:
                return
            if loop is None or self._time.away:
                self._wake.give()
                return
            self._is_due = True
        loop.call_soon(self._sync_here, loop)

    def _hand_over(self) -> bool:
        group = self._group
        if self._time.away or self._closing or group.members or len(group.futures) != 1:
            return False
        (loop,) = group.futures
        try:
            loop.call_soon_threadsafe(self._sync_here, loop)
        except RuntimeError:
            # It is closed: what waits is synced all the same, and nobody hears of it.
            return False
        self._is_due = True
        return True

    def _serve(self, group: Group) -> None:
        if self._here is None:
            self._time.was_away()
        super()._serve(group)

    def _tell(
        self, loop: asyncio.AbstractEventLoop, futures: list[asyncio.Future[None]], error: BasaltError | None
    ) -> None:
        if loop is self._here:
            loop.call_soon(resolve_all, futures, error)
        else:
            super()._tell(loop, futures, error)
