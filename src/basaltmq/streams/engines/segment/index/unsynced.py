"""What the index knows of frames that the log may still lose, and taking it back.

The index is written without the WAL, and RocksDB brings it to disk when it likes: perhaps before the log is synced.
After a power loss it then knows frames that are not there. To take them back at a cost that follows what was lost, each
write of gathered frames leaves a note beside them:

    'P' lane            -> position u64: the log was synced up to there when this was written
    'U' lane | position -> shards (u64 each) with frames among those that this write brought, up to `position`
    'X' lane            -> position u64: changes other than appends (deletes, trims, copies) lie below it

Notes at or below 'P' are deleted with the next write. What only appends brought can be undone (`undo`): the rows of a
shard's last frames say all there is to know, but for keys and tags, which are looked for among the shard's. Other
changes take rows away for good; where one of them was lost, or where there is no 'X' to tell, the index is built again.
The notes are no function of the log, and not part of what is the same after a rebuild (P6).

Budget: 0.1 us per gathered frame.
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
from basaltmq.store.keys import queues as keys
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
        for key, raw in store.scan(FAMILY, *keys.prefix_range(b"P")):
            self._synced[keys.decode_log_synced_key(key)] = _POSITION.unpack(raw)[0]
        for key, raw in store.scan(FAMILY, *keys.prefix_range(b"X")):
            self._changed[keys.decode_log_changed_key(key)] = _POSITION.unpack(raw)[0]
        for key, _ in store.scan(FAMILY, *keys.prefix_range(b"U")):
            lane, position = keys.decode_log_unsynced_key(key)
            self._noted.setdefault(lane, {})[position] = None

    def watch(self, lane: int, log: Lane) -> None:
        """Leave notes of this log with every write from here on."""
        self._logs[lane] = log

    def synced(self, lane: int) -> int:
        """How far the lane was synced when the index was last written."""
        return self._synced.get(lane, 0)

    def changed(self, lane: int) -> int:
        """The position below which all changes other than appends lie."""
        return self._changed.get(lane, POSITION_MAX)

    def clear(self) -> None:
        self._synced, self._changed, self._noted = {}, {}, {}

    def put(
        self, batch: Batch, checkpoints: Mapping[int, int], touched: Mapping[int, SegmentShard], *, is_append: bool
    ) -> None:
        """Add the notes to a write that brings the index up to these checkpoints."""
        for lane, log in self._logs.items():
            # No entry reaches the store before its frame is in the log.
            log.write_gathered()
            synced = log.synced_position
            position = checkpoints.get(lane, 0)
            batch.put(FAMILY, keys.log_synced_key(lane), _POSITION.pack(synced))
            if not is_append or lane not in self._changed:
                self._changed[lane] = position
                batch.put(FAMILY, keys.log_changed_key(lane), _POSITION.pack(position))
            elif position > synced:
                numbers = [number for number, shard in touched.items() if shard.lane == lane]
                if numbers:
                    batch.put(FAMILY, keys.log_unsynced_key(lane, position), pack(f">{len(numbers)}Q", *numbers))
                    self._noted.setdefault(lane, {})[position] = None
            for noted in self._noted.get(lane, ()):
                if noted > synced:
                    break
                batch.delete(FAMILY, keys.log_unsynced_key(lane, noted))
                self._passed.append((lane, noted))

    def written(self) -> None:
        for lane, noted in self._passed:
            self._noted[lane].pop(noted, None)
        self._passed.clear()

    def take_back(self, batch: Batch, lane: int, position: int) -> set[int]:
        """Add to `batch` that the log was lost from a position on; the shards that may have had frames there."""
        shards: set[int] = set()
        noted = self._noted.get(lane, {})
        for at in [each for each in noted if each > position]:
            key = keys.log_unsynced_key(lane, at)
            raw = self._store.get(FAMILY, key) or b""
            if len(raw) % 8:
                raise CorruptionError(f"an index row of unsynced shards has {len(raw)} bytes, not a multiple of 8")
            shards.update(number for (number,) in iter_unpack(">Q", raw))
            batch.delete(FAMILY, key)
            del noted[at]
        if self.synced(lane) > position:
            self._synced[lane] = position
            batch.put(FAMILY, keys.log_synced_key(lane), _POSITION.pack(position))
        return shards


def undo(store: Reader, batch: Batch, shard: SegmentShard, position: int) -> None:
    """Add to `batch` that a shard's frames from a position on go; the shard counts what is left."""
    number = shard.number
    first: int | None = None
    flags = 0
    shard.indexed_next = 0
    for key, raw in store.scan(FAMILY, *keys.prefix_range(keys.frame_key(number, 0)[:9]), reverse=True):
        entry = Entry.decode(keys.decode_frame_key(key)[1], raw)
        if entry.position < position:
            # Frames were only appended since, so all before this one are kept too.
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
            batch.delete(FAMILY, keys.stream_expiry_key(entry.expire_min_ms, number, entry.last_offset))
    if first is None:
        return
    shard.timestamp_max_ms = TIME_NONE
    times = keys.prefix_range(keys.stream_time_key(number, 0, 0)[:9])
    for key, _ in store.scan(FAMILY, *times, reverse=True):
        _, time_ms, last_offset = keys.decode_stream_time_key(key)
        if last_offset < first:
            shard.timestamp_max_ms = time_ms
            break
        batch.delete(FAMILY, key)
    for kind, flag in ((b"K", HAS_KEYS), (b"G", HAS_TAGS), (b"Q", IN_TRANSACTION), (b"M", IS_MARKER)):
        if flags & flag:
            for key, _ in store.scan(FAMILY, *keys.prefix_range(kind + _POSITION.pack(number))):
                if keys.decode_stream_index_key(key)[3] >= first:
                    batch.delete(FAMILY, key)
