"""Rebuild job: builds the index of a store's log in parallel tasks, and then replaces the old index.

    take the store's lock, so that no process appends
      -> a task per segment: sorted rows of its frames                                    (`index/scan.py`)
      -> a task per group of shards that deletes, cleaning or compaction have touched     (`index/scan.py`)
      -> a task per key range: an SST file                                                (`index/tables.py`)
      -> delete the old index in one batch                                                from here the index is missing
      -> ingest all SST files in one RocksDB operation                                    until here

If the job is killed before the deletion, nothing has changed, and the next run deletes its directory below `staging`.
If it is killed between the two last steps, the index is missing; the next process that opens the store detects this and
rebuilds it. A partial index cannot occur: the position up to which the log is indexed is part of the SST files.

Damaged frames are skipped and reported, as at a start of the engine. A torn tail is left for the next start to
truncate.
"""

from __future__ import annotations

import shutil
import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import closing
from functools import partial
from pathlib import Path
from struct import Struct as Layout
from typing import Final
from uuid import uuid4

import msgspec

from basaltmq.errors import InvalidArgumentError
from basaltmq.log.lane_view import LaneView
from basaltmq.pipeline.findings import Finding, Severity
from basaltmq.pipeline.index.runs import RANGE_ROWS, Run, bounds_of
from basaltmq.pipeline.index.scan import RewrittenShards, Scanned, SegmentAt, ShardRows, scan_segment, scan_shards
from basaltmq.pipeline.index.tables import APART, WHOLE, Table, make_table, write_table
from basaltmq.pipeline.store_path import DEFAULT_VHOST, store_path
from basaltmq.pipeline.tasks import Tasks
from basaltmq.store.batch import Batch
from basaltmq.store.directory import LOG, make_directory
from basaltmq.store.keys import parts as key_parts
from basaltmq.store.keys import streams as stream_keys
from basaltmq.store.open import open_store
from basaltmq.store.rocks import RocksStore
from basaltmq.streams.engines.segment.index.rows import FAMILY, SegmentStats
from basaltmq.streams.imports.stage import STAGING

FOLDER: Final = "index-"
"""Prefix of this job's directories below `staging`."""

RANGES_PER_TASK: Final = 2
"""Ranges per parallel task, so that one large range does not delay the end."""

DIFFERENCES_MAX: Final = 50
"""Maximum number of differing rows in a report."""

_POSITION: Final = Layout(">Q")

OnPhase = Callable[[str], Callable[[int, int], None]]
"""Returns the progress callback (done, total) of a phase."""


class RebuildJob(msgspec.Struct, frozen=True, kw_only=True):
    path: str
    vhost: str = DEFAULT_VHOST
    compare: bool = False
    """Compare the index with the log, and change nothing."""
    dry_run: bool = False


class Rebuilt(msgspec.Struct, frozen=True):
    path: str
    segments: int
    log_bytes: int
    rows: int
    tables: int
    shards_rewritten: int
    """Shards that deletes, cleaning or compaction have touched."""
    seconds: float
    findings: list[Finding]


def rebuild_index(tasks: Tasks, job: RebuildJob, on_phase: OnPhase | None = None) -> Rebuilt:
    """Rebuild or compare the index. Raises StoreLockedError if another process has the store open for writing."""
    began_s = time.monotonic()
    path = store_path(job.path, job.vhost)
    if not (path / LOG).is_dir():
        raise InvalidArgumentError(f"{path} has no log to index: it has no topic with the segment engine")
    with closing(open_store(path, create=False)) as store:
        run = _Run(tasks, path, job, on_phase or (lambda _: lambda _done, _total: None))
        if job.dry_run:
            return run.result(began_s, [], Counter(), [])
        if not job.compare:
            # The old index is about to be deleted, so its compaction would waste CPU.
            store.set_options({"disable_auto_compactions": "true"}, FAMILY)
        _clean(path)
        make_directory(run.folder)
        try:
            return run.rebuild(store, began_s)
        finally:
            shutil.rmtree(run.folder, ignore_errors=True)


def _clean(path: Path) -> None:
    """Delete what a killed run left. The lock excludes other runs."""
    for folder in (path / STAGING).glob(f"{FOLDER}*"):
        shutil.rmtree(folder, ignore_errors=True)


class _Run:
    def __init__(self, tasks: Tasks, path: Path, job: RebuildJob, on_phase: OnPhase) -> None:
        self._tasks = tasks
        self._path = path
        self._job = job
        self._on_phase = on_phase
        self._shards: list[Run] = []
        self.folder = path / STAGING / f"{FOLDER}{uuid4().hex}"
        self._lanes = sorted(each for each in (path / LOG).iterdir() if LaneView.exists(each))
        self._segments = [at for number, lane in enumerate(self._lanes) for at in _segments(number, lane)]

    def rebuild(self, store: RocksStore, began_s: float) -> Rebuilt:
        self._shards = ShardRows.write(store, self.folder)
        scanned = self._scan()
        rewritten = sorted({shard for each in scanned for shard in each.rewritten})
        whole = self._rewritten(rewritten)
        runs = [run for each in scanned for run in each.runs] + [run for each in whole for run in each.runs]
        tables = self._tables(runs, rewritten)
        garbage: Counter[bytes] = Counter()
        for sizes in [table.garbage for table in tables] + [part.garbage for part in whole]:
            for at, size_bytes in sizes.items():
                garbage[bytes.fromhex(at)] += size_bytes
        rows = _log_rows(scanned, garbage)
        sources = (scanned, whole, tables)
        losses = [detail for parts in sources for part in parts for detail in part.losses]
        findings = _damages(scanned, losses)
        if self._job.compare:
            findings += _differences(store, rows, tables)
        else:
            self._publish(store, rows, tables)
        return self.result(began_s, tables, rows, findings, len(rewritten))

    def result(
        self,
        began_s: float,
        tables: Sequence[Table],
        rows: dict[bytes, bytes] | Counter[bytes],
        findings: list[Finding],
        rewritten: int = 0,
    ) -> Rebuilt:
        return Rebuilt(
            str(self._path),
            len(self._segments),
            sum(at.end - at.start for at in self._segments),
            sum(table.rows for table in tables) + len(rows),
            sum(table.path is not None for table in tables),
            rewritten,
            time.monotonic() - began_s,
            findings,
        )

    def _scan(self) -> list[Scanned]:
        # Largest first, so that the last task to end is a small one.
        order = sorted(self._segments, key=lambda at: at.start - at.end)
        found = self._tasks.run(
            partial(_scan_one, self._shards, str(self.folder)), order, self._on_phase("segments read")
        )
        return sorted(found, key=lambda each: (each.at.lane, each.at.start))

    def _rewritten(self, shards: list[int]) -> list[RewrittenShards]:
        width = self._tasks.width
        groups = [group for number in range(width) if (group := shards[number::width])]
        lanes = [str(lane) for lane in self._lanes]
        call = partial(_scan_group, self._shards, lanes, str(self.folder))
        return self._tasks.run(call, groups, self._on_phase("shards read")) if groups else []

    def _tables(self, runs: list[Run], rewritten: list[int]) -> list[Table]:
        rows = sum(run.rows for run in runs)
        ranges = max(rows // RANGE_ROWS, RANGES_PER_TASK * self._tasks.width)
        items = [
            (begin, end, str(self.folder / f"table-{number:06d}.sst"))
            for number, (begin, end) in enumerate(bounds_of(runs, ranges, WHOLE, APART))
        ]
        compared_with = str(self._path) if self._job.compare else None
        call = partial(_table_one, self._shards, runs, frozenset(rewritten), compared_with)
        return self._tasks.run(call, items, self._on_phase("tables written"))

    def _publish(self, store: RocksStore, rows: dict[bytes, bytes], tables: Sequence[Table]) -> None:
        paths = [Path(table.path) for table in tables if table.path is not None]
        for kinds in (b"C", b"PS", b"X"):
            some = sorted(row for row in rows.items() if row[0][:1] in kinds)
            if some:
                paths.append(self.folder / f"log-{kinds.decode()}.sst")
                write_table(paths[-1], some)
        batch = Batch()
        batch.delete_range(FAMILY, b"", b"\xff")
        store.write(batch)
        store.sync()
        store.flush(FAMILY)
        if paths:
            store.ingest(FAMILY, paths)


def _segments(number: int, lane: Path) -> list[SegmentAt]:
    with closing(LaneView(lane)) as log:
        return [SegmentAt(number, str(lane), each.start, each.end) for each in log.segments() if each.size_bytes]


def _scan_one(shards: list[Run], folder: str, at: SegmentAt) -> Scanned:
    return scan_segment(ShardRows(shards), at, folder)


def _scan_group(shards: list[Run], lanes: list[str], folder: str, group: list[int]) -> RewrittenShards:
    return scan_shards(ShardRows(shards), lanes, group, folder)


def _table_one(
    shards: list[Run],
    runs: list[Run],
    rewritten: frozenset[int],
    compare_with: str | None,
    item: tuple[bytes, bytes, str],
) -> Table:
    begin, end, target = item
    return make_table(ShardRows(shards), runs, begin, end, rewritten, target, compare_with=compare_with)


def _log_rows(scanned: Sequence[Scanned], garbage: Counter[bytes]) -> dict[bytes, bytes]:
    """Return the rows of segments, and per lane the positions indexed, synced and changed."""
    rows: dict[bytes, bytes] = {}
    for each in scanned:
        if each.sums is None:
            continue
        at = each.at
        key = stream_keys.log_segment_key(at.lane, at.start)
        stats = SegmentStats(each.sums)
        stats.garbage_bytes += garbage[key]
        rows[key] = stats.encode()
        reached = _POSITION.pack(each.intact_end)
        for of in (stream_keys.log_checkpoint_key, stream_keys.log_synced_key, stream_keys.log_changed_key):
            rows[of(at.lane)] = reached
    return rows


def _damages(scanned: Sequence[Scanned], losses: Sequence[str]) -> list[Finding]:
    last = {each.at.lane: each for each in scanned}
    found = []
    for each in scanned:
        for number, detail in enumerate(each.damages, 1):
            is_tail = each.has_torn_end and each is last[each.at.lane] and number == len(each.damages)
            severity, kind = (Severity.NOTE, "torn tail") if is_tail else (Severity.LOSS, "damage")
            found.append(Finding(severity, kind, f"lane {each.at.lane}", detail))
    return [*found, *(Finding(Severity.LOSS, "gap", "log", detail) for detail in losses)]


def _differences(store: RocksStore, rows: dict[bytes, bytes], tables: Sequence[Table]) -> list[Finding]:
    found = [Finding(Severity.FAULT, "index", "row", detail) for table in tables for detail in table.differences]
    wanted = {key: value for key, value in rows.items() if key[:1] in b"CS"}
    there = {key: value for kind in (b"C", b"S") for key, value in store.scan(FAMILY, *key_parts.prefix_range(kind))}
    unlike = [key for key in sorted({*wanted, *there}) if wanted.get(key) != there.get(key)]
    found += [Finding(Severity.FAULT, "index", "log", f"{key[:1].decode()} {key[1:].hex()} differs") for key in unlike]
    total = sum(table.differing for table in tables) + len(unlike)
    if total > DIFFERENCES_MAX:
        detail = f"{total} rows differ in total; the index of a store that was not closed properly is behind its log"
        found = [Finding(Severity.FAULT, "index", "rows", detail), *found[:DIFFERENCES_MAX]]
    return found
