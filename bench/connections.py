"""Logins: handshakes per second over AMQP (beside RabbitMQ) and Kafka, and 10,000 open connections.

A handshake is everything from the TCP connection to the first answer after the login: AMQP's `connection.open-ok`, or
Kafka's SaslAuthenticate with PLAIN. The client answers with bytes that were encoded before, and keeps a fixed number
of handshakes in progress. The rates of both brokers include the client, which is the same. The CPU of the server is
measured apart.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import resource
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Final

from bench.rabbitmq import PEER_PATH, Side, _await_port, _free_port, _rabbitmq, _resident_kib
from bench.row import Row
from pika import frame, spec

from basaltmq.protocols.kafka.wire import api as k

HANDSHAKES: Final = 2_000
AT_ONCE: Final = 50
ROUNDS: Final = 3
OPEN: Final = 10_000
OPEN_S_MAX: Final = 60.0
OPEN_KIB_MAX: Final = 40.0
RATIO_MIN: Final = 1.0
FILES_BESIDES: Final = 200
HANDSHAKE_S_MAX: Final = 60.0

AMQP_STEPS: Final = (
    (b"AMQP\x00\x00\x09\x01", 1),
    (
        frame.Method(
            0,
            spec.Connection.StartOk(client_properties={}, mechanism="PLAIN", response="\0guest\0guest", locale="en_US"),
        ).marshal(),
        1,
    ),
    (
        frame.Method(0, spec.Connection.TuneOk(2047, 131_072, 0)).marshal()
        + frame.Method(0, spec.Connection.Open(virtual_host="/")).marshal(),
        1,
    ),
)
"""What the client sends, and how many frames it awaits then."""

KAFKA_STEPS: Final = (
    (k.encode_request(k.SASL_HANDSHAKE, 1, 1, "bench", {"mechanism": "PLAIN"}), 1),
    (k.encode_request(k.SASL_AUTHENTICATE, 1, 2, "bench", {"auth_bytes": b"\0guest\0guest"}), 1),
)

Steps = tuple[tuple[bytes, int], ...]
Sizes = Callable[[bytes], int]


def amqp_frame_bytes(begin: bytes) -> int:
    return 8 + int.from_bytes(begin[3:7], "big")


def kafka_frame_bytes(begin: bytes) -> int:
    return 4 + int.from_bytes(begin[:4], "big")


def run() -> list[Row]:
    peer = shutil.which("rabbitmq-server", path=PEER_PATH)
    rows: list[Row] = []
    with tempfile.TemporaryDirectory(prefix="basalt-bench-connections-") as folder, contextlib.ExitStack() as stack:
        # A process for each figure of memory, while nothing else has made it grow.
        with _basalt(Path(folder) / "kafka") as (_, kafka):
            rows += _open(kafka, "Kafka", KAFKA_STEPS, kafka_frame_bytes)
        with _basalt(Path(folder) / "amqp") as (amqp, _):
            rows += _open(amqp, "AMQP", AMQP_STEPS, amqp_frame_bytes)
        amqp, kafka = stack.enter_context(_basalt(Path(folder) / "both"))
        rows += _storm(amqp)
        sides = [amqp]
        if peer is not None:
            sides.append(stack.enter_context(_rabbitmq(peer, Path(folder))))
        rows += _compared(sides)
        rate, cpu_us = _rate(kafka, KAFKA_STEPS, kafka_frame_bytes)
        rows += [Row("Kafka handshakes", rate, "per s"), Row("Kafka, server CPU of one", cpu_us, "us")]
    return rows


def _storm(side: Side) -> list[Row]:
    """The first logins after a start, all at once, when no password check is cached."""
    started = time.perf_counter()
    asyncio.run(_handshakes(side.port, AMQP_STEPS, amqp_frame_bytes, 1_000, 1_000))
    return [Row("first 1,000 logins, all at once", time.perf_counter() - started, "s")]


def _compared(sides: list[Side]) -> list[Row]:
    seen: dict[str, list[tuple[float, float]]] = {side.name: [] for side in sides}
    for _ in range(ROUNDS):
        for side in sides:
            seen[side.name].append(_rate(side, AMQP_STEPS, amqp_frame_bytes))
    rates = {name: statistics.median(rate for rate, _ in found) for name, found in seen.items()}
    rows = [Row(f"AMQP handshakes, {name}", rate, "per s") for name, rate in rates.items()]
    rows += [
        Row(f"AMQP, server CPU of one, {name}", statistics.median(cpu for _, cpu in found), "us")
        for name, found in seen.items()
    ]
    if len(sides) > 1:
        ratio = rates[sides[0].name] / rates[sides[1].name]
        rows.append(Row("AMQP handshakes: ours / theirs", ratio, "x", f">= {RATIO_MIN}", ratio >= RATIO_MIN))
    return rows


def _rate(side: Side, steps: Steps, size_of: Sizes) -> tuple[float, float]:
    cpu_s, started = _cpu_s(side.pid), time.perf_counter()
    asyncio.run(_handshakes(side.port, steps, size_of, HANDSHAKES, AT_ONCE))
    took = time.perf_counter() - started
    return HANDSHAKES / took, (_cpu_s(side.pid) - cpu_s) / HANDSHAKES * 1e6


def _open(side: Side, name: str, steps: Steps, size_of: Sizes) -> list[Row]:
    """Open many connections and keep them."""
    count = min(OPEN, _files_max() - FILES_BESIDES)
    before = _resident_kib(side.pid)
    started = time.perf_counter()
    after: list[int] = []
    asyncio.run(_handshakes(side.port, steps, size_of, count, AT_ONCE, lambda: after.append(_resident_kib(side.pid))))
    took = time.perf_counter() - started
    each = (after[0] - before) / count
    return [
        Row(f"{name}: open and close {count} connections", took, "s", f"<= {OPEN_S_MAX:.0f}", took <= OPEN_S_MAX),
        Row(f"{name}: memory of each", each, "KiB", f"<= {OPEN_KIB_MAX:.0f}", each <= OPEN_KIB_MAX),
    ]


def _files_max() -> int:
    """Raise the limit of open files and return it."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    return hard if hard != resource.RLIM_INFINITY else OPEN + FILES_BESIDES


async def _handshakes(
    port: int, steps: Steps, size_of: Sizes, count: int, at_once: int, opened: Callable[[], None] | None = None
) -> None:
    """Make `count` handshakes. With `opened`, keep the connections, call it, then close them."""
    loop = asyncio.get_running_loop()
    left = iter(range(count))
    kept: list[asyncio.BaseTransport] = []

    async def one_after_the_other() -> None:
        for _ in left:
            client = _Client(steps, size_of, loop.create_future())
            transport, _ = await loop.create_connection(lambda client=client: client, "127.0.0.1", port)  # type: ignore[misc]
            await asyncio.wait_for(client.done, HANDSHAKE_S_MAX)
            if opened is None:
                transport.abort()
            else:
                kept.append(transport)

    async with asyncio.TaskGroup() as tasks:
        for _ in range(at_once):
            tasks.create_task(one_after_the_other())
    if opened is not None:
        opened()
    for transport in kept:
        transport.close()


class _Client(asyncio.Protocol):
    """Sends the steps of a handshake, each after the answer to the one before."""

    def __init__(self, steps: Steps, size_of: Sizes, done: asyncio.Future[None]) -> None:
        self.done = done
        self._steps = iter(steps)
        self._size_of = size_of
        self._awaited = 0
        self._received = b""
        self._transport: asyncio.WriteTransport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.WriteTransport)
        self._transport = transport
        self._next()

    def data_received(self, data: bytes) -> None:
        self._received += data
        while len(self._received) >= 7 and len(self._received) >= self._size_of(self._received):
            self._received = self._received[self._size_of(self._received) :]
            self._awaited -= 1
            if not self._awaited:
                self._next()

    def connection_lost(self, error: Exception | None) -> None:
        if not self.done.done():
            self.done.set_exception(ConnectionError(f"the broker closed a connection during its handshake: {error}"))

    def _next(self) -> None:
        step = next(self._steps, None)
        if step is None:
            if not self.done.done():
                self.done.set_result(None)
            return
        assert self._transport is not None
        self._awaited = step[1]
        self._transport.write(step[0])


def _cpu_s(pid: int) -> float:
    """CPU time of a process and of its children, which are the Erlang machine behind RabbitMQ's script."""
    total = 0.0
    for each in _family(pid):
        fields = Path(f"/proc/{each}/stat").read_text().rpartition(")")[2].split()
        total += (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
    return total


def _family(pid: int) -> list[int]:
    listed = subprocess.run(["ps", "-o", "pid=", "--ppid", str(pid)], capture_output=True, text=True, check=False)
    return [pid, *(descendant for child in listed.stdout.split() for descendant in _family(int(child)))]


@contextlib.contextmanager
def _basalt(folder: Path) -> Iterator[tuple[Side, Side]]:
    amqp, kafka = _free_port(), _free_port()
    flags = [f"--data-dir={folder}", f"--amqp-port={amqp}", "--admin-port=0", "--quiet", "--log-level=error"]
    flags += ["--kafka-enabled=true", f"--kafka-port={kafka}", "--fila-enabled=false"]
    with subprocess.Popen([sys.executable, "-m", "basaltmq.cli", "serve", *flags]) as process:
        try:
            _await_port(amqp)
            yield Side("Basalt", amqp, process.pid), Side("Basalt", kafka, process.pid)
        finally:
            process.terminate()
            process.wait(60)


if __name__ == "__main__":
    print(json.dumps([row._asdict() for row in run()], indent=1))
