"""AMQP 0-9-1 beside RabbitMQ: the same load, on the same machine, in turns. `BASALT_AMQP_LOAD=/path/to/amqp_load`.

The peer is Debian's `rabbitmq-server`, started on a port and in a directory of its own. The load is a program on
librabbitmq, `amqp_load HOST PORT pub|sub QUEUE COUNT SIZE WINDOW [persistent]`, cheap enough for the broker to be what
is measured. Basalt confirms after fsync; RabbitMQ does not. Each workload runs in turns on both, several times; the
figure is the median of each. Without the peer or the program, what can be measured is.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Final, NamedTuple

import pika
from bench.row import Row

COUNT: Final = int(os.environ.get("BASALT_BENCH_MESSAGES", "100000"))
BACKLOG: Final = 300_000
ROUNDS: Final = 3
SIZE: Final = 256
WINDOW: Final = 200
FAN_OUT: Final = 10
FAN_MESSAGES: Final = 3000
IDLE: Final = 1000
QUEUES: Final = 10_000
START_S: Final = 90.0
LOAD_S: Final = 300.0


class Side(NamedTuple):
    """A broker that runs."""

    name: str
    port: int
    pid: int


class Figure(NamedTuple):
    rate: float
    p99_ms: float = 0.0


def run() -> list[Row]:
    load = os.environ.get("BASALT_AMQP_LOAD") or shutil.which("amqp_load")
    peer = shutil.which("rabbitmq-server")
    rows: list[Row] = []
    with tempfile.TemporaryDirectory(prefix="basalt-bench-amqp-") as folder, contextlib.ExitStack() as stack:
        sides = [stack.enter_context(_basalt(Path(folder)))]
        if peer is not None:
            sides.append(stack.enter_context(_rabbitmq(peer, Path(folder))))
        if load is not None:
            rows += _loads(load, sides)
        rows += _compare("fan-out of 1 KiB to 10 queues", sides, _fan_out, "msg/s", 2.0)
        rows += _compare("declare, bind, delete of 10 k queues", sides, _declares, "queues/s", 1.0)
        rows.append(_idle(sides[0]))
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
    rows += _ratio(
        "300 k backlog, publish", sides, {n: statistics.median(v) for n, v in published.items()}, "msg/s", 2.0
    )
    rows += _ratio("300 k backlog, drain", sides, {n: statistics.median(v) for n, v in drained.items()}, "msg/s", 1.5)
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
            rows.append(Row(f"{name}: p99, ours / theirs", ours / theirs, "x", "<= 1", ours <= theirs))
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
    told, _ = process.communicate(timeout=LOAD_S)
    assert process.returncode == 0, f"the load failed: {told}"
    words = told.split()
    return Figure(float(words[3]), float(words[7]) if len(words) > 7 else 0.0)


def _pub_and_sub(load: str, side: Side, mode: list[str]) -> Figure:
    queue = f"load-{time.monotonic_ns()}"
    taker = _spawn(load, side, "sub", queue, COUNT, [])
    time.sleep(0.3)
    giver = _spawn(load, side, "pub", queue, COUNT, mode)
    given, taken = _rate(giver), _rate(taker)
    return Figure(given.rate, taken.p99_ms)


def _connected(side: Side) -> pika.BlockingConnection:
    return pika.BlockingConnection(pika.ConnectionParameters("127.0.0.1", side.port))


def _fan_out(side: Side) -> Figure:
    """Messages published to an exchange with ten queues and confirmed, in windows of as many as a tick takes."""
    import asyncio

    import aio_pika

    async def publish() -> float:
        connection = await aio_pika.connect_robust(f"amqp://guest:guest@127.0.0.1:{side.port}/")
        async with connection:
            channel = await connection.channel(publisher_confirms=True)
            exchange = await channel.declare_exchange("bench-fan", aio_pika.ExchangeType.FANOUT)
            queues = [await channel.declare_queue(f"bench-fan-{at}", durable=True) for at in range(FAN_OUT)]
            for queue in queues:
                await queue.bind(exchange)
            message = aio_pika.Message(b"x" * 1024, delivery_mode=aio_pika.DeliveryMode.PERSISTENT)
            window = asyncio.Semaphore(WINDOW)

            async def one() -> None:
                async with window:
                    await exchange.publish(message, "")

            begin = time.perf_counter()
            await asyncio.gather(*(one() for _ in range(FAN_MESSAGES)))
            seconds = time.perf_counter() - begin
            for queue in queues:
                await queue.delete(if_empty=False)
            await exchange.delete()
        return FAN_MESSAGES / seconds

    return Figure(asyncio.run(publish()))


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
    """Memory of one more connection with a channel."""
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


def _free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        port: int = sock.getsockname()[1]
        return port


@contextlib.contextmanager
def _basalt(folder: Path) -> Iterator[Side]:
    port = _free_port()
    flags = [f"--data-dir={folder / 'basalt'}", f"--amqp-port={port}", "--admin-port=0", "--quiet", "--log-level=error"]
    environment = {**os.environ, "BASALT_FILA_PORT": "0"}
    command = [sys.executable, "-m", "basaltmq.cli", "serve", *flags]
    with subprocess.Popen(command, env=environment) as process:
        try:
            _await_port(port)
            yield Side("Basalt", port, process.pid)
        finally:
            process.terminate()
            process.wait(60)


@contextlib.contextmanager
def _rabbitmq(program: str, folder: Path) -> Iterator[Side]:
    port = _free_port()
    home = folder / "rabbitmq"
    home.mkdir()
    home.chmod(0o777)
    folder.chmod(0o755)
    environment = {
        **os.environ,
        "RABBITMQ_NODENAME": f"bench{port}@localhost",
        "RABBITMQ_NODE_PORT": str(port),
        "RABBITMQ_NODE_IP_ADDRESS": "127.0.0.1",
        "RABBITMQ_DIST_PORT": str(_free_port()),
        "RABBITMQ_MNESIA_BASE": str(home),
        "RABBITMQ_LOG_BASE": str(home),
        "RABBITMQ_ENABLED_PLUGINS_FILE": str(home / "plugins"),
        "ERL_EPMD_ADDRESS": "127.0.0.1",
        "HOME": str(home),
    }
    process = subprocess.Popen(
        [program], env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True
    )
    try:
        _await_port(port)
        time.sleep(5)
        yield Side("RabbitMQ", port, process.pid)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGTERM)
        try:
            process.wait(60)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait(10)
        # Debian's script runs the server as another user, in a session of its own.
        subprocess.run(["pkill", "-f", f"bench{port}@localhost"], check=False)


def _await_port(port: int) -> None:
    until = time.monotonic() + START_S
    while time.monotonic() < until:
        with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), timeout=1):
            return
        time.sleep(0.2)
    raise TimeoutError(f"nobody listens on port {port}")
