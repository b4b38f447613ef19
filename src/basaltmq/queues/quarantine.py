"""Rows of the queue plane that cannot be read: kept as they were found until an operator decides (SPEC A12, P7).

    queue quarantine   key     | lp(queue, empty if unknown) | found ns u64 | number u64 |
                       value   | layout u8 | flags u8 | lp(family label) | lp(reason) | key bytes u32 | key | value |

A reader that meets a damaged row calls `note` and goes on without it. The next change of the plane moves it: the batch
that puts the record deletes the row, so the row is in one place or in the other. A row that must exist (a queue's
configuration, its counts) is replaced instead of deleted. If a crash comes first, the row is met again.

A row that was overwritten after it was noted stays; the bytes that were noted go to quarantine. A row that is gone by
then was quarantined or deleted, and nothing is written. What a message row refers to (its body) stays where it is until
the record is deleted.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import suppress
from struct import Struct
from struct import error as struct_error
from typing import Final, NamedTuple, Protocol

from basaltmq.errors import CorruptionError, InvalidArgumentError, NotFoundError
from basaltmq.queues.change import Change
from basaltmq.queues.message import HEAD
from basaltmq.queues.ready.backing import APART
from basaltmq.queues.ready.rows import read_entry, unwrap
from basaltmq.store.api import Reader, Store
from basaltmq.store.batch import Batch
from basaltmq.store.families import Family
from basaltmq.store.keys.queues import (
    decode_queue_quarantine_key,
    lp,
    message_of,
    prefix_range,
    queue_quarantine_key,
    queue_quarantine_prefix,
    take_lp,
)

LAYOUT: Final = 1
MISSING: Final = 1
"""Flag of a record: there was no row, although another one says that there is."""

PENDING_MAX: Final = 1024
"""Rows noted before they are moved in a batch of their own. With rows of 2 MiB at most this bounds the memory."""

PENDING_BYTES_MAX: Final = 16 << 20
"""Bytes of rows noted before they are moved in a batch of their own."""

LINES_MAX: Final = 20
"""Log lines of one batch; thousands of damaged rows must not flood the log."""

REASON_BYTES_MAX: Final = 1024

_HEAD: Final = Struct(">BB")
_KEY_BYTES: Final = Struct(">I")
_BY_QUEUE_AT: Final = {
    Family.MESSAGES: 0,
    Family.TRANSIENT: 0,
    Family.LEASES: 0,
    Family.LEASE_CALLS: 0,
    Family.DELAYED: 0,
    Family.MESSAGE_EXPIRY: 0,
    Family.DEDUP: 0,
    Family.DEDUP_EXPIRY: 0,
    Family.LEASE_CALL_EXPIRY: 8,
    Family.TIMERS: 9,
}
"""Where lp(queue) begins in the keys of a family."""

_NAMED: Final = (Family.QUEUES, Family.QUEUE_STATS, Family.DELETED_QUEUES)
"""Families whose keys are the queue's name."""

_WITH_ID: Final = (Family.MESSAGES, Family.TRANSIENT, Family.DELAYED, Family.MESSAGE_EXPIRY)
"""Families whose keys end with a message id."""

_log: Final = logging.getLogger("basaltmq")


class Suspects(Protocol):
    """Who takes a note of rows that cannot be read."""

    def note(self, family: Family, key: bytes, value: bytes | None, reason: str) -> None: ...


class Suspect(NamedTuple):
    """A row that was met and cannot be read. `value` is None if it is missing."""

    family: Family
    key: bytes
    value: bytes | None
    reason: str
    replacement: bytes | None
    """What takes its place; None if nothing does."""
    queue: str
    is_counted: bool
    """Whether the counts of its queue include it."""


class Record(NamedTuple):
    """A row in quarantine."""

    queue: str
    found_ns: int
    number: int
    family: str
    reason: str
    key: bytes
    value: bytes
    is_missing: bool

    @property
    def id(self) -> str:
        """What an operator names it by."""
        return f"{self.found_ns}-{self.number}"

    @property
    def message_id(self) -> str:
        """The id of the message, in hex; empty if the row is not one of a message."""
        return self.key[-16:].hex() if self.family in {family.label for family in _WITH_ID} else ""

    def line(self) -> str:
        """What a report says of it."""
        message = f" of message {self.message_id}" if self.message_id else ""
        where = f"queue {self.queue!r}: " if self.queue else ""
        return f"{where}row{message} in family {self.family} is in quarantine as {self.id}: {self.reason}"


class Loss:
    """What quarantined rows took out of the counts of a queue."""

    __slots__ = ("apart", "delayed", "delayed_bytes", "messages", "size_bytes")

    def __init__(self) -> None:
        self.messages = self.size_bytes = self.delayed = self.delayed_bytes = self.apart = 0

    def add(self, suspect: Suspect) -> None:
        if not suspect.is_counted:
            return
        size_bytes, is_apart = _size_of(suspect)
        if suspect.family is Family.MESSAGES:
            self.messages += 1
            self.size_bytes += size_bytes
            self.apart += is_apart
        elif suspect.family is Family.DELAYED:
            self.delayed += 1
            self.delayed_bytes += size_bytes
            self.apart += is_apart


class Quarantine:
    """What was noted and what is in quarantine. Not thread-safe: the plane's lock is around every call."""

    def __init__(self, store: Store, clock_ns: Callable[[], int]) -> None:
        self._store = store
        self._clock_ns = clock_ns
        self._pending: dict[tuple[Family, bytes], Suspect] = {}
        self._pending_bytes = 0
        self._losses: dict[str, Loss] = {}
        self._counts: dict[str, int] = {}
        self._next = 0
        for key, _ in store.scan(Family.QUEUE_QUARANTINE):
            try:
                queue, _, number = decode_queue_quarantine_key(key)
            except CorruptionError:
                queue, number = "", 0
            self._counts[queue] = self._counts.get(queue, 0) + 1
            self._next = max(self._next, number + 1)

    @property
    def is_pending(self) -> bool:
        """Whether rows were noted that are still in their families."""
        return bool(self._pending or self._losses)

    @property
    def total(self) -> int:
        return sum(self._counts.values())

    def count(self, queue: str) -> int:
        """Rows of a queue in quarantine; those of no known queue are under the empty name."""
        return self._counts.get(queue, 0)

    def note(
        self,
        family: Family,
        key: bytes,
        value: bytes | None,
        reason: str,
        *,
        replacement: bytes | None = None,
        is_counted: bool = True,
    ) -> None:
        """A row cannot be read (None: it is missing) and is to be moved, with `replacement` in its place."""
        at = (family, key)
        if at in self._pending:
            return
        self._pending[at] = Suspect(family, key, value, reason, replacement, queue_of(family, key), is_counted)
        self._pending_bytes += len(key) + len(value or b"")
        if len(self._pending) >= PENDING_MAX or self._pending_bytes >= PENDING_BYTES_MAX:
            batch = Batch()
            noted = list(self._pending)
            moved = self._move(batch)
            self._store.write(batch)
            self._moved(noted, moved, is_counted=False)

    def move(self, change: Change) -> dict[str, Loss]:
        """Move what was noted with a change; by queue, what that takes out of its counts."""
        noted = list(self._pending)
        moved = self._move(change.batch)
        losses = dict(self._losses)
        for suspect in moved:
            losses.setdefault(suspect.queue, Loss()).add(suspect)
        change.after(lambda: self._moved(noted, moved, is_counted=True))
        return losses

    def keep(
        self, change: Change, family: Family, key: bytes, value: bytes | None, reason: str, *, queue: str | None = None
    ) -> None:
        """Put the record of a row that the same change deletes."""
        name = queue_of(family, key) if queue is None else queue
        suspect = Suspect(family, key, value, reason, None, name, is_counted=False)
        self.put(change.batch, suspect)
        change.after(lambda: self._moved([], [suspect], is_counted=True))

    def _move(self, batch: Batch) -> list[Suspect]:
        moved: list[Suspect] = []
        for suspect in self._pending.values():
            found = self._store.get(suspect.family, suspect.key)
            if found is None and suspect.value is not None:
                continue
            if found == suspect.value:
                if suspect.replacement is not None:
                    batch.put(suspect.family, suspect.key, suspect.replacement)
                elif found is not None:
                    batch.delete(suspect.family, suspect.key)
            elif suspect.value is None:
                continue
            self.put(batch, suspect)
            moved.append(suspect)
        return moved

    def put(self, batch: Batch, suspect: Suspect) -> None:
        """Add the record of a row to a batch."""
        key = queue_quarantine_key(suspect.queue, self._clock_ns(), self._next)
        self._next += 1
        batch.put(Family.QUEUE_QUARANTINE, key, encode_record(suspect))

    def _moved(self, noted: list[tuple[Family, bytes]], moved: list[Suspect], *, is_counted: bool) -> None:
        for at_key in noted:
            self._pending.pop(at_key, None)
        self._pending_bytes = sum(len(each.key) + len(each.value or b"") for each in self._pending.values())
        if is_counted and noted:
            self._losses.clear()
        for at, suspect in enumerate(moved):
            self._counts[suspect.queue] = self._counts.get(suspect.queue, 0) + 1
            if not is_counted:
                self._losses.setdefault(suspect.queue, Loss()).add(suspect)
            if at < LINES_MAX:
                _log.error(
                    "queue %r: a row of family %s%s was moved to quarantine: %s",
                    suspect.queue,
                    suspect.family.label,
                    f", message {suspect.key[-16:].hex()}," if suspect.family in _WITH_ID else "",
                    suspect.reason,
                )
        if len(moved) > LINES_MAX:
            more = len(moved) - LINES_MAX
            _log.error("%d more rows were moved to quarantine; list them with: basalt queue quarantine list", more)

    def delete(self, change: Change, record: Record, release: Callable[[Change, bytes, bytes], None]) -> None:
        """Delete a record for good; `release` deletes what a message row refers to."""
        change.batch.delete(Family.QUEUE_QUARANTINE, queue_quarantine_key(record.queue, record.found_ns, record.number))
        if record.family in (Family.MESSAGES.label, Family.DELAYED.label):
            key = message_of(record.key)[0] if record.family == Family.DELAYED.label else record.key
            release(change, key, record.value)
        change.after(lambda: self._uncount(record.queue))

    def _uncount(self, queue: str) -> None:
        left = self._counts.get(queue, 1) - 1
        if left > 0:
            self._counts[queue] = left
        else:
            self._counts.pop(queue, None)


def encode_record(suspect: Suspect) -> bytes:
    reason = suspect.reason.encode(errors="replace")[:REASON_BYTES_MAX]
    head = _HEAD.pack(LAYOUT, MISSING if suspect.value is None else 0)
    label = lp(suspect.family.label)
    return b"".join((head, label, lp(reason), _KEY_BYTES.pack(len(suspect.key)), suspect.key, suspect.value or b""))


def decode_record(key: bytes, raw: bytes) -> Record:
    """A record; one that is itself damaged is shown as it is."""
    try:
        queue, found_ns, number = decode_queue_quarantine_key(key)
    except CorruptionError:
        return Record("", 0, 0, Family.QUEUE_QUARANTINE.label, "the key of the record is damaged", key, raw, False)
    try:
        layout, flags = _HEAD.unpack_from(raw)
        if layout != LAYOUT:
            raise ValueError
        label, at = take_lp(raw, _HEAD.size)
        reason, at = take_lp(raw, at)
        key_bytes: int = _KEY_BYTES.unpack_from(raw, at)[0]
        at += _KEY_BYTES.size
        if at + key_bytes > len(raw):
            raise ValueError
    except (struct_error, ValueError, CorruptionError):
        label_text = Family.QUEUE_QUARANTINE.label
        return Record(queue, found_ns, number, label_text, "the record itself is damaged", b"", raw, False)
    own_key, value = raw[at : at + key_bytes], raw[at + key_bytes :]
    text = reason.decode(errors="replace")
    return Record(queue, found_ns, number, label.decode(errors="replace"), text, own_key, value, bool(flags & MISSING))


def records(store: Reader, queue: str | None = None) -> Iterator[Record]:
    """Rows in quarantine, of one queue or of all, by queue and time."""
    start, end = (b"", None) if queue is None else prefix_range(queue_quarantine_prefix(queue))
    for key, raw in store.scan(Family.QUEUE_QUARANTINE, start, end):
        yield decode_record(key, raw)


def find_record(store: Reader, record_id: str) -> Record:
    """The record of an id as `Record.id` gives it."""
    found_ns, dash, number = record_id.partition("-")
    if not (dash and found_ns.isdecimal() and number.isdecimal()):
        raise InvalidArgumentError(f"{record_id!r:.80} is not the id of a quarantined row; list them to see the ids")
    for record in records(store):
        if record.id == record_id:
            return record
    raise NotFoundError(f"no row {record_id} is in quarantine; list what is: basalt queue quarantine list")


def queue_of(family: Family, key: bytes) -> str:
    """The queue in a key, as far as that can be read; empty if it cannot."""
    try:
        if family in _NAMED:
            return key.decode()
        if family in _BY_QUEUE_AT:
            return take_lp(key, _BY_QUEUE_AT[family])[0].decode()
    except (CorruptionError, UnicodeDecodeError):
        pass
    return ""


def _size_of(suspect: Suspect) -> tuple[int, bool]:
    """What a message row counted for in its queue: exact if it can be read, else a guess from its length."""
    row = suspect.value or b""
    try:
        entry = read_entry(suspect.key, row)
        return entry.size_bytes, bool(entry.flags & APART)
    except CorruptionError:
        # The length of its payload is what can be guessed.
        pass
    with suppress(CorruptionError):
        row = unwrap(row)[0]
    return max(0, len(row) - HEAD.size), False
