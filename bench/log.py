"""Streams in the commit log: appending, syncing, many shards.

Every figure is measured next to its bound, in the same run, on the same disk. BASALT_BENCH_SHARDS sets the number of
shards (default 200000; the bar is meant for 1000000). BASALT_BENCH_PARTS selects parts (appending, syncing,
many_shards). `log_read` measures reads and starts.
"""

from __future__ import annotations

import asyncio
import os
import resource
import threading

import uvloop
from bench.log_rig import MIB, RECORDS, ROUNDS, VALUE_BYTES, Rig, batch_of, bench_path, middle, rate, rows_of
from bench.row import Row
from bench.size import sized
from tests.log_frames import encode_batch

from basaltmq.durability import Durability
from basaltmq.log.batches.record import Record


def appending() -> list[Row]:
    """In each round, append the same bytes with plain write(2) and through the engine, one after the other."""
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
    """Sixteen writers that wait for every batch, next to one that does not wait, and next to the plain disk.

    The writers are coroutines of one loop, as in a broker. With threads, the figure mainly shows GIL handover; it is
    reported too. Rounds take turns, because the speed of the disk varies.
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
    # The disk's limit: sixteen waiting writers can have at most sixteen batches per sync.
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


def many_shards() -> list[Row]:
    count = int(os.environ.get("BASALT_BENCH_SHARDS", sized(200_000, 20_000)))
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


def _resident_bytes() -> int:
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * resource.getpagesize()


def run() -> list[Row]:
    return rows_of(appending, syncing, many_shards)
