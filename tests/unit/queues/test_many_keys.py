"""Queues of very many fairness keys: served in runs with exact shares, and not without bound."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

import pytest
from tests.unit.queues.conftest import Planes, payloads

from basaltmq.errors import LimitExceededError
from basaltmq.queues import fair
from basaltmq.queues.config import Durability, QueueConfig
from basaltmq.queues.draft import Draft
from basaltmq.queues.plane import QueuePlane


@pytest.mark.spec("C10")
def test_many_keys_are_served_in_runs_and_get_their_shares(
    plane: QueuePlane, make: Callable[..., str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fair, "MANY_KEYS", 20)
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
    # At any moment a key is less than one run from its exact share.
    assert max(abs(got[key] - weight * exact) / weight for key, weight in weights.items()) <= fair.RUN
    assert runs <= sum(got.values()) / 2
    # With few keys left each has its turn again at once.
    payloads(plane, name)
    plane.enqueue(name, [Draft(payload=b"%d" % n, fairness_key=f"k{n % 2}") for n in range(20)])
    first = [delivery.message().fairness_key for delivery in plane.lease(name, 4)]
    assert sorted(first) == ["k0", "k0", "k1", "k1"]


@pytest.mark.promise("P8")
@pytest.mark.parametrize("priorities_max", [0, 3])
def test_a_queue_keeps_so_many_keys_apart_and_no_more(
    planes: Planes, monkeypatch: pytest.MonkeyPatch, priorities_max: int
) -> None:
    monkeypatch.setattr(fair, "SUB_QUEUES_MAX", 10)
    plane = planes.open()
    plane.create(QueueConfig(name="q", durability=Durability.WRITTEN, priorities_max=priorities_max))
    plane.enqueue("q", [Draft(payload=b"x", fairness_key=f"k{n}") for n in range(10)])
    for again in (plane, planes.open()):
        with pytest.raises(LimitExceededError, match="fairness keys"):
            again.enqueue("q", [Draft(payload=b"x", fairness_key="one more")])
        again.enqueue("q", [Draft(payload=b"y", fairness_key=f"k{n}") for n in range(10)])
    # Those that are in the queue already are never refused.
    again.release("q", again.lease("q", 30)[0].token)
    assert len(payloads(again, "q")) == 30
    again.enqueue("q", [Draft(payload=b"x", fairness_key=f"other{n}") for n in range(10)])
