"""What an Arrow IPC file says of itself, read without decoding anything: whether its record batches are compressed.

A compressed buffer begins with the length it will have, and a few bytes can become gigabytes: whoever takes files from
others has to know before the first one is decoded, and pyarrow does not tell. So the parts of the flatbuffers that lead
there are followed here, with every position checked by `struct`, which raises where a file ends.

    | ARROW1 \\0\\0 | ... messages ... | footer | footer bytes i32 | ARROW1 |
    footer:    a table; field 3: record batches, a vector of | offset i64 | metadata bytes i32 | (4) | body bytes i64 |
    message:   | 0xffffffff | metadata bytes i32 | a table; field 2: header, a table; its field 3: compression |
    table:     | distance back to its vtable i32 | ... |
    vtable:    | bytes u16 | bytes of the table u16 | place of field 0 in the table u16, 0 if there is none | ... |
"""

from __future__ import annotations

import struct
from typing import Final

MAGIC: Final = b"ARROW1"
CONTINUED: Final = 0xFFFFFFFF

_U16: Final = struct.Struct("<H")
_U32: Final = struct.Struct("<I")
_I32: Final = struct.Struct("<i")
_BLOCK: Final = struct.Struct("<qi4xq")
_END: Final = struct.Struct("<i6s")

_BATCHES: Final = 3
"""The field of a footer with the record batches."""
_HEADER: Final = 2
"""The field of a message with what it is about."""
_COMPRESSION: Final = 3
"""The field of a record batch that says how its buffers are compressed."""

BATCHES_MAX: Final = 1_000_000
"""Of one file: more than a file of the largest size has room for."""


def is_compressed(raw: memoryview) -> bool:
    """Whether any record batch of a file is; ValueError if the file cannot be followed."""
    try:
        return any(_is_batch_compressed(raw, at) for at in _batches(raw))
    except (struct.error, OverflowError) as error:
        raise ValueError(f"its footer or a message leads outside of it: {error}") from None


def _batches(raw: memoryview) -> list[int]:
    """Where the messages of record batches begin."""
    length, magic = _END.unpack_from(raw, _inside(raw, len(raw) - _END.size))
    if magic != MAGIC:
        raise ValueError("it does not end as one")
    footer = _inside(raw, len(raw) - _END.size - length)
    found = _field(raw, _follow(raw, footer), _BATCHES)
    if found is None:
        return []
    vector = _follow(raw, found)
    count = _U32.unpack_from(raw, vector)[0]
    if count > BATCHES_MAX:
        raise ValueError(f"it tells of {count} record batches")
    return [_inside(raw, _BLOCK.unpack_from(raw, vector + 4 + index * _BLOCK.size)[0]) for index in range(count)]


def _is_batch_compressed(raw: memoryview, at: int) -> bool:
    # Files of before version 0.15 have no mark in front of the length.
    begin = at + (8 if _U32.unpack_from(raw, at)[0] == CONTINUED else 4)
    header = _field(raw, _follow(raw, begin), _HEADER)
    if header is None:
        raise ValueError("a message is about nothing")
    return _field(raw, _follow(raw, header), _COMPRESSION) is not None


def _field(raw: memoryview, table: int, number: int) -> int | None:
    """Where a field of a table is; None if it has none."""
    vtable = _inside(raw, table - _I32.unpack_from(raw, table)[0])
    if 4 + 2 * number >= _U16.unpack_from(raw, vtable)[0]:
        return None
    place: int = _U16.unpack_from(raw, vtable + 4 + 2 * number)[0]
    return _inside(raw, table + place) if place else None


def _follow(raw: memoryview, at: int) -> int:
    """Where what is at a distance told here begins."""
    return _inside(raw, at + int(_U32.unpack_from(raw, at)[0]))


def _inside(raw: memoryview, at: int) -> int:
    """A position, checked: `struct` would count one below 0 from the end."""
    if not 0 <= at < len(raw):
        raise ValueError(f"it leads to byte {at} of {len(raw)}")
    return at
