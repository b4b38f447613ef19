"""Several files of a killed store are damaged together: verify still names them, and repair still helps."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from click.testing import CliRunner
from tests.crash.test_lost_tail import killed

import basaltmq
from basaltmq.cli.main import main
from basaltmq.errors import CorruptionError
from basaltmq.store.integrity.synced import SYNCED

pytestmark = [pytest.mark.promise("P3", "P7"), pytest.mark.spec("B6")]


def run(path: Path, *words: str) -> tuple[int, str]:
    found = CliRunner().invoke(main, ["--data-dir", str(path), "store", *words])
    assert found.exception is None or isinstance(found.exception, SystemExit), found.output
    return found.exit_code, found.output


def test_verify_names_damage_of_the_log_in_a_store_that_does_not_open(tmp_path: Path) -> None:
    path = tmp_path / "data"
    killed(path, batches=3)
    (path / "kv" / "CURRENT").unlink()
    next((path / "log" / "0000").glob("*.log")).unlink()
    code, said = run(path, "verify")
    assert code == 2
    assert "CURRENT" in said
    assert "confirmed records are lost" in said


@pytest.mark.parametrize("kept_bytes", [60, 120])
def test_a_manifest_that_is_cut_after_its_first_records_is_rebuilt(tmp_path: Path, kept_bytes: int) -> None:
    path = tmp_path / "data"
    following = killed(path, batches=3)
    os.truncate(next((path / "kv").glob("MANIFEST-*")), kept_bytes)
    (path / "kv" / "CURRENT").unlink()
    code, said = run(path, "repair", "--accept-loss")
    assert code == 0, said
    with basaltmq.open(path) as db:
        assert {topic: db.topic(topic).append(b"new").offset for topic in following} == following


def test_offsets_in_a_lost_wal_are_not_assigned_again(tmp_path: Path) -> None:
    """The records of the engine `rocksdb` are in the WAL only."""
    path = tmp_path / "data"
    with basaltmq.open(path) as db:
        for _ in range(5):
            db.topic("rows", engine="rocksdb").append(b"old")
    confirmed = killed(path, batches=3, topics=("rows",))["rows"]
    for wal in (path / "kv").glob("*.log"):
        wal.unlink()
    (path / SYNCED).unlink()
    code, said = run(path, "repair", "--accept-loss")
    assert code == 0, said
    assert "confirmed writes" in said
    with basaltmq.open(path) as db:
        topic = db.topic("rows")
        first = topic.append(b"new").offset
        assert first > confirmed
        assert [record.value for record in topic.read()] == [b"old"] * 5 + [b"new"]
        assert topic.append(b"newer").offset == first + 1


def test_a_lane_marker_that_was_exchanged_with_another_file_is_damaged(tmp_path: Path) -> None:
    path = tmp_path / "data"
    following = killed(path, batches=3)
    marker = path / "log" / "0000" / "LANE"
    marker.write_bytes((path / "STORE").read_bytes())
    run(path, "verify")
    with basaltmq.open(path) as db:
        assert {topic: db.topic(topic).append(b"new").offset for topic in following} == following
    (marker.parent / "LANE.copy").unlink()
    with pytest.raises(CorruptionError, match="LANE does not match its checksum"):
        basaltmq.open(path)
