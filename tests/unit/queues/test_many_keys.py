"""Queues with very many fairness keys."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
from tests.unit.queues.conftest import Planes, payloads

from basaltmq.durability import Durability
from basaltmq.errors import InvalidArgumentError, LimitExceededError
from basaltmq.queues.config import QueueConfig
from basaltmq.queues.draft import Draft
from basaltmq.queues.plane import QueuePlane
from basaltmq.queues.ready import fair_queue
from basaltmq.queues.ready.budget import MemoryBudget, PagingLimits
from basaltmq.queues.ready.paging_queue import PagingQueue
from basaltmq.store.keys.parts import lp
from basaltmq.store.ranges import read_ranges


@pytest.mark.spec("C10")
def test_many_keys_are_served_in_runs_with_exact_shares(
    plane: QueuePlane, make: Callable[..., str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fair_queue, "MANY_KEYS", 20)
    name = make()
    weights = {f"k{number}": 1 + number % 4 for number in range(40)}
    for key, weight in weights.items():
        plane.enqueue(name, [Draft(payload=b"x", fairness_key=key, weight=weight)] * 160 * weight)
    got: Counter[str] = Counter()
    runs = 0
    last = ""
    for _ in range(80):
        deliveries = plane.lease(name, 100)
        for delivery in deliveries:
            key = delivery.message().fairness_key
            runs += key != last
            last = key
            got[key] += 1
        plane.ack(name, deliveries[0].token)
    exact = sum(got.values()) / sum(weights.values())
    # A key is always less than one run from its exact share.
    assert max(abs(got[key] - weight * exact) / weight for key, weight in weights.items()) <= fair_queue.RUN
    assert runs <= sum(got.values()) / 2
    # With few keys left, keys are served singly again.
    payloads(plane, name)
    plane.enqueue(name, [Draft(payload=b"%d" % n, fairness_key=f"k{n % 2}") for n in range(20)])
    first = [delivery.message().fairness_key for delivery in plane.lease(name, 4)]
    assert sorted(first) == ["k0", "k0", "k1", "k1"]


@pytest.mark.promise("P8")
@pytest.mark.parametrize("priorities_max", [0, 3])
def test_number_of_fairness_keys_is_limited(
    planes: Planes, monkeypatch: pytest.MonkeyPatch, priorities_max: int
) -> None:
    monkeypatch.setattr(fair_queue, "SUB_QUEUES_MAX", 10)
    plane = planes.open()
    plane.create(QueueConfig(name="q", durability=Durability.WRITTEN, priorities_max=priorities_max))
    plane.enqueue("q", [Draft(payload=b"x", fairness_key=f"k{n}") for n in range(10)])
    for again in (plane, planes.open()):
        with pytest.raises(LimitExceededError, match="fairness keys"):
            again.enqueue("q", [Draft(payload=b"x", fairness_key="one more")])
        again.enqueue("q", [Draft(payload=b"y", fairness_key=f"k{n}") for n in range(10)])
    # Existing keys are never refused.
    again.release("q", again.lease("q", 30)[0].token)
    assert len(payloads(again, "q")) == 30
    again.enqueue("q", [Draft(payload=b"x", fairness_key=f"other{n}") for n in range(10)])


@pytest.mark.spec("C10")
@pytest.mark.promise("P3")
@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("budget_bytes", [0, 30_000])
def test_many_keys_on_disk_are_read_completely_and_in_order(
    planes: Planes, monkeypatch: pytest.MonkeyPatch, seed: int, budget_bytes: int
) -> None:
    monkeypatch.setattr(fair_queue, "MANY_KEYS", 8)
    chance = random.Random(seed)
    budget = MemoryBudget(budget_bytes)
    plane = planes.open(budget=budget)
    plane.create(QueueConfig(name="q", durability=Durability.WRITTEN))
    passes = 0

    def counted(*arguments: Any) -> Any:
        nonlocal passes
        passes += 1
        return read_ranges(*arguments)

    monkeypatch.setattr(fair_queue, "read_ranges", counted)
    sent: dict[str, list[bytes]] = {}
    got: dict[str, list[bytes]] = {}

    def send(count: int) -> None:
        drafts: list[Draft | bytes] = []
        for _ in range(count):
            key = f"k{chance.randrange(60)}"
            line = sent.setdefault(key, [])
            line.append(b"%s/%d" % (key.encode(), len(line)))
            drafts.append(
                Draft(payload=line[-1], fairness_key=key, weight=1 + int(key[1:]) % 5, transient=chance.random() < 0.05)
            )
        plane.enqueue("q", drafts)

    send(600)
    while deliveries := plane.lease("q", chance.randrange(1, 120)):
        if chance.random() < 0.3:
            plane.release("q", deliveries[0].token)
        else:
            for delivery in deliveries:
                got.setdefault(delivery.message().fairness_key, []).append(delivery.payload)
            plane.ack("q", deliveries[0].token)
        if chance.random() < 0.1:
            send(30)
    assert got == sent
    assert passes > 0
    assert plane.stats("q")["ready"] == 0
    assert budget.used_bytes == 0


@pytest.mark.promise("P8")
def test_reads_for_many_keys_exceed_the_budget_by_one_row_per_key(
    planes: Planes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fair_queue, "MANY_KEYS", 8)
    budget = MemoryBudget(0)
    plane = planes.open(budget=budget)
    plane.create(QueueConfig(name="q", durability=Durability.WRITTEN))
    for _ in range(100):
        plane.enqueue("q", [Draft(payload=b"x" * 100, fairness_key=f"k{n}") for n in range(40)])
    most = 0
    for _ in range(50):
        plane.ack("q", plane.lease("q", 16)[0].token)
        most = max(most, budget.used_bytes)
    # One turn of each key in one pass, then the rest of the served keys.
    assert most <= 40 * (fair_queue.RUN + 2) * 500


@pytest.mark.spec("C10")
def test_drafts_keep_keys_and_weights_and_invalid_ones_are_refused(plane: QueuePlane, make: Callable[..., str]) -> None:
    name = make()
    drafts = [
        Draft(payload=b"%d" % n, properties=b"p" * n, fairness_key=f"k{n % 3}", weight=1 + n % 4) for n in range(12)
    ]
    plane.enqueue(name, drafts)
    plane.enqueue(name, [Draft(payload=b"slow", fairness_key="schlüssel", weight=9), b"plain"])
    seen = {message.payload: message for message in plane.browse(name, 100)}
    assert len(seen) == 14
    for draft in drafts:
        message = seen[draft.payload]
        assert (message.properties, message.fairness_key, message.weight) == (
            draft.properties,
            draft.fairness_key,
            draft.weight,
        )
    assert seen[b"slow"].weight == 9
    bad: list[dict[str, Any]] = [
        {"weight": 0},
        {"weight": True},
        {"weight": 1 << 32},
        {"fairness_key": b"x"},
        {"fairness_key": "\ud800"},
        {"fairness_key": "x" * 1025},
        {"payload": "text"},
    ]
    for fields in bad:
        with pytest.raises((InvalidArgumentError, LimitExceededError)):
            plane.enqueue(name, [Draft(**({"payload": b"ok", "fairness_key": "k"} | fields)), drafts[0]])
    assert plane.stats(name)["ready"] == 14


@pytest.mark.spec("C10")
def test_keys_are_served_in_runs_until_few_are_left(planes: Planes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fair_queue, "MANY_KEYS", 16)
    plane = planes.open()
    plane.create(QueueConfig(name="q", durability=Durability.WRITTEN))
    backing = plane._loaded.require("q").backing
    assert isinstance(backing, fair_queue.FairQueue)
    for _ in range(fair_queue.RUN):
        plane.enqueue("q", [Draft(payload=b"x", fairness_key=f"k{n}") for n in range(16)])
    assert backing._choose_run() == 1
    plane.enqueue("q", [Draft(payload=b"x", fairness_key="one more")])
    runs: dict[int, int] = {}
    while deliveries := plane.lease("q", fair_queue.RUN):
        runs[len(backing.sub_queues())] = backing._choose_run()
        plane.ack("q", deliveries[0].token)
    few = 16 // fair_queue.FEW_KEYS_SHARE
    assert runs == {left: fair_queue.RUN if left > few else 1 for left in runs}
    assert {few, few + 1} <= runs.keys()


@pytest.mark.spec("C10")
def test_due_keys_are_read_together_across_passes(planes: Planes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fair_queue, "MANY_KEYS", 8)
    plane = planes.open(budget=MemoryBudget(0), paging=PagingLimits(read_ahead_bytes=2000))
    plane.create(QueueConfig(name="q", durability=Durability.WRITTEN))
    for _ in range(5):
        plane.enqueue("q", [Draft(payload=b"x" * 100, fairness_key=f"k{n}") for n in range(60, 0, -1)])
    alone = 0
    read_ahead = PagingQueue._read_ahead

    def counted(queue: PagingQueue, wanted: int) -> bool:
        nonlocal alone
        alone += queue.cursor is not None
        return read_ahead(queue, wanted)

    monkeypatch.setattr(PagingQueue, "_read_ahead", counted)
    while deliveries := plane.lease("q", 10):
        plane.ack("q", deliveries[0].token)
    assert alone == 0
    assert plane.stats("q")["acked"] == 300


@pytest.mark.spec("E11")
def test_browse_covers_all_keys_in_order_despite_changes(plane: QueuePlane, make: Callable[..., str]) -> None:
    queue = make()
    names = [f"k{number}" for number in (5, 40, 3, 300, 7, 20)]
    plane.enqueue(queue, [Draft(payload=f"{name}-{n}".encode(), fairness_key=name) for name in names for n in range(3)])
    expected = sorted(names, key=lp)
    for page in (1, 2, 4, 100):
        seen: list[bytes] = []
        after = b""
        while True:
            found, after = plane.browse_page(queue, page, after=after)
            if not found:
                break
            seen += [each.payload for each in found]
        assert seen == [f"{name}-{n}".encode() for name in expected for n in range(3)]
    # Between pages, one message is added after the cursor, one before it, and the rest is consumed.
    _, after = plane.browse_page(queue, 7, after=b"")
    plane.enqueue(queue, [Draft(payload=b"late", fairness_key="k8"), Draft(payload=b"early", fairness_key="k0")])
    rest = plane.browse_page(queue, 100, after=after)[0]
    assert [each.payload for each in rest][:4] == [b"k7-1", b"k7-2", b"late", b"k20-0"]
    plane.ack(queue, plane.lease(queue, 100)[0].token)
    assert plane.browse_page(queue, 100, after=after)[0] == []


@pytest.mark.spec("C10")
def test_purged_queue_of_many_keys_is_fair_and_uses_no_memory(plane: QueuePlane, make: Callable[..., str]) -> None:
    queue = make()
    for _ in range(2):
        weights = {"a": 1, "b": 2, "c": 9}
        plane.enqueue(
            queue,
            [Draft(payload=b"", fairness_key=key, weight=weight) for key, weight in weights.items() for _ in range(90)],
        )
        got = Counter(delivery.message().fairness_key for delivery in plane.lease(queue, 96))
        assert got == {"a": 8, "b": 16, "c": 72}
        assert plane.purge(queue) == 270 - 96
        assert plane.lease(queue, 1) == []
        assert plane._shared.budget.used_bytes == 0
