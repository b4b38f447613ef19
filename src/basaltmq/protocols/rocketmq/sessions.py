"""Heartbeat, Telemetry and NotifyClientTermination: the session of a client.

The broker answers settings with the same settings and its own values in them. Clients wait for this answer at start.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator
from typing import Final

from basaltmq.broker.auth.permissions import WRITE
from basaltmq.protocols.rocketmq.lite.subscriptions import CLIENT_QUOTA
from basaltmq.protocols.rocketmq.methods import Caller
from basaltmq.protocols.rocketmq.rules.names import LITE_CHARACTERS_MAX, group_name, topic_name
from basaltmq.protocols.rocketmq.rules.status import OK, Refused, status_of
from basaltmq.streams.pop.groups import GroupConfig
from basaltmq.streams.pop.lease import hash_of
from basaltmq.wire import rocketmq_wire_pb2 as wire

CONSUMERS: Final = frozenset(
    {
        wire.PUSH_CONSUMER,
        wire.SIMPLE_CONSUMER,
        wire.PULL_CONSUMER,
        wire.LITE_PUSH_CONSUMER,
        wire.LITE_SIMPLE_CONSUMER,
    }
)

RECEIVE_BATCH: Final = 32
LONG_POLLING_S: Final = 20
COMMANDS_MAX: Final = 1_000
"""Commands that wait for a client that does not read its telemetry stream. Later ones are dropped and repeated."""

PRODUCER_ATTEMPTS: Final = 3


def heartbeat(request: wire.HeartbeatRequest, caller: Caller) -> wire.HeartbeatResponse:
    client = caller.client
    if client.settings is None or (request.client_type and request.client_type != client.client_type):
        raise Refused(wire.UNRECOGNIZED_CLIENT_TYPE, "the client has not sent its settings over telemetry")
    if request.client_type in CONSUMERS:
        group_name(request.group)
    return wire.HeartbeatResponse(status=OK)


def notify_client_termination(
    request: wire.NotifyClientTerminationRequest, caller: Caller
) -> wire.NotifyClientTerminationResponse:
    if request.HasField("group"):
        host = caller.host
        holder, group = hash_of(caller.client.id), group_name(request.group)
        caller.check_read(group)
        for each in host.in_use(group):
            each.subscription.release_all(holder, host.now_ms())
            each.changed()
    caller.host.lite_subscriptions.client_gone(caller.client.id)
    caller.host.clients.remove(caller.client)
    return wire.NotifyClientTerminationResponse(status=OK)


async def telemetry(
    requests: AsyncIterator[wire.TelemetryCommand], caller: Caller
) -> AsyncGenerator[wire.TelemetryCommand, None]:
    commands: asyncio.Queue[wire.TelemetryCommand | None] = asyncio.Queue()
    client = caller.client

    def send(command: wire.TelemetryCommand) -> None:
        if commands.qsize() < COMMANDS_MAX:
            commands.put_nowait(command)

    def end() -> None:
        commands.put_nowait(None)

    client.send, client.end = send, end

    async def read() -> None:
        try:
            async for command in requests:
                caller.host.clients.require(client.id)
                if command.WhichOneof("command") == "settings":
                    commands.put_nowait(await _settled(command.settings, caller))
                    # Stop reading from a client that does not read its commands.
                    await commands.join()
        except Refused as refused:
            commands.put_nowait(wire.TelemetryCommand(status=status_of(refused)))
        finally:
            commands.put_nowait(None)

    reading = asyncio.ensure_future(read())
    try:
        while (command := await commands.get()) is not None:
            yield command
            commands.task_done()
    finally:
        reading.cancel()
        await asyncio.gather(reading, return_exceptions=True)
        if client.send is send:
            client.send = client.end = None


async def _settled(given: wire.Settings, caller: Caller) -> wire.TelemetryCommand:
    """Remember the settings of a client. Return them with the broker's values, or why they are refused."""
    try:
        settings = await _merged(given, caller)
    except Exception as error:
        return wire.TelemetryCommand(status=status_of(error))
    return wire.TelemetryCommand(status=OK, settings=settings)


async def _merged(given: wire.Settings, caller: Caller) -> wire.Settings:
    settings = wire.Settings()
    settings.CopyFrom(given)
    client, host = caller.client, caller.host
    host.clients.check_settings(client, given.ByteSize())
    kind = settings.WhichOneof("pub_sub")
    if kind == "publishing":
        settings.publishing.max_body_size = host.settings.body_bytes_max
        settings.publishing.validate_message_type = True
        policy = settings.backoff_policy
        policy.max_attempts = PRODUCER_ATTEMPTS
        policy.exponential_backoff.initial.FromMilliseconds(10)
        policy.exponential_backoff.max.FromSeconds(1)
        policy.exponential_backoff.multiplier = 2
        # The broker sends transactional messages of these topics to the client, so it needs the permission.
        announced = {topic_name(each): each for each in settings.publishing.topics}
        client.publishes = {name: each for name, each in announced.items() if caller.may(WRITE, name)}
        client.client_type = settings.client_type or wire.PRODUCER
    elif kind == "subscription":
        name = group_name(settings.subscription.group)
        caller.check_read(name)
        config = await host.group_or_new(name, GroupConfig(), lambda: caller.may_configure(name))
        subscription = settings.subscription
        subscription.fifo = config.ordered
        subscription.receive_batch_size = RECEIVE_BATCH
        subscription.lite_subscription_quota = CLIENT_QUOTA
        subscription.max_lite_topic_size = LITE_CHARACTERS_MAX
        subscription.long_polling_timeout.FromSeconds(LONG_POLLING_S)
        policy = settings.backoff_policy
        policy.max_attempts = config.max_attempts
        policy.ClearField("strategy")
        for delay_s in config.backoff_s:
            policy.customized_backoff.next.add().FromSeconds(delay_s)
        client.group = name
        client.client_type = settings.client_type or wire.SIMPLE_CONSUMER
    else:
        raise Refused(
            wire.UNRECOGNIZED_CLIENT_TYPE,
            "the settings must have the field `publishing` (producer) or `subscription` (consumer)",
        )
    settings.metric.on = False
    client.settings = settings
    return settings
