"""MQTT compared with mosquitto: the same loads on both brokers, in turns, and the cost of idle clients and retained
messages.

- QoS 1: 100 publishers and 100 durable subscribers, one topic each, 256 B. Basalt acknowledges after fsync; mosquitto
  with persistence writes its file periodically.
- fan-out: one publisher, 1,000 subscribers, QoS 0.
- shared subscription: 1,000 publishers with one unacknowledged message each, 5 members.
- idle connections: memory of the broker per connection.
- retained: a subscription of `#` while another client sends a ping every 5 ms.
- offline sessions: memory, and the start after it.

mosquitto: Debian's package. HiveMQ CE, if `bench/side_by_side/install_jvm_brokers` has installed it. The load is
`bench/mqtt_load/mqtt_load.c`, compiled with cc when the bench starts. A figure is the median of the turns, a ratio the
median of the ratios within the turns.
"""

from __future__ import annotations

import json
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, Final

from bench.log_rig import bench_path
from bench.row import Row
from bench.side_by_side import jvm_brokers
from bench.side_by_side.brokers import basalt_mqtt, mosquitto
from bench.side_by_side.process import Side
from bench.size import sized

TURNS: Final = sized(5, 2)
IDLE: Final = sized(9_000, 1_000)
"""Below the default limit of 10,000 connections, and of the ports of one address."""

RETAINED: Final = sized(100_000, 5_000)
SESSIONS: Final = sized(2_000, 200)
OFFLINE: Final = 10
LOAD_S: Final = 250.0
IDLE_KIB_MAX: Final = 12.0
PING_MS_MAX: Final = 100.0

LOADS: Final[Mapping[str, tuple[dict[str, Any], float]]] = {
    "QoS 1, 100 to 100": ({"pubs": 100, "subs": 100, "count": sized(500, 50), "qos": 1, "clean": 0}, 1.5),
    "QoS 0, 1 to 1,000": (
        {"pubs": 1, "subs": 1000, "count": sized(200, 20), "topic": "{name}", "filter": "{name}"},
        1.0,
    ),
    "shared, 1,000 to 5": (
        {
            "pubs": 1000,
            "subs": 5,
            "count": sized(20, 5),
            "qos": 1,
            "window": 1,
            "filter": "$share/g/{name}/+",
            "expected": 1000 * sized(20, 5),
        },
        1.0,
    ),
}
"""Options of the load, and the least ratio."""


def run() -> list[Row]:
    program = shutil.which("mosquitto", path="/usr/sbin:/usr/bin")
    compiler = shutil.which("cc")
    if compiler is None:
        raise RuntimeError("the load needs a C compiler: install gcc and libc6-dev")
    with bench_path() as folder, ExitStack() as stack:
        load = folder / "mqtt_load"
        subprocess.run([compiler, "-O2", "-o", str(load), str(SOURCE)], check=True)
        sides = [stack.enter_context(basalt_mqtt(folder / "basalt"))]
        if program is None:
            print("mqtt: mosquitto skipped: install Debian's mosquitto", file=sys.stderr, flush=True)
        else:
            sides.append(stack.enter_context(mosquitto(program, folder)))
        if (home := jvm_brokers.distribution("BASALT_HIVEMQ")) is not None:
            sides.append(stack.enter_context(jvm_brokers.hivemq(home, folder)))
        # First, while no memory is free for reuse.
        rows = [_idle(load, side) for side in sides]
        for title, (options, bar) in LOADS.items():
            rows += _compared(load, sides, title, options, bar)
        return [*rows, *_retained(load, sides[0]), *_offline(load, folder)]


SOURCE: Final = Path(__file__).parent / "mqtt_load" / "mqtt_load.c"


def _compared(load: Path, sides: list[Side], title: str, options: dict[str, Any], bar: float) -> list[Row]:
    seen: dict[str, list[dict[str, float]]] = {side.name: [] for side in sides}
    for turn in range(TURNS):
        for side in sides:
            name = f"{title[:3].lower().strip()}{len(title)}-{turn}"
            given = {"topic": "{name}/%ld", "filter": "{name}/%ld", "name": name, **options}
            seen[side.name].append(
                _load(load, side, {key: str(value).format(name=name) for key, value in given.items()})
            )
    rows = []
    for name, each in seen.items():
        rows.append(Row(f"{title}, {name}", statistics.median(one["rate"] for one in each), "msg/s"))
        rows.append(Row("  p99 until delivery", statistics.median(one["p99_ms"] for one in each), "ms"))
    ours = seen[sides[0].name]
    for peer in sides[1:]:
        theirs = seen[peer.name]
        ratio = statistics.median(one["rate"] / two["rate"] for one, two in zip(ours, theirs, strict=True))
        slower = statistics.median(one["p99_ms"] / two["p99_ms"] for one, two in zip(ours, theirs, strict=True))
        rows.append(Row(f"{title}: Basalt / {peer.name}", ratio, "x", f">= {bar:g}", ratio >= bar))
        rows.append(Row(f"  p99: Basalt / {peer.name}", slower, "x", "<= 1", slower <= 1))
    return rows


def _load(load: Path, side: Side, options: Mapping[str, object]) -> dict[str, float]:
    command = [str(load), str(side.port), *(f"{name}={value}" for name, value in options.items())]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, timeout=LOAD_S, check=True)
    found: dict[str, float] = json.loads(done.stdout)
    return found


def _memory_kib(side: Side) -> int:
    status = Path(f"/proc/{side.pid}/status").read_text()
    return int(next(line for line in status.splitlines() if line.startswith("VmRSS")).split()[1])


def _idle(load: Path, side: Side) -> Row:
    before = _memory_kib(side)
    with _held(load, side, {"subs": IDLE, "pubs": 0, "idle": 1}):
        each = (_memory_kib(side) - before) / IDLE
    bar = f"<= {IDLE_KIB_MAX:g}" if side.name == "Basalt" else ""
    return Row(f"{IDLE:,} idle connections, each, {side.name}", each, "KiB", bar, each <= IDLE_KIB_MAX if bar else None)


@contextmanager
def _held(load: Path, side: Side, options: Mapping[str, object]) -> Iterator[None]:
    """A load that keeps its connections during the block."""
    command = [str(load), str(side.port), "hold=1", *(f"{name}={value}" for name, value in options.items())]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    try:
        assert process.stdout is not None
        if not process.stdout.readline():
            raise RuntimeError("the connections were not made")
        yield
    finally:
        process.communicate(timeout=LOAD_S)


def _retained(load: Path, side: Side) -> list[Row]:
    publish = {"pubs": 20, "subs": 0, "count": RETAINED // 20, "qos": 1, "retain": 1, "size": 64, "expected": 0}
    _load(load, side, {**publish, "topic": "retained/%ld"})
    subscribe = {"pubs": 0, "subs": 1, "filter": "retained/#", "expected": RETAINED, "ping_ms": 5, "name": "all"}
    found = _load(load, side, subscribe)
    longest = found["ping_max_ms"]
    return [
        Row(f"`#` over {RETAINED:,} retained messages", found["rate"], "msg/s"),
        Row("  longest answer to a ping meanwhile", longest, "ms", f"<= {PING_MS_MAX:g}", longest <= PING_MS_MAX),
    ]


def _offline(load: Path, folder: Path) -> list[Row]:
    home = folder / "offline"
    with basalt_mqtt(home) as side:
        before = _memory_kib(side)
        begun = time.perf_counter()
        leave = {"subs": SESSIONS, "pubs": 0, "clean": 0, "leave": 1, "qos": 1, "filter": "offline", "name": "away"}
        _load(load, side, leave)
        joined_s = time.perf_counter() - begun
        publish = {
            "pubs": 1,
            "subs": 0,
            "qos": 1,
            "topic": "offline",
            "count": OFFLINE,
            "window": OFFLINE,
            "expected": 0,
        }
        stored = _load(load, side, publish)
        each = (_memory_kib(side) - before) / SESSIONS
    with basalt_mqtt(home) as side:
        again = _memory_kib(side)
        start_s = side.start_s
    return [
        Row(f"{SESSIONS:,} durable sessions, created", SESSIONS / joined_s, "/s"),
        Row(f"  {OFFLINE} offline messages for each, stored", SESSIONS * OFFLINE / stored["seconds"], "msg/s"),
        Row("  memory of each", each, "KiB"),
        Row("  start after it", start_s, "s"),
        Row("  memory after the start", again / 1024, "MiB"),
    ]
