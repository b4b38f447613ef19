"""Handlers for admin tools: log directories, leaders, reassignments, the quorum, and partitions of topics.

There is one broker, which leads every partition and holds its only replica. So elections are not needed, and a
reassignment may only name this broker.
"""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import AsyncIterator, Iterable
from typing import Final

from basaltmq.broker.auth.permissions import CONFIGURE, READ
from basaltmq.broker.scheduling.turns import Turns
from basaltmq.errors import BasaltError
from basaltmq.protocols.kafka.admin.configs import BROKER, TOPIC
from basaltmq.protocols.kafka.admin.topics import PAGE
from basaltmq.protocols.kafka.authorization import may_describe, topic_operations
from basaltmq.protocols.kafka.context import NODE_ID, Client, Context
from basaltmq.protocols.kafka.wire import errors as e
from basaltmq.protocols.kafka.wire.api import Request
from basaltmq.protocols.kafka.wire.schema import Fields
from basaltmq.streams.topics import TopicSummary

PARTITIONS_MAX: Final = 2000
"""Partitions in one response of DescribeTopicPartitions, as in Apache Kafka."""

LOG_PARTITIONS_MAX: Final = 100_000
"""Partitions in one response of DescribeLogDirs: about 30 MiB."""

METADATA_TOPIC: Final = "__cluster_metadata"
"""Name under which tools ask for the controller quorum."""

_REPLICAS: Final = [NODE_ID]


async def describe_log_dirs(context: Context, client: Client, request: Request) -> Fields:
    """Return the sizes of partitions that the client may read."""
    topics: list[Fields] = []
    left = LOG_PARTITIONS_MAX
    async for name, wanted in _named_partitions(context, client, request.body["topics"]):
        partitions = []
        for partition in wanted:
            try:
                engine, shard = context.engine(context.topic(name), partition)
                info = engine.shard_info(shard)
            except BasaltError:
                # The partition was deleted meanwhile, does not exist, or is stored outside the log.
                continue
            partitions.append({"partition_index": partition, "partition_size": info.size_bytes})
        left -= len(partitions)
        if left < 0:
            # The response is too large. Tools then request fewer topics.
            return {"error_code": e.INVALID_REQUEST, "results": []}
        if partitions:
            topics.append({"name": name, "partitions": partitions})
    path = context.vhost.streams.log_path
    if path is None:
        return {"results": []}
    disk = await asyncio.to_thread(shutil.disk_usage, path)
    result = {"log_dir": str(path), "topics": topics, "total_bytes": disk.total, "usable_bytes": disk.free}
    return {"results": [result]}


async def _named_partitions(
    context: Context, client: Client, wanted: list[Fields] | None
) -> AsyncIterator[tuple[str, Iterable[int]]]:
    """Yield the wanted partitions of each readable topic, in short turns; None wants all."""
    turns = Turns()
    if wanted is None:
        async for topic in _topics(context):
            if client.may(READ, topic.name):
                yield topic.name, range(topic.partitions)
        return
    for each in wanted:
        if client.may(READ, each["topic"]):
            yield each["topic"], each["partitions"]
        await turns.yield_if_due()


async def _topics(context: Context, start_after: str | None = None) -> AsyncIterator[TopicSummary]:
    """Yield topics by name, in short turns."""
    turns = Turns()
    while True:
        page, start_after = context.plane.topics.summaries(start_after=start_after, limit=PAGE)
        for topic in page:
            yield topic
            await turns.yield_if_due()
        if start_after is None:
            return


async def elect_leaders(context: Context, client: Client, request: Request) -> Fields:
    """Respond that each partition has its leader. For all partitions there is nothing to report."""
    turns = Turns()
    results = []
    for each in request.body["topic_partitions"] or ():
        partitions = []
        for partition in each["partitions"]:
            error = _partition_error(context, client, each["topic"], partition)
            error = error or (e.ELECTION_NOT_NEEDED, "the partition has its leader; there is one broker")
            partitions.append({"partition_id": partition, "error_code": error[0], "error_message": error[1]})
            await turns.yield_if_due()
        results.append({"topic": each["topic"], "partition_result": partitions})
    return {"replica_election_results": results}


async def alter_reassignments(context: Context, client: Client, request: Request) -> Fields:
    turns = Turns()
    responses = []
    for each in request.body["topics"]:
        partitions = []
        for item in each["partitions"]:
            error = _partition_error(context, client, each["name"], item["partition_index"])
            if error is None and item["replicas"] is None:
                error = e.NO_REASSIGNMENT_IN_PROGRESS, "no reassignment is in progress"
            elif error is None and item["replicas"] != _REPLICAS:
                error = e.INVALID_REPLICA_ASSIGNMENT, f"the only replica must be broker {NODE_ID}"
            code, message = error or (e.NONE, None)
            partitions.append(
                {"partition_index": item["partition_index"], "error_code": code, "error_message": message}
            )
            await turns.yield_if_due()
        responses.append({"name": each["name"], "partitions": partitions})
    return {"responses": responses, "allow_replication_factor_change": request.body["allow_replication_factor_change"]}


def list_reassignments(context: Context, client: Client, request: Request) -> Fields:
    return {"topics": []}


def _partition_error(context: Context, client: Client, topic: str, partition: int) -> tuple[int, str] | None:
    """Return why a client may not change a partition, or None."""
    if not client.may(CONFIGURE, topic):
        return e.TOPIC_AUTHORIZATION_FAILED, f"configure access to {topic!r} refused"
    found = context.plane.topics.summary(topic)
    if found is None or not 0 <= partition < found.partitions:
        return e.UNKNOWN_TOPIC_OR_PARTITION, f"there is no partition {partition} of topic {topic!r}"
    return None


def describe_quorum(context: Context, client: Client, request: Request) -> Fields:
    """Describe this broker as the only voter of the controller quorum."""
    now_ms = context.now_ms()
    replica = {"replica_id": NODE_ID, "last_fetch_timestamp": now_ms, "last_caught_up_timestamp": now_ms}
    topics = []
    for topic in request.body["topics"]:
        partitions: list[Fields] = []
        for each in topic["partitions"]:
            index = each["partition_index"]
            if topic["topic_name"] != METADATA_TOPIC or index:
                message = f"the quorum has partition 0 of {METADATA_TOPIC} only"
                error = {"error_code": e.UNKNOWN_TOPIC_OR_PARTITION, "error_message": message}
                partitions.append({"partition_index": index, **error})
            else:
                partitions.append({"partition_index": index, "leader_id": NODE_ID, "current_voters": [replica]})
        topics.append({"topic_name": topic["topic_name"], "partitions": partitions})
    host, port = client.address()
    return {
        "topics": topics,
        "nodes": [{"node_id": NODE_ID, "listeners": [{"name": "CONTROLLER", "host": host, "port": port}]}],
    }


async def list_config_resources(context: Context, client: Client, request: Request) -> Fields:
    """List topics that the client may see, and the broker. Version 0 requests client metrics, which do not exist."""
    if request.version == 0:
        return {"config_resources": []}
    wanted = request.body["resource_types"]
    found: list[Fields] = []
    if not wanted or BROKER in wanted:
        found.append({"resource_name": str(NODE_ID), "resource_type": BROKER})
    if not wanted or TOPIC in wanted:
        found += [
            {"resource_name": topic.name, "resource_type": TOPIC}
            async for topic in _topics(context)
            if may_describe(client, topic.name)
        ]
    return {"config_resources": found}


async def describe_topic_partitions(context: Context, client: Client, request: Request) -> Fields:
    """Describe partitions by topic name and number, a page at a time. The cursor is the first one of the next page."""
    cursor = request.body["cursor"]
    names = sorted({each["name"] for each in request.body["topics"]})
    left = min(PARTITIONS_MAX, request.body["response_partition_limit"])
    if left < 1:
        left = PARTITIONS_MAX
    topics: list[Fields] = []
    async for name, found in _described_topics(context, client, names, cursor):
        first = cursor["partition_index"] if cursor is not None and cursor["topic_name"] == name else 0
        if found is None:
            if names:
                topics.append({"error_code": e.UNKNOWN_TOPIC_OR_PARTITION, "name": name})
            continue
        if not left:
            return {"topics": topics, "next_cursor": {"topic_name": name, "partition_index": first}}
        end = min(found.partitions, max(0, first) + left)
        partitions = [_described_partition(number) for number in range(max(0, first), end)]
        topics.append(
            {
                "name": name,
                "topic_id": found.id,
                "partitions": partitions,
                "topic_authorized_operations": topic_operations(client, name),
            }
        )
        left -= len(partitions)
        if end < found.partitions:
            return {"topics": topics, "next_cursor": {"topic_name": name, "partition_index": end}}
    return {"topics": topics, "next_cursor": None}


async def _described_topics(
    context: Context, client: Client, names: list[str], cursor: Fields | None
) -> AsyncIterator[tuple[str, TopicSummary | None]]:
    """Yield the named topics, or all, from the cursor on. A topic that the client may not see yields None."""
    start = "" if cursor is None else cursor["topic_name"]
    if names:
        turns = Turns()
        for name in names:
            if name >= start:
                yield name, context.plane.topics.summary(name) if may_describe(client, name) else None
                await turns.yield_if_due()
        return
    if start and (found := context.plane.topics.summary(start)) is not None and may_describe(client, start):
        yield start, found
    async for topic in _topics(context, start or None):
        if may_describe(client, topic.name):
            yield topic.name, topic


def _described_partition(number: int) -> Fields:
    return {
        "partition_index": number,
        "leader_id": NODE_ID,
        "replica_nodes": _REPLICAS,
        "isr_nodes": _REPLICAS,
        "eligible_leader_replicas": [],
        "last_known_elr": [],
    }
