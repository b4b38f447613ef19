"""Batch cursors: cached decoder positions inside Kafka batches, so that the next read continues there.

A batch may hold 100,000 compressed records. A consumer with a prefetch of 1 needs one read per record. Decoding the
batch from its start on every read would take quadratic time. So a read that stops inside a batch caches its cursor, and
the read that starts at that offset of that frame takes it.

The cache key is shard, position of the frame in the log, and offset. Log bytes never change and positions are never
reused, so a cached cursor is always valid. A frame that segment cleaning copied has a new position. Only one reader
uses a cursor at a time: `take` removes it from the cache. The size of the cached batches bounds the memory.
"""

from __future__ import annotations

import threading
from typing import Final

from basaltmq.log.batches.kafka import RecordReader
from basaltmq.log.batches.record import StoredRecord, record_size_bytes

CURSORS_MAX: Final = 1024
"""Maximum number of cached cursors. Without a cached cursor, a read decodes its batch from the start."""

CURSORS_BYTES_MAX: Final = 64 << 20
"""Maximum bytes of all cached cursors: 64 batches of 1 MiB, the default batch limit of brokers."""

CURSOR_BYTES: Final = 256 << 10
"""Estimated memory of a cursor beyond its batch: the decompressor's window and its current output."""


class BatchCursor:
    """A decoder position in one batch. It can hold one decoded record that the reader put back."""

    __slots__ = ("_reader", "_waiting", "size_bytes")

    def __init__(self, raw: bytes, record_bytes_max: int) -> None:
        self._reader = RecordReader(raw, record_bytes_max)
        self._waiting: StoredRecord | None = None
        self.size_bytes = len(raw) + CURSOR_BYTES

    @property
    def is_paused(self) -> bool:
        """Whether a put-back record is pending. After a decode error there is none, and the cursor is useless."""
        return self._waiting is not None

    @property
    def next_offset(self) -> int:
        """The lowest offset that the next record can have."""
        return self._reader.next if self._waiting is None else self._waiting.offset

    def take(self, offset: int) -> StoredRecord | None:
        """Return the next record with an offset of at least `offset`, or None at the end of the batch."""
        record = self._waiting
        self._waiting = None
        if record is None:
            self._reader.skip_to(offset)
            record = next(self._reader, None)
        while record is not None and record.offset < offset:
            record = next(self._reader, None)
        return record

    def put_back(self, record: StoredRecord) -> None:
        """Make the record that was taken last the next one again."""
        self._waiting = record

    def held_bytes(self) -> int:
        return self.size_bytes + (0 if self._waiting is None else record_size_bytes(self._waiting))


class Cursors:
    """A bounded cache of paused cursors. Evicts the oldest first. Thread-safe."""

    def __init__(self, count_max: int = CURSORS_MAX, bytes_max: int = CURSORS_BYTES_MAX) -> None:
        self._count_max = count_max
        self._bytes_max = bytes_max
        self._saved: dict[tuple[int, int, int], tuple[BatchCursor, int]] = {}
        self._bytes = 0
        self._lock = threading.Lock()

    def take(self, shard: int, position: int, offset: int) -> BatchCursor | None:
        """Remove and return the cursor that stopped at `offset` in the frame at `position`."""
        if not self._saved:
            return None
        with self._lock:
            found = self._saved.pop((shard, position, offset), None)
            if found is None:
                return None
            self._bytes -= found[1]
        return found[0]

    def save(self, shard: int, position: int, cursor: BatchCursor) -> None:
        size = cursor.held_bytes()
        if size > self._bytes_max:
            return
        with self._lock:
            key = (shard, position, cursor.next_offset)
            before = self._saved.pop(key, None)
            if before is not None:
                self._bytes -= before[1]
            self._saved[key] = (cursor, size)
            self._bytes += size
            while len(self._saved) > self._count_max or self._bytes > self._bytes_max:
                self._bytes -= self._saved.pop(next(iter(self._saved)))[1]
