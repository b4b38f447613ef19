"""Group commit that syncs on the requesting event loop while the disk is fast.

On a disk that syncs in a few hundred microseconds, waking a thread and returning costs as much as the sync. The GIL
changes hands twice while the loop is busy. So the loop syncs itself. After a sync that takes too long, the thread runs
the following ones; their number doubles with each repetition. On a slow disk the loop blocks for 1 in 1,000 syncs.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Final

from basaltmq.errors import BasaltError
from basaltmq.store.sync.group_commit import Group, GroupCommit, Syncable, Synced

HERE_S_MAX: Final = 0.002
"""Longest sync that the loop accepts, in seconds. It is shorter than a turn with a full batch."""

AWAY_MIN: Final = 8
AWAY_MAX: Final = 1024
"""Number of syncs that the thread runs after a slow one. It doubles with each consecutive slow sync."""


class LoopTime:
    """Decides by the duration of past syncs whether the loop or the thread runs the next one."""

    __slots__ = ("_away_next", "_here_s_max", "away")

    def __init__(self, here_s_max: float = HERE_S_MAX) -> None:
        self._here_s_max = here_s_max
        self._away_next = AWAY_MIN
        self.away = 0
        """The number of syncs that the thread runs before the loop tries again."""

    def took(self, seconds: float) -> None:
        """Record a sync on the loop."""
        if seconds <= self._here_s_max:
            self._away_next = AWAY_MIN
        else:
            self.away = self._away_next
            self._away_next = min(AWAY_MAX, 2 * self._away_next)

    def was_away(self) -> None:
        """Record a sync in the thread."""
        if self.away:
            self.away -= 1


class LoopSync(GroupCommit):
    """Base of the group commits that an event loop may serve. Subclasses decide when the loop syncs."""

    def __init__(
        self, target: Syncable, finish: Callable[[], None] | None = None, *, here_s_max: float = HERE_S_MAX
    ) -> None:
        self._time = LoopTime(here_s_max)
        self._here: asyncio.AbstractEventLoop | None = None
        """The loop that runs a sync now."""
        super().__init__(target, finish)

    def _serve_here(self, loop: asyncio.AbstractEventLoop | None, group: Group) -> None:
        """Serve a group on the calling thread, which runs `loop`."""
        started = time.monotonic()
        self._here = loop
        try:
            self._serve(group)
        finally:
            self._here = None
            self._time.took(time.monotonic() - started)

    def _serve(self, group: Group) -> None:
        if self._here is None:
            self._time.was_away()
        super()._serve(group)

    def _notify(self, loop: asyncio.AbstractEventLoop, callbacks: list[Synced], error: BasaltError | None) -> None:
        if loop is self._here:
            self._notify_here(loop, callbacks, error)
        else:
            super()._notify(loop, callbacks, error)

    def _notify_here(self, loop: asyncio.AbstractEventLoop, callbacks: list[Synced], error: BasaltError | None) -> None:
        """Call back on the loop that has run the sync."""
        raise NotImplementedError
