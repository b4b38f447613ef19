"""Quarantine of unreadable rows of the queue plane. They stay unchanged until an operator decides (SPEC A12, P7).

    queue quarantine   key     | lp(queue, empty if unknown) | found ns u64 | number u64 |
                       value   | layout u8 | flags u8 | lp(family label) | lp(reason) | key bytes u32 | key | value |

A reader that finds a damaged row calls `note` and continues without it. The next change of the plane moves the row: one
batch puts the record and deletes the row. A mandatory row (a queue's configuration, its counts) is replaced instead of
deleted. After a crash before the move, the row is simply found again.

If the row was overwritten after `note`, the new row stays and the noted bytes are quarantined. If the row is gone by
then, nothing is written. The body of a quarantined message row stays until the record is deleted.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import suppress
from struct import Struct
from struct import error as struct_error
from typing import Any, Final, NamedTuple, Protocol

from basaltmq.errors import CorruptionError, InvalidArgumentError, NotFoundError
from basaltmq.queues.change import Change
from basaltmq.queues.entries.backing import APART
from basaltmq.queues.entries.rows import read_entry, unwrap
from basaltmq.queues.message import HEAD
from basaltmq.store.api import Reader, Store
from basaltmq.store.batch import Batch
from basaltmq.store.families import Family
from basaltmq.store.keys.parts import lp, prefix_range, take_lp
from basaltmq.store.keys.queues import decode_quarantine_key, message_of, quarantine_key, quarantine_prefix

LAYOUT: Final = 1
MISSING: Final = 1
"""Record flag: the row is missing although another row refers to it."""

PENDING_MAX: Final = 1024
"""Rows to note before they are moved in a separate batch. Bounds memory, with rows of 2 MiB at most."""

PENDING_BYTES_MAX: Final = 16 << 20
"""Bytes of rows to note before they are moved in a separate batch."""

LINES_MAX: Final = 20
"""Log lines per batch, so that thousands of damaged rows do not flood the log."""

REASON_BYTES_MAX: Final = 1024

_HEAD: Final = Struct(">BB")
_KEY_BYTES: Final = Struct(">I")
_BY_QUEUE_AT: Final = {
    Family.MESSAGES: 0,
    Family.TRANSIENT: 0,
    Family.LEASES: 0,
    Family.DELAYED: 0,
    Family.MESSAGE_EXPIRY: 0,
    Family.DEDUP: 0,
    Family.DEDUP_EXPIRY: 0,
    Family.LEASE_EXPIRY: 8,
    Family.TIMERS: 9,
}
"""Offset of lp(queue) in the keys of a family."""

_NAMED: Final = (Family.QUEUES, Family.QUEUE_STATS, Family.DELETED_QUEUES)
"""Families whose keys are the queue's name."""

_WITH_ID: Final = (Family.MESSAGES, Family.TRANSIENT, Family.DELAYED, Family.MESSAGE_EXPIRY)
"""Families whose keys end with a message id."""

_log: Final = logging.getLogger("basaltmq")


class Suspects(Protocol):
    """Receives unreadable rows."""

    def note(self, family: Family, key: bytes, value: bytes | None, reason: str) -> None: ...


class Suspect(NamedTuple):
    """An unreadable row. `value` is None if the row is missing."""

    family: Family
    key: bytes
    value: bytes | None
    reason: str
    replacement: bytes | None
    """Row to write in its place; None to delete it."""
    queue: str
    is_counted: bool
    """Whether the queue's counts include it."""


class Record(NamedTuple):
    """A quarantined row."""

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
        """The id that operators use."""
        return f"{self.found_ns}-{self.number}"

    @property
    def message_id(self) -> str:
        """The id of the message in hex; empty if the row does not belong to a message."""
        return self.key[-16:].hex() if self.family in {family.label for family in _WITH_ID} else ""

    def summary(self) -> dict[str, Any]:
        """The row for JSON, without its bytes."""
        return {
            "id": self.id,
            "queue": self.queue or None,
            "family": self.family,
            "message_id": self.message_id or None,
            "reason": self.reason,
            "found_ns": self.found_ns,
            "missing": self.is_missing,
            "value_bytes": len(self.value),
        }

    def line(self) -> str:
        """The line of a report."""
        message = f" of message {self.message_id}" if self.message_id else ""
        where = f"queue {self.queue!r}: " if self.queue else ""
        return f"{where}row{message} in family {self.family} is in quarantine as {self.id}: {self.reason}"


class Loss:
    """What quarantined rows remove from the counts of a queue."""

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
    """Noted rows and quarantined rows. Not thread-safe: callers hold the plane's lock."""

    def __init__(self, store: Store, clock_ns: Callable[[], int]) -> None:
        self._store = store
        self._clock_ns = clock_ns
        self._pending: dict[tuple[Family, bytes], Suspect] = {}
        self._pending_bytes = 0
        self._losses: dict[str, Loss] = {}
        self._counts: dict[str, int] = {}
        self._next = 0
        for key, _ in store.scan(Family.QUARANTINE):
            try:
                queue, _, number = decode_quarantine_key(key)
            except CorruptionError:
                queue, number = "", 0
            self._counts[queue] = self._counts.get(queue, 0) + 1
            self._next = max(self._next, number + 1)

    @property
    def is_pending(self) -> bool:
        """Whether noted rows still have to be moved."""
        return bool(self._pending or self._losses)

    @property
    def total(self) -> int:
        return sum(self._counts.values())

    def count(self, queue: str) -> int:
        """Return the number of quarantined rows of a queue. Rows of unknown queues count under the empty name."""
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
        """Note an unreadable row (None: missing) for quarantine, with `replacement` to be written in its place."""
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
        """Move the noted rows within a change. Return what that removes from the counts, by queue."""
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
        key = quarantine_key(suspect.queue, self._clock_ns(), self._next)
        self._next += 1
        batch.put(Family.QUARANTINE, key, encode_record(suspect))

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
                    "queue %r: moved a row of family %s%s to quarantine: %s",
                    suspect.queue,
                    suspect.family.label,
                    f", message {suspect.key[-16:].hex()}," if suspect.family in _WITH_ID else "",
                    suspect.reason,
                )
        if len(moved) > LINES_MAX:
            more = len(moved) - LINES_MAX
            _log.error("moved %d more rows to quarantine; list them with: basalt queue quarantine list", more)

    def delete(self, change: Change, record: Record, release: Callable[[Change, bytes, bytes], None]) -> None:
        """Delete a record for good. `release` deletes what a message row refers to."""
        change.batch.delete(Family.QUARANTINE, quarantine_key(record.queue, record.found_ns, record.number))
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
    """Decode a record. A damaged record is returned as far as it can be read."""
    try:
        queue, found_ns, number = decode_quarantine_key(key)
    except CorruptionError:
        return Record("", 0, 0, Family.QUARANTINE.label, "the key of the record is damaged", key, raw, False)
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
        label_text = Family.QUARANTINE.label
        return Record(queue, found_ns, number, label_text, "the record itself is damaged", b"", raw, False)
    own_key, value = raw[at : at + key_bytes], raw[at + key_bytes :]
    text = reason.decode(errors="replace")
    return Record(queue, found_ns, number, label.decode(errors="replace"), text, own_key, value, bool(flags & MISSING))


def records(store: Reader, queue: str | None = None) -> Iterator[Record]:
    """Yield quarantined rows, of one queue or of all, ordered by queue and time."""
    start, end = (b"", None) if queue is None else prefix_range(quarantine_prefix(queue))
    for key, raw in store.scan(Family.QUARANTINE, start, end):
        yield decode_record(key, raw)


def find_record(store: Reader, record_id: str) -> Record:
    """Return the record with this id (`Record.id`)."""
    found_ns, dash, number = record_id.partition("-")
    if not (dash and found_ns.isdecimal() and number.isdecimal()):
        raise InvalidArgumentError(
            f"{record_id!r:.80} is not the id of a quarantined row; list the ids with: basalt queue quarantine list"
        )
    for record in records(store):
        if record.id == record_id:
            return record
    raise NotFoundError(f"no quarantined row has the id {record_id}; list the ids with: basalt queue quarantine list")


def queue_of(family: Family, key: bytes) -> str:
    """Return the queue in a key; empty if the key cannot be read."""
    try:
        if family in _NAMED:
            return key.decode()
        if family in _BY_QUEUE_AT:
            return take_lp(key, _BY_QUEUE_AT[family])[0].decode()
    except (CorruptionError, UnicodeDecodeError):
        pass
    return ""


def _size_of(suspect: Suspect) -> tuple[int, bool]:
    """Return a message row's body size and whether the body is outside the row; a guess if it is unreadable."""
    row = suspect.value or b""
    try:
        entry = read_entry(suspect.key, row)
        return entry.size_bytes, bool(entry.flags & APART)
    except CorruptionError:
        # Guess the size from the length of the row.
        pass
    with suppress(CorruptionError):
        row = unwrap(row)[0]
    return max(0, len(row) - HEAD.size), False
