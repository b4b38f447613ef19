"""Encoding of HTTP/2 frames (RFC 9113).

    +-----------------------------------------------+
    |                length u24                     |
    +---------------+---------------+---------------+
    |    type u8    |   flags u8    |
    +-+-------------+---------------+---------------+
    |R|               stream u31                    |
    +-+---------------------------------------------+
    |                payload (length)             ...

`Connection` decides what a frame means and whether it is allowed.
"""

from __future__ import annotations

import enum
from collections.abc import Iterable
from struct import Struct
from typing import Final

PREFACE: Final = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
"""The first bytes that a client sends."""

HEAD: Final = Struct(">HBBBI")
"""Frame header: length (16 high bits, 8 low bits), type, flags, stream id."""

HEAD_BYTES: Final = HEAD.size
_SETTING: Final = Struct(">HI")
_U32: Final = Struct(">I")
_GOAWAY: Final = Struct(">II")

FRAME_BYTES_MIN: Final = 16_384
"""The smallest permitted MAX_FRAME_SIZE: every peer accepts payloads of this size."""

FRAME_BYTES_ACCEPTED: Final = 256 << 10
"""Our MAX_FRAME_SIZE, and the largest frame we send. A batch of 100 messages of 1 KB is then one frame, not seven.
The limit bounds memory, because an incomplete frame is buffered. It also bounds head-of-line blocking: a frame takes
20 ms at 100 Mbit/s."""

FRAME_BYTES_MAX: Final = (1 << 24) - 1
WINDOW_MAX: Final = (1 << 31) - 1
WINDOW_DEFAULT: Final = 65_535
STREAM_MAX: Final = (1 << 31) - 1

DATA: Final = 0
HEADERS: Final = 1
PRIORITY: Final = 2
RST_STREAM: Final = 3
SETTINGS: Final = 4
PUSH_PROMISE: Final = 5
PING: Final = 6
GOAWAY: Final = 7
WINDOW_UPDATE: Final = 8
CONTINUATION: Final = 9

END_STREAM: Final = 0x1
ACK: Final = 0x1
END_HEADERS: Final = 0x4
PADDED: Final = 0x8
PRIORITIZED: Final = 0x20


class Setting(enum.IntEnum):
    HEADER_TABLE_SIZE = 1
    ENABLE_PUSH = 2
    MAX_CONCURRENT_STREAMS = 3
    INITIAL_WINDOW_SIZE = 4
    MAX_FRAME_SIZE = 5
    MAX_HEADER_LIST_SIZE = 6


class Code(enum.IntEnum):
    NO_ERROR = 0
    PROTOCOL_ERROR = 1
    INTERNAL_ERROR = 2
    FLOW_CONTROL_ERROR = 3
    SETTINGS_TIMEOUT = 4
    STREAM_CLOSED = 5
    FRAME_SIZE_ERROR = 6
    REFUSED_STREAM = 7
    CANCEL = 8
    COMPRESSION_ERROR = 9
    CONNECT_ERROR = 10
    ENHANCE_YOUR_CALM = 11
    INADEQUATE_SECURITY = 12
    HTTP_1_1_REQUIRED = 13


SETTINGS_ACK: Final = HEAD.pack(0, 0, SETTINGS, ACK, 0)


def frame(kind: int, flags: int, stream: int, payload: bytes = b"") -> bytes:
    return head(len(payload), kind, flags, stream) + payload


def head(length: int, kind: int, flags: int, stream: int) -> bytes:
    """Return the frame header of a payload of this length."""
    return HEAD.pack(length >> 8, length & 0xFF, kind, flags, stream)


def settings(given: Iterable[tuple[int, int]]) -> bytes:
    return frame(SETTINGS, 0, 0, b"".join([_SETTING.pack(number, value) for number, value in given]))


def settings_of(payload: bytes) -> list[tuple[int, int]]:
    """Return the (number, value) pairs of a SETTINGS payload, whose length must be a multiple of 6."""
    return list(_SETTING.iter_unpack(payload))


def window_update(stream: int, by: int) -> bytes:
    return frame(WINDOW_UPDATE, 0, stream, _U32.pack(by))


def rst_stream(stream: int, code: int) -> bytes:
    return frame(RST_STREAM, 0, stream, _U32.pack(code))


def ping(payload: bytes, *, is_ack: bool = False) -> bytes:
    return frame(PING, ACK if is_ack else 0, 0, payload)


def goaway(last_stream: int, code: int, text: str = "") -> bytes:
    return frame(GOAWAY, 0, 0, _GOAWAY.pack(last_stream, code) + text.encode())


def goaway_of(payload: bytes) -> tuple[int, int, str]:
    """Return the last stream id, the code and the text of a GOAWAY payload of at least 8 bytes."""
    last, code = _GOAWAY.unpack_from(payload)
    return last & STREAM_MAX, code, payload[_GOAWAY.size :].decode("utf-8", "replace")


def u32(payload: bytes) -> int:
    number: int = _U32.unpack_from(payload)[0]
    return number
