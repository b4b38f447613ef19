"""The history of the ratios: `python -m bench.history` shows it, `python -m bench --quick` appends to it.

A CSV file with one line per ratio and run. A line has the date, the commit, the machine and its load before the run,
because ratios of a busy machine are unreliable. Rows that are not ratios are left out: they depend on the machine.
"""

from __future__ import annotations

import csv
import os
import subprocess
import sys
from collections.abc import Iterable, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final, NamedTuple

from bench.machine import machine

ROOT: Final = Path(__file__).parents[1]
HISTORY: Final = ROOT / "docs" / "bench-history.csv"
UNITS: Final = frozenset({"x", "ratio"})
SHOWN: Final = 10
"""Number of runs that the view shows per ratio."""

LEVELS: Final = "▁▂▃▄▅▆▇█"


class Run(NamedTuple):
    """The common fields of a run's ratios."""

    date: str
    commit: str
    machine: str
    load: str


class Ratio(NamedTuple):
    """One line of the file."""

    date: str
    commit: str
    machine: str
    load: str
    bench: str
    name: str
    value: str
    bar: str


def this_run() -> Run:
    """Return the fields of this run. Call it before the benches, because they are a load themselves."""
    git = ["git", "-C", str(ROOT), "describe", "--always", "--dirty", "--exclude=*"]
    named = subprocess.run(git, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, check=False)
    commit = named.stdout.strip() or "unknown"
    return Run(datetime.now(UTC).strftime("%Y-%m-%dT%H:%MZ"), commit, machine(), f"{os.getloadavg()[0]:.1f}")


def append(path: Path, run: Run, results: Mapping[str, Sequence[Mapping[str, Any]]]) -> None:
    is_new = not path.exists()
    with path.open("a", newline="", encoding="utf-8") as file:
        writer = csv.writer(file, lineterminator="\n")
        if is_new:
            writer.writerow(Ratio._fields)
        writer.writerows(ratios(run, results))


def ratios(run: Run, results: Mapping[str, Sequence[Mapping[str, Any]]]) -> Iterable[Ratio]:
    """Return the ratios among the rows. An indented name is prefixed with the name of its row."""
    for bench, rows in results.items():
        owner = ""
        for row in rows:
            name = row["name"].strip()
            if not row["name"].startswith(" "):
                owner = name
            if row["unit"] in UNITS:
                shown = name if name == owner else f"{owner}: {name}"
                yield Ratio(*run, bench, shown, f"{row['value']:.4g}", row["bar"])


def read(path: Path) -> list[Ratio]:
    with path.open(newline="", encoding="utf-8") as file:
        lines = csv.reader(file)
        head = tuple(next(lines, ()))
        if head != Ratio._fields:
            raise ValueError(
                f"{path} begins with {head}, not with {Ratio._fields}; move it away to start a new history"
            )
        return [Ratio(*line) for line in lines]


def view(history: Sequence[Ratio]) -> str:
    """Return the last runs of every ratio, oldest first, by machine."""
    series: dict[tuple[str, str, str], list[Ratio]] = {}
    for each in history:
        series.setdefault((each.machine, each.bench, each.name), []).append(each)
    lines: list[str] = []
    width = max((len(f"{bench}: {name}") for _, bench, name in series), default=0)
    last_machine = ""
    for (where, bench, name), found in sorted(series.items(), key=lambda item: item[0][0]):
        if where != last_machine:
            lines.append(f"{where}, the last {SHOWN} runs, oldest first")
            last_machine = where
        values = [each.value for each in found[-SHOWN:]]
        line = spark_line([float(each) for each in values])
        bar = f"bar {found[-1].bar}" if found[-1].bar else ""
        lines.append(f"  {f'{bench}: {name}':<{width}}  {line:<{SHOWN}}  {' '.join(values)}  {bar}".rstrip())
    return "\n".join(lines)


def spark_line(values: Sequence[float]) -> str:
    """Return one character per value, with a height between those of the smallest and the largest value."""
    low, high = min(values), max(values)
    if low == high:
        return LEVELS[len(LEVELS) // 2] * len(values)
    return "".join(LEVELS[round((each - low) / (high - low) * (len(LEVELS) - 1))] for each in values)


def main() -> None:
    path = Path(sys.argv[1]) if len(sys.argv) > 1 else HISTORY
    if not path.exists():
        raise SystemExit(f"{path} does not exist; `make bench BENCH=all ARGS=--quick` starts it")
    print(view(read(path)))


if __name__ == "__main__":
    main()
