"""Log replay: applies frames to the index at start, from the checkpoint or from the beginning.

Each frame changes the index as it did when it was written; `index` explains why the result is the same. Frames of
deleted shards, and frames below their shard's start offset, only count as garbage.

Consecutive plain frames, which are most of a log, are applied in bulk. Cost besides reading: 8 us per such frame (2 us
for checksums, 3 us in RocksDB), and 20 us for any other frame of plain records.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Final, Protocol

import google_crc32c

from basaltmq.errors import InvalidArgumentError, LimitExceededError, ShardNotFoundError
from basaltmq.log.batches.columnar import ColumnBatch
from basaltmq.log.frame import (
    AWAITED,
    COLUMNAR,
    DELETES,
    DROP,
    HEADER_BYTES,
    KAFKA,
    MAGIC,
    PLAIN_HEADER,
    RELOCATED,
    REWRITTEN,
    TRIM,
    Header,
    check_body,
    decode_deletes,
    decode_header,
    records_of,
)
from basaltmq.log.lane import Lane
from basaltmq.log.recovery import Found, Loss
from basaltmq.log.run import Cut
from basaltmq.log.segment import Segment
from basaltmq.store.keys import streams as stream_keys
from basaltmq.streams.engines.segment.index.index import StreamIndex
from basaltmq.streams.engines.segment.index.plain import PlainRows, key_hashes
from basaltmq.streams.engines.segment.index.rows import (
    HAS_KEYS,
    NO_FLAGS,
    NO_TERMS,
    Entry,
    IndexTerms,
    entry_of,
    first_expiry,
    kafka_terms,
)
from basaltmq.streams.engines.segment.state import SegmentShard
from basaltmq.streams.shards import ShardConfig

Progress = Callable[[int, int], None]
"""Called with (bytes done, total bytes) every PROGRESS_BYTES and at the end."""

_log: Final = logging.getLogger(__name__)


def note(index: StreamIndex, lane: int, segment: int, position: int, header: Header, garbage: int) -> None:
    """Add a frame to the index by its header."""
    least_ms, largest_ms, stored_ms = header.timestamp_min_ms, header.timestamp_max_ms, header.store_time_ms
    if header.kind not in (COLUMNAR, KAFKA):
        # Frames without records have only their store time.
        least_ms = largest_ms = stored_ms
    index.note(lane, segment, position, header.size_bytes, least_ms, largest_ms, stored_ms, garbage)


KNOWN_MAX: Final = 10_000
"""Shard states cached during replay."""

PROGRESS_BYTES: Final = 64 << 20
"""Bytes between progress calls."""

ONLY_VALUES: Final = (3).to_bytes(2, "little")
"""The buffer count of a body that has only values and times."""

_crc32c = google_crc32c.value
_extend = google_crc32c.extend


class Indexed(Protocol):
    """The target of a replay: an engine or a part of one."""

    @property
    def index(self) -> StreamIndex: ...

    def cut(self, raw: bytes) -> Cut | None: ...

    def state_of(self, shard: int) -> SegmentShard: ...

    def config_of(self, shard: int) -> ShardConfig: ...


class Replay:
    """Applies the frames of one lane to the index, as they were applied when they were written."""

    def __init__(
        self,
        engine: Indexed,
        lane: int,
        log: Lane,
        start: int,
        done_before: int,
        total: int,
        progress: Progress | None,
    ) -> None:
        self._engine = engine
        self._index = engine.index
        self._lane = lane
        self._log = log
        self._start = start
        self._done_before = done_before
        self._total = total
        self._progress = progress
        self._reported = 0
        self._segment = log.segments()[0]
        self._gaps: list[Loss] = []
        self._known: dict[int, tuple[SegmentShard | None, ShardConfig]] = {}
        self._raw = b""
        self._cut: Cut | None = None

    def apply(self, found: Found) -> None:
        position, header, body = found
        segment = self._segment_at(position)
        state, config = self._known.get(header.shard) or self._meet(header.shard)
        size = header.size_bytes
        index = self._index
        holds_records = header.kind in (COLUMNAR, KAFKA)
        is_live = holds_records and state is not None and header.last_offset >= state.start_offset
        is_counted = header.kind == DELETES and state is not None
        with index.lock:
            is_late = is_live and state is not None and self._is_late(state, header)
            if holds_records and not header.flags and not is_late:
                index.make_room()
            else:
                index.flush()
            is_live = is_live and not (is_late and self._is_known(header))
            garbage = 0 if is_live or is_counted else size
            note(index, self._lane, segment.start, position, header, garbage)
            if is_live and state is not None:
                self._records(state, config, header, position, body)
            elif not holds_records:
                self._event(state, header, position, body)
        self._report(position + size)

    @staticmethod
    def _is_late(state: SegmentShard, header: Header) -> bool:
        """Whether a frame precedes the shard's last one, although it is no copy. Two segments were exchanged, or a
        segment is there twice."""
        return not header.flags & RELOCATED and header.base_offset < state.indexed_next

    def _is_known(self, header: Header) -> bool:
        """Whether the index has a frame with some of these offsets."""
        entry = next(self._index.entries(header.shard, header.base_offset), None)
        return entry is not None and entry.base_offset <= header.last_offset

    def _segment_at(self, position: int) -> Segment:
        segment = self._segment
        if not segment.start <= position < segment.end:
            segment = self._segment = self._log.segment_at(position)
        return segment

    def _report(self, position: int) -> None:
        done = self._done_before + position - self._start
        if self._progress is not None and done - self._reported >= PROGRESS_BYTES:
            self._reported = done
            self._progress(done, self._total)

    def take(self, raw: bytes, at: int, stop: int, position: int) -> int:
        """Apply plain frames that follow their shard's last frame, up to the first other one. A `recovery.Take`."""
        known = self._known
        rows = PlainRows()
        frames, positions, sizes, flags, shards = rows.frames, rows.positions, rows.sizes, rows.flags, rows.shards
        seed = self._log.seed
        unpack = PLAIN_HEADER.unpack_from
        if raw is not self._raw:
            self._raw = raw
            self._cut = self._engine.cut(raw)
        cut = self._cut
        begun = at
        shift = position - at
        size = len(raw)
        while at < stop:
            body = at + HEADER_BYTES
            if body > size:
                break
            fields = unpack(raw, at)
            magic, header_crc, body_crc, length, number, base, records, last_delta, _, largest_ms, _, rest = fields
            end = body + length + (-length & 7)
            if rest != COLUMNAR or last_delta != records - 1 or end > size or magic != MAGIC:
                break
            if header_crc != _extend(seed, raw[at + 8 : body]):
                break
            state, config = known.get(number) or self._meet(number)
            if state is None or base != state.next_offset or base < state.start_offset:
                break
            if body_crc != _crc32c(raw[body : body + length] if cut is None else cut(body, length)):
                break
            last = base + last_delta
            has = NO_FLAGS
            if raw[body + 4 : body + 6] != ONLY_VALUES:
                hashes = key_hashes(raw, body, length, records, is_wanted=config.index_keys)
                if hashes is None:
                    break
                if hashes:
                    has = HAS_KEYS
                    rows.bare_keys += stream_keys.stream_index_keys(b"K", number, hashes, last)
            if largest_ms > state.timestamp_max_ms and config.index_times:
                state.timestamp_max_ms = largest_ms
                rows.bare_keys.append(stream_keys.stream_time_key(number, largest_ms, last))
            size_bytes = end - at
            frames.append(fields)
            positions.append(at + shift)
            sizes.append(size_bytes)
            flags.append(has)
            # Same as `StreamIndex.add` does to a shard. A call per frame would cost 10 %.
            state.indexed_next = state.next_offset = state.high_watermark = last + 1
            state.frames += 1
            state.records += records
            state.size_bytes += size_bytes
            shards[number] = state
            at = end
        if frames:
            index = self._index
            with index.lock:
                index.absorb(self._lane, self._segment_at(position).start, at + shift, rows)
                index.make_room()
            self._report(at + shift)
        return at - begun

    def lost(self) -> list[Loss]:
        """Return the offsets without a frame. Call after all frames, because copies are out of order."""
        self._index.flush()
        found = []
        for loss in self._gaps:
            entry = next(self._index.entries(loss.shard, loss.first_offset), None)
            if entry is None or entry.base_offset > loss.first_offset:
                found.append(loss)
        return found

    def _meet(self, shard: int) -> tuple[SegmentShard | None, ShardConfig]:
        if len(self._known) >= KNOWN_MAX:
            self._known.clear()
        state = self._state(shard)
        known = self._known[shard] = (state, ShardConfig() if state is None else self._engine.config_of(shard))
        return known

    def _records(self, state: SegmentShard, config: ShardConfig, header: Header, position: int, body: bytes) -> None:
        base, last = header.base_offset, header.last_offset
        is_edge = base < state.start_offset
        is_late = self._is_late(state, header)
        if header.kind == KAFKA:
            # Decoded only with a key index, as at the append.
            batch = self._indexed(header, body, config) if config.index_keys else None
            terms = kafka_terms(body, batch, config)
        else:
            has_terms = body[4:6] != ONLY_VALUES
            batch = (
                records_of(header, body, config.record_bytes_max)
                if has_terms or header.flags & ~AWAITED or is_edge or is_late
                else None
            )
            terms = IndexTerms(batch, config) if has_terms else NO_TERMS
        entry = entry_of(header, position, terms, first_expiry(batch, base, state.start_offset))
        if header.flags & REWRITTEN:
            self._index.replace(
                state, entry, batch, config, lambda old: self._load(state, old), self._log.segment_start
            )
        else:
            if is_edge and entry.is_dense:
                state.skipped = min(entry.records, state.start_offset - base)
            elif is_edge and batch is not None:
                state.skipped = batch.count_below(state.start_offset - base)
            if header.flags & RELOCATED or is_late:
                self._index.move(state, entry, batch, config, self._log.segment_start)
            else:
                if base > state.next_offset:
                    self._gaps.append(Loss(state.number, state.next_offset, base - 1))
                self._index.add(state, entry, terms, config)
        if last >= state.next_offset:
            state.next_offset = state.high_watermark = last + 1

    @staticmethod
    def _indexed(header: Header, body: bytes, config: ShardConfig) -> ColumnBatch | None:
        """Return the records of a Kafka batch for the key index, or None if one exceeds the current size limit."""
        try:
            return records_of(header, body, config.record_bytes_max)
        except LimitExceededError as error:
            _log.warning(
                "shard %d, offsets %d to %d: keys are not indexed: %s",
                header.shard, header.base_offset, header.last_offset, error,
            )  # fmt: skip
            return None

    def _event(self, state: SegmentShard | None, header: Header, position: int, body: bytes) -> None:
        if header.kind == DROP:
            self._index.drop(header.shard, self._lane, self._log.segment_start)
        elif state is None:
            return
        elif header.kind == DELETES:
            self._index.delete(
                state,
                decode_deletes(body),
                position,
                header.size_bytes,
                lambda entry: self._load(state, entry),
                self._log.segment_start,
            )
        elif header.kind == TRIM:
            config = self._engine.config_of(header.shard)
            self._index.trim(
                state, state.start_offset, config, lambda entry: self._load(state, entry), self._log.segment_start
            )

    def _state(self, shard: int) -> SegmentShard | None:
        try:
            return self._engine.state_of(shard)
        except (ShardNotFoundError, InvalidArgumentError):
            return None

    def _load(self, state: SegmentShard, entry: Entry) -> ColumnBatch | None:
        raw = self._log.read(entry.position, entry.size_bytes)
        header = decode_header(self._log.seed, raw)
        body = raw[HEADER_BYTES : HEADER_BYTES + header.body_bytes]
        check_body(header, body)
        return records_of(header, body, state.config.record_bytes_max)
