"""An iterator over a topic as a member of a group.

Partitions are shared with the group's other members in this process. What was handed out is committed when more is
asked for, and when a `with` block ends without an error: so a crash, or an error in the loop, repeats records but skips
none. One consumer belongs to one thread.

A member that leaves, and partitions that are added, change who reads what; a consumer that waits takes notice. If the
topic is deleted, the next call raises TopicNotFoundError, also if another was made under its name: what was committed
in the one says nothing about the other.
"""

from __future__ import annotations

from types import TracebackType
from typing import TYPE_CHECKING, Final, Self

from basaltmq.embedded.waiting import Arrivals, Patience
from basaltmq.errors import StaleMemberError, TopicNotFoundError
from basaltmq.streams.groups import Delivered, Reset
from basaltmq.streams.plane import StreamPlane

if TYPE_CHECKING:
    from basaltmq.embedded.topic import EmbeddedTopic

LEAVE_COMMITS_MAX: Final = 10
"""Tries to commit while leaving; each fails only if a partition changed hands in that very moment."""


class Consumer:
    """One member. Made by `EmbeddedTopic.consume`; leaves the group when closed."""

    def __init__(
        self,
        topic: EmbeddedTopic,
        streams: StreamPlane,
        arrivals: Arrivals,
        group: str,
        reset: Reset,
        wait: float | None,
        batch: int,
    ) -> None:
        Patience(wait)
        self._topic = topic
        self._found = streams.topics.get(topic.name)
        self._members = streams.group(group)
        self._member = self._members.join([topic.name], reset)
        self._arrivals = arrivals
        self._wait = wait
        self._batch = batch
        self._ready: list[Delivered] = []
        """Read but not handed out, the last first."""
        self._taken: dict[tuple[str, int], int] = {}
        """The offset after the last record handed out of `_ready`, by partition."""
        self._committed: dict[tuple[str, int], int] = {}
        """Positions at the last commit."""
        self._closed = False

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> Delivered:
        if self._closed:
            raise StopIteration
        if not self._ready:
            found = self.poll(self._wait)
            if not found:
                self.close()
                raise StopIteration
            self._ready = found[::-1]
        delivered = self._ready.pop()
        self._taken[delivered.topic, delivered.partition] = delivered.offset + 1
        return delivered

    def poll(self, wait: float | None = 0) -> list[Delivered]:
        """Commit what was handed out before, and return the next records; empty after `wait` seconds without any."""
        patience = Patience(wait)
        if self._ready:
            found, self._ready = self._ready[::-1], []
            return found
        self._follow()
        self._commit_read()
        while True:
            seen = self._arrivals.count
            self._follow()
            before = self._positions()
            found = self._member.poll(self._batch)
            if found:
                return found
            # A long run of deleted records is passed over in steps.
            if before == self._positions() and not self._arrivals.wait(seen, patience):
                if not self._arrivals.closed:
                    self._commit_read()
                return []

    def commit(self) -> None:
        """Commit everything handed out so far; records not yet taken from this iterator are not part of it."""
        if not self._ready:
            self._member.commit()
            self._committed = self._positions()
        else:
            owned = self._member.assignment
            self._member.commit({place: offset for place, offset in self._taken.items() if place in owned})
            self._committed = {}
        self._taken.clear()

    def _commit_read(self) -> None:
        """Commit everything handed out, if that is more than was committed: a poll that finds nothing costs no sync."""
        if not self._closed and self._positions() == self._committed:
            return
        try:
            self.commit()
        except StaleMemberError:
            if self._closed:
                raise
            # A partition went to another member this moment; what was read of it is read again there.

    def _commit_owned(self) -> None:
        """Commit what this member still has; partitions may go to others while it leaves, and are read there."""
        for _ in range(LEAVE_COMMITS_MAX):
            try:
                self.commit()
            except StaleMemberError:
                continue
            return

    def close(self, *, commit: bool = False) -> None:
        """Leave the group. Without `commit`, what was handed out since the last one is read again by who comes next."""
        if self._closed:
            return
        try:
            if commit:
                self._commit_owned()
        finally:
            self._closed = True
            self._ready.clear()
            self._member.close()
            # Those who wait may have been given what this one had.
            self._arrivals.wake()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close(commit=error is None)

    def _positions(self) -> dict[tuple[str, int], int]:
        return {place: self._member.position(place) for place in self._member.assignment}

    def _follow(self) -> None:
        """Take notice of a topic that was deleted or has more partitions."""
        try:
            found = self._topic.require(self._found)
        except TopicNotFoundError:
            self.close()
            raise
        if found.config.partitions != self._found.config.partitions:
            self._found = found
            self._members.rebalance()
