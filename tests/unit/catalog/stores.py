"""A store that counts writes and fails on demand, and a dump of all rows."""

from __future__ import annotations

from basaltmq.store.api import Store
from basaltmq.store.batch import Batch
from basaltmq.store.families import Family
from basaltmq.store.memory import MemoryStore


class CountingStore(MemoryStore):
    """Counts batches and syncs, and fails the write that the test selects."""

    def __init__(self) -> None:
        super().__init__()
        self.batches: list[Batch] = []
        self.syncs = 0
        self.reads = 0
        self.fail_at: int | None = None

    def write(self, batch: Batch, *, wal: bool = True, wait_ms: int | None = None) -> None:
        if self.fail_at is not None and len(self.batches) >= self.fail_at:
            raise OSError("the power is gone")
        self.batches.append(batch)
        super().write(batch, wal=wal, wait_ms=wait_ms)

    def get(self, family: Family, key: bytes) -> bytes | None:
        self.reads += 1
        return super().get(family, key)

    def sync(self) -> None:
        self.syncs += 1
        super().sync()


def rows(store: Store, *families: Family) -> dict[tuple[str, bytes], bytes]:
    """Return all rows of some families, or of all."""
    return {(family.label, key): value for family in families or tuple(Family) for key, value in store.scan(family)}
