"""Reads RocksDB's log format without RocksDB: its WAL files (`*.log`) and its MANIFEST.

Basalt scans these files before every open, for two reasons. RocksDB 10.4 treats a record with a zeroed header as the
end of its block and opens without the rest. A record type flipped to a recyclable kind makes RocksDB read forever. The
scan costs about 1 us per record, and only data that was not flushed has to be scanned.

A log consists of blocks of 32 KiB filled with fragments. A fragment never crosses a block. Fewer than seven bytes left
in a block are zeros:

     0        4     6    7
    ┌────────┬─────┬────┬──────────────────┐
    │ crc    │ len │type│ payload          │   type: 1 full, 2 first, 3 middle, 4 last
    │ u32 le │ u16 │ u8 │ len bytes        │   crc: CRC32C over type and payload, rotated and offset ("masked")
    └────────┴─────┴────┴──────────────────┘

A record is one full fragment, or first, middle ..., last. Zeros up to the end of the file are preallocated space.

The bytes after a fault decide its kind. If nothing valid follows, the tail is `torn`: a power loss interrupted writes
that were never confirmed as durable. If a valid fragment follows, or only the length of an otherwise complete fragment
is wrong, the log is damaged.
"""

from __future__ import annotations

import mmap
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from struct import Struct
from typing import BinaryIO, Final

import google_crc32c

from basaltmq.errors import CorruptionError

BLOCK_BYTES: Final = 32 * 1024
_HEADER: Final = Struct("<IHB")
_HEADER_BYTES: Final = _HEADER.size
_BATCH_HEAD: Final = Struct("<QI")
"""The start of a WAL record: the sequence number of its first row change, and the number of changes."""
_FULL, _FIRST, _MIDDLE, _LAST = 1, 2, 3, 4
_MASK_DELTA: Final = 0xA282EAD8
_WAL_NAME: Final = re.compile(r"(\d{6,})\.log")
_MANIFEST_NAME: Final = re.compile(rb"MANIFEST-\d{6,}\n")
_TYPE_BYTE: Final = re.compile(rb"[\x01-\x04]")


@dataclass(frozen=True, slots=True)
class LogFault:
    """The first fault in a log. `cut_at` is the end of the last complete record before it."""

    offset: int
    what: str
    torn: bool
    cut_at: int
    resumes_at: int | None = None


@dataclass(frozen=True, slots=True)
class LogScan:
    """The result of reading a log."""

    path: Path
    size_bytes: int
    records: int
    fault: LogFault | None
    last_record_at: int = 0
    """The start of the last complete record."""

    @property
    def is_cut_short(self) -> bool:
        """Whether the file ends inside its last record, as happens while it is being written."""
        return self.fault is not None and self.fault.torn and self.fault.what.startswith("the file ends")

    def describe(self) -> str:
        """Describe the fault."""
        fault = self.fault
        assert fault is not None
        after = f"; valid records continue at byte {fault.resumes_at}" if fault.resumes_at is not None else ""
        return f"{self.path}: {fault.what} at byte {fault.offset} of {self.size_bytes}{after}"


def masked(crc: int) -> int:
    """Mask a CRC as RocksDB does for CRCs stored next to data with CRCs."""
    return (((crc >> 15) | (crc << 17)) + _MASK_DELTA) & 0xFFFFFFFF


def wal_files(database: Path) -> list[Path]:
    """Return the WAL files, oldest first."""
    return sorted((path for path in database.iterdir() if _WAL_NAME.fullmatch(path.name)), key=wal_number)


def current_manifest(database: Path) -> Path:
    """Return the MANIFEST named in CURRENT."""
    current = database / "CURRENT"
    try:
        raw = current.read_bytes()
    except FileNotFoundError:
        raise CorruptionError(f"{current} is missing; restore a backup, or run repair") from None
    if not _MANIFEST_NAME.fullmatch(raw):
        raise CorruptionError(f"{current} does not name a MANIFEST: {raw[:40]!r}; restore a backup, or run repair")
    manifest = database / raw[:-1].decode("ascii")
    if not manifest.exists():
        raise CorruptionError(f"{current} names {manifest.name}, which is missing; restore a backup, or run repair")
    return manifest


def is_wal(name: str) -> bool:
    return _WAL_NAME.fullmatch(name) is not None


def wal_number(path: Path) -> int:
    match = _WAL_NAME.fullmatch(path.name)
    assert match is not None
    return int(match[1])


def read_records(path: Path) -> Iterator[bytes]:
    """Yield the complete records of a log up to its first fault."""
    return (record for _, record in read_placed_records(scan_log(path)))


def read_placed_records(scan: LogScan) -> Iterator[tuple[int, bytes]]:
    """Yield the complete records of a scanned log up to its first fault, with the end of the record before each."""
    path = scan.path
    end = scan.size_bytes if scan.fault is None else scan.fault.cut_at
    data = path.read_bytes()[:end]
    parts: list[bytes] = []
    offset = before = 0
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
            yield before, b"".join(parts)
            parts.clear()
            before = offset


def append_record(path: Path, record: bytes) -> None:
    """Append a record to a log that no other process writes."""
    with open(path, "ab") as log:
        write_record(log, log.tell(), record)


def write_record(log: BinaryIO, at: int, record: bytes) -> int:
    """Write a record at position `at`, the end of the log. Return the new end."""
    first = True
    while True:
        room = BLOCK_BYTES - at % BLOCK_BYTES
        if room < _HEADER_BYTES:
            log.write(bytes(room))
            at += room
            room = BLOCK_BYTES
        part, record = record[: room - _HEADER_BYTES], record[room - _HEADER_BYTES :]
        kind = (_FIRST, _FULL, _MIDDLE, _LAST)[2 * (not first) + (not record)]
        body = bytes([kind]) + part
        log.write(_HEADER.pack(masked(google_crc32c.value(body)), len(part), kind) + part)
        at += _HEADER_BYTES + len(part)
        if not record:
            return at
        first = False


@dataclass(frozen=True, slots=True)
class DamagedRecord:
    """A part of a log without a complete record. `payload` is the unverified content of its fragments."""

    offset: int
    end: int
    payload: bytes


def salvage_records(path: Path) -> Iterator[bytes | DamagedRecord]:
    """Yield every complete record of a log, including those after damage.

    Reading resumes at the end given by the damaged fragment's length, or else at the next block. It never searches for
    a header at arbitrary bytes, because a message payload may contain bytes that look like a record.
    """
    data = path.read_bytes()
    parts: list[bytes] = []
    bad: list[bytes] = []
    offset = begin = bad_at = 0
    in_record = in_damage = False
    while offset < len(data):
        room = BLOCK_BYTES - offset % BLOCK_BYTES
        if room < _HEADER_BYTES:
            offset += room
            continue
        part, kind, following = _fragment(data, offset, room)
        if kind == 0 and not data[offset:].strip(b"\0"):
            # Preallocated space.
            break
        whole = kind in (_FULL, _FIRST, _MIDDLE, _LAST)
        if whole and in_damage and kind in (_FULL, _FIRST):
            yield DamagedRecord(bad_at, offset, b"".join(bad))
            in_damage = False
        if not whole or in_damage or in_record != (kind in (_MIDDLE, _LAST)):
            if not in_damage:
                bad_at, bad, in_damage = (begin if in_record else offset), parts, True
                parts = []
            bad.append(part)
            in_record = False
            offset = following
            continue
        if not in_record:
            begin = offset
        parts.append(part)
        offset = following
        in_record = kind in (_FIRST, _MIDDLE)
        if not in_record:
            yield b"".join(parts)
            parts = []
    if in_record:
        bad_at, bad, in_damage = begin, parts, True
    if in_damage:
        yield DamagedRecord(bad_at, len(data), b"".join(bad))


def _fragment(data: bytes, offset: int, room: int) -> tuple[bytes, int, int]:
    """Return the payload of the fragment at `offset`, its kind (-1 if damaged) and the next fragment's position."""
    next_block = offset + room
    if offset + _HEADER_BYTES > len(data):
        return b"", -1, len(data)
    stored, length, kind = _HEADER.unpack_from(data, offset)
    end = offset + _HEADER_BYTES + length
    if stored == 0 and length == 0 and kind == 0:
        return b"", 0, next_block
    if end > min(next_block, len(data)):
        return data[offset + _HEADER_BYTES : next_block], -1, next_block
    part = data[offset + _HEADER_BYTES : end]
    if stored == masked(google_crc32c.value(data[offset + 6 : end])):
        return part, kind if kind <= _LAST else -1, end
    # If only the payload is damaged, the length is correct and another fragment or the end of the block follows.
    is_chained = next_block - end < _HEADER_BYTES or end == len(data) or _is_fragment(data, end, next_block)
    return part, -1, end if is_chained else next_block


def _is_fragment(data: bytes, offset: int, next_block: int) -> bool:
    if offset + _HEADER_BYTES > len(data):
        return False
    stored, length, _ = _HEADER.unpack_from(data, offset)
    end = offset + _HEADER_BYTES + length
    return end <= min(next_block, len(data)) and bool(stored == masked(google_crc32c.value(data[offset + 6 : end])))


def last_sequence(path: Path, scan: LogScan) -> int:
    """Return the sequence number of the last row change in a WAL file, 0 if it has none."""
    if not scan.records:
        return 0
    with open(path, "rb") as log:
        log.seek(scan.last_record_at + _HEADER_BYTES)
        head = log.read(min(_BATCH_HEAD.size, -log.tell() % BLOCK_BYTES))
        if len(head) < _BATCH_HEAD.size:
            # The record continues after the header of the next block.
            log.seek(_HEADER_BYTES, os.SEEK_CUR)
            head += log.read(_BATCH_HEAD.size - len(head))
    if len(head) < _BATCH_HEAD.size:
        return 0
    sequence, count = _BATCH_HEAD.unpack(head)
    return int(sequence + max(count, 1) - 1)


def scan_log(path: Path) -> LogScan:
    """Read a log and find its first fault."""
    with open(path, "rb") as file:
        size = os.fstat(file.fileno()).st_size
        if size == 0:
            return LogScan(path, 0, 0, None)
        with mmap.mmap(file.fileno(), size, access=mmap.ACCESS_READ) as data:
            records, fault, last_record_at = _scan(data, size)
    return LogScan(path, size, records, fault, last_record_at)


def _scan(data: mmap.mmap, size: int) -> tuple[int, LogFault | None, int]:
    crc_of = google_crc32c.value
    header_of = _HEADER.unpack_from
    offset = whole_end = records = begin = last = 0
    inside = False
    while offset < size:
        room = BLOCK_BYTES - offset % BLOCK_BYTES
        if room < _HEADER_BYTES:
            if data[offset : offset + room].strip(b"\0"):
                return records, _fault(data, size, offset, "non-zero padding at the end of a block", whole_end), last
            offset += room
            continue
        if offset + _HEADER_BYTES > size:
            return records, _fault(data, size, offset, "the file ends inside a header", whole_end), last
        stored, length, kind = header_of(data, offset)
        end = offset + _HEADER_BYTES + length
        if kind == 0 and length == 0 and stored == 0:
            if not inside and _zeros(data, offset, size):
                return records, None, last
            return records, _fault(data, size, offset, "zeros instead of a record", whole_end), last
        if _HEADER_BYTES + length > room:
            return records, _fault(data, size, offset, "a length beyond the end of its block", whole_end), last
        if end > size:
            return records, _fault(data, size, offset, "the file ends inside a record", whole_end), last
        crc = crc_of(data[offset + 6 : end])
        if stored != (((crc >> 15) | (crc << 17)) + _MASK_DELTA) & 0xFFFFFFFF:
            return records, _fault(data, size, offset, "a record that does not match its checksum", whole_end), last
        if kind > _LAST:
            what = f"a record of kind {kind}, which Basalt does not write"
            return records, LogFault(offset, what, False, whole_end, offset), last
        if inside != (kind in (_MIDDLE, _LAST)):
            what = "a record that starts inside another" if inside else "the rest of a record without its start"
            return records, LogFault(offset, what, False, whole_end, offset), last
        if not inside:
            begin = offset
        offset = end
        inside = kind in (_FIRST, _MIDDLE)
        if not inside:
            records += 1
            last = begin
            whole_end = offset
    if inside:
        return records, LogFault(whole_end, "the file ends before the last part of a record", True, whole_end), last
    return records, None, last


def _fault(data: mmap.mmap, size: int, offset: int, what: str, cut_at: int) -> LogFault:
    if _is_whole_but_for_length(data, size, offset):
        return LogFault(offset, "a record whose length does not fit its bytes", False, cut_at, offset)
    resumes_at = _next_valid(data, size, offset + 1)
    return LogFault(offset, what, resumes_at is None, cut_at, resumes_at)


def _is_whole_but_for_length(data: mmap.mmap, size: int, offset: int) -> bool:
    """Whether all bytes up to the end match the checksum, which does not cover the length."""
    end = min(size, offset - offset % BLOCK_BYTES + BLOCK_BYTES)
    if end - offset <= _HEADER_BYTES or data[offset + 6] not in (_FULL, _FIRST, _MIDDLE, _LAST):
        return False
    stored: int = _HEADER.unpack_from(data, offset)[0]
    return stored == masked(google_crc32c.value(data[offset + 6 : end]))


def _next_valid(data: mmap.mmap, size: int, start: int) -> int | None:
    """Return the position of the next fragment with a matching checksum, at any byte: lengths may be wrong."""
    base = start - start % BLOCK_BYTES
    while base < size:
        block = data[base : min(base + BLOCK_BYTES, size)]
        for match in _TYPE_BYTE.finditer(block, max(start - base, 0) + 6):
            at = match.start() - 6
            stored, length, _ = _HEADER.unpack_from(block, at)
            end = at + _HEADER_BYTES + length
            # Skip empty payloads: they match by chance too often, and Basalt writes no empty records.
            if length > 0 and end <= len(block) and stored == masked(google_crc32c.value(block[at + 6 : end])):
                return base + at
        base += BLOCK_BYTES
    return None


def _zeros(data: mmap.mmap, start: int, size: int) -> bool:
    step = 1 << 20
    return not any(data[at : min(at + step, size)].strip(b"\0") for at in range(start, size, step))
