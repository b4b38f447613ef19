"""One Kafka client's pipeline does not hold the others up (P13)."""

from __future__ import annotations

import asyncio
import struct
from itertools import count
from pathlib import Path

import pytest
from tests.fuzz.kafka import World, answers, settle

from basaltmq.broker.loop_shares import TURN_S, LoopShares
from basaltmq.protocols.kafka import api as k

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
        for connection in (flooding, other):
            connection.connection_lost(None)
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
