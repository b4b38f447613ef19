"""Message ids of the message store: u64, increasing, never reused (SPEC A4).

The row `nextMessageId` in `version` says from which id on nothing was ever handed out. It is moved ahead a block at a
time, and rides in the batch that first stores an id of the block, so no message costs a write of its own. A crash
skips what is left of a block.

    written <= every id of a stored batch that did not carry the row < row in that batch
    next    the id handed out next; anything below may be in a batch on its way

A batch whose ids are all below `written` goes its own way. One that is not carries the row and is written under the
lock, with the end of reservation as of that moment: batches that carry the row reach the store in order, so the row
never goes back.
"""

from __future__ import annotations

import threading
from struct import Struct
from typing import Final

from basaltmq.errors import CorruptionError, StoreStalledError
from basaltmq.store.api import Store
from basaltmq.store.batch import Batch
from basaltmq.store.families import Family
from basaltmq.store.keys import queues as keys

NEXT_MESSAGE_ID: Final = b"nextMessageId"
ID_BLOCK: Final = 4096
"""One row in 4096 messages carries the reservation; a crash every second for a century uses 2^44 of 2^64 ids."""

FIRST_ID: Final = 1
LOCK_WAIT_S: Final = 0.05
"""How long a loop waits for a thread that is writing a reservation; longer means that the store is stalled."""

_ROW: Final = Struct(">Q")


def encode_next_id(next_id: int) -> bytes:
    return _ROW.pack(next_id)


def decode_next_id(raw: bytes) -> int:
    if len(raw) != _ROW.size:
        raise CorruptionError(f"the row nextMessageId has {len(raw)} bytes, not {_ROW.size}")
    next_id: int = _ROW.unpack(raw)[0]
    return next_id


class IdSequence:
    """Hands out message ids. Safe to share between threads."""

    def __init__(self, store: Store, block: int = ID_BLOCK) -> None:
        assert block > 0
        self._store = store
        self._block = block
        self._counters = threading.Lock()
        self._writing = threading.Lock()
        raw = store.get(Family.VERSION, NEXT_MESSAGE_ID)
        next_id = FIRST_ID if raw is None else decode_next_id(raw)
        # A row that was lost or set back by hand must not lead to an id that is in use.
        for key, _ in store.scan(Family.MESSAGE_METADATA, reverse=True):
            next_id = max(next_id, keys.decode_metadata_key(key) + 1)
            break
        self._next = self._reserved = self._written = next_id

    @property
    def next_id(self) -> int:
        return self._next

    def take(self) -> int:
        """An id nobody had."""
        with self._counters:
            if self._next == self._reserved:
                self._reserved += self._block
            taken = self._next
            self._next = taken + 1
            return taken

    def covers(self, message_id: int) -> bool:
        """Whether a batch that stores `message_id` may be written without the row."""
        return message_id < self._written

    def write(self, batch: Batch, *, wait_ms: int | None = None) -> None:
        """Write a batch together with the row that covers every id handed out so far."""
        if not self._writing.acquire(timeout=-1 if wait_ms is None else LOCK_WAIT_S + wait_ms / 1000):
            raise StoreStalledError("the store is behind with compaction; nothing was written, try again")
        try:
            end = self._reserved
            carrying = Batch()
            carrying.extend(batch)
            carrying.put(Family.VERSION, NEXT_MESSAGE_ID, encode_next_id(end))
            self._store.write(carrying, wait_ms=wait_ms)
            self._written = end
        finally:
            self._writing.release()
