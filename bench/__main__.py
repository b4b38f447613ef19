"""`python -m bench [name ...]`: figures as ratios within one run, because machines differ and are noisy.

A bench is a module of this package with `run()`, which returns rows; add its name to BENCHES. A row with a target shows
whether it was met, and the exit code is 1 if one was not. `--quick` uses reduced sizes and appends the ratios to a
history, after each bench.
"""

from __future__ import annotations

import argparse
import importlib
import inspect
import json
import os
import platform
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

from bench.history import HISTORY, append, read, this_run, view
from bench.size import QUICK

ALL: Final = "all"
BENCHES: Final = [
    "writes",
    "commits",
    "catalog",
    "fairness",
    "client_latency",
    "log",
    "grpc_queues",
    "http2_library",
    "log_read",
    "queues_events",
    "queues",
    "queues_due",
    "broker",
    "rabbitmq",
    "spark_index",
    "kafka_peer",
    "peers",
    "pipeline",
    "mqtt",
    "amqp10",
    "rocketmq",
]


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m bench", description="Measure Basalt: ratios within one run.")
    parser.add_argument(
        "names", nargs="*", metavar="name", help=f"one of {', '.join(BENCHES)}; all, or none, for every one"
    )
    parser.add_argument("--full", action="store_true", help="the full sizes where a bench has smaller ones by default")
    parser.add_argument("--quick", action="store_true", help="reduced sizes; the ratios are appended to the history")
    parser.add_argument("--history", type=Path, default=HISTORY, metavar="FILE", help="the history of --quick")
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of tables")
    chosen = parser.parse_args(arguments)
    if chosen.quick and chosen.full:
        parser.error("--quick and --full exclude each other")
    if chosen.quick:
        os.environ[QUICK] = "1"
    names = BENCHES if chosen.names in ([], [ALL]) else chosen.names
    run = this_run()
    unknown = [name for name in names if name not in BENCHES]
    if unknown:
        parser.error(f"there is no bench {', '.join(unknown)}; there are {', '.join(BENCHES)}")
    results: dict[str, list[dict[str, Any]]] = {}
    for name in names:
        module = importlib.import_module(f"bench.{name}")
        started = time.perf_counter()
        sized = "full" in inspect.signature(module.run).parameters
        rows = module.run(full=chosen.full) if sized else module.run()
        results[name] = [row._asdict() for row in rows]
        if chosen.quick:
            append(chosen.history, run, {name: results[name]})
        if not chosen.json:
            title = (module.__doc__ or name).splitlines()[0]
            print(_table(name, title, results[name], time.perf_counter() - started), flush=True)
    if chosen.quick and not chosen.json:
        print(view(read(chosen.history)))
    if chosen.json:
        print(json.dumps({"python": platform.python_version(), "machine": platform.machine(), "benches": results}))
    missed = any(row["passed"] is False for rows in results.values() for row in rows)
    return 1 if missed else 0


def _table(name: str, title: str, rows: list[dict[str, Any]], seconds: float) -> str:
    width = max(len(row["name"]) for row in rows)
    lines = [f"{name}: {title}  ({seconds:.0f} s)"]
    for row in rows:
        verdict = {None: "", True: "cleared", False: "MISSED"}[row["passed"]]
        figure = f"{row['value']:>14,.0f}" if abs(row["value"]) >= 1000 else f"{row['value']:>14.4g}"
        bar = f"bar {row['bar']}" if row["bar"] else ""
        lines.append(f"  {row['name']:<{width}} {figure} {row['unit']:<10} {bar:<12} {verdict}".rstrip())
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    sys.exit(main())
