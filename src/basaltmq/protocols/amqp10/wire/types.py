"""The type system of AMQP 1.0: encoding and decoding of values.

    value        | constructor u8 | content |
    described    | 0x00 | descriptor, a value | value |
    compound     | constructor | size u8 or u32 | count u8 or u32 | values |
    array        | constructor | size u8 or u32 | count u8 or u32 | one constructor | contents |

The high half of a constructor gives the width of its content: 4 none, 5 one byte, 6 two, 7 four, 8 eight, 9 sixteen,
A and B variable with a size of one or four bytes, C and D compound, E and F array.

    AMQP           Python         AMQP           Python         AMQP             Python
    null           None           ulong          Ulong          timestamp (ms)   Timestamp
    boolean        bool           byte           Byte           uuid             uuid.UUID
    ubyte          Ubyte          short          Short          binary           bytes
    ushort         Ushort         int            Int            string           str
    uint           Uint           long           int            symbol           Symbol
    float          Float          double         float          list             list
    char           Char           decimal32..128 Decimal        map              dict, or Pairs
    described      Described      array          Array

A decoded value encodes to a value of the same type. The encoder uses the shortest constructor. Values nest at most
`DEPTH_MAX` deep.
"""

from __future__ import annotations

import struct
from struct import Struct
from typing import Any, Final
from uuid import UUID

from basaltmq.protocols.amqp10.wire.errors import DECODE_ERROR, Fault

DEPTH_MAX: Final = 32
"""Deeper than any client needs, and far below Python's recursion limit."""

EMPTY_ELEMENTS_MAX: Final = 4096
"""Limit of an array whose elements have no content: its count is not bounded by its size."""


class Ubyte(int):
    __slots__ = ()


class Ushort(int):
    __slots__ = ()


class Uint(int):
    __slots__ = ()


class Ulong(int):
    __slots__ = ()


class Byte(int):
    __slots__ = ()


class Short(int):
    __slots__ = ()


class Int(int):
    __slots__ = ()


class Timestamp(int):
    """Milliseconds since 1970."""

    __slots__ = ()


class Float(float):
    """A number of 32 bits."""

    __slots__ = ()


class Char(str):
    __slots__ = ()


class Symbol(str):
    __slots__ = ()


class Decimal(bytes):
    """A decimal number in its encoded form of 4, 8 or 16 bytes."""

    __slots__ = ()


class Encoded(bytes):
    """A value in its encoded form."""

    __slots__ = ()


class Described:
    """A value with a descriptor: a Ulong or a Symbol."""

    __slots__ = ("descriptor", "value")

    def __init__(self, descriptor: Any, value: Any) -> None:
        self.descriptor = descriptor
        self.value = value

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Described) and (self.descriptor, self.value) == (other.descriptor, other.value)

    def __hash__(self) -> int:
        return hash(self.descriptor)

    def __repr__(self) -> str:
        return f"Described({self.descriptor!r}, {self.value!r})"


class Array(list[Any]):
    """Values of one type, encoded with one constructor."""

    __slots__ = ("constructor",)

    def __init__(self, constructor: bytes, values: list[Any]) -> None:
        super().__init__(values)
        self.constructor = constructor
        """The constructor as on the wire; with its descriptor, if the elements are described."""


class Pairs(list[tuple[Any, Any]]):
    """A map with keys that cannot be keys of a dict: lists or maps."""

    __slots__ = ()


def malformed(text: str) -> Fault:
    return Fault(DECODE_ERROR, text)


def _cut(code: int, at: int) -> Fault:
    return malformed(f"a value with constructor 0x{code:02x} breaks off at byte {at}")


_U16: Final = Struct(">H")
_U32: Final = Struct(">I")
_U64: Final = Struct(">Q")
_PAIR32: Final = Struct(">II")

_CONSTANTS: Final[dict[int, Any]] = {0x40: None, 0x41: True, 0x42: False, 0x43: Uint(0), 0x44: Ulong(0)}
_FIXED: Final[dict[int, tuple[Any, int, Any]]] = {
    0x50: (Struct(">B").unpack_from, 1, Ubyte),
    0x51: (Struct(">b").unpack_from, 1, Byte),
    0x52: (Struct(">B").unpack_from, 1, Uint),
    0x53: (Struct(">B").unpack_from, 1, Ulong),
    0x54: (Struct(">b").unpack_from, 1, Int),
    0x55: (Struct(">b").unpack_from, 1, int),
    0x60: (_U16.unpack_from, 2, Ushort),
    0x61: (Struct(">h").unpack_from, 2, Short),
    0x70: (_U32.unpack_from, 4, Uint),
    0x71: (Struct(">i").unpack_from, 4, Int),
    0x72: (Struct(">f").unpack_from, 4, Float),
    0x80: (_U64.unpack_from, 8, Ulong),
    0x81: (Struct(">q").unpack_from, 8, int),
    0x82: (Struct(">d").unpack_from, 8, float),
    0x83: (Struct(">q").unpack_from, 8, Timestamp),
}
"""Constructors of numbers: reader, width, type."""

_RAW: Final = {0x74: 4, 0x84: 8, 0x94: 16}
"""Constructors of decimals, with their width."""

_KNOWN: Final = frozenset(
    {0x40, 0x41, 0x42, 0x43, 0x44, 0x45, 0x56, 0x73, 0x98, 0xA0, 0xA1, 0xA3, 0xB0, 0xB1, 0xB3}
    | {0xC0, 0xC1, 0xD0, 0xD1, 0xE0, 0xF0}
    | _FIXED.keys()
    | _RAW.keys()
)
_WIDTHS: Final = {4: 0, 5: 1, 6: 2, 7: 4, 8: 8, 9: 16}


def decode(raw: bytes, at: int, end: int, depth: int = 0) -> tuple[Any, int]:
    """Decode the value at `at`. Return it and the position after it."""
    if at >= end:
        raise malformed(f"a value is missing at byte {at}")
    code = raw[at]
    if code == 0:
        if depth >= DEPTH_MAX:
            raise _too_deep()
        descriptor, at = decode(raw, at + 1, end, depth + 1)
        value, at = decode(raw, at, end, depth + 1)
        return Described(descriptor, value), at
    return decode_content(raw, code, at + 1, end, depth)


def decode_content(raw: bytes, code: int, at: int, end: int, depth: int) -> tuple[Any, int]:
    """Decode the content of a value after its constructor."""
    fixed = _FIXED.get(code)
    if fixed is not None:
        read, width, kind = fixed
        stop = at + width
        if stop > end:
            raise _cut(code, at)
        value = read(raw, at)[0]
        return (value if kind is int or kind is float else kind(value)), stop
    if code in _CONSTANTS:
        return _CONSTANTS[code], at
    half = code >> 4
    if half in (0xA, 0xB):
        start, stop = span(raw, code, at, end)
        content = raw[start:stop]
        if code in (0xA0, 0xB0):
            return content, stop
        if code in (0xA1, 0xB1):
            try:
                return content.decode(), stop
            except UnicodeDecodeError:
                raise malformed(f"the string at byte {start} is not UTF-8") from None
        if code in (0xA3, 0xB3):
            if not content.isascii():
                raise malformed(f"the symbol at byte {start} is not ASCII")
            return Symbol(content.decode()), stop
    elif half in (0xC, 0xD):
        return _decode_compound(raw, code, at, end, depth)
    elif half in (0xE, 0xF):
        return _decode_array(raw, code, at, end, depth)
    elif code == 0x45:
        return [], at
    return _decode_rare(raw, code, at, end)


def _decode_rare(raw: bytes, code: int, at: int, end: int) -> tuple[Any, int]:
    if code not in _KNOWN:
        raise malformed(f"unknown constructor 0x{code:02x} at byte {at - 1}")
    stop = at + _WIDTHS[code >> 4]
    if stop > end:
        raise _cut(code, at)
    content = raw[at:stop]
    if code == 0x56:
        if content[0] > 1:
            raise malformed(f"a boolean at byte {at} has the value {content[0]}")
        return content == b"\1", stop
    if code == 0x98:
        return UUID(bytes=content), stop
    if code == 0x73:
        number = _U32.unpack(content)[0]
        if number > 0x10FFFF or 0xD800 <= number <= 0xDFFF:
            raise malformed(f"a char at byte {at} is not a Unicode character")
        return Char(chr(number)), stop
    return Decimal(content), stop


def span(raw: bytes, code: int, at: int, end: int) -> tuple[int, int]:
    """Return start and end of content whose size is at `at`."""
    if code & 0x10 == 0:
        if at >= end:
            raise _cut(code, at)
        start = at + 1
        stop = start + raw[at]
    else:
        start = at + 4
        if start > end:
            raise _cut(code, at)
        stop = start + int(_U32.unpack_from(raw, at)[0])
    if stop > end:
        raise malformed(f"a value of {stop - start} bytes at byte {at} exceeds the {end} bytes that contain it")
    return start, stop


def compound(raw: bytes, code: int, at: int, end: int) -> tuple[int, int, int]:
    """Return count, start and end of the values of a compound or array, whose size is at `at`."""
    at, stop = span(raw, code, at, end)
    if code & 0x10 == 0:
        if at >= stop:
            raise _cut(code, at)
        return raw[at], at + 1, stop
    if at + 4 > stop:
        raise _cut(code, at)
    return int(_U32.unpack_from(raw, at)[0]), at + 4, stop


def _too_deep() -> Fault:
    return malformed(f"values are nested deeper than {DEPTH_MAX}")


def _decode_compound(raw: bytes, code: int, at: int, end: int, depth: int) -> tuple[Any, int]:
    if code not in _KNOWN:
        raise malformed(f"unknown constructor 0x{code:02x} at byte {at - 1}")
    if depth >= DEPTH_MAX:
        raise _too_deep()
    count, at, stop = compound(raw, code, at, end)
    if count > stop - at:
        raise malformed(f"a list or map of {count} values has only {stop - at} bytes")
    values = []
    for _ in range(count):
        value, at = decode(raw, at, stop, depth + 1)
        values.append(value)
    if at != stop:
        raise malformed(f"{stop - at} bytes follow the {count} values of a list or map")
    if code in (0xC0, 0xD0):
        return values, stop
    if count % 2:
        raise malformed("a map has a key without a value")
    keys = values[::2]
    for key in keys:
        if isinstance(key, list | dict | Described):
            return Pairs(zip(keys, values[1::2], strict=True)), stop
    return dict(zip(keys, values[1::2], strict=True)), stop


def _decode_array(raw: bytes, code: int, at: int, end: int, depth: int) -> tuple[Any, int]:
    if code not in _KNOWN:
        raise malformed(f"unknown constructor 0x{code:02x} at byte {at - 1}")
    if depth >= DEPTH_MAX:
        raise _too_deep()
    count, at, stop = compound(raw, code, at, end)
    begin, element, descriptor, at = _element_constructor(raw, at, stop, depth)
    constructor = raw[begin:at]
    if count > (EMPTY_ELEMENTS_MAX if element >> 4 == 4 else stop - at):
        raise malformed(f"an array of {count} values has only {stop - at} bytes")
    values = []
    for _ in range(count):
        value, at = decode_content(raw, element, at, stop, depth + 1)
        values.append(Described(descriptor, value) if descriptor is not None else value)
    if at != stop:
        raise malformed(f"{stop - at} bytes follow the {count} values of an array")
    return Array(constructor, values), stop


def _element_constructor(raw: bytes, at: int, stop: int, depth: int) -> tuple[int, int, Any, int]:
    begin = at
    descriptor: Any = None
    if at < stop and raw[at] == 0:
        descriptor, at = decode(raw, at + 1, stop, depth + 1)
    if at >= stop or raw[at] not in _KNOWN:
        raise malformed(f"an array has no valid constructor at byte {at}")
    return begin, raw[at], descriptor, at + 1


def decode_all(raw: bytes) -> Any:
    """Decode a value that fills all of `raw`."""
    value, at = decode(raw, 0, len(raw))
    if at != len(raw):
        raise malformed(f"{len(raw) - at} bytes follow a value of {at} bytes")
    return value


def encode(value: Any) -> bytes:
    """Encode a value."""
    encoder = _ENCODERS.get(type(value))
    if encoder is None:
        raise TypeError(f"{type(value).__name__} is not a type of AMQP 1.0")
    encoded: bytes = encoder(value)
    return encoded


def encode_uint(value: int) -> bytes:
    return b"\x43" if not value else bytes((0x52, value)) if value < 256 else b"\x70" + _U32.pack(value)


def encode_ulong(value: int) -> bytes:
    return b"\x44" if not value else bytes((0x53, value)) if value < 256 else b"\x80" + _U64.pack(value)


def _encode_int(value: int) -> bytes:
    return struct.pack(">Bb", 0x54, value) if -128 <= value < 128 else struct.pack(">Bi", 0x71, value)


def _encode_long(value: int) -> bytes:
    return struct.pack(">Bb", 0x55, value) if -128 <= value < 128 else struct.pack(">Bq", 0x81, value)


def _sized(code: int, content: bytes) -> bytes:
    size = len(content)
    return bytes((code, size)) + content if size < 256 else struct.pack(">BI", code | 0x10, size) + content


def encode_binary(value: bytes) -> bytes:
    return _sized(0xA0, value)


def encode_string(value: str) -> bytes:
    return _sized(0xA1, value.encode(errors="replace"))


def encode_symbol(value: str) -> bytes:
    return _sized(0xA3, value.encode("ascii", errors="replace"))


def encode_compound(code: int, count: int, content: bytes) -> bytes:
    """Encode a list (0xc0), map (0xc1) or array (0xe0) from its encoded values."""
    size = len(content) + 1
    if size < 256 and count < 256:
        return bytes((code, size, count)) + content
    return struct.pack(">BII", code | 0x10, len(content) + 4, count) + content


def encode_list(values: list[Any]) -> bytes:
    return encode_compound(0xC0, len(values), b"".join(map(encode, values))) if values else b"\x45"


def _encode_map(value: dict[Any, Any]) -> bytes:
    return encode_compound(0xC1, 2 * len(value), b"".join([encode(k) + encode(v) for k, v in value.items()]))


def _encode_pairs(value: Pairs) -> bytes:
    return encode_compound(0xC1, 2 * len(value), b"".join([encode(k) + encode(v) for k, v in value]))


def _encode_array(value: Array) -> bytes:
    code = value.constructor[-1]
    contents = [_element(code, each.value if isinstance(each, Described) else each) for each in value]
    return encode_compound(0xE0, len(value), value.constructor + b"".join(contents))


def _element(code: int, value: Any) -> bytes:
    """Encode the content of an array element for a constructor, which may be wider than necessary."""
    half = code >> 4
    if half == 4:
        return b""
    if code in _FIXED:
        width, kind = _FIXED[code][1:]
        if kind in (float, Float):
            return struct.pack(">f" if width == 4 else ">d", value)
        return int(value).to_bytes(width, "big", signed=code in (0x51, 0x54, 0x55, 0x61, 0x71, 0x81, 0x83))
    if code == 0x56:
        return b"\1" if value else b"\0"
    encoded = encode(value)
    if half < 0xA:
        return encoded[1:]
    if encoded == b"\x45":
        return b"\1\0" if half == 0xC else b"\0\0\0\4\0\0\0\0"
    if encoded[0] & 0x10 == code & 0x10:
        return encoded[1:]
    if half in (0xA, 0xB):
        return _U32.pack(len(encoded) - 2) + encoded[2:]
    return _PAIR32.pack(encoded[1] + 3, encoded[2]) + encoded[3:]


def symbols(values: list[str]) -> Array:
    """Return an array of symbols."""
    return Array(b"\xa3", [Symbol(each) for each in values])


_ENCODERS: Final[dict[type, Any]] = {
    type(None): lambda value: b"\x40",
    bool: lambda value: b"\x41" if value else b"\x42",
    Ubyte: lambda value: bytes((0x50, value)),
    Ushort: lambda value: struct.pack(">BH", 0x60, value),
    Uint: encode_uint,
    Ulong: encode_ulong,
    Byte: lambda value: struct.pack(">Bb", 0x51, value),
    Short: lambda value: struct.pack(">Bh", 0x61, value),
    Int: _encode_int,
    int: _encode_long,
    Float: lambda value: struct.pack(">Bf", 0x72, value),
    float: lambda value: struct.pack(">Bd", 0x82, value),
    Char: lambda value: struct.pack(">BI", 0x73, ord(value)),
    Decimal: lambda value: bytes(({4: 0x74, 8: 0x84, 16: 0x94}[len(value)],)) + value,
    Timestamp: lambda value: struct.pack(">Bq", 0x83, value),
    UUID: lambda value: b"\x98" + value.bytes,
    bytes: encode_binary,
    Encoded: bytes,
    str: encode_string,
    Symbol: encode_symbol,
    list: encode_list,
    dict: _encode_map,
    Pairs: _encode_pairs,
    Array: _encode_array,
    Described: lambda value: b"\0" + encode(value.descriptor) + encode(value.value),
}
