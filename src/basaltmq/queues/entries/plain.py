"""Messages in columns: `Plain` (keys, rows, sizes) instead of one `Entry` object per message.

Hundreds of messages are published, read ahead, leased and acked together, and usually nothing looks at a single one. An
object per message, and a loop per rarely used feature (a flag, an expiry), would be most of the cost. So columns pass
through entry_builder.py, paging_queue.py and granting.py. Code that needs single messages (a heap of returned messages,
limits, scripts, an ack for part of a lease) uses `Plain` as a sequence of entries.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import repeat
from typing import Final, overload

from basaltmq.queues.entries.backing import Entry

SMALL: Final = 64
"""Shorter columns are merged while they wait: an object per one-message call would cost more than the message."""

LARGE: Final = 1024
"""Longer columns are split while they wait."""


class Plain(Sequence[Entry]):
    """Entries with common flags and expiry, in key order. The columns never change."""

    __slots__ = (
        "_entries",
        "_id_bytes",
        "_overhead",
        "_sizes",
        "expires_ns",
        "flags",
        "has_stayed",
        "ids",
        "keys",
        "row_bytes",
        "rows",
        "size_bytes",
    )

    def __init__(
        self,
        keys: list[bytes],
        rows: list[bytes],
        sizes: list[int],
        flags: int = 0,
        expires_ns: int = 0,
        *,
        overhead: int = 0,
        row_bytes: int | None = None,
    ) -> None:
        """`sizes` are the sizes of the bodies, plus `overhead` bytes each. `row_bytes` is the total of all rows, if
        known.

        An empty list of rows means that they are only on disk.
        """
        self.keys = keys
        self.rows = rows
        self.flags = flags
        self.expires_ns = expires_ns
        self._sizes = sizes
        self._overhead = overhead
        self.size_bytes = sum(sizes) - overhead * len(sizes)
        """Total size of the bodies."""
        self.row_bytes = sum(map(len, rows)) if row_bytes is None else row_bytes
        self.ids: list[bytes] | None = None
        """Ids of all messages, if already computed."""
        self.has_stayed = False
        """Whether the messages have been in memory since they were published."""
        self._id_bytes = b""
        self._entries: list[Entry] | None = None

    def id_bytes(self) -> bytes:
        """Return all ids concatenated, as lease rows and events store them."""
        if not self._id_bytes:
            if self.ids is None:
                self.ids = [key[-16:] for key in self.keys]
            self._id_bytes = b"".join(self.ids)
        return self._id_bytes

    @property
    def sizes(self) -> list[int]:
        """Size of each body."""
        if self._overhead:
            overhead = self._overhead
            self._sizes = [size - overhead for size in self._sizes]
            self._overhead = 0
        return self._sizes

    def entries(self) -> list[Entry]:
        """Return the entries. Repeated calls return the same objects."""
        if self._entries is None:
            rows = self.rows or repeat(b"")
            self._entries = list(map(Entry, self.keys, rows, self.sizes, repeat(self.flags), repeat(self.expires_ns)))
        return self._entries

    def without_rows(self) -> Plain:
        """Return the same messages without rows in memory."""
        without = Plain(self.keys, [], self._sizes, self.flags, self.expires_ns, overhead=self._overhead, row_bytes=0)
        without.ids, without._id_bytes = self.ids, self._id_bytes
        without.has_stayed = self.has_stayed
        return without

    def part(self, begin: int, end: int) -> Plain:
        """Return the messages from index `begin` to `end`."""
        part = Plain(
            self.keys[begin:end],
            self.rows[begin:end],
            self._sizes[begin:end],
            self.flags,
            self.expires_ns,
            overhead=self._overhead,
        )
        if self.ids is not None:
            part.ids = self.ids[begin:end]
        part.has_stayed = self.has_stayed
        return part

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


class ColumnQueue:
    """FIFO of persistent messages in key order, in memory: added at the end, taken from the front.

    A call's columns that are taken as a whole are returned unchanged. Otherwise columns are split and merged.
    """

    __slots__ = ("_at", "_count", "_pieces", "_tail")

    def __init__(self) -> None:
        self._pieces: list[Plain] = []
        self._at = 0
        """Messages taken from the first piece."""
        self._count = 0
        self._tail: Plain | None = None
        """The last piece, if it is one that merges small columns. Only this object uses its columns."""

    def __len__(self) -> int:
        return self._count

    def first(self) -> bytes:
        return self._pieces[0].keys[self._at]

    def last(self) -> bytes:
        return self._pieces[-1].keys[-1]

    def add(self, plain: Plain) -> None:
        """Add columns. They are not empty, and their keys are greater than all present ones."""
        count = len(plain.keys)
        self._count += count
        if count >= SMALL:
            # Split large columns: a piece stays in memory until all of it is taken.
            cuts = range(0, count, LARGE)
            self._pieces += [plain] if count <= LARGE else [plain.part(at, at + LARGE) for at in cuts]
            self._tail = None
            return
        tail = self._tail
        if tail is None or len(tail.keys) >= SMALL:
            tail = self._tail = Plain([], [], [])
            tail.ids = []
            self._pieces.append(tail)
        tail.keys += plain.keys
        tail.rows += plain.rows
        tail.sizes.extend(plain.sizes)
        tail.size_bytes += plain.size_bytes
        tail.row_bytes += plain.row_bytes
        if plain.ids is None:
            tail.ids = None
        elif tail.ids is not None:
            tail.ids += plain.ids

    def take(self, count: int) -> Plain:
        """Take the first `count` messages, or all. Both must be at least one."""
        parts: list[Plain] = []
        wanted = min(count, self._count)
        while wanted:
            piece = self._pieces[0]
            left = len(piece.keys) - self._at
            if left > wanted:
                parts.append(piece.part(self._at, self._at + wanted))
                self._at += wanted
                self._count -= wanted
                break
            parts.append(piece.part(self._at, len(piece.keys)) if self._at else piece)
            del self._pieces[0]
            if piece is self._tail:
                self._tail = None
            self._at = 0
            self._count -= left
            wanted -= left
        return parts[0] if len(parts) == 1 else _joined(parts)


def _joined(parts: list[Plain]) -> Plain:
    whole = Plain(
        [key for part in parts for key in part.keys],
        [row for part in parts for row in part.rows],
        [size for part in parts for size in part.sizes],
        row_bytes=sum(part.row_bytes for part in parts),
    )
    ids = [part.ids for part in parts if part.ids is not None]
    if len(ids) == len(parts):
        whole.ids = [message_id for each in ids for message_id in each]
    whole.has_stayed = all(part.has_stayed for part in parts)
    return whole
