"""Checkpoint and restore: all or nothing, consistent, and independent of the source store."""

from __future__ import annotations

import os
import shutil
import threading
from pathlib import Path

import pytest

from basaltmq.errors import (
    AlreadyExistsError,
    CorruptionError,
    InvalidArgumentError,
    NotAStoreError,
    StorageError,
    StoreReadOnlyError,
)
from basaltmq.store.batch import Batch
from basaltmq.store.checkpoint import read_checksums, restore
from basaltmq.store.directory import encode_line, read_marker
from basaltmq.store.families import Family
from basaltmq.store.open import open_store, open_view
from basaltmq.store.rocks import RocksStore
from basaltmq.store.salvage.verify import verify

pytestmark = pytest.mark.spec("A10")

FAMILIES = (Family.MESSAGES, Family.LEASES, Family.STREAM_RECORDS)


def put(store: RocksStore, number: int) -> None:
    batch = Batch()
    for family in FAMILIES:
        batch.put(family, b"%06d" % number, b"%06d" % number * 1000)
    store.write(batch)


def numbers(store: RocksStore) -> list[int]:
    one, two, three = ([int(key) for key, _ in store.scan(family)] for family in FAMILIES)
    assert one == two == three, "a batch was applied partially"
    return one


def tree(path: Path) -> dict[str, bytes]:
    return {str(each.relative_to(path)): each.read_bytes() for each in sorted(path.rglob("*")) if each.is_file()}


def test_a_checkpoint_has_the_rows_of_its_creation_synced_or_not(tmp_path: Path) -> None:
    store = open_store(tmp_path / "store")
    for number in range(20):
        put(store, number)
    store.write(_unlogged := Batch(), wal=False)
    batch = Batch()
    batch.put(Family.STATE, b"without", b"wal")
    store.write(batch, wal=False)
    store.checkpoint(tmp_path / "copy")
    put(store, 20)
    view = open_view(tmp_path / "copy")
    assert numbers(view) == list(range(20))
    assert view.get(Family.STATE, b"without") == b"wal"
    view.close()
    assert verify(tmp_path / "copy") == []
    assert read_marker(tmp_path / "copy") == read_marker(tmp_path / "store")
    store.close()


@pytest.mark.promise("P2")
def test_the_first_open_of_a_checkpoint_reports_nothing(tmp_path: Path) -> None:
    reports: list[str] = []
    store = open_store(tmp_path / "store", report=reports.append)
    put(store, 1)
    store.checkpoint(tmp_path / "copy")
    store.close()
    open_store(tmp_path / "copy", report=reports.append).close()
    assert reports == []


def test_a_checkpoint_under_load_has_complete_batches_in_order(tmp_path: Path) -> None:
    store = open_store(tmp_path / "store")
    stop = threading.Event()

    def write() -> None:
        number = 0
        while not stop.is_set():
            put(store, number)
            number += 1

    writer = threading.Thread(target=write)
    writer.start()
    try:
        for number in range(5):
            store.checkpoint(tmp_path / f"copy-{number}")
    finally:
        stop.set()
        writer.join(60)
    counts = []
    for number in range(5):
        view = open_view(tmp_path / f"copy-{number}")
        found = numbers(view)
        assert found == list(range(len(found))), "a later batch without an earlier one"
        counts.append(len(found))
        view.close()
    assert counts == sorted(counts)
    store.close()


def test_an_existing_target_is_refused_and_unchanged(tmp_path: Path) -> None:
    store = open_store(tmp_path / "store")
    (tmp_path / "copy").mkdir()
    (tmp_path / "file").write_text("mine")
    os.symlink("nowhere", tmp_path / "link")
    for name in ("copy", "file", "link"):
        with pytest.raises(AlreadyExistsError, match=name):
            store.checkpoint(tmp_path / name)
    assert (tmp_path / "file").read_text() == "mine"
    assert list((tmp_path / "copy").iterdir()) == []
    with pytest.raises(InvalidArgumentError, match="inside"):
        store.checkpoint(tmp_path / "store" / "copy")
    store.close()


def test_abandoned_drafts_are_removed_but_not_those_in_progress(tmp_path: Path) -> None:
    import fcntl

    store = open_store(tmp_path / "store")
    left = tmp_path / "copy.partial-1"
    left.mkdir()
    (left / "junk").write_text("half")
    fd = os.open(left, os.O_RDONLY)
    fcntl.flock(fd, fcntl.LOCK_EX)
    with pytest.raises(AlreadyExistsError, match=r"copy\.partial-1"):
        store.checkpoint(tmp_path / "copy")
    assert (left / "junk").exists()
    os.close(fd)
    store.checkpoint(tmp_path / "copy")
    assert not left.exists()
    store.close()


def test_a_view_cannot_take_a_checkpoint(tmp_path: Path) -> None:
    open_store(tmp_path / "store").close()
    view = open_view(tmp_path / "store")
    with pytest.raises(StoreReadOnlyError):
        view.checkpoint(tmp_path / "copy")
    view.close()


@pytest.mark.promise("P7")
def test_an_sst_file_damaged_after_sealing_is_not_backed_up(tmp_path: Path) -> None:
    store = open_store(tmp_path / "store")
    put(store, 1)
    store.close()
    store = open_store(tmp_path / "store")
    (table,) = list((tmp_path / "store" / "kv").glob("*.blob"))[:1]
    body = bytearray(table.read_bytes())
    body[100] ^= 1
    table.write_bytes(body)
    with pytest.raises(CorruptionError, match=table.name):
        store.checkpoint(tmp_path / "copy")
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["store"]
    store.close()


def test_restore_copies_all_bytes_and_shares_no_file(tmp_path: Path) -> None:
    store = open_store(tmp_path / "store")
    for number in range(50):
        put(store, number)
    store.checkpoint(tmp_path / "copy")
    store.close()
    before = tree(tmp_path / "copy")
    restore(tmp_path / "copy", tmp_path / "deep" / "er" / "back")
    back = tmp_path / "deep" / "er" / "back"
    after = tree(back)
    assert after == {name: body for name, body in before.items() if name != "CHECKSUMS"}
    assert all(each.stat().st_nlink == 1 for each in back.rglob("*") if each.is_file())
    shutil.rmtree(tmp_path / "copy")
    store = open_store(back, create=False)
    assert numbers(store) == list(range(50))
    put(store, 50)
    store.close()
    assert verify(back) == []


def test_a_checkpoint_opened_for_writing_becomes_a_store_and_does_not_change_its_source(tmp_path: Path) -> None:
    store = open_store(tmp_path / "store")
    for number in range(10):
        put(store, number)
    store.checkpoint(tmp_path / "copy")
    other = open_store(tmp_path / "copy", create=False)
    batch = Batch()
    for family in FAMILIES:
        batch.delete_range(family, b"", b"~")
    other.write(batch)
    other.compact()
    other.close()
    assert not (tmp_path / "copy" / "CHECKSUMS").exists()
    assert numbers(store) == list(range(10))
    assert store.verify() == []
    store.close()
    with pytest.raises(NotAStoreError, match="no CHECKSUMS"):
        restore(tmp_path / "copy", tmp_path / "back")


@pytest.mark.promise("P7")
@pytest.mark.parametrize("damage", ["missing", "extra", "longer", "checksums", "outside", "form", "marker"])
def test_restore_refuses_an_incomplete_checkpoint_and_names_the_file(tmp_path: Path, damage: str) -> None:
    store = open_store(tmp_path / "store")
    put(store, 1)
    store.checkpoint(tmp_path / "copy")
    store.close()
    copy = tmp_path / "copy"
    (table,) = list((copy / "kv").glob("*.sst"))[:1]
    name = table.name
    if damage == "missing":
        table.unlink()
    elif damage == "extra":
        name = "stranger"
        (copy / "kv" / "stranger").write_text("who")
    elif damage == "longer":
        table.chmod(0o644)
        body = table.read_bytes()
        table.unlink()
        table.write_bytes(body + b"x")
    elif damage == "checksums":
        name = "CHECKSUMS"
        (copy / "CHECKSUMS").write_bytes(b"0" + (copy / "CHECKSUMS").read_bytes())
    elif damage == "outside":
        name = "outside the checkpoint"
        files = {**read_checksums(copy), "../../etc/passwd": (1, 1)}
        (copy / "CHECKSUMS").write_bytes(encode_line({"format": "basalt-checksums", "version": 1, "files": files}))
    elif damage == "form":
        name = "unknown structure"
        (copy / "CHECKSUMS").write_bytes(encode_line({"format": "basalt-checksums", "version": 1, "files": [1]}))
    else:
        name = "STORE"
        (copy / "STORE").write_bytes(b"junk")
    with pytest.raises(CorruptionError, match=name):
        restore(copy, tmp_path / "back")
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["copy", "store"]
    assert any(name in line for line in verify(copy))


def test_restore_refuses_other_directories_and_an_existing_target(tmp_path: Path) -> None:
    store = open_store(tmp_path / "store")
    with pytest.raises(NotAStoreError, match="no checkpoint"):
        restore(tmp_path / "nothing", tmp_path / "back")
    with pytest.raises(NotAStoreError, match="no CHECKSUMS"):
        restore(tmp_path / "store", tmp_path / "back")
    store.checkpoint(tmp_path / "copy")
    store.close()
    (tmp_path / "back").mkdir()
    with pytest.raises(AlreadyExistsError, match="back"):
        restore(tmp_path / "copy", tmp_path / "back")


def test_files_with_names_similar_to_a_draft_are_kept(tmp_path: Path) -> None:
    store = open_store(tmp_path / "store")
    (tmp_path / "copy.partial-results").mkdir()
    (tmp_path / "copy.partial-results" / "mine").write_text("kept")
    (tmp_path / "copy.partial-7").write_text("a file")
    store.checkpoint(tmp_path / "copy")
    assert (tmp_path / "copy.partial-results" / "mine").read_text() == "kept"
    assert (tmp_path / "copy.partial-7").read_text() == "a file"
    store.close()


def test_a_second_checkpoint_to_the_same_target_does_not_damage_the_first(tmp_path: Path) -> None:
    store = open_store(tmp_path / "store")
    put(store, 1)

    def again(draft: Path) -> None:
        with pytest.raises(AlreadyExistsError, match="is being created as"):
            store.checkpoint(tmp_path / "copy")
        assert draft.is_dir()

    store.checkpoint(tmp_path / "copy", add_files=again)
    store.close()
    assert verify(tmp_path / "copy") == []


def test_restore_into_the_checkpoint_itself_is_refused_for_every_spelling_of_the_path(tmp_path: Path) -> None:
    store = open_store(tmp_path / "store")
    store.checkpoint(tmp_path / "copy")
    store.close()
    os.symlink(tmp_path / "copy", tmp_path / "link")
    before = tree(tmp_path / "copy")
    with pytest.raises(InvalidArgumentError, match="inside"):
        restore(tmp_path / "copy", tmp_path / "link" / "back")
    assert tree(tmp_path / "copy") == before


def test_unreadable_checksums_are_named(tmp_path: Path) -> None:
    store = open_store(tmp_path / "store")
    store.checkpoint(tmp_path / "copy")
    store.close()
    (tmp_path / "copy" / "CHECKSUMS").unlink()
    (tmp_path / "copy" / "CHECKSUMS").mkdir()
    with pytest.raises(StorageError, match=r"copy/CHECKSUMS: Is a directory"):
        restore(tmp_path / "copy", tmp_path / "back")
    assert not (tmp_path / "back").exists()
