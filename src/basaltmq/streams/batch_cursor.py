"""Cursors: readers inside a Kafka batch, kept so that the next read goes on where this one stopped.

A batch may hold 100,000 records and be compressed. A consumer with a prefetch of 1 reads it in as many reads; to decode
it anew for each costs time that grows with the square of its records. So a read that stops inside a batch leaves its
cursor, and the read that begins at that offset of that frame takes it.

A cursor is found by shard, position of the frame in the log, and offset. Bytes of a log do not change and positions are
not used again, so a cursor is never wrong; a frame that cleaning moved has another position. A cursor is used by one
reader: it is taken out, and left again. Memory is bounded by the bytes of the batches that cursors hold.
"""

from __future__ import annotations

import threading
from typing import Final

from basaltmq.log.batches.kafka import RecordReader
from basaltmq.log.batches.record import StoredRecord, record_size_bytes

CURSORS_MAX: Final = 1024
"""Consumers inside a batch at once; those beyond decode it from its beginning."""

CURSORS_BYTES_MAX: Final = 64 << 20
"""What cursors may hold together: 64 batches of the 1 MiB that brokers allow by default."""

CURSOR_BYTES: Final = 256 << 10
"""What a cursor costs beside its batch: the window of a decompressor and the pieces it is at."""


class BatchCursor:
    """Reads on in one batch. A record that was read and not taken waits in it."""

    __slots__ = ("_reader", "_waiting", "size_bytes")

    def __init__(self, raw: bytes, record_bytes_max: int) -> None:
        self._reader = RecordReader(raw, record_bytes_max)
        self._waiting: StoredRecord | None = None
        self.size_bytes = len(raw) + CURSOR_BYTES

    @property
    def is_paused(self) -> bool:
        """Does a record wait in it? After an error none does, and the cursor is of no use."""
        return self._waiting is not None

    @property
    def next_offset(self) -> int:
        """The least offset that the next record can have."""
        return self._reader.next if self._waiting is None else self._waiting.offset

    def take(self, offset: int) -> StoredRecord | None:
        """The next record at `offset` or behind it; None at the end."""
        record = self._waiting
        self._waiting = None
        if record is None:
            self._reader.skip_to(offset)
            record = next(self._reader, None)
        while record is not None and record.offset < offset:
            record = next(self._reader, None)
        return record

    def put_back(self, record: StoredRecord) -> None:
        """The record that was taken last is to be the next one."""
        self._waiting = record

    def held_bytes(self) -> int:
        return self.size_bytes + (0 if self._waiting is None else record_size_bytes(self._waiting))


class Cursors:
    """Cursors that readers left."""

    def __init__(self, count_max: int = CURSORS_MAX, bytes_max: int = CURSORS_BYTES_MAX) -> None:
        self._count_max = count_max
        self._bytes_max = bytes_max
        self._left: dict[tuple[int, int, int], tuple[BatchCursor, int]] = {}
        self._bytes = 0
        self._lock = threading.Lock()

    def take(self, shard: int, position: int, offset: int) -> BatchCursor | None:
        """The cursor that stopped at `offset` of the frame at `position`."""
        if not self._left:
            return None
        with self._lock:
            found = self._left.pop((shard, position, offset), None)
            if found is None:
                return None
            self._bytes -= found[1]
        return found[0]

    def leave(self, shard: int, position: int, cursor: BatchCursor) -> None:
        size = cursor.held_bytes()
        if size > self._bytes_max:
            return
        with self._lock:
            key = (shard, position, cursor.next_offset)
            before = self._left.pop(key, None)
            if before is not None:
                self._bytes -= before[1]
            self._left[key] = (cursor, size)
            self._bytes += size
            while len(self._left) > self._count_max or self._bytes > self._bytes_max:
                self._bytes -= self._left.pop(next(iter(self._left)))[1]
