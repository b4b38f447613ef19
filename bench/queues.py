"""The queue plane against raw RocksDB in one run: ratios, 256 B messages, calls of 100.

    python bench/queues.py [--messages N] [--backlog N] [--queues N] [--keys N] [--only NAME ...]

Rounds alternate between the plane and raw RocksDB, so that both see the same machine. Rates are those of the best
round, ratios the median of those within a round.
"""

from __future__ import annotations

import argparse
import os
import resource
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from statistics import median

from rocksdict import WriteBatch, WriteOptions

from basaltmq.queues.config import Durability, QueueConfig
from basaltmq.queues.draft import Draft
from basaltmq.queues.plane import QueuePlane
from basaltmq.store.commit import GroupCommit
from basaltmq.store.families import Family
from basaltmq.store.open import open_store
from basaltmq.store.rocks import RocksStore

CALL = 100
ROUNDS = 5


@contextmanager
def opened(path: Path) -> Iterator[tuple[RocksStore, QueuePlane]]:
    store = open_store(path)
    commit = GroupCommit(store)
    plane = QueuePlane(store, commit)
    try:
        yield store, plane
    finally:
        plane.close()
        commit.close()
        store.close()


def timed(work: Callable[[], object]) -> float:
    begin = time.perf_counter()
    work()
    return time.perf_counter() - begin


def raw_put(store: RocksStore, keys: list[bytes], value: bytes) -> None:
    handle, db, options = store._handles[Family.MESSAGES], store._db, WriteOptions()
    for at in range(0, len(keys), CALL):
        batch = WriteBatch(raw_mode=True)
        for key in keys[at : at + CALL]:
            batch.put(key, value, handle)
        db.write(batch, options)


def raw_delete(store: RocksStore, keys: list[bytes]) -> None:
    handle, db, options = store._handles[Family.MESSAGES], store._db, WriteOptions()
    for at in range(0, len(keys), CALL):
        batch = WriteBatch(raw_mode=True)
        for key in keys[at : at + CALL]:
            batch.delete(key, handle)
        db.write(batch, options)


def enqueue(plane: QueuePlane, queue: str, count: int, payload: bytes) -> None:
    call: list[Draft | bytes] = [payload] * CALL
    for _ in range(count // CALL):
        plane.enqueue(queue, call)


def drain(plane: QueuePlane, queue: str, count: int) -> None:
    left = count
    while left > 0:
        deliveries = plane.lease(queue, CALL, consumer="bench")
        if not deliveries:
            break
        plane.ack(queue, deliveries[0].token)
        left -= len(deliveries)
    assert left == 0, f"{left} messages are missing"


def throughput(base: Path, messages: int) -> None:
    payload = os.urandom(256)
    prefix = b"\x00\x03raw\x00\x07default"
    best: dict[str, float] = {}
    ratios: dict[str, list[float]] = {"put": [], "cycle": [], "deep": []}
    with opened(base / "raw") as (raw, _), opened(base / "plane") as (_, plane):
        plane.create(QueueConfig(name="q", durability=Durability.WRITTEN))
        for round_number in range(ROUNDS):
            keys = [prefix + (round_number * messages + i).to_bytes(8, "big") + os.urandom(16) for i in range(messages)]
            took = {
                "raw put": timed(lambda keys=keys: raw_put(raw, keys, payload)),  # type: ignore[misc]
                "enqueue": timed(lambda: enqueue(plane, "q", messages, payload)),
                "raw delete": timed(lambda keys=keys: raw_delete(raw, keys)),  # type: ignore[misc]
                "lease+ack": timed(lambda: drain(plane, "q", messages)),
            }
            took["raw put+delete"] = took["raw put"] + took["raw delete"]
            took["enqueue+lease+ack"] = took["enqueue"] + took["lease+ack"]
            for name, seconds in took.items():
                best[name] = min(best.get(name, seconds), seconds)
            cycle = timed(lambda: short_queue(plane, messages, payload))
            best["short queue cycle"] = min(best.get("short queue cycle", cycle), cycle)
            ratios["put"].append(took["raw put"] / took["enqueue"])
            ratios["cycle"].append(took["raw put+delete"] / cycle)
            ratios["deep"].append(took["raw put+delete"] / took["enqueue+lease+ack"])
    for name, seconds in best.items():
        print(f"  {name:<20} {messages / seconds:>10,.0f} msg/s   {seconds / messages * 1e6:5.2f} us")
    show("enqueue / raw put", median(ratios["put"]), 0.35)
    show("enqueue+lease+ack / raw put+delete, short queue", median(ratios["cycle"]), 0.25)
    print(f"       the same with {messages:,} messages enqueued first and then drained: {median(ratios['deep']):.0%}")


def short_queue(plane: QueuePlane, messages: int, payload: bytes) -> None:
    """A queue that is emptied as fast as it is filled."""
    call: list[Draft | bytes] = [payload] * CALL
    for _ in range(messages // CALL):
        plane.enqueue("q", call)
        deliveries = plane.lease("q", CALL, consumer="bench")
        plane.ack("q", deliveries[0].token)


def fairness(base: Path, messages: int, keys: int) -> None:
    rates: dict[int, float] = {}
    payload = os.urandom(256)
    messages = min(messages, keys)
    with opened(base / "fair") as (_, plane):
        for count in (10, keys):
            queue = f"fair-{count}"
            plane.create(QueueConfig(name=queue, durability=Durability.WRITTEN))
            each = max(1, messages // count)
            total = each * count
            for at in range(0, total, CALL):
                drafts: list[Draft | bytes] = [
                    Draft(payload=payload, fairness_key=f"k{i % count}") for i in range(at, min(at + CALL, total))
                ]
                plane.enqueue(queue, drafts)
            rates[count] = total / timed(lambda queue=queue, total=total: drain(plane, queue, total))  # type: ignore[misc]
            print(f"  {count:>7} keys          {rates[count]:>10,.0f} msg/s leased and acked")
    show(f"{keys} keys / 10 keys", rates[keys] / rates[10], 0.80)


def shares(base: Path) -> None:
    with opened(base / "shares") as (_, plane):
        plane.create(QueueConfig(name="w", durability=Durability.WRITTEN))
        weights = {"a": 1, "b": 2, "c": 7}
        for key, weight in weights.items():
            for _ in range(200):
                plane.enqueue("w", [Draft(payload=b"x", fairness_key=key, weight=weight)] * CALL)
        got = dict.fromkeys(weights, 0)
        for _ in range(100):
            deliveries = plane.lease("w", CALL)
            for delivery in deliveries:
                got[delivery.message().fairness_key] += 1
            plane.ack("w", deliveries[0].token)
    total = sum(got.values())
    worst = max(abs(got[key] / total - weight / 10) / (weight / 10) for key, weight in weights.items())
    print(f"  shares of weights 1:2:7: {got}, off by {worst:.2%} at most (bar: 1 %)")


def backlog(base: Path, size: int) -> None:
    payload = os.urandom(256)
    path = base / "backlog"
    sample = min(size, 200_000)
    with opened(path) as (_, plane):
        plane.create(QueueConfig(name="q", durability=Durability.WRITTEN))
        empty_s = timed(lambda: enqueue(plane, "q", sample, payload))
        short_s = timed(lambda: drain(plane, "q", sample))
        enqueue(plane, "q", size // 10, payload)
        tenth_mib = rss_mib()
        enqueue(plane, "q", size - size // 10 - sample, payload)
        full_s = timed(lambda: enqueue(plane, "q", sample, payload))
        full_mib = rss_mib()
        drain_s = timed(lambda: drain(plane, "q", sample))
    with opened(base / "none") as (_, plane):
        pass
    none_s = timed(lambda: open_and_lease(base / "none", None))
    behind_s = timed(lambda: open_and_lease(path, "q"))
    show(
        f"memory at {size:,} / at {size // 10:,} ({full_mib:.0f} / {tenth_mib:.0f} MiB)", tenth_mib / full_mib, 1 / 1.2
    )
    show("enqueue rate behind the backlog / empty", empty_s / full_s, 0.70)
    show("drain rate of the backlog / of a short queue", short_s / drain_s, 0.60)
    print(f"  open and first lease: {behind_s:.2f} s with the backlog, {none_s:.2f} s empty (bar: 3 s more)")


def open_and_lease(path: Path, queue: str | None) -> None:
    with opened(path) as (_, plane):
        if queue is not None:
            assert plane.lease(queue, CALL)


def many_queues(base: Path, count: int) -> None:
    path = base / "many"
    with opened(path) as (store, plane):
        begin = time.perf_counter()
        half_mib = 0.0
        for at in range(0, count, 500):
            some = range(at, min(at + 500, count))
            with plane.change():
                for number in some:
                    plane.create(QueueConfig(name=f"queue-{number}", durability=Durability.WRITTEN))
            for number in some:
                plane.enqueue(f"queue-{number}", [b"x" * 100] * 3)
            if at < count // 2:
                half_mib = rss_mib() - tables_mib(store)
        full_mib = rss_mib() - tables_mib(store)
        print(f"  {count:,} queues with 3 messages made in {time.perf_counter() - begin:.1f} s")
    each = (full_mib - half_mib) * 1048576 / (count / 2)
    print(f"  process without RocksDB's write buffers: {half_mib:.0f} MiB at half of them, {full_mib:.0f} MiB at all")
    print(f"  memory of one more queue: {each:,.0f} B (bar: 1,024 B)")
    print(f"  open: {timed(lambda: open_and_lease(path, None)):.2f} s")


def tables_mib(store: RocksStore) -> float:
    """RocksDB's write buffers: a fixed budget that fills whatever is written."""
    return store.properties()["memtable-bytes"] / 1048576


def rss_mib() -> float:
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * resource.getpagesize() / 1048576


def show(what: str, ratio: float, bar: float) -> None:
    print(f"  {'ok  ' if ratio >= bar else 'LOW '} {what}: {ratio:.0%} (bar: {bar:.0%})")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--messages", type=int, default=200_000)
    parser.add_argument("--backlog", type=int, default=1_000_000)
    parser.add_argument("--queues", type=int, default=10_000)
    parser.add_argument("--keys", type=int, default=100_000)
    parser.add_argument("--only", nargs="*", choices=["throughput", "fairness", "shares", "backlog", "queues"])
    chosen = parser.parse_args()
    base = Path(tempfile.mkdtemp(prefix="basalt-bench-"))
    parts: dict[str, Callable[[], None]] = {
        "throughput": lambda: throughput(base, chosen.messages),
        "fairness": lambda: fairness(base, chosen.messages, chosen.keys),
        "shares": lambda: shares(base),
        "backlog": lambda: backlog(base, chosen.backlog),
        "queues": lambda: many_queues(base, chosen.queues),
    }
    try:
        for name, part in parts.items():
            if not chosen.only or name in chosen.only:
                print(name)
                part()
    finally:
        shutil.rmtree(base)


if __name__ == "__main__":
    main()
