"""The format of body files, and checks of them without RocksDB.

    bodies/0000000001.body    frames, one after the other. A file is never appended to after a restart

     0       4       8       12      16    17
    ┌───────┬───────┬───────┬───────┬─────┬─────┬──────┐
    │ magic │ head  │ crc   │ size  │ key │ key │ body │   crc: CRC32C of the body
    │ "Body"│ crc   │ u32   │ u32   │ len │     │      │   head crc: CRC32C of the header without it, and of the key
    └───────┴───────┴───────┴───────┴─────┴─────┴──────┘   little-endian

The row that points to a frame (`Place`) has the same CRC and size, so a read needs no header. Headers are for reading a
whole file: to move live bodies out of it, and to repair without readable rows.
"""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Iterable, Iterator
from pathlib import Path
from struct import Struct
from struct import error as struct_error
from typing import Final, NamedTuple

import google_crc32c

from basaltmq.errors import CorruptionError
from basaltmq.store.directory import sync_directory, sync_file

BODIES: Final = "bodies"
"""The directory of body files, next to that of RocksDB."""

SUFFIX: Final = ".body"
KEY_BYTES_MAX: Final = 255

DURABLE_KEY: Final = b"durable-end-of-bodies"
"""Key of the row in `body_files` with the position up to which body files were durable when its batch was written."""

_MAGIC: Final = b"Body"
_HEAD: Final = Struct("<4sIIIB")
_CHECKED: Final = Struct("<IIB")
_PLACE: Final = Struct("<BIQQI")
_LIVE: Final = Struct("<BQ")
_POSITION: Final = Struct("<BQQ")
_NUMBER: Final = Struct(">Q")
_LAYOUT: Final = 1


class Place(NamedTuple):
    """Where a body is: the value of a row in `body_places`."""

    file: int
    offset: int
    """Position of the frame."""
    size: int
    """Size of the body in bytes."""
    crc: int

    def encode(self) -> bytes:
        return _PLACE.pack(_LAYOUT, self.crc, self.file, self.offset, self.size)

    @classmethod
    def decode(cls, key: bytes, row: bytes) -> Place:
        try:
            layout, crc, file, offset, size = _PLACE.unpack(row)
        except struct_error:
            layout = 0
        if layout != _LAYOUT:
            raise CorruptionError(f"the row that points to the body {key.hex()} is damaged ({len(row)} bytes)")
        return cls(file, offset, size, crc)


class Position(NamedTuple):
    """A position in the sequence of body files."""

    file: int = 0
    offset: int = 0

    def encode(self) -> bytes:
        return _POSITION.pack(_LAYOUT, self.file, self.offset)

    @classmethod
    def decode(cls, row: bytes) -> Position:
        try:
            return cls(*_POSITION.unpack(row)[1:])
        except struct_error:
            return cls()


class Frame(NamedTuple):
    """A frame that a walk found."""

    key: bytes
    place: Place


def encode_number(number: int) -> bytes:
    return _NUMBER.pack(number)


def encode_live(live_bytes: int) -> bytes:
    return _LIVE.pack(_LAYOUT, live_bytes)


def decode_files(rows: Iterable[tuple[bytes, bytes]]) -> dict[int, int]:
    """Return the live bytes of each file, from the rows of `body_files`. Unreadable rows are left out."""
    found: dict[int, int] = {}
    for key, row in rows:
        if len(key) == _NUMBER.size and len(row) == _LIVE.size:
            found[_NUMBER.unpack(key)[0]] = _LIVE.unpack(row)[1]
    return found


def frame_bytes(key: bytes, size: int) -> int:
    """Return the size of the frame of a body."""
    return _HEAD.size + len(key) + size


def encode_head(key: bytes, size: int, crc: int) -> bytes:
    """Return the bytes of a frame before its body."""
    head_crc = google_crc32c.extend(google_crc32c.value(_CHECKED.pack(crc, size, len(key))), key)
    return _HEAD.pack(_MAGIC, head_crc, crc, size, len(key)) + key


def file_name(number: int) -> str:
    return f"{number:010}{SUFFIX}"


def file_number(name: str) -> int | None:
    """Return the number of a body file, None for other names."""
    stem = name.removesuffix(SUFFIX)
    return int(stem) if stem != name and stem.isascii() and stem.isdecimal() else None


def files_in(directory: Path) -> dict[int, Path]:
    """Return the body files in a directory by number, in their order. A missing directory has none."""
    try:
        names = os.listdir(directory)
    except FileNotFoundError:
        return {}
    found = {number: directory / name for name in names if (number := file_number(name)) is not None}
    return dict(sorted(found.items()))


def sync_files(directory: Path) -> None:
    """Make all body files and their names durable."""
    found = files_in(directory)
    for path in found.values():
        sync_file(path)
    if found:
        sync_directory(directory)


def link_files(source: Path, target: Path) -> None:
    """Link all body files into another directory, or copy them where links are not possible."""
    for path in files_in(source).values():
        target.mkdir(mode=0o700, exist_ok=True)
        # A dead file may be removed meanwhile.
        with contextlib.suppress(FileNotFoundError):
            try:
                os.link(path, target / path.name)
            except OSError as error:
                if isinstance(error, FileNotFoundError):
                    raise
                shutil.copyfile(path, target / path.name)


def read_body(fd: int, path: str, key: bytes, place: Place) -> bytes:
    """Read a body and check it. Raises CorruptionError."""
    begin = place.offset + _HEAD.size + len(key)
    body = os.pread(fd, place.size, begin)
    while len(body) < place.size and (more := os.pread(fd, place.size - len(body), begin + len(body))):
        body += more
    if len(body) != place.size:
        raise CorruptionError(f"{path} ends inside the body {key.hex()} at byte {place.offset}")
    if google_crc32c.value(body) != place.crc:
        raise CorruptionError(f"{path}: the body {key.hex()} at byte {place.offset} does not match its checksum")
    return body


def walk(path: Path, number: int) -> Iterator[Frame]:
    """Yield the frames of a file up to its end or to the first damaged header. Bodies are not checked."""
    with open(path, "rb", buffering=0) as file:
        end = os.fstat(file.fileno()).st_size
        offset = 0
        while offset < end:
            head = os.pread(file.fileno(), _HEAD.size + KEY_BYTES_MAX, offset)
            if len(head) < _HEAD.size:
                return
            magic, head_crc, crc, size, key_bytes = _HEAD.unpack_from(head)
            key = head[_HEAD.size : _HEAD.size + key_bytes]
            wanted = google_crc32c.extend(google_crc32c.value(_CHECKED.pack(crc, size, key_bytes)), key)
            if magic != _MAGIC or head_crc != wanted:
                return
            yield Frame(key, Place(number, offset, size, crc))
            offset += frame_bytes(key, size)


class BodyFault(NamedTuple):
    """A body that cannot be read."""

    path: Path
    key: bytes
    what: str
    body: bytes | None = None
    """The body, if only its header is damaged."""


def check_places(directory: Path, places: Iterable[tuple[bytes, Place]]) -> Iterator[BodyFault]:
    """Read the frames at these places and yield those that are damaged. Fastest in the order of places."""
    opened, path, fd = -1, directory, -1
    try:
        for key, place in places:
            if place.file != opened:
                if fd >= 0:
                    os.close(fd)
                opened, path, fd = place.file, directory / file_name(place.file), -1
                try:
                    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
                except FileNotFoundError:
                    fd = -1
            if fd < 0:
                yield BodyFault(path, key, "is missing")
                continue
            try:
                body = read_body(fd, path.name, key, place)
                head = encode_head(key, place.size, place.crc)
                if os.pread(fd, len(head), place.offset) != head:
                    yield BodyFault(path, key, f"the header of the body {key.hex()} is damaged", body)
            except CorruptionError as error:
                yield BodyFault(path, key, str(error).removeprefix(f"{path.name}: ").removeprefix(f"{path.name} "))
            except OSError as error:
                yield BodyFault(path, key, f"cannot be read: {error.strerror}")
    finally:
        if fd >= 0:
            os.close(fd)
