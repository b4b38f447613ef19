"""The options file of an open database matches the profiles and settings."""

from __future__ import annotations

import contextlib
import time
from pathlib import Path

import pytest

from basaltmq.store.batch import Batch
from basaltmq.store.families import BODIES, MIB, Family
from basaltmq.store.open import open_store
from basaltmq.store.options import BUFFERS_MAX, UNFLUSHED_MAX, SharedMemory, StoreOptions
from basaltmq.store.rocks_properties import UNFLUSHED, families_of


def written_options(path: Path) -> dict[str, dict[str, str]]:
    """Return section -> option -> value from RocksDB's options file."""
    newest = max((path / "kv").glob("OPTIONS-*"), key=lambda each: int(each.name.partition("-")[2]))
    sections: dict[str, dict[str, str]] = {}
    section: dict[str, str] = {}
    for line in newest.read_text().splitlines():
        line = line.strip()
        if line.startswith("["):
            section = sections.setdefault(line.strip("[]"), {})
        elif "=" in line:
            name, _, value = line.partition("=")
            section[name.strip()] = value.strip()
    return sections


@pytest.mark.spec("A1")
def test_every_family_has_the_options_of_its_profile(tmp_path: Path) -> None:
    open_store(tmp_path / "store").close()
    sections = written_options(tmp_path / "store")
    for family in Family:
        if family is Family.DEFAULT:
            continue
        found, profile = sections[f'CFOptions "{family.label}"'], family.profile
        assert int(found["write_buffer_size"]) == profile.write_buffer_bytes, family
        assert (found["enable_blob_files"] == "true") == (profile.blob_bytes_min is not None), family
        if profile.blob_bytes_min is not None:
            assert int(found["min_blob_size"]) == profile.blob_bytes_min
            assert int(found["max_write_buffer_number"]) == BUFFERS_MAX
            assert found["enable_blob_garbage_collection"] == "true"
            assert float(found["blob_garbage_collection_force_threshold"]) == 0.5
        table = sections[f'TableOptions/BlockBasedTable "{family.label}"']
        assert table["cache_index_and_filter_blocks"] == "true", "index blocks count towards the shared memory limit"
        assert ("bloomfilter" in table["filter_policy"].lower()) == profile.bloom, family


@pytest.mark.promise("P8")
def test_database_options_take_effect(tmp_path: Path) -> None:
    options = StoreOptions(open_files_max=77, wal_bytes_max=9 * MIB, background_jobs=3)
    open_store(tmp_path / "store", options=options).close()
    database = written_options(tmp_path / "store")["DBOptions"]
    assert database["max_open_files"] == "77"
    assert database["max_total_wal_size"] == str(9 * MIB)
    assert database["max_background_jobs"] == "3"
    assert database["paranoid_checks"] == "true"


@pytest.mark.promise("P8", "P9")
def test_the_wal_size_is_bounded(tmp_path: Path) -> None:
    """A family with one old row must not retain all later WAL files."""
    store = open_store(tmp_path / "store", options=StoreOptions(wal_bytes_max=2 * MIB))
    batch = Batch()
    batch.put(Family.STATE, b"old", b"row")
    store.write(batch)
    for number in range(400):
        batch = Batch()
        batch.put(Family.MESSAGES, b"%d" % number, bytes(50_000))
        store.write(batch)
    store.flush(Family.MESSAGES)
    deadline = time.monotonic() + 30
    while log_bytes(tmp_path / "store") > 4 * MIB and time.monotonic() < deadline:
        # A write triggers the flush that frees old WAL files. It runs in the background.
        store.write(batch)
        time.sleep(0.01)
    assert log_bytes(tmp_path / "store") <= 4 * MIB
    store.close()


def log_bytes(path: Path) -> int:
    total = 0
    for each in (path / "kv").glob("*.log"):
        # RocksDB may delete a WAL file between the listing and the stat.
        with contextlib.suppress(FileNotFoundError):
            total += each.stat().st_size
    return total


@pytest.mark.promise("P8")
def test_stores_of_a_process_share_one_memory_budget(tmp_path: Path) -> None:
    memory = SharedMemory(cache_bytes=4 * MIB, write_buffer_bytes=16 * MIB)
    stores = [open_store(tmp_path / str(number), options=StoreOptions(memory=memory)) for number in range(3)]
    for number in range(1000):
        batch = Batch()
        batch.put(Family.MESSAGES, b"%d" % number, bytes(10_000))
        batch.put(Family.CONTENT_REFS, b"%d" % number, bytes(10_000))
        for store in stores:
            store.write(batch)
    assert memory.write_buffers.get_buffer_size() == 16 * MIB
    # No family has filled its own buffer of 16 MiB, so the shared budget triggers the flushes.
    deadline = time.monotonic() + 30
    while memory.write_buffers.get_usage() > 16 * MIB and time.monotonic() < deadline:
        # The next write over the budget triggers a flush.
        for store in stores:
            store.write(batch)
        time.sleep(0.01)
    assert memory.write_buffers.get_usage() <= 16 * MIB
    assert sum(store.properties()["sst-bytes"] for store in stores) > 0
    for store in stores:
        store.close()


@pytest.mark.promise("P13")
def test_a_store_is_behind_while_full_memtables_of_bodies_wait_for_their_flush(tmp_path: Path) -> None:
    with contextlib.closing(open_store(tmp_path / "store")) as store:
        family = store._families[Family.MESSAGES]
        assert family.property_int_value(UNFLUSHED) == 0
        assert not store.is_behind()
        waiting = dict.fromkeys(Family, 0)
        store._families = [_Waiting(waiting, each) for each in Family]  # type: ignore[misc]
        for each in BODIES:
            waiting[each] = UNFLUSHED_MAX - 1
            assert not store.is_behind()
            waiting[each] = UNFLUSHED_MAX
            assert store.is_behind(), each
            waiting[each] = 0
        waiting[Family.QUEUES] = UNFLUSHED_MAX
        assert not store.is_behind()
        store._families = families_of(store._db)


class _Waiting:
    """A family whose full memtables are never flushed."""

    def __init__(self, waiting: dict[Family, int], family: Family) -> None:
        self._waiting = waiting
        self._family = family

    def property_int_value(self, name: str) -> int:
        assert name == UNFLUSHED
        return self._waiting[self._family]
