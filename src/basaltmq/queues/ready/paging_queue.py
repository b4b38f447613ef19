"""The main backing queue: a window of the head in memory, the rest on disk. backing.py explains the design.

Read-ahead reads up to `read_ahead` rows in one scan from the cursor. Publishing appends to memory while memory reaches
the end of the queue and has room. A queue may have 100,000 fairness keys with one object of this class each, so an
empty one must be small: a list is, a deque is not.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from heapq import heapify, heappop, heappush
from typing import Final

from basaltmq.queues.change import Change
from basaltmq.queues.entries.backing import (
    ENTRY_OVERHEAD_BYTES,
    RETURNED,
    SPILLED,
    TRANSIENT,
    Entry,
    Info,
)
from basaltmq.queues.entries.plain import ColumnQueue, Plain
from basaltmq.queues.ready import on_disk
from basaltmq.queues.ready.message_window import NONE_DELETED, MessageWindow
from basaltmq.queues.ready.row_changes import delete_rows, put_rows
from basaltmq.store.ranges import Range

RESIDENT_BYTES_MIN: Final = 16 * 1024
"""What a queue may keep when the total budget is exceeded, so that no queue reads row by row."""


class PagingQueue(MessageWindow):
    """The messages of one sub-queue, in key order."""

    __slots__ = ()

    def publish(self, change: Change, entries: Sequence[Entry], sub: str | None = None) -> None:
        put_rows(change, entries)
        change.after(lambda: self.append(entries))

    def fetch(self, count: int) -> list[Entry]:
        taken: list[Entry] = []
        while len(taken) < count:
            if self._returned or self._deleted:
                entry = self._pop()
                if entry is not None:
                    taken.append(entry)
                    continue
            elif self._window:
                taken += self._take(count - len(taken))
                continue
            elif self._columns is not None:
                taken += self._take_columns(self._columns, count - len(taken)).entries()
                continue
            if not self._read_ahead(count - len(taken)):
                break
        return taken

    def fetch_plain(self, count: int) -> Plain | None:
        """Like `fetch`, as columns. Return None and take nothing if memory has entries or returned messages."""
        while True:
            if self._returned or self._deleted or self._window:
                return None
            columns = self._columns
            if columns is not None and (self.cursor is None or len(columns) >= count):
                return self._take_columns(columns, count)
            if columns is None:
                if not self._read_ahead(count, whole_calls=True):
                    return None
            else:
                # Read only what this call lacks, so that the next read starts at a call boundary.
                self._read_missing(count - len(columns))

    def _read_missing(self, wanted: int) -> None:
        """Read the messages that a call lacks."""
        assert self.cursor is not None, "the caller checked that there is more on disk"
        self._read_from(self.cursor, wanted, self._limits.read_ahead_bytes, wanted)

    def _take_columns(self, columns: ColumnQueue, count: int) -> Plain:
        taken = columns.take(count)
        if not len(columns):
            self._columns = None
        self._charge(-taken.row_bytes - ENTRY_OVERHEAD_BYTES * len(taken.keys))
        return taken

    def _take(self, count: int) -> list[Entry]:
        """Take up to `count` from the window. Nothing else is in memory."""
        window = self._window
        taken = window[:count]
        del window[:count]
        self._charge(-sum([len(e.row) for e in taken]) - ENTRY_OVERHEAD_BYTES * len(taken))
        return taken

    def _pop(self) -> Entry | None:
        """Take the first message in memory, if nothing on disk comes before it."""
        self._make_entries()
        while self._returned or self._window:
            returned, window, cursor = self._returned, self._window, self.cursor
            if returned and (not window or returned[0][0] < window[0].key):
                if cursor is not None and returned[0][0] >= cursor:
                    return None
                entry = heappop(returned)[1]
            else:
                entry = window.pop(0)
            self._charge(-entry.cost_bytes())
            if entry.key in self._deleted:
                self._deleted -= {entry.key}
                continue
            if self._load_row(entry):
                return entry
        return None

    def put_back(self, entries: Sequence[Entry]) -> None:
        self._insert(entries)
        self._enforce_limits()

    def append(self, entries: Sequence[Entry]) -> None:
        """Add published messages, usually after the last one. Keys of one call ascend."""
        if self._is_backlog(entries):
            # They are on disk and are read later.
            return
        if self.cursor is None and isinstance(entries, Plain):
            if self._is_full(entries):
                self.cursor = entries.keys[0]
                return
            if self._append_columns(entries):
                self._enforce_limits()
                return
        self._make_entries()
        window = self._window
        if self.cursor is None and entries and (not window or window[-1].key < entries[0].key):
            window.extend(entries)
            self._charge(sum([len(e.row) for e in entries]) + ENTRY_OVERHEAD_BYTES * len(entries))
        else:
            self._insert(entries)
        self._enforce_limits()

    def _is_full(self, plain: Plain) -> bool:
        """Whether published messages are left to the disk, because memory is full and all of it comes before them."""
        columns, limits = self._columns, self._limits
        if columns is None or plain.flags or self._returned or columns.last() >= plain.keys[0]:
            return False
        return (
            self._bytes + plain.row_bytes + ENTRY_OVERHEAD_BYTES * len(plain.keys) > limits.resident_bytes_max
            or len(columns) + len(plain.keys) > limits.resident_max
        )

    def _append_columns(self, plain: Plain) -> bool:
        """Append published messages to the columns. Return False if entries are needed."""
        if self._window or plain.flags or plain.expires_ns or not plain.keys:
            return False
        columns = self._columns
        if columns is None:
            columns = self._columns = ColumnQueue()
        elif columns.last() >= plain.keys[0]:
            return False
        columns.add(plain)
        self._charge(plain.row_bytes + ENTRY_OVERHEAD_BYTES * len(plain.keys))
        return True

    def _is_backlog(self, entries: Sequence[Entry]) -> bool:
        """Whether these are persistent, never delivered messages above the cursor, in order."""
        if self.cursor is None or not entries:
            return False
        if isinstance(entries, Plain):
            return not entries.flags and entries.keys[0] >= self.cursor
        return entries[0].key >= self.cursor and not [e for e in entries if e.flags]

    def _enforce_limits(self) -> None:
        limits = self._limits
        if self._bytes > limits.resident_bytes_max or self._count_in_memory() > limits.resident_max:
            self._shrink(limits.resident_max // 2, limits.resident_bytes_max // 2)
        elif self.budget.room_bytes() < 0 and self._bytes > self._share_bytes():
            self._shrink(limits.resident_max, self._share_bytes())

    def _share_bytes(self) -> int:
        """Bytes that may stay in memory when the budget is overdrawn: the queue's minimum, less what its other
        sub-queues use."""
        return max(0, RESIDENT_BYTES_MIN - (self.budget.used_bytes - self._bytes))

    def _insert(self, entries: Sequence[Entry]) -> None:
        """Put each entry at the place of its key."""
        self._make_entries()
        unspilled: list[Entry] = []
        for entry in entries:
            if entry.flags & SPILLED:
                self._has_spilled = True
            if self.cursor is not None and entry.key >= self.cursor:
                if entry.flags & TRANSIENT and not entry.flags & SPILLED:
                    unspilled.append(entry)
                elif entry.flags & RETURNED:
                    self._leased.paged_out(entry)
                continue
            if entry.row and self.cursor is None and (not self._window or self._window[-1].key < entry.key):
                self._window.append(entry)
            else:
                heappush(self._returned, (entry.key, entry))
            self._charge(entry.cost_bytes())
        if unspilled and not self._spill(unspilled):
            for entry in unspilled:
                heappush(self._returned, (entry.key, entry))
                self._charge(entry.cost_bytes())

    def remove(self, change: Change, entries: Sequence[Entry]) -> None:
        delete_rows(change, entries)
        change.after(lambda: self.forget(entries))

    def forget(self, entries: Sequence[Entry]) -> None:
        for entry in entries:
            if self.cursor is None or entry.key < self.cursor or self._in_heap(entry):
                self._deleted |= {entry.key}

    def _in_heap(self, entry: Entry) -> bool:
        """Whether a message above the cursor is in the heap: a transient one that could not be spilled."""
        return bool(entry.flags & TRANSIENT) and not entry.flags & SPILLED

    def purge(self) -> None:
        self._charge(-self._bytes)
        self._window.clear()
        self._columns = None
        self._returned.clear()
        self._deleted = NONE_DELETED
        self.cursor = None

    def block(self, sub: str) -> None:
        raise AssertionError("FairQueue blocks sub-queues")

    def unblock(self, sub: str) -> None:
        raise AssertionError("FairQueue blocks sub-queues")

    def shrink(self) -> None:
        self._shrink(0, 0)

    def fetchwhile(self, holds: Callable[[Entry], bool], count_max: int, sub: str | None = None) -> list[Entry]:
        taken: list[Entry] = []
        while len(taken) < count_max:
            head = self.head()
            if head is None or not holds(head):
                break
            found = self.fetch(1)
            if found and found[0].key != head.key and not holds(found[0]):
                # The row of the head was unreadable, and this is the next message.
                self.put_back(found)
                break
            taken += found
        return taken

    def head(self) -> Entry | None:
        while True:
            self._make_entries()
            returned, window, cursor = self._returned, self._window, self.cursor
            if returned and (not window or returned[0][0] < window[0].key):
                entry, blocked = returned[0][1], cursor is not None and returned[0][0] >= cursor
            elif window:
                entry, blocked = window[0], False
            else:
                entry, blocked = None, True
            if blocked or entry is None:
                if not self._read_ahead(1):
                    return None
            elif entry.key in self._deleted:
                self._drop_deleted_head()
            else:
                return entry

    def _drop_deleted_head(self) -> None:
        """Remove the deleted message at the front. `_pop` also takes the next one, which goes back."""
        following = self._pop()
        if following is not None:
            self._insert([following])

    def take_turn(self, most: int, taken: list[Entry]) -> tuple[int, int, bool]:
        """Fetch up to `most` messages into `taken`. Return how many, their memory cost for the caller to charge, and
        whether there are more.

        Queues with many fairness keys spend their time here, so the common case makes no calls.
        """
        if self._columns is not None:
            self._make_entries()
        window = self._window
        count = len(window)
        if self._returned or self._deleted or (count < most and self.cursor is not None) or not count:
            found = self.fetch(most)
            taken += found
            return len(found), 0, len(found) == most and self.head() is not None
        if count <= most and self.cursor is None:
            # Take everything, at the recorded total cost.
            taken += window
            cost_bytes, self._window, self._bytes = self._bytes, [], 0
            return count, cost_bytes, False
        if most == 1:
            entry = window.pop(0)
            taken.append(entry)
            cost_bytes = len(entry.row) + ENTRY_OVERHEAD_BYTES
        else:
            some = window[:most]
            taken += some
            del window[:most]
            cost_bytes = sum([len(e.row) for e in some]) + ENTRY_OVERHEAD_BYTES * most
        self._bytes -= cost_bytes
        return most, cost_bytes, bool(window) or (self.cursor is not None and self.head() is not None)

    def to_read(self, most: int) -> Range | None:
        """Return the range to read from disk for a turn of `most`; None if memory has it, or transient messages were
        spilled.

        The range has one row more than the turn needs, to tell whether there are more.
        """
        if self.cursor is None or self._has_spilled:
            return None
        self._make_entries()
        if len(self._window) > most:
            return None
        return self.cursor, on_disk.end_of(self._prefix), most + 1 - len(self._window)

    def take_in(self, entries: list[Entry], cursor: bytes | None) -> int:
        """Add messages that the caller read from the cursor up to a new cursor, without leased ones. Return their
        memory cost for the caller to charge."""
        self.cursor = cursor
        self._window += entries
        cost_bytes = sum([len(e.row) for e in entries]) + ENTRY_OVERHEAD_BYTES * len(entries)
        self._bytes += cost_bytes
        return cost_bytes

    def has_room_for(self, entries: Sequence[Entry]) -> bool:
        return True

    def info(self) -> Info:
        return Info(self.resident_len(), self._bytes, self.cursor is not None, self._has_spilled)

    def _read_ahead(self, wanted: int, *, whole_calls: bool = False) -> bool:
        """Fill the window from disk. Return False if there is nothing more. `whole_calls`: read a multiple of
        `wanted`."""
        if self.cursor is None:
            return False
        limits = self._limits
        count_max = min(max(limits.read_ahead, wanted), limits.resident_max)
        if whole_calls and wanted < count_max:
            count_max -= count_max % wanted
        bytes_max = min(limits.read_ahead_bytes, max(1, self._share_bytes(), self.budget.room_bytes()))
        cursor: bytes | None = self.cursor
        while cursor is not None:
            if self._read_from(cursor, count_max, bytes_max, wanted):
                return True
            cursor = self.cursor
        return bool(self._returned)

    def _read_from(self, start: bytes, count_max: int, bytes_max: int, wanted: int) -> bool:
        """Add rows after those in memory. Return False if none of them is ready. If reading fails, nothing changes."""
        store, prefix, spilled = self._store, self._prefix, self._has_spilled
        pieces, more = on_disk.pieces(store, prefix, start, count_max, bytes_max, wanted, spilled=spilled)
        how = {"columns": not self._window, "spilled": spilled}
        read = [on_disk.read(store, prefix, piece, self._leased, self._suspects, **how) for piece in pieces]
        self.cursor = pieces[-1].keys[-1] + b"\0" if more else None
        for entries in read:
            if entries and not (isinstance(entries, Plain) and self._append_columns(entries)):
                self._make_entries()
                self.budget.charge(self.take_in([*entries], self.cursor))
        return any(map(len, read))

    def _shrink(self, count: int, size_bytes: int) -> None:
        """Drop messages from the end of memory until at most `count` messages and `size_bytes` are left."""
        self._make_entries()
        window = self._window
        dropped: list[Entry] = []
        while window and (self._bytes > size_bytes or len(window) + len(self._returned) > count):
            entry = window.pop()
            self._charge(-entry.cost_bytes())
            dropped.append(entry)
        if self._bytes > size_bytes or len(self._returned) > count:
            dropped += self._shrink_returned(count, size_bytes)
        dropped = [e for e in dropped if not self._was_deleted(e)]
        if not dropped:
            return
        unspilled = [e for e in dropped if e.flags & (TRANSIENT | SPILLED) == TRANSIENT]
        if unspilled and not self._spill(unspilled):
            for entry in dropped:
                heappush(self._returned, (entry.key, entry))
                self._charge(entry.cost_bytes())
            return
        for entry in dropped:
            if entry.flags & RETURNED:
                self._leased.paged_out(entry)
        lowest = min(e.key for e in dropped)
        if self.cursor is None or lowest < self.cursor:
            self._lower_cursor(lowest)

    def _shrink_returned(self, count: int, size_bytes: int) -> list[Entry]:
        """Drop messages from the upper end of the heap until the limits hold."""
        kept = sorted(self._returned)
        dropped: list[Entry] = []
        while kept and (self._bytes > size_bytes or len(kept) > count):
            entry = kept.pop()[1]
            self._charge(-entry.cost_bytes())
            dropped.append(entry)
        self._returned = kept
        return dropped

    def _lower_cursor(self, cursor: bytes) -> None:
        """Move the cursor down, and drop from memory what is at or above it."""
        self.cursor = cursor
        while self._window and self._window[-1].key >= cursor:
            entry = self._window.pop()
            self._charge(-entry.cost_bytes())
            self._deleted -= {entry.key}
            if entry.flags & RETURNED:
                self._leased.paged_out(entry)
            assert not entry.flags & TRANSIENT or entry.flags & SPILLED, "the window shrinks from its end"
        staying: list[tuple[bytes, Entry]] = []
        for key, entry in self._returned:
            if key < cursor or entry.flags & (TRANSIENT | SPILLED) == TRANSIENT:
                staying.append((key, entry))
            else:
                self._charge(-entry.cost_bytes())
                self._deleted -= {key}
                if entry.flags & RETURNED:
                    self._leased.paged_out(entry)
        self._returned = staying
        heapify(self._returned)

    def _was_deleted(self, entry: Entry) -> bool:
        if entry.key in self._deleted:
            self._deleted -= {entry.key}
            return True
        return False

    def _spill(self, entries: Sequence[Entry]) -> bool:
        """Write transient messages to disk. Return False if the store is stalled."""
        if not on_disk.spill(self._store, entries):
            return False
        for entry in entries:
            if entry.flags & RETURNED:
                self._leased.paged_out(entry)
        self._has_spilled = True
        return True
