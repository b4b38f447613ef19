"""Damage to every kind of file: verify reports it, repair loses nothing else, and the store serves all data.

The places of the damage are random; a failure prints its seed. More cases by hand, and more than one damaged file each:

    SALVAGE_CASES=200 python -m pytest -q tests/crash/test_salvage.py -k many
"""

from __future__ import annotations

import os
import random
import shutil
from dataclasses import dataclass
from pathlib import Path

import msgspec
import pytest
from tests.crash.harness import Emit, Forge
from tests.crash.salvage_workload import KINDS, WAYS, Ledger, build, check, damage, repaired, reported, targets

from basaltmq.embedded.reconcile import reconcile_planes
from basaltmq.store.repair import repair
from basaltmq.store.salvage.naming import Loss
from basaltmq.store.salvage.swap import LOSSES
from basaltmq.store.salvage.verify import verify

CASES = int(os.environ.get("SALVAGE_CASES", "2"))
SMALL = ("OPTIONS", "IDENTITY", "STORE", "LOCK", "SEALS", "SYNCED", "CURRENT")
"""Files that can be recreated without any row. They are damaged together."""


@dataclass
class StoreCopies:
    closed: Path
    killed: Path
    ledger: Ledger

    def copy(self, state: str, target: Path) -> Path:
        return Path(shutil.copytree(getattr(self, state), target))


@pytest.fixture(scope="module")
def store_copies(tmp_path_factory: pytest.TempPathFactory) -> StoreCopies:
    home = tmp_path_factory.mktemp("salvage")
    return StoreCopies(home / "closed", home / "killed", build(home / "closed", home / "killed", seed=1))


@pytest.fixture
def rng() -> random.Random:
    seed = random.SystemRandom().getrandbits(32)
    print(f"seed {seed}")
    return random.Random(seed)


@pytest.mark.promise("P1", "P6", "P7", "P10")
@pytest.mark.parametrize("state", ["closed", "killed"])
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("kind", ["messages", "tables", "blob", "body", "places", "MANIFEST", "wal", "small"])
def test_damage_is_reported_and_repair_loses_nothing_else(
    store_copies: StoreCopies, tmp_path: Path, rng: random.Random, kind: str, way: str, state: str
) -> None:
    path = store_copies.copy(state, tmp_path / "store")
    if kind == "small":
        files = [file for each in SMALL for file in targets(path, each)]
    else:
        families = [each for each in KINDS if each not in SMALL] if kind == "tables" else [kind]
        chosen = targets(path, rng.choice(families))
        if not chosen:
            pytest.skip("a store that was closed has nothing in its log")
        files = [rng.choice(chosen)]
    content = {file: file.read_bytes() for file in files}
    done = [damage(file, way, rng) for file in files]
    print(done)
    faults = verify(path)
    for file in files if way != "flip" else ():
        if file.exists() and file.read_bytes().strip() == content[file].strip():
            # Only the line end of a text file is missing.
            continue
        # Without SEALS the other small files have no checksum, and RocksDB does not need them.
        if kind != "small" or file.name in ("STORE", "CURRENT"):
            assert any(file.name in fault for fault in faults), faults
    outcome = repaired(path)
    assert outcome.remaining == []
    losses = reported(outcome)
    messages, records = check(path, store_copies.ledger, losses)
    print(f"{messages} messages and {records} records are lost")
    if kind == "small":
        assert (messages, records, losses) == (0, 0, [])
    elif kind == "MANIFEST":
        assert (messages, records) == (0, 0)
    elif way == "flip":
        # A table block has 16 KiB, so the last block of a small table has rows of several queues.
        assert messages < len(store_copies.ledger.messages) // 2


@pytest.mark.promise("P1", "P6", "P7", "P10")
@pytest.mark.parametrize("case", range(CASES))
def test_many_kinds_of_damage_together(
    store_copies: StoreCopies, tmp_path: Path, rng: random.Random, case: int
) -> None:
    state = rng.choice(["closed", "killed"])
    path = store_copies.copy(state, tmp_path / "store")
    done = []
    for _ in range(rng.randint(2, 3)):
        files = targets(path, rng.choice(KINDS))
        if files:
            done.append(damage(rng.choice(files), rng.choice(WAYS), rng))
    print(state, done)
    outcome = repaired(path)
    assert outcome.remaining == []
    check(path, store_copies.ledger, reported(outcome))


def run_repair(emit: Emit, path: str) -> None:
    """Repair a store, and report before each visible step."""
    rename = os.rename

    def reported_rename(source: str, target: str) -> None:
        emit("rename")
        rename(source, target)

    os.rename = reported_rename  # type: ignore[assignment]
    repair(Path(path), reconcile=reconcile_planes, progress=lambda *_: emit("copied"))


@pytest.mark.promise("P7")
def test_killed_repair_leaves_the_old_or_the_repaired_store(
    store_copies: StoreCopies, tmp_path: Path, rng: random.Random, forge: Forge
) -> None:
    path = store_copies.copy("killed", tmp_path / "store")
    table = max(targets(path, "messages"), key=lambda each: each.stat().st_size)
    print(damage(table, "flip", rng))
    damaged = table.read_bytes()
    for step in sorted(rng.sample(range(1, 120), 2)):
        child = forge.start("tests.crash.test_salvage:run_repair", str(path))
        for count, _ in enumerate(child.lines(timeout_s=60), 1):
            if count == step:
                break
        child.kill()
        kept = path / "quarantine" / "repair-1" / "kv" / table.name
        assert (kept if kept.exists() else table).read_bytes() == damaged, "the damaged files are kept"
    outcome = repaired(path)
    assert outcome.remaining == []
    (report,) = (path / "quarantine").glob(f"repair-*/{LOSSES}")
    losses = [msgspec.json.decode(line, type=Loss) for line in report.read_bytes().splitlines()]
    check(path, store_copies.ledger, losses)
