"""Unsettled deliveries of a channel.

Delivery tags count from 1 in sending order. A client settles one tag, or all up to a tag. `_low`, the lowest tag that
may be unsettled, is kept, so that settling with `multiple` visits each tag once.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice
from typing import Generic, TypeAlias, TypeVar

from basaltmq.protocols.amqp091.wire.errors import PRECONDITION_FAILED, ChannelFault

Source = TypeVar("Source")
Taken: TypeAlias = tuple[int, Source, int, bytes]
"""Delivery tag, source, lease token, message id."""


class Unacked(Generic[Source]):
    """Unsettled deliveries: delivery tag -> (source, lease token, message id)."""

    __slots__ = ("_low", "entries", "last")

    def __init__(self) -> None:
        self.entries: dict[int, tuple[Source, int, bytes]] = {}
        self.last = 0
        """The last delivery tag used."""
        self._low = 1

    def __len__(self) -> int:
        return len(self.entries)

    def take(self, tag: int, multiple: bool, method: tuple[int, int]) -> list[Taken[Source]]:
        """Remove the deliveries that a client settles, in tag order. Tag 0 with `multiple` means all."""
        entries = self.entries
        if not multiple:
            entry = entries.pop(tag, None)
            if entry is None:
                raise unknown_tag(tag, method)
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
            raise unknown_tag(tag, method)
        self._low = max(self._low, tag + 1)
        return found

    def is_long(self, tag: int, portion: int) -> bool:
        """Whether settling all up to a tag (0: all) takes more than one portion."""
        return (min(tag, self.last) if tag else self.last) - self._low >= portion

    def take_portion(self, tag: int, portion: int) -> tuple[list[Taken[Source]], bool]:
        """Remove a portion of the deliveries up to a tag, in order. Also return whether it was the last portion."""
        stop = min(tag, self.last) + 1
        until = min(stop, self._low + portion)
        entries = self.entries
        found = [(each, *entries.pop(each)) for each in range(self._low, until) if each in entries]
        self._low = max(self._low, until)
        return found, until == stop

    def detach(self, portion: int) -> Iterator[list[Taken[Source]]]:
        """Remove all deliveries, and return them as a lazy iterator of portions."""
        entries, self.entries = self.entries, {}
        self._low = self.last + 1
        rows = iter(entries.items())
        return iter(lambda: [(tag, *entry) for tag, entry in islice(rows, portion)], [])

    def put_back(self, taken: list[Taken[Source]]) -> None:
        """Undo a take, after a transaction was rolled back."""
        for tag, source, token, message_id in taken:
            self.entries[tag] = (source, token, message_id)
            self._low = min(self._low, tag)

    def clear(self) -> list[Taken[Source]]:
        """Remove and return all deliveries, in tag order."""
        found = [(tag, *entry) for tag, entry in sorted(self.entries.items())]
        self.entries = {}
        self._low = self.last + 1
        return found


def unknown_tag(tag: int, method: tuple[int, int]) -> ChannelFault:
    """Return the fault for a delivery tag that was not sent or is already settled."""
    return ChannelFault(PRECONDITION_FAILED, f"unknown delivery tag {tag}", method)
