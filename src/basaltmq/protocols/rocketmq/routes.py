"""QueryRoute and QueryAssignment: which queues a topic has.

The broker answers with the endpoints that the client connected to, so routes work behind port forwarding. Each
partition is a queue. Every consumer of a group is assigned every queue, because leases divide the records, not queues.
"""

from __future__ import annotations

from collections.abc import Coroutine
from typing import Any, Final

from basaltmq.broker.auth.permissions import READ, WRITE
from basaltmq.errors import TopicNotFoundError
from basaltmq.protocols.rocketmq.methods import Caller
from basaltmq.protocols.rocketmq.rules.names import DEAD_LETTERS, group_name, topic_name
from basaltmq.protocols.rocketmq.rules.status import OK, Refused
from basaltmq.streams.shards import MessageType
from basaltmq.streams.topics import Topic
from basaltmq.wire import rocketmq_wire_pb2 as wire

BROKER: Final = "basalt"
"""Name of the only broker in routes."""

PORT_MAX: Final = 65_535
TYPES: Final = {each: wire.MessageType.Value(each.value) for each in MessageType}


def query_route(
    request: wire.QueryRouteRequest, caller: Caller
) -> wire.QueryRouteResponse | Coroutine[Any, Any, wire.QueryRouteResponse]:
    name = topic_name(request.topic)
    _check_endpoints(request.endpoints)
    found = caller.host.plane.topics.find(name)
    if found is not None:
        return _route(found, request, caller)
    return _route_of_new(name, request, caller)


async def _route_of_new(name: str, request: wire.QueryRouteRequest, caller: Caller) -> wire.QueryRouteResponse:
    if name.startswith(DEAD_LETTERS):
        raise TopicNotFoundError(f"topic {name!r} does not exist; no message of the group was dead-lettered")
    return _route(await caller.host.topic_or_new(name, lambda: caller.may_configure(name)), request, caller)


def _route(topic: Topic, request: wire.QueryRouteRequest, caller: Caller) -> wire.QueryRouteResponse:
    may_read, may_write = caller.may(READ, topic.name), caller.may(WRITE, topic.name)
    if not (may_read or may_write):
        caller.check_read(topic.name)
    answer = wire.QueryRouteResponse(status=OK)
    permission = wire.READ_WRITE if may_read and may_write else wire.READ if may_read else wire.WRITE
    answer.message_queues.extend(
        wire.MessageQueue(
            topic=request.topic,
            id=partition,
            permission=permission,
            broker=wire.Broker(name=BROKER, id=0, endpoints=request.endpoints),
            accept_message_types=accepted_types(topic),  # type: ignore[arg-type]
        )
        for partition in range(len(topic.shards))
    )
    return answer


def query_assignment(request: wire.QueryAssignmentRequest, caller: Caller) -> wire.QueryAssignmentResponse:
    name = topic_name(request.topic)
    group_name(request.group)
    _check_endpoints(request.endpoints)
    caller.check_read(name)
    topic = caller.host.topic(name)
    answer = wire.QueryAssignmentResponse(status=OK)
    for partition in range(len(topic.shards)):
        answer.assignments.add().message_queue.CopyFrom(
            wire.MessageQueue(
                topic=request.topic,
                id=partition,
                permission=wire.READ_WRITE,
                broker=wire.Broker(name=BROKER, id=0, endpoints=request.endpoints),
                accept_message_types=accepted_types(topic),  # type: ignore[arg-type]
            )
        )
    return answer


def _check_endpoints(endpoints: wire.Endpoints) -> None:
    addresses = endpoints.addresses
    if not addresses or any(not each.host or not 0 < each.port <= PORT_MAX for each in addresses):
        raise Refused(wire.ILLEGAL_ACCESS_POINT, "the request needs the endpoints that the client connects to")


def accepted_types(topic: Topic) -> list[int]:
    """Return the types of messages that may be sent to a topic."""
    chosen = topic.config.message_type
    return list(TYPES.values()) if chosen is None else [TYPES[chosen]]
