"""The next answer to a consumer, made ready while it looks at the last one.

A consumer that goes through a partition asks for 1 MB, looks at it for milliseconds, and asks for what follows. Reading
and checking that takes 0.2 ms in which it would wait. So when an answer was full and is sent, what follows is taken
from the log (`streams.segment_kafka.take_ahead`) and kept for the connection's next fetch, whether that uses it or not.

It costs nothing that would not be done anyway, unless the consumer goes elsewhere: then one read was for nothing. What
is kept is bounded for each connection and for all; the oldest goes first, and anything that nobody asked for within
KEPT_S. One partition is read per turn of the loop, so that others are not held up.
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
"""Kept for one connection: four partitions at the limit of 1 MiB that clients ask for unless told otherwise."""

BYTES_MAX: Final = 64 << 20
"""Kept for all: sixteen consumers in a hurry. More of them share the processor, and wait for that."""

KEPT_S: Final = 2.0
"""A consumer that needs longer for what it has does not wait for us."""


class Reader(Protocol):
    """A connection."""

    def unsent_bytes(self) -> int | None:
        """Of its answers; None when it is gone."""
        ...


class Next(NamedTuple):
    """Where a partition goes on."""

    engine: SegmentEngine
    shard: int
    offset: int
    bytes_max: int


class _Slot:
    """What one connection will ask for."""

    __slots__ = ("found", "size_bytes", "wanted")

    def __init__(self, wanted: Iterable[Next]) -> None:
        self.wanted = deque(wanted)
        self.found: dict[tuple[int, int], Ahead] = {}
        self.size_bytes = 0


class ReadAhead:
    """What is ready for the connections of one virtual host."""

    def __init__(self) -> None:
        self._slots: OrderedDict[Reader, _Slot] = OrderedDict()
        self._timer: asyncio.TimerHandle | None = None
        self._marked: set[_Slot] = set()
        """Those that were there when the time was last looked at."""
        self.size_bytes = 0

    def take(self, reader: Reader) -> Mapping[tuple[int, int], Ahead]:
        """By shard and offset; it is not kept any longer."""
        slot = self._slots.pop(reader, None)
        if slot is None:
            return {}
        self._let_go(slot)
        return slot.found

    def prepare(self, reader: Reader, wanted: list[Next]) -> None:
        """Read these when the answer that ends before them is sent."""
        self.take(reader)
        loop = asyncio.get_running_loop()
        slot = self._slots[reader] = _Slot(wanted)
        if self._timer is None:
            self._timer = loop.call_later(KEPT_S, self._age)
        # A transport sends what it was given after the callbacks of this turn, so this is for the turn after.
        loop.call_soon(loop.call_soon, self._read, reader, slot)

    def close(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        for reader in list(self._slots):
            self.take(reader)

    def _read(self, reader: Reader, slot: _Slot) -> None:
        """Read one of those wanted."""
        if self._slots.get(reader) is not slot or not slot.wanted:
            return
        if reader.unsent_bytes() is None:
            self.take(reader)
            return
        each = slot.wanted.popleft()
        if slot.size_bytes + each.bytes_max <= CLIENT_BYTES_MAX:
            # What goes wrong is said when it is asked for.
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

    def _let_go(self, slot: _Slot) -> None:
        self.size_bytes -= slot.size_bytes
        self._marked.discard(slot)
        slot.wanted.clear()

    def _age(self) -> None:
        """Let go of what has been there for KEPT_S, and for less than twice of it."""
        self._timer = None
        for reader in [reader for reader, slot in self._slots.items() if slot in self._marked]:
            self.take(reader)
        self._marked = set(self._slots.values())
        if self._slots:
            self._timer = asyncio.get_running_loop().call_later(KEPT_S, self._age)
