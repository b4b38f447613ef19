"""Interface for brokers: bulk drafts, refusals per draft, routed dead letters, delivery limit."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.unit.queues.conftest import Clock, Planes, TestStore, payloads, settle

from basaltmq.durability import Durability
from basaltmq.errors import InvalidArgumentError, InvalidConfigError, LimitExceededError
from basaltmq.pipeline.audit.queues import audit_queues
from basaltmq.queues.config import Overflow, QueueConfig, decode_config, encode_config
from basaltmq.queues.draft import Draft
from basaltmq.queues.lifecycle import entry_builder
from basaltmq.queues.message import Message
from basaltmq.queues.plane import QueuePlane
from basaltmq.store.families import Family

KEPT = {Family.VERSION, Family.QUEUES, Family.QUEUE_STATS, Family.TIMERS}


def left(store: TestStore) -> list[tuple[str, bytes]]:
    return [(family.label, key) for family in Family if family not in KEPT for key in store.rows(family)]


DRAFTS = st.lists(
    st.builds(Draft, payload=st.binary(max_size=30), properties=st.binary(max_size=30), transient=st.booleans()),
    min_size=1,
    max_size=5,
)


@given(drafts=DRAFTS, ttl_ms=st.sampled_from([None, 1000]))
def test_bulk_built_plain_drafts_equal_those_built_singly(drafts: list[Draft], ttl_ms: int | None) -> None:
    from basaltmq.store.sync.group_commit import GroupCommit

    entries = []
    for one_by_one in (False, True):
        store, clock = TestStore(), Clock()
        commit = GroupCommit(store)
        plane = QueuePlane(store, commit, clock_ns=clock)
        plane.create(QueueConfig(name="q", durability=Durability.WRITTEN, ttl_ms=ttl_ms))
        with pytest.MonkeyPatch.context() as patch:
            if one_by_one:
                patch.setattr(entry_builder, "_build_plain", lambda *_: None)
            plane.enqueue("q", drafts)
        found = plane._queue("q").backing.fetch(10)
        entries.append([(e.key[:-16], e.row, e.size_bytes, e.flags, e.expires_ns) for e in found])
        commit.close()
    assert entries[0] == entries[1]
    assert len(entries[0]) == len(drafts)


def test_bulk_building_refuses_invalid_drafts(plane: QueuePlane, make: Callable[..., str]) -> None:
    queue = make()
    for bad in (
        Draft(payload="text"),  # type: ignore[arg-type]
        Draft(payload=b"x", properties=bytearray(b"y")),  # type: ignore[arg-type]
        Draft(payload=b"x", properties=None),  # type: ignore[arg-type]
    ):
        with pytest.raises(InvalidArgumentError):
            plane.enqueue(queue, [Draft(payload=b"good", properties=b"p"), bad])
    with pytest.raises(LimitExceededError):
        plane.enqueue(queue, [Draft(payload=b"x", properties=bytes((1 << 20) + 1))])
    assert plane.stats(queue)["enqueued"] == 0
    plane.enqueue(queue, [Draft(payload=b"x" * 5000, properties=b"p" * 5000), b"plain"])
    assert [(d.payload, d.message().properties) for d in plane.lease(queue, 5)] == [
        (b"x" * 5000, b"p" * 5000),
        (b"plain", b""),
    ]


@pytest.mark.spec("E7")
def test_dead_letters_are_routed_in_the_batch_of_their_failure(
    plane: QueuePlane, store: TestStore, make: Callable[..., str], clock: Clock
) -> None:
    work = make("work", ttl_ms=1000)
    one, two = make("one"), make("two", priorities_max=5)
    asked: list[tuple[str, bytes, str]] = []

    def route(config: QueueConfig, message: Message, reason: str) -> tuple[Sequence[str], bytes]:
        asked.append((config.name, message.payload[:1], reason))
        if config.name != work:
            return (), b""
        targets = {b"a": [one], b"b": [one, two, one], b"c": [], b"d": ["missing"], b"e": [work], b"f": ["gone", two]}
        return targets[message.payload[:1]], b"x-death of " + message.properties

    plane.dead_letter_router = route
    drafts = [Draft(payload=name * 5000, properties=b"p" + name, priority=3) for name in (b"a", b"b", b"c", b"d")]
    plane.enqueue(work, drafts)
    held = plane.lease(work, 4)
    before = len(store.batches)
    plane.nack(work, held[0].token, reject=True)
    assert len(store.batches) == before + 1
    assert asked == [("work", name, "rejected") for name in (b"a", b"b", b"c", b"d")]
    assert len(store.rows(Family.MESSAGE_CONTENT)) == 2
    assert (plane.stats(work)["dead_lettered"], plane.stats(work)["dropped"]) == (2, 2)
    in_two = plane.lease(two, 5)
    assert in_two[0].payload == b"b" * 5000
    plane.ack(two, in_two[0].token)
    # The shared body exists as long as one of its messages.
    in_one = plane.lease(one, 5)
    assert [(d.payload[:2], d.message().properties) for d in in_one] == [
        (b"aa", b"x-death of pa"),
        (b"bb", b"x-death of pb"),
    ]
    assert [(d.payload[:2], d.message().priority) for d in in_two] == [(b"bb", 3)]
    assert in_one[1].id == held[1].id != in_two[0].id
    plane.ack(one, in_one[0].token)
    assert left(store) == []
    # Expired messages are routed too, also to the same queue.
    asked.clear()
    plane.enqueue(work, [Draft(payload=b"e", properties=b"1"), Draft(payload=b"f" * 9000, ttl_ms=10)])
    clock.pass_ms(10)
    settle(plane, clock)
    assert asked == [("work", b"f", "expired")]
    assert payloads(plane, two) == [b"f" * 9000]
    clock.pass_ms(990)
    settle(plane, clock)
    assert plane.lease(work)[0].message().properties == b"x-death of 1"


def test_router_returning_none_uses_the_dead_letter_queue(plane: QueuePlane, make: Callable[..., str]) -> None:
    queue = make(dead_letter_queue="dead")
    plane.dead_letter_router = lambda config, message, reason: None
    plane.enqueue(queue, [b"x"])
    plane.nack(queue, plane.lease(queue)[0].token, reject=True)
    assert payloads(plane, "dead") == [b"x"]


@pytest.mark.spec("E7")
@pytest.mark.parametrize("transient", [False, True])
@pytest.mark.parametrize("visibility_ms", [0, 1000])
def test_delivery_limit_counts_across_restarts(
    planes: Planes, clock: Clock, transient: bool, visibility_ms: int
) -> None:
    plane = planes.open()
    plane.create(QueueConfig(name="q", durability=Durability.WRITTEN, delivery_limit=3, dead_letter_queue="dead"))
    plane.enqueue("q", [Draft(payload=b"x" * 9000, transient=transient), Draft(payload=b"y", transient=transient)])
    for returns in range(4):
        held = plane.lease("q", 2, visibility_ms=visibility_ms)
        assert [(d.payload[:1], d.redelivered) for d in held] == [(b"x", returns > 0), (b"y", returns > 0)]
        if returns == 1:
            plane.nack("q", held[0].token)
        else:
            plane.release("q", held[0].token)
        if not transient and returns == 2:
            plane.close()
            plane = planes.open()
    assert plane.lease("q") == []
    assert [p[:1] for p in payloads(plane, "dead")] == [b"x", b"y"]
    plane.create(QueueConfig(name="never", durability=Durability.WRITTEN, delivery_limit=0))
    plane.enqueue("never", [Draft(payload=b"z", transient=transient)])
    plane.release("never", plane.lease("never")[0].token)
    assert plane.stats("never")["ready"] == 0


@pytest.mark.promise("P1")
def test_memory_durability_writes_nothing_to_disk(planes: Planes, plane: QueuePlane, store: TestStore) -> None:
    plane.create(QueueConfig(name="m", durability=Durability.MEMORY))
    plane.create(QueueConfig(name="d", durability=Durability.WRITTEN))
    plane.enqueue("d", [b"kept"])
    before = len(store.batches)
    plane.enqueue("m", [b"a", Draft(payload=b"b" * 9000, fairness_key="k")])
    plane.enqueue("d", [b"lost"], durability=Durability.MEMORY)
    plane.publish(["m", "d"], b"c" * 9000, durability=Durability.MEMORY)
    held = plane.lease("m", 1, visibility_ms=0)
    plane.ack("m", held[0].token)
    assert len(store.batches) == before
    assert store.rows(Family.MESSAGE_CONTENT) == []
    plane.enqueue("m", [b"safe"], durability=Durability.WRITTEN)
    assert (plane.stats("m")["enqueued"], plane.stats("m")["acked"]) == (4, 1)
    assert [p[:4] for p in payloads(plane, "d")] == [b"kept", b"lost", b"cccc"]
    again = planes.open()
    assert payloads(again, "m") == [b"safe"]
    assert again.stats("m")["acked"] == 2


def test_config_stores_broker_properties() -> None:
    config = QueueConfig(name="q", extra=bytes(range(256)), delivery_limit=5)
    assert decode_config("q", encode_config(config)) == config
    with pytest.raises(InvalidConfigError):
        QueueConfig(name="q", extra=bytes((1 << 20) + 1))
    with pytest.raises(InvalidConfigError):
        QueueConfig(name="q", overflow=Overflow.REJECT_PUBLISH_DEAD_LETTER)
    QueueConfig(name="q", overflow=Overflow.REJECT_PUBLISH_DEAD_LETTER, extra=b"x")


@pytest.mark.promise("P2", "P4")
@pytest.mark.parametrize("answer", ["ack", "nack", "release", "reject"])
def test_messages_settled_in_a_change_are_not_leased_again_in_it(planes: Planes, answer: str) -> None:
    plane = planes.open()
    plane.create(QueueConfig(name="q", durability=Durability.WRITTEN, dead_letter_queue="dead"))
    plane.enqueue("q", [b"1", b"2", b"3"])
    held = plane.lease("q", 2)
    # Messages only on disk are read again from the head.
    plane = planes.open()
    with plane.change():
        if answer == "ack":
            plane.ack("q", held[0].token)
        elif answer == "release":
            plane.release("q", held[0].token)
        else:
            plane.nack("q", held[0].token, reject=answer == "reject")
        (other,) = plane.lease("q", 5)
    assert other.payload == b"3"
    assert plane.stats("q")["leased"] == 1
    plane.ack("q", other.token)
    back = [] if answer in ("ack", "reject") else [b"1", b"2"]
    assert plane.stats("q")["ready"] == plane.stats("q")["messages"] == len(back)
    assert payloads(plane, "q") == back
    assert payloads(plane, "dead") == ([b"1", b"2"] if answer == "reject" else [])
    assert list(audit_queues(planes.store)) == []


@pytest.mark.promise("P2")
def test_ack_and_enqueue_in_a_full_queue_drops_only_queued_messages(planes: Planes) -> None:
    plane = planes.open()
    plane.create(QueueConfig(name="q", durability=Durability.WRITTEN, length_max=2, dead_letter_queue="dead"))
    plane.enqueue("q", [b"0"])
    held = plane.lease("q", 1)
    plane.enqueue("q", [b"1", b"2"])
    plane = planes.open()
    transaction = plane.transaction()
    transaction.ack("q", held[0].token)
    transaction.enqueue("q", [b"3"])
    transaction.commit()
    assert plane.stats("q")["messages"] == 2
    assert payloads(plane, "dead") == [b"1"]
    assert payloads(plane, "q") == [b"2", b"3"]
    assert list(audit_queues(planes.store)) == []


def test_priorities_cannot_change_while_messages_are_delayed(planes: Planes) -> None:
    plane = planes.open()
    plane.create(QueueConfig(name="q", durability=Durability.WRITTEN))
    plane.enqueue("q", [Draft(payload=b"later", delay_ms=50)])
    with pytest.raises(InvalidConfigError, match="has messages"):
        plane.update(QueueConfig(name="q", durability=Durability.WRITTEN, priorities_max=3))
    planes.clock.pass_ms(51)
    settle(plane, planes.clock)
    assert payloads(plane, "q") == [b"later"]
    plane.update(QueueConfig(name="q", durability=Durability.WRITTEN, priorities_max=3))
    plane.enqueue("q", [b"more"])
    assert payloads(plane, "q") == [b"more"]


@pytest.mark.promise("P10")
def test_timed_lease_of_transient_messages_is_deleted_with_its_queue(planes: Planes) -> None:
    plane = planes.open()
    plane.create(QueueConfig(name="q", durability=Durability.MEMORY))
    plane.enqueue("q", [b"a"])
    (held,) = plane.lease("q", visibility_ms=0)
    plane.extend("q", held.token, 60_000)
    plane = planes.open()
    assert plane.stats("q")["enqueued"] == 1
    plane.delete("q")
    for family in (Family.LEASES, Family.LEASE_EXPIRY, Family.QUEUE_STATS):
        assert planes.store.rows(family) == []
