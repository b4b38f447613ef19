"""A killed process whose store then loses SYNCED and its WAL: the open refuses, and a repair names the loss."""

from __future__ import annotations

import logging
import os
from pathlib import Path

import pytest
from click.testing import CliRunner
from tests.crash.test_lost_tail import killed

import basaltmq
from basaltmq.cli.main import main
from basaltmq.errors import CorruptionError
from basaltmq.store.integrity.synced import SYNCED

pytestmark = pytest.mark.promise("P1", "P7")


def wal_files(path: Path) -> list[Path]:
    return sorted((path / "kv").glob("*.log"))


def run(path: Path, *words: str) -> tuple[int, str]:
    found = CliRunner().invoke(main, ["--data-dir", str(path), "store", *words])
    return found.exit_code, found.output


@pytest.mark.parametrize("is_damaged", [False, True], ids=["removed", "damaged"])
def test_a_wal_that_is_lost_with_synced_is_noticed(tmp_path: Path, is_damaged: bool) -> None:
    path = tmp_path / "data"
    killed(path, batches=3)
    if is_damaged:
        (path / SYNCED).write_bytes(os.urandom(4096))
    else:
        (path / SYNCED).unlink()
    assert wal_files(path)
    for wal in wal_files(path):
        wal.unlink()
    before = sorted(each.name for each in (path / "kv").iterdir())
    with pytest.raises(CorruptionError, match=r"SYNCED and .*\.log are missing.*restore a backup, or run repair"):
        basaltmq.open(path)
    assert sorted(each.name for each in (path / "kv").iterdir()) == before
    code, said = run(path, "verify")
    assert code == 2
    assert "SYNCED and" in said
    code, said = run(path, "repair", "--accept-loss")
    assert "confirmed writes" in said
    assert code == 0, said
    with basaltmq.open(path) as db:
        assert db.topic("fresh").append(b"x").offset == 0


def test_the_newest_wal_that_is_lost_with_synced_is_noticed(tmp_path: Path) -> None:
    """An older WAL file is still there, because one family was not flushed."""
    path = tmp_path / "data"
    killed(path, batches=3)
    older = wal_files(path)[-1]
    raw = older.read_bytes()
    killed(path, batches=3)
    older.write_bytes(raw)
    wal_files(path)[-1].unlink()
    (path / SYNCED).unlink()
    with pytest.raises(CorruptionError, match="SYNCED and"):
        basaltmq.open(path)


def test_repair_names_records_of_lost_topics_but_not_of_deleted_ones(tmp_path: Path) -> None:
    path = tmp_path / "data"
    with basaltmq.open(path) as db:
        db.topic("deleted").append([b"x"] * 10)
        db.delete_topic("deleted")
    killed(path, batches=3)
    for wal in wal_files(path):
        wal.unlink()
    code, said = run(path, "repair", "--accept-loss")
    assert code == 0, said
    lost = [line.split(": ", 1)[1] for line in said.splitlines() if "of an unknown name" in line]
    assert lost == ["a partition is lost: shard 2, offsets 0 to 8", "a partition is lost: shard 3, offsets 0 to 2"]
    assert "nothing to repair" in run(path, "repair", "--accept-loss")[1]


def test_synced_alone_is_written_again_and_reported(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "data"
    following = killed(path, batches=3)
    (path / SYNCED).unlink()
    with caplog.at_level(logging.WARNING), basaltmq.open(path) as db:
        assert db.topic("busy").append(b"new").offset == following["busy"]
    assert "compare with a backup" in caplog.text
    caplog.clear()
    (path / SYNCED).unlink()
    with caplog.at_level(logging.WARNING), basaltmq.open(path):
        pass
    assert "compare with a backup" not in caplog.text, "a store that was closed cleanly needs no WAL"


def test_a_power_loss_at_the_first_open_is_no_damage(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """The content of SYNCED was not on disk yet: it is all zeros."""
    path = tmp_path / "data"
    killed(path, batches=3)
    (path / SYNCED).write_bytes(bytes(4096))
    with caplog.at_level(logging.WARNING), basaltmq.open(path):
        pass
    assert not caplog.text
