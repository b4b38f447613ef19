"""Other common clients: aio-pika, py-amqp and kombu, each with its own assumptions about a server."""

from __future__ import annotations

import asyncio
import importlib
from typing import Any

import aio_pika
import amqp
import pytest
from tests.interop.server import Broker

WAIT_S = 60
kombu: Any = importlib.import_module("kombu")  # its types are for others


async def _aio_pika(broker: Broker, name: str) -> None:
    connection = await aio_pika.connect_robust(broker.url("amqp"))
    async with connection:
        channel = await connection.channel(publisher_confirms=True, on_return_raises=True)
        await channel.set_qos(prefetch_count=10)
        queue = await channel.declare_queue(name, durable=True)
        exchange = await channel.declare_exchange(name, aio_pika.ExchangeType.TOPIC, auto_delete=True)
        await queue.bind(exchange, "orders.#")
        for index in range(100):
            message = aio_pika.Message(
                b"%d" % index, delivery_mode=aio_pika.DeliveryMode.PERSISTENT, headers={"n": index}
            )
            await exchange.publish(message, f"orders.{index}")
        got: list[int] = []
        async with asyncio.timeout(WAIT_S):
            async with queue.iterator() as messages:
                async for incoming in messages:
                    async with incoming.process():
                        assert incoming.headers["n"] == int(incoming.body)
                        got.append(int(incoming.body))
                    if len(got) == 100:
                        break
        assert got == list(range(100))
        with pytest.raises(aio_pika.exceptions.DeliveryError):
            await channel.default_exchange.publish(aio_pika.Message(b"x"), "nowhere", mandatory=True)
        await _transaction(connection, name)
        assert (await queue.declare()).message_count == 1
        await queue.delete(if_empty=False, if_unused=False)


async def _transaction(connection: Any, name: str) -> None:
    channel = await connection.channel(publisher_confirms=False)
    async with channel.transaction():
        await channel.default_exchange.publish(aio_pika.Message(b"in a transaction"), name)


def test_aio_pika(broker: Broker, name: str) -> None:
    asyncio.run(_aio_pika(broker, name))


def test_aio_pika_calls_a_remote_procedure(broker: Broker, name: str) -> None:
    from aio_pika.patterns import RPC

    async def double(*, value: int) -> int:
        return 2 * value

    async def scenario() -> list[int]:
        async with await aio_pika.connect_robust(broker.url("amqp")) as connection:
            channel = await connection.channel()
            rpc = await RPC.create(channel)
            await rpc.register(name, double, auto_delete=True)
            async with asyncio.timeout(WAIT_S):
                answers = await asyncio.gather(*(rpc.call(name, kwargs={"value": each}) for each in range(20)))
            await rpc.close()
            return list(answers)

    assert asyncio.run(scenario()) == [2 * each for each in range(20)]


def test_py_amqp(broker: Broker, name: str) -> None:
    with amqp.Connection(f"127.0.0.1:{broker.port('amqp')}", confirm_publish=True, heartbeat=10) as connection:
        channel = connection.channel()
        channel.queue_declare(name, durable=True, auto_delete=False)
        channel.basic_publish_confirm(amqp.Message("hello", delivery_mode=2), routing_key=name)
        got: list[str] = []

        def on_message(message: Any) -> None:
            got.append(message.body)
            channel.basic_ack(message.delivery_tag)

        tag = channel.basic_consume(name, callback=on_message)
        connection.send_heartbeat()
        while not got:
            connection.drain_events(timeout=WAIT_S)
        assert got == ["hello"]
        channel.basic_cancel(tag)
        assert channel.queue_delete(name) == 0


def test_kombu(broker: Broker, name: str) -> None:
    with kombu.Connection(broker.url("amqp").replace("%2F", "/"), transport="pyamqp") as connection:
        exchange = kombu.Exchange(name, "direct", durable=True)
        queue = kombu.Queue(name, exchange, routing_key="k", queue_arguments={"x-max-priority": 5})
        producer = connection.Producer(serializer="json")
        for index in range(10):
            producer.publish({"n": index}, exchange=exchange, routing_key="k", declare=[queue], priority=index % 3)
        got: list[int] = []

        def on_message(body: dict[str, int], message: Any) -> None:
            got.append(body["n"])
            message.ack()

        with connection.Consumer(queue, callbacks=[on_message], prefetch_count=1):
            while len(got) < 10:
                try:
                    connection.drain_events(timeout=WAIT_S)
                except TimeoutError:
                    raise AssertionError(f"only {got} came") from None
        assert sorted(got) == list(range(10))
        assert got[1:] == sorted(got[1:], key=lambda n: (-(n % 3), n)), "higher priorities come first"
        simple = connection.SimpleQueue(name + "-simple")
        simple.put("x")
        message = simple.get(block=True, timeout=WAIT_S)
        assert message.payload == "x"
        message.ack()
        simple.close()
        bound = queue(connection.default_channel)
        bound.delete()
        exchange(connection.default_channel).delete()
