"""Kafka's wire types, and codecs made from tables of fields.

A message is a `Struct`: fields in the order of the wire, each with the versions it is in. `Struct.codec(version,
is_flexible)` derives a reader and a writer once; they work on plain dictionaries by field name.

    int8 .. int64, float64   big-endian        bool     one byte
    string   i16 length, utf-8; -1 null        flexible: unsigned varint of length + 1; 0 null
    bytes    i32 length; -1 null               flexible: the same varint
    records  as bytes; written from a list of chunks, without joining them
    array    i32 count; -1 null                flexible: varint of count + 1; 0 null
    struct   its fields; where it may be null, a byte before them: 1, or -1 and nothing more
    tags     (flexible only, after a struct)   varint count, (varint tag, varint size, content)*; unknown ones skipped

Invariants: no length of the wire is believed. A length that reaches out of the frame, a count larger than the bytes
that are left (every element takes one at least), a negative length where null is not allowed, text that is not UTF-8
are a MalformedRequestError, before anything is allocated. Writers trust their caller.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import groupby
from struct import Struct as Layout
from struct import error as struct_error
from struct import pack as pack_all
from typing import Any, Final, NamedTuple
from uuid import UUID

from basaltmq.errors import MalformedRequestError

Fields = dict[str, Any]
Reader = Callable[[bytes, int], tuple[Any, int]]
Writer = Callable[[Any, list[bytes]], None]

EVER: Final = 32_767
"""A version beyond all."""

NEVER: Final = -1
NIL: Final = UUID(int=0)

_I8: Final = Layout(">b")
_I16: Final = Layout(">h")
_I32: Final = Layout(">i")
_I64: Final = Layout(">q")
_U16: Final = Layout(">H")
_F64: Final = Layout(">d")
_NUMBERS: Final = {"int8": _I8, "int16": _I16, "int32": _I32, "int64": _I64, "uint16": _U16, "float64": _F64}
_FIXED: Final = {"bool": "?"} | {name: layout.format[1:] for name, layout in _NUMBERS.items()}
"""How fields are packed that always have the same size."""

_NULL_I8: Final = b"\xff"
_PRESENT: Final = b"\x01"
_NULL_I16: Final = b"\xff\xff"
_NULL_I32: Final = b"\xff\xff\xff\xff"
_NO_TAGS: Final = b"\x00"
_VARINT_BYTES_MAX: Final = 5


class Array(NamedTuple):
    """Any number of a type or a struct."""

    of: str | Struct


class Field(NamedTuple):
    """One field of a struct."""

    name: str
    type: str | Array | Struct
    since: int = 0
    until: int = EVER
    null_since: int = EVER
    """The first version in which it may be null."""
    default: Any = None
    """Read where a version does not have it, written where the caller gives none; None takes the type's zero."""
    tag: int = NEVER
    """It is a tagged field of flexible versions."""

    def is_in(self, version: int) -> bool:
        return self.since <= version <= self.until

    @property
    def zero(self) -> Any:
        if self.default is not None or self.null_since == 0:
            return self.default
        if isinstance(self.type, Array):
            return ()
        if isinstance(self.type, Struct):
            return {}
        return _ZEROS.get(self.type, 0)


class Encoded(bytes):
    """An array as it is on the wire (`encode_array`), given where it is the same in many messages."""


class Codec(NamedTuple):
    read: Reader
    write: Writer


class Struct:
    """A table of fields."""

    def __init__(self, *fields: Field) -> None:
        self.fields = fields
        self._codecs: dict[tuple[int, bool], Codec] = {}

    def codec(self, version: int, is_flexible: bool) -> Codec:
        made = self._codecs.get((version, is_flexible))
        if made is None:
            made = self._codecs[version, is_flexible] = _struct(self, version, is_flexible)
        return made


def _struct(table: Struct, version: int, flexible: bool) -> Codec:
    present = [field for field in table.fields if field.is_in(version)]
    plain = [(field.name, _codec(field, version, flexible), field.zero) for field in present if field.tag == NEVER]
    tagged = {
        field.tag: (field.name, _codec(field, version, flexible), field.zero) for field in present if field.tag >= 0
    }
    absent = {field.name: field.zero for field in table.fields if not field.is_in(version) or field.tag >= 0}
    readers = [(name, codec.read) for name, codec, _ in plain]
    steps = _steps([(field, *each) for field, each in zip((f for f in present if f.tag == NEVER), plain, strict=True)])

    def read(raw: bytes, at: int) -> tuple[Fields, int]:
        found = dict(absent)
        for name, reader in readers:
            found[name], at = reader(raw, at)
        if flexible:
            at = _read_tags(raw, at, tagged, found)
        return found, at

    def write(given: Fields, out: list[bytes]) -> None:
        get = given.get
        for names, zeros, pack, writer in steps:
            if pack is not None:
                out.append(pack(*map(get, names, zeros)))
            else:
                writer(get(names[0], zeros[0]), out)
        if flexible:
            _write_tags(given, tagged, out)

    return Codec(read, write)


_Step = tuple[tuple[str, ...], tuple[Any, ...], Callable[..., bytes] | None, Writer]


def _steps(fields: list[tuple[Field, str, Codec, Any]]) -> list[_Step]:
    """What writes fields one after the other: numbers and flags side by side are packed together."""
    steps: list[_Step] = []
    for is_fixed, run in groupby(fields, lambda each: each[0].type in _FIXED):
        found = list(run)
        if is_fixed:
            layout = Layout(">" + "".join(_FIXED[str(field.type)] for field, *_ in found))
            names, zeros = tuple(name for _, name, *_ in found), tuple(zero for *_, zero in found)
            steps.append((names, zeros, layout.pack, found[0][2].write))
        else:
            steps += (((name,), (zero,), None, codec.write) for _, name, codec, zero in found)
    return steps


def _read_tags(raw: bytes, at: int, tagged: dict[int, tuple[str, Codec, Any]], found: Fields) -> int:
    count, at = read_varint(raw, at)
    for _ in range(count):
        tag, at = read_varint(raw, at)
        size, at = read_varint(raw, at)
        end = at + size
        if end > len(raw):
            raise MalformedRequestError(f"a tagged field of {size} bytes reaches out of its request")
        if tag in tagged:
            name, codec, _ = tagged[tag]
            found[name], stop = codec.read(raw, at)
            if stop != end:
                raise MalformedRequestError(f"the tagged field {name} says {size} bytes and has {stop - at}")
        at = end
    return at


def _write_tags(given: Fields, tagged: dict[int, tuple[str, Codec, Any]], out: list[bytes]) -> None:
    chosen = [(tag, *tagged[tag]) for tag in sorted(tagged) if tagged[tag][0] in given]
    if not chosen:
        out.append(_NO_TAGS)
        return
    out.append(varint(len(chosen)))
    for tag, name, codec, _ in chosen:
        content: list[bytes] = []
        codec.write(given[name], content)
        raw = b"".join(content)
        out += (varint(tag), varint(len(raw)), raw)


def _codec(field: Field, version: int, flexible: bool) -> Codec:
    nullable = version >= field.null_since
    if isinstance(field.type, Struct):
        codec = field.type.codec(version, flexible)
        return _or_null(field.name, codec) if nullable else codec
    if isinstance(field.type, Array):
        of = field.type.of
        element = of.codec(version, flexible) if isinstance(of, Struct) else _plain(field.name, of, flexible, False)
        return _array(field.name, element, flexible, nullable, "" if isinstance(of, Struct) else _FIXED.get(of, ""))
    return _plain(field.name, field.type, flexible, nullable)


def _or_null(name: str, codec: Codec) -> Codec:
    """A struct that may be null."""
    read_one, write_one = codec

    def read(raw: bytes, at: int) -> tuple[Fields | None, int]:
        if at >= len(raw):
            raise MalformedRequestError(f"a request ends before its field {name}")
        return (None, at + 1) if raw[at] > 0x7F else read_one(raw, at + 1)

    def write(value: Fields | None, out: list[bytes]) -> None:
        if value is None:
            out.append(_NULL_I8)
        else:
            out.append(_PRESENT)
            write_one(value, out)

    return Codec(read, write)


def _plain(name: str, type_: str, flexible: bool, nullable: bool) -> Codec:
    layout = _NUMBERS.get(type_)
    if layout is not None:
        return _number(name, layout)
    if type_ == "bool":
        return Codec(_read_bool, lambda value, out: out.append(b"\x01" if value else b"\x00"))
    if type_ == "uuid":
        return Codec(_read_uuid, lambda value, out: out.append(value.bytes))
    read_size = _sizes(name, flexible, nullable, is_short=type_ == "string")
    if type_ == "string":
        return Codec(_string_reader(name, read_size), _string_writer(flexible))
    assert type_ in {"bytes", "records"}, type_
    return Codec(_bytes_reader(read_size), _chunks_writer(flexible) if type_ == "records" else _bytes_writer(flexible))


def _number(name: str, layout: Layout) -> Codec:
    size, unpack, pack = layout.size, layout.unpack_from, layout.pack

    def read(raw: bytes, at: int) -> tuple[int, int]:
        try:
            return unpack(raw, at)[0], at + size
        except struct_error:
            raise MalformedRequestError(f"a request ends before its field {name}") from None

    return Codec(read, lambda value, out: out.append(pack(value)))


def _read_bool(raw: bytes, at: int) -> tuple[bool, int]:
    if at >= len(raw):
        raise MalformedRequestError("a request ends before a flag")
    return raw[at] != 0, at + 1


def _read_uuid(raw: bytes, at: int) -> tuple[UUID, int]:
    if len(raw) - at < 16:
        raise MalformedRequestError("a request ends inside an id")
    return UUID(bytes=raw[at : at + 16]), at + 16


def _sizes(name: str, flexible: bool, nullable: bool, *, is_short: bool) -> Reader:
    """Reads a length, checked against what is left; -1 for null."""
    layout = _I16 if is_short else _I32
    size, unpack = layout.size, layout.unpack_from

    def read(raw: bytes, at: int) -> tuple[int, int]:
        if flexible:
            length, at = read_varint(raw, at)
            length -= 1
        else:
            try:
                length = unpack(raw, at)[0]
            except struct_error:
                raise MalformedRequestError(f"a request ends before its field {name}") from None
            at += size
        if length > len(raw) - at or length < -1 or (length == -1 and not nullable):
            raise MalformedRequestError(f"field {name} says {length} bytes or elements; {len(raw) - at} bytes are left")
        return length, at

    return read


def _string_reader(name: str, read_size: Reader) -> Reader:
    def read(raw: bytes, at: int) -> tuple[str | None, int]:
        length, at = read_size(raw, at)
        if length < 0:
            return None, at
        try:
            return raw[at : at + length].decode(), at + length
        except UnicodeDecodeError:
            raise MalformedRequestError(f"field {name} is not UTF-8") from None

    return read


def _bytes_reader(read_size: Reader) -> Reader:
    def read(raw: bytes, at: int) -> tuple[bytes | None, int]:
        length, at = read_size(raw, at)
        return (None, at) if length < 0 else (raw[at : at + length], at + length)

    return read


def _string_writer(flexible: bool) -> Writer:
    def write(value: str | None, out: list[bytes]) -> None:
        if value is None:
            out.append(_NO_TAGS if flexible else _NULL_I16)
            return
        raw = value.encode()
        out += (varint(len(raw) + 1) if flexible else _I16.pack(len(raw)), raw)

    return write


def _bytes_writer(flexible: bool) -> Writer:
    def write(value: bytes | None, out: list[bytes]) -> None:
        if value is None:
            out.append(_NO_TAGS if flexible else _NULL_I32)
        else:
            out += (varint(len(value) + 1) if flexible else _I32.pack(len(value)), value)

    return write


def _chunks_writer(flexible: bool) -> Writer:
    whole = _bytes_writer(flexible)

    def write(chunks: bytes | Sequence[bytes] | None, out: list[bytes]) -> None:
        if chunks is None or isinstance(chunks, bytes):
            whole(chunks, out)
            return
        size = sum(map(len, chunks))
        out.append(varint(size + 1) if flexible else _I32.pack(size))
        out += chunks

    return write


def _array(name: str, element: Codec, flexible: bool, nullable: bool, fixed: str) -> Codec:
    """`fixed`: how elements are packed that all have the same size."""
    read_size = _sizes(name, flexible, nullable, is_short=False)
    read_one, write_one = element

    def read(raw: bytes, at: int) -> tuple[list[Any] | None, int]:
        count, at = read_size(raw, at)
        if count < 0:
            return None, at
        found = []
        for _ in range(count):
            one, at = read_one(raw, at)
            found.append(one)
        return found, at

    def write(values: Sequence[Any] | None, out: list[bytes]) -> None:
        if values is None:
            out.append(_NO_TAGS if flexible else _NULL_I32)
            return
        if isinstance(values, Encoded):
            out.append(values)
            return
        count = len(values)
        out.append(varint(count + 1) if flexible else _I32.pack(count))
        if fixed and count:
            out.append(pack_all(f">{count}{fixed}", *values))
            return
        for value in values:
            write_one(value, out)

    return Codec(read, write)


def encode_array(of: Struct, values: Sequence[Fields], version: int, is_flexible: bool) -> Encoded:
    """An array of structs, to be given wherever a field of this type and version takes it."""
    out: list[bytes] = []
    _array("", of.codec(version, is_flexible), is_flexible, False, "").write(values, out)
    return Encoded(b"".join(out))


def read_varint(raw: bytes, at: int) -> tuple[int, int]:
    """An unsigned varint of 32 bits."""
    number = shift = 0
    for byte in raw[at : at + _VARINT_BYTES_MAX]:
        number |= (byte & 0x7F) << shift
        at += 1
        if byte < 0x80:
            return number, at
        shift += 7
    raise MalformedRequestError("a request ends inside a number, or the number has more than 32 bits")


def varint(number: int) -> bytes:
    if number < 0x80:
        return bytes((number,))
    out = bytearray()
    while number >= 0x80:
        out.append(number & 0x7F | 0x80)
        number >>= 7
    out.append(number)
    return bytes(out)


_ZEROS: Final[dict[str, Any]] = {"string": "", "bytes": b"", "records": b"", "bool": False, "uuid": NIL}
