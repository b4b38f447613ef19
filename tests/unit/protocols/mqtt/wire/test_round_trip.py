"""Every valid packet of every version is encoded and decoded unchanged, however its bytes are cut."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.unit.protocols.mqtt.wire import strategies
from tests.unit.protocols.mqtt.wire.client_decoder import ClientDecoder

from basaltmq.protocols.mqtt.wire import packets as p
from basaltmq.protocols.mqtt.wire.decoder import Decoder, Limits
from basaltmq.protocols.mqtt.wire.encoder import encode


@pytest.mark.mqtt("MQTT-2.2.2-1", "MQTT-3.1.3-1", "MQTT-3.1.3-3", "MQTT-3.1.2-9", "MQTT-3.1.2-17", "MQTT-3.1.2-19")
@given(st.data(), strategies.VERSIONS)
def test_packets_of_a_client_round_trip_for_any_fragmentation(data: st.DataObject, version: int) -> None:
    sent: list[p.Packet] = [data.draw(strategies.connects(version))]
    sent += data.draw(st.lists(strategies.from_client(version), max_size=5))
    raw = b"".join(encode(packet, version) for packet in sent)
    decoder = Decoder(Limits())
    received: list[p.Packet] = []
    at = 0
    while at < len(raw):
        size = data.draw(st.integers(1, len(raw)))
        received += decoder.feed(raw[at : at + size])
        at += size
    assert received == sent
    assert decoder.version == version
    assert decoder.buffered_bytes == 0


@pytest.mark.mqtt("MQTT-2.1.3-1")
@given(st.data(), strategies.VERSIONS)
def test_packets_of_a_server_round_trip(data: st.DataObject, version: int) -> None:
    sent = data.draw(st.lists(strategies.from_server(version), min_size=1, max_size=5))
    raw = b"".join(encode(packet, version) for packet in sent)
    assert list(ClientDecoder(version).feed(raw)) == sent


@given(st.data(), strategies.VERSIONS)
def test_bytes_may_be_added_between_packets(data: st.DataObject, version: int) -> None:
    sent = data.draw(st.lists(strategies.from_client(version), min_size=2, max_size=6))
    decoder = Decoder(Limits())
    list(decoder.feed(encode(p.Connect("c", version), version)))
    raw = b"".join(encode(packet, version) for packet in sent)
    cut = data.draw(st.integers(0, len(raw)))
    received = list(itertools.islice(decoder.feed(raw[:cut]), data.draw(st.integers(0, 3))))
    received += decoder.feed(raw[cut:])
    assert received == sent


def test_an_iterator_continues_with_bytes_fed_in_between() -> None:
    sent = [p.Publish("a", b"%d" % number) for number in range(6)]
    raws = [encode(packet, p.V5) for packet in sent]
    decoder = Decoder(Limits())
    list(decoder.feed(encode(p.Connect("c"), p.V5)))
    iterator = decoder.feed(b"".join(raws[:3]))
    received = [next(iterator)]
    decoder.feed(b"".join(raws[3:]))
    received += iterator
    assert received == sent
