"""The store interface: an ordered key-value store with column families, atomic batches and snapshots.

`rocks` and `memory` implement it; both pass one conformance suite. Reads see every write that returned, durable or not.
`sync` makes all of them durable. A scan or snapshot sees the state at its creation, regardless of later writes.

A store may be shared between threads; a scan belongs to one thread. A failed write or sync poisons the store: every
call raises until the store is reopened, because memory and disk may differ. Open scans and snapshots fail with the same
error. A scan may first return the rows it has read ahead.

Three errors mean that the batch was not applied and do not poison the store: a batch with values that are not bytes
(InvalidArgumentError), a batch over the size limit (LimitExceededError), and a write stall (StoreStalledError).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Protocol, Self

from basaltmq.store.batch import Batch
from basaltmq.store.families import Family


class Reader(Protocol):
    """Read operations on a consistent state."""

    def get(self, family: Family, key: bytes) -> bytes | None: ...

    def get_many(self, family: Family, keys: Sequence[bytes]) -> list[bytes | None]:
        """Return a value per key, in the order of `keys`. None for a missing key."""
        ...

    def scan(
        self, family: Family, start: bytes = b"", end: bytes | None = None, *, reverse: bool = False
    ) -> Iterator[tuple[bytes, bytes]]:
        """Yield rows with start <= key < end in key order, or in reverse key order when `reverse`.

        An `end` of None means no upper bound. The range is empty unless start < end.
        """
        ...


class Snapshot(Reader, Protocol):
    """Reads of the given families as of one point in time. Close it: it pins memory and files."""

    def close(self) -> None: ...

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class Store(Reader, Protocol):
    """The store that the queue plane, the stream plane and the catalog use."""

    def snapshot(self, *families: Family) -> Snapshot: ...

    def write(self, batch: Batch, *, wal: bool = True, wait_ms: int | None = None) -> None:
        """Apply the operations of a batch atomically and in order.

        The write survives a process crash on return (with `wal`) and a power loss after `sync`.

        If the store stalls, wait up to `wait_ms` (None: the store's own limit), then raise StoreStalledError. Nothing
        is applied in that case.
        """
        ...

    def sync(self) -> None:
        """Return when every write that returned before this call is durable."""
        ...

    def size_bytes(self) -> int:
        """Return the size of all families in memtables and files."""
        ...

    def has_unreadable(self, family: Family) -> bool:
        """Return whether reads have skipped unreadable rows of a family since the last repair."""
        ...

    def is_behind(self) -> bool:
        """Return whether memtables with message bodies wait for their flush, so that large writes should be delayed.

        Without the delay the store stalls, and then it refuses small writes too.
        """
        ...

    def poison(self, error: BaseException) -> None:
        """Make every further call fail with `error` as the cause."""
        ...

    def close(self) -> None:
        """Flush, sync and close. Idempotent."""
        ...


class ManagedStore(Store, Protocol):
    """A store with operator functions (SPEC A10). An operation without a family covers all families."""

    def on_write(self, listener: Callable[[int], None]) -> None:
        """Set the one write listener (the size guard). It receives the byte size of every applied batch."""
        ...

    def writes(self) -> int:
        """Return the number of writes, including failed ones. Rows read earlier are current while it is unchanged."""
        ...

    def set_options(self, options: Mapping[str, str], family: Family | None = None) -> None: ...

    def flush(self, family: Family | None = None, *, wait: bool = True) -> None: ...

    def compact(self, family: Family | None = None) -> None: ...

    def properties(self, family: Family | None = None) -> dict[str, int]:
        """Return the figures of one family, or the sums over all families plus database-wide figures."""
        ...

    def statistics(self) -> dict[str, str]: ...

    def checkpoint(self, target: Path, *, add_files: Callable[[Path], None] | None = None) -> None:
        """Create an openable copy of the current state at `target`, which must not exist.

        `add_files` is called with the unfinished directory so that the caller can add files next to the database.
        """
        ...

    def verify(self, progress: Callable[[int, int], None] | None = None) -> list[str]:
        """Read all data back and return one line per fault, naming the file. `progress(done, total)` counts bytes."""
        ...
