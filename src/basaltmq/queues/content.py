"""Bodies that are not kept in their rows (SPEC E3, E4, E5).

    small       in the row: one put, one delete, read along with it.
    large       in the family `bodies`, in blob files that are rewritten when half of them is garbage. The row names the
                body, so an attempt, a delay or a move rewrites the row and leaves the body where it is.
    fanned out  the same, kept once however many queues have it, with a row {body}{message} in `content_refs` for each.

No counters: whether a body is still wanted is whether a reference row is left, and rows are exact after any crash. The
reference goes in the batch that deletes the message, and the last one takes the body along. A large body of one
message needs no reference: it goes with its message.

A transient message's body is in memory with it; large ones are not kept apart, because nothing is to be written.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Final

from basaltmq.errors import CorruptionError
from basaltmq.queues.change import Change
from basaltmq.queues.ready.backing import APART, SHARED, Entry
from basaltmq.queues.ready.rows import body_of
from basaltmq.store.api import Store
from basaltmq.store.batch import PUT
from basaltmq.store.families import Family
from basaltmq.store.keys.queues import (
    body_key,
    content_ref_key,
    content_ref_prefix,
    decode_content_ref_key,
    prefix_range,
)

INLINE_BYTES_MAX: Final = 4096
"""Bodies up to here are in their rows. From here on RocksDB keeps a value of `bodies` in a blob file."""


class Content:
    """Writes, reads and deletes bodies kept apart."""

    def __init__(self, store: Store) -> None:
        self._store = store

    def put(self, change: Change, body_id: bytes, body: bytes) -> None:
        change.batch.put(Family.BODIES, body_key(body_id), body)

    def refer(self, change: Change, body_id: bytes, message_id: bytes) -> None:
        """One more message has a shared body."""
        change.batch.put(Family.CONTENT_REFS, content_ref_key(body_id, message_id), b"")

    def get(self, entry: Entry) -> bytes:
        return self.get_many([entry])[0]

    def read(self, body_id: bytes, size_bytes: int | None) -> bytes:
        """A body by its id and its size, where that is known."""
        body = self._store.get(Family.BODIES, body_key(body_id))
        if body is None:
            raise CorruptionError(f"the body {body_id.hex()} is missing")
        if size_bytes is not None and len(body) != size_bytes:
            raise CorruptionError(f"the body {body_id.hex()} is {len(body)} bytes long, not {size_bytes}")
        return body

    def get_many(self, entries: Sequence[Entry]) -> list[bytes]:
        """The bodies of entries that have theirs apart."""
        bodies: list[bytes] = []
        for body in self.find_many(entries):
            if isinstance(body, CorruptionError):
                raise body
            bodies.append(body)
        return bodies

    def find_many(self, entries: Sequence[Entry]) -> list[bytes | CorruptionError]:
        """The same, with an error in the place of each body that is missing or cut."""
        wanted = [body_key(body_of(e.row)) for e in entries]
        return [
            body if body is not None and len(body) == entry.size_bytes else _damaged(entry, body)
            for entry, body in zip(entries, self._store.get_many(Family.BODIES, wanted), strict=True)
        ]

    def release(self, change: Change, bodies: Iterable[tuple[bytes, bytes, int]]) -> None:
        """Messages (body id, message id, flags) are gone for good; take along what nobody else has."""
        leaving: dict[bytes, set[bytes]] = {}
        for body_id, message_id, flags in bodies:
            assert flags & APART, "only a body apart is released"
            if flags & SHARED:
                leaving.setdefault(body_id, set()).add(content_ref_key(body_id, message_id))
            else:
                change.batch.delete(Family.BODIES, body_key(body_id))
        if not leaving:
            return
        touched = _references(change)
        for body_id, refs in leaving.items():
            for ref in refs:
                change.batch.delete(Family.CONTENT_REFS, ref)
            if not self._is_wanted(touched.get(body_id, {}), body_id, refs):
                change.batch.delete(Family.BODIES, body_key(body_id))

    def cancel(self, change: Change, entries: Iterable[Entry]) -> None:
        """The bodies of messages that this change brought in are not to be written after all."""
        for entry in entries:
            if not entry.flags & SHARED:
                change.cancel(Family.BODIES, body_key(body_of(entry.row)))

    def put_only_if_wanted(self, change: Change, body_id: bytes, body: bytes) -> None:
        """Take a shared body back out of the change if no message of it is left that has it; have it there if one of
        them has gone again, the first perhaps, and took it along."""
        key = body_key(body_id)
        if not self._is_wanted(_references(change).get(body_id, {}), body_id, set()):
            change.cancel(Family.BODIES, key)
        elif any(kind != PUT and family is Family.BODIES and each == key for kind, family, each, _ in change.batch.ops):
            change.batch.put(Family.BODIES, key, body)

    def _is_wanted(self, before: dict[bytes, bool], body_id: bytes, leaving: set[bytes]) -> bool:
        """Whether a message beside those leaving has the body, on disk or `before` this in the same change."""
        if any(present and ref not in leaving for ref, present in before.items()):
            return True
        for ref, _ in self._store.scan(Family.CONTENT_REFS, *prefix_range(content_ref_prefix(body_id))):
            if ref not in leaving and before.get(ref, True):
                return True
        return False


def _damaged(entry: Entry, body: bytes | None) -> CorruptionError:
    what = "missing" if body is None else f"{len(body)} bytes long, not {entry.size_bytes}"
    return CorruptionError(f"the body of message {entry.key[-16:].hex()} is {what}")


def _references(change: Change) -> dict[bytes, dict[bytes, bool]]:
    """References a change puts and deletes, by body: whether each is there after it."""
    found: dict[bytes, dict[bytes, bool]] = {}
    for kind, family, key, _ in change.batch.ops:
        if family is Family.CONTENT_REFS:
            found.setdefault(decode_content_ref_key(key)[0], {})[key] = kind == PUT
    return found
