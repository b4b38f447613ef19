"""Registry of fetches that wait for new records, by shard.

Every append in the broker reports here once its records are readable: produce requests and AMQP stream queues. A fetch
that found too few bytes registers with its shards. It is woken when the missing bytes have arrived, so nothing polls.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable


class Wait:
    """A callback that waits until a number of bytes arrives in any of its shards."""

    __slots__ = ("missing_bytes", "shards", "wake")

    def __init__(self, shards: Iterable[int], missing_bytes: int, wake: Callable[[], None]) -> None:
        self.shards = tuple(shards)
        self.missing_bytes = missing_bytes
        self.wake = wake


class Arrivals:
    """The waiting fetches of one virtual host."""

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

    def notify_appended(self, shard: int, size_bytes: int) -> None:
        """Record that `size_bytes` became readable in a shard, and wake the waits that are now satisfied."""
        waiting = self._by_shard.get(shard)
        if waiting:
            for wait in tuple(waiting):
                wait.missing_bytes -= size_bytes
                if wait.missing_bytes <= 0:
                    self.remove(wait)
                    wait.wake()

    def __len__(self) -> int:
        return len({wait for waiting in self._by_shard.values() for wait in waiting})
