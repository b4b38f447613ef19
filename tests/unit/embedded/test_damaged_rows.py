"""An embedded program on a store with damaged queue rows."""

from __future__ import annotations

import random
from collections import Counter
from pathlib import Path

import pytest
from click.testing import CliRunner
from tests.unit.queues.damaged_rig import (
    ACKED,
    BY_VALUE,
    DAMAGES,
    LATER_NS,
    SHARED,
    Damage,
    Harness,
    Row,
    damages_of,
    drain,
)

import basaltmq
from basaltmq.cli.main import main
from basaltmq.embedded.database import Settings
from basaltmq.store.families import Family
from basaltmq.store.open import open_store

pytestmark = [pytest.mark.spec("A12"), pytest.mark.promise("P7")]

SETTINGS = Settings(clock_ns=lambda: LATER_NS, clock_ms=lambda: LATER_NS // 1_000_000)


@pytest.fixture(scope="module")
def harness() -> Harness:
    return Harness()


def damaged_store(harness: Harness, path: Path, damaged: list[tuple[Row, Damage]]) -> Path:
    store = open_store(path)
    try:
        harness.fill(store, damaged)
        store.sync()
    finally:
        store.close()
    return path


@pytest.mark.parametrize("seed", range(4))
def test_program_reads_all_undamaged_messages(harness: Harness, tmp_path: Path, seed: int) -> None:
    rng = random.Random(seed)
    chosen = rng.sample(harness.of(*BY_VALUE), 12)
    at_risk = harness.at_risk(chosen)
    path = damaged_store(harness, tmp_path / "data", [(row, rng.choice(damages_of(row[0]))) for row in chosen])
    with basaltmq.open(path, create=False, settings=SETTINGS) as db:
        found = Counter(drain(db.queue_plane, LATER_NS))
        records = db.queue_plane.damage.records()
        per_queue = sum(queue.stats()["quarantined"] for queue in db.queues())
    for payload in harness.payloads:
        wanted = 2 if payload.startswith(SHARED) else 1
        assert found[payload] == wanted or payload in at_risk, payload[:40]
    assert set(found) <= harness.payloads | {ACKED}
    assert per_queue <= len(records)
    with basaltmq.open(path, create=False, settings=SETTINGS) as db:
        assert db.queue_plane.damage.records() == records
        assert drain(db.queue_plane, LATER_NS) == []


def test_commands_show_export_and_delete_quarantined_rows(harness: Harness, tmp_path: Path) -> None:
    row = next(row for row in harness.of(Family.MESSAGES) if row[1].startswith(b"\0\5plain"))
    path = damaged_store(harness, tmp_path / "data", [(row, DAMAGES["truncated"])])

    def run(*arguments: str) -> str:
        done = CliRunner().invoke(main, ["--data-dir", str(path), *arguments])
        assert done.exit_code in (0, 2), done.output
        return done.output

    before = run("store", "verify")
    assert row[1][:20].hex() in before, "verify reports a damaged row that was not read yet"
    assert "1 rows in quarantine" in run("queue", "restart", "plain")
    assert '"quarantined":1' in run("queue", "stats", "plain", "--json").replace(" ", "")
    listed = run("queue", "quarantine", "list", "--queue", "plain")
    assert row[1][-16:].hex() in listed
    record_id = next(word for word in listed.split() if word[:3].isdecimal() and "-" in word)
    assert record_id in run("store", "verify")
    assert row[1][-16:].hex() in run("queue", "quarantine", "show", record_id)
    assert run("queue", "quarantine", "export").count("\n") == 1
    assert "deleted" in run("queue", "quarantine", "delete", record_id, "--yes")
    assert "the quarantine is empty" in run("queue", "quarantine", "list")
    assert record_id not in run("store", "verify")
