"""Which queue entries are being taken by a transaction that is not finished.

An entry on its way out belongs to one transaction: a second one that would dequeue it is told so at once, before
either has written anything. Open transactions hold their locks in memory only; those of a prepared branch are taken
again from its record when the store is opened.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable
from typing import Final
from uuid import UUID

from basaltmq.errors import EntryLockedError, LimitExceededError
from basaltmq.store.keys import queues as keys

LOCKS_MAX: Final = 1 << 20
"""Entries taken by unfinished transactions at any time: about 128 MiB of memory at worst."""


class EntryLocks:
    """Entry keys, each held by at most one transaction. Safe to share between threads."""

    def __init__(self, limit: int = LOCKS_MAX) -> None:
        self._held: set[bytes] = set()
        self._limit = limit
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return len(self._held)

    def is_held(self, queue_id: UUID, message_id: int) -> bool:
        return keys.queue_entry_key(queue_id, message_id) in self._held

    def take(self, key: bytes) -> None:
        with self._lock:
            if key in self._held:
                queue_id, message_id = keys.decode_queue_entry_key(key)
                raise EntryLockedError(
                    f"message {message_id} of queue {queue_id} is being taken by another transaction; "
                    "try again when that is finished"
                )
            if len(self._held) >= self._limit:
                raise LimitExceededError(
                    f"unfinished transactions hold {self._limit} queue entries; finish some before taking more"
                )
            self._held.add(key)

    def take_recovered(self, entries: Iterable[bytes]) -> None:
        """Those of a branch found prepared: they are owed to it whatever the limit."""
        with self._lock:
            self._held.update(entries)

    def release(self, entries: Iterable[bytes]) -> None:
        with self._lock:
            self._held.difference_update(entries)
