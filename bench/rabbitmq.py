"""AMQP 0-9-1 compared with RabbitMQ: the same load, on the same machine, in turns.
`BASALT_AMQP_LOAD=/path/to/amqp_load`.

The peer is Debian's `rabbitmq-server`, started on a port and in a directory of its own. The load is a program on
librabbitmq, `amqp_load HOST PORT pub|sub QUEUE COUNT SIZE WINDOW [persistent]`, which needs so little CPU time that the
broker is the bottleneck. Basalt confirms after fsync; RabbitMQ does not. Each workload runs in turns on both, several
times; the figure is the median of each. Without the peer or the program, the other parts are measured.
"""

from __future__ import annotations

import contextlib
import os
import re
import statistics
import subprocess
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Final, NamedTuple

import pika
from bench.amqp_wire import Wire, publish_bytes
from bench.row import Row
from bench.side_by_side.brokers import basalt_amqp, rabbitmq, rabbitmq_program
from bench.side_by_side.loads import amqp_program
from bench.side_by_side.process import Side
from bench.size import sized

COUNT: Final = int(os.environ.get("BASALT_BENCH_MESSAGES", sized(100_000, 10_000)))
BACKLOG: Final = sized(300_000, 20_000)
ROUNDS: Final = 3
SIZE: Final = 256
WINDOW: Final = 200
FAN_OUT: Final = 10
FAN_MESSAGES: Final = sized(20_000, 2_000)
IDLE: Final = sized(1000, 200)
QUEUES: Final = sized(10_000, 300)
LOAD_S: Final = 300.0


class Figure(NamedTuple):
    rate: float
    p99_ms: float = 0.0


def run() -> list[Row]:
    load = amqp_program()
    peer = rabbitmq_program()
    rows: list[Row] = []
    with tempfile.TemporaryDirectory(prefix="basalt-bench-amqp-") as folder, contextlib.ExitStack() as stack:
        sides = [stack.enter_context(basalt_amqp(Path(folder)))]
        # First, before other work makes the process grow.
        rows.append(_idle(sides[0]))
        if peer is not None:
            sides.append(stack.enter_context(rabbitmq(peer, Path(folder))))
        if load is not None:
            rows += _loads(load, sides)
        rows += _compare("fan-out of 1 KiB to 10 queues", sides, _fan_out, "msg/s", 2.0)
        rows += _compare(f"declare, bind, delete of {QUEUES:,} queues", sides, _declares, "queues/s", 1.0)
    return rows


def _loads(load: str, sides: list[Side]) -> list[Row]:
    def both(mode: list[str]) -> Callable[[Side], Figure]:
        return lambda side: _pub_and_sub(load, side, mode)

    rows = _compare("persistent, publish and consume", sides, both(["persistent"]), "msg/s", 2.0)
    rows += _compare("transient, publish and consume", sides, both([]), "msg/s", 1.3)
    published: dict[str, list[float]] = {side.name: [] for side in sides}
    drained: dict[str, list[float]] = {side.name: [] for side in sides}
    for turn in range(ROUNDS - 1):
        for side in sides:
            queue = f"backlog-{turn}"
            published[side.name].append(_rate(_spawn(load, side, "pub", queue, BACKLOG, ["persistent"])).rate)
            drained[side.name].append(_rate(_spawn(load, side, "sub", queue, BACKLOG, [])).rate)
    for what, rates, bar in (("publish", published, 2.0), ("drain", drained, 1.5)):
        medians = {name: statistics.median(each) for name, each in rates.items()}
        rows += _ratio(f"backlog of {BACKLOG:,}, {what}", sides, medians, "msg/s", bar)
    return rows


def _compare(name: str, sides: list[Side], measure: Callable[[Side], Figure], unit: str, bar: float) -> list[Row]:
    seen: dict[str, list[Figure]] = {side.name: [] for side in sides}
    for _ in range(ROUNDS):
        for side in sides:
            seen[side.name].append(measure(side))
    rows = _ratio(name, sides, {n: statistics.median([f.rate for f in v]) for n, v in seen.items()}, unit, bar)
    if seen[sides[0].name][0].p99_ms:
        slow = {n: statistics.median([f.p99_ms for f in v]) for n, v in seen.items()}
        rows += [Row(f"{name}: p99, {side.name}", slow[side.name], "ms") for side in sides]
        if len(sides) > 1:
            ours, theirs = (slow[side.name] for side in sides)
            # The target is for confirms after fsync. At memory speed the publisher is faster than the consumer.
            is_bar = name.startswith("persistent")
            bar_text, passed = ("<= 1", ours <= theirs) if is_bar else ("", None)
            rows.append(Row(f"{name}: p99, ours / theirs", ours / theirs, "x", bar_text, passed))
    return rows


def _ratio(name: str, sides: list[Side], rates: dict[str, float], unit: str, bar: float) -> list[Row]:
    rows = [Row(f"{name}, {side.name}", rates[side.name], unit) for side in sides]
    if len(sides) > 1:
        ratio = rates[sides[0].name] / rates[sides[1].name]
        rows.append(Row(f"{name}: ours / theirs", ratio, "x", f">= {bar}", ratio >= bar))
    return rows


def _spawn(load: str, side: Side, role: str, queue: str, count: int, mode: list[str]) -> subprocess.Popen[str]:
    command = [load, "127.0.0.1", str(side.port), role, queue, str(count), str(SIZE), str(WINDOW), *mode]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True)


def _rate(process: subprocess.Popen[str]) -> Figure:
    reported, _ = process.communicate(timeout=LOAD_S)
    assert process.returncode == 0, f"the load failed: {reported}"
    words = reported.split()
    return Figure(float(words[3]), float(words[7]) if len(words) > 7 else 0.0)


def _pub_and_sub(load: str, side: Side, mode: list[str]) -> Figure:
    queue = f"load-{time.monotonic_ns()}"
    consumer = _spawn(load, side, "sub", queue, COUNT, [])
    time.sleep(0.3)
    giver = _spawn(load, side, "pub", queue, COUNT, mode)
    given, taken = _rate(giver), _rate(consumer)
    return Figure(given.rate, taken.p99_ms)


def _connected(side: Side) -> pika.BlockingConnection:
    return pika.BlockingConnection(pika.ConnectionParameters("127.0.0.1", side.port))


def _fan_out(side: Side) -> Figure:
    """Measure messages published to an exchange with ten queues and confirmed, with a client that only sends and
    counts."""
    with contextlib.closing(_connected(side)) as connection:
        channel = connection.channel()
        channel.exchange_declare("bench-fan", "fanout", durable=True)
        for at in range(FAN_OUT):
            channel.queue_declare(f"bench-fan-{at}", durable=True)
            channel.queue_bind(f"bench-fan-{at}", "bench-fan")
        with Wire(side.port) as wire:
            message = publish_bytes("bench-fan", "", b"x" * 1024, delivery_mode=2)
            rate = FAN_MESSAGES / wire.publish_confirmed(message, FAN_MESSAGES, WINDOW)
        for at in range(FAN_OUT):
            channel.queue_delete(f"bench-fan-{at}")
        channel.exchange_delete("bench-fan")
    return Figure(rate)


def _declares(side: Side) -> Figure:
    count = QUEUES // ROUNDS
    with contextlib.closing(_connected(side)) as connection:
        channel = connection.channel()
        begin = time.perf_counter()
        for at in range(count):
            channel.queue_declare(f"bench-{at}", durable=True)
            channel.queue_bind(f"bench-{at}", "amq.direct", f"key-{at}")
        for at in range(count):
            channel.queue_delete(f"bench-{at}")
        return Figure(count / (time.perf_counter() - begin))


def _idle(side: Side) -> Row:
    """Return the memory of one more connection with a channel."""
    kept = [_connected(side) for _ in range(20)]
    for connection in kept:
        connection.channel()
    before = _resident_kib(side.pid)
    more = []
    for _ in range(IDLE):
        connection = _connected(side)
        connection.channel()
        more.append(connection)
    each = (_resident_kib(side.pid) - before) / IDLE
    for connection in [*kept, *more]:
        connection.close()
    return Row("memory of an idle connection with a channel", each, "KiB", "<= 40", each <= 40)


def _resident_kib(pid: int) -> int:
    found = re.search(r"VmRSS:\s+(\d+)", Path(f"/proc/{pid}/status").read_text())
    assert found is not None
    return int(found[1])
