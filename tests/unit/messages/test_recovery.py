"""Recovery tells the plane everything in order, loses nothing, and clears what a crash left."""

from __future__ import annotations

from pathlib import Path
from unittest.mock import patch
from uuid import UUID

import pytest
from tests.fixtures.messages_world import QUEUE_A, QUEUE_B, QUEUE_C, World

from basaltmq.errors import NotFoundError, StoreStalledError
from basaltmq.messages import recovery, stored
from basaltmq.messages.branches import PreparedBranch, Xid
from basaltmq.messages.quarantine import Quarantine, Reason
from basaltmq.messages.recovery import Recovery, RecoveryReport
from basaltmq.messages.stored import StoredMessage
from basaltmq.store.batch import Batch
from basaltmq.store.families import Family
from basaltmq.store.keys import queues as keys
from basaltmq.transactions.transaction import Transaction

UNKNOWN = UUID(int=0xFFFF)


class Plane:
    """Writes down what it is told."""

    def __init__(self, *queues: UUID) -> None:
        self.queues = queues
        self.told: list[tuple[object, ...]] = []

    def message(self, message: StoredMessage) -> None:
        self.told.append(("message", message.id))

    def knows_queue(self, queue_id: UUID) -> bool:
        return queue_id in self.queues

    def instance(self, queue_id: UUID, message_id: int) -> None:
        self.told.append(("instance", queue_id, message_id))

    def queue_complete(self, queue_id: UUID, instances: int) -> None:
        self.told.append(("complete", queue_id, instances))

    def instances_complete(self) -> None:
        self.told.append(("all",))

    def branch(self, branch: PreparedBranch) -> None:
        self.told.append(("branch", branch.xid))


def recover(world: World, *queues: UUID, window_ids: int = 1000) -> tuple[Plane, RecoveryReport]:
    plane = Plane(*(queues or (QUEUE_A, QUEUE_B, QUEUE_C)))
    quarantine = Quarantine(world.store, lambda: 5)
    return plane, Recovery(world.messages, plane, quarantine, window_ids=window_ids).run()


def prepared(world: World, xid: Xid, queue_id: UUID) -> StoredMessage:
    message = world.finished()
    branch = world.xa.start(xid, "session")
    branch.enqueue("session", queue_id, message)
    world.xa.end(xid, "session")
    world.xa.prepare(xid)
    return message


@pytest.mark.spec("A12")
def test_a_sound_store_is_told_in_order_and_left_as_it_is(tmp_path: Path) -> None:
    world = World(tmp_path / "store")
    b1, a1, b2 = (world.put(queue).id for queue in (QUEUE_B, QUEUE_A, QUEUE_B))
    xid = Xid(1, b"g", b"b")
    held = prepared(world, xid, QUEUE_C).id
    before = world.rows()
    world.reopen()
    plane, report = recover(world)
    assert plane.told == [
        *(("message", each) for each in (b1, a1, b2, held)),
        ("instance", QUEUE_A, a1),
        ("complete", QUEUE_A, 1),
        ("instance", QUEUE_B, b1),
        ("instance", QUEUE_B, b2),
        ("complete", QUEUE_B, 2),
        ("all",),
        ("branch", xid),
    ]
    assert report == RecoveryReport(messages=4, instances=3, queues=2, branches=1)
    assert world.rows() == before
    world.close()


@pytest.mark.spec("A12")
def test_entries_of_unknown_queues_and_messages_are_put_aside_and_can_come_back() -> None:
    world = World()
    kept, stray = world.put(QUEUE_A).id, world.put(UNKNOWN).id
    batch = Batch()
    batch.put(Family.QUEUE_ENTRIES, keys.queue_entry_key(QUEUE_A, 999), b"")
    world.store.write(batch)
    before = world.rows()
    plane, report = recover(world)
    assert ("instance", QUEUE_A, kept) in plane.told
    assert world.entries() == [(QUEUE_A, kept)]
    assert (report.entries_of_unknown_queues, report.entries_of_unknown_messages, report.quarantined) == (1, 1, 2)
    assert report.problems == [
        f"message 999 of queue {QUEUE_A} is unknown",
        f"queue {UNKNOWN} of message {stray} is unknown",
    ]
    assert report.orphans_removed == 0
    assert world.messages.get_content(stray) == b"content"
    quarantine = Quarantine(world.store)
    assert {(row.reason, row.key[-1], row.at_ns) for row in quarantine.rows()} == {
        (Reason.UNKNOWN_MESSAGE, 999 & 0xFF, 5),
        (Reason.UNKNOWN_QUEUE, stray, 5),
    }
    recover(world)
    assert world.messages.get_content(stray) == b"content"
    for row in list(quarantine.rows(Family.QUEUE_ENTRIES)):
        quarantine.restore(row.family, row.key)
    assert world.rows() == before
    assert list(quarantine.rows()) == []
    with pytest.raises(NotFoundError, match="in quarantine"):
        quarantine.restore(Family.QUEUE_ENTRIES, b"none")
    plane, report = recover(world, QUEUE_A, UNKNOWN)
    assert ("instance", UNKNOWN, stray) in plane.told
    world.close()


@pytest.mark.spec("A12")
def test_what_a_crash_left_without_an_entry_is_removed() -> None:
    world = World(chunk_shift=4)
    kept, taken = world.put(QUEUE_A), world.put(QUEUE_B)
    with Transaction(world.messages) as transaction:
        transaction.dequeue(QUEUE_B, taken.id)
        transaction.commit()
    with patch.object(stored, "SPILL_BYTES", 64):
        writer = world.messages.add_message(b"")
        writer.add_content(b"x" * 200)
        writer.finish()
    world.reopen()
    plane, report = recover(world)
    assert (report.orphans_removed, report.unfinished_removed, report.orphans_kept) == (1, 1, 0)
    assert ("message", writer.id) not in plane.told
    assert sorted(world.rows()) == sorted(
        (family.label, key)
        for family, key in (
            (Family.MESSAGE_METADATA, keys.metadata_key(kept.id)),
            (Family.MESSAGE_CONTENT, keys.content_key(kept.id, 0)),
            (Family.QUEUE_ENTRIES, keys.queue_entry_key(QUEUE_A, kept.id)),
        )
    )
    world.close()


@pytest.mark.spec("A12")
@pytest.mark.promise("P7")
def test_rows_that_cannot_be_read_are_put_aside_and_keep_orphans_from_being_removed() -> None:
    world = World()
    orphan, damaged, fine = world.put(QUEUE_A).id, world.put(QUEUE_A).id, world.put(QUEUE_A).id
    batch = Batch()
    batch.delete(Family.QUEUE_ENTRIES, keys.queue_entry_key(QUEUE_A, orphan))
    batch.put(Family.QUEUE_ENTRIES, b"short", b"")
    batch.put(Family.MESSAGE_METADATA, keys.metadata_key(damaged), b"?")
    batch.put(Family.XIDS, b"", b"no branch")
    world.store.write(batch)
    plane, report = recover(world)
    assert (report.malformed_rows, report.entries_of_unknown_messages) == (3, 1)
    assert (report.orphans_kept, report.orphans_removed) == (1, 0)
    assert [told for told in plane.told if told[0] == "instance"] == [("instance", QUEUE_A, fine)]
    assert world.messages.get_content(orphan) == b"content"
    _, again = recover(world)
    assert (again.malformed_rows, again.orphans_kept) == (0, 1)
    quarantine = Quarantine(world.store)
    quarantine.discard(Family.QUEUE_ENTRIES, b"short")
    quarantine.discard(Family.XIDS, b"")
    _, at_last = recover(world)
    assert at_last.orphans_removed == 1
    world.close()


@pytest.mark.spec("A12")
def test_a_branch_that_misses_messages_is_reported_and_kept() -> None:
    world = World()
    xid = Xid(1, b"g", b"")
    held = prepared(world, xid, QUEUE_A)
    batch = Batch()
    batch.delete(Family.MESSAGE_METADATA, keys.metadata_key(held.id))
    world.store.write(batch)
    plane, report = recover(world)
    assert report.branches_incomplete == 1
    assert ("branch", xid) in plane.told
    assert str(xid) in report.problems[0]
    world.close()


@pytest.mark.spec("A12")
@pytest.mark.promise("P8")
@pytest.mark.parametrize("window_ids", [1, 2, 3, 7, 100])
def test_windows_of_any_size_find_the_same_orphans(window_ids: int) -> None:
    world = World()
    placed = [world.put((QUEUE_A, QUEUE_B, QUEUE_C)[at % 3]) for at in range(20)]
    orphans = {message.id for message in placed[::4]}
    for message in placed:
        if message.id in orphans:
            batch = Batch()
            batch.delete_range(Family.QUEUE_ENTRIES, b"", b"")
            for queue in (QUEUE_A, QUEUE_B, QUEUE_C):
                batch.delete(Family.QUEUE_ENTRIES, keys.queue_entry_key(queue, message.id))
            world.store.write(batch)
    with patch.object(recovery, "STEP_ROWS", 2):
        _, report = recover(world, window_ids=window_ids)
    assert report.orphans_removed == len(orphans)
    left: list[int] = []
    world.messages.visit_messages(lambda message: left.append(message.id))
    assert left == [message.id for message in placed if message.id not in orphans]
    world.close()


@pytest.mark.spec("A12")
def test_walking_over_gaps_between_messages_finds_each_one() -> None:
    world = World()
    for at in range(120):
        queue = QUEUE_A if at % 40 == 0 else QUEUE_B
        world.put(queue)
    plane, report = recover(world)
    assert report.instances == 120
    assert [told[2] for told in plane.told if told[:2] == ("instance", QUEUE_A)] == [1, 41, 81]
    world.close()


@pytest.mark.spec("A12")
@pytest.mark.promise("P2")
def test_recovery_interrupted_at_any_write_ends_the_same_when_run_again() -> None:
    def damaged() -> World:
        world = World()
        placed = [world.put(queue) for queue in (QUEUE_A, UNKNOWN, QUEUE_B, UNKNOWN, QUEUE_A, QUEUE_A)]
        batch = Batch()
        batch.delete(Family.QUEUE_ENTRIES, keys.queue_entry_key(QUEUE_A, placed[0].id))
        batch.delete(Family.QUEUE_ENTRIES, keys.queue_entry_key(QUEUE_A, placed[4].id))
        batch.put(Family.QUEUE_ENTRIES, keys.queue_entry_key(QUEUE_B, 77), b"")
        world.store.write(batch)
        return world

    with patch.object(recovery, "STEP_ROWS", 1):
        sound = damaged()
        sound.store.watch()
        recover(sound)
        writes = len(sound.store.batches)
        assert writes >= 4
        for fail_at in range(writes):
            world = damaged()
            world.store.watch(fail_at)
            with pytest.raises(StoreStalledError, match="injected"):
                recover(world)
            recover(world)
            assert world.rows() == sound.rows()
            assert len(list(Quarantine(world.store).rows())) == 3
            world.close()
        sound.close()
