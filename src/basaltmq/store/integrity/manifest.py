"""Reads RocksDB's MANIFEST, edits copies of it, and builds a new one from files alone.

A MANIFEST record is one edit: tag (varint), value, tag, value ... The required tags come first, before the lists of
files. Reading stops at the first other tag:

    1 comparator, 201 name of an added family, 8193 database id            bytes, after a varint of their length
    2 log number, 3 next file, 4 last sequence, 9 previous log, 10 oldest log to keep, 200 family, 203 last family
                                                                           varint

WAL files below the highest "oldest log to keep" are left over from before a flush. RocksDB skips and no longer syncs
them, so they may be torn after a power loss.

`without_table` returns an edit that removes an SST file (6: level, number) from a copy.

`write_manifest` builds a MANIFEST to read SST files whose MANIFEST is lost. Every SST file goes to level 0 and spans
all keys. An iterator merges SST files by sequence number, so it returns the correct rows at any level; a `get` would
not. It uses these edits:

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
from basaltmq.varints import read_varint, varint

_COMPARATOR: Final = 1
_LOG: Final = 2
_NEXT_FILE: Final = 3
_LAST_SEQUENCE: Final = 4
_COMPACT_CURSOR: Final = 5
_DELETED_FILE: Final = 6
_PREVIOUS_LOG: Final = 9
_OLDEST_LOG: Final = 10
_NEW_FILE: Final = 103
_FAMILY: Final = 200
_FAMILY_ADD: Final = 201
_FAMILY_DROP: Final = 202
_LAST_FAMILY: Final = 203
_BLOB_FILE, _BLOB_GARBAGE = 400, 401
_DATABASE_ID: Final = 8193
_IGNORABLE: Final = 1 << 13
"""Tag bit: readers that do not know the tag may skip it."""
_NUMBER_MASK: Final = (1 << 62) - 1
_OLDEST_BLOB, _EPOCH, _END_OF_FIELDS = 4, 13, 1
_BYTEWISE: Final = b"leveldb.BytewiseComparator"

SEQUENCE_MAX: Final = (1 << 56) - 1
"""RocksDB's highest sequence number."""

_KEY_END: Final = Struct("<Q")
_KEY_FIRST: Final = _KEY_END.pack(SEQUENCE_MAX << 8 | 1)
_KEY_LAST: Final = b"\xff" * 1024 + _KEY_END.pack(0)
"""Keys in a MANIFEST end with sequence number and kind. No Basalt key starts with 1,024 bytes 0xff: keys start with
lengths, ids or names."""

_TEXTS: Final = frozenset((_COMPARATOR, _FAMILY_ADD, _DATABASE_ID))
_NUMBERS: Final = frozenset((_LOG, _NEXT_FILE, _LAST_SEQUENCE, _PREVIOUS_LOG, _OLDEST_LOG, _FAMILY, _LAST_FAMILY))


def oldest_log(manifest: Path) -> int:
    """Return the number of the oldest WAL file that is still required. 0: every WAL file may be required."""
    return max((_head(edit)[0].get(_OLDEST_LOG, 0) for edit in read_records(manifest)), default=0)


def family_numbers(manifest: Path) -> dict[str, int]:
    """Return RocksDB's number of each family."""
    found = {"default": 0}
    for edit in read_records(manifest):
        numbers, texts = _head(edit)
        if _FAMILY_ADD in texts and _FAMILY in numbers:
            found[texts[_FAMILY_ADD].decode("utf-8", "replace")] = numbers[_FAMILY]
    return found


def sequence_reached(manifest: Path) -> int:
    """Return the last sequence number in the edits of a MANIFEST."""
    return max((_head(edit)[0].get(_LAST_SEQUENCE, 0) for edit in read_records(manifest)), default=0)


def is_openable(manifest: Path) -> bool:
    """Whether a MANIFEST has all numbers that RocksDB requires. One that is truncated after its first records lacks
    some."""
    found: set[int] = set()
    for edit in read_records(manifest):
        found.update(_head(edit)[0])
    return {_NEXT_FILE, _LAST_SEQUENCE} <= found


class ListedTable(NamedTuple):
    """An SST file to list in a MANIFEST."""

    number: int
    size_bytes: int


def write_manifest(
    path: Path,
    families: Mapping[str, int],
    tables: Mapping[str, Sequence[ListedTable]],
    blobs: Mapping[str, Sequence[int]],
) -> None:
    """Write a MANIFEST that lists SST and blob files by family. It is for reading only."""
    numbers = [each.number for found in tables.values() for each in found] + [
        n for found in blobs.values() for n in found
    ]
    head = _numbered(_COMPARATOR, _BYTEWISE) + varint(_LOG) + varint(0)
    start = head + b"".join(
        varint(tag) + varint(value)
        for tag, value in (
            (_NEXT_FILE, max(numbers, default=0) + 1),
            # Rows with a higher sequence number are not visible.
            (_LAST_SEQUENCE, SEQUENCE_MAX >> 1),
            (_LAST_FAMILY, max(families.values(), default=0)),
        )
    )
    edits = [start]
    for name, number in families.items():
        whose = varint(_FAMILY) + varint(number) if number else b""
        if number:
            edits.append(head + whose + _numbered(_FAMILY_ADD, name.encode()))
        oldest_blob = min(blobs.get(name, ()), default=0)
        # RocksDB drops a blob file without a referring SST file when it reads the MANIFEST.
        for blob in blobs.get(name, ()) if tables.get(name) else ():
            parts = (_BLOB_FILE, blob, 1 << 40, 1 << 50, 0, 0, 0)
            edits.append(b"".join(map(varint, parts)) + whose)
        for table in tables.get(name, ()):
            edit = b"".join(map(varint, (_NEW_FILE, 0, table.number, table.size_bytes)))
            edit += _sized(_KEY_FIRST) + _sized(_KEY_LAST) + varint(0) + varint(SEQUENCE_MAX >> 1)
            if oldest_blob:
                edit += _numbered(_OLDEST_BLOB, varint(oldest_blob))
            edits.append(edit + _numbered(_EPOCH, varint(table.number)) + varint(_END_OF_FIELDS) + whose)
    with open(path, "wb") as file:
        at = 0
        for edit in edits:
            at = write_record(file, at, edit)


def _sized(data: bytes) -> bytes:
    return varint(len(data)) + data


def _numbered(tag: int, data: bytes) -> bytes:
    return varint(tag) + _sized(data)


def live_tables(manifest: Path) -> dict[int, int] | None:
    """Return number and size of every live SST file, None if an edit has an unknown format."""
    listed = _listed(manifest)
    return None if listed is None else listed[0]


def added_blobs(manifest: Path) -> set[int] | None:
    """Return the numbers of all blob files that edits added, None if an edit has an unknown format.

    Any other blob file is left over from a flush or compaction that a crash interrupted.
    """
    listed = _listed(manifest)
    return None if listed is None else listed[1]


def _listed(manifest: Path) -> tuple[dict[int, int], set[int]] | None:
    live: dict[int, int] = {}
    blobs: set[int] = set()
    for edit in read_records(manifest):
        at = 0
        try:
            while at < len(edit):
                tag, at = read_varint(edit, at)
                if tag in _NUMBERS:
                    _, at = read_varint(edit, at)
                elif tag in _TEXTS or tag & _IGNORABLE:
                    at = _skipped(edit, at)
                elif tag == _COMPACT_CURSOR:
                    at = _skipped(edit, read_varint(edit, at)[1])
                elif tag == _DELETED_FILE:
                    number, at = read_varint(edit, read_varint(edit, at)[1])
                    live.pop(number, None)
                elif tag == _NEW_FILE:
                    number, size_bytes, at = _new_file(edit, at)
                    live[number] = size_bytes
                elif tag in (_BLOB_FILE, _BLOB_GARBAGE):
                    blobs.add(read_varint(edit, at)[0])
                    at = _blob_edit(edit, at, has_checksum=tag == _BLOB_FILE)
                elif tag != _FAMILY_DROP:
                    return None
        except IndexError:
            return None
    return live, blobs


def _new_file(edit: bytes, at: int) -> tuple[int, int, int]:
    _, at = read_varint(edit, at)
    number, at = read_varint(edit, at)
    size_bytes, at = read_varint(edit, at)
    at = _skipped(edit, _skipped(edit, at))
    _, at = read_varint(edit, at)
    _, at = read_varint(edit, at)
    while True:
        field, at = read_varint(edit, at)
        if field == _END_OF_FIELDS:
            # The upper bits of a number select a directory; Basalt uses only one.
            return number & _NUMBER_MASK, size_bytes, at
        at = _skipped(edit, at)


def _blob_edit(edit: bytes, at: int, *, has_checksum: bool) -> int:
    for _ in range(3):
        _, at = read_varint(edit, at)
    if has_checksum:
        at = _skipped(edit, _skipped(edit, at))
    while True:
        field, at = read_varint(edit, at)
        if field == 0:
            return at
        at = _skipped(edit, at)


def _skipped(edit: bytes, at: int) -> int:
    """Return the position after a length-prefixed text."""
    length, at = read_varint(edit, at)
    if at + length > len(edit):
        raise IndexError
    return at + length


def without_table(family: int, level: int, table: int) -> bytes:
    """Return the edit that removes an SST file from a family."""
    edit = varint(_DELETED_FILE) + varint(level) + varint(table)
    return edit + varint(_FAMILY) + varint(family) if family else edit


def _head(edit: bytes) -> tuple[dict[int, int], dict[int, bytes]]:
    """Return the numbers and texts at the start of an edit."""
    numbers: dict[int, int] = {}
    texts: dict[int, bytes] = {}
    at = 0
    try:
        while at < len(edit):
            tag, at = read_varint(edit, at)
            if tag in _TEXTS:
                length, at = read_varint(edit, at)
                texts[tag] = edit[at : at + length]
                at += length
            elif tag in _NUMBERS:
                numbers[tag], at = read_varint(edit, at)
            else:
                break
    except IndexError:
        # The checksum matched, so the format is unknown. Return nothing, so that every WAL file counts as required.
        return {}, {}
    return numbers, texts
