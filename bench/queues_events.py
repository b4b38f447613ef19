"""Queues with lifecycle events against queues without: what does telling `__events` cost? (DESIGN 6)

The embedded database, 256 B messages, enqueue + lease + ack in calls of 100 and of 1, everything `written`. Stretches
with events and without take turns in one process, and in an order that changes, so that a machine that changes its pace
changes it for both. Time is the CPU time of the whole process: the thread that writes the topic is part of the price.
The median of what the pairs of neighbours say counts; the quartiles beside it tell how much to believe it: on a busy
machine they are wide. The best stretch of each kind is given too, for the absolute cost.
"""

from __future__ import annotations

import os
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Final

from bench.row import Row

import basaltmq
from basaltmq.embedded.database import Basalt, Settings
from basaltmq.queues.draft import Draft
from basaltmq.queues.event_topic import EventSettings

PAIRS: Final = 24
MESSAGES: Final = 20_000
COST_MAX: Final = 0.10


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
    payload = os.urandom(256)

    def cycle() -> None:
        drafts: list[Draft | bytes] = [payload] * call
        for _ in range(messages // call):
            plane.enqueue("q", drafts)
            plane.ack("q", plane.lease("q", call, consumer="bench")[0].token)
        _settle(db)

    def without() -> float:
        plane.record_events(None)
        return _cpu_s(cycle)

    def with_events() -> float:
        plane.record_events(recorder)
        return _cpu_s(cycle)

    cycle()
    costs: list[float] = []
    best = {"without": float("inf"), "with": float("inf")}
    for number in range(pairs):
        if number % 2:
            told_s, plain_s = with_events(), without()
        else:
            plain_s, told_s = without(), with_events()
        costs.append(told_s / plain_s - 1)
        best = {"without": min(best["without"], plain_s), "with": min(best["with"], told_s)}
    low, middle, high = statistics.quantiles(costs, n=4)
    dropped = db.event_counters()["dropped"] + db.event_counters()["failed"]
    what = f"calls of {call}"
    return [
        Row(f"best without events, {what}", best["without"] / messages * 1e6, "us/message"),
        Row(f"best with events, {what}", best["with"] / messages * 1e6, "us/message"),
        Row(f"cost, {what}, median of pairs", middle * 100, "%", f"<= {COST_MAX:.0%}", middle <= COST_MAX),
        Row(f"cost, {what}, first quartile", low * 100, "%"),
        Row(f"cost, {what}, third quartile", high * 100, "%"),
        Row(f"events dropped, {what}", dropped, "events"),
    ]


def _settle(db: Basalt) -> None:
    """Wait until the events of a stretch are written, so that they are paid for where they were made."""
    pause_s = 0.05  # a few wakes: looking must not be what is measured
    while db.event_counters()["waiting_bytes"]:
        time.sleep(pause_s)


def _cpu_s(work: Callable[[], None]) -> float:
    begin = time.process_time()
    work()
    return time.process_time() - begin
