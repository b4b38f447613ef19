"""The client side of a connection, for tests: encodes frames and decodes the server's output."""

from __future__ import annotations

from typing import Any, NamedTuple

from basaltmq.protocols.grpc.http2 import frames as f
from basaltmq.protocols.grpc.http2.connection import Connection
from basaltmq.protocols.grpc.http2.frames import HEAD, HEAD_BYTES, Code
from basaltmq.protocols.grpc.http2.header_blocks import Field, HeaderCache, encode
from basaltmq.protocols.grpc.messages import prefix

REQUEST = [(":method", "POST"), (":scheme", "http"), (":path", "/a.B/C"), ("content-type", "application/grpc")]
OPENING = f.PREFACE + f.settings([])


class Frame(NamedTuple):
    kind: int
    flags: int
    stream: int
    payload: bytes


def frames(raw: bytes) -> list[Frame]:
    """Decode whole frames. Bytes after them are an error."""
    found: list[Frame] = []
    at = 0
    while at < len(raw):
        high, low, kind, flags, stream = HEAD.unpack_from(raw, at)
        end = at + HEAD_BYTES + (high << 8 | low)
        assert end <= len(raw), "half a frame was sent"
        found.append(Frame(kind, flags, stream, raw[at + HEAD_BYTES : end]))
        at = end
    return found


def prefixed(message: bytes) -> bytes:
    """Return a gRPC message with its length prefix."""
    return prefix(message) + message


def headers(stream: int, fields: list[Field] = REQUEST, *, ends: bool = False) -> bytes:
    return f.frame(f.HEADERS, f.END_HEADERS | (f.END_STREAM if ends else 0), stream, encode(fields))


def data(stream: int, content: bytes, *, ends: bool = False) -> bytes:
    return f.frame(f.DATA, f.END_STREAM if ends else 0, stream, content)


class Clock:
    def __init__(self) -> None:
        self.now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


def served(clock: Clock | None = None, **given: Any) -> Connection[list[Field]]:
    """Return a server connection that a client has opened."""
    core: Connection[list[Field]] = Connection(HeaderCache(list), clock_s=clock or Clock(), **given)
    core.take()
    assert core.receive(OPENING) == []
    assert frames(core.take()) == [Frame(f.SETTINGS, f.ACK, 0, b"")]
    return core


def goaway(raw: bytes) -> Code | None:
    """Return the error code of GOAWAY; None if the connection was not ended."""
    for frame in frames(raw):
        if frame.kind == f.GOAWAY:
            return Code(f.goaway_of(frame.payload)[1])
    return None


def resets(raw: bytes) -> dict[int, Code]:
    """Return reset streams with their error codes."""
    return {each.stream: Code(f.u32(each.payload)) for each in frames(raw) if each.kind == f.RST_STREAM}
