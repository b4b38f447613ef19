"""The cost of the catalog with a million topics (SPEC D1, promises P8 and P9).

Three questions, each a ratio within one run:

- creating: the rate over the last tenth of a million topics compared with the first tenth;
- finding one topic by name and updating it durably: its cost with a million topics compared with a thousand;
- opening: time and resident memory of a process that opens the million topics compared with an empty catalog.

Topics are created 1,000 per batch, each batch durable before the next. Opening is measured in separate child processes,
several times each in turns. The result is the minimum time and the median memory.
"""

from __future__ import annotations

import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Final
from uuid import UUID

from bench.row import Row
from bench.size import sized

from basaltmq.catalog.catalog import Catalog
from basaltmq.catalog.kinds import Kind
from basaltmq.catalog.objects import NewObject
from basaltmq.store.open import open_store

TOPICS: Final = sized(1_000_000, 50_000)
FEW_TOPICS: Final = 1_000
BATCH: Final = 1_000
UPDATES: Final = 400
OPENINGS: Final = 7
MIB: Final = 1 << 20

CREATE_RATIO_MIN: Final = 0.70
UPDATE_RATIO_MAX: Final = 1.30
OPEN_RATIO_MAX: Final = 2.0
OPEN_MEMORY_MIB_MAX: Final = 64.0


def run(topics: int = TOPICS) -> list[Row]:
    with tempfile.TemporaryDirectory(prefix="basalt-bench-") as folder:
        empty, few, many = (Path(folder) / name for name in ("empty", "few", "many"))
        _fill(empty, 0)
        _fill(few, FEW_TOPICS)
        rates = _fill(many, topics)
        rows = _creating(rates, topics)
        rows += _updating(few, many, topics)
        rows += _opening(empty, many)
    return rows


def _fill(path: Path, topics: int) -> list[float]:
    """Create topics. Return the number per second in each tenth."""
    store = open_store(path)
    catalog = Catalog(store)
    catalog.open()
    vhost = catalog.create(Kind.VHOST, "/").id
    rates = []
    tenth = topics // 10
    for begin in range(0, topics, tenth or 1):
        started = time.perf_counter()
        for first in range(begin, begin + tenth, BATCH):
            catalog.create_many(_topic(number, vhost) for number in range(first, min(first + BATCH, begin + tenth)))
        rates.append(tenth / (time.perf_counter() - started))
    catalog.close()
    store.close()
    return rates


def _topic(number: int, vhost: UUID) -> NewObject:
    attributes = {"partitions": 4, "engine": "segment", "retention_ms": 604_800_000}
    return NewObject(Kind.TOPIC, f"orders.region-{number % 97}.{number}", vhost, attributes)


def _creating(rates: list[float], topics: int) -> list[Row]:
    ratio = rates[-1] / rates[0]
    return [
        Row(f"create, first tenth of {topics}", rates[0], "topics/s"),
        Row("create, last tenth", rates[-1], "topics/s"),
        Row("create, slowest tenth", min(rates), "topics/s"),
        Row("create, last to first tenth", ratio, "x", f">= {CREATE_RATIO_MIN}", ratio >= CREATE_RATIO_MIN),
    ]


def _updating(few: Path, many: Path, topics: int) -> list[Row]:
    """Measure in turns, so that a change of the disk's speed affects both."""
    stores = [open_store(few), open_store(many)]
    catalogs = [Catalog(store) for store in stores]
    costs: list[list[float]] = [[], []]
    cpu: list[list[float]] = [[], []]
    chosen = []
    for catalog, count in zip(catalogs, (FEW_TOPICS, topics), strict=True):
        catalog.open()
        vhost = catalog.find(Kind.VHOST, "/")
        assert vhost is not None
        numbers = [(turn * 7919) % count for turn in range(UPDATES)]
        chosen.append([(vhost.id, _topic(number, vhost.id).name) for number in numbers])
    for turn in range(UPDATES):
        for which, catalog in enumerate(catalogs):
            parent, name = chosen[which][turn]
            started, started_cpu = time.perf_counter(), time.thread_time()
            topic = catalog.find(Kind.TOPIC, name, parent)
            assert topic is not None, name
            catalog.update(topic.id, {**topic.attributes, "retention_ms": turn})
            costs[which].append(time.perf_counter() - started)
            cpu[which].append(time.thread_time() - started_cpu)
    for catalog, store in zip(catalogs, stores, strict=True):
        catalog.close()
        store.close()
    at_few, at_many = (statistics.median(cost) for cost in costs)
    ratio = at_many / at_few
    return [
        Row(f"durable update among {FEW_TOPICS}", at_few * 1e3, "ms"),
        Row(f"durable update among {topics}", at_many * 1e3, "ms"),
        Row("durable update, many to few", ratio, "x", f"<= {UPDATE_RATIO_MAX}", ratio <= UPDATE_RATIO_MAX),
        Row(f"CPU of it among {FEW_TOPICS}", statistics.median(cpu[0]) * 1e6, "us"),
        Row(f"CPU of it among {topics}", statistics.median(cpu[1]) * 1e6, "us"),
    ]


_OPEN: Final = """
import os, sys, time
from pathlib import Path
from basaltmq.catalog.catalog import Catalog
from basaltmq.catalog.kinds import Kind
from basaltmq.store.open import open_store
started = time.perf_counter()
store = open_store(Path(sys.argv[1]))
catalog = Catalog(store)
catalog.open()
assert catalog.find(Kind.VHOST, "/") is not None
took = time.perf_counter() - started
pages = int(open("/proc/self/statm").read().split()[1])
print(took, pages * os.sysconf("SC_PAGE_SIZE"))
store.close()
"""


def _opening(empty: Path, many: Path) -> list[Row]:
    seen: dict[Path, list[tuple[float, int]]] = {empty: [], many: []}
    for _ in range(OPENINGS):
        for path in (empty, many):
            printed = subprocess.run(
                [sys.executable, "-c", _OPEN, str(path)], check=True, capture_output=True, text=True, timeout=120
            ).stdout.split()
            seen[path].append((float(printed[0]), int(printed[1])))
    times = {path: min(took for took, _ in figures) for path, figures in seen.items()}
    memory = {path: statistics.median(size for _, size in figures) for path, figures in seen.items()}
    ratio = times[many] / times[empty]
    more_mib = (memory[many] - memory[empty]) / MIB
    return [
        Row("open, empty", times[empty] * 1e3, "ms"),
        Row("open, full", times[many] * 1e3, "ms"),
        Row("open, full to empty", ratio, "x", f"<= {OPEN_RATIO_MAX}", ratio <= OPEN_RATIO_MAX),
        Row(
            "memory after opening, full less empty",
            more_mib,
            "MiB",
            f"<= {OPEN_MEMORY_MIB_MAX}",
            more_mib <= OPEN_MEMORY_MIB_MAX,
        ),
    ]
