"""Requests of consumer groups of the second protocol: who may, what makes sense, and how answers are spelt.

A group is read, and so are the topics a member names; one it may not read refuses the heartbeat. A group that has
members of the classic protocol is none of this one's: GROUP_ID_NOT_FOUND, as by an Apache Kafka that was told not to
migrate groups under way. Without members a group becomes whatever the next member is.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial
from typing import Final
from uuid import UUID

from basaltmq.broker.auth.permissions import READ
from basaltmq.protocols.kafka.context import Answer, Client, Desk
from basaltmq.protocols.kafka.groups.assignors import ASSIGNORS, EMPTY, UNIFORM, Place
from basaltmq.protocols.kafka.groups.classic_groups import NAME_BYTES_MAX, refusal
from basaltmq.protocols.kafka.groups.consumer_group import ConsumerGroup, State, by_topic
from basaltmq.protocols.kafka.groups.consumer_member import AWAY, JOINING, ConsumerMember
from basaltmq.protocols.kafka.wire import errors as e
from basaltmq.protocols.kafka.wire.api import Request
from basaltmq.protocols.kafka.wire.errors import Refused
from basaltmq.protocols.kafka.wire.schema import Fields

OWN_IDS_SINCE: Final = 1
"""The version of ConsumerGroupHeartbeat in which members name themselves."""

LEAVING: Final = -1
SUBSCRIBED_MAX: Final = 10_000
"""Names in one member's subscription: about a megabyte. Whoever wants more has a pattern."""

CONSUMER_MEMBER: Final = 1


def heartbeat(desk: Desk, client: Client, request: Request) -> Answer:
    """ConsumerGroupHeartbeat."""
    body = request.body
    refused = refusal(client, body["group_id"])
    if refused:
        return {"error_code": refused}
    try:
        _check(body, request.version)
        _check_topics(client, body["subscribed_topic_names"] or ())
        _check_protocol(desk, body)
        with desk.guard():
            return desk.consumer_groups.heartbeat(body, client.client_id, client.host, partial(client.may, READ))
    except Refused as error:
        return {"error_code": error.code, "error_message": str(error)}


def _check(body: Fields, version: int) -> None:
    """Refused if the request makes no sense."""
    epoch = body["member_epoch"]
    names_itself = version >= OWN_IDS_SINCE or epoch != JOINING
    wrong = ""
    if names_itself and not body["member_id"]:
        wrong = "a member names itself: the member id is empty"
    elif any(len((body[field] or "").encode()) > NAME_BYTES_MAX for field in ("member_id", "instance_id", "rack_id")):
        wrong = f"ids of members, instances and racks have at most {NAME_BYTES_MAX} bytes"
    elif body["instance_id"] == "" or body["rack_id"] == "":
        wrong = "an instance or a rack that is given has a name"
    elif len(body["subscribed_topic_names"] or ()) > SUBSCRIBED_MAX:
        wrong = f"a member subscribes to at most {SUBSCRIBED_MAX} topics by name; use a pattern"
    elif body["rebalance_timeout_ms"] < -1:
        wrong = f"a rebalance timeout of {body['rebalance_timeout_ms']} ms cannot be"
    elif epoch == JOINING:
        wrong = _wrong_join(body)
    elif epoch == AWAY and body["instance_id"] is None:
        wrong = "only a member with an instance id keeps its place with epoch -2"
    elif epoch < AWAY:
        wrong = f"there is no epoch {epoch}"
    if wrong:
        raise Refused(e.INVALID_REQUEST, wrong)
    if body["server_assignor"] is not None and body["server_assignor"] not in ASSIGNORS:
        known = ", ".join(sorted(ASSIGNORS))
        raise Refused(
            e.UNSUPPORTED_ASSIGNOR, f"there is no assignor {body['server_assignor']!r:.80}; there are {known}"
        )


def _wrong_join(body: Fields) -> str:
    if body["rebalance_timeout_ms"] == -1:
        return "a member that joins says its rebalance timeout"
    if body["topic_partitions"] is None or body["topic_partitions"]:
        return "a member that joins says that it has no partitions"
    if body["subscribed_topic_names"] is None and body["subscribed_topic_regex"] is None:
        return "a member that joins says what it subscribes to"
    return ""


def _check_topics(client: Client, names: Iterable[str]) -> None:
    denied = [name for name in names if not client.may(READ, name)]
    if denied:
        raise Refused(e.TOPIC_AUTHORIZATION_FAILED, f"read access to topic {denied[0]!r:.300} refused")


def _check_protocol(desk: Desk, body: Fields) -> None:
    classic = desk.groups.get(body["group_id"])
    if classic is None:
        return
    if classic.members or classic.has_pending:
        raise Refused(
            e.GROUP_ID_NOT_FOUND,
            f"group {body['group_id']!r:.300} has members of the classic protocol; stop them before others join",
        )
    if body["member_epoch"] == JOINING:
        desk.groups.discard(classic)


def describe(desk: Desk, client: Client, request: Request) -> Answer:
    """ConsumerGroupDescribe."""
    with desk.guard():
        return {"groups": [_described(desk, client, name) for name in request.body["group_ids"]]}


def _described(desk: Desk, client: Client, name: str) -> Fields:
    refused = refusal(client, name)
    if refused:
        return {"group_id": name, "error_code": refused}
    group = desk.consumer_groups.get(name)
    if group is not None:
        return _shown(desk, client, group)
    row = desk.consumer_groups.row(name)
    if row is None or not row.epoch:
        message = f"there is no group {name!r:.300} of the consumer protocol"
        return {"group_id": name, "error_code": e.GROUP_ID_NOT_FOUND, "error_message": message}
    return {
        "group_id": name,
        "group_state": State.EMPTY.value,
        "group_epoch": row.epoch,
        "assignment_epoch": row.epoch,
        "assignor_name": UNIFORM,
    }


def _shown(desk: Desk, client: Client, group: ConsumerGroup) -> Fields:
    hidden = [name for name in sorted(group.basis.topics) if not client.may(READ, name)]
    if hidden:
        message = f"group {group.name!r:.300} reads topics that may not be seen"
        return {"group_id": group.name, "error_code": e.TOPIC_AUTHORIZATION_FAILED, "error_message": message}
    return {
        "group_id": group.name,
        "group_state": group.state.value,
        "group_epoch": group.epoch,
        "assignment_epoch": group.target_epoch,
        "assignor_name": group.basis.assignor,
        "members": [_member(desk, group, each) for each in group.members.values()],
    }


def _member(desk: Desk, group: ConsumerGroup, member: ConsumerMember) -> Fields:
    return {
        "member_id": member.id,
        "instance_id": member.instance,
        "rack_id": member.rack,
        "member_epoch": member.epoch,
        "client_id": member.client_id,
        "client_host": member.host,
        "subscribed_topic_names": sorted(member.names),
        "subscribed_topic_regex": member.pattern or None,
        "assignment": _assignment(desk, member.assigned),
        "target_assignment": _assignment(desk, group.target.get(member.id, EMPTY)),
        "member_type": CONSUMER_MEMBER,
    }


def _assignment(desk: Desk, places: Iterable[Place]) -> Fields:
    """Partitions with the names of their topics; those of topics that are gone are left out."""
    named = []
    for each in by_topic(places):
        topic_id: UUID = each["topic_id"]
        name = desk.topic_name(topic_id)
        if name is not None:
            named.append({**each, "topic_name": name})
    return {"topic_partitions": named}
