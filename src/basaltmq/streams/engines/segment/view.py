"""The segment engine for a read-only view beside the writing process.

The index on disk lags behind the log, because it is written without the WAL. `catch_up` replays the rest of the log
into an `OverlayStore` in memory, as recovery does. It repairs nothing: it skips damage and leaves a torn tail for the
next refresh.

Visibility (promise P3): in a `synced` shard, readers see the frames below the lane's durable position. In other shards
they see all complete frames, up to the first frame that requested `synced` and is not durable. The shard looks as if
hidden frames did not exist. Copies by segment cleaning and compaction are at the end of the lane, but contain only
records that were durable before, so they are never hidden.

Frames of shards that are not in the store belong to deleted shards. If such a shard was created after the store was
loaded, `catch_up` raises StoreBehindError.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final

from basaltmq.durability import Durability
from basaltmq.errors import CorruptionError, LimitExceededError, ShardNotFoundError, StorageError, StoreBehindError
from basaltmq.log.frame import DROP, HEADER_BYTES, RELOCATED, decode_header
from basaltmq.log.lane_options import LaneOptions
from basaltmq.log.lane_view import LaneView
from basaltmq.log.recovery import Damage, Found, scan
from basaltmq.store.families import Family
from basaltmq.store.keys import parts as key_parts
from basaltmq.store.keys import streams as stream_keys
from basaltmq.store.overlay import OverlayStore
from basaltmq.streams.adapter import Budget, Clock, IfAllOlder
from basaltmq.streams.engines.segment.engine import SHARDS_LOADED_MAX, SegmentEngine
from basaltmq.streams.engines.segment.index.rows import IS_AWAITED, IS_REWRITTEN, Entry
from basaltmq.streams.engines.segment.read_result import FramesRead
from basaltmq.streams.engines.segment.reader import LogLane
from basaltmq.streams.engines.segment.replay import Progress, Replay, note
from basaltmq.streams.engines.segment.state import SegmentShard
from basaltmq.streams.offsets import Offsets
from basaltmq.streams.shards import Recent, ShardMeta, Shards

CAUGHT_UP_FRAMES_MAX: Final = 2_000_000
"""Maximum frames indexed by a view, about 1 GB of memory with one key each. A writer flushes at a tenth of that."""


class ViewedLane(LogLane):
    """A lane without the parts that only a writer needs."""

    __slots__ = ("durable_position", "view")

    def __init__(self, number: int, view: LaneView) -> None:
        self.number = number
        self.log = view
        self.view = view
        self.lock = threading.RLock()
        self.durable_position = 0


class SegmentView(SegmentEngine):
    """The read side of a `StorageAdapter` over the segment files of another process."""

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
        """Use the lanes found under `path`. Call `catch_up` before reading."""
        self.view_lanes = [ViewedLane(number, lane) for number, lane in enumerate(lanes)]
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
        """Use the given lanes without recovery."""
        self.lanes = list(self.view_lanes)

    def applied(self, lane: int) -> int:
        """Return the position up to which a lane is indexed; 0 if it has no checkpoint."""
        return self.index.checkpoint(lane) or 0

    def catch_up(self, limits: Sequence[int], *, frames_max: int, is_store_current: bool) -> int:
        """Replay the frames that start below `limits`, by lane, into the index. Return how many there were.

        With `is_store_current` the store was loaded after the log, so unknown shards are deleted or not in a backup.
        """
        frames = 0
        raw = self._store.get(Family.SHARDS, stream_keys.SHARD_COUNTER_KEY)
        shard_next = 0 if raw is None else int.from_bytes(raw, "big")
        self._is_catching_up = True
        self._states = Recent(self.load_state, SHARDS_LOADED_MAX)
        try:
            for lane, limit in zip(self.view_lanes, limits, strict=True):
                start = self.applied(lane.number)
                if start >= limit:
                    continue
                damages: list[Damage] = []
                replay = Replay(self, lane.number, lane.log, start, 0, limit - start, None)
                for found in scan(lane.log, start, damages, end=limit):
                    if found.header.shard >= shard_next and not is_store_current:
                        raise StoreBehindError(f"shard {found.header.shard} was created after the store was loaded")
                    if found.header.kind == DROP:
                        self._pass(lane, found)
                    else:
                        replay.apply(found)
                    frames += 1
                    if frames > frames_max:
                        raise LimitExceededError(
                            f"the index of {self._path} is more than {frames_max} frames behind its log; open the "
                            "store for writing once to update the index"
                        )
                self.losses += replay.lost()
                applied = self.applied(lane.number)
                self.damages += [each for each in damages if each.position < applied]
            if not self._has_followed:
                self._follow_starts()
                self._has_followed = True
            self.index.settle()
        except StoreBehindError:
            # Earlier frames stay applied.
            self.index.settle()
            raise
        finally:
            self._is_catching_up = False
        return frames

    def _pass(self, lane: ViewedLane, found: Found) -> None:
        """Count a DROP frame without deleting the shard's rows: nothing reads them, and tombstones need memory."""
        header = found.header
        with self.index.lock:
            self.index.flush()
            segment = lane.log.segment_start(found.position)
            note(self.index, lane.number, segment, found.position, header, header.size_bytes)

    def _follow_starts(self) -> None:
        """Remove frames below start offsets from the index, where the index on disk may lag behind the shard rows."""
        for key, _ in list(
            self._store.scan(Family.SHARDS, *key_parts.prefix_range(stream_keys.trimmed_shard_key(0)[:1]))
        ):
            try:
                state = self.state_of(stream_keys.decode_trimmed_shard_key(key))
                config = self.config_of(state.number)
            except ShardNotFoundError:
                continue
            if state.lane < len(self.view_lanes):
                with self.index.lock:
                    self.index.flush()
                    self._follow_start(self.view_lanes[state.lane], state, config, state.start_offset)

    def show(self, durable: Sequence[int]) -> None:
        """Make frames up to these durable positions visible, by lane."""
        for lane, position in zip(self.view_lanes, durable, strict=True):
            lane.durable_position = position
        # States loaded during catch-up show hidden frames too, so drop them.
        self._states = Recent(self.load_state, SHARDS_LOADED_MAX)

    def close(self) -> None:
        """Do nothing: the owner closes the lanes."""

    def load_state(self, shard: int) -> SegmentShard:
        meta = self._own(shard)
        state = SegmentShard(meta, self.index.shard_row(shard))
        if state.lane >= len(self.view_lanes):
            # The index has no log, as in a backup of the store alone.
            state.records = state.skipped = state.deleted = state.size_bytes = 0
        elif not self._is_catching_up:
            self._hide(state, meta)
            if self.index.outcomes.is_used:
                state.undecided = self.index.outcomes.undecided(shard)
        return state

    def _hide(self, state: SegmentShard, meta: ShardMeta) -> None:
        """Remove hidden frames from the end of a shard's state."""
        lane = self.view_lanes[state.lane]
        is_synced = meta.config.durability is Durability.SYNCED
        prefix = stream_keys.frame_key(state.number, 0)[:9]
        last: list[Entry] = []
        hidden = 0
        for key, raw in self._store.scan(Family.STREAM_INDEX, *key_parts.prefix_range(prefix), reverse=True):
            entry = Entry.decode(stream_keys.decode_frame_key(key)[1], raw)
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

    def _is_copy(self, lane: ViewedLane, entry: Entry) -> bool:
        """Whether segment cleaning or compaction wrote the frame. Both copy only durable records."""
        if entry.position >= lane.log.end:
            # The index was flushed before the log was synced, and a power loss removed the frame.
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

    def _offset_by_timestamp(self, shard: int, timestamp_ms: int, otherwise: IfAllOlder) -> int:
        self._require_log(shard)
        return super()._offset_by_timestamp(shard, timestamp_ms, otherwise)

    def _require_log(self, shard: int) -> None:
        lane = self._own(shard).lane
        if lane >= len(self.view_lanes) and self._states.get(shard).frames:
            raise StorageError(
                f"the records of shard {shard} are missing: {self._path / f'{lane:04d}'} does not exist; "
                "copy the log beside the store, or open the original store"
            )
