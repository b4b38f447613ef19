"""A read-only view of the topics, records and groups of a store that another process may have open for writing.

    with StreamView.open("data") as view:
        batch = view.read("orders", 0, offset=0)

A view takes no lock and writes no file. So it works beside a running writer, after a crash, on a closed store, on a
backup and on a read-only file system. It shows a snapshot until `refresh` or `wait`.

Components: a read-only RocksDB snapshot (`open_view`), a plane over an `OverlayStore` on it (because opening a plane
writes), and `SegmentView`, whose index is in a second overlay. A refresh reads the log first and the store second, so
it has the shard of every frame. It loads the store again only if the store's files changed; appends to segment topics
do not change them. Loading takes 50 ms or more with a long WAL, so `wait` limits how often it does so. Topics and
commits may therefore appear slightly later than records.

The index overlay is kept until the writer flushes its index. Then the view drops the overlay and reads the log from the
new checkpoint, so the overlay holds no more than the writer holds in memory. A restarted writer (a new epoch in
COMMITTED) may have truncated the log, so the view reads everything again.

Segment cleaning may delete a segment that a reader uses. Its live frames then have durable, indexed copies further on,
so the view refreshes and retries.

Records of memory topics are in the other process, so a view cannot read them. RocksDB topics are read through the WAL.
The view syncs the WAL first, so a power loss cannot revoke what it shows.

Threads may share a view; its calls are serialized.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Final, Self, TypeAlias, TypeVar

from basaltmq.clock import now_ms
from basaltmq.errors import (
    CorruptionError,
    InvalidArgumentError,
    SegmentGoneError,
    StoreBehindError,
    StoreClosedError,
    StoreStalledError,
)
from basaltmq.log.committed import Mark
from basaltmq.log.lane_view import LaneView
from basaltmq.store.api import Store
from basaltmq.store.directory import DATABASE, LOG, os_error, sync_data
from basaltmq.store.integrity.wal import wal_files
from basaltmq.store.open import open_view
from basaltmq.store.options import StoreOptions
from basaltmq.store.overlay import OverlayStore
from basaltmq.store.rocks import RocksStore
from basaltmq.streams.adapter import READ_BYTES, READ_RECORDS, Clock, IfAllOlder, ReadBatch, ShardInfo
from basaltmq.streams.engines.memory import MemoryEngine
from basaltmq.streams.engines.rocksdb.engine import RocksdbEngine
from basaltmq.streams.engines.segment.view import CAUGHT_UP_FRAMES_MAX, SegmentView
from basaltmq.streams.groups import PartitionLag
from basaltmq.streams.leaders import Leaders
from basaltmq.streams.offsets import Offsets
from basaltmq.streams.plane import StreamPlane
from basaltmq.streams.shards import Engine, Shards
from basaltmq.streams.topics import Topic, TopicPage

WATCH_INTERVAL_S: Final = 0.02
"""Polling interval of `wait`: about ten system calls each, 1 % of a core."""

LOAD_PAUSE_FACTOR: Final = 9
"""`wait` pauses this many times the duration of a store load between two loads: at most 10 % of a core."""

LOAD_PAUSE_MAX_S: Final = 2.0
"""Maximum pause between store loads: the maximum delay until a follower sees a new topic."""

ATTEMPTS_MAX: Final = 16
"""Maximum retries of a read that meets segment cleaning. Each retry means that one more segment was deleted."""

LOST_AFTER_LOADS: Final = 4
"""A segment that is missing in this many consecutive loads of the newest index is lost, not cleaned."""

MANIFEST: Final = "MANIFEST-"

PAGE: Final = 500
"""Topics or groups per page of a listing."""

T = TypeVar("T")


Stamp: TypeAlias = tuple[tuple[str, int], ...]
"""Names and sizes of the store's files that grow with each change."""


class StreamView:
    """A snapshot of the streams in a store, read from its files. Created by `open`."""

    def __init__(self, path: Path, options: StoreOptions | None, clock_ms: Clock) -> None:
        self.path = path
        self._options = options
        self._clock_ms = clock_ms
        self._lock = threading.RLock()
        self._closing = threading.Event()
        self._stores: _Stores | None = None
        self._stamp: Stamp = ()
        self._load_due_s = 0.0
        self._lanes: list[LaneView] = []
        self._epochs: list[int | None] = []
        self._marks_seen: list[Mark | None] = []
        self._plane: StreamPlane | None = None
        self._segments: SegmentView | None = None

    @classmethod
    def open(
        cls, path: str | os.PathLike[str], *, options: StoreOptions | None = None, clock_ms: Clock = now_ms
    ) -> StreamView:
        """Open a view of the store at `path`."""
        view = cls(Path(path), options, clock_ms)
        try:
            view.refresh()
        except BaseException:
            view.close()
            raise
        return view

    def topics(self, after: str | None = None) -> Iterator[Topic]:
        """Yield the topics ordered by name, all or those after a name."""
        while True:
            page = self._on(partial(_topics_after, after))
            yield from page.topics
            if page.next_after is None:
                return
            after = page.next_after

    def topic(self, name: str) -> Topic:
        return self._on(lambda plane: plane.topics.get(name))

    def info(self, name: str, partition: int) -> ShardInfo:
        """Return the offsets and the size of a partition, as visible to readers."""
        return self._on(lambda plane: plane.drivers.info(name, partition))

    def aborted_records(self, name: str, partition: int) -> int:
        """Return how many records of aborted transactions a partition still has. `info` counts them, no read returns
        them."""

        def count(plane: StreamPlane) -> int:
            engine, shard = plane.drivers.route(plane.topics.get(name), partition)
            return engine.index.outcomes.aborted_records(shard) if isinstance(engine, SegmentView) else 0

        return self._on(count)

    def read(
        self,
        name: str,
        partition: int,
        offset: int,
        *,
        max_records: int = READ_RECORDS,
        max_bytes: int = READ_BYTES,
        key: bytes | None = None,
        tag: bytes | None = None,
    ) -> ReadBatch:
        """Return records from an offset on: all, those with a key, or those with a tag. Empty at the end."""
        if key is not None and tag is not None:
            raise InvalidArgumentError("a read takes a key or a tag, not both")

        def look(plane: StreamPlane) -> ReadBatch:
            _require_seen(plane, name)
            drivers = plane.drivers
            if key is not None:
                return drivers.read_by_key(name, partition, key, offset, max_records, max_bytes)
            if tag is not None:
                return drivers.read_by_tag(name, partition, tag, offset, max_records, max_bytes)
            return drivers.read(name, partition, offset, max_records, max_bytes)

        return self._on(look)

    def offset_at(self, name: str, partition: int, timestamp_ms: int) -> int:
        """Return the first offset with a record at or after this time; the end if there is none."""

        def look(plane: StreamPlane) -> int:
            _require_seen(plane, name)
            return plane.drivers.offset_at(name, partition, timestamp_ms, IfAllOlder.LATEST)

        return self._on(look)

    def groups(self) -> Iterator[str]:
        """Yield every group with a committed offset."""
        after: str | None = None
        while True:
            page = self._on(partial(_groups_after, after))
            yield from page
            if len(page) < PAGE:
                return
            after = page[-1]

    def lag(self, group: str) -> list[PartitionLag]:
        """Return the group's lag by topic and partition."""
        return self._on(lambda plane: plane.groups.lag(group))

    def refresh(self) -> None:
        """Update the snapshot. The cost follows the log written since, plus a store load if the store changed."""
        with self._lock:
            self._require_open()
            self._refresh()

    def wait(self, timeout_s: float | None) -> bool:
        """Wait for a change, then refresh. Return False if nothing changed within the timeout."""
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        while True:
            with self._lock:
                self._require_open()
                is_due = time.monotonic() >= self._load_due_s
                if self._has_changed(is_due):
                    self._refresh(is_due=is_due)
                    return True
            left_s = WATCH_INTERVAL_S if deadline is None else deadline - time.monotonic()
            if left_s <= 0 or self._closing.wait(min(left_s, WATCH_INTERVAL_S)):
                return False

    def close(self) -> None:
        """Close the files. Idempotent. Ends a `wait` in another thread."""
        self._closing.set()
        with self._lock:
            self._close_plane()
            for lane in self._lanes:
                lane.close()
            if self._stores is not None:
                self._stores.base.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _on(self, call: Callable[[StreamPlane], T]) -> T:
        gone: SegmentGoneError | None = None
        repeated = 0
        with self._lock:
            for _ in range(ATTEMPTS_MAX):
                self._require_open()
                if gone is not None or self._plane is None:
                    self._refresh(store_too=True)
                assert self._plane is not None, "a successful refresh creates a plane"
                try:
                    return call(self._plane)
                except SegmentGoneError as error:
                    if gone is not None and str(gone) == str(error):
                        repeated += 1
                        if repeated == LOST_AFTER_LOADS:
                            break
                    gone = error
        if repeated == LOST_AFTER_LOADS:
            raise CorruptionError(
                f"{gone}, but the index refers to it: restore the file from a backup, or continue without its records "
                "with basalt pipeline rebuild-index"
            ) from gone
        raise self._outpaced() from gone

    def _require_open(self) -> None:
        if self._closing.is_set():
            raise StoreClosedError(f"the view of {self.path} is closed")

    def _outpaced(self) -> StoreStalledError:
        return StoreStalledError(f"{self.path} is cleaned faster than this view can read it; try again")

    def _has_changed(self, store_too: bool) -> bool:
        return (
            any(lane.has_changed() for lane in self._lanes)
            or LaneView.exists(self._lane_path(len(self._lanes)))
            or self._marks() != self._marks_seen
            or (store_too and _stamp(self.path) != self._stamp)
        )

    def _marks(self) -> list[Mark | None]:
        return [lane.mark() for lane in self._lanes]

    def _lane_path(self, number: int) -> Path:
        return self.path / LOG / f"{number:04d}"

    def _refresh(self, *, store_too: bool = False, is_due: bool = True) -> None:
        """Catch up with the log. Loads the store if `store_too`, or if it changed and `is_due`."""
        for _ in range(ATTEMPTS_MAX):
            with suppress(SegmentGoneError, StoreBehindError):
                if self._catch_up(store_too, is_due):
                    return
            # The new index does not refer to the deleted segment, and the new store contains the new shard.
            store_too = True
        raise self._outpaced()

    def _catch_up(self, store_too: bool, is_due: bool) -> bool:
        """Try once to catch up. Return False if the files changed meanwhile and are inconsistent."""
        try:
            return self._try(store_too, is_due)
        except StoreBehindError:
            # All earlier frames were applied.
            raise
        except BaseException:
            # It is unknown how many frames were applied, so the next try starts from scratch.
            self._close_plane()
            raise

    def _try(self, store_too: bool, is_due: bool) -> bool:
        marks, limits, is_reset = self._read_lanes()
        stamp = _stamp(self.path)
        loaded = store_too or self._stores is None or (is_due and stamp != self._stamp)
        if loaded:
            self._load_store(stamp)
        if loaded or is_reset or self._plane is None:
            self._build(is_reset)
            # The index may extend beyond the end of the log found above.
            for lane in self._lanes:
                lane.relist()
        segments = self._segments
        stores = self._stores
        assert segments is not None, "the plane is built"
        assert stores is not None, "the store was loaded"
        for number, (lane, limit) in enumerate(zip(self._lanes, limits, strict=True)):
            if not lane.covers(segments.applied(number), limit) and not (loaded and _stamp(self.path) == stamp):
                return False
        frames_max = CAUGHT_UP_FRAMES_MAX - stores.frames
        stores.frames += segments.catch_up(limits, frames_max=frames_max, is_store_current=loaded)
        segments.show(
            [
                lane.sync_to(segments.applied(number)) if mark is None else mark.synced_position
                for number, (lane, mark) in enumerate(zip(self._lanes, marks, strict=True))
            ]
        )
        self._marks_seen = marks
        # A writer that started meanwhile may have truncated what was read.
        return _epochs(self._marks()) == self._epochs

    def _load_store(self, stamp: Stamp) -> None:
        began_s = time.monotonic()
        if self._stores is None:
            self._stores = _Stores(open_view(self.path, options=self._options))
        else:
            self._stores.base.refresh()
        self._stamp = stamp
        self._stores.loaded(_manifests(stamp), _manifests(_stamp(self.path)))
        now_s = time.monotonic()
        self._load_due_s = now_s + min(LOAD_PAUSE_MAX_S, LOAD_PAUSE_FACTOR * (now_s - began_s))

    def _read_lanes(self) -> tuple[list[Mark | None], list[int], bool]:
        """Return (COMMITTED marks, ends of lanes, whether to read all again). The read order keeps them consistent."""
        marks = self._marks()
        is_reset = _epochs(marks) != self._epochs or LaneView.exists(self._lane_path(len(self._lanes)))
        if is_reset:
            for lane in self._lanes:
                lane.close()
            self._lanes = []
            while LaneView.exists(path := self._lane_path(len(self._lanes))):
                self._lanes.append(LaneView(path))
            marks = self._marks()
            self._epochs = _epochs(marks)
        limits = []
        for lane in self._lanes:
            before = lane.end
            lane.relist()
            limits.append(lane.end)
            is_reset = is_reset or lane.end < before
        return marks, limits, is_reset

    def _build(self, is_reset: bool) -> None:
        """Create a plane over the loaded store."""
        assert self._stores is not None, "the store was loaded"
        if is_reset or self._plane is None:
            self._stores.forget_tail()
        self._close_plane()
        self._stores.rows.discard()
        wal = partial(RocksdbView, database=self.path / DATABASE)
        plane = StreamPlane(
            self._stores.rows,
            self._clock_ms,
            makers={Engine.MEMORY: MemoryView, Engine.ROCKSDB: wal, Engine.SEGMENT: self._segment_view},
        )
        self._plane = plane
        segments = plane.engines.get(Engine.SEGMENT)
        assert isinstance(segments, SegmentView), "the plane uses the given engine makers"
        self._segments = segments

    def _segment_view(
        self, store: Store, shards: Shards, offsets: Offsets, clock_ms: Clock, leaders: Leaders
    ) -> SegmentView:
        assert self._stores is not None, "the store was loaded"
        return SegmentView(self._stores.tail, shards, offsets, clock_ms, path=self.path / LOG, lanes=list(self._lanes))

    def _close_plane(self) -> None:
        plane, self._plane, self._segments = self._plane, None, None
        if plane is not None:
            plane.close()


class _Stores:
    """The loaded store and its in-memory overlays."""

    def __init__(self, base: RocksStore) -> None:
        self.base = base
        self.rows = OverlayStore(base)
        """Overlay for what opening a plane writes."""
        self.tail = OverlayStore(base)
        """Overlay for index rows of frames beyond the index on disk."""
        self.frames = 0
        """Number of frames in `tail`."""
        self._manifests: Stamp | None = None
        """Manifests of the loaded store; None if they changed during the load."""

    def loaded(self, before: Stamp, after: Stamp) -> None:
        """Record a load of the base between these two stamps. Drop `tail` if the index below may have changed."""
        if before != after or before != self._manifests:
            self.forget_tail()
        self._manifests = before if before == after else None

    def forget_tail(self) -> None:
        self.tail.discard()
        self.frames = 0


def _topics_after(after: str | None, plane: StreamPlane) -> TopicPage:
    return plane.topics.page(start_after=after, limit=PAGE)


def _groups_after(after: str | None, plane: StreamPlane) -> list[str]:
    return plane.groups.page(start_after=after, limit=PAGE)


def _require_seen(plane: StreamPlane, name: str) -> None:
    if plane.topics.get(name).config.engine is Engine.MEMORY:
        raise InvalidArgumentError(
            f"topic {name!r} uses the memory engine: its records are in the memory of the process that has the "
            "store open, and only that process can read them"
        )


def _epochs(marks: list[Mark | None]) -> list[int | None]:
    return [None if mark is None else mark.epoch for mark in marks]


def _manifests(stamp: Stamp) -> Stamp:
    """Return the part of a stamp that changes when SST files are added or removed."""
    return tuple(each for each in stamp if each[0].startswith(MANIFEST))


def _stamp(path: Path) -> Stamp:
    """Return names and sizes of the store's WAL files and manifests. Every change of the store grows one of them."""
    found = []
    try:
        with os.scandir(path / DATABASE) as entries:
            for entry in entries:
                if entry.name.endswith(".log") or entry.name.startswith(MANIFEST):
                    try:
                        found.append((entry.name, entry.stat().st_size))
                    except FileNotFoundError:
                        continue
    except FileNotFoundError:
        # The store is missing or just being created. Opening it reports which.
        return ()
    except OSError as error:
        raise os_error(error, path) from error
    return tuple(sorted(found))


class RocksdbView(RocksdbEngine):
    """The RocksDB engine over a read-only view of the store.

    Its topics are read from the WAL, which may be written but not synced. fdatasync needs no write permission, so the
    view syncs the WAL before it reads. A WAL file that has disappeared was flushed to SST files, which are durable.
    """

    def __init__(
        self, store: Store, shards: Shards, offsets: Offsets, clock_ms: Clock, leaders: Leaders, *, database: Path
    ) -> None:
        sync_wal(database)
        super().__init__(store, shards, offsets, clock_ms, leaders)


class MemoryView(MemoryEngine):
    """Memory shards of another process. A view cannot read their records, so it reports them as empty."""

    def shard_info(self, shard: int) -> ShardInfo:
        meta = self._own(shard)
        return ShardInfo(meta, meta.start_offset, meta.start_offset, meta.start_offset, 0, 0)


def sync_wal(database: Path) -> None:
    """Sync all WAL files to disk."""
    for path in wal_files(database):
        try:
            sync_data(path)
        except OSError as error:
            raise os_error(error, path) from error
