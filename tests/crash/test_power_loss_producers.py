"""Idempotent producers after a power loss: batches in the log are duplicates, lost ones are accepted again."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
from tests.crash.harness import Forge, PowerLoss, Tails
from tests.crash.producer_workload import BATCHES

TIMEOUT_S = 60.0


class Machine:
    """One store used by several processes, each ended by a power loss."""

    def __init__(self, forge: Forge, folder: Path) -> None:
        self._forge = forge
        self._folder = folder
        self._losses = 0
        self.path = folder / "store-0"

    def until_the_power_goes(self, step: str, *args: str | int) -> list[str]:
        """Run a process until a power loss. Return its lines."""
        disk = PowerLoss(self.path, self._folder / f"disk-{self._losses}")
        child = self._forge.start(f"tests.crash.producer_workload:{step}", str(self.path), *args, shim=disk.shim())
        said = []
        for line in child.lines(TIMEOUT_S):
            said.append(line)
            if line == "ready":
                break
        child.kill()
        child.close()
        assert said[-1:] == ["ready"], "\n".join(said)
        self._losses += 1
        left = self._folder / f"store-{self._losses}"
        disk.play(left, Tails.CUT, random.Random(0))
        self.path = left
        return said[:-1]

    def reported(self, producer: int, first: int, last: int) -> list[str]:
        """Return the results of repeated batches."""
        (line,) = self._forge.run("tests.crash.producer_workload:resend", str(self.path), producer, first, last)
        return line.split()[1:]

    def begun(self, *, is_compacted: bool) -> int:
        (line,) = self.until_the_power_goes("begin", int(is_compacted))
        return int(line.split()[1])


@pytest.mark.promise("P1", "P2")
def test_compacted_batch_is_deduplicated_after_a_power_loss(forge: Forge, tmp_path: Path) -> None:
    machine = Machine(forge, tmp_path)
    producer = machine.begun(is_compacted=True)
    assert machine.until_the_power_goes("compact", producer) == [f"values {BATCHES - 1}"]
    assert machine.reported(producer, BATCHES - 2, BATCHES) == [str(BATCHES - 2), str(BATCHES - 1), "none"]


@pytest.mark.promise("P1", "P2")
def test_batch_with_a_lost_producer_row_is_deduplicated_after_compaction(forge: Forge, tmp_path: Path) -> None:
    machine = Machine(forge, tmp_path)
    producer = machine.begun(is_compacted=True)
    assert machine.until_the_power_goes("send", producer, "log") == []
    assert machine.until_the_power_goes("compact_again") == [f"values {BATCHES - 1}"]
    assert machine.reported(producer, BATCHES - 2, BATCHES) == [str(BATCHES - 2), str(BATCHES - 1), "none"]


@pytest.mark.promise("P1")
@pytest.mark.parametrize("are_others_first", [False, True])
def test_lost_batch_is_accepted_again_although_its_producer_row_exists(
    forge: Forge, tmp_path: Path, are_others_first: bool
) -> None:
    machine = Machine(forge, tmp_path)
    producer = machine.begun(is_compacted=False)
    assert machine.until_the_power_goes("send", producer, "rows") == []
    if are_others_first:
        assert machine.until_the_power_goes("others") == []
    assert machine.reported(producer, 0, 0) == ["none"]
