"""The paging backing queue: order, memory bounds, moves between memory and disk."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from tests.unit.queues.conftest import NOWHERE, TestStore

from basaltmq.queues.change import Change
from basaltmq.queues.entries.backing import SPILLED, TRANSIENT, Entry
from basaltmq.queues.entries.rows import prefix_of
from basaltmq.queues.message import Message, encode_row
from basaltmq.queues.ready.budget import MemoryBudget, PagingLimits
from basaltmq.queues.ready.paging_queue import RESIDENT_BYTES_MIN, PagingQueue
from basaltmq.store.families import Family

PREFIX = prefix_of("q", "default")


class Leased:
    """Keys that the test marks as leased."""

    def __init__(self) -> None:
        self.keys: set[bytes] = set()

    def has_key(self, key: bytes) -> bool:
        return key in self.keys

    def leased_among(self, keys: Sequence[bytes]) -> list[int]:
        return [number for number, key in enumerate(keys) if key in self.keys]

    def paged_out(self, entry: Entry) -> None:
        raise AssertionError("nothing of these tests came back to a queue")


def entry(number: int, size: int = 10, flags: int = 0) -> Entry:
    message = Message(id=number.to_bytes(16, "big"), queue="q", payload=bytes(size), enqueued_ns=number)
    return Entry(message.key(), encode_row(message), size, flags)


def number(found: Entry) -> int:
    return int.from_bytes(found.key[-16:], "big")


class Bench:
    """A backing queue on a store whose changes are written at once."""

    def __init__(self, store: TestStore, budget: MemoryBudget | None = None, **limits: int) -> None:
        self.store = store
        self.leased = Leased()
        self.budget = budget or MemoryBudget()
        self.limits = PagingLimits(**limits)
        self.queue = self.open(known_empty=True)

    def open(self, *, known_empty: bool = False, prefix: bytes = PREFIX) -> PagingQueue:
        return PagingQueue(self.store, prefix, self.budget, self.limits, self.leased, NOWHERE, known_empty=known_empty)

    def write(self, change: Change) -> None:
        self.store.write(change.seal())
        change.applied()

    def publish(self, *entries: Entry) -> None:
        change = Change(0)
        self.queue.publish(change, entries)
        self.write(change)

    def fetch(self, count: int) -> list[int]:
        return [number(e) for e in self.queue.fetch(count)]


@pytest.mark.spec("E1", "E2")
@pytest.mark.promise("P8")
def test_memory_is_bounded_in_messages_and_order_is_kept(store: TestStore) -> None:
    bench = Bench(store, resident_max=10, read_ahead=4)
    for first in range(0, 1000, 10):
        bench.publish(*[entry(n) for n in range(first, first + 10)])
        assert bench.queue.info().resident <= 10
    assert bench.queue.info().paged
    assert bench.fetch(7) == list(range(7))
    assert bench.queue.info().resident <= 10
    assert bench.fetch(2000) == list(range(7, 1000))
    assert bench.fetch(1) == []
    assert bench.budget.used_bytes == 0


@pytest.mark.spec("E2")
@pytest.mark.promise("P8")
def test_memory_is_bounded_in_bytes(store: TestStore) -> None:
    bench = Bench(store, resident_bytes_max=20_000, read_ahead=100, read_ahead_bytes=8_000)
    bench.publish(*[entry(n, size=1000) for n in range(200)])
    assert bench.queue.info().resident_bytes <= 20_000
    assert bench.fetch(1) == [0]
    # A read exceeds its limit by at most one chunk of rows.
    assert bench.queue.info().resident <= 40
    assert bench.fetch(500) == list(range(1, 200))


@pytest.mark.spec("E2")
@pytest.mark.promise("P8")
def test_shared_budget_bounds_all_queues_without_blocking_any(store: TestStore) -> None:
    budget = MemoryBudget(100_000)
    bench = Bench(store, budget)
    queues = [bench.open(known_empty=True, prefix=prefix_of("q", f"s{i}")) for i in range(20)]
    for index, queue in enumerate(queues):
        made = []
        for n in range(100):
            message = Message(id=n.to_bytes(16, "big"), queue="q", payload=bytes(500), enqueued_ns=n)
            message.fairness_key = f"s{index}"
            made.append(Entry(message.key(), encode_row(message), 500))
        change = Change(0)
        queue.publish(change, made)
        bench.write(change)
    assert budget.used_bytes <= 100_000 + len(queues) * RESIDENT_BYTES_MIN
    for queue in queues:
        assert [number(e) for e in queue.fetch(200)] == list(range(100))
    assert budget.used_bytes == 0


@pytest.mark.spec("E1")
@pytest.mark.promise("P3")
@pytest.mark.parametrize("order", [[3, 1, 2, 0], [0, 1, 2, 3], [3, 2, 1, 0]])
def test_requeued_messages_return_to_their_places(store: TestStore, order: list[int]) -> None:
    bench = Bench(store, resident_max=6, read_ahead=2)
    bench.publish(*[entry(n) for n in range(20)])
    taken = bench.queue.fetch(4)
    for each in order:
        taken[each].row = b""
        change = Change(0)
        bench.queue.requeue(change, [taken[each]])
        bench.write(change)
    assert bench.fetch(20) == list(range(20))


@pytest.mark.spec("E10")
def test_leased_rows_on_disk_are_not_fetched(store: TestStore) -> None:
    bench = Bench(store, read_ahead=2)
    bench.publish(*[entry(n) for n in range(9)])
    bench.leased.keys = {entry(n).key for n in (0, 1, 2, 3, 5, 8)}
    bench.queue = bench.open()
    assert bench.fetch(20) == [4, 6, 7]
    assert bench.queue.is_empty()


@pytest.mark.spec("E2")
def test_transient_messages_spill_to_disk_in_order(store: TestStore) -> None:
    bench = Bench(store, resident_max=4, read_ahead=3)
    bench.publish(*[entry(n, flags=TRANSIENT if n % 3 else 0) for n in range(30)])
    assert store.rows(Family.TRANSIENT)
    assert len(store.rows(Family.MESSAGES)) == 10
    taken = bench.queue.fetch(40)
    assert [number(e) for e in taken] == list(range(30))
    assert [bool(e.flags & TRANSIENT) for e in taken] == [n % 3 > 0 for n in range(30)]
    change = Change(0)
    bench.queue.ack(change, taken)
    bench.write(change)
    assert store.rows(Family.TRANSIENT) == store.rows(Family.MESSAGES) == []


@pytest.mark.spec("E2")
def test_transient_messages_stay_in_memory_if_spilling_fails(store: TestStore) -> None:
    bench = Bench(store, resident_max=4, read_ahead=2)
    bench.publish(*[entry(n) for n in range(10)])
    store.refuse_unlogged = True
    bench.publish(entry(10, flags=TRANSIENT), entry(11))
    bench.publish(entry(12, flags=TRANSIENT))
    assert store.rows(Family.TRANSIENT) == []
    assert bench.fetch(20) == list(range(13))


@pytest.mark.spec("E2")
def test_leased_spilled_message_can_spill_again(store: TestStore) -> None:
    bench = Bench(store, resident_max=4, read_ahead=2)
    bench.publish(*[entry(n, flags=TRANSIENT) for n in range(10)])
    taken = bench.queue.fetch(10)
    assert any(e.flags & SPILLED for e in taken)
    for each in taken:
        if each.flags & SPILLED:
            each.row = b""
    bench.queue = bench.open(known_empty=True)
    bench.queue.put_back(taken)
    assert bench.fetch(20) == list(range(10))


@pytest.mark.spec("E1")
@pytest.mark.parametrize("at", [0, 1, 3, 15, 19])
def test_removed_messages_are_not_delivered(store: TestStore, at: int) -> None:
    bench = Bench(store, resident_max=8, read_ahead=3)
    bench.publish(*[entry(n) for n in range(20)])
    first = bench.queue.fetch(2)
    bench.queue.put_back(first)
    change = Change(0)
    bench.queue.remove(change, [entry(at)])
    bench.write(change)
    assert not bench.queue.is_duplicate(entry(at).key)
    assert bench.queue.is_duplicate(entry(2).key)
    head = bench.queue.head()
    assert head is not None
    assert number(head) == (1 if at == 0 else 0)
    assert bench.fetch(30) == [n for n in range(20) if n != at]


@pytest.mark.spec("E11")
def test_browsing_sees_memory_and_disk_and_changes_nothing(store: TestStore) -> None:
    bench = Bench(store, resident_max=6, read_ahead=2)
    bench.publish(*[entry(n) for n in range(20)])
    taken = bench.queue.fetch(3)
    bench.leased.keys = {e.key for e in taken[:2]}
    taken[2].row = b""
    bench.queue.put_back(taken[2:])
    before = bench.queue.info()
    seen: list[int] = []
    after = b""
    while page := bench.queue.browse(after, 4):
        assert all(e.row for e in page)
        seen += [number(e) for e in page]
        after = page[-1].key
    assert seen == list(range(2, 20))
    assert bench.queue.info() == before
    assert bench.fetch(30) == list(range(2, 20))


@pytest.mark.spec("E1")
def test_while_operations_stop_at_the_first_mismatch(store: TestStore) -> None:
    bench = Bench(store, resident_max=4, read_ahead=2)
    bench.publish(*[entry(n) for n in range(10)])
    assert [number(e) for e in bench.queue.fetchwhile(lambda e: number(e) < 3, 100)] == [0, 1, 2]
    change = Change(0)
    assert [number(e) for e in bench.queue.dropwhile(change, lambda e: number(e) < 6, 2)] == [3, 4]
    assert [number(e) for e in bench.queue.drop(change, 1)] == [5]
    change.refused()
    assert bench.fetch(2) == [3, 4]


@pytest.mark.spec("E1")
def test_releasing_memory_loses_no_message(store: TestStore) -> None:
    bench = Bench(store)
    bench.publish(*[entry(n, flags=TRANSIENT if n % 2 else 0) for n in range(10)])
    bench.queue.put_back(bench.queue.fetch(3))
    bench.queue.shrink()
    assert bench.budget.used_bytes == 0
    assert bench.fetch(20) == list(range(10))


@pytest.mark.spec("E1")
def test_message_published_below_the_cursor_is_delivered_in_order(store: TestStore) -> None:
    bench = Bench(store, resident_max=4, read_ahead=2)
    bench.publish(*[entry(n) for n in range(10, 30)])
    bench.publish(entry(5))
    bench.publish(entry(30))
    assert bench.fetch(30) == [5, *range(10, 31)]
