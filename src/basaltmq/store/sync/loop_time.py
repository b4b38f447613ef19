"""Decides whether the event loop or the sync thread runs the next sync.

On a disk that syncs in a few hundred microseconds, waking a thread and returning costs as much as the sync, because the
GIL changes hands twice against a busy loop. So the loop syncs itself. After a sync that takes too long, the thread runs
the following ones; their number doubles with each repetition. On a slow disk the loop blocks for 1 in 1,000 syncs.
"""

from __future__ import annotations

from typing import Final

HERE_S_MAX: Final = 0.002
"""Longest sync that the loop accepts, in seconds. It is shorter than a turn with a full batch."""

AWAY_MIN: Final = 8
AWAY_MAX: Final = 1024
"""Number of syncs that the thread runs after a slow one. It doubles with each consecutive slow sync."""


class LoopTime:
    """Tracks the duration and the place of each sync."""

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
