"""What has to go: decisions of retention and compaction, the same for every engine (SPEC B10).

Engines hold the records and execute; the decisions are here, as functions of what the engine shows. Retention takes
from the start only: time, size and count say how far the start offset moves. It goes by extents: a record for engines
that keep records, a frame for those that keep frames. Age counts from the record's timestamp or from when it was
stored, whichever is earlier, so that a timestamp from the future cannot pin a shard for ever.

Compaction keeps, per key, the latest record below the high watermark. A null value is a tombstone: it deletes its
key, and goes itself once readers had `tombstone_retention_ms` to see it.

Nothing here has a timer. `Rounds` hands out shards in turns, so that a caller that does a bounded step at a time
comes by all of them.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import islice
from typing import Final

import msgspec

from basaltmq.streams.shards import Engine, ShardConfig, ShardMeta, Shards

SHARDS_PER_STEP: Final = 1_000
"""Shards one step looks at: rows of a few hundred bytes, a few milliseconds."""

RECORDS_PER_STEP: Final = 20_000
"""Records one step removes or compacts over: some tens of milliseconds."""

COMPACT_FRACTION: Final = 10
"""A pass over a shard's keys begins when a tenth of what it holds is new since the last, so that passes over large
shards pay for themselves."""


class Extent(msgspec.Struct, frozen=True, gc=False):
    """A run of records that goes as one."""

    end_offset: int
    """The offset after its last."""
    records: int
    size_bytes: int
    time_ms: int
    """When its latest record became due to age."""


def start_offset_after(
    config: ShardConfig, start: int, records: int, size_bytes: int, oldest: Iterable[Extent], now_ms: int
) -> int:
    """Where the shard has to begin, given what it holds and its extents from the start on.

    `oldest` may end before the shard does; the answer then is as far as it went.
    """
    horizon_ms = None if config.retention_ms is None else now_ms - config.retention_ms
    for extent in oldest:
        over_records = config.retention_records is not None and records > config.retention_records
        over_bytes = config.retention_bytes is not None and size_bytes > config.retention_bytes
        too_old = horizon_ms is not None and extent.time_ms <= horizon_ms
        if over_records and config.retention_records is not None:
            # An extent that straddles the limit stays: at least so many records are promised.
            over_records = too_old or over_bytes or records - extent.records >= config.retention_records
        if not (over_records or over_bytes or too_old):
            break
        records -= extent.records
        size_bytes -= extent.size_bytes
        start = extent.end_offset
    return start


def age_time_ms(timestamp_ms: int, stored_ms: int) -> int:
    """The time a record's age counts from."""
    return min(timestamp_ms, stored_ms)


def is_tombstone(value: bytes | None) -> bool:
    """Empty bytes are a value, as at Kafka."""
    return value is None


def tombstone_goes(config: ShardConfig, time_ms: int, now_ms: int) -> bool:
    """May a tombstone that is the latest of its key go?"""
    return time_ms + config.tombstone_retention_ms <= now_ms


def pass_is_due(high_watermark: int, passed_to: int, records: int) -> bool:
    """Has enough come since the last pass over a shard's keys, which saw offsets below `passed_to`?"""
    fresh = high_watermark - passed_to
    return fresh > 0 and fresh * COMPACT_FRACTION >= records


class Rounds:
    """The shards of an engine in turns, by number, over and over."""

    def __init__(self, shards: Shards, engine: Engine) -> None:
        self._shards = shards
        self._engine = engine
        self._after = 0

    def step(self, limit: int = SHARDS_PER_STEP) -> Iterator[ShardMeta]:
        """Up to `limit` shards that have something to retain, going on where the last step ended.

        A caller that has done enough simply stops: the next step goes on with the shard after the last one taken.
        """
        page = list(islice(self._shards.listed(self._after), limit))
        for meta in page:
            self._after = meta.number
            if meta.engine is self._engine and meta.config.retains:
                yield meta
        # Reached unless the caller stopped early: a short page was the last.
        if len(page) < limit:
            self._after = 0


class CompactionPass:
    """Where compaction of one shard stands; `at` is what the engine goes by: a hash of keys, or an offset."""

    __slots__ = ("at", "bound", "is_running", "passed_to", "tombstone_due_ms")

    def __init__(self) -> None:
        self.is_running = False
        self.at = 0
        self.bound = 0
        """Offsets below it are judged in this pass."""
        self.passed_to = 0
        """Offsets below it were judged by the last pass."""
        self.tombstone_due_ms: int | None = None
        """When the first tombstone that stayed may go."""
