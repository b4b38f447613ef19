"""What backing queues share, one and those made of several: taking messages away for good.

Each says how messages are found and returned; deleting them is the same for all, and is undone by returning them.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence

from basaltmq.queues.change import Change
from basaltmq.queues.ready.backing import Entry
from basaltmq.queues.ready.row_changes import delete_rows


class Proxy(ABC):
    """The deleting half of a `BackingQueue`."""

    __slots__ = ()

    @abstractmethod
    def fetch(self, count: int) -> list[Entry]: ...

    @abstractmethod
    def fetchwhile(self, holds: Callable[[Entry], bool], count_max: int, sub: str | None = None) -> list[Entry]: ...

    @abstractmethod
    def put_back(self, entries: Sequence[Entry]) -> None: ...

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
