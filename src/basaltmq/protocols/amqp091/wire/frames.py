"""AMQP 0-9-1 frames.

    | type u8 | channel u16 | payload bytes u32 | payload | end 0xCE |

    type 1 method       | class u16 | method u16 | arguments |
         2 header       | class u16 | weight u16 = 0 | body bytes u64 | property flags and properties |
         3 body         | part of the body |
         8 heartbeat    empty, channel 0

A connection starts with an eight-byte protocol header, which is not a frame. The server responds to any other header
with its own and closes the connection.
"""

from __future__ import annotations

from collections.abc import Sequence
from struct import Struct
from typing import Final

PROTOCOL_HEADER: Final = b"AMQP\0\0\x09\x01"

METHOD: Final = 1
HEADER: Final = 2
BODY: Final = 3
HEARTBEAT: Final = 8

END: Final = 0xCE
END_BYTE: Final = b"\xce"

HEAD: Final = Struct(">BHI")
HEAD_BYTES: Final = HEAD.size
OVERHEAD_BYTES: Final = HEAD_BYTES + 1
"""Bytes that a frame adds to its payload."""

CONTENT_HEAD: Final = Struct(">BHIHHQ")
"""A header frame up to its properties."""

CONTENT_FIXED_BYTES: Final = 12
"""Bytes of class, weight and body size, which precede the properties in a header frame."""

BASIC_CLASS: Final = 60
"""The only class with content."""

FRAME_BYTES_MIN: Final = 4096
"""Frame size that both sides must accept. A lower limit cannot be negotiated."""

HEARTBEAT_FRAME: Final = HEAD.pack(HEARTBEAT, 0, 0) + END_BYTE


def encode_frame(kind: int, channel: int, payload: bytes) -> bytes:
    return HEAD.pack(kind, channel, len(payload)) + payload + END_BYTE


def body_frames(channel: int, body: bytes, piece_bytes: int) -> list[bytes | memoryview[int]]:
    """Return the frames of a body with views of it. The end of a frame and the head of the next are one part."""
    view = memoryview(body)
    parts: list[bytes | memoryview[int]] = []
    before = b""
    for at in range(0, len(body), piece_bytes):
        piece = view[at : at + piece_bytes]
        parts += (before + HEAD.pack(BODY, channel, len(piece)), piece)
        before = END_BYTE
    parts.append(before)
    return parts


def encode_content(
    channel: int, properties: bytes, body: bytes, frame_bytes_max: int
) -> Sequence[bytes | memoryview[int]]:
    """Encode header and body frames of a content. The body is split at the peer's frame size."""
    size = CONTENT_FIXED_BYTES + len(properties)
    header = CONTENT_HEAD.pack(HEADER, channel, size, BASIC_CLASS, 0, len(body)) + properties + END_BYTE
    piece_bytes = frame_bytes_max - OVERHEAD_BYTES
    if len(body) <= piece_bytes:
        return (header, HEAD.pack(BODY, channel, len(body)), body, END_BYTE) if body else (header,)
    return [header, *body_frames(channel, body, piece_bytes)]
