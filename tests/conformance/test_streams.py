"""Conformance of all stream engines (SPEC B2, B3, B6, B10)."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tests.conformance.stream_engines import ENGINES, START_MS, Rig, drained, fill, offsets, record

from basaltmq.durability import Durability
from basaltmq.errors import (
    BasaltError,
    InvalidArgumentError,
    InvalidConfigError,
    LimitExceededError,
    NotLeaderError,
    OffsetOutOfRangeError,
    ShardNotFoundError,
    StoreOverfullError,
)
from basaltmq.log.batches.columnar import ColumnBatch
from basaltmq.log.batches.record import RECORD_BYTES_MAX, Record
from basaltmq.streams.adapter import BATCH_BYTES_MAX, BATCH_RECORDS_MAX, IfAllOlder
from basaltmq.streams.engines.memory import MemoryEngine
from basaltmq.streams.shards import Engine, ShardConfig, ShardSpec

DURABLE = [name for name in sorted(ENGINES) if name != "memory"]


@pytest.fixture(params=sorted(ENGINES))
def rig(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Rig]:
    made = Rig(request.param, tmp_path)
    yield made
    made.close()


@pytest.fixture(params=DURABLE)
def durable_rig(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Rig]:
    made = Rig(request.param, tmp_path)
    yield made
    made.close()


@pytest.mark.spec("B2", "B6")
@pytest.mark.promise("P3")
def test_offsets_are_dense_from_zero_per_shard(rig: Rig) -> None:
    one, two = rig.shard(), rig.shard()
    assert (rig.engine.write(one, record("a")).base_offset, rig.engine.write(one, record("b")).base_offset) == (0, 1)
    batch = rig.engine.batch_write(one, [record("c"), record("d")])
    assert (batch.base_offset, batch.last_offset, batch.count) == (2, 3, 2)
    assert rig.engine.write(two, record("x")).base_offset == 0
    assert [each.value for each in drained(rig, one)] == [b"a", b"b", b"c", b"d"]
    assert [each.offset for each in drained(rig, one)] == [0, 1, 2, 3]
    assert [each.value for each in drained(rig, two)] == [b"x"]


@pytest.mark.spec("B2")
def test_record_round_trips(rig: Rig) -> None:
    shard = rig.shard()
    written = Record(
        value=b"\x00\xffvalue",
        key=b"k\x00",
        headers=(("a", b"1"), ("a", b""), ("ü", b"\xff")),
        tags=(b"red", b"", b"red"),
        timestamp_ms=5,
        expire_at_ms=START_MS + 1,
    )
    rig.engine.batch_write(shard, [written, Record(value=b""), Record(value=b"x", key=b"")])
    first, second, third = rig.engine.read_by_offset(shard, 0).records()
    assert (first.value, first.key, first.headers, first.tags) == (
        written.value,
        written.key,
        written.headers,
        written.tags,
    )
    assert (first.timestamp_ms, first.expire_at_ms, first.offset) == (5, START_MS + 1, 0)
    assert (second.value, second.key, second.timestamp_ms) == (b"", None, START_MS)
    assert third.key == b""


@pytest.mark.spec("B2", "B6")
@settings(max_examples=15, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(keys=st.lists(st.binary(max_size=40), min_size=1, max_size=6))
def test_keys_and_tags_of_any_bytes_are_distinguished(rig: Rig, keys: list[bytes]) -> None:
    shard = rig.shard()
    rig.engine.batch_write(shard, [record(key, key=key, tags=(key, key + b"\x00")) for key in keys])
    for key in keys:
        expected = [at for at, each in enumerate(keys) if each == key]
        assert [each.offset for each in rig.engine.read_by_key(shard, key, 0).records()] == expected
        tagged = [at for at, each in enumerate(keys) if key in (each, each + b"\x00")]
        assert [each.offset for each in rig.engine.read_by_tag(shard, key, 0).records()] == tagged


@pytest.mark.spec("B2")
@pytest.mark.parametrize("indexed", [True, False])
def test_lookups_match_with_and_without_an_index(rig: Rig, indexed: bool) -> None:
    shard = rig.shard(index_keys=indexed, index_tags=indexed, index_times=indexed)
    for number in range(20):
        rig.engine.write(
            shard, record(number, key=b"k%d" % (number % 3), tags=(b"t%d" % (number % 4),), timestamp_ms=number * 10)
        )
    rig.engine.delete_by_offset(shard, [3])
    assert [r.offset for r in rig.engine.read_by_key(shard, b"k0", 1).records()] == [6, 9, 12, 15, 18]
    assert [r.offset for r in rig.engine.read_by_tag(shard, b"t1", 2).records()] == [5, 9, 13, 17]
    assert rig.engine.read_by_tag(shard, b"t9", 0).records() == []
    assert rig.engine.read_by_key(shard, b"none", 0).records() == []
    assert rig.engine.get_offset_by_timestamp(shard, 95, IfAllOlder.LATEST) == 10
    assert rig.engine.get_offset_by_timestamp(shard, 30, IfAllOlder.LATEST) == 4
    assert rig.engine.delete_by_key(shard, b"k0") == 6
    assert rig.engine.read_by_key(shard, b"k0", 0).records() == []
    assert rig.engine.shard_info(shard).records == 13


@pytest.mark.spec("B2")
def test_lookup_continues_at_its_next_offset(rig: Rig) -> None:
    shard = rig.shard()
    fill(rig, shard, 10, key=b"k", tags=(b"t",))
    for read in (rig.engine.read_by_key, rig.engine.read_by_tag):
        name = b"k" if read == rig.engine.read_by_key else b"t"
        at, seen = 0, []
        while at < 10:
            batch = read(shard, name, at, max_records=3)
            assert 1 <= len(batch) <= 3
            seen += [each.offset for each in batch.records()]
            at = batch.next_offset
        assert seen == list(range(10))


@pytest.mark.spec("B6")
def test_first_record_is_returned_even_over_the_byte_limit(rig: Rig) -> None:
    shard = rig.shard()
    rig.engine.batch_write(shard, [record(b"x" * 1000), record(b"y" * 10), record(b"z" * 10)])
    first = rig.engine.read_by_offset(shard, 0, max_bytes=1)
    assert [len(each.value or b"") for each in first.records()] == [1000]
    assert first.next_offset == 1
    rest = rig.engine.read_by_offset(shard, 1, max_bytes=20)
    assert [each.offset for each in rest.records()] == [1, 2]
    assert [each.offset for each in rig.engine.read_by_offset(shard, 1, max_bytes=19).records()] == [1]
    assert [each.offset for each in rig.engine.read_by_offset(shard, 0, max_records=2).records()] == [0, 1]


@pytest.mark.spec("B6")
@pytest.mark.promise("P8")
def test_empty_and_maximum_size_records_are_accepted_and_larger_ones_refused(rig: Rig) -> None:
    shard = rig.shard()
    rig.engine.write(shard, record(b""))
    large = b"\xa5" * RECORD_BYTES_MAX
    rig.engine.write(shard, record(large))
    with pytest.raises(LimitExceededError, match="record_bytes_max"):
        rig.engine.batch_write(shard, [record("small"), record(large + b"!")])
    with pytest.raises(LimitExceededError, match=str(BATCH_BYTES_MAX)):
        rig.engine.batch_write(shard, [record(large)] * 5)
    with pytest.raises(LimitExceededError, match=str(BATCH_RECORDS_MAX)):
        rig.engine.batch_write(shard, [record("")] * (BATCH_RECORDS_MAX + 1))
    with pytest.raises(InvalidArgumentError, match="empty"):
        rig.engine.batch_write(shard, [])
    assert rig.engine.write(shard, record("after")).base_offset == 2
    found = drained(rig, shard)
    assert [len(each.value or b"") for each in found] == [0, RECORD_BYTES_MAX, 5]
    assert found[1].value == large


@pytest.mark.spec("B6")
def test_topic_sets_the_maximum_record_size(rig: Rig) -> None:
    shard = rig.shard(record_bytes_max=10)
    rig.engine.write(shard, record(b"x" * 10))
    with pytest.raises(LimitExceededError):
        rig.engine.write(shard, record(b"x" * 11))


@pytest.mark.spec("B2")
@pytest.mark.parametrize(
    "fields", [{"value": "text"}, {"key": "k"}, {"tags": [b"t"]}, {"timestamp_ms": -2}, {"headers": (("n", "v"),)}]
)
def test_record_of_wrong_types_is_refused(rig: Rig, fields: dict[str, Any]) -> None:
    shard = rig.shard()
    wrong = Record(**({"value": b""} | fields))
    with pytest.raises(InvalidArgumentError):
        rig.engine.batch_write(shard, [record("good"), wrong])
    assert rig.engine.shard_info(shard).next_offset == 0


@pytest.mark.spec("B2", "B6")
def test_time_lookup_returns_the_first_offset_not_older(rig: Rig) -> None:
    shard = rig.shard()
    times = [50, 10, 70, 20, 70, 60, 90, 5]
    for time_ms in times:
        rig.engine.write(shard, record("", timestamp_ms=time_ms))
    for asked in range(0, 95, 5):
        expected = next((at for at, time_ms in enumerate(times) if time_ms >= asked), None)
        assert rig.engine.get_offset_by_timestamp(shard, asked, IfAllOlder.LATEST) == (
            8 if expected is None else expected
        )
    assert rig.engine.get_offset_by_timestamp(shard, 91, IfAllOlder.EARLIEST) == 0
    assert rig.engine.get_offset_by_timestamp(shard, 91, IfAllOlder.LATEST) == 8


@pytest.mark.spec("B2")
def test_time_lookup_skips_deleted_records(rig: Rig) -> None:
    shard = rig.shard()
    for time_ms in (100, 50, 60, 200, 150):
        rig.engine.write(shard, record("", timestamp_ms=time_ms))
    rig.engine.delete_by_offset(shard, [3])
    assert rig.engine.get_offset_by_timestamp(shard, 120, IfAllOlder.LATEST) == 4
    rig.engine.delete_records_before(shard, 1)
    assert rig.engine.get_offset_by_timestamp(shard, 55, IfAllOlder.LATEST) == 2
    assert rig.engine.get_offset_by_timestamp(shard, 40, IfAllOlder.LATEST) == 1
    assert rig.engine.get_offset_by_timestamp(shard, 151, IfAllOlder.EARLIEST) == 1
    empty = rig.shard()
    assert rig.engine.get_offset_by_timestamp(empty, 0, IfAllOlder.LATEST) == 0


@pytest.mark.spec("B6")
@pytest.mark.promise("P3")
def test_clock_set_back_affects_neither_offsets_nor_lookups(rig: Rig) -> None:
    shard = rig.shard()
    fill(rig, shard, 3)
    rig.clock.now_ms -= 1_000_000
    fill(rig, shard, 3)
    rig.clock.now_ms += 2_000_000
    fill(rig, shard, 1)
    assert offsets(rig, shard) == list(range(7))
    assert rig.engine.get_offset_by_timestamp(shard, START_MS, IfAllOlder.LATEST) == 0
    assert rig.engine.get_offset_by_timestamp(shard, START_MS + 1, IfAllOlder.LATEST) == 6


@pytest.mark.spec("B2")
@pytest.mark.promise("P3")
def test_offsets_of_deleted_records_are_not_reused(rig: Rig) -> None:
    shard = rig.shard()
    fill(rig, shard, 6, key=b"k")
    assert rig.engine.delete_by_offset(shard, [1, 5, 5, 99, -1]) == 2
    assert rig.engine.delete_by_offset(shard, [1]) == 0
    assert offsets(rig, shard) == [0, 2, 3, 4]
    assert rig.engine.write(shard, record("next")).base_offset == 6
    assert rig.engine.delete_by_key(shard, b"k") == 4
    assert rig.engine.delete_by_key(shard, b"k") == 0
    assert offsets(rig, shard) == [6]
    assert rig.engine.shard_info(shard).start_offset == 0


@pytest.mark.spec("B2")
def test_read_outside_the_range_names_the_available_offsets(rig: Rig) -> None:
    shard = rig.shard()
    fill(rig, shard, 10)
    assert rig.engine.delete_records_before(shard, 4) == 4
    assert rig.engine.delete_records_before(shard, 2) == 4
    reads: list[Callable[[], object]] = [
        lambda: rig.engine.read_by_offset(shard, 3),
        lambda: rig.engine.read_by_key(shard, b"k", 0),
        lambda: rig.engine.read_by_tag(shard, b"t", 3),
    ]
    for read in reads:
        with pytest.raises(OffsetOutOfRangeError, match="offsets 4 to 10 are") as caught:
            read()
        assert (caught.value.earliest, caught.value.latest) == (4, 10)
    assert offsets(rig, shard) == [4, 5, 6, 7, 8, 9]
    for beyond in (10, 11, 1 << 40):
        batch = rig.engine.read_by_offset(shard, beyond)
        assert (len(batch), batch.next_offset, batch.high_watermark, batch.start_offset) == (0, beyond, 10, 4)
    with pytest.raises(InvalidArgumentError, match="negative"):
        rig.engine.read_by_offset(shard, -1)
    with pytest.raises(InvalidArgumentError):
        rig.engine.read_by_offset(shard, 4, max_records=0)


@pytest.mark.spec("B6", "B10")
@pytest.mark.promise("P3")
def test_emptied_shard_continues_its_offsets(rig: Rig) -> None:
    shard = rig.shard()
    fill(rig, shard, 5)
    assert rig.engine.delete_records_before(shard, 99) == 5
    info = rig.engine.shard_info(shard)
    assert (info.start_offset, info.next_offset, info.records, info.size_bytes) == (5, 5, 0, 0)
    assert rig.engine.write(shard, record("x")).base_offset == 5
    if rig.is_durable:
        rig.engine.delete_records_before(shard, 6)
        rig.reopen()
        assert rig.engine.write(shard, record("y")).base_offset == 6


@pytest.mark.spec("B2")
def test_writers_of_one_shard_are_serialised(rig: Rig) -> None:
    shard = rig.shard()
    rounds, size = 40, 5
    appends: list[tuple[str, int]] = []
    failures: list[BaseException] = []
    begin = threading.Barrier(3)

    def writer(name: str) -> None:
        try:
            begin.wait(30)
            for number in range(rounds):
                batch = [record(f"{name} {number} {at}") for at in range(size)]
                append = rig.engine.batch_write(shard, batch)
                rig.engine.wait(append)
                appends.append((name, append.base_offset))
        except BaseException as error:
            failures.append(error)

    def reader() -> None:
        try:
            begin.wait(30)
            seen = 0
            while seen < 2 * rounds * size and not failures:
                batch = rig.engine.read_by_offset(shard, seen)
                assert [each.offset for each in batch.records()] == list(range(seen, seen + len(batch)))
                seen = batch.next_offset
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=writer, args=(name,)) for name in ("a", "b")]
    threads.append(threading.Thread(target=reader))
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
        assert not thread.is_alive()
    assert not failures, failures
    found = drained(rig, shard)
    assert [each.offset for each in found] == list(range(2 * rounds * size))
    bases = {base: name for name, base in appends}
    assert len(bases) == 2 * rounds
    for name in ("a", "b"):
        mine = [(each.value or b"").decode() for each in found if (each.value or b"").decode().startswith(name)]
        assert mine == [f"{name} {number} {at}" for number in range(rounds) for at in range(size)]
    for base, name in bases.items():
        assert all((each.value or b"").decode().startswith(name) for each in found[base : base + size])


@pytest.mark.promise("P1", "P3")
def test_synced_record_is_visible_after_the_sync_and_hides_later_ones(durable_rig: Rig) -> None:
    rig = durable_rig
    shard = rig.shard()
    fill(rig, shard, 2)
    with rig.syncs_held():
        append = rig.engine.write(shard, record("synced"), Durability.SYNCED)
        later = rig.engine.write(shard, record("written"), Durability.WRITTEN)
        rig.engine.wait(later)
        reported = threading.Event()

        def waiting() -> None:
            rig.engine.wait(append)
            reported.set()

        waiter = threading.Thread(target=waiting)
        waiter.start()
        assert rig.store.arrived.wait(30)
        assert not reported.is_set()
        info = rig.engine.shard_info(shard)
        assert (info.high_watermark, info.next_offset) == (2, 4)
        assert offsets(rig, shard) == [0, 1]
        assert rig.engine.read_by_offset(shard, 2).records() == []
        assert rig.engine.get_offset_by_timestamp(shard, START_MS + 1, IfAllOlder.LATEST) == 2
    waiter.join(30)
    assert reported.is_set()
    assert offsets(rig, shard) == [0, 1, 2, 3]


@pytest.mark.promise("P1")
def test_confirmed_records_are_readable_at_once(durable_rig: Rig) -> None:
    rig = durable_rig
    shard = rig.shard(durability=Durability.SYNCED)
    for number in range(20):
        append = rig.engine.write(shard, record(number))
        assert append.durability is Durability.SYNCED
        rig.engine.wait(append)
        assert rig.engine.shard_info(shard).high_watermark == number + 1


@pytest.mark.promise("P1")
def test_loop_callback_runs_when_the_append_is_durable(rig: Rig) -> None:
    shard = rig.shard(durability=Durability.SYNCED if rig.is_durable else Durability.MEMORY)

    async def appending() -> list[int]:
        appends = [rig.engine.write(shard, record(number)) for number in range(10)]
        await asyncio.wait_for(asyncio.gather(*(rig.engine.confirmed(each) for each in appends)), 30)
        return [each.base_offset for each in appends]

    assert asyncio.run(appending()) == list(range(10))
    assert offsets(rig, shard) == list(range(10))


@pytest.mark.promise("P1")
def test_reported_durability_is_never_above_the_actual(tmp_path: Path) -> None:
    rig = Rig("memory", tmp_path)
    with pytest.raises(InvalidConfigError, match="cannot provide durability 'synced'"):
        rig.shard(durability=Durability.SYNCED)
    shard = rig.shard()
    with pytest.raises(InvalidConfigError, match="cannot provide durability 'written'"):
        rig.engine.write(shard, record("x"), Durability.WRITTEN)
    assert rig.engine.shard_info(shard).next_offset == 0
    rig.close()


@pytest.mark.spec("B3", "B6")
@pytest.mark.promise("P3")
def test_records_survive_reopening_the_engine(durable_rig: Rig) -> None:
    rig = durable_rig
    topic = uuid4()
    shard = rig.shard(topic, 7)
    other = rig.shard()
    for number in range(30):
        rig.engine.write(shard, record(number, key=b"k%d" % (number % 5), tags=(b"t",), timestamp_ms=1_000 - number))
    rig.engine.write(other, record("other"))
    rig.engine.delete_by_offset(shard, [29])
    rig.engine.delete_by_key(shard, b"k1")
    rig.engine.delete_records_before(shard, 3)
    rig.engine.commit_offset("group", {shard: 9, other: 1})
    before = [(each.offset, each.value) for each in drained(rig, shard)]
    info = rig.engine.shard_info(shard)
    rig.reopen()
    assert [(each.offset, each.value) for each in drained(rig, shard)] == before
    assert rig.engine.shard_info(shard) == info
    assert rig.shards.find(topic, 7).number == shard
    assert [each.offset for each in rig.engine.read_by_key(shard, b"k0", 3).records()] == [5, 10, 15, 20, 25]
    assert rig.engine.get_offset_by_timestamp(shard, 990, IfAllOlder.LATEST) == 3
    assert rig.engine.get_offset_by_group("group", [shard, other]) == {shard: 9, other: 1}
    assert rig.engine.write(shard, record("x")).base_offset == 30


@pytest.mark.spec("B2")
@pytest.mark.promise("P10")
def test_recreated_shard_is_empty(rig: Rig) -> None:
    topic = uuid4()
    first = rig.shard(topic, 0)
    fill(rig, first, 100, key=b"k", tags=(b"t",))
    rig.engine.delete_shard(first)
    for call in (
        lambda: rig.engine.read_by_offset(first, 0),
        lambda: rig.engine.write(first, record("x")),
        lambda: rig.engine.shard_info(first),
        lambda: rig.engine.delete_shard(first),
    ):
        with pytest.raises(ShardNotFoundError):
            call()
    second = rig.shard(topic, 0)
    assert second > first
    assert rig.engine.write(second, record("new", key=b"k", tags=(b"t",))).base_offset == 0
    assert [each.value for each in drained(rig, second)] == [b"new"]
    assert len(rig.engine.read_by_key(second, b"k", 0)) == 1
    assert len(rig.engine.read_by_tag(second, b"t", 0)) == 1
    if rig.is_durable:
        rig.reopen()
        assert [each.value for each in drained(rig, second)] == [b"new"]
        with pytest.raises(ShardNotFoundError):
            rig.engine.read_by_offset(first, 0)
    rig.engine.delete_shard(second)
    rig.reopen()
    third = rig.shard(topic, 0)
    assert third > second
    assert drained(rig, third) == []


@pytest.mark.spec("B2")
def test_shards_are_listed_in_pages(rig: Rig) -> None:
    numbers = [rig.shard() for _ in range(7)]
    fill(rig, numbers[3], 2)
    rig.engine.delete_shard(numbers[5])
    seen, after = [], 0
    while page := rig.engine.list_shard(after, 3):
        assert len(page) <= 3
        seen += page
        after = page[-1].meta.number
    assert [info.meta.number for info in seen] == [number for number in numbers if number != numbers[5]]
    assert [info.next_offset for info in seen] == [0, 0, 0, 2, 0, 0]


@pytest.mark.spec("B9")
def test_write_to_a_shard_led_elsewhere_is_refused_with_the_leader(rig: Rig) -> None:
    shard = rig.shard()
    fill(rig, shard, 2)
    rig.leaders.elsewhere[shard] = "node-7"
    for call in (
        lambda: rig.engine.write(shard, record("x")),
        lambda: rig.engine.delete_by_offset(shard, [0]),
        lambda: rig.engine.delete_by_key(shard, b"k"),
        lambda: rig.engine.delete_records_before(shard, 1),
    ):
        with pytest.raises(NotLeaderError, match="node-7") as caught:
            call()
        assert caught.value.leader == "node-7"
        assert caught.value.retriable
    assert offsets(rig, shard) == [0, 1]


@pytest.mark.spec("B2", "B7")
def test_offsets_of_groups_are_kept_by_shard(rig: Rig) -> None:
    one, two = rig.shard(), rig.shard()
    assert rig.engine.get_offset_by_group("g", [one, two]) == {}
    rig.engine.commit_offset("g", {one: 5})
    rig.engine.commit_offset("h", {one: 1, two: 2})
    rig.engine.commit_offset("g", {one: 3})
    assert rig.engine.get_offset_by_group("g", [one, two]) == {one: 3}
    assert rig.engine.get_offset_by_group("h", [two, one]) == {one: 1, two: 2}
    with pytest.raises(InvalidArgumentError):
        rig.engine.commit_offset("g", {one: -1})
    with pytest.raises(InvalidArgumentError):
        rig.engine.commit_offset("", {one: 1})
    with pytest.raises(ShardNotFoundError):
        rig.engine.commit_offset("g", {999: 1})


@pytest.mark.spec("B2")
def test_columns_are_appended_and_read_as_arrow(rig: Rig) -> None:
    pytest.importorskip("pyarrow")
    shard = rig.shard()
    records = [record(n, key=b"k" if n % 2 else None, tags=(b"t",), timestamp_ms=n) for n in range(10)]
    rig.engine.batch_write(shard, ColumnBatch.from_records(records, START_MS))
    rig.engine.delete_by_offset(shard, [4])
    table = rig.engine.read_by_offset(shard, 0).arrow()
    kept = [n for n in range(10) if n != 4]
    assert table.column("offset").to_pylist() == kept
    assert table.column("value").to_pylist() == [b"%d" % n for n in kept]
    assert table.column("key").to_pylist() == [b"k" if n % 2 else None for n in kept]
    assert [each.value for each in drained(rig, shard)] == [b"%d" % n for n in kept]
    empty = rig.engine.read_by_offset(shard, 10).arrow()
    assert (empty.num_rows, empty.schema) == (0, table.schema)


@pytest.mark.spec("D5")
@pytest.mark.promise("P3")
def test_records_can_be_appended_at_given_offsets(rig: Rig) -> None:
    source = rig.shard()
    fill(rig, source, 12, key=b"k")
    rig.engine.delete_by_offset(source, [2, 3, 11])
    rig.engine.delete_records_before(source, 1)
    config = rig.shards.get(source).config
    target = rig.engine.create_shard(ShardSpec(uuid4(), 0, rig.engine_name, config, start_offset=1)).number
    bounds = rig.engine.shard_info(target)
    assert (bounds.start_offset, bounds.high_watermark, bounds.next_offset) == (1, 1, 1)
    stored = drained(rig, source)
    rig.engine.wait(rig.engine.append_at(target, stored[:4], stored[4].offset))
    with pytest.raises(InvalidArgumentError):
        rig.engine.append_at(target, stored[:1], 12)
    rig.engine.wait(rig.engine.append_at(target, stored[4:], 12))
    if rig.is_durable:
        rig.reopen()
    assert drained(rig, target) == stored
    assert [each.offset for each in rig.engine.read_by_key(target, b"k", 1).records()] == [s.offset for s in stored]
    rig.engine.wait(rig.engine.append_at(target, [], 15))
    assert rig.engine.shard_info(target).start_offset == 1
    assert rig.engine.write(target, record("x")).base_offset == 15


@pytest.mark.spec("B2")
def test_shard_of_another_engine_is_refused(rig: Rig) -> None:
    other = Engine.MEMORY if rig.is_durable else Engine.ROCKSDB
    level = Durability.MEMORY
    with pytest.raises(InvalidArgumentError):
        rig.engine.create_shard(ShardSpec(uuid4(), 0, other, ShardConfig(durability=level)))
    number = rig.shards.create([ShardSpec(uuid4(), 0, other, ShardConfig(durability=level))])[0].number
    with pytest.raises(InvalidArgumentError, match="belongs to engine"):
        rig.engine.write(number, record("x"))


@pytest.mark.spec("B3")
@pytest.mark.promise("P3")
def test_memory_shard_is_empty_after_a_restart_and_reuses_no_offset(tmp_path: Path) -> None:
    rig = Rig("memory", tmp_path)
    shard = rig.shard()
    fill(rig, shard, 10)
    rig.engine.commit_offset("g", {shard: 4})
    rig.reopen()
    assert rig.engine.shard_info(shard).start_offset == 10
    assert rig.engine.write(shard, record("x")).base_offset == 10
    with pytest.raises(OffsetOutOfRangeError, match="10"):
        rig.engine.read_by_offset(shard, rig.engine.get_offset_by_group("g", [shard])[shard])
    # A crash: the engine is never closed, only its store is opened again.
    fresh = MemoryEngine(rig.store, type(rig.shards)(rig.store, rig.clock), rig.offsets, rig.clock)
    info = fresh.shard_info(shard)
    assert info.start_offset == info.next_offset > 10
    assert info.records == 0
    rig.close()


@pytest.mark.spec("B3")
@pytest.mark.promise("P8")
def test_memory_engine_is_bounded(tmp_path: Path) -> None:
    rig = Rig("memory", tmp_path)
    rig.engine.close()
    rig.engine = MemoryEngine(rig.store, rig.shards, rig.offsets, rig.clock, size_bytes_max=50_000)
    free, limited = rig.shard(), rig.shard(retention_records=5)
    rig.engine.batch_write(free, [record(b"x" * 500)] * 50)
    with pytest.raises(StoreOverfullError, match="50000") as caught:
        rig.engine.batch_write(free, [record(b"x" * 500)] * 20)
    assert caught.value.retriable
    written = 50
    assert len(offsets(rig, free)) == written
    rig.engine.delete_records_before(free, 20)
    for _ in range(100):
        rig.engine.write(limited, record(b"x" * 500))
    assert rig.engine.shard_info(limited).records >= 5
    rig.engine.delete_shard(limited)
    rig.engine.delete_shard(free)
    again = rig.shard()
    rig.engine.batch_write(again, [record(b"x" * 500)] * 60)
    rig.close()


@pytest.mark.spec("B6")
@pytest.mark.promise("P2")
def test_failed_write_leaves_nothing(durable_rig: Rig) -> None:
    rig = durable_rig
    if rig.engine_name is not Engine.ROCKSDB:
        pytest.skip("its records are not written through the store")
    shard = rig.shard()
    fill(rig, shard, 2)
    rig.store.fail_write = BasaltError("no")
    with pytest.raises(BasaltError):
        rig.engine.batch_write(shard, [record("x")] * 3)
    with pytest.raises(BasaltError):
        rig.engine.delete_by_offset(shard, [0])
    with pytest.raises(BasaltError):
        rig.engine.delete_records_before(shard, 1)
    with pytest.raises(BasaltError):
        rig.engine.delete_shard(shard)
    rig.store.fail_write = None
    info = rig.engine.shard_info(shard)
    assert (info.start_offset, info.next_offset, info.records) == (0, 2, 2)
    assert rig.engine.write(shard, record("y")).base_offset == 2
    assert [each.value for each in drained(rig, shard)] == [b"0", b"1", b"y"]
