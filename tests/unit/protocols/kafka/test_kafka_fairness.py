"""One Kafka client's pipeline does not hold the others up (P13)."""

from __future__ import annotations

import asyncio
import struct
from itertools import count
from pathlib import Path

import pytest
from tests.fuzz.kafka import World, answers, settle

from basaltmq.broker.loop_shares import TURN_S, LoopShares
from basaltmq.protocols.kafka import connection, topics
from basaltmq.protocols.kafka.wire import api as k
from basaltmq.protocols.kafka.wire.schema import NIL
from basaltmq.streams.topics import TopicConfig

LOOK_S = TURN_S / 10
REQUESTS = 500


def versions(number: int) -> bytes:
    return k.encode_request(k.API_VERSIONS, 0, number, "c", {})


@pytest.mark.promise("P13")
def test_a_pipeline_is_split_and_another_client_is_answered_meanwhile(tmp_path: Path) -> None:
    async def run() -> None:
        world = World(tmp_path)
        ticks = count()
        world.server.shares = LoopShares(clock_s=lambda: next(ticks) * LOOK_S)
        flooding, flooded = world.connect()
        other, answered = world.connect()
        flooding.data_received(b"".join(versions(number) for number in range(REQUESTS)))
        assert 0 < flooding.requests <= 10
        await settle(1)
        assert flooding.requests <= 20
        other.data_received(versions(7))
        assert len(answers(b"".join(answered.written))) == 1
        assert flooding.requests < REQUESTS
        await settle(REQUESTS)
        told = answers(b"".join(flooded.written))
        assert [struct.unpack_from(">i", each)[0] for each in told] == [*range(REQUESTS)], "all, in order"
        assert world.server.shares.behind == 0
        for each in (flooding, other):
            each.connection_lost(None)
        await world.close()

    asyncio.run(run())


@pytest.mark.promise("P13")
def test_a_client_that_leaves_with_requests_left_is_forgotten(tmp_path: Path) -> None:
    async def run() -> None:
        world = World(tmp_path)
        ticks = count()
        world.server.shares = LoopShares(clock_s=lambda: next(ticks) * LOOK_S)
        flooding, _ = world.connect()
        flooding.data_received(b"".join(versions(number) for number in range(REQUESTS)))
        assert world.server.shares.behind == 1
        flooding.connection_lost(None)
        assert world.server.shares.behind == 0
        await settle(5)
        assert flooding.requests <= 10
        await world.close()

    asyncio.run(run())


@pytest.mark.promise("P13")
def test_metadata_of_many_topics_comes_in_pages_and_others_are_answered_meanwhile(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(topics, "PAGE", 5)
    monkeypatch.setattr(connection, "TOPICS_ENCODED_HERE_MAX", 5)

    async def run() -> None:
        world = World(tmp_path)
        desk = world.server.desk()
        names = [f"t{number:04}" for number in range(17)]
        for name in names:
            desk.plane.topics.create(name, TopicConfig())
        asking, told = world.connect()
        other, answered = world.connect()
        for asked in (None, [{"name": name, "topic_id": NIL} for name in names]):
            told.written.clear()
            answered.written.clear()
            body = {"topics": asked, "allow_auto_topic_creation": False}
            asking.data_received(k.encode_request(k.METADATA, 9, 1, "c", body))
            assert not told.written
            other.data_received(versions(7))
            assert len(answers(b"".join(answered.written))) == 1
            for _ in range(1000):
                if told.written:
                    break
                await asyncio.sleep(0.01)
            (answer,) = answers(b"".join(told.written))
            assert all(name.encode() in answer for name in names)
        for each in (asking, other):
            each.connection_lost(None)
        await world.close()

    asyncio.run(run())
