"""Scans of queues: every ready message is read once, and again when it returns."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import pytest

from basaltmq.queues.browsing import scan as scan_module
from basaltmq.queues.browsing.scan import Scan
from basaltmq.queues.config import QueueConfig
from basaltmq.queues.draft import Draft
from basaltmq.queues.plane import QueuePlane
from basaltmq.queues.ready.budget import PagingLimits
from basaltmq.store.memory import MemoryStore
from basaltmq.store.sync.group_commit import GroupCommit

SMALL = PagingLimits(resident_max=8, resident_bytes_max=4096, read_ahead=3, read_ahead_bytes=1024)
MIB = 1 << 20


@pytest.fixture
def plane() -> Iterator[QueuePlane]:
    store = MemoryStore()
    commit = GroupCommit(store)
    with QueuePlane(store, commit, paging=SMALL) as made:
        yield made
    commit.close()


def bodies(plane: QueuePlane, scan: Scan, count: int = 5, *, copy: bool = True) -> list[bytes]:
    found: list[bytes] = []
    while scan.is_behind:
        page = plane.readers.read("q", scan, count, MIB, copy=copy)
        assert len(page) <= count
        found += [each.payload for each in page]
    return found


@pytest.mark.spec("G2", "E11")
@pytest.mark.parametrize("count", [1, 5, 64])
def test_each_message_is_read_once(plane: QueuePlane, count: int) -> None:
    plane.create(QueueConfig(name="q"))
    sent = [b"%d" % number for number in range(100)]
    plane.enqueue("q", sent[:50])
    scan = Scan()
    assert bodies(plane, scan, count) == sent[:50]
    assert not scan.is_behind
    plane.enqueue("q", sent[50:])
    assert bodies(plane, scan, count) == sent[50:]
    leased = plane.lease("q", 10)
    assert not bodies(plane, scan, count)
    plane.release("q", leased[0].token)
    assert bodies(plane, scan, count) == sent[:10]


@pytest.mark.spec("G2")
def test_picked_messages_are_leased_and_keep_their_places(plane: QueuePlane) -> None:
    plane.create(QueueConfig(name="q"))
    plane.enqueue("q", [b"%d" % number for number in range(40)])
    read = plane.readers.read("q", Scan(), 40, MIB, copy=False)
    keys = [each.key for each in read if int(each.payload) % 7 == 0]
    leased = plane.readers.lease("q", keys, MIB, visibility_ms=0)
    assert [each.payload for each in leased] == [b"0", b"7", b"14", b"21", b"28", b"35"]
    assert not plane.readers.lease("q", keys, MIB, visibility_ms=0)
    plane.ack("q", leased[0].token, [leased[1].id])
    plane.release("q", leased[0].token)
    rest = plane.lease("q", 100)
    assert [int(each.payload) for each in rest] == [number for number in range(40) if number != 7]


@pytest.mark.spec("G2")
def test_what_does_not_fit_is_read_again(plane: QueuePlane) -> None:
    plane.create(QueueConfig(name="q"))
    sent = [bytes([number]) * 100_000 for number in range(5)]
    plane.enqueue("q", sent)
    scan = Scan()
    read = plane.readers.read("q", scan, 5, MIB, copy=False)
    leased = plane.readers.lease("q", [each.key for each in read], 250_000, visibility_ms=0)
    assert [each.payload for each in leased] == sent[:2]
    copies = [each.payload for each in plane.readers.read("q", scan, 5, 250_000, copy=True)]
    assert copies == sent[2:4]
    assert bodies(plane, scan) == sent[4:]


@pytest.mark.spec("G2")
def test_spilled_messages_are_read_and_picked(plane: QueuePlane) -> None:
    plane.create(QueueConfig(name="q"))
    sent = [Draft(payload=b"%d" % number, transient=number % 2 == 1) for number in range(40)]
    plane.enqueue("q", sent)
    scan = Scan()
    read = []
    while scan.is_behind:
        read += plane.readers.read("q", scan, 7, MIB, copy=False)
    assert [int(each.payload) for each in read] == list(range(40))
    assert len(plane.browse("q", 100)) == 40
    leased = plane.readers.lease("q", [each.key for each in read[-5:]], MIB, visibility_ms=0)
    assert [int(each.payload) for each in leased] == [35, 36, 37, 38, 39]
    plane.release("q", leased[0].token, [leased[2].id])
    plane.ack("q", leased[0].token)
    assert [int(each.payload) for each in plane.lease("q", 100)] == [*range(35), 37]


@pytest.mark.spec("G2")
def test_higher_priorities_are_read_first(plane: QueuePlane) -> None:
    plane.create(QueueConfig(name="q", priorities_max=9))
    plane.enqueue("q", [Draft(payload=b"%d" % number, priority=number % 3) for number in range(9)])
    scan = Scan()
    assert [int(body) % 3 for body in bodies(plane, scan, 2)] == [2, 2, 2, 1, 1, 1, 0, 0, 0]
    plane.enqueue("q", [Draft(payload=b"9", priority=9)])
    assert bodies(plane, scan) == [b"9"]


@pytest.mark.spec("G2")
def test_many_returned_messages_take_bounded_memory(plane: QueuePlane, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scan_module, "AGAIN_MAX", 10)
    plane.create(QueueConfig(name="q"))
    sent = [b"%d" % number for number in range(60)]
    plane.enqueue("q", sent)
    scan = Scan()
    bodies(plane, scan)
    leased = plane.lease("q", 30)
    plane.release("q", leased[0].token)
    # The scan goes back to the first of them, so it reads the others again too.
    assert bodies(plane, scan) == sent


@pytest.mark.spec("G2")
def test_scans_see_what_random_operations_make_ready(plane: QueuePlane) -> None:
    """A reader that picks what it reads gets every message exactly once, beside a usual consumer."""
    seed = random.randrange(1 << 32)
    chance = random.Random(seed)
    plane.create(QueueConfig(name="q"))
    scan = Scan()
    sent = 0
    done: set[bytes] = set()
    held: list[Any] = []
    for _ in range(400):
        step = chance.random()
        if step < 0.3:
            count = chance.randrange(1, 6)
            plane.enqueue("q", [b"%d" % (sent + number) for number in range(count)])
            sent += count
        elif step < 0.5:
            held += plane.lease("q", chance.randrange(1, 4))
        elif step < 0.8:
            keys = [e.key for e in plane.readers.read("q", scan, 4, MIB, copy=False) if chance.random() < 0.5]
            if keys:
                held += plane.readers.lease("q", keys, MIB, visibility_ms=0)
        elif held:
            each = held.pop(chance.randrange(len(held)))
            if chance.random() < 0.5:
                plane.release("q", each.token, [each.id])
            else:
                plane.ack("q", each.token, [each.id])
                assert each.payload not in done, seed
                done.add(each.payload)
    for each in held:
        plane.release("q", each.token, [each.id])
    late = Scan()
    left = set(bodies(plane, late))
    assert not left & done, seed
    assert len(left | done) == sent, seed
    assert left == {each.payload for each in plane.lease("q", 1000)}, seed
