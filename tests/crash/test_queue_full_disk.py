"""Queues on a full disk: the failing call reports it, later calls are refused, a reopen finds all confirmed data."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.crash.harness import Forge, Shim
from tests.crash.test_full_disk import SYNCS, WRITES, by_name


@pytest.mark.promise("P1", "P2", "P8")
@pytest.mark.spec("A6", "C6", "E10")
@pytest.mark.parametrize(
    ("ops", "pattern", "half"),
    [
        (WRITES, "*/kv/*.log", False),
        (WRITES, "*/kv/*.log", True),
        (SYNCS, "*/kv/*.log", False),
        ("pwritev", "*/bodies/*.body", False),
        ("pwritev", "*/bodies/*.body", True),
        (SYNCS, "*/bodies/*.body", False),
    ],
)
def test_queues_on_a_full_disk_lose_nothing_confirmed(
    forge: Forge, tmp_path: Path, ops: str, pattern: str, half: bool
) -> None:
    path = tmp_path / "home" / "store"
    path.parent.mkdir()
    shim = Shim(path.parent, path.parent.with_name("home.control"))
    said = by_name(
        forge.run("tests.crash.queue_faults:fill", str(path), str(shim.control), ops, pattern, int(half), shim=shim)
    )
    assert said["enqueue"].startswith("DiskFullError"), said
    for name in ("ack", "lease", "due", "decide", "healed"):
        assert said[name].startswith("StorePoisonedError"), (name, said)
    assert said["doubt"] == "1", said
    assert said["found"] == "True", said
    # The message of the failed enqueue was not confirmed. It may or may not exist.
    assert said["others"] in ("[]", "['too much']"), said
    assert said["faults"] == "[]", said
