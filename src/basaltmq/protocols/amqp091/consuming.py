"""Handlers of consumer methods: qos, consume, cancel, get, ack, nack, reject, recover."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final

from basaltmq.broker.message.operations import ACK, REJECT, REQUEUE, SETTLE_PORTIONS, SETTLE_S, Settlement
from basaltmq.broker.message.properties import EMPTY_ENVELOPE, decode_envelope, visible
from basaltmq.broker.message.text_headers import envelope_of
from basaltmq.protocols.amqp091 import reply_to
from basaltmq.protocols.amqp091.outbox import DeliverWriter, write_content
from basaltmq.protocols.amqp091.subscriptions import Subscription
from basaltmq.protocols.amqp091.unacked import Taken, unknown_tag
from basaltmq.protocols.amqp091.wire import methods as m
from basaltmq.protocols.amqp091.wire.errors import (
    NOT_ALLOWED,
    NOT_IMPLEMENTED,
    PRECONDITION_FAILED,
    ChannelFault,
    ConnectionFault,
)

if TYPE_CHECKING:
    from basaltmq.protocols.amqp091.channel import Channel, Work

PRIORITY_ARGUMENT: Final = "x-priority"


def qos(channel: Channel, method: m.BasicQos) -> None:
    if method.prefetch_size:
        raise ConnectionFault(NOT_IMPLEMENTED, f"prefetch_size!=0 ({method.prefetch_size})", method.number)
    if method.global_:
        channel.subscriptions.limit_channel(method.prefetch_count)
    else:
        channel.subscriptions.prefetch = method.prefetch_count
    channel.send(m.BasicQosOk())
    _send_held(channel, ())


def consume(channel: Channel, method: m.BasicConsume) -> None:
    queue = channel.queue_name(method.queue, method)
    tag = method.consumer_tag or f"amq.ctag-{channel.connection.server.token()}"
    if tag in channel.subscriptions.by_tag:
        raise ConnectionFault(NOT_ALLOWED, f"attempt to reuse consumer tag '{tag}'", method.number)
    writer = DeliverWriter(channel.number, tag, channel.session.tuning.frame_bytes_max)
    if queue == reply_to.REPLY_TO:
        _consume_replies(channel, method, Subscription(queue, tag, writer, no_ack=True, prefetch=0))
        return
    channel.check("read", queue)
    subscription = Subscription(queue, tag, writer, no_ack=method.no_ack, prefetch=channel.subscriptions.prefetch)
    consumer = channel.vhost.subscribe(
        queue,
        channel,
        tag=tag,
        no_ack=method.no_ack,
        exclusive=method.exclusive,
        priority=_priority(method),
        prefetch=subscription.prefetch,
        arguments=method.arguments,
        owner=channel.connection,
    )
    channel.subscriptions.by_tag[tag] = subscription
    channel.subscriptions.add(subscription, consumer)
    if channel.connection.is_full:
        consumer.pause()
    if not method.nowait:
        channel.send(m.BasicConsumeOk(tag))


def _priority(method: m.BasicConsume) -> int:
    value: Any = method.arguments.get(PRIORITY_ARGUMENT, 0)
    if type(value) is not int:
        raise ChannelFault(
            PRECONDITION_FAILED, f"{PRIORITY_ARGUMENT} must be an integer, not {value!r:.80}", method.number
        )
    return value


def _consume_replies(channel: Channel, method: m.BasicConsume, subscription: Subscription) -> None:
    if not method.no_ack:
        raise ChannelFault(PRECONDITION_FAILED, "reply consumer cannot acknowledge", method.number)
    if channel.reply_subscription is not None:
        raise ChannelFault(PRECONDITION_FAILED, "reply consumer already set", method.number)
    if not channel.reply_name:
        channel.reply_name = channel.connection.server.replies.register(channel.vhost.name, channel)
    channel.reply_subscription = subscription
    channel.subscriptions.by_tag[subscription.tag] = subscription
    if not method.nowait:
        channel.send(m.BasicConsumeOk(subscription.tag))


def cancel(channel: Channel, method: m.BasicCancel) -> None:
    subscription = channel.subscriptions.by_tag.get(method.consumer_tag)
    if subscription is not None:
        unsent = channel.subscriptions.remove(subscription)
        if subscription is channel.reply_subscription:
            channel.reply_subscription = None
            channel.connection.server.replies.forget(channel.vhost.name, channel.reply_name)
            channel.reply_name = ""
        elif subscription.consumer is not None:
            subscription.consumer.cancel()
        if unsent:
            channel.vhost.settle([Settlement(subscription.queue, each.token, [each.id], REQUEUE) for each in unsent])
    if not method.nowait:
        channel.send(m.BasicCancelOk(method.consumer_tag))


def cancel_ok(channel: Channel, method: m.BasicCancelOk) -> None:
    """Ignore the client's response to a server-sent basic.cancel."""


def get(channel: Channel, method: m.BasicGet) -> None:
    queue = channel.queue_name(method.queue, method)
    channel.check("read", queue)
    found = channel.vhost.get(queue, no_ack=method.no_ack, owner=channel.connection)
    if found is None:
        channel.send(m.BasicGetEmpty())
        return
    delivery, left = found
    unacked = channel.unacked
    unacked.last += 1
    if not method.no_ack:
        source = Subscription(queue, "", None, no_ack=False, prefetch=0)
        unacked.entries[unacked.last] = (source, delivery.token, delivery.id)
    exchange, routing_key, properties = decode_envelope(
        visible(delivery.properties or envelope_of(delivery.headers) or EMPTY_ENVELOPE)
    )
    answer = m.BasicGetOk(unacked.last, delivery.redelivered, exchange, routing_key, left)
    frame_bytes_max = channel.session.tuning.frame_bytes_max
    write_content(channel.session.outgoing, channel.number, answer, properties, delivery.payload, frame_bytes_max)
    channel.delivered += 1


def ack(channel: Channel, method: m.BasicAck) -> Work | None:
    if method.multiple and channel.unacked.is_long(method.delivery_tag, SETTLE_PORTIONS[ACK]):
        return _in_portions(channel, method.delivery_tag, ACK, method)
    taken = channel.unacked.take(method.delivery_tag, method.multiple, method.number)
    channel.acked += len(taken)
    if channel.transaction is not None:
        channel.transaction.settle(taken, ACK)
    else:
        settle(channel, taken, ACK)
    return None


def _in_portions(channel: Channel, up_to: int, outcome: str, method: m.Method) -> Work:
    """Settle all deliveries up to a delivery tag (0: all), one portion per turn."""
    unacked = channel.unacked
    tag = up_to or unacked.last
    if tag > unacked.last:
        raise unknown_tag(tag, method.number)
    count, is_done = 0, False
    while not is_done and channel.is_open:
        taken, is_done = unacked.take_portion(tag, SETTLE_PORTIONS[outcome])
        count += len(taken)
        if outcome == ACK:
            channel.acked += len(taken)
        if channel.transaction is not None:
            channel.transaction.settle(taken, outcome)
        else:
            settle(channel, taken, outcome)
        yield False
    if up_to and not count and channel.is_open:
        raise unknown_tag(tag, method.number)


def nack(channel: Channel, method: m.BasicNack) -> Work | None:
    outcome = REQUEUE if method.requeue else REJECT
    if method.multiple and channel.unacked.is_long(method.delivery_tag, SETTLE_PORTIONS[outcome]):
        return _in_portions(channel, method.delivery_tag, outcome, method)
    _reject(channel, method.delivery_tag, method.multiple, method.requeue, method)
    return None


def reject(channel: Channel, method: m.BasicReject) -> None:
    _reject(channel, method.delivery_tag, False, method.requeue, method)


def _reject(channel: Channel, tag: int, multiple: bool, requeue: bool, method: m.Method) -> None:
    taken = channel.unacked.take(tag, multiple, method.number)
    outcome = REQUEUE if requeue else REJECT
    if channel.transaction is not None:
        channel.transaction.settle(taken, outcome)
    else:
        settle(channel, taken, outcome)


def recover(channel: Channel, method: m.BasicRecover) -> Work:
    yield from _recover(channel, method.requeue, method)
    if channel.is_open:
        channel.send(m.BasicRecoverOk())


def recover_async(channel: Channel, method: m.BasicRecoverAsync) -> Work:
    return _recover(channel, method.requeue, method)


def _recover(channel: Channel, requeue: bool, method: m.Method) -> Work:
    if not requeue:
        raise ConnectionFault(NOT_IMPLEMENTED, "basic.recover with requeue=false", method.number)
    last, is_done = channel.unacked.last, False
    while not is_done and channel.is_open:
        taken, is_done = channel.unacked.take_portion(last, SETTLE_PORTIONS[REQUEUE])
        settle(channel, taken, REQUEUE)
        if not is_done:
            yield False


def settlements_of(taken: Sequence[Taken[Subscription]], outcome: str) -> list[Settlement]:
    """Return the settlements of deliveries, grouped by queue and lease, in order."""
    if len(taken) == 1:
        _, only, token, message_id = taken[0]
        return [Settlement(only.queue, token, [message_id], outcome)]
    groups: dict[tuple[str, int], list[bytes]] = {}
    source: Subscription | None = None
    token = -1
    ids: list[bytes] = []
    for _, each, each_token, message_id in taken:
        if each is not source or each_token != token:
            source, token = each, each_token
            ids = groups.setdefault((each.queue, each_token), [])
        ids.append(message_id)
    return [Settlement(queue, token, ids, outcome) for (queue, token), ids in groups.items()]


def counts_of(taken: Sequence[Taken[Subscription]]) -> Mapping[Subscription, int]:
    """Return the number of deliveries of each subscription."""
    if len(taken) == 1 or (taken and len({id(each[1]) for each in taken}) == 1):
        return {taken[0][1]: len(taken)}
    counts: dict[Subscription, int] = {}
    for each in taken:
        counts[each[1]] = counts.get(each[1], 0) + 1
    return counts


def settle(channel: Channel, taken: Sequence[Taken[Subscription]], outcome: str) -> None:
    """Settle deliveries, and send held ones that prefetch now allows."""
    if taken:
        channel.connection.later_s += len(taken) * SETTLE_S[outcome]
        channel.vhost.settle(settlements_of(taken, outcome))
        _send_held(channel, tuple(counts_of(taken).items()))


def give_credit(channel: Channel, taken: Sequence[Taken[Subscription]]) -> None:
    """Return the prefetch credit of deliveries that a transaction settled."""
    if taken:
        _send_held(channel, tuple(counts_of(taken).items()))


def _send_held(channel: Channel, counts: Sequence[tuple[Subscription, int]]) -> None:
    for subscription, delivery in channel.subscriptions.settled(counts):
        channel.send_deliveries(subscription, (delivery,))


def stop_all(channel: Channel) -> None:
    """Cancel the consumers of a channel that ends, and requeue its unsettled deliveries."""
    for subscription in list(channel.subscriptions.by_tag.values()):
        if subscription.consumer is not None:
            subscription.consumer.cancel()
    if channel.reply_name:
        channel.connection.server.replies.forget(channel.vhost.name, channel.reply_name)
    held = channel.subscriptions.take_held()
    if len(channel.unacked) > SETTLE_PORTIONS[REQUEUE]:
        portions = channel.unacked.detach(SETTLE_PORTIONS[REQUEUE])
        channel.vhost.settle_in_portions(settlements_of(portion, REQUEUE) for portion in portions)
    taken = channel.unacked.clear()
    if channel.transaction is not None:
        taken = sorted([*taken, *channel.transaction.taken()], key=lambda each: each[0])
    settlements = settlements_of(taken, REQUEUE)
    settlements += [Settlement(source.queue, each.token, [each.id], REQUEUE) for source, each in held]
    channel.subscriptions.by_tag.clear()
    channel.subscriptions.by_consumer.clear()
    if settlements:
        channel.vhost.settle(settlements)


HANDLERS: Final[dict[type[m.Method], Any]] = {
    m.BasicQos: qos,
    m.BasicConsume: consume,
    m.BasicCancel: cancel,
    m.BasicCancelOk: cancel_ok,
    m.BasicGet: get,
    m.BasicAck: ack,
    m.BasicNack: nack,
    m.BasicReject: reject,
    m.BasicRecover: recover,
    m.BasicRecoverAsync: recover_async,
}
