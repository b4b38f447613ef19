"""Handlers for classic consumer groups, and for committed offsets and group listings of both group protocols.

Members are in memory. Offsets are in the stream plane's store, and durable before the response.
"""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any, Final
from uuid import UUID

from basaltmq.broker.auth.permissions import READ
from basaltmq.broker.turns import Turns, in_turns
from basaltmq.errors import BasaltError
from basaltmq.protocols.kafka.groups.classic_group import ClassicGroup, State
from basaltmq.protocols.kafka.wire import errors as e
from basaltmq.protocols.kafka.wire.api import Request
from basaltmq.protocols.kafka.wire.schema import Fields
from basaltmq.streams.offsets import METADATA_BYTES_MAX, Commit, PersistentOffsets, TopicPartition

if TYPE_CHECKING:
    from basaltmq.protocols.kafka.context import Answer, Client, Context

LISTED_MAX: Final = 10_000

PORTION: Final = 1000
"""Offsets read or written in one turn of the loop, which takes 5 ms."""

GROUP: Final = 0
NAME_BYTES_MAX: Final = 1024

EPOCHS_SINCE: Final = 9
"""First version of OffsetCommit and OffsetFetch with member epochs (KIP-848)."""

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


def group_error(client: Client, group: str) -> int:
    if not group or len(group.encode()) > NAME_BYTES_MAX:
        return e.INVALID_GROUP_ID
    return e.NONE if client.may(READ, group) else e.GROUP_AUTHORIZATION_FAILED


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


def heartbeat(context: Context, client: Client, request: Request) -> Answer:
    body = request.body
    refused = group_error(client, body["group_id"])
    group = context.groups.get(body["group_id"])
    if refused or group is None:
        return {"error_code": refused or e.UNKNOWN_MEMBER_ID}
    return {"error_code": group.heartbeat(body["member_id"], body["group_instance_id"], body["generation_id"])}


def leave_group(context: Context, client: Client, request: Request) -> Answer:
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


async def offset_commit(context: Context, client: Client, request: Request) -> Fields:
    body = request.body
    code = group_error(client, body["group_id"]) or _member_error(context, body, request.version)
    commits: dict[TopicPartition, int | Commit] = {}
    topics = []
    turns = Turns()
    for topic in body["topics"]:
        denied = topic_error(client, topic["name"])
        found = None if denied else context.plane.topics.find(topic["name"])
        partitions = []
        for each in topic["partitions"]:
            wrong = code or denied or commit_error(each, 0 if found is None else found.config.partitions)
            if found is not None and not wrong:
                commits[found.id, each["partition_index"]] = Commit(
                    each["committed_offset"],
                    epoch=each["committed_leader_epoch"],
                    metadata=each["committed_metadata"] or "",
                )
            partitions.append({"partition_index": each["partition_index"], "error_code": wrong})
            await turns.yield_if_due()
        topics.append({"name": topic["name"], "partitions": partitions})
    response: Fields = {"topics": topics}
    if commits:
        # The group may have changed meanwhile.
        code = _member_error(context, body, request.version)
        if code:
            for each in (each for topic in topics for each in topic["partitions"]):
                each["error_code"] = each["error_code"] or code
            return response
        try:
            await _commit(context, body["group_id"], commits)
        except BasaltError as error:
            failed = e.code_of(error)
            for each in (each for topic in topics for each in topic["partitions"]):
                each["error_code"] = each["error_code"] or failed
    return response


def _member_error(context: Context, body: Fields, version: int) -> int:
    """Return the error code if the member may not commit, else NONE."""
    name, member_id, generation = body["group_id"], body["member_id"], body["generation_id"]
    consumers = context.consumer_groups.get(name)
    if consumers is not None:
        code = consumers.epoch_error(member_id, generation)
        return e.UNSUPPORTED_VERSION if not code and version < EPOCHS_SINCE else code
    group = context.groups.get(name)
    if group is not None:
        return group.commit_error(member_id, body["group_instance_id"], generation)
    if generation < 0:
        return e.NONE
    # The group has no members, perhaps because of a restart. Each protocol rejoins after its code.
    return e.UNKNOWN_MEMBER_ID if version >= EPOCHS_SINCE else e.ILLEGAL_GENERATION


def commit_error(item: Fields, partitions: int) -> int:
    if not 0 <= item["partition_index"] < partitions:
        return e.UNKNOWN_TOPIC_OR_PARTITION
    if item["committed_offset"] < 0:
        return e.OFFSET_OUT_OF_RANGE
    if len((item["committed_metadata"] or "").encode()) > METADATA_BYTES_MAX:
        return e.OFFSET_METADATA_TOO_LARGE
    return e.NONE


async def _commit(context: Context, group: str, commits: dict[TopicPartition, int | Commit]) -> None:
    offsets = context.plane.offsets
    with context.guard():
        if not isinstance(offsets, PersistentOffsets):
            await asyncio.to_thread(offsets.commit, group, commits)
            return
        items = list(commits.items())
        for at in range(0, len(items) - PORTION, PORTION):
            # A crash leaves some offsets committed. The client has no response, so it commits them again.
            offsets.write(group, dict(items[at : at + PORTION]))
            await asyncio.sleep(0)
        last = (len(items) - 1) // PORTION * PORTION
        await offsets.commit_async(group, dict(items[last:]) if last else commits)


async def offset_fetch(context: Context, client: Client, request: Request) -> Fields:
    body = request.body
    if request.version < 8:
        topics, code = await _committed(context, client, body["group_id"], body["topics"], body["require_stable"])
        return {"topics": topics, "error_code": code}
    groups = []
    for each in body["groups"]:
        topics, code = await _committed(context, client, each["group_id"], each["topics"], body["require_stable"])
        consumers = context.consumer_groups.get(each["group_id"])
        is_member = each["member_id"] is not None or each["member_epoch"] >= 0
        if consumers is not None and is_member and not code:
            code = consumers.epoch_error(each["member_id"], each["member_epoch"])
            topics = [] if code else topics
        groups.append({"group_id": each["group_id"], "topics": topics, "error_code": code})
    return {"groups": groups}


async def _committed(
    context: Context, client: Client, group: str, wanted: list[Fields] | None, is_stable: bool
) -> tuple[list[Fields], int]:
    refused = group_error(client, group)
    if refused:
        return [], refused
    with context.guard():
        if wanted is None:
            return await _all_committed(context, client, group, is_stable), e.NONE
        found: list[Fields] = []
        turns = Turns()
        for item in wanted:
            await turns.yield_if_due()
            denied = topic_error(client, item["name"])
            if denied:
                partitions = [{"partition_index": each, "error_code": denied} for each in item["partition_indexes"]]
                found.append({"name": item["name"], "partitions": partitions})
                continue
            topic = context.plane.topics.summary(item["name"])
            partitions = []
            for at in range(0, len(item["partition_indexes"]), PORTION):
                indexes = item["partition_indexes"][at : at + PORTION]
                known: dict[TopicPartition, Commit] = {}
                if topic is not None:
                    known = context.plane.offsets.committed(group, [(topic.id, each) for each in indexes if each >= 0])
                partitions += [
                    _shown(each, None if topic is None else known.get((topic.id, each)))
                    if topic is None or not is_stable or not context.transactions.is_pending(group, topic.id, each)
                    else _unstable(each)
                    for each in indexes
                ]
                await turns.yield_if_due()
            found.append({"name": item["name"], "partitions": partitions})
        return found, e.NONE


async def _all_committed(context: Context, client: Client, group: str, is_stable: bool) -> list[Fields]:
    # In a thread, because a group may have offsets of many thousand partitions.
    commits = await asyncio.to_thread(context.plane.offsets.of_group, group)
    found: dict[UUID, tuple[str, list[Fields]] | None] = {}
    turns = Turns()
    for (topic_id, partition), commit in commits.items():
        if topic_id not in found:
            topic = context.plane.topics.summary_of(topic_id)
            found[topic_id] = (topic.name, []) if topic is not None and client.may(READ, topic.name) else None
        shown = found[topic_id]
        if shown is not None:
            is_held = is_stable and context.transactions.is_pending(group, topic_id, partition)
            shown[1].append(_unstable(partition) if is_held else _shown(partition, commit))
        await turns.yield_if_due()
    return [{"name": each[0], "partitions": each[1]} for each in found.values() if each is not None]


def _unstable(partition: int) -> Fields:
    """A pending transaction may change the offset, so the client must retry."""
    return {"partition_index": partition, "error_code": e.UNSTABLE_OFFSET_COMMIT}


def _shown(partition: int, commit: Commit | None) -> Fields:
    if commit is None:
        return {"partition_index": partition}
    return {
        "partition_index": partition,
        "committed_offset": commit.offset,
        "committed_leader_epoch": commit.epoch,
        "metadata": commit.metadata,
    }


async def describe_groups(context: Context, client: Client, request: Request) -> Fields:
    return {"groups": await in_turns(request.body["groups"], partial(_described, context, client, request.version))}


def _described(context: Context, client: Client, version: int, name: str) -> Fields:
    refused = group_error(client, name)
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
        if is_wanted and client.may(READ, name):
            groups.append(row)
        await turns.yield_if_due()
    return {"groups": groups}


def _row(name: str, state: str, kind: str, protocol_type: str = CONSUMER) -> Fields:
    return {"group_id": name, "protocol_type": protocol_type, "group_state": state, "group_type": kind}


async def delete_groups(context: Context, client: Client, request: Request) -> Fields:
    results = []
    for name in request.body["groups_names"]:
        code = group_error(client, name)
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


async def offset_delete(context: Context, client: Client, request: Request) -> Fields:
    body = request.body
    code = group_error(client, body["group_id"])
    if code:
        return {"error_code": code}
    group = context.groups.get(body["group_id"])
    consumers = context.consumer_groups.get(body["group_id"])
    if group is None and consumers is None and not context.plane.offsets.has_group(body["group_id"]):
        return {"error_code": e.GROUP_ID_NOT_FOUND}
    topics: list[Fields] = []
    going: set[TopicPartition] = set()
    for item in body["topics"]:
        denied = topic_error(client, item["name"])
        topic = None if denied else context.plane.topics.find(item["name"])
        partitions: list[dict[str, Any]] = []
        for each in item["partitions"]:
            at = each["partition_index"]
            wrong = denied
            if denied:
                pass
            elif topic is None or not 0 <= at < topic.config.partitions:
                wrong = e.UNKNOWN_TOPIC_OR_PARTITION
            elif group is not None and group.members:
                # Subscriptions are in client-defined metadata, so with members every topic counts as subscribed.
                wrong = e.GROUP_SUBSCRIBED_TO_TOPIC
            elif consumers is not None and consumers.is_subscribed(topic.name):
                wrong = e.GROUP_SUBSCRIBED_TO_TOPIC
            else:
                going.add((topic.id, at))
            partitions.append({"partition_index": at, "error_code": wrong})
        topics.append({"name": item["name"], "partitions": partitions})
    if going:
        with context.guard():
            await asyncio.to_thread(context.plane.offsets.delete, body["group_id"], going)
    return {"topics": topics}
