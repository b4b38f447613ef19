"""The specification's rules for records, shards and topics on disk, tested through an embedded store."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.unit.embedded.killed_process import lines_until_killed
from tests.unit.embedded.queue_rig import until

import basaltmq
from basaltmq.embedded.database import Basalt, Settings
from basaltmq.errors import CorruptionError, StorageError
from basaltmq.log import lane_options
from basaltmq.log.batches.record import Record
from basaltmq.store.families import Family

ENGINES = ("memory", "rocksdb", "segment")
MIB = 1 << 20


@pytest.fixture
def db(tmp_path: Path) -> Iterator[Basalt]:
    with basaltmq.open(tmp_path / "data") as opened:
        yield opened


def values(records: Any) -> list[bytes | None]:
    return [record.value for record in records]


def rows(db: Basalt, family: Family) -> int:
    return sum(1 for _ in db.store.scan(family))


@pytest.mark.spec("B2", "B3")
@pytest.mark.parametrize("engine", ENGINES)
def test_every_operation_of_the_adapter_works_on_every_engine(db: Basalt, engine: str) -> None:
    topic = db.topic("orders", engine=engine)
    first = topic.append(
        b"0", key=b"k\0", tags=[b"t\xff"], headers={"h": b"v"}, timestamp_ms=1000, expire_at_ms=9_000_000_000_000
    )
    assert (first.partition, first.offset) == (0, 0)
    many = [Record(b"%d" % at, b"k%d" % (at % 2), (), (b"t%d" % (at % 3),), 1000 + at) for at in range(1, 10)]
    (place,) = topic.append(many)
    assert (place.offset, place.last_offset) == (1, 9)
    (whole,) = topic.read(limit=1)
    assert (whole.value, whole.key, whole.headers, whole.tags) == (b"0", b"k\0", (("h", b"v"),), (b"t\xff",))
    assert (whole.timestamp_ms, whole.expire_at_ms) == (1000, 9_000_000_000_000)
    assert values(topic.read(offset=7)) == [b"7", b"8", b"9"]
    assert values(topic.read(tag=b"t\xff")) == [b"0"]
    assert values(topic.read(tag=b"t1")) == [b"1", b"4", b"7"]
    assert values(topic.read(key=b"k1")) == [b"1", b"3", b"5", b"7", b"9"]
    assert values(topic.read(since_ms=1008)) == [b"8", b"9"]
    assert values(topic.read(since_ms=5000)) == []
    with topic.consume("billing", wait=0, batch=4) as consumer:
        assert values(consumer.poll()) == [b"0", b"1", b"2", b"3"]
    assert [(each.committed, each.lag) for each in topic.lag("billing")] == [(4, 6)]
    assert topic.delete_key(b"k1") == 5
    assert topic.delete_offsets(0, [2]) == 1
    assert topic.delete_before(0, 4) == 4
    assert values(topic.read()) == [b"4", b"6", b"8"]
    assert topic.append(b"10").offset == 10
    db.delete_topic("orders")
    assert list(db.topics()) == []


@pytest.mark.spec("B4")
def test_appends_are_routed_to_the_engine_and_partition_of_the_topic(db: Basalt) -> None:
    log = db.path / "log"
    rocks = db.topic("rocks", engine="rocksdb", partitions=3)
    assert [rocks.append(b"x").partition for _ in range(6)] in [[a % 3 for a in range(s, s + 6)] for s in range(3)]
    assert rocks.append(b"x", partition=1).partition == 1
    assert not log.exists(), "an engine starts with the first topic that uses it"
    segment = db.topic("segment", partitions=3)
    by_key = {key: segment.append(b"x", key=key).partition for key in (b"a", b"b", b"c", b"d", b"e")}
    assert len(set(by_key.values())) > 1
    assert log.exists()
    assert rows(db, Family.STREAM_RECORDS) == 7
    # The next append uses changed settings, and a key keeps its partition.
    rocks.alter(partitions=4)
    assert {rocks.append(b"x").partition for _ in range(8)} == {0, 1, 2, 3}
    assert {key: segment.append(b"y", key=key).partition for key in by_key} == by_key


@pytest.mark.spec("B1")
def test_shards_are_named_by_topic_id_and_partition(db: Basalt) -> None:
    for engine in ENGINES:
        topic = db.topic(engine, engine=engine, partitions=3)
        names = [topic.info(partition).meta.name for partition in range(3)]
        topic_id = db.streams.topics.get(engine).id
        assert names == [f"{topic_id}_{partition}" for partition in range(3)]
        for partition in range(3):
            assert topic.append(b"x", partition=partition).offset == 0


@pytest.mark.spec("B5")
def test_segments_roll_by_size_and_age_and_all_indexes_cover_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = [1_700_000_000_000]
    settings = Settings(clock_ms=lambda: now[0], maintenance_interval_s=0.01)
    monkeypatch.setattr(lane_options.LaneOptions.__init__, "__defaults__", small_segments())
    with basaltmq.open(tmp_path / "data", settings=settings) as db:
        topic = db.topic("orders")

        def segments() -> list[Path]:
            return sorted((db.path / "log").glob("*/*.log"))

        for at in range(40):
            topic.append(b"%02d" % at + bytes(40_000), key=b"k%d" % (at % 4), tags=[b"t%d" % (at % 5)], timestamp_ms=at)
        by_size = len(segments())
        assert by_size >= 4
        now[0] += lane_options.SEGMENT_AGE_MS + 1
        until(lambda: len(segments()) > by_size)
        topic.append(b"40", key=b"k0", tags=[b"t0"], timestamp_ms=40)

        def numbers(**how: Any) -> list[int]:
            return [int((record.value or b"")[:2]) for record in topic.read(**how)]

        assert numbers() == list(range(41))
        assert numbers(offset=17) == list(range(17, 41))
        assert numbers(key=b"k1") == list(range(1, 40, 4))
        assert numbers(tag=b"t2") == list(range(2, 40, 5))
        assert numbers(since_ms=33) == list(range(33, 41))
        before = len(segments())
        topic.delete_before(0, 38)
        until(lambda: len(segments()) < before)
        assert numbers() == [38, 39, 40]
    with basaltmq.open(tmp_path / "data", settings=settings) as db:
        assert [record.offset for record in db.topic("orders").read()] == [38, 39, 40]


def small_segments() -> tuple[Any, ...]:
    """Defaults of a lane, with segments of 256 KiB."""
    options = lane_options.LaneOptions(segment_bytes=256 * 1024)
    return tuple(getattr(options, name) for name in lane_options.LaneOptions.__dataclass_fields__)


APPENDS = """
import sys, basaltmq
db = basaltmq.open(sys.argv[1])
topics = [db.topic(engine, engine=engine) for engine in ("rocksdb", "segment")]
number = 0
while True:
    for topic in topics:
        print(topic.name, topic.append(b"%d" % number, key=b"k").offset)
    number += 1
"""


@pytest.mark.spec("B6")
@pytest.mark.promise("P3")
def test_offsets_are_dense_and_not_reused_after_a_crash(tmp_path: Path) -> None:
    path = tmp_path / "data"
    lines = [line.split() for line in lines_until_killed(APPENDS, path, 60)]
    ends: dict[str, int] = {}
    with basaltmq.open(path) as db:
        for engine in ("rocksdb", "segment"):
            topic = db.topic(engine)
            confirmed = [int(offset) for name, offset in lines if name == engine]
            assert confirmed == list(range(len(confirmed)))
            found = list(topic.read())
            assert [record.offset for record in found] == list(range(len(found)))
            assert values(found) == [b"%d" % number for number in range(len(found))]
            assert values(topic.read(key=b"k")) == values(found)
            assert len(found) >= len(confirmed)
            topic.delete_offsets(0, [len(found) - 1])
            assert topic.append(b"next").offset == len(found)
            ends[engine] = len(found)
        # A second crash, right after the append.
        shutil.copytree(path, tmp_path / "copy")
    with basaltmq.open(tmp_path / "copy") as db:
        for engine, end in ends.items():
            assert values(db.topic(engine).read(offset=end)) == [b"next"]
            assert db.topic(engine).append(b"after").offset == end + 1


@pytest.mark.spec("B6")
@pytest.mark.promise("P7")
@pytest.mark.parametrize("engine", ENGINES)
def test_record_larger_than_the_read_limit_is_returned(db: Basalt, engine: str) -> None:
    topic = db.topic("orders", engine=engine)
    large = b"x" * (9 * MIB)
    topic.append(large)
    odd = [b"", b"\0", b"\xff\xff", b"|:/", b"\0\0"]
    for each in odd:
        topic.append(each, key=each, tags=[each] if each else [])
    assert values(topic.read()) == [large, *odd]
    for each in odd:
        assert values(topic.read(key=each)) == [each]
        assert not each or values(topic.read(tag=each)) == [each]


@pytest.mark.spec("B6")
@pytest.mark.promise("P7")
def test_checksum_is_verified_on_read(tmp_path: Path) -> None:
    with basaltmq.open(tmp_path / "data") as db:
        topic = db.topic("orders")
        topic.append(b"good")
        topic.append(b"flip me" * 100)
        (segment,) = (db.path / "log").glob("*/*.log")
        raw = bytearray(segment.read_bytes())
        at = raw.rindex(b"flip me") + 3
        with segment.open("r+b") as file:
            file.seek(at)
            file.write(bytes([raw[at] ^ 1]))
    with basaltmq.open(tmp_path / "data") as db:
        reading = db.topic("orders").read()
        assert next(reading).value == b"good"
        with pytest.raises(CorruptionError):
            next(reading)


CREATIONS = """
import sys, basaltmq
db = basaltmq.open(sys.argv[1])
number = 0
while True:
    name = "t%d" % number
    db.topic(name, partitions=5, engine="rocksdb" if number % 2 else "segment")
    print(name)
    if number % 4 == 3:
        db.delete_topic(name)
        print("-" + name)
    number += 1
"""


@pytest.mark.spec("B8", "D1")
@pytest.mark.promise("P2")
def test_topics_are_complete_or_absent_after_a_crash(tmp_path: Path) -> None:
    path = tmp_path / "data"
    lines = lines_until_killed(CREATIONS, path, 40)
    deleted = {line[1:] for line in lines if line.startswith("-")}
    with basaltmq.open(path) as db:
        found = {topic.name: topic for topic in db.topics()}
        # The last line may be a topic that was being deleted.
        assert {line for line in lines[:-1] if not line.startswith("-")} - deleted <= set(found)
        assert not deleted & set(found)
        for topic in found.values():
            assert [topic.append(b"x", partition=each).offset for each in range(5)] == [0] * 5


@pytest.mark.spec("B8")
@pytest.mark.parametrize("engine", ["rocksdb", "segment"])
def test_failed_topic_creation_leaves_nothing_and_can_be_repeated(
    db: Basalt, engine: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    db.topic("first", engine=engine)

    def kept() -> list[bytes]:
        """Return the keys of topics and shards. Shard numbers are never reused."""
        shards = [key for key, _ in db.store.scan(Family.SHARDS) if key[:1] in b"MS"]
        return shards + [key for key, _ in db.store.scan(Family.CONFIGURED_OBJECTS)]

    before = kept()

    class GoneDisk:
        def wait_durable(self, timeout_s: float = -1) -> bool:
            raise StorageError("the disk is gone")

    with monkeypatch.context() as patch:
        patch.setattr(db.streams.topics, "_sync", GoneDisk())
        with pytest.raises(StorageError, match="the disk is gone"):
            db.topic("orders", engine=engine, partitions=3)
    assert [topic.name for topic in db.topics()] == ["first"]
    assert kept() == before
    topic = db.topic("orders", engine=engine, partitions=3)
    assert [topic.append(b"x", partition=each).offset for each in range(3)] == [0, 0, 0]


@pytest.mark.spec("B10")
@pytest.mark.parametrize("engine", ENGINES)
def test_retention_and_compaction_rules(tmp_path: Path, engine: str) -> None:
    now = [1_700_000_000_000]
    settings = Settings(clock_ms=lambda: now[0], maintenance_interval_s=0.01)
    with basaltmq.open(tmp_path / "data", settings=settings) as db:
        by_time = db.topic("time", engine=engine, retention_ms=10_000)
        by_size = db.topic("size", engine=engine, retention_bytes=4000)
        by_count = db.topic("count", engine=engine, retention_records=3)
        expiring = db.topic("expiring", engine=engine)
        kept = db.topic("kept", engine=engine)
        for at in range(10):
            by_time.append(b"%d" % at, timestamp_ms=now[0] - (10 - at) * 200)
            by_size.append(b"%d" % at + bytes(1000))
            by_count.append(b"%d" % at)
            expiring.append(b"%d" % at, expire_at_ms=now[0] + 12_000 if at % 2 else 9_000_000_000_000)
            kept.append(b"%d" % at)
        until(lambda: values(by_count.read()) == [b"7", b"8", b"9"])
        until(lambda: 1 <= len(list(by_size.read())) <= 4)
        assert (next(by_size.read()).offset, by_size.info().next_offset) == (10 - by_size.info().records, 10)
        assert len(list(by_time.read())) == len(list(expiring.read())) == 10
        now[0] += 9050
        until(lambda: values(by_time.read()) == [b"6", b"7", b"8", b"9"])
        assert len(list(expiring.read())) == 10
        now[0] += 3000
        until(lambda: values(expiring.read()) == [b"0", b"2", b"4", b"6", b"8"])
        assert len(list(kept.read())) == 10
        if engine != "memory":
            compacted = db.topic("compacted", engine=engine, compact=True)
            for at in range(30):
                compacted.append(b"%d" % at, key=b"k%d" % (at % 3))
            until(lambda: set(values(compacted.read())) == {b"27", b"28", b"29"})
            assert [record.offset for record in compacted.read()] == [27, 28, 29]


@pytest.mark.spec("D1")
@pytest.mark.promise("P8")
def test_cost_of_creating_a_topic_is_independent_of_their_number(db: Basalt) -> None:
    def written_bytes(numbers: range) -> int:
        before = io_bytes()
        for number in numbers:
            db.topic(f"t{number}", engine="rocksdb").append(b"x", durability="written")
        return io_bytes() - before

    first = written_bytes(range(100))
    for number in range(100, 900):
        db.topic(f"t{number}", engine="rocksdb")
    last = written_bytes(range(900, 1000))
    assert last < 2 * first
    assert sum(1 for _ in db.topics()) == 1000


def io_bytes() -> int:
    """Return the bytes that this process has written with write(2)."""
    fields = dict(line.split(": ") for line in Path("/proc/self/io").read_text().splitlines())
    return int(fields["wchar"])


@pytest.mark.spec("D2")
def test_index_has_rows_but_no_files_per_topic(db: Basalt) -> None:
    topic = db.topic("one")
    topic.append(b"x")
    files = sum(1 for _ in db.path.rglob("*"))
    wide = db.topic("wide", partitions=300)
    wide.append([Record(b"%d" % at, b"k%d" % at, timestamp_ms=1000 + at) for at in range(3000)])
    for partition in range(300):
        wide.append(b"last", partition=partition, timestamp_ms=9000)
    assert sum(1 for _ in db.path.rglob("*")) - files < 20
    for partition in range(0, 300, 29):
        (found,) = wide.read(partition, since_ms=9000)
        assert found.value == b"last"
        assert values(wide.read(partition, found.offset)) == [b"last"]


@pytest.mark.spec("D4")
@pytest.mark.promise("P10")
def test_deleted_records_and_topics_leave_no_index_rows(tmp_path: Path) -> None:
    settings = Settings(maintenance_interval_s=0.01)
    with basaltmq.open(tmp_path / "data", settings=settings) as db:
        db.topic("other").append(b"kept")
    with basaltmq.open(tmp_path / "data", settings=settings) as db:
        empty = rows(db, Family.STREAM_INDEX)
        topic = db.topic("orders", partitions=2)
        for at in range(60):
            topic.append(b"%d" % at, partition=at % 2, key=b"k%d" % at, tags=[b"t"])
    with basaltmq.open(tmp_path / "data", settings=settings) as db:
        full = rows(db, Family.STREAM_INDEX)
        assert full > empty
        topic = db.topic("orders")
        for partition in range(2):
            topic.delete_before(partition, 29)
        until(lambda: rows(db, Family.STREAM_INDEX) < empty + (full - empty) / 4)
        assert values(topic.read(0)) == [b"58"]
        db.delete_topic("orders")
        until(lambda: rows(db, Family.STREAM_INDEX) <= empty)
    with basaltmq.open(tmp_path / "data", settings=settings) as db:
        assert [topic.name for topic in db.topics()] == ["other"]
        again = db.topic("orders", partitions=2)
        assert list(again.read(0)) == list(again.read(1)) == list(again.read(0, key=b"k0")) == []
        assert values(db.topic("other").read()) == [b"kept"]
