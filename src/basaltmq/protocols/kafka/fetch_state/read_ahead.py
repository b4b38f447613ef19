"""Read-ahead: prepares the next fetch response while the consumer processes the last one.

A consumer that scans a partition fetches 1 MB, processes it for milliseconds, and fetches the next 1 MB. Reading and
checking takes 0.2 ms, during which the consumer would wait. So after a full response is sent, the next batches are read
from the log (`take_ahead`) and kept for the connection's next fetch.

The work is wasted only if the consumer continues elsewhere. Memory is bounded per connection and in total; the oldest
entry is evicted first, and entries expire after KEPT_S. Each loop turn reads one partition, so that other connections
are not delayed.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict, deque
from collections.abc import Iterable, Mapping
from contextlib import suppress
from typing import Final, NamedTuple, Protocol

from basaltmq.errors import BasaltError
from basaltmq.streams.engines.segment.engine import SegmentEngine
from basaltmq.streams.engines.segment.kafka import Ahead, take_ahead

CLIENT_BYTES_MAX: Final = 4 << 20
"""Limit per connection: four partitions at 1 MiB, the clients' default limit per partition."""

BYTES_MAX: Final = 64 << 20
"""Limit for all connections: sixteen busy consumers. With more, CPU time is the bottleneck, not reading."""

KEPT_S: Final = 2.0
"""Lifetime of an entry in seconds. A consumer that needs longer gains nothing from read-ahead."""


class Reader(Protocol):
    """A connection that fetches."""

    def unsent_bytes(self) -> int | None:
        """Return the bytes of responses not yet sent; None after the connection closed."""
        ...


class Next(NamedTuple):
    """The next position in a partition."""

    engine: SegmentEngine
    shard: int
    offset: int
    bytes_max: int


class _Slot:
    """Entry of one connection: positions to read, and batches already read."""

    __slots__ = ("found", "size_bytes", "wanted")

    def __init__(self, wanted: Iterable[Next]) -> None:
        self.wanted = deque(wanted)
        self.found: dict[tuple[int, int], Ahead] = {}
        self.size_bytes = 0


class ReadAhead:
    """The entries of all connections of one virtual host."""

    def __init__(self) -> None:
        self._slots: OrderedDict[Reader, _Slot] = OrderedDict()
        self._timer: asyncio.TimerHandle | None = None
        self._aged: set[_Slot] = set()
        """Slots that existed when the timer last fired."""
        self.size_bytes = 0

    def take(self, reader: Reader) -> Mapping[tuple[int, int], Ahead]:
        """Remove the connection's entry and return its batches by shard and offset."""
        slot = self._slots.pop(reader, None)
        if slot is None:
            return {}
        self._release(slot)
        return slot.found

    def prepare(self, reader: Reader, wanted: list[Next]) -> None:
        """Schedule reads at these positions for after the current response is sent."""
        self.take(reader)
        loop = asyncio.get_running_loop()
        slot = self._slots[reader] = _Slot(wanted)
        if self._timer is None:
            self._timer = loop.call_later(KEPT_S, self._expire)
        # The transport writes after the callbacks of this turn, so read one turn later.
        loop.call_soon(loop.call_soon, self._read, reader, slot)

    def close(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        for reader in list(self._slots):
            self.take(reader)

    def _read(self, reader: Reader, slot: _Slot) -> None:
        """Read the next position of an entry."""
        if self._slots.get(reader) is not slot or not slot.wanted:
            return
        if reader.unsent_bytes() is None:
            self.take(reader)
            return
        each = slot.wanted.popleft()
        if slot.size_bytes + each.bytes_max <= CLIENT_BYTES_MAX:
            # The fetch itself reports read errors.
            with suppress(BasaltError):
                ahead = take_ahead(each.engine, each.shard, each.offset, each.bytes_max)
                if ahead is not None:
                    slot.found[each.shard, each.offset] = ahead
                    slot.size_bytes += ahead.taken.size_bytes
                    self.size_bytes += ahead.taken.size_bytes
        while self.size_bytes > BYTES_MAX:
            self.take(next(iter(self._slots)))
        if slot.wanted:
            asyncio.get_running_loop().call_soon(self._read, reader, slot)

    def _release(self, slot: _Slot) -> None:
        self.size_bytes -= slot.size_bytes
        self._aged.discard(slot)
        slot.wanted.clear()

    def _expire(self) -> None:
        """Evict entries that are between KEPT_S and twice KEPT_S old."""
        self._timer = None
        for reader in [reader for reader, slot in self._slots.items() if slot in self._aged]:
            self.take(reader)
        self._aged = set(self._slots.values())
        if self._slots:
            self._timer = asyncio.get_running_loop().call_later(KEPT_S, self._expire)
