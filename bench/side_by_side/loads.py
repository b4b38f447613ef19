"""The load on a broker: one program per publisher and per consumer, the same kind for all brokers of a protocol.

- AMQP: `amqp_load`, a program on librabbitmq that BASALT_AMQP_LOAD names; `bench.side_by_side.amqp_fan_out`
  publishes to an exchange, which that program cannot.
- NATS and Redis: `bench/side_by_side/load`, a program in Go, built when the bench starts.
- Kafka: librdkafka in `bench.kafka_load`.

Each prints `ROLE COUNT SECONDS RATE`, or JSON with `rate`.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from bench.side_by_side.process import Side

PUB, SUB = "pub", "sub"
QUEUE: Final = "queue"
"""Messages leave the broker when they are acknowledged."""

FAN_OUT: Final = "fan-out"
"""Every consumer acknowledges every message."""

STREAM: Final = "stream"
"""A consumer reads from the start, without acknowledgements."""

LOAD_S: Final = 600.0
CONSUMERS_READY_S: Final = 0.5
"""From the start of the consumers to that of the publisher."""

SOURCE: Final = Path(__file__).parent / "load"


@dataclass(frozen=True)
class Task:
    """The work of a publisher and its consumers. A name is used once."""

    kind: str
    name: str
    count: int
    size: int
    window: int
    consumers: int = 1


Command = Callable[[Side, str, Task, int], list[str]]
"""Makes the command line of a role; the number is that of the consumer."""


def amqp_command(program: str) -> Command:
    def command(side: Side, role: str, task: Task, at: int) -> list[str]:
        amounts = [str(task.count), str(task.size), str(task.window)]
        if task.kind == FAN_OUT and role == PUB:
            module = [sys.executable, "-m", "bench.side_by_side.amqp_fan_out"]
            return [*module, str(side.port), task.name, *amounts, str(task.consumers)]
        queue = fan_out_queue(task.name, at) if task.kind == FAN_OUT else task.name
        mode = ["persistent"] if role == PUB else []
        return [program, "127.0.0.1", str(side.port), role, queue, *amounts, *mode]

    return command


def fan_out_queue(exchange: str, at: int) -> str:
    return f"{exchange}-{at}"


def go_command(program: Path, protocol: str) -> Command:
    def command(side: Side, role: str, task: Task, at: int) -> list[str]:
        kind = task.kind
        if kind == FAN_OUT:
            kind = STREAM if role == PUB else f"group:g{at}"
        amounts = [str(task.count), str(task.size), str(task.window)]
        return [str(program), protocol, side.address, role, kind, task.name, *amounts]

    return command


def kafka_command(side: Side, role: str, task: Task, at: int) -> list[str]:
    work = {PUB: "produce", SUB: "consume"}[role]
    return [sys.executable, "-m", "bench.kafka_load", work, side.address, task.name, str(task.count)]


def at_once(command: Command, side: Side, task: Task) -> float:
    """Return the rate of the slowest of the publisher and its consumers, times the number of consumers."""
    consumers = [_start(command(side, SUB, task, at)) for at in range(task.consumers)]
    try:
        time.sleep(CONSUMERS_READY_S)
        published = _rate(_start(command(side, PUB, task, 0)))
        return min(published, *map(_rate, consumers)) * task.consumers
    finally:
        _kill(consumers)


def one_after_the_other(command: Command, side: Side, task: Task) -> tuple[float, float]:
    """Return the rates of publishing all messages and of consuming them afterwards."""
    published, consumed = (_rate(_start(command(side, role, task, 0))) for role in (PUB, SUB))
    return published, consumed


def _start(command: list[str]) -> subprocess.Popen[str]:
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True)


def _rate(process: subprocess.Popen[str]) -> float:
    try:
        reported, _ = process.communicate(timeout=LOAD_S)
    finally:
        _kill([process])
    if process.returncode:
        raise RuntimeError(f"the load {process.args!r} ended with code {process.returncode}")
    return rate_of(reported)


def _kill(processes: list[subprocess.Popen[str]]) -> None:
    for process in processes:
        if process.poll() is None:
            process.kill()
            process.wait()
        if process.stdout is not None:
            process.stdout.close()


def rate_of(reported: str) -> float:
    """Return the rate in the output of a load."""
    return float(json.loads(reported)["rate"] if reported.startswith("{") else reported.split()[3])


def amqp_program() -> str | None:
    return os.environ.get("BASALT_AMQP_LOAD") or shutil.which("amqp_load")


def build_go_load(folder: Path) -> Path | None:
    """Build the program for NATS and Redis. Return None if Go or its modules are not available."""
    if shutil.which("go") is None:
        return None
    program = folder / "load"
    built = subprocess.run(["go", "build", "-o", str(program), "."], cwd=SOURCE, check=False)
    return program if built.returncode == 0 else None
