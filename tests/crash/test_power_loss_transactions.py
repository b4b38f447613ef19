"""Kafka transactions after kill -9 and power loss: all or nothing, and nothing of an undecided one."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
from tests.crash.harness import Forge, PowerLoss, Tails, deaths, listen_and_kill, remove
from tests.crash.transaction_workload import TransactionExpectation

LOSSES = 3
EARLY = 0.2
EARLY_S = 0.3
LATE_S = 0.4


@pytest.mark.promise("P1", "P2")
def test_power_loss_keeps_committed_transactions_complete_and_no_others(forge: Forge, tmp_path: Path) -> None:
    seed = random.SystemRandom().getrandbits(32)
    print(f"seed {seed}")
    rng = random.Random(seed)
    path, expectation = tmp_path / "store-0", TransactionExpectation()
    for number, early in enumerate(deaths(rng, LOSSES, EARLY, until=lambda: len(expectation.committed) > LOSSES)):
        disk = PowerLoss(path, tmp_path / f"disk-{number}")
        child = forge.start("tests.crash.transaction_workload:run", str(path), rng.getrandbits(32), shim=disk.shim())
        listen_and_kill(child, expectation.receive_line, rng, early=early, early_s=EARLY_S, late_s=LATE_S)
        left = tmp_path / f"store-{number + 1}"
        disk.play(left, rng.choice([Tails.CUT, Tails.TORN]), rng)
        remove(path)
        remove(tmp_path / f"disk-{number}")
        path = left
    for line in forge.run("tests.crash.transaction_workload:check", str(path)):
        expectation.receive_line(line)
    print(f"{len(expectation.committed)} transactions committed, {expectation.opened} times opened")
    assert expectation.opened > 0
