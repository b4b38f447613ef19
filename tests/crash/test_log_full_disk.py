"""A disk that is full, or that fails, at every place where the log writes: the segment, its ring, what lies between."""

from __future__ import annotations

import errno
from pathlib import Path

import pytest
from tests.crash.harness import Forge, Shim

SEGMENT = "*/log/0000/0*.log"
RING = "*/log/0000/RING"
SMALL, LARGE = 200, 4000
"""Frames that reach their segment when writers have been told, and those that are moved there meanwhile."""


def run(forge: Forge, tmp_path: Path, ops: str, pattern: str, code: int, *, half: bool, size: int) -> dict[str, str]:
    return child(forge, tmp_path, "fill", ops, pattern, code, int(half), size)


def child(forge: Forge, tmp_path: Path, what: str, *args: str | int) -> dict[str, str]:
    path = tmp_path / "home" / "base"
    path.mkdir(parents=True)
    shim = Shim.beside(path.parent)
    said = forge.run(f"tests.crash.log_faults:{what}", str(path), str(shim.control), *args, shim=shim)
    print("\n".join(said))
    return {name: rest for name, _, rest in (line.partition(" ") for line in said)}


@pytest.mark.promise("P1", "P11")
@pytest.mark.parametrize(
    ("ops", "pattern", "code", "half", "size"),
    [
        ("write,writev", SEGMENT, errno.ENOSPC, False, LARGE),
        ("write,writev", SEGMENT, errno.ENOSPC, True, SMALL),
        ("fdatasync", SEGMENT, errno.ENOSPC, False, LARGE),
        ("open", SEGMENT, errno.ENOSPC, False, LARGE),
        ("pwritev", RING, errno.EIO, True, LARGE),
    ],
)
def test_a_log_that_cannot_write_says_so_stops_and_has_all_that_was_confirmed_when_there_is_space(
    forge: Forge, tmp_path: Path, ops: str, pattern: str, code: int, half: bool, size: int
) -> None:
    said = run(forge, tmp_path, ops, pattern, code, half=half, size=size)
    assert said["failed"] == "2", said
    meaning = "no space left for" if code == errno.ENOSPC else "Input/output error"
    assert meaning in said["first"], said
    assert "/log/0000" in said["first"], said
    for name in ("then", "healed"):
        assert said[name].startswith("StorePoisonedError"), said
        assert "stopped after an I/O error" in said[name]
        assert meaning in said[name], said
    assert said["lost"] == "0", said
    assert said["damages"] == "0", said
    assert said["goes"] == "on True", said


@pytest.mark.promise("P1")
@pytest.mark.parametrize("pattern", ["*/log/0000/COMMITTED", "*/log/0000/RING.new"])
def test_a_log_does_without_what_is_only_for_speed_or_for_others(forge: Forge, tmp_path: Path, pattern: str) -> None:
    said = run(forge, tmp_path, "write,pwrite", pattern, errno.ENOSPC, half=False, size=LARGE)
    assert said["failed"] == "0", said
    assert said["closing"] == "fine", said
    assert said["lost"] == "0"
    assert said["goes"] == "on True"


@pytest.mark.promise("P1", "P3")
def test_what_a_failed_sync_was_about_is_written_again_by_the_next_start(forge: Forge, tmp_path: Path) -> None:
    # It is in the page cache, is shown, and no later sync would bring it to the disk.
    said = child(forge, tmp_path, "doubt", LARGE)
    assert "Input/output error" in said["sync"], said
    assert LARGE <= int(said["again"]) < 2 * LARGE, said
    assert said["lost"] == "0", said
    assert said["damages"] == "0", said
    assert said["goes"] == "on True", said
