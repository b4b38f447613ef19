"""Streams in the commit log through kill -9 and power loss, at both levels of durability."""

from __future__ import annotations

import os
import random
from pathlib import Path

import pytest
from tests.crash.harness import Forge, PowerLoss, Tails, remove
from tests.crash.log_workload import Expectation, ride

from basaltmq.durability import Durability

KILLS = 8
LOSSES = 5


@pytest.mark.spec("B6", "D3")
@pytest.mark.promise("P1", "P3", "P6", "P10")
def test_kill_9_keeps_confirmed_records_and_the_index_matches_the_log(forge: Forge, tmp_path: Path) -> None:
    seed = random.SystemRandom().getrandbits(32)
    print(f"seed {seed}")
    rng = random.Random(seed)
    expectation = Expectation((Durability.SYNCED, Durability.WRITTEN))
    path = tmp_path / "base"
    path.mkdir()
    for _ in range(KILLS):
        ride(forge.start("tests.crash.log_workload:run", str(path), rng.getrandbits(32)), expectation, rng)
    _check(forge, path, expectation)


@pytest.mark.spec("B6", "D3")
@pytest.mark.promise("P1", "P3", "P7", "P10")
@pytest.mark.parametrize("tails", Tails)
def test_power_loss_keeps_synced_records(forge: Forge, tmp_path: Path, tails: Tails) -> None:
    seed = random.SystemRandom().getrandbits(32)
    print(f"seed {seed}")
    rng = random.Random(seed)
    expectation = Expectation((Durability.SYNCED,))
    path = tmp_path / "base-0"
    path.mkdir()
    for number in range(LOSSES):
        disk = PowerLoss(path, tmp_path / f"disk-{number}")
        child = forge.start("tests.crash.log_workload:run", str(path), rng.getrandbits(32), shim=disk.shim())
        ride(child, expectation, rng)
        left = tmp_path / f"base-{number + 1}"
        disk.play(left, tails, rng)
        remove(path)
        remove(tmp_path / f"disk-{number}")
        path = left
    _check(forge, path, expectation)


@pytest.mark.promise("P3", "P9")
@pytest.mark.parametrize("is_inside", [True, False], ids=["inside a frame", "at a frame"])
@pytest.mark.parametrize("is_last", [True, False], ids=["no frame follows", "frames follow"])
def test_a_torn_segment_that_was_never_synced_is_no_loss_after_later_crashes(
    forge: Forge, tmp_path: Path, is_inside: bool, is_last: bool
) -> None:
    """A power loss tears it while a later segment survives. Later starts see the gap, but nothing durable was lost."""

    def killed(workload: str) -> str:
        child = forge.start(f"tests.crash.log_workload:{workload}", str(tmp_path))
        line = next(iter(child.lines(timeout_s=60)))
        child.kill()
        return line

    killed("run_unsynced")
    _, segment, *later = sorted((tmp_path / "log" / "0000").glob("*.log"))
    os.truncate(segment, segment.stat().st_size // 2 if is_inside else 0)
    for each in later if is_last else ():
        os.truncate(each, 0)
    found = [killed("run_recovered").split(" ") for _ in range(3)]
    assert [each[0] for each in found[1:]] == ["0", "0"], "losses"
    first = int(found[0][1])
    assert [int(each[1]) for each in found] == [first, first + 1, first + 2], "an offset was skipped"


@pytest.mark.spec("D3")
@pytest.mark.promise("P6", "P9")
@pytest.mark.parametrize("tails", Tails)
def test_power_loss_index_ahead_of_its_log_is_rolled_back_without_a_rebuild(
    forge: Forge, tmp_path: Path, tails: Tails
) -> None:
    seed = random.SystemRandom().getrandbits(32)
    print(f"seed {seed}")
    path = tmp_path / "base"
    path.mkdir()
    disk = PowerLoss(path, tmp_path / "disk")
    child = forge.start("tests.crash.log_workload:run_ahead", str(path), seed, shim=disk.shim())
    marks: dict[str, int] = {}
    try:
        for line in child.lines(timeout_s=60):
            name, _, position = line.partition(" ")
            marks[name] = int(position)
            if name == "ahead":
                break
    finally:
        child.kill()
        child.close()
    left = tmp_path / "left"
    disk.play(left, tails, random.Random(seed))
    said = forge.run("tests.crash.log_workload:check_taken_back", str(left))
    end = next(int(line.split()[1]) for line in said if line.startswith("end "))
    assert marks["synced"] <= end <= marks["ahead"]
    assert end < marks["ahead"] or tails is Tails.TORN
    assert "built again" not in said
    assert "index same" in said, "\n".join(line for line in said if line.startswith("differs"))


def _check(forge: Forge, path: Path, expectation: Expectation) -> None:
    checked = expectation.checks
    assert checked, "every child was killed before it had opened"
    said = forge.run("tests.crash.log_workload:check", str(path))
    for line in said:
        expectation.receive_line(line)
    assert expectation.checks == checked + 1
    differences = [line for line in said if line.startswith("differs")]
    print("\n".join(differences))
    assert not differences
    assert "index same" in said
