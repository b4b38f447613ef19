"""Streams in the commit log: appending, reading, many shards, starting again.

Every figure is measured beside what bounds it, in the same run, on the same disk: `bench_path()` lies on the disk the
repository is on, or where BASALT_BENCH_DIR says. BASALT_BENCH_LOG_GB sets the size of the log for the restart (default
1; 10 for the bar as it is meant), BASALT_BENCH_SHARDS the number of shards (default 200000; 1000000 for the bar).
"""

from __future__ import annotations

import asyncio
import os
import resource
import shutil
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from uuid import uuid4

import google_crc32c
import uvloop
from bench.row import Row

from basaltmq.log.columnar import ColumnBatch
from basaltmq.log.frame import encode_batch
from basaltmq.log.record import Record
from basaltmq.store.open import open_store
from basaltmq.store.rocks import RocksStore
from basaltmq.streams.durability import Durability
from basaltmq.streams.offsets import PersistentOffsets
from basaltmq.streams.segment_engine import SegmentEngine
from basaltmq.streams.shards import Engine, ShardConfig, Shards, ShardSpec
from basaltmq.streams.watermark import Watermarks

RECORDS = 100
VALUE_BYTES = 256
ROUNDS = 5
MIB = 1 << 20


def clock_ms() -> int:
    return time.time_ns() // 1_000_000


@contextmanager
def bench_path() -> Iterator[Path]:
    path = Path(tempfile.mkdtemp(prefix="basalt-bench-", dir=os.environ.get("BASALT_BENCH_DIR", Path.cwd())))
    try:
        yield path
    finally:
        shutil.rmtree(path, ignore_errors=True)


class Rig:
    """An engine over a store."""

    def __init__(self, path: Path, progress: Callable[[int, int], None] | None = None) -> None:
        self.path = path
        self.store: RocksStore = open_store(path / "store")
        self.watermarks = Watermarks(self.store)
        self.shards = Shards(self.store, clock_ms)
        offsets = PersistentOffsets(self.store, self.watermarks.group, clock_ms)
        self.engine = SegmentEngine(self.store, self.shards, offsets, clock_ms, path=path / "log", progress=progress)

    def create(self, count: int) -> list[int]:
        config = ShardConfig(durability=Durability.WRITTEN)
        specs = [ShardSpec(uuid4(), 0, Engine.SEGMENT, config) for _ in range(count)]
        return [meta.number for meta in self.shards.create([self.engine.place(spec) for spec in specs])]

    def close(self) -> None:
        self.engine.close()
        self.watermarks.close()
        self.store.close()


def batch_of(number: int, keyed: bool = False) -> ColumnBatch:
    value = os.urandom(VALUE_BYTES)
    return ColumnBatch.from_records(
        [Record(value, b"key-%d" % (number + at) if keyed else None) for at in range(RECORDS)], clock_ms()
    )


def rate(count: int, action: Callable[[int], object]) -> float:
    """Actions per second."""
    started = time.perf_counter()
    for number in range(count):
        action(number)
    return count / (time.perf_counter() - started)


def middle(values: list[float]) -> float:
    return sorted(values)[len(values) // 2]


def appending() -> list[Row]:
    """Each round: the same bytes by bare write(2) and through the engine, one after the other."""
    count = 4000
    plain = [batch_of(number) for number in range(50)]
    keyed = [batch_of(number * RECORDS, keyed=True) for number in range(50)]
    bare: list[float] = []
    engine: list[float] = []
    with bench_path() as path:
        rig = Rig(path)
        shard = rig.create(1)[0]
        write = rig.engine.batch_write
        frames = [b"".join(encode_batch(1, 1, 0, batch, 0)) for batch in plain]
        for number in range(ROUNDS):
            fd = os.open(path / f"bare-{number}", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
            bare.append(rate(count, lambda at, fd=fd: os.write(fd, frames[at % 50])))  # type: ignore[misc]
            os.close(fd)
            os.unlink(path / f"bare-{number}")
            engine.append(rate(count, lambda at: write(shard, plain[at % 50])))
        with_keys = rate(500, lambda at: write(shard, keyed[at % 50]))
        records = [Record(os.urandom(VALUE_BYTES)) for _ in range(RECORDS)]
        with_records = rate(1000, lambda at: write(shard, records))
        rig.close()
    ratio = middle([ours / theirs for ours, theirs in zip(engine, bare, strict=True)])
    return [
        Row("bare write(2), batches of 100 x 256 B", middle(bare), "batches/s"),
        Row("append columns, written", middle(engine), "batches/s"),
        Row("append columns / bare write", ratio, "ratio", ">= 0.5", ratio >= 0.5),
        Row("append columns with a key each, all indexed", with_keys, "batches/s"),
        Row("append plain records", with_records, "batches/s"),
    ]


def syncing() -> list[Row]:
    """Sixteen writers that wait for every batch, beside one that does not wait, and beside the bare disk.

    The writers are coroutines of one loop, as in a broker; with threads, the interpreter's lock changing hands is what
    is measured, and it is reported. Rounds take turns, because the disk changes its pace.
    """
    writers, each = 16, 100
    batches = [batch_of(number) for number in range(16)]
    frame = b"".join(encode_batch(1, 1, 0, batches[0], 0))
    figures: dict[str, list[float]] = {name: [] for name in ("written", "loop", "threads", "disk")}
    with bench_path() as path:
        rig = Rig(path)
        shard = rig.create(1)[0]
        fd = os.open(path / "bare", os.O_WRONLY | os.O_CREAT | os.O_APPEND)

        def group(_: int) -> None:
            os.write(fd, frame * writers)
            os.fdatasync(fd)

        async def write() -> None:
            for at in range(each):
                await rig.engine.confirmed(rig.engine.batch_write(shard, batches[at % 16], Durability.SYNCED))

        async def write_all() -> None:
            await asyncio.gather(*(write() for _ in range(writers)))

        def work() -> None:
            for at in range(each):
                rig.engine.wait(rig.engine.batch_write(shard, batches[at % 16], Durability.SYNCED))

        def threads(_: int) -> None:
            started = [threading.Thread(target=work) for _ in range(writers)]
            for thread in started:
                thread.start()
            for thread in started:
                thread.join()

        for _ in range(ROUNDS):
            total = writers * each
            figures["written"].append(rate(total, lambda at: rig.engine.batch_write(shard, batches[at % 16])))
            rig.engine.checkpoint()
            figures["disk"].append(rate(each, group) * writers)
            figures["loop"].append(rate(1, lambda _: uvloop.run(write_all())) * total)
            figures["threads"].append(rate(1, threads) * total)
        os.close(fd)
        rig.close()
    # The disk's limit: sixteen batches a sync is the most that sixteen waiting writers can have.
    bounds = [min(0.6 * written, disk) for written, disk in zip(figures["written"], figures["disk"], strict=True)]
    ratio = middle([ours / bound for ours, bound in zip(figures["loop"], bounds, strict=True)])
    in_threads = middle([ours / bound for ours, bound in zip(figures["threads"], bounds, strict=True)])
    return [
        Row("append columns, written, in the same rounds", middle(figures["written"]), "batches/s"),
        Row("bare write and fdatasync of 16 batches", middle(figures["disk"]), "batches/s"),
        Row("append columns, synced, 16 writers", middle(figures["loop"]), "batches/s"),
        Row("synced / (the lower of 60 % of written, disk)", ratio, "ratio", ">= 1", ratio >= 1),
        Row("append columns, synced, 16 threads", middle(figures["threads"]), "batches/s"),
        Row("the same with threads", in_threads, "ratio"),
    ]


def reading() -> list[Row]:
    count = 8000
    batches = [batch_of(number) for number in range(50)]
    with bench_path() as path:
        rig = Rig(path)
        shard = rig.create(1)[0]
        for number in range(count):
            rig.engine.batch_write(shard, batches[number % 50])
        rig.engine.checkpoint()
        entries = list(rig.engine.index.entries(shard, 0))
        log = rig.engine.lanes[0].log
        segments = {segment.start: os.open(segment.path, os.O_RDONLY) for segment in log.segments()}
        places = [(segments[log.segment_at(e.position).start], e) for e in entries]
        starts = {segments[start]: start for start in segments}

        def bare() -> float:
            started = time.perf_counter()
            for fd, entry in places:
                raw = os.pread(fd, entry.size_bytes, entry.position - starts[fd])
                google_crc32c.value(raw)
            return count / (time.perf_counter() - started)

        def arrow() -> float:
            started = time.perf_counter()
            at = rows = 0
            while rows < count * RECORDS:
                found = rig.engine.read_by_offset(shard, at, 100_000, MIB)
                rows += found.arrow().num_rows
                at = found.next_offset
            return count / (time.perf_counter() - started)

        def records() -> float:
            started = time.perf_counter()
            at = rows = 0
            while rows < 1000 * RECORDS:
                found = rig.engine.read_by_offset(shard, at, 10_000, 4 * MIB)
                rows += len(found.records())
                at = found.next_offset
            return 1000 / (time.perf_counter() - started)

        pairs = [(bare(), arrow()) for _ in range(ROUNDS)]
        plain = records()
        for fd in segments.values():
            os.close(fd)
        rig.close()
    ratio = middle([ours / theirs for theirs, ours in pairs])
    return [
        Row("bare pread and CRC32C, frame by frame", middle([theirs for theirs, _ in pairs]), "batches/s"),
        Row("read as Arrow batches", middle([ours for _, ours in pairs]), "batches/s"),
        Row("read as Arrow / bare pread", ratio, "ratio", ">= 0.4", ratio >= 0.4),
        Row("read as plain records", plain, "batches/s"),
    ]


def many_shards() -> list[Row]:
    count = int(os.environ.get("BASALT_BENCH_SHARDS", "200000"))
    record = (Record(os.urandom(VALUE_BYTES)),)
    with bench_path() as path:
        rig = Rig(path)
        few = rig.create(100)
        write = rig.engine.batch_write
        rate(2000, lambda at: write(few[at % 100], record))
        over_few = rate(20_000, lambda at: write(few[at % 100], record))
        many: list[int] = []
        while len(many) < count:
            many += rig.create(min(50_000, count - len(many)))
        rate(20_000, lambda at: write(many[at], record))
        before = _resident_bytes()
        over_many = rate(count - 20_000, lambda at: write(many[20_000 + at], record))
        grown = _resident_bytes() - before
        files = len(os.listdir("/proc/self/fd"))
        rig.close()
    ratio = over_many / over_few
    return [
        Row("append one record, over 100 shards", over_few, "records/s"),
        Row(f"append one record, over {count} shards", over_many, "records/s"),
        Row("many shards / 100 shards", ratio, "ratio", ">= 0.5", ratio >= 0.5),
        Row("memory grown meanwhile", grown / MIB, "MiB", "<= 200", grown <= 200 * MIB),
        Row("open files", files, "files", "<= 700", files <= 700),
    ]


def restarting() -> list[Row]:
    """Start after a crash: 64 MiB past the checkpoint, with much log before it and with none."""
    size_bytes = int(float(os.environ.get("BASALT_BENCH_LOG_GB", "1")) * (1 << 30))
    small = _start_after_crash(0)
    large, log_bytes, rebuild, raw, told = _start_after_crash(size_bytes, rebuild=True)
    return [
        Row("start with 64 MiB in all, all past the checkpoint", small[0], "s"),
        Row(f"start with {log_bytes / (1 << 30):.1f} GiB, 64 MiB past it", large, "s"),
        Row("large / small", large / small[0], "ratio", "<= 2", large <= 2 * small[0]),
        Row("raw sequential read from the disk", raw / MIB, "MiB/s"),
        Row("whole rebuild of the index", rebuild / MIB, "MiB/s"),
        Row("rebuild / raw read", rebuild / raw, "ratio", ">= 0.25", rebuild >= 0.25 * raw),
        Row("times progress was told", told, "times", ">= 1", told >= 1),
    ]


def _start_after_crash(size_bytes: int, rebuild: bool = False) -> tuple[float, int, float, float, int]:
    batches = [batch_of(number) for number in range(50)]
    frame_bytes = len(batches[0].body) + 72
    with bench_path() as path:
        rig = Rig(path)
        shards = rig.create(100)
        for number in range(size_bytes // frame_bytes):
            rig.engine.batch_write(shards[number % 100], batches[number % 50])
        rig.engine.checkpoint()
        # A crash: what the index gathers from here on is not on disk when the process ends. The copy of the checkpoint
        # is what a killed process leaves; the index rows written later are left out of it.
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
        if not rebuild:
            return start_s, log_bytes, 0.0, 0.0, 0
        # From the disk, as after a reboot: what is in the page cache is dropped before each.
        _drop_cache(path / "log" / "0000")
        raw = _raw_read(path / "log" / "0000")
        _wipe(path)
        _drop_cache(path / "log" / "0000")
        told: list[int] = []
        started = time.perf_counter()
        rebuilt = Rig(path, lambda done, total: told.append(done))
        rebuild_rate = log_bytes / (time.perf_counter() - started)
        rebuilt.close()
        return start_s, log_bytes, rebuild_rate, raw, len(told)


def _wipe(path: Path) -> None:
    store = open_store(path / "store")
    from basaltmq.store.batch import Batch
    from basaltmq.store.families import Family

    batch = Batch()
    batch.delete_range(Family.STREAM_INDEX, b"", b"\xff")
    store.write(batch)
    store.close()


def _drop_cache(path: Path) -> None:
    for file in path.glob("*.log"):
        fd = os.open(file, os.O_RDONLY)
        os.fsync(fd)
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(fd)


def _raw_read(path: Path) -> float:
    started = time.perf_counter()
    total = 0
    for file in sorted(path.glob("*.log")):
        fd = os.open(file, os.O_RDONLY)
        while data := os.read(fd, 4 * MIB):
            total += len(data)
        os.close(fd)
    return total / (time.perf_counter() - started)


def _resident_bytes() -> int:
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * resource.getpagesize()


def run() -> list[Row]:
    return [*appending(), *syncing(), *reading(), *many_shards(), *restarting()]
