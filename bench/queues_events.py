"""What lifecycle events cost the queues: enqueue + lease + ack with them and without, in one process, in turns.

256 B messages that come and go (enqueue, lease, ack), in calls of 100 and of 1, everything `written`. Short stretches
with events and without take turns, and in an order that changes, so that a machine that changes its pace changes it for
both. Time is CPU time of the two threads that have to do with it, each by its own clock: of the caller, as the median
of what the pairs of neighbours say; and of the thread that writes the topic, all of it, over all events. What RocksDB
does in the background is left out: it comes when it comes, for what any stretch wrote, and is most of the noise. The
quartiles of the pairs tell how much to believe the caller's part. Beside it what the same stretches lost by the
clock on the wall, which is less than all: what the writing thread does reaches into stretches without events.
"""

from __future__ import annotations

import os
import statistics
import tempfile
import threading
import time
from pathlib import Path
from typing import Final

from bench.row import Row

import basaltmq
from basaltmq.embedded.database import Basalt, Settings
from basaltmq.queues.draft import Draft
from basaltmq.queues.event_topic import EventSettings
from basaltmq.queues.recorder import Recorder

PAIRS: Final = 150
MESSAGES: Final = 2_000
"""Of a stretch, in calls of 100: some ten milliseconds. A tenth of it in calls of 1."""
COST_MAX: Final = 0.10
THREAD: Final = "basalt-events"
SETTLE_S: Final = 60


def run(pairs: int = PAIRS, messages: int = MESSAGES) -> list[Row]:
    rows: list[Row] = []
    for call, count in ((100, messages), (1, messages // 10)):
        with tempfile.TemporaryDirectory(prefix="basalt-bench-") as folder:
            settings = Settings(events=EventSettings())
            with basaltmq.open(Path(folder) / "data", settings=settings) as db:
                rows += _compare(db, call, count, pairs)
    return rows


def _compare(db: Basalt, call: int, messages: int, pairs: int) -> list[Row]:
    db.queue("q", durability="written")
    plane = db.queue_plane
    recorder = plane._shared.events
    assert isinstance(recorder, Recorder)
    drafts: list[Draft | bytes] = [os.urandom(256)] * call

    walls: dict[bool, list[float]] = {True: [], False: []}

    def stretch_us(*, told: bool) -> float:
        """CPU time of this thread per message."""
        plane.record_events(recorder if told else None)
        begin, begin_wall = time.thread_time(), time.perf_counter()
        for _ in range(messages // call):
            plane.enqueue("q", drafts)
            plane.ack("q", plane.lease("q", call, consumer="bench")[0].token)
        walls[told].append(time.perf_counter() - begin_wall)
        return (time.thread_time() - begin) / messages * 1e6

    stretch_us(told=True)
    _settle(db, recorder)
    writer = next(thread for thread in threading.enumerate() if thread.name == THREAD)
    assert writer.ident is not None
    clock = time.pthread_getcpuclockid(writer.ident)
    began_s, written_before = time.clock_gettime(clock), db.event_counters()["written"]
    told: list[float] = []
    plain: list[float] = []
    for number in range(pairs):
        if number % 2:
            told.append(stretch_us(told=True))
            plain.append(stretch_us(told=False))
        else:
            plain.append(stretch_us(told=False))
            told.append(stretch_us(told=True))
    _settle(db, recorder)
    written = db.event_counters()["written"] - written_before
    assert written == 3 * messages * pairs, f"{written} events were written of {3 * messages * pairs}"
    writer_us = (time.clock_gettime(clock) - began_s) / (messages * pairs) * 1e6
    low, more_us, high = statistics.quantiles([a - b for a, b in zip(told, plain, strict=True)], n=4)
    without_us = statistics.median(plain)
    cost = (more_us + writer_us) / without_us
    lost = 1 - statistics.median(walls[False]) / statistics.median(walls[True])
    what = f"calls of {call}"
    return [
        Row(f"without events, {what}", without_us, "us/message"),
        Row(f"more for the caller, {what}, median", more_us, "us/message"),
        Row(f"more for the caller, {what}, first quartile", low, "us/message"),
        Row(f"more for the caller, {what}, third quartile", high, "us/message"),
        Row(f"the thread that writes them, {what}", writer_us, "us/message"),
        Row(f"throughput lost by the wall clock, {what}", lost * 100, "%"),
        Row(f"cost, {what}", cost * 100, "%", f"<= {COST_MAX:.0%}", cost <= COST_MAX),
    ]


def _settle(db: Basalt, recorder: Recorder) -> None:
    """Wait until what was told is written."""
    until_s = time.monotonic() + SETTLE_S
    while db.event_counters()["written"] < recorder.recorded:
        assert time.monotonic() < until_s, f"events are not written: {db.event_counters()}"
        time.sleep(0.05)
