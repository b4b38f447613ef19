"""Requests about topics: metadata, creation, deletion, partitions, records that go."""

from __future__ import annotations

import asyncio
import re
from collections import Counter
from collections.abc import Iterable, Sequence
from functools import lru_cache
from typing import Final

from basaltmq.broker.auth.permissions import CONFIGURE, READ, WRITE
from basaltmq.errors import BasaltError, OffsetOutOfRangeError, TopicExistsError
from basaltmq.protocols.kafka.configs import topic_config
from basaltmq.protocols.kafka.context import NODE_ID, Answer, Client, Desk
from basaltmq.protocols.kafka.wire import errors as e
from basaltmq.protocols.kafka.wire.api import Request
from basaltmq.protocols.kafka.wire.schema import NIL, Encoded, Fields, encode_array
from basaltmq.protocols.kafka.wire.topics import METADATA_PARTITION
from basaltmq.streams.topics import PARTITIONS_MAX, Topic, TopicConfig

NAME: Final = re.compile(r"[A-Za-z0-9._-]{1,249}")
"""What Kafka takes as a topic's name."""

PAGE: Final = 500
DELETED_BY_ID_SINCE: Final = 6
IDS_SINCE: Final = 12
"""Metadata in which topics may be asked for by id; versions 10 and 11 carry ids only to tell them."""

LATEST: Final = -1

PARTITIONS_KEPT: Final = 16
"""Lists of partitions that are kept as they are sent, by their number and the request's version: 26 bytes for each."""

_ONE_NODE: Final = (NODE_ID,)


def is_name(name: str) -> bool:
    return NAME.fullmatch(name) is not None and name not in {".", ".."}


def metadata(desk: Desk, client: Client, request: Request) -> Answer:
    """At once, unless topics have to be made first or are many: clients ask for little else before they begin."""
    asked = request.body["topics"]
    if asked is None or (request.version == 0 and not asked):
        page = desk.plane.topics.page(limit=PAGE)
        topics = _described_all(client, page.topics, request)
        if page.next_after is not None:
            return _metadata_paged(desk, client, topics, page.next_after, request)
        return _cluster(desk, client, topics)
    if len(asked) > PAGE:
        return _metadata_made(desk, client, asked, [None] * len(asked), request)
    found = [_metadata_of(desk, client, each, request) for each in asked]
    if None in found:
        return _metadata_made(desk, client, asked, found, request)
    return _cluster(desk, client, found)


async def _metadata_paged(desk: Desk, client: Client, topics: list[Fields], after: str, request: Request) -> Fields:
    """Of all topics, with others served between two pages."""
    next_after: str | None = after
    while next_after is not None:
        await asyncio.sleep(0)
        page = desk.plane.topics.page(start_after=next_after, limit=PAGE)
        topics += _described_all(client, page.topics, request)
        next_after = page.next_after
    return _cluster(desk, client, topics)


def _described_all(client: Client, topics: Iterable[Topic], request: Request) -> list[Fields]:
    return [_described(topic, request) for topic in topics if _visible(client, topic.name)]


def _cluster(desk: Desk, client: Client, topics: Sequence[Fields | None]) -> Fields:
    host, port = client.address()
    return {
        "brokers": [{"node_id": NODE_ID, "host": host, "port": port, "rack": None}],
        "cluster_id": desk.settings.cluster_id,
        "controller_id": NODE_ID,
        "topics": topics,
    }


async def _metadata_made(
    desk: Desk, client: Client, asked: list[Fields], found: list[Fields | None], request: Request
) -> Fields:
    """With the topics made that are to be, one after the other, and others served in between."""
    for at, each in enumerate(asked):
        if found[at] is None:
            found[at] = _metadata_of(desk, client, each, request) or await _made(desk, each["name"], request)
        if at % PAGE == PAGE - 1:
            await asyncio.sleep(0)
    return _cluster(desk, client, found)


def _visible(client: Client, name: str) -> bool:
    return any(client.may(kind, name) for kind in (READ, WRITE, CONFIGURE))


def _metadata_of(desk: Desk, client: Client, asked: Fields, request: Request) -> Fields | None:
    """None: it is to be made."""
    name = asked["name"]
    if name is None or asked["topic_id"] != NIL:
        # Java's client gives an empty name with an id.
        if request.version < IDS_SINCE:
            return {"error_code": e.UNSUPPORTED_VERSION, "topic_id": asked["topic_id"]}
        topic = None if asked["topic_id"] == NIL else desk.plane.topics.by_id(asked["topic_id"])
        if topic is None or not _visible(client, topic.name):
            return {"error_code": e.UNKNOWN_TOPIC_OR_PARTITION, "name": None, "topic_id": asked["topic_id"]}
        return _described(topic, request)
    if not _visible(client, name):
        return {"error_code": e.TOPIC_AUTHORIZATION_FAILED, "name": name}
    topic = desk.plane.topics.find(name)
    if topic is not None:
        return _described(topic, request)
    if not is_name(name):
        return {"error_code": e.INVALID_TOPIC_EXCEPTION, "name": name}
    may_create = desk.settings.auto_create and request.body["allow_auto_topic_creation"]
    if may_create and client.may(CONFIGURE, name):
        return None
    return {"error_code": e.UNKNOWN_TOPIC_OR_PARTITION, "name": name}


async def _made(desk: Desk, name: str, request: Request) -> Fields:
    topic: Topic | None
    try:
        topic = await _create(desk, name, topic_config((), desk.settings.partitions, desk.settings.durability))
    except TopicExistsError:
        topic = desk.plane.topics.find(name)
    except BasaltError as error:
        return {"error_code": e.code_of(error), "name": name}
    if topic is None:
        return {"error_code": e.UNKNOWN_TOPIC_OR_PARTITION, "name": name}
    return _described(topic, request)


async def _create(desk: Desk, name: str, config: TopicConfig) -> Topic:
    # In a thread: it waits for a sync.
    with desk.guard():
        return await asyncio.to_thread(desk.plane.topics.create, name, config)


def _described(topic: Topic, request: Request) -> Fields:
    is_flexible = request.version >= request.api.flexible_since
    partitions = _partitions(topic.config.partitions, request.version, is_flexible)
    return {"name": topic.name, "topic_id": topic.id, "partitions": partitions}


@lru_cache(maxsize=PARTITIONS_KEPT)
def _partitions(count: int, version: int, is_flexible: bool) -> Encoded:
    """The partitions of any topic that has so many: the one broker has them all."""
    partitions = [
        {"partition_index": at, "leader_id": NODE_ID, "replica_nodes": _ONE_NODE, "isr_nodes": _ONE_NODE}
        for at in range(count)
    ]
    return encode_array(METADATA_PARTITION, partitions, version, is_flexible)


async def create_topics(desk: Desk, client: Client, request: Request) -> Fields:
    counts = Counter(each["name"] for each in request.body["topics"])
    return {
        "topics": [
            await _created(desk, client, each, request.body["validate_only"], counts[each["name"]] > 1)
            for each in request.body["topics"]
        ]
    }


async def _created(desk: Desk, client: Client, asked: Fields, is_trial: bool, is_twice: bool) -> Fields:
    name = asked["name"]
    if is_twice:
        return _refused(name, e.INVALID_REQUEST, "the topic is named twice in one request")
    if not is_name(name):
        return _refused(
            name, e.INVALID_TOPIC_EXCEPTION, "a topic's name has 1 to 249 of the characters A-Z a-z 0-9 . _ -"
        )
    if not client.may(CONFIGURE, name):
        return _refused(name, e.TOPIC_AUTHORIZATION_FAILED, f"configure access to '{name}' refused")
    partitions = len(asked["assignments"]) or asked["num_partitions"]
    if partitions == -1:
        partitions = desk.settings.partitions
    if not 1 <= partitions <= PARTITIONS_MAX:
        return _refused(name, e.INVALID_PARTITIONS, f"a topic has 1 to {PARTITIONS_MAX} partitions, not {partitions}")
    if not asked["assignments"] and asked["replication_factor"] not in {-1, 1}:
        return _refused(name, e.INVALID_REPLICATION_FACTOR, "there is one broker: the replication factor is 1")
    try:
        config = topic_config(
            [(each["name"], each["value"]) for each in asked["configs"]], partitions, desk.settings.durability
        )
        config.check()
        if desk.plane.topics.find(name) is not None:
            return _refused(name, e.TOPIC_ALREADY_EXISTS, f"the topic {name!r} exists")
        topic_id = NIL if is_trial else (await _create(desk, name, config)).id
    except BasaltError as error:
        return _refused(name, e.code_of(error), str(error))
    return {
        "name": name,
        "topic_id": topic_id,
        "num_partitions": partitions,
        "replication_factor": 1,
        "configs": [],
    }


def _refused(name: str, code: int, message: str) -> Fields:
    return {"name": name, "error_code": code, "error_message": message, "configs": None}


async def delete_topics(desk: Desk, client: Client, request: Request) -> Fields:
    if request.version < DELETED_BY_ID_SINCE:
        return {"responses": [await _deleted(desk, client, name) for name in request.body["topic_names"]]}
    return {"responses": [await _deleted_by(desk, client, each) for each in request.body["topics"]]}


async def _deleted_by(desk: Desk, client: Client, asked: Fields) -> Fields:
    """By name or by id."""
    if asked["name"] is not None:
        return await _deleted(desk, client, asked["name"])
    name = desk.topic_name(asked["topic_id"])
    if name is None:
        return {"name": None, "topic_id": asked["topic_id"], "error_code": e.UNKNOWN_TOPIC_ID}
    return {**await _deleted(desk, client, name), "topic_id": asked["topic_id"]}


async def _deleted(desk: Desk, client: Client, name: str) -> Fields:
    if not client.may(CONFIGURE, name):
        return {"name": name, "error_code": e.TOPIC_AUTHORIZATION_FAILED}
    if desk.is_queue(name):
        message = f"{name!r} is a stream queue of AMQP; delete the queue"
        return {"name": name, "error_code": e.POLICY_VIOLATION, "error_message": message}
    try:
        with desk.guard():
            await asyncio.to_thread(desk.plane.topics.delete, name)
    except BasaltError as error:
        return {"name": name, "error_code": e.code_of(error), "error_message": str(error)}
    return {"name": name}


async def create_partitions(desk: Desk, client: Client, request: Request) -> Fields:
    is_trial = request.body["validate_only"]
    return {"results": [await _widened(desk, client, each, is_trial) for each in request.body["topics"]]}


async def _widened(desk: Desk, client: Client, asked: Fields, is_trial: bool) -> Fields:
    name, count = asked["name"], asked["count"]
    try:
        client.check(CONFIGURE, name)
        topic = desk.topic(name)
        if desk.is_queue(name):
            message = f"{name!r} is a stream queue of AMQP, which has one partition"
            return {"name": name, "error_code": e.POLICY_VIOLATION, "error_message": message}
        if not topic.config.partitions < count <= PARTITIONS_MAX:
            message = f"topic {name!r} has {topic.config.partitions} partitions; give more, up to {PARTITIONS_MAX}"
            return {"name": name, "error_code": e.INVALID_PARTITIONS, "error_message": message}
        if not is_trial:
            with desk.guard():
                await asyncio.to_thread(desk.plane.topics.alter, name, partitions=count)
    except BasaltError as error:
        return {"name": name, "error_code": e.code_of(error), "error_message": str(error)}
    return {"name": name}


async def delete_records(desk: Desk, client: Client, request: Request) -> Fields:
    return {
        "topics": [
            {
                "name": topic["name"],
                "partitions": [await _trimmed(desk, client, topic["name"], each) for each in topic["partitions"]],
            }
            for topic in request.body["topics"]
        ]
    }


async def _trimmed(desk: Desk, client: Client, name: str, asked: Fields) -> Fields:
    partition, offset = asked["partition_index"], asked["offset"]
    try:
        client.check(CONFIGURE, name)
        engine, shard = desk.engine(desk.topic(name), partition)
        info = engine.shard_info(shard)
        latest = engine.state_of(shard).high_watermark
        if offset == LATEST:
            offset = latest
        if not 0 <= offset <= latest:
            raise OffsetOutOfRangeError(shard, offset, info.start_offset, latest)
        with desk.guard():
            desk.producers.settle(shard)
            start = await asyncio.to_thread(engine.delete_records_before, shard, offset)
    except BasaltError as error:
        return {"partition_index": partition, "error_code": e.code_of(error)}
    return {"partition_index": partition, "low_watermark": start}


def describe_cluster(desk: Desk, client: Client, request: Request) -> Answer:
    host, port = client.address()
    return {
        "endpoint_type": request.body["endpoint_type"],
        "cluster_id": desk.settings.cluster_id,
        "controller_id": NODE_ID,
        "brokers": [{"broker_id": NODE_ID, "host": host, "port": port, "rack": None}],
    }
