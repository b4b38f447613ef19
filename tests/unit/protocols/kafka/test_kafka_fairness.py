"""The pipelined requests of one Kafka client do not delay the others (P13)."""

from __future__ import annotations

import asyncio
import struct
import threading
import time
from itertools import count
from pathlib import Path
from typing import Any

import msgspec
import pytest
from tests.fuzz.kafka import Harness, responses, settle
from tests.log_frames import encode_plain

from basaltmq.broker.scheduling import turns
from basaltmq.broker.scheduling.loop_shares import TURN_S, LoopShares
from basaltmq.log.batches import kafka
from basaltmq.log.batches.record import Record
from basaltmq.protocols.kafka import connection, fetch, list_offsets, produce
from basaltmq.protocols.kafka.admin import topics
from basaltmq.protocols.kafka.admin.topic_settings import BEFORE_MAX
from basaltmq.protocols.kafka.context import NODE_ID
from basaltmq.protocols.kafka.groups import offset_requests
from basaltmq.protocols.kafka.wire import api as k
from basaltmq.protocols.kafka.wire import errors as e
from basaltmq.protocols.kafka.wire.schema import NIL, encode_array
from basaltmq.streams.topics import TopicConfig

LOOK_S = TURN_S / 10
REQUESTS = 500


def versions(number: int) -> bytes:
    return k.encode_request(k.API_VERSIONS, 0, number, "c", {})


@pytest.mark.promise("P13")
def test_pipelined_requests_are_split_over_turns_while_other_clients_are_served(tmp_path: Path) -> None:
    async def run() -> None:
        harness = Harness(tmp_path)
        ticks = count()
        harness.server.shares = LoopShares(clock_s=lambda: next(ticks) * LOOK_S)
        flooding, flooded = harness.connect()
        other, responded = harness.connect()
        flooding.data_received(b"".join(versions(number) for number in range(REQUESTS)))
        assert 0 < flooding.requests <= 10
        await settle(1)
        assert flooding.requests <= 20
        other.data_received(versions(7))
        assert len(responses(b"".join(responded.written))) == 1
        assert flooding.requests < REQUESTS
        await settle(REQUESTS)
        reported = responses(b"".join(flooded.written))
        assert [struct.unpack_from(">i", each)[0] for each in reported] == [*range(REQUESTS)], "all, in order"
        assert harness.server.shares.behind == 0
        for each in (flooding, other):
            each.connection_lost(None)
        await harness.close()

    asyncio.run(run())


@pytest.mark.promise("P13")
def test_a_client_that_disconnects_with_pending_requests_leaves_no_state(tmp_path: Path) -> None:
    async def run() -> None:
        harness = Harness(tmp_path)
        ticks = count()
        harness.server.shares = LoopShares(clock_s=lambda: next(ticks) * LOOK_S)
        flooding, _ = harness.connect()
        flooding.data_received(b"".join(versions(number) for number in range(REQUESTS)))
        assert harness.server.shares.behind == 1
        flooding.connection_lost(None)
        assert harness.server.shares.behind == 0
        await settle(5)
        assert flooding.requests <= 10
        await harness.close()

    asyncio.run(run())


@pytest.mark.promise("P13")
def test_metadata_of_many_topics_is_computed_in_pages_while_others_are_served(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(topics, "PAGE", 5)
    monkeypatch.setattr(connection, "LOOP_ENCODED_ITEMS_MAX", 5)

    async def run() -> None:
        harness = Harness(tmp_path)
        context = harness.server.context()
        names = [f"t{number:04}" for number in range(17)]
        for name in names:
            context.plane.topics.create(name, TopicConfig())
        asking, reported = harness.connect()
        other, responded = harness.connect()
        for asked in (None, [{"name": name, "topic_id": NIL} for name in names]):
            reported.written.clear()
            responded.written.clear()
            body = {"topics": asked, "allow_auto_topic_creation": False}
            asking.data_received(k.encode_request(k.METADATA, 9, 1, "c", body))
            assert not reported.written
            other.data_received(versions(7))
            assert len(responses(b"".join(responded.written))) == 1
            for _ in range(1000):
                if reported.written:
                    break
                await asyncio.sleep(0.01)
            (response,) = responses(b"".join(reported.written))
            assert all(name.encode() in response for name in names)
        for each in (asking, other):
            each.connection_lost(None)
        await harness.close()

    asyncio.run(run())


@pytest.mark.promise("P13")
def test_offsets_of_many_partitions_are_listed_in_portions_while_others_are_served(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(list_offsets, "PORTION", 5)
    monkeypatch.setattr(connection, "LOOP_ENCODED_ITEMS_MAX", 5)
    placed: list[int] = []
    offset_of = list_offsets._offset_of

    def counting(*given: Any) -> Any:
        placed.append(1)
        return offset_of(*given)

    monkeypatch.setattr(list_offsets, "_offset_of", counting)

    async def run() -> None:
        harness = Harness(tmp_path)
        harness.server.context().plane.topics.create("t", TopicConfig(partitions=17))
        asking, reported = harness.connect()
        other, responded = harness.connect()
        wanted = [{"partition_index": at, "current_leader_epoch": -1, "timestamp": -1} for at in range(17)]
        body = {"replica_id": -1, "isolation_level": 0, "topics": [{"name": "t", "partitions": wanted}]}
        asking.data_received(k.encode_request(k.LIST_OFFSETS, 6, 1, "c", body))
        await settle(1)
        assert len(placed) <= 5, "one portion per turn"
        other.data_received(versions(7))
        assert len(responses(b"".join(responded.written))) == 1
        assert not reported.written
        for _ in range(1000):
            if reported.written:
                break
            await asyncio.sleep(0.01)
        assert len(placed) == 17
        (response,) = responses(b"".join(reported.written))
        offsets = [struct.pack(">ih", at, 0) + struct.pack(">qqi", -1, 0, -1) for at in range(17)]
        assert all(each in response for each in offsets), "index, no error, no time, the end, no epoch"
        for each in (asking, other):
            each.connection_lost(None)
        await harness.close()

    asyncio.run(run())


@pytest.mark.parametrize("version", range(13))
@pytest.mark.parametrize("is_flexible", [False, True])
def test_partitions_encoded_together_equal_those_encoded_one_by_one(version: int, is_flexible: bool) -> None:
    for number in (0, 1, 127, 300):
        expected = [
            {"partition_index": at, "leader_id": NODE_ID, "replica_nodes": [NODE_ID],
             "isr_nodes": [NODE_ID]} for at in range(number)
        ]  # fmt: skip
        assert topics._partitions(number, version, is_flexible) == encode_array(
            k.METADATA_PARTITION, expected, version, is_flexible
        )


@pytest.mark.promise("P13")
@pytest.mark.parametrize("by_name", [False, True])
def test_metadata_of_topics_with_many_partitions_is_split_and_reads_no_shards(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, by_name: bool
) -> None:
    monkeypatch.setattr(topics, "PORTION_PARTITIONS", 20)
    described: list[str] = []
    describe = topics._described

    def counting(client: Any, topic: Any, request: Any) -> Any:
        described.append(topic.name)
        return describe(client, topic, request)

    monkeypatch.setattr(topics, "_described", counting)

    async def run() -> None:
        harness = Harness(tmp_path)
        plane = harness.server.context().plane
        names = [f"t{number}" for number in range(6)]
        for name in names:
            plane.topics.create(name, TopicConfig(partitions=15))
        monkeypatch.setattr(plane.topics._shards, "of_topic", None)
        asking, told = harness.connect()
        asked = [{"name": name, "topic_id": NIL} for name in names] if by_name else None
        body = {"topics": asked, "allow_auto_topic_creation": False}
        asking.data_received(k.encode_request(k.METADATA, 9, 1, "c", body))
        seen = len(described)
        while not told.written:
            await asyncio.sleep(0)
            assert len(described) - seen <= 2, "30 partitions of two topics are a portion"
            seen = len(described)
        _, response = k.decode_response(k.METADATA, 9, responses(b"".join(told.written))[0])
        assert {each["name"]: len(each["partitions"]) for each in response["topics"]} == dict.fromkeys(names, 15)
        asking.connection_lost(None)
        await harness.close()

    asyncio.run(run())


def committing(group: str, partitions: int) -> dict[str, Any]:
    each = [{"partition_index": at, "committed_offset": at} for at in range(partitions)]
    return {"group_id": group, "generation_id": -1, "member_id": "", "topics": [{"name": "t", "partitions": each}]}


LONG_REQUESTS: list[tuple[int, int, dict[str, Any]]] = [
    (k.OFFSET_COMMIT, 2, committing("g", 30)),
    (k.OFFSET_FETCH, 2, {"group_id": "g", "topics": [{"name": "t", "partition_indexes": list(range(30))}]}),
    (k.OFFSET_FETCH, 2, {"group_id": "g", "topics": None}),
    (k.LIST_GROUPS, 1, {}),
    (k.DESCRIBE_GROUPS, 1, {"groups": [f"g{at}" for at in range(20)]}),
    (k.DESCRIBE_CONFIGS, 1, {"resources": [
        {"resource_type": 2, "resource_name": "t", "configuration_keys": None} for _ in range(20)]}),
    (k.PRODUCE, 3, {"acks": 1, "timeout_ms": 1000, "topics": [
        {"name": "t", "partitions": [
            {"index": at, "records": encode_plain([Record(timestamp_ms=1, value=b"x")])} for at in range(30)]}]}),
    (k.FETCH, 4, {"replica_id": -1, "max_wait_ms": 0, "min_bytes": 0, "max_bytes": 1 << 20, "topics": [
        {"topic": "t", "partitions": [
            {"partition": at, "fetch_offset": 0, "partition_max_bytes": 1 << 16} for at in range(30)]}]}),
]  # fmt: skip


@pytest.mark.promise("P13")
@pytest.mark.parametrize(
    ("key", "version", "body"), LONG_REQUESTS, ids=[k.APIS[each[0]].name for each in LONG_REQUESTS]
)
@pytest.mark.parametrize("is_large", [False, True])
def test_a_long_request_takes_many_turns_while_others_are_served(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, key: int, version: int, body: dict[str, Any], is_large: bool
) -> None:
    monkeypatch.setattr(turns, "TURN_S", 0.0)
    monkeypatch.setattr(offset_requests, "PORTION", 5)
    monkeypatch.setattr(fetch, "PARTITIONS_PER_TURN_MAX", 5)
    monkeypatch.setattr(produce, "PARTITIONS_PER_TURN_MAX", 5)
    if is_large:
        monkeypatch.setattr(connection, "LOOP_DECODED_BYTES_MAX", len(versions(7)))
        monkeypatch.setattr(connection, "LOOP_ENCODED_ITEMS_MAX", 0)

    async def run() -> None:
        harness = Harness(tmp_path)
        plane = harness.server.context().plane
        topic = plane.topics.create("t", TopicConfig(partitions=30))
        for at in range(20):
            plane.offsets.commit(f"g{at}", {(topic.id, 0): at})
        plane.offsets.commit("g", {(topic.id, at): at for at in range(30)})
        asking, told = harness.connect()
        other, responded = harness.connect()
        asking.data_received(k.encode_request(key, version, 1, "c", body))
        assert not told.written
        answered_meanwhile = 0
        async with asyncio.timeout(30):
            while not told.written:
                other.data_received(versions(7))
                answered_meanwhile += len(responded.written)
                responded.written.clear()
                await asyncio.sleep(0)
        assert answered_meanwhile >= 5, "others get responses between portions"
        _, response = k.decode_response(key, version, responses(b"".join(told.written))[0])
        text = str(response)
        errors = [each.split(",")[0].rstrip("}]") for each in text.split("'error_code': ")[1:]]
        assert set(errors) <= {"0"}, text
        partitions = [each for topic in response.get("topics", ()) for each in topic["partitions"]]
        shown = {
            k.OFFSET_COMMIT: lambda: len(partitions) == 30,
            k.OFFSET_FETCH: lambda: (
                [at["committed_offset"] for at in response["topics"][0]["partitions"]] == [*range(30)]
            ),
            k.LIST_GROUPS: lambda: len(response["groups"]) == 21,
            k.DESCRIBE_GROUPS: lambda: [each["group_state"] for each in response["groups"]] == ["Empty"] * 20,
            k.DESCRIBE_CONFIGS: lambda: len(response["results"]) == 20,
            k.PRODUCE: lambda: len(partitions) == 30,
            k.FETCH: lambda: len(partitions) == 30,
        }
        assert shown[key](), text
        for each in (asking, other):
            each.connection_lost(None)
        await harness.close()

    asyncio.run(run())


@pytest.mark.promise("P13")
@pytest.mark.parametrize(
    ("config", "is_time_limited"),
    [
        (TopicConfig(), False),
        (TopicConfig(compact=True, index_keys=False), False),
        (TopicConfig(index_keys=False), True),
    ],
    ids=["indexed", "compacted", "timed"],
)
@pytest.mark.parametrize("partitions", [1, 20])
def test_many_records_are_not_decoded_in_the_loop(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, config: TopicConfig, is_time_limited: bool, partitions: int
) -> None:
    loop_thread = threading.get_ident()
    decoded_in: set[bool] = set()
    step = kafka.RecordReader.__next__

    def noting(reader: kafka.RecordReader) -> Any:
        decoded_in.add(threading.get_ident() == loop_thread)
        return step(reader)

    monkeypatch.setattr(kafka.RecordReader, "__next__", noting)
    now_ms = time.time_ns() // 1_000_000

    def sent(count: int) -> list[dict[str, Any]]:
        batch = encode_plain([Record(key=b"k", value=b"", timestamp_ms=now_ms)] * (count // partitions))
        return [{"index": at, "records": batch} for at in range(partitions)]

    async def run() -> None:
        harness = Harness(tmp_path)
        topics_of_plane = harness.server.context().plane.topics
        topics_of_plane.create("t", msgspec.structs.replace(config, partitions=partitions))
        if is_time_limited:
            topics_of_plane.alter("t", kafka=((BEFORE_MAX, "3600000"),))
        client, told = harness.connect()

        async def produced(count: int) -> set[int]:
            body = {"acks": 1, "timeout_ms": 1000, "topics": [{"name": "t", "partitions": sent(count)}]}
            client.data_received(k.encode_request(k.PRODUCE, 3, 1, "c", body))
            async with asyncio.timeout(30):
                while not told.written:
                    await settle(1)
            _, response = k.decode_response(k.PRODUCE, 3, responses(b"".join(told.written))[0])
            told.written.clear()
            return {each["error_code"] for each in response["topics"][0]["partitions"]}

        limit = produce.LOOP_DECODED_RECORDS_MAX
        assert await produced(limit) == {0}
        assert decoded_in == {True}, "a thread costs more than a few records"
        decoded_in.clear()
        assert await produced(limit + 2 * partitions) == {0}
        assert decoded_in == {False}
        decoded_in.clear()
        monkeypatch.setattr(kafka, "RECORDS_MAX", 2 * limit)
        assert await produced(partitions * (2 * limit + 1)) == {e.INVALID_REQUEST}
        assert not decoded_in, "what is too long is not decoded at all"
        client.connection_lost(None)
        await harness.close()

    asyncio.run(run())


@pytest.mark.promise("P13")
def test_a_fetch_of_many_partitions_waits_and_finds_a_batch_that_arrives(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fetch, "PARTITIONS_PER_TURN_MAX", 2)

    async def run() -> None:
        harness = Harness(tmp_path)
        harness.server.context().plane.topics.create("t", TopicConfig(partitions=5))
        asking, told = harness.connect()
        producing, produced = harness.connect()
        wanted = [{"partition": at, "fetch_offset": 0, "partition_max_bytes": 1 << 16} for at in range(5)]
        body = {"replica_id": -1, "max_wait_ms": 30_000, "min_bytes": 1, "max_bytes": 1 << 20,
                "topics": [{"topic": "t", "partitions": wanted}]}  # fmt: skip
        asking.data_received(k.encode_request(k.FETCH, 4, 1, "c", body))
        await settle(20)
        assert not told.written
        batch = encode_plain([Record(timestamp_ms=1, value=b"here")])
        one = [{"name": "t", "partitions": [{"index": 0, "records": batch}]}]
        producing.data_received(k.encode_request(k.PRODUCE, 3, 1, "c", {"acks": 1, "timeout_ms": 1000, "topics": one}))
        for _ in range(1000):
            if told.written:
                break
            await asyncio.sleep(0.005)
        assert produced.written
        assert b"here" in b"".join(told.written)
        asking.data_received(k.encode_request(k.FETCH, 4, 2, "c", body | {"min_bytes": 1 << 20}))
        await settle(20)
        for each in (asking, producing):
            each.connection_lost(None)
        await settle(20)
        assert not harness.server.context().arrivals._by_shard, "a closed connection waits for nothing"
        await harness.close()

    asyncio.run(run())
