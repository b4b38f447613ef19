"""Handlers for classic consumer groups, and for group listings and deletions of both group protocols."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Final

from basaltmq.broker.auth.acls import Operation, Resource
from basaltmq.broker.auth.permissions import READ
from basaltmq.broker.scheduling.turns import Turns, in_turns
from basaltmq.protocols.kafka.authorization import with_group_operations
from basaltmq.protocols.kafka.groups.classic_group import ClassicGroup, State
from basaltmq.protocols.kafka.wire import errors as e
from basaltmq.protocols.kafka.wire.api import Request
from basaltmq.protocols.kafka.wire.schema import Fields

if TYPE_CHECKING:
    from basaltmq.protocols.kafka.context import Client, Context, Response

LISTED_MAX: Final = 10_000

NAME_BYTES_MAX: Final = 1024

NOT_FOUND_SINCE: Final = 6
"""First DescribeGroups version that reports an unknown group as an error."""

CLASSIC: Final = "classic"
CONSUMER: Final = "consumer"
"""Type of a KIP-848 group. Also the protocol type of most classic groups."""


class ClassicGroups:
    """The classic groups that have members."""

    def __init__(self, new_id: Callable[[str], str] = lambda client: f"{client}-{uuid.uuid4()}") -> None:
        self._new_id = new_id
        self.by_name: dict[str, ClassicGroup] = {}

    def get(self, name: str) -> ClassicGroup | None:
        return self.by_name.get(name)

    def make(self, name: str) -> ClassicGroup:
        found = self.by_name.get(name)
        if found is None:
            found = self.by_name[name] = ClassicGroup(name, self._new_id, self.discard)
        return found

    def discard(self, group: ClassicGroup) -> None:
        if self.by_name.get(group.name) is group:
            del self.by_name[group.name]

    def close(self) -> None:
        for group in list(self.by_name.values()):
            group.close()
        self.by_name.clear()


def group_error(client: Client, group: str, operation: Operation = Operation.READ) -> int:
    if not group or len(group.encode()) > NAME_BYTES_MAX:
        return e.INVALID_GROUP_ID
    return e.NONE if client.may(READ, group, operation, Resource.GROUP) else e.GROUP_AUTHORIZATION_FAILED


def topic_error(client: Client, topic: str) -> int:
    return e.NONE if client.may(READ, topic) else e.TOPIC_AUTHORIZATION_FAILED


async def join_group(context: Context, client: Client, request: Request) -> Fields:
    body = request.body
    refused = group_error(client, body["group_id"])
    if refused:
        return {"error_code": refused, "member_id": body["member_id"]}
    if context.consumer_groups.get(body["group_id"]) is not None:
        return {"error_code": e.INCONSISTENT_GROUP_PROTOCOL, "member_id": body["member_id"]}
    group = context.groups.get(body["group_id"])
    if group is None:
        if body["member_id"]:
            return {"error_code": e.UNKNOWN_MEMBER_ID, "member_id": body["member_id"]}
        with context.guard():
            context.consumer_groups.forget(body["group_id"])
        group = context.groups.make(body["group_id"])
    response = await group.join(body, request.version, client.client_id, client.host)
    if not group.members and not group.has_pending:
        context.groups.discard(group)
    return response


async def sync_group(context: Context, client: Client, request: Request) -> Fields:
    refused = group_error(client, request.body["group_id"])
    group = context.groups.get(request.body["group_id"])
    if refused or group is None:
        return {"error_code": refused or e.UNKNOWN_MEMBER_ID}
    return await group.sync(request.body)


def heartbeat(context: Context, client: Client, request: Request) -> Response:
    body = request.body
    refused = group_error(client, body["group_id"])
    group = context.groups.get(body["group_id"])
    if refused or group is None:
        return {"error_code": refused or e.UNKNOWN_MEMBER_ID}
    return {"error_code": group.heartbeat(body["member_id"], body["group_instance_id"], body["generation_id"])}


def leave_group(context: Context, client: Client, request: Request) -> Response:
    body = request.body
    refused = group_error(client, body["group_id"])
    if refused:
        return {"error_code": refused}
    group = context.groups.get(body["group_id"])
    if request.version <= 2:
        return {"error_code": e.UNKNOWN_MEMBER_ID if group is None else group.leave(body["member_id"], None)}
    members = []
    for each in body["members"]:
        code = e.UNKNOWN_MEMBER_ID
        if group is not None:
            code = group.leave(each["member_id"], each["group_instance_id"])
        members.append(
            {
                "member_id": each["member_id"],
                "group_instance_id": each["group_instance_id"],
                "error_code": code,
            }
        )
    return {"members": members}


async def describe_groups(context: Context, client: Client, request: Request) -> Fields:
    groups = await in_turns(request.body["groups"], partial(_described, context, client, request.version))
    if request.body["include_authorized_operations"]:
        groups = await in_turns(groups, partial(with_group_operations, client))
    return {"groups": groups}


def _described(context: Context, client: Client, version: int, name: str) -> Fields:
    refused = group_error(client, name, Operation.DESCRIBE)
    if refused:
        return {"group_id": name, "error_code": refused}
    group = context.groups.get(name)
    if group is None:
        with context.guard():
            is_there = not context.consumer_groups.is_consumer(name) and context.plane.offsets.has_group(name)
        if is_there:
            return {"group_id": name, "group_state": State.EMPTY.value, "protocol_type": CONSUMER}
        response: Fields = {"group_id": name, "group_state": State.DEAD.value}
        if version >= NOT_FOUND_SINCE:
            message = f"classic group {name!r:.300} does not exist"
            response |= {"error_code": e.GROUP_ID_NOT_FOUND, "error_message": message}
        return response
    return {
        "group_id": name,
        "group_state": group.state.value,
        "protocol_type": group.protocol_type,
        "protocol_data": group.protocol,
        "members": [
            {
                "member_id": each.id,
                "group_instance_id": each.instance,
                "client_id": each.client_id,
                "client_host": each.host,
                "member_metadata": each.protocols.get(group.protocol, b""),
                "member_assignment": each.assignment,
            }
            for each in group.members.values()
        ],
    }


async def list_groups(context: Context, client: Client, request: Request) -> Fields:
    states = {each.lower() for each in request.body["states_filter"]}
    types = {each.lower() for each in request.body["types_filter"]}
    rows = {
        name: _row(name, group.state.value, CLASSIC, group.protocol_type)
        for name, group in context.groups.by_name.items()
    }
    for name, consumers in context.consumer_groups.by_name.items():
        rows[name] = _row(name, consumers.state.value, CONSUMER)
    turns = Turns()
    with context.guard():
        for name, kept in context.consumer_groups.rows():
            if len(rows) >= LISTED_MAX:
                break
            if kept.epoch:
                rows.setdefault(name, _row(name, State.EMPTY.value, CONSUMER))
            await turns.yield_if_due()
        for name in context.plane.offsets.groups():
            if len(rows) >= LISTED_MAX:
                break
            rows.setdefault(name, _row(name, State.EMPTY.value, CLASSIC))
            await turns.yield_if_due()
    groups: list[Fields] = []
    for name, row in rows.items():
        is_wanted = (not states or row["group_state"].lower() in states) and (not types or row["group_type"] in types)
        if is_wanted and client.may(READ, name, Operation.DESCRIBE, Resource.GROUP):
            groups.append(row)
        await turns.yield_if_due()
    return {"groups": groups}


def _row(name: str, state: str, kind: str, protocol_type: str = CONSUMER) -> Fields:
    return {"group_id": name, "protocol_type": protocol_type, "group_state": state, "group_type": kind}


async def delete_groups(context: Context, client: Client, request: Request) -> Fields:
    results = []
    for name in request.body["groups_names"]:
        code = group_error(client, name, Operation.DELETE)
        group = context.groups.get(name)
        has_members = context.consumer_groups.get(name) is not None or (group is not None and bool(group.members))
        if not code and has_members:
            code = e.NON_EMPTY_GROUP
        if not code:
            with context.guard():
                is_there = context.consumer_groups.forget(name) or group is not None
                gone = await asyncio.to_thread(context.plane.offsets.delete, name)
            code = e.NONE if gone or is_there else e.GROUP_ID_NOT_FOUND
        results.append({"group_id": name, "error_code": code})
    return {"results": results}
