"""ListOffsets and OffsetForLeaderEpoch: offsets by position, by timestamp, or by leader epoch.

    -1 end   -2, -4 start   -3 the record with the largest timestamp   -5 end of tiered storage: none
    0 and above: the first record with that timestamp or a later one

Lookups that decode frames run in a thread, because decoding a batch takes milliseconds.

There is one leader, so the leader epoch is always 0. Its end offset is the high watermark; any later epoch is unknown.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Final

from basaltmq.broker.auth.permissions import READ
from basaltmq.errors import BasaltError
from basaltmq.protocols.kafka.context import Client, Context, Response
from basaltmq.protocols.kafka.fetch import READ_COMMITTED
from basaltmq.protocols.kafka.wire import errors as e
from basaltmq.protocols.kafka.wire.api import Request
from basaltmq.protocols.kafka.wire.schema import EVER, Fields
from basaltmq.streams.adapter import IfAllOlder
from basaltmq.streams.engines.segment.engine import SegmentEngine

LATEST: Final = -1
EARLIEST: Final = -2
LARGEST_TIME: Final = -3
EARLIEST_LOCAL: Final = -4
LATEST_TIERED: Final = -5
LARGEST_TIME_SINCE: Final = 7
EARLIEST_LOCAL_SINCE: Final = 8
LATEST_TIERED_SINCE: Final = 9

PORTION: Final = 200
"""Partitions looked up per loop turn. A request costs about 40 us per partition, codec included."""

LEADER_EPOCH: Final = 0
_SINCE: Final = {
    LARGEST_TIME: LARGEST_TIME_SINCE,
    EARLIEST_LOCAL: EARLIEST_LOCAL_SINCE,
    LATEST_TIERED: LATEST_TIERED_SINCE,
}


def list_offsets(context: Context, client: Client, request: Request) -> Response:
    topics = request.body["topics"]
    times = (each["timestamp"] for topic in topics for each in topic["partitions"])
    if any(time_ms >= 0 or time_ms == LARGEST_TIME for time_ms in times):
        return _listed_in_thread(context, client, request)
    if sum(len(topic["partitions"]) for topic in topics) > PORTION:
        return _listed_in_portions(context, client, request)
    return _listed(context, client, request)


async def _listed_in_portions(context: Context, client: Client, request: Request) -> Fields:
    """Look up the offsets in portions, and yield to the event loop after each."""
    found: list[Fields] = []
    for topic in request.body["topics"]:
        partitions: list[Fields] = []
        for at in range(0, len(topic["partitions"]), PORTION):
            portion = topic["partitions"][at : at + PORTION]
            partitions += _listed_of(context, client, topic["name"], portion, request)
            await asyncio.sleep(0)
        found.append({"name": topic["name"], "partitions": partitions})
    return {"topics": found}


async def _listed_in_thread(context: Context, client: Client, request: Request) -> Fields:
    with context.guard():
        return await asyncio.to_thread(_listed, context, client, request)


def _listed(context: Context, client: Client, request: Request) -> Fields:
    return {
        "topics": [
            {
                "name": topic["name"],
                "partitions": _listed_of(context, client, topic["name"], topic["partitions"], request),
            }
            for topic in request.body["topics"]
        ]
    }


def _listed_of(context: Context, client: Client, name: str, items: Sequence[Fields], request: Request) -> list[Fields]:
    return [
        {"partition_index": each["partition_index"]} | _offset_of(context, client, name, each, request)
        for each in items
    ]


def _offset_of(context: Context, client: Client, name: str, item: Fields, request: Request) -> Fields:
    time_ms, version = item["timestamp"], request.version
    try:
        client.check(READ, name)
        engine, shard = context.engine(context.topic(name), item["partition_index"])
        info = engine.shard_info(shard)
        if time_ms == LATEST:
            is_committed = request.body["isolation_level"] == READ_COMMITTED
            return {"offset": info.high_watermark if is_committed else engine.state_of(shard).high_watermark}
        if time_ms in (EARLIEST, EARLIEST_LOCAL) and version >= _SINCE.get(time_ms, 0):
            return {"offset": info.start_offset}
        if time_ms < 0 and version < _SINCE.get(time_ms, EVER):
            return {"error_code": e.UNSUPPORTED_VERSION}
        if time_ms == LATEST_TIERED:
            return {}
        if time_ms == LARGEST_TIME:
            return _of_largest_time(engine, shard)
        return _at_time(engine, shard, time_ms)
    except BasaltError as error:
        return {"error_code": e.code_of(error)}


def _at_time(engine: SegmentEngine, shard: int, time_ms: int) -> Fields:
    offset = engine.get_offset_by_timestamp(shard, time_ms, IfAllOlder.LATEST)
    found = engine.read_by_offset(shard, offset, 1).records()
    if not found or found[0].timestamp_ms < time_ms:
        return {}
    return {"offset": found[0].offset, "timestamp": found[0].timestamp_ms}


def _of_largest_time(engine: SegmentEngine, shard: int) -> Fields:
    """Return the first readable record with the largest timestamp. Frames are tried from the largest timestamp down."""
    info = engine.shard_info(shard)
    entries = engine.index.entries(shard, info.start_offset)
    times = {entry.timestamp_max_ms for entry in entries if entry.base_offset < info.high_watermark and entry.records}
    for time_ms in sorted(times, reverse=True):
        found = _at_time(engine, shard, time_ms)
        if found:
            return found
    return {}


def offset_for_leader_epoch(context: Context, client: Client, request: Request) -> Response:
    return {
        "topics": [
            {
                "topic": topic["topic"],
                "partitions": [
                    {"partition": each["partition"]} | _end_of_epoch(context, client, topic["topic"], each)
                    for each in topic["partitions"]
                ],
            }
            for topic in request.body["topics"]
        ]
    }


def _end_of_epoch(context: Context, client: Client, name: str, item: Fields) -> Fields:
    try:
        client.check(READ, name)
        engine, shard = context.engine(context.topic(name), item["partition"])
        if item["current_leader_epoch"] > LEADER_EPOCH:
            return {"error_code": e.UNKNOWN_LEADER_EPOCH}
        if item["leader_epoch"] != LEADER_EPOCH:
            return {}
        return {"leader_epoch": LEADER_EPOCH, "end_offset": engine.state_of(shard).high_watermark}
    except BasaltError as error:
        return {"error_code": e.code_of(error)}
