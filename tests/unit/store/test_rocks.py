"""Properties of the RocksDB store only: operator functions, stalls, closing, and workarounds for `rocksdict`."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from rocksdict import Options, Rdict, ReadOptions, WriteBatch

from basaltmq.errors import (
    CorruptionError,
    InvalidConfigError,
    StoreClosedError,
    StorePoisonedError,
    StoreReadOnlyError,
    StoreStalledError,
    UnknownOptionError,
)
from basaltmq.store.batch import Batch
from basaltmq.store.families import MIB, Family
from basaltmq.store.open import open_store, open_view
from basaltmq.store.options import StoreOptions
from basaltmq.store.rocks import RocksStore
from basaltmq.store.rocks_properties import DATABASE_PROPERTIES, PROPERTIES

WAIT_S = 60
F = Family.MESSAGES
G = Family.CONTENT_REFS


@pytest.fixture
def store(tmp_path: Path) -> Iterator[RocksStore]:
    opened = open_store(tmp_path / "store")
    yield opened
    opened.close()


def put(store: RocksStore, family: Family, *keys: bytes, value: bytes = b"v") -> None:
    batch = Batch()
    for key in keys:
        batch.put(family, key, value)
    store.write(batch)


def numbered(count: int) -> list[bytes]:
    return [number.to_bytes(8, "big") for number in range(count)]


@pytest.mark.spec("A10")
def test_options_can_change_on_an_open_store_for_one_family_or_all(store: RocksStore) -> None:
    store.set_options({"level0_slowdown_writes_trigger": "31", "disable_auto_compactions": "true"}, F)
    store.set_options({"write_buffer_size": str(2 * MIB)})
    put(store, F, *numbered(10))
    for _ in range(6):
        put(store, F, *numbered(10))
        store.flush(F)
    assert store.properties(F)["level-0-files"] >= 6
    store.set_options({})


@pytest.mark.spec("A10")
@pytest.mark.parametrize("family", [F, None])
@pytest.mark.parametrize("name", ["no_such_option", "num_levels", "max_open_files", ""])
def test_an_unknown_or_immutable_option_is_refused_by_name(store: RocksStore, name: str, family: Family | None) -> None:
    with pytest.raises(UnknownOptionError, match=f"{name!r} is not an option"):
        store.set_options({name: "7"}, family)
    put(store, F, b"k")


@pytest.mark.spec("A10")
@pytest.mark.parametrize(
    ("name", "value"),
    [("write_buffer_size", "many"), ("write_buffer_size", ""), ("disable_auto_compactions", "perhaps")],
)
def test_an_invalid_option_value_is_refused_by_name(store: RocksStore, name: str, value: str) -> None:
    with pytest.raises(InvalidConfigError, match=f"option '{name}' is not valid"):
        store.set_options({name: value}, F)
    put(store, F, b"k")


@pytest.mark.spec("A10")
@pytest.mark.promise("P8")
def test_a_negative_option_value_is_refused_before_rocksdb_parses_it_as_unsigned(store: RocksStore) -> None:
    with pytest.raises(InvalidConfigError, match="'write_buffer_size' cannot be negative: -5"):
        store.set_options({"write_buffer_size": "-5"})


@pytest.mark.spec("A10")
def test_flush_writes_one_family_or_all_to_files(store: RocksStore) -> None:
    put(store, F, *numbered(100))
    put(store, G, *numbered(100))
    store.flush(F)
    assert store.properties(F)["sst-bytes"] > 0
    assert store.properties(G)["sst-bytes"] == 0
    store.flush()
    assert store.properties(G)["sst-bytes"] > 0
    put(store, Family.VERSION, b"k")
    store.flush(wait=False)


@pytest.mark.spec("A10")
def test_compact_frees_the_space_of_one_family_or_all(store: RocksStore) -> None:
    for family in (F, G):
        put(store, family, *numbered(3000), value=os.urandom(200))
        store.flush(family)
        store.set_options({"disable_auto_compactions": "true"}, family)
        batch = Batch()
        batch.delete_range(family, b"", b"\xff")
        store.write(batch)
        store.flush(family)
    before = store.properties(G)["sst-bytes"]
    assert store.properties(F)["sst-bytes"] > 10_000
    store.compact(F)
    assert store.properties(F)["sst-bytes"] < 10_000
    assert store.properties(G)["sst-bytes"] == before
    store.compact()
    assert store.properties(G)["sst-bytes"] < 10_000


@pytest.mark.spec("A10")
def test_properties_are_per_family_and_summed_over_all(store: RocksStore) -> None:
    for number, family in enumerate(Family):
        put(store, family, *numbered(number + 1))
    assert store.properties(F)["estimated-rows"] == F + 1
    summed = store.properties()
    assert set(summed) == {*PROPERTIES, *DATABASE_PROPERTIES}
    for name in ("estimated-rows", "memtable-bytes", "sst-bytes"):
        assert summed[name] == sum(store.properties(family)[name] for family in Family)
    assert summed["estimated-rows"] == len(Family) * (len(Family) + 1) // 2


@pytest.mark.spec("A10")
def test_database_figures_are_counted_once(store: RocksStore, monkeypatch: pytest.MonkeyPatch) -> None:
    class Compacting:
        """A family of a database that runs one compaction."""

        def property_int_value(self, name: str) -> int:
            return 1

    with monkeypatch.context() as patched:
        patched.setattr(store, "_families", [Compacting()] * len(Family))
        patched.setattr(store, "_db", Compacting())
        summed, single = store.properties(), store.properties(F)
    assert summed["running-compactions"] == summed["background-errors"] == 1
    assert summed["level-0-files"] == len(Family)
    assert set(single) == set(PROPERTIES), "a single family has no database figures"


@pytest.mark.spec("A10", "A11")
def test_the_size_includes_memtables_sst_files_and_blob_files(store: RocksStore) -> None:
    put(store, Family.STREAM_RECORDS, *numbered(100), value=os.urandom(10_000))
    assert store.size_bytes() >= MIB * 100 // 110
    store.flush()
    properties = store.properties()
    assert properties["blob-bytes"] >= 1_000_000
    assert store.size_bytes() == properties["sst-bytes"] + properties["blob-bytes"] + properties["memtable-bytes"]


@pytest.mark.spec("A10")
def test_statistics_exist_only_when_enabled(store: RocksStore, tmp_path: Path) -> None:
    with pytest.raises(InvalidConfigError, match="open the store with statistics=True"):
        store.statistics()
    counted = open_store(tmp_path / "counted", options=StoreOptions(statistics=True))
    put(counted, F, *numbered(10))
    figures = counted.statistics()
    assert figures["rocksdb.number.keys.written"] == "COUNT : 10"
    counted.close()
    with pytest.raises(StoreClosedError):
        counted.statistics()


@pytest.mark.spec("A10")
def test_a_view_refuses_writes_and_changes(store: RocksStore) -> None:
    put(store, F, b"k")
    store.sync()
    view = open_view(store.path)
    assert view.get(F, b"k") == b"v"
    calls: list[Callable[[], None]] = [
        lambda: put(view, F, b"x"),
        view.sync,
        view.flush,
        view.compact,
        lambda: view.set_options({"write_buffer_size": "1"}),
    ]
    for call in calls:
        with pytest.raises(StoreReadOnlyError, match="opened read-only"):
            call()
    assert view.properties()["estimated-rows"] >= 1
    put(store, F, b"later")
    store.sync()
    view.refresh()
    assert [key for key, _ in view.scan(F)] == [b"k", b"later"]
    view.close()
    view.close()


@pytest.mark.promise("P8")
def test_a_stalled_write_raises_after_the_wait_and_applies_nothing(tmp_path: Path) -> None:
    store = open_store(tmp_path / "store", options=StoreOptions(stall_wait_ms_max=20))
    store.set_options({"level0_file_num_compaction_trigger": "100"}, F)
    for number in range(3):
        put(store, F, b"%d" % number)
        store.flush(F)
    store.set_options({"level0_slowdown_writes_trigger": "2", "level0_stop_writes_trigger": "2"}, F)
    batch = Batch()
    batch.put(F, b"stalled", b"v")
    batch.put(G, b"stalled", b"v")
    for wait_ms in (0, 5, None):
        with pytest.raises(StoreStalledError, match="nothing was written") as caught:
            store.write(batch, wait_ms=wait_ms)
        assert caught.value.retriable
    assert store.get(F, b"stalled") is None
    assert store.get(G, b"stalled") is None
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(store.write, batch, wait_ms=WAIT_S * 1000)
        store.set_options({"level0_slowdown_writes_trigger": "50", "level0_stop_writes_trigger": "60"}, F)
        waiting.result(WAIT_S)
    assert store.get(F, b"stalled") == store.get(G, b"stalled") == b"v"
    store.close()


@pytest.mark.promise("P1")
def test_rows_survive_a_reopen_with_or_without_wal(tmp_path: Path) -> None:
    for round_number in range(3):
        store = open_store(tmp_path / "store")
        assert [key for key, _ in store.scan(F)] == numbered(2 * round_number)
        batch = Batch()
        batch.put(F, numbered(100)[2 * round_number], b"v")
        store.write(batch, wal=False)
        put(store, F, numbered(100)[2 * round_number + 1])
        store.close()


@pytest.mark.promise("P2")
def test_an_inverted_range_is_not_logged(tmp_path: Path) -> None:
    """RocksDB would log it, apply half of the batch, and refuse to open the database afterwards."""
    store = open_store(tmp_path / "store")
    batch = Batch()
    batch.put(F, b"before", b"v")
    batch.delete_range(F, b"b", b"a")
    batch.put(F, b"later", b"v")
    store.write(batch)
    store.poison(OSError("no flush at close"))
    store.close()
    store = open_store(tmp_path / "store")
    assert [key for key, _ in store.scan(F)] == [b"before", b"later"]
    store.close()


def test_closing_a_poisoned_store_does_not_flush_and_recovery_replays_the_wal(tmp_path: Path) -> None:
    store = open_store(tmp_path / "store")
    put(store, F, b"k")
    store.poison(OSError("gone"))
    with pytest.raises(StorePoisonedError):
        store.flush()
    store.close()
    assert not [name for name in os.listdir(tmp_path / "store" / "kv") if name.endswith(".sst")]
    store = open_store(tmp_path / "store")
    assert store.get(F, b"k") == b"v"
    store.close()


def test_a_closed_store_can_be_opened_at_once_despite_open_scans_and_snapshots(tmp_path: Path) -> None:
    store = open_store(tmp_path / "store")
    put(store, F, *numbered(1000))
    scan, snapshot = store.scan(F), store.snapshot(F, G)
    inner = snapshot.scan(F)
    next(scan)
    next(inner)
    untouched = store.scan(F)
    store.close()
    store = open_store(tmp_path / "store")
    for held in (scan, inner, untouched):
        with pytest.raises(StoreClosedError):
            list(held)
    store.close()


@pytest.mark.parametrize("round_number", range(3))
def test_a_store_closed_during_use_can_be_opened_at_once(tmp_path: Path, round_number: int) -> None:
    store = open_store(tmp_path / "store")
    put(store, F, *numbered(3000), value=bytes(100))
    begun = threading.Barrier(5)

    def read() -> None:
        next(store.scan(F))
        begun.wait(WAIT_S)
        try:
            while True:
                list(store.scan(F))
                store.get_many(F, numbered(3000))
        except StoreClosedError:
            return

    with ThreadPoolExecutor(4) as pool:
        readers = [pool.submit(read) for _ in range(4)]
        begun.wait(WAIT_S)
        store.close()
        again = open_store(tmp_path / "store")
        assert sum(1 for _ in again.scan(F)) == 3000
        for reader in readers:
            reader.result(WAIT_S)
        again.close()


def test_a_running_compaction_does_not_delay_close(tmp_path: Path) -> None:
    store = open_store(tmp_path / "store")
    for _ in range(10):
        put(store, Family.STREAM_RECORDS, *(os.urandom(8) for _ in range(100)), value=os.urandom(8000))
        store.flush(Family.STREAM_RECORDS)
    begun = threading.Event()

    def compact() -> str:
        begun.set()
        try:
            while True:
                store.compact(Family.STREAM_RECORDS)
        except StoreClosedError:
            return "closed"

    with ThreadPoolExecutor(1) as pool:
        compacting = pool.submit(compact)
        assert begun.wait(WAIT_S)
        store.close()
        assert compacting.result(WAIT_S) == "closed"
    store = open_store(tmp_path / "store")
    assert sum(1 for _ in store.scan(Family.STREAM_RECORDS)) == 1000
    store.close()


KEPT = Family.QUEUES
"""A family whose unreadable rows are not skipped."""


@pytest.mark.promise("P7")
def test_a_scan_over_damage_names_the_file_and_does_not_keep_the_store_locked(tmp_path: Path) -> None:
    store = open_store(tmp_path / "store")
    put(store, KEPT, *numbered(20_000), value=os.urandom(100))
    store.flush()
    path = max((tmp_path / "store" / "kv").glob("*.sst"), key=lambda each: each.stat().st_size)
    with open(path, "r+b") as file:
        file.seek(path.stat().st_size // 2)
        file.write(b"\xde\xad\xbe\xef" * 8)
    rows: list[bytes] = []
    scan = store.scan(KEPT)
    with pytest.raises(CorruptionError, match=path.name) as caught:
        rows.extend(key for key, _ in scan)
    assert 0 < len(rows) < 20_000
    with store.snapshot(KEPT) as snapshot, pytest.raises(CorruptionError, match=path.name) as caught_too:
        list(snapshot.scan(KEPT, reverse=True))
    with pytest.raises(CorruptionError, match=path.name):
        store.get_many(KEPT, numbered(20_000))
    assert caught.value is not caught_too.value
    store.close()
    assert_not_held(tmp_path / "store")


def assert_not_held(path: Path) -> None:
    """Assert that RocksDB's lock is free although the errors of the scans still exist."""
    Rdict.destroy(str(path / "kv"), Options(raw_mode=True))


@pytest.mark.promise("P8")
def test_errors_of_a_closed_store_do_not_collect_tracebacks(store: RocksStore) -> None:
    store.poison(OSError("gone"))
    seen = set()
    for _ in range(5):
        with pytest.raises(StorePoisonedError) as caught:
            store.get(F, b"k")
        depth, trace = 0, caught.value.__traceback__
        while trace is not None:
            depth, trace = depth + 1, trace.tb_next
        seen.add(depth)
    assert len(seen) == 1


def test_the_properties_of_rocksdict_that_the_store_works_around(store: RocksStore) -> None:
    """If one of these fails, a workaround can be removed."""
    put(store, F, *numbered(10))
    native = store._families[F]

    snapshot = native.snapshot()
    put(store, F, b"\xff later")
    assert len(list(snapshot.keys())) == 11, "iteration of a snapshot honours it"

    reading = ReadOptions()
    reading.set_iterate_lower_bound(numbered(10)[4])
    walk = native.iter(reading)
    walk.seek_to_first()
    assert walk.key() == numbered(10)[0], "the lower bound is one"
    walk.seek_to_last()
    assert walk.key() == numbered(10)[3], "the lower bound is no longer the upper bound"

    iterator = native.iter()
    put(store, F, b"\xff\xff latest")
    iterator.seek_to_last()
    assert iterator.key() == b"\xff later"
    del snapshot, walk, iterator

    batch = WriteBatch(raw_mode=True)
    batch.put(b"half", b"v", store._handles[F])
    batch.delete_range(b"b", b"a", store._handles[F])
    batch.put(b"rest", b"v", store._handles[F])
    with pytest.raises(Exception, match="end key comes before start key"):
        store._db.write(batch)
    store.poison(OSError("the database is in an error state of its own"))
    assert (native.get(b"half"), native.get(b"rest")) == (b"v", None), (
        "a batch with an inverted range is all or nothing"
    )
