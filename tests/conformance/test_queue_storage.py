"""One suite for queue storage, over every store."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from tests.fixtures.messages_world import WatchedStore

from basaltmq.errors import (
    CorruptionError,
    InvalidArgumentError,
    QueueNotFoundError,
    StoreStalledError,
    StoreTooNewError,
)
from basaltmq.ids import Ids
from basaltmq.queues.config import Durability, QueueConfig
from basaltmq.queues.draft import Draft
from basaltmq.queues.lease import Lease
from basaltmq.queues.message import Message
from basaltmq.queues.operations import (
    DeleteLease,
    DeleteMessage,
    DeleteState,
    Operation,
    PutLease,
    PutMessage,
    PutMessages,
    PutQueue,
    PutState,
)
from basaltmq.queues.plane import QueuePlane
from basaltmq.queues.storage import CONTENT, FAMILIES, Storage, StoreStorage
from basaltmq.store.api import Store
from basaltmq.store.batch import Batch
from basaltmq.store.families import Family
from basaltmq.store.keys import queues as keys
from basaltmq.store.memory import MemoryStore
from basaltmq.store.open import open_store
from basaltmq.store.sync.group_commit import GroupCommit
from basaltmq.store.versions import put_version

IDS = Ids()


class Setup:
    """A storage on a watched store that can be opened again."""

    def __init__(self, path: Path | None) -> None:
        self._path = path
        self._memory = MemoryStore()
        self.open()

    def open(self) -> None:
        inner: Store = self._memory if self._path is None else open_store(self._path)
        self.store = WatchedStore(inner)
        self.storage: Storage = StoreStorage.open(self.store)

    def reopen(self) -> None:
        if self._path is not None:
            self.store.close()
        self.open()

    def rows(self) -> dict[tuple[str, bytes], bytes]:
        return {(family.label, key): value for family in FAMILIES for key, value in self.store.inner.scan(family)}


@pytest.fixture(params=["memory", "rocks"])
def setup(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Setup]:
    made = Setup(tmp_path / "store" if request.param == "rocks" else None)
    yield made
    made.store.close()


def message(queue: str = "q", fairness_key: str = "f", enqueued_ns: int = 1, payload: bytes = b"p") -> Message:
    return Message(
        id=IDS.next(),
        queue=queue,
        payload=payload,
        enqueued_ns=enqueued_ns,
        fairness_key=fairness_key,
        headers={"h": "v"},
    )


def lease_of(each: Message, expires_ns: int, token: int = 1) -> Lease:
    return Lease(
        queue=each.queue, token=token, consumer="c", leased_ns=3, expires_ns=expires_ns, message_keys=(each.key(),)
    )


@pytest.mark.spec("C1")
def test_messages_are_put_read_changed_and_deleted(setup: Setup) -> None:
    storage = setup.storage
    first, second = message(), message(enqueued_ns=2)
    storage.put_message(first)
    assert storage.get_message(first.key()) == first
    assert storage.get_message(second.key()) is None
    first.attempts = 3
    storage.put_message(first)
    setup.reopen()
    storage = setup.storage
    assert storage.get_messages([second.key(), first.key()]) == [None, first]
    storage.delete_message(first.key())
    storage.delete_message(first.key())
    assert storage.get_message(first.key()) is None
    assert setup.rows() == {}


@pytest.mark.spec("C1", "C2")
@pytest.mark.promise("P3")
def test_lists_go_by_fairness_key_time_and_id_from_a_cursor(setup: Setup) -> None:
    storage = setup.storage
    made = [message("q", key, at) for at in (3, 1, 2) for key in ("a", "b", "bb", "")]
    made.append(message("q", "a", 1))
    others = [message("qq", "a"), message("p", "a"), message("q\0", "a")]
    storage.write_batch([PutMessage(each) for each in [*made, *others]])
    expected = sorted(made, key=lambda each: (len(each.fairness_key), each.fairness_key, each.enqueued_ns, each.id))
    assert list(storage.list_messages("q")) == expected
    of_a = [each for each in expected if each.fairness_key == "a"]
    assert list(storage.list_messages("q", "a")) == of_a
    for at, each in enumerate(of_a):
        assert list(storage.list_messages("q", "a", after=each.key())) == of_a[at + 1 :]
    assert list(storage.list_messages("q", after=of_a[-1].key())) == expected[expected.index(of_a[-1]) + 1 :]
    assert list(storage.list_messages("none")) == []
    with pytest.raises(InvalidArgumentError, match="another queue"):
        storage.list_messages("q", "b", after=of_a[0].key())
    assert list(storage.list_fairness_keys("q")) == ["", "a", "b", "bb"]
    assert list(storage.list_fairness_keys("q", after="a")) == ["b", "bb"]
    assert list(storage.list_fairness_keys("none")) == []


@pytest.mark.spec("C1")
@pytest.mark.promise("P8")
def test_a_list_reads_no_further_than_it_is_walked(setup: Setup) -> None:
    storage = setup.storage
    storage.write_batch([PutMessage(message(enqueued_ns=at)) for at in range(100)])
    setup.store.watch()
    walk = storage.list_messages("q")
    next(walk)
    next(walk)
    assert setup.store.rows_scanned == 2
    setup.store.watch()
    assert list(storage.list_fairness_keys("q")) == ["f"]
    assert setup.store.rows_scanned == 1


@pytest.mark.spec("C1", "C2")
def test_leases_are_found_by_message_and_by_time(setup: Setup) -> None:
    storage = setup.storage
    made = [message(queue) for queue in ("q", "q", "r")]
    leases = [lease_of(each, at, at) for at, each in zip((30, 10, 20), made, strict=True)]
    for each, lease in zip(made, leases, strict=True):
        storage.put_message(each)
        storage.put_lease(lease)
    setup.reopen()
    storage = setup.storage
    assert storage.get_lease("q", made[0].id) == leases[0]
    assert storage.get_lease("r", made[0].id) is None
    assert list(storage.list_leases("q")) == [leases[1], leases[0]]
    assert list(storage.list_expired(9)) == []
    assert list(storage.list_expired(20)) == [leases[1], leases[2]]
    assert list(storage.list_expired(1 << 63, from_ns=20)) == [leases[2], leases[0]]
    assert list(storage.list_expired((1 << 64) - 1)) == [leases[1], leases[2], leases[0]]
    for each, lease in zip(made, leases, strict=True):
        storage.delete_message(each.key())
        assert storage.get_lease(each.queue, each.id) is None
        storage.delete_lease(lease)
    assert setup.rows() == {}


@pytest.mark.spec("C1", "C7")
def test_an_extended_lease_expires_at_its_later_time_only(setup: Setup) -> None:
    storage = setup.storage
    each = message()
    storage.put_message(each)
    storage.put_lease(lease_of(each, 10))
    walk = storage.list_expired(10)
    longer = lease_of(each, 50)
    storage.put_lease(longer, replaces_expires_ns=10)
    assert list(walk) == []
    assert list(storage.list_expired(49)) == []
    assert list(storage.list_expired(50)) == [longer]
    storage.delete_lease(longer)
    storage.delete_message(each.key())
    assert setup.rows() == {}


@pytest.mark.spec("C1", "C2", "E3", "E4")
def test_what_a_plane_writes_is_read_here_and_what_is_put_here_is_served_by_a_plane(setup: Setup) -> None:
    commit = GroupCommit(setup.store)
    plane = QueuePlane(setup.store, commit, clock_ns=lambda: 10**18)
    for name in ("q", "r"):
        plane.create(QueueConfig(name=name, durability=Durability.WRITTEN))
    plane.enqueue("q", [b"small", Draft(payload=b"b" * 9000, ttl_ms=5000), Draft(payload=b"k", fairness_key="k")])
    plane.publish(["q", "r"], b"s" * 9000)
    held = plane.lease("q", 2, consumer="me", visibility_ms=1)
    storage = setup.storage
    assert [each.payload for each in storage.list_messages("q")] == [b"k", b"small", b"b" * 9000, b"s" * 9000]
    assert storage.get_message(held[0].key) == held[0].message()
    (lease,) = storage.list_expired(10**18 + 10**6)
    assert (lease.token, lease.consumer, lease.queue) == (held[0].token, "me", "q")
    assert set(lease.message_keys) == {delivery.key for delivery in held}
    plane.ack("q", held[0].token, [held[0].id])
    assert storage.get_lease("q", held[0].id) is None
    rest = storage.get_lease("q", held[1].id)
    assert rest is not None
    assert rest.message_keys == (held[1].key,)
    plane.close()
    storage.delete_message(next(storage.list_messages("r")).key())
    added = message("r", "x", 5)
    storage.put_message(added)
    storage.delete_queue("q")
    storage.recount("r")
    assert list(setup.store.scan(Family.BODIES)) == list(setup.store.scan(Family.CONTENT_REFS)) == []
    plane = QueuePlane(setup.store, commit, clock_ns=lambda: 10**18)
    assert plane.stats("r")["messages"] == 1
    assert [delivery.message() for delivery in plane.lease("r", 9)] == [added]
    assert {config.name for config in plane.configs()} == {"r"}
    plane.close()
    commit.close()


@pytest.mark.spec("C1")
def test_queue_configurations_are_kept_listed_and_refused_when_damaged(setup: Setup) -> None:
    storage = setup.storage
    configs = [QueueConfig(name=name, ttl_ms=at) for at, name in enumerate(("a", "b", "é", "\U0001f600"))]
    for config in configs:
        storage.put_queue(config)
    assert storage.get_queue("b") == configs[1]
    assert storage.get_queue("none") is None
    assert list(storage.list_queues()) == configs
    assert list(storage.list_queues(after="b")) == configs[2:]
    batch = Batch()
    batch.put(Family.QUEUES, b"b", b"\x02broken")
    setup.store.write(batch)
    with pytest.raises(CorruptionError, match="'b'"):
        storage.get_queue("b")


@pytest.mark.spec("C1")
def test_state_is_kept_and_listed_by_prefix(setup: Setup) -> None:
    storage = setup.storage
    for name, value in (("throttle.a", b"1"), ("throttle.b", b"\0"), ("throttles", b""), ("other", b"x")):
        storage.put_state(name, value)
    assert storage.get_state("throttle.b") == b"\0"
    assert storage.get_state("none") is None
    assert list(storage.list_state("throttle.")) == [("throttle.a", b"1"), ("throttle.b", b"\0")]
    assert len(list(storage.list_state())) == 4
    storage.delete_state("other")
    assert storage.get_state("other") is None


def change_of_every_kind(storage: Storage) -> list[Operation]:
    """Operations over every family, on top of something to delete."""
    old, fresh = message(enqueued_ns=1), message(enqueued_ns=2)
    storage.put_message(old)
    storage.put_lease(lease_of(old, 5))
    storage.put_state("old", b"1")
    return [
        PutMessage(fresh),
        DeleteMessage(old.key()),
        DeleteLease("q", 1, 5),
        PutLease(lease_of(fresh, 9, 2)),
        PutQueue(QueueConfig(name="q")),
        PutState("fresh", b"1"),
        DeleteState("old"),
    ]


@pytest.mark.spec("C1", "C6")
@pytest.mark.promise("P2")
def test_a_batch_of_every_operation_is_one_write_and_all_or_nothing(setup: Setup) -> None:
    operations = change_of_every_kind(setup.storage)
    before = setup.rows()
    setup.store.watch(fail_at=0)
    with pytest.raises(StoreStalledError):
        setup.storage.write_batch(operations)
    assert setup.rows() == before
    setup.storage.write_batch(operations)
    assert len(setup.store.batches) == 1
    after = {(family, key[:3]) for family, key in setup.rows()}
    assert {family for family, _ in after} == {family.label for family in FAMILIES}
    assert len(setup.rows()) == 5


@pytest.mark.spec("C1")
def test_many_messages_in_one_operation_are_the_same_as_one_each(setup: Setup) -> None:
    made = [message(queue, key, at) for at, (queue, key) in enumerate([("q", "a"), ("q", "b"), ("r", "a"), ("q", "a")])]
    one_each = setup.storage.batch_of([PutMessage(each) for each in made])
    assert setup.storage.batch_of([PutMessages(made)]).ops == one_each.ops
    setup.storage.write_batch([PutMessages(made), PutMessages([])])
    assert setup.storage.get_messages([each.key() for each in made]) == made


@pytest.mark.spec("C6")
@pytest.mark.promise("P2")
@pytest.mark.parametrize(
    "change",
    [
        lambda storage, each: storage.put_message(each),
        lambda storage, each: storage.put_lease(lease_of(each, 7), replaces_expires_ns=5),
        lambda storage, each: storage.delete_lease(lease_of(each, 5)),
        lambda storage, each: storage.delete_queue("q"),
    ],
    ids=["put_message", "put_lease", "delete_lease", "delete_queue"],
)
def test_every_change_is_one_write_and_all_or_nothing(setup: Setup, change: Callable[[Storage, Message], None]) -> None:
    each = message()
    setup.storage.put_queue(QueueConfig(name="q"))
    setup.storage.put_message(message())
    setup.storage.put_lease(lease_of(each, 5))
    before = setup.rows()
    setup.store.watch(fail_at=0)
    with pytest.raises(StoreStalledError):
        change(setup.storage, each)
    assert setup.rows() == before
    change(setup.storage, each)
    assert len(setup.store.batches) == 1
    assert setup.rows() != before


@pytest.mark.spec("C1", "C13")
@pytest.mark.promise("P10")
def test_a_deleted_queue_is_gone_in_one_batch_and_begins_empty_when_made_again(setup: Setup) -> None:
    storage = setup.storage
    kept: list[Message] = []
    for queue in ("q", "qq", "p", "q\0"):
        storage.put_queue(QueueConfig(name=queue))
        for at in range(5):
            each = message(queue, f"key{at % 2}", at)
            storage.put_message(each)
            storage.put_lease(lease_of(each, 100 + at, at))
            if queue != "q":
                kept.append(each)
    setup.store.watch()
    storage.delete_queue("q")
    assert len(setup.store.batches) == 1
    with pytest.raises(QueueNotFoundError, match="'q'"):
        storage.delete_queue("q")
    for _ in range(2):
        assert storage.get_queue("q") is None
        assert list(storage.list_messages("q")) == []
        assert list(storage.list_leases("q")) == []
        assert {lease.queue for lease in storage.list_expired(1 << 62)} == {"qq", "p", "q\0"}
        assert all(storage.get_message(each.key()) == each for each in kept)
        assert not any(key.startswith(keys.lp("q")) or key[8:].startswith(keys.lp("q")) for _, key in setup.rows())
        setup.reopen()
        storage = setup.storage
    storage.put_queue(QueueConfig(name="q"))
    assert list(storage.list_messages("q")) == []
    fresh = message("q")
    storage.put_message(fresh)
    assert list(storage.list_messages("q")) == [fresh]


@pytest.mark.spec("C1")
@pytest.mark.promise("P7")
def test_a_queue_with_a_damaged_lease_can_still_be_deleted(setup: Setup) -> None:
    storage = setup.storage
    each = message()
    storage.put_queue(QueueConfig(name="q"))
    storage.put_lease(lease_of(each, 5))
    batch = Batch()
    batch.put(Family.LEASE_CALLS, keys.lease_call_key("q", 1), b"?")
    setup.store.write(batch)
    with pytest.raises(CorruptionError, match="lease 1 of queue 'q' is damaged"):
        storage.get_lease("q", each.id)
    storage.delete_queue("q")
    assert list(storage.list_expired(10)) == []


@pytest.mark.spec("C1")
def test_threads_share_a_storage(setup: Setup) -> None:
    storage = setup.storage
    failures: list[BaseException] = []

    def work(queue: str) -> None:
        try:
            for at in range(20):
                some = [message(queue, "f", at * 10 + step) for step in range(10)]
                storage.write_batch([PutMessage(each) for each in some])
                assert len(list(storage.list_messages(queue))) == (at + 1) * 5 + 5
                storage.write_batch([DeleteMessage(each.key()) for each in some[:5]])
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=work, args=(f"q{at}",)) for at in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert failures == []
    assert [len(list(storage.list_messages(f"q{at}"))) for at in range(4)] == [100] * 4


@pytest.mark.spec("A9")
def test_a_storage_of_a_later_version_is_refused_by_name_of_both(setup: Setup) -> None:
    batch = Batch()
    put_version(batch, CONTENT, 4)
    setup.store.write(batch)
    with pytest.raises(StoreTooNewError, match="version 4, this Basalt knows up to 3"):
        StoreStorage.open(setup.store)
