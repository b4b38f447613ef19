"""High watermarks: the offset below which readers of a shard see records.

    shard   ... 41 42 | 43 44 45 | 46 | 47 48
                       └ synced,   └ written
                         waiting
                      ^ high watermark            ^ next offset

A write with durability `synced` hides itself and all later writes until a sync that began after it has returned. So
readers never see a record that a power loss could revoke. Writes of lower levels are visible at once, unless an
unsynced `synced` write precedes them.

Syncs are numbered. A completed write gets the number of the next sync to begin, which makes it durable. So all writes
of a shard that one sync covers need only one entry. The watermarks advance before the waiters are notified, so a writer
can read its own confirmed write.
"""

from __future__ import annotations

import asyncio
import threading
from collections import deque
from collections.abc import Callable
from typing import Final

from basaltmq.durability import Durability
from basaltmq.store.sync.group_commit import GroupCommit, Syncable

UNSYNCED_APPENDS_MAX: Final = 10_000
"""Maximum appends that may be pending without a waiter. The next append waits for a sync."""

_SYNCED: Final = Durability.SYNCED


class ShardOffsets:
    """The offsets of one shard. Guarded by the shard's lock."""

    __slots__ = ("__weakref__", "high_watermark", "lock", "next_offset", "unsynced")

    def __init__(self, next_offset: int) -> None:
        self.lock = threading.RLock()
        self.next_offset = next_offset
        self.high_watermark = next_offset
        self.unsynced: deque[tuple[int, int]] | None = None
        """(sync number, first offset it covers) of pending writes. None until the first: most shards are idle."""

    def settle(self) -> None:
        self.high_watermark = self.unsynced[0][1] if self.unsynced else self.next_offset


class Watermarks:
    """Numbers the syncs of one store or lane and advances the high watermarks of its shards.

    `fast_sync` replaces the store's `sync` with a faster one. `group` makes the group commit that calls it.
    """

    def __init__(
        self,
        store: Syncable,
        fast_sync: Callable[[], None] | None = None,
        group: Callable[[Syncable], GroupCommit] = GroupCommit,
    ) -> None:
        self._store = store
        self._fast_sync = store.sync if fast_sync is None else fast_sync
        self._lock = threading.Lock()
        self._next = 1
        """Number of the next sync to begin."""
        self._synced = 0
        """Number of the last sync that returned."""
        self._unsynced = 0
        """Appends that the next sync will cover."""
        self._waiting: deque[tuple[int, ShardOffsets]] = deque()
        self.group = group(self)

    def written(self, shard: ShardOffsets, base_offset: int, durability: Durability) -> int:
        """Record a completed write at `base_offset` and return the number of the sync that covers it.

        The caller holds the shard's lock and has advanced `next_offset`.
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
        """Whether a write waits for a sync."""
        return bool(self._waiting)

    def throttle(self) -> None:
        """Wait for a sync if too many appends are pending. Do not call it under a shard's lock."""
        if self._unsynced > UNSYNCED_APPENDS_MAX:
            self.group.wait_durable()

    def wait(self, sequence: int) -> None:
        if sequence > self._synced:
            self.group.wait_durable()

    def wait_all(self) -> None:
        """Return when all writes to the store so far are durable."""
        self.group.wait_durable()

    def confirmed(self, sequence: int) -> asyncio.Future[None]:
        if sequence > self._synced:
            return self.group.durable()
        return done()

    def sync(self) -> None:
        """Sync the store once. Called by the group's thread."""
        with self._lock:
            covered = self._next
            self._next = covered + 1
            self._unsynced = 0
        self._fast_sync()
        moved: list[ShardOffsets] = []
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
        """Sync pending writes, then stop. The store stays open."""
        self.group.close()


def done() -> asyncio.Future[None]:
    """Return a completed future of the running loop."""
    future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
    future.set_result(None)
    return future
