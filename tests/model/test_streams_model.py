"""Random operations on every stream engine, with reopens, compared with a model of lists."""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path
from typing import Any, ClassVar

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from tests.conformance.stream_engines import ENGINES, Rig, drained

from basaltmq.durability import Durability
from basaltmq.errors import OffsetOutOfRangeError
from basaltmq.log.batches.record import Record, StoredRecord
from basaltmq.streams.adapter import IfAllOlder

KEYS = st.sampled_from([None, b"", b"a", b"b", b"\xff\x00"])
TAGS = st.lists(st.sampled_from([b"t", b"", b"\x00u"]), max_size=2).map(tuple)
VALUES = st.one_of(st.binary(max_size=8), st.integers(100, 2_000).map(lambda size: b"v" * size))
PLACES = st.integers(0, 1_000_000)
"""A number that each rule reduces to its valid range, so that most examples are valid."""


class ModelShard:
    """The records of a shard, as a list."""

    def __init__(self, number: int) -> None:
        self.number = number
        self.start = 0
        self.next = 0
        self.kept: list[StoredRecord] = []

    def live(self, now_ms: int) -> list[StoredRecord]:
        return [each for each in self.kept if each.expire_at_ms == 0 or each.expire_at_ms > now_ms]


class StreamMachine(RuleBasedStateMachine):
    engine_name: ClassVar[str]

    def __init__(self) -> None:
        super().__init__()
        self.path = Path(tempfile.mkdtemp(prefix="basalt-model-"))
        self.rig = Rig(self.engine_name, self.path, on_disk=False)
        self.shards: list[ModelShard] = []
        self.gone: list[int] = []
        self.groups: dict[tuple[str, int], int] = {}

    @property
    def now(self) -> int:
        return self.rig.clock.now_ms

    @initialize()
    def create_two(self) -> None:
        self.shards = [ModelShard(self.rig.shard()), ModelShard(self.rig.shard(index_tags=False, index_times=False))]

    @rule(
        which=st.integers(0, 1),
        records=st.lists(
            st.tuples(VALUES, KEYS, TAGS, st.integers(-1, 50), st.sampled_from([0, 0, 0, 5, 20])),
            min_size=1,
            max_size=6,
        ),
        synced=st.booleans(),
    )
    def write(self, which: int, records: list[tuple[Any, ...]], synced: bool) -> None:
        shard = self.shards[which]
        batch = [
            Record(value, key, (), tags, stamp, self.now + life if life else 0)
            for value, key, tags, stamp, life in records
        ]
        level = Durability.SYNCED if synced and self.rig.is_durable else None
        append = self.rig.engine.batch_write(shard.number, batch, level)
        self.rig.engine.wait(append)
        assert append.base_offset == shard.next
        for offset, each in enumerate(batch, shard.next):
            stamp = self.now if each.timestamp_ms == -1 else each.timestamp_ms
            shard.kept.append(
                StoredRecord(each.value, each.key, (), each.tags, stamp, each.expire_at_ms, offset=offset)
            )
        shard.next += len(batch)

    @rule(which=st.integers(0, 1), place=PLACES, count=st.integers(1, 5), size=st.integers(0, 3_000))
    def read(self, which: int, place: int, count: int, size: int) -> None:
        shard = self.shards[which]
        offset = place % (shard.next + 2)
        if offset < shard.start:
            with pytest.raises(OffsetOutOfRangeError) as caught:
                self.rig.engine.read_by_offset(shard.number, offset, count, size)
            assert (caught.value.earliest, caught.value.latest) == (shard.start, shard.next)
            return
        batch = self.rig.engine.read_by_offset(shard.number, offset, count, size)
        after = [each for each in shard.live(self.now) if each.offset >= offset]
        expected: list[StoredRecord] = []
        for each in after[:count]:
            left = size - sum(_size(one) for one in expected)
            if expected and _size(each) > left:
                break
            expected.append(each)
        assert batch.records() == expected
        unread = [each.offset for each in after if each not in expected]
        assert batch.next_offset <= (unread[0] if unread else max(offset, shard.next))
        assert batch.next_offset > offset or offset >= shard.next
        assert all(each.offset < batch.next_offset for each in expected)

    @rule(which=st.integers(0, 1), key=KEYS, tag=st.sampled_from([b"t", b"", b"\x00u", b"none"]), place=PLACES)
    def look_up(self, which: int, key: bytes | None, tag: bytes, place: int) -> None:
        shard = self.shards[which]
        offset = shard.start + place % (shard.next - shard.start + 1)
        live = [each for each in shard.live(self.now) if each.offset >= offset]
        found = self.rig.engine.read_by_tag(shard.number, tag, offset).records()
        assert found == [each for each in live if tag in each.tags]
        if key is not None:
            found = self.rig.engine.read_by_key(shard.number, key, offset).records()
            assert found == [each for each in live if each.key == key]

    @rule(which=st.integers(0, 1), stamp=st.integers(0, 60), otherwise=st.sampled_from(list(IfAllOlder)))
    def at_time(self, which: int, stamp: int, otherwise: IfAllOlder) -> None:
        shard = self.shards[which]
        missing = shard.start if otherwise is IfAllOlder.EARLIEST else shard.next
        expected = next((each.offset for each in shard.live(self.now) if each.timestamp_ms >= stamp), missing)
        assert self.rig.engine.get_offset_by_timestamp(shard.number, stamp, otherwise) == expected

    @rule(which=st.integers(0, 1), places=st.lists(PLACES, max_size=4))
    def delete_offsets(self, which: int, places: list[int]) -> None:
        shard = self.shards[which]
        going = {place % (shard.next + 1) for place in places}
        # Expired records may or may not count.
        there = {each.offset for each in shard.kept}
        certain = {each.offset for each in shard.live(self.now)}
        count = self.rig.engine.delete_by_offset(shard.number, sorted(going))
        assert len(going & certain) <= count <= len(going & there)
        shard.kept = [each for each in shard.kept if each.offset not in going]

    @rule(which=st.integers(0, 1), key=KEYS)
    def delete_key(self, which: int, key: bytes | None) -> None:
        if key is not None:
            shard = self.shards[which]
            certain = sum(each.key == key for each in shard.live(self.now))
            count = self.rig.engine.delete_by_key(shard.number, key)
            assert certain <= count <= sum(each.key == key for each in shard.kept)
            shard.kept = [each for each in shard.kept if each.key != key]

    @rule(which=st.integers(0, 1), place=PLACES)
    def delete_before(self, which: int, place: int) -> None:
        shard = self.shards[which]
        offset = place % (shard.next + 2)
        shard.start = max(shard.start, min(offset, shard.next))
        shard.kept = [each for each in shard.kept if each.offset >= shard.start]
        assert self.rig.engine.delete_records_before(shard.number, offset) == shard.start

    @rule(step_ms=st.integers(-5, 10))
    def move_clock(self, step_ms: int) -> None:
        self.rig.clock.now_ms += step_ms

    @rule()
    def retain(self) -> None:
        self.rig.engine.retain(self.now)
        for shard in self.shards:
            shard.kept = shard.live(self.now)

    @rule(group=st.sampled_from(["g", "h"]), which=st.integers(0, 1), place=PLACES)
    def commit(self, group: str, which: int, place: int) -> None:
        shard = self.shards[which]
        offset = place % (shard.next + 1)
        self.rig.engine.commit_offset(group, {shard.number: offset})
        self.groups[group, shard.number] = offset

    @rule(which=st.integers(0, 1))
    def create_again(self, which: int) -> None:
        old = self.shards[which].number
        meta = self.rig.shards.get(old)
        self.rig.engine.delete_shard(old)
        config = {name: getattr(meta.config, name) for name in ("index_tags", "index_times")}
        number = self.rig.shard(meta.topic_id, meta.partition, **config)
        assert number not in {*self.gone, old}
        self.gone.append(old)
        # Group offsets belong to the shard's name and survive.
        for (group, shard), offset in list(self.groups.items()):
            if shard == old:
                self.groups[group, number] = offset
                del self.groups[group, shard]
        self.shards[which] = ModelShard(number)

    @precondition(lambda self: self.rig.is_durable)
    @rule()
    def reopen(self) -> None:
        self.rig.reopen()

    @invariant()
    def bounds_agree(self) -> None:
        for shard in self.shards:
            info = self.rig.engine.shard_info(shard.number)
            assert (info.start_offset, info.high_watermark, info.next_offset) == (shard.start, shard.next, shard.next)
            assert len(shard.live(self.now)) <= info.records <= shard.next - shard.start

    def teardown(self) -> None:
        try:
            for shard in self.shards:
                assert drained(self.rig, shard.number) == shard.live(self.now)
            for (group, number), offset in self.groups.items():
                assert self.rig.engine.get_offset_by_group(group, [number]) == {number: offset}
        finally:
            self.rig.close()
            shutil.rmtree(self.path, ignore_errors=True)


def _size(record: StoredRecord) -> int:
    return len(record.value or b"") + len(record.key or b"") + sum(len(tag) for tag in record.tags)


@pytest.mark.spec("B2", "B3", "B6", "B10")
@pytest.mark.promise("P3", "P10")
@pytest.mark.parametrize("name", sorted(ENGINES))
def test_stream_engines_match_the_model(name: str) -> None:
    machine = type(f"{name}Machine", (StreamMachine,), {"engine_name": name})
    test = machine.TestCase  # type: ignore[attr-defined]
    test.settings = settings(max_examples=60, stateful_step_count=40)
    test().runTest()
