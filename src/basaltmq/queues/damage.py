"""Operators' view of damage: quarantined rows and failed queues (SPEC A12, P7, P11).

Readers note damaged rows (`Quarantine`). `settle` moves them in a separate change after the operation that found them,
and subtracts them from the counts of their queues.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from itertools import islice
from typing import Final

from basaltmq.errors import CorruptionError, QueueFailedError, QueueNotFoundError, StoreStalledError
from basaltmq.queues.change import Change
from basaltmq.queues.change_runner import ChangeRunner
from basaltmq.queues.entries import rows
from basaltmq.queues.entries.backing import APART
from basaltmq.queues.entries.quarantine import PENDING_MAX, Record, find_record, records
from basaltmq.queues.loaded_queues import LoadedQueues
from basaltmq.queues.plane_context import PlaneContext
from basaltmq.queues.recovery.recount import counted
from basaltmq.queues.stats import QueueStats
from basaltmq.store.api import Store
from basaltmq.store.families import Family

LIST_MAX: Final = 1000
"""Records per answer; a value has up to 2 MiB."""


class Recount:
    """Result of reading a whole queue: its counts and its unreadable rows."""

    def __init__(self) -> None:
        self.stats = QueueStats()
        self.damaged: list[tuple[Family, bytes, bytes | None, str]] = []

    def note(self, family: Family, key: bytes, value: bytes | None, reason: str) -> None:
        # Rows beyond the limit are found again when they are read.
        if len(self.damaged) < PENDING_MAX:
            self.damaged.append((family, key, value, reason))


class Damage:
    """Quarantine and failed queues of a plane. Thread-safe."""

    def __init__(self, store: Store, shared: PlaneContext, changes: ChangeRunner, loaded: LoadedQueues) -> None:
        self._store = store
        self._shared = shared
        self._changes = changes
        self._loaded = loaded

    def settle(self) -> None:
        """Move noted rows to quarantine. If the store stalls, they are moved later."""
        quarantine = self._shared.quarantine
        if not quarantine.is_pending or self._changes.is_open:
            return

        def move(change: Change) -> None:
            for name, loss in quarantine.move(change).items():
                with suppress(QueueNotFoundError, QueueFailedError):
                    # A failed queue is recounted when it is restarted.
                    queue = self._loaded.require(name)
                    queue.touch(change)
                    queue.stats.lose(loss)

        with suppress(StoreStalledError):
            self._changes.run(move)

    def total(self) -> int:
        """Number of quarantined rows."""
        with self._changes.lock:
            return self._shared.quarantine.total

    def records(self, queue: str | None = None, *, after: str = "", count: int = LIST_MAX) -> list[Record]:
        """Return quarantined rows, of one queue or of all, starting after the id `after`."""
        with self._changes.lock:
            self._changes.require_open()
            self.settle()
            found: Iterator[Record] = records(self._store, queue)
            if after:
                for record in found:
                    if record.id == after:
                        break
            return list(islice(found, min(count, LIST_MAX)))

    def record(self, record_id: str) -> Record:
        with self._changes.lock:
            self._changes.require_open()
            return find_record(self._store, record_id)

    def delete(self, record_id: str) -> Record:
        """Delete a quarantined row for good, with the body it refers to. Durable on return."""
        with self._changes.lock:
            record = self.record(record_id)
            self._changes.do(lambda change: self._shared.quarantine.delete(change, record, self._release))
        self._changes.sync()
        return record

    def _release(self, change: Change, key: bytes, row: bytes) -> None:
        with suppress(CorruptionError):
            entry = rows.read_entry(key, row)
            if entry.flags & APART:
                self._shared.content.release(change, [(rows.body_of(row), key[-16:], entry.flags)])

    def down(self) -> list[str]:
        """Queues that failed too often and need a restart."""
        with self._changes.lock:
            return self._loaded.failures.down()

    def error_of(self, name: str) -> str | None:
        """Return why a queue is down; None if it is not."""
        with self._changes.lock:
            return self._loaded.failures.error_of(name)

    def restart(self, name: str) -> None:
        """Reload a queue from disk and recount it. State in memory only is lost. Durable on return."""
        self.begin_restart(name)
        self.finish_restart(name, self.count(name))
        self._changes.sync()

    def begin_restart(self, name: str) -> None:
        """Unload a queue; it is down until `finish_restart`."""
        with self._changes.lock:
            self._changes.require_alone("restart")
            self._loaded.take_down(name)

    def count(self, name: str) -> Recount:
        """Recount a queue that is down from its rows. Reads all of them and holds no lock."""
        found = Recount()
        found.stats = counted(self._store, name, found, self._loaded.counts_on_disk(name))
        return found

    def finish_restart(self, name: str, found: Recount) -> None:
        """Serve a queue again with these counts, without the unreadable rows."""
        with self._changes.lock:
            self._changes.require_alone("restart")
            for row in found.damaged:
                self._shared.quarantine.note(*row)
            self._changes.do(lambda change: self._loaded.bring_up(change, name, found.stats))
