"""Deliveries of a channel that wait for the client's word.

Delivery tags are numbers from 1 on, in the order of sending. A client settles one tag, or all up to one. The lowest tag
that may be unsettled is remembered, so that settling "all up to" walks over each tag once in its life.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice
from typing import Generic, TypeAlias, TypeVar

from basaltmq.protocols.amqp091.wire.errors import PRECONDITION_FAILED, ChannelFault

Source = TypeVar("Source")
Taken: TypeAlias = tuple[int, Source, int, bytes]
"""Tag, source, lease token, message id."""


class Unacked(Generic[Source]):
    """What was sent and is not settled: tag -> (where it came from, lease token, message id)."""

    __slots__ = ("_low", "entries", "last")

    def __init__(self) -> None:
        self.entries: dict[int, tuple[Source, int, bytes]] = {}
        self.last = 0
        """The last tag given out."""
        self._low = 1

    def __len__(self) -> int:
        return len(self.entries)

    def take(self, tag: int, multiple: bool, method: tuple[int, int]) -> list[Taken[Source]]:
        """Take out what a client settles, in order of the tags; tag 0 with `multiple` is everything."""
        entries = self.entries
        if not multiple:
            entry = entries.pop(tag, None)
            if entry is None:
                raise unknown(tag, method)
            return [(tag, *entry)]
        everything = tag == 0
        if everything:
            tag = self.last
        found = []
        for each in range(self._low, min(tag, self.last) + 1):
            entry = entries.pop(each, None)
            if entry is not None:
                found.append((each, *entry))
        if not everything and (tag > self.last or not found):
            self.put_back(found)
            raise unknown(tag, method)
        self._low = max(self._low, tag + 1)
        return found

    def is_long(self, tag: int, portion: int) -> bool:
        """Whether "all up to a tag" (0: everything) takes more than one portion."""
        return (min(tag, self.last) if tag else self.last) - self._low >= portion

    def take_portion(self, tag: int, portion: int) -> tuple[list[Taken[Source]], bool]:
        """Take out some of those up to a tag, in order; whether that were all."""
        stop = min(tag, self.last) + 1
        until = min(stop, self._low + portion)
        entries = self.entries
        found = [(each, *entries.pop(each)) for each in range(self._low, until) if each in entries]
        self._low = max(self._low, until)
        return found, until == stop

    def detach(self, portion: int) -> Iterator[list[Taken[Source]]]:
        """Take everything, in portions that may be asked for later."""
        entries, self.entries = self.entries, {}
        self._low = self.last + 1
        rows = iter(entries.items())
        return iter(lambda: [(tag, *entry) for tag, entry in islice(rows, portion)], [])

    def put_back(self, taken: list[Taken[Source]]) -> None:
        """Undo a take: a transaction was rolled back."""
        for tag, source, token, message_id in taken:
            self.entries[tag] = (source, token, message_id)
            self._low = min(self._low, tag)

    def clear(self) -> list[Taken[Source]]:
        """Take everything."""
        found = [(tag, *entry) for tag, entry in sorted(self.entries.items())]
        self.entries = {}
        self._low = self.last + 1
        return found


def unknown(tag: int, method: tuple[int, int]) -> ChannelFault:
    """The client settles what it was not sent, or has settled."""
    return ChannelFault(PRECONDITION_FAILED, f"unknown delivery tag {tag}", method)
