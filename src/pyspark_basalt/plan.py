"""Plans a query: resolves topics and bounds to offsets, and splits them into pieces for tasks.

Planning reads the store's metadata once. A piece contains only plain values, so any task can read it.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator

import msgspec

from basaltmq.errors import InvalidArgumentError, NotFoundError, TopicNotFoundError
from basaltmq.pipeline.source import Topics
from basaltmq.streams.adapter import ShardInfo
from pyspark_basalt.losses import check_kept, report_gone, report_recreated
from pyspark_basalt.offsets import EARLIEST, LATEST, Ids, Offsets
from pyspark_basalt.options import Bound, ReadOptions


class Piece(msgspec.Struct, frozen=True):
    """A range of one partition, which one task reads."""

    topic: str
    partition: int
    begin: int
    end: int
    shard: int | None = None
    """Shard of the partition at planning. A view with another shard is out of date."""
    topic_id: str | None = None
    """Topic id at planning. None accepts any topic of the name."""


def partitions_of(view: Topics, options: ReadOptions) -> list[tuple[str, int]]:
    """Return the topics and partitions of a query at this moment."""
    if options.assign is not None:
        for name, numbers in options.assign.items():
            count = len(view.topic(name).shards)
            for number in numbers:
                if not 0 <= number < count:
                    raise InvalidArgumentError(f"topic {name!r} has partitions 0 to {count - 1}, not {number}")
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
            existing = f"; there are {', '.join(known)}" if known else "; the store has no topics at all"
            raise TopicNotFoundError(f"there is no topic {name!r} in {options.location}{existing}") from None
    return found


def resolve(
    view: Topics, bound: Bound, partitions: list[tuple[str, int]], *, which_end: str, may_be_gone: bool = False
) -> tuple[Offsets, Ids]:
    """Return the offset of one bound ("from" or "to") for every partition, and the ids of their topics.

    `may_be_gone`: leave out topics that were deleted after they were listed.
    """
    resolved: Offsets = {}
    ids: Ids = {}
    for topic, number in partitions:
        try:
            info = view.info(topic, number)
            offset = _resolve_one(view, bound, topic, number, info, which_end)
        except NotFoundError:
            if not may_be_gone:
                raise
            resolved.pop(topic, None)
            ids.pop(topic, None)
            continue
        resolved.setdefault(topic, {})[number] = offset
        ids[topic] = str(info.meta.topic_id)
    unknown = {(t, n) for of in (bound.offsets, bound.timestamps) for t, by in of.items() for n in by}
    unknown -= set(partitions)
    if unknown:
        raise InvalidArgumentError(
            "offsets are given for partitions that are not read: "
            + ", ".join(f"{topic}[{number}]" for topic, number in sorted(unknown)[:10])
        )
    return resolved, ids


def _resolve_one(view: Topics, bound: Bound, topic: str, number: int, info: ShardInfo, which_end: str) -> int:
    timestamp_ms = bound.timestamps.get(topic, {}).get(number, bound.timestamp_ms)
    if timestamp_ms is not None:
        found = view.offset_at(topic, number, timestamp_ms)
        if bound.must_match and found >= info.high_watermark:
            raise InvalidArgumentError(
                f"{topic}[{number}] has no record of {timestamp_ms} ms or later; begin earlier, or set "
                "startingOffsetsByTimestampStrategy=latest"
            )
        return found
    offset = bound.offsets.get(topic, {}).get(number, bound.position)
    if offset == EARLIEST:
        return info.start_offset
    if offset == LATEST:
        return info.high_watermark
    if offset > info.high_watermark:
        raise InvalidArgumentError(
            f"{topic}[{number}] ends at offset {info.high_watermark}; it cannot be read {which_end} offset {offset}"
        )
    return offset


def pieces(
    view: Topics,
    start: Offsets,
    end: Offsets,
    options: ReadOptions,
    start_ids: Ids | None = None,
    end_ids: Ids | None = None,
) -> list[Piece]:
    """Return the pieces for tasks. A partition without a start, and a recreated topic, are read from their first
    offset.

    Offsets without ids, from older checkpoints and options, match any topic of the name.
    """
    start_ids, end_ids = start_ids or {}, end_ids or {}
    whole: list[Piece] = []
    for topic, by_partition in end.items():
        wanted = end_ids.get(topic)
        is_recreated = wanted is not None and start_ids.get(topic, wanted) != wanted
        known = {} if is_recreated else start.get(topic, {})
        for number, to in by_partition.items():
            if known.get(number, 0) >= to:
                continue
            info = _info_of(view, topic, number, wanted, (known.get(number, 0), to), options)
            if info is None:
                continue
            begin = known.get(number, info.start_offset if is_recreated else 0)
            begin = check_kept(topic, number, begin, to, info, options)
            to = min(to, info.high_watermark)
            if begin < to:
                whole.append(Piece(topic, number, begin, to, info.meta.number, str(info.meta.topic_id)))
    total = sum(piece.end - piece.begin for piece in whole)
    return [part for piece in whole for part in _cut(view, piece, total, options)]


def _info_of(
    view: Topics, topic: str, number: int, wanted: str | None, span: tuple[int, int], options: ReadOptions
) -> ShardInfo | None:
    """Return the planned partition. None if it is gone and the query accepts that."""
    try:
        info = view.info(topic, number)
    except NotFoundError:
        report_gone(topic, number, *span, options)
        return None
    actual = str(info.meta.topic_id)
    if wanted is not None and wanted != actual:
        report_recreated(topic, number, wanted, actual, options)
        return None
    return info


def _cut(view: Topics, piece: Piece, total: int, options: ReadOptions) -> Iterator[Piece]:
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
        yield Piece(piece.topic, piece.partition, begin, end, piece.shard, piece.topic_id)


def limited(start: Offsets, latest: Offsets, count_max: int) -> Offsets:
    """Return ends so that about `count_max` offsets are read, in proportion to the lag of each partition."""
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
        # At least one offset, so that a small partition next to a large one makes progress.
        share = max(1, count * count_max // total) if count > 0 else 0
        ends.setdefault(topic, {})[number] = begin + min(share, max(0, count))
    return ends
