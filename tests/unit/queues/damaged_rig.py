"""A store with every kind of row of the queue plane, whose rows tests damage before they drain the queues."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable
from contextlib import closing
from typing import Final

from tests.unit.queues.conftest import MS, START_NS, Clock

from basaltmq.queues.config import QueueConfig
from basaltmq.queues.draft import Draft
from basaltmq.queues.entries import rows
from basaltmq.queues.entries.backing import APART
from basaltmq.queues.plane import QueuePlane
from basaltmq.queues.transactions.branch_rows import decode_draft
from basaltmq.queues.transactions.xid import Xid
from basaltmq.store.api import Store
from basaltmq.store.batch import Batch
from basaltmq.store.families import Family
from basaltmq.store.memory import MemoryStore
from basaltmq.store.sync.group_commit import GroupCommit

LATER_NS: Final = START_NS + 3_600_000 * MS
"""A time after all deadlines."""

XID: Final = Xid(1, b"global", b"branch")
ACKED: Final = b"acked by the branch"
"""Payload that is delivered only if the branch cannot be committed."""

SHARED: Final = b"shared"
"""Prefix of payloads that two queues have."""

Row = tuple[Family, bytes, bytes]
Damage = Callable[[bytes, bytes], tuple[bytes, bytes]]
"""A row after the damage: key and value."""

BY_VALUE: Final = (
    Family.MESSAGES,
    Family.DELAYED,
    Family.MESSAGE_CONTENT,
    Family.LEASES,
    Family.QUEUES,
    Family.QUEUE_STATS,
    Family.DEDUP,
    Family.XIDS,
    Family.BRANCH_DRAFTS,
    Family.STATE,
    Family.DELETED_QUEUES,
)
"""Families whose values have content."""

BY_KEY: Final = (
    Family.MESSAGES,
    Family.DELAYED,
    Family.LEASES,
    Family.LEASE_EXPIRY,
    Family.MESSAGE_EXPIRY,
    Family.TIMERS,
    Family.DEDUP_EXPIRY,
    Family.CONTENT_REFS,
)
"""Families whose keys have content."""


def truncated(key: bytes, value: bytes) -> tuple[bytes, bytes]:
    return key, value[: len(value) * 2 // 3]


def emptied(key: bytes, value: bytes) -> tuple[bytes, bytes]:
    return key, b""


def relaid(key: bytes, value: bytes) -> tuple[bytes, bytes]:
    return key, b"\x7f" + value[1:]


def scrambled(key: bytes, value: bytes) -> tuple[bytes, bytes]:
    # Change the length, because only the length of a body is checked.
    return key, random.Random(value).randbytes(len(value) + 3)


def cut_key(key: bytes, value: bytes) -> tuple[bytes, bytes]:
    return key[:-3], value


DAMAGES: Final[dict[str, Damage]] = {
    "truncated": truncated,
    "empty": emptied,
    "layout": relaid,
    "random": scrambled,
}


def damages_of(family: Family) -> list[Damage]:
    """Return the damages that a family detects. A body has no layout; only its length is checked."""
    return [damage for damage in DAMAGES.values() if family is not Family.MESSAGE_CONTENT or damage is not relaid]


def populate(plane: QueuePlane) -> set[bytes]:
    """Fill the queues of a plane. Return the payloads that they must deliver."""
    made: set[bytes] = set()

    def payload(what: str, size: int = 0) -> bytes:
        made.add(text := f"{what} {len(made)} ".encode().ljust(size, b"."))
        return text

    def make(name: str, **settings: object) -> str:
        plane.create(QueueConfig(name=name, **settings))  # type: ignore[arg-type]
        return name

    plane.enqueue(make("plain"), [payload("plain") for _ in range(12)])
    plane.enqueue("plain", [Draft(payload=payload("headers"), headers={"a": "b"})])
    plane.enqueue("plain", [payload("large", 6000) for _ in range(2)])
    make("fair")
    for key in ("a", "b", "c"):
        plane.enqueue("fair", [Draft(payload=payload(key), fairness_key=key, weight=2) for _ in range(4)])
    plane.enqueue(make("prio", priorities_max=9), [Draft(payload=payload("prio"), priority=n) for n in (1, 5, 9, 9)])
    plane.enqueue(make("later"), [Draft(payload=payload("later"), delay_ms=1000 * n) for n in (1, 2, 3)])
    plane.enqueue("later", [Draft(payload=payload("large later", 6000), delay_ms=5000)])
    make("short", dead_letter_queue="dead")
    plane.enqueue("short", [Draft(payload=payload("short"), ttl_ms=1000 * n) for n in (1, 2)])
    plane.enqueue(make("leased"), [payload("leased") for _ in range(6)])
    plane.lease("leased", 2)
    plane.lease("leased", 1)
    make("once", dedup_window_ms=60_000)
    plane.enqueue("once", [Draft(payload=payload("once"), dedup_id=b"%d" % n) for n in range(3)])
    plane.publish([make("left"), make("right")], payload("shared", 5000))
    plane.set_setting("throttle.t", "10,10")
    plane.enqueue(make("held"), [ACKED, payload("held")])
    make("branch")
    session = plane.xa.begin(XID)
    session.dequeue("held")
    session.enqueue("branch", [payload("branch"), payload("large branch", 6000)])
    session.end()
    plane.xa.prepare(XID)
    # A deleted queue whose rows are not reclaimed yet.
    plane.enqueue(make("gone"), [b"x" * 9000])
    step, plane._shared.reclaim.step = plane._shared.reclaim.step, lambda change: None  # type: ignore[method-assign]
    plane.delete("gone")
    plane._shared.reclaim.step = step  # type: ignore[method-assign]
    return made


class Harness:
    """The rows of a populated store, and the payloads in it."""

    def __init__(self) -> None:
        store = MemoryStore()
        with closing(GroupCommit(store)) as commit, QueuePlane(store, commit, clock_ns=Clock()) as plane:
            self.payloads = populate(plane)
        self.rows: list[Row] = [(family, key, value) for family in Family for key, value in store.scan(family)]
        self._bodies = {key: value for family, key, value in self.rows if family is Family.MESSAGE_CONTENT}

    def of(self, *families: Family) -> list[Row]:
        return [row for row in self.rows if row[0] in families]

    def fill(self, store: Store, damaged: Iterable[tuple[Row, Damage]]) -> None:
        """Put the rows into a store, some of them damaged."""
        batch = Batch()
        for family, key, value in self.rows:
            batch.put(family, key, value)
        for (family, key, value), damage in damaged:
            batch.delete(family, key)
            batch.put(family, *damage(key, value))
        store.write(batch)

    def at_risk(self, chosen: Iterable[Row]) -> set[bytes]:
        """Return the payloads that may be lost with these rows."""
        found: set[bytes] = set()
        for family, key, value in chosen:
            if family in (Family.MESSAGES, Family.DELAYED):
                entry = rows.read_entry(key, value)
                found.add(self._bodies[rows.body_of(value)] if entry.flags & APART else rows.payload_of(value))
            elif family is Family.MESSAGE_CONTENT:
                found.add(value)
            elif family is Family.BRANCH_DRAFTS:
                found.add(self._drafted(value))
            elif family is Family.XIDS:
                found |= {self._drafted(draft) for _, _, draft in self.of(Family.BRANCH_DRAFTS)}
        return found & self.payloads

    def _drafted(self, raw: bytes) -> bytes:
        draft = decode_draft(raw)
        return self._bodies.get(draft.body_id, draft.draft.payload)


def drain(plane: QueuePlane, now_ns: int) -> list[bytes]:
    """Run all due work and return the payloads of all queues."""
    found: list[bytes] = []
    if XID in plane.xa.recover():
        plane.xa.commit(XID)
    for _ in range(1000):
        deadline_ns = plane.run_due(now_ns)
        for config in plane.configs():
            while deliveries := plane.lease(config.name, 5):
                found += [each.payload for each in deliveries]
                # All fields of a message must be readable.
                assert all(each.message().queue == config.name and each.headers is not None for each in deliveries)
                plane.ack(config.name, deliveries[0].token)
        if deadline_ns is None or deadline_ns > now_ns:
            return found
    raise AssertionError("something stays due")
