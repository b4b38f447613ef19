"""Messages that are nothing but their payloads: columns of keys, rows and sizes, entries only when asked for.

What is published, read ahead, leased and acked by the hundred is looked at one by one by nobody, as a rule: an object
for each, and a pass over them for each thing that is usually not there (a flag, an expiry), would be most of what it
costs. So these columns go from hand to hand (making.py, paging.py, lending.py), and entries are made by whoever wants
some: a heap they return to, a limit, a script, an answer for a part of a lease. To them this is the sequence of entries
it stands for.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import repeat
from typing import overload

from basaltmq.queues.backing import Entry


class Plain(Sequence[Entry]):
    """Entries that have their flags and their expiry in common, in key order. The columns are never changed."""

    __slots__ = ("_entries", "expires_ns", "flags", "ids", "keys", "rows", "size_bytes", "sizes")

    def __init__(
        self, keys: list[bytes], rows: list[bytes], sizes: list[int], flags: int = 0, expires_ns: int = 0
    ) -> None:
        self.keys = keys
        self.rows = rows
        self.flags = flags
        self.expires_ns = expires_ns
        self.size_bytes = sum(sizes)
        """Of all bodies."""
        self.sizes = sizes
        self.ids: list[bytes] | None = None
        """Of all messages, where somebody had them."""
        self._entries: list[Entry] | None = None

    def entries(self) -> list[Entry]:
        """The entries, the same ones whenever they are asked for."""
        if self._entries is None:
            self._entries = list(
                map(Entry, self.keys, self.rows, self.sizes, repeat(self.flags), repeat(self.expires_ns))
            )
        return self._entries

    def without_rows(self) -> Plain:
        """The same messages, their rows on disk only."""
        without = Plain(self.keys, [b""] * len(self.keys), self.sizes, self.flags, self.expires_ns)
        without.ids = self.ids
        return without

    def __len__(self) -> int:
        return len(self.keys)

    @overload
    def __getitem__(self, index: int) -> Entry: ...

    @overload
    def __getitem__(self, index: slice) -> Sequence[Entry]: ...

    def __getitem__(self, index: int | slice) -> Entry | Sequence[Entry]:
        return self.entries()[index]

    def __iter__(self) -> Iterator[Entry]:
        return iter(self.entries())


class Stretch:
    """Persistent messages in key order that wait in memory: added at the end, taken from the front."""

    __slots__ = ("_at", "_keys", "_rows", "_sizes")

    def __init__(self) -> None:
        self._keys: list[bytes] = []
        self._rows: list[bytes] = []
        self._sizes: list[int] = []
        self._at = 0
        """What is before this was taken."""

    def __len__(self) -> int:
        return len(self._keys) - self._at

    def first(self) -> bytes:
        return self._keys[self._at]

    def last(self) -> bytes:
        return self._keys[-1]

    def add(self, plain: Plain) -> None:
        self._keys += plain.keys
        self._rows += plain.rows
        self._sizes += plain.sizes

    def take(self, count: int) -> Plain:
        """The first `count`, or all there are."""
        at = self._at
        end = min(at + count, len(self._keys))
        taken = Plain(self._keys[at:end], self._rows[at:end], self._sizes[at:end])
        self._at = end
        if 2 * end >= len(self._keys):
            # So that what was taken costs a move of what is left, never more, and does not stay in memory.
            del self._keys[:end], self._rows[:end], self._sizes[:end]
            self._at = 0
        return taken
