"""The log format of RocksDB, read without RocksDB: its write-ahead log (`*.log`) and its MANIFEST.

Why we read it ourselves before every open: RocksDB 10.4 passes over a record whose header is zeroed as if the log
ended its block there, and opens without the rest; a record type flipped to one of the recyclable kinds makes it read
for ever. A scan of ours costs about 1 us per record, and only what was not flushed is there to be scanned.

A log is blocks of 32 KiB, each filled with fragments; a fragment never crosses a block, and fewer than seven bytes
left in a block are zeros:

     0        4     6    7
    ┌────────┬─────┬────┬──────────────────┐
    │ crc    │ len │type│ payload          │   type: 1 full, 2 first, 3 middle, 4 last
    │ u32 le │ u16 │ u8 │ len bytes        │   crc: CRC32C over type and payload, rotated and offset ("masked")
    └────────┴─────┴────┴──────────────────┘

A full fragment, or first, middle ..., last, is one record. Zeros to the end of the file are space laid out ahead.

What is wrong with a log is told apart by what comes after it. Where nothing valid follows, the tail is `torn`: the
bytes of writes under way when the power went, which nobody was told are durable. Where a valid fragment follows, or
a length alone does not fit bytes that are whole, the log is damaged.
"""

from __future__ import annotations

import mmap
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from struct import Struct
from typing import Final

import google_crc32c

from basaltmq.errors import CorruptionError

BLOCK_BYTES: Final = 32 * 1024
_HEADER: Final = Struct("<IHB")
_HEADER_BYTES: Final = _HEADER.size
_FULL, _FIRST, _MIDDLE, _LAST = 1, 2, 3, 4
_MASK_DELTA: Final = 0xA282EAD8
_WAL_NAME: Final = re.compile(r"(\d{6,})\.log")
_MANIFEST_NAME: Final = re.compile(rb"MANIFEST-\d{6,}\n")
_TYPE_BYTE: Final = re.compile(rb"[\x01-\x04]")


@dataclass(frozen=True, slots=True)
class LogFault:
    """The first thing wrong in a log. `cut_at` is where the last whole record before it ends."""

    offset: int
    what: str
    torn: bool
    cut_at: int
    resumes_at: int | None = None


@dataclass(frozen=True, slots=True)
class LogScan:
    """What a log holds."""

    path: Path
    size_bytes: int
    records: int
    fault: LogFault | None

    def describe(self) -> str:
        """The fault in words."""
        fault = self.fault
        assert fault is not None
        after = f"; valid records go on at byte {fault.resumes_at}" if fault.resumes_at is not None else ""
        return f"{self.path}: {fault.what} at byte {fault.offset} of {self.size_bytes}{after}"


def masked(crc: int) -> int:
    """RocksDB's disguise for a CRC that is itself stored among data with CRCs."""
    return (((crc >> 15) | (crc << 17)) + _MASK_DELTA) & 0xFFFFFFFF


def wal_files(database: Path) -> list[Path]:
    """The write-ahead logs, oldest first."""
    return sorted((path for path in database.iterdir() if _WAL_NAME.fullmatch(path.name)), key=wal_number)


def current_manifest(database: Path) -> Path:
    """The MANIFEST that CURRENT names."""
    current = database / "CURRENT"
    try:
        raw = current.read_bytes()
    except FileNotFoundError:
        raise CorruptionError(f"{current} is missing, so the store cannot be read; restore a backup") from None
    if not _MANIFEST_NAME.fullmatch(raw):
        raise CorruptionError(f"{current} does not name a MANIFEST: {raw[:40]!r}; restore a backup")
    manifest = database / raw[:-1].decode("ascii")
    if not manifest.exists():
        raise CorruptionError(f"{current} names {manifest.name}, which is not there; restore a backup")
    return manifest


def is_wal(name: str) -> bool:
    return _WAL_NAME.fullmatch(name) is not None


def wal_number(path: Path) -> int:
    match = _WAL_NAME.fullmatch(path.name)
    assert match is not None
    return int(match[1])


def read_records(path: Path) -> Iterator[bytes]:
    """The whole records of a log, up to the first thing wrong with it."""
    scan = scan_log(path)
    end = scan.size_bytes if scan.fault is None else scan.fault.cut_at
    data = path.read_bytes()[:end]
    parts: list[bytes] = []
    offset = 0
    while offset < end:
        room = BLOCK_BYTES - offset % BLOCK_BYTES
        if room < _HEADER_BYTES:
            offset += room
            continue
        _, length, kind = _HEADER.unpack_from(data, offset)
        if kind == 0:
            return
        start = offset + _HEADER_BYTES
        offset = start + length
        parts.append(data[start:offset])
        if kind in (_FULL, _LAST):
            yield b"".join(parts)
            parts.clear()


def append_record(path: Path, record: bytes) -> None:
    """Add a record smaller than a block to a log nobody else writes."""
    with open(path, "ab") as log:
        room = BLOCK_BYTES - log.tell() % BLOCK_BYTES
        if room < _HEADER_BYTES:
            log.write(bytes(room))
            room = BLOCK_BYTES
        first, last = record[: room - _HEADER_BYTES], record[room - _HEADER_BYTES :]
        for kind, part in ((_FIRST, first), (_LAST, last)) if last else ((_FULL, first),):
            body = bytes([kind]) + part
            log.write(_HEADER.pack(masked(google_crc32c.value(body)), len(part), kind) + part)


def scan_log(path: Path) -> LogScan:
    """Read a log through and find the first thing wrong with it."""
    with open(path, "rb") as file:
        size = os.fstat(file.fileno()).st_size
        if size == 0:
            return LogScan(path, 0, 0, None)
        with mmap.mmap(file.fileno(), size, access=mmap.ACCESS_READ) as data:
            records, fault = _scan(data, size)
    return LogScan(path, size, records, fault)


def _scan(data: mmap.mmap, size: int) -> tuple[int, LogFault | None]:
    crc_of = google_crc32c.value
    header_of = _HEADER.unpack_from
    offset = whole_end = records = 0
    inside = False
    while offset < size:
        room = BLOCK_BYTES - offset % BLOCK_BYTES
        if room < _HEADER_BYTES:
            if data[offset : offset + room].strip(b"\0"):
                return records, _fault(data, size, offset, "bytes where a block ends in zeros", whole_end)
            offset += room
            continue
        if offset + _HEADER_BYTES > size:
            return records, _fault(data, size, offset, "the file ends inside a header", whole_end)
        stored, length, kind = header_of(data, offset)
        end = offset + _HEADER_BYTES + length
        if kind == 0 and length == 0 and stored == 0:
            if not inside and _zeros(data, offset, size):
                return records, None
            return records, _fault(data, size, offset, "zeros instead of a record", whole_end)
        if _HEADER_BYTES + length > room:
            return records, _fault(data, size, offset, "a length that passes its block", whole_end)
        if end > size:
            return records, _fault(data, size, offset, "the file ends inside a record", whole_end)
        crc = crc_of(data[offset + 6 : end])
        if stored != (((crc >> 15) | (crc << 17)) + _MASK_DELTA) & 0xFFFFFFFF:
            return records, _fault(data, size, offset, "a record that does not match its checksum", whole_end)
        if kind > _LAST:
            what = f"a record of kind {kind}, which Basalt does not write"
            return records, LogFault(offset, what, False, whole_end, offset)
        if inside != (kind in (_MIDDLE, _LAST)):
            what = "a record that begins inside another" if inside else "the rest of a record without its beginning"
            return records, LogFault(offset, what, False, whole_end, offset)
        offset = end
        inside = kind in (_FIRST, _MIDDLE)
        if not inside:
            records += 1
            whole_end = offset
    if inside:
        return records, LogFault(whole_end, "the file ends before the last part of a record", True, whole_end)
    return records, None


def _fault(data: mmap.mmap, size: int, offset: int, what: str, cut_at: int) -> LogFault:
    if _is_whole_but_for_length(data, size, offset):
        return LogFault(offset, "a record whose length does not fit its bytes", False, cut_at, offset)
    resumes_at = _next_valid(data, size, offset + 1)
    return LogFault(offset, what, resumes_at is None, cut_at, resumes_at)


def _is_whole_but_for_length(data: mmap.mmap, size: int, offset: int) -> bool:
    """The checksum leaves the length out: bytes up to the end that match it were written whole."""
    end = min(size, offset - offset % BLOCK_BYTES + BLOCK_BYTES)
    if end - offset <= _HEADER_BYTES or data[offset + 6] not in (_FULL, _FIRST, _MIDDLE, _LAST):
        return False
    stored: int = _HEADER.unpack_from(data, offset)[0]
    return stored == masked(google_crc32c.value(data[offset + 6 : end]))


def _next_valid(data: mmap.mmap, size: int, start: int) -> int | None:
    """Where the next fragment with a matching checksum is, at any byte: lengths before it may be wrong."""
    base = start - start % BLOCK_BYTES
    while base < size:
        block = data[base : min(base + BLOCK_BYTES, size)]
        for match in _TYPE_BYTE.finditer(block, max(start - base, 0) + 6):
            at = match.start() - 6
            stored, length, _ = _HEADER.unpack_from(block, at)
            end = at + _HEADER_BYTES + length
            # Seven bytes of CRC and type without payload match too easily by chance; Basalt writes no empty record.
            if length > 0 and end <= len(block) and stored == masked(google_crc32c.value(block[at + 6 : end])):
                return base + at
        base += BLOCK_BYTES
    return None


def _zeros(data: mmap.mmap, start: int, size: int) -> bool:
    step = 1 << 20
    return not any(data[at : min(at + step, size)].strip(b"\0") for at in range(start, size, step))
