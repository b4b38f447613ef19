"""In-memory state of a shard in the segment engine, and its row.

    'N' shard -> | offset after the last frame u64 | frames u64 | records u64 | skipped u64 |
                 | deleted u64 | rewritten u64 | bytes u64 | max time i64 |

The row is derived from the shard's live frames, deleted records and start offset, and is rebuilt with the index.
`records` counts the records in the frames. It includes those of the first frame below the start offset (`skipped`) and
individually deleted ones (`deleted`). `rewritten` counts frames that compaction created; if it is 0, the log matches
the index. A shard without live frames has no row.
"""

from __future__ import annotations

from struct import Struct as Layout
from typing import Final

from basaltmq.errors import CorruptionError, ShardNotFoundError
from basaltmq.streams.shards import ShardMeta
from basaltmq.streams.watermark import ShardOffsets

_ROW: Final = Layout(">QQQQQQQq")

TIME_NONE: Final = -(1 << 62)
"""Largest timestamp of a shard without records or without a time index."""


def indexed_next_of(raw: bytes) -> int:
    """Return the offset after the last frame according to a row; 0 for an invalid row."""
    return int(_ROW.unpack(raw)[0]) if len(raw) == _ROW.size else 0


class SegmentShard(ShardOffsets):
    """One shard. Its lock guards the offsets. Changes of the counts also need the lane's lock."""

    __slots__ = (
        "ceiling",
        "config",
        "deleted",
        "frames",
        "indexed_next",
        "is_deleted",
        "lane",
        "number",
        "records",
        "rewritten",
        "size_bytes",
        "skipped",
        "start_offset",
        "timestamp_max_ms",
        "undecided",
    )

    def __init__(self, meta: ShardMeta, raw: bytes | None) -> None:
        next_offset = max(meta.next_offset_min, meta.start_offset)
        if raw is None:
            self.indexed_next = 0
            self.frames = self.records = self.skipped = self.deleted = self.rewritten = self.size_bytes = 0
            self.timestamp_max_ms = TIME_NONE
        else:
            if len(raw) != _ROW.size:
                raise CorruptionError(f"the index row of shard {meta.number} has {len(raw)} bytes, not {_ROW.size}")
            (
                self.indexed_next,
                self.frames,
                self.records,
                self.skipped,
                self.deleted,
                self.rewritten,
                self.size_bytes,
                self.timestamp_max_ms,
            ) = _ROW.unpack(raw)
            next_offset = max(next_offset, self.indexed_next)
        super().__init__(next_offset)
        self.ceiling = next_offset
        """Appends reserve offsets from here on (see `ceilings`)."""
        self.number = meta.number
        self.lane = meta.lane
        self.config = meta.config
        self.start_offset = meta.start_offset
        self.is_deleted = False
        self.undecided: dict[int, int] | None = None
        """First offset of each open transaction, by producer id. None until there is one."""

    @property
    def stable_offset(self) -> int:
        """The last stable offset: no open transaction starts below it."""
        if not self.undecided:
            return self.high_watermark
        return max(self.start_offset, min(self.high_watermark, *self.undecided.values()))

    def follow(self, producer_id: int, base_offset: int, is_marker: bool) -> None:
        """Record an appended frame of a transaction, or the marker that ends it. The caller holds the lock."""
        if is_marker:
            if self.undecided:
                self.undecided.pop(producer_id, None)
            return
        if self.undecided is None:
            self.undecided = {}
        self.undecided.setdefault(producer_id, base_offset)

    @property
    def kept(self) -> int:
        """Number of records that readers can find."""
        return self.records - self.skipped - self.deleted

    def encode(self) -> bytes:
        return _ROW.pack(
            self.indexed_next,
            self.frames,
            self.records,
            self.skipped,
            self.deleted,
            self.rewritten,
            self.size_bytes,
            self.timestamp_max_ms,
        )

    def require(self) -> None:
        if self.is_deleted:
            raise ShardNotFoundError(f"shard {self.number} is being deleted")
