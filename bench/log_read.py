"""Streams in the commit log: reading in order, starting after a crash, building the index again.

Every figure is measured next to its bound, in the same run, on the same disk, in turns. BASALT_BENCH_LOG_GB sets the
size of the log for the restart and the rebuild (default 1; the bar is meant for 10). BASALT_BENCH_PARTS selects parts
(reading, restarting).

A rebuild is compared with a plain read of the same files twice: warm, both from the page cache, and cold, both from the
disk. Before each measurement mincore checks and reports which it is. The time is that of the engine until the index is
on disk, without opening the store.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import random
import shutil
import time
from collections.abc import Callable
from pathlib import Path

import google_crc32c
from bench.log_rig import MIB, RECORDS, ROUNDS, Rig, batch_of, bench_path, clock_ms, middle, rows_of
from bench.row import Row
from bench.size import sized

from basaltmq.log.batches.columnar import ColumnBatch
from basaltmq.log.batches.record import Record
from basaltmq.store.batch import Batch
from basaltmq.store.families import Family
from basaltmq.store.open import open_store

FRAMES_READ = 8000
REBUILDS = 3


def reading() -> list[Row]:
    """As Arrow batches of 4,000 and of 16,000 rows, and as plain records; all from the page cache."""
    batches = [batch_of(number) for number in range(50)]
    small, large, bare = _read_beside_bare(batches, (MIB, 4 * MIB))
    mixed, mixed_bare = _read_beside_bare(_mixed_batches(), (MIB,))
    ratio = middle([ours / theirs for ours, theirs in zip(small, bare, strict=True)])
    in_large = middle([ours / theirs for ours, theirs in zip(large, bare, strict=True)])
    in_mixed = middle([ours / theirs for ours, theirs in zip(mixed, mixed_bare, strict=True)])
    return [
        Row("bare pread and CRC32C, frame by frame", middle(bare), "batches/s"),
        Row("read as Arrow, 4,000 rows a batch", middle(small), "batches/s"),
        Row("read as Arrow / bare pread", ratio, "ratio", ">= 0.4", ratio >= 0.4),
        Row("the same, 16,000 rows a batch", in_large, "ratio"),
        Row("the same, values of 200 to 312 B with keys", in_mixed, "ratio"),
        Row("read as plain records", _records_rate(batches), "batches/s"),
    ]


def _mixed_batches() -> list[ColumnBatch]:
    """Return batches that all have different layouts."""
    rng = random.Random(1)
    return [
        ColumnBatch.from_records(
            [Record(rng.randbytes(rng.randrange(200, 312)), b"key-%d" % rng.randrange(10**6)) for _ in range(RECORDS)],
            clock_ms(),
        )
        for _ in range(2000)
    ]


def _read_beside_bare(batches: list[ColumnBatch], sizes_bytes: tuple[int, ...]) -> tuple[list[float], ...]:
    """Return frames per second by round: through the engine in reads of each size, and by plain pread."""
    count = FRAMES_READ
    with bench_path() as path:
        rig = Rig(path)
        shard = rig.create(1, index_keys=False)[0]
        for number in range(count):
            rig.engine.batch_write(shard, batches[number % len(batches)])
        rig.engine.checkpoint()
        log = rig.engine.lanes[0].log
        fds = {segment.start: os.open(segment.path, os.O_RDONLY) for segment in log.segments()}
        places = []
        for entry in rig.engine.index.entries(shard, 0):
            start = log.segment_at(entry.position).start
            places.append((fds[start], entry.size_bytes, entry.position - start))

        def bare() -> float:
            started = time.perf_counter()
            for fd, size, begin in places:
                google_crc32c.value(os.pread(fd, size, begin))
            return count / (time.perf_counter() - started)

        def arrow(size_bytes: int) -> float:
            started = time.perf_counter()
            at = rows = 0
            while rows < count * RECORDS:
                found = rig.engine.read_by_offset(shard, at, 100_000, size_bytes)
                rows += found.arrow().num_rows
                at = found.next_offset
            return count / (time.perf_counter() - started)

        figures: list[list[float]] = [[] for _ in range(len(sizes_bytes) + 1)]
        for _ in range(ROUNDS):
            for column, size_bytes in zip(figures, sizes_bytes, strict=False):
                column.append(arrow(size_bytes))
            figures[-1].append(bare())
        for fd in fds.values():
            os.close(fd)
        rig.close()
    return tuple(figures)


def _records_rate(batches: list[ColumnBatch]) -> float:
    with bench_path() as path:
        rig = Rig(path)
        shard = rig.create(1)[0]
        for number in range(1000):
            rig.engine.batch_write(shard, batches[number % len(batches)])
        started = time.perf_counter()
        at = rows = 0
        while rows < 1000 * RECORDS:
            found = rig.engine.read_by_offset(shard, at, 10_000, 4 * MIB)
            rows += len(found.records())
            at = found.next_offset
        rate = 1000 / (time.perf_counter() - started)
        rig.close()
    return rate


def restarting() -> list[Row]:
    """Start after a crash: 64 MiB behind the checkpoint, with a large log before it and without one. Then without an
    index."""
    size_bytes = int(float(os.environ.get("BASALT_BENCH_LOG_GB", sized(1.0, 0.125))) * (1 << 30))
    with bench_path() as path:
        small_s, _ = _start_after_crash(path, 0)
    with bench_path() as path:
        large_s, log_bytes = _start_after_crash(path, size_bytes)
        rebuilds = _rebuilding(path, log_bytes)
    return [
        Row("start with 64 MiB in all, all past the checkpoint", small_s, "s"),
        Row(f"start with {log_bytes / (1 << 30):.1f} GiB, 64 MiB past it", large_s, "s"),
        Row("large / small", large_s / small_s, "ratio", "<= 2", large_s <= 2 * small_s),
        *rebuilds,
    ]


def _start_after_crash(path: Path, size_bytes: int) -> tuple[float, int]:
    """Return the start time in seconds, and the bytes in the log."""
    batches = [batch_of(number) for number in range(50)]
    frame_bytes = len(batches[0].body) + 72
    rig = Rig(path)
    shards = rig.create(100)
    for number in range(size_bytes // frame_bytes):
        rig.engine.batch_write(shards[number % 100], batches[number % 50])
    rig.engine.checkpoint()
    # A crash: index rows gathered from here on are not on disk. The copy at the checkpoint is the state that a killed
    # process leaves, without later index rows.
    rig.store.checkpoint(path / "copy")
    for number in range(64 * MIB // frame_bytes):
        rig.engine.batch_write(shards[number % 100], batches[number % 50])
    rig.close()
    shutil.rmtree(path / "store")
    os.rename(path / "copy", path / "store")
    started = time.perf_counter()
    again = Rig(path)
    start_s = time.perf_counter() - started
    log_bytes = again.engine.lanes[0].log.end
    again.close()
    return start_s, log_bytes


def _rebuilding(path: Path, log_bytes: int) -> list[Row]:
    reported: list[int] = []
    rows = [
        *_rebuild_beside_read(path, log_bytes, "warm", _warm, reported),
        *_rebuild_beside_read(path, log_bytes, "cold", _drop_cache, reported),
    ]
    return [*rows, Row("times progress was told", len(reported), "times", ">= 1", len(reported) >= 1)]


def _rebuild_beside_read(
    path: Path, log_bytes: int, name: str, prepare: Callable[[Path], None], reported: list[int]
) -> list[Row]:
    lane = path / "log" / "0000"
    reads: list[float] = []
    rebuilds: list[float] = []
    resident: list[float] = []
    for _ in range(REBUILDS):
        prepare(lane)
        resident.append(_resident(lane))
        reads.append(_raw_read(lane))
        _wipe(path)
        prepare(lane)
        resident.append(_resident(lane))
        rebuilt = Rig(path, lambda done, total: reported.append(done))
        rebuilds.append(log_bytes / rebuilt.engine_s)
        rebuilt.close()
    ratio = middle([ours / theirs for ours, theirs in zip(rebuilds, reads, strict=True)])
    bound, extreme = ("least", min(resident)) if name == "warm" else ("most", max(resident))
    return [
        Row(f"raw sequential read, {name}", middle(reads) / MIB, "MiB/s"),
        Row(f"whole rebuild of the index, {name}", middle(rebuilds) / MIB, "MiB/s"),
        Row(f"rebuild / raw read, {name}", ratio, "ratio", ">= 0.25", ratio >= 0.25),
        Row(f"{bound} in the page cache before, {name}", 100 * extreme, "%"),
    ]


def _wipe(path: Path) -> None:
    """Delete the index."""
    store = open_store(path / "store")
    batch = Batch()
    batch.delete_range(Family.STREAM_INDEX, b"", b"\xff")
    store.write(batch)
    store.close()


def _warm(path: Path) -> None:
    _raw_read(path)


def _drop_cache(path: Path) -> None:
    for file in path.glob("*.log"):
        fd = os.open(file, os.O_RDONLY)
        os.fsync(fd)
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(fd)


def _resident(path: Path) -> float:
    """Return the share of the files' pages in the page cache."""
    libc = ctypes.CDLL(None, use_errno=True)
    libc.mincore.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_void_p]
    pages = there = 0
    for file in path.glob("*.log"):
        size = file.stat().st_size
        if not size:
            continue
        with open(file, "rb") as opened, mmap.mmap(opened.fileno(), size, access=mmap.ACCESS_COPY) as mapped:
            count = -(-size // mmap.PAGESIZE)
            marks = ctypes.create_string_buffer(count)
            first = ctypes.c_char.from_buffer(mapped)
            try:
                if libc.mincore(ctypes.addressof(first), size, marks):
                    raise OSError(ctypes.get_errno(), f"mincore of {file}")
            finally:
                del first
            pages += count
            there += sum(mark & 1 for mark in marks.raw[:count])
    return there / pages if pages else 0.0


def _raw_read(path: Path) -> float:
    started = time.perf_counter()
    total = 0
    for file in sorted(path.glob("*.log")):
        fd = os.open(file, os.O_RDONLY)
        # A rebuild also announces its reads to the kernel.
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_SEQUENTIAL)
        while data := os.read(fd, 4 * MIB):
            total += len(data)
        os.close(fd)
    return total / (time.perf_counter() - started)


def run() -> list[Row]:
    return rows_of(reading, restarting)
