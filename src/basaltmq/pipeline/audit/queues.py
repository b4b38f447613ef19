"""Audit of queues: counts, bodies, references and leases.

Each column family is scanned once in one view, which is a consistent snapshot. A batch of the writer is visible
completely or not at all, so an inconsistency here is one in the store. Memory use is a few dozen bytes per separate
body. Such a body has at least 4 KiB, so this is about 1 % of the data.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Final

from basaltmq.errors import CorruptionError
from basaltmq.pipeline.findings import Finding, Severity
from basaltmq.queues.entries.backing import APART, SHARED
from basaltmq.queues.entries.rows import NO_BODY, unwrap
from basaltmq.queues.lifecycle.reclaim import floors
from basaltmq.queues.stats import QueueStats
from basaltmq.queues.transactions.branch_rows import decode_draft
from basaltmq.store.api import Store
from basaltmq.store.families import Family
from basaltmq.store.keys import queues as queue_keys

_ANY_SIZE: Final = -2
"""Marks a prepared branch, which does not store the size of its payload."""


def audit_queues(store: Store) -> Iterator[Finding]:
    """Yield the findings of all queues."""
    counts = {
        queue: QueueStats.decode(queue, raw)
        for key, raw in store.scan(Family.QUEUE_STATS)
        for queue in [queue_keys.decode_queue_stats_key(key)]
    }
    rows = _Rows(store, counts)
    yield from rows.findings()
    calls = Counter(queue_keys.decode_lease_key(key)[0] for key, _ in store.scan(Family.LEASES))
    for queue in sorted(set(calls) - set(counts)):
        yield Finding(Severity.FAULT, "orphan", f"queue {queue}", f"{calls[queue]} leases of a queue without counters")


class _Rows:
    """Counts the rows of messages, and collects their references to bodies."""

    def __init__(self, store: Store, counts: dict[str, QueueStats]) -> None:
        self._store = store
        self._counts = counts
        self._floors = floors(store)
        self._ready: Counter[str] = Counter()
        self._delayed: Counter[str] = Counter()
        self._without_body: Counter[str] = Counter()
        self._damaged: Counter[str] = Counter()
        self._bodies: dict[bytes, tuple[str, int]] = {}
        """Body id -> (a queue that refers to it, its size)."""
        self._references: set[bytes] = set()
        """Keys of the reference rows that must exist."""
        for key, row in store.scan(Family.MESSAGES):
            queue, _, place_ns, message_id = queue_keys.decode_message_key(key)
            self._collect(self._ready, queue, place_ns, message_id, row)
        for key, row in store.scan(Family.DELAYED):
            queue, _, _, place_ns, message_id = queue_keys.decode_timed_message_key(key)
            self._collect(self._delayed, queue, place_ns, message_id, row)
        for _, raw in store.scan(Family.BRANCH_DRAFTS):
            self._collect_draft(raw)

    def _collect_draft(self, raw: bytes) -> None:
        """Collect the body of a prepared branch. It is stored with a reference, like the body of a message."""
        try:
            queue, _, body_id, _ = decode_draft(raw)
        except CorruptionError:
            self._damaged["(prepared branch)"] += 1
            return
        if body_id != NO_BODY:
            self._bodies.setdefault(body_id, (queue, _ANY_SIZE))
            self._references.add(queue_keys.content_ref_key(body_id, body_id))

    def _collect(self, found: Counter[str], queue: str, place_ns: int, message_id: bytes, row: bytes) -> None:
        stats = self._counts.get(queue)
        floor_ns = max(self._floors.get(queue, 0), 0 if stats is None else stats.floor_ns)
        if place_ns >= floor_ns:
            found[queue] += 1
        # Rows of a deleted queue refer to their bodies until they are reclaimed.
        try:
            _, flags, body_id, size_bytes = unwrap(row)
        except CorruptionError:
            self._damaged[queue] += 1
            return
        if flags & APART:
            self._bodies[body_id] = queue, size_bytes
            if flags & SHARED:
                self._references.add(queue_keys.content_ref_key(body_id, message_id))

    def findings(self) -> Iterator[Finding]:
        for queue, stats in sorted(self._counts.items()):
            for count, found, what in (
                (stats.messages, self._ready[queue], "messages"),
                (stats.delayed, self._delayed[queue], "delayed messages"),
            ):
                if count != found:
                    severity = Severity.LOSS if found < count else Severity.FAULT
                    yield Finding(severity, "count", f"queue {queue}", f"counts {count} {what}, but has {found}")
        both = self._ready + self._delayed
        for queue in sorted(set(both) - set(self._counts)):
            detail = f"{both[queue]} messages of a queue without counters"
            yield Finding(Severity.FAULT, "orphan", f"queue {queue}", detail)
        for queue, count in sorted(self._damaged.items()):
            yield Finding(Severity.LOSS, "checksum", f"queue {queue}", f"{count} rows of messages are unreadable")
        yield from self._content()

    def _content(self) -> Iterator[Finding]:
        orphans = _Sample()
        for key, body in self._store.scan(Family.MESSAGE_CONTENT):
            body_id = queue_keys.decode_body_key(key)
            queue, size_bytes = self._bodies.pop(body_id, ("", -1))
            if size_bytes == -1:
                orphans.add(body_id)
            elif size_bytes != _ANY_SIZE and len(body) != size_bytes:
                self._without_body[queue] += 1
        for queue, _ in self._bodies.values():
            self._without_body[queue] += 1
        for queue, count in sorted(self._without_body.items()):
            detail = f"{count} bodies of its messages are missing or have the wrong size"
            yield Finding(Severity.LOSS, "reference", f"queue {queue}", detail)
        if orphans.count:
            yield Finding(Severity.FAULT, "orphan", "bodies", f"{orphans.count} bodies belong to no message: {orphans}")
        strays = _Sample()
        for key, _ in self._store.scan(Family.CONTENT_REFS):
            if key in self._references:
                self._references.discard(key)
            else:
                strays.add(queue_keys.decode_content_ref_key(key)[1])
        if strays.count:
            detail = f"{strays.count} references belong to missing messages and keep bodies alive: {strays}"
            yield Finding(Severity.FAULT, "orphan", "references to bodies", detail)
        if self._references:
            lacking = _Sample()
            for key in sorted(self._references):
                lacking.add(queue_keys.decode_content_ref_key(key)[1])
            detail = f"{lacking.count} messages share a body without a reference to it: {lacking}"
            yield Finding(Severity.FAULT, "reference", "references to bodies", detail)


class _Sample:
    """A count, with the first few items."""

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
