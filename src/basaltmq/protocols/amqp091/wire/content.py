"""Assembly of a published message: method, header frame, and body frames up to the announced size.

A body is copied once. Large pieces stay views of the socket reads that they arrived in until the body is complete.
"""

from __future__ import annotations

from typing import Final, TypeAlias

from basaltmq.protocols.amqp091.wire.errors import FRAME_ERROR, UNEXPECTED_FRAME, ConnectionFault
from basaltmq.protocols.amqp091.wire.frames import BASIC_CLASS, CONTENT_FIXED_BYTES, CONTENT_HEAD, HEAD_BYTES
from basaltmq.protocols.amqp091.wire.methods import BasicPublish
from basaltmq.protocols.amqp091.wire.states import OPEN, ChannelPhase
from basaltmq.protocols.frame_buffer import add_part

Piece: TypeAlias = "bytes | memoryview[int]"

VIEW_SHARE: Final = 4
"""A piece of at least a quarter of its read is a view. A view keeps the whole read in memory."""

VIEW_BYTES_MIN: Final = 4096
"""A view of fewer bytes costs as much as a copy."""


def piece_of(data: bytes, at: int, stop: int) -> Piece:
    """Return a part of a read without a copy if it is large."""
    if stop - at >= VIEW_BYTES_MIN and (stop - at) * VIEW_SHARE >= len(data):
        return memoryview(data)[at:stop]
    return data[at:stop]


class OpenFrame:
    """The payload of a body frame whose end has not arrived."""

    __slots__ = ("missing_bytes", "number", "pieces", "size")

    def __init__(self, number: int, size: int) -> None:
        self.number = number
        """The channel."""
        self.size = self.missing_bytes = size
        self.pieces: list[Piece] = []

    def add(self, data: bytes, at: int) -> int:
        """Take bytes from `at` on. Return the position after them."""
        stop = min(len(data), at + self.missing_bytes)
        if stop > at:
            add_part(self.pieces, piece_of(data, at, stop))
            self.missing_bytes -= stop - at
        return stop


class ChannelState:
    """Protocol state of one channel, with the content that is being received."""

    __slots__ = ("body_bytes", "got_bytes", "method", "number", "phase", "pieces", "properties")

    def __init__(self, number: int) -> None:
        self.number = number
        self.phase: ChannelPhase = OPEN
        self.method: BasicPublish | None = None
        self.properties: bytes | None = None
        self.body_bytes = 0
        self.got_bytes = 0
        self.pieces: list[Piece] = []

    def header(self, data: bytes, at: int, stop: int) -> int:
        """Read the header frame at `at` whose payload ends at `stop`. Return the announced body size in bytes."""
        if self.method is None or self.properties is not None:
            raise self._unexpected("a content header")
        if stop - at < HEAD_BYTES + CONTENT_FIXED_BYTES + 2:
            raise ConnectionFault(FRAME_ERROR, f"a content header of {stop - at - HEAD_BYTES} bytes is too short")
        _, _, _, class_id, weight, body_bytes = CONTENT_HEAD.unpack_from(data, at)
        if class_id != BASIC_CLASS:
            raise ConnectionFault(
                UNEXPECTED_FRAME, f"a content header of class {class_id} follows a method of class {BASIC_CLASS}"
            )
        if weight:
            raise ConnectionFault(UNEXPECTED_FRAME, f"content header with weight {weight}; expected 0")
        self.properties = data[at + CONTENT_HEAD.size : stop]
        self.body_bytes = int(body_bytes)
        return self.body_bytes

    def body(self, pieces: list[Piece], size: int) -> bool:
        """Add a body frame of `size` bytes. Return whether the body is complete."""
        if self.properties is None:
            raise self._unexpected("a content body")
        self.got_bytes += size
        if self.got_bytes > self.body_bytes:
            raise ConnectionFault(
                FRAME_ERROR,
                f"the body frames on channel {self.number} exceed the announced {self.body_bytes} bytes",
            )
        for piece in pieces:
            add_part(self.pieces, piece)
        return self.got_bytes == self.body_bytes

    def take(self) -> tuple[BasicPublish, bytes, bytes]:
        """Return the complete content, and open the channel for the next method."""
        method, properties, pieces = self.method, self.properties, self.pieces
        assert method is not None
        assert properties is not None
        self.drop()
        self.phase = OPEN
        return method, properties, bytes(pieces[0]) if len(pieces) == 1 else b"".join(pieces)

    def drop(self) -> None:
        """Discard an incomplete content."""
        self.method = self.properties = None
        self.body_bytes = self.got_bytes = 0
        self.pieces = []

    def _unexpected(self, what: str) -> ConnectionFault:
        due = "a method" if self.method is None else "a content header" if self.properties is None else "a content body"
        return ConnectionFault(UNEXPECTED_FRAME, f"{what} on channel {self.number}, expected {due}")
