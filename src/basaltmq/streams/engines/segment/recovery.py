"""Starting the segment engine: the index is brought up to the logs, taken back to them, or built again.

    log      ......................|==== lost ====
    index    ..........P...........|.............C       P synced when the index was written, C indexed

Without a crash the two end at the same place. After a crash of the process the index is behind, and what it lacks is
applied from C on. After a power loss it may be ahead: RocksDB brought rows to disk whose frames never got there. Then
the part after P is read, and the index taken back to where it is no longer whole; frames that lie intact behind a hole
are applied again. Only if the index is missing, or what was lost held more than appends, or synced bytes are gone, is
it built from the whole log. So a start costs what changed since the last sync, not what there is (P9).
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from basaltmq.errors import BasaltError
from basaltmq.log.committed import read_mark
from basaltmq.log.frame import COLUMNAR, DELETES, KAFKA, decode_deletes, frame_bytes
from basaltmq.log.lane import Lane, LaneOptions
from basaltmq.log.recovery import Damage, LostTail, intact, repair, scan
from basaltmq.store.batch import Batch
from basaltmq.streams.engines.segment.index.index import StreamIndex
from basaltmq.streams.engines.segment.index.rows import SegmentStats
from basaltmq.streams.engines.segment.replay import Progress, Replay

if TYPE_CHECKING:
    from basaltmq.streams.engines.segment.engine import SegmentEngine


def open_log(
    engine: SegmentEngine,
    path: Path,
    *,
    clock_ms: Callable[[], int],
    random_u32: Callable[[], int],
    options: LaneOptions | None,
) -> Lane:
    """Open a lane. One that ends before what its writer had made durable has lost its tail."""
    mark = read_mark(path)
    log = Lane.open(path, clock_ms=clock_ms, random_u32=random_u32, options=options)
    if mark is not None and log.end < mark.synced_position:
        engine.losses.append(LostTail(path, log.end, mark.synced_position))
    return log


def recover(engine: SegmentEngine, logs: list[Lane], quarantine: Path, progress: Progress | None) -> None:
    """Repair the logs and bring the index to what they say."""
    index = engine.index
    begins = [index.checkpoint(number) for number in range(len(logs))]
    starts = _starts(engine, logs)
    is_stale = starts is None
    if starts is None:
        index.wipe()
        starts = [log.start for log in logs]
    is_rolled_back = any(begin is not None and start < begin for begin, start in zip(begins, starts, strict=True))
    if not is_stale:
        # A rebuild leaves no notes of what is unsynced: without them, one that a power loss ends begins anew.
        _watch(index, logs)
    total = sum(log.end - start for log, start in zip(logs, starts, strict=True))
    done_before = 0
    for number, (log, start) in enumerate(zip(logs, starts, strict=True)):
        replay = Replay(engine, number, log, start, done_before, total, progress)
        repaired = repair(log, start, quarantine, replay.apply, replay.take)
        done_before += log.end - start
        engine.damages += repaired.damages
        engine.losses += replay.lost()
        engine.quarantined += repaired.quarantined
        if repaired.cut is not None:
            engine.quarantined.append(repaired.cut)
        log.settle()
        if not is_stale:
            _restore_stats(index, number, log, start)
    _watch(index, logs)
    if is_stale or is_rolled_back:
        # The index before must not come back after another crash: its positions will mean other frames by then.
        index.harden()
    else:
        index.settle()
    if progress is not None:
        progress(total, total)


def _watch(index: StreamIndex, logs: list[Lane]) -> None:
    for number, log in enumerate(logs):
        index.unsynced.watch(number, log)


def _starts(engine: SegmentEngine, logs: list[Lane]) -> list[int] | None:
    """Where to apply each log from, the index being taken back to there; None if it has to be built again."""
    index = engine.index
    starts = []
    for number, log in enumerate(logs):
        begin = index.checkpoint(number)
        if begin is None:
            if log.end > log.start:
                return None
            starts.append(log.start)
            continue
        reached = _intact_until(engine, log, index.unsynced.synced(number), begin)
        if reached is None:
            return None
        if reached < begin and not _roll_back(engine, number, log, reached):
            return None
        if index.exceeds(number, log):
            return None
        starts.append(min(reached, begin))
    return starts


def _intact_until(engine: SegmentEngine, log: Lane, synced: int, end: int) -> int | None:
    """How far the log is whole from what was synced up to `end`; None if it does not even reach that far."""
    damages: list[Damage] = []
    reached = max(synced, log.start)
    if reached >= end:
        return end if end <= log.end else None
    if reached > log.end:
        return None

    def take(raw: bytes, at: int, stop: int, position: int) -> int:
        nonlocal reached
        until = at
        for begin, fields in intact(log.seed, raw, at, stop, engine.cut(raw)):
            until = begin + frame_bytes(fields[3])
        if until > at and not damages:
            reached = position + until - at
        return until - at

    for found in scan(log, reached, damages, end=end, take=take):
        if not damages:
            reached = found.position + found.header.size_bytes
    return reached


def _roll_back(engine: SegmentEngine, lane: int, log: Lane, position: int) -> bool:
    """The log was lost from a position on: know only what lies before. False if that cannot be told any more."""
    index = engine.index
    with index.lock:
        if index.unsynced.changed(lane) > position:
            return False
        batch = Batch()
        for number in index.unsynced.take_back(batch, lane, position):
            try:
                shard = engine.load_state(number)
            except BasaltError:
                return False
            index.take_back(batch, shard, position)
        start = max((segment.start for segment in log.segments() if segment.start <= position), default=position)
        index.return_to(lane, position, batch, start, _summed(index, log, start, position))
    return True


def _restore_stats(index: StreamIndex, lane: int, log: Lane, position: int) -> None:
    """Segments the index has forgotten were about to be deleted; count them again, so that cleaning finds them."""
    for segment in log.segments():
        if segment.end <= position and segment.size_bytes and index.stats(lane, segment.start) is None:
            index.count(lane, segment.start, _summed(index, log, segment.start, segment.end))


def _summed(index: StreamIndex, log: Lane, position: int, end: int) -> SegmentStats:
    """What the frames of a part of the log add up to, the index being up to date with them."""
    stats = SegmentStats()
    for at, header, body in scan(log, position, end=end):
        size = header.size_bytes
        if header.kind in (COLUMNAR, KAFKA):
            entry = index.entry(header.shard, header.last_offset)
            stats.garbage_bytes += 0 if entry is not None and entry.position == at else size
            stats.add(size, header.timestamp_min_ms, header.timestamp_max_ms, header.store_time_ms)
            continue
        stats.add(size, header.store_time_ms, header.store_time_ms, header.store_time_ms)
        stats.garbage_bytes += size
        if header.kind == DELETES:
            offsets = decode_deletes(body)
            stats.garbage_bytes -= size // len(offsets) * len(index.deletes_of(header.shard, offsets, at))
    return stats


def lanes_present(path: Path) -> int:
    """Lanes found on disk: fewer than asked for is fine, more must all be opened."""
    if not path.is_dir():
        return 0
    numbers = [int(entry.name) for entry in path.iterdir() if entry.is_dir() and entry.name.isdigit()]
    return max(numbers) + 1 if numbers else 0
