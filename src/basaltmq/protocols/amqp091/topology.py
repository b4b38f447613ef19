"""Handlers of methods that declare, bind and delete exchanges and queues, and of channel.flow and access.request."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Final

from basaltmq.broker.routing.exchange import EXCHANGE, QUEUE
from basaltmq.errors import NotFoundError
from basaltmq.protocols.amqp091 import reply_to
from basaltmq.protocols.amqp091.wire import methods as m
from basaltmq.protocols.amqp091.wire.errors import (
    NOT_FOUND,
    NOT_IMPLEMENTED,
    ChannelFault,
    ConnectionFault,
)

if TYPE_CHECKING:
    from basaltmq.protocols.amqp091.channel import Channel

GENERATED: Final = "amq.gen-"
"""Prefix of server-generated queue names. Permissions for such a name are checked on the prefix."""


def clean(name: str) -> str:
    """Return a name without line breaks, as RabbitMQ does for names read from files and command output."""
    return name.replace("\r", "").replace("\n", "")


def exchange_declare(channel: Channel, method: m.ExchangeDeclare) -> None:
    name = clean(method.exchange)
    if not method.passive:
        channel.check("configure", name)
        alternate = method.arguments.get("alternate-exchange")
        if isinstance(alternate, str):
            channel.check("read", name)
            channel.check("write", alternate)
    channel.vhost.declare_exchange(
        name,
        method.type,
        durable=method.durable,
        auto_delete=method.auto_delete,
        internal=method.internal,
        arguments=method.arguments,
        passive=method.passive,
    )
    if not method.nowait:
        channel.send(m.ExchangeDeclareOk())


def exchange_delete(channel: Channel, method: m.ExchangeDelete) -> Iterator[bool]:
    name = clean(method.exchange)
    channel.check("configure", name)
    if not (method.if_unused or name.startswith("amq.")):
        for _ in channel.vhost.unbinding(EXCHANGE, name):
            yield True
    channel.vhost.delete_exchange(name, if_unused=method.if_unused)
    if not method.nowait and channel.is_open:
        channel.send(m.ExchangeDeleteOk())


def exchange_bind(channel: Channel, method: m.ExchangeBind) -> None:
    destination, source = clean(method.destination), clean(method.source)
    _check_bind(channel, destination, source, method.routing_key)
    channel.vhost.bind_exchange(destination, source, method.routing_key, method.arguments)
    if not method.nowait:
        channel.send(m.ExchangeBindOk())


def exchange_unbind(channel: Channel, method: m.ExchangeUnbind) -> None:
    destination, source = clean(method.destination), clean(method.source)
    _check_bind(channel, destination, source, method.routing_key)
    # A missing exchange is no error, because clients unbind after an auto-delete.
    with suppress(NotFoundError):
        channel.vhost.unbind_exchange(destination, source, method.routing_key, method.arguments)
    if not method.nowait:
        channel.send(m.ExchangeUnbindOk())


def _check_bind(channel: Channel, destination: str, source: str, routing_key: str) -> None:
    channel.check("write", destination)
    channel.check("read", source)
    permissions = channel.connection.server.node.permissions
    permissions.check_topic(channel.user, channel.vhost.name, source, "read", routing_key)


def queue_declare(channel: Channel, method: m.QueueDeclare) -> None:
    name = clean(method.queue)
    if method.passive:
        name = channel.queue_name(name, method)
        if reply_to.is_reply_name(name):
            _declare_reply(channel, name, method)
            return
    if not method.passive:
        channel.check("configure", name or GENERATED)
        dead_letters = method.arguments.get("x-dead-letter-exchange")
        if isinstance(dead_letters, str):
            channel.check("read", name or GENERATED)
            channel.check("write", dead_letters)
    info = channel.vhost.declare_queue(
        name,
        durable=method.durable,
        exclusive=method.exclusive,
        auto_delete=method.auto_delete,
        arguments=method.arguments,
        passive=method.passive,
        owner=channel.connection,
    )
    channel.last_queue = info.name
    if not method.nowait:
        channel.send(m.QueueDeclareOk(info.name, info.messages, info.consumers))


def _declare_reply(channel: Channel, name: str, method: m.QueueDeclare) -> None:
    """Respond to a passive declare of a direct reply-to name: whether its channel still exists."""
    if channel.connection.server.replies.find(channel.vhost.name, name) is None:
        raise ChannelFault(NOT_FOUND, f"no queue '{name}' in vhost '{channel.vhost.name}'", method.number)
    if not method.nowait:
        channel.send(m.QueueDeclareOk(name, 0, 1))


def queue_bind(channel: Channel, method: m.QueueBind) -> None:
    queue, routing_key = _queue_and_key(channel, method)
    exchange = clean(method.exchange)
    _check_bind(channel, queue, exchange, routing_key)
    channel.vhost.bind_queue(queue, exchange, routing_key, method.arguments, owner=channel.connection)
    if not method.nowait:
        channel.send(m.QueueBindOk())


def queue_unbind(channel: Channel, method: m.QueueUnbind) -> None:
    queue, routing_key = _queue_and_key(channel, method)
    exchange = clean(method.exchange)
    _check_bind(channel, queue, exchange, routing_key)
    with suppress(NotFoundError):
        channel.vhost.unbind_queue(queue, exchange, routing_key, method.arguments, owner=channel.connection)
    channel.send(m.QueueUnbindOk())


def _queue_and_key(channel: Channel, method: m.QueueBind | m.QueueUnbind) -> tuple[str, str]:
    """Return queue and routing key. If both are empty, both are the queue declared last."""
    queue = channel.queue_name(method.queue, method)
    return queue, method.routing_key or ("" if method.queue else queue)


def queue_purge(channel: Channel, method: m.QueuePurge) -> Iterator[bool]:
    queue = channel.queue_name(method.queue, method)
    channel.check("read", queue)
    count = 0
    for purged in channel.vhost.purging(queue, owner=channel.connection):
        count += purged
        yield True
    if not method.nowait and channel.is_open:
        channel.send(m.QueuePurgeOk(count))


def queue_delete(channel: Channel, method: m.QueueDelete) -> Iterator[bool]:
    queue = channel.queue_name(method.queue, method)
    channel.check("configure", queue)
    channel.vhost.check_delete(queue, if_unused=method.if_unused, if_empty=method.if_empty, owner=channel.connection)
    for _ in channel.vhost.unbinding(QUEUE, queue):
        yield True
    count = channel.vhost.delete_queue(
        queue, if_unused=method.if_unused, if_empty=method.if_empty, owner=channel.connection
    )
    if not method.nowait and channel.is_open:
        channel.send(m.QueueDeleteOk(count))


def channel_flow(channel: Channel, method: m.ChannelFlow) -> None:
    if not method.active:
        raise ConnectionFault(NOT_IMPLEMENTED, "active=false: use basic.qos", method.number)
    channel.send(m.ChannelFlowOk(True))


def channel_flow_ok(channel: Channel, method: m.ChannelFlowOk) -> None:
    """Ignored: the server never sends channel.flow."""


def access_request(channel: Channel, method: m.AccessRequest) -> None:
    """Accept access.request, which some clients still send although it belongs to AMQP 0-8. Permissions are checked per
    operation."""
    channel.send(m.AccessRequestOk(1))


HANDLERS: Final[dict[type[m.Method], Any]] = {
    m.ExchangeDeclare: exchange_declare,
    m.ExchangeDelete: exchange_delete,
    m.ExchangeBind: exchange_bind,
    m.ExchangeUnbind: exchange_unbind,
    m.QueueDeclare: queue_declare,
    m.QueueBind: queue_bind,
    m.QueueUnbind: queue_unbind,
    m.QueuePurge: queue_purge,
    m.QueueDelete: queue_delete,
    m.ChannelFlow: channel_flow,
    m.ChannelFlowOk: channel_flow_ok,
    m.AccessRequest: access_request,
}
