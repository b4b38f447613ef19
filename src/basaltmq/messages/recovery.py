"""Recovery of the message store in its order (SPEC A12): what a queue plane above is told, and what is put aside.

    1 messages      every stored message, by id
    2 instances     every queue entry, by queue and id        an entry of an unknown queue or message -> quarantine
    3 completion    of each queue after its last instance, then of all
    4 branches      every prepared branch, with what it misses
    5 orphans       messages without entry, branch or quarantined entry, and unfinished ones -> removed

A crash between taking a message's last entry and removing the message leaves an orphan: that is the ordinary case,
so orphans are removed. But as long as quarantine has an entry or a branch that could not be read, it may be what held
them: then they are kept and reported.

Memory is bounded whatever the number of messages. Whether an entry's message exists is a walk along both families;
orphans are looked for in windows of ids, each compared with the entries of every queue in that range of ids.
Nothing else may use the store meanwhile. Run again after a crash, it goes on where it was.
"""

from __future__ import annotations

from array import array
from bisect import bisect_left
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Final, Protocol
from uuid import UUID

from basaltmq.errors import CorruptionError
from basaltmq.messages.branches import DEQUEUE, PreparedBranch, decode_branch
from basaltmq.messages.metadata import COMPLETE, decode_metadata, delete_rows, is_visible
from basaltmq.messages.quarantine import Quarantine, Reason
from basaltmq.messages.store import MessageStore
from basaltmq.messages.stored import StoredMessage
from basaltmq.store.api import Store
from basaltmq.store.batch import Batch
from basaltmq.store.families import Family
from basaltmq.store.keys import queues as keys

WINDOW_IDS: Final = 4 << 20
"""Message ids looked at together for orphans: 36 MiB."""

STEP_ROWS: Final = 1024
"""Rows moved or removed per write."""

WALK_ROWS: Final = 16
"""Rows walked over before it is cheaper to seek."""

PROBLEMS_MAX: Final = 100
"""Problems told in words; beyond it they are counted only."""


class RecoveryHandler(Protocol):
    """The queue plane's side."""

    def message(self, message: StoredMessage) -> None: ...

    def knows_queue(self, queue_id: UUID) -> bool: ...

    def instance(self, queue_id: UUID, message_id: int) -> None: ...

    def queue_complete(self, queue_id: UUID, instances: int) -> None: ...

    def instances_complete(self) -> None: ...

    def branch(self, branch: PreparedBranch) -> None: ...


@dataclass(slots=True)
class RecoveryReport:
    """What was found."""

    messages: int = 0
    instances: int = 0
    queues: int = 0
    branches: int = 0
    branches_incomplete: int = 0
    entries_of_unknown_queues: int = 0
    entries_of_unknown_messages: int = 0
    malformed_rows: int = 0
    unfinished_removed: int = 0
    orphans_removed: int = 0
    orphans_kept: int = 0
    problems: list[str] = field(default_factory=list)

    @property
    def quarantined(self) -> int:
        return self.entries_of_unknown_queues + self.entries_of_unknown_messages + self.malformed_rows

    def problem(self, text: str) -> None:
        if len(self.problems) < PROBLEMS_MAX:
            self.problems.append(text)


class Recovery:
    """One run over a message store."""

    def __init__(
        self, messages: MessageStore, handler: RecoveryHandler, quarantine: Quarantine, *, window_ids: int = WINDOW_IDS
    ) -> None:
        self._messages = messages
        self._store: Store = messages.store
        self._handler = handler
        self._quarantine = quarantine
        self._window_ids = window_ids
        self._batch = Batch()
        self._keep_orphans = False
        self.report = RecoveryReport()

    def run(self) -> RecoveryReport:
        """All five steps. What was put aside or removed is durable on return."""
        self._recover_messages()
        self._recover_instances()
        self._recover_branches()
        self._flush()
        self._keep_orphans = self._has_unreadable()
        self._remove_orphans()
        self._flush()
        self._store.sync()
        return self.report

    def _recover_messages(self) -> None:
        for key, raw in self._store.scan(Family.MESSAGE_METADATA):
            try:
                message_id = keys.decode_metadata_key(key)
                row = decode_metadata(message_id, raw)
            except CorruptionError as error:
                self._put_aside(Family.MESSAGE_METADATA, key, raw, Reason.MALFORMED, str(error))
                continue
            if row.state == COMPLETE:
                self.report.messages += 1
                self._handler.message(StoredMessage(self._messages, message_id, row))
        self._flush()

    def _recover_instances(self) -> None:
        stored = _Walk(self._store)
        queue = b""
        known = False
        instances = 0
        for key, value in self._store.scan(Family.QUEUE_ENTRIES):
            try:
                queue_id, message_id = keys.decode_queue_entry_key(key)
            except CorruptionError as error:
                self._put_aside(Family.QUEUE_ENTRIES, key, value, Reason.MALFORMED, str(error))
                continue
            if key[:16] != queue:
                self._complete(queue, known, instances)
                queue, instances, known = key[:16], 0, self._handler.knows_queue(queue_id)
            if not known:
                self._put_aside(
                    Family.QUEUE_ENTRIES,
                    key,
                    value,
                    Reason.UNKNOWN_QUEUE,
                    f"queue {queue_id} of message {message_id} is unknown",
                )
            elif not stored.has(message_id):
                self._put_aside(
                    Family.QUEUE_ENTRIES,
                    key,
                    value,
                    Reason.UNKNOWN_MESSAGE,
                    f"message {message_id} of queue {queue_id} is unknown",
                )
            else:
                instances += 1
                self._handler.instance(queue_id, message_id)
        self._complete(queue, known, instances)
        self._handler.instances_complete()

    def _complete(self, queue: bytes, known: bool, instances: int) -> None:
        if known:
            self.report.queues += 1
            self.report.instances += instances
            self._handler.queue_complete(UUID(bytes=queue), instances)

    def _recover_branches(self) -> None:
        for key, raw in self._store.scan(Family.XIDS):
            try:
                branch = decode_branch(key, raw)
            except CorruptionError as error:
                self._put_aside(Family.XIDS, key, raw, Reason.MALFORMED, str(error))
                continue
            missing = self._missing(branch)
            if missing:
                self.report.branches_incomplete += 1
                self.report.problem(f"branch {branch.xid} misses {missing} of the messages it acts on")
            self.report.branches += 1
            self._handler.branch(branch)

    def _missing(self, branch: PreparedBranch) -> int:
        missing = 0
        for action in branch.actions:
            if action.kind == DEQUEUE:
                missing += not self._messages.has_entry(action.queue_id, action.message_id)
            else:
                raw = self._store.get(Family.MESSAGE_METADATA, keys.metadata_key(action.message_id))
                missing += raw is None or not is_visible(raw)
        return missing

    def _put_aside(self, family: Family, key: bytes, value: bytes, reason: Reason, text: str) -> None:
        if reason is Reason.MALFORMED:
            self.report.malformed_rows += 1
        elif reason is Reason.UNKNOWN_QUEUE:
            self.report.entries_of_unknown_queues += 1
        else:
            self.report.entries_of_unknown_messages += 1
        self.report.problem(text)
        self._quarantine.move_in(self._batch, family, key, value, reason)
        self._step()

    def _has_unreadable(self) -> bool:
        return any(
            row.reason is Reason.MALFORMED
            for family in (Family.QUEUE_ENTRIES, Family.XIDS)
            for row in self._quarantine.rows(family)
        )

    def _remove_orphans(self) -> None:
        start = 0
        while True:
            ids = self._window(start)
            held = bytearray(len(ids))
            if ids:
                for message_ids in self._holders(ids[0], ids[-1]):
                    _mark(ids, held, message_ids)
            for at, is_held in enumerate(held):
                if not is_held:
                    self._orphan(ids[at])
            if len(ids) < self._window_ids:
                return
            start = ids[-1] + 1

    def _window(self, start: int) -> array[int]:
        """The next whole messages from id `start` on. Unfinished ones met on the way are removed."""
        ids = array("Q")
        for key, raw in self._store.scan(Family.MESSAGE_METADATA, keys.metadata_key(start)):
            message_id = keys.decode_metadata_key(key)
            row = decode_metadata(message_id, raw)
            if row.state == COMPLETE:
                ids.append(message_id)
                if len(ids) == self._window_ids:
                    break
            else:
                self.report.unfinished_removed += 1
                delete_rows(self._batch, message_id, row)
                self._step()
        return ids

    def _holders(self, first: int, last: int) -> Iterator[Iterator[int]]:
        """Message ids in [first, last] that something holds: sorted runs of them."""
        for queue_id in self._queues():
            start = keys.queue_entry_key(queue_id, first)
            end = keys.queue_entry_key(queue_id, last) + b"\0"
            yield (int.from_bytes(key[16:], "big") for key, _ in self._store.scan(Family.QUEUE_ENTRIES, start, end))
        for row in self._quarantine.rows(Family.QUEUE_ENTRIES):
            if row.reason is not Reason.MALFORMED:
                yield iter((keys.decode_queue_entry_key(row.key)[1],))
        for key, raw in self._store.scan(Family.XIDS):
            branch = decode_branch(key, raw)
            yield iter(sorted(action.message_id for action in branch.actions if action.kind != DEQUEUE))

    def _queues(self) -> Iterator[UUID]:
        """Every queue that has an entry, by seeking from one to the next."""
        start: bytes | None = b""
        while start is not None:
            row = next(iter(self._store.scan(Family.QUEUE_ENTRIES, start)), None)
            if row is None:
                return
            queue_id = keys.decode_queue_entry_key(row[0])[0]
            yield queue_id
            start = keys.prefix_range(keys.queue_entry_prefix(queue_id))[1]

    def _orphan(self, message_id: int) -> None:
        if self._keep_orphans:
            self.report.orphans_kept += 1
            self.report.problem(f"message {message_id} is in no queue; kept, because some rows could not be read")
            return
        raw = self._store.get(Family.MESSAGE_METADATA, keys.metadata_key(message_id))
        if raw is not None:
            self.report.orphans_removed += 1
            delete_rows(self._batch, message_id, decode_metadata(message_id, raw))
            self._step()

    def _step(self) -> None:
        if len(self._batch) >= STEP_ROWS:
            self._flush()

    def _flush(self) -> None:
        if len(self._batch):
            self._store.write(self._batch)
            self._batch = Batch()


def _mark(ids: array[int], held: bytearray, message_ids: Iterator[int]) -> None:
    at = 0
    for message_id in message_ids:
        at = bisect_left(ids, message_id, at)
        if at == len(ids):
            return
        if ids[at] == message_id:
            held[at] = 1


class _Walk:
    """Whether messages exist, asked for in mostly rising order."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._rows: Iterator[tuple[bytes, bytes]] = iter(())
        self._at: tuple[bytes, bytes] | None = None

    def has(self, message_id: int) -> bool:
        key = keys.metadata_key(message_id)
        if self._at is None or key < self._at[0]:
            self._seek(key)
        steps = 0
        while self._at is not None and self._at[0] < key:
            if steps == WALK_ROWS:
                self._seek(key)
                break
            self._at = next(self._rows, None)
            steps += 1
        return self._at is not None and self._at[0] == key and is_visible(self._at[1])

    def _seek(self, key: bytes) -> None:
        self._rows = iter(self._store.scan(Family.MESSAGE_METADATA, key))
        self._at = next(self._rows, None)
