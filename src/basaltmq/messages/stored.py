"""One message of the message store: being written, waiting for its transaction, or stored.

    MessageWriter ──finish──> StoredMessage (pending) ──its transaction commits or prepares──> stored ──> removed
          │                          └── its transaction aborts ──> discarded
          └──discard

A pending message belongs to the first transaction that enqueues it: that one stores it or discards it, and no other
may enqueue it meanwhile. Once stored, any transaction may enqueue it in further queues; but one that a prepared branch
brought belongs to the branch until that is decided, since a rollback removes it.

Content is streamed both ways. A writer keeps at most `SPILL_BYTES` and the piece it is given; what is more goes to
disk ahead of the transaction, under an `UNFINISHED` row that a crash turns into garbage for recovery. A reader holds
one chunk at a time.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final, Protocol, TypeAlias

from basaltmq.errors import (
    CorruptionError,
    InvalidArgumentError,
    LimitExceededError,
    MessageNotFoundError,
    TransactionError,
)
from basaltmq.messages.metadata import COMPLETE, UNFINISHED, Metadata, delete_rows, encode_metadata
from basaltmq.store.batch import Batch
from basaltmq.store.families import Family
from basaltmq.store.keys import queues as keys

SPILL_BYTES: Final = 1 << 20
"""Content held back for the transaction's own batch. Most messages are smaller and cost one write."""

SPILL_BATCH_BYTES: Final = 4 << 20
"""Content per write when spilling: a write holds the interpreter lock, at this size for a few milliseconds."""

Bytes: TypeAlias = bytes | bytearray | memoryview


class Rows(Protocol):
    """What a message needs of its store."""

    content_bytes_max: int

    def owner_of(self, message_id: int) -> object | None:
        """The prepared branch a stored message belongs to."""
        ...

    def read_chunk(self, message_id: int, chunk: int) -> bytes | None: ...

    def write(self, batch: Batch, top_id: int) -> None:
        """Write a batch whose highest message id is `top_id`; survives a process crash on return."""
        ...


class StoredMessage:
    """A finished message: its id, metadata and content."""

    __slots__ = (
        "_pending",
        "_removed",
        "_rows",
        "content_bytes",
        "content_chunk_shift",
        "id",
        "kind",
        "metadata",
        "owner",
    )

    def __init__(self, rows: Rows, message_id: int, row: Metadata, pending: _Pending | None = None) -> None:
        self._rows = rows
        self._pending = pending
        self._removed = False
        self.id = message_id
        self.kind = row.kind
        self.metadata = row.metadata
        self.content_bytes = row.content_bytes
        self.content_chunk_shift = row.chunk_shift
        self.owner: object | None = None
        """The transaction a message that is not stored belongs to."""

    @property
    def is_stored(self) -> bool:
        return self._pending is None and not self._removed

    @property
    def pending_bytes(self) -> int:
        """What the transaction's batch has to carry."""
        return 0 if self._pending is None else len(self.metadata) + sum(map(len, self._pending.chunks))

    def get_content(self, offset: int = 0, length: int | None = None) -> bytes:
        """`length` bytes from `offset` on; less at the end of the content."""
        return b"".join(self.content_pieces(offset, length))

    def content_pieces(self, offset: int = 0, length: int | None = None) -> Iterator[bytes]:
        """The same, a chunk at a time."""
        if offset < 0 or (length is not None and length < 0):
            raise InvalidArgumentError(f"content of message {self.id} from {offset}, {length} bytes: give no negatives")
        if self._removed:
            raise MessageNotFoundError(f"message {self.id} was removed")
        end = self.content_bytes if length is None else min(offset + length, self.content_bytes)
        return self._pieces(offset, end)

    def _pieces(self, at: int, end: int) -> Iterator[bytes]:
        shift = self.content_chunk_shift
        while at < end:
            chunk = at >> shift
            base = chunk << shift
            raw = self._chunk(chunk)
            if len(raw) != min(1 << shift, self.content_bytes - base):
                raise CorruptionError(f"chunk {chunk} of message {self.id} has {len(raw)} bytes")
            piece = raw[at - base : end - base]
            yield piece
            at += len(piece)

    def _chunk(self, chunk: int) -> bytes:
        pending = self._pending
        if pending is not None and chunk >= pending.spilled:
            return pending.chunks[chunk - pending.spilled]
        raw = self._rows.read_chunk(self.id, chunk)
        if raw is None:
            raise CorruptionError(f"chunk {chunk} of message {self.id} is missing; the message cannot be read whole")
        return raw

    @property
    def row(self) -> Metadata:
        return Metadata(COMPLETE, self.content_chunk_shift, self.kind, self.content_bytes, self.metadata)

    def claim(self, owner: object) -> None:
        """Take a message that is not stored for a transaction; a stored one may be enqueued by any."""
        if self._removed:
            raise MessageNotFoundError(f"message {self.id} was removed or its transaction aborted; add it again")
        holder = self._rows.owner_of(self.id) if self._pending is None else self.owner
        if holder is not None and holder is not owner:
            raise TransactionError(
                f"message {self.id} belongs to another transaction until that is finished; enqueue it then"
            )
        if self._pending is not None:
            self.owner = owner

    def put_rows(self, batch: Batch) -> None:
        """What a pending message still has to write."""
        pending = self._pending
        if pending is None:
            return
        batch.put(Family.MESSAGE_METADATA, keys.metadata_key(self.id), encode_metadata(self.row))
        for chunk, content in enumerate(pending.chunks, pending.spilled):
            batch.put(Family.MESSAGE_CONTENT, keys.content_key(self.id, chunk), content)

    def set_stored(self) -> None:
        """The rows are written."""
        self._pending = None
        self.owner = None

    def set_removed(self) -> None:
        self._pending = None
        self._removed = True

    def delete_rows(self, batch: Batch) -> None:
        delete_rows(batch, self.id, self.row)

    def discard(self) -> None:
        """Forget a message that no transaction has stored."""
        pending = self._pending
        if pending is None:
            return
        if pending.spilled:
            batch = Batch()
            self.delete_rows(batch)
            self._rows.write(batch, self.id)
        self.set_removed()


class _Pending:
    """Content that is not on disk: chunks from number `spilled` on."""

    __slots__ = ("chunks", "spilled")

    def __init__(self) -> None:
        self.chunks: list[bytes] = []
        self.spilled = 0


class MessageWriter:
    """A message whose content is coming in. Used by one thread."""

    def __init__(self, rows: Rows, message_id: int, metadata: bytes, kind: int, chunk_shift: int) -> None:
        self._rows = rows
        self._metadata = metadata
        self._kind = kind
        self._chunk_shift = chunk_shift
        self._pending = _Pending()
        self._tail: list[bytes] = []
        self._tail_bytes = 0
        self._closed = False
        self.id = message_id
        self.content_bytes = 0

    def add_content(self, data: Bytes) -> None:
        """Append to the content. On an error nothing of `data` was taken."""
        self._require_open()
        view = memoryview(data).cast("B")
        if self.content_bytes + len(view) > self._rows.content_bytes_max:
            raise LimitExceededError(
                f"message {self.id} would have {self.content_bytes + len(view)} bytes of content, "
                f"over the limit of {self._rows.content_bytes_max}"
            )
        self._spill()
        self.content_bytes += len(view)
        at = 0
        while at < len(view):
            piece = bytes(view[at : at + (1 << self._chunk_shift) - self._tail_bytes])
            at += len(piece)
            self._tail.append(piece)
            self._tail_bytes += len(piece)
            if self._tail_bytes == 1 << self._chunk_shift:
                self._end_chunk()

    def finish(self) -> StoredMessage:
        """All content is in. The message waits for a transaction to enqueue it."""
        self._require_open()
        self._spill()
        if self._tail:
            self._end_chunk()
        self._closed = True
        return StoredMessage(self._rows, self.id, self._row(COMPLETE, self.content_bytes), self._pending)

    def discard(self) -> None:
        """Give the message up and delete what was spilled of it."""
        if self._closed:
            return
        if self._pending.spilled:
            batch = Batch()
            delete_rows(batch, self.id, self._row(UNFINISHED, self._pending.spilled << self._chunk_shift))
            self._rows.write(batch, self.id)
        self._closed = True

    def _end_chunk(self) -> None:
        self._pending.chunks.append(b"".join(self._tail))
        self._tail.clear()
        self._tail_bytes = 0

    def _spill(self) -> None:
        """Write full chunks out once they pass what a transaction's batch should carry."""
        pending = self._pending
        shift = self._chunk_shift
        if len(pending.chunks) << shift < SPILL_BYTES:
            return
        at_once = max(1, SPILL_BATCH_BYTES >> shift)
        while pending.chunks:
            some = pending.chunks[:at_once]
            batch = Batch()
            for chunk, content in enumerate(some, pending.spilled):
                batch.put(Family.MESSAGE_CONTENT, keys.content_key(self.id, chunk), content)
            unfinished = self._row(UNFINISHED, pending.spilled + len(some) << shift)
            batch.put(Family.MESSAGE_METADATA, keys.metadata_key(self.id), encode_metadata(unfinished))
            self._rows.write(batch, self.id)
            pending.spilled += len(some)
            del pending.chunks[:at_once]

    def _row(self, state: int, content_bytes: int) -> Metadata:
        return Metadata(state, self._chunk_shift, self._kind, content_bytes, self._metadata)

    def _require_open(self) -> None:
        if self._closed:
            raise TransactionError(f"message {self.id} is finished or discarded; nothing can be added to it")
