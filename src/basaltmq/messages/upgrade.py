"""The message store from version 1, the layout of its model, to version 2 (SPEC A9).

    version 1   metadata  key id u64                          value | kind u8 | metadata |
                content   key id u64                          value: all of it
                entry     key queue uuid text (36) + id u64   value: empty
                xid       key hash (16)                       value | 1 | format | global id | branch id | enqueues
                                                                    | dequeues |, numbers and lengths as varints
                version   nextMessageId                       decimal text, written with every message

No version row. The steps can be made again after a crash at any point: metadata is told by a cursor that moves with
it, content, entries and xids by the length of their keys and their first byte.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final
from uuid import UUID

from basaltmq.errors import CorruptionError
from basaltmq.messages.branches import (
    DEQUEUE,
    ENQUEUE_SHARED,
    PREPARED,
    Action,
    Xid,
    check_xid,
    encode_branch,
    xid_key,
)
from basaltmq.messages.metadata import CHUNK_SHIFT, COMPLETE, Metadata, encode_metadata
from basaltmq.messages.quarantine import Quarantine, Reason
from basaltmq.messages.sequence import FIRST_ID, NEXT_MESSAGE_ID, encode_next_id
from basaltmq.store.api import Store
from basaltmq.store.batch import Batch
from basaltmq.store.families import Family
from basaltmq.store.keys import queues as keys

CURSOR: Final = b"messages_upgrade_1"
BATCH_BYTES: Final = 8 << 20
"""Rows of this size are written together: a few milliseconds each, and bounded memory."""

_ID_BYTES: Final = 8
_UUID_TEXT_BYTES: Final = 36
_HASH_BYTES: Final = 16
_CHUNK_BYTES: Final = 1 << CHUNK_SHIFT


def from_version_1(store: Store) -> Iterator[Batch]:
    yield from _messages(store)
    # A batch is written when the next one is asked for: behind this one, all of those above are.
    yield Batch()
    yield from _content_without_message(store)
    yield from _entries(store)
    yield from _branches(store)
    last = Batch()
    last.put(Family.VERSION, NEXT_MESSAGE_ID, encode_next_id(_next_id(store)))
    last.delete(Family.VERSION, CURSOR)
    yield last


def _messages(store: Store) -> Iterator[Batch]:
    done = store.get(Family.VERSION, CURSOR)
    batch = _Sized()
    for key, raw in store.scan(Family.MESSAGE_METADATA, b"" if done is None else done + b"\0"):
        # A row of another form is left for recovery to quarantine.
        if len(key) == _ID_BYTES and raw:
            yield from _message(store, batch, key, raw)
        batch.put(Family.VERSION, CURSOR, key)
        if batch.size_bytes >= BATCH_BYTES:
            yield batch.take()
    yield batch.take()


def _message(store: Store, batch: _Sized, key: bytes, raw: bytes) -> Iterator[Batch]:
    content = store.get(Family.MESSAGE_CONTENT, key) or b""
    for chunk, at in enumerate(range(0, len(content), _CHUNK_BYTES)):
        batch.put(
            Family.MESSAGE_CONTENT,
            keys.content_key(keys.decode_metadata_key(key), chunk),
            content[at : at + _CHUNK_BYTES],
        )
        if batch.size_bytes >= BATCH_BYTES:
            yield batch.take()
    row = Metadata(COMPLETE, CHUNK_SHIFT, raw[0], len(content), raw[1:])
    batch.put(Family.MESSAGE_METADATA, key, encode_metadata(row))
    batch.delete(Family.MESSAGE_CONTENT, key)


def _content_without_message(store: Store) -> Iterator[Batch]:
    quarantine = Quarantine(store)
    for key, content in store.scan(Family.MESSAGE_CONTENT):
        if len(key) == _ID_BYTES:
            batch = Batch()
            quarantine.move_in(batch, Family.MESSAGE_CONTENT, key, content, Reason.UNKNOWN_MESSAGE)
            yield batch


def _entries(store: Store) -> Iterator[Batch]:
    batch = _Sized()
    for key, _ in store.scan(Family.QUEUE_ENTRIES):
        if len(key) != _UUID_TEXT_BYTES + _ID_BYTES:
            continue
        try:
            queue_id = keys.decode_configured_key(key[:_UUID_TEXT_BYTES])
        except CorruptionError:
            continue
        message_id = keys.decode_metadata_key(key[_UUID_TEXT_BYTES:])
        batch.put(Family.QUEUE_ENTRIES, keys.queue_entry_key(queue_id, message_id), b"")
        batch.delete(Family.QUEUE_ENTRIES, key)
        if batch.size_bytes >= BATCH_BYTES:
            yield batch.take()
    yield batch.take()


def _branches(store: Store) -> Iterator[Batch]:
    batch = _Sized()
    for key, raw in store.scan(Family.XIDS):
        if len(key) == _HASH_BYTES and raw[:1] == b"\1":
            xid, actions = _Cursor(raw).branch()
            batch.put(Family.XIDS, xid_key(xid), encode_branch(PREPARED, 0, actions))
            batch.delete(Family.XIDS, key)
    yield batch.take()


def _next_id(store: Store) -> int:
    raw = store.get(Family.VERSION, NEXT_MESSAGE_ID)
    if raw is None:
        return FIRST_ID
    if not raw.isdigit() or len(raw) > 20:
        raise CorruptionError(f"the row nextMessageId says {raw[:40]!r}, not a number; restore the store from a backup")
    return int(raw)


class _Sized:
    """A batch that knows its size without counting again."""

    def __init__(self) -> None:
        self._batch = Batch()
        self.size_bytes = 0

    def put(self, family: Family, key: bytes, value: bytes) -> None:
        self._batch.put(family, key, value)
        self.size_bytes += len(key) + len(value)

    def delete(self, family: Family, key: bytes) -> None:
        self._batch.delete(family, key)
        self.size_bytes += len(key)

    def take(self) -> Batch:
        taken, self._batch = self._batch, Batch()
        self.size_bytes = 0
        return taken


class _Cursor:
    """Reads a version 1 branch record."""

    def __init__(self, raw: bytes) -> None:
        self._raw = raw
        self._at = 1

    def branch(self) -> tuple[Xid, list[Action]]:
        xid = Xid(self._varint(), self._take(self._varint()), self._take(self._varint()))
        check_xid(xid)
        actions = [self._action(ENQUEUE_SHARED) for _ in range(self._varint())]
        actions += [self._action(DEQUEUE) for _ in range(self._varint())]
        return xid, actions

    def _action(self, kind: int) -> Action:
        return Action(kind, UUID(bytes=self._take(16)), self._varint())

    def _take(self, size: int) -> bytes:
        taken = self._raw[self._at : self._at + size]
        if len(taken) != size:
            raise CorruptionError(f"a branch record of version 1 ends after {len(self._raw)} bytes")
        self._at += size
        return taken

    def _varint(self) -> int:
        value = shift = 0
        while True:
            byte = self._take(1)[0]
            value |= (byte & 0x7F) << shift
            if byte < 0x80:
                return value
            shift += 7
