"""RocketMQ's Python client against a broker: python_scenario.py PORT. Runs in an environment of its own."""

from __future__ import annotations

import sys
import threading
import time

from rocketmq.v5.client import ClientConfiguration, Credentials
from rocketmq.v5.consumer import LiteSimpleConsumer, PushConsumer, SimpleConsumer
from rocketmq.v5.consumer.push import ConsumeResult, MessageListener
from rocketmq.v5.exception import LiteSubscriptionQuotaExceededException
from rocketmq.v5.model import FilterExpression, Message
from rocketmq.v5.producer import Producer

WAIT_S = 30


def text(number: int) -> Message:
    made = Message()
    made.topic = "python"
    made.body = f"m{number}".encode()
    made.tag = "odd" if number % 2 else "even"
    made.keys = f"key{number}"
    made.add_property("number", str(number))
    return made


class Listener(MessageListener):  # type: ignore[misc]
    """Fails on the first delivery of each message."""

    def __init__(self) -> None:
        self.done: dict[str, int] = {}
        self.is_complete = threading.Event()

    def consume(self, message: Message) -> ConsumeResult:
        if message.delivery_attempt == 1:
            return ConsumeResult.FAILURE
        self.done[message.body.decode()] = message.delivery_attempt
        if len(self.done) == 3:
            self.is_complete.set()
        return ConsumeResult.SUCCESS


def subscribe(lite: LiteSimpleConsumer, name: str) -> None:
    """Subscribe to a lite topic. A simple consumer has no quota until the broker's settings arrive after its start."""
    until = time.monotonic() + WAIT_S
    while True:
        try:
            # This version sends the name as a list of its letters. The second call sends all names as they are.
            lite.subscribe_lite(name)
            lite.subscribe_lite_all()
            return
        except LiteSubscriptionQuotaExceededException:
            assert time.monotonic() < until
            time.sleep(0.05)


def main(port: str) -> None:
    configuration = ClientConfiguration(f"127.0.0.1:{port}", Credentials())
    producer = Producer(configuration, ("python",))
    producer.startup()
    for number in range(6):
        receipt = producer.send(text(number))
        print("sent", receipt.offset)

    consumer = SimpleConsumer(configuration, "python-simple", {"python": FilterExpression("odd")}, await_duration=5)
    consumer.startup()
    received = consumer.receive(16, 30)
    for message in received:
        print("got", message.body.decode(), message.tag, *message.keys, message.properties["number"])
    consumer.change_invisible_duration(received[0], 10)
    for message in received:
        consumer.ack(message)
    consumer.shutdown()

    listener = Listener()
    push = PushConsumer(configuration, "python-push", listener, {"python": FilterExpression("even")})
    push.startup()
    assert listener.is_complete.wait(WAIT_S), listener.done
    print("pushed", sorted(listener.done.items()))
    push.shutdown()

    lite = LiteSimpleConsumer("python", configuration, "python-lite", await_duration=5)
    lite.startup()
    subscribe(lite, "room")
    for number in range(3):
        made = Message()
        made.topic, made.lite_topic, made.body = "python", "room", f"lite{number}".encode()
        producer.send(made)
    for _ in range(3):
        (message,) = lite.receive(16, 30)
        print("lite", message.lite_topic, message.body.decode())
        lite.ack(message)
    lite.shutdown()
    producer.shutdown()


if __name__ == "__main__":
    main(sys.argv[1])
