"""Who takes messages from a queue, and whose turn it is (SPEC E8).

A consumer takes as many messages as it has credit; the channel that owns it counts what is unacknowledged and gives
credit back. Turns go round among consumers of the highest priority that can take something; the others get what those
cannot. With a single active consumer only one is served, the first that came; when it goes, the next takes over.

Consumers that can take something stand in a line per priority, the others do not, so that handing out a message costs
the same among one consumer and among thousands.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, Final, Protocol

from basaltmq.broker.routing.exchange import Arguments

if TYPE_CHECKING:
    from basaltmq.broker.consumers.queue import BrokerQueue

UNLIMITED: Final = 1 << 62
"""The credit of a consumer without a limit."""

LINE_SLACK: Final = 16
"""Consumers that left and may still stand in a line, beside as many as are there."""


class Delivered(Protocol):
    """A message handed to a consumer: the queue plane's Delivery, or a stream's."""

    @property
    def id(self) -> bytes: ...

    @property
    def token(self) -> int: ...

    @property
    def redelivered(self) -> bool: ...

    @property
    def properties(self) -> bytes:
        """Exchange, routing key and properties: see `properties.open_envelope`."""
        ...

    @property
    def payload(self) -> bytes: ...

    def content(self) -> tuple[bytes, bytes]:
        """Properties and payload at once."""
        ...


class ConsumerSink(Protocol):
    """Where a consumer's messages go: a channel."""

    def deliver(self, consumer: Consumer, deliveries: Sequence[Any]) -> None:
        """Take messages, never more than there was credit for. Must not fail."""
        ...

    def cancelled(self, consumer: Consumer) -> None:
        """The queue is gone, and the consumer with it."""
        ...


class Consumer:
    """One subscription."""

    __slots__ = (
        "active",
        "arguments",
        "credit_left",
        "delivered",
        "exclusive",
        "is_cancelled",
        "is_lined_up",
        "no_ack",
        "offset",
        "owner",
        "paused",
        "prefetch",
        "priority",
        "queue",
        "sink",
        "tag",
    )

    def __init__(
        self,
        queue: BrokerQueue,
        sink: ConsumerSink,
        tag: str,
        *,
        no_ack: bool,
        exclusive: bool,
        priority: int,
        prefetch: int,
        arguments: Arguments,
        owner: object,
    ) -> None:
        self.queue = queue
        self.sink = sink
        self.tag = tag
        self.no_ack = no_ack
        self.exclusive = exclusive
        self.priority = priority
        self.prefetch = prefetch
        self.arguments = arguments
        self.owner = owner
        self.credit_left = prefetch or UNLIMITED
        self.paused = False
        self.active = True
        """False while another is the single active one."""
        self.is_cancelled = False
        self.is_lined_up = False
        self.delivered = 0
        self.offset = 0
        """Of a stream: what to read next."""

    def can_take(self) -> bool:
        return self.credit_left > 0 and self.active and not self.paused and not self.is_cancelled

    def credit(self, count: int) -> None:
        """It may take so many more."""
        if self.credit_left < UNLIMITED >> 1:
            self.credit_left += count
            if self.credit_left == count or not self.is_lined_up:
                self.queue.consumers.line_up(self)

    def limit(self, count: int | None) -> None:
        """It may take exactly so many from here on; None: any number."""
        self.credit_left = UNLIMITED if count is None else count
        self.queue.consumers.line_up(self)

    def pause(self) -> None:
        """Its client does not read; hand it nothing for a while."""
        self.paused = True

    def resume(self) -> None:
        self.paused = False
        self.queue.consumers.line_up(self)

    def cancel(self) -> None:
        """Stop; what it holds stays the channel's to settle. Cancelling twice is fine."""
        self.queue.consumers.remove(self)


class Consumers:
    """The consumers of one queue."""

    __slots__ = ("_counts", "_lines", "_order", "_removed", "_single_active", "_wake")

    def __init__(self, *, single_active: bool, wake: Callable[[], None], removed: Callable[[Consumer], None]) -> None:
        """`wake`: somebody can take something. `removed`: somebody is gone."""
        self._single_active = single_active
        self._wake = wake
        self._removed = removed
        self._order: dict[Consumer, None] = {}
        self._counts: dict[int, int] = {}
        """How many there are of each priority."""
        self._lines: dict[int, deque[Consumer]] = {}
        """Per priority, the highest first: those who can take something, whose turn it is first."""

    def __len__(self) -> int:
        return len(self._order)

    def __iter__(self) -> Iterator[Consumer]:
        return iter(list(self._order))

    @property
    def has_exclusive(self) -> bool:
        return any(consumer.exclusive for consumer in self._order)

    def add(self, consumer: Consumer) -> None:
        consumer.active = not (self._single_active and self._order)
        self._order[consumer] = None
        priority = consumer.priority
        self._counts[priority] = self._counts.get(priority, 0) + 1
        if priority not in self._lines:
            self._lines[priority] = deque()
            self._lines = dict(sorted(self._lines.items(), reverse=True))
        self.line_up(consumer)

    def remove(self, consumer: Consumer) -> None:
        if consumer.is_cancelled:
            return
        consumer.is_cancelled = True
        del self._order[consumer]
        priority = consumer.priority
        self._counts[priority] -= 1
        if not self._counts[priority]:
            del self._counts[priority]
            del self._lines[priority]
        elif len(self._lines[priority]) > 2 * self._counts[priority] + LINE_SLACK:
            # Those who left stay in the line until their turn comes, or until there are too many of them.
            self._lines[priority] = deque(each for each in self._lines[priority] if not each.is_cancelled)
        if self._single_active and consumer.active and self._order:
            heir = max(self._order, key=lambda other: other.priority)
            heir.active = True
            self.line_up(heir)
        self._removed(consumer)

    def line_up(self, consumer: Consumer) -> None:
        """It may be able to take something: give it a place."""
        if consumer.can_take():
            if not consumer.is_lined_up:
                consumer.is_lined_up = True
                self._lines[consumer.priority].append(consumer)
            self._wake()

    def first_line(self) -> deque[Consumer] | None:
        """Those of the highest priority who can take something; None if nobody can."""
        for line in self._lines.values():
            while line and not line[0].can_take():
                line.popleft().is_lined_up = False
            if line:
                return line
        return None


def wanted(line: deque[Consumer], count_max: int) -> int:
    """How many messages those in a line take together, up to a limit."""
    count = 0
    for consumer in line:
        if consumer.can_take():
            count += consumer.credit_left
            if count >= count_max:
                return count_max
    return count


def share_out(line: deque[Consumer], deliveries: Sequence[Any]) -> list[tuple[Consumer, Sequence[Any]]]:
    """Give messages one by one to those in a line, each in its turn. There are not more than they want together."""
    first = line[0]
    if len(line) == 1 and first.credit_left >= len(deliveries):
        first.credit_left -= len(deliveries)
        first.delivered += len(deliveries)
        return [(first, deliveries)]
    shares: dict[Consumer, list[Any]] = {}
    for delivery in deliveries:
        while not line[0].can_take():
            line.popleft().is_lined_up = False
        consumer = line[0]
        shares.setdefault(consumer, []).append(delivery)
        consumer.credit_left -= 1
        consumer.delivered += 1
        line.rotate(-1)
    return list(shares.items())
