"""The part of an audit that looks at messages: queues with their counts and bodies, and the rows of the message store.

Every family is scanned once, in one view, which shows one moment: a batch of the writer is there as a whole or not at
all, so what does not fit here does not fit in the store. Memory is a few dozen bytes per body that is kept apart, which
has 4 KiB at least, so about a hundredth of what it is about.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Final

from basaltmq.errors import CorruptionError
from basaltmq.messages.metadata import COMPLETE, decode_metadata
from basaltmq.pipeline.findings import Finding, Severity
from basaltmq.queues.lifecycle.reclaim import floors
from basaltmq.queues.ready.backing import APART, SHARED
from basaltmq.queues.ready.rows import NO_BODY, unwrap
from basaltmq.queues.stats import QueueStats
from basaltmq.queues.transactions.branches import decode_draft
from basaltmq.store.api import Store
from basaltmq.store.families import Family
from basaltmq.store.keys import queues as keys

_COMING: Final = -1
"""Content that is still being written: as many chunks as came so far."""

_ANY_SIZE: Final = -2
"""A prepared branch does not say how large its payload is."""


def audit_queues(store: Store) -> Iterator[Finding]:
    """Queues: counts, bodies, references, leases."""
    counts = {
        queue: QueueStats.decode(queue, raw)
        for key, raw in store.scan(Family.QUEUE_STATS)
        for queue in [keys.decode_queue_stats_key(key)]
    }
    rows = _Rows(store, counts)
    yield from rows.findings()
    calls = Counter(keys.decode_lease_call_key(key)[0] for key, _ in store.scan(Family.LEASE_CALLS))
    for queue in sorted(set(calls) - set(counts)):
        yield Finding(Severity.FAULT, "orphan", f"queue {queue}", f"{calls[queue]} leases of a queue without counts")


class _Rows:
    """Rows of messages, counted, with what they say of bodies."""

    def __init__(self, store: Store, counts: dict[str, QueueStats]) -> None:
        self._store = store
        self._counts = counts
        self._floors = floors(store)
        self._ready: Counter[str] = Counter()
        self._delayed: Counter[str] = Counter()
        self._bodiless: Counter[str] = Counter()
        self._damaged: Counter[str] = Counter()
        self._bodies: dict[bytes, tuple[str, int]] = {}
        """Body -> a queue that has it, and its size."""
        self._references: set[bytes] = set()
        """Keys of the references that rows call for."""
        for key, row in store.scan(Family.MESSAGES):
            queue, _, place_ns, message_id = keys.decode_message_key(key)
            self._look(self._ready, queue, place_ns, message_id, row)
        for key, row in store.scan(Family.DELAYED):
            queue, _, _, place_ns, message_id = keys.decode_timed_message_key(key)
            self._look(self._delayed, queue, place_ns, message_id, row)
        for _, raw in store.scan(Family.BRANCH_DRAFTS):
            self._look_at_draft(raw)

    def _look_at_draft(self, raw: bytes) -> None:
        """A prepared branch keeps a large payload as a message would, with a reference of its own."""
        try:
            queue, _, body_id, _ = decode_draft(raw)
        except CorruptionError:
            self._damaged["of a prepared branch"] += 1
            return
        if body_id != NO_BODY:
            self._bodies.setdefault(body_id, (queue, _ANY_SIZE))
            self._references.add(keys.content_ref_key(body_id, body_id))

    def _look(self, found: Counter[str], queue: str, place_ns: int, message_id: bytes, row: bytes) -> None:
        stats = self._counts.get(queue)
        floor_ns = max(self._floors.get(queue, 0), 0 if stats is None else stats.floor_ns)
        if place_ns >= floor_ns:
            found[queue] += 1
        # Those of a deleted queue have their bodies until they are taken away.
        try:
            _, flags, body_id, size_bytes = unwrap(row)
        except CorruptionError:
            self._damaged[queue] += 1
            return
        if flags & APART:
            self._bodies[body_id] = queue, size_bytes
            if flags & SHARED:
                self._references.add(keys.content_ref_key(body_id, message_id))

    def findings(self) -> Iterator[Finding]:
        for queue, stats in sorted(self._counts.items()):
            for count, found, what in (
                (stats.messages, self._ready[queue], "messages"),
                (stats.delayed, self._delayed[queue], "delayed messages"),
            ):
                if count != found:
                    severity = Severity.LOSS if found < count else Severity.FAULT
                    yield Finding(severity, "count", f"queue {queue}", f"counts {count} {what} and has {found}")
        both = self._ready + self._delayed
        for queue in sorted(set(both) - set(self._counts)):
            said = f"{both[queue]} messages of a queue without counts"
            yield Finding(Severity.FAULT, "orphan", f"queue {queue}", said)
        for queue, count in sorted(self._damaged.items()):
            yield Finding(Severity.LOSS, "checksum", f"queue {queue}", f"{count} rows of messages cannot be read")
        yield from self._content()

    def _content(self) -> Iterator[Finding]:
        orphans = _Some()
        for key, body in self._store.scan(Family.BODIES):
            body_id = keys.decode_body_key(key)
            queue, size_bytes = self._bodies.pop(body_id, ("", -1))
            if size_bytes == -1:
                orphans.add(body_id)
            elif size_bytes != _ANY_SIZE and len(body) != size_bytes:
                self._bodiless[queue] += 1
        for queue, _ in self._bodies.values():
            self._bodiless[queue] += 1
        for queue, count in sorted(self._bodiless.items()):
            said = f"{count} bodies of its messages are not there, or not of their size"
            yield Finding(Severity.LOSS, "reference", f"queue {queue}", said)
        if orphans.count:
            yield Finding(Severity.FAULT, "orphan", "bodies", f"{orphans.count} are of no message: {orphans}")
        strays = _Some()
        for key, _ in self._store.scan(Family.CONTENT_REFS):
            if key in self._references:
                self._references.discard(key)
            else:
                strays.add(keys.decode_content_ref_key(key)[1])
        if strays.count:
            said = f"{strays.count} are of messages that are not there, and keep their bodies: {strays}"
            yield Finding(Severity.FAULT, "orphan", "references to bodies", said)
        if self._references:
            lacking = _Some()
            for key in sorted(self._references):
                lacking.add(keys.decode_content_ref_key(key)[1])
            said = f"{lacking.count} messages share a body without a reference that keeps it: {lacking}"
            yield Finding(Severity.FAULT, "reference", "references to bodies", said)


def audit_messages(store: Store) -> Iterator[Finding]:
    """The message store: metadata, content by chunks, entries of queues."""
    known: dict[int, int] = {}
    """Messages with content, and how many chunks of it they are to have; those without are looked up."""
    damaged, orphans, dangling = _Some(), _Some(), _Some()
    for key, raw in store.scan(Family.MESSAGE_METADATA):
        message_id = keys.decode_metadata_key(key)
        try:
            row = decode_metadata(message_id, raw)
        except CorruptionError:
            damaged.add(message_id)
            continue
        if row.state != COMPLETE:
            known[message_id] = _COMING
        elif row.chunks:
            known[message_id] = row.chunks
    chunks: Counter[int] = Counter()
    for key, _ in store.scan(Family.MESSAGE_CONTENT):
        message_id, _ = keys.decode_content_key(key)
        chunks[message_id] += 1
        if message_id not in known and chunks[message_id] == 1:
            orphans.add(message_id)
    lacking = _Some()
    for message_id, wanted in known.items():
        if wanted != _COMING and chunks[message_id] != wanted:
            lacking.add(message_id)
    for key, _ in store.scan(Family.QUEUE_ENTRIES):
        _, message_id = keys.decode_queue_entry_key(key)
        if message_id not in known and store.get(Family.MESSAGE_METADATA, keys.metadata_key(message_id)) is None:
            dangling.add(message_id)
    for severity, kind, some, said in (
        (Severity.LOSS, "checksum", damaged, "have a row that cannot be read"),
        (Severity.LOSS, "reference", lacking, "lack a part of their content, or have too much"),
        (Severity.LOSS, "reference", dangling, "are in a queue and not there"),
        (Severity.FAULT, "orphan", orphans, "are not there, or empty, and have content"),
    ):
        if some.count:
            yield Finding(severity, kind, "message store", f"{some.count} messages {said}: {some}")


class _Some:
    """How many there are, and which the first ones are."""

    SHOWN_MAX = 3

    def __init__(self) -> None:
        self.count = 0
        self._shown: list[str] = []

    def add(self, each: bytes | int) -> None:
        self.count += 1
        if len(self._shown) < self.SHOWN_MAX:
            self._shown.append(each.hex() if isinstance(each, bytes) else str(each))

    def __str__(self) -> str:
        return ", ".join(self._shown) + (" ..." if self.count > self.SHOWN_MAX else "")
