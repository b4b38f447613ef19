"""ReceiveMessage: a stream of a status, the messages, and the time of delivery.

A call without messages waits until there are some, for at most the client's polling time. If the client disconnects
during the response, the leases are released at once, and the delivery is not counted as an attempt.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from typing import Final, Protocol

from basaltmq.protocols.rocketmq.consumption import RENEW_MS, Delivery, ReceiveCall
from basaltmq.protocols.rocketmq.methods import Caller
from basaltmq.protocols.rocketmq.records import message_of
from basaltmq.protocols.rocketmq.routes import BROKER
from basaltmq.protocols.rocketmq.rules.filters import filter_of
from basaltmq.protocols.rocketmq.rules.handles import encode_handle
from basaltmq.protocols.rocketmq.rules.messages import millis
from basaltmq.protocols.rocketmq.rules.names import group_name, topic_name
from basaltmq.protocols.rocketmq.rules.status import OK, Refused
from basaltmq.protocols.rocketmq.sessions import LONG_POLLING_S, RECEIVE_BATCH
from basaltmq.protocols.rocketmq.subscribing import LITE_CLIENTS
from basaltmq.streams.pop.groups import GroupConfig
from basaltmq.streams.pop.lease import hash_of
from basaltmq.wire import rocketmq_wire_pb2 as wire

INVISIBLE_MS_MAX: Final = 12 * 3_600_000
ANSWER_S: Final = 0.5
"""Time before the client's deadline at which an empty call is answered."""


class Source(Protocol):
    """Gives records to receive calls."""

    def receive(self, call: ReceiveCall, now_ms: int) -> tuple[list[Delivery], bool]: ...
    async def wait(self, timeout_s: float) -> None: ...


async def receive_message(
    request: wire.ReceiveMessageRequest, caller: Caller
) -> AsyncGenerator[wire.ReceiveMessageResponse, None]:
    host = caller.host
    topic_resource = request.message_queue.topic
    name, group = topic_name(topic_resource), group_name(request.group)
    caller.check_read(name)
    caller.check_read(group)
    call = await _receive_call(request, caller, group)
    until_s = host.loop.time() + _polling_s(request, caller)
    topic = host.topic(name)
    source: Source
    if caller.client.client_type in LITE_CLIENTS:
        source = host.lite_subscriptions.find(caller.client.id, group, topic)
    else:
        source = host.consumption(group, topic)
    found = await _received(source, call, until_s, caller)
    if not found:
        yield wire.ReceiveMessageResponse(status=wire.Status(code=wire.MESSAGE_NOT_FOUND, message="no new message"))
        return
    unsent = len(found)
    try:
        yield wire.ReceiveMessageResponse(status=OK)
        for each in found:
            yield wire.ReceiveMessageResponse(message=_message(each, topic_resource, call))
        unsent = 0
        delivered = wire.ReceiveMessageResponse()
        delivered.delivery_timestamp.FromMilliseconds(host.now_ms())
        yield delivered
    finally:
        if unsent:
            for each in reversed(found):
                each.consumption.subscription.release(each.lease, host.now_ms())
                each.consumption.changed()


async def _receive_call(request: wire.ReceiveMessageRequest, caller: Caller, group: str) -> ReceiveCall:
    host = caller.host
    config = await host.group_or_new(group, GroupConfig(), lambda: caller.may_configure(group))
    if not request.batch_size > 0:
        raise Refused(wire.BAD_REQUEST, f"the batch size must be above 0, not {request.batch_size}")
    invisible_ms, holder = RENEW_MS, 0
    if request.auto_renew:
        holder = hash_of(caller.client.id)
    elif not request.HasField("invisible_duration"):
        raise Refused(wire.ILLEGAL_INVISIBLE_TIME, "a receive call needs an invisible duration, or auto_renew")
    else:
        invisible_ms = millis(request.invisible_duration)
        if not host.settings.invisible_ms_min <= invisible_ms <= INVISIBLE_MS_MAX:
            raise Refused(
                wire.ILLEGAL_INVISIBLE_TIME,
                f"the invisible duration must be {host.settings.invisible_ms_min} to {INVISIBLE_MS_MAX} ms, "
                f"not {invisible_ms} (rocketmq.invisible_ms_min)",
            )
    return ReceiveCall(
        min(request.batch_size, RECEIVE_BATCH),
        filter_of(request.filter_expression),
        invisible_ms,
        hash_of(request.attempt_id) if request.attempt_id else 0,
        holder,
        max(0, request.message_queue.id),
        config,
    )


def _polling_s(request: wire.ReceiveMessageRequest, caller: Caller) -> float:
    """Return how long a call waits for messages."""
    if request.HasField("long_polling_timeout"):
        polling_s = millis(request.long_polling_timeout) / 1000
    elif caller.deadline_s is not None:
        polling_s = caller.deadline_s
    else:
        polling_s = LONG_POLLING_S
    if caller.deadline_s is not None:
        polling_s = min(polling_s, caller.deadline_s - ANSWER_S)
    return max(0.0, min(polling_s, LONG_POLLING_S))


async def _received(source: Source, call: ReceiveCall, until_s: float, caller: Caller) -> list[Delivery]:
    """Return leased records. Wait for some until `until_s`."""
    host = caller.host
    while True:
        with host.guard():
            found, has_more = source.receive(call, host.now_ms())
        left_s = until_s - host.loop.time()
        if found or left_s <= 0 or host.is_stopping or not host.vhost.is_up:
            return found
        if has_more:
            await asyncio.sleep(0)
        else:
            host.clients.require(caller.client.id)
            await source.wait(left_s)


def _message(delivery: Delivery, topic: wire.Resource, call: ReceiveCall) -> wire.Message:
    lease, consumption = delivery.lease, delivery.consumption
    message = message_of(delivery.record, delivery.shard, lease.partition, BROKER)
    message.topic.CopyFrom(topic)
    system = message.system_properties
    system.receipt_handle = encode_handle(consumption.group, consumption.topic.id, lease)
    system.delivery_attempt = lease.attempts
    system.invisible_duration.FromMilliseconds(call.invisible_ms)
    return message
