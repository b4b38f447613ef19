"""Starts of a broker with several virtual hosts never fail (SPEC E9, P11).

`BASALT_STARTS=500` runs the long version.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

VHOSTS = 8
STARTS = int(os.environ.get("BASALT_STARTS", "6"))
"""Half of the starts crashed when threads built type information, so 6 starts find that defect in 98 % of runs."""

START_S_MAX = 15
"""Timeout of a start, which takes about a second on an idle machine."""


def workload(*arguments: object) -> str:
    return subprocess.run(
        [sys.executable, "-m", "tests.crash.start_workload", *map(str, arguments)],
        cwd=Path(__file__).parents[2],
        check=True,
        stdout=subprocess.PIPE,
        text=True,
        timeout=60 + STARTS * START_S_MAX,
    ).stdout


@pytest.mark.spec("E9")
@pytest.mark.promise("P11")
@pytest.mark.timeout(120 + STARTS * START_S_MAX)
def test_no_start_with_several_vhosts_crashes(tmp_path: Path) -> None:
    workload("make", tmp_path / "data", VHOSTS)
    said = json.loads(workload("run", tmp_path / "data", STARTS))
    assert said == {"starts": STARTS, "failed": []}
