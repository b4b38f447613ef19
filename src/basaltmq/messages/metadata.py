"""The row of a message in `message_metadata`: what is known of it besides its content.

    | layout u8 | state u8 | chunk shift u8 | kind u8 | content bytes u64 | metadata ... |

`metadata` is the protocol's own encoding of headers and properties, `kind` says whose it is; both are opaque here.
Content is kept in chunks of `1 << chunk shift` bytes, all full but the last, so size and shift say which content rows
exist. A message is `UNFINISHED` while its content is still coming in: its chunks are on disk, nobody may see it, and
recovery removes it. Every content row thus has a metadata row, always.
"""

from __future__ import annotations

from struct import Struct
from typing import Final, NamedTuple

from basaltmq.errors import CorruptionError, InvalidArgumentError, LimitExceededError
from basaltmq.store.batch import Batch
from basaltmq.store.families import Family
from basaltmq.store.keys import queues as keys

LAYOUT: Final = 2
COMPLETE: Final = 0
UNFINISHED: Final = 1

CHUNK_SHIFT: Final = 17
"""Chunks of 128 KiB: the usual frame limit of AMQP, so that a frame's worth of content is one or two rows."""

METADATA_BYTES_MAX: Final = 1 << 20
"""Headers and properties. Eight full AMQP frames; it is read whole with every visit, unlike content."""

CONTENT_BYTES_MAX: Final = 1 << 30
"""One message's content. Twice RabbitMQ's limit; what is larger wants an object store and a reference."""

_CHUNK_SHIFT_MAX: Final = 26
_HEAD: Final = Struct(">BBBBQ")


class Metadata(NamedTuple):
    """A decoded row."""

    state: int
    chunk_shift: int
    kind: int
    content_bytes: int
    metadata: bytes

    @property
    def chunks(self) -> int:
        return -(-self.content_bytes >> self.chunk_shift)


def encode_metadata(row: Metadata) -> bytes:
    return _HEAD.pack(LAYOUT, row.state, row.chunk_shift, row.kind, row.content_bytes) + row.metadata


def decode_metadata(message_id: int, raw: bytes) -> Metadata:
    if len(raw) < _HEAD.size:
        raise CorruptionError(
            f"the metadata of message {message_id} has {len(raw)} bytes, at least {_HEAD.size} needed"
        )
    layout, state, chunk_shift, kind, content_bytes = _HEAD.unpack_from(raw)
    if layout != LAYOUT or state > UNFINISHED or chunk_shift > _CHUNK_SHIFT_MAX:
        raise CorruptionError(
            f"the metadata of message {message_id} has layout {layout}, state {state}, chunk shift {chunk_shift}"
        )
    return Metadata(state, chunk_shift, kind, content_bytes, raw[_HEAD.size :])


def is_visible(raw: bytes) -> bool:
    """Whether a row is that of a whole message; cheaper than decoding it."""
    return len(raw) >= _HEAD.size and raw[0] == LAYOUT and raw[1] == COMPLETE


def delete_rows(batch: Batch, message_id: int, row: Metadata) -> None:
    """Delete a message's metadata and content. By key: a range tombstone per message would slow every later scan."""
    batch.delete(Family.MESSAGE_METADATA, keys.metadata_key(message_id))
    for chunk in range(row.chunks):
        batch.delete(Family.MESSAGE_CONTENT, keys.content_key(message_id, chunk))


def check_metadata(metadata: bytes, kind: int) -> None:
    if not isinstance(metadata, bytes):
        raise InvalidArgumentError(f"metadata is bytes, not {type(metadata).__name__}")
    if len(metadata) > METADATA_BYTES_MAX:
        raise LimitExceededError(f"metadata of {len(metadata)} bytes is over the limit of {METADATA_BYTES_MAX}")
    if not isinstance(kind, int) or not 0 <= kind <= 0xFF:
        raise InvalidArgumentError(f"a metadata kind is 0 to 255, not {kind!r}")
