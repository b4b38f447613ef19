"""Properties of the RocksDB engine only: its rows, limits and bounded steps."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.conformance.stream_engines import Rig, drained, fill, offsets, record

from basaltmq.durability import Durability
from basaltmq.errors import CorruptionError, StorageError, StorePoisonedError
from basaltmq.log.batches.record import Record, StoredRecord
from basaltmq.store.batch import Batch
from basaltmq.store.families import Family
from basaltmq.store.keys import streams as stream_keys
from basaltmq.streams import adapter, watermark
from basaltmq.streams.engines.retention import Extent, start_offset_after
from basaltmq.streams.engines.rocksdb.engine import RocksdbEngine
from basaltmq.streams.engines.rocksdb.record_row import decode_row, encode_row, row_times
from basaltmq.streams.shards import ShardConfig

FAMILIES = (Family.STREAM_RECORDS, Family.STREAM_RECORD_INDEX)
SMALL = st.binary(max_size=20)


@pytest.fixture
def rig(tmp_path: Path) -> Iterator[Rig]:
    made = Rig("rocksdb", tmp_path, on_disk=False)
    yield made
    made.close()


def rows(rig: Rig) -> int:
    return sum(1 for family in FAMILIES for _ in rig.store.scan(family))


@pytest.mark.spec("B6")
@pytest.mark.promise("P7")
@given(
    written=st.builds(
        Record,
        value=SMALL,
        key=st.none() | SMALL,
        headers=st.lists(
            st.tuples(st.text(st.characters(exclude_categories=["Cs"]), max_size=5), SMALL), max_size=3
        ).map(tuple),
        tags=st.lists(SMALL, max_size=3).map(tuple),
        timestamp_ms=st.integers(0, (1 << 63) - 1),
        expire_at_ms=st.integers(0, (1 << 63) - 1),
    ),
    at=st.integers(0, 1 << 20),
    bit=st.integers(0, 7),
)
def test_a_row_survives_a_round_trip_and_any_change_is_detected(written: Record, at: int, bit: int) -> None:
    key = stream_keys.stream_record_key(3, 9)
    raw = encode_row(key, written, 77)
    found = decode_row(key, raw)
    assert isinstance(found, StoredRecord)
    assert found.offset == 9
    for name in Record.__struct_fields__:
        assert getattr(found, name) == getattr(written, name)
    assert row_times(raw) == (77, written.timestamp_ms, written.expire_at_ms)
    flipped = bytearray(raw)
    flipped[at % len(raw)] ^= 1 << bit
    for damaged in (bytes(flipped), raw[: at % len(raw)], raw + b"\x00"):
        with pytest.raises(CorruptionError, match="record 9 of shard 3"):
            decode_row(key, damaged)
    with pytest.raises(CorruptionError):
        decode_row(stream_keys.stream_record_key(3, 10), raw)


@pytest.mark.spec("B6")
@pytest.mark.promise("P7")
def test_a_damaged_record_is_named_and_its_neighbours_can_be_read(rig: Rig) -> None:
    shard = rig.shard()
    fill(rig, shard, 5)
    key = stream_keys.stream_record_key(shard, 2)
    raw = rig.store.get(Family.STREAM_RECORDS, key)
    batch = Batch()
    batch.put(Family.STREAM_RECORDS, key, raw[:-1] + b"?")
    rig.store.write(batch)
    assert [each.offset for each in rig.engine.read_by_offset(shard, 0, max_records=2).records()] == [0, 1]
    with pytest.raises(CorruptionError, match=f"record 2 of shard {shard}"):
        rig.engine.read_by_offset(shard, 2)
    assert [each.offset for each in rig.engine.read_by_offset(shard, 3).records()] == [3, 4]


@pytest.mark.spec("B6")
@pytest.mark.promise("P2")
def test_an_append_is_one_batch_of_records_index_and_tail(rig: Rig) -> None:
    shard = rig.shard()
    batches: list[Batch] = []
    write = rig.store.write

    def seen(batch: Batch, **options: object) -> None:
        batches.append(batch)
        write(batch, **options)

    rig.store.write = seen  # type: ignore[method-assign]
    records = [record(n, key=b"k", tags=(b"t", b"u"), expire_at_ms=9, timestamp_ms=n) for n in range(3)]
    rig.engine.batch_write(shard, records)
    assert len(batches) == 1
    kinds = [key[:1] for _, family, key, _ in batches[0].ops if family is Family.STREAM_RECORD_INDEX]
    assert sorted(kinds) == [b"E"] * 3 + [b"G"] * 6 + [b"K"] * 3 + [b"N"] + [b"T"] * 3
    assert sum(family is Family.STREAM_RECORDS for _, family, _, _ in batches[0].ops) == 3


@pytest.mark.spec("B10")
@pytest.mark.promise("P3")
def test_a_large_prefix_is_deleted_in_steps_with_its_index_rows(rig: Rig) -> None:
    shard = rig.shard(index_times=False)
    for _ in range(3):
        rig.engine.batch_write(shard, [record("x", key=b"k", tags=(b"t",))] * 4_000)
    assert rig.engine.delete_records_before(shard, 11_990) == 11_990
    info = rig.engine.shard_info(shard)
    assert (info.records, info.next_offset) == (10, 12_000)
    assert info.size_bytes == sum(len(value) for _, value in rig.store.scan(Family.STREAM_RECORDS))
    assert rows(rig) == 10 * 3 + 1
    assert offsets(rig, shard) == list(range(11_990, 12_000))
    assert rig.engine.delete_by_key(shard, b"k") == 10
    assert rows(rig) == 1


@pytest.mark.promise("P10")
@pytest.mark.parametrize("count", [10, 200])
def test_a_deleted_shard_leaves_no_row(rig: Rig, count: int) -> None:
    kept = rig.shard()
    fill(rig, kept, 3, key=b"k", tags=(b"t",))
    before = rows(rig)
    shard = rig.shard()
    fill(rig, shard, count, key=b"k", tags=(b"t",), expire_at_ms=rig.clock.now_ms + 5)
    rig.engine.delete_shard(shard)
    assert rows(rig) == before + count
    rig.clock.now_ms += 5
    rig.engine.retain(rig.clock.now_ms)
    assert rows(rig) == before
    assert offsets(rig, kept) == [0, 1, 2]


@pytest.mark.promise("P8")
def test_idle_shards_use_no_memory(rig: Rig) -> None:
    rig.engine = RocksdbEngine(
        rig.store, rig.shards, rig.offsets, rig.clock, watermarks=rig.watermarks, shards_loaded_max=4
    )
    shards = [rig.shard() for _ in range(20)]
    for turn in range(3):
        for shard in shards:
            assert rig.engine.write(shard, record("x")).base_offset == turn
    assert isinstance(rig.engine, RocksdbEngine)
    assert len(rig.engine._tails.loaded()) <= 5


@pytest.mark.promise("P8")
def test_a_lookup_without_index_examines_a_bounded_number_of_records(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(adapter, "SCANNED_MAX", 10)
    shard = rig.shard(index_tags=False)
    rig.engine.batch_write(shard, [record(n, tags=(b"last",) if n == 49 else ()) for n in range(50)])
    at, reads = 0, 0
    found: list[StoredRecord] = []
    while at < 50:
        batch = rig.engine.read_by_tag(shard, b"last", at)
        assert batch.next_offset <= at + 10
        found += batch.records()
        at = batch.next_offset
        reads += 1
    assert (reads, [each.offset for each in found]) == (5, [49])


@pytest.mark.promise("P8")
def test_writers_without_a_waiter_are_throttled(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watermark, "UNSYNCED_APPENDS_MAX", 5)
    shard = rig.shard(durability=Durability.SYNCED)
    syncs = rig.store.syncs
    for number in range(6):
        rig.engine.write(shard, record(number))
    assert rig.store.syncs == syncs + 1
    assert rig.engine.shard_info(shard).high_watermark == 6


@pytest.mark.promise("P1", "P11")
def test_records_of_a_failed_sync_stay_invisible_and_its_waiters_fail(rig: Rig) -> None:
    shard = rig.shard(durability=Durability.SYNCED)
    append = rig.engine.write(shard, record("x"))
    rig.store.fail_sync = StorageError("on purpose")
    with pytest.raises(StorageError, match="on purpose"):
        rig.engine.wait(append)
    assert rig.watermarks._synced < append.sequence
    rig.store.fail_sync = None
    with pytest.raises(StorePoisonedError):
        rig.engine.write(shard, record("y"))
    rig._memory._error = None
    assert rig.engine.shard_info(shard).high_watermark == 0


@pytest.mark.promise("P3")
def test_a_sync_shows_only_earlier_writes(rig: Rig) -> None:
    shard = rig.shard(durability=Durability.SYNCED)
    first = rig.engine.write(shard, record("first"))
    with rig.syncs_held():
        waiter = threading.Thread(target=rig.engine.wait, args=(first,))
        waiter.start()
        assert rig.store.arrived.wait(30)
        second = rig.engine.write(shard, record("second"))
    waiter.join(30)
    assert rig.engine.shard_info(shard).high_watermark in (1, 2)
    assert first.sequence < second.sequence
    if rig.watermarks._synced < second.sequence:
        assert offsets(rig, shard) == [0]
    rig.engine.wait(second)
    assert [each.value for each in drained(rig, shard)] == [b"first", b"second"]


@pytest.mark.spec("B10")
def test_retention_decides_by_extents() -> None:
    extents = [Extent(10, 10, 100, 5), Extent(20, 10, 100, 50), Extent(30, 10, 100, 7)]

    def start(now_ms: int = 0, **limits: Any) -> int:
        return start_offset_after(ShardConfig(**limits), 0, 30, 300, extents, now_ms)

    assert start() == 0
    assert [start(retention_records=limit) for limit in (30, 29, 20, 19, 10, 9, 0)] == [0, 0, 10, 10, 20, 20, 30]
    assert [start(retention_bytes=limit) for limit in (300, 299, 200, 150, 100, 0)] == [0, 10, 10, 20, 20, 30]
    assert [start(now, retention_ms=10) for now in (14, 15, 59, 60)] == [0, 10, 10, 30]
    assert start(15, retention_ms=10, retention_records=10) == 20
