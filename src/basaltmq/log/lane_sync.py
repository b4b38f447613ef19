"""Syncs of a lane by the loop that asks, where that is faster than to wake a thread (see `store.loop_time`).

The loop syncs in the call that asks for it, at the end of its turn (`tick`), tells those who waited and tidies up; so
nothing is left behind in a loop that takes no further turn. It does so only when the thread sleeps, little waits, and
nobody else is syncing the lane, which may take as long as a whole segment does. Everything else is the thread's: what
is large, those who come while a sync runs, threads that wait, and a loop that blocks until its own writes are durable.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Final

from basaltmq.errors import BasaltError
from basaltmq.log.lane import GATHERED_BYTES_MAX, Lane
from basaltmq.store.sync.group_commit import Group, GroupSync, Syncable, resolve_all
from basaltmq.store.sync.loop_time import HERE_S_MAX, LoopTime

HERE_BYTES_MAX: Final = GATHERED_BYTES_MAX
"""What may wait for a sync by the loop: more is no longer gathered, and would be a sync of the segment."""


class LaneSync(GroupSync):
    """Waits for the durability of what was written to one lane."""

    def __init__(
        self, target: Syncable, log: Lane, tidy: Callable[[], None], *, here_s_max: float = HERE_S_MAX
    ) -> None:
        self._log = log
        self._tidy = tidy
        self._time = LoopTime(here_s_max)
        self._here: asyncio.AbstractEventLoop | None = None
        """The loop that is syncing."""
        super().__init__(target)

    def resolve_durable(self, loop: asyncio.AbstractEventLoop, futures: list[asyncio.Future[None]]) -> None:
        with self._lock:
            self._require_open()
            self._group.futures.setdefault(loop, []).extend(futures)
            if not self._idle:
                return
            if not self._is_short():
                self._wake_up()
                return
            # To others it looks as if the thread were at work: they join the next group.
            self._idle = False
            group, self._group = self._group, Group()
        started = time.monotonic()
        self._here = loop
        try:
            self._serve(group)
        finally:
            self._here = None
            self._time.took(time.monotonic() - started)
            self._tidy_up()
            with self._lock:
                self._idle = not self._group and not self._closing
                if not self._idle:
                    self._wake.give()

    def _is_short(self) -> bool:
        """Whether the loop can spare the time. Under the lock."""
        log = self._log
        return not self._time.away and not log.is_syncing and log.end - log.synced_position <= HERE_BYTES_MAX

    def _serve(self, group: Group) -> None:
        if self._here is None:
            self._time.was_away()
        super()._serve(group)

    def _tell(
        self, loop: asyncio.AbstractEventLoop, futures: list[asyncio.Future[None]], error: BasaltError | None
    ) -> None:
        if loop is self._here:
            resolve_all(futures, error)
        else:
            super()._tell(loop, futures, error)

    def _tidy_up(self) -> None:
        # A failure has poisoned what was synced, which the next write finds out.
        with suppress(BasaltError):
            self._tidy()
