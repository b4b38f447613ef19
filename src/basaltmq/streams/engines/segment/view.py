"""The segment engine beside the process that writes: the same reads, over lanes that are only read.

The index of a store that is open elsewhere lags behind its log: it is written without WAL, so only what was flushed is
on disk. `catch_up` applies the rest of the log to it as recovery does, into an `OverlayStore`, so in memory. Nothing is
repaired: damage is passed over, a torn tail is left for the next look.

What a reader may see (promise P3): of a shard at `synced`, frames below the lane's durable position; of any other,
all that is whole in the log up to a frame that asked to be durable and is not. The shard is shown as if what is
hidden were not there. Copies made by cleaning lie at the end of the lane but hold what was durable before, because
only that is copied; they are never hidden.

Frames of shards the store does not know are taken for those of deleted ones. A frame that shows that the store was
looked at too early, because its shard was made later, is StoreBehindError.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final

from basaltmq.durability import Durability
from basaltmq.errors import CorruptionError, LimitExceededError, ShardNotFoundError, StorageError, StoreBehindError
from basaltmq.log.frame import DROP, HEADER_BYTES, RELOCATED, decode_header
from basaltmq.log.lane import LaneOptions
from basaltmq.log.lane_view import LaneView
from basaltmq.log.recovery import Damage, Found, scan
from basaltmq.store.families import Family
from basaltmq.store.keys import queues as keys
from basaltmq.store.overlay import OverlayStore
from basaltmq.streams.adapter import Budget, Clock, Otherwise
from basaltmq.streams.engines.segment.engine import SHARDS_LOADED_MAX, SegmentEngine
from basaltmq.streams.engines.segment.index.rows import IS_AWAITED, IS_REWRITTEN, Entry
from basaltmq.streams.engines.segment.read import FramesRead
from basaltmq.streams.engines.segment.reader import LogLane
from basaltmq.streams.engines.segment.replay import Progress, Replay, note
from basaltmq.streams.engines.segment.state import SegmentShard
from basaltmq.streams.offsets import Offsets
from basaltmq.streams.shards import Recent, ShardMeta, Shards

CAUGHT_UP_FRAMES_MAX: Final = 2_000_000
"""Frames a view keeps index rows for, about 1 GB of memory with a key each; a writer flushes its own at a tenth."""


class SeenLane(LogLane):
    """A lane without what only a writer needs."""

    __slots__ = ("durable_position", "view")

    def __init__(self, number: int, view: LaneView) -> None:
        self.number = number
        self.log = view
        self.view = view
        self.lock = threading.RLock()
        self.durable_position = 0


class SegmentView(SegmentEngine):
    """The reading part of a `StorageAdapter` on segment files of another process."""

    def __init__(
        self,
        store: OverlayStore,
        shards: Shards,
        offsets: Offsets,
        clock_ms: Clock,
        *,
        path: Path,
        lanes: list[LaneView],
    ) -> None:
        """Over the lanes found under `path`; `catch_up` before anything is read."""
        self.seen = [SeenLane(number, lane) for number, lane in enumerate(lanes)]
        self._path = path
        self._is_catching_up = False
        self._has_followed = False
        super().__init__(store, shards, offsets, clock_ms, path=path)

    def _open_lanes(
        self,
        path: Path,
        quarantine: Path,
        lanes: int,
        options: LaneOptions | None,
        random_u32: Callable[[], int],
        progress: Progress | None,
    ) -> None:
        """They are open, and nothing is recovered."""
        self.lanes = list(self.seen)

    def applied(self, lane: int) -> int:
        """The position up to which a lane is in the index; a lane begins at 0, whether or not that is still there."""
        return self.index.checkpoint(lane) or 0

    def catch_up(self, limits: Sequence[int], *, frames_max: int, is_store_current: bool) -> int:
        """Apply the frames that begin below the limits, by lane, to the index; how many there were.

        If the store was looked at after the log was, shards it does not know are gone, or not part of a backup.
        """
        frames = 0
        raw = self._store.get(Family.SHARDS, keys.SHARD_COUNTER_KEY)
        shard_next = 0 if raw is None else int.from_bytes(raw, "big")
        self._is_catching_up = True
        self._states = Recent(self.load_state, SHARDS_LOADED_MAX)
        try:
            for lane, limit in zip(self.seen, limits, strict=True):
                start = self.applied(lane.number)
                if start >= limit:
                    continue
                damages: list[Damage] = []
                replay = Replay(self, lane.number, lane.log, start, 0, limit - start, None)
                for found in scan(lane.log, start, damages, end=limit):
                    if found.header.shard >= shard_next and not is_store_current:
                        raise StoreBehindError(f"shard {found.header.shard} was made after the store was looked at")
                    if found.header.kind == DROP:
                        self._pass(lane, found)
                    else:
                        replay.apply(found)
                    frames += 1
                    if frames > frames_max:
                        raise LimitExceededError(
                            f"the index of {self._path} is over {frames_max} frames behind its log; open the store for "
                            "writing once to have it brought up to date"
                        )
                self.losses += replay.lost()
                applied = self.applied(lane.number)
                self.damages += [each for each in damages if each.position < applied]
            if not self._has_followed:
                self._follow_starts()
                self._has_followed = True
            self.index.settle()
        except StoreBehindError:
            # What came before is applied, and stays.
            self.index.settle()
            raise
        finally:
            self._is_catching_up = False
        return frames

    def _pass(self, lane: SeenLane, found: Found) -> None:
        """A shard went. Its rows stay: nobody asks for them any more, and to cover each of them takes memory."""
        header = found.header
        with self.index.lock:
            self.index.flush()
            segment = lane.segment_of(found.position)
            note(self.index, lane.number, segment, found.position, header, header.size_bytes)

    def _follow_starts(self) -> None:
        """Take out of the index what shard rows say is gone, where the index on disk may not have followed yet."""
        for key, _ in list(self._store.scan(Family.SHARDS, *keys.prefix_range(keys.trimmed_shard_key(0)[:1]))):
            try:
                state = self.state_of(keys.decode_trimmed_shard_key(key))
                config = self.config_of(state.number)
            except ShardNotFoundError:
                continue
            if state.lane < len(self.seen):
                with self.index.lock:
                    self.index.flush()
                    self._follow_start(self.seen[state.lane], state, config, state.start_offset)

    def show(self, durable: Sequence[int]) -> None:
        """Let readers see what is durable up to these positions, by lane."""
        for lane, position in zip(self.seen, durable, strict=True):
            lane.durable_position = position
        # What was loaded to catch up shows all there is.
        self._states = Recent(self.load_state, SHARDS_LOADED_MAX)

    def close(self) -> None:
        """The lanes are their owner's."""

    def load_state(self, shard: int) -> SegmentShard:
        meta = self._own(shard)
        state = SegmentShard(meta, self.index.shard_row(shard))
        if state.lane >= len(self.seen):
            # The index came without its log, as in a backup of the store alone.
            state.records = state.skipped = state.deleted = state.size_bytes = 0
        elif not self._is_catching_up:
            self._hide(state, meta)
            if self.index.outcomes.is_used:
                state.undecided = self.index.outcomes.undecided(shard)
        return state

    def _hide(self, state: SegmentShard, meta: ShardMeta) -> None:
        """Take the frames that are not to be seen off the end of a shard."""
        lane = self.seen[state.lane]
        is_synced = meta.config.durability is Durability.SYNCED
        prefix = keys.frame_key(state.number, 0)[:9]
        last: list[Entry] = []
        hidden = 0
        for key, raw in self._store.scan(Family.STREAM_INDEX, *keys.prefix_range(prefix), reverse=True):
            entry = Entry.decode(keys.decode_frame_key(key)[1], raw)
            end = entry.position + entry.size_bytes
            if end <= min(lane.durable_position, lane.log.end):
                break
            last.append(entry)
            if is_synced or end > lane.log.end or entry.flags & IS_AWAITED:
                if self._is_copy(lane, entry):
                    break
                hidden = len(last)
        for entry in last[:hidden]:
            state.frames -= 1
            state.records -= entry.records
            state.size_bytes -= entry.size_bytes
            state.next_offset = entry.base_offset
        if state.next_offset < state.start_offset:
            state.next_offset = state.start_offset
            state.records = state.skipped = state.deleted = 0
        state.settle()

    def _is_copy(self, lane: SeenLane, entry: Entry) -> bool:
        """Was the frame written by cleaning or compaction, which touch only what was durable before?"""
        if entry.position >= lane.log.end:
            # The index was flushed before the log was synced, and the power went.
            return False
        if entry.flags & IS_REWRITTEN:
            return True
        try:
            header = decode_header(lane.log.seed, lane.log.read(entry.position, HEADER_BYTES))
        except CorruptionError:
            return False
        return bool(header.flags & RELOCATED)

    def _read_once(self, shard: int, offset: int, budget: Budget, tag: bytes | None, key: bytes | None) -> FramesRead:
        self._require_log(shard)
        return super()._read_once(shard, offset, budget, tag, key)

    def _offset_by_timestamp(self, shard: int, timestamp_ms: int, otherwise: Otherwise) -> int:
        self._require_log(shard)
        return super()._offset_by_timestamp(shard, timestamp_ms, otherwise)

    def _require_log(self, shard: int) -> None:
        lane = self._own(shard).lane
        if lane >= len(self.seen) and self._states.get(shard).frames:
            raise StorageError(
                f"the records of shard {shard} are not here: {self._path / f'{lane:04d}'} is missing; "
                "copy the log beside the store, or look at the store this was taken from"
            )
