"""kill -9 under load: QoS 1 at least once, QoS 2 exactly once, each in order, and a rule copies exactly once."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
from tests.interop.mqtt.raw import Answer, Raw
from tests.interop.server import Broker

from basaltmq.protocols.mqtt.wire import packets as p
from basaltmq.protocols.mqtt.wire.properties import Properties

KILLS = 4
WINDOW = 20
END_S = 120.0
DURABLE = Properties(session_expiry_s=3600)


class Reconnecting:
    """A client that connects again until it is told to stop."""

    def __init__(self, port: int, client_id: str) -> None:
        self.port = port
        self.client_id = client_id
        self.stop = threading.Event()
        self.error: BaseException | None = None
        self.sessions: list[bool] = []
        """Whether the server had the session, for each connection."""
        self.thread = threading.Thread(target=self._run)
        self.thread.start()

    def _run(self) -> None:
        try:
            while not self.stop.is_set():
                try:
                    with Raw(self.port) as raw:
                        raw.sock.settimeout(2)
                        self._serve(raw)
                except (ConnectionError, TimeoutError, AssertionError) as error:
                    if isinstance(error, AssertionError) and "connection ended" not in str(error):
                        raise
                time.sleep(0.02)
        except BaseException as error:
            self.error = error

    def _serve(self, raw: Raw) -> None:
        answer = raw.connect(self.client_id, clean_start=False, properties=DURABLE)
        assert answer.reason_code == 0, answer
        self.sessions.append(bool(answer.body[0]))
        self.resume(raw)
        for answer in raw.rest():
            self.handle(raw, answer)
            if self.stop.is_set():
                return

    def resume(self, raw: Raw) -> None: ...

    def handle(self, raw: Raw, answer: Answer) -> None: ...

    def end(self) -> None:
        self.stop.set()
        self.thread.join(END_S)
        assert not self.thread.is_alive()
        if self.error is not None:
            raise self.error


class Publisher(Reconnecting):
    """Sends numbered messages of one QoS. A message is sent again until its flow is complete."""

    def __init__(self, port: int, client_id: str, topic: str, qos: int) -> None:
        self.topic = topic
        self.qos = qos
        self.next = 0
        self.completed = 0
        self.limit = 1 << 30
        self.flows: dict[int, tuple[int, bool]] = {}
        """Packet id -> number, and whether PUBREC came."""
        super().__init__(port, client_id)

    def publish(self, packet_id: int, number: int, *, dup: bool) -> p.Publish:
        return p.Publish(self.topic, b"%d" % number, self.qos, dup=dup, packet_id=packet_id)

    def resume(self, raw: Raw) -> None:
        if not self.sessions[-1]:
            assert len(self.sessions) == 1, "the server lost the session of a publisher"
        for packet_id, (number, is_received) in self.flows.items():
            raw.send(p.Pubrel(packet_id) if is_received else self.publish(packet_id, number, dup=True))
        self._fill(raw)

    def _fill(self, raw: Raw) -> None:
        packets = []
        while len(self.flows) < WINDOW and self.next < self.limit:
            packet_id = next(each for each in range(1, WINDOW + 2) if each not in self.flows)
            self.flows[packet_id] = (self.next, False)
            packets.append(self.publish(packet_id, self.next, dup=False))
            self.next += 1
        raw.send(*packets)

    def handle(self, raw: Raw, answer: Answer) -> None:
        packet_id = answer.packet_id
        if answer.kind == p.PUBREC:
            assert answer.reason_code in (0, 0x10), answer
            if packet_id in self.flows:
                self.flows[packet_id] = (self.flows[packet_id][0], True)
            raw.send(p.Pubrel(packet_id))
        elif answer.kind in (p.PUBACK, p.PUBCOMP):
            if answer.kind == p.PUBACK:
                assert answer.reason_code in (0, 0x10), answer
            if self.flows.pop(packet_id, None) is not None:
                self.completed += 1
            self._fill(raw)


class Subscriber(Reconnecting):
    """Records messages. It remembers the identifiers of QoS 2 until PUBREL."""

    def __init__(self, port: int, client_id: str, topic: str) -> None:
        self.topic = topic
        self.seen: list[int] = []
        self.identifiers: set[int] = set()
        super().__init__(port, client_id)

    def resume(self, raw: Raw) -> None:
        if not self.sessions[-1]:
            assert len(self.sessions) == 1, "the server lost the session of a subscriber"
            raw.send(p.Subscribe(1, (p.Subscription(self.topic, 2),)))

    def handle(self, raw: Raw, answer: Answer) -> None:
        if answer.kind == p.PUBLISH:
            _, packet_id, payload = answer.publish()
            if answer.flags >> 1 & 3 == 1:
                self.seen.append(int(payload))
                raw.send(p.Puback(packet_id))
                return
            if packet_id not in self.identifiers:
                self.identifiers.add(packet_id)
                self.seen.append(int(payload))
            raw.send(p.Pubrec(packet_id))
        elif answer.kind == p.PUBREL:
            self.identifiers.discard(answer.packet_id)
            raw.send(p.Pubcomp(answer.packet_id))


def until(done: Callable[[], bool], *clients: Reconnecting) -> None:
    limit = time.monotonic() + END_S
    while not done():
        assert time.monotonic() < limit, [vars(each) for each in clients]
        for each in clients:
            assert each.error is None, each.error
        time.sleep(0.05)


def copied(broker: Broker) -> list[int]:
    """Return the numbers in the stream of the rule."""
    found: list[int] = []
    for partition in range(2):
        page: dict[str, Any] = {"next_offset": 0, "records": [0]}
        while page["records"]:
            lines = f"/api/topics/%2F/copies/{partition}/lines"
            page = broker.call("GET", lines, offset=page["next_offset"], limit=1000)
            found += [int(each["value"]) for each in page["records"]]
    return found


def _grew(publishers: dict[int, Publisher], before: dict[int, int]) -> bool:
    return all(each.completed > before[qos] + 50 for qos, each in publishers.items())


@pytest.mark.spec("G1")
@pytest.mark.promise("P1")
def test_kill_9_loses_no_message_and_duplicates_no_qos_2_message_nor_its_copy_by_a_rule(
    own_broker: Broker,
) -> None:
    seed = random.randrange(1 << 30)
    print("seed", seed)
    chance = random.Random(seed)
    port = own_broker.port("mqtt")
    own_broker.call("PUT", "/api/topics/%2F/copies", {"partitions": 2})
    own_broker.call("PUT", "/api/mqtt/rules/%2F/copies", {"filter": "crash/2", "topic": "copies"})
    subscribers = {qos: Subscriber(port, f"sub{qos}", f"crash/{qos}") for qos in (1, 2)}
    until(lambda: all(each.sessions for each in subscribers.values()), *subscribers.values())
    time.sleep(0.5)
    publishers = {qos: Publisher(port, f"pub{qos}", f"crash/{qos}", qos) for qos in (1, 2)}
    clients = [*subscribers.values(), *publishers.values()]
    try:
        for _ in range(KILLS):
            before = {qos: each.completed for qos, each in publishers.items()}
            until(lambda before=before: _grew(publishers, before), *clients)  # type: ignore[misc]
            time.sleep(chance.random() * 0.5)
            own_broker.kill()
            own_broker.start()
        for each in publishers.values():
            each.limit = each.next
        until(lambda: not any(each.flows for each in publishers.values()), *clients)
        total = {qos: each.next for qos, each in publishers.items()}
        until(lambda: all(len(set(each.seen)) >= total[qos] for qos, each in subscribers.items()), *clients)
        until(lambda: len(set(copied(own_broker))) >= total[2], *clients)
        time.sleep(0.5)
    finally:
        for client in clients:
            client.stop.set()
        for client in clients:
            client.end()
    assert set(subscribers[1].seen) == set(range(total[1]))
    assert sorted(subscribers[2].seen) == list(range(total[2])), "QoS 2 is exactly once"
    assert sorted(copied(own_broker)) == list(range(total[2])), "a rule copies exactly once"
    first = list(dict.fromkeys(subscribers[1].seen))
    print(f"QoS 1: {total[1]} sent, {len(subscribers[1].seen)} received; QoS 2: {total[2]} sent")
    assert len(first) == total[1]
