"""Codec for AMQP 0-9-1 field tables, in RabbitMQ's dialect.

    table  | bytes u32 | field ...            field  | name: length u8, bytes | value |
    array  | bytes u32 | value ...            value  | kind u8 | content, by kind |

      kind                        in Python           kind                       in Python
      t  boolean u8               bool                f  float                   float
      b  i8    B  u8              int                 d  double                  float
      s  i16   u  u16             int                 D  scale u8, i32           decimal.Decimal
      I  i32   i  u32             int                 S  text: bytes u32, ...    str (bytes, if not UTF-8)
      l  i64   L  i64             int                 x  bytes: bytes u32, ...   bytes
      T  seconds u64              Timestamp           V  nothing                 None
      A  array                    list                F  table                   dict

The letters differ from the published specification where RabbitMQ does (`s` is a short integer, not a short string).
Some clients send `L`, which the specification calls a long integer.

Decoding and re-encoding keeps values but not the width of integers. `edit` changes single fields of a table and keeps
every other field byte for byte. `check` validates a table without building it: a table that passes can be decoded and
sent to other clients.

Tables nest at most `DEPTH_MAX` deep. The frame that carries a table bounds its size.
"""

from __future__ import annotations

import decimal
import struct
from collections.abc import Mapping, Sequence
from decimal import Decimal
from struct import Struct
from typing import Final, TypeAlias

from basaltmq.errors import MalformedTableError

DEPTH_MAX: Final = 32
"""Deeper than any client needs (x-death has three levels) and far below Python's recursion limit."""

NAME_BYTES_MAX: Final = 255
"""Length of a short string. The specification allows 128 bytes, RabbitMQ 255."""

Value: TypeAlias = (
    "bool | int | float | str | bytes | Decimal | Timestamp | Long | Sequence[Value] | Mapping[str, Value] | None"
)
Table: TypeAlias = "dict[str, Value]"

EMPTY: Final = b"\0\0\0\0"
"""An encoded table without fields."""


class Timestamp(int):
    """Seconds since 1970."""

    __slots__ = ()


class Long(int):
    """An integer that is always encoded with 64 bits."""

    __slots__ = ()


_U32: Final = Struct(">I")
_DECIMAL: Final = Struct(">Bi")

_NUMBERS: Final = {
    ord(kind): Struct(">" + form)
    for kind, form in {
        "b": "b",
        "B": "B",
        "s": "h",
        "u": "H",
        "I": "i",
        "i": "I",
        "l": "q",
        "L": "q",
        "f": "f",
        "d": "d",
    }.items()
}
_TIMESTAMP: Final = Struct(">Q")

_SIZES: Final = {kind: form.size for kind, form in _NUMBERS.items()} | {
    ord("t"): 1,
    ord("T"): _TIMESTAMP.size,
    ord("D"): _DECIMAL.size,
    ord("V"): 0,
}
"""Content size in bytes of fixed-size kinds."""

_SIZED: Final = frozenset(b"SxAF")
"""Kinds whose content begins with its size."""

_T, _I, _LL, _D, _S, _X, _TT, _V, _A, _F, _DD = b"tIlDSxTVAFd"
_I32_MIN, _I32_MAX = -(1 << 31), (1 << 31) - 1
_I64_MIN, _I64_MAX = -(1 << 63), (1 << 63) - 1
_DECIMAL_SCALE_MAX: Final = 255


def decode(raw: bytes, at: int = 0, end: int | None = None) -> tuple[Table, int]:
    """Return the table at `at` and the position of its end. Of two fields with the same name, the first is used."""
    return _decode_table(raw, at, len(raw) if end is None else end, 0)


def decode_all(raw: bytes) -> Table:
    """Decode a table that fills all of `raw`."""
    table, end = _decode_table(raw, 0, len(raw), 0)
    if end != len(raw):
        raise MalformedTableError(f"{len(raw) - end} bytes follow a table of {end} bytes")
    return table


def _span(raw: bytes, at: int, end: int, what: str) -> tuple[int, int]:
    """Return start and end of the content whose size is at `at`."""
    if at + 4 > end:
        raise MalformedTableError(f"a {what} breaks off within its size at byte {at}")
    start = at + 4
    stop = start + int(_U32.unpack_from(raw, at)[0])
    if stop > end:
        raise MalformedTableError(
            f"a {what} of {stop - start} bytes at byte {at} exceeds the {end} bytes that contain it"
        )
    return start, stop


def _deeper(depth: int) -> int:
    if depth >= DEPTH_MAX:
        raise MalformedTableError(f"tables and arrays are nested deeper than {DEPTH_MAX}")
    return depth + 1


def _decode_table(raw: bytes, at: int, end: int, depth: int) -> tuple[Table, int]:
    at, stop = _span(raw, at, end, "table")
    depth = _deeper(depth)
    table: Table = {}
    while at < stop:
        name_end = at + 1 + raw[at]
        if name_end >= stop:
            raise MalformedTableError(f"a table breaks off in a field's name at byte {at}")
        try:
            name = raw[at + 1 : name_end].decode()
        except UnicodeDecodeError:
            raise MalformedTableError(f"a field's name at byte {at} is not UTF-8") from None
        value, at = _decode_value(raw, name_end, stop, depth)
        table.setdefault(name, value)
    return table, stop


def _decode_value(raw: bytes, at: int, end: int, depth: int) -> tuple[Value, int]:
    kind = raw[at]
    at += 1
    form = _NUMBERS.get(kind)
    if form is not None:
        stop = at + form.size
        if stop > end:
            raise _cut(kind, at)
        number: int | float = form.unpack_from(raw, at)[0]
        return number, stop
    if kind in _SIZED:
        start, stop = _span(raw, at, end, "value")
        if kind == _S:
            text = raw[start:stop]
            try:
                return text.decode(), stop
            except UnicodeDecodeError:
                return text, stop
        if kind == _F:
            return _decode_table(raw, at, end, depth)
        if kind == _A:
            depth = _deeper(depth)
            values = []
            while start < stop:
                value, start = _decode_value(raw, start, stop, depth)
                values.append(value)
            return values, stop
        return raw[start:stop], stop
    size = _SIZES.get(kind)
    if size is None:
        raise MalformedTableError(f"a field at byte {at - 1} has the unknown kind {chr(kind)!r}")
    stop = at + size
    if stop > end:
        raise _cut(kind, at)
    if kind == _T:
        return raw[at] != 0, stop
    if kind == _TT:
        return Timestamp(_TIMESTAMP.unpack_from(raw, at)[0]), stop
    if kind == _D:
        scale, digits = _DECIMAL.unpack_from(raw, at)
        return Decimal(digits).scaleb(-scale), stop
    return None, stop


def _cut(kind: int, at: int) -> MalformedTableError:
    return MalformedTableError(f"a field of kind {chr(kind)!r} breaks off at byte {at}")


def encode(table: Mapping[str, Value]) -> bytes:
    """Encode a table, prefixed with its size."""
    parts: list[bytes] = []
    _encode_fields(table, parts, _deeper(0))
    return _sized(parts)


def _sized(parts: list[bytes]) -> bytes:
    body = b"".join(parts)
    return _U32.pack(len(body)) + body


def encode_name(name: str) -> bytes:
    """Encode a field's name."""
    try:
        raw = name.encode()
    except (AttributeError, UnicodeEncodeError):
        raise MalformedTableError(f"a field's name must be Unicode text, got {name!r:.80}") from None
    if len(raw) > NAME_BYTES_MAX:
        raise MalformedTableError(f"a field's name of {len(raw)} bytes is over the limit of {NAME_BYTES_MAX}")
    return bytes((len(raw),)) + raw


def _encode_fields(table: Mapping[str, Value], parts: list[bytes], depth: int) -> None:
    for name, value in table.items():
        parts.append(encode_name(name))
        _encode_value(value, parts, depth)


def _encode_value(value: Value, parts: list[bytes], depth: int) -> None:
    match value:
        case bool():
            parts.append(b"t\1" if value else b"t\0")
        case Timestamp():
            if value < 0:
                raise MalformedTableError(f"a time of {int(value)} seconds is before 1970")
            parts.append(b"T" + _TIMESTAMP.pack(value))
        case int():
            parts.append(_encode_int(value))
        case str():
            try:
                text = value.encode()
            except UnicodeEncodeError:
                raise MalformedTableError(f"text {value!r:.80} cannot be encoded as UTF-8") from None
            parts.append(b"S" + _U32.pack(len(text)) + text)
        case None:
            parts.append(b"V")
        case float():
            parts.append(b"d" + _NUMBERS[_DD].pack(value))
        case bytes():
            parts.append(b"x" + _U32.pack(len(value)) + value)
        case Decimal():
            parts.append(_encode_decimal(value))
        case Mapping():
            inner: list[bytes] = []
            _encode_fields(value, inner, _deeper(depth))
            parts.append(b"F" + _sized(inner))
        case list() | tuple():
            inner = []
            depth = _deeper(depth)
            for each in value:
                _encode_value(each, inner, depth)
            parts.append(b"A" + _sized(inner))
        case _:
            raise MalformedTableError(f"a field table cannot contain a value of type {type(value).__name__}")


def _encode_int(value: int) -> bytes:
    if _I32_MIN <= value <= _I32_MAX and type(value) is not Long:
        return b"I" + _NUMBERS[_I].pack(value)
    if _I64_MIN <= value <= _I64_MAX:
        return b"l" + _NUMBERS[_LL].pack(value)
    raise MalformedTableError(f"the integer {value!r:.80} does not fit into 64 bits")


def _encode_decimal(value: Decimal) -> bytes:
    _, digits, exponent = value.as_tuple()
    try:
        if not isinstance(exponent, int):
            raise MalformedTableError(f"the decimal {value} is not a number")
        scale = max(0, -exponent)
        if scale > _DECIMAL_SCALE_MAX:
            raise MalformedTableError(f"the decimal {value} has {scale} places; the limit is {_DECIMAL_SCALE_MAX}")
        return b"D" + _DECIMAL.pack(scale, int(value.scaleb(scale)))
    except (struct.error, decimal.InvalidOperation):
        raise MalformedTableError(f"the decimal of {len(digits)} digits does not fit into 32 bits") from None


def check(raw: bytes, at: int, end: int, depth: int = 0) -> int:
    """Validate the table at `at` without building it. Return the position of its end."""
    at, stop = _span(raw, at, end, "table")
    depth = _deeper(depth)
    while at < stop:
        name_end = at + 1 + raw[at]
        if name_end >= stop:
            raise MalformedTableError(f"a table breaks off in a field's name at byte {at}")
        try:
            raw[at + 1 : name_end].decode()
        except UnicodeDecodeError:
            raise MalformedTableError(f"a field's name at byte {at} is not UTF-8") from None
        at = _skip(raw, name_end, stop, depth)
    return stop


def _skip(raw: bytes, at: int, end: int, depth: int) -> int:
    """Return the end of the value at `at`."""
    kind = raw[at]
    size = _SIZES.get(kind)
    if size is not None:
        stop = at + 1 + size
        if stop > end:
            raise _cut(kind, at)
        return stop
    if kind not in _SIZED:
        raise MalformedTableError(f"a field at byte {at} has the unknown kind {chr(kind)!r}")
    start, stop = _span(raw, at + 1, end, "value")
    if kind == _F:
        check(raw, at + 1, end, depth)
    elif kind == _A:
        depth = _deeper(depth)
        while start < stop:
            start = _skip(raw, start, stop, depth)
    return stop


def find(raw: bytes, name: str, at: int = 0) -> Value:
    """Return the value of one field of the table at `at`; None if the field is missing."""
    wanted = encode_name(name)
    start, stop = _span(raw, at, len(raw), "table")
    while start < stop:
        name_end = start + 1 + raw[start]
        if name_end >= stop:
            raise MalformedTableError(f"a table breaks off in a field's name at byte {start}")
        if raw.startswith(wanted, start):
            return _decode_value(raw, name_end, stop, 1)[0]
        start = _skip(raw, name_end, stop, 1)
    return None


def edit(raw: bytes, put: Mapping[str, Value], drop: Sequence[str] = ()) -> bytes:
    """Return a table with fields set or dropped and all others kept byte for byte."""
    gone = {encode_name(name) for name in (*put, *drop)}
    start, stop = _span(raw, 0, len(raw), "table")
    if stop != len(raw):
        raise MalformedTableError(f"{len(raw) - stop} bytes follow a table of {stop} bytes")
    parts = []
    while start < stop:
        name_end = start + 1 + raw[start]
        if name_end >= stop:
            raise MalformedTableError(f"a table breaks off in a field's name at byte {start}")
        field_end = _skip(raw, name_end, stop, 1)
        if raw[start:name_end] not in gone:
            parts.append(raw[start:field_end])
        start = field_end
    _encode_fields(put, parts, 1)
    return _sized(parts)
