"""Many ends at once, and clients that send too much: other clients are served meanwhile."""

from __future__ import annotations

import socket
import time
from pathlib import Path

import pytest
from tests.interop.mqtt.raw import Raw
from tests.interop.server import Broker, running

from basaltmq.protocols.mqtt.wire import packets as p
from basaltmq.protocols.mqtt.wire.encoder import encode
from basaltmq.protocols.mqtt.wire.properties import Properties

WILLS = 400


@pytest.mark.spec("G1")
@pytest.mark.mqtt("MQTT-3.1.2-14", "MQTT-3.1.3-10")
def test_the_wills_of_many_lost_connections_are_all_published(broker: Broker) -> None:
    port = broker.port("mqtt")
    user = tuple((f"n{number % 2}", str(number)) for number in range(5))
    with Raw(port) as witness:
        witness.connect("mourner")
        witness.send(p.Subscribe(1, (p.Subscription("wills/#", 1, retain_as_published=True),)))
        witness.expect(p.SUBACK)
        lost = []
        for number in range(WILLS):
            sock = socket.create_connection(("127.0.0.1", port), 20)
            will = p.Will(f"wills/{number}", b"gone", 1, properties=Properties(user=user))
            # Half of the sessions are durable, with a will at once.
            expiry = Properties(session_expiry_s=60 * (number % 2))
            sock.sendall(encode(p.Connect(f"lost-{number}", will=will, properties=expiry), p.V5))
            lost.append(sock)
        for sock in lost:
            assert sock.recv(4)[0] >> 4 == p.CONNACK
        for sock in lost:
            sock.close()
        # A client that is back before its lost connection was handled takes its session over.
        with Raw(port) as back:
            answer = back.connect(f"lost-{WILLS - 1}", clean_start=False, properties=Properties(session_expiry_s=60))
            assert answer.body[0] == 1
            seen: set[str] = set()
            while len(seen) < WILLS:
                found = witness.expect(p.PUBLISH)
                topic, packet_id, _ = found.publish()
                assert topic not in seen
                assert not found.flags & 1
                assert b"".join(b"\x26\0\x02%b\0\x01%b" % (n.encode(), v.encode()) for n, v in user) in found.body
                seen.add(topic)
                witness.send(p.Puback(packet_id))
            back.send(p.Pingreq())
            back.expect(p.PINGRESP)
    sessions = broker.call("GET", "/api/mqtt/sessions/%2F")
    names = {each["client_id"] for each in sessions if each["client_id"] != "mourner"}
    assert names == {f"lost-{number}" for number in range(1, WILLS, 2)}


@pytest.mark.spec("G1")
def test_packets_above_the_rate_wait_for_the_next_second(tmp_path: Path) -> None:
    with running(tmp_path / "data", "--mqtt-packets-per-s-max=10") as broker:
        port = broker.port("mqtt")
        with Raw(port) as fast, Raw(port) as other:
            other.connect("other")
            fast.connect("fast")
            begun = time.monotonic()
            fast.send(*(p.Publish("rate", b"", 1, packet_id=number) for number in range(1, 41)))
            other.send(p.Pingreq())
            other.expect(p.PINGRESP)
            assert [fast.expect(p.PUBACK).packet_id for _ in range(40)] == list(range(1, 41)), "nothing is lost"
            assert time.monotonic() - begun > 2, "40 packets take at least 3 further seconds"


@pytest.mark.spec("G1")
@pytest.mark.mqtt("MQTT-3.14.0-1", "MQTT-3.2.0-1")
def test_clients_that_take_over_each_other_get_connack_first(broker: Broker) -> None:
    durable = Properties(session_expiry_s=60)
    connect = p.Connect("stampede", clean_start=False, properties=durable)
    raws = [Raw(broker.port("mqtt")) for _ in range(40)]
    try:
        for raw in raws:
            raw.send(connect)
        firsts = [raw.read() for raw in raws]
        assert {answer.kind for answer in firsts if answer is not None} == {p.CONNACK}
        assert any(answer is not None and answer.reason_code == 0 for answer in firsts)
        sessions = broker.call("GET", "/api/mqtt/sessions/%2F")
        assert [each["connected"] for each in sessions if each["client_id"] == "stampede"] == [True]
    finally:
        for raw in raws:
            raw.close()
