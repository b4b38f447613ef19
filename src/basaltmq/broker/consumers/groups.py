"""Message groups of a queue: all messages of a group go to one consumer, in order, while it consumes.

The queue argument `x-basalt-message-groups` turns them on. The group of a message is its group-id (AMQP 1.0, JMS) or
app_id (AMQP 0-9-1). Messages without one go to any consumer.

The first consumer that reads a message of a new group assigns the group to the consumer with the fewest groups. Each
consumer reads the queue with a scan of its own (`selection.py`) and leaves the messages of others. When a consumer
leaves, its groups have no owner, and the other consumers read the queue again.

The owners are in memory. Above `GROUPS_MAX`, the oldest assignment is dropped, and the next message of that group
assigns it again.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

from basaltmq.broker.consumers.consumer import Consumer
from basaltmq.broker.consumers.selection import Selection
from basaltmq.broker.message import properties
from basaltmq.broker.message.text_headers import envelope_of
from basaltmq.queues.browsing.scan import Scan

GROUPS_MAX: Final = 65_536
"""Groups of a queue with an owner: about 10 MiB."""


class MessageGroups:
    """The groups of one queue and their consumers."""

    __slots__ = ("_counts", "_filtered", "_owners")

    def __init__(self) -> None:
        self._filtered: set[Consumer] = set()
        """Consumers that do not accept all messages."""
        self._owners: dict[str, Consumer] = {}
        self._counts: dict[Consumer, int] = {}
        """Consumers with their number of groups, in the order of their arrival."""

    def add(self, consumer: Consumer) -> None:
        """Add a consumer. One with a filter only gets groups of messages that it accepts."""
        filtered = consumer.selection
        if filtered is not None and filtered.is_copy:
            return
        accepts = None if filtered is None else filtered.accepts
        if accepts is not None:
            self._filtered.add(consumer)
        consumer.selection = Selection(self._chooser(consumer, accepts))
        self._counts[consumer] = 0

    def _chooser(self, consumer: Consumer, accepts: Callable[[Any], bool] | None) -> Callable[[Any], bool]:
        def is_mine(delivery: Any) -> bool:
            if accepts is not None and not accepts(delivery):
                return False
            group = group_of(delivery)
            if not group:
                return True
            owner = self._owners.get(group)
            if owner is None:
                owner = self._assign(group, consumer)
            return owner is consumer

        return is_mine

    def _assign(self, group: str, reader: Consumer) -> Consumer:
        candidates = [reader]
        if reader not in self._filtered:
            candidates = [each for each in self._counts if each.active and each not in self._filtered]
        owner = min(candidates, key=self._counts.__getitem__)
        if len(self._owners) >= GROUPS_MAX:
            first = next(iter(self._owners))
            self._counts[self._owners.pop(first)] -= 1
        self._owners[group] = owner
        self._counts[owner] += 1
        return owner

    def remove(self, consumer: Consumer) -> list[Scan]:
        """Free the groups of a consumer. The others read the queue again, because they have left its messages.

        Return their old scans, which the caller must end.
        """
        self._filtered.discard(consumer)
        if not self._counts.pop(consumer, 0):
            return []
        self._owners = {group: owner for group, owner in self._owners.items() if owner is not consumer}
        return [each.selection.start_over() for each in self._counts if each.selection is not None]


def group_of(delivery: Any) -> str | None:
    """Return the group of a message."""
    envelope = delivery.properties or envelope_of(delivery.headers)
    return properties.parse(properties.decode_envelope(envelope)[2]).app_id
