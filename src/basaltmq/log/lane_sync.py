"""Syncs a lane on the requesting event loop where that is faster than waking a thread (see `store.sync.loop_time`).

The loop syncs inside the requesting call, at the end of its turn (`tick`), notifies the waiters and tidies up. So no
work is left for a later turn. It does so only if the thread is idle, little data waits, and no other sync of the lane
is running, which may take as long as a whole segment. The thread handles everything else: large data, requests during a
sync, waiting threads, and a loop that blocks until its own writes are durable.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Final

from basaltmq.errors import BasaltError
from basaltmq.log.lane import GATHERED_BYTES_MAX, Lane
from basaltmq.store.sync.group_commit import Group, GroupSync, Syncable, Synced, call_all
from basaltmq.store.sync.loop_time import HERE_S_MAX, LoopTime

HERE_BYTES_MAX: Final = GATHERED_BYTES_MAX
"""Most bytes for a sync on the loop. More is not gathered and would require a sync of the segment."""


class LaneSync(GroupSync):
    """Waits until writes to one lane are durable."""

    def __init__(
        self, target: Syncable, log: Lane, after_sync: Callable[[], None], *, here_s_max: float = HERE_S_MAX
    ) -> None:
        self._log = log
        self._after_sync = after_sync
        self._time = LoopTime(here_s_max)
        self._here: asyncio.AbstractEventLoop | None = None
        """The loop that runs a sync now."""
        super().__init__(target)

    def after_sync(self, loop: asyncio.AbstractEventLoop, callbacks: list[Synced]) -> None:
        with self._lock:
            self._require_open()
            self._group.callbacks.setdefault(loop, []).extend(callbacks)
            if not self._idle:
                return
            if not self._is_short():
                self._wake_up()
                return
            # Mark the thread as busy, so that others join the next group.
            self._idle = False
            group, self._group = self._group, Group()
        started = time.monotonic()
        self._here = loop
        try:
            self._serve(group)
        finally:
            self._here = None
            self._time.took(time.monotonic() - started)
            self._finish_sync()
            with self._lock:
                self._idle = not self._group and not self._closing
                if not self._idle:
                    self._wake.give()

    def _is_short(self) -> bool:
        """Whether the sync is short enough for the loop. The lock is held."""
        log = self._log
        return not self._time.away and not log.is_syncing and log.end - log.synced_position <= HERE_BYTES_MAX

    def _serve(self, group: Group) -> None:
        if self._here is None:
            self._time.was_away()
        super()._serve(group)

    def _notify(self, loop: asyncio.AbstractEventLoop, callbacks: list[Synced], error: BasaltError | None) -> None:
        if loop is self._here:
            call_all(callbacks, error)
        else:
            super()._notify(loop, callbacks, error)

    def _finish_sync(self) -> None:
        # A failure poisons the target, and the next write raises.
        with suppress(BasaltError):
            self._after_sync()
