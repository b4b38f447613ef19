"""A million delayed messages become due at once: time until all are ready, and waits of other operations meanwhile.

Meanwhile the bench uses another queue: enqueue, lease and ack of one message between two portions of the due work, when
other threads would get the plane's lock. The figures are times, not ratios: the targets bound the duration of a
portion.
"""

from __future__ import annotations

import os
import tempfile
import time
from pathlib import Path
from typing import Final

from bench.row import Row
from bench.size import sized

from basaltmq.durability import Durability
from basaltmq.queues.config import QueueConfig
from basaltmq.queues.draft import Draft
from basaltmq.queues.plane import QueuePlane
from basaltmq.store.open import open_store
from basaltmq.store.sync.group_commit import GroupCommit

MESSAGES: Final = sized(1_000_000, 100_000)
CALL: Final = 10_000
DELAY_MS: Final = 3_600_000


def run(messages: int = MESSAGES) -> list[Row]:
    now_ns = time.time_ns()
    clock = [now_ns]
    with tempfile.TemporaryDirectory(prefix="basalt-bench-") as folder:
        store = open_store(Path(folder) / "store")
        commit = GroupCommit(store)
        plane = QueuePlane(store, commit, clock_ns=lambda: clock[0])
        for name in ("crowd", "other"):
            plane.create(QueueConfig(name=name, durability=Durability.WRITTEN))
        payload = os.urandom(64)
        begin = time.perf_counter()
        drafts: list[Draft | bytes] = [Draft(payload=payload, delay_ms=DELAY_MS)] * CALL
        for _ in range(messages // CALL):
            plane.enqueue("crowd", drafts)
        filled_s = time.perf_counter() - begin
        clock[0] += (DELAY_MS + 1) * 1_000_000
        pieces: list[float] = []
        others: list[float] = []
        begin = time.perf_counter()
        while plane.stats("crowd")["delayed"]:
            at = time.perf_counter()
            plane.run_due()
            between = time.perf_counter()
            plane.enqueue("other", [payload])
            plane.ack("other", plane.lease("other")[0].token)
            pieces.append(between - at)
            others.append(time.perf_counter() - between)
        due_s = time.perf_counter() - begin
        ready = plane.stats("crowd")["ready"]
        plane.close()
        commit.close()
        store.close()
    pieces.sort()
    return [
        Row("messages delayed", messages / filled_s, "messages/s"),
        Row("messages that came back", ready, "messages", f"{messages}", ready == messages),
        Row("until all are ready", due_s, "s"),
        Row("pieces", len(pieces), "calls"),
        Row("a piece, median", pieces[len(pieces) // 2] * 1e3, "ms"),
        Row("a piece, longest", pieces[-1] * 1e3, "ms"),
        Row("a turn of the other queue, longest", max(others) * 1e3, "ms"),
    ]
