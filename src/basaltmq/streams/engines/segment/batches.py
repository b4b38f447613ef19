"""Converts the input of a write to batches that fit a frame of the segment engine."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Final

from basaltmq.errors import LimitExceededError
from basaltmq.log.batches.columnar import OFFSET_DELTAS, ColumnBatch
from basaltmq.log.batches.record import TIMESTAMP_MS_MAX, UNSTAMPED, StoredRecord, check_time
from basaltmq.streams.adapter import BATCH_BYTES_MAX, BATCH_RECORDS_MAX, Records, check_batch

DELTA_MAX: Final = (1 << 31) - 1
"""Maximum distance of offsets within a frame: deltas are int32."""


def as_columns(records: Records, now_ms: int, record_bytes_max: int) -> ColumnBatch:
    """Return a batch that satisfies all limits."""
    if not isinstance(records, ColumnBatch):
        check_batch(records, record_bytes_max)
        return ColumnBatch.from_records(records, now_ms)
    size_bytes = len(records.body)
    if (
        size_bytes <= record_bytes_max
        and records.count <= BATCH_RECORDS_MAX
        and records.timestamp_min_ms >= 0
        and records.timestamp_max_ms <= TIMESTAMP_MS_MAX
        and OFFSET_DELTAS not in records.extents
    ):
        return records
    if records.count > BATCH_RECORDS_MAX:
        raise LimitExceededError(
            f"a batch of {records.count} records exceeds the limit of {BATCH_RECORDS_MAX}; split it"
        )
    if size_bytes > record_bytes_max:
        if size_bytes > 2 * max(BATCH_BYTES_MAX, record_bytes_max):
            raise LimitExceededError(f"a batch of {size_bytes} bytes exceeds the limit of {BATCH_BYTES_MAX}; split it")
        records.check_sizes(record_bytes_max)
    check_time("timestamp_ms", records.timestamp_min_ms, UNSTAMPED)
    check_time("timestamp_ms", records.timestamp_max_ms, UNSTAMPED)
    if records.timestamp_min_ms < 0:
        records = records.stamped(now_ms)
    if OFFSET_DELTAS in records.extents:
        # The shard assigns offsets, so drop the gaps of a batch that was read elsewhere.
        return ColumnBatch.from_records(records.records(0), now_ms)
    return records


def offset_runs(base: int, records: Sequence[StoredRecord]) -> Iterator[Sequence[StoredRecord]]:
    """Yield runs of records whose offsets fit the deltas of one frame."""
    begin = 0
    for at, record in enumerate(records):
        if at > begin and record.offset - max(base, records[begin].offset) > DELTA_MAX // 2:
            yield records[begin:at]
            base = records[at - 1].offset + 1
            begin = at
    if records:
        yield records[begin:]
