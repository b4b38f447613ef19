"""A virtual host after kill -9 and power loss under load."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
from tests.crash.harness import Forge, PowerLoss, Tails, deaths, remove
from tests.crash.queue_workload import Expectation, ride

KILLS = 8
LOSSES = 4
EARLY = 0.25


@pytest.mark.spec("E6", "E7", "E10")
@pytest.mark.promise("P1", "P2")
def test_kill_9_keeps_confirmed_messages_once_and_no_acked_ones(forge: Forge, tmp_path: Path) -> None:
    seed = random.SystemRandom().getrandbits(32)
    print(f"seed {seed}")
    rng = random.Random(seed)
    path, expectation = tmp_path / "store", Expectation(acks_last=True)
    for early in deaths(rng, KILLS, EARLY, until=lambda: len(expectation.confirmed) > KILLS):
        child = forge.start("tests.crash.broker_workload:run", str(path), rng.getrandbits(32))
        ride(child, expectation, rng, early=early)
    for line in forge.run("tests.crash.broker_workload:check", str(path)):
        expectation.receive_line(line)
    expectation.check()
    assert expectation.opened > KILLS // 3
    assert len(expectation.confirmed) > KILLS


@pytest.mark.spec("E6", "E10")
@pytest.mark.promise("P1", "P2")
def test_power_loss_keeps_confirmed_messages_queues_and_bindings(forge: Forge, tmp_path: Path) -> None:
    seed = random.SystemRandom().getrandbits(32)
    print(f"seed {seed}")
    rng = random.Random(seed)
    path, expectation = tmp_path / "store-0", Expectation(acks_last=False)
    for number, early in enumerate(deaths(rng, LOSSES, EARLY)):
        disk = PowerLoss(path, tmp_path / f"disk-{number}")
        child = forge.start("tests.crash.broker_workload:run", str(path), rng.getrandbits(32), shim=disk.shim())
        ride(child, expectation, rng, early=early)
        left = tmp_path / f"store-{number + 1}"
        disk.play(left, Tails.TORN, rng)
        remove(path)
        remove(tmp_path / f"disk-{number}")
        path = left
    for line in forge.run("tests.crash.broker_workload:check", str(path)):
        expectation.receive_line(line)
    expectation.check()
    assert expectation.opened > 0
