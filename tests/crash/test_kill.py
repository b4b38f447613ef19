"""kill -9 at random moments of open, recovery, writes, flush, compaction, checkpoint, set_options and close."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
from tests.crash.harness import Forge, deaths
from tests.crash.workload import Expectation, ride

KILLS_PER_STORE = 35
STORES = 6
EARLY = 0.3


@pytest.mark.promise("P1", "P2", "P10")
@pytest.mark.spec("A10")
@pytest.mark.parametrize("number", range(STORES))
def test_kill_9_keeps_confirmed_batches_atomic_and_deletes(forge: Forge, tmp_path: Path, number: int) -> None:
    seed = random.SystemRandom().getrandbits(32)
    print(f"seed {seed}")
    rng = random.Random(seed)
    path = tmp_path / "store"
    expectation = Expectation()
    for early in deaths(rng, KILLS_PER_STORE, EARLY):
        child = forge.start("tests.crash.workload:run", str(path), rng.getrandbits(32))
        ride(child, expectation, rng, early=early)
    checked = expectation.checks
    assert checked >= KILLS_PER_STORE // 3, "most children were killed before they had opened"
    for line in forge.run("tests.crash.workload:check", str(path)):
        expectation.receive_line(line)
    assert expectation.checks == checked + 1
