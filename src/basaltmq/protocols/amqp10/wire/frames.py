"""Frames of AMQP 1.0.

| size u32 | data offset u8, in words | type u8: 0 AMQP, 1 SASL | channel u16 | extended header | body |

transfer  | performative | payload |        an empty body only keeps the connection alive
"""

from __future__ import annotations

from collections.abc import Iterator
from struct import Struct
from typing import Any, Final, NamedTuple

from basaltmq.protocols.amqp10.wire import types as t
from basaltmq.protocols.amqp10.wire.errors import FRAMING_ERROR, Fault
from basaltmq.protocols.frame_buffer import FrameBuffer

HEAD: Final = Struct(">IBBH")
HEAD_BYTES: Final = HEAD.size
FRAME_BYTES_MIN: Final = 512
"""The smallest maximum frame size that a peer may announce."""

AMQP: Final = 0
SASL: Final = 1
HEADER: Final = -1
"""Kind of a protocol header, which is not a frame."""

AMQP_HEADER: Final = b"AMQP\0\1\0\0"
SASL_HEADER: Final = b"AMQP\3\1\0\0"
HEADER_BYTES: Final = 8

EMPTY_FRAME: Final = HEAD.pack(HEAD_BYTES, 2, AMQP, 0)
"""Keeps a connection alive."""


class Frame(NamedTuple):
    """A frame: the body is `raw[at:end]`."""

    kind: int
    channel: int
    raw: bytes
    at: int
    end: int


class FrameReader:
    """Cuts received bytes into frames."""

    __slots__ = ("_buffer", "bytes_max", "wants_header")

    def __init__(self, bytes_max: int) -> None:
        self.bytes_max = bytes_max
        self.wants_header = True
        """Whether a protocol header must come next."""
        self._buffer = FrameBuffer()

    def feed(self, data: bytes) -> Iterator[Frame]:
        """Yield the frames that are complete. All of them must be consumed before the next call."""
        complete = self._buffer.with_next(data)
        if complete is None:
            return
        data, at, end, needed_bytes = complete, 0, len(complete), HEAD_BYTES
        unpack = HEAD.unpack_from
        while end - at >= HEAD_BYTES:
            if self.wants_header:
                self.wants_header = False
                yield Frame(HEADER, 0, data, at, at + HEADER_BYTES)
                at += HEADER_BYTES
                continue
            size, offset, kind, channel = unpack(data, at)
            if size > self.bytes_max:
                raise Fault(FRAMING_ERROR, f"a frame of {size} bytes exceeds the limit of {self.bytes_max}")
            if offset < 2 or offset * 4 > size:
                raise Fault(FRAMING_ERROR, f"a frame of {size} bytes has the data offset {offset}")
            if kind > SASL:
                raise Fault(FRAMING_ERROR, f"unknown frame type {kind}")
            if at + size > end:
                needed_bytes = size
                break
            yield Frame(kind, channel, data, at + offset * 4, at + size)
            at += size
        if at < end:
            self._buffer.keep(data[at:], needed_bytes - (end - at))


def frame(channel: int, body: bytes, kind: int = AMQP) -> bytes:
    """Return a frame."""
    return HEAD.pack(HEAD_BYTES + len(body), 2, kind, channel) + body


_FIELDS_MAX: Final = 11
IS_ACCEPTED: Final = t.Described(t.Ulong(0x24), [])
"""What `read_fields` returns for the outcome accepted: always the same object."""


def quick_descriptor(raw: bytes, at: int) -> int:
    """Return the descriptor of a performative with the usual encoding, otherwise 0."""
    return raw[at + 2] if raw[at : at + 2] == b"\0\x53" and len(raw) > at + 3 else 0


def read_fields(raw: bytes, at: int, end: int) -> tuple[list[Any], int]:
    """Decode the list of fields of a performative whose descriptor was read, without building objects for the usual
    types. Return 11 fields, missing ones as None, and the position after the list."""
    fields: list[Any] = [None] * _FIELDS_MAX
    if at >= end:
        raise t.malformed("a performative has no fields")
    code = raw[at]
    if code == 0x45:
        return fields, at + 1
    if code not in (0xC0, 0xD0):
        raise t.malformed("the fields of a performative must be a list")
    count, at, stop = t.compound(raw, code, at + 1, end)
    if count > _FIELDS_MAX:
        raise t.malformed(f"a performative has {count} fields, at most {_FIELDS_MAX} are defined")
    try:
        for number in range(count):
            code = raw[at]
            at += 1
            if code == 0x52 or code == 0x50 or code == 0x53:
                fields[number] = raw[at]
                at += 1
            elif code == 0x43 or code == 0x44:
                fields[number] = 0
            elif code == 0x70:
                fields[number] = int.from_bytes(raw[at : at + 4], "big")
                at += 4
            elif code == 0x41:
                fields[number] = True
            elif code == 0x42:
                fields[number] = False
            elif code == 0xA0:
                start = at + 1
                at = start + raw[at]
                fields[number] = raw[start:at]
            elif code == 0 and raw[at : at + 3] == b"\x53\x24\x45":
                fields[number] = IS_ACCEPTED
                at += 3
            elif code != 0x40:
                fields[number], at = t.decode(raw, at - 1, stop, 1)
    except IndexError:
        raise t.malformed("a performative breaks off") from None
    if at != stop:
        raise t.malformed("the fields of a performative do not fill its list")
    return fields, stop


_TRANSFER_HEAD: Final = Struct(">IBBH3sBBBBIBIBB")
_TRANSFER_TAIL: Final = (b"\x43\x42\x42", b"\x43\x41\x42", b"\x43\x42\x41", b"\x43\x41\x41")
"""Message format 0, settled, more; by settled + 2 * more."""

_FIXED_BYTES: Final = _TRANSFER_HEAD.size + 3


def transfer_bytes(tag: bytes) -> int:
    """Return the size of a transfer frame without its payload."""
    return _FIXED_BYTES + len(tag)


def encode_transfer(
    out: list[bytes], channel: int, handle: int, delivery_id: int, tag: bytes, payload_bytes: int, flags: int
) -> None:
    """Append the head of a transfer frame whose payload follows. `flags` is settled + 2 * more."""
    tag_bytes = len(tag)
    out.append(
        _TRANSFER_HEAD.pack(
            _FIXED_BYTES + tag_bytes + payload_bytes,
            2,
            AMQP,
            channel,
            b"\0\x53\x14",
            0xC0,
            16 + tag_bytes,
            6,
            0x70,
            handle,
            0x70,
            delivery_id,
            0xA0,
            tag_bytes,
        )
        + tag
        + _TRANSFER_TAIL[flags]
    )


ACCEPTED: Final = b"\0\x53\x24\x45"


def encode_disposition(
    channel: int, *, is_receiver: bool, first: int, last: int, is_settled: bool, state: bytes
) -> bytes:
    """Return a disposition frame. `state` is an encoded outcome."""
    body = b"\0\x53\x15" + t.encode_compound(
        0xC0,
        5,
        b"".join(
            (
                b"\x41" if is_receiver else b"\x42",
                t.encode_uint(first),
                t.encode_uint(last),
                b"\x41" if is_settled else b"\x42",
                state,
            )
        ),
    )
    return frame(channel, body)
