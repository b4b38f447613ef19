"""The history of ratios: the recorded fields of a run, and their display."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from bench.history import Run, append, read, spark_line, view

RUN = Run("2026-01-02T03:04Z", "abc1234", "2 cores", "0.5")


def row(name: str, value: float, unit: str, bar: str = "") -> dict[str, Any]:
    return {"name": name, "value": value, "unit": unit, "bar": bar, "passed": None}


def test_only_ratios_are_recorded_each_with_its_run(tmp_path: Path) -> None:
    path = tmp_path / "history.csv"
    append(path, RUN, {"log": [row("append", 1234, "batches/s"), row("append / write", 0.51, "ratio", ">= 0.5")]})
    append(path, RUN._replace(commit="def5678"), {"peers": [row("queue: ours / theirs, x", 2.25, "x")]})
    assert [(each.commit, each.bench, each.name, each.value, each.bar) for each in read(path)] == [
        ("abc1234", "log", "append / write", "0.51", ">= 0.5"),
        ("def5678", "peers", "queue: ours / theirs, x", "2.25", ""),
    ]
    assert read(path)[0][:4] == RUN


def test_an_indented_ratio_gets_the_name_of_its_owner(tmp_path: Path) -> None:
    path = tmp_path / "history.csv"
    rows = [row("read", 1.5, "ratio"), row("  most", 1.7, "ratio"), row("write", 3, "s"), row("  most", 0.9, "ratio")]
    append(path, RUN, {"pipeline": rows})
    assert [each.name for each in read(path)] == ["read", "read: most", "write: most"]


def test_the_view_has_one_line_per_ratio_and_machine(tmp_path: Path) -> None:
    path = tmp_path / "history.csv"
    for where, value in (("a", 1.0), ("b", 5.0), ("a", 2.0)):
        append(path, RUN._replace(machine=where), {"log": [row("append / write", value, "x", ">= 0.5")]})
    lines = view(read(path)).splitlines()
    assert [line.split() for line in lines if "append" in line] == [
        ["log:", "append", "/", "write", "▁█", "1", "2", "bar", ">=", "0.5"],
        ["log:", "append", "/", "write", "▅", "5", "bar", ">=", "0.5"],
    ]
    assert [line[0] for line in lines if "append" not in line] == ["a", "b"]


def test_a_file_that_is_no_history_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "other.csv"
    path.write_text("x,y\n1,2\n")
    with pytest.raises(ValueError, match=r"other\.csv"):
        read(path)


@pytest.mark.parametrize(("values", "shown"), [([1, 2, 3], "▁▅█"), ([3, 1], "█▁"), ([2, 2], "▅▅")])
def test_spark_line(values: list[float], shown: str) -> None:
    assert spark_line(values) == shown
