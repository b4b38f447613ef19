"""Verify: continues after a damaged file, names each fault and its cost, changes nothing, and reports progress."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest

from basaltmq.errors import NotAStoreError, StoreLockedError, StoreNotFoundError
from basaltmq.store.batch import Batch
from basaltmq.store.families import Family
from basaltmq.store.open import open_store, open_view
from basaltmq.store.salvage.verify import verify

pytestmark = [pytest.mark.spec("A10"), pytest.mark.promise("P7")]


@pytest.fixture
def home(tmp_path: Path) -> Path:
    """Return a store with four SST files of one family, with separate keys, and one of another family."""
    store = open_store(tmp_path / "store")
    store.set_options({"disable_auto_compactions": "true"}, Family.QUEUES)
    for letter in (b"a", b"b", b"c", b"d"):
        batch = Batch()
        for number in range(200):
            batch.put(Family.QUEUES, letter + b"%04d" % number, os.urandom(100))
        batch.put(Family.LEASES, letter, letter)
        batch.put(Family.STREAM_RECORDS, letter, letter * 10_000)
        store.write(batch)
        store.flush()
    store.close()
    # Without seals, so that the readers must detect the faults.
    (tmp_path / "store" / "SEALS").unlink()
    return tmp_path / "store"


def damage(path: Path, at: int = 50) -> None:
    body = bytearray(path.read_bytes())
    body[at] ^= 0x20
    path.write_bytes(body)


def queue_tables(home: Path) -> list[Path]:
    return [path for path in sorted((home / "kv").glob("*.sst")) if path.stat().st_size > 15_000]


def test_two_damaged_sst_files_are_both_named_with_family_and_keys(home: Path) -> None:
    first, second = queue_tables(home)[0], queue_tables(home)[2]
    damage(first)
    damage(second)
    found = verify(home)
    assert len([line for line in found if line.startswith(f"{home}/kv/")]) == 2, found
    for table in (first, second):
        assert any("the configuration of queues between" in line and f"({table.name})" in line for line in found)
    for table, letter in ((first, "61"), (second, "63")):
        (line,) = (line for line in found if line.startswith(f"{table}: "))
        assert "rows of family queues between keys" in line
        assert f"{letter}30303030 and {letter}30313939" in line


def test_a_damaged_blob_value_is_named_with_its_key_and_hides_no_other_fault(home: Path) -> None:
    blob = sorted((home / "kv").glob("*.blob"))[1]
    damage(blob, 1000)
    damage(queue_tables(home)[3])
    found = verify(home)
    assert len([line for line in found if line.startswith(f"{home}/kv/")]) == 2, found
    (line,) = (line for line in found if line.startswith(f"{blob}: "))
    assert "(key 62)" in line
    assert "family stream_records" in line


def test_missing_sst_and_blob_files_are_named(home: Path) -> None:
    table, blob = queue_tables(home)[1], sorted((home / "kv").glob("*.blob"))[0]
    table.unlink()
    blob.unlink()
    found = verify(home)
    assert any(line.startswith(f"{table}: ") for line in found), found
    assert any(line.startswith(f"{blob}: ") for line in found), found


def test_sst_files_are_read_despite_a_damaged_wal(home: Path) -> None:
    log = home / "kv" / "999999.log"
    log.write_bytes(b"\x01" * 300)
    damage(queue_tables(home)[0])
    found = verify(home)
    assert len([line for line in found if line.startswith(f"{home}/kv/")]) == 2, found
    assert any(line.startswith(f"{log}: ") for line in found)


def test_an_intact_sst_file_of_an_open_store_is_sealed(home: Path) -> None:
    store = open_store(home)
    assert store.verify() == []
    table = queue_tables(home)[0]
    # In the filter or the property block, which RocksDB ignores if damaged.
    damage(table, table.stat().st_size - 1200)
    found = store.verify()
    store.close()
    assert [line.partition(": ")[0] for line in found if line.startswith(f"{home}/kv/")] == [str(table)]


def test_progress_rises_to_the_total(home: Path) -> None:
    steps: list[tuple[int, int]] = []
    assert verify(home, lambda done, total: steps.append((done, total))) == []
    assert [done for done, _ in steps] == sorted(done for done, _ in steps)
    assert steps[-1][0] == steps[-1][1] == steps[0][1] > 100_000


def test_an_open_store_is_verified_by_its_own_process(home: Path) -> None:
    store = open_store(home)
    with pytest.raises(StoreLockedError, match="verify it in that process"):
        verify(home)
    view = open_view(home)
    with pytest.raises(StoreLockedError):
        view.verify()
    view.close()
    assert store.verify() == []
    store.close()


def test_verify_changes_nothing_in_a_closed_store(home: Path) -> None:
    def tree() -> dict[str, tuple[bytes, int]]:
        return {str(p): (p.read_bytes(), p.stat().st_mtime_ns) for p in home.rglob("*") if p.is_file()}

    before = tree()
    verify(home)
    assert tree() == before


def test_a_missing_database_is_a_fault(home: Path) -> None:
    shutil.rmtree(home / "kv")
    (line,) = verify(home)
    assert line.startswith(f"{home / 'kv'}: is missing")


def test_verify_refuses_missing_and_foreign_directories(tmp_path: Path) -> None:
    with pytest.raises(StoreNotFoundError):
        verify(tmp_path / "nothing")
    (tmp_path / "file").write_text("x")
    with pytest.raises(NotAStoreError):
        verify(tmp_path)


def test_a_blob_file_of_an_interrupted_flush_is_not_a_fault(home: Path) -> None:
    (home / "kv" / "900000.blob").touch()
    assert verify(home) == []
    known = next(iter(sorted((home / "kv").glob("*.blob"))))
    known.write_bytes(b"")
    assert [line for line in verify(home) if line.startswith(f"{known}: a file of 0 bytes")]
