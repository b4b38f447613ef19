"""What a connection tells of, in the order it happened."""

from __future__ import annotations

from typing import Generic, TypeAlias, TypeVar

from basaltmq.protocols.grpc.http2.stream import Stream

F = TypeVar("F")

Chunk: TypeAlias = "bytes | memoryview[int]"
"""Content of some size is a view of what was read, which stays in memory as long as the view does."""


class Headers(Generic[F]):
    """Header fields of a stream arrived, in the form the connection was told to give them."""

    __slots__ = ("fields", "has_ended", "stream")

    def __init__(self, stream: Stream, fields: F, has_ended: bool) -> None:
        self.stream = stream
        self.fields = fields
        self.has_ended = has_ended


class Data:
    """A part of a stream's content. Whoever is done with it says so with `Connection.consumed`."""

    __slots__ = ("chunk", "has_ended", "size_bytes", "stream")

    def __init__(self, stream: Stream, chunk: Chunk, size_bytes: int, has_ended: bool) -> None:
        self.stream = stream
        self.chunk = chunk
        self.size_bytes = size_bytes
        """What it took of the window, padding included."""
        self.has_ended = has_ended


class Reset:
    """A stream ended before its time: the other side gave it up, or broke a rule on it."""

    __slots__ = ("code", "stream", "text")

    def __init__(self, stream: Stream, code: int, text: str = "") -> None:
        self.stream = stream
        self.code = code
        self.text = text


class Writable:
    """All that was given to a stream to send, and waited for the other side's window, is on its way."""

    __slots__ = ("stream",)

    def __init__(self, stream: Stream) -> None:
        self.stream = stream


class PingAnswered:
    """The other side lives."""

    __slots__ = ()


class Leaving:
    """The other side takes no streams above `last_stream`."""

    __slots__ = ("code", "last_stream", "text")

    def __init__(self, last_stream: int, code: int, text: str) -> None:
        self.last_stream = last_stream
        self.code = code
        self.text = text


class Broken:
    """The connection is over; what is to be sent says why. Nothing comes after it."""

    __slots__ = ("code", "text")

    def __init__(self, code: int, text: str) -> None:
        self.code = code
        self.text = text


Event = Headers[F] | Data | Reset | Writable | PingAnswered | Leaving | Broken
