"""Retention, compaction and segment cleaning of the segment engine, in bounded steps.

A step does three tasks: per shard, retention raises the log start offset; then a part of a compaction pass over the
shard's frames, if it is compacted; then a part of cleaning one segment.

Compaction: adjacent frames with removable records are rewritten as one frame with the same offsets (deltas) at the head
of the lane. Deleted and expired records are dropped too. Other frames stay unchanged. The key index shows whether a
record is superseded, and the frame it names confirms it. Without a key index, a first pass collects the keys
(`LatestKeys`). A pass ends before the first open transaction. Aborted records are dropped and supersede nothing.
Rewritten frames belong to no transaction. A transaction marker is dropped when no frame is left that it may decide.
Rewritten frames do not name the idempotent producer. So before a pass starts, the producer state row is extended to the
end of the pass and synced (`producers_row`).

Segment cleaning: the live frames of a sealed segment that is at least half garbage are copied to the head of the lane
(flag RELOCATED, same offsets and times). The segment is deleted when the copies are synced and the index that points to
them is on disk. Readers of the old position look up the index again. A segment with damaged bytes is never deleted, so
that an operator can examine it. An active segment that is half garbage is rolled first, because it may get no appends
for a day.

The progress between steps is only in memory. After a restart a pass starts again, with the same result.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from itertools import islice
from typing import TYPE_CHECKING, Final

from basaltmq.errors import DamagedFrameError, ShardNotFoundError
from basaltmq.log.batches.columnar import ColumnBatch
from basaltmq.log.batches.record import NEVER
from basaltmq.log.frame import (
    COLUMNAR,
    DELETES,
    KAFKA,
    RELOCATED,
    REWRITTEN,
    Header,
    decode_deletes,
    encode_frame,
)
from basaltmq.log.recovery import Damage, Found, scan
from basaltmq.log.segment import Segment, SegmentState
from basaltmq.store.api import ManagedStore
from basaltmq.store.batch import Batch
from basaltmq.store.families import Family
from basaltmq.store.keys import streams as stream_keys
from basaltmq.streams.engines.retention import (
    PASSES_MAX,
    RECORDS_PER_STEP,
    CompactionPass,
    CompactionPasses,
    Extent,
    Rounds,
    age_time_ms,
    start_offset_after,
)
from basaltmq.streams.engines.segment.compaction_filter import CompactionFilter, offsets_of
from basaltmq.streams.engines.segment.index.rows import IS_MARKER, NO_TERMS, Entry, entry_of
from basaltmq.streams.engines.segment.latest_keys import LatestKeys
from basaltmq.streams.engines.segment.producers_row import encode_row, known_to, recover
from basaltmq.streams.engines.segment.state import SegmentShard
from basaltmq.streams.shards import Engine, ShardConfig, ShardMeta, Shards

if TYPE_CHECKING:
    from basaltmq.streams.engines.segment.engine import SegmentEngine
    from basaltmq.streams.engines.segment.reader import LogLane

MERGED_FRAMES_MAX: Final = 256
MERGED_RECORDS_MAX: Final = 10_000
MERGED_BYTES_MAX: Final = 1 << 20
"""Limits of a frame that compaction creates: large enough to merge small frames, small enough for the shard's lock."""

RELOCATED_BYTES_PER_STEP: Final = 32 << 20
"""Bytes of a segment cleaned per step: tens of milliseconds."""

ROLLED_GARBAGE_MIN: Final = 4 << 20
"""Minimum garbage to roll the active segment. Less does not pay for two syncs and a file."""

RECLAIMED_GARBAGE_MIN: Final = 64 << 10
"""Minimum garbage to roll the active segment when the disk is nearly full."""

RECLAIM_STEPS_MAX: Final = 64
"""Maximum cleaning steps per `reclaim`: 2 GiB of segments."""

EXPIRED_FRAMES_PER_STEP: Final = 1_000
"""Frames with expired records examined per step."""

_log: Final = logging.getLogger(__name__)


class SegmentCleaner:
    """Executes the retention policy and reclaims space."""

    def __init__(self, engine: SegmentEngine, store: ManagedStore, shards: Shards) -> None:
        self._engine = engine
        self._store = store
        self._rounds = Rounds(shards, Engine.SEGMENT)
        self._passes = CompactionPasses()
        self._latest: LatestKeys | None = None
        self._without_row: set[int] = set()
        """Shards without idempotent producers. A producer that starts while this process runs writes a row first."""
        self._cleaning: tuple[LogLane, Segment, int, list[Damage]] | None = None
        self._damaged: set[tuple[int, int]] = set()

    def forget(self, shard: int) -> None:
        self._passes.forget(shard)
        self._without_row.discard(shard)
        if self._latest is not None and self._latest.shard == shard:
            self._latest = None

    def step(self, now_ms: int) -> int:
        """Do a bounded part of the work. Return how many records were removed."""
        gone = self._expire(now_ms) + self._rounds.clean(lambda meta, limit: self._clean_shard(meta, now_ms, limit))
        self.clean()
        return gone

    def _clean_shard(self, meta: ShardMeta, now_ms: int, limit: int) -> tuple[int, int]:
        removed = self._retain(meta, now_ms)
        examined, compacted = self._compact(meta, now_ms, limit) if meta.config.compact else (0, 0)
        return removed + examined, removed + compacted

    def _expire(self, now_ms: int) -> int:
        """Delete expired records. Rewrite frames that have lost half of their records."""
        gone = 0
        due = list(islice(self._engine.index.due(now_ms), EXPIRED_FRAMES_PER_STEP))
        for shard, last_offset in due:
            try:
                state = self._engine.state_of(shard)
                config = self._engine.config_of(shard)
            except ShardNotFoundError:
                # The shard is being deleted with its rows.
                continue
            with state.lock:
                entry = self._engine.index.entry(shard, last_offset)
                if state.is_deleted or entry is None or last_offset >= state.high_watermark:
                    continue
                gone += self._expire_frame(state, config, entry, now_ms)
        return gone

    def _expire_frame(self, state: SegmentShard, config: ShardConfig, entry: Entry, now_ms: int) -> int:
        engine = self._engine
        batch = engine.load(state, entry)
        expiries = None if batch is None else batch.expiries()
        if batch is None or expiries is None:
            return 0
        places = zip(offsets_of(entry, batch), expiries, strict=True)
        expired = [
            offset
            for offset, time_ms in places
            if time_ms != NEVER and time_ms <= now_ms and offset >= state.start_offset
        ]
        gone = engine.delete_offsets(state, expired)
        deleted = engine.index.deleted(state.number, entry.base_offset, entry.last_offset)
        if 2 * len(deleted) >= batch.count:
            current = engine.index.entry(state.number, entry.last_offset)
            assert current is not None, "a frame stays in the index under its shard's lock"
            group = [current]
            before = engine.index.entry_before(state.number, entry.base_offset)
            is_hole = before is not None and before.records == 0 and not before.flags & IS_MARKER
            if before is not None and is_hole and before.base_offset >= state.start_offset:
                group.insert(0, before)
            self._rewrite(state, config, group, CompactionFilter(engine, state, config, None, now_ms))
        return gone

    def _retain(self, meta: ShardMeta, now_ms: int) -> int:
        state = self._engine.state_of(meta.number)
        with state.lock:
            state.require()
            start = start_offset_after(
                meta.config, state.start_offset, state.kept, state.size_bytes, self._oldest(state), now_ms
            )
        # Read frames without the lock, because that takes long. Records appended in between do not lower the start.
        self.settle_trimmed(state, start)
        with state.lock:
            state.require()
            return self._engine.trim(state, meta.config, start)

    def settle_trimmed(self, state: SegmentShard, start: int) -> None:
        """Extend the producer state row to `start` before the batches below it are deleted.

        Do not call it under the shard's lock. The sync before the deletion makes the row durable. Without a row there
        are no producers, unless a power loss removed it. Then the state is recovered from the log when the producer
        returns.
        """
        if start <= state.start_offset:
            return
        key = stream_keys.producers_key(state.number)
        raw = self._store.get(Family.PRODUCERS, key)
        if raw is None or known_to(raw) >= start:
            return
        row = encode_row(start, recover(self._engine, state.number, raw, start))
        with state.lock:
            state.require()
            # A concurrent writer may have written a newer row.
            if self._store.get(Family.PRODUCERS, key) == raw:
                batch = Batch()
                batch.put(Family.PRODUCERS, key, row)
                self._store.write(batch)

    def _oldest(self, state: SegmentShard) -> Iterator[Extent]:
        skipped = state.skipped
        for entry in islice(self._engine.index.entries(state.number, state.start_offset), RECORDS_PER_STEP):
            if entry.last_offset >= state.high_watermark:
                return
            time_ms = age_time_ms(entry.timestamp_max_ms, entry.store_time_ms)
            yield Extent(entry.last_offset + 1, entry.records - skipped, entry.size_bytes, time_ms)
            skipped = 0

    def _compact(self, meta: ShardMeta, now_ms: int, limit: int) -> tuple[int, int]:
        """Do a part of a pass. Return (records examined, records removed)."""
        progress = self._passes.of(meta.number)
        state = self._engine.state_of(meta.number)
        if not progress.is_running:
            with state.lock:
                bound = state.stable_offset
            if not progress.is_due(bound, state.kept, now_ms):
                return 0, 0
            if not meta.config.index_keys and not self._begin_noting(meta.number, progress.passed_to):
                return 0, 0
            self._settle_producers(state, bound)
            progress.begin(0, bound)
        record_filter = CompactionFilter(self._engine, state, meta.config, progress, now_ms, self._latest)
        examined = gone = 0
        if self._latest is not None and self._latest.shard == meta.number:
            examined = self._note(state, progress, self._latest, record_filter, limit)
            if not self._latest.is_whole:
                return examined, 0
        while progress.is_running and examined < max(limit, 1):
            with state.lock:
                state.require()
                group = self._group(state, progress)
                if not group:
                    progress.end()
                    if not meta.config.index_keys:
                        self._latest = None
                    break
                examined += 1 + sum(entry.records for entry in group)
                try:
                    gone += self._rewrite(state, meta.config, group, record_filter)
                except DamagedFrameError as error:
                    _log.error("compaction skips the damaged offsets %d to %d: %s", *_span(group), error)
                progress.at = group[-1].last_offset + 1
        return examined, gone

    def _settle_producers(self, state: SegmentShard, bound: int) -> None:
        """Extend the producer state row to `bound` and sync it, because a pass removes the batch headers."""
        number = state.number
        key = stream_keys.producers_key(number)
        with state.lock:
            state.require()
            raw = self._store.get(Family.PRODUCERS, key)
            if raw is None and number in self._without_row:
                return
            if raw is None or known_to(raw) < bound:
                known = recover(self._engine, number, raw, bound)
                if raw is None and not known:
                    if len(self._without_row) >= PASSES_MAX:
                        self._without_row.clear()
                    self._without_row.add(number)
                    return
                batch = Batch()
                batch.put(Family.PRODUCERS, key, encode_row(bound, known))
                self._store.write(batch)
        self._store.sync()

    def _begin_noting(self, shard: int, start: int) -> bool:
        """Start collecting a shard's keys. Return False if another shard is in progress."""
        if self._latest is not None and self._latest.shard != shard:
            try:
                if self._engine.config_of(self._latest.shard).compact:
                    return False
            except ShardNotFoundError:
                pass
        self._latest = LatestKeys(shard, start)
        return True

    def _note(
        self,
        state: SegmentShard,
        progress: CompactionPass,
        latest: LatestKeys,
        record_filter: CompactionFilter,
        limit: int,
    ) -> int:
        """Collect keys up to the pass's bound, or lower the bound if the map is full. Return the records examined."""
        examined = 0
        while not latest.is_whole and examined < max(limit, 1):
            with state.lock:
                state.require()
                at = max(latest.next_offset, state.start_offset)
                entry = next(self._engine.index.entries(state.number, at), None)
                if entry is None or entry.last_offset >= progress.bound:
                    latest.is_whole = True
                elif latest.is_full:
                    latest.is_whole = True
                    progress.bound = entry.base_offset
                else:
                    examined += 1 + entry.records
                    try:
                        latest.note(record_filter.latest_visible(entry), entry.last_offset + 1)
                    except DamagedFrameError as error:
                        _log.error("compaction cannot read the keys of offsets %d to %d: %s", *_span([entry]), error)
                        latest.note({}, entry.last_offset + 1)
        return examined

    def _group(self, state: SegmentShard, progress: CompactionPass) -> list[Entry]:
        """Return the next frames to compact together."""
        group: list[Entry] = []
        records = size = 0
        for entry in self._engine.index.entries(state.number, max(progress.at, state.start_offset)):
            records += entry.records
            size += entry.size_bytes
            is_full = len(group) >= MERGED_FRAMES_MAX or records > MERGED_RECORDS_MAX or size > MERGED_BYTES_MAX
            too_far = group and entry.last_offset - group[0].base_offset >= (1 << 31)
            if entry.last_offset >= progress.bound or (group and (is_full or too_far)):
                break
            if entry.flags & IS_MARKER and self._engine.index.outcomes.is_needed(state.number, entry):
                # The marker stays unchanged, so frames are not merged across it.
                if group:
                    break
                records -= entry.records
                size -= entry.size_bytes
                continue
            group.append(entry)
        return group

    def _rewrite(
        self, state: SegmentShard, config: ShardConfig, group: list[Entry], record_filter: CompactionFilter
    ) -> int:
        """Rewrite a group as one frame if it has removable records. Return how many. Call under the shard's lock."""
        engine = self._engine
        kept = []
        held = gone = 0
        headers: list[Header] = []
        for entry in group:
            header, _ = engine.frame_of(state, entry)
            headers.append(header)
            batch = engine.load(state, entry)
            if batch is None:
                continue
            held += batch.count
            alive = record_filter.kept(entry, batch) if engine.is_visible(state, entry) else []
            gone += record_filter.live(entry, batch) - len(alive)
            kept += alive
        holes = sum(entry.records == 0 for entry in group)
        if len(kept) == held and holes < 2:
            return 0
        base = group[0].base_offset
        records = None
        if kept:
            records = ColumnBatch.from_records(kept, 0, [record.offset - base for record in kept])
        header = Header(
            0,
            0 if records is None else len(records.body),
            state.number,
            base,
            len(kept),
            group[-1].last_offset - base,
            min(each.timestamp_min_ms for each in headers),
            max(each.timestamp_max_ms for each in headers),
            max(each.store_time_ms for each in headers),
            COLUMNAR,
            RELOCATED | REWRITTEN,
        )
        before = state.kept
        self._append(state, header, b"" if records is None else records.body, records, config)
        assert before - state.kept == gone, "the index removed as many records as the compaction"
        return gone

    def _append(
        self, state: SegmentShard, header: Header, body: bytes, records: ColumnBatch | None, config: ShardConfig
    ) -> None:
        """Append a copy of frames and point the index to it. The caller holds the shard's lock."""
        engine = self._engine
        lane = engine.lanes[state.lane]
        parts = encode_frame(
            lane.log.seed,
            header.kind,
            header.shard,
            header.base_offset,
            header.records,
            header.last_delta,
            header.timestamp_min_ms,
            header.timestamp_max_ms,
            header.store_time_ms,
            body,
            header.flags,
        )
        with engine.log_change(lane, parts, header, garbage=0) as position:
            if records is not None or (header.records == 0 and header.flags & REWRITTEN):
                entry = entry_of(header, position, NO_TERMS, NEVER)
                engine.index.replace(
                    state, entry, records, config, lambda old: engine.load(state, old), lane.log.segment_start
                )
            else:
                old = engine.index.entry(header.shard, header.last_offset)
                assert old is not None, "only live frames are copied"
                engine.index.move(state, old._replace(position=position), None, config, lane.log.segment_start)

    def reclaim(self, is_enough: Callable[[], bool]) -> None:
        """Clean segments until `is_enough`, nothing is left, or RECLAIM_STEPS_MAX steps are done."""
        for _ in range(RECLAIM_STEPS_MAX):
            if is_enough() or not self.clean(RECLAIMED_GARBAGE_MIN):
                return

    def clean(self, garbage_min: int = ROLLED_GARBAGE_MIN) -> bool:
        """Continue cleaning a segment, or start with one that is half garbage. Return False if there is nothing to do.

        `garbage_min` is the minimum garbage to roll the active segment for cleaning.
        """
        if self._cleaning is None:
            self._cleaning = self._choose(garbage_min)
        if self._cleaning is None:
            return False
        lane, segment, position, damages = self._cleaning
        limit = position + RELOCATED_BYTES_PER_STEP
        for found in scan(lane.log, position, damages, end=segment.end):
            position = found.position + found.header.size_bytes
            self._relocate(lane, found)
            if position >= limit:
                self._cleaning = (lane, segment, position, damages)
                return True
        self._cleaning = None
        if damages:
            self._damaged.add((lane.number, segment.start))
            self._engine.damages += damages
            return True
        self._engine.index.forget_segment(lane.number, segment.start)
        self._engine.checkpoint()
        lane.log.delete(segment)
        return True

    def _choose(self, garbage_min: int) -> tuple[LogLane, Segment, int, list[Damage]] | None:
        best: tuple[float, LogLane, Segment] | None = None
        for lane in self._engine.lanes:
            lane.roll_if_old()
            self._roll_garbage(lane, garbage_min)
            segments = lane.log.segments()[:-1]
            if any(segment.state is SegmentState.SEALING for segment in segments):
                lane.log.sync()
            for segment in segments:
                if (lane.number, segment.start) in self._damaged or segment.state is not SegmentState.SEALED:
                    continue
                stats = self._engine.index.stats(lane.number, segment.start)
                # A sealed segment without stats was being deleted when the process ended.
                share = 1.0 if stats is None else stats.garbage_bytes / max(segment.size_bytes, 1)
                if share >= 0.5 and (best is None or share > best[0]):
                    best = (share, lane, segment)
        return None if best is None else (best[1], best[2], best[2].start, [])

    def _roll_garbage(self, lane: LogLane, garbage_min: int) -> None:
        """Roll the active segment if half of it is garbage, for example after the deletion of a topic."""
        with lane.lock:
            active = lane.log.segments()[-1]
            stats = self._engine.index.stats(lane.number, active.start)
            if stats is not None and stats.garbage_bytes >= max(garbage_min, active.size_bytes // 2):
                lane.log.roll()

    def _relocate(self, lane: LogLane, found: Found) -> None:
        """Copy a frame to the head of the lane if it is still needed."""
        header = found.header
        engine = self._engine
        if header.kind not in (COLUMNAR, KAFKA, DELETES):
            return
        try:
            state = engine.state_of(header.shard)
            config = engine.config_of(header.shard)
        except ShardNotFoundError:
            return
        with state.lock:
            if state.is_deleted:
                return
            if header.kind == DELETES:
                needed = engine.index.deletes_of(header.shard, decode_deletes(found.body), found.position)
                if needed:
                    engine.append_deletes(state, needed, header.store_time_ms)
                return
            entry = engine.index.entry(header.shard, header.last_offset)
            if entry is not None and entry.position == found.position:
                self._append(state, header._replace(flags=header.flags | RELOCATED), found.body, None, config)


def _span(group: Sequence[Entry]) -> tuple[int, int]:
    """Return the first and the last offset of frames."""
    return group[0].base_offset, group[-1].last_offset
