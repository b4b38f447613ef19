"""Frames of the log and Kafka batches for tests and benchmarks."""

from __future__ import annotations

from collections.abc import Sequence

from basaltmq.log.batches.columnar import ColumnBatch
from basaltmq.log.batches.kafka import encode_records
from basaltmq.log.batches.record import Record, StoredRecord
from basaltmq.log.frame import COLUMNAR, encode_frame


def encode_batch(
    seed: int, shard: int, base_offset: int, batch: ColumnBatch, store_time_ms: int, flags: int = 0
) -> tuple[bytes, ...]:
    """Return a frame of records."""
    times = (batch.timestamp_min_ms, batch.timestamp_max_ms)
    return encode_frame(
        seed, COLUMNAR, shard, base_offset, batch.count, batch.last_delta, *times, store_time_ms, batch.body, flags
    )


def encode_plain(plain: Sequence[Record], base_offset: int = 0) -> bytes:
    """Encode records without offsets as a producer's batch."""
    return encode_records(
        [
            StoredRecord(
                each.value, each.key, each.headers, (), each.timestamp_ms, each.expire_at_ms, offset=base_offset + at
            )
            for at, each in enumerate(plain)
        ]
    )
