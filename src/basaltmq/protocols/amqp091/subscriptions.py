"""The consumers of one channel, and how much each may still take (SPEC E8).

Two limits, as RabbitMQ defines basic.qos: without `global` it is the prefetch of each consumer begun after it, with
`global` one limit for the unacknowledged deliveries of all consumers of the channel together. Zero is no limit.
Consumers that do not acknowledge have none.

The broker counts down a consumer's credit as it hands out, and the channel gives credit back as the client settles.
Under a limit for the channel each consumer is told what is left for all. Two of them can be served in one turn before
they are told of each other; what is beyond the limit then is held here, in order, until there is room.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence

from basaltmq.broker.consumers.consumer import Consumer, Delivered
from basaltmq.protocols.amqp091.outbox import DeliverWriter


class Subscription:
    """One consumer of a channel; without a consumer, the place where deliveries of basic.get come from."""

    __slots__ = ("consumer", "no_ack", "outstanding", "prefetch", "queue", "tag", "writer")

    def __init__(self, queue: str, tag: str, writer: DeliverWriter | None, *, no_ack: bool, prefetch: int) -> None:
        self.queue = queue
        self.tag = tag
        self.writer = writer
        self.no_ack = no_ack
        self.prefetch = 0 if no_ack else prefetch
        self.consumer: Consumer | None = None
        self.outstanding = 0


class Subscriptions:
    """All consumers of a channel."""

    __slots__ = ("_held", "by_consumer", "by_tag", "channel_outstanding", "channel_prefetch", "prefetch")

    def __init__(self) -> None:
        self.by_tag: dict[str, Subscription] = {}
        self.by_consumer: dict[Consumer, Subscription] = {}
        self.prefetch = 0
        """Of consumers to come."""
        self.channel_prefetch = 0
        self.channel_outstanding = 0
        self._held: deque[tuple[Subscription, Delivered]] = deque()

    def add(self, subscription: Subscription, consumer: Consumer) -> None:
        subscription.consumer = consumer
        self.by_consumer[consumer] = subscription
        if self.channel_prefetch:
            self._tell(subscription)

    def remove(self, subscription: Subscription) -> list[Delivered]:
        """Take a consumer out; what was held for it and not sent."""
        self.by_tag.pop(subscription.tag, None)
        if subscription.consumer is not None:
            self.by_consumer.pop(subscription.consumer, None)
        unsent = [delivery for held_for, delivery in self._held if held_for is subscription]
        if unsent:
            self._held = deque(held for held in self._held if held[0] is not subscription)
        return unsent

    def take_held(self) -> list[tuple[Subscription, Delivered]]:
        """Everything held and not sent."""
        held, self._held = list(self._held), deque()
        return held

    def limit_channel(self, prefetch: int) -> None:
        """A limit for all together; zero lifts it."""
        self.channel_prefetch = prefetch
        for subscription in self.by_tag.values():
            self._tell(subscription)

    def admit(self, subscription: Subscription, deliveries: Sequence[Delivered]) -> Sequence[Delivered]:
        """What of these may be sent right away; the rest is held."""
        if subscription.no_ack:
            return deliveries
        if self.channel_prefetch:
            room = self.channel_prefetch - self.channel_outstanding - len(self._held)
            if room < len(deliveries):
                room = max(0, room)
                self._held.extend((subscription, delivery) for delivery in deliveries[room:])
                deliveries = deliveries[:room]
        subscription.outstanding += len(deliveries)
        self.channel_outstanding += len(deliveries)
        if self.channel_prefetch:
            self._tell_all()
        return deliveries

    def settled(self, counts: Iterable[tuple[Subscription, int]]) -> list[tuple[Subscription, Delivered]]:
        """The client settled so many of each; what was held and may be sent in their place."""
        for subscription, count in counts:
            if subscription.consumer is None:
                continue
            subscription.outstanding -= count
            self.channel_outstanding -= count
            if not self.channel_prefetch and subscription.prefetch:
                subscription.consumer.credit(count)
        if not self.channel_prefetch:
            return []
        sendable: list[tuple[Subscription, Delivered]] = []
        while self._held and self.channel_outstanding < self.channel_prefetch:
            subscription, delivery = self._held.popleft()
            subscription.outstanding += 1
            self.channel_outstanding += 1
            sendable.append((subscription, delivery))
        self._tell_all()
        return sendable

    def _tell_all(self) -> None:
        for subscription in self.by_tag.values():
            self._tell(subscription)

    def _tell(self, subscription: Subscription) -> None:
        """Set a consumer's credit to what both limits leave."""
        if subscription.consumer is None or subscription.no_ack:
            return
        rooms = []
        if subscription.prefetch:
            rooms.append(subscription.prefetch - subscription.outstanding)
        if self.channel_prefetch:
            rooms.append(self.channel_prefetch - self.channel_outstanding - len(self._held))
        subscription.consumer.limit(max(0, min(rooms)) if rooms else None)
