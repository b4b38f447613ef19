"""Who waits for records in which shard.

Everything that appends in a broker says so here once its records can be read: produce requests themselves, and stream
queues of AMQP. A fetch that found too little registers with the shards it asked for, and is woken when as much as it
lacks has come; nobody polls.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable


class Wait:
    """One that waits in some shards for so many bytes."""

    __slots__ = ("lacking_bytes", "shards", "wake")

    def __init__(self, shards: Iterable[int], lacking_bytes: int, wake: Callable[[], None]) -> None:
        self.shards = tuple(shards)
        self.lacking_bytes = lacking_bytes
        self.wake = wake


class Arrivals:
    """The waits of one virtual host."""

    def __init__(self) -> None:
        self._by_shard: dict[int, set[Wait]] = {}

    def add(self, wait: Wait) -> None:
        for shard in wait.shards:
            self._by_shard.setdefault(shard, set()).add(wait)

    def remove(self, wait: Wait) -> None:
        for shard in wait.shards:
            waiting = self._by_shard.get(shard)
            if waiting is not None:
                waiting.discard(wait)
                if not waiting:
                    del self._by_shard[shard]

    def came(self, shard: int, size_bytes: int) -> None:
        """So much more can be read in a shard."""
        waiting = self._by_shard.get(shard)
        if waiting:
            for wait in tuple(waiting):
                wait.lacking_bytes -= size_bytes
                if wait.lacking_bytes <= 0:
                    self.remove(wait)
                    wait.wake()

    def __len__(self) -> int:
        return len({wait for waiting in self._by_shard.values() for wait in waiting})
