"""AMQP 1.0 compared with Qpid Broker-J and ActiveMQ Artemis: the same load on all, in turns, and the memory of links.

- one publisher and one consumer on a queue: durable messages of 256 B, 200 unsettled ones at each end. All brokers
  accept a message after a sync.
- 10,000 links on one connection: memory of the broker per link.

The load is `bench/amqp10_load`, in Go, built when the bench starts. `side_by_side/jvm_brokers.py` says how to install
the peers. A figure is the median of the turns, a ratio the median of the ratios within the turns.
"""

from __future__ import annotations

import json
import shutil
import statistics
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path
from typing import Final

import pika
from bench.log_rig import bench_path
from bench.row import Row
from bench.side_by_side import jvm_brokers
from bench.side_by_side.brokers import basalt_amqp
from bench.side_by_side.process import Side
from bench.size import sized
from tests.interop.amqp10.raw import RawClient

from basaltmq.protocols.amqp10.wire import performatives as p

TURNS: Final = sized(5, 2)
COUNT: Final = sized(40_000, 2_000)
SIZE: Final = 256
WINDOW: Final = 200
LINKS: Final = sized(10_000, 1_000)
LINK_KIB_MAX: Final = 4.0
LOAD_S: Final = 600.0
SOURCE: Final = Path(__file__).parent / "amqp10_load"
PEERS: Final = (("BASALT_BROKER_J", jvm_brokers.broker_j, 2.0), ("BASALT_ARTEMIS", jvm_brokers.artemis, 1.0))
"""Environment variable, start, and the least ratio."""


def run() -> list[Row]:
    go = shutil.which("go")
    if go is None:
        raise RuntimeError("the load needs Go: install golang-go")
    with bench_path() as folder, ExitStack() as stack:
        load = folder / "amqp10_load"
        subprocess.run([go, "build", "-o", str(load), "."], cwd=SOURCE, check=True)
        ours = stack.enter_context(basalt_amqp(folder / "basalt"))
        sides, bars = [ours], {}
        for variable, start, bar in PEERS:
            home = jvm_brokers.distribution(variable)
            if home is None:
                hint = f"run bench/side_by_side/install_jvm_brokers, or set {variable}"
                print(f"amqp10: a peer skipped: {hint}", file=sys.stderr, flush=True)
                continue
            sides.append(stack.enter_context(start(home, folder)))
            bars[sides[-1].name] = bar
        return [_links(folder, p.SENDER), _links(folder, p.RECEIVER), *_compared(load, sides, bars)]


def _compared(load: Path, sides: list[Side], bars: dict[str, float]) -> list[Row]:
    seen: dict[str, list[dict[str, float]]] = {side.name: [] for side in sides}
    for turn in range(TURNS + 1):
        for side in sides:
            found = _load(load, side, f"bench-{turn}")
            # The first turn warms up the compilers of Java.
            if turn:
                seen[side.name].append(found)
    rows = []
    for name, each in seen.items():
        rows.append(Row(f"1 publisher, 1 consumer, {name}", statistics.median(one["rate"] for one in each), "msg/s"))
        rows.append(Row("  p99 until delivery", statistics.median(one["p99_ms"] for one in each), "ms"))
    for name, bar in bars.items():
        pairs = list(zip(seen[sides[0].name], seen[name], strict=True))
        ratio = statistics.median(one["rate"] / two["rate"] for one, two in pairs)
        slower = statistics.median(one["p99_ms"] / two["p99_ms"] for one, two in pairs)
        rows.append(Row(f"Basalt / {name}", ratio, "x", f">= {bar:g}", ratio >= bar))
        rows.append(Row(f"  p99: Basalt / {name}", slower, "x", "<= 1", slower <= 1))
    return rows


def _load(load: Path, side: Side, queue: str) -> dict[str, float]:
    if side.name == "Basalt":
        # The other brokers create a queue with its first link.
        _declare(side, queue)
    command = [str(load), str(side.port), queue, str(COUNT), str(SIZE), str(WINDOW)]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, timeout=LOAD_S, check=True)
    found: dict[str, float] = json.loads(done.stdout)
    return found


def _declare(side: Side, queue: str) -> None:
    with pika.BlockingConnection(pika.ConnectionParameters("127.0.0.1", side.port)) as connection:
        connection.channel().queue_declare(queue, durable=True)


def _links(folder: Path, role: bool) -> Row:
    # A fresh broker process: no memory is free for reuse.
    with basalt_amqp(folder / f"links-{role:d}") as side:
        return _held_links(side, role)


def _held_links(side: Side, role: bool) -> Row:
    _declare(side, "links")
    client = RawClient(side.port)
    client.open()
    before = _memory_kib(side)
    for handle in range(LINKS):
        client.send(
            p.Attach(
                name=f"link-{handle}",
                handle=handle,
                role=role,
                source=p.Source(address="/queues/links"),
                target=p.Target(address="/queues/links"),
                initial_delivery_count=0 if role == p.SENDER else None,
            )
        )
        if handle % 100 == 99:
            for _ in range(100):
                client.take(p.Attach)
    each = (_memory_kib(side) - before) / LINKS
    client.sock.close()
    what = "consume" if role == p.RECEIVER else "publish"
    name = f"{LINKS:,} links of a connection that {what}, each"
    return Row(name, each, "KiB", f"<= {LINK_KIB_MAX:g}", each <= LINK_KIB_MAX)


def _memory_kib(side: Side) -> int:
    status = Path(f"/proc/{side.pid}/status").read_text()
    return int(next(line for line in status.splitlines() if line.startswith("VmRSS")).split()[1])
