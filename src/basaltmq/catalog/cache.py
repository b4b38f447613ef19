"""A bounded cache that is never behind the store.

A value read from the store is put together with the epoch taken before the read. Whoever changes a row discards its
key after the write, which also ends the epoch: a reader that was overtaken by the change finds its epoch gone and
caches nothing. So what is cached is what the store has, or is discarded before the change returns.

Bounded by bytes, least recently used first out. None is a value like any other: that nothing is there is worth
remembering too.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from typing import Final, Generic, TypeVar

V = TypeVar("V")

ENTRY_BYTES: Final = 400
"""What an entry costs beside its bytes: measured as 399 for an object, 274 for a name."""


class Cache(Generic[V]):
    """Values by key, at most `bytes_max` of them."""

    def __init__(self, bytes_max: int) -> None:
        self.epoch = 0
        self._bytes_max = bytes_max
        self._size_bytes = 0
        self._entries: OrderedDict[bytes, tuple[V, int]] = OrderedDict()
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return len(self._entries)

    @property
    def size_bytes(self) -> int:
        return self._size_bytes

    def get(self, key: bytes) -> tuple[V, int] | None:
        """The value (and its size) if it is cached."""
        with self._lock:
            entry = self._entries.get(key)
            if entry is not None:
                self._entries.move_to_end(key)
            return entry

    def put(self, key: bytes, value: V, value_bytes: int, epoch: int) -> None:
        """Keep a value read in `epoch`, unless something changed since."""
        size = len(key) + value_bytes + ENTRY_BYTES
        if size > self._bytes_max:
            return
        with self._lock:
            if epoch != self.epoch:
                return
            self._drop(key)
            self._entries[key] = (value, size)
            self._size_bytes += size
            while self._size_bytes > self._bytes_max:
                self._drop(next(iter(self._entries)))

    def discard(self, *keys: bytes) -> None:
        with self._lock:
            self.epoch += 1
            for key in keys:
                self._drop(key)

    def clear(self) -> None:
        with self._lock:
            self.epoch += 1
            self._entries.clear()
            self._size_bytes = 0

    def _drop(self, key: bytes) -> None:
        entry = self._entries.pop(key, None)
        if entry is not None:
            self._size_bytes -= entry[1]
