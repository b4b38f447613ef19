"""kill -9 and power loss while streams are written, trimmed, committed, created and deleted."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
from tests.crash.harness import Forge, PowerLoss, Tails, deaths, remove
from tests.crash.stream_workload import StreamExpectation, ride

KILLS = 10
LOSSES = 8
EARLY = 0.2
ENGINES = ("rocksdb", "segment")


@pytest.mark.spec("B6", "B7", "B8")
@pytest.mark.promise("P1", "P2", "P3", "P10")
@pytest.mark.parametrize("engine", ENGINES)
def test_kill_9_keeps_written_records_and_reuses_no_offset(forge: Forge, tmp_path: Path, engine: str) -> None:
    seed = random.SystemRandom().getrandbits(32)
    print(f"seed {seed}")
    rng = random.Random(seed)
    path = tmp_path / "store"
    expectation = StreamExpectation(written_survives=True)
    for early in deaths(rng, KILLS, EARLY):
        child = forge.start("tests.crash.stream_workload:run", str(path), engine, rng.getrandbits(32))
        ride(child, expectation, rng, early=early)
    checked = expectation.checks
    assert checked >= KILLS // 3, "most children were killed before they had opened"
    for line in forge.run("tests.crash.stream_workload:check", str(path)):
        expectation.receive_line(line)
    assert expectation.checks == checked + 1


@pytest.mark.spec("B6", "B7", "B8")
@pytest.mark.promise("P1", "P2", "P3", "P10")
@pytest.mark.parametrize("engine", ["rocksdb", "segment"])
@pytest.mark.parametrize("tails", [Tails.CUT, Tails.TORN])
def test_power_loss_keeps_synced_and_visible_records(forge: Forge, tmp_path: Path, engine: str, tails: Tails) -> None:
    seed = random.SystemRandom().getrandbits(32)
    print(f"seed {seed}")
    rng = random.Random(seed)
    path = tmp_path / "store-0"
    expectation = StreamExpectation(written_survives=False)
    for number, early in enumerate(deaths(rng, LOSSES, EARLY)):
        disk = PowerLoss(path, tmp_path / f"disk-{number}")
        child = forge.start("tests.crash.stream_workload:run", str(path), engine, rng.getrandbits(32), shim=disk.shim())
        ride(child, expectation, rng, early=early)
        left = tmp_path / f"store-{number + 1}"
        disk.play(left, tails, rng)
        remove(path)
        remove(tmp_path / f"disk-{number}")
        path = left
    checked = expectation.checks
    assert checked >= LOSSES // 4, "most children were killed before they had opened"
    for line in forge.run("tests.crash.stream_workload:check", str(path)):
        expectation.receive_line(line)
    assert expectation.checks == checked + 1
