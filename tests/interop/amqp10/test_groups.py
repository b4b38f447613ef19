"""Message groups: one consumer gets all messages of a group, in order."""

from __future__ import annotations

from typing import Any

import pika
import pytest
from proton import Message
from proton.reactor import Selector
from proton.utils import BlockingConnection
from tests.interop.amqp10.test_filters import receiver, send
from tests.interop.amqp10.test_protocol import depth
from tests.interop.amqp10.test_proton import WAIT_S, connect
from tests.interop.server import Broker


def declare(broker: Broker, name: str) -> str:
    broker.call("PUT", f"/api/queues/%2F/{name}", {"durable": True, "arguments": {"x-basalt-message-groups": True}})
    return f"/queues/{name}"


def grouped(number: int, group: str | None) -> Message:
    return Message(body=b"%d" % number, inferred=True, group_id=group, properties={"number": number})


def read(link: Any, count: int) -> list[tuple[str, int]]:
    """Receive messages without settling them. Return groups and numbers."""
    found = []
    for _ in range(count):
        message = link.receive(timeout=WAIT_S)
        found.append((message.group_id, int(bytes(message.body))))
    return found


def open_links(broker: Broker, address: str, count: int) -> tuple[BlockingConnection, list[Any]]:
    client = connect(broker)
    return client, [receiver(client, address, credit=100) for _ in range(count)]


@pytest.mark.spec("G2")
def test_a_group_stays_with_its_consumer_until_it_leaves(broker: Broker) -> None:
    address = declare(broker, "g-stay")
    client, (first, second) = open_links(broker, address, 2)
    other, _ = open_links(broker, address, 0)
    send(other, address, *[grouped(number, f"group-{number % 4}") for number in range(20)])
    # Four groups, two for each consumer.
    of_first, of_second = read(first, 10), read(second, 10)
    groups = {group for group, _ in of_first}
    assert len(groups) == 2
    assert groups.isdisjoint({group for group, _ in of_second})
    for found in (of_first, of_second):
        for group in {group for group, _ in found}:
            numbers = [number for each, number in found if each == group]
            assert numbers == sorted(numbers)
    send(other, address, *[grouped(20 + number, f"group-{number % 4}") for number in range(4)])
    assert {group for group, _ in read(first, 2)} == groups
    # The groups of a consumer that leaves go to the other one, with what it has not settled.
    first.close()
    left = read(second, 2 + 12)
    assert {group for group, _ in left} == {f"group-{number}" for number in range(4)}
    for group in groups:
        assert [number for each, number in left if each == group] == [
            number for number in range(24) if f"group-{number % 4}" == group
        ]
    for _ in range(24):
        second.accept()
    client.close()
    other.close()
    assert depth(broker, "g-stay") == 0


@pytest.mark.spec("G2")
def test_groups_work_with_selectors_other_protocols_and_messages_without_group(broker: Broker) -> None:
    address = declare(broker, "g-mixed")
    client = connect(broker)
    low = receiver(client, address, options=Selector("number < 2"), credit=100)
    connection = pika.BlockingConnection(pika.URLParameters(broker.url()))
    channel = connection.channel()
    channel.basic_publish("", "g-mixed", b"0", pika.BasicProperties(app_id="a", headers={"number": 0}))
    assert read(low, 1) == [("a", 0)]
    # The selector's consumer has group a, so nobody else gets it.
    send(client, address, grouped(5, "a"), grouped(6, "b"), grouped(7, None))
    found = []
    for method, properties, body in channel.consume("g-mixed", auto_ack=True, inactivity_timeout=WAIT_S):
        assert method is not None
        found.append((properties.app_id, body))
        if len(found) == 2:
            break
    assert found == [("b", b"6"), (None, b"7")]
    low.accept()
    low.close()
    method, _, body = next(channel.consume("g-mixed", auto_ack=True, inactivity_timeout=WAIT_S))
    assert body == b"5"
    connection.close()
    client.close()
