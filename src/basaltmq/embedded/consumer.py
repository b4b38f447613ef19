"""An iterator over a topic as a member of a consumer group.

The group's members in this process share the partitions. The consumer commits delivered records when it fetches more,
and when a `with` block ends without an error. A crash or an error in the loop therefore repeats records but skips none.
A consumer belongs to one thread.

A member that leaves and new partitions trigger a rebalance; waiting consumers notice it. If the topic is deleted, the
next call raises TopicNotFoundError, even if a topic with the same name was created: old offsets do not apply to it.
"""

from __future__ import annotations

from types import TracebackType
from typing import TYPE_CHECKING, Final, Self

from basaltmq.embedded.waiting import Arrivals, WaitLimit
from basaltmq.errors import StaleMemberError, TopicNotFoundError
from basaltmq.streams.groups import Delivered, Reset
from basaltmq.streams.plane import StreamPlane

if TYPE_CHECKING:
    from basaltmq.embedded.topic import EmbeddedTopic

LEAVE_COMMITS_MAX: Final = 10
"""Attempts to commit while leaving. An attempt fails only if a partition is reassigned at that moment."""


class Consumer:
    """One group member, created by `EmbeddedTopic.consume`. Leaves the group when closed."""

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
        WaitLimit(wait)
        self._topic = topic
        self._found = streams.topics.get(topic.name)
        self._members = streams.group(group)
        self._member = self._members.join([topic.name], reset)
        self._arrivals = arrivals
        self._wait = wait
        self._batch = batch
        self._ready: list[Delivered] = []
        """Records read but not yet delivered, in reverse order."""
        self._taken: dict[tuple[str, int], int] = {}
        """The offset after the last record delivered from `_ready`, by partition."""
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
        """Commit what was delivered before, and return the next records; empty after `wait` seconds without any."""
        wait_limit = WaitLimit(wait)
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
            # A long run of deleted records is skipped in steps, so progress without records is not the end.
            if before == self._positions() and not self._arrivals.wait(seen, wait_limit):
                if not self._arrivals.closed:
                    self._commit_read()
                return []

    def commit(self) -> None:
        """Commit all delivered records, but not those this iterator has read and not yet delivered."""
        if not self._ready:
            self._member.commit()
            self._committed = self._positions()
        else:
            owned = self._member.assignment
            self._member.commit({tp: offset for tp, offset in self._taken.items() if tp in owned})
            self._committed = {}
        self._taken.clear()

    def _commit_read(self) -> None:
        """Commit all delivered records if any are new, so that a poll without records costs no fsync."""
        if not self._closed and self._positions() == self._committed:
            return
        try:
            self.commit()
        except StaleMemberError:
            if self._closed:
                raise
            # A partition was reassigned just now. Its new owner reads the uncommitted records again.

    def _commit_owned(self) -> None:
        """Commit the partitions that this member still owns. Others may be reassigned while it leaves."""
        for _ in range(LEAVE_COMMITS_MAX):
            try:
                self.commit()
            except StaleMemberError:
                continue
            return

    def close(self, *, commit: bool = False) -> None:
        """Leave the group. Without `commit`, records delivered since the last commit are delivered again."""
        if self._closed:
            return
        try:
            if commit:
                self._commit_owned()
        finally:
            self._closed = True
            self._ready.clear()
            self._member.close()
            # Waiting members may have got this member's partitions.
            self._arrivals.wake()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close(commit=error is None)

    def _positions(self) -> dict[tuple[str, int], int]:
        return {tp: self._member.position(tp) for tp in self._member.assignment}

    def _follow(self) -> None:
        """Check whether the topic was deleted, and rebalance if it has more partitions."""
        try:
            found = self._topic.require(self._found)
        except TopicNotFoundError:
            self.close()
            raise
        if found.config.partitions != self._found.config.partitions:
            self._found = found
            self._members.rebalance()
