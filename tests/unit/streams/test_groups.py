"""Consumer groups: offsets in both strategies, lag, reset, and consumers that share partitions."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from uuid import UUID, uuid4

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.conformance.stream_engines import FakeClock, GatedStore

from basaltmq.errors import (
    BasaltError,
    CorruptionError,
    GroupNotFoundError,
    InvalidArgumentError,
    LimitExceededError,
    OffsetOutOfRangeError,
    StaleMemberError,
    StorageError,
    StoreClosedError,
    TopicNotFoundError,
)
from basaltmq.log.batches.record import Record
from basaltmq.store.batch import Batch
from basaltmq.store.families import Family
from basaltmq.store.memory import MemoryStore
from basaltmq.store.sync.group_commit import GroupCommit
from basaltmq.streams import offsets as offsets_module
from basaltmq.streams.groups import GroupMembers, Reset, assign_partitions
from basaltmq.streams.offsets import CachedOffsets, Commit, Offsets, PersistentOffsets
from basaltmq.streams.plane import OffsetStrategy, StreamPlane
from basaltmq.streams.shards import Engine
from basaltmq.streams.topics import TopicConfig

TOPIC = UUID(int=7)


class UnpoisonedStore(GatedStore):
    """A store that a failed sync does not poison, so that tests can read it afterwards."""

    def poison(self, error: BaseException) -> None:
        pass


@pytest.fixture
def store() -> GatedStore:
    return UnpoisonedStore(MemoryStore())


@pytest.fixture
def sync(store: GatedStore) -> Iterator[GroupCommit]:
    made = GroupCommit(store)
    yield made
    store.gate.set()
    made.close()


@pytest.fixture(params=["persistent", "cached"])
def offsets(request: pytest.FixtureRequest, store: GatedStore, sync: GroupCommit) -> Offsets:
    if request.param == "persistent":
        return PersistentOffsets(store, sync, FakeClock(5))
    return CachedOffsets(store, sync, FakeClock(5), flush_interval_ms=None)


@pytest.mark.spec("B7")
def test_both_strategies_return_the_same_offsets(offsets: Offsets) -> None:
    other = uuid4()
    offsets.commit("g", {(TOPIC, 0): 1, (TOPIC, 1): Commit(2, epoch=3, metadata="where ü")})
    offsets.commit("g", {(TOPIC, 0): 9, (other, 4): 4})
    offsets.commit("longer name", {(TOPIC, 0): 0})
    assert offsets.committed("g", [(TOPIC, 0), (TOPIC, 1), (TOPIC, 2)]) == {
        (TOPIC, 0): Commit(9, 5),
        (TOPIC, 1): Commit(2, 5, 3, "where ü"),
    }
    assert set(offsets.of_group("g")) == {(TOPIC, 0), (TOPIC, 1), (other, 4)}
    assert list(offsets.groups()) == ["g", "longer name"]
    assert list(offsets.groups("g")) == ["longer name"]
    assert offsets.groups_of(TOPIC) == ["g", "longer name"]
    assert offsets.delete("g", [(other, 4)]) == 1
    assert offsets.groups_of(other) == []
    assert offsets.delete("g") == 2
    assert offsets.delete("g") == 0
    assert list(offsets.groups()) == ["longer name"]
    assert offsets.groups_of(TOPIC) == ["longer name"]


@pytest.mark.spec("B7")
@pytest.mark.promise("P10")
def test_deleting_a_topic_deletes_the_offsets_of_every_group(offsets: Offsets, store: GatedStore) -> None:
    kept = uuid4()
    for group in ("a", "b"):
        offsets.commit(group, {(TOPIC, 0): 1, (kept, 0): 2})
    batch = Batch()
    offsets.plan_delete_topic(batch, TOPIC)
    store.write(batch)
    offsets.flush()
    assert offsets.of_group("a") == {(kept, 0): Commit(2, 5)}
    assert offsets.groups_of(TOPIC) == []


@pytest.mark.spec("B7")
def test_an_invalid_commit_is_refused_and_stores_nothing(offsets: Offsets) -> None:
    for wrong in (-1, 1 << 63):
        with pytest.raises(InvalidArgumentError):
            offsets.commit("g", {(TOPIC, 0): 1, (TOPIC, 1): wrong})
    with pytest.raises(LimitExceededError):
        offsets.commit("g", {(TOPIC, 0): Commit(1, metadata="x" * 5000)})
    for name in ("", "x" * 2000):
        with pytest.raises(InvalidArgumentError):
            offsets.commit(name, {(TOPIC, 0): 1})
    assert offsets.of_group("g") == {}


@pytest.mark.spec("B7")
@given(
    commit=st.builds(
        Commit,
        st.integers(0, (1 << 63) - 1),
        st.integers(-(1 << 63), (1 << 63) - 1),
        st.integers(-(1 << 31), (1 << 31) - 1),
        st.text(st.characters(exclude_categories=["Cs"]), max_size=20),
    )
)
def test_a_commit_survives_a_round_trip(commit: Commit) -> None:
    assert Commit.decode(commit.encode()) == commit
    for cut in range(21):
        with pytest.raises(CorruptionError):
            Commit.decode(commit.encode()[:cut])
    with pytest.raises(CorruptionError):
        Commit.decode(b"\x02" + commit.encode()[1:])


@pytest.mark.spec("B7")
@pytest.mark.promise("P1")
def test_a_persistent_commit_returns_only_when_durable(store: GatedStore, sync: GroupCommit) -> None:
    offsets = PersistentOffsets(store, sync, FakeClock())
    store.gate.clear()
    answered = threading.Event()

    def commit() -> None:
        offsets.commit("g", {(TOPIC, 0): 1})
        answered.set()

    thread = threading.Thread(target=commit)
    thread.start()
    assert store.arrived.wait(30)
    assert not answered.is_set()
    store.gate.set()
    thread.join(30)
    assert answered.is_set()
    assert store.syncs == 1
    store.fail_sync = StorageError("on purpose")
    with pytest.raises(BasaltError):
        offsets.commit("g", {(TOPIC, 0): 2})


@pytest.mark.spec("B7")
def test_a_cached_commit_returns_at_once_and_is_visible_before_its_write(store: GatedStore, sync: GroupCommit) -> None:
    offsets = CachedOffsets(store, sync, FakeClock(), flush_interval_ms=None)
    store.gate.clear()
    offsets.commit("g", {(TOPIC, 0): 1})
    assert list(store.scan(Family.CONSUMER_OFFSETS)) == []
    assert offsets.committed("g", [(TOPIC, 0)])[TOPIC, 0].offset == 1
    store.gate.set()
    offsets.flush()
    assert len(list(store.scan(Family.CONSUMER_OFFSETS))) == 1
    assert store.syncs == 1
    offsets.flush()
    assert store.syncs == 1


@pytest.mark.spec("B7")
@pytest.mark.parametrize("part", ["write", "sync"])
def test_a_failed_flush_keeps_its_entries(store: GatedStore, sync: GroupCommit, part: str) -> None:
    offsets = CachedOffsets(store, sync, FakeClock(), flush_interval_ms=None)
    offsets.commit("g", {(TOPIC, 0): 1, (TOPIC, 1): 2})
    setattr(store, f"fail_{part}", StorageError("on purpose"))
    for _ in range(2):
        with pytest.raises(StorageError):
            offsets.flush()
    with pytest.raises(StorageError):
        offsets.close()
    offsets.commit("g", {(TOPIC, 1): 3})
    setattr(store, f"fail_{part}", None)
    offsets.flush()
    below = PersistentOffsets(store, sync, FakeClock())
    assert {at: commit.offset for at, commit in below.of_group("g").items()} == {(TOPIC, 0): 1, (TOPIC, 1): 3}


@pytest.mark.spec("B7")
def test_a_commit_during_a_flush_is_not_lost(store: GatedStore, sync: GroupCommit) -> None:
    offsets = CachedOffsets(store, sync, FakeClock(), flush_interval_ms=None)
    offsets.commit("g", {(TOPIC, 0): 1})
    store.gate.clear()
    store.arrived.clear()
    flusher = threading.Thread(target=offsets.flush)
    flusher.start()
    assert store.arrived.wait(30)
    offsets.commit("g", {(TOPIC, 0): 2})
    store.gate.set()
    flusher.join(30)
    assert offsets.committed("g", [(TOPIC, 0)])[TOPIC, 0].offset == 2
    offsets.close()
    assert PersistentOffsets(store, sync, FakeClock()).of_group("g")[TOPIC, 0].offset == 2
    with pytest.raises(StoreClosedError):
        offsets.commit("g", {(TOPIC, 0): 3})


@pytest.mark.spec("B7")
def test_the_background_thread_flushes_and_reports_failures(store: GatedStore, sync: GroupCommit) -> None:
    failed, synced = threading.Event(), threading.Event()
    store.fail_write = StorageError("on purpose")
    original = store.sync

    def seen() -> None:
        original()
        synced.set()

    store.sync = seen  # type: ignore[method-assign]
    offsets = CachedOffsets(store, sync, FakeClock(), flush_interval_ms=1, failed=lambda error: failed.set())
    offsets.commit("g", {(TOPIC, 0): 1})
    assert failed.wait(30)
    store.fail_write = None
    assert synced.wait(30)
    offsets.close()
    assert PersistentOffsets(store, sync, FakeClock()).of_group("g")[TOPIC, 0].offset == 1


@pytest.mark.spec("B7")
@pytest.mark.promise("P8")
def test_the_number_of_unflushed_commits_is_bounded(
    store: GatedStore, sync: GroupCommit, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(offsets_module, "DIRTY_MAX", 10)
    offsets = CachedOffsets(store, sync, FakeClock(), flush_interval_ms=None)
    for partition in range(25):
        offsets.commit("g", {(TOPIC, partition): 1})
    assert len(list(store.scan(Family.CONSUMER_OFFSETS))) == 22


@pytest.fixture(params=list(OffsetStrategy))
def plane(request: pytest.FixtureRequest, store: GatedStore) -> Iterator[StreamPlane]:
    made = StreamPlane(store, FakeClock(), offset_strategy=request.param)
    made.topics.create("orders", TopicConfig(partitions=4, engine=Engine.MEMORY))
    yield made
    made.close()


def fill(plane: StreamPlane, count: int, topic: str = "orders") -> None:
    for number in range(count):
        plane.drivers.append(topic, Record(b"%d" % number))


@pytest.mark.spec("B7")
def test_lag_counts_only_readable_offsets(plane: StreamPlane) -> None:
    fill(plane, 40)
    topic = plane.topics.get("orders")
    plane.offsets.commit("g", {(topic.id, 0): 4, (topic.id, 1): 10, (topic.id, 2): 0, (uuid4(), 0): 1})
    plane.drivers.delete_records_before("orders", 2, 7)
    lags = {each.partition: (each.committed, each.end_offset, each.lag) for each in plane.groups.lag("g")}
    assert lags == {0: (4, 10, 6), 1: (10, 10, 0), 2: (0, 10, 3)}
    with pytest.raises(GroupNotFoundError):
        plane.groups.lag("nobody")
    assert plane.groups.page() == ["g"]
    assert plane.groups.delete("g") == 4
    with pytest.raises(GroupNotFoundError):
        plane.groups.delete("g")


@pytest.mark.spec("B7")
def test_a_group_can_be_reset_to_ends_offsets_and_times(plane: StreamPlane) -> None:
    for number in range(10):
        plane.drivers.append("orders", Record(b"x", timestamp_ms=number * 100), partition=1)
    plane.drivers.delete_records_before("orders", 1, 2)
    assert plane.groups.reset("g", "orders", Reset.EARLIEST) == {0: 0, 1: 2, 2: 0, 3: 0}
    assert plane.groups.reset("g", "orders", Reset.LATEST, partition=1) == {1: 10}
    assert plane.groups.reset("g", "orders", 5, partition=1) == {1: 5}
    assert plane.groups.reset("g", "orders", Reset.LATEST, timestamp_ms=450, partition=1) == {1: 5}
    assert plane.groups.reset("g", "orders", Reset.LATEST, timestamp_ms=9999, partition=1) == {1: 10}
    with pytest.raises(OffsetOutOfRangeError):
        plane.groups.reset("g", "orders", 1, partition=1)
    with pytest.raises(InvalidArgumentError):
        plane.groups.reset("g", "orders", Reset.NONE)
    with pytest.raises(TopicNotFoundError):
        plane.groups.reset("g", "nothing", Reset.EARLIEST)
    assert plane.offsets.of_group("g")[plane.topics.get("orders").id, 1].offset == 10


@pytest.mark.spec("B7")
def test_consumers_of_a_group_share_partitions_and_read_every_record_once(plane: StreamPlane) -> None:
    fill(plane, 100)
    group = plane.group("g")
    assert plane.group("g") is group
    one, two = group.join(["orders"]), group.join(["orders"])
    assert one.assignment | two.assignment == {("orders", partition) for partition in range(4)}
    assert not one.assignment & two.assignment
    assert len(one.assignment) == 2
    seen: list[bytes] = []
    for _ in range(20):
        for consumer in (one, two):
            got = consumer.poll(max_records=7)
            assert len(got) <= 7
            assert all((each.topic, each.partition) in consumer.assignment for each in got)
            seen += [(each.record.value or b"") for each in got]
            consumer.commit()
    assert sorted(seen) == sorted(b"%d" % number for number in range(100))
    assert sum(each.lag for each in plane.groups.lag("g")) == 0
    assert one.poll() == two.poll() == []
    one.close()
    one.close()
    assert len(two.assignment) == 4
    with pytest.raises(StaleMemberError):
        one.poll()


@pytest.mark.spec("B7")
def test_the_next_owner_reads_uncommitted_records_and_the_previous_one_cannot_commit(
    plane: StreamPlane,
) -> None:
    fill(plane, 40)
    group = plane.group("g")
    one = group.join(["orders"])
    assert len(one.poll(1000)) == 40
    two = group.join(["orders"])
    lost = sorted(two.assignment)[0]
    with pytest.raises(StaleMemberError, match="not assigned to this member"):
        one.commit({lost: 10})
    one.commit()
    again = two.poll(1000)
    assert {(each.topic, each.partition) for each in again} == two.assignment
    assert len(again) == 20
    assert {each.partition for each in plane.groups.lag("g")} == {partition for _, partition in one.assignment}


@pytest.mark.spec("B7")
def test_a_group_starts_at_the_requested_offset_and_recovers_from_retention(plane: StreamPlane) -> None:
    fill(plane, 8)
    late = plane.group("late").join(["orders"], Reset.LATEST)
    assert late.poll() == []
    with pytest.raises(InvalidArgumentError, match="has no offset"):
        plane.group("none").join(["orders"], Reset.NONE).poll()
    early = plane.group("early").join(["orders"])
    assert len(early.poll(4)) == 4
    early.commit()
    early.close()
    for partition in range(4):
        plane.drivers.delete_records_before("orders", partition, 2)
    fill(plane, 4)
    again = plane.group("early").join(["orders"])
    assert [each.record.offset for each in again.poll(1000)] == [2, 2, 2, 2]
    strict = plane.group("strict").join(["orders"], Reset.NONE)
    for partition in range(4):
        strict.seek("orders", partition, 0)
    with pytest.raises(OffsetOutOfRangeError, match="offsets 2 to 3"):
        strict.poll()
    assert len(late.poll(1000)) == 4


@pytest.mark.spec("B7")
def test_a_deleted_topic_is_removed_from_a_group(plane: StreamPlane) -> None:
    plane.topics.create("other", TopicConfig(engine=Engine.MEMORY))
    fill(plane, 4)
    fill(plane, 2, "other")
    consumer = plane.group("g").join(["orders", "other"])
    plane.topics.delete("orders")
    seen = [each.record.value for each in (*consumer.poll(), *consumer.poll())]
    assert consumer.assignment == {("other", 0)}
    assert seen == [b"0", b"1"]
    with pytest.raises(TopicNotFoundError):
        plane.group("g").join(["orders"])
    with pytest.raises(InvalidArgumentError):
        plane.group("g").join([])


@pytest.mark.spec("B7")
@given(
    partitions=st.dictionaries(st.sampled_from("abcdef"), st.integers(1, 9), min_size=1),
    members=st.integers(1, 6),
)
def test_partitions_are_assigned_completely_and_evenly(partitions: dict[str, int], members: int) -> None:
    dealt = assign_partitions(partitions, {member: frozenset(partitions) for member in range(members)})
    everything = sorted(place for places in dealt.values() for place in places)
    assert everything == sorted((topic, number) for topic, count in partitions.items() for number in range(count))
    sizes = [len(places) for places in dealt.values()]
    assert max(sizes) - min(sizes) <= 1


def test_members_are_found_by_the_name_of_their_group(plane: StreamPlane) -> None:
    assert isinstance(plane.group("g"), GroupMembers)
    assert plane.group("g").group == "g"
