"""Handlers for KIP-848 consumer groups: validation, permissions, and the form of responses.

A member needs read permission for the group and for every topic that it names; otherwise the heartbeat fails. For a
group with classic members, heartbeats get GROUP_ID_NOT_FOUND, as in an Apache Kafka with group migration disabled. A
group without members takes the protocol of its next member.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial
from typing import TYPE_CHECKING, Final
from uuid import UUID

from basaltmq.broker.auth.acls import Operation
from basaltmq.broker.auth.permissions import READ
from basaltmq.protocols.kafka.authorization import with_group_operations
from basaltmq.protocols.kafka.groups.assignors import ASSIGNORS, EMPTY, UNIFORM, PartitionId
from basaltmq.protocols.kafka.groups.classic_requests import NAME_BYTES_MAX, group_error
from basaltmq.protocols.kafka.groups.consumer_group import ConsumerGroup, State, by_topic
from basaltmq.protocols.kafka.groups.consumer_member import JOINING, STATIC_LEAVE, ConsumerMember
from basaltmq.protocols.kafka.wire import errors as e
from basaltmq.protocols.kafka.wire.api import Request
from basaltmq.protocols.kafka.wire.errors import Refused
from basaltmq.protocols.kafka.wire.schema import Fields

if TYPE_CHECKING:
    from basaltmq.protocols.kafka.context import Client, Context, Response

OWN_IDS_SINCE: Final = 1
"""First ConsumerGroupHeartbeat version in which clients choose the member id."""

SUBSCRIBED_MAX: Final = 10_000
"""Limit of topic names in one member's subscription, about 1 MB. Use a pattern for more topics."""

CONSUMER_MEMBER: Final = 1


def heartbeat(context: Context, client: Client, request: Request) -> Response:
    """ConsumerGroupHeartbeat."""
    body = request.body
    refused = group_error(client, body["group_id"])
    if refused:
        return {"error_code": refused}
    try:
        _check(body, request.version)
        _check_topics(client, body["subscribed_topic_names"] or ())
        _check_protocol(context, body)
        with context.guard():
            return context.consumer_groups.heartbeat(body, client.client_id, client.host, partial(client.may, READ))
    except Refused as error:
        return {"error_code": error.code, "error_message": str(error)}


def _check(body: Fields, version: int) -> None:
    """Raise Refused if a heartbeat is invalid."""
    epoch = body["member_epoch"]
    names_itself = version >= OWN_IDS_SINCE or epoch != JOINING
    wrong = ""
    if names_itself and not body["member_id"]:
        wrong = "the member id is empty; clients choose it since version 1"
    elif any(len((body[field] or "").encode()) > NAME_BYTES_MAX for field in ("member_id", "instance_id", "rack_id")):
        wrong = f"member id, instance id and rack id have at most {NAME_BYTES_MAX} bytes each"
    elif body["instance_id"] == "" or body["rack_id"] == "":
        wrong = "the instance id and the rack id must not be empty strings; use null"
    elif len(body["subscribed_topic_names"] or ()) > SUBSCRIBED_MAX:
        wrong = f"a member may subscribe to at most {SUBSCRIBED_MAX} topics by name; use a pattern"
    elif body["rebalance_timeout_ms"] < -1:
        wrong = f"invalid rebalance timeout: {body['rebalance_timeout_ms']} ms"
    elif epoch == JOINING:
        wrong = _wrong_join(body)
    elif epoch == STATIC_LEAVE and body["instance_id"] is None:
        wrong = "only a static member (with an instance id) may send epoch -2"
    elif epoch < STATIC_LEAVE:
        wrong = f"invalid member epoch {epoch}; the lowest is {STATIC_LEAVE}"
    if wrong:
        raise Refused(e.INVALID_REQUEST, wrong)
    if body["server_assignor"] is not None and body["server_assignor"] not in ASSIGNORS:
        known = ", ".join(sorted(ASSIGNORS))
        raise Refused(
            e.UNSUPPORTED_ASSIGNOR, f"unknown assignor {body['server_assignor']!r:.80}; valid assignors: {known}"
        )


def _wrong_join(body: Fields) -> str:
    if body["rebalance_timeout_ms"] == -1:
        return "a joining member must send its rebalance timeout"
    if body["topic_partitions"] is None or body["topic_partitions"]:
        return "a joining member must send an empty list of owned partitions"
    if body["subscribed_topic_names"] is None and body["subscribed_topic_regex"] is None:
        return "a joining member must send its subscription"
    return ""


def _check_topics(client: Client, names: Iterable[str]) -> None:
    denied = [name for name in names if not client.may(READ, name)]
    if denied:
        raise Refused(e.TOPIC_AUTHORIZATION_FAILED, f"read access to topic {denied[0]!r:.300} refused")


def _check_protocol(context: Context, body: Fields) -> None:
    classic = context.groups.get(body["group_id"])
    if classic is None:
        return
    if classic.members or classic.has_pending:
        raise Refused(
            e.GROUP_ID_NOT_FOUND,
            f"group {body['group_id']!r:.300} has members of the classic protocol; stop them first",
        )
    if body["member_epoch"] == JOINING:
        context.groups.discard(classic)


def describe(context: Context, client: Client, request: Request) -> Response:
    """ConsumerGroupDescribe."""
    with context.guard():
        groups = [_described(context, client, name) for name in request.body["group_ids"]]
    if request.body["include_authorized_operations"]:
        groups = [with_group_operations(client, each) for each in groups]
    return {"groups": groups}


def _described(context: Context, client: Client, name: str) -> Fields:
    refused = group_error(client, name, Operation.DESCRIBE)
    if refused:
        return {"group_id": name, "error_code": refused}
    group = context.consumer_groups.get(name)
    if group is not None:
        return _shown(context, client, group)
    row = context.consumer_groups.row(name)
    if row is None or not row.epoch:
        message = f"consumer group {name!r:.300} does not exist"
        return {"group_id": name, "error_code": e.GROUP_ID_NOT_FOUND, "error_message": message}
    return {
        "group_id": name,
        "group_state": State.EMPTY.value,
        "group_epoch": row.epoch,
        "assignment_epoch": row.epoch,
        "assignor_name": UNIFORM,
    }


def _shown(context: Context, client: Client, group: ConsumerGroup) -> Fields:
    hidden = [name for name in sorted(group.inputs.topics) if not client.may(READ, name)]
    if hidden:
        message = f"group {group.name!r:.300} subscribes to topics without read permission"
        return {"group_id": group.name, "error_code": e.TOPIC_AUTHORIZATION_FAILED, "error_message": message}
    return {
        "group_id": group.name,
        "group_state": group.state.value,
        "group_epoch": group.epoch,
        "assignment_epoch": group.target_epoch,
        "assignor_name": group.inputs.assignor,
        "members": [_member(context, group, each) for each in group.members.values()],
    }


def _member(context: Context, group: ConsumerGroup, member: ConsumerMember) -> Fields:
    return {
        "member_id": member.id,
        "instance_id": member.instance,
        "rack_id": member.rack,
        "member_epoch": member.epoch,
        "client_id": member.client_id,
        "client_host": member.host,
        "subscribed_topic_names": sorted(member.names),
        "subscribed_topic_regex": member.pattern or None,
        "assignment": _assignment(context, member.assigned),
        "target_assignment": _assignment(context, group.target.get(member.id, EMPTY)),
        "member_type": CONSUMER_MEMBER,
    }


def _assignment(context: Context, partition_ids: Iterable[PartitionId]) -> Fields:
    """Group partitions by topic with topic names; omits deleted topics."""
    named = []
    for each in by_topic(partition_ids):
        topic_id: UUID = each["topic_id"]
        name = context.topic_name(topic_id)
        if name is not None:
            named.append({**each, "topic_name": name})
    return {"topic_partitions": named}
