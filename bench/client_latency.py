"""How long one client waits because of another's work (P13): the longest wait of a probe while an aggressor runs.

A broker process runs per scenario. A probe process (`client_latency_probe`) sends small requests of each protocol every
few milliseconds. Its AMQP clients have a virtual host of their own. The figures are the longest waits in milliseconds.
"p99" is of `answer`. "fsync" is an fdatasync of the probe itself, because clients share the disk in any design.

Time in which the broker's loop or the probe was ready to run and other processes had the processor (schedstat) does not
count, so the figures hold for an otherwise idle machine. "elapsed" is the longest wait with that time. "turn" is
the longest turn of the loop in processor time of its thread: other programs do not change it, so it shows best what is
not split. "loop s" is the processor time of the loop's thread for the aggressor and the probe.

BASALT_SCENARIOS=name,name runs some of them. BASALT_PROBE_VHOST=/ puts the AMQP probes into the virtual host of the
aggressor. BASALT_FLAGS="--flag=value ..." goes to `basalt serve`. BASALT_ROUNDS=n runs each scenario n times.
BASALT_WATCH=1 prints what the loop did in its longest turns (`client_latency_watch`).
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
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Final
from urllib.parse import quote

from bench.client_latency_probe import Waits, probe
from bench.client_latency_scenarios import SCENARIOS
from bench.client_latency_target import Target
from bench.client_latency_watch import LongestTurn
from bench.row import Row
from bench.size import is_quick

from basaltmq.errors import BasaltError
from basaltmq.http_client import HttpClient, Login

START_S: Final = 60.0
STOP_S: Final = 60.0
SETTLE_S: Final = 0.5
"""Time before and after the aggressor: the start of the probe is excluded, and the tail of the work is included."""

WAIT_MAX_MS: Final = 100.0
QUICK_SCENARIOS: Final = ("binds", "fanout", "small_flood", "drain", "purge")
PROBE: Final = os.environ.get("BASALT_PROBE_VHOST", "probe")
ROUNDS: Final = int(os.environ.get("BASALT_ROUNDS", "1"))
IS_WATCHED: Final = bool(os.environ.get("BASALT_WATCH"))
FLAGS: Final = os.environ.get("BASALT_FLAGS", "").split()
COLUMNS: Final = ("loop", "answer", "p99", "synced", "kafka", "grpc", "admin", "fsync", "elapsed", "turn", "loop s")
READY: Final = re.compile(r'"ports":\s*(\{[^}]*\})')


def run() -> list[Row]:
    chosen = os.environ.get("BASALT_SCENARIOS")
    names = chosen.split(",") if chosen else list(QUICK_SCENARIOS if is_quick() else SCENARIOS)
    rows: list[Row] = []
    print(f"{'scenario':<22}" + "".join(f"{each:>8}" for each in COLUMNS), flush=True)
    for name in names:
        worst: list[float] = []
        for _ in range(ROUNDS):
            try:
                with tempfile.TemporaryDirectory(prefix="basalt-bench-latency-") as folder:
                    waits, turn_ms, loop_s = _measure(Path(folder), SCENARIOS[name])
            except (AssertionError, BasaltError, OSError) as error:
                print(f"{name:<22}  failed: {error!r:.200}", flush=True)
                continue
            loop, answer, *others = (max(each, default=0.0) for each in waits)
            figures = (loop, answer, _p99(waits.answer), *others, turn_ms)
            print(f"{name:<22}" + "".join(f"{each:8.0f}" for each in figures) + f"{loop_s:8.2f}", flush=True)
            worst.append(answer)
        if worst:
            rows.append(
                Row(f"{name}: worst answer", max(worst), "ms", f"<= {WAIT_MAX_MS:g}", max(worst) <= WAIT_MAX_MS)
            )
    return rows


def _p99(waits: list[float]) -> float:
    return sorted(waits)[int(len(waits) * 0.99)] if waits else 0.0


def _measure(folder: Path, scenario: Callable[[Target], Iterator[None]]) -> tuple[Waits, float, float]:
    with _broker(folder) as (pid, target), contextlib.ExitStack() as stack:
        api = HttpClient(Login(f"http://127.0.0.1:{target.admin}"))
        api.put(f"/api/vhosts/{quote(PROBE, safe='')}")
        steps = scenario(target)
        stack.callback(steps.close)  # type: ignore[attr-defined]
        next(steps)
        ours, theirs = multiprocessing.get_context("spawn").Pipe()
        process = multiprocessing.get_context("spawn").Process(
            target=probe, args=(target, PROBE, pid, str(folder), theirs)
        )
        process.start()
        stack.callback(process.join)
        stack.callback(process.terminate)
        assert ours.poll(START_S), "the probe did not start"
        ours.recv()
        time.sleep(SETTLE_S)
        schedstat = Path(f"/proc/{pid}/task/{pid}/schedstat")
        longest = LongestTurn(folder / "turn")
        longest.cpu_s = 0.0
        began_ns = int(schedstat.read_text().split()[0])
        next(steps, None)
        time.sleep(SETTLE_S)
        loop_s = (int(schedstat.read_text().split()[0]) - began_ns) / 1e9
        turn_ms = longest.cpu_s * 1000
        ours.send(None)
        assert ours.poll(STOP_S), "the probe did not end"
        return Waits(*ours.recv()), turn_ms, loop_s


@contextlib.contextmanager
def _broker(folder: Path) -> Iterator[tuple[int, Target]]:
    ports = [f"--{name.replace('_', '-')}-port=0" for name in Target._fields]
    watch = ["bench.client_latency_watch", str(folder / "turn")]
    command = [sys.executable, "-m", *watch, "serve", f"--data-dir={folder / 'data'}", "--log-format=json", *FLAGS]
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
            if IS_WATCHED:
                print((folder / "log").read_text(errors="replace"), file=sys.stderr)
