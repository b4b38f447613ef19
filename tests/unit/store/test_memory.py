"""Properties of the memory store only. The conformance suite tests the rest."""

from __future__ import annotations

from pathlib import Path

import pytest

from basaltmq.errors import InvalidConfigError, StorageError, StoreClosedError, UnknownOptionError
from basaltmq.store.batch import Batch
from basaltmq.store.families import Family
from basaltmq.store.memory import MemoryStore

F = Family.MESSAGES


def put(store: MemoryStore, key: bytes, value: bytes) -> None:
    batch = Batch()
    batch.put(F, key, value)
    store.write(batch)


def test_the_size_is_exact_after_puts_overwrites_and_deletes() -> None:
    store = MemoryStore()
    put(store, b"abc", b"12345")
    assert store.size_bytes() == 8
    put(store, b"abc", b"1")
    assert store.size_bytes() == 4
    scan = store.scan(F)
    put(store, b"d", b"22")
    assert store.size_bytes() == 7
    batch = Batch()
    batch.delete(F, b"missing")
    batch.delete_range(F, b"a", b"b")
    store.write(batch)
    assert store.size_bytes() == 3
    assert list(scan) == [(b"abc", b"1")]
    assert store.properties(F) == store.properties() == {"estimated-rows": 1, "memtable-bytes": 3}
    assert store.properties(Family.LEASES) == {"estimated-rows": 0, "memtable-bytes": 0}


def test_a_write_copies_a_family_once_per_reader_not_once_per_row() -> None:
    store = MemoryStore()
    put(store, b"a", b"1")
    snapshot = store.snapshot(F)
    before = store._rows[F]
    put(store, b"b", b"2")
    copied = store._rows[F]
    assert copied is not before
    put(store, b"c", b"3")
    assert store._rows[F] is copied
    snapshot.close()


@pytest.mark.spec("A10")
def test_operator_functions_work_on_the_memory_store(tmp_path: Path) -> None:
    store = MemoryStore()
    store.flush()
    store.compact(F)
    store.set_options({})
    assert store.verify() == []
    with pytest.raises(UnknownOptionError, match="'write_buffer_size'"):
        store.set_options({"write_buffer_size": "1"})
    with pytest.raises(InvalidConfigError, match="no statistics"):
        store.statistics()
    with pytest.raises(StorageError, match="no files"):
        store.checkpoint(tmp_path / "copy")
    store.close()
    for call in (store.flush, store.compact, store.properties, store.statistics, store.verify):
        with pytest.raises(StoreClosedError):
            call()
    with pytest.raises(StoreClosedError):
        store.checkpoint(tmp_path / "copy")
