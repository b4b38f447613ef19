"""Keys of the stream plane: shards, records, index rows, group offsets and Kafka transactions.

Layouts:

    consumer offset  | lp(group) | topic uuid (16) | partition u32 |
    topic group      | topic uuid (16) | lp(group) |
    shard counter    | 'N' |
    shard            | 'S' | shard u64 |
    shard name       | 'M' | topic uuid (16) | partition u32 |
    deleted shard    | 'X' | shard u64 |
    trimmed shard    | 'Y' | shard u64 |
    orphaned topic   | 'Z' | topic uuid (16) |
    stream record    | shard u64 | offset u64 |
    stream tail      | 'N' | shard u64 |
    by key           | 'K' | shard u64 | hash64(key) | offset u64 |
    by tag           | 'G' | shard u64 | hash64(tag) | offset u64 |
    by time          | 'T' | shard u64 | running max ms i64, sign flipped | offset u64 |
    by expiry        | 'E' | expire at ms i64, sign flipped | shard u64 | offset u64 |
    log checkpoint   | 'C' | lane u32 |
    log synced       | 'P' | lane u32 |
    log changed      | 'X' | lane u32 |
    log unsynced     | 'U' | lane u32 | position u64 |
    log segment      | 'S' | lane u32 | first position u64 |
    frame            | 'O' | shard u64 | last offset u64 |
    deleted record   | 'D' | shard u64 | offset u64 |
    import           | run |
    producers        | shard u64 |
    transaction      | 'T' | transactional id |
    open transaction | 'B' | transactional id |
    pending offset   | 'P' | lp(transactional id) | consumer offset key |
    consumer group   | group |
    pop lease        | topic uuid (16) | lp(group) | partition u32 | offset u64 |
    scheduled record | 'D' | due ms u64 | id (16) |
    half record      | 'H' | id (16) |
    check            | 'C' | due ms u64 | id (16) |
    moved shard      | 'M' | shard u64 |
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import repeat
from struct import Struct
from typing import Final
from uuid import UUID

from basaltmq.ids import ID_BYTES
from basaltmq.store.keys.parts import (
    SIGN,
    U64,
    decode_unprefixed,
    exactly,
    lp,
    malformed,
    take_text,
    unprefixed,
)

_U32: Final = Struct(">I")


def consumer_offset_key(group: str, topic_id: UUID, partition: int) -> bytes:
    return lp(group) + topic_id.bytes + _U32.pack(partition)


def decode_consumer_offset_key(key: bytes) -> tuple[str, UUID, int]:
    group, at = take_text(key, 0)
    exactly(key, at + ID_BYTES + 4)
    return group, UUID(bytes=key[at : at + ID_BYTES]), int.from_bytes(key[at + ID_BYTES :], "big")


def topic_group_key(topic_id: UUID, group: str) -> bytes:
    return topic_id.bytes + lp(group)


def topic_group_prefix(topic_id: UUID) -> bytes:
    return topic_id.bytes


def decode_topic_group_key(key: bytes) -> tuple[UUID, str]:
    group, at = take_text(key, ID_BYTES)
    exactly(key, at)
    return UUID(bytes=key[:ID_BYTES]), group


SHARD_COUNTER_KEY: Final = b"N"

_SHARD: Final = Struct(">cQ")
_SHARD_NAME: Final = Struct(">c16sI")
_STREAM_RECORD: Final = Struct(">QQ")
_STREAM_INDEX: Final = Struct(">cQQQ")
_LANE: Final = Struct(">cI")
_LANE_POSITION: Final = Struct(">cIQ")
_FRAME: Final = Struct(">cQQ")


def shard_key(shard: int) -> bytes:
    return _SHARD.pack(b"S", shard)


def decode_shard_key(key: bytes) -> int:
    return _one_of(key, _SHARD, b"S")


def shard_name_key(topic_id: UUID, partition: int) -> bytes:
    return _SHARD_NAME.pack(b"M", topic_id.bytes, partition)


def shard_name_prefix(topic_id: UUID) -> bytes:
    return b"M" + topic_id.bytes


def decode_shard_name_key(key: bytes) -> tuple[UUID, int]:
    exactly(key, _SHARD_NAME.size)
    kind, raw, partition = _SHARD_NAME.unpack(key)
    if kind != b"M":
        raise malformed(key)
    return UUID(bytes=raw), partition


def deleted_shard_key(shard: int) -> bytes:
    return _SHARD.pack(b"X", shard)


def decode_deleted_shard_key(key: bytes) -> int:
    return _one_of(key, _SHARD, b"X")


def trimmed_shard_key(shard: int) -> bytes:
    return _SHARD.pack(b"Y", shard)


def decode_trimmed_shard_key(key: bytes) -> int:
    return _one_of(key, _SHARD, b"Y")


def orphaned_topic_key(topic_id: UUID) -> bytes:
    return b"Z" + topic_id.bytes


def decode_orphaned_topic_key(key: bytes) -> UUID:
    exactly(key, 17)
    if key[:1] != b"Z":
        raise malformed(key)
    return UUID(bytes=key[1:])


def stream_record_key(shard: int, offset: int) -> bytes:
    return _STREAM_RECORD.pack(shard, offset)


def decode_stream_record_key(key: bytes) -> tuple[int, int]:
    exactly(key, _STREAM_RECORD.size)
    shard, offset = _STREAM_RECORD.unpack(key)
    return shard, offset


def stream_tail_key(shard: int) -> bytes:
    return _SHARD.pack(b"N", shard)


def decode_stream_tail_key(key: bytes) -> int:
    return _one_of(key, _SHARD, b"N")


def stream_index_key(kind: bytes, shard: int, hash64: int, offset: int) -> bytes:
    """Return the key of an index row for records by key (`K`) or tag (`G`)."""
    return _STREAM_INDEX.pack(kind, shard, hash64, offset)


def stream_index_keys(kind: bytes, shard: int, hashes: Iterable[bytes], offset: int) -> list[bytes]:
    """Return `stream_index_key` for many hashes, each given as its 8 bytes in the key."""
    head, tail = _SHARD.pack(kind, shard), U64.pack(offset)
    return [head + each + tail for each in hashes]


def decode_stream_index_key(key: bytes) -> tuple[bytes, int, int, int]:
    exactly(key, _STREAM_INDEX.size)
    kind, shard, hash64, offset = _STREAM_INDEX.unpack(key)
    return kind, shard, hash64, offset


def stream_time_key(shard: int, time_ms: int, offset: int) -> bytes:
    """Times before 1970 sort first."""
    return _STREAM_INDEX.pack(b"T", shard, time_ms + SIGN, offset)


def decode_stream_time_key(key: bytes) -> tuple[int, int, int]:
    kind, shard, raw, offset = decode_stream_index_key(key)
    if kind != b"T":
        raise malformed(key)
    return shard, raw - SIGN, offset


def stream_expiry_key(expire_at_ms: int, shard: int, offset: int) -> bytes:
    """The time comes first, so that one range scan finds expired records of all shards."""
    return _STREAM_INDEX.pack(b"E", expire_at_ms + SIGN, shard, offset)


def stream_expiry_bound(time_ms: int) -> bytes:
    """Return the end (exclusive) of the rows of records that expire before `time_ms`."""
    return b"E" + U64.pack(time_ms + SIGN)


def decode_stream_expiry_key(key: bytes) -> tuple[int, int, int]:
    kind, raw, shard, offset = decode_stream_index_key(key)
    if kind != b"E":
        raise malformed(key)
    return raw - SIGN, shard, offset


def log_checkpoint_key(lane: int) -> bytes:
    return _LANE.pack(b"C", lane)


def decode_log_checkpoint_key(key: bytes) -> int:
    return _one_of(key, _LANE, b"C")


def log_synced_key(lane: int) -> bytes:
    return _LANE.pack(b"P", lane)


def decode_log_synced_key(key: bytes) -> int:
    return _one_of(key, _LANE, b"P")


def log_changed_key(lane: int) -> bytes:
    return _LANE.pack(b"X", lane)


def decode_log_changed_key(key: bytes) -> int:
    return _one_of(key, _LANE, b"X")


def log_unsynced_key(lane: int, position: int) -> bytes:
    return _LANE_POSITION.pack(b"U", lane, position)


def decode_log_unsynced_key(key: bytes) -> tuple[int, int]:
    return _two_of(key, _LANE_POSITION, b"U")


def log_segment_key(lane: int, start: int) -> bytes:
    return _LANE_POSITION.pack(b"S", lane, start)


def decode_log_segment_key(key: bytes) -> tuple[int, int]:
    return _two_of(key, _LANE_POSITION, b"S")


def frame_key(shard: int, last_offset: int) -> bytes:
    """The key has the last offset, so that one seek from any offset finds its frame."""
    return _FRAME.pack(b"O", shard, last_offset)


def frame_keys(shards: Iterable[int], last_offsets: Iterable[int]) -> list[bytes]:
    """Return `frame_key` for many frames."""
    return list(map(_FRAME.pack, repeat(b"O"), shards, last_offsets))


def decode_frame_key(key: bytes) -> tuple[int, int]:
    return _two_of(key, _FRAME, b"O")


def deleted_record_key(shard: int, offset: int) -> bytes:
    return _FRAME.pack(b"D", shard, offset)


def decode_deleted_record_key(key: bytes) -> tuple[int, int]:
    return _two_of(key, _FRAME, b"D")


def _one_of(key: bytes, layout: Struct, kind: bytes) -> int:
    """Return the number in a key of a kind and one number."""
    exactly(key, layout.size)
    found, number = layout.unpack(key)
    if found != kind:
        raise malformed(key)
    assert isinstance(number, int)
    return number


def _two_of(key: bytes, layout: Struct, kind: bytes) -> tuple[int, int]:
    """Return the numbers in a key of a kind and two numbers."""
    exactly(key, layout.size)
    found, first, second = layout.unpack(key)
    if found != kind:
        raise malformed(key)
    return first, second


def import_key(name: str) -> bytes:
    """`name` is the name of the run."""
    return unprefixed(name)


def decode_import_key(key: bytes) -> str:
    return decode_unprefixed(key)


def producers_key(shard: int) -> bytes:
    """Return the key of a shard's idempotent producers. The row of shard 0 has the end of the allocated ids."""
    return U64.pack(shard)


_TRANSACTION: Final = b"T"
_BUSY_TRANSACTION: Final = b"B"
_PENDING_OFFSET: Final = b"P"


def transaction_key(transactional_id: str) -> bytes:
    """Return the key of the state of a transactional id."""
    return _TRANSACTION + unprefixed(transactional_id)


def decode_transaction_key(key: bytes) -> str:
    if key[:1] != _TRANSACTION:
        raise malformed(key)
    return decode_unprefixed(key[1:])


def busy_transaction_key(transactional_id: str) -> bytes:
    """Return the key of a row that exists while a transaction is open, or decided but not yet completed."""
    return _BUSY_TRANSACTION + unprefixed(transactional_id)


def decode_busy_transaction_key(key: bytes) -> str:
    if key[:1] != _BUSY_TRANSACTION:
        raise malformed(key)
    return decode_unprefixed(key[1:])


def pending_offset_key(transactional_id: str, group: str, topic_id: UUID, partition: int) -> bytes:
    """Return the key of an offset that is committed with the transaction."""
    return pending_offset_prefix(transactional_id) + consumer_offset_key(group, topic_id, partition)


def pending_offset_prefix(transactional_id: str) -> bytes:
    return _PENDING_OFFSET + lp(transactional_id)


def decode_pending_offset_key(key: bytes) -> tuple[str, str, UUID, int]:
    if key[:1] != _PENDING_OFFSET:
        raise malformed(key)
    transactional_id, at = take_text(key, 1)
    return (transactional_id, *decode_consumer_offset_key(key[at:]))


def consumer_group_key(group: str) -> bytes:
    """Return the key of a KIP-848 consumer group."""
    return unprefixed(group)


def decode_consumer_group_key(key: bytes) -> str:
    return decode_unprefixed(key)


_PLACE: Final = Struct(">IQ")


def pop_lease_key(topic_id: UUID, group: str, partition: int, offset: int) -> bytes:
    return topic_id.bytes + lp(group) + _PLACE.pack(partition, offset)


def pop_lease_prefix(topic_id: UUID, group: str | None = None) -> bytes:
    """Return the prefix of a topic's leases, of one group or of all."""
    return topic_id.bytes if group is None else topic_id.bytes + lp(group)


def decode_pop_lease_key(key: bytes) -> tuple[UUID, str, int, int]:
    group, at = take_text(key, ID_BYTES)
    exactly(key, at + _PLACE.size)
    partition, offset = _PLACE.unpack_from(key, at)
    return UUID(bytes=key[:ID_BYTES]), group, partition, offset


SCHEDULED: Final = b"D"
CHECK: Final = b"C"
_DUE: Final = Struct(">cQ16s")


def scheduled_key(kind: bytes, due_ms: int, record_id: bytes) -> bytes:
    """Return the key of a scheduled record or of a check."""
    return _DUE.pack(kind, due_ms, record_id)


def scheduled_end(kind: bytes, due_ms: int) -> bytes:
    """Return the key above all that are due at this time."""
    return _DUE.pack(kind, due_ms + 1, bytes(ID_BYTES))


def decode_scheduled_key(key: bytes) -> tuple[bytes, int, bytes]:
    exactly(key, _DUE.size)
    kind, due_ms, record_id = _DUE.unpack(key)
    return kind, due_ms, record_id


def half_record_key(record_id: bytes) -> bytes:
    return b"H" + record_id


MOVED: Final = b"M"


def moved_shard_key(shard: int) -> bytes:
    return _SHARD.pack(MOVED, shard)


def decode_moved_shard_key(key: bytes) -> int:
    return _one_of(key, _SHARD, MOVED)
