"""Damaged rows of every kind are moved to quarantine. All other messages are delivered."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterable
from contextlib import closing

import pytest
from tests.unit.queues.conftest import Clock
from tests.unit.queues.damaged_rig import (
    ACKED,
    BY_KEY,
    BY_VALUE,
    DAMAGES,
    LATER_NS,
    SHARED,
    Damage,
    Harness,
    Row,
    cut_key,
    damages_of,
    drain,
)

from basaltmq.queues.entries.quarantine import Record
from basaltmq.queues.plane import QueuePlane
from basaltmq.queues.recovery.verify import verify_rows
from basaltmq.store.families import Family
from basaltmq.store.memory import MemoryStore
from basaltmq.store.sync.group_commit import GroupCommit

pytestmark = [pytest.mark.spec("A12"), pytest.mark.promise("P7")]

NO_RECORD = (Family.STATE, Family.DEDUP, Family.CONTENT_REFS, Family.DEDUP_EXPIRY)
"""Families whose rows are not read here, or whose damage is reported when they are listed."""


@pytest.fixture(scope="module")
def harness() -> Harness:
    return Harness()


def check(harness: Harness, damaged: Iterable[tuple[Row, Damage]]) -> list[Record]:
    """Check that messages not at risk are delivered once, and others are delivered unchanged or in quarantine."""
    damaged = list(damaged)
    at_risk = harness.at_risk(row for row, _ in damaged)
    store = MemoryStore()
    harness.fill(store, damaged)
    clock = Clock()
    clock.now_ns = LATER_NS
    with closing(GroupCommit(store)) as commit:
        with QueuePlane(store, commit, clock_ns=clock) as plane:
            found = Counter(drain(plane, LATER_NS))
            records = plane.damage.records()
            left = {config.name: plane.stats(config.name) for config in plane.configs()}
        for payload in harness.payloads:
            wanted = 2 if payload.startswith(SHARED) else 1
            assert found[payload] == wanted or (payload in at_risk and found[payload] < wanted), payload[:40]
        assert set(found) <= harness.payloads | {ACKED}, "only enqueued messages are delivered"
        assert len(records) >= sum(not found[payload] for payload in at_risk)
        for name, counts in left.items():
            assert (counts["ready"], counts["leased"], counts["delayed"]) == (0, 0, 0), name
            assert counts["quarantined"] == sum(record.queue == name for record in records)
        with QueuePlane(store, commit, clock_ns=clock) as plane:
            assert drain(plane, LATER_NS) == []
            assert plane.damage.records() == records, "quarantined rows stay in quarantine"
        lines = verify_rows(store)
        assert [record.id for record in records if not any(record.id in line for line in lines)] == []
    return records


@pytest.mark.spec("C1")
@pytest.mark.parametrize(
    ("family", "damage"),
    [(family, damage) for family in BY_VALUE for damage in damages_of(family)],
    ids=lambda each: each.label if isinstance(each, Family) else each.__name__,
)
def test_damaged_value_is_moved_to_quarantine_unchanged(harness: Harness, family: Family, damage: Damage) -> None:
    for row in harness.of(family):
        records = check(harness, [(row, damage)])
        if family in NO_RECORD or damage(*row[1:]) == row[1:]:
            continue
        if family is Family.MESSAGE_CONTENT:
            # A body stays in its row, because other messages may share it.
            assert not records or {record.family for record in records} <= {"messages", "branch_drafts"}
        elif row[1] != b"gone":
            assert (family.label, *damage(*row[1:])) in [(r.family, r.key, r.value) for r in records]


@pytest.mark.parametrize("family", BY_KEY, ids=lambda family: family.label)
def test_damaged_key_hides_no_other_message(harness: Harness, family: Family) -> None:
    for row in harness.of(family):
        records = check(harness, [(row, cut_key)])
        if family not in NO_RECORD and b"gone" not in row[1]:
            assert (family.label, row[1][:-3]) in [(record.family, record.key) for record in records]


@pytest.mark.parametrize("family", [*BY_VALUE, *BY_KEY], ids=lambda family: family.label)
def test_damage_of_all_rows_of_a_family(harness: Harness, family: Family) -> None:
    check(harness, [(row, DAMAGES["empty"] if family in BY_VALUE else cut_key) for row in harness.of(family)])


@pytest.mark.parametrize("key", [b"queue_place", b"queue_clean", b"queue_lease_boot"])
@pytest.mark.parametrize("value", [b"", b"\xff" * 3, b"\xff" * 4, b"\xff" * 8, b"\xff" * 9])
def test_damaged_rows_of_the_previous_boot(harness: Harness, key: bytes, value: bytes) -> None:
    check(harness, [((Family.VERSION, key, b""), lambda key, _: (key, value))])


@pytest.mark.parametrize("seed", range(40))
def test_random_damage(harness: Harness, seed: int) -> None:
    rng = random.Random(seed)
    chosen = rng.sample(harness.of(*BY_VALUE), rng.randint(1, 20))
    check(harness, [(row, rng.choice(damages_of(row[0]))) for row in chosen])
