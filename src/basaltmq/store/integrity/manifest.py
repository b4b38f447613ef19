"""What we need to know from a MANIFEST, what we add to a copy of it, and how a new one is made from files alone.

A record of a MANIFEST is one edit: tag (varint), value, tag, value ... Those of interest come first in it, before the
lists of files; reading stops at the first tag that is not among them:

    1 comparator, 201 name of a family that is added, 8193 database id     bytes, after a varint of their length
    2 log number, 3 next file, 4 last sequence, 9 previous log, 10 oldest log to keep, 200 family, 203 last family
                                                                           varint

Logs below the highest "oldest log to keep" are left over from before a flush. RocksDB passes over them, and nobody
syncs them any more, so after a power loss they may well be torn.

`without_table` is an edit that takes a table out (6: level, number), for a copy to be read without it.

`write_manifest` makes a MANIFEST for reading tables whose own MANIFEST is lost. Every table is put into level 0 and
spans all keys. An iterator merges tables by sequence number, so it shows the right rows whatever the levels were; a
`get` would not. The edits it uses:

    103 new file    level, number, bytes, first key, last key (bytes), first and last sequence number, then fields of
                    tag and bytes: 4 oldest blob file, 13 epoch (distinct in level 0); tag 1 ends them
    400 blob file   number, values, bytes, checksum method and value (bytes, empty), 0
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from struct import Struct
from typing import Final, NamedTuple

from basaltmq.store.integrity.wal import read_records, write_record

_OLDEST_LOG: Final = 10
_DELETED_FILE: Final = 6
_FAMILY: Final = 200
_FAMILY_ADD: Final = 201
_NEXT_FILE: Final = 3
_LAST_SEQUENCE: Final = 4
_LOG: Final = 2
_COMPARATOR: Final = 1
_LAST_FAMILY: Final = 203
_COMPACT_CURSOR: Final = 5
_FAMILY_DROP: Final = 202
_NEW_FILE: Final = 103
_BLOB_FILE, _BLOB_GARBAGE = 400, 401
_IGNORABLE: Final = 1 << 13
"""In a tag: whoever does not know it may pass over it."""
_NUMBER_MASK: Final = (1 << 62) - 1
_OLDEST_BLOB, _EPOCH, _END_OF_FIELDS = 4, 13, 1
_BYTEWISE: Final = b"leveldb.BytewiseComparator"

SEQUENCE_MAX: Final = (1 << 56) - 1
"""The highest sequence number RocksDB has."""

_KEY_END: Final = Struct("<Q")
_KEY_FIRST: Final = _KEY_END.pack(SEQUENCE_MAX << 8 | 1)
_KEY_LAST: Final = b"\xff" * 1024 + _KEY_END.pack(0)
"""Keys in a MANIFEST end in sequence number and kind. No key of ours begins with 1,024 bytes 0xff: they begin with
lengths, ids or names."""

_TEXTS: Final = frozenset((1, _FAMILY_ADD, 8193))
_NUMBERS: Final = frozenset((2, 3, 4, 9, _OLDEST_LOG, _FAMILY, 203))


def oldest_log(manifest: Path) -> int:
    """The number of the first write-ahead log that is still needed; 0 if all may be."""
    return max((_head(edit)[0].get(_OLDEST_LOG, 0) for edit in read_records(manifest)), default=0)


def family_numbers(manifest: Path) -> dict[str, int]:
    """RocksDB's number of each family."""
    found = {"default": 0}
    for edit in read_records(manifest):
        numbers, texts = _head(edit)
        if _FAMILY_ADD in texts and _FAMILY in numbers:
            found[texts[_FAMILY_ADD].decode("utf-8", "replace")] = numbers[_FAMILY]
    return found


def sequence_reached(manifest: Path) -> int:
    """The last sequence number that the edits of a MANIFEST name."""
    return max((_head(edit)[0].get(_LAST_SEQUENCE, 0) for edit in read_records(manifest)), default=0)


class ListedTable(NamedTuple):
    """A table to be listed."""

    number: int
    size_bytes: int


def write_manifest(
    path: Path,
    families: Mapping[str, int],
    tables: Mapping[str, Sequence[ListedTable]],
    blobs: Mapping[str, Sequence[int]],
) -> None:
    """Write a MANIFEST that lists tables and blob files by family. It is for reading only."""
    numbers = [each.number for found in tables.values() for each in found] + [
        n for found in blobs.values() for n in found
    ]
    head = _numbered(_COMPARATOR, _BYTEWISE) + _encoded(_LOG) + _encoded(0)
    start = head + b"".join(
        _encoded(tag) + _encoded(value)
        for tag, value in (
            (_NEXT_FILE, max(numbers, default=0) + 1),
            # Rows with a higher number than this are not seen.
            (_LAST_SEQUENCE, SEQUENCE_MAX >> 1),
            (_LAST_FAMILY, max(families.values(), default=0)),
        )
    )
    edits = [start]
    for name, number in families.items():
        whose = _encoded(_FAMILY) + _encoded(number) if number else b""
        if number:
            edits.append(head + whose + _numbered(_FAMILY_ADD, name.encode()))
        oldest_blob = min(blobs.get(name, ()), default=0)
        # A blob file that no table points at is dropped when the MANIFEST is read.
        for blob in blobs.get(name, ()) if tables.get(name) else ():
            parts = (_BLOB_FILE, blob, 1 << 40, 1 << 50, 0, 0, 0)
            edits.append(b"".join(map(_encoded, parts)) + whose)
        for table in tables.get(name, ()):
            edit = b"".join(map(_encoded, (_NEW_FILE, 0, table.number, table.size_bytes)))
            edit += _sized(_KEY_FIRST) + _sized(_KEY_LAST) + _encoded(0) + _encoded(SEQUENCE_MAX >> 1)
            if oldest_blob:
                edit += _numbered(_OLDEST_BLOB, _encoded(oldest_blob))
            edits.append(edit + _numbered(_EPOCH, _encoded(table.number)) + _encoded(_END_OF_FIELDS) + whose)
    with open(path, "wb") as file:
        at = 0
        for edit in edits:
            at = write_record(file, at, edit)


def _sized(data: bytes) -> bytes:
    return _encoded(len(data)) + data


def _numbered(tag: int, data: bytes) -> bytes:
    return _encoded(tag) + _sized(data)


def live_tables(manifest: Path) -> dict[int, int] | None:
    """Number and size of every table the edits leave; None if one of them has a form we do not know."""
    live: dict[int, int] = {}
    for edit in read_records(manifest):
        at = 0
        try:
            while at < len(edit):
                tag, at = _varint(edit, at)
                if tag in _NUMBERS:
                    _, at = _varint(edit, at)
                elif tag in _TEXTS or tag & _IGNORABLE:
                    at = _skipped(edit, at)
                elif tag == _COMPACT_CURSOR:
                    at = _skipped(edit, _varint(edit, at)[1])
                elif tag == _DELETED_FILE:
                    number, at = _varint(edit, _varint(edit, at)[1])
                    live.pop(number, None)
                elif tag == _NEW_FILE:
                    number, size_bytes, at = _new_file(edit, at)
                    live[number] = size_bytes
                elif tag in (_BLOB_FILE, _BLOB_GARBAGE):
                    at = _blob_edit(edit, at, has_checksum=tag == _BLOB_FILE)
                elif tag != _FAMILY_DROP:
                    return None
        except IndexError:
            return None
    return live


def _new_file(edit: bytes, at: int) -> tuple[int, int, int]:
    _, at = _varint(edit, at)
    number, at = _varint(edit, at)
    size_bytes, at = _varint(edit, at)
    at = _skipped(edit, _skipped(edit, at))
    _, at = _varint(edit, at)
    _, at = _varint(edit, at)
    while True:
        field, at = _varint(edit, at)
        if field == _END_OF_FIELDS:
            # The upper bits of a number are the directory it is in; there is one.
            return number & _NUMBER_MASK, size_bytes, at
        at = _skipped(edit, at)


def _blob_edit(edit: bytes, at: int, *, has_checksum: bool) -> int:
    for _ in range(3):
        _, at = _varint(edit, at)
    if has_checksum:
        at = _skipped(edit, _skipped(edit, at))
    while True:
        field, at = _varint(edit, at)
        if field == 0:
            return at
        at = _skipped(edit, at)


def _skipped(edit: bytes, at: int) -> int:
    """Behind a text."""
    length, at = _varint(edit, at)
    if at + length > len(edit):
        raise IndexError
    return at + length


def without_table(family: int, level: int, table: int) -> bytes:
    """The edit that takes a table of a family out."""
    edit = _encoded(_DELETED_FILE) + _encoded(level) + _encoded(table)
    return edit + _encoded(_FAMILY) + _encoded(family) if family else edit


def _head(edit: bytes) -> tuple[dict[int, int], dict[int, bytes]]:
    """The numbers and texts an edit begins with."""
    numbers: dict[int, int] = {}
    texts: dict[int, bytes] = {}
    at = 0
    try:
        while at < len(edit):
            tag, at = _varint(edit, at)
            if tag in _TEXTS:
                length, at = _varint(edit, at)
                texts[tag] = edit[at : at + length]
                at += length
            elif tag in _NUMBERS:
                numbers[tag], at = _varint(edit, at)
            else:
                break
    except IndexError:
        # The checksum matched, so this is a form we do not know; then nothing is known, and every log counts.
        return {}, {}
    return numbers, texts


def _varint(data: bytes, at: int) -> tuple[int, int]:
    shift = value = 0
    while True:
        byte = data[at]
        at += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, at
        shift += 7


def _encoded(number: int) -> bytes:
    out = bytearray()
    while number >= 0x80:
        out.append(number & 0x7F | 0x80)
        number >>= 7
    out.append(number)
    return bytes(out)
