"""A full disk, or a failing sync, at every place where a store writes."""

from __future__ import annotations

import errno
from pathlib import Path

import pytest
from tests.crash.harness import Forge, Shim

WRITES = "write,pwrite,writev"
SYNCS = "fdatasync,fsync"


def by_name(said: list[str]) -> dict[str, str]:
    return {name: rest for name, _, rest in (line.partition(" ") for line in said)}


def run(forge: Forge, path: Path, function: str, *args: str | int) -> dict[str, str]:
    shim = Shim(path.parent, path.parent.with_name(path.parent.name + ".control"))
    said = forge.run(f"tests.crash.faults:{function}", str(path), str(shim.control), *args, shim=shim)
    return by_name(said)


@pytest.mark.promise("P1", "P2")
@pytest.mark.parametrize(
    ("what", "ops", "pattern", "half"),
    [
        ("commit", WRITES, "*/kv/*.log", False),
        ("commit", WRITES, "*/kv/*.log", True),
        ("commit", SYNCS, "*/kv/*.log", False),
        ("flush", WRITES, "*/kv/*.sst", False),
        ("flush", WRITES, "*/kv/*.blob", True),
        ("flush", "open", "*/kv/*.sst", False),
        ("flush", WRITES, "*/kv/MANIFEST-*", True),
        ("flush", SYNCS, "*/kv/MANIFEST-*", False),
        ("close", WRITES, "*/kv/*.sst", False),
    ],
)
def test_full_disk_poisons_the_store_and_loses_nothing_confirmed(
    forge: Forge, tmp_path: Path, what: str, ops: str, pattern: str, half: bool
) -> None:
    path = tmp_path / "home" / "store"
    path.parent.mkdir()
    said = run(forge, path, "fill", what, ops, pattern, errno.ENOSPC, int(half))
    if what == "close":
        assert said["closing"].startswith("DiskFullError"), said
    else:
        assert said[what].startswith("DiskFullError"), said
        assert said["get"].startswith("StorePoisonedError"), said
        assert said["write"].startswith("StorePoisonedError"), said
        assert said["closing"] == "fine", said
    assert str(path) in said["closing" if what == "close" else what]
    assert said["lost"] == "0", said
    assert said["faults"] == "[]", said


@pytest.mark.promise("P1")
@pytest.mark.spec("A10")
@pytest.mark.parametrize("pattern", ["*/copy.partial*", "*/copy.partial*/CHECKSUMS*", "*/copy.partial*/MANIFEST-*"])
def test_full_disk_during_a_checkpoint_leaves_no_partial_backup(forge: Forge, tmp_path: Path, pattern: str) -> None:
    path = tmp_path / "home" / "store"
    path.parent.mkdir()
    said = run(forge, path, "fill", "checkpoint", WRITES, pattern, errno.ENOSPC, 1)
    assert said["checkpoint"].startswith("DiskFullError"), said
    assert said["get"] == said["write"] == said["closing"] == "fine", said
    assert said["beside"] == "store"
    assert said["lost"] == "0"
    assert said["faults"] == "[]"


@pytest.mark.spec("A10")
def test_full_disk_during_a_restore_leaves_nothing_and_it_can_be_repeated(forge: Forge, tmp_path: Path) -> None:
    path = tmp_path / "home" / "store"
    path.parent.mkdir()
    said = run(forge, path, "fill_while_restoring")
    assert said["restore"].startswith("DiskFullError"), said
    assert said["beside"] == "copy store"
    assert said["again"] == "fine"
    assert said["lost"] == "0"


@pytest.mark.promise("P1")
@pytest.mark.parametrize(
    ("ops", "pattern"),
    [
        (WRITES, "*/kv/MANIFEST-*"),
        (WRITES, "*/kv/*.sst"),
        (SYNCS, "*/kv/*.sst"),
        ("open", "*/kv/*"),
        (WRITES, "*/LOCK"),
        (f"{WRITES},open", "*"),
    ],
)
def test_full_disk_during_open_is_reported_and_open_works_with_space(
    forge: Forge, tmp_path: Path, ops: str, pattern: str
) -> None:
    path = tmp_path / "home" / "store"
    path.parent.mkdir()
    said = run(forge, path, "fill_while_opening", ops, pattern)
    assert said["open"].startswith("DiskFullError"), said
    assert said["lost"] == "0", said
    assert said["faults"] == "[]", said


@pytest.mark.promise("P1")
def test_failed_sync_fails_its_waiters_and_poisons_the_store(forge: Forge, tmp_path: Path) -> None:
    path = tmp_path / "home" / "store"
    path.parent.mkdir()
    shim = Shim(path.parent, tmp_path / "control")
    said = forge.run("tests.crash.faults:fail_one_sync", str(path), str(shim.control), shim=shim)
    waiters = [line for line in said if line.startswith("waiter ")]
    assert len(waiters) == 8
    # No waiter gets a success. The first group gets the disk's error, later ones that of the poisoned store.
    assert all(line.startswith(("waiter StorageError", "waiter StorePoisonedError")) for line in waiters), waiters
    assert any(line.startswith("waiter StorageError") for line in waiters), waiters
    reported = by_name(said)
    assert reported["after"].startswith("StorePoisonedError")
    assert reported["lost"] == "0"
    assert reported["faults"] == "[]"


@pytest.mark.promise("P1")
def test_io_error_during_a_wal_write_poisons_and_loses_nothing_confirmed(forge: Forge, tmp_path: Path) -> None:
    path = tmp_path / "home" / "store"
    path.parent.mkdir()
    said = run(forge, path, "fill", "commit", WRITES, "*/kv/*.log", errno.EIO, 1)
    assert said["commit"].startswith("StorageError"), said
    assert said["get"].startswith("StorePoisonedError")
    assert said["lost"] == "0"
    assert said["faults"] == "[]"
