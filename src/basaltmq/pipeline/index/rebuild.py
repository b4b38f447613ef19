"""Rebuild the index of a store's log: by many tasks at once, and then all of it takes the old one's place.

    the store's lock is taken: nobody appends meanwhile
      -> a task per segment: rows of its frames, sorted                                  (`index_scan`)
      -> a task per group of shards that deletes, cleaning or compaction have touched    (`index_scan`)
      -> a task per range of keys: a table                                               (`index_tables`)
      -> the index there is, is deleted, in one batch                                     it is missing from here on
      -> all tables are taken in, in one step of RocksDB's                                to here

Killed before the deletion, nothing has happened but for a folder below `staging`, which the next run removes. Killed
between the two, the index is missing, which the next process to open the store sees and builds it by itself. There is
never a half one: the position up to which the log is indexed comes with the tables, and without it none counts.

Damage is passed over and told of, as at a start of the engine; a torn tail stays for the next start to cut off.
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
from basaltmq.pipeline.index.scan import EntangledShards, Scanned, SegmentAt, ShardRows, scan_segment, scan_shards
from basaltmq.pipeline.index.tables import APART, WHOLE, Table, make_table, write_table
from basaltmq.pipeline.place import DEFAULT_VHOST, store_path
from basaltmq.pipeline.tasks import Tasks
from basaltmq.store.batch import Batch
from basaltmq.store.directory import make_directory
from basaltmq.store.keys import queues as keys
from basaltmq.store.open import open_store
from basaltmq.store.rocks import RocksStore
from basaltmq.streams.engines.segment.index.rows import FAMILY, SegmentStats
from basaltmq.streams.imports.stage import STAGING
from basaltmq.streams.view import LOG

FOLDER: Final = "index-"
"""What folders of this job below `staging` begin with."""

RANGES_PER_TASK: Final = 2
"""Ranges for each that runs at once, so that one that is larger does not keep all waiting."""

DIFFERENCES_MAX: Final = 50
"""Differing rows that are named."""

_POSITION: Final = Layout(">Q")

OnPhase = Callable[[str], Callable[[int, int], None]]
"""Given the name of a phase, how to tell of its progress."""


class RebuildJob(msgspec.Struct, frozen=True, kw_only=True):
    """Which index to rebuild."""

    path: str
    vhost: str = DEFAULT_VHOST
    compare: bool = False
    """Look whether the index is what it would be rebuilt to, and leave it as it is."""
    dry_run: bool = False


class Rebuilt(msgspec.Struct, frozen=True):
    """What was done, or would be."""

    path: str
    segments: int
    log_bytes: int
    rows: int
    tables: int
    shards_entangled: int
    """Shards that deletes, cleaning or compaction have touched."""
    seconds: float
    findings: list[Finding]


def rebuild_index(tasks: Tasks, job: RebuildJob, on_phase: OnPhase | None = None) -> Rebuilt:
    """Rebuild it, or compare. StoreLockedError if somebody has the store open for writing."""
    began_s = time.monotonic()
    path = store_path(job.path, job.vhost)
    if not (path / LOG).is_dir():
        raise InvalidArgumentError(f"{path} has no log, and so no index of it: no topic of the segment engine was made")
    with closing(open_store(path, create=False)) as store:
        run = _Run(tasks, path, job, on_phase or (lambda _: lambda _done, _total: None))
        if job.dry_run:
            return run.told(began_s, [], Counter(), [])
        if not job.compare:
            # What RocksDB would tidy up meanwhile, on the same cores, is about to be deleted.
            store.set_options({"disable_auto_compactions": "true"}, FAMILY)
        _clean(path)
        make_directory(run.folder)
        try:
            return run.rebuild(store, began_s)
        finally:
            shutil.rmtree(run.folder, ignore_errors=True)


def _clean(path: Path) -> None:
    """Remove what a killed run left. The lock is held, so nobody else is at it."""
    for folder in (path / STAGING).glob(f"{FOLDER}*"):
        shutil.rmtree(folder, ignore_errors=True)


class _Run:
    """One run of the job."""

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
        entangled = sorted({shard for each in scanned for shard in each.entangled})
        whole = self._entangled(entangled)
        runs = [run for each in scanned for run in each.runs] + [run for each in whole for run in each.runs]
        tables = self._tables(runs, entangled)
        garbage: Counter[bytes] = Counter()
        for told in [table.garbage for table in tables] + [part.garbage for part in whole]:
            for at, size_bytes in told.items():
                garbage[bytes.fromhex(at)] += size_bytes
        rows = _log_rows(scanned, garbage)
        told_by = (scanned, whole, tables)
        losses = [said for parts in told_by for part in parts for said in part.losses]
        findings = _damages(scanned, losses)
        if self._job.compare:
            findings += _differences(store, rows, tables)
        else:
            self._publish(store, rows, tables)
        return self.told(began_s, tables, rows, findings, len(entangled))

    def told(
        self,
        began_s: float,
        tables: Sequence[Table],
        rows: dict[bytes, bytes] | Counter[bytes],
        findings: list[Finding],
        entangled: int = 0,
    ) -> Rebuilt:
        return Rebuilt(
            str(self._path),
            len(self._segments),
            sum(at.end - at.start for at in self._segments),
            sum(table.rows for table in tables) + len(rows),
            sum(table.path is not None for table in tables),
            entangled,
            time.monotonic() - began_s,
            findings,
        )

    def _scan(self) -> list[Scanned]:
        # The largest first: the last one to end is a small one.
        order = sorted(self._segments, key=lambda at: at.start - at.end)
        found = self._tasks.run(
            partial(_scan_one, self._shards, str(self.folder)), order, self._on_phase("segments read")
        )
        return sorted(found, key=lambda each: (each.at.lane, each.at.start))

    def _entangled(self, shards: list[int]) -> list[EntangledShards]:
        width = self._tasks.width
        groups = [group for number in range(width) if (group := shards[number::width])]
        lanes = [str(lane) for lane in self._lanes]
        call = partial(_scan_group, self._shards, lanes, str(self.folder))
        return self._tasks.run(call, groups, self._on_phase("shards sorted out")) if groups else []

    def _tables(self, runs: list[Run], entangled: list[int]) -> list[Table]:
        rows = sum(run.rows for run in runs)
        ranges = max(rows // RANGE_ROWS, RANGES_PER_TASK * self._tasks.width)
        items = [
            (begin, end, str(self.folder / f"table-{number:06d}.sst"))
            for number, (begin, end) in enumerate(bounds_of(runs, ranges, WHOLE, APART))
        ]
        with_ = str(self._path) if self._job.compare else None
        call = partial(_table_one, self._shards, runs, frozenset(entangled), with_)
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


def _scan_group(shards: list[Run], lanes: list[str], folder: str, group: list[int]) -> EntangledShards:
    return scan_shards(ShardRows(shards), lanes, group, folder)


def _table_one(
    shards: list[Run],
    runs: list[Run],
    entangled: frozenset[int],
    compare_with: str | None,
    item: tuple[bytes, bytes, str],
) -> Table:
    begin, end, target = item
    return make_table(ShardRows(shards), runs, begin, end, entangled, target, compare_with=compare_with)


def _log_rows(scanned: Sequence[Scanned], garbage: Counter[bytes]) -> dict[bytes, bytes]:
    """Rows of segments, and how far each lane is indexed, on disk, and changed by other than appends."""
    rows: dict[bytes, bytes] = {}
    for each in scanned:
        if each.sums is None:
            continue
        at = each.at
        key = keys.log_segment_key(at.lane, at.start)
        stats = SegmentStats(each.sums)
        stats.garbage_bytes += garbage[key]
        rows[key] = stats.encode()
        reached = _POSITION.pack(each.intact_end)
        for of in (keys.log_checkpoint_key, keys.log_synced_key, keys.log_changed_key):
            rows[of(at.lane)] = reached
    return rows


def _damages(scanned: Sequence[Scanned], losses: Sequence[str]) -> list[Finding]:
    last = {each.at.lane: each for each in scanned}
    found = []
    for each in scanned:
        for number, said in enumerate(each.damages, 1):
            is_tail = each.has_torn_end and each is last[each.at.lane] and number == len(each.damages)
            severity, kind = (Severity.NOTE, "torn tail") if is_tail else (Severity.LOSS, "damage")
            found.append(Finding(severity, kind, f"lane {each.at.lane}", said))
    return [*found, *(Finding(Severity.LOSS, "gap", "log", said) for said in losses)]


def _differences(store: RocksStore, rows: dict[bytes, bytes], tables: Sequence[Table]) -> list[Finding]:
    found = [Finding(Severity.FAULT, "index", "row", said) for table in tables for said in table.differences]
    wanted = {key: value for key, value in rows.items() if key[:1] in b"CS"}
    there = {key: value for kind in (b"C", b"S") for key, value in store.scan(FAMILY, *keys.prefix_range(kind))}
    unlike = [key for key in sorted({*wanted, *there}) if wanted.get(key) != there.get(key)]
    found += [Finding(Severity.FAULT, "index", "log", f"{key[:1].decode()} {key[1:].hex()} differs") for key in unlike]
    total = sum(table.differing for table in tables) + len(unlike)
    if total > DIFFERENCES_MAX:
        said = f"{total} rows differ in all; a store that was not closed has an index that is behind"
        found = [Finding(Severity.FAULT, "index", "rows", said), *found[:DIFFERENCES_MAX]]
    return found
