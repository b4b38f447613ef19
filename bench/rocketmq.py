"""RocketMQ 5 clients on Basalt and on RocketMQ: the same loads, in turns.

Messages of 1 KiB are sent, received and acknowledged with 1, 16 and 128 producers, and in order over 10,000 message
groups. The load is `bench/rocketmq_load/Load.java`: RocketMQ's Java client, each producer waits for each answer, four
threads receive. Its JVM takes most of a machine with two cores, for every broker alike.

The peer is namesrv with a proxy that has the broker in it, from the published jars in BASALT_ROCKETMQ_JARS, which maven
fills:

    mvn -q -f bench/rocketmq_peer.xml dependency:copy-dependencies -DoutputDirectory="$BASALT_ROCKETMQ_JARS"

It runs with sync flush, as Basalt does, and with its default. Without its jars Basalt is measured alone. The clients
are those of the tests (`tests/interop/rocketmq/clients/install`). A figure is the median of the turns, a ratio the
median of the ratios within the turns. BASALT_BENCH_PARTS selects loads by their names below, separated by commas.
"""

from __future__ import annotations

import os
import shutil
import statistics
import subprocess
import sys
from collections.abc import Iterable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Final, NamedTuple

from bench.log_rig import bench_path
from bench.row import Row
from bench.side_by_side import rocketmq_peer
from bench.side_by_side.brokers import basalt_rocketmq
from bench.side_by_side.process import Side
from bench.size import sized

TURNS: Final = int(os.environ.get("BASALT_BENCH_ROUNDS", sized(3, 1)))
PARTITIONS: Final = 8
WARM_UP: Final = 500
LOAD_S: Final = 230.0
PACED: Final = 1_000
CLIENTS: Final = Path(os.environ.get("BASALT_ROCKETMQ_CLIENTS", Path.home() / ".cache" / "basalt" / "rocketmq-clients"))
SOURCE: Final = Path(__file__).parent / "rocketmq_load" / "Load.java"
BASALT, SYNC, DEFAULT = "Basalt", "RocketMQ, sync flush", "RocketMQ"


class Load(NamedTuple):
    """Options of the load."""

    producers: int
    messages: int
    groups: int = 0
    rate: int = 0


NORMAL, FIFO, PACED_LOAD = "16 producers", "FIFO", "paced"
LOADS: Final = {
    "1 producer": Load(1, sized(2_000, 200)),
    NORMAL: Load(16, sized(6_000, 500)),
    "128 producers": Load(128, sized(12_000, 1_000)),
    FIFO: Load(16, sized(10_000, 1_000), groups=sized(10_000, 1_000)),
    PACED_LOAD: Load(16, sized(5_000, 500), rate=PACED),
}
RATIO_MIN: Final = {SYNC: 2.0, DEFAULT: 1.0}
FIFO_MIN: Final = 0.7


class Found(NamedTuple):
    """What a load has measured."""

    rate: float
    p50_us: float
    p99_us: float
    disordered: float


def run() -> list[Row]:
    if shutil.which("javac") is None or not (CLIENTS / "jars").exists():
        raise RuntimeError("the load needs a JDK and tests/interop/rocketmq/clients/install")
    chosen = os.environ.get("BASALT_BENCH_PARTS", ",".join(LOADS)).split(",")
    loads = {name: LOADS[name] for name in chosen}
    with bench_path() as folder, ExitStack() as stack:
        classes = folder / "classes"
        jars = f"{CLIENTS / 'jars'}/*"
        subprocess.run(["javac", "-cp", jars, "-d", str(classes), str(SOURCE)], check=True)
        path = f"{jars}:{classes}"
        seen: dict[str, dict[str, list[Found]]] = {}
        sides = list(_sides(folder, stack, loads))
        for side in sides:
            for name, load in loads.items():
                _measure(path, side, name, load._replace(messages=WARM_UP, rate=0))
        for _ in range(TURNS):
            for name, load in loads.items():
                for side in sides:
                    seen.setdefault(name, {}).setdefault(side.name, []).append(_measure(path, side, name, load))
    return list(_rows(seen))


def _sides(folder: Path, stack: ExitStack, loads: Iterable[str]) -> Iterator[Side]:
    yield stack.enter_context(basalt_rocketmq(folder / "basalt", PARTITIONS))
    jars = os.environ.get("BASALT_ROCKETMQ_JARS")
    if not jars:
        print("rocketmq: RocketMQ skipped: set BASALT_ROCKETMQ_JARS", file=sys.stderr, flush=True)
        return
    for name, flush in ((SYNC, "SYNC_FLUSH"), (DEFAULT, "ASYNC_FLUSH")):
        broker = stack.enter_context(rocketmq_peer.started(Path(jars), folder / flush, name, flush))
        for load in loads:
            broker.create(_topic(load), PARTITIONS, is_ordered=load == FIFO)
        yield broker.side


def _topic(load: str) -> str:
    return load.replace(" ", "-")


def _measure(path: str, side: Side, name: str, load: Load) -> Found:
    command = ["java", "-cp", path, "Load", str(side.port), _topic(name), *(str(each) for each in load)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=LOAD_S, check=False)
    if done.returncode:
        raise RuntimeError(f"the load {name} on {side.name} failed: {done.stdout}{done.stderr[-2000:]}")
    return Found(*(float(each) for each in done.stdout.split()))


def _rows(seen: dict[str, dict[str, list[Found]]]) -> Iterator[Row]:
    for load, by_side in seen.items():
        for side, found in by_side.items():
            yield Row(f"{load}, {side}", statistics.median(each.rate for each in found), "msg/s")
            yield Row("  p50 until receipt", statistics.median(each.p50_us for each in found) / 1000, "ms")
            yield Row("  p99 until receipt", statistics.median(each.p99_us for each in found) / 1000, "ms")
        for side in list(by_side)[1:]:
            yield _compared(load, side, by_side[BASALT], by_side[side])
    if FIFO in seen and NORMAL in seen:
        ordered, normal = (statistics.median(each.rate for each in seen[name][BASALT]) for name in (FIFO, NORMAL))
        ratio = ordered / normal
        yield Row("FIFO / normal, Basalt", ratio, "x", f">= {FIFO_MIN:g}", ratio >= FIFO_MIN)


def _compared(load: str, side: str, ours: list[Found], theirs: list[Found]) -> Row:
    if load == PACED_LOAD:
        slower = statistics.median(one.p99_us / two.p99_us for one, two in zip(ours, theirs, strict=True))
        return Row(f"p99 at {PACED:,}/s: {BASALT} / {side}", slower, "x", "<= 1", slower <= 1)
    ratio = statistics.median(one.rate / two.rate for one, two in zip(ours, theirs, strict=True))
    bar = RATIO_MIN[side]
    return Row(f"{load}: {BASALT} / {side}", ratio, "x", f">= {bar:g}", ratio >= bar)
