"""The staging area: files beside the store with records that are not imported yet.

    staging/
      RUN/BATCH/part-00003-5f0c...e1.arrow      the output of one task: an Arrow IPC file, one record batch per chunk

A retried task or a repeated batch creates a file with another name. `imports` determines which files count. A chunk
belongs to one partition of one topic and becomes one atomic append. Its timestamps are fixed when it is staged, so its
content never changes.

Besides `imports`, only this module of the plane needs pyarrow. It neither locks nor opens the store.
"""

from __future__ import annotations

import logging
import re
import shutil
import zlib
from collections.abc import Collection
from pathlib import Path
from typing import Final
from uuid import uuid4

import msgspec
import pyarrow as pa
import pyarrow.ipc

from basaltmq.errors import CorruptionError, InvalidArgumentError
from basaltmq.log.arrow import from_arrow
from basaltmq.log.batches.columnar import ColumnBatch
from basaltmq.log.batches.record import UNSTAMPED
from basaltmq.store.directory import make_directory, os_error, sync_directory, sync_file

STAGING: Final = "staging"

CHUNK_RECORDS: Final = 20_000
CHUNK_BYTES: Final = 8 << 20
"""Limits of a chunk, which becomes one frame. A single larger record is allowed."""

ABANDONED_S: Final = 24 * 3600.0
"""Unfinished stages are removed after a day. A query that resumes stages its records again."""

CRC_PIECE_BYTES: Final = 1 << 20

SCHEMA: Final = pa.schema(
    [
        pa.field("key", pa.binary()),
        pa.field("value", pa.binary()),
        pa.field("headers", pa.list_(pa.struct([pa.field("key", pa.string()), pa.field("value", pa.binary())]))),
        pa.field("timestamp", pa.timestamp("ms", tz="UTC")),
    ]
)
"""Schema of every staged file. Timestamps are never null."""

_RUN: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,99}")

_log = logging.getLogger("basaltmq.streams")


class Chunk(msgspec.Struct, frozen=True):
    """Records for one partition of a topic."""

    topic: str
    partition: int
    records: int


class Part(msgspec.Struct, frozen=True):
    """A staged file, as a task reports it to the committer."""

    file: str
    size_bytes: int
    crc: int
    chunks: list[Chunk]
    """In the order of the record batches in the file."""


def check_run(run: str) -> str:
    """Validate and return the name of a run, which is also a directory name."""
    if not _RUN.fullmatch(run):
        raise InvalidArgumentError(
            f"a run name has up to 100 letters, digits, dots, dashes and underscores, not {run!r:.120}"
        )
    return run


def folder_of(store: Path, run: str, batch: int) -> Path:
    if batch < 0:
        raise InvalidArgumentError(f"batch numbers of a run start at 0, not {batch}")
    return store / STAGING / check_run(run) / str(batch)


class PartWriter:
    """Writes one file of a stage. `finish` makes it durable; `discard` deletes an unfinished one."""

    def __init__(self, folder: Path, number: int) -> None:
        self._folder = folder
        self.path = folder / f"part-{number:05d}-{uuid4().hex}.arrow"
        self._chunks: list[Chunk] = []
        try:
            make_directory(folder)
            self._sink = pa.OSFile(str(self.path), "wb")
        except OSError as error:
            raise os_error(error, folder) from error
        self._writer = pa.ipc.new_file(self._sink, SCHEMA)

    def add(self, topic: str, partition: int, batch: pa.RecordBatch, record_bytes_max: int) -> None:
        """Add a chunk. Rejects records that the topic would reject, before anything is imported."""
        from_arrow(batch, UNSTAMPED).check_sizes(record_bytes_max)
        try:
            self._writer.write_batch(batch)
        except OSError as error:
            raise os_error(error, self.path) from error
        self._chunks.append(Chunk(topic, partition, batch.num_rows))

    def finish(self) -> Part:
        try:
            self._writer.close()
            self._sink.close()
            sync_file(self.path)
            sync_directory(self._folder)
            return Part(self.path.name, self.path.stat().st_size, _crc(self.path), self._chunks)
        except OSError as error:
            raise os_error(error, self.path) from error

    def discard(self) -> None:
        self._sink.close()
        self.path.unlink(missing_ok=True)


class StagedPart:
    """A staged file with a verified checksum, read chunk by chunk."""

    def __init__(self, folder: Path, part: Part) -> None:
        path = folder / part.file
        try:
            if path.stat().st_size != part.size_bytes or _crc(path) != part.crc:
                raise CorruptionError(f"the staged file {path} has changed since it was staged; run the batch again")
            self._file = pa.ipc.open_file(pa.memory_map(str(path)))
        except FileNotFoundError:
            raise CorruptionError(f"the staged file {path} is missing; restore it, and run the batch again") from None
        except OSError as error:
            raise os_error(error, path) from error

    def chunk(self, index: int) -> ColumnBatch:
        return from_arrow(self._file.get_batch(index), UNSTAMPED)


def remove(folder: Path) -> None:
    """Remove a stage and its empty parent directories. `expire` removes the rest later."""
    shutil.rmtree(folder, ignore_errors=True)
    for above in (folder.parent, folder.parent.parent):
        try:
            above.rmdir()
        except OSError:
            return


def expire(store: Path, needed: Collection[tuple[str, int]], now_s: float) -> int:
    """Remove stages that are not needed and unchanged for ABANDONED_S seconds. Return how many."""
    gone = 0
    for folder in sorted((store / STAGING).glob("*/*")):
        run, batch = folder.parent.name, folder.name
        if not batch.isdecimal() or (run, int(batch)) in needed:
            continue
        try:
            is_old = now_s - folder.stat().st_mtime >= ABANDONED_S
        except FileNotFoundError:
            continue
        if is_old:
            remove(folder)
            gone += 1
    if gone:
        _log.warning("removed %d abandoned stages in %s", gone, store / STAGING)
    return gone


def _crc(path: Path) -> int:
    crc = 0
    with open(path, "rb") as file:
        while piece := file.read(CRC_PIECE_BYTES):
            crc = zlib.crc32(piece, crc)
    return crc
