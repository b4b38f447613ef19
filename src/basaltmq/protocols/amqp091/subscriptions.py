"""The consumers of one channel and their prefetch limits (SPEC E8).

basic.qos has two limits, as in RabbitMQ. Without `global` it sets the prefetch of each consumer started later. With
`global` it limits the unacknowledged deliveries of all consumers of the channel together. Zero means no limit.
Consumers in no-ack mode have no limit.

The broker decrements a consumer's credit per delivery, and the channel returns credit when the client settles. With a
channel limit, the consumers whose queues have messages share what remains equally, so that one deep queue does not take
it all. Every consumer has credit for at least one message. Deliveries above the limit are held here, in order, until
there is room.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence

from basaltmq.broker.consumers.consumer import Consumer, Delivered
from basaltmq.protocols.amqp091.outbox import DeliverWriter


class Subscription:
    """A consumer of a channel. Without a consumer, the source of basic.get deliveries."""

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
    """All consumers of a channel, with their prefetch accounting."""

    __slots__ = ("_held", "by_consumer", "by_tag", "channel_outstanding", "channel_prefetch", "prefetch")

    def __init__(self) -> None:
        self.by_tag: dict[str, Subscription] = {}
        self.by_consumer: dict[Consumer, Subscription] = {}
        self.prefetch = 0
        """Prefetch of consumers started from now on."""
        self.channel_prefetch = 0
        self.channel_outstanding = 0
        self._held: deque[tuple[Subscription, Delivered]] = deque()

    def add(self, subscription: Subscription, consumer: Consumer) -> None:
        subscription.consumer = consumer
        self.by_consumer[consumer] = subscription
        if self.channel_prefetch:
            self._update_all_credit()

    def remove(self, subscription: Subscription) -> list[Delivered]:
        """Remove a consumer. Return the deliveries that were held for it and not sent."""
        self.by_tag.pop(subscription.tag, None)
        if subscription.consumer is not None:
            self.by_consumer.pop(subscription.consumer, None)
        unsent = [delivery for held_for, delivery in self._held if held_for is subscription]
        if unsent:
            self._held = deque(held for held in self._held if held[0] is not subscription)
        return unsent

    def take_held(self) -> list[tuple[Subscription, Delivered]]:
        """Remove and return all held deliveries."""
        held, self._held = list(self._held), deque()
        return held

    def limit_channel(self, prefetch: int) -> None:
        """Set the limit of the channel; zero removes it."""
        self.channel_prefetch = prefetch
        self._update_all_credit()

    def admit(self, subscription: Subscription, deliveries: Sequence[Delivered]) -> Sequence[Delivered]:
        """Return the deliveries that may be sent at once, and hold the rest."""
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
            self._update_all_credit()
        return deliveries

    def settled(self, counts: Iterable[tuple[Subscription, int]]) -> list[tuple[Subscription, Delivered]]:
        """Record settled deliveries per subscription. Return held deliveries that may be sent now."""
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
        self._update_all_credit()
        return sendable

    def _update_all_credit(self) -> None:
        """Set the credit of all consumers to what both limits allow."""
        limited = [(each, each.consumer) for each in self.by_consumer.values() if each.consumer and not each.no_ack]
        room = max(0, self.channel_prefetch - self.channel_outstanding - len(self._held))
        share = max(min(room, 1), room // max(1, sum(consumer.queue.has_ready for _, consumer in limited)))
        for subscription, consumer in limited:
            rooms = []
            if subscription.prefetch:
                rooms.append(max(0, subscription.prefetch - subscription.outstanding))
            if self.channel_prefetch:
                rooms.append(share if consumer.queue.has_ready else room)
            consumer.limit(min(rooms) if rooms else None)
