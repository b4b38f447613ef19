"""Detects compressed record batches in an Arrow IPC file without decoding them.

A compressed buffer states its uncompressed length, and a few bytes can expand to gigabytes. A receiver of untrusted
files must know this before decoding, and pyarrow does not expose it. So this module follows the flatbuffers to the
compression field. `struct` and `_inside` check every position against the end of the file.

    | ARROW1 \\0\\0 | ... messages ... | footer | footer bytes i32 | ARROW1 |
    footer:    a table; field 3: record batches, a vector of | offset i64 | metadata bytes i32 | (4) | body bytes i64 |
    message:   | 0xffffffff | metadata bytes i32 | a table; field 2: header, a table; its field 3: compression |
    table:     | distance back to its vtable i32 | ... |
    vtable:    | bytes u16 | bytes of the table u16 | position of field 0 in the table u16, 0 if absent | ... |
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
"""Footer field: the record batches."""
_HEADER: Final = 2
"""Message field: the header."""
_COMPRESSION: Final = 3
"""Record batch field: the compression of its buffers."""

BATCHES_MAX: Final = 1_000_000
"""Maximum record batches per file: more than fit into a file of the largest size."""


def is_compressed(raw: memoryview) -> bool:
    """Whether any record batch of the file is compressed. Raises ValueError if the structure is invalid."""
    try:
        return any(_is_batch_compressed(raw, at) for at in _batches(raw))
    except (struct.error, OverflowError) as error:
        raise ValueError(f"the footer or a message points outside of the file: {error}") from None


def _batches(raw: memoryview) -> list[int]:
    """Return the positions of the record batch messages."""
    length, magic = _END.unpack_from(raw, _inside(raw, len(raw) - _END.size))
    if magic != MAGIC:
        raise ValueError("the file does not end with the Arrow magic")
    footer = _inside(raw, len(raw) - _END.size - length)
    found = _field(raw, _follow(raw, footer), _BATCHES)
    if found is None:
        return []
    vector = _follow(raw, found)
    count = _U32.unpack_from(raw, vector)[0]
    if count > BATCHES_MAX:
        raise ValueError(f"the footer lists {count} record batches")
    return [_inside(raw, _BLOCK.unpack_from(raw, vector + 4 + index * _BLOCK.size)[0]) for index in range(count)]


def _is_batch_compressed(raw: memoryview, at: int) -> bool:
    # Files of Arrow before version 0.15 have no continuation marker before the length.
    begin = at + (8 if _U32.unpack_from(raw, at)[0] == CONTINUED else 4)
    header = _field(raw, _follow(raw, begin), _HEADER)
    if header is None:
        raise ValueError("a message has no header")
    return _field(raw, _follow(raw, header), _COMPRESSION) is not None


def _field(raw: memoryview, table: int, number: int) -> int | None:
    """Return the position of a table's field, or None if it is absent."""
    vtable = _inside(raw, table - _I32.unpack_from(raw, table)[0])
    if 4 + 2 * number >= _U16.unpack_from(raw, vtable)[0]:
        return None
    place: int = _U16.unpack_from(raw, vtable + 4 + 2 * number)[0]
    return _inside(raw, table + place) if place else None


def _follow(raw: memoryview, at: int) -> int:
    """Return the target of the relative offset at `at`."""
    return _inside(raw, at + int(_U32.unpack_from(raw, at)[0]))


def _inside(raw: memoryview, at: int) -> int:
    """Return `at` if it is inside the file. `struct` would count a negative position from the end."""
    if not 0 <= at < len(raw):
        raise ValueError(f"a position points to byte {at} of {len(raw)}")
    return at
