"""A child that moves messages between queues in transactions and branches until it is killed, and the checks.

Every label is in exactly one place at any time: an ack and an enqueue in one transaction move it. So after a crash each
label exists once: in a queue, or in a prepared branch, whose rollback returns it and whose commit moves it. The parent
knows all reported steps of a branch. A confirmed decision is never undone.
"""

from __future__ import annotations

import random
from pathlib import Path

from tests.crash.harness import Child, Emit, listen_and_kill
from tests.crash.queue_workload import check_counts

from basaltmq.queues.config import QueueConfig
from basaltmq.queues.plane import QueuePlane
from basaltmq.queues.transactions.xa import parse_xid
from basaltmq.queues.transactions.xid import Xid
from basaltmq.store.families import Family
from basaltmq.store.open import open_store
from basaltmq.store.rocks import RocksStore
from basaltmq.store.sync.group_commit import GroupCommit

QUEUES = ("a", "b", "c")
LABELS = 60
LEFT = {Family.VERSION, Family.QUEUES, Family.QUEUE_STATS, Family.TIMERS}


class Transcript:
    """The lines of the children."""

    def __init__(self) -> None:
        self.filled = False
        self.moved = 0
        self.opened = 0
        self.prepared: set[str] = set()
        self.deciding: dict[str, str] = {}
        self.decided: set[str] = set()
        self.found: list[str] = []

    def receive_line(self, line: str) -> None:
        word, *rest = line.split(" ")
        if word == "filled":
            self.filled = True
        elif word == "opened":
            self.opened += 1
        elif word == "doubt":
            in_doubt = set(rest)
            lost = self.prepared - in_doubt - self.deciding.keys()
            assert not lost, f"prepared, not decided, and lost: {lost}"
            assert not in_doubt & self.decided, "decided, and in doubt again"
            self.prepared = in_doubt
            self.deciding = {}
        elif word == "prepared":
            self.prepared.add(rest[0])
        elif word == "deciding":
            self.deciding[rest[0]] = rest[1]
        elif word == "decided":
            self.prepared.discard(rest[0])
            self.deciding.pop(rest[0])
            self.decided.add(rest[0])
        elif word == "moved":
            self.moved += 1
        elif word == "found":
            self.found += rest

    def check(self) -> None:
        if self.filled:
            assert sorted(self.found) == sorted(f"{number}" for number in range(LABELS))


def open_plane(path: str) -> tuple[RocksStore, GroupCommit, QueuePlane]:
    store = open_store(Path(path))
    commit = GroupCommit(store)
    return store, commit, QueuePlane(store, commit)


def run(emit: Emit, path: str, seed: int) -> None:
    """Work until killed."""
    rng = random.Random(seed)
    store, _, plane = open_plane(path)
    check_counts(store, plane)
    if not plane.configs():
        with plane.change():
            for name in QUEUES:
                plane.create(QueueConfig(name=name, visibility_timeout_ms=100))
            plane.enqueue("a", [body(f"{number}", rng) for number in range(LABELS)])
    emit("filled")
    emit(" ".join(["doubt", *map(str, plane.xa.recover())]))
    emit("opened")
    number = 0
    while True:
        number += 1
        plane.run_due()
        act = rng.random()
        if act < 0.4:
            transact(emit, plane, rng)
        elif act < 0.8:
            branch(emit, plane, rng, Xid(1, seed.to_bytes(8, "big"), number.to_bytes(4, "big")))
        else:
            decide(emit, plane, rng)


def body(label: str, rng: random.Random) -> bytes:
    return label.encode() + b" " * rng.choice([1, 6000])


def transact(emit: Emit, plane: QueuePlane, rng: random.Random) -> None:
    source, target = rng.sample(QUEUES, 2)
    with plane.transaction() as tx:
        for delivery in tx.dequeue(source, rng.randint(1, 3), visibility_ms=60_000):
            tx.enqueue(target, [body(delivery.payload.decode().strip(), rng)])
        if rng.random() < 0.2:
            tx.abort()
    emit("moved")


def branch(emit: Emit, plane: QueuePlane, rng: random.Random, xid: Xid) -> None:
    source, target = rng.sample(QUEUES, 2)
    session = plane.xa.begin(xid)
    taken = session.dequeue(source, rng.randint(1, 3), visibility_ms=60_000)
    for delivery in taken:
        session.enqueue(target, [body(delivery.payload.decode().strip(), rng)])
    session.end()
    if rng.random() < 0.2:
        plane.xa.commit(xid, one_phase=True)
        return
    if not plane.xa.prepare(xid).read_only:
        emit(f"prepared {xid}")


def decide(emit: Emit, plane: QueuePlane, rng: random.Random) -> None:
    doubt = plane.xa.recover()
    if not doubt:
        return
    xid = rng.choice(doubt)
    commit = rng.random() < 0.5
    emit(f"deciding {xid} {'commit' if commit else 'rollback'}")
    (plane.xa.commit if commit else plane.xa.rollback)(xid)
    emit(f"decided {xid}")


def check(emit: Emit, path: str, seed: int) -> None:
    """Decide all branches and drain all queues. Return the labels, and check that nothing is left."""
    rng = random.Random(seed)
    store, commit, plane = open_plane(path)
    check_counts(store, plane)
    emit(" ".join(["doubt", *map(str, plane.xa.recover())]))
    for xid in plane.xa.recover():
        assert parse_xid(str(xid)) == xid
        (plane.xa.commit if rng.random() < 0.5 else plane.xa.rollback)(xid)
    for config in plane.configs():
        for call in plane._queue(config.name).leases.calls():
            plane.release(config.name, call.token)
        while held := plane.lease(config.name, 50):
            emit(" ".join(["found", *[delivery.payload.decode().strip() for delivery in held]]))
            plane.ack(config.name, held[0].token)
    left = [(family.label, key) for family in Family if family not in LEFT for key, _ in store.scan(family)]
    assert left == [], left[:5]
    plane.close()
    commit.close()
    store.close()


def ride(child: Child, story: Transcript, rng: random.Random, *, early: bool) -> None:
    listen_and_kill(child, story.receive_line, rng, early=early, early_s=0.5, late_s=0.5)
