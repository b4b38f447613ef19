"""Records that are appended to a topic later: rows of the family `scheduled_records`.

    'D' due ms u64, id (16)   ->  the record and its topic: it is appended when it is due
    'H' id (16)               ->  a half record: it is appended if its producer commits the transaction
    'C' due ms u64, id (16)   ->  when the broker requests the decision from the producer of a half record
    'M' shard u64             ->  next offset u64: scheduled records are being appended to the shard

Values are MessagePack. Each row is written in one batch with the change that causes it: the deletion of a lease (dead
letter), or of the half record (commit).
"""

from __future__ import annotations

from struct import Struct as Layout
from typing import Final
from uuid import UUID

import msgspec

from basaltmq.decoding import msgpack_decoder
from basaltmq.errors import CorruptionError
from basaltmq.log.batches.record import Record
from basaltmq.store.batch import Batch
from basaltmq.store.families import Family
from basaltmq.store.keys import streams as stream_keys

_OFFSET: Final = Layout(">Q")


class Scheduled(msgspec.Struct, frozen=True, gc=False):
    """A record and where it is appended."""

    topic: str
    topic_id: bytes
    """The topic must still have this id. Empty: the topic of that name, which is created if it is missing."""
    partition: int
    record: Record

    def is_for(self, topic_id: UUID) -> bool:
        return not self.topic_id or self.topic_id == topic_id.bytes


class Half(msgspec.Struct, frozen=True, gc=False):
    """A half record of a transaction."""

    scheduled: Scheduled
    created_ms: int
    check_ms: int
    """The time in the key of its check."""
    checks: int = 0
    """How often a producer was asked."""


_scheduled: Final = msgpack_decoder(Scheduled)
_half: Final = msgpack_decoder(Half)


def decode_scheduled(raw: bytes) -> Scheduled:
    try:
        return _scheduled(raw)
    except (msgspec.ValidationError, msgspec.DecodeError) as error:
        raise CorruptionError(f"a scheduled record cannot be decoded: {error}") from error


def decode_half(raw: bytes) -> Half:
    try:
        return _half(raw)
    except (msgspec.ValidationError, msgspec.DecodeError) as error:
        raise CorruptionError(f"a half record cannot be decoded: {error}") from error


def put_scheduled(batch: Batch, due_ms: int, record_id: bytes, scheduled: Scheduled) -> None:
    key = stream_keys.scheduled_key(stream_keys.SCHEDULED, due_ms, record_id)
    batch.put(Family.SCHEDULED_RECORDS, key, msgspec.msgpack.encode(scheduled))


def put_half(batch: Batch, record_id: bytes, half: Half, *, before: Half | None = None) -> None:
    """Put a half record with its check. `before` is the same one as it is stored."""
    if before is not None:
        batch.delete(Family.SCHEDULED_RECORDS, _check_key(record_id, before))
    batch.put(Family.SCHEDULED_RECORDS, stream_keys.half_record_key(record_id), msgspec.msgpack.encode(half))
    batch.put(Family.SCHEDULED_RECORDS, _check_key(record_id, half), b"")


def delete_half(batch: Batch, record_id: bytes, half: Half) -> None:
    batch.delete(Family.SCHEDULED_RECORDS, stream_keys.half_record_key(record_id))
    batch.delete(Family.SCHEDULED_RECORDS, _check_key(record_id, half))


def put_moved(batch: Batch, shard: int, next_offset: int) -> None:
    batch.put(Family.SCHEDULED_RECORDS, stream_keys.moved_shard_key(shard), _OFFSET.pack(next_offset))


def decode_moved(raw: bytes) -> int:
    """Return the offset from which a shard may have scheduled records."""
    if len(raw) != _OFFSET.size:
        raise CorruptionError(f"the mark of a moved shard has {len(raw)} bytes instead of {_OFFSET.size}")
    offset: int = _OFFSET.unpack(raw)[0]
    return offset


def _check_key(record_id: bytes, half: Half) -> bytes:
    return stream_keys.scheduled_key(stream_keys.CHECK, half.check_ms, record_id)
