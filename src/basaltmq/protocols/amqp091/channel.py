"""A channel: runs the client's methods on the broker, and sends the broker's deliveries, returns and confirms.

Methods reach the virtual host in the order received. A basic.return precedes the confirm of its message. After a fault
the channel stops: its consumers are cancelled, unacknowledged deliveries are requeued at their original positions, and
an open transaction is discarded.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, Final, TypeAlias

from basaltmq.broker.consumers.consumer import Consumer, Delivered
from basaltmq.broker.consumers.queue import BrokerQueue
from basaltmq.broker.message import properties
from basaltmq.broker.message.operations import Publish
from basaltmq.broker.message.properties import encode_envelope
from basaltmq.protocols.amqp091 import consuming, reply_to
from basaltmq.protocols.amqp091.confirms import Confirms
from basaltmq.protocols.amqp091.events import Message, Published
from basaltmq.protocols.amqp091.outbox import write_content
from basaltmq.protocols.amqp091.subscriptions import Subscription, Subscriptions
from basaltmq.protocols.amqp091.transactions import Transaction
from basaltmq.protocols.amqp091.unacked import Unacked
from basaltmq.protocols.amqp091.wire import methods as m
from basaltmq.protocols.amqp091.wire.errors import (
    NO_ROUTE,
    NOT_FOUND,
    NOT_IMPLEMENTED,
    PRECONDITION_FAILED,
    ChannelFault,
    ConnectionFault,
)
from basaltmq.protocols.amqp091.wire.states import Phase

if TYPE_CHECKING:
    from basaltmq.protocols.amqp091.connection import Connection

DEFAULT_EXCHANGE_RESOURCE: Final = "amq.default"
"""Name of the default exchange in permissions."""

CHECKED_MAX: Final = 256
"""Limit of the cache of validated properties, per connection. Properties with unique ids or times never hit it."""

CHECKED_BYTES_MAX: Final = 256

HEADERS_BYTES_LARGE: Final = 4 << 10
"""Messages with properties of this size or more are charged like a fan-out."""

LARGE_BYTES_MIN: Final = 16 << 10
"""Bodies of this size or more wait while the store is behind with flushes. Smaller ones use the reserve of the store,
so their publishers do not wait for publishers of large messages."""

PROPERTIES_BYTE_S: Final = 2e-7
"""Cost of checking, decoding and matching headers, in seconds per byte: 7,000 headers of 100 KB take 15 to 25 ms."""

IMPERSONATOR: Final = "impersonator"
"""Tag of users who may set any user_id property."""

Work: TypeAlias = Iterator[bool]
"""A method that runs in portions. True: the next portion may follow at once. False: wait for the next turn."""

Handler = Callable[["Channel", Any], Work | None]


class Channel:
    """A channel of a connection."""

    def __init__(self, number: int, connection: Connection) -> None:
        self.number = number
        self.connection = connection
        self.session = connection.session
        self.vhost = connection.vhost
        self.user = connection.user
        self.is_open = True
        self.confirms: Confirms | None = None
        self.transaction: Transaction | None = None
        self.unacked: Unacked[Subscription] = Unacked()
        self.subscriptions = Subscriptions()
        self.last_queue = ""
        """The queue declared last, for methods with an empty queue name."""
        self.reply_name = ""
        self.reply_subscription: Subscription | None = None
        self.published = self.delivered = self.acked = 0

    @property
    def is_running(self) -> bool:
        """Whether the channel may send. While a connection closes, its channels end in portions."""
        return self.is_open and self.session.phase is Phase.RUNNING

    def send(self, method: m.Method) -> None:
        self.session.send(self.number, method)

    def check(self, kind: str, resource: str) -> None:
        """Raise AccessRefusedError unless the user has the permission."""
        self.connection.server.node.permissions.check(self.user, self.vhost.name, kind, resource)

    def queue_name(self, name: str, method: m.Method) -> str:
        """Return the queue name of a method without line breaks, or the queue declared last if it is empty."""
        if name:
            return name.replace("\r", "").replace("\n", "")
        if not self.last_queue:
            raise ChannelFault(NOT_FOUND, "no previously declared queue", method.number)
        return self.last_queue

    def publish(self, event: Published) -> tuple[list[Message], int]:
        """Publish consecutive messages. If one is rejected, the messages before it are still published.

        Return the messages left for later, because this turn has no room for their fan-out or their headers or the
        store is behind, and the number published.
        """
        self.connection.is_publisher = True
        known = self.connection.checked_properties
        confirms = self.confirms
        number, step = (confirms.last, 1) if confirms is not None else (0, 0)
        route: m.BasicPublish | None = None
        exchange = routing_key = ""
        mandatory = to_channel = False
        shares, router = self.connection.server.shares, self.vhost.tick.router
        copies = copies_each = 0
        cost_s = another_s = 0.0
        is_costly = is_over = False
        limited: list[BrokerQueue] = []
        messages: list[Publish] = []
        rest: list[Message] = []
        try:
            for at, (method, raw, body) in enumerate(event.messages):
                if is_over:
                    rest = event.messages[at:]
                    break
                if method is not route:
                    to_channel = self._check_route(method)
                    route = method
                    exchange, routing_key, mandatory = method.exchange, method.routing_key, method.mandatory
                    learned = router.learned
                    found = None if to_channel else router.known_route(exchange, routing_key)
                    is_over = router.learned != learned and shares.is_over()
                    copies_each = 1 if found is None else found.copies
                    is_costly = found is not None and found.is_costly
                    if found is not None and is_costly:
                        cost_s, another_s = found.fan_out_s(is_transient=False), found.another_s
                    else:
                        cost_s = another_s = 0.0
                    limited = [] if found is None else found.limited()
                if limited and min([queue.publish_credit for queue in limited]) < 1:
                    rest = event.messages[at:]
                    self.connection.wait_for_credit(limited)
                    break
                if len(body) >= LARGE_BYTES_MIN and self.vhost.delays_large():
                    rest = event.messages[at:]
                    self.connection.wait_for_store()
                    break
                if is_costly or len(raw) >= HEADERS_BYTES_LARGE:
                    cost_s += len(raw) * PROPERTIES_BYTE_S
                    if not shares.has_room(cost_s):
                        rest = event.messages[at:]
                        self.connection.wait_for_fan_out()
                        break
                    shares.add_debt(cost_s)
                    cost_s = another_s
                for queue in limited:
                    queue.publish_credit -= 1
                if raw not in known:
                    raw = self._check_properties(raw)
                number += step
                if to_channel:
                    self._publish_reply(method, raw, body, number)
                else:
                    messages.append((self, exchange, routing_key, raw, body, mandatory, number))
                    copies += copies_each
        finally:
            self.published += len(messages)
            if confirms is not None:
                confirms.last = number
            if self.transaction is not None:
                self.transaction.publish(messages, copies)
            elif messages:
                self.vhost.publish_many(messages)
        return rest, len(messages)

    def _check_route(self, method: m.BasicPublish) -> bool:
        """Check the permission to publish. Return True if the routing key is a direct reply-to name."""
        exchange, permissions = method.exchange, self.connection.server.node.permissions
        permissions.check(self.user, self.vhost.name, "write", exchange or DEFAULT_EXCHANGE_RESOURCE)
        if method.immediate:
            raise ConnectionFault(NOT_IMPLEMENTED, "immediate=true", method.number)
        if exchange:
            permissions.check_topic(self.user, self.vhost.name, exchange, "write", method.routing_key)
        elif reply_to.is_reply_name(method.routing_key):
            return True
        self.vhost.check_exchange(exchange)
        return False

    def _check_properties(self, raw: bytes) -> bytes:
        """Validate properties, and replace a direct reply-to request with the channel's reply name."""
        seen = properties.peek(raw)
        if seen.user_id is not None and seen.user_id != self.user.name.encode() and IMPERSONATOR not in self.user.tags:
            raise ChannelFault(
                PRECONDITION_FAILED,
                f"user_id property set to '{seen.user_id.decode(errors='backslashreplace')}' "
                f"but authenticated user was '{self.user.name}'",
                m.BasicPublish.number,
            )
        if seen.has_headers and b"CC" in raw:
            headers = properties.parse(raw).headers
            for name in ("CC", "BCC"):
                if name in headers and not isinstance(headers[name], list):
                    raise ChannelFault(
                        PRECONDITION_FAILED, f"header {name} must be an array of routing keys", m.BasicPublish.number
                    )
        if seen.has_reply_to and reply_to.wants_reply(raw):
            if not self.reply_name:
                raise ChannelFault(PRECONDITION_FAILED, "fast reply consumer does not exist", m.BasicPublish.number)
            return reply_to.rewrite(raw, self.reply_name)
        if len(raw) <= CHECKED_BYTES_MAX:
            known = self.connection.checked_properties
            if len(known) >= CHECKED_MAX:
                known.clear()
            known.add(raw)
        return raw

    def _publish_reply(self, method: m.BasicPublish, raw: bytes, body: bytes, number: int) -> None:
        """Deliver a direct reply to its channel without a queue, or drop it."""
        consumer = self.connection.server.replies.find(self.vhost.name, method.routing_key)
        if consumer is not None:
            consumer.take_reply(method.exchange, method.routing_key, raw, body)
        elif method.mandatory:
            self.returned(method.exchange, method.routing_key, raw, body, number)
        self.published += 1
        if number:
            self.confirmed([number], True)

    def take_reply(self, exchange: str, routing_key: str, properties: bytes, body: bytes) -> None:
        """Deliver a direct reply to the client of this channel."""
        subscription = self.reply_subscription
        if not self.is_running or subscription is None or subscription.writer is None:
            return
        self.unacked.last += 1
        envelope = encode_envelope(exchange, routing_key, properties)
        subscription.writer.write(self.session.outgoing, self.unacked.last, False, envelope, body)
        self.delivered += 1
        self.connection.schedule_flush()

    def returned(self, exchange: str, routing_key: str, properties: bytes, body: bytes, number: int) -> None:
        """Send basic.return for a mandatory message without a route."""
        if not self.is_running:
            return
        method = m.BasicReturn(NO_ROUTE, "NO_ROUTE", exchange, routing_key)
        frame_bytes_max = self.session.tuning.frame_bytes_max
        write_content(self.session.outgoing, self.number, method, properties, body, frame_bytes_max)
        self.connection.schedule_flush()

    def confirmed(self, numbers: Sequence[int], ok: bool) -> None:
        """Send confirms for messages that are durable, or nacks for rejected ones."""
        if self.is_running and self.confirms is not None and numbers:
            self.confirms.answer(numbers, ok, self.session.outgoing)
            self.connection.flush_now()

    def deliver(self, consumer: Consumer, deliveries: Sequence[Delivered]) -> None:
        """Send messages to a consumer of this channel, as far as prefetch allows."""
        subscription = self.subscriptions.by_consumer.get(consumer)
        if subscription is None:
            return
        self.send_deliveries(subscription, self.subscriptions.admit(subscription, deliveries))

    def send_deliveries(self, subscription: Subscription, deliveries: Sequence[Delivered]) -> None:
        unacked = self.unacked
        writer = subscription.writer
        assert writer is not None
        tag = unacked.last + 1
        if self.session.phase is Phase.RUNNING:
            # Otherwise the connection is closing, and the end of the channel requeues them.
            writer.write_all(self.session.outgoing, tag, deliveries)
        if not subscription.no_ack:
            entries = [(subscription, delivery.token, delivery.id) for delivery in deliveries]
            unacked.entries.update(zip(range(tag, tag + len(entries)), entries, strict=True))
        unacked.last += len(deliveries)
        self.delivered += len(deliveries)
        self.connection.schedule_flush()

    def cancelled(self, consumer: Consumer) -> None:
        """Handle the deletion of a consumer's queue."""
        subscription = self.subscriptions.by_consumer.get(consumer)
        if subscription is None:
            return
        self.subscriptions.remove(subscription)
        if self.is_open and self.connection.client.consumer_cancel_notify:
            self.send(m.BasicCancel(subscription.tag, True))
            self.connection.schedule_flush()

    def stop(self) -> None:
        """Stop the channel: cancel its consumers and requeue its deliveries."""
        if not self.is_open:
            return
        self.is_open = False
        consuming.stop_all(self)
        if self.transaction is not None:
            self.transaction.forget()

    def info(self) -> dict[str, Any]:
        """Return the channel's state for the management API."""
        return {
            "number": self.number,
            "name": f"{self.connection.name} ({self.number})",
            "user": self.user.name,
            "vhost": self.vhost.name,
            "confirm": self.confirms is not None,
            "transactional": self.transaction is not None,
            "prefetch_count": self.subscriptions.prefetch,
            "global_prefetch_count": self.subscriptions.channel_prefetch,
            "consumer_count": len(self.subscriptions.by_tag),
            "messages_unacknowledged": len(self.unacked),
            "messages_unconfirmed": 0 if self.confirms is None else self.confirms.unanswered,
            "acks_uncommitted": 0 if self.transaction is None else self.transaction.acks,
            "messages_uncommitted": 0 if self.transaction is None else len(self.transaction.publishes),
            "published": self.published,
            "delivered": self.delivered,
            "acknowledged": self.acked,
        }
