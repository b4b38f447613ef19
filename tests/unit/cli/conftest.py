"""Runs `basalt` in this process."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TypeAlias

import pytest
from click.testing import CliRunner, Result

from basaltmq.cli.main import main

Basalt: TypeAlias = Callable[..., Result]


@pytest.fixture
def data(tmp_path: Path) -> Path:
    return tmp_path / "data"


@pytest.fixture
def basalt(data: Path) -> Basalt:
    """Run a command on the store of the test; `code` is the exit code expected, `stdin` what it reads."""

    def run(*words: str | Path, code: int = 0, stdin: str | bytes = "") -> Result:
        result = CliRunner().invoke(main, ["--data-dir", str(data), *map(str, words)], input=stdin)
        assert result.exit_code == code, f"{words}: {result.output} {result.exception!r}"
        if code == 1:
            assert result.stderr.count("\n") == 1 + result.stderr.count("records appended"), result.stderr
            assert "error [" in result.stderr
        return result

    return run
