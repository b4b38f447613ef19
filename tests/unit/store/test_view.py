"""Views: one point in time of a store in use, including blob files, unaffected by its writer."""

from __future__ import annotations

import os
import threading
from contextlib import closing
from pathlib import Path

import pytest
from rocksdict import Rdict

from basaltmq.errors import CorruptionError, StoreClosedError
from basaltmq.store.batch import Batch
from basaltmq.store.directory import DATABASE
from basaltmq.store.families import Family
from basaltmq.store.open import open_store, open_view
from basaltmq.store.options import StoreOptions, database_options, family_options
from basaltmq.store.rocks import RocksStore

ROWS_MAX = 3000
"""Enough for hundreds of flushes during the creation of views."""

FAMILIES = (Family.MESSAGES, Family.LEASES, Family.STREAM_RECORDS)


def put(store: RocksStore, number: int) -> None:
    batch = Batch()
    for family in FAMILIES:
        batch.put(family, b"%06d" % number, b"%06d" % number * 1000)
    store.write(batch)


def numbers(store: RocksStore) -> list[int]:
    one, two, three = ({int(key): value for key, value in store.scan(family)} for family in FAMILIES)
    assert one == two == three, "a batch was applied partially"
    assert all(value == b"%06d" % number * 1000 for number, value in one.items())
    return sorted(one)


def open_files(below: Path) -> int:
    """Return the store's files that this process has open."""
    fds = [f"/proc/self/fd/{name}" for name in os.listdir("/proc/self/fd")]
    return sum(os.readlink(fd).startswith(str(below)) for fd in fds if os.path.lexists(fd))


def test_a_view_reads_blob_values_of_sst_files_and_of_the_wal(tmp_path: Path) -> None:
    store = open_store(tmp_path / "store")
    for number in range(10):
        put(store, number)
    store.flush()
    for number in range(10, 20):
        put(store, number)
    view = open_view(tmp_path / "store")
    assert numbers(view) == list(range(20))
    assert view.get(Family.STREAM_RECORDS, b"000003") == b"000003" * 1000
    assert next(key for key, _ in view.scan(Family.STREAM_RECORDS, reverse=True)) == b"000019"
    with view.snapshot(*FAMILIES) as snapshot:
        assert snapshot.get(Family.STREAM_RECORDS, b"000015") == b"000015" * 1000
    view.close()
    store.close()


def test_a_view_keeps_its_rows_after_the_writer_deletes_and_compacts_them(tmp_path: Path) -> None:
    store = open_store(tmp_path / "store")
    for number in range(50):
        put(store, number)
    store.flush()
    view = open_view(tmp_path / "store")
    batch = Batch()
    for family in FAMILIES:
        batch.delete_range(family, b"", b"~")
    store.write(batch)
    store.flush()
    store.compact()
    assert list((tmp_path / "store" / "kv").glob("*.blob")) == []
    assert numbers(view) == list(range(50))
    view.refresh()
    assert numbers(view) == []
    view.close()
    store.close()


@pytest.mark.promise("P2")
def test_views_next_to_a_busy_writer_see_complete_batches_in_order(tmp_path: Path) -> None:
    store = open_store(tmp_path / "store")
    for family in FAMILIES:
        store.set_options({"write_buffer_size": "65536", "level0_file_num_compaction_trigger": "2"}, family)
    stop = threading.Event()

    def write() -> None:
        number = 0
        while not stop.is_set() and number < ROWS_MAX:
            put(store, number)
            number += 1

    writer = threading.Thread(target=write)
    writer.start()
    try:
        view = open_view(tmp_path / "store")
        seen = 0
        for _ in range(8):
            found = numbers(view)
            assert found == list(range(len(found))), "a later batch without an earlier one"
            assert len(found) >= seen
            seen = len(found)
            view.refresh()
        view.close()
    finally:
        stop.set()
        writer.join(60)
    store.close()
    assert seen > 0


def test_a_refresh_closes_scans_and_snapshots_and_releases_files(tmp_path: Path) -> None:
    store = open_store(tmp_path / "store")
    for number in range(100):
        put(store, number)
    store.flush()
    view = open_view(tmp_path / "store")
    numbers(view)
    before = open_files(tmp_path)
    scan = view.scan(Family.MESSAGES)
    next(scan)
    snapshot = view.snapshot(Family.MESSAGES)
    for _ in range(5):
        view.refresh()
    with pytest.raises(StoreClosedError):
        list(scan)
    with pytest.raises(StoreClosedError):
        snapshot.get(Family.MESSAGES, b"000001")
    del scan, snapshot
    view.refresh()
    numbers(view)
    assert open_files(tmp_path) <= before
    view.close()
    with pytest.raises(StoreClosedError):
        view.refresh()
    store.close()


@pytest.mark.promise("P7")
def test_a_view_refuses_a_damaged_wal_and_names_it(tmp_path: Path) -> None:
    store = open_store(tmp_path / "store")
    for number in range(10):
        put(store, number)
    store.sync()
    (log,) = (path for path in (tmp_path / "store" / "kv").glob("*.log") if path.stat().st_size)
    body = bytearray(log.read_bytes())
    body[6] = 5
    log.write_bytes(body)
    with pytest.raises(CorruptionError, match=log.name):
        open_view(tmp_path / "store")
    store.close()


@pytest.mark.spec("A9")
def test_a_view_shows_a_family_that_the_store_lacks_as_empty(tmp_path: Path) -> None:
    store = open_store(tmp_path / "store")
    put(store, 1)
    store.close()
    options = database_options(StoreOptions())
    database = Rdict(str(tmp_path / "store" / DATABASE), options, family_options(StoreOptions()))
    database.drop_column_family(Family.XIDS.label)
    database.close()
    with closing(open_view(tmp_path / "store")) as view:
        assert numbers(view) == [1]
        assert list(view.scan(Family.XIDS)) == []
        assert view.get(Family.XIDS, b"x") is None
        view.refresh()
        assert list(view.scan(Family.XIDS)) == []
    with closing(open_store(tmp_path / "store")) as again, closing(open_view(tmp_path / "store")) as view:
        put(again, 2)
        view.refresh()
        assert numbers(view) == [1, 2]
        assert list(view.scan(Family.XIDS)) == []
