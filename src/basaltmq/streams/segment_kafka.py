"""Reading a shard the way a Kafka listener does: as record batches, as they were appended where possible.

A batch that came from a Kafka producer is handed out as it lies in the log, compressed or not, control batches
included; its checksum was checked with its frame's. Anything else is put into a batch: records that came some other
way, and what is left of a batch of which records were deleted or have expired. As in Kafka, the first batch may begin
before the offset asked for: consumers skip what they did not ask for.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Final, NamedTuple

from basaltmq.errors import CorruptionError, DamagedFrameError
from basaltmq.log.frame import KAFKA, records_of
from basaltmq.log.kafka import encode_records
from basaltmq.streams.adapter import READ_BYTES, READ_BYTES_MAX, check_offset, is_expired
from basaltmq.streams.index_rows import IN_TRANSACTION, Entry
from basaltmq.streams.segment_state import SegmentShard

if TYPE_CHECKING:
    from basaltmq.streams.segment_reader import SegmentReader

FRAMES_MAX: Final = 10_000
"""Frames one read looks at, so that none takes for ever where little is left of many."""


class KafkaRead(NamedTuple):
    """What a read found."""

    batches: list[bytes]
    next_offset: int
    start_offset: int
    high_watermark: int


def read_batches(
    reader: SegmentReader, shard: int, offset: int, max_bytes: int = READ_BYTES, *, is_decided: bool = False
) -> KafkaRead:
    """Batches from the one that holds `offset` on, the first whatever its size; empty at the high watermark.

    With `is_decided` it stands where the first transaction begins that is not; aborted batches are given all the same.
    """
    state = reader.state_of(shard)
    with state.lock:
        start, end = state.start_offset, state.stable_offset if is_decided else state.high_watermark
    check_offset(shard, offset, start, end)
    left = min(max_bytes, READ_BYTES_MAX)
    batches: list[bytes] = []
    at = offset
    for looked, entry in enumerate(_below(reader.index.entries(shard, offset), end)):
        if looked >= FRAMES_MAX:
            return KafkaRead(batches, at, start, end)
        try:
            raw = _batch(reader, state, entry, start)
        except DamagedFrameError:
            if not batches:
                raise
            return KafkaRead(batches, at, start, end)
        if raw is not None:
            if batches and len(raw) > left:
                return KafkaRead(batches, at, start, end)
            batches.append(raw)
            left -= len(raw)
        at = entry.last_offset + 1
    return KafkaRead(batches, max(at, end), start, end)


def _below(entries: Iterator[Entry], end: int) -> Iterator[Entry]:
    for entry in entries:
        if entry.base_offset >= end:
            return
        yield entry


def _batch(reader: SegmentReader, state: SegmentShard, entry: Entry, start: int) -> bytes | None:
    """A frame as a batch; None if nothing of it is left."""
    try:
        header, body = reader.frame_of(state, entry)
        deleted = reader.index.deleted(state.number, entry.base_offset, entry.last_offset) if state.deleted else []
        if header.kind == KAFKA and not deleted:
            return body
        is_aborted = entry.flags & IN_TRANSACTION and reader.index.outcomes.is_aborted(state.number, entry)
        columns = None if is_aborted else records_of(header, body)
    except CorruptionError as error:
        log = reader.lanes[state.lane].log
        reason = f"{log.path} at position {entry.position}: {error}"
        raise DamagedFrameError(state.number, entry.base_offset, entry.last_offset, reason) from error
    if columns is None:
        return None
    gone = set(deleted)
    now_ms = reader.now_ms()
    kept = [
        record
        for record in columns.records(entry.base_offset)
        if record.offset >= start and record.offset not in gone and not is_expired(record, now_ms)
    ]
    return encode_records(kept) if kept else None
