"""The demo reports its steps, finds its data again, and ends cleanly when interrupted."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

import basaltmq
from basaltmq.demo import count_messages, main

SOURCE = Path(__file__).parents[2] / "src"
WAIT_S = 60


def test_a_second_run_continues_with_existing_data(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["--data-dir", str(tmp_path / "data"), "--messages", "300"]
    assert main(arguments) == 0
    first = capsys.readouterr().out
    assert "nothing: the first run" in first
    assert "published  300 messages" in first
    assert "consumed   300 as group" in first
    assert "kept       300 messages, lag of the group 0" in first
    assert str(tmp_path / "data") in first
    assert main(arguments) == 0
    assert "found      300 messages of earlier runs" in capsys.readouterr().out


def test_errors_are_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "letter.txt").write_text("not a store")
    assert main(["--data-dir", str(tmp_path / "data")]) == 1
    assert "is not a Basalt store" in capsys.readouterr().err


@pytest.mark.parametrize("count", ["0", "-1", "many", "100000000"])
def test_an_invalid_count_is_refused(count: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(["--messages", count])
    assert "is not" in capsys.readouterr().err


@pytest.mark.promise("P1")
def test_an_interrupted_demo_reports_it_and_leaves_a_valid_store(tmp_path: Path) -> None:
    child = subprocess.Popen(
        [sys.executable, "-m", "basaltmq.demo", "--data-dir", str(tmp_path / "data"), "--messages", "5000000"],
        env={**os.environ, "PYTHONPATH": str(SOURCE)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        # The process that runs the tests may ignore the signal, and children inherit that.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )
    assert child.stdout is not None
    while "confirmed so far" not in child.stdout.readline():
        assert child.poll() is None
    child.send_signal(signal.SIGINT)
    said, errors = child.communicate(timeout=WAIT_S)
    assert child.returncode == 130
    assert errors == ""
    stopped = re.search(r"Stopped after ([\d,]+) confirmed messages", said)
    assert stopped is not None, said
    confirmed = int(stopped.group(1).replace(",", ""))
    with basaltmq.open(tmp_path / "data", create=False) as db:
        assert 0 < confirmed <= count_messages(db)
