"""Group commit for planes on an event loop: they never wait, and the confirming caller requests the sync.

If the disk is fast, the loop runs the sync itself (see `loop_sync`), otherwise it wakes the thread. It does so in the
second turn after the request, when connections have written the replies and deliveries of the requesting turn. A
consumer then does not wait for the disk, nor for the GIL that the thread needs. Requests that arrive meanwhile share
the sync, or form the next, larger batch.

Waiters are notified one turn after the sync, when the consumers' replies are read. A publisher notified earlier would
outrun the consumers, and the resulting backlog adds latency.
"""

from __future__ import annotations

import asyncio

from basaltmq.errors import BasaltError
from basaltmq.store.sync.group_commit import Group, Syncable, Synced, call_all
from basaltmq.store.sync.loop_sync import HERE_S_MAX, LoopSync


class LoopCommit(LoopSync):
    """Group commit of a store whose planes run on an event loop."""

    def __init__(self, store: Syncable, *, here_s_max: float = HERE_S_MAX) -> None:
        self._is_due = False
        """Whether the loop has taken over from the thread and will sync soon."""
        super().__init__(store, here_s_max=here_s_max)

    def wait_durable(self, timeout_s: float = -1) -> bool:
        """Return at once: the loop must not block, so only the write itself is guaranteed."""
        return True

    def sync_in_thread(self) -> None:
        """Run the next sync in the thread, because much data has to be written."""
        with self._lock:
            self._time.away = max(1, self._time.away)

    def after_sync(self, loop: asyncio.AbstractEventLoop, callbacks: list[Synced]) -> None:
        with self._lock:
            self._require_open()
            self._group.callbacks.setdefault(loop, []).extend(callbacks)
            if not self._idle:
                return
            # Mark the thread as busy, so that others only join the group.
            self._idle = False
            self._is_due = True
        # Two turns later: connections write this turn's deliveries in the next one.
        loop.call_soon(loop.call_soon, self._sync_here, loop)

    def close(self) -> None:
        self._sync_here(None)
        super().close()

    def _sync_here(self, loop: asyncio.AbstractEventLoop | None) -> None:
        """Sync the pending group. The thread stays asleep if no new members joined meanwhile."""
        with self._lock:
            if not self._is_due:
                return
            self._is_due = False
            if loop is not None and self._time.away:
                self._wake.give()
                return
            group, self._group = self._group, Group()
        try:
            self._serve_here(loop, group)
        finally:
            self._go_on(loop)

    def _go_on(self, loop: asyncio.AbstractEventLoop | None) -> None:
        """Schedule the next group if members joined during the sync; otherwise mark the thread as idle.

        A loop that does not wait for the group may end before it runs what is scheduled, so the thread takes over.
        """
        with self._lock:
            self._idle = not self._group
            if self._idle:
                return
            if loop not in self._group.callbacks or self._time.away:
                self._wake.give()
                return
            self._is_due = True
        assert loop is not None
        loop.call_soon(self._sync_here, loop)

    def _hand_over(self) -> bool:
        group = self._group
        if self._time.away or self._closing or len(group.callbacks) != 1:
            return False
        (loop,) = group.callbacks
        try:
            loop.call_soon_threadsafe(self._sync_here, loop)
        except RuntimeError:
            # The loop is closed. The thread syncs the group without a notification.
            return False
        self._is_due = True
        return True

    def _notify_here(self, loop: asyncio.AbstractEventLoop, callbacks: list[Synced], error: BasaltError | None) -> None:
        loop.call_soon(call_all, callbacks, error)
