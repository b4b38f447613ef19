"""Requests for places in partitions: by name, by time, by leader epoch.

    -1 the end   -2, -4 the start   -3 the record of the largest time   -5 the end of what is kept elsewhere: none
    0 and above: the first record of that time or later

What has to look into frames does so in a thread: a batch takes milliseconds to open, and others want the loop.

There is one leader, so its epoch is 0 for ever: who asks for the end of that epoch gets the end, and of any later one
hears that there is none.
"""

from __future__ import annotations

import asyncio
from typing import Final

from basaltmq.broker.auth.permissions import READ
from basaltmq.errors import BasaltError
from basaltmq.protocols.kafka.context import Answer, Client, Desk
from basaltmq.protocols.kafka.wire import errors as e
from basaltmq.protocols.kafka.wire.api import Request
from basaltmq.protocols.kafka.wire.schema import EVER, Fields
from basaltmq.streams.adapter import Otherwise
from basaltmq.streams.engines.segment.engine import SegmentEngine

LATEST: Final = -1
EARLIEST: Final = -2
LARGEST_TIME: Final = -3
EARLIEST_LOCAL: Final = -4
LATEST_TIERED: Final = -5
LARGEST_TIME_SINCE: Final = 7
EARLIEST_LOCAL_SINCE: Final = 8
LATEST_TIERED_SINCE: Final = 9

READ_COMMITTED: Final = 1
LEADER_EPOCH: Final = 0
_SINCE: Final = {
    LARGEST_TIME: LARGEST_TIME_SINCE,
    EARLIEST_LOCAL: EARLIEST_LOCAL_SINCE,
    LATEST_TIERED: LATEST_TIERED_SINCE,
}


def list_offsets(desk: Desk, client: Client, request: Request) -> Answer:
    topics = request.body["topics"]
    times = (each["timestamp"] for topic in topics for each in topic["partitions"])
    if any(time_ms >= 0 or time_ms == LARGEST_TIME for time_ms in times):
        return _listed_apart(desk, client, request)
    return _listed(desk, client, request)


async def _listed_apart(desk: Desk, client: Client, request: Request) -> Fields:
    with desk.guard():
        return await asyncio.to_thread(_listed, desk, client, request)


def _listed(desk: Desk, client: Client, request: Request) -> Fields:
    return {
        "topics": [
            {
                "name": topic["name"],
                "partitions": [
                    {"partition_index": each["partition_index"]} | _place(desk, client, topic["name"], each, request)
                    for each in topic["partitions"]
                ],
            }
            for topic in request.body["topics"]
        ]
    }


def _place(desk: Desk, client: Client, name: str, asked: Fields, request: Request) -> Fields:
    time_ms, version = asked["timestamp"], request.version
    try:
        client.check(READ, name)
        engine, shard = desk.engine(desk.topic(name), asked["partition_index"])
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
    offset = engine.get_offset_by_timestamp(shard, time_ms, Otherwise.LATEST)
    found = engine.read_by_offset(shard, offset, 1).records()
    if not found or found[0].timestamp_ms < time_ms:
        return {}
    return {"offset": found[0].offset, "timestamp": found[0].timestamp_ms}


def _of_largest_time(engine: SegmentEngine, shard: int) -> Fields:
    """The first record of the largest time that can be read; frames are tried in the order of theirs."""
    info = engine.shard_info(shard)
    entries = engine.index.entries(shard, info.start_offset)
    times = {entry.timestamp_max_ms for entry in entries if entry.base_offset < info.high_watermark and entry.records}
    for time_ms in sorted(times, reverse=True):
        found = _at_time(engine, shard, time_ms)
        if found:
            return found
    return {}


def offset_for_leader_epoch(desk: Desk, client: Client, request: Request) -> Answer:
    return {
        "topics": [
            {
                "topic": topic["topic"],
                "partitions": [
                    {"partition": each["partition"]} | _end_of_epoch(desk, client, topic["topic"], each)
                    for each in topic["partitions"]
                ],
            }
            for topic in request.body["topics"]
        ]
    }


def _end_of_epoch(desk: Desk, client: Client, name: str, asked: Fields) -> Fields:
    try:
        client.check(READ, name)
        engine, shard = desk.engine(desk.topic(name), asked["partition"])
        if asked["current_leader_epoch"] > LEADER_EPOCH:
            return {"error_code": e.UNKNOWN_LEADER_EPOCH}
        if asked["leader_epoch"] != LEADER_EPOCH:
            return {}
        return {"leader_epoch": LEADER_EPOCH, "end_offset": engine.state_of(shard).high_watermark}
    except BasaltError as error:
        return {"error_code": e.code_of(error)}
