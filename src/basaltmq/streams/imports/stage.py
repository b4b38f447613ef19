"""The stage: records on their way into topics, in files beside the store that count for nothing yet.

    staging/
      RUN/BATCH/part-00003-5f0c...e1.arrow      what one task brought: an Arrow IPC file, a chunk per record batch

A task that is tried twice, or a batch that is done again, makes a file of another name; which ones count is said by
`imports`. A chunk belongs to one partition of one topic and becomes one append, which is atomic; its times are fixed
when it is staged, so that it is the same whenever it is looked at.

The only module of the plane besides `imports` that needs pyarrow. Nothing here locks or opens the store.
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
from basaltmq.log.batches.arrow import from_arrow
from basaltmq.log.batches.columnar import ColumnBatch
from basaltmq.log.batches.record import UNSTAMPED
from basaltmq.store.directory import make_directory, os_error, sync_directory, sync_file

STAGING: Final = "staging"

CHUNK_RECORDS: Final = 20_000
CHUNK_BYTES: Final = 8 << 20
"""What a chunk holds at most, but for a single larger record: a frame that is written and read in one go."""

ABANDONED_S: Final = 24 * 3600.0
"""A stage that nobody finished is removed after a day: a query that comes back stages anew."""

CRC_PIECE_BYTES: Final = 1 << 20

SCHEMA: Final = pa.schema(
    [
        pa.field("key", pa.binary()),
        pa.field("value", pa.binary()),
        pa.field("headers", pa.list_(pa.struct([pa.field("key", pa.string()), pa.field("value", pa.binary())]))),
        pa.field("timestamp", pa.timestamp("ms", tz="UTC")),
    ]
)
"""Of every staged file. No time is null."""

_RUN: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,99}")

_log = logging.getLogger("basaltmq.streams")


class Chunk(msgspec.Struct, frozen=True):
    """Records for one partition."""

    topic: str
    partition: int
    records: int


class Part(msgspec.Struct, frozen=True):
    """A staged file: what a task tells the one who commits."""

    file: str
    size_bytes: int
    crc: int
    chunks: list[Chunk]
    """In the order of the file's record batches."""


def check_run(run: str) -> str:
    """The name of a run, which is that of a folder too."""
    if not _RUN.fullmatch(run):
        raise InvalidArgumentError(
            f"a run is named by up to 100 letters, digits, dots, dashes and underscores, not {run!r:.120}"
        )
    return run


def folder_of(store: Path, run: str, batch: int) -> Path:
    if batch < 0:
        raise InvalidArgumentError(f"batches of a run are numbered from 0 on, not {batch}")
    return store / STAGING / check_run(run) / str(batch)


class PartWriter:
    """Writes one file of a stage. `finish` makes it durable; without it, `discard`."""

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
        """A chunk; refused here if a topic would refuse it, where nothing has happened yet."""
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
    """A file of a stage, checked, to be read chunk by chunk."""

    def __init__(self, folder: Path, part: Part) -> None:
        path = folder / part.file
        try:
            if path.stat().st_size != part.size_bytes or _crc(path) != part.crc:
                raise CorruptionError(f"the staged file {path} is not what was staged; run the batch again")
            self._file = pa.ipc.open_file(pa.memory_map(str(path)))
        except FileNotFoundError:
            raise CorruptionError(f"the staged file {path} is gone; put it back, and run the batch again") from None
        except OSError as error:
            raise os_error(error, path) from error

    def chunk(self, index: int) -> ColumnBatch:
        return from_arrow(self._file.get_batch(index), UNSTAMPED)


def remove(folder: Path) -> None:
    """Remove a stage, and what it was in if that is empty; what cannot be removed expires."""
    shutil.rmtree(folder, ignore_errors=True)
    for above in (folder.parent, folder.parent.parent):
        try:
            above.rmdir()
        except OSError:
            return


def expire(store: Path, needed: Collection[tuple[str, int]], now_s: float, age_s: float = ABANDONED_S) -> int:
    """Remove stages that nobody needs and nothing was added to for `age_s`; how many there were."""
    gone = 0
    for folder in sorted((store / STAGING).glob("*/*")):
        run, batch = folder.parent.name, folder.name
        if not batch.isdecimal() or (run, int(batch)) in needed:
            continue
        try:
            is_old = now_s - folder.stat().st_mtime >= age_s
        except FileNotFoundError:
            continue
        if is_old:
            remove(folder)
            gone += 1
    if gone:
        _log.warning("%d abandoned stages in %s were removed", gone, store / STAGING)
    return gone


def _crc(path: Path) -> int:
    crc = 0
    with open(path, "rb") as file:
        while piece := file.read(CRC_PIECE_BYTES):
            crc = zlib.crc32(piece, crc)
    return crc
