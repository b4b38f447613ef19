"""Repair: copied rows, reported losses, and the state after a crash in the middle."""

from __future__ import annotations

import contextlib
import os
import random
import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest

from basaltmq.errors import CorruptionError, DiskFullError, NotAStoreError, StoreNotFoundError
from basaltmq.store.batch import Batch
from basaltmq.store.directory import read_marker
from basaltmq.store.families import Family
from basaltmq.store.integrity.synced import SYNCED, Synced, read_synced
from basaltmq.store.integrity.wal import current_manifest, scan_log
from basaltmq.store.open import open_store
from basaltmq.store.repair import repair
from basaltmq.store.salvage import swap
from basaltmq.store.salvage.verify import verify

ROWS = 900


@pytest.fixture(scope="module")
def stores(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Return a closed store and a killed one. A third of the second's rows are only in the WAL."""
    home = tmp_path_factory.mktemp("stores")
    rng = random.Random(7)
    store = open_store(home / "closed")
    for step in range(3):
        batch = Batch()
        for number in range(step, ROWS, 3):
            batch.put(Family.MESSAGES, b"%05d" % number, rng.randbytes(200))
            batch.put(Family.MESSAGE_CONTENT, b"%05d" % number, rng.randbytes(5_000))
        store.write(batch)
        store.sync()
        if step < 2:
            store.flush()
    shutil.copytree(home / "closed", home / "killed")
    store.close()
    return {"closed": home / "closed", "killed": home / "killed"}


@pytest.fixture
def killed(stores: dict[str, Path], tmp_path: Path) -> Path:
    return Path(shutil.copytree(stores["killed"], tmp_path / "store"))


@pytest.fixture
def closed(stores: dict[str, Path], tmp_path: Path) -> Path:
    return Path(shutil.copytree(stores["closed"], tmp_path / "store"))


def keys_of(path: Path, family: Family = Family.MESSAGES) -> set[bytes]:
    store = open_store(path, create=False)
    try:
        return {key for key, _ in store.scan(family)}
    finally:
        store.close()


def log_of(path: Path) -> Path:
    (log,) = (each for each in (path / "kv").glob("*.log") if each.stat().st_size)
    return log


def flip(path: Path, at: int) -> None:
    data = bytearray(path.read_bytes())
    data[at] ^= 8
    path.write_bytes(data)


def tree(path: Path) -> dict[str, bytes]:
    found = {str(each.relative_to(path)): each.read_bytes() for each in path.rglob("*") if each.is_file()}
    found.pop("LOCK", None)
    return found


@pytest.mark.promise("P1", "P7")
@pytest.mark.parametrize("way", ["removed", "shortened"])
def test_a_wal_that_lost_confirmed_writes_is_refused_and_repair_reports_the_loss(killed: Path, way: str) -> None:
    log = log_of(killed)
    if way == "removed":
        log.unlink()
    else:
        os.truncate(log, log.stat().st_size // 2)
    before = tree(killed)
    with pytest.raises(CorruptionError, match=log.name):
        open_store(killed)
    assert tree(killed) == before
    assert any(log.name in line for line in verify(killed))
    outcome = repair(killed)
    assert any(loss.subject == "confirmed writes" and log.name in loss.text for loss in outcome.losses)
    assert verify(killed) == []
    assert len(keys_of(killed)) >= ROWS * 2 // 3


@pytest.mark.promise("P1")
def test_a_torn_tail_of_unconfirmed_writes_is_not_a_loss(stores: dict[str, Path], tmp_path: Path) -> None:
    path = Path(shutil.copytree(stores["killed"], tmp_path / "store"))
    store = open_store(path)
    batch = Batch()
    batch.put(Family.STATE, b"confirmed", b"")
    store.write(batch)
    store.sync()
    later = Batch()
    later.put(Family.STATE, b"later", b"x" * 100)
    store.write(later)
    shutil.copytree(path, tmp_path / "cut")
    store.close()
    log = max((tmp_path / "cut" / "kv").glob("*.log"))
    os.truncate(log, log.stat().st_size - 10)
    outcome = repair(tmp_path / "cut")
    assert outcome.losses == []
    assert outcome.kept is None, "nothing was copied"
    assert keys_of(tmp_path / "cut", Family.STATE) == {b"confirmed"}


@pytest.mark.promise("P7")
def test_a_manifest_that_ends_before_durable_records_is_named_and_repaired(killed: Path) -> None:
    manifest = current_manifest(killed / "kv")
    os.truncate(manifest, scan_log(manifest).last_record_at)
    assert scan_log(manifest).fault is None, "it ends between two records"
    with pytest.raises(CorruptionError):
        open_store(killed)
    [line] = verify(killed)
    assert str(manifest) in line
    assert "were durable" in line
    assert repair(killed).losses == []
    assert verify(killed) == []
    assert len(keys_of(killed)) == ROWS


@pytest.mark.promise("P7")
@pytest.mark.parametrize("names", ["MANIFEST", "CURRENT", "MANIFEST CURRENT", "MANIFEST CURRENT OPTIONS SEALS SYNCED"])
def test_a_store_without_manifest_is_refused_and_rebuilt_from_its_sst_files(killed: Path, names: str) -> None:
    for name in names.split():
        for file in [*killed.glob(name), *(killed / "kv").glob(f"{name}*")]:
            file.unlink()
    before = tree(killed)
    with pytest.raises(CorruptionError):
        open_store(killed)
    assert tree(killed) == before
    assert repair(killed).losses == []
    assert len(keys_of(killed)) == ROWS
    assert len(keys_of(killed, Family.MESSAGE_CONTENT)) == ROWS


@pytest.mark.promise("P7")
def test_a_missing_blob_file_loses_only_its_values_with_or_without_manifest(closed: Path) -> None:
    blob = max((closed / "kv").glob("*.blob"))
    blob.unlink()
    for manifest in (closed / "kv").glob("MANIFEST-*"):
        manifest.unlink()
    outcome = repair(closed)
    bodies = keys_of(closed, Family.MESSAGE_CONTENT)
    named = {bytes.fromhex(each) for loss in outcome.losses for each in loss.ids}
    assert named | bodies == {b"%05d" % number for number in range(ROWS)}
    assert not named & bodies
    assert 0 < len(bodies) < ROWS
    assert len(keys_of(closed)) == ROWS


@pytest.mark.promise("P7")
def test_two_damaged_sst_files_and_a_damaged_wal_lose_only_the_damaged_rows(killed: Path) -> None:
    tables = [each for each in sorted((killed / "kv").glob("*.sst")) if each.stat().st_size > 50_000]
    assert len(tables) == 2
    flip(tables[0], 20_000)
    flip(tables[1], 60)
    flip(log_of(killed), 100_000)
    outcome = repair(killed)
    missing = {b"%05d" % number for number in range(ROWS)} - keys_of(killed)
    ranges = [loss for loss in outcome.losses if loss.family == "messages" and loss.start]
    in_tables = {key for key in missing if int(key) % 3 < 2}
    for key in in_tables:
        assert any(bytes.fromhex(r.start) <= key and (r.end is None or key < bytes.fromhex(r.end)) for r in ranges)
    assert 0 < len(in_tables) < 250
    assert any("hold no complete record" in loss.text for loss in outcome.losses)
    assert verify(killed) == []


@pytest.mark.promise("P7")
@pytest.mark.parametrize("way", ["removed", "damaged"])
def test_a_lost_store_file_is_named_and_written_again_with_the_same_id(closed: Path, way: str) -> None:
    marker = read_marker(closed)
    assert marker is not None
    if way == "removed":
        (closed / "STORE").unlink()
    else:
        flip(closed / "STORE", 40)
    with pytest.raises((CorruptionError, NotAStoreError), match="STORE"):
        open_store(closed)
    assert any("STORE" in line for line in verify(closed))
    assert repair(closed, accept_loss=False).remaining
    assert repair(closed).losses == []
    assert read_marker(closed) == marker
    assert len(keys_of(closed)) == ROWS


def test_repair_does_not_turn_another_directory_into_a_store(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(NotAStoreError):
        repair(tmp_path)
    with pytest.raises(StoreNotFoundError):
        repair(tmp_path / "nothing")


@pytest.mark.promise("P7")
def test_without_accept_loss_nothing_changes_and_the_loss_is_reported(closed: Path) -> None:
    flip(max((closed / "kv").glob("*.sst"), key=lambda each: each.stat().st_size), 20_000)
    before = tree(closed)
    outcome = repair(closed, accept_loss=False)
    assert outcome.losses
    assert outcome.kept is None
    assert tree(closed) == before
    assert not (closed / swap.SCRATCH).exists()


def test_a_repair_without_disk_space_for_the_copy_is_refused(closed: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    flip(max((closed / "kv").glob("*.sst")), 20)
    before = tree(closed)
    monkeypatch.setattr(os, "statvfs", lambda _: SimpleNamespace(f_bavail=1000, f_frsize=4096))
    with pytest.raises(DiskFullError, match=r"free .* more"):
        repair(closed)
    assert tree(closed) == before


class Killed(BaseException):
    """Simulates SIGKILL. The `finally` blocks run, and the test restores the files that they remove."""


@pytest.mark.promise("P7")
@pytest.mark.parametrize("renames", range(1, 9))
def test_the_next_open_completes_a_swap_interrupted_at_any_step(
    closed: Path, renames: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    flip(max((closed / "kv").glob("*.sst"), key=lambda each: each.stat().st_size), 20_000)
    begun: list[str] = []
    rename = os.rename

    def stop_at(source: str, target: str) -> None:
        if (closed / swap.REPAIR).exists() or Path(target).name == swap.REPAIR:
            begun.append(str(target))
            if len(begun) == renames:
                raise Killed
        rename(source, target)

    monkeypatch.setattr(os, "rename", stop_at)
    with contextlib.suppress(Killed):
        repair(closed)
    monkeypatch.undo()
    was_decided = (closed / swap.REPAIR).exists()
    if was_decided:
        reports: list[str] = []
        open_store(closed, report=reports.append).close()
        assert "interrupted" in reports[0]
        assert verify(closed) == []
    else:
        assert repair(closed).remaining == []
    assert len(keys_of(closed)) > ROWS // 2
    assert not (closed / swap.SCRATCH).exists()
    assert (closed / "quarantine" / "repair-1").is_dir()


def test_synced_survives_a_torn_slot(closed: Path) -> None:
    newest = read_synced(closed)
    assert newest is not None
    at = newest.generation % 2 * 2048
    flip(closed / SYNCED, at + 20)
    older = read_synced(closed)
    assert older is not None
    assert older.generation == newest.generation - 1
    flip(closed / SYNCED, 2048 - at + 20)
    assert read_synced(closed) is None
    assert len(keys_of(closed)) == ROWS


def test_a_slot_of_synced_decodes_to_its_content() -> None:
    said = Synced(7, 1 << 40, 12, 4096, (3, 9, 1 << 33))
    assert Synced.decode(said.encode()) == said
    assert Synced.decode(b"") is None
    assert Synced.decode(bytes(2048)) is None


@pytest.mark.promise("P7")
@pytest.mark.timeout(900)
def test_a_flipped_bit_anywhere_in_a_table_costs_at_most_that_table(tmp_path: Path) -> None:
    store = open_store(tmp_path / "open")
    for table in range(2):
        batch = Batch()
        for number in range(table, 40, 2):
            batch.put(Family.QUEUES, b"%04d" % number, b"value")
        store.write(batch)
        store.flush()
    killed = Path(shutil.copytree(tmp_path / "open", tmp_path / "killed"))
    store.close()
    name = max((killed / "kv").glob("*.sst"), key=lambda each: each.stat().st_size).name
    content = (killed / "kv" / name).read_bytes()
    unhurt = 0
    for place in range(0, len(content), 19):
        path = Path(shutil.copytree(killed, tmp_path / f"flip-{place}"))
        damaged = bytearray(content)
        damaged[place] ^= 8
        (path / "kv" / name).write_bytes(damaged)
        faults = verify(path)
        outcome = repair(path)
        assert outcome.remaining == [], place
        kept = keys_of(path, Family.QUEUES)
        assert len(kept) >= 20, (place, faults)
        if len(kept) == 40 and faults:
            assert any("filter" in fault for fault in faults)
            unhurt += 1
        else:
            assert (len(kept) < 40) == bool(outcome.losses), (place, faults)
        shutil.rmtree(path)
    assert unhurt, "no place was in the bloom filter"
