"""Data types of MQTT (section 1.5): integers, variable byte integers, strings, binary data.

    two byte integer        | u16 |                    big-endian
    four byte integer       | u32 |
    variable byte integer   | 7 bits + more flag | ... 1 to 4 bytes, least significant group first
    UTF-8 string            | length u16 | bytes |     no U+0000, no surrogates
    binary data             | length u16 | bytes |

Readers take the data, the position and the end of the packet. They return the value and the next position. They raise
MalformedPacket if the value crosses the end.
"""

from __future__ import annotations

from struct import Struct as Layout
from typing import Final

from basaltmq.protocols.mqtt.wire import reason_codes as rc
from basaltmq.protocols.mqtt.wire.errors import MalformedPacket

U16: Final = Layout(">H")
U32: Final = Layout(">I")

FIELD_BYTES_MAX: Final = 65_535
"""Largest string or binary field."""

VARINT_BYTES_MAX: Final = 4


def malformed(text: str) -> MalformedPacket:
    return MalformedPacket(rc.MALFORMED_PACKET, text)


def read_byte(data: bytes, at: int, end: int) -> tuple[int, int]:
    if at >= end:
        raise malformed("the packet ends before a byte field")
    return data[at], at + 1


def read_u16(data: bytes, at: int, end: int) -> tuple[int, int]:
    after = at + 2
    if after > end:
        raise malformed("the packet ends inside a two byte integer")
    return data[at] << 8 | data[at + 1], after


def read_u32(data: bytes, at: int, end: int) -> tuple[int, int]:
    after = at + 4
    if after > end:
        raise malformed("the packet ends inside a four byte integer")
    return int.from_bytes(data[at:after]), after


def read_varint(data: bytes, at: int, end: int) -> tuple[int, int]:
    """Read a variable byte integer of MQTT 5.0, which must have the shortest form."""
    value = 0
    for index in range(VARINT_BYTES_MAX):
        if at >= end:
            raise malformed("the packet ends inside a variable byte integer")
        byte = data[at]
        at += 1
        value |= (byte & 0x7F) << 7 * index
        if byte < 0x80:
            if not byte and index:
                raise malformed("a variable byte integer is longer than necessary")
            return value, at
    raise malformed("a variable byte integer has more than 4 bytes")


def read_binary(data: bytes, at: int, end: int) -> tuple[bytes, int]:
    begin = at + 2
    if begin > end:
        raise malformed("the packet ends inside the length of a field")
    after = begin + (data[at] << 8 | data[at + 1])
    if after > end:
        raise malformed(f"a field of {after - begin} bytes crosses the end of the packet")
    return data[begin:after], after


def read_text(data: bytes, at: int, end: int) -> tuple[str, int]:
    raw, after = read_binary(data, at, end)
    return text_of(raw), after


def text_of(raw: bytes) -> str:
    """Decode a UTF-8 string. The codec of Python rejects surrogates and overlong forms, and keeps U+FEFF."""
    try:
        text = raw.decode()
    except UnicodeDecodeError as error:
        raise malformed(f"a string is not valid UTF-8: {error.reason} at byte {error.start}") from None
    if "\0" in text:
        raise malformed("a string contains U+0000")
    return text


def write_binary(raw: bytes) -> bytes:
    assert len(raw) <= FIELD_BYTES_MAX, f"a field of {len(raw)} bytes does not fit; the limit is {FIELD_BYTES_MAX}"
    return U16.pack(len(raw)) + raw


def write_text(text: str) -> bytes:
    return write_binary(text.encode())
