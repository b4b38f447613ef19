"""Messages of one call that are nothing but small payloads: columns of keys and rows, entries only when asked for.

What is published behind the window of a long queue goes to disk and is read when it is its turn; nobody looks at its
entries before. So they are made by whoever does: the window they are appended to, a limit, a script. To everyone else
this is the sequence of entries it stands for.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import repeat
from typing import overload

from basaltmq.queues.backing import Entry


class Plain(Sequence[Entry]):
    """Entries of one call that have their flags and their expiry in common."""

    __slots__ = ("_entries", "_sizes", "expires_ns", "flags", "keys", "rows", "size_bytes")

    def __init__(self, keys: list[bytes], rows: list[bytes], sizes: list[int], flags: int, expires_ns: int) -> None:
        self.keys = keys
        self.rows = rows
        self.flags = flags
        self.expires_ns = expires_ns
        self.size_bytes = sum(sizes)
        """Of all bodies."""
        self._sizes = sizes
        self._entries: list[Entry] | None = None

    def entries(self) -> list[Entry]:
        """The entries, the same ones whenever they are asked for."""
        if self._entries is None:
            self._entries = list(
                map(Entry, self.keys, self.rows, self._sizes, repeat(self.flags), repeat(self.expires_ns))
            )
        return self._entries

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
