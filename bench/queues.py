"""The queue plane compared with plain `rocksdict`: 256 B messages in calls of 100, WAL on, no sync, ratios within one
run.

The two take turns round by round, so that both run under the same conditions. The result is the median of the ratios. A
short queue (enqueue 100, lease 100, ack 100, again) is compared with a put and a delete of 100 rows at a time. A deep
queue (all enqueued, then all drained) is compared with all puts and then all deletes.

- fairness: equal numbers of messages under 10 and under 100,000 keys, several per key, enqueued in turns and drained by
  lease and ack. Shares: deliveries compared with weights while all keys have messages.
- backlog: memory, enqueue and drain rates behind it, and the time from open to the first lease after kill -9.
- queues: many queues with a few messages each: memory of one more, time to open.

`python -m bench queues` uses sizes that take a minute or two. `--full` uses the sizes of the targets: ten million
messages and a hundred thousand queues. Rows name their size. Each part that measures memory runs in a separate process.
"""

from __future__ import annotations

import argparse
import os
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from typing import Final, NamedTuple

import msgspec
from bench.row import Row
from bench.size import is_quick, sized
from rocksdict import WriteBatch, WriteOptions

from basaltmq.durability import Durability
from basaltmq.queues.config import QueueConfig
from basaltmq.queues.draft import Draft
from basaltmq.queues.plane import QueuePlane
from basaltmq.store.families import Family
from basaltmq.store.open import open_store
from basaltmq.store.rocks import RocksStore
from basaltmq.store.sync.group_commit import GroupCommit

CALL: Final = 100
PAYLOAD_BYTES: Final = 256
ROUNDS: Final = 5
FEW_KEYS: Final = 10
PER_KEY: Final = 5
"""Messages per key: more than one, so that a key stays ready after its turn."""
FAIR_ROUNDS: Final = 2
FAIR_CALL: Final = 1000
"""Messages per enqueue call if only the drain is measured."""
RATE_SAMPLE: Final = sized(200_000, 5_000)
"""Messages for the measurement of a rate behind a backlog."""
MIB: Final = 1 << 20


class Sizes(NamedTuple):
    """Sizes of the measurements."""

    messages: int = 100_000
    keys: int = 100_000
    backlog: int = 1_000_000
    queues: int = 10_000


QUICK: Final = Sizes(messages=20_000, keys=20_000, backlog=100_000, queues=1_000)
FULL: Final = Sizes(backlog=10_000_000, queues=100_000)


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


class Raw:
    """Writes rows directly to a database."""

    def __init__(self, store: RocksStore) -> None:
        self._store = store
        self._number = 0
        self._payload = os.urandom(PAYLOAD_BYTES)

    def keys(self, count: int) -> list[bytes]:
        """Return ascending keys with the length of a message's key."""
        self._number += count
        first = self._number - count
        prefix = b"\x00\x01q\x00\x07default"
        return [prefix + (first + i).to_bytes(8, "big") + os.urandom(16) for i in range(count)]

    def put(self, keys: list[bytes]) -> None:
        handle, db, options = self._store._handles[Family.MESSAGES], self._store._db, WriteOptions()
        for at in range(0, len(keys), CALL):
            batch = WriteBatch(raw_mode=True)
            for key in keys[at : at + CALL]:
                batch.put(key, self._payload, handle)
            db.write(batch, options)

    def delete(self, keys: list[bytes]) -> None:
        handle, db, options = self._store._handles[Family.MESSAGES], self._store._db, WriteOptions()
        for at in range(0, len(keys), CALL):
            batch = WriteBatch(raw_mode=True)
            for key in keys[at : at + CALL]:
                batch.delete(key, handle)
            db.write(batch, options)

    def in_turns(self, keys: list[bytes]) -> None:
        """Put a call's rows and delete them, call by call."""
        for at in range(0, len(keys), CALL):
            self.put(keys[at : at + CALL])
            self.delete(keys[at : at + CALL])


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


def cycles(plane: QueuePlane, queue: str, count: int, payload: bytes) -> None:
    """Measure a queue that is emptied as fast as it is filled."""
    call: list[Draft | bytes] = [payload] * CALL
    for _ in range(count // CALL):
        plane.enqueue(queue, call)
        plane.ack(queue, plane.lease(queue, CALL, consumer="bench")[0].token)


def throughput(base: Path, messages: int) -> list[Row]:
    payload = os.urandom(PAYLOAD_BYTES)
    with opened(base / "raw") as (raw_store, _), opened(base / "plane") as (_, plane):
        raw = Raw(raw_store)
        plane.create(QueueConfig(name="q", durability=Durability.WRITTEN))
        rounds = [_throughput_round(raw, plane, messages, payload) for _ in range(ROUNDS)]
    put = median(took["raw put"] / took["enqueue"] for took in rounds)
    short = median(took["raw short"] / took["short"] for took in rounds)
    deep = median((took["raw put"] + took["raw delete"]) / (took["enqueue"] + took["lease and ack"]) for took in rounds)
    rates = [
        Row(name, messages / median(took[name] for took in rounds), "msg/s")
        for name in ("raw put", "enqueue", "raw delete", "lease and ack", "raw short", "short")
    ]
    return [
        *rates,
        _at_least("enqueue to raw put", put, 0.35),
        _at_least("enqueue+lease+ack to raw put+delete, short queue", short, 0.25),
        _at_least(f"enqueue+lease+ack to raw put+delete, {messages:,} deep", deep, 0.25),
    ]


def _throughput_round(raw: Raw, plane: QueuePlane, messages: int, payload: bytes) -> dict[str, float]:
    deep, short = raw.keys(messages), raw.keys(messages)
    return {
        "raw put": timed(lambda: raw.put(deep)),
        "enqueue": timed(lambda: enqueue(plane, "q", messages, payload)),
        "raw delete": timed(lambda: raw.delete(deep)),
        "lease and ack": timed(lambda: drain(plane, "q", messages)),
        "raw short": timed(lambda: raw.in_turns(short)),
        "short": timed(lambda: cycles(plane, "q", messages, payload)),
    }


def fairness(base: Path, keys: int) -> list[Row]:
    """Measure drain rates with few and with many keys, with the same number of messages, in turns."""
    payload = os.urandom(PAYLOAD_BYTES)
    total = keys * PER_KEY
    rates: dict[int, list[float]] = {FEW_KEYS: [], keys: []}
    with opened(base / "fair") as (_, plane):
        for number in range(FAIR_ROUNDS):
            for count, measured in rates.items():
                queue = f"fair-{count}-{number}"
                plane.create(QueueConfig(name=queue, durability=Durability.WRITTEN))
                for at in range(0, total, FAIR_CALL):
                    some = range(at, min(at + FAIR_CALL, total))
                    plane.enqueue(queue, [Draft(payload=payload, fairness_key=f"k{i % count}") for i in some])
                begin = time.perf_counter()
                drain(plane, queue, total)
                measured.append(total / (time.perf_counter() - begin))
    ratio = median(many / few for few, many in zip(rates[FEW_KEYS], rates[keys], strict=True))
    return [
        Row(f"{FEW_KEYS} keys, {total // FEW_KEYS:,} messages each", median(rates[FEW_KEYS]), "msg/s"),
        Row(f"{keys:,} keys, {PER_KEY} messages each", median(rates[keys]), "msg/s"),
        _at_least(f"{keys:,} keys to {FEW_KEYS}", ratio, 0.80),
        *_shares(base),
    ]


def _shares(base: Path) -> list[Row]:
    weights = {"a": 1, "b": 2, "c": 7}
    got = dict.fromkeys(weights, 0)
    with opened(base / "shares") as (_, plane):
        plane.create(QueueConfig(name="w", durability=Durability.WRITTEN))
        for key, weight in weights.items():
            for _ in range(200):
                plane.enqueue("w", [Draft(payload=b"x", fairness_key=key, weight=weight)] * CALL)
        for _ in range(100):
            deliveries = plane.lease("w", CALL)
            for delivery in deliveries:
                got[delivery.message().fairness_key] += 1
            plane.ack("w", deliveries[0].token)
    exact = sum(got.values()) / sum(weights.values())
    worst = max(abs(got[key] / (weight * exact) - 1) for key, weight in weights.items())
    return [Row("worst share against its weight", worst, "of 1", "<= 0.01", worst <= 0.01)]


def backlog(base: Path, size: int) -> list[Row]:
    path = base / "backlog"
    seen = _in_child("fill", str(path), str(size), killed=True)
    with opened(base / "none"):
        pass
    empty_s = min(_in_child("first-lease", str(base / "none"))["first_lease_s"] for _ in range(3))
    behind_s = _in_child("first-lease", str(path), "q")["first_lease_s"]
    more = seen["full_mib"] / seen["tenth_mib"]
    enqueue_ratio = seen["empty_s"] / seen["full_s"]
    drain_ratio = seen["short_s"] / seen["drain_s"]
    return [
        Row(f"memory at {size // 10:,}", seen["tenth_mib"], "MiB"),
        Row(f"memory at {size:,}", seen["full_mib"], "MiB", f"<= {seen['tenth_mib'] * 1.2:.0f}", more <= 1.2),
        _at_least(f"enqueue rate behind {size:,} to empty", enqueue_ratio, 0.70),
        _at_least(f"drain rate of {size:,} to a short queue's", drain_ratio, 0.60),
        Row("open and look, empty", empty_s, "s"),
        Row(
            f"open and first lease after kill -9, {size:,} behind",
            behind_s,
            "s",
            f"<= {empty_s + 3:.2f}",
            behind_s <= empty_s + 3,
        ),
    ]


def fill(path: Path, size: int) -> dict[str, float]:
    """Build a backlog; the caller kills this process."""
    payload = os.urandom(PAYLOAD_BYTES)
    sample = min(size // 10, RATE_SAMPLE)
    store = open_store(path)
    plane = QueuePlane(store, GroupCommit(store))
    plane.create(QueueConfig(name="q", durability=Durability.WRITTEN))
    seen = {"empty_s": timed(lambda: enqueue(plane, "q", sample, payload))}
    drain(plane, "q", sample)
    seen["short_s"] = 0.0
    for _ in range(sample // CALL):
        plane.enqueue("q", [payload] * CALL)
        seen["short_s"] += timed(lambda: drain(plane, "q", CALL))
    enqueue(plane, "q", size // 10, payload)
    seen["tenth_mib"] = _rss_mib()
    enqueue(plane, "q", size - size // 10 - sample, payload)
    seen["full_s"] = timed(lambda: enqueue(plane, "q", sample, payload))
    seen["full_mib"] = _rss_mib()
    seen["drain_s"] = timed(lambda: drain(plane, "q", sample))
    return seen


def first_lease(path: Path, queue: str | None) -> dict[str, float]:
    begin = time.perf_counter()
    with opened(path) as (_, plane):
        if queue is not None:
            assert plane.lease(queue, CALL)
        else:
            plane.configs()
        return {"first_lease_s": time.perf_counter() - begin}


def many_queues(base: Path, count: int) -> list[Row]:
    seen = _in_child("queues", str(base / "many"), str(count))
    open_s = min(_in_child("first-lease", str(base / "many"))["first_lease_s"] for _ in range(3))
    with opened(base / "one") as (_, plane):
        plane.create(QueueConfig(name="one"))
    one_s = min(_in_child("first-lease", str(base / "one"))["first_lease_s"] for _ in range(3))
    return [
        Row(f"queues made, 3 messages each, of {count:,}", count / seen["took_s"], "queues/s"),
        Row(f"memory of one more of {count:,} queues", seen["each_bytes"], "B", "<= 1024", seen["each_bytes"] <= 1024),
        Row("open, one queue", one_s, "s"),
        Row(f"open, {count:,} queues", open_s, "s", f"<= {one_s + 1:.2f}", open_s <= one_s + 1),
    ]


def make_queues(path: Path, count: int) -> dict[str, float]:
    begin = time.perf_counter()
    half_mib = 0.0
    with opened(path) as (store, plane):
        for at in range(0, count, 500):
            some = range(at, min(at + 500, count))
            with plane.change():
                for number in some:
                    plane.create(QueueConfig(name=f"queue-{number}", durability=Durability.WRITTEN))
            for number in some:
                plane.enqueue(f"queue-{number}", [b"x" * 100] * 3)
            if at < count // 2:
                half_mib = _rss_mib() - _tables_mib(store)
        full_mib = _rss_mib() - _tables_mib(store)
    return {"took_s": time.perf_counter() - begin, "each_bytes": (full_mib - half_mib) * MIB / (count / 2)}


def _tables_mib(store: RocksStore) -> float:
    """Return the size of RocksDB's write buffers: a fixed budget that does not depend on queues."""
    return store.properties()["memtable-bytes"] / MIB


def _rss_mib() -> float:
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * resource.getpagesize() / MIB


def _at_least(name: str, value: float, bar: float) -> Row:
    return Row(name, value, "x", f">= {bar}", value >= bar)


def _in_child(*arguments: str, killed: bool = False) -> dict[str, float]:
    """Run a part in a separate process and return its result. `killed`: send SIGKILL as soon as the part reports it is
    ready."""
    command = [sys.executable, "-m", "bench.queues", "--child", *arguments]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as child:
        assert child.stdout is not None
        line = child.stdout.readline()
        if killed:
            child.send_signal(signal.SIGKILL)
        child.wait()
    return msgspec.json.decode(line, type=dict[str, float])


def _child(name: str, *arguments: str) -> None:
    path = Path(arguments[0])
    if name == "fill":
        seen = fill(path, int(arguments[1]))
    elif name == "queues":
        seen = make_queues(path, int(arguments[1]))
    else:
        seen = first_lease(path, arguments[1] if len(arguments) > 1 else None)
    print(msgspec.json.encode(seen).decode(), flush=True)
    if name == "fill":
        signal.pause()


def run(*, full: bool = False, only: str | None = None) -> list[Row]:
    sizes = FULL if full else QUICK if is_quick() else Sizes()
    base = Path(tempfile.mkdtemp(prefix="basalt-bench-"))
    parts: dict[str, Callable[[], list[Row]]] = {
        "throughput": lambda: throughput(base, sizes.messages),
        "fairness": lambda: fairness(base, sizes.keys),
        "backlog": lambda: backlog(base, sizes.backlog),
        "queues": lambda: many_queues(base, sizes.queues),
    }
    try:
        return [row for name, part in parts.items() if only in (None, name) for row in part()]
    finally:
        shutil.rmtree(base)


def main() -> None:
    parser = argparse.ArgumentParser(description="One part of the bench alone; all of it: python -m bench queues.")
    parser.add_argument("--only", choices=["throughput", "fairness", "backlog", "queues"])
    parser.add_argument("--full", action="store_true", help="10 M messages, 100 k queues")
    parser.add_argument("--child", nargs="+", help=argparse.SUPPRESS)
    chosen = parser.parse_args()
    if chosen.child:
        _child(*chosen.child)
        return
    for row in run(full=chosen.full, only=chosen.only):
        verdict = {None: "", True: "cleared", False: "MISSED"}[row.passed]
        print(f"{row.name:60} {row.value:14,.3f} {row.unit:10} {row.bar:10} {verdict}")


if __name__ == "__main__":
    main()
