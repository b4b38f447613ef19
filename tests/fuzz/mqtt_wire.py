"""Fuzz the MQTT codec and the WebSocket adapter: sessions of packets, then damaged, in pieces of any size.

    python -m tests.fuzz.mqtt_wire --seconds 300 [--seed N]

Each round is one connection from one seed, over TCP or WebSocket. After it:

- the decoder raised nothing but its own errors, with a reason code that CONNACK or DISCONNECT may have;
- it buffered no more than a packet and the last read;
- every packet that it returned is encoded and decoded again unchanged;
- without damage it returned exactly what was sent;
- the adapter raised nothing, and passed on exactly the payload of the binary frames.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Iterator
from typing import Any

from tests.fuzz.amqp091 import Transport, pieces
from tests.fuzz.rounds import command, run_rounds
from wsproto import ConnectionType, WSConnection
from wsproto.events import AcceptConnection, BytesMessage, CloseConnection, Event, Ping, Pong, Request, TextMessage

from basaltmq.broker.auth.web_hosts import WebHosts
from basaltmq.broker.scheduling.loop_shares import LoopShares
from basaltmq.protocols.mqtt.websocket import WebSocketProtocol
from basaltmq.protocols.mqtt.wire import packets as p
from basaltmq.protocols.mqtt.wire import properties as pr
from basaltmq.protocols.mqtt.wire import reason_codes as rc
from basaltmq.protocols.mqtt.wire.decoder import Decoder, Limits
from basaltmq.protocols.mqtt.wire.encoder import encode
from basaltmq.protocols.mqtt.wire.errors import MqttError
from basaltmq.protocols.mqtt.wire.fields import read_binary, read_text
from basaltmq.protocols.mqtt.wire.properties import NO_PROPERTIES, Properties

PACKET_BYTES_MAX = 4096
TEXTS = ("", "a", "a/b", "é/﻿", "x" * 200, "$SYS/a", "a.b*c%2E")
NAMES = TEXTS[1:]
FILTERS = ("#", "+", "a/+/#", "+/b", *NAMES, "$share/group/#", "$share/g/a/b")
ACKNOWLEDGEMENTS: list[tuple[type[p.Puback | p.Pubrec | p.Pubrel | p.Pubcomp], int, frozenset[int]]] = [
    (p.Puback, p.PUBACK, rc.PUBACK),
    (p.Pubrec, p.PUBREC, rc.PUBREC),
    (p.Pubrel, p.PUBREL, rc.PUBREL),
    (p.Pubcomp, p.PUBCOMP, rc.PUBCOMP),
]
NUMBERS = {"payload_format": (0, 1), "maximum_qos": (0, 1)}


def properties_of(rng: random.Random, packet: int, version: int, without: tuple[str, ...] = ()) -> Properties:
    if version != p.V5 or rng.random() < 0.4:
        return NO_PROPERTIES
    kinds = [kind for kind in pr.TABLE if packet in kind.allowed and kind.field not in without]
    found: dict[str, Any] = {}
    for kind in rng.sample(kinds, rng.randint(1, min(4, len(kinds)))):
        found[kind.field] = value_of(rng, kind)
    if "authentication_data" in found:
        found.setdefault("authentication_method", "x")
    return Properties(**found)


def value_of(rng: random.Random, kind: pr.Kind) -> Any:
    if kind.field == "user":
        return tuple((rng.choice(TEXTS), rng.choice(TEXTS)) for _ in range(rng.randint(1, 3)))
    if kind.field == "subscription_ids":
        return (rng.choice([1, 127, 128, 268_435_455]),)
    if kind.read is read_text:
        return rng.choice(NAMES if kind.field == "response_topic" else TEXTS)
    if kind.read is read_binary:
        return rng.randbytes(rng.randint(0, 30))
    if kind.read is pr._read_flag:
        return rng.random() < 0.5
    return rng.choice(NUMBERS.get(kind.field, (1, 2, 255, 65_535)))


def connect_of(rng: random.Random, version: int) -> p.Connect:
    will = None
    if rng.random() < 0.4:
        will = p.Will(
            rng.choice(NAMES),
            rng.randbytes(9),
            rng.randrange(3),
            rng.random() < 0.5,
            properties_of(rng, pr.WILL, version),
        )
    has_user = rng.random() < 0.5
    return p.Connect(
        rng.choice(NAMES),
        version,
        rng.random() < 0.5,
        rng.randrange(65_536),
        will,
        rng.choice(TEXTS) if has_user else None,
        rng.randbytes(5) if has_user and rng.random() < 0.7 else None,
        properties_of(rng, p.CONNECT, version),
        is_bridge=version != p.V5 and rng.random() < 0.1,
    )


def packet_of(rng: random.Random, version: int) -> p.Packet:
    packet_id = rng.choice([1, 255, 256, 65_535])
    is_5 = version == p.V5
    match rng.randrange(11 if is_5 else 10):
        case 0 | 1 | 2:
            qos = rng.randrange(3)
            properties = properties_of(rng, p.PUBLISH, version, ("subscription_ids",))
            topic = "" if properties.topic_alias is not None else rng.choice(NAMES)
            payload = rng.randbytes(rng.choice([0, 1, 100, 1000]))
            return p.Publish(
                topic,
                payload,
                qos,
                rng.random() < 0.3,
                bool(qos) and rng.random() < 0.2,
                packet_id if qos else 0,
                properties,
            )
        case 3 | 4 | 5:
            kind, number, codes = rng.choice(ACKNOWLEDGEMENTS)
            code = rng.choice(sorted(codes)) if is_5 else 0
            return kind(packet_id, code, properties_of(rng, number, version))
        case 6:
            return p.Subscribe(
                packet_id,
                tuple(p.Subscription(rng.choice(FILTERS), rng.randrange(3)) for _ in range(rng.randint(1, 4))),
                properties_of(rng, p.SUBSCRIBE, version),
            )
        case 7:
            filters = tuple(rng.choice(FILTERS) for _ in range(rng.randint(1, 4)))
            return p.Unsubscribe(packet_id, filters, properties_of(rng, p.UNSUBSCRIBE, version))
        case 8:
            return p.Pingreq()
        case 9:
            code = rng.choice(sorted(rc.DISCONNECT_BY_CLIENT)) if is_5 else 0
            return p.Disconnect(code, properties_of(rng, p.DISCONNECT, version))
    return p.Auth(
        rc.CONTINUE_AUTHENTICATION, Properties(authentication_method="x", authentication_data=rng.randbytes(8))
    )


def damage(rng: random.Random, raw: bytes) -> bytes:
    """Damage a packet: its content, header, or length."""
    broken = bytearray(raw)
    match rng.randrange(7):
        case 0:
            broken[rng.randrange(len(broken))] ^= 1 << rng.randrange(8)
        case 1:
            broken[rng.randrange(len(broken))] = rng.randrange(256)
        case 2:
            del broken[rng.randrange(len(broken)) :]
        case 3 if len(broken) > 2 and broken[1] < 0x80:
            # The length matches the truncated body.
            del broken[rng.randrange(2, len(broken)) :]
            broken[1] = len(broken) - 2
        case 4:
            at = rng.randrange(len(broken))
            broken[at:at] = rng.randbytes(rng.randint(1, 5))
        case 5:
            broken[1:2] = b"\xff" * rng.randint(1, 5) + b"\x00"
        case _:
            return rng.randbytes(rng.randint(1, 60))
    return bytes(broken)


class Sink(asyncio.Protocol):
    """Decodes bytes like a connection."""

    def __init__(self) -> None:
        self.decoder = Decoder(Limits(packet_bytes_max=PACKET_BYTES_MAX, connect_bytes_max=PACKET_BYTES_MAX))
        self.received: list[p.Packet] = []
        self.error: MqttError | None = None
        self.is_lost = False

    def connection_lost(self, error: Exception | None) -> None:
        self.is_lost = True

    def data_received(self, data: bytes) -> None:
        if self.error is not None:
            return
        try:
            self.received += self.decoder.feed(data)
        except MqttError as error:
            self.error = error
            return
        assert self.decoder.buffered_bytes <= PACKET_BYTES_MAX


def session_of(rng: random.Random, harm: float) -> tuple[list[p.Packet], bytes]:
    version = rng.choice([p.V31, p.V311, p.V5, p.V5])
    sent: list[p.Packet] = [connect_of(rng, version)]
    sent += [packet_of(rng, version) for _ in range(rng.randint(0, 20))]
    raws = [encode(packet, version) for packet in sent]
    return sent, b"".join(damage(rng, raw) if rng.random() < harm else raw for raw in raws)


def check(sink: Sink, sent: list[p.Packet], is_whole: bool) -> None:
    if sink.error is not None:
        codes = rc.DISCONNECT_BY_SERVER if sink.received else rc.CONNACK
        assert sink.error.reason_code in codes, f"{sink.error} cannot be reported"
    if is_whole:
        assert sink.error is None
        assert sink.received == sent
    if sink.received:
        version = sink.decoder.version
        again = Decoder(Limits())
        raw = b"".join(encode(packet, version) for packet in sink.received)
        assert list(again.feed(raw)) == sink.received


async def one_round(seed: int) -> None:
    rng = random.Random(seed)
    harm = rng.choice([0.0, 0.0, 0.05, 0.4])
    sent, raw = session_of(rng, harm)
    if rng.random() < 0.6:
        sink = Sink()
        for piece in pieces(rng, raw):
            sink.data_received(piece)
        check(sink, sent, harm == 0)
    else:
        await websocket_round(rng, sent, raw, harm)


async def websocket_round(rng: random.Random, sent: list[p.Packet], raw: bytes, harm: float) -> None:
    sinks: list[Sink] = []

    def make() -> Sink:
        sinks.append(Sink())
        return sinks[-1]

    hosts = WebHosts("127.0.0.1", lambda: ())
    shares = LoopShares(clock_s=lambda: 0.0)
    outer = WebSocketProtocol(make, hosts, shares, message_bytes_max=1 << 20, handshake_s=60.0)
    transport = Transport()
    outer.connection_made(transport)  # type: ignore[arg-type]
    client = WSConnection(ConnectionType.CLIENT)
    framing = rng.choice([0.0, 0.0, 0.02, 0.2])
    request = client.send(Request(host="localhost", target="/mqtt", subprotocols=["mqtt"]))
    is_broken = rng.random() < framing
    if is_broken:
        request = damage(rng, request)
    for piece in pieces(rng, request):
        if not transport.closed:
            outer.data_received(piece)
    if sinks and not is_broken:
        client.receive_data(b"".join(transport.written))
        assert isinstance(next(client.events()), AcceptConnection)
        transport.written.clear()
        for frame in frames_of(rng, client, raw):
            broken = damage(rng, frame) if rng.random() < framing else frame
            for piece in pieces(rng, broken):
                if not transport.closed:
                    outer.data_received(piece)
        check(sinks[0], sent, harm == 0 and framing == 0)
        check_answers(client, b"".join(transport.written))
    outer.connection_lost(None)
    assert all(sink.is_lost for sink in sinks)
    assert shares.behind == 0


def frames_of(rng: random.Random, client: WSConnection, raw: bytes) -> Iterator[bytes]:
    for piece in pieces(rng, raw):
        if rng.random() < 0.1:
            yield client.send(Ping(payload=rng.randbytes(rng.randrange(126))))
        yield client.send(BytesMessage(data=piece, message_finished=rng.random() < 0.7))


def check_answers(client: WSConnection, raw: bytes) -> None:
    """Check that the adapter sent whole frames: pongs, and at most one close at the end."""
    client.receive_data(raw)
    found: list[Event] = list(client.events())
    assert not any(isinstance(event, TextMessage | BytesMessage) for event in found)
    closes = [event for event in found if isinstance(event, CloseConnection)]
    assert len(closes) <= 1
    assert all(isinstance(event, Pong | CloseConnection) for event in found)


async def fuzz(seeds: Iterator[int], stop: Callable[[int], bool], check_every: int = 1000) -> int:
    """Run rounds until `stop` returns True. Return their number."""

    async def nothing() -> None: ...

    return await run_rounds("tests.fuzz.mqtt_wire", one_round, nothing, seeds, stop, check_every)


if __name__ == "__main__":
    command("the MQTT codec", fuzz)
