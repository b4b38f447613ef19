"""Power loss: the disk holds what was synced, and beyond it nothing, a torn rest, noise or zeros."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
from tests.crash.harness import Forge, PowerLoss, Tails, remove
from tests.crash.workload import Expectation, ride

LOSSES_PER_STORE = 12


@pytest.mark.promise("P1", "P2", "P10")
@pytest.mark.parametrize("tails", Tails)
def test_after_power_loss_confirmed_stays_batches_are_whole_and_deleted_is_gone(
    forge: Forge, tmp_path: Path, tails: Tails
) -> None:
    seed = random.SystemRandom().getrandbits(32)
    print(f"seed {seed}")
    rng = random.Random(seed)
    path = tmp_path / "store-0"
    expectation = Expectation()
    for number in range(LOSSES_PER_STORE):
        disk = PowerLoss(path, tmp_path / f"disk-{number}")
        ride(
            forge.start("tests.crash.workload:run", str(path), rng.getrandbits(32), shim=disk.shim()), expectation, rng
        )
        left = tmp_path / f"store-{number + 1}"
        disk.play(left, tails, rng)
        remove(path)
        remove(tmp_path / f"disk-{number}")
        path = left
    checked = expectation.checks
    assert checked >= LOSSES_PER_STORE // 4, "most children died before they had opened: the test shows little"
    for line in forge.run("tests.crash.workload:check", str(path)):
        expectation.hear(line)
    assert expectation.checks == checked + 1
