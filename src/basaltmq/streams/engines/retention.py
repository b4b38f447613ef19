"""Retention and compaction policy, shared by all engines (SPEC B10).

The functions here decide; the engines hold the records and execute. Retention removes records only from the start:
time, size and count determine the new log start offset. It works in extents: single records, or frames in engines that
store frames. The age of a record counts from its timestamp or its store time, whichever is earlier, so that a future
timestamp cannot pin a shard.

Compaction keeps the latest record per key below the high watermark. A null value is a tombstone: it deletes its key and
is removed itself after `tombstone_retention_ms`.

There are no timers here. `Rounds` iterates over the shards, so that bounded steps eventually visit all of them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from itertools import islice
from typing import Final

import msgspec

from basaltmq.errors import ShardNotFoundError
from basaltmq.streams.shards import Engine, ShardConfig, ShardMeta, Shards

SHARDS_PER_STEP: Final = 1_000
"""Shards examined per step: rows of a few hundred bytes, a few milliseconds."""

RECORDS_PER_STEP: Final = 20_000
"""Records removed or compacted per step: tens of milliseconds."""

COMPACT_FRACTION: Final = 10
"""A compaction pass starts when 1/10 of the shard's records are new since the last pass. This bounds the cost of passes
over large shards."""


PASSES_MAX: Final = 10_000
"""Maximum shards whose last compaction pass is remembered."""


class Extent(msgspec.Struct, frozen=True, gc=False):
    """A run of records that retention removes as a unit."""

    end_offset: int
    """The offset after the last record."""
    records: int
    size_bytes: int
    time_ms: int
    """The time from which the age of its latest record counts."""


def start_offset_after(
    config: ShardConfig, start: int, records: int, size_bytes: int, oldest: Iterable[Extent], now_ms: int
) -> int:
    """Return the new log start offset, given the shard's totals and its extents from the start.

    `oldest` may cover only a part of the shard. The result then goes at most to its end.
    """
    horizon_ms = None if config.retention_ms is None else now_ms - config.retention_ms
    for extent in oldest:
        over_records = config.retention_records is not None and records > config.retention_records
        over_bytes = config.retention_bytes is not None and size_bytes > config.retention_bytes
        too_old = horizon_ms is not None and extent.time_ms <= horizon_ms
        if over_records and config.retention_records is not None:
            # Keep an extent that straddles the limit: retention_records is a guaranteed minimum.
            over_records = too_old or over_bytes or records - extent.records >= config.retention_records
        if not (over_records or over_bytes or too_old):
            break
        records -= extent.records
        size_bytes -= extent.size_bytes
        start = extent.end_offset
    return start


def age_time_ms(timestamp_ms: int, stored_ms: int) -> int:
    """Return the time from which a record's age counts."""
    return min(timestamp_ms, stored_ms)


def is_tombstone(value: bytes | None) -> bool:
    """Whether a value is null. Empty bytes are a value, as in Kafka."""
    return value is None


class Rounds:
    """Iterates over the shards of an engine by number, round after round."""

    def __init__(self, shards: Shards, engine: Engine) -> None:
        self._shards = shards
        self._engine = engine
        self._after = 0

    def step(self, limit: int = SHARDS_PER_STEP) -> Iterator[ShardMeta]:
        """Yield up to `limit` shards with retention or compaction, after the last shard of the previous step.

        The caller may stop early. The next step continues after the last shard it took.
        """
        page = list(islice(self._shards.listed(self._after), limit))
        for meta in page:
            self._after = meta.number
            if meta.engine is self._engine and meta.config.retains:
                yield meta
        # A short page is the last one. This is not reached if the caller stops early.
        if len(page) < limit:
            self._after = 0

    def clean(self, clean_shard: Callable[[ShardMeta, int], tuple[int, int]]) -> int:
        """Clean the next shards until RECORDS_PER_STEP records are examined. Return how many records were removed.

        `clean_shard` gets a shard and the records left to examine. It returns the records examined and removed.
        """
        left = RECORDS_PER_STEP
        gone = 0
        for meta in self.step():
            try:
                examined, removed = clean_shard(meta, left)
            except ShardNotFoundError:
                # The shard was deleted after the page was read.
                continue
            gone += removed
            left -= examined
            if left <= 0:
                break
        return gone


class CompactionPass:
    """Progress of a shard's compaction. `at` is the engine's position: a key hash or an offset."""

    __slots__ = ("at", "bound", "is_running", "passed_to", "tombstone_due_ms")

    def __init__(self) -> None:
        self.is_running = False
        self.at = 0
        self.bound = 0
        """This pass covers the offsets below it."""
        self.passed_to = 0
        """The last pass covered the offsets below it."""
        self.tombstone_due_ms: int | None = None
        """When the first remaining tombstone may be removed."""

    def is_due(self, bound: int, records: int, now_ms: int) -> bool:
        """Whether a tombstone is due, or enough of the records below `bound` are new since the last pass."""
        if self.tombstone_due_ms is not None and self.tombstone_due_ms <= now_ms:
            return True
        fresh = bound - self.passed_to
        return fresh > 0 and fresh * COMPACT_FRACTION >= records

    def begin(self, at: int, bound: int) -> None:
        self.is_running = True
        self.at = at
        self.bound = bound
        self.tombstone_due_ms = None

    def end(self) -> None:
        self.is_running = False
        self.passed_to = self.bound

    def is_tombstone_due(self, config: ShardConfig, time_ms: int, now_ms: int) -> bool:
        """Whether a tombstone that is the latest record of its key may be removed. Records when a later one is due."""
        due_ms = time_ms + config.tombstone_retention_ms
        if due_ms <= now_ms:
            return True
        self.tombstone_due_ms = due_ms if self.tombstone_due_ms is None else min(self.tombstone_due_ms, due_ms)
        return False


class CompactionPasses:
    """The compaction passes of an engine's shards. A forgotten shard is compacted again."""

    def __init__(self) -> None:
        self._passes: dict[int, CompactionPass] = {}

    def of(self, shard: int) -> CompactionPass:
        known = self._passes.get(shard)
        if known is None:
            if len(self._passes) >= PASSES_MAX:
                self._passes.pop(next(iter(self._passes)))
            known = self._passes[shard] = CompactionPass()
        return known

    def forget(self, shard: int) -> None:
        self._passes.pop(shard, None)
