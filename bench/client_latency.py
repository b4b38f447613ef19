"""How long one client waits for another's work (P13): the worst wait of a probe while an aggressor runs.

A broker process runs per scenario. A probe process has a virtual host of its own and asks every few milliseconds, on
three connections:

    loop     basic.qos, which needs the event loop only
    answer   a transient publish and its confirm, then a basic.get: no fsync
    synced   a persistent publish and its confirm, which waits for an fsync

Beside them the probe times an fdatasync of its own on the same disk, because clients share that in any design. The
figures are the longest waits in milliseconds; "p99" is of `answer`. Time in which the broker's loop or the probe was
ready to run and other processes had the processor (schedstat) does not count, so the figures hold for an otherwise idle
machine; "elapsed" is the longest wait with that time, and "loop s" the processor time of the
loop's thread for the aggressor and the probe. BASALT_SCENARIOS=name,name runs some of them; BASALT_PROBE_VHOST=/
puts the probe into the virtual host of the aggressor.
"""

from __future__ import annotations

import contextlib
import json
import multiprocessing
import os
import re
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Final, NamedTuple
from urllib.parse import quote

from bench.amqp_wire import Wire, publish_bytes
from bench.client_latency_scenarios import SCENARIOS
from bench.client_latency_target import Target
from bench.row import Row
from pika import spec

from basaltmq.errors import BasaltError
from basaltmq.http_client import HttpClient, Login

START_S: Final = 60.0
STOP_S: Final = 60.0
PAUSE_S: Final = 0.002
SYNC_PAUSE_S: Final = 0.02
SETTLE_S: Final = 0.5
"""Before and after the aggressor: the probe's own start and the tail of the work are measured apart and along."""

WAIT_MAX_MS: Final = 100.0
PROBE: Final = os.environ.get("BASALT_PROBE_VHOST", "probe")
READY: Final = re.compile(r'"ports":\s*(\{[^}]*\})')


class Waits(NamedTuple):
    """Waits in milliseconds, by probe."""

    loop: list[float]
    answer: list[float]
    synced: list[float]
    disk: list[float]
    elapsed: list[float]
    """Waits of all probes of the broker, with the time that other processes took."""


def run() -> list[Row]:
    chosen = os.environ.get("BASALT_SCENARIOS")
    names = chosen.split(",") if chosen else list(SCENARIOS)
    rows: list[Row] = []
    print(
        f"{'scenario':<34}{'loop':>8}{'answer':>8}{'p99':>8}{'synced':>8}{'fsync':>8}{'elapsed':>8}{'loop s':>8}",
        flush=True,
    )
    for name in names:
        try:
            with tempfile.TemporaryDirectory(prefix="basalt-bench-latency-") as folder:
                waits, loop_s = _measure(Path(folder), SCENARIOS[name])
        except (AssertionError, BasaltError, OSError) as error:
            print(f"{name:<34}  failed: {error!r:.80}", flush=True)
            continue
        loop, answer, synced, disk, elapsed = (max(each, default=0.0) for each in waits)
        p99 = _p99(waits.answer)
        figures = "".join(f"{each:8.0f}" for each in (loop, answer, p99, synced, disk, elapsed))
        print(f"{name:<34}{figures}{loop_s:8.2f}", flush=True)
        rows.append(Row(f"{name}: worst answer", answer, "ms", f"<= {WAIT_MAX_MS:g}", answer <= WAIT_MAX_MS))
    return rows


def _p99(waits: list[float]) -> float:
    return sorted(waits)[int(len(waits) * 0.99)] if waits else 0.0


def _measure(folder: Path, scenario: Callable[[Target], Iterator[None]]) -> tuple[Waits, float]:
    with _broker(folder) as (pid, target), contextlib.ExitStack() as stack:
        api = HttpClient(Login(f"http://127.0.0.1:{target.admin}"))
        api.put(f"/api/vhosts/{quote(PROBE, safe='')}")
        steps = scenario(target)
        stack.callback(steps.close)  # type: ignore[attr-defined]
        next(steps)
        ours, theirs = multiprocessing.get_context("spawn").Pipe()
        probe = multiprocessing.get_context("spawn").Process(
            target=_probe, args=(target.amqp, pid, str(folder), theirs)
        )
        probe.start()
        stack.callback(probe.join)
        stack.callback(probe.terminate)
        assert ours.poll(START_S), "the probe did not start"
        ours.recv()
        time.sleep(SETTLE_S)
        schedstat = Path(f"/proc/{pid}/task/{pid}/schedstat")
        began_ns = int(schedstat.read_text().split()[0])
        next(steps, None)
        time.sleep(SETTLE_S)
        loop_s = (int(schedstat.read_text().split()[0]) - began_ns) / 1e9
        ours.send(None)
        assert ours.poll(STOP_S), "the probe did not end"
        return Waits(*ours.recv()), loop_s


@contextlib.contextmanager
def _broker(folder: Path) -> Iterator[tuple[int, Target]]:
    ports = [f"--{name}-port=0" for name in ("amqp", "admin", "fila", "kafka")]
    command = [sys.executable, "-m", "basaltmq.cli", "serve", f"--data-dir={folder / 'data'}", "--log-format=json"]
    log = folder / "log"
    with open(log, "ab") as out, subprocess.Popen([*command, *ports], stdout=out, stderr=out) as process:
        try:
            until = time.monotonic() + START_S
            while not (found := READY.search(log.read_text())):
                assert process.poll() is None, log.read_text()
                assert time.monotonic() < until, log.read_text()
                time.sleep(0.05)
            yield process.pid, Target(**json.loads(found[1]))
        finally:
            process.terminate()
            try:
                process.wait(STOP_S)
            except subprocess.TimeoutExpired:
                process.kill()


def _probe(port: int, pid: int, folder: str, pipe: Connection) -> None:
    """The probe process: asks until it is told to end, then sends its waits."""
    ending = threading.Event()
    waits = Waits([], [], [], [], [])
    probes = [
        (waits.loop, PAUSE_S, *_asks_loop(port)),
        (waits.answer, PAUSE_S, *_asks_answer(port)),
        (waits.synced, SYNC_PAUSE_S, *_asks_synced(port)),
        (waits.disk, SYNC_PAUSE_S, *_asks_disk(folder)),
    ]
    threads = [threading.Thread(target=_ask, args=(ending, pid, waits.elapsed, *each), daemon=True) for each in probes]
    for thread in threads:
        thread.start()
    pipe.send(None)
    pipe.recv()
    ending.set()
    for thread in threads:
        thread.join()
    pipe.send(tuple(waits))


def _ask(
    ending: threading.Event,
    pid: int,
    elapsed: list[float],
    waits: list[float],
    pause_s: float,
    ask: Callable[[], Any],
) -> None:
    here, there = Path("/proc/thread-self/schedstat"), Path(f"/proc/{pid}/task/{pid}/schedstat")
    while not ending.is_set():
        began_late_ms = _late_ms(here) + _late_ms(there)
        began = time.perf_counter()
        ask()
        took_ms = (time.perf_counter() - began) * 1000
        waits.append(max(0.0, took_ms - (_late_ms(here) + _late_ms(there) - began_late_ms)))
        elapsed.append(took_ms)
        time.sleep(pause_s)


def _late_ms(schedstat: Path) -> float:
    """How long a thread was ready to run and did not."""
    return int(schedstat.read_text().split()[1]) / 1e6


def _asks_loop(port: int) -> tuple[Callable[[], Any]]:
    wire = Wire(port, PROBE)
    return (lambda: wire.call(1, spec.Basic.Qos(0, 1), spec.Basic.QosOk),)


def _asks_answer(port: int) -> tuple[Callable[[], Any]]:
    wire = Wire(port, PROBE)
    wire.call(1, spec.Queue.Declare(queue="transient"), spec.Queue.DeclareOk)
    wire.call(1, spec.Confirm.Select(), spec.Confirm.SelectOk)
    publish = publish_bytes("", "transient", b"x" * 256)

    def ask() -> None:
        wire.write(publish)
        wire.wait(spec.Basic.Ack)
        wire.call(1, spec.Basic.Get(queue="transient", no_ack=True), spec.Basic.GetOk)

    return (ask,)


def _asks_synced(port: int) -> tuple[Callable[[], Any]]:
    wire = Wire(port, PROBE)
    wire.call(1, spec.Queue.Declare(queue="durable", durable=True), spec.Queue.DeclareOk)
    wire.call(1, spec.Confirm.Select(), spec.Confirm.SelectOk)
    publish = publish_bytes("", "durable", b"x" * 256, delivery_mode=2)

    def ask() -> None:
        wire.write(publish)
        wire.wait(spec.Basic.Ack)

    return (ask,)


def _asks_disk(folder: str) -> tuple[Callable[[], Any]]:
    file = open(Path(folder) / "disk", "wb", buffering=0)  # noqa: SIM115  (lives as long as the process)

    def ask() -> None:
        file.write(b"x" * 4096)
        os.fdatasync(file.fileno())

    return (ask,)
