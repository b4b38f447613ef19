"""A full or failing disk at every place where the log writes: segments, the ring, and moves between them."""

from __future__ import annotations

import errno
from pathlib import Path

import pytest
from tests.crash.harness import Forge, Shim

SEGMENT = "*/log/0000/0*.log"
RING = "*/log/0000/RING"
SMALL, LARGE = 200, 4000
"""Frames written to the segment after the confirmation, and frames moved there in the background."""


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
def test_log_on_a_full_disk_stops_and_keeps_confirmed_records(
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
def test_log_works_without_optional_files(forge: Forge, tmp_path: Path, pattern: str) -> None:
    said = run(forge, tmp_path, "write,pwrite", pattern, errno.ENOSPC, half=False, size=LARGE)
    assert said["failed"] == "0", said
    assert said["closing"] == "fine", said
    assert said["lost"] == "0"
    assert said["goes"] == "on True"


@pytest.mark.promise("P1", "P3")
def test_next_start_rewrites_the_data_of_a_failed_sync(forge: Forge, tmp_path: Path) -> None:
    # The data is visible in the page cache, but no later sync writes it to disk.
    said = child(forge, tmp_path, "doubt", LARGE)
    assert "Input/output error" in said["sync"], said
    assert LARGE <= int(said["again"]) < 2 * LARGE, said
    assert said["lost"] == "0", said
    assert said["damages"] == "0", said
    assert said["goes"] == "on True", said
