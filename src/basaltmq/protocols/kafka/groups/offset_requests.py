"""Handlers for committed offsets of both group protocols, and the checks that transactions share.

Offsets are in the stream plane's store, and durable before the response.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Final, NamedTuple
from uuid import UUID

from basaltmq.broker.auth.acls import Operation
from basaltmq.broker.auth.permissions import READ
from basaltmq.broker.scheduling.turns import Turns
from basaltmq.errors import BasaltError
from basaltmq.protocols.kafka.groups.classic_requests import group_error, topic_error
from basaltmq.protocols.kafka.wire import errors as e
from basaltmq.protocols.kafka.wire.api import Request
from basaltmq.protocols.kafka.wire.schema import Fields
from basaltmq.streams.offsets import METADATA_BYTES_MAX, Commit, TopicPartition

if TYPE_CHECKING:
    from basaltmq.protocols.kafka.context import Client, Context

PORTION: Final = 1000
"""Offsets read or written in one turn of the loop, which takes 5 ms."""

EPOCHS_SINCE: Final = 9
"""First version of OffsetCommit and OffsetFetch with member epochs (KIP-848)."""

TOPIC_IDS_SINCE: Final = 10
"""First version of OffsetCommit and OffsetFetch that names topics by id (KIP-848)."""


class RequestedCommits(NamedTuple):
    """The offsets of a commit request, and its response."""

    topics: list[Fields]
    """The topics of the response, with an error code per partition."""

    valid: dict[TopicPartition, Commit]

    def refuse(self, code: int) -> None:
        """Set an error code for every partition that has none."""
        for topic in self.topics:
            for each in topic["partitions"]:
                each["error_code"] = each["error_code"] or code


def _topic_name(context: Context, item: Fields, by_id: bool) -> tuple[str, int]:
    """Return the name of the topic of a request, or the error code of an unknown id."""
    if not by_id:
        return item["name"], e.NONE
    name = context.topic_name(item["topic_id"])
    return ("", e.UNKNOWN_TOPIC_ID) if name is None else (name, e.NONE)


async def check_commits(
    context: Context,
    client: Client,
    topics: list[Fields],
    code: int,
    committed_ms: int = 0,
    *,
    by_id: bool = False,
) -> RequestedCommits:
    """Check the offsets of a commit request, in short turns. A nonzero `code` refuses them all."""
    commits = RequestedCommits([], {})
    turns = Turns()
    for topic in topics:
        name, denied = _topic_name(context, topic, by_id)
        denied = denied or topic_error(client, name)
        found = None if denied else context.plane.topics.find(name)
        partitions = []
        for each in topic["partitions"]:
            wrong = code or denied or _commit_error(each, 0 if found is None else found.config.partitions)
            if found is not None and not wrong:
                commits.valid[found.id, each["partition_index"]] = Commit(
                    each["committed_offset"],
                    committed_ms,
                    each["committed_leader_epoch"],
                    each["committed_metadata"] or "",
                )
            partitions.append({"partition_index": each["partition_index"], "error_code": wrong})
            await turns.yield_if_due()
        commits.topics.append({**_named(topic), "partitions": partitions})
    return commits


def _named(item: Fields) -> Fields:
    """Name the topic of an item of a request in its response, by name or id."""
    return {key: item[key] for key in ("name", "topic_id") if key in item}


def _commit_error(item: Fields, partitions: int) -> int:
    if not 0 <= item["partition_index"] < partitions:
        return e.UNKNOWN_TOPIC_OR_PARTITION
    if item["committed_offset"] < 0:
        return e.OFFSET_OUT_OF_RANGE
    if len((item["committed_metadata"] or "").encode()) > METADATA_BYTES_MAX:
        return e.OFFSET_METADATA_TOO_LARGE
    return e.NONE


async def offset_commit(context: Context, client: Client, request: Request) -> Fields:
    body = request.body
    code = group_error(client, body["group_id"]) or _member_error(context, body, request.version)
    by_id = request.version >= TOPIC_IDS_SINCE
    commits = await check_commits(context, client, body["topics"], code, by_id=by_id)
    if commits.valid:
        # The group may have changed meanwhile.
        code = _member_error(context, body, request.version)
        try:
            if not code:
                await _commit(context, body["group_id"], commits.valid)
        except BasaltError as error:
            code = e.code_of(error)
        commits.refuse(code)
    return {"topics": commits.topics}


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


async def _commit(context: Context, group: str, commits: Mapping[TopicPartition, Commit]) -> None:
    offsets = context.plane.offsets
    with context.guard():
        items = list(commits.items())
        for at in range(0, len(items) - PORTION, PORTION):
            # A crash leaves some offsets committed. The client has no response, so it commits them again.
            offsets.write(group, dict(items[at : at + PORTION]))
            await asyncio.sleep(0)
        last = (len(items) - 1) // PORTION * PORTION
        await offsets.commit_async(group, dict(items[last:]) if last else commits)


async def offset_fetch(context: Context, client: Client, request: Request) -> Fields:
    body = request.body
    by_id = request.version >= TOPIC_IDS_SINCE
    is_stable = body["require_stable"]
    if request.version < 8:
        topics, code = await _committed(context, client, body["group_id"], body["topics"], is_stable, by_id)
        return {"topics": topics, "error_code": code}
    groups = []
    for each in body["groups"]:
        topics, code = await _committed(context, client, each["group_id"], each["topics"], is_stable, by_id)
        consumers = context.consumer_groups.get(each["group_id"])
        is_member = each["member_id"] is not None or each["member_epoch"] >= 0
        if consumers is not None and is_member and not code:
            code = consumers.epoch_error(each["member_id"], each["member_epoch"])
            topics = [] if code else topics
        groups.append({"group_id": each["group_id"], "topics": topics, "error_code": code})
    return {"groups": groups}


async def _committed(
    context: Context, client: Client, group: str, wanted: list[Fields] | None, is_stable: bool, by_id: bool
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
            name, denied = _topic_name(context, item, by_id)
            denied = denied or topic_error(client, name)
            if denied:
                partitions = [{"partition_index": each, "error_code": denied} for each in item["partition_indexes"]]
                found.append({**_named(item), "partitions": partitions})
                continue
            topic = context.plane.topics.summary(name)
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
            found.append({**_named(item), "partitions": partitions})
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
    return [
        {"name": each[0], "topic_id": topic_id, "partitions": each[1]}
        for topic_id, each in found.items()
        if each is not None
    ]


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


async def offset_delete(context: Context, client: Client, request: Request) -> Fields:
    body = request.body
    code = group_error(client, body["group_id"], Operation.DELETE)
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
