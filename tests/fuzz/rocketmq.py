"""Fuzz RocketMQ: random and damaged requests of every method against a real broker.

    python -m tests.fuzz.rocketmq --seconds 600 [--seed N]

A request has random fields, with values that are often valid: known topics and groups, handles that the broker gave
out, numbers at the limits. Some requests are damaged bytes. After each one the status is not INTERNAL, and at the end a
valid client is served and the log has no error.
"""

from __future__ import annotations

import random
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import grpc
from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import Message
from tests.fuzz.rounds import command
from tests.interop.rocketmq.raw import SERVICE, Client, bodies, message
from tests.interop.server import Broker, running

from basaltmq.wire import rocketmq_wire_pb2 as wire

UNARY = (
    *("QueryRoute", "QueryAssignment", "Heartbeat", "NotifyClientTermination", "SendMessage", "AckMessage"),
    *("ForwardMessageToDeadLetterQueue", "EndTransaction", "ChangeInvisibleDuration", "RecallMessage"),
    *("UpdateOffset", "GetOffset", "QueryOffset"),
)
STREAMS = ("ReceiveMessage", "PullMessage")
CALLS_PER_ROUND = 40
LOG_CHARACTERS_SHOWN = 4_000
DEPTH_MAX = 5
NUMBERS = (0, 1, -1, 2, 32, 255, 10_000, (1 << 31) - 1, -(1 << 31))
LARGE = (*NUMBERS, (1 << 63) - 1, -(1 << 63), 1 << 40)
TEXTS = ("", "a", "b", "fuzz", "g", "%DLQ%g", "%RETRY%g", "a||b", "*", "x > 1", " ", "\0", "\u00e9\u4e2d", "y" * 300)
REFUSALS = {grpc.StatusCode.DEADLINE_EXCEEDED, grpc.StatusCode.RESOURCE_EXHAUSTED}


class Fuzzer:
    """Makes requests from a seed."""

    def __init__(self, seed: int, known: list[str]) -> None:
        self.chance = random.Random(seed)
        self.known = known
        """Handles and ids that the broker gave out."""

    def value(self, field: FieldDescriptor) -> Any:
        chance = self.chance
        kind = field.cpp_type
        if kind == FieldDescriptor.CPPTYPE_STRING:
            texts = [*TEXTS, *self.known[-20:]]
            text = chance.choice(texts)
            return chance.randbytes(chance.randrange(50)) if field.type == FieldDescriptor.TYPE_BYTES else text
        if kind == FieldDescriptor.CPPTYPE_BOOL:
            return chance.random() < 0.5
        if kind in (FieldDescriptor.CPPTYPE_FLOAT, FieldDescriptor.CPPTYPE_DOUBLE):
            return chance.choice((0.0, 1.5, -1.0, float("inf"), float("nan")))
        if kind == FieldDescriptor.CPPTYPE_ENUM:
            return chance.choice((0, 1, 2, 3, 4, 5, 6, 99, -1))
        return chance.choice(LARGE if kind == FieldDescriptor.CPPTYPE_INT64 else NUMBERS)

    def fill(self, target: Message, depth: int = 0) -> None:
        """Set random fields."""
        for field in target.DESCRIPTOR.fields:
            if self.chance.random() < 0.25 or depth > DEPTH_MAX:
                continue
            if field.message_type is not None and field.message_type.GetOptions().map_entry:
                getattr(target, field.name).update({self.chance.choice(TEXTS): self.chance.choice(TEXTS)})
            elif field.is_repeated:
                some = getattr(target, field.name)
                for _ in range(self.chance.randrange(3)):
                    if field.message_type is not None:
                        self.fill(some.add(), depth + 1)
                    else:
                        some.append(self.value(field))
            elif field.message_type is not None:
                self.fill(getattr(target, field.name), depth + 1)
                getattr(target, field.name).SetInParent()
            else:
                setattr(target, field.name, self.value(field))
        if isinstance(target, wire.Resource) and self.chance.random() < 0.8:
            target.resource_namespace, target.name = "", self.chance.choice(("fuzz", "g", "fuzz"))

    def request(self, name: str) -> bytes:
        made: Message = getattr(wire, name + "Request")()
        self.fill(made)
        if isinstance(made, wire.ReceiveMessageRequest | wire.PullMessageRequest):
            # A call that waits would only take time.
            made.long_polling_timeout.FromMilliseconds(0)
        raw = made.SerializeToString()
        if raw and self.chance.random() < 0.15:
            damaged = bytearray(raw)
            damaged[self.chance.randrange(len(damaged))] ^= 1 << self.chance.randrange(8)
            raw = bytes(damaged[: self.chance.randrange(1, len(damaged) + 1)])
        return raw


def note(answer: Any, known: list[str]) -> None:
    """Remember the handles of an answer, and check its status."""
    status = answer.status if answer.HasField("status") else None
    assert status is None or status.code not in (wire.INTERNAL_ERROR, wire.INTERNAL_SERVER_ERROR), answer
    for entry in getattr(answer, "entries", ()):
        known += [text for text in (getattr(entry, "recall_handle", ""), getattr(entry, "transaction_id", "")) if text]
    if getattr(answer, "receipt_handle", ""):
        known.append(answer.receipt_handle)
    if isinstance(answer, wire.ReceiveMessageResponse) and answer.HasField("message"):
        known.append(answer.message.system_properties.receipt_handle)


def one_round(client: Client, seed: int) -> None:
    known: list[str] = []
    fuzzer = Fuzzer(seed, known)
    for _ in range(CALLS_PER_ROUND):
        name = fuzzer.chance.choice(UNARY + STREAMS)
        raw = fuzzer.request(name)
        response = getattr(wire, name + "Response")
        kind = client.channel.unary_stream if name in STREAMS else client.channel.unary_unary
        call: Any = kind(SERVICE + name, response_deserializer=response.FromString)
        try:
            found = call(raw, metadata=client.metadata(), timeout=10)
            for answer in found if name in STREAMS else (found,):
                note(answer, known)
        except grpc.RpcError as error:
            if error.code() not in REFUSALS:
                raise


def fuzz(broker: Broker, seeds: Iterator[int], stop: Callable[[int], bool]) -> int:
    """Run rounds until `stop`. Return how many."""
    count = 0
    with Client(broker.port("rocketmq")) as client:
        client.route("fuzz")
        while not stop(count):
            seed = next(seeds)
            try:
                one_round(client, seed)
            except BaseException as error:
                error.add_note(f"seed {seed}: run python -m tests.fuzz.rocketmq --seed {seed} --rounds 1")
                error.add_note(broker.log()[-LOG_CHARACTERS_SHOWN:])
                raise
            count += 1
        client.route("after")
        assert client.send(message("after", b"valid")).status.code == wire.OK
        assert bodies(client.receive("after", "after")[1]) == [b"valid"]
    assert '"level":"error"' not in broker.log(), broker.log()
    return count


async def session(seeds: Iterator[int], stop: Callable[[int], bool]) -> int:
    with (
        tempfile.TemporaryDirectory() as folder,
        running(Path(folder) / "data", "--rocketmq-invisible-ms-min=100") as broker,
    ):
        return fuzz(broker, seeds, stop)


if __name__ == "__main__":
    command("rocketmq", session)
