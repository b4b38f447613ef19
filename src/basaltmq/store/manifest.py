"""What we need to know from a MANIFEST, and the one thing we add to a copy of it.

A record of a MANIFEST is one edit: tag (varint), value, tag, value ... Those of interest come first in it, before the
lists of files; reading stops at the first tag that is not among them:

    1 comparator, 201 name of a family that is added, 8193 database id     bytes, after a varint of their length
    2 log number, 3 next file, 4 last sequence, 9 previous log, 10 oldest log to keep, 200 family, 203 last family
                                                                           varint

Logs below the highest "oldest log to keep" are left over from before a flush. RocksDB passes over them, and nobody
syncs them any more, so after a power loss they may well be torn.

`without_table` is an edit that takes a table out (6: level, number), for a copy to be read without it.
"""

from __future__ import annotations

from pathlib import Path
from typing import Final

from basaltmq.store.wal import read_records

_OLDEST_LOG: Final = 10
_DELETED_FILE: Final = 6
_FAMILY: Final = 200
_FAMILY_ADD: Final = 201
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
