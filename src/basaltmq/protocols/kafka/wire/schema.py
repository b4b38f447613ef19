"""Kafka's wire types, and codecs derived from schemas.

A message is a `Struct`: its fields in wire order, each with its versions. `Struct.codec(version, is_flexible)` derives
a reader and a writer once. Both work on dictionaries by field name.

    int8 .. int64, float64   big-endian        bool     one byte
    string   i16 length, utf-8; -1 null        flexible: unsigned varint of length + 1; 0 null
    bytes    i32 length; -1 null               flexible: the same varint
    records  as bytes; written from a list of chunks, without joining them
    array    i32 count; -1 null                flexible: varint of count + 1; 0 null
    struct   its fields; a nullable struct has a byte before them: 1, or -1 for null
    tags     (flexible only, after a struct)   varint count, (varint tag, varint size, content)*; unknown ones skipped

Readers check every length before they allocate. They raise MalformedRequestError for a length beyond the frame, a count
above the remaining bytes (each element takes at least one), a negative length of a field that is not nullable, and text
that is not UTF-8. Writers do not check their input.
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
from basaltmq.varints import varint

Fields = dict[str, Any]
Reader = Callable[[bytes, int], tuple[Any, int]]
Writer = Callable[[Any, list[bytes]], None]

EVER: Final = 32_767
"""Larger than every version."""

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
"""Struct format characters of the types with a fixed size."""

_NULL_I8: Final = b"\xff"
_PRESENT: Final = b"\x01"
_NULL_I16: Final = b"\xff\xff"
_NULL_I32: Final = b"\xff\xff\xff\xff"
_NO_TAGS: Final = b"\x00"
_VARINT_BYTES_MAX: Final = 5


class Array(NamedTuple):
    """An array of a primitive type or a struct."""

    of: str | Struct


class Field(NamedTuple):
    """A field of a struct."""

    name: str
    type: str | Array | Struct
    since: int = 0
    until: int = EVER
    null_since: int = EVER
    """First version in which the field may be null."""
    default: Any = None
    """Value when a version has no such field or the caller gives none; None means the type's zero value."""
    tag: int = NEVER
    """Tag number, if this is a tagged field of flexible versions."""

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
    """An array already encoded by `encode_array`, for content that many messages share."""


class Codec(NamedTuple):
    read: Reader
    write: Writer


class Struct:
    """A struct: its fields, and a codec per version."""

    def __init__(self, *fields: Field) -> None:
        self.fields = fields
        self._codecs: dict[tuple[int, bool], Codec] = {}

    def array(self, *path: str) -> Struct:
        """Return the struct of a nested array."""
        found = self
        for name in path:
            (kind,) = (field.type for field in found.fields if field.name == name)
            assert isinstance(kind, Array)
            assert isinstance(kind.of, Struct)
            found = kind.of
        return found

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
    """Return the write steps of a struct. Adjacent fields of fixed size are packed together."""
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
            raise MalformedRequestError(f"a tagged field of {size} bytes extends beyond the end of the request")
        if tag in tagged:
            name, codec, _ = tagged[tag]
            found[name], stop = codec.read(raw, at)
            if stop != end:
                raise MalformedRequestError(f"tagged field {name} declares {size} bytes but has {stop - at}")
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
        return _nullable_struct(field.name, codec) if nullable else codec
    if isinstance(field.type, Array):
        of = field.type.of
        element = of.codec(version, flexible) if isinstance(of, Struct) else _primitive(field.name, of, flexible, False)
        return _array(field.name, element, flexible, nullable, "" if isinstance(of, Struct) else _FIXED.get(of, ""))
    return _primitive(field.name, field.type, flexible, nullable)


def _nullable_struct(name: str, codec: Codec) -> Codec:
    """Return the codec of a nullable struct."""
    read_one, write_one = codec

    def read(raw: bytes, at: int) -> tuple[Fields | None, int]:
        if at >= len(raw):
            raise MalformedRequestError(f"the request ends before field {name}")
        return (None, at + 1) if raw[at] > 0x7F else read_one(raw, at + 1)

    def write(value: Fields | None, out: list[bytes]) -> None:
        if value is None:
            out.append(_NULL_I8)
        else:
            out.append(_PRESENT)
            write_one(value, out)

    return Codec(read, write)


def _primitive(name: str, type_: str, flexible: bool, nullable: bool) -> Codec:
    layout = _NUMBERS.get(type_)
    if layout is not None:
        return _number(name, layout)
    if type_ == "bool":
        return Codec(_read_bool, lambda value, out: out.append(b"\x01" if value else b"\x00"))
    if type_ == "uuid":
        return Codec(_read_uuid, lambda value, out: out.append(value.bytes))
    read_length = _length_reader(name, flexible, nullable, is_short=type_ == "string")
    if type_ == "string":
        return Codec(_string_reader(name, read_length), _string_writer(flexible))
    assert type_ in {"bytes", "records"}, type_
    return Codec(
        _bytes_reader(read_length), _chunks_writer(flexible) if type_ == "records" else _bytes_writer(flexible)
    )


def _number(name: str, layout: Layout) -> Codec:
    size, unpack, pack = layout.size, layout.unpack_from, layout.pack

    def read(raw: bytes, at: int) -> tuple[int, int]:
        try:
            return unpack(raw, at)[0], at + size
        except struct_error:
            raise MalformedRequestError(f"the request ends before field {name}") from None

    return Codec(read, lambda value, out: out.append(pack(value)))


def _read_bool(raw: bytes, at: int) -> tuple[bool, int]:
    if at >= len(raw):
        raise MalformedRequestError("the request ends before a boolean field")
    return raw[at] != 0, at + 1


def _read_uuid(raw: bytes, at: int) -> tuple[UUID, int]:
    if len(raw) - at < 16:
        raise MalformedRequestError("the request ends inside a UUID")
    return UUID(bytes=raw[at : at + 16]), at + 16


def _length_reader(name: str, flexible: bool, nullable: bool, *, is_short: bool) -> Reader:
    """Return a reader of lengths, which checks them against the remaining bytes; -1 means null."""
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
                raise MalformedRequestError(f"the request ends before field {name}") from None
            at += size
        if length > len(raw) - at or length < -1 or (length == -1 and not nullable):
            raise MalformedRequestError(f"field {name} has the invalid length {length}; {len(raw) - at} bytes are left")
        return length, at

    return read


def _string_reader(name: str, read_length: Reader) -> Reader:
    def read(raw: bytes, at: int) -> tuple[str | None, int]:
        length, at = read_length(raw, at)
        if length < 0:
            return None, at
        try:
            return raw[at : at + length].decode(), at + length
        except UnicodeDecodeError:
            raise MalformedRequestError(f"field {name} is not UTF-8") from None

    return read


def _bytes_reader(read_length: Reader) -> Reader:
    def read(raw: bytes, at: int) -> tuple[bytes | None, int]:
        length, at = read_length(raw, at)
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
    """Return the codec of an array. `fixed` is the struct format of elements with a fixed size."""
    read_length = _length_reader(name, flexible, nullable, is_short=False)
    read_one, write_one = element

    def read(raw: bytes, at: int) -> tuple[list[Any] | None, int]:
        count, at = read_length(raw, at)
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
    """Encode an array of structs for reuse in any field of this type and version."""
    out: list[bytes] = []
    _array("", of.codec(version, is_flexible), is_flexible, False, "").write(values, out)
    return Encoded(b"".join(out))


def read_varint(raw: bytes, at: int) -> tuple[int, int]:
    """Read an unsigned 32-bit varint."""
    number = shift = 0
    for byte in raw[at : at + _VARINT_BYTES_MAX]:
        number |= (byte & 0x7F) << shift
        at += 1
        if byte < 0x80:
            return number, at
        shift += 7
    raise MalformedRequestError("the request ends inside a varint, or the varint has more than 32 bits")


_ZEROS: Final[dict[str, Any]] = {"string": "", "bytes": b"", "records": b"", "bool": False, "uuid": NIL}
