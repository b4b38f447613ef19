"""What the segment engine keeps in memory of one shard, and the row it is kept as.

    'N' shard -> | offset after the last frame u64 | frames u64 | records u64 | skipped u64 |
                 | deleted u64 | rewritten u64 | bytes u64 | max time i64 |

Everything in the row follows from the shard's live frames, its deleted records and its start offset, so it is derived
and rebuilt with the index. `records` counts what the frames hold; those of the first frame that lie below the start
offset (`skipped`) and those deleted one by one (`deleted`) are still in it. `rewritten` counts frames made by
compaction: without any, what lies in the log is what the index says. A shard without live frames has no row.
"""

from __future__ import annotations

from struct import Struct as Layout
from typing import Final

from basaltmq.errors import CorruptionError, ShardNotFoundError
from basaltmq.streams.shards import ShardMeta
from basaltmq.streams.watermark import Visible

_ROW: Final = Layout(">QQQQQQQq")

TIME_NONE: Final = -(1 << 62)
"""The largest timestamp of a shard without records, or without an index by time."""


class SegmentShard(Visible):
    """One shard. Offsets are guarded by its lock; the counts change only under the lane's lock as well."""

    __slots__ = (
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
        self.number = meta.number
        self.lane = meta.lane
        self.config = meta.config
        self.start_offset = meta.start_offset
        self.is_deleted = False
        self.undecided: dict[int, int] | None = None
        """Where transactions begin that are not decided, by producer. None until there is one."""

    @property
    def stable_offset(self) -> int:
        """Where readers end who are shown only what is decided."""
        if not self.undecided:
            return self.high_watermark
        return max(self.start_offset, min(self.high_watermark, *self.undecided.values()))

    def follow(self, producer_id: int, base_offset: int, is_marker: bool) -> None:
        """A frame of a transaction, or the marker that ends it, was appended. Under the lock."""
        if is_marker:
            if self.undecided:
                self.undecided.pop(producer_id, None)
            return
        if self.undecided is None:
            self.undecided = {}
        self.undecided.setdefault(producer_id, base_offset)

    @property
    def kept(self) -> int:
        """Records a reader could find."""
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
