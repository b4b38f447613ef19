"""Start-up recovery of the segment engine: replays, rolls back or rebuilds the index to match the logs.

    log      ......................|==== lost ====
    index    ..........P...........|.............C       P synced when the index was written, C indexed

Without a crash, both end at the same position. After a process crash the index is behind, and recovery replays the log
from C on. After a power loss the index may be ahead, because RocksDB flushed rows of frames that never reached the
disk. Then recovery reads the log from P on and rolls the index back to the end of the intact part. It replays intact
frames behind a gap. It rebuilds the index from the whole log only if the index is missing, if the lost part contained
more than appends, or if synced bytes are lost. So the cost of a start follows the changes since the last sync, not the
total size (P9).
"""

from __future__ import annotations

import logging
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Final

from basaltmq.errors import BasaltError, CorruptionError
from basaltmq.log.frame import COLUMNAR, DELETES, HEADER_BYTES, KAFKA, decode_deletes, decode_header, frame_bytes
from basaltmq.log.lane import Lane
from basaltmq.log.recovery import Damage, LostBytes, LostTail, intact, repair, scan
from basaltmq.store.api import Reader
from basaltmq.store.batch import Batch
from basaltmq.store.directory import make_directory, write_durably
from basaltmq.streams.engines.segment.index.index import StreamIndex
from basaltmq.streams.engines.segment.index.rows import SegmentStats
from basaltmq.streams.engines.segment.lost_offsets import LostOffsets
from basaltmq.streams.engines.segment.missing_bytes import missing_bytes
from basaltmq.streams.engines.segment.replay import Progress, Replay
from basaltmq.streams.engines.segment.state import indexed_next_of

if TYPE_CHECKING:
    from basaltmq.streams.engines.segment.engine import SegmentEngine


LOG_LOSSES: Final = "log-losses.txt"

LOG_LOSSES_BYTES_MAX: Final = 1 << 20
"""Nothing is added beyond this size: a log with so much damage needs a restore, not a longer list."""


_log: Final = logging.getLogger(__name__)


def recover(
    engine: SegmentEngine,
    store: Reader,
    logs: list[Lane],
    quarantine: Path,
    progress: Progress | None,
    lost: LostOffsets,
) -> list[Lane]:
    """Repair opened logs and bring the index in line with them. Return the logs."""
    index = engine.index
    # COMMITTED may be lost with the segments. ENDS and the index also have the durable position.
    durable = [max(log.durable_before_open, index.unsynced.synced(number)) for number, log in enumerate(logs)]
    short: list[LostTail | LostBytes] = [
        LostTail(log.path, log.end, position) for log, position in zip(logs, durable, strict=True) if log.end < position
    ]
    short += [
        LostBytes(log.path, *each)
        for number, log in enumerate(logs)
        for each in missing_bytes(store, number, log.segments(), durable[number])
    ]
    engine.losses += short
    is_short = bool(short)
    begins = [index.checkpoint(number) for number in range(len(logs))]
    hidden = _hidden(logs, begins, short)
    starts = _starts(engine, logs, lost)
    is_stale = starts is None
    if starts is None:
        if is_short:
            lost.add_index()
        index.wipe()
        starts = [log.start for log in logs]
    is_rolled_back = any(begin is not None and start < begin for begin, start in zip(begins, starts, strict=True))
    if not is_stale:
        # A rebuild writes no unsynced notes. Without notes, a rebuild that a power loss interrupts starts again.
        _watch(index, logs)
    total = sum(log.end - start for log, start in zip(logs, starts, strict=True))
    done_before = 0
    ends: dict[int, int] = {}
    for number, (log, start) in enumerate(zip(logs, starts, strict=True)):
        replay = Replay(engine, number, log, start, done_before, total, progress)
        repaired = repair(log, start, quarantine, replay.apply, replay.take)
        done_before += log.end - start
        engine.damages += repaired.damages
        lost.add_damages(repaired.damages, durable[number])
        for damage in repaired.damages:
            if (begins[number] or 0) <= damage.position < durable[number] and not damage.certain:
                hidden[number] = max(hidden.get(number, 0), damage.position + damage.end - damage.begin)
        is_short = is_short or repaired.cut is not None or any(damage.certain for damage in repaired.damages)
        if repaired.damages or _has_gap(log, start):
            ends[number] = log.end
        engine.losses += replay.lost()
        # A damaged frame that was the last of its shard leaves no offset gap, so report damages separately.
        engine.faults += [str(damage) for damage in repaired.damages if damage.position < durable[number]]
        engine.quarantined += repaired.quarantined
        if repaired.cut is not None:
            engine.quarantined.append(repaired.cut)
        log.settle()
        if not is_stale:
            _restore_stats(index, number, log, start)
    _watch(index, logs)
    if is_short or hidden or is_rolled_back or (is_stale and any(begin is not None for begin in begins)):
        engine.losses += lost.raise_floors(hidden)
    engine.faults += [str(loss) for loss in engine.losses]
    _keep(engine.faults, quarantine)
    if is_stale or is_rolled_back or ends:
        # The old index must not return after another crash, because its positions will then point to other frames.
        # A power loss may tear a segment that was never synced. If the checkpoint on disk stays below that gap, the
        # next start takes the gap for a loss of synced bytes.
        index.flush_to_disk(ends)
    else:
        index.settle()
    if progress is not None:
        progress(total, total)
    return logs


def _keep(faults: list[str], quarantine: Path) -> None:
    """Record the losses. The next open finds a shorter but intact log."""
    if not faults:
        return
    path = quarantine / LOG_LOSSES
    try:
        before = path.read_text() if path.exists() else ""
        known = set(before.splitlines())
        added = [fault for fault in faults if fault not in known]
        if added and len(before) < LOG_LOSSES_BYTES_MAX:
            make_directory(quarantine)
            write_durably(path, (before + "".join(f"{fault}\n" for fault in added)).encode())
    except OSError as error:
        # The caller reports the faults too. The log opens without the list.
        _log.error("%s could not be written: %s", path, error)


def _has_gap(log: Lane, start: int) -> bool:
    """Whether bytes are missing between the segments that end above `start`."""
    return any(each.end < following.start for each, following in pairwise(log.segments()) if following.start > start)


def _hidden(logs: list[Lane], begins: list[int | None], short: list[LostTail | LostBytes]) -> dict[int, int]:
    """Return, by lane, the end of the lost bytes that the index on disk does not cover. `begins`: the checkpoints."""
    hidden: dict[int, int] = {}
    for number, (log, begin) in enumerate(zip(logs, begins, strict=True)):
        for loss in short:
            end = loss.synced_position if isinstance(loss, LostTail) else loss.end
            if loss.lane == log.path and (begin is None or begin < end):
                hidden[number] = max(hidden.get(number, 0), end)
    return hidden


def _watch(index: StreamIndex, logs: list[Lane]) -> None:
    for number, log in enumerate(logs):
        index.unsynced.watch(number, log)


def _starts(engine: SegmentEngine, logs: list[Lane], lost: LostOffsets) -> list[int] | None:
    """Roll the index back as needed. Return the replay start of each log, or None if the index must be rebuilt."""
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
        if reached < min(begin, log.durable_before_open):
            lost.add_index()
        if reached < begin and not _roll_back(engine, number, log, reached):
            return None
        if index.exceeds(number, log) or _is_exchanged(index, log, min(reached, begin)):
            return None
        starts.append(min(reached, begin))
    return starts


def _is_exchanged(index: StreamIndex, log: Lane, checkpoint: int) -> bool:
    """Whether a segment below the checkpoint starts with a frame that the index does not know yet: it was exchanged.

    One read and one lookup per segment.
    """
    for segment in log.segments():
        if segment.start >= checkpoint or segment.size_bytes < HEADER_BYTES:
            continue
        try:
            header = decode_header(log.seed, log.read(segment.start, HEADER_BYTES))
        except CorruptionError:
            continue
        row = index.shard_row(header.shard) if header.kind in (COLUMNAR, KAFKA) else None
        if row is not None and header.last_offset >= indexed_next_of(row):
            return True
    return False


def _intact_until(engine: SegmentEngine, log: Lane, synced: int, end: int) -> int | None:
    """Return the end of the intact log between `synced` and `end`, or None if the log ends before `synced`."""
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
    """Roll the index back to a position at which the log now ends. Return False if only a rebuild can do it."""
    index = engine.index
    with index.lock:
        if index.unsynced.changed(lane) > position:
            return False
        batch = Batch()
        for number in index.unsynced.roll_back(batch, lane, position):
            try:
                shard = engine.load_state(number)
            except BasaltError:
                return False
            index.roll_back(batch, shard, position)
        start = max((segment.start for segment in log.segments() if segment.start <= position), default=position)
        index.roll_back_lane(lane, position, batch, start, _stats_of(index, log, start, position))
    return True


def _restore_stats(index: StreamIndex, lane: int, log: Lane, position: int) -> None:
    """Recount segments without a stats row, which were about to be deleted, so that cleaning finds them."""
    for segment in log.segments():
        if segment.end <= position and segment.size_bytes and index.stats(lane, segment.start) is None:
            index.count(lane, segment.start, _stats_of(index, log, segment.start, segment.end))


def _stats_of(index: StreamIndex, log: Lane, position: int, end: int) -> SegmentStats:
    """Compute the stats of a part of the log. The index must be up to date with it."""
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
    """Return the number of lanes on disk. The engine opens all of them, even if fewer are configured."""
    if not path.is_dir():
        return 0
    numbers = [int(entry.name) for entry in path.iterdir() if entry.is_dir() and entry.name.isdigit()]
    return max(numbers) + 1 if numbers else 0
