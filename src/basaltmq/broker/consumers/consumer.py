"""Consumers of a queue: credit, priorities, round-robin and single active consumer (SPEC E8).

A consumer receives at most as many messages as it has credit. Its channel counts unacknowledged messages and returns
credit. Messages go round-robin to the ready consumers of the highest priority. Lower priorities get messages only if no
consumer of a higher one is ready. With a single active consumer, only the first consumer is served; when it leaves, the
next one of the highest priority takes over.

A consumer is ready if it has credit, is active and is not paused. Each priority has a rotation that holds its ready
consumers only, so a delivery costs the same with one consumer and with thousands. Consumers with a selection are served
one by one.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, Final, Protocol

from basaltmq.broker.consumers.selection import Selection
from basaltmq.broker.routing.exchange import Arguments

if TYPE_CHECKING:
    from basaltmq.broker.consumers.queue import BrokerQueue

UNLIMITED: Final = 1 << 62
"""The credit of a consumer without a prefetch limit."""

ROTATION_SLACK: Final = 16
"""A rotation is compacted when it exceeds twice the number of its consumers plus this."""


class Delivered(Protocol):
    """A delivered message: a Delivery of the queue plane or a StreamDelivery."""

    @property
    def id(self) -> bytes: ...

    @property
    def token(self) -> int: ...

    @property
    def redelivered(self) -> bool: ...

    @property
    def properties(self) -> bytes:
        """Exchange, routing key and properties: see `properties.decode_envelope`."""
        ...

    @property
    def payload(self) -> bytes: ...

    def content(self) -> tuple[bytes, bytes]:
        """Return properties and payload."""
        ...


class ConsumerSink(Protocol):
    """Receives the messages of a consumer: a channel."""

    def deliver(self, consumer: Consumer, deliveries: Sequence[Any]) -> None:
        """Accept messages, never more than the consumer had credit for. Must not raise."""
        ...

    def cancelled(self, consumer: Consumer) -> None:
        """Handle the cancellation of a consumer, because its queue was deleted."""
        ...


class Consumer:
    """One subscription."""

    __slots__ = (
        "active",
        "arguments",
        "credit_left",
        "delivered",
        "exclusive",
        "in_rotation",
        "is_cancelled",
        "no_ack",
        "offset",
        "owner",
        "paused",
        "prefetch",
        "priority",
        "queue",
        "selection",
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
        selection: Selection | None = None,
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
        self.selection = selection
        """None: the consumer receives messages from the head of the queue."""
        self.credit_left = prefetch or UNLIMITED
        self.paused = False
        self.active = True
        """False while another consumer is the single active one."""
        self.is_cancelled = False
        self.in_rotation = False
        self.delivered = 0
        self.offset = 0
        """Next stream offset to read."""

    def can_take(self) -> bool:
        return self.credit_left > 0 and self.active and not self.paused and not self.is_cancelled

    def credit(self, count: int) -> None:
        """Add credit."""
        if self.credit_left < UNLIMITED >> 1:
            self.credit_left += count
            if self.credit_left == count or not self.in_rotation:
                self.queue.consumers.add_if_ready(self)

    def limit(self, count: int | None) -> None:
        """Set the credit; None means unlimited."""
        self.credit_left = UNLIMITED if count is None else count
        self.queue.consumers.add_if_ready(self)

    def pause(self) -> None:
        """Stop deliveries while the client does not read its socket."""
        self.paused = True

    def resume(self) -> None:
        self.paused = False
        self.queue.consumers.add_if_ready(self)

    def cancel(self) -> None:
        """Stop deliveries. The channel still settles delivered messages. Idempotent."""
        self.queue.consumers.remove(self)


class Consumers:
    """The consumers of one queue."""

    __slots__ = (
        "_by_priority",
        "_exclusive",
        "_order",
        "_queue",
        "_removed",
        "_rotations",
        "_single_active",
        "_wake",
        "choosing",
    )

    def __init__(
        self,
        queue: BrokerQueue,
        *,
        single_active: bool,
        wake: Callable[[BrokerQueue], None],
        removed: Callable[[BrokerQueue, Consumer], None],
    ) -> None:
        """`wake` is called when a consumer becomes ready, `removed` after a consumer was removed.

        They get the queue, because a function per queue would take 0.3 KiB of each idle one.
        """
        self._queue = queue
        self._single_active = single_active
        self._wake = wake
        self._removed = removed
        self._order: dict[Consumer, None] = {}
        self._by_priority: dict[int, dict[Consumer, None]] = {}
        """Consumers by priority, in the order of their arrival. A queue may have 10,000 of them."""
        self._exclusive = 0
        """Number of exclusive consumers."""
        self._rotations: dict[int, deque[Consumer]] = {}
        """Ready consumers by priority, the highest priority first, the next consumer to serve first."""
        self.choosing: dict[Consumer, None] = {}
        """Consumers with a selection, which are in no rotation."""

    def __len__(self) -> int:
        return len(self._order)

    def __iter__(self) -> Iterator[Consumer]:
        return iter(list(self._order))

    @property
    def has_exclusive(self) -> bool:
        return self._exclusive > 0

    def add(self, consumer: Consumer) -> None:
        consumer.active = not (self._single_active and self._order)
        self._order[consumer] = None
        if consumer.selection is not None:
            self.choosing[consumer] = None
        self._exclusive += consumer.exclusive
        priority = consumer.priority
        self._by_priority.setdefault(priority, {})[consumer] = None
        if priority not in self._rotations:
            self._rotations[priority] = deque()
            self._rotations = dict(sorted(self._rotations.items(), reverse=True))
        self.add_if_ready(consumer)

    def remove(self, consumer: Consumer) -> None:
        if consumer.is_cancelled:
            return
        consumer.is_cancelled = True
        del self._order[consumer]
        self.choosing.pop(consumer, None)
        self._exclusive -= consumer.exclusive
        priority = consumer.priority
        alike = self._by_priority[priority]
        del alike[consumer]
        if not alike:
            del self._by_priority[priority]
            del self._rotations[priority]
        elif len(self._rotations[priority]) > 2 * len(alike) + ROTATION_SLACK:
            # Cancelled consumers stay in the rotation until their turn comes or until there are too many of them.
            self._rotations[priority] = deque(each for each in self._rotations[priority] if not each.is_cancelled)
        if self._single_active and consumer.active and self._order:
            successor = next(iter(self._by_priority[max(self._by_priority)]))
            successor.active = True
            self.add_if_ready(successor)
        self._removed(self._queue, consumer)

    def add_if_ready(self, consumer: Consumer) -> None:
        """Add a consumer to its rotation if it is ready, and wake the queue."""
        if consumer.can_take():
            if not consumer.in_rotation and consumer.selection is None:
                consumer.in_rotation = True
                self._rotations[consumer.priority].append(consumer)
            self._wake(self._queue)

    def first_rotation(self) -> deque[Consumer] | None:
        """Return the rotation of the highest priority that has a ready consumer; None if no consumer is ready."""
        for rotation in self._rotations.values():
            while rotation and not rotation[0].can_take():
                rotation.popleft().in_rotation = False
            if rotation:
                return rotation
        return None


def total_credit(rotation: deque[Consumer], count_max: int) -> int:
    """Return the sum of the credit of a rotation's ready consumers, up to a limit."""
    count = 0
    for consumer in rotation:
        if consumer.can_take():
            count += consumer.credit_left
            if count >= count_max:
                return count_max
    return count


def distribute(rotation: deque[Consumer], deliveries: Sequence[Any]) -> list[tuple[Consumer, Sequence[Any]]]:
    """Assign messages round-robin. Their number must not exceed the total credit of the rotation."""
    first = rotation[0]
    if len(rotation) == 1 and first.credit_left >= len(deliveries):
        first.credit_left -= len(deliveries)
        first.delivered += len(deliveries)
        return [(first, deliveries)]
    shares: dict[Consumer, list[Any]] = {}
    for delivery in deliveries:
        while not rotation[0].can_take():
            rotation.popleft().in_rotation = False
        consumer = rotation[0]
        shares.setdefault(consumer, []).append(delivery)
        consumer.credit_left -= 1
        consumer.delivered += 1
        rotation.rotate(-1)
    return list(shares.items())
