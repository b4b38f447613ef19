"""Command line of the jobs without Spark: flags, times, and Spark errors in one line."""

from __future__ import annotations

import sys
from importlib import metadata
from pathlib import Path

import click
import pytest
from click.testing import CliRunner

import basaltmq
from basaltmq.cli.main import main
from basaltmq.cli.pipeline.flags import bound, ours
from basaltmq.errors import InvalidArgumentError

pytestmark = pytest.mark.spec("F2")


@pytest.mark.parametrize(
    ("text", "options"),
    [
        (None, {}),
        ("earliest", {"startingOffsets": "earliest"}),
        ('{"a": {"0": 1}}', {"startingOffsets": '{"a": {"0": 1}}'}),
        ("1700000000000", {"startingTimestamp": "1700000000000"}),
        ("2023-11-14T22:13:20", {"startingTimestamp": "1700000000000"}),
        ("2023-11-14T23:13:20+01:00", {"startingTimestamp": "1700000000000"}),
    ],
)
def test_start_flag_accepts_positions_offsets_and_times(text: str | None, options: dict[str, str]) -> None:
    assert bound("--from", "starting", text) == options


def test_invalid_start_flag_is_refused() -> None:
    with pytest.raises(InvalidArgumentError, match="--from: expected earliest"):
        bound("--from", "starting", "yesterday")


def test_basalt_error_is_extracted_from_a_spark_error() -> None:
    trace = (
        "[PYTHON_DATA_SOURCE_ERROR] Failed: Traceback (most recent call last):\n  File ...\n"
        "basaltmq.errors.DataLossError: orders[0] begins at offset 7; with failOnDataLoss=false it is skipped\n\n"
        "\tat java.lang.Thread"
    )
    lost = ours(trace)
    assert (lost.message, lost.exit_code) == ("orders[0] begins at offset 7; with --skip-lost it is skipped", 3)
    other = ours("[DIVIDE_BY_ZERO] Division by zero.\n== SQL ==\n...")
    assert (other.message, other.exit_code) == ("[DIVIDE_BY_ZERO] Division by zero.", 1)
    assert isinstance(ours(""), click.ClickException)


@pytest.mark.parametrize(
    ("flags", "reported"),
    [
        (["archive", "--topics", ",", "--to", "x"], "expected one or more topic names"),
        (["archive", "--topics", "a", "--to", "x", "--once", "--continuous", "1"], "give either"),
        (["replay", "--topics", "a", "--checkpoint", "x"], "cannot be replayed into itself"),
        (["compact"], "Missing argument"),
        (["dedup", "--topics", "a"], "choose a target"),
        (["latest", "--topics", "a", "--target-topic", "b", "--parquet", "c"], "choose a target"),
        (["profile", "--data-dir", "x", "--server", "http://y"], "give either"),
        (["audit", "--server", "http://y"], "give --data-dir"),
        (["rebuild-index", "--server", "http://y"], "give --data-dir"),
        (["dlq", "report", "--server", "http://y"], "requires the names"),
        (["lag", "--server", "http://127.0.0.1:1"], "no broker responds"),
    ],
)
def test_invalid_flags_are_refused_before_spark_starts(tmp_path: Path, flags: list[str], reported: str) -> None:
    found = CliRunner().invoke(main, ["--data-dir", str(tmp_path), "pipeline", *flags])
    assert found.exit_code in (1, 2)
    assert reported in found.stderr


def test_missing_java_is_reported_in_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JAVA_HOME", str(tmp_path))
    found = CliRunner().invoke(main, ["--data-dir", str(tmp_path), "pipeline", "compact", str(tmp_path / "archive")])
    assert found.exit_code == 1
    assert found.stderr.count("\n") == 1
    assert "needs Java 17" in found.stderr


def test_missing_pyspark_is_reported_in_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [each for each in sys.modules if each.partition(".")[0] == "pyspark"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "pyspark", None)
    monkeypatch.setattr(metadata, "version", _missing)
    found = CliRunner().invoke(main, ["--data-dir", str(tmp_path), "pipeline", "compact", str(tmp_path / "archive")])
    assert found.exit_code == 1
    assert "the pipeline needs pyspark: pip install 'basaltmq[spark]'" in found.stderr


def _missing(name: str) -> str:
    raise metadata.PackageNotFoundError(name)


def test_lag_page_is_written_without_spark(tmp_path: Path) -> None:
    with basaltmq.open(tmp_path / "data") as db:
        db.topic("orders").append([b"a", b"b", b"c"])
        db.streams.offsets.commit("readers", {(db.streams.topics.get("orders").id, 0): 1})
        db.queue("jobs").enqueue(b"a")
    page = tmp_path / "lag.html"
    found = CliRunner().invoke(main, ["--data-dir", str(tmp_path / "data"), "pipeline", "lag", "--html", str(page)])
    assert found.exit_code == 0, found.output
    assert "readers · orders[0]: lag 2 records" in page.read_text()
    assert "jobs: ready or leased 1 messages" in page.read_text()
