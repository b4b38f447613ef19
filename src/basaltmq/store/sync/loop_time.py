"""Whether a loop can spare the time to sync by itself.

On a disk that syncs in a few hundred microseconds, waking a thread and hearing from it costs as much as the sync: each
time the interpreter's lock changes hands twice, against a loop that is busy. So the loop syncs by itself. A sync that
takes longer than the loop can spare sends the following ones to the thread, more of them each time it happens again: on
a slow disk the loop stands still for one sync in a thousand.
"""

from __future__ import annotations

from typing import Final

HERE_S_MAX: Final = 0.002
"""What the loop can spare: below what a turn with a full batch takes."""

AWAY_MIN: Final = 8
AWAY_MAX: Final = 1024
"""Syncs left to the thread after a slow one, doubled with each that follows."""


class LoopTime:
    """Told how long each sync took, and who did it."""

    __slots__ = ("_away_next", "_here_s_max", "away")

    def __init__(self, here_s_max: float = HERE_S_MAX) -> None:
        self._here_s_max = here_s_max
        self._away_next = AWAY_MIN
        self.away = 0
        """Syncs the thread does before the loop tries again."""

    def took(self, seconds: float) -> None:
        """The loop has synced."""
        if seconds <= self._here_s_max:
            self._away_next = AWAY_MIN
        else:
            self.away = self._away_next
            self._away_next = min(AWAY_MAX, 2 * self._away_next)

    def was_away(self) -> None:
        """The thread has."""
        if self.away:
            self.away -= 1
