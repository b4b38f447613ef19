"""The client's side of the wire for tests: encodes frames, and decodes the server's output."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import NamedTuple

from basaltmq.protocols.amqp091.events import Event, Published
from basaltmq.protocols.amqp091.session import Session
from basaltmq.protocols.amqp091.tuning import Limits
from basaltmq.protocols.amqp091.wire import methods as m
from basaltmq.protocols.amqp091.wire.frames import BODY, END, HEAD, HEADER, METHOD, PROTOCOL_HEADER, encode_content
from basaltmq.protocols.amqp091.wire.method_codec import codecs, encode_method

FRAME_MAX = 4096
_WITH_CONTENT = (m.BasicPublish, m.BasicReturn, m.BasicDeliver, m.BasicGetOk)


class Frame(NamedTuple):
    """A received frame."""

    kind: int
    channel: int
    payload: bytes

    @property
    def method(self) -> m.Method:
        assert self.kind == METHOD
        return codecs()[int.from_bytes(self.payload[:4], "big")].decode(self.payload)


def frames(raw: bytes) -> Iterator[Frame]:
    """Decode a server's output into whole frames. Anything else fails."""
    at = 0
    while at < len(raw):
        kind, channel, size = HEAD.unpack_from(raw, at)
        stop = at + HEAD.size + size
        assert raw[stop] == END
        yield Frame(kind, channel, raw[at + HEAD.size : stop])
        at = stop + 1


def sent(session: Session) -> list[m.Method]:
    """Remove and return the methods in a session's output."""
    raw = b"".join(session.outgoing)
    session.outgoing.clear()
    return [frame.method for frame in frames(raw) if frame.kind == METHOD]


class Message(NamedTuple):
    """A received message."""

    method: m.Method
    properties: bytes
    body: bytes


def messages(found: Iterable[Frame]) -> list[Message]:
    """Return the assembled messages; other methods are omitted."""
    done: list[Message] = []
    method: m.Method | None = None
    properties, body, size = b"", b"", 0
    for frame in found:
        if frame.kind == METHOD and isinstance(frame.method, _WITH_CONTENT):
            method, body = frame.method, b""
        elif frame.kind == HEADER:
            size = int.from_bytes(frame.payload[4:12], "big")
            properties = frame.payload[12:]
        elif frame.kind == BODY:
            body += frame.payload
        if method is not None and frame.kind in (HEADER, BODY) and len(body) == size:
            done.append(Message(method, properties, body))
            method = None
    return done


def publish(
    body: bytes,
    *,
    channel: int = 1,
    exchange: str = "",
    key: str = "q",
    properties: bytes = b"\0\0",
    mandatory: bool = False,
    frame_max: int = FRAME_MAX,
) -> bytes:
    method = encode_method(channel, m.BasicPublish(0, exchange, key, mandatory, False))
    return method + b"".join(encode_content(channel, properties, body, frame_max))


def handshake(frame_max: int = FRAME_MAX, channel_max: int = 10, heartbeat: int = 0, vhost: str = "/") -> list[bytes]:
    """Yield the client's steps until the connection is open, one per awaited response."""
    capabilities: dict[str, object] = {
        "connection.blocked": True,
        "consumer_cancel_notify": True,
        "authentication_failure_close": True,
    }
    properties = {"capabilities": capabilities}
    start_ok = m.ConnectionStartOk(properties, "PLAIN", b"\0guest\0guest", "en_US")  # type: ignore[arg-type]
    return [
        PROTOCOL_HEADER,
        encode_method(0, start_ok),
        encode_method(0, m.ConnectionTuneOk(channel_max, frame_max, heartbeat)),
        encode_method(0, m.ConnectionOpen(vhost)),
    ]


def running(limits: Limits | None = None, *, channels: int = 1, frame_max: int = FRAME_MAX) -> Session:
    """Return a session with an open connection and open channels."""
    session = Session(limits or Limits())
    header, start_ok, tune_ok, open_vhost = handshake(frame_max)
    drain(session, header)
    drain(session, start_ok)
    session.send(0, m.ConnectionTune(2047, 131072, 60))
    drain(session, tune_ok)
    drain(session, open_vhost)
    session.send(0, m.ConnectionOpenOk())
    for number in range(1, channels + 1):
        drain(session, encode_method(number, m.ChannelOpen()))
    session.outgoing.clear()
    return session


def drain(session: Session, raw: bytes) -> list[Event]:
    return list(session.receive(raw))


def published(events: Iterable[Event]) -> list[tuple[int, str, str, bool, bytes, bytes]]:
    """Yield every message of events."""
    return [
        (event.channel, method.exchange, method.routing_key, method.mandatory, properties, body)
        for event in events
        if isinstance(event, Published)
        for method, properties, body in event.messages
    ]
