"""The high watermark: what readers of a shard may see.

    shard   ... 41 42 | 43 44 45 | 46 | 47 48
                       └ synced,   └ written
                         waiting
                      ^ high watermark            ^ next offset

A write that asked for `synced` hides itself, and all after it, until a sync that began after it has returned; so a
reader never sees a record that a power loss could take back. Writes of lower levels are visible at once unless such a
write lies before them.

Syncs are numbered. A write that has returned from the store gets the number of the sync that begins next, which makes
it durable; so the writes of a shard that one sync covers need one entry, however many they are. The watermarks move
before those who wait are told, so that a writer that was told can read what it wrote.
"""

from __future__ import annotations

import asyncio
import threading
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from typing import Final

from basaltmq.durability import Durability
from basaltmq.errors import BasaltError
from basaltmq.store.sync.group_commit import GroupSync, Syncable

UNSYNCED_APPENDS_MAX: Final = 10_000
"""Appends that may wait for a sync nobody asked for; the next one waits itself."""

_SYNCED: Final = Durability.SYNCED


class Visible:
    """The visible part of one shard. Guarded by the shard's lock."""

    __slots__ = ("__weakref__", "high_watermark", "lock", "next_offset", "unsynced")

    def __init__(self, next_offset: int) -> None:
        self.lock = threading.RLock()
        self.next_offset = next_offset
        self.high_watermark = next_offset
        self.unsynced: deque[tuple[int, int]] | None = None
        """(sync, first offset it covers) of writes that wait for one. None until there is one: most shards are idle."""

    def settle(self) -> None:
        self.high_watermark = self.unsynced[0][1] if self.unsynced else self.next_offset


class Watermarks:
    """Numbers the syncs of one store or lane and moves the watermarks of its shards with them.

    `secure` is its sync, if it has a faster one; then `tidy` is what is left to do when those who wait have been told.
    `group` makes what tells them, if it is not a thread.
    """

    def __init__(
        self,
        store: Syncable,
        secure: Callable[[], None] | None = None,
        tidy: Callable[[], None] | None = None,
        group: Callable[[Syncable], GroupSync] | None = None,
    ) -> None:
        self._store = store
        self._secure = store.sync if secure is None else secure
        self._lock = threading.Lock()
        self._next = 1
        """The sync that has not begun."""
        self._synced = 0
        """The last that has returned."""
        self._unsynced = 0
        """Appends that wait for the next one."""
        self._waiting: deque[tuple[int, Visible]] = deque()
        if group is not None:
            self.group = group(self)
        else:
            self.group = GroupSync(self) if tidy is None else _TidyGroup(self, tidy)

    def written(self, shard: Visible, base_offset: int, durability: Durability) -> int:
        """A write at `base_offset` has returned, and `next_offset` was moved; the sync that covers it.

        Under the shard's lock.
        """
        with self._lock:
            sequence = self._next
            if durability is _SYNCED:
                self._unsynced += 1
                unsynced = shard.unsynced
                if unsynced is None:
                    unsynced = shard.unsynced = deque()
                if not unsynced or unsynced[-1][0] != sequence:
                    unsynced.append((sequence, base_offset))
                    self._waiting.append((sequence, shard))
        shard.settle()
        return sequence

    @property
    def is_awaited(self) -> bool:
        """Does a write wait for a sync?"""
        return bool(self._waiting)

    def hold(self) -> None:
        """Wait for a sync if too many writes wait for one. Not under a shard's lock."""
        if self._unsynced > UNSYNCED_APPENDS_MAX:
            self.group.wait_durable()

    def wait(self, sequence: int) -> None:
        if sequence > self._synced:
            self.group.wait_durable()

    def wait_all(self) -> None:
        """Return when everything written to the store so far is durable."""
        self.group.wait_durable()

    def confirmed(self, sequence: int) -> asyncio.Future[None]:
        if sequence > self._synced:
            return self.group.durable()
        return done()

    def sync(self) -> None:
        """One sync of the store, by the group's thread."""
        with self._lock:
            covered = self._next
            self._next = covered + 1
            self._unsynced = 0
        self._secure()
        moved: list[Visible] = []
        with self._lock:
            waiting = self._waiting
            while waiting and waiting[0][0] <= covered:
                moved.append(waiting.popleft()[1])
        for shard in moved:
            with shard.lock:
                unsynced = shard.unsynced
                while unsynced and unsynced[0][0] <= covered:
                    unsynced.popleft()
                shard.settle()
        self._synced = covered

    def poison(self, error: BaseException) -> None:
        self._store.poison(error)

    def close(self) -> None:
        """Sync what waits, then stop. The store stays open."""
        self.group.close()


class _TidyGroup(GroupSync):
    """Has something to do after each sync that nobody waits for."""

    def __init__(self, target: Syncable, tidy: Callable[[], None]) -> None:
        self._tidy = tidy
        super().__init__(target)

    def _tidy_up(self) -> None:
        # A failure has poisoned what was synced, which the next write finds out.
        with suppress(BasaltError):
            self._tidy()


def done() -> asyncio.Future[None]:
    """A future of the running loop that has its answer."""
    future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
    future.set_result(None)
    return future
