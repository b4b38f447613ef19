"""The counts of a queue, exact after kill -9: one row, part of every batch that changes the queue.

    | layout u8 | messages | bytes | delayed | delayed bytes | apart | enqueued | acked | failed | expired |
    | dead-lettered | dropped | cycles | duplicates | returned ns | floor ns   (u64 each) | CRC-32 of the rest u32 |

`messages` and `bytes` count the persistent messages in the queue, ready or leased. `apart` counts bodies stored outside
the rows, including those of delayed messages. `enqueued` to `duplicates` are totals since the queue was created. The
number of leased messages comes from the leases, so a lease does not change this row.

Messages with an enqueue time up to `returned ns` may have been delivered before. The queue has no message with an
enqueue time below `floor ns`; rows found there do not belong to it. Layout 1 lacks these two fields. Layout 2 lacks the
checksum, which detects wrong but plausible counts: they would hide the messages of a queue.

Transient messages and their counts are in memory. Eviction of a queue writes both to the transient family, which is
wiped at open:

    transient counts   | transient | transient bytes   (u64 each) |
"""

from __future__ import annotations

from collections.abc import Sequence
from struct import Struct
from struct import error as struct_error
from typing import Final
from zlib import crc32

from basaltmq.errors import CorruptionError
from basaltmq.queues.entries.backing import APART, TRANSIENT, Entry
from basaltmq.queues.entries.plain import Plain
from basaltmq.queues.entries.quarantine import Loss

LAYOUT: Final = 3
FIELDS: Final = (
    "messages",
    "size_bytes",
    "delayed",
    "delayed_bytes",
    "apart",
    "enqueued",
    "acked",
    "failed",
    "expired",
    "dead_lettered",
    "dropped",
    "cycles",
    "duplicates",
    "returned_ns",
    "floor_ns",
)
DURABLE_FIELDS: Final = 5
"""The first five fields describe what is on disk and change with it. The others are totals."""

_TRANSIENT: Final = Struct(">QQ")
_ROW: Final = Struct(f">B{len(FIELDS)}Q")
_CRC: Final = Struct(">I")
_ROW_1: Final = Struct(f">B{len(FIELDS) - 2}Q")


class QueueStats:
    """The counts of one queue."""

    __slots__ = (*FIELDS, "transient", "transient_bytes")

    def __init__(self) -> None:
        self.messages = 0
        self.size_bytes = 0
        self.delayed = 0
        self.delayed_bytes = 0
        self.apart = 0
        self.enqueued = 0
        self.acked = 0
        self.failed = 0
        self.expired = 0
        self.dead_lettered = 0
        self.dropped = 0
        self.cycles = 0
        self.duplicates = 0
        self.returned_ns = 0
        self.floor_ns = 0
        self.transient = 0
        self.transient_bytes = 0

    def shown(self, leased: int, leased_bytes: int) -> dict[str, int]:
        """Return the counts by name, including ready and leased messages."""
        counts = dict(zip(QueueStats.__slots__, self.values(), strict=True))
        ready = {"ready": self.depth() - leased, "ready_bytes": self.depth_bytes() - leased_bytes}
        return counts | ready | {"leased": leased}

    def values(self) -> tuple[int, ...]:
        """Return all fields, for `restore`."""
        return (
            self.messages,
            self.size_bytes,
            self.delayed,
            self.delayed_bytes,
            self.apart,
            self.enqueued,
            self.acked,
            self.failed,
            self.expired,
            self.dead_lettered,
            self.dropped,
            self.cycles,
            self.duplicates,
            self.returned_ns,
            self.floor_ns,
            self.transient,
            self.transient_bytes,
        )

    def restore(self, values: tuple[int, ...]) -> None:
        for name, value in zip(self.__slots__, values, strict=True):
            setattr(self, name, value)

    def count(self, entries: Sequence[Entry], sign: int) -> None:
        """Add (1) or subtract (-1) messages."""
        if isinstance(entries, Plain) and not entries.flags & TRANSIENT:
            self.messages += sign * len(entries)
            self.size_bytes += sign * entries.size_bytes
            return
        if self.transient or self.apart or (sign > 0 and [e for e in entries if e.flags]):
            marked = [e for e in entries if e.flags & (TRANSIENT | APART)]
            transient = [e for e in marked if e.flags & TRANSIENT]
            self.transient += sign * len(transient)
            self.transient_bytes += sign * sum(e.size_bytes for e in transient)
            self.apart += sign * (len(marked) - len(transient))
            entries = [e for e in entries if not e.flags & TRANSIENT]
        self.messages += sign * len(entries)
        self.size_bytes += sign * sum([e.size_bytes for e in entries])

    def add(self, count: int, size_bytes: int, *, apart: int) -> None:
        """Add persistent messages of `size_bytes` in total, `apart` of them with their body outside the row."""
        self.enqueued += count
        self.messages += count
        self.size_bytes += size_bytes
        self.apart += apart

    def lose(self, loss: Loss) -> None:
        """Subtract quarantined messages. The size of an unreadable row is a guess; an empty queue has size 0."""
        self.messages = max(0, self.messages - loss.messages)
        self.size_bytes = max(0, self.size_bytes - loss.size_bytes) if self.messages else 0
        self.delayed = max(0, self.delayed - loss.delayed)
        self.delayed_bytes = max(0, self.delayed_bytes - loss.delayed_bytes) if self.delayed else 0
        self.apart = max(0, self.apart - loss.apart)

    def depth(self) -> int:
        """Number of messages in the queue, ready or leased."""
        return self.messages + self.transient

    def depth_bytes(self) -> int:
        return self.size_bytes + self.transient_bytes

    def encode(self) -> bytes:
        try:
            row = _ROW.pack(LAYOUT, *self.values()[: len(FIELDS)])
        except struct_error:
            # Rows that were lost outside of Basalt can make a count negative. A recount (`restart`) corrects it.
            row = _ROW.pack(LAYOUT, *(max(0, value) for value in self.values()[: len(FIELDS)]))
        return row + _CRC.pack(crc32(row))

    @classmethod
    def decode(cls, queue: str, row: bytes) -> QueueStats:
        if len(row) == _ROW_1.size and row[0] == 1:
            row = b"\2" + row[1:] + bytes(_ROW.size - _ROW_1.size)
        is_sound = len(row) == _ROW.size and row[0] == 2
        if len(row) == _ROW.size + _CRC.size and row[0] == LAYOUT:
            is_sound = _CRC.pack(crc32(row[: _ROW.size])) == row[_ROW.size :]
        if not is_sound:
            raise CorruptionError(f"the counts of queue {queue!r} are damaged ({len(row)} bytes)")
        stats = cls()
        stats.restore((*_ROW.unpack_from(row)[1:], 0, 0))
        return stats

    def encode_transient(self) -> bytes:
        return _TRANSIENT.pack(self.transient, self.transient_bytes)

    def restore_transient(self, queue: str, row: bytes) -> None:
        if len(row) != _TRANSIENT.size:
            raise CorruptionError(f"the counts of transient messages of queue {queue!r} are damaged ({len(row)} bytes)")
        self.transient, self.transient_bytes = _TRANSIENT.unpack(row)
