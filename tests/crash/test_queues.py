"""Queues after kill -9 and power loss: confirmed messages exist once, counts are exact, no rows are orphaned."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
from tests.crash.harness import Forge, PowerLoss, Tails, deaths, remove
from tests.crash.queue_workload import Expectation, ride

KILLS = 12
LOSSES = 6
EARLY = 0.15


@pytest.mark.spec("C6", "C7", "C8", "C9", "C13", "E3", "E4", "E10")
@pytest.mark.promise("P1", "P2", "P4", "P10")
def test_kill_9_keeps_confirmed_messages_once_and_counts_exact(forge: Forge, tmp_path: Path) -> None:
    seed = random.SystemRandom().getrandbits(32)
    print(f"seed {seed}")
    rng = random.Random(seed)
    path, expectation = tmp_path / "store", Expectation(acks_last=True)
    for early in deaths(rng, KILLS, EARLY, until=lambda: len(expectation.confirmed) > KILLS):
        child = forge.start("tests.crash.queue_workload:run", str(path), rng.getrandbits(32))
        ride(child, expectation, rng, early=early)
    for line in forge.run("tests.crash.queue_workload:check", str(path)):
        expectation.receive_line(line)
    expectation.check()
    assert expectation.opened > KILLS // 3
    assert len(expectation.confirmed) > KILLS


@pytest.mark.spec("C6", "E10")
@pytest.mark.promise("P1", "P2")
@pytest.mark.parametrize("tails", [Tails.CUT, Tails.TORN])
def test_power_loss_keeps_confirmed_messages_once_and_counts_exact(forge: Forge, tmp_path: Path, tails: Tails) -> None:
    seed = random.SystemRandom().getrandbits(32)
    print(f"seed {seed}")
    rng = random.Random(seed)
    path, expectation = tmp_path / "store-0", Expectation(acks_last=False)
    for number, early in enumerate(deaths(rng, LOSSES, EARLY)):
        disk = PowerLoss(path, tmp_path / f"disk-{number}")
        child = forge.start("tests.crash.queue_workload:run", str(path), rng.getrandbits(32), shim=disk.shim())
        ride(child, expectation, rng, early=early)
        left = tmp_path / f"store-{number + 1}"
        disk.play(left, tails, rng)
        remove(path)
        remove(tmp_path / f"disk-{number}")
        path = left
    for line in forge.run("tests.crash.queue_workload:check", str(path)):
        expectation.receive_line(line)
    expectation.check()
    assert expectation.opened > 1
