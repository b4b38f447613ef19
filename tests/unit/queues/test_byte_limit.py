"""Byte limits of leases."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
from tests.unit.queues.conftest import TestStore, payloads

from basaltmq.errors import InvalidArgumentError, StoreStalledError
from basaltmq.queues.draft import Draft
from basaltmq.queues.plane import QueuePlane
from basaltmq.queues.ready import byte_limit
from basaltmq.store.families import Family

SIZES = (10, 9000, 5000, 20_000, 1, 5000, 5000)


def drafts(keys: int = 1) -> list[Draft | bytes]:
    return [Draft(payload=bytes([at]) * size, fairness_key=f"k{at % keys}") for at, size in enumerate(SIZES)]


def taken(plane: QueuePlane, size_bytes_max: int, count: int = 100) -> list[list[int]]:
    """Return the first byte of each message, by lease call, until the queue is empty."""
    calls: list[list[int]] = []
    while found := plane.lease("q", count, size_bytes_max=size_bytes_max):
        calls.append([each.payload[0] for each in found])
        plane.ack("q", found[0].token)
    return calls


@pytest.mark.promise("P3", "P8")
def test_lease_returns_at_least_one_message_over_the_byte_limit(plane: QueuePlane, make: Callable[..., str]) -> None:
    make()
    plane.enqueue("q", drafts())
    assert taken(plane, 10_000) == [[0, 1], [2], [3], [4, 5], [6]]
    plane.enqueue("q", drafts())
    assert taken(plane, 0) == [[0], [1], [2], [3], [4], [5], [6]]
    plane.enqueue("q", drafts())
    assert taken(plane, sum(SIZES)) == [[0, 1, 2, 3, 4, 5, 6]]
    plane.enqueue("q", drafts())
    assert taken(plane, 10_000, count=1) == [[0], [1], [2], [3], [4], [5], [6]]


@pytest.mark.promise("P8")
def test_bodies_beyond_the_byte_limit_are_not_read(
    plane: QueuePlane, store: TestStore, make: Callable[..., str], monkeypatch: pytest.MonkeyPatch
) -> None:
    make()
    plane.enqueue("q", [bytes(50_000)] * 20)
    read: list[int] = []
    get_many = store.get_many

    def counted(family: Family, keys: Sequence[bytes]) -> list[bytes | None]:
        if family is Family.MESSAGE_CONTENT:
            read.append(len(keys))
        return get_many(family, keys)

    monkeypatch.setattr(store, "get_many", counted)
    assert len(plane.lease("q", 20, size_bytes_max=120_000)) == 2
    assert sum(read) == 2


@pytest.mark.promise("P2", "P3")
def test_failed_lease_write_leaves_messages_in_place(
    plane: QueuePlane, store: TestStore, make: Callable[..., str]
) -> None:
    make()
    plane.enqueue("q", drafts())
    store.refuse = 1
    with pytest.raises(StoreStalledError):
        plane.lease("q", 100, size_bytes_max=10_000)
    assert plane.stats("q")["ready"] == len(SIZES)
    assert [each[0] for each in payloads(plane, "q")] == list(range(len(SIZES)))


@pytest.mark.promise("P3")
def test_messages_over_the_byte_limit_keep_order_and_are_not_redelivered(
    plane: QueuePlane, make: Callable[..., str]
) -> None:
    make()
    plane.enqueue("q", drafts(keys=3))
    order: list[int] = []
    while found := plane.lease("q", 4, size_bytes_max=9000):
        assert sum(len(each.payload) for each in found[1:]) <= 9000
        assert not any(each.redelivered for each in found)
        order += [each.payload[0] for each in found]
        plane.ack("q", found[0].token)
    assert sorted(order) == list(range(len(SIZES)))
    for key in range(3):
        assert [at for at in order if at % 3 == key] == [at for at in range(len(SIZES)) if at % 3 == key]


@pytest.mark.promise("P8")
def test_default_byte_limit_applies(
    plane: QueuePlane, make: Callable[..., str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(byte_limit, "LEASE_BYTES_MAX", 10_000)
    make()
    for most in (None, 1 << 40):
        plane.enqueue("q", drafts())
        calls: list[list[int]] = []
        while found := plane.lease("q", 100, size_bytes_max=most):
            calls.append([each.payload[0] for each in found])
            plane.ack("q", found[0].token)
        assert calls == [[0, 1], [2], [3], [4, 5], [6]]
    for wrong in (-1, "1", True):
        with pytest.raises(InvalidArgumentError, match="must be 0 or more"):
            plane.lease("q", size_bytes_max=wrong)  # type: ignore[arg-type]
