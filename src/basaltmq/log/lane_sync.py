"""Syncs a lane on the requesting event loop where that is faster than waking a thread (see `store.sync.loop_sync`).

The loop syncs at the end of the turn that requested it (`tick`), and notifies the waiters. No work is left for a later
turn. It does so only if the thread is idle, little data waits, and no other sync of the lane is running. Such a sync
may take as long as that of a whole segment. The thread handles everything else: large data, requests during a sync,
waiting threads, and a loop that blocks until its own writes are durable.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Final

from basaltmq.errors import BasaltError
from basaltmq.log.lane import Lane
from basaltmq.log.lane_options import GATHERED_BYTES_MAX
from basaltmq.store.sync.group_commit import Group, Syncable, Synced, call_all
from basaltmq.store.sync.loop_sync import HERE_S_MAX, LoopSync

HERE_BYTES_MAX: Final = GATHERED_BYTES_MAX
"""Maximum unsynced bytes for a sync on the loop. More bytes are not gathered and require a sync of the segment."""


class LaneSync(LoopSync):
    """Group commit of one lane."""

    def __init__(
        self, target: Syncable, log: Lane, finish: Callable[[], None], *, here_s_max: float = HERE_S_MAX
    ) -> None:
        self._log = log
        super().__init__(target, finish, here_s_max=here_s_max)

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
        try:
            self._serve_here(loop, group)
        finally:
            self._finish_sync()
            with self._lock:
                self._idle = not self._group and not self._closing
                if not self._idle:
                    self._wake.give()

    def _is_short(self) -> bool:
        """Whether the sync is short enough for the loop. The lock is held."""
        log = self._log
        return not self._time.away and not log.is_syncing and log.end - log.synced_position <= HERE_BYTES_MAX

    def _notify_here(self, loop: asyncio.AbstractEventLoop, callbacks: list[Synced], error: BasaltError | None) -> None:
        call_all(callbacks, error)
