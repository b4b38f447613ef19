"""The events that a connection reports, in the order in which they occurred."""

from __future__ import annotations

from typing import Generic, TypeAlias, TypeVar

from basaltmq.protocols.grpc.http2.stream import Stream

F = TypeVar("F")

Chunk: TypeAlias = "bytes | memoryview[int]"
"""Content of a stream. Large content is a view of the read buffer, which stays in memory as long as the view."""


class Headers(Generic[F]):
    """Parsed header fields of a stream arrived."""

    __slots__ = ("fields", "has_ended", "stream")

    def __init__(self, stream: Stream, fields: F, has_ended: bool) -> None:
        self.stream = stream
        self.fields = fields
        self.has_ended = has_ended


class Data:
    """Content of a stream arrived. The receiver must call `Connection.consumed` when it has processed it."""

    __slots__ = ("chunk", "has_ended", "size_bytes", "stream")

    def __init__(self, stream: Stream, chunk: Chunk, size_bytes: int, has_ended: bool) -> None:
        self.stream = stream
        self.chunk = chunk
        self.size_bytes = size_bytes
        """Bytes charged to the window, including padding."""
        self.has_ended = has_ended


class Reset:
    """A stream ended early: the peer reset it, or violated the protocol on it."""

    __slots__ = ("code", "stream", "text")

    def __init__(self, stream: Stream, code: int, text: str = "") -> None:
        self.stream = stream
        self.code = code
        self.text = text


class Writable:
    """All data of a stream that waited for the peer's window has been sent."""

    __slots__ = ("stream",)

    def __init__(self, stream: Stream) -> None:
        self.stream = stream


class PingAcked:
    """The peer acknowledged a PING."""

    __slots__ = ()


class GoAway:
    """The peer sent GOAWAY and processes no streams above `last_stream`."""

    __slots__ = ("code", "last_stream", "text")

    def __init__(self, last_stream: int, code: int, text: str) -> None:
        self.last_stream = last_stream
        self.code = code
        self.text = text


class ConnectionFailed:
    """The connection failed and reports no more events. The output still holds a GOAWAY with the reason."""

    __slots__ = ("code", "text")

    def __init__(self, code: int, text: str) -> None:
        self.code = code
        self.text = text


Event = Headers[F] | Data | Reset | Writable | PingAcked | GoAway | ConnectionFailed
