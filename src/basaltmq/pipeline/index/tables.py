"""Builds the SST files of an index, each from one key range of all runs.

Rows that segments produced separately are combined by shard:

    'N' shard   sums of the parts; offsets between two parts that are in no frame are lost
    'T' shard   rows by time ascend within a segment. Of all of them, those stay that ascend together: a row goes if an
                earlier frame has reached its time

Both need all rows of a shard, so their ranges are split only between shards (`WHOLE`). Rows of rewritten shards are
ignored, except those of final runs (`index/scan.py`).
"""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from contextlib import closing
from pathlib import Path
from typing import Final

import msgspec
from rocksdict import SstFileWriter

from basaltmq.log.recovery import Loss
from basaltmq.pipeline.index.runs import Run, merged
from basaltmq.pipeline.index.scan import NOWHERE, Part, ShardRows
from basaltmq.store.keys import streams as stream_keys
from basaltmq.store.open import open_view
from basaltmq.store.options import StoreOptions, family_options
from basaltmq.store.rocks_errors import translate
from basaltmq.streams.engines.segment.index.rows import FAMILY
from basaltmq.streams.engines.segment.state import TIME_NONE, SegmentShard

WHOLE: Final = b"NT"
"""Kinds of rows that are combined by shard."""

APART: Final = (b"P", b"T")
"""Keys that no SST file spans. Rows of segments lie between them, and are known only after all files are built."""

Rows = Sequence[tuple[bytes, bytes]]

SHOWN_MAX: Final = 20
"""Maximum number of differences that are described per range."""


class Table(msgspec.Struct, frozen=True):
    """An SST file, or the differences of a range."""

    path: str | None
    rows: int
    garbage: dict[str, int]
    """Garbage of known shards in bytes, by hex key of the segment's row."""
    losses: list[str]
    differing: int = 0
    differences: list[str] = []


def make_table(
    shards: ShardRows,
    runs: Sequence[Run],
    begin: bytes,
    end: bytes,
    rewritten: Collection[int],
    target: str,
    *,
    compare_with: str | None = None,
) -> Table:
    """Build the SST file of a range at `target`. With `compare_with`, compare with that store's index instead."""
    rows: list[tuple[bytes, bytes]] = []
    partial = merged([run for run in runs if not run.is_final], begin, end)
    if rewritten:
        ignored = {shard.to_bytes(8, "big") for shard in rewritten}
        partial = [row for row in partial if _shard(row[0]) not in ignored]
    summing = _Summing(shards)
    for kind, some in _by_kind(partial):
        if kind == b"N":
            rows += summing.shards(some)
        elif kind == b"T":
            rows += _ascending(some)
        else:
            rows += some
    final = merged([run for run in runs if run.is_final], begin, end)
    if final:
        rows = sorted([*rows, *final])
    garbage = dict(summing.garbage)
    if compare_with is not None:
        return _compared(compare_with, begin, end, rows, garbage, summing.losses)
    if rows:
        write_table(Path(target), rows)
    return Table(target if rows else None, len(rows), garbage, summing.losses)


def write_table(path: Path, rows: Rows) -> None:
    """Write ascending rows as an SST file for the index's column family."""
    writer = SstFileWriter(family_options(StoreOptions())[FAMILY.label])
    try:
        writer.open(str(path))
        for key, value in rows:
            writer[key] = value
        writer.finish()
    except Exception as error:
        raise translate(error, path) from error


def _shard(key: bytes) -> bytes:
    """Return the shard in the key of a frame's or a shard's row."""
    return key[9:17] if key[:1] == b"E" else key[1:9]


def _by_kind(rows: Rows) -> Iterator[tuple[bytes, Rows]]:
    begin = 0
    while begin < len(rows):
        kind = rows[begin][0][:1]
        end = bisect_right(rows, kind, begin, key=lambda row: row[0][:1])
        yield kind, rows[begin:end]
        begin = end


def _ascending(rows: Rows) -> list[tuple[bytes, bytes]]:
    """Return the rows, sorted by time and offset, whose time no row with a lower offset has reached."""
    kept: list[tuple[bytes, bytes]] = []
    shard = time = least = b""
    for row in reversed(rows):
        key = row[0]
        if key[:9] != shard:
            shard, time, least = key[:9], b"", b""
        offset = key[17:]
        if least and offset >= least:
            continue
        if key[9:17] == time:
            # A lower offset has the same time.
            kept.pop()
        kept.append(row)
        time, least = key[9:17], offset
    kept.reverse()
    return kept


class _Summing:
    """Sums the parts of shards."""

    def __init__(self, known: ShardRows) -> None:
        self._known = known
        self.garbage: Counter[str] = Counter()
        self.losses: list[str] = []

    def shards(self, rows: Rows) -> list[tuple[bytes, bytes]]:
        found: list[tuple[bytes, bytes]] = []
        at = 0
        while at < len(rows):
            key = rows[at][0]
            parts = []
            while at < len(rows) and rows[at][0] == key:
                parts.append(Part.decode(rows[at][1]))
                at += 1
            row = self._sum(stream_keys.decode_stream_tail_key(key), parts)
            if row is not None:
                found.append((key, row))
        return found

    def _sum(self, shard: int, parts: list[Part]) -> bytes | None:
        meta = self._known.meta(shard)
        total = SegmentShard(meta, None)
        following = total.next_offset
        for part in sorted(parts, key=lambda each: each.segment):
            if part.garbage:
                self.garbage[stream_keys.log_segment_key(part.lane, part.segment).hex()] += part.garbage
            if not part.row:
                continue
            state = SegmentShard(meta, part.row)
            if part.first != NOWHERE and part.first > following:
                self.losses.append(str(Loss(shard, following, part.first - 1)))
            total.indexed_next = following = max(total.indexed_next, state.indexed_next)
            total.frames += state.frames
            total.records += state.records
            total.skipped += state.skipped
            total.size_bytes += state.size_bytes
            total.timestamp_max_ms = max(total.timestamp_max_ms, state.timestamp_max_ms, TIME_NONE)
        return total.encode() if total.frames else None


def _compared(store: str, begin: bytes, end: bytes, rows: Rows, garbage: dict[str, int], losses: list[str]) -> Table:
    with closing(open_view(store)) as view:
        there = {key: value for key, value in view.scan(FAMILY, begin, end) if key[:1] not in b"CPSUX"}
    wanted = dict(rows)
    unlike = [key for key in sorted({*there, *wanted}) if there.get(key) != wanted.get(key)]
    differences = [_difference(key, there.get(key), wanted.get(key)) for key in unlike[:SHOWN_MAX]]
    return Table(None, len(rows), garbage, losses, len(unlike), differences)


def _difference(key: bytes, there: bytes | None, wanted: bytes | None) -> str:
    what = "is missing" if there is None else "is superfluous" if wanted is None else "differs"
    return f"{key[:1].decode('ascii', 'replace')} {key[1:].hex()} {what}"
