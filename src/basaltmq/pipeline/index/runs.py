"""Rows of an index on their way from tasks that read the log to tasks that write tables: sorted runs, cut by range.

    a task gathers rows, up to RUN_ROWS ─ sorts them ─ one file: Arrow IPC, batches of BATCH_ROWS rows, key and value
    all runs together ─ bounds of ranges with about as many rows each ─ a task per range reads its part of each run

Where each batch begins is told with the run (`Run.firsts`), so that bounds are found without reading anything, and a
range is read without reading the rest. Memory is bounded by RUN_ROWS on one side and by a range on the other.
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
"""Rows a task gathers before it writes them: some 200 MB of Python objects."""

BATCH_ROWS: Final = 16_384
"""What a range is off by at most for each run it reads."""

RANGE_ROWS: Final = 1_000_000
"""Rows of one table: 20 to 60 MB on disk, what RocksDB itself makes of them."""

_SCHEMA: Final = pa.schema([pa.field("key", pa.binary()), pa.field("value", pa.binary())])


class Run(msgspec.Struct, frozen=True):
    """A file of sorted rows."""

    path: str
    rows: int
    firsts: list[bytes]
    """The first key of each batch."""
    is_final: bool
    """Its rows are those of the index; in others, rows of a shard may be parts that are to be put together."""


class RunWriter:
    """Gathers rows in any order and writes them as runs."""

    def __init__(self, folder: Path, *, is_final: bool = False, rows_max: int = RUN_ROWS) -> None:
        self._folder = folder
        self._is_final = is_final
        self._rows_max = rows_max
        self.keys: list[bytes] = []
        self.values: list[bytes] = []
        self.runs: list[Run] = []

    def add(self, key: bytes, value: bytes) -> None:
        self.keys.append(key)
        self.values.append(value)

    def make_room(self) -> None:
        """Write what was gathered if that is enough."""
        if len(self.keys) >= self._rows_max:
            self._write()

    def finish(self) -> list[Run]:
        """All runs; nothing can be added afterwards."""
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
    """Ranges of keys, [begin, end), that cover all runs and hold about as many rows each.

    Rows of the kinds in `whole` are cut between shards only; a range never spans one of `apart`.
    """
    firsts = sorted(first for run in runs for first in run.firsts)
    if not firsts:
        return []
    step = max(1, len(firsts) // max(ranges, 1))
    cuts = {first[:9] if first[:1] in whole else first for first in firsts[step::step]} | set(apart)
    edges = [b"", *sorted(cut for cut in cuts if cut), b"\xff"]
    return list(pairwise(edges))


def read_range(run: Run, begin: bytes, end: bytes) -> list[pa.Table]:
    """The rows of a run in a range, in order."""
    first = max(0, bisect_left(run.firsts, begin) - 1)
    last = bisect_left(run.firsts, end)
    if first >= last:
        return []
    try:
        file = pa.ipc.open_file(pa.memory_map(run.path))
    except FileNotFoundError:
        raise CorruptionError(f"{run.path} is gone; run the job again") from None
    except OSError as error:
        raise os_error(error, Path(run.path)) from error
    found = []
    for number in range(first, last):
        batch = file.get_batch(number)
        keys = batch.column(0)
        low = _place(keys, begin)
        high = _place(keys, end)
        if low < high:
            found.append(pa.Table.from_batches([batch.slice(low, high - low)]))
    return found


class SortedRows:
    """Rows of a final run, looked up one by one; the file is mapped, not read."""

    def __init__(self, runs: Sequence[Run]) -> None:
        self._runs = runs
        self._files = [pa.ipc.open_file(pa.memory_map(run.path)) for run in runs]

    def get(self, key: bytes) -> bytes | None:
        for run, file in zip(self._runs, self._files, strict=True):
            number = bisect_right(run.firsts, key) - 1
            if number < 0:
                continue
            batch = file.get_batch(number)
            at = _place(batch.column(0), key)
            if at < batch.num_rows and batch.column(0)[at].as_py() == key:
                found: bytes = batch.column(1)[at].as_py()
                return found
        return None


def gathered(runs: Iterable[Run], begin: bytes, end: bytes) -> list[tuple[bytes, bytes]]:
    """The rows of a range over all runs, sorted by key."""
    tables = [table for run in runs for table in read_range(run, begin, end)]
    if not tables:
        return []
    rows = pa.concat_tables(tables).combine_chunks()
    if len(tables) > 1:
        rows = rows.take(pc.array_sort_indices(rows.column(0).combine_chunks()))
    return list(zip(rows.column(0).to_pylist(), rows.column(1).to_pylist(), strict=True))


def _place(keys: pa.Array, key: bytes) -> int:
    """How many of sorted keys come before `key`."""
    low, high = 0, len(keys)
    while low < high:
        middle = (low + high) // 2
        if keys[middle].as_py() < key:
            low = middle + 1
        else:
            high = middle
    return low
