"""Durable commits per second: 64 concurrent committers compared with one (SPEC E6, promise P1).

A commit is a batch of one 256-byte row, and counts when its sync has returned. One committer waits for each of its
commits; 64 share syncs. Rounds of one and of many take turns on one store, because the disk speed varies; the median of
the rounds' ratios counts. With asyncio (uvloop, as in the broker) the figure has a target; with threads it is only
reported.
"""

from __future__ import annotations

import asyncio
import os
import statistics
import tempfile
import threading
import time
from functools import partial
from pathlib import Path
from typing import Final

import uvloop
from bench.row import Row
from bench.size import sized

from basaltmq.store.batch import Batch
from basaltmq.store.families import Family
from basaltmq.store.open import open_store
from basaltmq.store.rocks import RocksStore
from basaltmq.store.sync.group_commit import GroupCommit, Synced, resolve

COMMITTERS: Final = 64
VALUE: Final = bytes(256)
ROUND_S: Final = 0.7
ROUNDS: Final = sized(9, 5)

RATE_RATIO_MIN: Final = 20.0


def run(rounds: int = ROUNDS, round_s: float = ROUND_S) -> list[Row]:
    figures: dict[str, list[float]] = {name: [] for name in ("one", "many", "thread", "threads")}
    with tempfile.TemporaryDirectory(prefix="basalt-bench-") as folder:
        store = open_store(Path(folder) / "store")
        group = GroupCommit(store)
        for _ in range(rounds):
            figures["one"].append(uvloop.run(_loop(store, group, 1, round_s)))
            figures["many"].append(uvloop.run(_loop(store, group, COMMITTERS, round_s)))
            figures["thread"].append(_threads(store, group, 1, round_s))
            figures["threads"].append(_threads(store, group, COMMITTERS, round_s))
        group.close()
        store.close()
    ratio = _median_ratio(figures["many"], figures["one"])
    return [
        Row("one committer, asyncio", statistics.median(figures["one"]), "commits/s"),
        Row(f"{COMMITTERS} committers, asyncio", statistics.median(figures["many"]), "commits/s"),
        Row("many to one, asyncio", ratio, "x", f">= {RATE_RATIO_MIN:.0f}", ratio >= RATE_RATIO_MIN),
        Row("one committer, thread", statistics.median(figures["thread"]), "commits/s"),
        Row(f"{COMMITTERS} committers, threads", statistics.median(figures["threads"]), "commits/s"),
        Row("many to one, threads", _median_ratio(figures["threads"], figures["thread"]), "x"),
    ]


def _median_ratio(many: list[float], one: list[float]) -> float:
    return statistics.median(left / right for left, right in zip(many, one, strict=True))


def _batch() -> Batch:
    batch = Batch()
    batch.put(Family.MESSAGES, os.urandom(16), VALUE)
    return batch


class _Turn:
    """Writes the batches of one turn of the loop as one batch, as the broker's tick does."""

    def __init__(self, store: RocksStore, group: GroupCommit) -> None:
        self._store = store
        self._group = group
        self._batch = Batch()
        self._callbacks: list[Synced] = []

    def commit(self, batch: Batch) -> asyncio.Future[None]:
        loop = asyncio.get_running_loop()
        if not self._batch:
            loop.call_soon(self._end, loop)
        self._batch.extend(batch)
        future: asyncio.Future[None] = loop.create_future()
        self._callbacks.append(partial(resolve, future))
        return future

    def _end(self, loop: asyncio.AbstractEventLoop) -> None:
        batch, self._batch = self._batch, Batch()
        callbacks, self._callbacks = self._callbacks, []
        self._store.write(batch)
        self._group.after_sync(loop, callbacks)


async def _loop(store: RocksStore, group: GroupCommit, committers: int, round_s: float) -> float:
    """Return commits per second of this number of coroutines."""
    deadline = time.perf_counter() + round_s
    turn = _Turn(store, group)

    async def commit() -> int:
        done = 0
        while time.perf_counter() < deadline:
            await turn.commit(_batch())
            done += 1
        return done

    started = time.perf_counter()
    counts = await asyncio.gather(*(commit() for _ in range(committers)))
    return sum(counts) / (time.perf_counter() - started)


def _threads(store: RocksStore, group: GroupCommit, committers: int, round_s: float) -> float:
    """Return commits per second of this number of threads."""
    counts = [0] * committers
    deadline = time.perf_counter() + round_s

    def commit(which: int) -> None:
        while time.perf_counter() < deadline:
            store.write(_batch())
            group.wait_durable()
            counts[which] += 1

    threads = [threading.Thread(target=commit, args=(which,)) for which in range(committers)]
    started = time.perf_counter()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return sum(counts) / (time.perf_counter() - started)
