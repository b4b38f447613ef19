"""RabbitMQ's own perf-test without confirms: ten publishers and ten consumers on one queue.

BASALT_PERF_TEST_JARS names the folder with the jars of `com.rabbitmq:perf-test` and its dependencies. Publishers
without confirms show whether a broker lets its consumers keep up.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from pathlib import Path
from typing import Final, NamedTuple

from bench.side_by_side.process import Side
from bench.size import sized

PAIRS: Final = 10
SECONDS: Final = sized(12, 4)
PATIENCE_S: Final = 120.0
FIGURE: Final = re.compile(r"(sending|receiving) rate avg: (\d+) msg/s")


class Flood(NamedTuple):
    """Messages per second."""

    sent: float
    delivered: float


def perf_test_jars() -> Path | None:
    jars = os.environ.get("BASALT_PERF_TEST_JARS")
    if jars and any(Path(jars).glob("perf-test-*.jar")) and shutil.which("java"):
        return Path(jars)
    return None


def flood(jars: Path, side: Side, queue: str) -> Flood:
    address = f"amqp://guest:guest@{side.address}/%2f"
    command = ["java", "-cp", f"{jars}/*", "com.rabbitmq.perf.PerfTest", "-h", address, "-u", queue]
    load = ["-z", str(SECONDS), "-x", str(PAIRS), "-y", str(PAIRS)]
    done = subprocess.run(
        [*command, *load], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=PATIENCE_S, check=True
    )
    return flood_of(done.stdout)


def flood_of(reported: str) -> Flood:
    """Return the averages at the end of perf-test's output."""
    found = {what: float(rate) for what, rate in FIGURE.findall(reported)}
    if found.keys() != {"sending", "receiving"}:
        raise RuntimeError(f"perf-test reported no averages; the end of its output:\n{reported[-2000:]}")
    return Flood(found["sending"], found["receiving"])
