"""Power loss: the disk holds synced data, followed by nothing, a torn tail, noise or zeros."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
from tests.crash.harness import Forge, PowerLoss, Tails, deaths, remove
from tests.crash.workload import Expectation, ride

from basaltmq.store.salvage.verify import verify

LOSSES_PER_STORE = 12
EARLY = 0.3


@pytest.mark.promise("P1", "P2", "P10")
@pytest.mark.parametrize("tails", Tails)
def test_power_loss_keeps_confirmed_batches_atomic_and_deletes(forge: Forge, tmp_path: Path, tails: Tails) -> None:
    seed = random.SystemRandom().getrandbits(32)
    print(f"seed {seed}")
    rng = random.Random(seed)
    path = tmp_path / "store-0"
    expectation = Expectation()
    for number, early in enumerate(deaths(rng, LOSSES_PER_STORE, EARLY)):
        disk = PowerLoss(path, tmp_path / f"disk-{number}")
        child = forge.start("tests.crash.workload:run", str(path), rng.getrandbits(32), shim=disk.shim())
        ride(child, expectation, rng, early=early)
        left = tmp_path / f"store-{number + 1}"
        disk.play(left, tails, rng)
        remove(path)
        remove(tmp_path / f"disk-{number}")
        path = left
    checked = expectation.checks
    assert checked >= LOSSES_PER_STORE // 4, "most children were killed before they had opened"
    for line in forge.run("tests.crash.workload:check", str(path)):
        expectation.receive_line(line)
    assert expectation.checks == checked + 1


@pytest.mark.promise("P1")
@pytest.mark.spec("A10")
@pytest.mark.parametrize("heard", ["stored", "copied", "restored"])
def test_completed_backup_survives_a_power_loss(forge: Forge, tmp_path: Path, heard: str) -> None:
    base = tmp_path / "base"
    base.mkdir()
    disk = PowerLoss(base, tmp_path / "disk")
    child = forge.start("tests.crash.faults:back_up", str(base), shim=disk.shim())
    assert heard in child.lines(timeout_s=60)
    child.kill()
    child.close()
    disk.play(tmp_path / "left", Tails.CUT, random.Random(0))
    said = forge.run("tests.crash.faults:look", str(tmp_path / "left" / "store"))
    if heard != "stored":
        assert verify(tmp_path / "left" / "copy") == []
    if heard == "restored":
        said += forge.run("tests.crash.faults:look", str(tmp_path / "left" / "back"))
    assert set(said) == {"lost 0", "faults []"}
    assert not [entry for entry in (tmp_path / "left").iterdir() if "partial" in entry.name and heard == "restored"]
