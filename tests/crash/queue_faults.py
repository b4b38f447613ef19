"""Workload of a child on queues with a full disk. It reports what it observes; the test checks it."""

from __future__ import annotations

import errno
from pathlib import Path

from tests.crash.faults import attempt
from tests.crash.harness import Emit, Shim
from tests.crash.queue_workload import check_counts

from basaltmq.queues.config import QueueConfig
from basaltmq.queues.plane import QueuePlane
from basaltmq.queues.transactions.xid import Xid
from basaltmq.store.open import open_store
from basaltmq.store.rocks import RocksStore
from basaltmq.store.sync.group_commit import GroupCommit

CONFIRMED = 40
X = Xid(1, b"g", b"b")


def open_plane(base: Path) -> tuple[RocksStore, GroupCommit, QueuePlane]:
    store = open_store(base)
    commit = GroupCommit(store)
    return store, commit, QueuePlane(store, commit)


def fill(emit: Emit, path: str, control: str, ops: str, pattern: str, half: int) -> None:
    base = Path(path)
    shim = Shim(base.parent, Path(control))
    store, commit, plane = open_plane(base)
    for name in ("q", "other"):
        plane.create(QueueConfig(name=name, visibility_timeout_ms=60_000))
    for number in range(CONFIRMED):
        plane.enqueue("q", [b"%d" % number + b" " * (0, 6000, 40_000)[number % 3]])
    session = plane.xa.begin(X)
    session.dequeue("q", 3)
    session.enqueue("other", [b"promised"])
    session.end()
    plane.xa.prepare(X)
    held = plane.lease("q", 5)
    shim.fail(ops, pattern, errno.ENOSPC, half=bool(half))
    attempt(emit, "enqueue", lambda: plane.enqueue("q", [b"too much" * 5000]))
    attempt(emit, "ack", lambda: plane.ack("q", held[0].token))
    attempt(emit, "lease", lambda: plane.lease("q"))
    attempt(emit, "due", lambda: plane.run_due(2**62))
    attempt(emit, "decide", lambda: plane.xa.commit(X))
    shim.heal()
    attempt(emit, "healed", lambda: plane.enqueue("q", [b"too late"]))
    plane.close()
    attempt(emit, "closing", commit.close)
    attempt(emit, "closed", store.close)
    look(emit, base)


def look(emit: Emit, base: Path) -> None:
    """Reopen, and check that every confirmed message exists once: in a queue, a lease or a branch."""
    store, commit, plane = open_plane(base)
    check_counts(store, plane)
    emit(f"doubt {len(plane.xa.recover())}")
    plane.xa.rollback(X)
    for call in plane._queue("q").leases.calls():
        plane.release("q", call.token)
    found: list[bytes] = []
    while held := plane.lease("q", 20):
        found += [delivery.payload.strip() for delivery in held]
        plane.ack("q", held[0].token)
    numbers = sorted(int(payload) for payload in found if payload.isdigit())
    emit(f"found {numbers == list(range(CONFIRMED))}")
    emit(f"others {sorted({payload[:8].decode() for payload in found if not payload.isdigit()})}")
    emit(f"faults {store.verify()}")
    plane.close()
    commit.close()
    store.close()
