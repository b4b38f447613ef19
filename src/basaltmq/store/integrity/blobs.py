"""Reads RocksDB blob files without RocksDB, so that a fault has a file name and an offset.

RocksDB reports "Blob CRC mismatch" without a position, and reads only values that SST files still refer to. A blob file
is a header, records and a footer, all little-endian:

    header  30   magic u32, version u32, family u32, flags u8, compression u8, expiration 2 x u64
    record  32   key length u64, value length u64, expiration u64, CRC of these 24, CRC of key and value; key; value
    footer  32   magic u32, records u64, expiration 2 x u64, CRC of these 28

CRCs are CRC32C, masked as in a log. A file without a footer is incomplete: a flush or a compaction was running.
"""

from __future__ import annotations

import mmap
import os
from dataclasses import dataclass
from pathlib import Path
from struct import Struct
from typing import Final

import google_crc32c

from basaltmq.store.integrity.wal import masked

_MAGIC: Final = 0x00248F37
_VERSION: Final = 1
_FILE_HEADER: Final = Struct("<IIIBBQQ")
_RECORD_HEADER: Final = Struct("<QQQII")
_RECORD_GUARDED_BYTES: Final = 24
_FOOTER: Final = Struct("<IQQQI")
_FOOTER_GUARDED_BYTES: Final = 28


@dataclass(frozen=True, slots=True)
class BlobFault:
    """A fault in a blob file. `key` is the key of the lost value, if known."""

    offset: int
    what: str
    key: bytes | None = None


REPAIRED_TAIL_BYTES: Final = 1 << 30
"""Zeros after the end of a repaired blob file: four times the largest batch, so no value can lie beyond. They are a
sparse hole and use no space."""


def is_framed(path: Path, family: int) -> bool:
    """Whether a blob file has a valid footer and a valid header for this family."""
    with open(path, "rb") as file:
        size = os.fstat(file.fileno()).st_size
        if size < _FILE_HEADER.size + _FOOTER.size:
            return False
        head = file.read(_FILE_HEADER.size)
        file.seek(size - _FOOTER.size)
        faults: list[BlobFault] = []
        _footer(head + file.read(), _FILE_HEADER.size, faults)
    return not faults and head == _FILE_HEADER.pack(_MAGIC, _VERSION, family, 0, 0, 0, 0)


def write_frame(path: Path, family: int) -> None:
    """Write a valid header and a valid footer around the content of a damaged blob file."""
    with open(path, "r+b") as file:
        file.write(_FILE_HEADER.pack(_MAGIC, _VERSION, family, 0, 0, 0, 0))
        end = os.fstat(file.fileno()).st_size + REPAIRED_TAIL_BYTES
        file.truncate(end)
        footer = _FOOTER.pack(_MAGIC, 0, 0, 0, 0)[:_FOOTER_GUARDED_BYTES]
        file.seek(end)
        file.write(footer + Struct("<I").pack(masked(google_crc32c.value(footer))))


def scan_blobs(path: Path) -> tuple[int, list[BlobFault]]:
    """Read a blob file. Return the number of valid records, and the faults."""
    with open(path, "rb") as file:
        size = os.fstat(file.fileno()).st_size
        if size < _FILE_HEADER.size:
            return 0, [BlobFault(0, f"a file of {size} bytes, shorter than its header")]
        with mmap.mmap(file.fileno(), size, access=mmap.ACCESS_READ) as data:
            return _scan(data, size)


def _scan(data: mmap.mmap, size: int) -> tuple[int, list[BlobFault]]:
    faults: list[BlobFault] = []
    magic, version, _, flags, _, begin, end_of_life = _FILE_HEADER.unpack_from(data, 0)
    if magic != _MAGIC or version != _VERSION or flags or begin or end_of_life:
        faults.append(BlobFault(0, "an invalid file header"))
    end = size - _FOOTER.size
    counted = _footer(data, end, faults)
    offset, whole, seen = _FILE_HEADER.size, 0, 0
    while offset < end:
        guarded = data[offset : offset + _RECORD_GUARDED_BYTES]
        if offset + _RECORD_HEADER.size > end:
            faults.append(BlobFault(offset, "the file ends inside a record"))
            break
        key_bytes, value_bytes, _, header_crc, crc = _RECORD_HEADER.unpack_from(data, offset)
        if header_crc != masked(google_crc32c.value(guarded)):
            # Without its lengths the next record cannot be located.
            faults.append(BlobFault(offset, "a record header that does not match its checksum; the rest is not read"))
            return whole, faults
        key_at = offset + _RECORD_HEADER.size
        record_end = key_at + key_bytes + value_bytes
        if record_end > end:
            faults.append(BlobFault(offset, "the file ends inside a record"))
            break
        seen += 1
        if crc == masked(google_crc32c.value(data[key_at:record_end])):
            whole += 1
        else:
            key = data[key_at : key_at + key_bytes]
            faults.append(BlobFault(offset, "a value that does not match its checksum", key))
        offset = record_end
    if counted is not None and counted != seen and not faults:
        faults.append(BlobFault(end, f"a footer that counts {counted} values where there are {seen}"))
    return whole, faults


def _footer(data: mmap.mmap | bytes, at: int, faults: list[BlobFault]) -> int | None:
    if at < _FILE_HEADER.size:
        faults.append(BlobFault(max(at, 0), "no footer"))
        return None
    magic, counted, _, _, crc = _FOOTER.unpack_from(data, at)
    if magic != _MAGIC or crc != masked(google_crc32c.value(data[at : at + _FOOTER_GUARDED_BYTES])):
        faults.append(BlobFault(at, "a footer that does not match its checksum"))
        return None
    assert isinstance(counted, int)
    return counted
