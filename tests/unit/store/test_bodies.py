"""Large bodies lie in files of their own: written once, reclaimed, contained when damaged, and part of every copy."""

from __future__ import annotations

import os
import random
import shutil
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path

import pytest
from rocksdict import WriteBatch, WriteOptions

from basaltmq.errors import CorruptionError, LimitExceededError, StoreStalledError
from basaltmq.store import checkpoint
from basaltmq.store.batch import BATCH_BYTES_MAX, Batch
from basaltmq.store.bodies import files as body_files
from basaltmq.store.bodies.recent import RECENT_BYTES_MAX
from basaltmq.store.bodies.store import LARGE_BYTES_MIN, UNSYNCED_BYTES_MAX, BodyStore
from basaltmq.store.families import Family
from basaltmq.store.integrity.body_frames import Place, decode_files, read_body
from basaltmq.store.integrity.synced import SYNCED
from basaltmq.store.open import open_store, open_view, reopen_store
from basaltmq.store.repair import repair
from basaltmq.store.rocks import RocksStore
from basaltmq.store.salvage.files import table_family
from basaltmq.store.salvage.verify import verify

C = Family.MESSAGE_CONTENT
SMALL = LARGE_BYTES_MIN - 1


def key(number: int) -> bytes:
    return b"%016d" % number


def body(number: int, size: int = LARGE_BYTES_MIN) -> bytes:
    return random.Random(number).randbytes(size)


def put(store: BodyStore, *numbers: int, size: int = LARGE_BYTES_MIN) -> None:
    batch = Batch()
    for number in numbers:
        batch.put(C, key(number), body(number, size))
    store.write(batch)


def delete(store: BodyStore, *numbers: int) -> None:
    batch = Batch()
    for number in numbers:
        batch.delete(C, key(number))
    store.write(batch)


def settle(store: BodyStore) -> None:
    """Wait for the thread that removes and empties files."""
    while (tidier := store._tidier) is not None:
        tidier.join(30)


def names(path: Path) -> list[str]:
    return sorted(os.listdir(path / "bodies"))


def damage(path: Path, change: Callable[[bytearray], None]) -> None:
    data = bytearray(path.read_bytes())
    change(data)
    path.write_bytes(data)


@pytest.fixture
def store(tmp_path: Path) -> Iterator[BodyStore]:
    opened = open_store(tmp_path / "store")
    yield opened
    opened.close()


@pytest.fixture
def small_files(monkeypatch: pytest.MonkeyPatch) -> int:
    """Four bodies fill a file."""
    size = 4 * (LARGE_BYTES_MIN + 100)
    monkeypatch.setattr(body_files, "FILE_BYTES_MAX", size)
    return size


@pytest.mark.spec("A4", "E3")
def test_a_large_body_is_written_once_and_outside_rocksdb(store: BodyStore) -> None:
    put(store, 1, size=1 << 20)
    store.sync()
    put(store, 2, size=SMALL)
    store.close()
    in_files = sum(each.stat().st_size for each in (store.path / "bodies").iterdir())
    in_rocksdb = sum(each.stat().st_size for each in (store.path / "kv").iterdir())
    assert 1 << 20 < in_files < (1 << 20) + 100
    assert SMALL < in_rocksdb < 1 << 19
    again = open_store(store.path)
    assert again.get_many(C, [key(1), key(2), key(3)]) == [body(1, 1 << 20), body(2, SMALL), None]
    assert dict(again.scan(C)) == {key(1): body(1, 1 << 20), key(2): body(2, SMALL)}
    again.close()


@pytest.mark.spec("A9")
def test_bodies_that_an_older_version_stored_as_rows_stay_readable(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as old:
        old.setattr("basaltmq.store.bodies.store.is_large", lambda key, body: False)
        store = open_store(tmp_path / "store")
        put(store, 1, 2)
        store.close()
    store = open_store(tmp_path / "store")
    assert not (store.path / "bodies").exists()
    put(store, 3)
    assert dict(store.scan(C)) == {key(n): body(n) for n in (1, 2, 3)}
    delete(store, 1, 3)
    assert [store.get(C, key(n)) for n in (1, 2, 3)] == [None, body(2), None]
    store.close()


@pytest.mark.spec("E5")
def test_files_without_live_bodies_are_removed(store: BodyStore, small_files: int) -> None:
    put(store, *range(40))
    store.sync()
    assert len(names(store.path)) == 10
    delete(store, *range(36))
    settle(store)
    assert len(names(store.path)) == 1
    assert store.size_bytes() < store.properties()["memtable-bytes"] + 2 * small_files
    put(store, 100)
    rows = decode_files(store.scan(Family.BODY_FILES))
    assert len(rows) == len(names(store.path)), "removed files leave no row"


@pytest.mark.spec("E5")
def test_disk_use_stays_bounded_with_one_percent_of_live_data(store: BodyStore, small_files: int) -> None:
    for number in range(0, 800, 8):
        put(store, *range(number, number + 8))
        delete(store, *[n for n in range(number, number + 8) if n % 100])
        store.sync()
    settle(store)
    held = sum(each.stat().st_size for each in (store.path / "bodies").iterdir())
    assert held <= 2 * 8 * (LARGE_BYTES_MIN + 100) + 2 * small_files
    for number in range(0, 800, 100):
        assert store.get(C, key(number)) == body(number)
    assert store.verify() == []


@pytest.mark.spec("E5")
def test_readers_keep_the_files_they_may_need(store: BodyStore, small_files: int) -> None:
    put(store, *range(8))
    store.sync()
    snapshot = store.snapshot(C)
    scan = store.scan(C)
    assert next(scan) == (key(0), body(0))
    delete(store, *range(8))
    settle(store)
    assert len(names(store.path)) == 2
    assert snapshot.get_many(C, [key(n) for n in range(8)]) == [body(n) for n in range(8)]
    assert dict(snapshot.scan(C)) == {key(n): body(n) for n in range(8)}
    assert dict(scan) == {key(n): body(n) for n in range(1, 8)}
    snapshot.close()
    del scan
    put(store, 9)
    store.sync()
    settle(store)
    assert len(names(store.path)) == 1


@pytest.mark.spec("E4")
def test_live_bytes_are_exact_after_any_history(store: BodyStore, small_files: int, tmp_path: Path) -> None:
    rng = random.Random(7)
    there: set[int] = set()
    for step in range(120):
        batch = Batch()
        for number in rng.sample(range(40), 4):
            if rng.random() < 0.4:
                batch.put(C, key(number), body(number, rng.choice([100, LARGE_BYTES_MIN])))
                there.add(number)
            elif rng.random() < 0.9:
                batch.delete(C, key(number))
                there.discard(number)
            else:
                batch.delete_range(C, key(number), key(number + 5))
                there -= set(range(number, number + 5))
        store.write(batch)
        if step % 10 == 0:
            settle(store)
    assert {each for each, _ in store.scan(C)} == {key(number) for number in there}
    settle(store)
    counted = decode_files(store.scan(Family.BODY_FILES))
    store.recount_bodies()
    exact = decode_files(store.scan(Family.BODY_FILES))
    assert {n: size for n, size in counted.items() if size} == {n: size for n, size in exact.items() if size}


@pytest.mark.promise("P1")
def test_a_file_stays_open_while_it_is_synced_or_read(store: BodyStore, monkeypatch: pytest.MonkeyPatch) -> None:
    files = store._files

    def evict(fd: int) -> None:
        files.end_current()
        files._handles.clear()
        os.fstat(fd)

    sync = os.fdatasync

    def evicting_sync(fd: int) -> None:
        evict(fd)
        sync(fd)

    def evicting_read(fd: int, name: str, key: bytes, place: Place) -> bytes:
        evict(fd)
        return read_body(fd, name, key, place)

    put(store, 1)
    monkeypatch.setattr(os, "fdatasync", evicting_sync)
    store.sync()
    monkeypatch.undo()
    monkeypatch.setattr(body_files, "read_body", evicting_read)
    store._recent.drop(key(1))
    assert store.get(C, key(1)) is not None


@pytest.mark.promise("P1")
def test_a_sync_does_not_cover_what_overwrites_an_undone_append(
    store: BodyStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = store._files
    synced: list[int] = []
    sync = os.fdatasync

    def undone_and_overwritten(fd: int) -> None:
        sync(fd)
        if not synced:
            files.undo()
            files.begin()
            files.append(key(2), body(2, LARGE_BYTES_MIN))
        synced.append(fd)

    monkeypatch.setattr(os, "fdatasync", undone_and_overwritten)
    files.begin()
    files.append(key(1), body(1, LARGE_BYTES_MIN * 2))
    files.sync(store._lock)
    assert len(synced) == 1
    files.sync(store._lock)
    assert len(synced) == 2, "the second body is not durable yet"
    files.begin()
    files.append(key(3), body(3, LARGE_BYTES_MIN * 2))
    files.sync(store._lock)
    files.undo()
    files.append(key(4), body(4))
    files.sync(store._lock)
    assert len(synced) == 4, "the fourth body overwrites the third, which was synced"


@pytest.mark.promise("P7")
@pytest.mark.parametrize("way", ["flip", "truncate", "remove"])
def test_damage_costs_its_bodies_and_verify_names_file_and_ids(store: BodyStore, way: str, small_files: int) -> None:
    put(store, *range(8))
    store.close()
    path = store.path / "bodies" / names(store.path)[0]
    if way == "flip":
        damage(path, lambda data: data.__setitem__(len(data) // 3, data[len(data) // 3] ^ 1))
    elif way == "truncate":
        damage(path, lambda data: data.__delitem__(slice(-9, None)))
    else:
        path.unlink()
    faults = verify(store.path)
    assert any(line.startswith(str(path)) for line in faults)
    assert not any(line.startswith(str(store.path / "kv")) for line in faults), "RocksDB's files are not damaged"
    again = open_store(store.path)
    lost = [n for n in range(8) if again.get(C, key(n)) is None]
    assert len(lost) == (4 if way == "remove" else 1)
    assert all(key(n).hex() in "".join(faults) for n in lost)
    assert [each for each, _ in again.scan(C)] == [key(n) for n in range(8) if n not in lost]
    assert again.unreadable() == len(lost)
    again.close()
    outcome = repair(store.path)
    assert outcome.kept is not None
    assert (outcome.kept / "kv").exists()
    assert verify(store.path) == []
    again = open_store(store.path)
    assert dict(again.scan(C)) == {key(n): body(n) for n in range(8) if n not in lost}
    again.close()


@pytest.mark.promise("P7")
def test_a_damaged_header_is_named_and_costs_no_body(store: BodyStore) -> None:
    put(store, 1, 2)
    store.close()
    path = store.path / "bodies" / names(store.path)[0]
    damage(path, lambda data: data.__setitem__(6, data[6] ^ 1))
    assert [line.split(";")[0] for line in verify(store.path)] == [
        f"{path}: the header of the body {key(1).hex()} is damaged"
    ]
    assert repair(store.path).losses == []
    again = open_store(store.path)
    assert dict(again.scan(C)) == {key(n): body(n) for n in (1, 2)}
    assert again.verify() == []
    again.close()


@pytest.mark.promise("P6", "P7")
def test_repair_finds_bodies_whose_rows_are_lost(store: BodyStore) -> None:
    put(store, *range(8))
    store.close()
    for table in (store.path / "kv").glob("*.sst"):
        if b"body_places" in table.read_bytes():
            damage(table, lambda data: data.__setitem__(100, data[100] ^ 1))
    assert verify(store.path)
    repair(store.path)
    again = open_store(store.path)
    assert dict(again.scan(C)) == {key(n): body(n) for n in range(8)}
    assert again.verify() == []
    again.close()


def damage_rows(path: Path, family: Family) -> None:
    """Damage the first block of a family's tables."""
    for table in (path / "kv").glob("*.sst"):
        if table_family(table)[0] == family.label:
            damage(table, lambda data: data.__setitem__(12, data[12] ^ 4))


@pytest.mark.promise("P1", "P7")
def test_a_store_with_unreadable_places_serves_other_bodies_and_keeps_all_files(
    store: BodyStore, small_files: int
) -> None:
    put(store, *range(8))
    store.close()
    damage_rows(store.path, Family.BODY_PLACES)
    again = open_store(store.path)
    assert again.get(C, key(0)) is None
    put(again, 100)
    put(again, 200, size=SMALL)
    assert dict(again.scan(C)) == {key(100): body(100), key(200): body(200, SMALL)}
    assert again.get_many(C, [key(1), key(100), key(200)]) == [None, body(100), body(200, SMALL)]
    put(again, 101)
    delete(again, 0, 100)
    again.sync()
    settle(again)
    assert len(names(store.path)) == 3, "a repair finds the bodies in them"
    assert again.has_unreadable(Family.BODY_PLACES)
    again.close()
    # The counts of live bytes are wrong now, as after a crash.
    (store.path / "bodies" / "0000000009.body").touch()
    again = open_store(store.path)
    again.tidy()
    assert len(names(store.path)) == 4
    assert dict(again.scan(C)) == {key(101): body(101), key(200): body(200, SMALL)}
    again.close()
    assert repair(store.path).remaining == []
    again = open_store(store.path)
    assert [again.get(C, key(n)) for n in range(1, 8)] == [body(n) for n in range(1, 8)]
    again.close()


@pytest.mark.promise("P6", "P7")
def test_unreadable_counts_of_body_files_are_counted_again(store: BodyStore) -> None:
    put(store, *range(8))
    delete(store, *range(4))
    store.close()
    counts = decode_files(store_rows(store.path))
    damage_rows(store.path, Family.BODY_FILES)
    again = open_store(store.path)
    assert decode_files(again.scan(Family.BODY_FILES)) == counts
    assert [again.get(C, key(n)) for n in range(4, 8)] == [body(n) for n in range(4, 8)]
    again.close()


def store_rows(path: Path) -> list[tuple[bytes, bytes]]:
    with closing(open_view(path)) as view:
        return list(view.scan(Family.BODY_FILES))


@pytest.mark.promise("P1", "P7")
@pytest.mark.parametrize("is_confirmed", [False, True])
def test_a_write_whose_body_did_not_reach_the_disk_is_cut_unless_it_was_durable(
    store: BodyStore, tmp_path: Path, is_confirmed: bool
) -> None:
    put(store, 1)
    store.sync()
    put(store, 2)
    put(store, 3)
    if is_confirmed:
        store.sync()
    left = tmp_path / "left"
    shutil.copytree(store.path, left)
    if is_confirmed:
        assert (left / SYNCED).exists()
    path = left / "bodies" / names(left)[0]
    damage(path, lambda data: data.__setitem__(slice(-50_000, -40_000), bytes(10_000)))
    reports: list[str] = []
    again = open_store(left, report=reports.append)
    found = [again.get(C, key(n)) is not None for n in (1, 2, 3)]
    rows = [again.get(Family.BODY_PLACES, key(n)) is not None for n in (1, 2, 3)]
    again.close()
    if is_confirmed:
        assert (found, rows) == ([True, False, True], [True, True, True])
        assert reports == []
    else:
        assert (found, rows) == ([True, False, False], [True, False, False])
        assert "a write whose body is not on disk" in reports[0]


@pytest.mark.spec("A10")
def test_backups_and_views_have_the_bodies(store: BodyStore, tmp_path: Path, small_files: int) -> None:
    put(store, *range(6))
    view = open_view(store.path)
    store.checkpoint(tmp_path / "backup")
    delete(store, *range(6))
    put(store, 9)
    settle(store)
    assert [view.get(C, key(n)) for n in (0, 5, 9)] == [body(0), body(5), None]
    assert len(list(view.scan(C))) == 6
    view.refresh()
    assert dict(view.scan(C)) == {key(9): body(9)}
    view.close()
    assert verify(tmp_path / "backup") == []
    checkpoint.restore(tmp_path / "backup", tmp_path / "restored")
    for copy in (tmp_path / "backup", tmp_path / "restored"):
        with_bodies = open_view(copy)
        assert dict(with_bodies.scan(C)) == {key(n): body(n) for n in range(6)}
        with_bodies.close()
    restored = open_store(tmp_path / "restored")
    put(restored, 7)
    assert restored.verify() == []
    restored.close()
    damage(
        tmp_path / "backup" / "bodies" / names(tmp_path / "backup")[0],
        lambda data: data.__setitem__(200, data[200] ^ 1),
    )
    with pytest.raises(CorruptionError, match="nothing was restored"):
        checkpoint.restore(tmp_path / "backup", tmp_path / "not")


def test_a_body_that_was_just_written_is_read_from_memory(store: BodyStore, monkeypatch: pytest.MonkeyPatch) -> None:
    def read_nothing(fd: int, name: str, key: bytes, place: Place) -> bytes:
        raise AssertionError(f"{name} is read")

    monkeypatch.setattr(body_files, "read_body", read_nothing)
    put(store, 1, 2)
    assert store.get_many(C, [key(1), key(3), key(2)]) == [body(1), None, body(2)]
    assert store.get(C, key(1)) == body(1)
    delete(store, 1)
    assert store.get(C, key(1)) is None
    small = Batch()
    small.put(C, key(2), b"small")
    store.write(small)
    assert store.get(C, key(2)) == b"small"
    batch = Batch()
    batch.put(C, key(4), body(4))
    batch.delete_range(C, key(4), key(5))
    store.write(batch)
    assert store.get(C, key(4)) is None


@pytest.mark.promise("P8")
def test_only_the_newest_bodies_are_kept_in_memory(store: BodyStore) -> None:
    for number in range(3 * RECENT_BYTES_MAX >> 20):
        put(store, number, size=1 << 20)
    kept = store._recent._bodies
    assert sum(map(len, kept.values())) == RECENT_BYTES_MAX == store._recent._size_bytes
    assert key(0) not in kept
    assert store.get(C, key(0)) == body(0, 1 << 20)
    delete(store, *range(3 * RECENT_BYTES_MAX >> 20))
    assert not kept
    assert not store._recent._size_bytes


@pytest.mark.promise("P8")
def test_a_refused_write_leaves_no_bytes_behind(store: BodyStore, monkeypatch: pytest.MonkeyPatch) -> None:
    put(store, 1)
    before = store.size_bytes() - store.properties()["memtable-bytes"]
    too_large = Batch()
    for number in range(BATCH_BYTES_MAX // (16 << 20) + 1):
        too_large.put(C, key(number), bytes(16 << 20))
    with pytest.raises(LimitExceededError):
        store.write(too_large)

    def stall(self: RocksStore, native: WriteBatch, options: WriteOptions) -> Exception:
        return Exception("Incomplete: Write stall")

    with monkeypatch.context() as stalled:
        stalled.setattr(RocksStore, "_write_native", stall)
        with pytest.raises(StoreStalledError):
            store.write(_batch_of(2), wait_ms=5)
    assert store.size_bytes() - store.properties()["memtable-bytes"] == before
    other = Batch()
    other.put(Family.DEFAULT, b"key", b"value")
    store.write(other)
    assert store.get(C, key(2)) is None
    put(store, 3)
    assert dict(store.scan(C)) == {key(1): body(1), key(3): body(3)}
    assert store.verify() == []


def _batch_of(number: int) -> Batch:
    batch = Batch()
    batch.put(C, key(number), body(number))
    return batch


@pytest.mark.promise("P8")
def test_publishers_without_confirms_are_held_until_a_thread_has_synced(
    store: BodyStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as slow:
        slow.setattr(BodyStore, "_tidy_later", lambda self: None)
        put(store, *range(5), size=UNSYNCED_BYTES_MAX // 5 + 1)
        assert store.is_behind()
    put(store, 6)
    settle(store)
    assert not store.is_behind()


@pytest.mark.spec("E10")
def test_a_reopened_store_goes_on_with_its_bodies(store: BodyStore) -> None:
    put(store, 1)
    store.poison(OSError("a test"))
    reopen_store(store)
    put(store, 2)
    assert dict(store.scan(C)) == {key(1): body(1), key(2): body(2)}
    assert len(names(store.path)) == 2, "a restart appends to no old file"


@pytest.mark.promise("P1")
def test_a_write_without_its_body_is_also_cut_after_a_store_that_failed_was_closed(store: BodyStore) -> None:
    put(store, 1)
    store.sync()
    put(store, 2)
    store.poison(OSError("a test"))
    store.close()
    path = store.path / "bodies" / names(store.path)[0]
    damage(path, lambda data: data.__delitem__(slice(-1000, None)))
    again = open_store(store.path, report=lambda line: None)
    assert [again.get(Family.BODY_PLACES, key(n)) is not None for n in (1, 2)] == [True, False]
    assert again.verify() == []
    again.close()
