"""A store over a read-only base store: writes stay in memory and are lost at close.

Some steps update rows at open: version upgrades, and a stream index behind its log. The overlay lets them run on a
read-only view, next to the process that owns the store. Its memory is not bounded, so use it only to catch up and for
dry runs.

Reads look in the overlay first, where a row is marked as put or deleted. Scans merge both layers in key order.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from heapq import merge
from pathlib import Path
from typing import Final

from basaltmq.errors import StoreReadOnlyError
from basaltmq.store.api import Reader, Snapshot, Store
from basaltmq.store.batch import DELETE, PUT, Batch
from basaltmq.store.families import Family
from basaltmq.store.memory import MemoryStore, checked_size_bytes

_PRESENT: Final = b"\x01"
_DELETED: Final = b"\x00"


class _Layers:
    """Reads an upper layer of marks over a lower layer."""

    def __init__(self, lower: Reader, upper: Reader) -> None:
        self._lower = lower
        self._upper = upper

    def get(self, family: Family, key: bytes) -> bytes | None:
        mark = self._upper.get(family, key)
        if mark is None:
            return self._lower.get(family, key)
        return _shown(mark)

    def get_many(self, family: Family, keys: Sequence[bytes]) -> list[bytes | None]:
        marks = self._upper.get_many(family, keys)
        below = iter(self._lower.get_many(family, [key for key, mark in zip(keys, marks, strict=True) if mark is None]))
        return [next(below) if mark is None else _shown(mark) for mark in marks]

    def scan(
        self, family: Family, start: bytes = b"", end: bytes | None = None, *, reverse: bool = False
    ) -> Iterator[tuple[bytes, bytes]]:
        lower = self._lower.scan(family, start, end, reverse=reverse)
        upper = self._upper.scan(family, start, end, reverse=reverse)
        return _merged(lower, upper, reverse)


def _merged(
    lower: Iterator[tuple[bytes, bytes]], upper: Iterator[tuple[bytes, bytes]], reverse: bool
) -> Iterator[tuple[bytes, bytes]]:
    # `merge` is stable: for equal keys the upper layer's row comes first and wins.
    both = merge(
        ((key, mark, True) for key, mark in upper),
        ((key, value, False) for key, value in lower),
        key=lambda row: row[0],
        reverse=reverse,
    )
    decided: bytes | None = None
    for key, value, is_mark in both:
        if is_mark:
            decided = key
            if value[:1] == _PRESENT:
                yield key, value[1:]
        elif key != decided:
            yield key, value


def _shown(mark: bytes) -> bytes | None:
    return mark[1:] if mark[:1] == _PRESENT else None


class OverlayStore(_Layers):
    """A `ManagedStore` that keeps its writes in memory, over a read-only store."""

    def __init__(self, base: Store) -> None:
        self._base = base
        self._marks = MemoryStore()
        super().__init__(base, self._marks)

    def snapshot(self, *families: Family) -> OverlaySnapshot:
        return OverlaySnapshot(self._base.snapshot(*families), self._marks.snapshot(*families))

    def write(self, batch: Batch, *, wal: bool = True, wait_ms: int | None = None) -> None:
        checked_size_bytes(batch)
        marks = Batch()
        for kind, family, key, value in batch.ops:
            if kind == PUT:
                marks.put(family, key, _PRESENT + value)
            elif kind == DELETE:
                marks.put(family, key, _DELETED)
            else:
                marks.delete_range(family, key, value)
                for below, _ in self._base.scan(family, key, value):
                    marks.put(family, below, _DELETED)
        self._marks.write(marks)

    def on_write(self, listener: Callable[[int], None]) -> None:
        self._marks.on_write(listener)

    def sync(self) -> None:
        """Do nothing durable: the overlay has no disk."""
        self._marks.sync()

    def size_bytes(self) -> int:
        return self._base.size_bytes() + self._marks.size_bytes()

    def is_behind(self) -> bool:
        return self._marks.is_behind()

    def has_unreadable(self, family: Family) -> bool:
        return self._marks.has_unreadable(family)

    def writes(self) -> int:
        return self._marks.writes()

    def poison(self, error: BaseException) -> None:
        self._marks.poison(error)

    def discard(self) -> None:
        """Drop all writes, so that reads show the base store."""
        fresh = MemoryStore()
        self._marks.close()
        self._marks = fresh
        self._upper = fresh

    def close(self) -> None:
        self._marks.close()
        self._base.close()

    def set_options(self, options: Mapping[str, str], family: Family | None = None) -> None:
        raise _read_only()

    def flush(self, family: Family | None = None, *, wait: bool = True) -> None:
        """Do nothing: the base store is read-only."""
        self._marks.flush()

    def compact(self, family: Family | None = None) -> None:
        raise _read_only()

    def properties(self, family: Family | None = None) -> dict[str, int]:
        return self._marks.properties(family)

    def statistics(self) -> dict[str, str]:
        return self._marks.statistics()

    def checkpoint(self, target: Path, *, add_files: Callable[[Path], None] | None = None) -> None:
        raise _read_only()

    def verify(self, progress: Callable[[int, int], None] | None = None) -> list[str]:
        raise _read_only()


class OverlaySnapshot(_Layers, Snapshot):
    """Both layers of some families as of one point in time."""

    def __init__(self, lower: Snapshot, upper: Snapshot) -> None:
        super().__init__(lower, upper)
        self._snapshots = (lower, upper)

    def close(self) -> None:
        for snapshot in self._snapshots:
            snapshot.close()


def _read_only() -> StoreReadOnlyError:
    return StoreReadOnlyError("a view cannot do this; open the store for writing")
