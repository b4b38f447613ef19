"""Cost of lifecycle events: life cycles of messages per second with events and without, in turns.

Messages of 256 B are enqueued, leased and acked, in calls of 100 and of 1, at `written`. A stretch is long enough for
several writes of the topic. It ends when all of its events are written, and this wait is part of its time, so it does
not affect the next stretch. Stretches come in fours: without, with, with, without. So a uniform change of the machine's
speed affects both. The result is the median over the fours; the quartiles show its reliability.

The bench also reports the CPU time of the two threads involved, the caller and the writer. RocksDB flushes between
stretches, and a stretch fills no memtable. So no background work of RocksDB, which is most of the noise, is in a
stretch. Events are therefore compared with less work than usual.
"""

from __future__ import annotations

import os
import statistics
import tempfile
import threading
import time
from pathlib import Path
from typing import Final, NamedTuple

from bench.row import Row
from bench.size import sized

import basaltmq
from basaltmq.embedded.database import Basalt, Settings
from basaltmq.queues.draft import Draft
from basaltmq.queues.events.topic import EventSettings, EventWriter

FOURS: Final = sized(24, 6)
STRETCH_S: Final = 0.25
"""As long as events are gathered, and too short to fill a memtable."""
COST_MAX: Final = 0.10
THREAD: Final = "basalt-events"
SETTLE_S: Final = 60


class Stretch(NamedTuple):
    """Time per message, in microseconds."""

    wall_us: float
    cpu_us: float


def run(fours: int = FOURS, stretch_s: float = STRETCH_S) -> list[Row]:
    rows: list[Row] = []
    for call in (100, 1):
        with tempfile.TemporaryDirectory(prefix="basalt-bench-") as folder:
            settings = Settings(events=EventSettings())
            with basaltmq.open(Path(folder) / "data", settings=settings) as db:
                rows += _compare(db, call, fours, stretch_s)
    return rows


def _compare(db: Basalt, call: int, fours: int, stretch_s: float) -> list[Row]:
    db.queue("q", durability="written")
    plane = db.queue_plane
    writer = db._open_queues().events
    assert isinstance(writer, EventWriter)
    drafts: list[Draft | bytes] = [os.urandom(256)] * call
    thread = next(thread for thread in threading.enumerate() if thread.name == THREAD)
    assert thread.ident is not None
    clock = time.pthread_getcpuclockid(thread.ident)

    def stretch(calls: int, *, reported: bool) -> Stretch:
        plane.record_events(writer.recorder if reported else None)
        before = writer.written
        db.store.flush()
        began_wall_s, began_s, began_writer_s = time.perf_counter(), time.thread_time(), time.clock_gettime(clock)
        for _ in range(calls):
            plane.enqueue("q", drafts)
            plane.ack("q", plane.lease("q", call, consumer="bench")[0].token)
        assert writer.flush(SETTLE_S), f"events are not written: {writer.counters()}"
        wall_s, cpu_s = time.perf_counter() - began_wall_s, time.thread_time() - began_s
        cpu_s += time.clock_gettime(clock) - began_writer_s
        written = writer.written - before
        assert written == 3 * calls * call * reported, f"{written} events were written of {3 * calls * call * reported}"
        return Stretch(wall_s / (calls * call) * 1e6, cpu_s / (calls * call) * 1e6)

    warm = 50
    stretch(warm, reported=True)
    calls = max(warm, round(stretch_s * 1e6 / (stretch(warm, reported=False).wall_us * call)))
    reported: list[Stretch] = []
    plain: list[Stretch] = []
    for _ in range(fours):
        first, second, third, fourth = (
            stretch(calls, reported=is_reported) for is_reported in (False, True, True, False)
        )
        plain.append(Stretch(first.wall_us + fourth.wall_us, first.cpu_us + fourth.cpu_us))
        reported.append(Stretch(second.wall_us + third.wall_us, second.cpu_us + third.cpu_us))
    lost = [1 - b.wall_us / a.wall_us for a, b in zip(reported, plain, strict=True)]
    more = [a.cpu_us / b.cpu_us - 1 for a, b in zip(reported, plain, strict=True)]
    what = f"calls of {call}"
    return [
        Row(f"lives without events, {what}", 2e6 / statistics.median(each.wall_us for each in plain), "msg/s"),
        Row(f"lives with events, {what}", 2e6 / statistics.median(each.wall_us for each in reported), "msg/s"),
        *_share(f"throughput lost, {what}", lost),
        *_share(f"more processor time, {what}", more),
    ]


def _share(what: str, fours: list[float]) -> list[Row]:
    low, middle, high = statistics.quantiles(fours, n=4)
    return [
        Row(what, middle * 100, "%", f"<= {COST_MAX:.0%}", middle <= COST_MAX),
        Row(f"{what}, first quartile", low * 100, "%"),
        Row(f"{what}, third quartile", high * 100, "%"),
    ]
