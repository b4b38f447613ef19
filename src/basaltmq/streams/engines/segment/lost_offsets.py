"""Prevents the reuse of offsets that a log lost with its tail.

A tail is lost when a segment is removed, truncated or damaged, or when the power fails before `written` frames are
synced. The log then ends earlier. If a new record got a lost offset, a group that had committed beyond that offset
would skip the record. So the next offset stays above every offset that these sources still show:

    index rows          the end of each shard; used only if synced bytes are lost, because unsynced frames were never
                        confirmed as synced
    damaged frames      shard and offsets of a durable frame with an intact header
    ceilings            for shards without a frame behind lost bytes that the index on disk does not cover; not all
                        offsets below a ceiling need to have been assigned (`ceilings`)
    committed offsets   what groups have read

The floor is `next_offset_min` in the shard row. It is durable before the first append. A crash before that leaves the
ceilings, and the old durable end in ENDS.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Final

from basaltmq.errors import BasaltError
from basaltmq.log.recovery import Damage, Loss
from basaltmq.store.api import Store
from basaltmq.store.families import Family
from basaltmq.store.keys import parts as key_parts
from basaltmq.store.keys import streams as stream_keys
from basaltmq.streams.engines.segment.producers_row import drop_lost_batches
from basaltmq.streams.engines.segment.state import SegmentShard, indexed_next_of
from basaltmq.streams.offsets import Commit
from basaltmq.streams.shards import OFFSET_MAX, Shards

if TYPE_CHECKING:
    from basaltmq.streams.engines.segment.engine import SegmentEngine

COMMITTED_AHEAD_MAX: Final = 1 << 32
"""A committed offset further above the end of the log is ignored as a client error. Groups may commit any number."""


class LostOffsets:
    """Collects offsets beyond the end of the log while the segment engine starts."""

    def __init__(self, engine: SegmentEngine, store: Store, shards: Shards) -> None:
        self._engine = engine
        self._store = store
        self._shards = shards
        self._next: dict[int, int] = {}
        """The next offset after the last known one, by shard. About 100 bytes per entry, only after a loss."""

    def add_index(self) -> None:
        """Record the end of each shard in the index, if synced bytes are lost. Call before the index is wiped."""
        for key, raw in self._store.scan(Family.STREAM_INDEX, *key_parts.prefix_range(b"N")):
            self._add(stream_keys.decode_stream_tail_key(key), indexed_next_of(raw))

    def add_damages(self, damages: list[Damage], synced: int) -> None:
        """Record damaged frames with intact headers below the lane's synced position."""
        for damage in damages:
            if damage.certain and damage.position < synced and damage.shard is not None:
                self._add(damage.shard, (damage.last_offset or 0) + 1)

    def _add(self, shard: int, following: int) -> None:
        self._next[shard] = max(self._next.get(shard, 0), following)

    def raise_floors(self, hidden: Mapping[int, int]) -> list[Loss]:
        """Write and sync the floors of shards that end too early. Call after log replay.

        `hidden` has, by lane, the end of the lost bytes for which ceilings count. Return the lost offsets. Offsets that
        only a group shows are left out, because they may never have been synced.
        """
        lost = []
        raised = False
        for number, following in self._next.items():
            state = self._state(number)
            if state is not None and state.next_offset < following <= OFFSET_MAX:
                lost.append(Loss(number, state.next_offset, following - 1))
                self._raise(state, following)
                raised = True
        for number, following in self._engine.ceilings.found().items() if hidden else ():
            state = self._state(number)
            if state is not None and state.next_offset < following and self._is_hidden(state, hidden):
                lost.append(Loss(number, state.next_offset, following - 1, certain=False))
                self._raise(state, following)
                raised = True
        for number, following in self._committed():
            state = self._state(number)
            if state is not None and 0 < following - state.next_offset <= COMMITTED_AHEAD_MAX:
                self._raise(state, following)
                raised = True
        if raised:
            self._store.sync()
        return lost

    def _is_hidden(self, state: SegmentShard, hidden: Mapping[int, int]) -> bool:
        """Whether lost bytes may contain the shard's last frames, because no frame of it is behind them."""
        end = hidden.get(state.lane)
        if end is None:
            return False
        last = self._engine.index.entry_before(state.number, OFFSET_MAX)
        return last is None or last.position < end

    def _raise(self, state: SegmentShard, following: int) -> None:
        # A producer that resends a lost batch must not be treated as a duplicate.
        drop_lost_batches(self._store, state.number, state.next_offset)
        self._shards.update(state.number, next_offset_min=following)
        state.next_offset = state.high_watermark = state.ceiling = following

    def _state(self, number: int) -> SegmentShard | None:
        try:
            return self._engine.state_of(number)
        except BasaltError:
            # The shard was deleted or belongs to another engine.
            return None

    def _committed(self) -> Iterator[tuple[int, int]]:
        """Yield (shard, committed offset) of every group."""
        for key, raw in self._store.scan(Family.CONSUMER_OFFSETS):
            try:
                _, topic_id, partition = stream_keys.decode_consumer_offset_key(key)
                offset = Commit.decode(raw).offset
            except BasaltError:
                continue
            number = self._shards.number_of(topic_id, partition)
            if number is not None:
                yield number, offset
