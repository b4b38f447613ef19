"""Reads segments of the log into index rows: each segment separately, and rewritten shards from all of their frames.

Most shards are only appended to. Then the index rows of a frame depend only on that frame, and the row of the shard is
a sum. `scan_segment` produces such rows from one segment, with the code of an engine start (`Replay`), on shards that
are empty before. `index/tables.py` combines the parts of a shard.

Some frames affect others: they delete records, or are copies made by cleaning or compaction. Their shard is called
rewritten. `scan_shards` applies all frames of such shards in order to an index in a temporary store. The rows of
`scan_segment` for these shards are ignored. Rows of a shard never depend on another shard, so both together equal one
pass over the whole log, key by key (P6).

Frames of deleted shards are garbage. Garbage of known shards is counted by shard, because the counts of rewritten
shards come from `scan_shards`.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from contextlib import closing
from operator import itemgetter
from pathlib import Path
from struct import Struct as Layout
from typing import Final

import msgspec

from basaltmq.errors import CorruptionError, ShardNotFoundError
from basaltmq.log.frame import (
    COLUMNAR,
    DELETES,
    HEADER,
    HEADER_BYTES,
    KAFKA,
    MAGIC,
    RELOCATED,
    REWRITTEN,
    decode_header,
)
from basaltmq.log.lane import Lane
from basaltmq.log.lane_view import LaneView
from basaltmq.log.recovery import Damage, Found, Loss, scan
from basaltmq.log.run import Cut
from basaltmq.pipeline.index.runs import Run, RunWriter, SortedRows
from basaltmq.store.api import Reader
from basaltmq.store.batch import Batch
from basaltmq.store.families import Family
from basaltmq.store.keys import parts as key_parts
from basaltmq.store.keys import streams as stream_keys
from basaltmq.store.memory import MemoryStore
from basaltmq.store.open import open_store
from basaltmq.store.scratch import Scratch
from basaltmq.streams.engines.segment.index.index import StreamIndex
from basaltmq.streams.engines.segment.index.rows import FAMILY
from basaltmq.streams.engines.segment.read_result import find_cutter
from basaltmq.streams.engines.segment.replay import Replay, note
from basaltmq.streams.engines.segment.state import SegmentShard
from basaltmq.streams.shards import Engine, Recent, ShardConfig, ShardMeta

STATES_MAX: Final = 16_384
"""Shards of a segment in memory, about 1 KB each."""

OWN: Final = b"OTKGE"
"""Kinds of index rows of an append-only shard."""

_OWN: Final = frozenset(OWN)
_KIND: Final = itemgetter(0)

NOWHERE: Final = -1
"""Next offset of a shard without known rows."""


class SegmentAt(msgspec.Struct, frozen=True):
    lane: int
    path: str
    """Directory of the lane."""
    start: int
    end: int


class Scanned(msgspec.Struct, frozen=True):
    """Result of a segment scan."""

    at: SegmentAt
    runs: list[Run]
    sums: bytes | None
    """Row of the segment, without garbage of known shards. None without frames."""
    intact_end: int
    """End of its last intact frame."""
    rewritten: list[int]
    damages: list[str]
    losses: list[str]
    """Offsets between two frames of the segment that no frame has."""
    has_torn_end: bool


class Part(msgspec.Struct, frozen=True):
    """The part of a shard in a segment, stored as the value of its row in a run.

    | lane u32 | segment start u64 | first base offset i64 | garbage u64 | the shard's row, if it has live frames |
    """

    lane: int
    segment: int
    first: int
    garbage: int
    row: bytes

    def encode(self) -> bytes:
        return _PART.pack(self.lane, self.segment, self.first, self.garbage) + self.row

    @classmethod
    def decode(cls, raw: bytes) -> Part:
        lane, segment, first, garbage = _PART.unpack_from(raw)
        return cls(lane, segment, first, garbage, raw[_PART.size :])


_PART: Final = Layout(">IQqQ")


class ShardRows:
    """The rows of shards at the start of the job."""

    def __init__(self, runs: Sequence[Run]) -> None:
        self._rows = SortedRows(runs)

    @classmethod
    def write(cls, store: Reader, folder: Path) -> list[Run]:
        """Write the rows of all shards to a run. Opening a view in each task would take longer than reading it."""
        writer = RunWriter(folder, is_final=True)
        for key, value in store.scan(Family.SHARDS, *key_parts.prefix_range(stream_keys.shard_key(0)[:1])):
            writer.add(key, value)
            writer.write_if_full()
        return writer.finish()

    def meta(self, shard: int) -> ShardMeta:
        raw = self._rows.get(stream_keys.shard_key(shard))
        meta = None if raw is None else ShardMeta.decode(shard, raw)
        if meta is None or meta.engine is not Engine.SEGMENT:
            raise ShardNotFoundError(f"shard {shard} does not use the segment engine")
        return meta


class _Sink(MemoryStore):
    """Store that receives the writes of an index: rows of frames go to a run, sums and shards stay in memory."""

    def __init__(self, writer: RunWriter) -> None:
        super().__init__()
        self._writer = writer
        self.shards: dict[int, bytes] = {}
        self.sums: dict[bytes, bytes] = {}

    def get(self, family: Family, key: bytes) -> bytes | None:
        return self.shards.get(stream_keys.decode_stream_tail_key(key)) if key[:1] == b"N" else None

    def write(self, batch: Batch, *, wal: bool = True, wait_ms: int | None = None) -> None:
        ops, columns = batch.parts()
        for part in columns:
            self._take(part.keys, part.values or ())
        self._take([op[2] for op in ops], [op[3] for op in ops])
        self._writer.write_if_full()

    def _take(self, row_keys: Sequence[bytes], values: Sequence[bytes]) -> None:
        if _OWN.issuperset(map(_KIND, row_keys)):
            self._writer.keys += row_keys
            self._writer.values += values
            return
        for key, value in zip(row_keys, values, strict=True):
            if key[:1] == b"N":
                self.shards[stream_keys.decode_stream_tail_key(key)] = value
            elif key[:1] == b"S":
                self.sums[key] = value
            elif key[0] in OWN:
                self._writer.add(key, value)


class _EmptyShards:
    """Context of `Replay` for one segment: shards without earlier rows."""

    def __init__(self, index: StreamIndex, rows: ShardRows) -> None:
        self.index = index
        self._rows = rows
        self._states: Recent[SegmentShard] = Recent(self._load, STATES_MAX)
        self._cutter = find_cutter()

    def cut(self, raw: bytes) -> Cut | None:
        return None if self._cutter is None else self._cutter(raw)

    def state_of(self, shard: int) -> SegmentShard:
        return self._states.get(shard)

    def config_of(self, shard: int) -> ShardConfig:
        return self._states.get(shard).config

    def _load(self, shard: int) -> SegmentShard:
        row = self.index.shard_row(shard)
        state = SegmentShard(self._rows.meta(shard), row)
        state.next_offset = state.high_watermark = NOWHERE if row is None else state.indexed_next
        return state


class _SegmentReplay(Replay):
    """Applies frames that affect only themselves, and records which shards have other frames."""

    def __init__(self, on: _EmptyShards, lane: int, log: Lane, start: int) -> None:
        super().__init__(on, lane, log, start, 0, 0, None)
        self.rewritten: set[int] = set()
        self.garbage: Counter[int] = Counter()

    def apply(self, found: Found) -> None:
        position, header, _ = found
        state, _ = self._known.get(header.shard) or self._meet(header.shard)
        affects_others = header.kind == DELETES or bool(header.flags & (RELOCATED | REWRITTEN))
        holds_records = header.kind in (COLUMNAR, KAFKA)
        if state is not None and not affects_others and holds_records and header.last_offset >= state.start_offset:
            super().apply(found)
            return
        if state is not None and affects_others:
            self.rewritten.add(header.shard)
        elif state is not None:
            self.garbage[header.shard] += header.size_bytes
        with self._index.lock:
            lost = header.size_bytes if state is None else 0
            note(self._index, self._lane, self._segment_at(position).start, position, header, lost)

    def gaps(self) -> tuple[dict[int, int], list[Loss]]:
        """Return (first offset of each shard, offsets between two frames that no frame has)."""
        firsts: dict[int, int] = {}
        lost = []
        for loss in self._gaps:
            if loss.first_offset == NOWHERE:
                firsts.setdefault(loss.shard, loss.last_offset + 1)
            else:
                lost.append(loss)
        return firsts, lost


def scan_segment(shards: ShardRows, at: SegmentAt, folder: str) -> Scanned:
    """Read one segment, and write its runs to `folder`."""
    log = LaneView(Path(at.path))
    writer = RunWriter(Path(folder))
    sink = _Sink(writer)
    index = StreamIndex(sink)
    damages: list[Damage] = []
    intact_end = at.start
    with closing(log):
        replay = _SegmentReplay(_EmptyShards(index, shards), at.lane, log, at.start)

        def take(raw: bytes, begin: int, stop: int, position: int) -> int:
            nonlocal intact_end
            taken = replay.take(raw, begin, stop, position)
            intact_end = max(intact_end, position + taken)
            return taken

        for found in scan(log, at.start, damages, end=at.end, take=take):
            intact_end = found.position + found.header.size_bytes
            replay.apply(found)
        index.settle()
        _make_durable(log, at)
    firsts, lost = replay.gaps()
    for shard in {*sink.shards, *replay.garbage}:
        part = Part(at.lane, at.start, firsts.get(shard, NOWHERE), replay.garbage[shard], sink.shards.get(shard, b""))
        writer.add(stream_keys.stream_tail_key(shard), part.encode())
    return Scanned(
        at,
        writer.finish(),
        sink.sums.get(stream_keys.log_segment_key(at.lane, at.start)),
        intact_end,
        sorted(replay.rewritten),
        list(map(str, damages)),
        list(map(str, lost)),
        bool(damages) and damages[-1].position >= intact_end,
    )


def _make_durable(log: Lane, at: SegmentAt) -> None:
    """fsync the segment: the index declares it durable, but a crashed process may have left it in the page cache."""
    fd = os.open(log.segment_at(at.start).path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fdatasync(fd)
    finally:
        os.close(fd)


class RewrittenShards(msgspec.Struct, frozen=True):
    """Result of a scan of rewritten shards."""

    runs: list[Run]
    garbage: dict[str, int]
    """Garbage in bytes by hex key of the segment's row."""
    losses: list[str]


class _WholeShards:
    """Context of `Replay` for all frames of some shards."""

    def __init__(self, index: StreamIndex, rows: ShardRows, own: Collection[int]) -> None:
        self.index = index
        self._rows = rows
        self._own = own
        self._states: Recent[SegmentShard] = Recent(self._load, STATES_MAX)
        self._cutter = find_cutter()

    def cut(self, raw: bytes) -> Cut | None:
        return None if self._cutter is None else self._cutter(raw)

    def state_of(self, shard: int) -> SegmentShard:
        if shard not in self._own:
            raise ShardNotFoundError(f"shard {shard} belongs to another task")
        return self._states.get(shard)

    def config_of(self, shard: int) -> ShardConfig:
        return self._states.get(shard).config

    def _load(self, shard: int) -> SegmentShard:
        return SegmentShard(self._rows.meta(shard), self.index.shard_row(shard))


def scan_shards(rows: ShardRows, lanes: list[str], shards: Collection[int], folder: str) -> RewrittenShards:
    """Apply every frame of some shards in order, and write the runs to `folder`."""
    own = frozenset(shards)
    writer = RunWriter(Path(folder), is_final=True)
    garbage: dict[str, int] = {}
    losses: list[str] = []
    with Scratch("index") as scratch, closing(open_store(scratch.path / "store")) as kept:
        index = StreamIndex(kept)
        whole = _WholeShards(index, rows, own)
        for number, path in enumerate(lanes):
            with closing(LaneView(Path(path))) as log:
                if not log.segments():
                    continue
                replay = Replay(whole, number, log, log.start, 0, 0, None)
                for found in _frames_of(log, replay, own):
                    replay.apply(found)
                losses += map(str, replay.lost())
        index.settle()
        for key, value in kept.scan(FAMILY):
            if key[:1] == b"S":
                stats = index.stats(*stream_keys.decode_log_segment_key(key))
                garbage[key.hex()] = 0 if stats is None else stats.garbage_bytes
            elif key[:1] not in b"CPUX":
                writer.add(key, value)
                writer.write_if_full()
    return RewrittenShards(writer.finish(), garbage, losses)


def _frames_of(log: LaneView, replay: Replay, own: Collection[int]) -> Iterator[Found]:
    """Yield the frames of some shards that are not applied in bulk. Frames of other shards are skipped by their
    headers."""

    def take(raw: bytes, at: int, stop: int, position: int) -> int:
        begin = at
        while at < stop and at + HEADER_BYTES <= len(raw):
            fields = HEADER.unpack_from(raw, at)
            length = fields[3]
            end = at + HEADER_BYTES + length + (-length & 7)
            if fields[0] != MAGIC or fields[4] in own or end > len(raw):
                break
            try:
                decode_header(log.seed, raw, at)
            except CorruptionError:
                break
            at = end
        return at - begin if at > begin else replay.take(raw, at, stop, position)

    for found in scan(log, log.start, take=take):
        if found.header.shard in own:
            yield found
