"""The order of message groups over failing and dying consumers, changed durations, and kill -9 of the broker."""

from __future__ import annotations

import random
import threading
import time
from collections import defaultdict
from pathlib import Path

import grpc
import pytest
from tests.interop.rocketmq.conftest import FLAGS
from tests.interop.rocketmq.raw import Client, handle_of, message
from tests.interop.server import Broker, running

from basaltmq.http_client import path
from basaltmq.wire import rocketmq_wire_pb2 as wire

GROUPS = [f"group-{number}" for number in range(6)]
MESSAGES = 20
CONSUMERS = 4
KILLS = 2
PARTITIONS = 2
WAIT_S = 180.0
AGAIN_S = 0.05


class Work:
    """What consumers have processed, in the order of processing."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.tried: dict[str, set[int]] = defaultdict(set)
        """Messages whose acknowledgement was sent. A kill may have lost the answer."""
        self.done: dict[str, list[tuple[int, int]]] = defaultdict(list)
        """When a message was processed, and its number, if its acknowledgement was accepted."""
        self._clock = 0

    def begin(self, group: str, number: int) -> int:
        with self.lock:
            self._clock += 1
            self.tried[group].add(number)
            return self._clock

    def end(self, group: str, number: int, at: int) -> None:
        with self.lock:
            self.done[group].append((at, number))

    def count(self) -> int:
        with self.lock:
            return sum(len(each) for each in self.tried.values())


def process(client: Client, found: list[wire.Message], work: Work, chance: random.Random) -> None:
    """Process messages in order, until one fails."""
    for each in found:
        handle, group, number = handle_of(each), each.system_properties.message_group, int(each.body)
        if chance.random() < 0.1:
            return
        if chance.random() < 0.2:
            changed = client.change("g", "t", handle, 3_000)
            if changed.status.code != wire.OK:
                return
            handle = changed.receipt_handle
        at = work.begin(group, number)
        if client.ack("g", "t", handle).status.code != wire.OK:
            return
        work.end(group, number, at)


def consume(port: int, work: Work, chance: random.Random, until: threading.Event) -> None:
    client = Client(port)
    while not until.is_set():
        try:
            _, found = client.receive(
                "g", "t", count=chance.choice([1, 4, 16]), invisible_ms=chance.choice([300, 2_000]), polling_ms=500
            )
            if chance.random() < 0.1:
                # The consumer dies with what it holds, and another one takes its place.
                client.channel.close()
                client = Client(port)
            else:
                process(client, found, work, chance)
        except grpc.RpcError:
            time.sleep(AGAIN_S)
    client.channel.close()


def fill(broker: Broker, *, is_ordered: bool) -> None:
    broker.call("PUT", path("topics", "/", "t"), {"partitions": PARTITIONS})
    broker.call("PUT", path("subscription-groups", "/", "g"), {"ordered": is_ordered, "max_attempts": 1_000})
    with Client(broker.port("rocketmq")) as client:
        for number in range(MESSAGES):
            for at, group in enumerate(GROUPS):
                made = message("t", b"%d" % number, message_type=wire.FIFO, message_group=group)
                made.system_properties.queue_id = at % PARTITIONS
                assert client.send(made).status.code == wire.OK


def wait_for(work: Work, wanted: int) -> None:
    until = time.monotonic() + WAIT_S
    while work.count() < wanted:
        assert time.monotonic() < until, f"{work.count()} of {wanted} messages were processed"
        time.sleep(AGAIN_S)


@pytest.mark.parametrize("is_ordered", [False, True])
def test_message_groups_stay_in_order(tmp_path: Path, is_ordered: bool) -> None:
    seed = random.randrange(1 << 32)
    print(f"seed {seed}")
    work, stopped = Work(), threading.Event()
    with running(tmp_path / "data", *FLAGS) as broker:
        fill(broker, is_ordered=is_ordered)
        threads = [
            threading.Thread(
                target=consume, args=(broker.port("rocketmq"), work, random.Random(seed + number), stopped), daemon=True
            )
            for number in range(CONSUMERS)
        ]
        for thread in threads:
            thread.start()
        try:
            for kill in range(1, KILLS + 1):
                wait_for(work, kill * len(GROUPS) * MESSAGES // (KILLS + 1))
                broker.kill()
                broker.start()
            wait_for(work, len(GROUPS) * MESSAGES)
        finally:
            stopped.set()
            for thread in threads:
                thread.join(WAIT_S)
    for group in GROUPS:
        assert work.tried[group] == set(range(MESSAGES))
        processed = [number for _, number in sorted(work.done[group])]
        assert processed == sorted(set(processed)), group
