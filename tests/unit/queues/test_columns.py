"""Messages stored as columns from publish to ack behave like entries."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest
from tests.unit.queues.conftest import Clock, Planes, TestStore, payloads, settle

from basaltmq.durability import Durability
from basaltmq.errors import StaleLeaseError, StoreStalledError
from basaltmq.ids import Ids
from basaltmq.queues.change import Change
from basaltmq.queues.config import QueueConfig
from basaltmq.queues.draft import Draft
from basaltmq.queues.entries import plain as plain_module
from basaltmq.queues.entries.plain import ColumnQueue, Plain
from basaltmq.queues.entries.rows import plain_rows, read_plain, weighted_rows, wrap
from basaltmq.queues.plane import QueuePlane
from basaltmq.queues.ready import row_changes
from basaltmq.queues.ready.budget import PagingLimits
from basaltmq.queues.ready.fair_queue import FairQueue
from basaltmq.store.batch import DELETE, DELETE_RANGE, PUT, Batch
from basaltmq.store.families import Family
from basaltmq.store.memory import MemoryStore

Make = Callable[..., str]


def is_plain(plane: QueuePlane, queue: str, token: int) -> bool:
    """Return whether a lease holds its messages as columns."""
    return plane._loaded.require(queue).leases.require(token).plain is not None


def columns(first: int, count: int) -> Plain:
    numbers = range(first, first + count)
    plain = Plain([b"k%04d" % n for n in numbers], [b"r%d" % n for n in numbers], [n + 9 for n in numbers], overhead=9)
    plain.ids = [b"%04d" % n for n in numbers]
    return plain


@pytest.mark.parametrize("count_taken", [1, 5, 64, 200])
def test_column_queue_keeps_order_for_any_split(count_taken: int) -> None:
    waiting = ColumnQueue()
    seen: list[tuple[bytes, bytes, int]] = []
    added = 0
    for count in (7, 1, 30, 2, 100, 3, 2500, 64, 63, 63, 1):
        plain = columns(added, count)
        before = [list(plain.keys), list(plain.rows), list(plain.sizes)]
        waiting.add(plain)
        added += count
        assert len(waiting) == added - len(seen)
        assert waiting.last() == b"k%04d" % (added - 1)
        assert waiting.first() == b"k%04d" % len(seen)
        taken = waiting.take(count_taken)
        seen += zip(taken.keys, taken.rows, taken.sizes, strict=True)
        # The caller may keep the columns.
        assert [plain.keys, plain.rows, plain.sizes] == before
    while len(waiting):
        taken = waiting.take(count_taken)
        assert taken.size_bytes == sum(taken.sizes)
        assert taken.row_bytes == sum(map(len, taken.rows))
        assert taken.ids == [key[-4:] for key in taken.keys]
        seen += zip(taken.keys, taken.rows, taken.sizes, strict=True)
    whole = columns(0, added)
    assert seen == list(zip(whole.keys, whole.rows, whole.sizes, strict=True))


def read(rows: list[bytes]) -> Plain | None:
    return read_plain([b"%d" % number for number in range(len(rows))], rows, list(map(len, rows)))


def test_only_plain_rows_are_read_as_columns() -> None:
    plain = plain_rows([b"", b"abc"], 0)
    with_properties = plain_rows([b"abcd"], 0, [b"properties"])
    weighted = weighted_rows([b"x" * 9], 0, [b""], [7])
    found = read([*plain, *with_properties, *weighted])
    assert found is not None
    assert found.sizes == [0, 3, 4, 9]
    assert found.size_bytes == 16
    for other in (plain_rows([b"x"], 99)[0], wrap(plain[0], 0), b"\x01"):
        assert read([plain[0], other]) is None
        assert read([other, plain[0]]) is None


@pytest.mark.spec("C7")
def test_bulk_published_messages_are_leased_and_acked_as_columns(
    plane: QueuePlane, make: Make, store: TestStore
) -> None:
    queue = make()
    plane.enqueue(queue, [b"%d" % n for n in range(7)])
    plane.enqueue(queue, [b"%d" % n for n in range(7, 10)])
    held = plane.lease(queue, 8)
    assert is_plain(plane, queue, held[0].token)
    assert [d.payload for d in held] == [b"%d" % n for n in range(8)]
    stats = plane.stats(queue)
    assert (stats["leased"], stats["ready"], stats["ready_bytes"]) == (8, 2, 2)
    plane.ack(queue, held[0].token)
    assert len(store.rows(Family.MESSAGES)) == 2
    assert store.rows(Family.LEASES) == store.rows(Family.LEASE_EXPIRY) == []
    with pytest.raises(StaleLeaseError):
        plane.ack(queue, held[0].token)
    assert payloads(plane, queue) == [b"8", b"9"]
    assert plane.stats(queue)["size_bytes"] == 0


@pytest.mark.spec("C7")
@pytest.mark.parametrize("order", ["all", "reversed", "part"])
def test_ack_by_ids_settles_only_those_messages(plane: QueuePlane, make: Make, order: str) -> None:
    queue = make()
    plane.enqueue(queue, [b"%d" % n for n in range(5)])
    held = plane.lease(queue, 5)
    ids = [d.id for d in held]
    chosen = {"all": ids, "reversed": ids[::-1], "part": [ids[3], ids[1]]}[order]
    assert plane.ack(queue, held[0].token, chosen) == len(chosen)
    left = [d.payload for d in held if d.id not in chosen]
    assert plane.stats(queue)["leased"] == len(left)
    if left:
        plane.release(queue, held[0].token)
    again = plane.lease(queue, 5)
    assert [(d.payload, d.redelivered) for d in again] == [(payload, True) for payload in left]


@pytest.mark.promise("P2")
@pytest.mark.parametrize("what", ["lease", "ack", "nack", "release", "extend"])
def test_failed_write_changes_nothing(plane: QueuePlane, make: Make, store: TestStore, clock: Clock, what: str) -> None:
    queue = make(visibility_timeout_ms=100)
    plane.enqueue(queue, [b"%d" % n for n in range(4)])
    held = [] if what == "lease" else plane.lease(queue, 3)
    before = plane.stats(queue)
    store.refuse = 1
    arguments: list[object] = [held[0].token] if held else [3]
    if what == "extend":
        arguments += [5000, [held[1].id]]
    with pytest.raises(StoreStalledError):
        getattr(plane, what)(queue, *arguments)
    assert plane.stats(queue) == before
    if held:
        assert [d.payload for d in plane.lease(queue, 9)] == [b"3"]
        assert plane.ack(queue, held[0].token, [held[1].id]) == 1
        clock.pass_ms(100)
        settle(plane, clock)
        assert payloads(plane, queue) == [b"0", b"2", b"3"]
    else:
        assert payloads(plane, queue) == [b"%d" % n for n in range(4)]


@pytest.mark.promise("P3")
def test_returned_messages_precede_later_columns(plane: QueuePlane, make: Make) -> None:
    queue = make()
    plane.enqueue(queue, [b"%d" % n for n in range(6)])
    held = plane.lease(queue, 2)
    plane.release(queue, held[0].token, [held[1].id])
    plane.enqueue(queue, [Draft(payload=b"t", transient=True)])
    plane.enqueue(queue, [b"6", b"7"])
    assert [d.payload for d in plane.lease(queue, 20)] == [b"1", b"2", b"3", b"4", b"5", b"t", b"6", b"7"]


@pytest.mark.promise("P3")
def test_returned_messages_precede_columns_published_meanwhile(plane: QueuePlane, make: Make) -> None:
    queue = make()
    plane.enqueue(queue, [b"0", b"1"])
    plane.release(queue, plane.lease(queue, 2)[0].token)
    plane.enqueue(queue, [b"2", b"3"])
    assert [d.payload for d in plane.lease(queue, 1)] == [b"0"]
    assert [d.payload for d in plane.lease(queue, 9)] == [b"1", b"2", b"3"]


def test_long_queue_is_read_in_columns_of_the_requested_size(planes: Planes) -> None:
    plane = planes.open(paging=PagingLimits(resident_max=50, read_ahead=7))
    plane.create(QueueConfig(name="q", durability=Durability.WRITTEN))
    for first in range(0, 200, 20):
        plane.enqueue("q", [b"%d" % n for n in range(first, first + 20)])
    seen: list[bytes] = []
    sizes: list[int] = []
    while held := plane.lease("q", 30):
        sizes.append(len(held))
        seen += [d.payload for d in held]
        plane.ack("q", held[0].token)
    assert seen == [b"%d" % n for n in range(200)]
    assert sizes == [30] * 6 + [20]


def test_columns_are_cut_at_the_byte_limit(plane: QueuePlane, make: Make) -> None:
    queue = make()
    plane.enqueue(queue, [b"x" * 100] * 5)
    assert len(plane.lease(queue, 5, size_bytes_max=250)) == 2
    assert len(plane.lease(queue, 5, size_bytes_max=300)) == 3


def test_leasing_columns_releases_their_memory(plane: QueuePlane, make: Make) -> None:
    queue = make()
    backing = plane._loaded.require(queue).backing
    assert isinstance(backing, FairQueue)
    plane.enqueue(queue, [b"x" * 100] * 10)
    assert backing.resident_len() == 10
    assert backing.info().resident_bytes > 1000
    plane.lease(queue, 4)
    assert backing.resident_len() == 6
    assert len(plane.lease(queue, 7)) == 6
    assert plane._shared.budget.used_bytes == 0
    assert backing.info().sub_queues == 0


@pytest.mark.spec("E2")
def test_full_memory_keeps_the_head_and_leaves_the_rest_on_disk(planes: Planes, store: TestStore) -> None:
    plane = planes.open(paging=PagingLimits(resident_max=250, read_ahead=100))
    plane.create(QueueConfig(name="q", durability=Durability.WRITTEN))
    for number in range(10):
        plane.enqueue("q", [b"%d" % each for each in range(100 * number, 100 * number + 100)])
    assert plane._loaded.require("q").backing.resident_len() == 200
    seen: list[bytes] = []
    for count in (1, 100, 100, 7, 300, 100, 500):
        held = plane.lease("q", count)
        assert is_plain(plane, "q", held[0].token)
        seen += [each.payload for each in held]
    assert seen == [b"%d" % each for each in range(1000)]


@pytest.mark.spec("C7")
@pytest.mark.promise("P3")
def test_leased_columns_are_not_read_from_disk_again(planes: Planes) -> None:
    plane = planes.open(paging=PagingLimits(resident_max=100, read_ahead=10))
    plane.create(QueueConfig(name="q", durability=Durability.WRITTEN))
    for number in range(0, 200, 2):
        plane.enqueue("q", [b"%d" % number, b"%d" % (number + 1)])
    tokens = [plane.lease("q", 2)[0].token for _ in range(70)]
    assert plane.stats("q")["leased"] == 140
    # All messages from the first of these on are read again, although most are leased.
    for token in (tokens[10], tokens[69]):
        plane.release("q", token)
    plane._loaded.require("q").backing.shrink()
    rest: list[bytes] = []
    while held := plane.lease("q", 9):
        rest += [each.payload for each in held]
    assert rest == [b"20", b"21", *[b"%d" % number for number in range(138, 200)]]
    assert plane.stats("q")["leased"] == 200


def deletes(store: TestStore) -> list[int]:
    """Return the kinds of delete operations of the last change."""
    return [op[0] for op in store.batches[-1].ops if op[1] is Family.MESSAGES and op[0] != PUT]


@pytest.mark.spec("C6")
def test_messages_of_one_call_are_deleted_with_one_range_delete(
    plane: QueuePlane, make: Make, store: TestStore
) -> None:
    queue, other = make(), make("r")
    calls = [plane.enqueue(queue, [b"%d" % n for n in range(size)]) for size in (64, 100, 250, 63, 64, 64)]
    plane.enqueue(other, [b"x"] * 70)
    held = [plane.lease(queue, count) for count in (64, 100, 100, 150, 63, 128)]
    assert [len(each) for each in held] == [64, 100, 100, 150, 63, 128]
    left = {message_id for ids in calls for message_id in ids}
    # Out of order, parts of a call, too few for a range, two calls together.
    expected = [[DELETE_RANGE]] * 4 + [[DELETE] * 63, [DELETE_RANGE] * 2]
    for number in (1, 0, 3, 2, 4, 5):
        assert plane.ack(queue, held[number][0].token) == len(held[number])
        assert deletes(store) == expected[number]
        left -= {delivery.id for delivery in held[number]}
        assert {key[-16:] for key in store.rows(Family.MESSAGES) if b"q" in key[:3]} == left
    assert len(store.rows(Family.MESSAGES)) == 70


@pytest.mark.spec("C6")
def test_non_adjacent_messages_are_deleted_singly(planes: Planes, store: TestStore) -> None:
    plane = planes.open()
    plane.create(QueueConfig(name="q", durability=Durability.WRITTEN))
    plane.enqueue("q", [b"%d" % n for n in range(80)])
    held = plane.lease("q", 80)
    plane.ack("q", held[0].token, [held[40].id])
    plane.ack("q", held[0].token)
    assert deletes(store) == [DELETE] * 79
    plane.enqueue("q", [b"%d" % n for n in range(80)])
    plane = planes.open()
    held = plane.lease("q", 80)
    plane.ack("q", held[0].token)
    assert deletes(store) == [DELETE] * 80
    assert store.rows(Family.MESSAGES) == []


@pytest.mark.promise("P1")
@pytest.mark.parametrize("missing", [0, 1, 40, 98, 99])
def test_range_deletes_cover_only_settled_messages(missing: int) -> None:
    place = b"queue" + bytes(8)
    keys = [place + message_id for message_id in Ids().many(100)]
    change = Change(0)
    plain = Plain(keys[:missing] + keys[missing + 1 :], [], [0] * 99)
    plain.has_stayed = True
    row_changes.delete_rows(change, plain)
    assert {op[0] for op in change.batch.ops} == ({DELETE} if 0 < missing < 99 else {DELETE_RANGE})
    store = MemoryStore()
    batch = Batch()
    batch.put_many(Family.MESSAGES, keys, [b""] * 100)
    store.write(batch)
    store.write(change.batch)
    assert [key for key, _ in store.scan(Family.MESSAGES)] == [keys[missing]]


@pytest.mark.promise("P1")
@pytest.mark.parametrize("number", range(4))
def test_rows_are_deleted_exactly_for_settled_messages(
    planes: Planes, store: TestStore, clock: Clock, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    """Range deletes of two or more messages."""
    monkeypatch.setattr(row_changes, "RANGE_MIN", 2)
    monkeypatch.setattr(plain_module, "SMALL", 2)
    chance = random.Random(number)
    plane = planes.open(paging=PagingLimits(resident_max=(12, 20, 40, 1000)[number], read_ahead=(3, 15)[number % 2]))
    plane.create(QueueConfig(name="q", durability=Durability.WRITTEN, visibility_timeout_ms=100_000))
    live: set[bytes] = set()
    held: dict[int, list[bytes]] = {}
    ranges = 0
    for _ in range(300):
        clock.pass_ms(chance.choice([0, 0, 1]))
        step = chance.choice(["enqueue"] * 4 + ["lease"] * 5 + ["ack"] * 4 + ["part", "nack", "release"])
        if step == "enqueue":
            live.update(plane.enqueue("q", [b"x"] * chance.randint(1, 9)))
        elif step == "lease" and (found := plane.lease("q", chance.randint(1, 9))):
            held[found[0].token] = [delivery.id for delivery in found]
        elif held and step in ("ack", "part", "nack", "release"):
            token = chance.choice([*held])
            ids = held.pop(token)
            if step == "part" and len(ids) > 1:
                held[token] = ids[1::2]
                ids = ids[::2]
            if step in ("ack", "part"):
                assert plane.ack("q", token, ids if step == "part" else None) == len(ids)
                ranges += DELETE_RANGE in deletes(store)
                live -= {*ids}
            else:
                getattr(plane, step)("q", token)
        assert {key[-16:] for key in store.rows(Family.MESSAGES)} == live
    assert ranges, "no range delete occurred; choose another seed"
    assert plane.stats("q")["messages"] == len(live)
    plane = planes.open()
    assert plane.stats("q")["messages"] == len(live)
