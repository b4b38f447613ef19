"""Both directions of the codec against paho-mqtt over a socket: paho encodes for the decoder, and decodes the encoder.

The peer is not a broker. It acknowledges every packet and sends the packets that the test sets.
"""

from __future__ import annotations

import queue
import socket
import threading
from collections.abc import Iterator
from typing import Any

import pytest
from paho.mqtt import client as paho
from paho.mqtt.enums import CallbackAPIVersion, MQTTProtocolVersion
from paho.mqtt.packettypes import PacketTypes
from paho.mqtt.properties import Properties as PahoProperties
from paho.mqtt.subscribeoptions import SubscribeOptions

from basaltmq.protocols.mqtt.wire import packets as p
from basaltmq.protocols.mqtt.wire.decoder import Decoder, Limits
from basaltmq.protocols.mqtt.wire.encoder import encode
from basaltmq.protocols.mqtt.wire.properties import NO_PROPERTIES, Properties

WAIT_S = 60.0
VERSIONS = [p.V31, p.V311, p.V5]


class Peer:
    """Accepts one connection and acknowledges what it reads."""

    def __init__(self) -> None:
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._listener.settimeout(WAIT_S)
        self.port: int = self._listener.getsockname()[1]
        self.received: queue.Queue[p.Packet | Exception] = queue.Queue()
        self.publish: list[p.Publish] = []
        """Sent after each SUBACK."""
        self._thread = threading.Thread(target=self._serve, daemon=True)
        self._thread.start()

    def next(self) -> p.Packet:
        packet = self.received.get(timeout=WAIT_S)
        if isinstance(packet, Exception):
            raise packet
        return packet

    def close(self) -> None:
        self._listener.close()
        self._thread.join(WAIT_S)
        assert not self._thread.is_alive()

    def _serve(self) -> None:
        decoder = Decoder(Limits())
        try:
            connection, _ = self._listener.accept()
        except OSError:
            return
        with connection:
            connection.settimeout(WAIT_S)
            try:
                while data := connection.recv(65_536):
                    for packet in decoder.feed(data):
                        self.received.put(packet)
                        for answer in self._answers(packet):
                            connection.sendall(encode(answer, decoder.version))
            except Exception as error:
                self.received.put(error)

    def _answers(self, packet: p.Packet) -> list[p.Packet]:
        match packet:
            case p.Connect():
                properties = Properties(receive_maximum=10, user=(("a", "1"), ("a", "2")), reason_string="hello")
                return [p.Connack(properties=properties if packet.version == p.V5 else NO_PROPERTIES)]
            case p.Publish(qos=1):
                return [p.Puback(packet.packet_id)]
            case p.Publish(qos=2):
                return [p.Pubrec(packet.packet_id)]
            case p.Pubrel():
                return [p.Pubcomp(packet.packet_id)]
            case p.Pubrec():
                return [p.Pubrel(packet.packet_id)]
            case p.Subscribe():
                return [p.Suback(packet.packet_id, tuple(each.qos for each in packet.subscriptions)), *self.publish]
            case p.Unsubscribe():
                return [p.Unsuback(packet.packet_id, (0,) * len(packet.filters))]
        return []


@pytest.fixture
def peer() -> Iterator[Peer]:
    found = Peer()
    yield found
    found.close()


def client_of(version: int) -> tuple[paho.Client, queue.Queue[Any]]:
    protocol = {3: MQTTProtocolVersion.MQTTv31, 4: MQTTProtocolVersion.MQTTv311, 5: MQTTProtocolVersion.MQTTv5}[version]
    client = paho.Client(CallbackAPIVersion.VERSION2, client_id="paho-1", protocol=protocol)
    seen: queue.Queue[Any] = queue.Queue()
    client.on_connect = lambda _client, _data, _flags, reason, properties: seen.put((reason, properties))
    client.on_subscribe = lambda _client, _data, _mid, reasons, _properties: seen.put(reasons)
    client.on_unsubscribe = lambda _client, _data, _mid, reasons, _properties: seen.put(reasons)
    client.on_message = lambda _client, _data, message: seen.put(message)
    return client, seen


def paho_properties(packet: int, **given: Any) -> PahoProperties:
    found = PahoProperties(packet)
    for name, value in given.items():
        setattr(found, name, value)
    return found


@pytest.mark.parametrize("version", VERSIONS)
def test_a_session_of_paho_is_decoded_and_its_responses_accepted(peer: Peer, version: int) -> None:
    is_5 = version == p.V5
    client, seen = client_of(version)
    client.username_pw_set("user", "secret")
    will_properties = paho_properties(PacketTypes.WILLMESSAGE, WillDelayInterval=7) if is_5 else None
    client.will_set("will/é", b"gone", 2, True, will_properties)
    rich = Properties(
        content_type="text/plain",
        correlation_data=b"\0\1",
        user=(("k", "1"), ("k", "2")),
        subscription_ids=(3, 400),
    )
    peer.publish = [
        p.Publish("back/0", b"x" * 300),
        p.Publish("back/1", b"\0\xff", 1, True, packet_id=7, properties=rich if is_5 else NO_PROPERTIES),
        p.Publish("back/2", b"", 2, packet_id=65_535),
    ]
    connect_properties = (
        paho_properties(PacketTypes.CONNECT, SessionExpiryInterval=60, ReceiveMaximum=20) if is_5 else None
    )
    client.connect("127.0.0.1", peer.port, keepalive=55, properties=connect_properties)
    client.loop_start()
    try:
        will = p.Will("will/é", b"gone", 2, True, Properties(will_delay_s=7) if is_5 else NO_PROPERTIES)
        properties = Properties(session_expiry_s=60, receive_maximum=20) if is_5 else NO_PROPERTIES
        expected = p.Connect("paho-1", version, True, 55, will, "user", b"secret", properties)
        assert peer.next() == expected
        reason, given = seen.get(timeout=WAIT_S)
        assert reason == 0
        if is_5:
            assert (given.ReceiveMaximum, given.UserProperty) == (10, [("a", "1"), ("a", "2")])
            assert given.ReasonString == "hello"

        options = SubscribeOptions(2, noLocal=True, retainAsPublished=True, retainHandling=2)
        if is_5:
            client.subscribe(
                [("back/+", options)], properties=paho_properties(PacketTypes.SUBSCRIBE, SubscriptionIdentifier=3)
            )
            assert peer.next() == p.Subscribe(
                1, (p.Subscription("back/+", 2, True, True, 2),), Properties(subscription_ids=(3,))
            )
        else:
            client.subscribe([("back/+", 2), ("#", 0)])
            assert peer.next() == p.Subscribe(1, (p.Subscription("back/+", 2), p.Subscription("#", 0)))
        assert seen.get(timeout=WAIT_S)[0].value == 2
        messages = {message.topic: message for message in (seen.get(timeout=WAIT_S) for _ in range(3))}
        assert [messages[f"back/{qos}"].qos for qos in range(3)] == [0, 1, 2]
        one = messages["back/1"]
        assert (one.payload, one.retain, messages["back/0"].payload) == (b"\0\xff", True, b"x" * 300)
        if is_5:
            assert one.properties.UserProperty == [("k", "1"), ("k", "2")]
            assert one.properties.SubscriptionIdentifier == [3, 400]
            assert (one.properties.ContentType, one.properties.CorrelationData) == ("text/plain", b"\0\1")
        assert {type(peer.next()) for _ in range(3)} == {p.Puback, p.Pubrec, p.Pubcomp}

        for qos in range(3):
            given_properties = None
            if is_5:
                given_properties = paho_properties(
                    PacketTypes.PUBLISH,
                    MessageExpiryInterval=9,
                    ResponseTopic="answer/here",
                    UserProperty=[("k", "1"), ("k", "2")],
                )
            info = client.publish("out/ü", b"y" * 200, qos, retain=qos == 1, properties=given_properties)
            packet = peer.next()
            assert isinstance(packet, p.Publish)
            assert (packet.topic, packet.payload, packet.qos, packet.retain) == ("out/ü", b"y" * 200, qos, qos == 1)
            assert packet.packet_id == (info.mid if qos else 0)
            if is_5:
                assert packet.properties == Properties(
                    message_expiry_s=9, response_topic="answer/here", user=(("k", "1"), ("k", "2"))
                )
            if qos == 2:
                assert peer.next() == p.Pubrel(info.mid)
            info.wait_for_publish(WAIT_S)
            assert info.is_published()

        client.unsubscribe(["back/+", "#"])
        packet = peer.next()
        assert isinstance(packet, p.Unsubscribe)
        assert packet.filters == ("back/+", "#")
        assert len(seen.get(timeout=WAIT_S)) == (2 if is_5 else 0)
        if is_5:
            client.disconnect(properties=paho_properties(PacketTypes.DISCONNECT, SessionExpiryInterval=5))
            assert peer.next() == p.Disconnect(0, Properties(session_expiry_s=5))
        else:
            client.disconnect()
            assert peer.next() == p.Disconnect()
    finally:
        client.loop_stop()
