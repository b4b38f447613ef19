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
from typing import Final, overload

from basaltmq.queues.ready.backing import Entry

SMALL: Final = 64
"""Columns shorter than this are put together while they wait: an object for each call of one message would cost more
than the message."""

LARGE: Final = 1024
"""Longer columns are cut while they wait."""


class Plain(Sequence[Entry]):
    """Entries that have their flags and their expiry in common, in key order. The columns are never changed."""

    __slots__ = (
        "_entries",
        "_id_bytes",
        "_less",
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
        less: int = 0,
        row_bytes: int | None = None,
    ) -> None:
        """`sizes` are those of the bodies, each with `less` to be taken off; `row_bytes` of all rows, if it is known.

        Without rows (an empty list) they are on disk only.
        """
        self.keys = keys
        self.rows = rows
        self.flags = flags
        self.expires_ns = expires_ns
        self._sizes = sizes
        self._less = less
        self.size_bytes = sum(sizes) - less * len(sizes)
        """Of all bodies."""
        self.row_bytes = sum(map(len, rows)) if row_bytes is None else row_bytes
        self.ids: list[bytes] | None = None
        """Of all messages, where somebody had them."""
        self.has_stayed = False
        """Whether they have been in memory ever since they were made."""
        self._id_bytes = b""
        self._entries: list[Entry] | None = None

    def id_bytes(self) -> bytes:
        """All ids, one behind the other: what a lease's row and events say of them."""
        if not self._id_bytes:
            if self.ids is None:
                self.ids = [key[-16:] for key in self.keys]
            self._id_bytes = b"".join(self.ids)
        return self._id_bytes

    @property
    def sizes(self) -> list[int]:
        """Of the bodies, one by one."""
        if self._less:
            less = self._less
            self._sizes = [size - less for size in self._sizes]
            self._less = 0
        return self._sizes

    def entries(self) -> list[Entry]:
        """The entries, the same ones whenever they are asked for."""
        if self._entries is None:
            rows = self.rows or repeat(b"")
            self._entries = list(map(Entry, self.keys, rows, self.sizes, repeat(self.flags), repeat(self.expires_ns)))
        return self._entries

    def without_rows(self) -> Plain:
        """The same messages, their rows on disk only."""
        without = Plain(self.keys, [], self._sizes, self.flags, self.expires_ns, less=self._less, row_bytes=0)
        without.ids, without._id_bytes = self.ids, self._id_bytes
        without.has_stayed = self.has_stayed
        return without

    def part(self, begin: int, end: int) -> Plain:
        """Some of them."""
        part = Plain(
            self.keys[begin:end],
            self.rows[begin:end],
            self._sizes[begin:end],
            self.flags,
            self.expires_ns,
            less=self._less,
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


class Stretch:
    """Persistent messages in key order that wait in memory: added at the end, taken from the front.

    What came in one call and is taken in one is handed over as it came; whatever is taken otherwise is cut and put
    together.
    """

    __slots__ = ("_at", "_count", "_pieces", "_tail")

    def __init__(self) -> None:
        self._pieces: list[Plain] = []
        self._at = 0
        """What of the first piece is before this was taken."""
        self._count = 0
        self._tail: Plain | None = None
        """The last piece, if it is one that small ones are put together in: its columns are nobody else's."""

    def __len__(self) -> int:
        return self._count

    def first(self) -> bytes:
        return self._pieces[0].keys[self._at]

    def last(self) -> bytes:
        return self._pieces[-1].keys[-1]

    def add(self, plain: Plain) -> None:
        """Columns that are not empty, with keys above those there are."""
        count = len(plain.keys)
        self._count += count
        if count >= SMALL:
            # What was taken of a piece stays in memory as long as the rest of it does.
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
        """The first `count`, or all there are; at least one of each."""
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
