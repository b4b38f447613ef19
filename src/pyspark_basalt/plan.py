"""What a query reads: topics resolved, ends resolved, ranges cut into pieces for tasks.

Resolving looks at the store once; the pieces carry plain numbers and are read wherever Spark puts them.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator

import msgspec

from basaltmq.errors import DamagedFrameError, DataLossError, InvalidArgumentError, TopicNotFoundError
from basaltmq.streams.adapter import ShardInfo
from pyspark_basalt.offsets import EARLIEST, LATEST, Offsets
from pyspark_basalt.options import Bound, ReadOptions
from pyspark_basalt.views import TopicView


class Piece(msgspec.Struct, frozen=True):
    """A range of one partition: what one task reads."""

    topic: str
    partition: int
    begin: int
    end: int
    shard: int | None = None
    """What kept the partition when this was planned: a view that sees another one is out of date."""


def partitions_of(view: TopicView, options: ReadOptions) -> list[tuple[str, int]]:
    """Topics and partitions a query is about, as they are at this moment."""
    if options.assign is not None:
        for name, numbers in options.assign.items():
            count = len(view.topic(name).shards)
            for number in numbers:
                if not 0 <= number < count:
                    raise InvalidArgumentError(f"topic {name!r} has partitions 0 to {count - 1}, and no {number}")
        return [(name, number) for name, numbers in options.assign.items() for number in numbers]
    if options.pattern is not None:
        wanted = re.compile(options.pattern)
        return [(t.name, n) for t in view.topics() if wanted.fullmatch(t.name) for n in range(len(t.shards))]
    found: list[tuple[str, int]] = []
    for name in options.topics:
        try:
            found += [(name, number) for number in range(len(view.topic(name).shards))]
        except TopicNotFoundError:
            known = [t.name for _, t in zip(range(10), view.topics(), strict=False)]
            there = f"; there are {', '.join(known)}" if known else "; the store has no topics at all"
            raise TopicNotFoundError(f"there is no topic {name!r} in {options.place}{there}") from None
    return found


def resolve(view: TopicView, bound: Bound, partitions: list[tuple[str, int]], *, which_end: str) -> Offsets:
    """The offset of one end ("from" or "to") for every partition."""
    resolved: Offsets = {}
    for topic, number in partitions:
        info = view.info(topic, number)
        resolved.setdefault(topic, {})[number] = _resolve_one(view, bound, topic, number, info, which_end)
    unknown = {(t, n) for of in (bound.offsets, bound.timestamps) for t, by in of.items() for n in by}
    unknown -= set(partitions)
    if unknown:
        raise InvalidArgumentError(
            "offsets are given for partitions that are not read: "
            + ", ".join(f"{topic}[{number}]" for topic, number in sorted(unknown)[:10])
        )
    return resolved


def _resolve_one(view: TopicView, bound: Bound, topic: str, number: int, info: ShardInfo, which_end: str) -> int:
    timestamp_ms = bound.timestamps.get(topic, {}).get(number, bound.timestamp_ms)
    if timestamp_ms is not None:
        found = view.offset_at(topic, number, timestamp_ms)
        if bound.must_match and found >= info.high_watermark:
            raise InvalidArgumentError(
                f"{topic}[{number}] has no record of {timestamp_ms} ms or later; begin earlier, or set "
                "startingOffsetsByTimestampStrategy=latest"
            )
        return found
    offset = bound.offsets.get(topic, {}).get(number, bound.place)
    if offset == EARLIEST:
        return info.start_offset
    if offset == LATEST:
        return info.high_watermark
    if offset > info.high_watermark:
        raise InvalidArgumentError(
            f"{topic}[{number}] ends at offset {info.high_watermark}; it cannot be read {which_end} {offset}"
        )
    return offset


def pieces(view: TopicView, start: Offsets, end: Offsets, options: ReadOptions) -> list[Piece]:
    """Ranges for tasks; a partition that is new at the end begins at its beginning."""
    whole: list[Piece] = []
    for topic, by_partition in end.items():
        for number, to in by_partition.items():
            info = view.info(topic, number)
            begin = start.get(topic, {}).get(number, info.start_offset)
            begin = check_kept(topic, number, begin, to, info, options)
            to = min(to, info.high_watermark) if not options.fail_on_data_loss else to
            if begin < to:
                whole.append(Piece(topic, number, begin, to, info.meta.number))
    total = sum(piece.end - piece.begin for piece in whole)
    return [part for piece in whole for part in _cut(view, piece, total, options)]


def check_kept(topic: str, number: int, begin: int, end: int, info: ShardInfo, options: ReadOptions) -> int:
    """Where a range begins that can be read; DataLossError if some of it is gone and that matters."""
    if end > info.high_watermark and options.fail_on_data_loss:
        raise DataLossError(
            f"{topic}[{number}] ends at offset {info.high_watermark}, but was to be read up to {end}: it was deleted "
            "and made again, or another store is at this path. With failOnDataLoss=false what is there is read"
        )
    if begin >= info.start_offset or begin >= end:
        return begin
    if options.fail_on_data_loss:
        raise DataLossError(
            f"{topic}[{number}] begins at offset {info.start_offset}: offsets {begin} to {info.start_offset - 1} were "
            "removed by retention before they were read. With failOnDataLoss=false they are skipped"
        )
    return info.start_offset


def behind_damage(topic: str, number: int, error: DamagedFrameError, options: ReadOptions) -> int:
    """Where to read on behind records that are damaged; DataLossError if that matters."""
    if options.fail_on_data_loss:
        raise DataLossError(
            f"{topic}[{number}], offsets {error.base_offset} to {error.last_offset}, cannot be read: {error.reason}. "
            "Bring the store back from a backup; with failOnDataLoss=false they are skipped"
        ) from error
    return error.last_offset + 1


def _cut(view: TopicView, piece: Piece, total: int, options: ReadOptions) -> Iterator[Piece]:
    count = piece.end - piece.begin
    parts = 1
    info = view.info(piece.topic, piece.partition)
    if info.records:
        size_bytes = info.size_bytes * count / max(info.records, 1)
        parts = max(parts, math.ceil(size_bytes / options.partition_bytes_max))
    if options.partition_records_max is not None:
        parts = max(parts, math.ceil(count / options.partition_records_max))
    if options.partitions_min is not None and total:
        parts = max(parts, round(options.partitions_min * count / total))
    parts = min(parts, count)
    for index in range(parts):
        begin = piece.begin + count * index // parts
        end = piece.begin + count * (index + 1) // parts
        yield Piece(piece.topic, piece.partition, begin, end, piece.shard)


def limited(start: Offsets, latest: Offsets, count_max: int) -> Offsets:
    """Ends so that about `count_max` offsets are read, each partition in proportion to what it has."""
    behind = {
        (topic, number): to - start.get(topic, {}).get(number, 0)
        for topic, of in latest.items()
        for number, to in of.items()
    }
    total = sum(max(0, count) for count in behind.values())
    if total <= count_max:
        return latest
    ends: Offsets = {}
    for (topic, number), count in behind.items():
        begin = latest[topic][number] - count
        # At least one, so that a small partition beside a large one moves.
        share = max(1, count * count_max // total) if count > 0 else 0
        ends.setdefault(topic, {})[number] = begin + min(share, max(0, count))
    return ends
