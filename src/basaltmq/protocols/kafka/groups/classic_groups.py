"""Requests of consumer groups: members here, in memory; offsets in the plane's store, durable before the answer."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Final

from basaltmq.broker.auth.permissions import READ
from basaltmq.errors import BasaltError
from basaltmq.protocols.kafka.groups.classic_group import Group, State
from basaltmq.protocols.kafka.wire import errors as e
from basaltmq.protocols.kafka.wire.api import Request
from basaltmq.protocols.kafka.wire.schema import Fields
from basaltmq.streams.offsets import METADATA_BYTES_MAX, Commit, PersistentOffsets, TopicPartition

if TYPE_CHECKING:
    from basaltmq.protocols.kafka.context import Answer, Client, Desk

LISTED_MAX: Final = 10_000
GROUP: Final = 0
NAME_BYTES_MAX: Final = 1024

EPOCHS_SINCE: Final = 9
"""The versions of OffsetCommit and OffsetFetch that know of epochs of members."""

NOT_FOUND_SINCE: Final = 6
"""The version of DescribeGroups in which a group that is not there is an error."""

CLASSIC: Final = "classic"
CONSUMER: Final = "consumer"
"""A group's type, and what the members of nearly all groups of the classic protocol call theirs."""


class Groups:
    """The groups that have members."""

    def __init__(self, new_id: Callable[[str], str] = lambda client: f"{client}-{uuid.uuid4()}") -> None:
        self._new_id = new_id
        self.by_name: dict[str, Group] = {}

    def get(self, name: str) -> Group | None:
        return self.by_name.get(name)

    def make(self, name: str) -> Group:
        found = self.by_name.get(name)
        if found is None:
            found = self.by_name[name] = Group(name, self._new_id, self.discard)
        return found

    def discard(self, group: Group) -> None:
        if self.by_name.get(group.name) is group:
            del self.by_name[group.name]

    def close(self) -> None:
        for group in list(self.by_name.values()):
            group.close()
        self.by_name.clear()


def refusal(client: Client, group: str) -> int:
    if not group or len(group.encode()) > NAME_BYTES_MAX:
        return e.INVALID_GROUP_ID
    return e.NONE if client.may(READ, group) else e.GROUP_AUTHORIZATION_FAILED


def denial(client: Client, topic: str) -> int:
    return e.NONE if client.may(READ, topic) else e.TOPIC_AUTHORIZATION_FAILED


async def join_group(desk: Desk, client: Client, request: Request) -> Fields:
    body = request.body
    refused = refusal(client, body["group_id"])
    if refused:
        return {"error_code": refused, "member_id": body["member_id"]}
    if desk.consumer_groups.get(body["group_id"]) is not None:
        return {"error_code": e.INCONSISTENT_GROUP_PROTOCOL, "member_id": body["member_id"]}
    group = desk.groups.get(body["group_id"])
    if group is None:
        if body["member_id"]:
            return {"error_code": e.UNKNOWN_MEMBER_ID, "member_id": body["member_id"]}
        with desk.guard():
            desk.consumer_groups.forget(body["group_id"])
        group = desk.groups.make(body["group_id"])
    answer = await group.join(body, request.version, client.client_id, client.host)
    if not group.members and not group.has_pending:
        desk.groups.discard(group)
    return answer


async def sync_group(desk: Desk, client: Client, request: Request) -> Fields:
    refused = refusal(client, request.body["group_id"])
    group = desk.groups.get(request.body["group_id"])
    if refused or group is None:
        return {"error_code": refused or e.UNKNOWN_MEMBER_ID}
    return await group.sync(request.body)


def heartbeat(desk: Desk, client: Client, request: Request) -> Answer:
    body = request.body
    refused = refusal(client, body["group_id"])
    group = desk.groups.get(body["group_id"])
    if refused or group is None:
        return {"error_code": refused or e.UNKNOWN_MEMBER_ID}
    return {"error_code": group.heartbeat(body["member_id"], body["group_instance_id"], body["generation_id"])}


def leave_group(desk: Desk, client: Client, request: Request) -> Answer:
    body = request.body
    refused = refusal(client, body["group_id"])
    if refused:
        return {"error_code": refused}
    group = desk.groups.get(body["group_id"])
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


async def offset_commit(desk: Desk, client: Client, request: Request) -> Fields:
    body = request.body
    code = refusal(client, body["group_id"]) or _wrong_member(desk, body, request.version)
    commits: dict[TopicPartition, int | Commit] = {}
    topics = []
    for topic in body["topics"]:
        denied = denial(client, topic["name"])
        found = None if denied else desk.plane.topics.find(topic["name"])
        partitions = []
        for each in topic["partitions"]:
            wrong = code or denied or wrong_commit(each, 0 if found is None else found.config.partitions)
            if found is not None and not wrong:
                commits[found.id, each["partition_index"]] = Commit(
                    each["committed_offset"],
                    epoch=each["committed_leader_epoch"],
                    metadata=each["committed_metadata"] or "",
                )
            partitions.append({"partition_index": each["partition_index"], "error_code": wrong})
        topics.append({"name": topic["name"], "partitions": partitions})
    answer: Fields = {"topics": topics}
    if commits:
        try:
            await _commit(desk, body["group_id"], commits)
        except BasaltError as error:
            failed = e.code_of(error)
            for each in (each for topic in topics for each in topic["partitions"]):
                each["error_code"] = each["error_code"] or failed
    return answer


def _wrong_member(desk: Desk, body: Fields, version: int) -> int:
    """Why the member that commits may not; none if it may."""
    name, member_id, generation = body["group_id"], body["member_id"], body["generation_id"]
    consumers = desk.consumer_groups.get(name)
    if consumers is not None:
        code = consumers.wrong(member_id, generation)
        return e.UNSUPPORTED_VERSION if not code and version < EPOCHS_SINCE else code
    group = desk.groups.get(name)
    if group is not None:
        return group.wrong_commit(member_id, body["group_instance_id"], generation)
    if generation < 0:
        return e.NONE
    # Nobody is there, perhaps since a restart. Both protocols know what to do about a member that is unknown.
    return e.UNKNOWN_MEMBER_ID if version >= EPOCHS_SINCE else e.ILLEGAL_GENERATION


def wrong_commit(asked: Fields, partitions: int) -> int:
    if not 0 <= asked["partition_index"] < partitions:
        return e.UNKNOWN_TOPIC_OR_PARTITION
    if asked["committed_offset"] < 0:
        return e.OFFSET_OUT_OF_RANGE
    if len((asked["committed_metadata"] or "").encode()) > METADATA_BYTES_MAX:
        return e.OFFSET_METADATA_TOO_LARGE
    return e.NONE


async def _commit(desk: Desk, group: str, commits: dict[TopicPartition, int | Commit]) -> None:
    offsets = desk.plane.offsets
    with desk.guard():
        if isinstance(offsets, PersistentOffsets):
            await offsets.commit_async(group, commits)
        else:
            await asyncio.to_thread(offsets.commit, group, commits)


def offset_fetch(desk: Desk, client: Client, request: Request) -> Answer:
    body = request.body
    if request.version < 8:
        topics, code = _committed(desk, client, body["group_id"], body["topics"], body["require_stable"])
        return {"topics": topics, "error_code": code}
    groups = []
    for each in body["groups"]:
        topics, code = _committed(desk, client, each["group_id"], each["topics"], body["require_stable"])
        consumers = desk.consumer_groups.get(each["group_id"])
        is_member = each["member_id"] is not None or each["member_epoch"] >= 0
        if consumers is not None and is_member and not code:
            code = consumers.wrong(each["member_id"], each["member_epoch"])
            topics = [] if code else topics
        groups.append({"group_id": each["group_id"], "topics": topics, "error_code": code})
    return {"groups": groups}


def _committed(
    desk: Desk, client: Client, group: str, wanted: list[Fields] | None, is_stable: bool
) -> tuple[list[Fields], int]:
    refused = refusal(client, group)
    if refused:
        return [], refused
    with desk.guard():
        if wanted is None:
            return _all_committed(desk, client, group, is_stable), e.NONE
        found: list[Fields] = []
        for asked in wanted:
            denied = denial(client, asked["name"])
            if denied:
                partitions = [{"partition_index": each, "error_code": denied} for each in asked["partition_indexes"]]
                found.append({"name": asked["name"], "partitions": partitions})
                continue
            topic = desk.plane.topics.find(asked["name"])
            known: dict[TopicPartition, Commit] = {}
            if topic is not None:
                places = [(topic.id, each) for each in asked["partition_indexes"] if each >= 0]
                known = desk.plane.offsets.committed(group, places)
            partitions = [
                _shown(each, None if topic is None else known.get((topic.id, each)))
                if topic is None or not is_stable or not desk.transactions.is_pending(group, topic.id, each)
                else _unstable(each)
                for each in asked["partition_indexes"]
            ]
            found.append({"name": asked["name"], "partitions": partitions})
        return found, e.NONE


def _all_committed(desk: Desk, client: Client, group: str, is_stable: bool) -> list[Fields]:
    by_topic: dict[str, list[Fields]] = {}
    for (topic_id, partition), commit in desk.plane.offsets.of_group(group).items():
        topic = desk.plane.topics.by_id(topic_id)
        if topic is not None and client.may(READ, topic.name):
            is_held = is_stable and desk.transactions.is_pending(group, topic_id, partition)
            shown = _unstable(partition) if is_held else _shown(partition, commit)
            by_topic.setdefault(topic.name, []).append(shown)
    return [{"name": name, "partitions": partitions} for name, partitions in by_topic.items()]


def _unstable(partition: int) -> Fields:
    """A transaction may commit another offset any moment; the client asks again."""
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


def describe_groups(desk: Desk, client: Client, request: Request) -> Answer:
    return {"groups": [_described(desk, client, name, request.version) for name in request.body["groups"]]}


def _described(desk: Desk, client: Client, name: str, version: int) -> Fields:
    refused = refusal(client, name)
    if refused:
        return {"group_id": name, "error_code": refused}
    group = desk.groups.get(name)
    if group is None:
        with desk.guard():
            is_there = not desk.consumer_groups.is_consumer(name) and bool(desk.plane.offsets.of_group(name))
        if is_there:
            return {"group_id": name, "group_state": State.EMPTY.value, "protocol_type": CONSUMER}
        answer: Fields = {"group_id": name, "group_state": State.DEAD.value}
        if version >= NOT_FOUND_SINCE:
            message = f"there is no group {name!r:.300} of the classic protocol"
            answer |= {"error_code": e.GROUP_ID_NOT_FOUND, "error_message": message}
        return answer
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


def list_groups(desk: Desk, client: Client, request: Request) -> Answer:
    states = {each.lower() for each in request.body["states_filter"]}
    types = {each.lower() for each in request.body["types_filter"]}
    rows = {
        name: _row(name, group.state.value, CLASSIC, group.protocol_type) for name, group in desk.groups.by_name.items()
    }
    for name, consumers in desk.consumer_groups.by_name.items():
        rows[name] = _row(name, consumers.state.value, CONSUMER)
    with desk.guard():
        for name, kept in desk.consumer_groups.rows():
            if len(rows) >= LISTED_MAX:
                break
            if kept.epoch:
                rows.setdefault(name, _row(name, State.EMPTY.value, CONSUMER))
        for name in desk.plane.offsets.groups():
            if len(rows) >= LISTED_MAX:
                break
            rows.setdefault(name, _row(name, State.EMPTY.value, CLASSIC))
    return {
        "groups": [
            row
            for name, row in rows.items()
            if client.may(READ, name)
            and (not states or row["group_state"].lower() in states)
            and (not types or row["group_type"] in types)
        ]
    }


def _row(name: str, state: str, kind: str, protocol_type: str = CONSUMER) -> Fields:
    return {"group_id": name, "protocol_type": protocol_type, "group_state": state, "group_type": kind}


async def delete_groups(desk: Desk, client: Client, request: Request) -> Fields:
    results = []
    for name in request.body["groups_names"]:
        code = refusal(client, name)
        group = desk.groups.get(name)
        has_members = desk.consumer_groups.get(name) is not None or (group is not None and bool(group.members))
        if not code and has_members:
            code = e.NON_EMPTY_GROUP
        if not code:
            with desk.guard():
                is_there = desk.consumer_groups.forget(name) or group is not None
                gone = await asyncio.to_thread(desk.plane.offsets.delete, name)
            code = e.NONE if gone or is_there else e.GROUP_ID_NOT_FOUND
        results.append({"group_id": name, "error_code": code})
    return {"results": results}


async def offset_delete(desk: Desk, client: Client, request: Request) -> Fields:
    body = request.body
    code = refusal(client, body["group_id"])
    if code:
        return {"error_code": code}
    group = desk.groups.get(body["group_id"])
    consumers = desk.consumer_groups.get(body["group_id"])
    if group is None and consumers is None and not desk.plane.offsets.of_group(body["group_id"]):
        return {"error_code": e.GROUP_ID_NOT_FOUND}
    topics: list[Fields] = []
    going: set[TopicPartition] = set()
    for asked in body["topics"]:
        denied = denial(client, asked["name"])
        topic = None if denied else desk.plane.topics.find(asked["name"])
        partitions: list[dict[str, Any]] = []
        for each in asked["partitions"]:
            at = each["partition_index"]
            wrong = denied
            if denied:
                pass
            elif topic is None or not 0 <= at < topic.config.partitions:
                wrong = e.UNKNOWN_TOPIC_OR_PARTITION
            elif group is not None and group.members:
                # Which topics its members read is in metadata of their own making; with members, all count as read.
                wrong = e.GROUP_SUBSCRIBED_TO_TOPIC
            elif consumers is not None and consumers.is_subscribed(topic.name):
                wrong = e.GROUP_SUBSCRIBED_TO_TOPIC
            else:
                going.add((topic.id, at))
            partitions.append({"partition_index": at, "error_code": wrong})
        topics.append({"name": asked["name"], "partitions": partitions})
    if going:
        with desk.guard():
            await asyncio.to_thread(desk.plane.offsets.delete, body["group_id"], going)
    return {"topics": topics}
