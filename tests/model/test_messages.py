"""Messages, transactions and branches against a model of plain dicts, with stops at any moment, ending empty."""

from __future__ import annotations

import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from unittest.mock import patch
from uuid import UUID

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, precondition, rule
from tests.fixtures.messages_world import World

from basaltmq.errors import EntryLockedError, StoreStalledError, TransactionError
from basaltmq.messages import stored
from basaltmq.messages.branches import PreparedBranch, Xid
from basaltmq.messages.quarantine import Quarantine
from basaltmq.messages.recovery import Recovery
from basaltmq.messages.stored import StoredMessage
from basaltmq.transactions.transaction import State, Transaction

QUEUES = [UUID(int=at) for at in range(1, 4)]
Entry = tuple[UUID, int]


@dataclass
class Changes:
    """What a transaction or branch is to do, in order."""

    adds: dict[int, bytes] = field(default_factory=dict)
    steps: list[tuple[bool, Entry]] = field(default_factory=list)

    @property
    def takes(self) -> set[Entry]:
        return {entry for is_put, entry in self.steps if not is_put}

    @property
    def puts(self) -> set[int]:
        return {message_id for is_put, (_, message_id) in self.steps if is_put}


class Plane:
    """Knows all queues of the model and writes down what recovery tells."""

    def __init__(self) -> None:
        self.entries: list[Entry] = []
        self.branches: list[Xid] = []

    def message(self, message: StoredMessage) -> None: ...

    def knows_queue(self, queue_id: UUID) -> bool:
        return queue_id in QUEUES

    def instance(self, queue_id: UUID, message_id: int) -> None:
        self.entries.append((queue_id, message_id))

    def queue_complete(self, queue_id: UUID, instances: int) -> None: ...

    def instances_complete(self) -> None: ...

    def branch(self, branch: PreparedBranch) -> None:
        self.branches.append(branch.xid)


class Machine(RuleBasedStateMachine):
    """The store under test beside what it should hold."""

    on_disk = False
    transactions = Bundle("transactions")

    def __init__(self) -> None:
        super().__init__()
        self.spill = patch.object(stored, "SPILL_BYTES", 64)
        self.spill.start()
        self.folder = tempfile.TemporaryDirectory() if self.on_disk else None
        path = None if self.folder is None else Path(self.folder.name) / "store"
        self.world = World(path, chunk_shift=4, id_block=3)
        self.contents: dict[int, bytes] = {}
        self.entries: set[Entry] = set()
        self.used: set[int] = set()
        """Ids that were ever stored."""
        self.handed_out: set[int] = set()
        """Ids since the last stop."""
        self.open: dict[Transaction, Changes] = {}
        self.prepared: dict[Xid, Changes] = {}
        self.decided: set[Xid] = set()
        self.xids = 0

    def taken(self) -> set[Entry]:
        changes = [*self.open.values(), *self.prepared.values()]
        return {entry for each in changes for entry in each.takes}

    def make(self, content: bytes, pieces: int) -> StoredMessage:
        writer = self.world.messages.add_message(b"m")
        assert writer.id not in self.used
        assert writer.id not in self.handed_out
        self.handed_out.add(writer.id)
        step = max(1, len(content) // pieces)
        for at in range(0, len(content), step):
            writer.add_content(content[at : at + step])
        return writer.finish()

    def apply(self, changes: Changes) -> None:
        self.contents |= changes.adds
        self.used |= changes.adds.keys()
        for is_put, entry in changes.steps:
            if is_put:
                self.entries.add(entry)
            else:
                self.entries.discard(entry)

    @rule(target=transactions)
    def begin(self) -> Transaction:
        transaction = Transaction(self.world.messages)
        self.open[transaction] = Changes()
        return transaction

    @rule(
        transaction=transactions,
        queue=st.sampled_from(QUEUES),
        content=st.binary(max_size=200),
        pieces=st.integers(1, 5),
    )
    def enqueue(self, transaction: Transaction, queue: UUID, content: bytes, pieces: int) -> None:
        if transaction not in self.open:
            return
        message = self.make(content, pieces)
        transaction.enqueue(queue, message)
        self.open[transaction].adds[message.id] = content
        self.open[transaction].steps.append((True, (queue, message.id)))

    @rule(transaction=transactions, queue=st.sampled_from(QUEUES), data=st.data())
    def enqueue_stored(self, transaction: Transaction, queue: UUID, data: st.DataObject) -> None:
        if transaction not in self.open or not self.contents:
            return
        message_id = data.draw(st.sampled_from(sorted(self.contents)))
        message = self.world.messages.get_message(message_id)
        if any(message_id in each.adds for each in self.prepared.values()):
            with pytest.raises(TransactionError, match="belongs to another"):
                transaction.enqueue(queue, message)
            return
        transaction.enqueue(queue, message)
        self.open[transaction].steps.append((True, (queue, message_id)))

    @rule(transaction=transactions, data=st.data())
    def dequeue(self, transaction: Transaction, data: st.DataObject) -> None:
        if transaction not in self.open or not self.entries:
            return
        queue, message_id = data.draw(st.sampled_from(sorted(self.entries)))
        if (queue, message_id) in self.open[transaction].takes:
            with pytest.raises(TransactionError, match="twice"):
                transaction.dequeue(queue, message_id)
        elif (queue, message_id) in self.taken():
            with pytest.raises(EntryLockedError):
                transaction.dequeue(queue, message_id)
        else:
            transaction.dequeue(queue, message_id)
            self.open[transaction].steps.append((False, (queue, message_id)))

    @rule(transaction=consumes(transactions), stalls=st.booleans())
    def commit(self, transaction: Transaction, stalls: bool) -> None:
        if transaction not in self.open:
            return
        changes = self.open.pop(transaction)
        if stalls and changes.steps:
            before = self.world.rows()
            self.world.store.watch(fail_at=0)
            with pytest.raises(StoreStalledError):
                transaction.commit()
            assert self.world.rows() == before
        self.world.store.watch()
        transaction.commit()
        assert len(self.world.store.batches) == bool(changes.steps)
        self.apply(changes)

    @rule(transaction=consumes(transactions))
    def abort(self, transaction: Transaction) -> None:
        if transaction not in self.open:
            return
        del self.open[transaction]
        transaction.abort()
        assert transaction.state is State.ABORTED

    @rule(
        puts=st.lists(st.tuples(st.sampled_from(QUEUES), st.binary(max_size=100)), max_size=3),
        takes=st.integers(0, 2),
        end=st.sampled_from(["prepare", "one_phase", "rollback", "lost"]),
        data=st.data(),
    )
    def branch(self, puts: list[tuple[UUID, bytes]], takes: int, end: str, data: st.DataObject) -> None:
        self.xids += 1
        xid, changes = Xid(1, self.xids.to_bytes(2, "big"), b""), Changes()
        branch = self.world.xa.start(xid, "session")
        for queue, content in puts:
            message = self.make(content, 1)
            branch.enqueue("session", queue, message)
            changes.adds[message.id] = content
            changes.steps.append((True, (queue, message.id)))
        for _ in range(takes):
            free = sorted(self.entries - self.taken() - changes.takes)
            if free:
                entry = data.draw(st.sampled_from(free))
                branch.dequeue("session", *entry)
                changes.steps.append((False, entry))
        if end == "lost":
            self.world.xa.release("session")
            return
        self.world.xa.end(xid, "session")
        if end == "one_phase":
            self.world.xa.commit(xid, one_phase=True)
            self.apply(changes)
        elif end == "rollback":
            self.world.xa.rollback(xid)
        else:
            vote = self.world.xa.prepare(xid)
            assert vote.read_only == (not changes.steps)
            if changes.steps:
                self.prepared[xid] = changes
                self.contents |= changes.adds
                self.used |= changes.adds.keys()

    @precondition(lambda self: self.prepared)
    @rule(commit=st.booleans(), by_operator=st.booleans(), data=st.data())
    def decide(self, commit: bool, by_operator: bool, data: st.DataObject) -> None:
        xid = data.draw(st.sampled_from(sorted(self.prepared)))
        changes = self.prepared.pop(xid)
        if by_operator:
            self.world.xa.decide(xid, commit=commit)
            self.decided.add(xid)
        elif commit:
            self.world.xa.commit(xid)
        else:
            self.world.xa.rollback(xid)
        if commit:
            self.apply(changes)
        else:
            for message_id in changes.adds:
                del self.contents[message_id]

    @precondition(lambda self: self.decided)
    @rule(data=st.data())
    def forget(self, data: st.DataObject) -> None:
        xid = data.draw(st.sampled_from(sorted(self.decided)))
        self.decided.remove(xid)
        self.world.xa.forget(xid)

    @rule()
    def stop_and_recover(self) -> None:
        """What was not committed or prepared is gone, and so is what nothing holds."""
        self.open.clear()
        self.handed_out.clear()
        self.world.reopen()
        plane = Plane()
        report = Recovery(self.world.messages, plane, Quarantine(self.world.store), window_ids=3).run()
        assert plane.entries == sorted(self.entries)
        assert plane.branches == self.world.xa.recover() == sorted({*self.prepared, *self.decided})
        assert (report.quarantined, report.branches_incomplete, report.problems) == (0, 0, [])
        held = {message_id for _, message_id in self.entries}
        held |= {message_id for each in self.prepared.values() for message_id in each.puts}
        assert report.orphans_removed == len(self.contents.keys() - held)
        self.contents = {message_id: content for message_id, content in self.contents.items() if message_id in held}

    @invariant()
    def holds_what_the_model_holds(self) -> None:
        assert self.world.entries() == sorted(self.entries)
        found: dict[int, bytes] = {}

        def take(message: StoredMessage) -> None:
            found[message.id] = message.get_content()

        self.world.messages.visit_messages(take)
        assert found == self.contents
        assert len(self.world.messages.locks) == len(self.taken())

    def teardown(self) -> None:
        try:
            for transaction in list(self.open):
                transaction.abort()
            self.open.clear()
            for at, (xid, changes) in enumerate(list(self.prepared.items())):
                if at % 2:
                    self.world.xa.commit(xid)
                    self.apply(changes)
                else:
                    self.world.xa.rollback(xid)
                    for message_id in changes.adds:
                        del self.contents[message_id]
                del self.prepared[xid]
            for xid in list(self.decided):
                self.world.xa.forget(xid)
            self.decided.clear()
            with Transaction(self.world.messages) as drain:
                for entry in sorted(self.entries):
                    drain.dequeue(*entry)
                drain.commit()
            self.entries.clear()
            self.stop_and_recover()
            assert self.world.rows() == {}
            assert len(self.world.messages.locks) == 0
        finally:
            self.world.close()
            if self.folder is not None:
                self.folder.cleanup()
            self.spill.stop()


class DiskMachine(Machine):
    on_disk = True


TestMessagesInMemory = pytest.mark.spec("A4", "A5", "A6", "A7", "A12")(
    pytest.mark.promise("P1", "P2", "P8")(Machine.TestCase)
)
TestMessagesInMemory.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)

TestMessagesOnDisk = pytest.mark.spec("A4", "A5", "A6", "A7", "A12")(
    pytest.mark.promise("P1", "P2", "P8")(DiskMachine.TestCase)
)
TestMessagesOnDisk.settings = settings(max_examples=5, stateful_step_count=20, deadline=None)
