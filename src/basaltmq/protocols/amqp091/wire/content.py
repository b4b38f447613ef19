"""Assembly of a published message: method, header frame, and body frames up to the announced size."""

from __future__ import annotations

from basaltmq.protocols.amqp091.wire.errors import FRAME_ERROR, UNEXPECTED_FRAME, ConnectionFault
from basaltmq.protocols.amqp091.wire.frames import BASIC_CLASS, CONTENT_FIXED_BYTES, CONTENT_HEAD, HEAD_BYTES
from basaltmq.protocols.amqp091.wire.methods import BasicPublish
from basaltmq.protocols.amqp091.wire.states import OPEN, ChannelPhase
from basaltmq.protocols.frame_buffer import add_part


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
        self.pieces: list[bytes] = []

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

    def body(self, piece: bytes) -> bool:
        """Add a body frame. Return whether the body is complete."""
        if self.properties is None:
            raise self._unexpected("a content body")
        self.got_bytes += len(piece)
        if self.got_bytes > self.body_bytes:
            raise ConnectionFault(
                FRAME_ERROR,
                f"the body frames on channel {self.number} exceed the announced {self.body_bytes} bytes",
            )
        add_part(self.pieces, piece)
        return self.got_bytes == self.body_bytes

    def take(self) -> tuple[BasicPublish, bytes, bytes]:
        """Return the complete content, and open the channel for the next method."""
        method, properties, pieces = self.method, self.properties, self.pieces
        assert method is not None
        assert properties is not None
        self.drop()
        self.phase = OPEN
        return method, properties, pieces[0] if len(pieces) == 1 else b"".join(pieces)

    def drop(self) -> None:
        """Discard an incomplete content."""
        self.method = self.properties = None
        self.body_bytes = self.got_bytes = 0
        self.pieces = []

    def _unexpected(self, what: str) -> ConnectionFault:
        due = "a method" if self.method is None else "a content header" if self.properties is None else "a content body"
        return ConnectionFault(UNEXPECTED_FRAME, f"{what} on channel {self.number}, expected {due}")
