"""Sorted runs of index rows, the exchange format between tasks that read the log and tasks that write SST files.

    a reading task collects up to RUN_ROWS rows, sorts them, and writes one Arrow IPC file in batches of BATCH_ROWS
    the driver splits the keys of all runs into ranges of about equal size; a task per range reads its part of each run

`Run.firsts` has the first key of each batch. So ranges are computed without reading files, and a task reads only the
batches of its range. Memory is limited by RUN_ROWS in the first task and by the range in the second.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Final
from uuid import uuid4

import msgspec
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.ipc

from basaltmq.errors import CorruptionError
from basaltmq.store.directory import os_error

RUN_ROWS: Final = 1_000_000
"""Rows that a task collects before it writes a run: about 200 MB of Python objects."""

BATCH_ROWS: Final = 16_384
"""Rows per batch, which is the maximum error of a range per run."""

RANGE_ROWS: Final = 1_000_000
"""Rows per SST file: 20 to 60 MB on disk, the size that RocksDB itself produces."""

_SCHEMA: Final = pa.schema([pa.field("key", pa.binary()), pa.field("value", pa.binary())])


class Run(msgspec.Struct, frozen=True):
    path: str
    rows: int
    firsts: list[bytes]
    is_final: bool
    """Whether the rows are final. In other runs, rows of a shard may be parts that are still to be combined."""


class RunWriter:
    """Collects rows in any order and writes them as runs."""

    def __init__(self, folder: Path, *, is_final: bool = False) -> None:
        self._folder = folder
        self._is_final = is_final
        self.keys: list[bytes] = []
        self.values: list[bytes] = []
        self.runs: list[Run] = []

    def add(self, key: bytes, value: bytes) -> None:
        self.keys.append(key)
        self.values.append(value)

    def write_if_full(self) -> None:
        """Write a run if the limit is reached."""
        if len(self.keys) >= RUN_ROWS:
            self._write()

    def finish(self) -> list[Run]:
        """Write the rest and return all runs."""
        if self.keys:
            self._write()
        return self.runs

    def _write(self) -> None:
        rows = _sorted(self.keys, self.values)
        self.keys, self.values = [], []
        path = self._folder / f"run-{uuid4().hex}.arrow"
        firsts = []
        try:
            with pa.OSFile(str(path), "wb") as sink, pa.ipc.new_file(sink, _SCHEMA) as writer:
                for batch in rows.to_batches(max_chunksize=BATCH_ROWS):
                    writer.write_batch(batch)
                    firsts.append(batch.column(0)[0].as_py())
        except OSError as error:
            raise os_error(error, path) from error
        self.runs.append(Run(str(path), rows.num_rows, firsts, self._is_final))


def _sorted(keys: list[bytes], values: list[bytes]) -> pa.Table:
    key_array = pa.array(keys, pa.binary())
    order = pc.array_sort_indices(key_array)
    return pa.Table.from_arrays([key_array.take(order), pa.array(values, pa.binary()).take(order)], schema=_SCHEMA)


def bounds_of(runs: Sequence[Run], ranges: int, whole: bytes, apart: Iterable[bytes]) -> list[tuple[bytes, bytes]]:
    """Return key ranges [begin, end) that cover all runs, with about equal numbers of rows.

    Rows of the kinds in `whole` are split only between shards. No range spans a key of `apart`.
    """
    firsts = sorted(first for run in runs for first in run.firsts)
    if not firsts:
        return []
    step = max(1, len(firsts) // max(ranges, 1))
    cuts = {first[:9] if first[:1] in whole else first for first in firsts[step::step]} | set(apart)
    edges = [b"", *sorted(cut for cut in cuts if cut), b"\xff"]
    return list(pairwise(edges))


def read_range(run: Run, begin: bytes, end: bytes) -> list[pa.Table]:
    """Return the rows of a run in a range, in order."""
    first = max(0, bisect_left(run.firsts, begin) - 1)
    last = bisect_left(run.firsts, end)
    if first >= last:
        return []
    try:
        file = pa.ipc.open_file(pa.memory_map(run.path))
    except FileNotFoundError:
        raise CorruptionError(f"{run.path} is missing; run the job again") from None
    except OSError as error:
        raise os_error(error, Path(run.path)) from error
    found = []
    for number in range(first, last):
        batch = file.get_batch(number)
        keys = batch.column(0)
        low = _position(keys, begin)
        high = _position(keys, end)
        if low < high:
            found.append(pa.Table.from_batches([batch.slice(low, high - low)]))
    return found


class SortedRows:
    """Looks up rows of final runs. The files are memory-mapped."""

    def __init__(self, runs: Sequence[Run]) -> None:
        self._runs = runs
        self._files = [pa.ipc.open_file(pa.memory_map(run.path)) for run in runs]

    def get(self, key: bytes) -> bytes | None:
        for run, file in zip(self._runs, self._files, strict=True):
            number = bisect_right(run.firsts, key) - 1
            if number < 0:
                continue
            batch = file.get_batch(number)
            at = _position(batch.column(0), key)
            if at < batch.num_rows and batch.column(0)[at].as_py() == key:
                found: bytes = batch.column(1)[at].as_py()
                return found
        return None


def merged(runs: Iterable[Run], begin: bytes, end: bytes) -> list[tuple[bytes, bytes]]:
    """Return the rows of a range over all runs, sorted by key."""
    tables = [table for run in runs for table in read_range(run, begin, end)]
    if not tables:
        return []
    rows = pa.concat_tables(tables).combine_chunks()
    if len(tables) > 1:
        rows = rows.take(pc.array_sort_indices(rows.column(0).combine_chunks()))
    return list(zip(rows.column(0).to_pylist(), rows.column(1).to_pylist(), strict=True))


def _position(keys: pa.Array, key: bytes) -> int:
    """Return how many of the sorted keys are below `key`."""
    return bisect_left(range(len(keys)), key, key=lambda at: keys[at].as_py())
