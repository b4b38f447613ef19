"""Notes about index rows of frames that the log may still lose, and their rollback.

The index is written without the WAL, and RocksDB may flush it before the log is synced. After a power loss the index
may then contain lost frames. To roll back at a cost that follows the loss, each write of buffered frames adds notes:

    'P' lane            -> position u64: synced end of the log at the time of the write
    'U' lane | position -> shards (u64 each) with frames in this write, which ends at `position`
    'X' lane            -> position u64: changes other than appends (deletes, trims, copies) are below it

The next write deletes notes at or below 'P'. Appends can be undone (`undo`): the rows of a shard's last frames contain
all that is needed, except keys and tags, which need a scan of the shard's rows. Other changes delete rows for good. If
one of them was lost, or if 'X' is missing, the index is rebuilt. The notes are not a function of the log, so they are
not equal after a rebuild (P6).

Cost: 0.1 us per buffered frame.
"""

from __future__ import annotations

from collections.abc import Mapping
from struct import Struct as Layout
from struct import iter_unpack, pack
from typing import Final

from basaltmq.errors import CorruptionError
from basaltmq.log.lane import Lane
from basaltmq.log.segment import POSITION_MAX
from basaltmq.store.api import Reader
from basaltmq.store.batch import Batch
from basaltmq.store.keys import parts as key_parts
from basaltmq.store.keys import streams as stream_keys
from basaltmq.streams.engines.segment.index.rows import (
    FAMILY,
    HAS_KEYS,
    HAS_TAGS,
    IN_TRANSACTION,
    IS_MARKER,
    IS_REWRITTEN,
    Entry,
)
from basaltmq.streams.engines.segment.state import TIME_NONE, SegmentShard

_POSITION: Final = Layout(">Q")


class Unsynced:
    """The notes of all lanes. Guarded by the index's lock."""

    def __init__(self, store: Reader) -> None:
        self._store = store
        self._logs: dict[int, Lane] = {}
        self._synced: dict[int, int] = {}
        self._changed: dict[int, int] = {}
        self._noted: dict[int, dict[int, None]] = {}
        self._passed: list[tuple[int, int]] = []
        for key, raw in store.scan(FAMILY, *key_parts.prefix_range(b"P")):
            self._synced[stream_keys.decode_log_synced_key(key)] = _POSITION.unpack(raw)[0]
        for key, raw in store.scan(FAMILY, *key_parts.prefix_range(b"X")):
            self._changed[stream_keys.decode_log_changed_key(key)] = _POSITION.unpack(raw)[0]
        for key, _ in store.scan(FAMILY, *key_parts.prefix_range(b"U")):
            lane, position = stream_keys.decode_log_unsynced_key(key)
            self._noted.setdefault(lane, {})[position] = None

    def watch(self, lane: int, log: Lane) -> None:
        """Write notes for this log with every index write from now on."""
        self._logs[lane] = log

    def synced(self, lane: int) -> int:
        """Return the synced end of the lane at the last index write."""
        return self._synced.get(lane, 0)

    def changed(self, lane: int) -> int:
        """Return the position below which all changes other than appends are."""
        return self._changed.get(lane, POSITION_MAX)

    def clear(self) -> None:
        self._synced, self._changed, self._noted = {}, {}, {}

    def put(
        self, batch: Batch, checkpoints: Mapping[int, int], touched: Mapping[int, SegmentShard], *, is_append: bool
    ) -> None:
        """Add the notes to a write that moves the index to these checkpoints."""
        for lane, log in self._logs.items():
            # A frame must be in the log before its entry is in the store.
            log.write_gathered()
            synced = log.synced_position
            position = checkpoints.get(lane, 0)
            batch.put(FAMILY, stream_keys.log_synced_key(lane), _POSITION.pack(synced))
            if not is_append or lane not in self._changed:
                self._changed[lane] = position
                batch.put(FAMILY, stream_keys.log_changed_key(lane), _POSITION.pack(position))
            elif position > synced:
                numbers = [number for number, shard in touched.items() if shard.lane == lane]
                if numbers:
                    batch.put(FAMILY, stream_keys.log_unsynced_key(lane, position), pack(f">{len(numbers)}Q", *numbers))
                    self._noted.setdefault(lane, {})[position] = None
            for noted in self._noted.get(lane, ()):
                if noted > synced:
                    break
                batch.delete(FAMILY, stream_keys.log_unsynced_key(lane, noted))
                self._passed.append((lane, noted))

    def written(self) -> None:
        for lane, noted in self._passed:
            self._noted[lane].pop(noted, None)
        self._passed.clear()

    def roll_back(self, batch: Batch, lane: int, position: int) -> set[int]:
        """Remove the notes from a lost position on. Return the shards that may have frames there."""
        shards: set[int] = set()
        noted = self._noted.get(lane, {})
        for at in [each for each in noted if each > position]:
            key = stream_keys.log_unsynced_key(lane, at)
            raw = self._store.get(FAMILY, key) or b""
            if len(raw) % 8:
                raise CorruptionError(f"an index row of unsynced shards has {len(raw)} bytes, not a multiple of 8")
            shards.update(number for (number,) in iter_unpack(">Q", raw))
            batch.delete(FAMILY, key)
            del noted[at]
        if self.synced(lane) > position:
            self._synced[lane] = position
            batch.put(FAMILY, stream_keys.log_synced_key(lane), _POSITION.pack(position))
        return shards


def was_indexed(store: Reader) -> bool:
    """Whether the index was built from a log, which may be missing now."""
    return next(iter(store.scan(FAMILY, *key_parts.prefix_range(b"P"))), None) is not None


def undo(store: Reader, batch: Batch, shard: SegmentShard, position: int) -> None:
    """Add to `batch` the removal of a shard's frames from a position on, and update the shard's counts."""
    number = shard.number
    first: int | None = None
    flags = 0
    shard.indexed_next = 0
    for key, raw in store.scan(FAMILY, *key_parts.prefix_range(stream_keys.frame_key(number, 0)[:9]), reverse=True):
        entry = Entry.decode(stream_keys.decode_frame_key(key)[1], raw)
        if entry.position < position:
            # Only appends happened since, so all earlier frames stay.
            shard.indexed_next = entry.last_offset + 1
            break
        first = entry.base_offset
        flags |= entry.flags
        shard.frames -= 1
        shard.records -= entry.records
        shard.size_bytes -= entry.size_bytes
        shard.rewritten -= bool(entry.flags & IS_REWRITTEN)
        batch.delete(FAMILY, key)
        if entry.expire_min_ms:
            batch.delete(FAMILY, stream_keys.stream_expiry_key(entry.expire_min_ms, number, entry.last_offset))
    if first is None:
        return
    shard.timestamp_max_ms = TIME_NONE
    times = key_parts.prefix_range(stream_keys.stream_time_key(number, 0, 0)[:9])
    for key, _ in store.scan(FAMILY, *times, reverse=True):
        _, time_ms, last_offset = stream_keys.decode_stream_time_key(key)
        if last_offset < first:
            shard.timestamp_max_ms = time_ms
            break
        batch.delete(FAMILY, key)
    for kind, flag in ((b"K", HAS_KEYS), (b"G", HAS_TAGS), (b"Q", IN_TRANSACTION), (b"M", IS_MARKER)):
        if flags & flag:
            for key, _ in store.scan(FAMILY, *key_parts.prefix_range(kind + _POSITION.pack(number))):
                if stream_keys.decode_stream_index_key(key)[3] >= first:
                    batch.delete(FAMILY, key)
