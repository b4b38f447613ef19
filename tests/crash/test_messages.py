"""The message store after kill -9 and power loss: confirmed stays, ids are used once, prepared branches hold."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
from tests.crash.harness import Child, Forge, PowerLoss, Tails, deaths, listen_and_kill, remove
from tests.fixtures.messages_crash import Expectation

KILLS = 12
LOSSES = 6
EARLY = 0.2


def ride(child: Child, expectation: Expectation, rng: random.Random, *, early: bool) -> None:
    """Listen to a child and kill it while it recovers or works."""
    listen_and_kill(child, expectation.hear, rng, early=early, early_s=0.3, late_s=0.5)


@pytest.mark.spec("A4", "A5", "A6", "A12")
@pytest.mark.promise("P1", "P2")
def test_after_kill_9_confirmed_messages_and_prepared_branches_are_there_and_no_id_is_used_twice(
    forge: Forge, tmp_path: Path
) -> None:
    seed = random.SystemRandom().getrandbits(32)
    print(f"seed {seed}")
    rng = random.Random(seed)
    path, expectation = tmp_path / "store", Expectation()
    for early in deaths(rng, KILLS, EARLY, until=lambda: len(expectation.stored) > KILLS):
        child = forge.start("tests.fixtures.messages_crash:run", str(path), rng.getrandbits(32))
        ride(child, expectation, rng, early=early)
    for line in forge.run("tests.fixtures.messages_crash:check", str(path)):
        expectation.hear(line)
    assert expectation.checks > KILLS // 3
    assert len(expectation.stored) > KILLS


@pytest.mark.spec("A4", "A5", "A6", "A12")
@pytest.mark.promise("P1", "P2")
@pytest.mark.parametrize("tails", [Tails.CUT, Tails.TORN])
def test_after_power_loss_confirmed_messages_and_prepared_branches_are_there_and_no_id_is_used_twice(
    forge: Forge, tmp_path: Path, tails: Tails
) -> None:
    seed = random.SystemRandom().getrandbits(32)
    print(f"seed {seed}")
    rng = random.Random(seed)
    path, expectation = tmp_path / "store-0", Expectation()
    for number, early in enumerate(deaths(rng, LOSSES, EARLY)):
        disk = PowerLoss(path, tmp_path / f"disk-{number}")
        child = forge.start("tests.fixtures.messages_crash:run", str(path), rng.getrandbits(32), shim=disk.shim())
        ride(child, expectation, rng, early=early)
        left = tmp_path / f"store-{number + 1}"
        disk.play(left, tails, rng)
        remove(path)
        remove(tmp_path / f"disk-{number}")
        path = left
    for line in forge.run("tests.fixtures.messages_crash:check", str(path)):
        expectation.hear(line)
    assert expectation.checks > 1
