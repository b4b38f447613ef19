"""Methods that all backing queues share."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence

from basaltmq.queues.change import Change
from basaltmq.queues.entries.backing import Entry
from basaltmq.queues.ready.row_changes import cancel_rows, delete_rows, put_rows


class BackingQueueBase(ABC):
    """Implements part of `BackingQueue` on top of fetch, put_back and head."""

    __slots__ = ()

    @abstractmethod
    def fetch(self, count: int) -> list[Entry]: ...

    @abstractmethod
    def fetchwhile(self, holds: Callable[[Entry], bool], count_max: int, sub: str | None = None) -> list[Entry]: ...

    @abstractmethod
    def put_back(self, entries: Sequence[Entry]) -> None: ...

    @abstractmethod
    def head(self) -> Entry | None: ...

    def publish_delivered(self, change: Change, entries: Sequence[Entry]) -> None:
        put_rows(change, entries)

    def discard(self, change: Change, entries: Sequence[Entry]) -> None:
        cancel_rows(change, entries)

    def requeue(self, change: Change, entries: Sequence[Entry]) -> None:
        change.after(lambda: self.put_back(entries))

    def is_empty(self) -> bool:
        return self.head() is None

    def ack(self, change: Change, entries: Sequence[Entry]) -> None:
        delete_rows(change, entries)

    def drop(self, change: Change, count: int) -> list[Entry]:
        return self._delete_taken(change, self.fetch(count))

    def dropwhile(
        self, change: Change, holds: Callable[[Entry], bool], count_max: int, sub: str | None = None
    ) -> list[Entry]:
        return self._delete_taken(change, self.fetchwhile(holds, count_max, sub))

    def _delete_taken(self, change: Change, taken: list[Entry]) -> list[Entry]:
        delete_rows(change, taken)
        change.undo(lambda: self.put_back(taken))
        return taken
