"""The messages of a sub-queue that are in memory, and reading of all of them: in order or by key, without fetching.

`PagingQueue` decides what is in memory. backing.py explains the design.

    returned (heap)   returned messages, by key
    window (list)     the head, in key order: all ready messages up to the cursor
    columns           the same as `Plain` columns, while no entries are needed; either this or the window is empty
    cursor            first key that is only on disk; None while the window reaches the end of the queue
    deleted           keys deleted while in the window or the heap; skipped when they reach the front
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Sequence
from typing import Final

import msgspec

from basaltmq.queues.entries.backing import RETURNED, TRANSIENT, Entry, Leased
from basaltmq.queues.entries.plain import ColumnQueue
from basaltmq.queues.entries.quarantine import Suspects
from basaltmq.queues.ready import on_disk
from basaltmq.queues.ready.base import BackingQueueBase
from basaltmq.queues.ready.budget import MemoryBudget, PagingLimits
from basaltmq.store.api import Store
from basaltmq.store.families import Family
from basaltmq.store.ranges import Row

NONE_DELETED: Final[frozenset[bytes]] = frozenset()


class MessageWindow(BackingQueueBase):
    """The messages of one sub-queue, as far as they are in memory."""

    __slots__ = (
        "_bytes",
        "_columns",
        "_deleted",
        "_has_spilled",
        "_leased",
        "_limits",
        "_prefix",
        "_returned",
        "_store",
        "_suspects",
        "_window",
        "budget",
        "cursor",
    )

    def __init__(
        self,
        store: Store,
        prefix: bytes,
        budget: MemoryBudget,
        limits: PagingLimits,
        leased: Leased,
        suspects: Suspects,
        *,
        known_empty: bool = False,
        head: bytes | None = None,
        spilled: bool = False,
    ) -> None:
        """`head`: a key at or below the first message, where reading starts. `spilled`: transient messages are on
        disk."""
        self._suspects = suspects
        self._store = store
        self._prefix = prefix
        self.budget = budget
        self._limits = limits
        self._leased = leased
        self._window: list[Entry] = []
        self._columns: ColumnQueue | None = None
        self._returned: list[tuple[bytes, Entry]] = []
        self._deleted: set[bytes] | frozenset[bytes] = NONE_DELETED
        self.cursor: bytes | None = None if known_empty else head or prefix
        """The first key that is only on disk; None if memory has all messages."""
        self._bytes = 0
        self._has_spilled = spilled

    def floor(self) -> bytes | None:
        at = len(self._prefix)
        firsts = [entry.key for entry in self._window[:1]] + [key for key, _ in self._returned[:1]]
        if self._columns is not None:
            firsts.append(self._columns.first())
        if self.cursor is not None:
            firsts.append(self.cursor)
        return min((key[at : at + 8] for key in firsts), default=None)

    def forget_returned(self) -> None:
        # Returned messages are never in the columns.
        for entry in [*self._window, *[entry for _, entry in self._returned]]:
            if entry.flags & RETURNED:
                self._leased.paged_out(entry)

    def resident_len(self) -> int:
        return self._count_in_memory() - len(self._deleted)

    def resident_bytes(self) -> int:
        return self._bytes

    def pending(self, count_max: int) -> int:
        """Return the number of waiting messages. Those on disk are counted until `count_max` is reached."""
        here = {e.key for e in self._in_memory()} - self._deleted
        count = len(here)
        if self.cursor is not None:
            for key, _ in self._rows(self.cursor):
                if count >= count_max:
                    break
                if key not in here and key not in self._deleted and not self._leased.has_key(key):
                    count += 1
        return count

    def is_duplicate(self, key: bytes) -> bool:
        if key in self._deleted or self._leased.has_key(key):
            return False
        if any(e.key == key for e in self._in_memory() if e.flags & TRANSIENT):
            return True
        return any(self._store.get(family, key) is not None for family in (Family.MESSAGES, Family.TRANSIENT))

    def browse(self, after: bytes, count: int) -> list[Entry]:
        self._make_entries()
        window, at = self._window, bisect_right(self._window, after, key=_key_of)
        found: list[Entry] = []
        while at < len(window) and len(found) < count:
            found += [e for e in window[at : at + count] if e.key not in self._deleted]
            at += count
        found += [e for key, e in self._returned if key > after and key not in self._deleted]
        found.sort(key=_key_of)
        cursor = self.cursor
        if cursor is not None and sum([e.key < cursor for e in found[:count]]) < count:
            found += self._browse_disk(max(cursor, after + b"\0"), count, {e.key for e in found})
            found.sort(key=_key_of)
        return [e for e in map(_own_row, found[:count]) if self._load_row(e)]

    def _browse_disk(self, start: bytes, count: int, here: set[bytes]) -> list[Entry]:
        found: list[Entry] = []
        more = True
        while more and len(found) < count:
            room, bytes_max = count - len(found), self._limits.read_ahead_bytes
            spilled = self._has_spilled
            pieces, more = on_disk.pieces(self._store, self._prefix, start, room, bytes_max, room, spilled=spilled)
            for piece in pieces:
                read = on_disk.read(self._store, self._prefix, piece, self._leased, self._suspects, spilled=spilled)
                found += [e for e in read if e.key not in here]
                # The last piece of a queue with spilled messages may be empty.
                start = piece.keys[-1] + b"\0" if piece.keys else start
        return found

    def pick(self, keys: Sequence[bytes], *, leave: bool) -> list[Entry]:
        """Return the messages with these keys that wait here. Without `leave`, take them out."""
        self._make_entries()
        window, returned = self._window, dict(self._returned)
        found: list[Entry] = []
        for key in keys:
            at = bisect_left(window, key, key=_key_of)
            is_in_window = at < len(window) and window[at].key == key
            if key in self._deleted:
                continue
            if is_in_window or key in returned:
                entry = window[at] if is_in_window else returned[key]
                if not leave:
                    self._charge(-entry.cost_bytes())
                    if is_in_window:
                        del window[at]
                    else:
                        del returned[key]
                else:
                    entry = _own_row(entry)
            elif self.cursor is not None and key >= self.cursor and not self._leased.has_key(key):
                row = self._store.get(Family.MESSAGES, key) or self._store.get(Family.TRANSIENT, key)
                read = [] if row is None else self._entries([(key, row)])
                if not read:
                    continue
                entry = read[0]
            else:
                continue
            if self._load_row(entry):
                found.append(entry)
        if not leave and len(returned) < len(self._returned):
            self._returned = sorted(returned.items())
        return found

    def _make_entries(self) -> None:
        """Convert the columns in memory to entries."""
        if self._columns is not None:
            self._window = self._columns.take(len(self._columns)).entries()
            self._columns = None

    def _count_in_memory(self) -> int:
        """Messages in memory, including deleted ones."""
        return len(self._window) + len(self._returned) + (0 if self._columns is None else len(self._columns))

    def _in_memory(self) -> Iterator[Entry]:
        self._make_entries()
        yield from self._window
        for _, entry in self._returned:
            yield entry

    def _charge(self, size_bytes: int) -> None:
        self._bytes += size_bytes
        self.budget.charge(size_bytes)

    def _rows(self, start: bytes) -> Iterator[Row]:
        return on_disk.scan(self._store, self._prefix, start, spilled=self._has_spilled)

    def _entries(self, rows: list[Row]) -> list[Entry]:
        return on_disk.entries(self._store, rows, self._suspects, spilled=self._has_spilled)

    def _load_row(self, entry: Entry) -> bool:
        """Load the row of a message that was returned without it. Return False if it is unreadable."""
        if not entry.row:
            entry.row = on_disk.row_of(self._store, entry, self._suspects) or b""
        return bool(entry.row)


def _key_of(entry: Entry) -> bytes:
    return entry.key


def _own_row(entry: Entry) -> Entry:
    """Return an entry that may load its row: a copy, if the queue keeps this one without."""
    return entry if entry.row else msgspec.structs.replace(entry)
