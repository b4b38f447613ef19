"""Transactions and branches over queues after kill -9 and power loss."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
from tests.crash.harness import Forge, PowerLoss, Tails, deaths, remove
from tests.crash.queue_branches import Transcript, ride

KILLS = 10
LOSSES = 5
EARLY = 0.2

pytestmark = [pytest.mark.spec("A5", "A6"), pytest.mark.promise("P1", "P2")]


def test_kill_9_keeps_every_message_in_one_place_and_decisions(forge: Forge, tmp_path: Path) -> None:
    seed = random.SystemRandom().getrandbits(32)
    print(f"seed {seed}")
    rng = random.Random(seed)
    path, story = tmp_path / "store", Transcript()
    for early in deaths(rng, KILLS, EARLY, until=lambda: story.decided and story.moved):
        child = forge.start("tests.crash.queue_branches:run", str(path), rng.getrandbits(32))
        ride(child, story, rng, early=early)
    for line in forge.run("tests.crash.queue_branches:check", str(path), rng.getrandbits(32)):
        story.receive_line(line)
    story.check()
    assert story.opened > KILLS // 3
    assert story.decided
    assert story.moved


@pytest.mark.parametrize("tails", [Tails.CUT, Tails.TORN])
def test_power_loss_keeps_every_message_in_one_place_and_decisions(forge: Forge, tmp_path: Path, tails: Tails) -> None:
    seed = random.SystemRandom().getrandbits(32)
    print(f"seed {seed}")
    rng = random.Random(seed)
    path, story = tmp_path / "store-0", Transcript()
    for number, early in enumerate(deaths(rng, LOSSES, EARLY)):
        disk = PowerLoss(path, tmp_path / f"disk-{number}")
        child = forge.start("tests.crash.queue_branches:run", str(path), rng.getrandbits(32), shim=disk.shim())
        ride(child, story, rng, early=early)
        left = tmp_path / f"store-{number + 1}"
        disk.play(left, tails, rng)
        remove(path)
        remove(tmp_path / f"disk-{number}")
        path = left
    for line in forge.run("tests.crash.queue_branches:check", str(path), rng.getrandbits(32)):
        story.receive_line(line)
    story.check()
    assert story.opened > 1
