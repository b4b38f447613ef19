"""Encoding and decoding of methods, derived from the table in methods.py.

    method frame payload   | class u16 | method u16 | argument ... |

    bit        consecutive bits share octets, the first in the lowest bit
    octet u8   short u16   long u32   longlong u64
    shortstr   length u8, UTF-8
    longstr    length u32, bytes
    table      `broker/message/amqp_table.py`

A decoder must consume the payload exactly. A truncated payload or bytes after the last argument are malformed.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from functools import cache
from itertools import groupby
from struct import Struct
from typing import Any, Final, TypeAlias

from basaltmq.broker.message import amqp_table
from basaltmq.errors import MalformedTableError
from basaltmq.protocols.amqp091.wire.errors import FRAME_ERROR, SYNTAX_ERROR, ConnectionFault, LocalProtocolError
from basaltmq.protocols.amqp091.wire.frames import METHOD, encode_frame
from basaltmq.protocols.amqp091.wire.methods import ALL, Method

Reader: TypeAlias = Callable[[bytes, int, list[Any]], int]
Writer: TypeAlias = Callable[[list[Any], list[bytes]], None]

_ID: Final = Struct(">HH")
_U32: Final = Struct(">I")
_NUMBERS: Final = {"octet": Struct(">B"), "short": Struct(">H"), "long": Struct(">I"), "longlong": Struct(">Q")}


class _TruncatedError(Exception):
    """An argument extends beyond the payload."""


class Codec:
    """Codec of one method."""

    __slots__ = ("_names", "_prefix", "_steps", "cls")

    def __init__(self, cls: type[Method]) -> None:
        self.cls = cls
        self._prefix = _ID.pack(*cls.number)
        self._names = cls.__struct_fields__
        kinds = [cls.__annotations__[name].lower() for name in self._names]
        self._steps: list[tuple[Reader, Writer]] = []
        for kind, run in groupby(kinds):
            count = len(list(run))
            self._steps += [_bits(count)] if kind == "bit" else [_STEPS[kind]] * count

    def decode(self, payload: bytes) -> Method:
        values: list[Any] = []
        at = _ID.size
        try:
            for read, _ in self._steps:
                at = read(payload, at, values)
        except (_TruncatedError, IndexError, struct.error):
            raise self._malformed(f"the payload of {len(payload)} bytes is too short") from None
        except UnicodeDecodeError:
            raise self._malformed("a short string is not UTF-8") from None
        except MalformedTableError as error:
            raise self._malformed(str(error), SYNTAX_ERROR) from None
        if at != len(payload):
            raise self._malformed(f"{len(payload) - at} bytes follow the last argument")
        return self.cls(*values)

    def _malformed(self, why: str, code: int = FRAME_ERROR) -> ConnectionFault:
        return ConnectionFault(code, f"malformed {name_of(self.cls)}: {why}", self.cls.number)

    def encode(self, method: Method) -> bytes:
        values = [getattr(method, name) for name in reversed(self._names)]
        parts = [self._prefix]
        try:
            for _, write in self._steps:
                write(values, parts)
        except (struct.error, MalformedTableError, TypeError, AttributeError) as error:
            raise LocalProtocolError(f"{method!r:.200} cannot be sent: {error}") from None
        return b"".join(parts)


def _number(kind: str) -> tuple[Reader, Writer]:
    form = _NUMBERS[kind]

    def read(payload: bytes, at: int, values: list[Any]) -> int:
        values.append(form.unpack_from(payload, at)[0])
        return at + form.size

    def write(values: list[Any], parts: list[bytes]) -> None:
        parts.append(form.pack(values.pop()))

    return read, write


def _bits(count: int) -> tuple[Reader, Writer]:
    octets = (count + 7) // 8

    def read(payload: bytes, at: int, values: list[Any]) -> int:
        if at + octets > len(payload):
            raise _TruncatedError
        bits = int.from_bytes(payload[at : at + octets], "little")
        values.extend(bool(bits >> place & 1) for place in range(count))
        return at + octets

    def write(values: list[Any], parts: list[bytes]) -> None:
        bits = 0
        for place in range(count):
            bits |= bool(values.pop()) << place
        parts.append(bits.to_bytes(octets, "little"))

    return read, write


def _read_shortstr(payload: bytes, at: int, values: list[Any]) -> int:
    start = at + 1
    end = start + payload[at]
    if end > len(payload):
        raise _TruncatedError
    values.append(payload[start:end].decode())
    return end


def _write_shortstr(values: list[Any], parts: list[bytes]) -> None:
    text = values.pop().encode()
    parts.append(_NUMBERS["octet"].pack(len(text)) + text)


def _read_longstr(payload: bytes, at: int, values: list[Any]) -> int:
    start = at + 4
    end = start + int(_U32.unpack_from(payload, at)[0])
    if end > len(payload):
        raise _TruncatedError
    values.append(payload[start:end])
    return end


def _write_longstr(values: list[Any], parts: list[bytes]) -> None:
    text = values.pop()
    parts.append(_U32.pack(len(text)) + text)


def _read_table(payload: bytes, at: int, values: list[Any]) -> int:
    table, end = amqp_table.decode(payload, at)
    values.append(table)
    return end


def _write_table(values: list[Any], parts: list[bytes]) -> None:
    parts.append(amqp_table.encode(values.pop()))


_STEPS: Final[dict[str, tuple[Reader, Writer]]] = {kind: _number(kind) for kind in _NUMBERS} | {
    "shortstr": (_read_shortstr, _write_shortstr),
    "longstr": (_read_longstr, _write_longstr),
    "table": (_read_table, _write_table),
}


@cache
def codecs() -> dict[int, Codec]:
    """Return the codecs of all methods by `class id << 16 | method id`."""
    return {cls.number[0] << 16 | cls.number[1]: Codec(cls) for cls in ALL}


@cache
def _encoders() -> dict[type[Method], Codec]:
    return {codec.cls: codec for codec in codecs().values()}


@cache
def name_of(cls: type[Method]) -> str:
    """Return a method's name as in the specification, for example `queue.declare-ok`."""
    words = "".join(f" {letter.lower()}" if letter.isupper() else letter for letter in cls.__name__).split()
    return f"{words[0]}.{'-'.join(words[1:])}"


def encode_payload(method: Method) -> bytes:
    """Encode a method as a frame payload."""
    return _encoders()[type(method)].encode(method)


def encode_method(channel: int, method: Method) -> bytes:
    """Encode a method as a complete frame."""
    return encode_frame(METHOD, channel, encode_payload(method))
