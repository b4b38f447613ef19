"""Workload of a child on queues until it is killed, and the parent's checks of its successors."""

from __future__ import annotations

import random
from pathlib import Path

from tests.crash.harness import Child, Emit, listen_and_kill

from basaltmq.queues.config import QueueConfig
from basaltmq.queues.draft import Draft
from basaltmq.queues.entries.backing import APART
from basaltmq.queues.entries.rows import NO_BODY, read_entry
from basaltmq.queues.plane import QueuePlane
from basaltmq.queues.transactions.branch_rows import decode_draft
from basaltmq.store.families import Family
from basaltmq.store.keys.parts import lp, prefix_range
from basaltmq.store.keys.queues import message_of
from basaltmq.store.open import open_store
from basaltmq.store.rocks import RocksStore
from basaltmq.store.sync.group_commit import GroupCommit

QUEUES = ("a", "b")
ALL = (*QUEUES, "dead")
KEPT = {
    Family.VERSION,
    Family.QUEUES,
    Family.QUEUE_STATS,
    Family.TIMERS,
    Family.DEDUP,
    Family.DEDUP_EXPIRY,
    Family.BODY_FILES,
}


class Expectation:
    """The reported steps and their consequences. Labels are `queue:number`, unique over all children."""

    def __init__(self, *, acks_last: bool) -> None:
        self.acks_last = acks_last
        """Whether a confirmed ack survives this kind of crash."""
        self.tried: set[str] = set()
        self.confirmed: set[str] = set()
        self.acking: set[str] = set()
        self.acked: set[str] = set()
        self.found: list[str] = []
        self.opened = 0

    def receive_line(self, line: str) -> None:
        word, *labels = line.split(" ")
        if word == "opened":
            self.opened += 1
        elif word == "found":
            self.found += labels
        else:
            known = {"try": self.tried, "confirmed": self.confirmed, "acking": self.acking, "acked": self.acked}[word]
            known.update(labels)

    def check(self) -> None:
        found = set(self.found)
        assert len(found) == len(self.found), "a message exists twice"
        assert not self.confirmed - self.acking - found, "confirmed, not acked, and lost"
        assert found <= self.tried
        if self.acks_last:
            assert not found & self.acked, "acked, but still there"


def open_plane(path: str) -> tuple[RocksStore, GroupCommit, QueuePlane]:
    store = open_store(Path(path))
    commit = GroupCommit(store)
    plane = QueuePlane(store, commit)
    for name in QUEUES:
        if name not in {config.name for config in plane.configs()}:
            plane.create(
                QueueConfig(
                    name=name,
                    attempts_max=3,
                    dead_letter_queue="dead",
                    visibility_timeout_ms=150,
                    dedup_window_ms=60_000,
                )
            )
    return store, commit, plane


def check_counts(store: RocksStore, plane: QueuePlane) -> None:
    """Check that counts match the rows, and that bodies and messages (or drafts of branches) refer to each other.

    Rows of deleted queues are reclaimed first, like in an open plane.
    """
    with plane._lock:
        while plane._shared.reclaim.is_pending:
            plane._changes.do(plane._shared.reclaim.step)
    wanted: set[bytes] = set()
    for name in [config.name for config in plane.configs()]:
        stats = plane.stats(name)
        for family, count, size in (
            (Family.MESSAGES, "messages", "size_bytes"),
            (Family.DELAYED, "delayed", "delayed_bytes"),
        ):
            rows = [
                read_entry(key if family is Family.MESSAGES else message_of(key)[0], row)
                for key, row in store.scan(family, *prefix_range(lp(name)))
            ]
            assert stats[count] == len(rows), (name, count, stats[count], len(rows))
            assert stats[size] == sum(entry.size_bytes for entry in rows)
            wanted |= {entry.row[2:18] for entry in rows if entry.flags & APART}
    kept = {decode_draft(row).body_id for _, row in store.scan(Family.BRANCH_DRAFTS)} - {NO_BODY}
    assert {key for key, _ in store.scan(Family.MESSAGE_CONTENT)} == wanted | kept


def run(emit: Emit, path: str, seed: int) -> None:
    """Work until killed."""
    rng = random.Random(seed)
    store, _, plane = open_plane(path)
    check_counts(store, plane)
    emit("opened")
    number = 0
    while True:
        number += 1
        queue = rng.choice(QUEUES)
        plane.run_due()
        act = rng.random()
        if act < 0.35:
            publish(emit, plane, rng, queue, f"{seed}.{number}")
        elif act < 0.45:
            fan_out(emit, plane, f"{seed}.{number}")
        elif act < 0.5:
            plane.redrive("dead", count=3, rate_per_s=rng.choice([None, 100]))
        elif act < 0.52:
            temporary(plane)
        else:
            consume(emit, plane, rng, rng.choice(ALL))


def publish(emit: Emit, plane: QueuePlane, rng: random.Random, queue: str, stem: str) -> None:
    labels = [f"{queue}:{stem}.{n}" for n in range(rng.randint(1, 8))]
    emit(" ".join(["try", *labels]))
    drafts: list[Draft | bytes] = []
    for label in labels:
        body = label.encode() + b" " * rng.choice([1, 100, 6000, 40_000])
        drafts.append(
            body
            if rng.random() < 0.4
            else Draft(
                payload=body,
                fairness_key=rng.choice("xyz"),
                delay_ms=rng.choice([0, 0, 20]),
                dedup_id=label.encode(),
            )
        )
    plane.enqueue(queue, drafts)
    emit(" ".join(["confirmed", *labels]))


def fan_out(emit: Emit, plane: QueuePlane, stem: str) -> None:
    # Both copies have one body. Their queues distinguish them.
    labels = [f"{queue}:both.{stem}" for queue in QUEUES]
    emit(" ".join(["try", *labels]))
    plane.publish(QUEUES, b"both." + stem.encode() + b" " * 3000)
    emit(" ".join(["confirmed", *labels]))


def temporary(plane: QueuePlane) -> None:
    """Create, fill and delete a queue."""
    name = "temporary"
    if name in {config.name for config in plane.configs()}:
        plane.delete(name)
    plane.create(QueueConfig(name=name))
    assert plane.stats(name)["messages"] == 0
    plane.enqueue(name, [b"x" * 7000, b"y", Draft(payload=b"z" * 7000, delay_ms=10_000)])
    plane.lease(name)
    plane.delete(name)


def consume(emit: Emit, plane: QueuePlane, rng: random.Random, queue: str) -> None:
    held = plane.lease(queue, rng.randint(1, 6), consumer="worker")
    if not held:
        return
    token = held[0].token
    some = rng.sample(held, rng.randint(1, len(held)))
    ids = [delivery.id for delivery in some]
    act = rng.random()
    if act < 0.5:
        # A fan-out copy is settled only in its queue, because elsewhere the copies cannot be distinguished.
        mine = [d for d in some if not d.payload.startswith(b"both.") or queue in QUEUES]
        labels = [label_of(queue, delivery.payload) for delivery in mine]
        if mine:
            emit(" ".join(["acking", *labels]))
            plane.ack(queue, token, [delivery.id for delivery in mine])
            emit(" ".join(["acked", *labels]))
    elif act < 0.7:
        plane.nack(queue, token, ids, error="no", delay_ms=rng.choice([0, 10]))
    elif act < 0.8:
        plane.release(queue, token, ids)
    elif act < 0.85:
        plane.extend(queue, token, 300, ids)


def label_of(queue: str, payload: bytes) -> str:
    text = payload.decode().rstrip()
    return f"{queue}:{text}" if text.startswith("both.") else text


def check(emit: Emit, path: str) -> None:
    """Drain all queues. Return the labels, and check that nothing is left."""
    store, commit, plane = open_plane(path)
    check_counts(store, plane)
    if "temporary" in {config.name for config in plane.configs()}:
        plane.delete("temporary")
    for name in ALL:
        for call in plane._queue(name).leases.calls():
            plane.release(name, call.token)
    far_ns = 2**63
    for name in ALL:
        while (deadline := plane.run_due(far_ns)) is not None and deadline <= far_ns:
            pass
        while held := plane.lease(name, 50):
            labels = []
            for delivery in held:
                label = label_of(name, delivery.payload)
                history = delivery.message().headers.get("x-first-death-queue")
                labels.append(label.replace("dead:", f"{history}:", 1) if history and name == "dead" else label)
            emit(" ".join(["found", *labels]))
            plane.ack(name, held[0].token)
    left = [(f.label, key) for f in Family if f not in KEPT for key, _ in store.scan(f)]
    assert left == [], left[:5]
    plane.close()
    commit.close()
    store.close()


def ride(child: Child, expectation: Expectation, rng: random.Random, *, early: bool) -> None:
    """Read the lines of a child, and kill it while it opens or works."""
    listen_and_kill(child, expectation.receive_line, rng, early=early, early_s=0.5, late_s=0.5)
