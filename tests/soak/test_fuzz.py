"""Some cases of the damage fuzz. For more, run `python -m tests.soak.fuzz --cases 200`."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from tests.soak import fuzz
from tests.soak.census import Held
from tests.soak.ledger import Label

SEED = 20_260
CASES = 4


@pytest.mark.promise("P1", "P7")
@pytest.mark.timeout(fuzz.CASE_S * CASES)
def test_damage_never_causes_crash_hang_or_unreported_loss(tmp_path: Path) -> None:
    assert fuzz.run_apart(tmp_path, SEED, 0, CASES) == ""


@pytest.mark.promise("P7")
def test_fuzz_finds_unreported_losses(tmp_path: Path) -> None:
    fuzz.build(tmp_path, SEED, size=8)
    case = fuzz.Case(0, SEED, tmp_path)
    shutil.rmtree(case.path)
    shutil.copytree(tmp_path / "closed", case.path)
    case.census.messages[Label("nobody", 1)] = [Held("plain", "00" * 16, "messages", b"")]
    assert "missing and not named: 1, such as Label(producer='nobody'" in case.run()
