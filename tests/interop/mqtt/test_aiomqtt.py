"""aiomqtt: an asyncio client."""

from __future__ import annotations

import asyncio

import aiomqtt
import pytest
from tests.interop.server import Broker


@pytest.mark.spec("G1")
def test_aiomqtt_publishes_and_subscribes(broker: Broker) -> None:
    async def work() -> list[bytes]:
        found = []
        async with asyncio.timeout(30), aiomqtt.Client("127.0.0.1", broker.port("mqtt"), identifier="aio") as client:
            await client.subscribe("aio/+", qos=2)
            for number in range(20):
                await client.publish(f"aio/{number}", b"%d" % number, qos=number % 3)
            async for message in client.messages:
                assert isinstance(message.payload, bytes)
                found.append(message.payload)
                if len(found) == 20:
                    return found
        return found

    assert sorted(asyncio.run(work())) == sorted(b"%d" % number for number in range(20))
