"""A stop during publishing: all confirmed messages exist, and no others."""

from __future__ import annotations

import asyncio
import signal

import aio_pika
import pytest
from aio_pika.exceptions import AMQPError
from tests.interop.server import Broker

from basaltmq.http_client import path

WINDOW = 200
ENOUGH = 300
WAIT_S = 60.0


@pytest.mark.promise("P1")
@pytest.mark.spec("E6")
def test_a_stop_leaves_no_message_in_doubt(own_broker: Broker) -> None:
    own_broker.call("PUT", path("queues", "/", "jobs"), {"durable": True})
    confirmed = asyncio.run(publish_until_closed(own_broker))
    assert own_broker.wait() == 0
    own_broker.start()
    stored = set()
    while found := own_broker.call(
        "POST", path("queues", "/", "jobs", "get"), {"count": 1000, "ackmode": "ack_requeue_false"}
    ):
        stored |= {int(each["payload"]) for each in found}
    assert len(confirmed) >= ENOUGH
    assert confirmed == stored


async def publish_until_closed(broker: Broker) -> set[int]:
    """Publish with many unconfirmed messages until the broker ends the connection. Return the confirmed ones."""
    connection = await aio_pika.connect(broker.url())
    channel = await connection.channel(publisher_confirms=True)
    confirmed: set[int] = set()
    window = asyncio.Semaphore(WINDOW)
    ended = asyncio.Event()

    async def one(number: int) -> None:
        try:
            message = aio_pika.Message(b"%d" % number, delivery_mode=aio_pika.DeliveryMode.PERSISTENT)
            await channel.default_exchange.publish(message, "jobs")
            confirmed.add(number)
        except (AMQPError, ConnectionError, RuntimeError, asyncio.CancelledError):
            ended.set()
        finally:
            window.release()

    tasks = []
    number = 0
    reported = False
    async with asyncio.timeout(WAIT_S):
        while not ended.is_set():
            await window.acquire()
            tasks.append(asyncio.create_task(one(number)))
            number += 1
            if not reported and len(confirmed) >= ENOUGH:
                reported = True
                broker.signal(signal.SIGTERM)
        await asyncio.gather(*tasks, return_exceptions=True)
    await connection.close()
    return confirmed
