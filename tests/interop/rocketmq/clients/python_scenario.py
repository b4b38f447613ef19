"""RocketMQ's Python client against a broker: python_scenario.py PORT. Runs in an environment of its own."""

from __future__ import annotations

import sys
import threading

from rocketmq.v5.client import ClientConfiguration, Credentials
from rocketmq.v5.consumer import PushConsumer, SimpleConsumer
from rocketmq.v5.consumer.push import ConsumeResult, MessageListener
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
    producer.shutdown()


if __name__ == "__main__":
    main(sys.argv[1])
