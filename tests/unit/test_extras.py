"""Errors about an optional package that is not installed name the extra that installs it."""

from __future__ import annotations

import importlib.metadata
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner

from basaltmq.cli.main import main

WITHOUT = """
import sys

sys.modules["pyarrow"] = sys.modules["lupa.lua54"] = None
import basaltmq
from basaltmq.errors import BasaltError

with basaltmq.open(sys.argv[1]) as db:
    topic = db.topic("orders")
    topic.append(b"1")
    for use in (
        lambda: list(topic.read_arrow()),
        lambda: db.queue("jobs", on_enqueue_script="function on_enqueue(m) return {} end"),
    ):
        try:
            use()
        except BasaltError as error:
            print(error)
"""


def test_a_store_works_without_extras_and_names_the_missing_one(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT, str(tmp_path / "store")], capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr
    arrow, lua = done.stdout.splitlines()
    assert "pip install 'basaltmq[arrow]'" in arrow
    assert "pip install 'basaltmq[lua]'" in lua


def test_doctor_names_the_extra_of_each_missing_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    installed = importlib.metadata.version

    def version(name: str) -> str:
        if name in ("lupa", "pyarrow", "uvloop"):
            raise importlib.metadata.PackageNotFoundError(name)
        return installed(name)

    monkeypatch.setattr(importlib.metadata, "version", version)
    result = CliRunner().invoke(main, ["doctor", f"--data-dir={tmp_path}"])
    for extra in ("lua", "arrow", "server"):
        assert f"pip install 'basaltmq[{extra}]'" in result.stdout
