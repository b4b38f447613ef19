"""What a store is: an ordered key-value store with families, atomic batches, snapshots.

Two implementations (`rocks`, `memory`), one conformance suite. Reads see every write that returned, durable or not;
`sync` makes all of them durable. A scan and a snapshot see the moment they were made, whatever is written meanwhile.
Safe to share between threads; one scan belongs to one thread. After a failed write or sync the store is poisoned:
every call raises until it is opened again, because what memory shows may not be what the disk has. Scans and snapshots
made before end with that error too, a scan at the latest when the rows it read ahead are used up.

Not errors of the disk, and therefore without effect and without poison: a batch with something other than bytes
(InvalidArgumentError), one over the limit (LimitExceededError), one the store has no room for right away
(StoreStalledError).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Protocol, Self

from basaltmq.store.batch import Batch
from basaltmq.store.families import Family


class Reader(Protocol):
    """Reads of one moment."""

    def get(self, family: Family, key: bytes) -> bytes | None: ...

    def get_many(self, family: Family, keys: Sequence[bytes]) -> list[bytes | None]:
        """The values in the order of the keys, None for a key that is missing."""
        ...

    def scan(
        self, family: Family, start: bytes = b"", end: bytes | None = None, *, reverse: bool = False
    ) -> Iterator[tuple[bytes, bytes]]:
        """Rows with start <= key < end in key order, or from the last to the first when `reverse`.

        None as `end` is no bound. A range whose end does not come after its start holds nothing.
        """
        ...


class Snapshot(Reader, Protocol):
    """Reads of the families it was made for, all of one moment. Close it: it holds memory and files."""

    def close(self) -> None: ...

    def __enter__(self) -> Self: ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...


class Store(Reader, Protocol):
    """The interface everything above stands on."""

    def snapshot(self, *families: Family) -> Snapshot: ...

    def write(self, batch: Batch, *, wal: bool = True, wait_ms: int | None = None) -> None:
        """Apply a batch as one, its operations in their order.

        Survives a process crash on return (with `wal`), a power loss after `sync`.

        When the store is behind, waits up to `wait_ms` (None: the store's own limit), then raises StoreStalledError
        and has applied nothing.
        """
        ...

    def sync(self) -> None:
        """Return when every write that returned before this call is durable."""
        ...

    def size_bytes(self) -> int:
        """What all families hold, in memory tables and files."""
        ...

    def poison(self, error: BaseException) -> None:
        """Refuse every further call, naming `error` as the cause."""
        ...

    def close(self) -> None:
        """Flush, sync and close. Closing twice is fine."""
        ...


class ManagedStore(Store, Protocol):
    """A store with the operator's tools (SPEC A10). An operation without a family covers all families."""

    def on_write(self, listener: Callable[[int], None]) -> None:
        """Call `listener` with the bytes of every batch once it is applied; there is one listener, the size guard."""
        ...

    def writes(self) -> int:
        """How many writes there were, failed ones included; while it is the same, what was read is still so."""
        ...

    def set_options(self, options: Mapping[str, str], family: Family | None = None) -> None: ...

    def flush(self, family: Family | None = None, *, wait: bool = True) -> None: ...

    def compact(self, family: Family | None = None) -> None: ...

    def properties(self, family: Family | None = None) -> dict[str, int]:
        """Figures of one family; without one, the sums over all families and the figures of the database itself."""
        ...

    def statistics(self) -> dict[str, str]: ...

    def checkpoint(self, target: Path, *, beside: Callable[[Path], None] | None = None) -> None:
        """An openable copy of this moment at `target`, which must not exist.

        `beside` is called with the directory in the making, to add what lies beside the database.
        """
        ...

    def verify(self, progress: Callable[[int, int], None] | None = None) -> list[str]:
        """Read everything back; one line per fault, naming the file. `progress(done, total)` in bytes."""
        ...
