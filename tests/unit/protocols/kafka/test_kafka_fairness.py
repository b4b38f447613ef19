"""One Kafka client's pipeline does not hold the others up (P13)."""

from __future__ import annotations

import asyncio
import struct
from itertools import count
from pathlib import Path
from typing import Any

import pytest
from tests.fuzz.kafka import Harness, answers, settle

from basaltmq.broker.loop_shares import TURN_S, LoopShares
from basaltmq.protocols.kafka import connection, list_offsets, topics
from basaltmq.protocols.kafka.context import NODE_ID
from basaltmq.protocols.kafka.wire import api as k
from basaltmq.protocols.kafka.wire.schema import NIL, encode_array
from basaltmq.protocols.kafka.wire.topics import METADATA_PARTITION
from basaltmq.streams.topics import TopicConfig

LOOK_S = TURN_S / 10
REQUESTS = 500


def versions(number: int) -> bytes:
    return k.encode_request(k.API_VERSIONS, 0, number, "c", {})


@pytest.mark.promise("P13")
def test_a_pipeline_is_split_and_another_client_is_answered_meanwhile(tmp_path: Path) -> None:
    async def run() -> None:
        harness = Harness(tmp_path)
        ticks = count()
        harness.server.shares = LoopShares(clock_s=lambda: next(ticks) * LOOK_S)
        flooding, flooded = harness.connect()
        other, answered = harness.connect()
        flooding.data_received(b"".join(versions(number) for number in range(REQUESTS)))
        assert 0 < flooding.requests <= 10
        await settle(1)
        assert flooding.requests <= 20
        other.data_received(versions(7))
        assert len(answers(b"".join(answered.written))) == 1
        assert flooding.requests < REQUESTS
        await settle(REQUESTS)
        reported = answers(b"".join(flooded.written))
        assert [struct.unpack_from(">i", each)[0] for each in reported] == [*range(REQUESTS)], "all, in order"
        assert harness.server.shares.behind == 0
        for each in (flooding, other):
            each.connection_lost(None)
        await harness.close()

    asyncio.run(run())


@pytest.mark.promise("P13")
def test_a_client_that_leaves_with_requests_left_is_forgotten(tmp_path: Path) -> None:
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
def test_metadata_of_many_topics_comes_in_pages_and_others_are_answered_meanwhile(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(topics, "PAGE", 5)
    monkeypatch.setattr(connection, "TOPICS_ENCODED_HERE_MAX", 5)

    async def run() -> None:
        harness = Harness(tmp_path)
        context = harness.server.context()
        names = [f"t{number:04}" for number in range(17)]
        for name in names:
            context.plane.topics.create(name, TopicConfig())
        asking, reported = harness.connect()
        other, answered = harness.connect()
        for asked in (None, [{"name": name, "topic_id": NIL} for name in names]):
            reported.written.clear()
            answered.written.clear()
            body = {"topics": asked, "allow_auto_topic_creation": False}
            asking.data_received(k.encode_request(k.METADATA, 9, 1, "c", body))
            assert not reported.written
            other.data_received(versions(7))
            assert len(answers(b"".join(answered.written))) == 1
            for _ in range(1000):
                if reported.written:
                    break
                await asyncio.sleep(0.01)
            (answer,) = answers(b"".join(reported.written))
            assert all(name.encode() in answer for name in names)
        for each in (asking, other):
            each.connection_lost(None)
        await harness.close()

    asyncio.run(run())


@pytest.mark.promise("P13")
def test_offsets_of_many_partitions_are_listed_in_portions_and_others_are_answered_meanwhile(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(list_offsets, "PORTION", 5)
    monkeypatch.setattr(connection, "TOPICS_ENCODED_HERE_MAX", 5)
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
        other, answered = harness.connect()
        wanted = [{"partition_index": at, "current_leader_epoch": -1, "timestamp": -1} for at in range(17)]
        body = {"replica_id": -1, "isolation_level": 0, "topics": [{"name": "t", "partitions": wanted}]}
        asking.data_received(k.encode_request(k.LIST_OFFSETS, 6, 1, "c", body))
        await settle(1)
        assert len(placed) <= 5, "one portion per turn"
        other.data_received(versions(7))
        assert len(answers(b"".join(answered.written))) == 1
        assert not reported.written
        for _ in range(1000):
            if reported.written:
                break
            await asyncio.sleep(0.01)
        assert len(placed) == 17
        (answer,) = answers(b"".join(reported.written))
        offsets = [struct.pack(">ih", at, 0) + struct.pack(">qqi", -1, 0, -1) for at in range(17)]
        assert all(each in answer for each in offsets), "index, no error, no time, the end, no epoch"
        for each in (asking, other):
            each.connection_lost(None)
        await harness.close()

    asyncio.run(run())


@pytest.mark.parametrize("version", range(13))
@pytest.mark.parametrize("is_flexible", [False, True])
def test_partitions_are_encoded_as_one_by_one(version: int, is_flexible: bool) -> None:
    for number in (0, 1, 127, 300):
        expected = [
            {"partition_index": at, "leader_id": NODE_ID, "replica_nodes": [NODE_ID],
             "isr_nodes": [NODE_ID]} for at in range(number)
        ]  # fmt: skip
        assert topics._partitions(number, version, is_flexible) == encode_array(
            METADATA_PARTITION, expected, version, is_flexible
        )
