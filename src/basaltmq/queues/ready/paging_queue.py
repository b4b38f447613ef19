"""The main backing queue: a window of the head in memory, the rest on disk. The idea is told in backing.py.

    returned (heap)   messages that came back, by key
    window (list)     the head, in key order; everything up to the cursor that is ready
    stretch           the same as columns (plain.py), while nobody needs entries; it or the window is empty
    cursor            first key that is on disk only; None while the window reaches to the queue's end
    gone              keys deleted while they sit in the window or the heap; skipped when they come up

Reading ahead fetches up to `read_ahead` rows in one scan that begins at the cursor. Publishing appends to what memory
has while that reaches to the end and there is room. There may be a hundred thousand of these in a queue of as many
fairness keys, so an empty one is small: a list is, a deque is not.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from heapq import heapify, heappop, heappush
from typing import Final

import msgspec

from basaltmq.errors import StoreStalledError
from basaltmq.queues.change import Change
from basaltmq.queues.quarantine import Suspects
from basaltmq.queues.ready import on_disk
from basaltmq.queues.ready.backing import ENTRY_OVERHEAD_BYTES, RETURNED, SPILLED, TRANSIENT, Entry, Info, Leased
from basaltmq.queues.ready.base import Proxy
from basaltmq.queues.ready.budget import MemoryBudget, PagingLimits
from basaltmq.queues.ready.plain import Plain, Stretch
from basaltmq.queues.ready.row_changes import cancel_rows, delete_rows, put_rows
from basaltmq.store.api import Store
from basaltmq.store.batch import Batch
from basaltmq.store.families import Family
from basaltmq.store.ranges import Range, Row

__all__ = ["RESIDENT_BYTES_MIN", "MemoryBudget", "PagingLimits", "PagingQueue"]

RESIDENT_BYTES_MIN: Final = 16 * 1024
"""What a queue may keep when all queues together are over their budget, so that none of them reads row by row."""

NOTHING: Final[frozenset[bytes]] = frozenset()

SPILL_WAIT_MS: Final = 0
"""A transient message that cannot be paged at once stays in memory: the publisher is not made to wait for it."""


class PagingQueue(Proxy):
    """The messages of one sub-queue, in key order."""

    __slots__ = (
        "_bytes",
        "_gone",
        "_has_spilled",
        "_leased",
        "_limits",
        "_prefix",
        "_returned",
        "_store",
        "_stretch",
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
        """`head`: a key at or below the first message, where reading begins. `spilled`: transient ones are on disk."""
        self._suspects = suspects
        self._store = store
        self._prefix = prefix
        self.budget = budget
        self._limits = limits
        self._leased = leased
        self._window: list[Entry] = []
        self._stretch: Stretch | None = None
        self._returned: list[tuple[bytes, Entry]] = []
        self._gone: set[bytes] | frozenset[bytes] = NOTHING
        self.cursor: bytes | None = None if known_empty else head or prefix
        """The first key that is on disk only; None if memory has all."""
        self._bytes = 0
        self._has_spilled = spilled

    def publish(self, change: Change, entries: Sequence[Entry], sub: str | None = None) -> None:
        put_rows(change, entries)
        change.after(lambda: self.append(entries))

    def publish_delivered(self, change: Change, entries: Sequence[Entry]) -> None:
        put_rows(change, entries)

    def discard(self, change: Change, entries: Sequence[Entry]) -> None:
        cancel_rows(change, entries)

    def fetch(self, count: int) -> list[Entry]:
        taken: list[Entry] = []
        while len(taken) < count:
            if self._returned or self._gone:
                entry = self._pop()
                if entry is not None:
                    taken.append(entry)
                    continue
            elif self._window:
                taken += self._take(count - len(taken))
                continue
            elif self._stretch is not None:
                taken += self._take_columns(self._stretch, count - len(taken)).entries()
                continue
            if not self._read_ahead(count - len(taken)):
                break
        return taken

    def fetch_plain(self, count: int) -> Plain | None:
        """The same as columns; None, and nothing is taken, if memory has entries or has to be asked in their order."""
        while True:
            if self._returned or self._gone or self._window:
                return None
            stretch = self._stretch
            if stretch is not None and (self.cursor is None or len(stretch) >= count):
                return self._take_columns(stretch, count)
            if stretch is None:
                if not self._read_ahead(count, in_calls=True):
                    return None
            else:
                # What is missing of this call, and no more: the next reading begins where a call does.
                self._take_rest(count - len(stretch))

    def _take_rest(self, wanted: int) -> None:
        """Read what a call is short of."""
        assert self.cursor is not None, "there is more on disk"
        self._read_on(self.cursor, wanted, self._limits.read_ahead_bytes, wanted)

    def _take_columns(self, stretch: Stretch, count: int) -> Plain:
        taken = stretch.take(count)
        if not len(stretch):
            self._stretch = None
        self._charge(-taken.row_bytes - ENTRY_OVERHEAD_BYTES * len(taken.keys))
        return taken

    def _unfold(self) -> None:
        """Have what waits in memory as entries."""
        if self._stretch is not None:
            self._window = self._stretch.take(len(self._stretch)).entries()
            self._stretch = None

    def _take(self, count: int) -> list[Entry]:
        """Up to `count` from the window, when nothing else is in memory."""
        window = self._window
        taken = window[:count]
        del window[:count]
        self._charge(-sum([len(e.row) for e in taken]) - ENTRY_OVERHEAD_BYTES * len(taken))
        return taken

    def _pop(self) -> Entry | None:
        """The first message in memory, if nothing on disk comes before it."""
        self._unfold()
        while self._returned or self._window:
            returned, window, cursor = self._returned, self._window, self.cursor
            if returned and (not window or returned[0][0] < window[0].key):
                if cursor is not None and returned[0][0] >= cursor:
                    return None
                entry = heappop(returned)[1]
            else:
                entry = window.pop(0)
            self._charge(-entry.cost_bytes())
            if entry.key in self._gone:
                self._gone -= {entry.key}
                continue
            if self._has_row(entry):
                return entry
        return None

    def requeue(self, change: Change, entries: Sequence[Entry]) -> None:
        change.after(lambda: self.put_back(entries))

    def put_back(self, entries: Sequence[Entry]) -> None:
        self._place(entries)
        self._limit()

    def append(self, entries: Sequence[Entry]) -> None:
        """Place what was published: behind the last one as a rule, for an append each. Keys of one call ascend."""
        if self._is_backlog(entries):
            # They are on disk, and are read when it is their turn.
            return
        if self.cursor is None and isinstance(entries, Plain):
            if self._is_full(entries):
                self.cursor = entries.keys[0]
                return
            if self._append_columns(entries):
                self._limit()
                return
        self._unfold()
        window = self._window
        if self.cursor is None and entries and (not window or window[-1].key < entries[0].key):
            window.extend(entries)
            self._charge(sum([len(e.row) for e in entries]) + ENTRY_OVERHEAD_BYTES * len(entries))
        else:
            self._place(entries)
        self._limit()

    def _is_full(self, plain: Plain) -> bool:
        """Whether what was published is better left to the disk: memory has as much as it may, and all before it."""
        stretch, limits = self._stretch, self._limits
        if stretch is None or plain.flags or self._returned or stretch.last() >= plain.keys[0]:
            return False
        return (
            self._bytes + plain.row_bytes + ENTRY_OVERHEAD_BYTES * len(plain.keys) > limits.resident_bytes_max
            or len(stretch) + len(plain.keys) > limits.resident_max
        )

    def _append_columns(self, plain: Plain) -> bool:
        """Add what was published behind the stretch, or begin one; False if it takes entries."""
        if self._window or plain.flags or plain.expires_ns or not plain.keys:
            return False
        stretch = self._stretch
        if stretch is None:
            stretch = self._stretch = Stretch()
        elif stretch.last() >= plain.keys[0]:
            return False
        stretch.add(plain)
        self._charge(plain.row_bytes + ENTRY_OVERHEAD_BYTES * len(plain.keys))
        return True

    def _is_backlog(self, entries: Sequence[Entry]) -> bool:
        """Persistent messages that nobody had, behind the cursor, in order."""
        if self.cursor is None or not entries:
            return False
        if isinstance(entries, Plain):
            return not entries.flags and entries.keys[0] >= self.cursor
        return entries[0].key >= self.cursor and not [e for e in entries if e.flags]

    def _limit(self) -> None:
        limits = self._limits
        if self._bytes > limits.resident_bytes_max or self._held() > limits.resident_max:
            self._shrink(limits.resident_max // 2, limits.resident_bytes_max // 2)
        elif self.budget.room_bytes() < 0 and self._bytes > self._share_bytes():
            self._shrink(limits.resident_max, self._share_bytes())

    def _held(self) -> int:
        """Messages in memory, gone ones among them."""
        return len(self._window) + len(self._returned) + (0 if self._stretch is None else len(self._stretch))

    def _share_bytes(self) -> int:
        """What may stay in memory when the budget is overdrawn: the queue's minimum, less what its other parts have."""
        return max(0, RESIDENT_BYTES_MIN - (self.budget.used_bytes - self._bytes))

    def _place(self, entries: Sequence[Entry]) -> None:
        """Put every entry where its key says."""
        self._unfold()
        homeless: list[Entry] = []
        for entry in entries:
            if entry.flags & SPILLED:
                self._has_spilled = True
            if self.cursor is not None and entry.key >= self.cursor:
                if entry.flags & TRANSIENT and not entry.flags & SPILLED:
                    homeless.append(entry)
                elif entry.flags & RETURNED:
                    self._leased.paged_out(entry)
                continue
            if entry.row and self.cursor is None and (not self._window or self._window[-1].key < entry.key):
                self._window.append(entry)
            else:
                heappush(self._returned, (entry.key, entry))
            self._charge(entry.cost_bytes())
        if homeless and not self._spill(homeless):
            for entry in homeless:
                heappush(self._returned, (entry.key, entry))
                self._charge(entry.cost_bytes())

    def remove(self, change: Change, entries: Sequence[Entry]) -> None:
        delete_rows(change, entries)
        change.after(lambda: self.forget(entries))

    def forget(self, entries: Sequence[Entry]) -> None:
        for entry in entries:
            if self.cursor is None or entry.key < self.cursor or self._in_heap(entry):
                self._gone |= {entry.key}

    def _in_heap(self, entry: Entry) -> bool:
        """A transient message above the cursor is on disk, or in the heap when the disk did not take it."""
        return bool(entry.flags & TRANSIENT) and not entry.flags & SPILLED

    def purge(self) -> None:
        self._charge(-self._bytes)
        self._window.clear()
        self._stretch = None
        self._returned.clear()
        self._gone = NOTHING
        self.cursor = None

    def block(self, sub: str) -> None:
        raise AssertionError("a queue of one sub-queue is blocked by not asking it")

    def unblock(self, sub: str) -> None:
        raise AssertionError("a queue of one sub-queue is blocked by not asking it")

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
                # The row of the head could not be read, and this is the next one.
                self.put_back(found)
                break
            taken += found
        return taken

    def head(self) -> Entry | None:
        while True:
            self._unfold()
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
            elif entry.key in self._gone:
                self._drop_first_gone()
            else:
                return entry

    def _drop_first_gone(self) -> None:
        """The first in memory is gone; popping it takes the next one along, which goes back."""
        following = self._pop()
        if following is not None:
            self._place([following])

    def take_turn(self, most: int, taken: list[Entry]) -> tuple[int, int, bool]:
        """Fetch up to `most` to the end of `taken`: how many, what they cost in memory, for the caller to charge, and
        whether there is more. A queue of many fairness keys spends its time here: the common case makes no call."""
        if self._stretch is not None:
            self._unfold()
        window = self._window
        count = len(window)
        if self._returned or self._gone or (count < most and self.cursor is not None) or not count:
            found = self.fetch(most)
            taken += found
            return len(found), 0, len(found) == most and self.head() is not None
        if count <= most and self.cursor is None:
            # All there is, at the cost of all there is.
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
        """What of the disk is to be read for a turn of `most`; None if memory has it, or not in this way.

        One row more than the turn takes, which says whether there are more.
        """
        if self.cursor is None or self._has_spilled:
            return None
        self._unfold()
        if len(self._window) > most:
            return None
        return self.cursor, on_disk.end_of(self._prefix), most + 1 - len(self._window)

    def take_in(self, entries: list[Entry], cursor: bytes | None) -> int:
        """Somebody read on for this queue, from the cursor to another one: these, without what is leased. What they
        cost in memory, for the caller to charge."""
        self.cursor = cursor
        self._window += entries
        cost_bytes = sum([len(e.row) for e in entries]) + ENTRY_OVERHEAD_BYTES * len(entries)
        self._bytes += cost_bytes
        return cost_bytes

    def is_empty(self) -> bool:
        return self.head() is None

    def floor(self) -> bytes | None:
        at = len(self._prefix)
        firsts = [entry.key for entry in self._window[:1]] + [key for key, _ in self._returned[:1]]
        if self._stretch is not None:
            firsts.append(self._stretch.first())
        if self.cursor is not None:
            firsts.append(self.cursor)
        return min((key[at : at + 8] for key in firsts), default=None)

    def forget_returned(self) -> None:
        # What came back is never in the stretch.
        for entry in [*self._window, *[entry for _, entry in self._returned]]:
            if entry.flags & RETURNED:
                self._leased.paged_out(entry)

    def resident_len(self) -> int:
        return self._held() - len(self._gone)

    def resident_bytes(self) -> int:
        return self._bytes

    def pending(self, count_max: int) -> int:
        """Messages that wait; those on disk are looked for until `count_max` is reached."""
        here = {e.key for e in self._in_memory()} - self._gone
        count = len(here)
        if self.cursor is not None:
            for key, _ in self._rows(self.cursor):
                if count >= count_max:
                    break
                if key not in here and key not in self._gone and not self._leased.has_key(key):
                    count += 1
        return count

    def is_duplicate(self, key: bytes) -> bool:
        if key in self._gone or self._leased.has_key(key):
            return False
        if any(e.key == key for e in self._in_memory() if e.flags & TRANSIENT):
            return True
        return any(self._store.get(family, key) is not None for family in (Family.MESSAGES, Family.TRANSIENT))

    def browse(self, after: bytes, count: int) -> list[Entry]:
        here = {e.key: e for e in self._in_memory() if e.key > after and e.key not in self._gone}
        if self.cursor is not None:
            below = sum(key < self.cursor for key in here)
            for row in self._rows(max(self.cursor, after + b"\0")):
                if below >= count:
                    break
                if not self._leased.has_key(row[0]) and (found := self._entries([row])):
                    here[row[0]] = found[0]
                    below += 1
        shown = [here[key] for key in sorted(here)[:count]]
        return [e for e in (e if e.row else msgspec.structs.replace(e) for e in shown) if self._has_row(e)]

    def has_room_for(self, entries: Sequence[Entry]) -> bool:
        return True

    def info(self) -> Info:
        return Info(self.resident_len(), self._bytes, self.cursor is not None, self._has_spilled)

    def _in_memory(self) -> Iterator[Entry]:
        self._unfold()
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

    def _read_ahead(self, wanted: int, *, in_calls: bool = False) -> bool:
        """Fill the window from disk; False if there is nothing more. `in_calls`: so many are wanted by each call."""
        if self.cursor is None:
            return False
        limits = self._limits
        count_max = min(max(limits.read_ahead, wanted), limits.resident_max)
        if in_calls and wanted < count_max:
            count_max -= count_max % wanted
        bytes_max = min(limits.read_ahead_bytes, max(1, self._share_bytes(), self.budget.room_bytes()))
        cursor: bytes | None = self.cursor
        while cursor is not None:
            if self._read_on(cursor, count_max, bytes_max, wanted):
                return True
            cursor = self.cursor
        return bool(self._returned)

    def _read_on(self, start: bytes, count_max: int, bytes_max: int, wanted: int) -> bool:
        """Add rows behind what is in memory; False if none of them is ready. If reading fails nothing has changed."""
        store, prefix, spilled = self._store, self._prefix, self._has_spilled
        pieces, more = on_disk.pieces(store, prefix, start, count_max, bytes_max, wanted, spilled=spilled)
        how = {"columns": not self._window, "spilled": spilled}
        read = [on_disk.read(store, prefix, piece, self._leased, self._suspects, **how) for piece in pieces]
        self.cursor = pieces[-1].keys[-1] + b"\0" if more else None
        for entries in read:
            if entries and not (isinstance(entries, Plain) and self._append_columns(entries)):
                self._unfold()
                self.budget.charge(self.take_in([*entries], self.cursor))
        return any(map(len, read))

    def _has_row(self, entry: Entry) -> bool:
        """Have the row of a message in memory that may have come back without it; False if it cannot be read."""
        if not entry.row:
            entry.row = on_disk.row_of(self._store, entry, self._suspects) or b""
        return bool(entry.row)

    def _shrink(self, count: int, size_bytes: int) -> None:
        """Leave the end of what is in memory to the disk until so much is left."""
        self._unfold()
        window = self._window
        dropped: list[Entry] = []
        while window and (self._bytes > size_bytes or len(window) + len(self._returned) > count):
            entry = window.pop()
            self._charge(-entry.cost_bytes())
            dropped.append(entry)
        if self._bytes > size_bytes or len(self._returned) > count:
            dropped += self._shrink_returned(count, size_bytes)
        dropped = [e for e in dropped if not self._took_gone(e)]
        if not dropped:
            return
        homeless = [e for e in dropped if e.flags & (TRANSIENT | SPILLED) == TRANSIENT]
        if homeless and not self._spill(homeless):
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
        """Take from the upper end of the heap until so much is left."""
        kept = sorted(self._returned)
        dropped: list[Entry] = []
        while kept and (self._bytes > size_bytes or len(kept) > count):
            entry = kept.pop()[1]
            self._charge(-entry.cost_bytes())
            dropped.append(entry)
        self._returned = kept
        return dropped

    def _lower_cursor(self, cursor: bytes) -> None:
        """Everything at or above `cursor` is read from disk from here on; what memory has of it is let go."""
        self.cursor = cursor
        while self._window and self._window[-1].key >= cursor:
            entry = self._window.pop()
            self._charge(-entry.cost_bytes())
            self._gone -= {entry.key}
            if entry.flags & RETURNED:
                self._leased.paged_out(entry)
            assert not entry.flags & TRANSIENT or entry.flags & SPILLED, "the window is let go from its end"
        staying: list[tuple[bytes, Entry]] = []
        for key, entry in self._returned:
            if key < cursor or entry.flags & (TRANSIENT | SPILLED) == TRANSIENT:
                staying.append((key, entry))
            else:
                self._charge(-entry.cost_bytes())
                self._gone -= {key}
                if entry.flags & RETURNED:
                    self._leased.paged_out(entry)
        self._returned = staying
        heapify(self._returned)

    def _took_gone(self, entry: Entry) -> bool:
        if entry.key in self._gone:
            self._gone -= {entry.key}
            return True
        return False

    def _spill(self, entries: Sequence[Entry]) -> bool:
        """Write transient messages to disk without the log. False if the store does not take them just then."""
        batch = Batch()
        for entry in entries:
            batch.put(Family.TRANSIENT, entry.key, entry.row)
        try:
            self._store.write(batch, wal=False, wait_ms=SPILL_WAIT_MS)
        except StoreStalledError:
            return False
        for entry in entries:
            entry.flags |= SPILLED
            if entry.flags & RETURNED:
                self._leased.paged_out(entry)
        self._has_spilled = True
        return True
