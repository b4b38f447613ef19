"""Message bodies that are stored outside the message row (SPEC E3, E4, E5).

    small       in the row: one put, one delete, read together with the row
    large       in the family `message_content`. On disk, bodies up to 32 KiB are in blob files and larger ones in body
                files (`store/bodies/`). The row holds the body id, so an attempt, a delay or a move rewrites the row
                only.
    fanned out  as large, stored once for all queues, with a row {body}{message} in `content_refs` per message

There are no reference counters. A body is in use while a reference row exists, and rows are exact after any crash. The
batch that deletes a message deletes its reference; the batch that deletes the last reference deletes the body. A large
body of a single message needs no reference and is deleted with its message.

Bodies of transient messages, large ones too, stay in memory with the message because nothing is written for them.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import cycle
from operator import add
from typing import Final

from basaltmq.errors import CorruptionError
from basaltmq.queues.change import Change
from basaltmq.queues.entries.backing import APART, SHARED, Entry
from basaltmq.queues.entries.rows import body_of
from basaltmq.store.api import Store
from basaltmq.store.batch import PUT
from basaltmq.store.families import Family
from basaltmq.store.keys.parts import prefix_range
from basaltmq.store.keys.queues import body_key, content_ref_key, content_ref_prefix, decode_content_ref_key

INLINE_BYTES_MAX: Final = 4096
"""Bodies up to this size are stored in their rows. RocksDB stores larger values of `message_content` in blob files."""


class Content:
    """Writes, reads and deletes bodies stored outside the message row."""

    def __init__(self, store: Store) -> None:
        self._store = store

    def put(self, change: Change, body_id: bytes, body: bytes) -> None:
        change.batch.put(Family.MESSAGE_CONTENT, body_key(body_id), body)

    def refer(self, change: Change, body_id: bytes, message_id: bytes) -> None:
        """Add a reference of one more message to a shared body."""
        change.batch.put(Family.CONTENT_REFS, content_ref_key(body_id, message_id), b"")

    def refer_many(self, change: Change, body_ids: Sequence[bytes], message_ids: Sequence[bytes]) -> None:
        """Add references of messages to these bodies, assigned round robin."""
        prefixes = cycle([content_ref_prefix(body_id) for body_id in body_ids])
        keys = list(map(add, prefixes, message_ids))
        change.batch.put_many(Family.CONTENT_REFS, keys, [b""] * len(keys))

    def get(self, entry: Entry) -> bytes:
        return self.get_many([entry])[0]

    def read(self, body_id: bytes, size_bytes: int | None) -> bytes:
        """Return a body by its id, and check its size if that is known."""
        body = self._store.get(Family.MESSAGE_CONTENT, body_key(body_id))
        if body is None:
            raise CorruptionError(f"the body {body_id.hex()} is missing")
        if size_bytes is not None and len(body) != size_bytes:
            raise CorruptionError(f"the body {body_id.hex()} is {len(body)} bytes long, not {size_bytes}")
        return body

    def get_many(self, entries: Sequence[Entry]) -> list[bytes]:
        """Return the bodies of entries whose body is stored outside the row."""
        bodies: list[bytes] = []
        for body in self.find_many(entries):
            if isinstance(body, CorruptionError):
                raise body
            bodies.append(body)
        return bodies

    def find_many(self, entries: Sequence[Entry]) -> list[bytes | CorruptionError]:
        """Like `get_many`, with an error in the place of each body that is missing or truncated."""
        wanted = [body_key(body_of(e.row)) for e in entries]
        return [
            body if body is not None and len(body) == entry.size_bytes else _damaged(entry, body)
            for entry, body in zip(entries, self._store.get_many(Family.MESSAGE_CONTENT, wanted), strict=True)
        ]

    def release(self, change: Change, bodies: Iterable[tuple[bytes, bytes, int]]) -> None:
        """Release the bodies of deleted messages (body id, message id, flags), and delete those without other
        references."""
        leaving: dict[bytes, set[bytes]] = {}
        for body_id, message_id, flags in bodies:
            assert flags & APART, "only a body outside the row can be released"
            if flags & SHARED:
                leaving.setdefault(body_id, set()).add(content_ref_key(body_id, message_id))
            else:
                change.batch.delete(Family.MESSAGE_CONTENT, body_key(body_id))
        if not leaving:
            return
        touched = _references(change)
        for body_id, refs in leaving.items():
            for ref in refs:
                change.batch.delete(Family.CONTENT_REFS, ref)
            if not self._is_wanted(touched.get(body_id, {}), body_id, refs):
                change.batch.delete(Family.MESSAGE_CONTENT, body_key(body_id))

    def cancel(self, change: Change, entries: Iterable[Entry]) -> None:
        """Do not write the bodies of messages that this change added."""
        for entry in entries:
            if not entry.flags & SHARED:
                change.cancel(Family.MESSAGE_CONTENT, body_key(body_of(entry.row)))

    def put_only_if_wanted(self, change: Change, body_id: bytes, body: bytes) -> None:
        """Put a shared body only if a message of the change still refers to it.

        A message deleted within the change may have deleted the body with it, so the put is restored if another
        remains.
        """
        key = body_key(body_id)
        if not self._is_wanted(_references(change).get(body_id, {}), body_id, set()):
            change.cancel(Family.MESSAGE_CONTENT, key)
        elif any(op[0] != PUT and op[1] is Family.MESSAGE_CONTENT and op[2] == key for op in change.batch.ops):
            change.batch.put(Family.MESSAGE_CONTENT, key, body)

    def _is_wanted(self, before: dict[bytes, bool], body_id: bytes, leaving: set[bytes]) -> bool:
        """Whether a message other than those `leaving` refers to the body, on disk or `before` this in the change."""
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
    """Return the references that a change puts (True) and deletes (False), by body and message."""
    found: dict[bytes, dict[bytes, bool]] = {}
    for kind, family, key, _ in change.batch.ops:
        if family is Family.CONTENT_REFS:
            found.setdefault(decode_content_ref_key(key)[0], {})[key] = kind == PUT
    return found
