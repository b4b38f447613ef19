"""Every Python example of the tutorials, recipes and README runs as printed, in order, against a real broker."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from tests.interop.server import ROOT, Broker

SPARK = ROOT / "docs" / "tutorials" / "spark.md"
"""Runs with the Spark tests, which share one JVM."""

PAGES = sorted({*ROOT.glob("docs/tutorials/*.md"), *ROOT.glob("docs/recipes/*.md"), ROOT / "README.md"} - {SPARK})
BLOCK = re.compile(r"^```python\n(.*?)^```", re.MULTILINE | re.DOTALL)
PORTS = {
    "127.0.0.1:5672": "amqp",
    "127.0.0.1:9092": "kafka",
    "127.0.0.1:5555": "fila",
    "127.0.0.1:15672": "admin",
    '"127.0.0.1", 1883': "mqtt",
}
"""Address in an example -> the listener with this address."""
RUN_S = 100


@pytest.mark.parametrize("page", PAGES, ids=lambda path: path.stem)
def test_the_examples_of_a_page_run_as_printed(page: Path, broker: Broker, tmp_path: Path) -> None:
    examples = BLOCK.findall(page.read_text())
    for code in examples:
        for address, listener in PORTS.items():
            code = code.replace(address, re.sub(r"\d+$", str(broker.port(listener)), address))
        done = subprocess.run(
            [sys.executable, "-c", code],
            cwd=tmp_path,
            env=os.environ | {"PYTHONPATH": str(ROOT / "src")},
            capture_output=True,
            text=True,
            timeout=RUN_S,
        )
        assert done.returncode == 0, f"{page.name} fails:\n{code}\n{done.stdout}{done.stderr}"


def test_the_pages_have_examples() -> None:
    assert sum(len(BLOCK.findall(page.read_text())) for page in PAGES) > 10
