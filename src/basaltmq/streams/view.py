"""Topics, records and groups of a store that another process may have open for writing: read only, beside it.

    with StreamView.open("data") as view:
        batch = view.read("orders", 0, offset=0)

No lock is taken and no file is written, so a view works while a writer runs, after one crashed, on a store nobody has
open, on a backup and on a read-only file system. It shows one moment until `refresh` or `wait`.

What it stands on: a read-only RocksDB of that moment (`open_view`), the plane over an `OverlayStore` on it, because
opening a plane writes, and `SegmentView`, whose index lives in another overlay. A refresh looks at the log first and at
the store after it, and so knows the shard of every frame it meets. The store is gathered again only if its files have
changed, which appends to segment topics do not do; and by `wait` not all the time, because it takes some 50 ms and more
with a long WAL: topics and commits may then be seen a little later than records.

The overlay of the index stays as long as nothing was flushed below; when something was, it is dropped and the log read
from the index's checkpoint on, so it holds no more than what the writer holds in memory itself. A writer that was
started again (another epoch in COMMITTED) may have cut the log back: everything is read anew.

Cleaning may delete a segment under a reader. Its frames lie further on by then, durable and indexed, so the answer is
to refresh and look again.

Records of memory topics are in the other process; here they cannot be read. RocksDB topics are seen through the WAL: it
is made durable before one is read, so that nothing shown can be taken back by a power loss.

A view may be shared between threads; its calls then wait for one another.
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

from basaltmq.errors import CorruptionError, InvalidArgumentError, StoreBehindError, StoreClosedError, StoreStalledError
from basaltmq.log.committed import Mark
from basaltmq.log.lane_view import LaneView
from basaltmq.log.segment import SegmentGoneError
from basaltmq.store.api import Store
from basaltmq.store.directory import DATABASE, os_error
from basaltmq.store.open import open_view
from basaltmq.store.options import StoreOptions
from basaltmq.store.overlay import OverlayStore
from basaltmq.store.rocks import RocksStore
from basaltmq.streams.adapter import READ_BYTES, READ_RECORDS, Clock, Otherwise, ReadBatch, ShardInfo
from basaltmq.streams.engines.segment.view import CAUGHT_UP_FRAMES_MAX, SegmentView
from basaltmq.streams.groups import PartitionLag
from basaltmq.streams.leaders import Leaders
from basaltmq.streams.offsets import Offsets
from basaltmq.streams.plane import StreamPlane
from basaltmq.streams.shards import Engine, Shards
from basaltmq.streams.topics import Topic, TopicPage
from basaltmq.streams.view_engines import SeenRocksdb, UnseenMemory

LOG: Final = "log"
"""The directory of the commit log beside the store's."""

WATCH_INTERVAL_S: Final = 0.02
"""Between two looks of `wait`: some ten system calls each, about 1 % of a core."""

GATHER_PAUSE_FACTOR: Final = 9
"""`wait` leaves so many times as long between two looks at the store as one takes: at most a tenth of a core."""

GATHER_PAUSE_MAX_S: Final = 2.0
"""As long as a follower waits at most for a topic that came."""

ATTEMPTS_MAX: Final = 16
"""A reader that meets cleaning looks again; each time one more segment must have gone."""

GONE_FOR_GOOD: Final = 4
"""So many looks at the newest index in a row that name one segment which is not there: it is lost, not cleaned."""

MANIFEST: Final = "MANIFEST-"

PAGE: Final = 500
"""Topics or groups read at once when listing."""

T = TypeVar("T")


Stamp: TypeAlias = tuple[tuple[str, int], ...]
"""Names and sizes of the store's files that grow with each change."""


def _now_ms() -> int:
    return time.time_ns() // 1_000_000


class StreamView:
    """Streams as another process's files show them. Made by `open`."""

    def __init__(self, path: Path, options: StoreOptions | None, clock_ms: Clock) -> None:
        self.path = path
        self._options = options
        self._clock_ms = clock_ms
        self._lock = threading.RLock()
        self._closing = threading.Event()
        self._stores: _Stores | None = None
        self._stamp: Stamp = ()
        self._gather_due_s = 0.0
        self._lanes: list[LaneView] = []
        self._epochs: list[int | None] = []
        self._marks_seen: list[Mark | None] = []
        self._plane: StreamPlane | None = None
        self._segments: SegmentView | None = None

    @classmethod
    def open(
        cls, path: str | os.PathLike[str], *, options: StoreOptions | None = None, clock_ms: Clock = _now_ms
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
        """Every topic, in the order of names, or those after a name."""
        while True:
            page = self._on(partial(_topics_after, after))
            yield from page.topics
            if page.next_after is None:
                return
            after = page.next_after

    def topic(self, name: str) -> Topic:
        return self._on(lambda plane: plane.topics.get(name))

    def info(self, name: str, partition: int) -> ShardInfo:
        """Offsets and size of a partition, as far as a reader may see."""
        return self._on(lambda plane: plane.drivers.info(name, partition))

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
        """Records from an offset on, all or those of a key or with a tag; empty at the end."""
        if key is not None and tag is not None:
            raise InvalidArgumentError("give a key or a tag to look for, not both")

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
        """The first offset whose record is of this time or later; the end if there is none."""

        def look(plane: StreamPlane) -> int:
            _require_seen(plane, name)
            return plane.drivers.offset_at(name, partition, timestamp_ms, Otherwise.LATEST)

        return self._on(look)

    def groups(self) -> Iterator[str]:
        """Every group that has committed something."""
        after: str | None = None
        while True:
            page = self._on(partial(_groups_after, after))
            yield from page
            if len(page) < PAGE:
                return
            after = page[-1]

    def lag(self, group: str) -> list[PartitionLag]:
        """Where a group stands, by topic and partition."""
        return self._on(lambda plane: plane.groups.lag(group))

    def refresh(self) -> None:
        """Show what there is by now. Costs what was written since, and a new look at the store if that changed."""
        with self._lock:
            self._require_open()
            self._refresh()

    def wait(self, timeout_s: float | None) -> bool:
        """Refresh as soon as anything has changed since the last one; False if nothing did in that time."""
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        while True:
            with self._lock:
                self._require_open()
                is_due = time.monotonic() >= self._gather_due_s
                if self._has_changed(is_due):
                    self._refresh(is_due=is_due)
                    return True
            left_s = WATCH_INTERVAL_S if deadline is None else deadline - time.monotonic()
            if left_s <= 0 or self._closing.wait(min(left_s, WATCH_INTERVAL_S)):
                return False

    def close(self) -> None:
        """Let go of the files. Closing twice is fine; a `wait` in another thread ends."""
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
                assert self._plane is not None, "a refresh that returns has a plane"
                try:
                    return call(self._plane)
                except SegmentGoneError as error:
                    if gone is not None and str(gone) == str(error):
                        repeated += 1
                        if repeated == GONE_FOR_GOOD:
                            break
                    gone = error
        if repeated == GONE_FOR_GOOD:
            raise CorruptionError(
                f"{gone}, and the index names it: bring the file back from a backup, or go on without what was in it "
                "with basalt pipeline rebuild-index"
            ) from gone
        raise self._outpaced() from gone

    def _require_open(self) -> None:
        if self._closing.is_set():
            raise StoreClosedError(f"the view of {self.path} is closed")

    def _outpaced(self) -> StoreStalledError:
        return StoreStalledError(f"{self.path} is cleaned faster than it can be read here; try again")

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
        """Catch up; with the store in any case, or if it changed and that is due."""
        for _ in range(ATTEMPTS_MAX):
            with suppress(SegmentGoneError, StoreBehindError):
                if self._catch_up(store_too, is_due):
                    return
            # The index on disk does not need the segment that went, and the store knows the shard by now.
            store_too = True
        raise self._outpaced()

    def _catch_up(self, store_too: bool, is_due: bool) -> bool:
        """One try; False if what was seen does not fit together because it changed meanwhile."""
        try:
            return self._try(store_too, is_due)
        except StoreBehindError:
            # All that came before was applied.
            raise
        except BaseException:
            # How much was, is not known; the next try begins anew.
            self._close_plane()
            raise

    def _try(self, store_too: bool, is_due: bool) -> bool:
        marks, limits, is_anew = self._look_at_log()
        stamp = _stamp(self.path)
        gathered = store_too or self._stores is None or (is_due and stamp != self._stamp)
        if gathered:
            self._gather(stamp)
        if gathered or is_anew or self._plane is None:
            self._build(is_anew)
            # The index may reach further than the log did at the first look.
            for lane in self._lanes:
                lane.relist()
        segments = self._segments
        stores = self._stores
        assert segments is not None, "the plane is built"
        assert stores is not None, "the store was gathered"
        for number, (lane, limit) in enumerate(zip(self._lanes, limits, strict=True)):
            if not lane.covers(segments.applied(number), limit) and not (gathered and _stamp(self.path) == stamp):
                return False
        frames_max = CAUGHT_UP_FRAMES_MAX - stores.frames
        stores.frames += segments.catch_up(limits, frames_max=frames_max, is_store_current=gathered)
        segments.show(
            [
                lane.harden(segments.applied(number)) if mark is None else mark.synced_position
                for number, (lane, mark) in enumerate(zip(self._lanes, marks, strict=True))
            ]
        )
        self._marks_seen = marks
        # A writer that started meanwhile may have cut off what was read.
        return _epochs(self._marks()) == self._epochs

    def _gather(self, stamp: Stamp) -> None:
        began_s = time.monotonic()
        if self._stores is None:
            self._stores = _Stores(open_view(self.path, options=self._options))
        else:
            self._stores.base.refresh()
        self._stamp = stamp
        self._stores.gathered(_manifests(stamp), _manifests(_stamp(self.path)))
        now_s = time.monotonic()
        self._gather_due_s = now_s + min(GATHER_PAUSE_MAX_S, GATHER_PAUSE_FACTOR * (now_s - began_s))

    def _look_at_log(self) -> tuple[list[Mark | None], list[int], bool]:
        """(what is durable, how far each lane goes, whether to read them anew), in an order that keeps them true."""
        marks = self._marks()
        is_anew = _epochs(marks) != self._epochs or LaneView.exists(self._lane_path(len(self._lanes)))
        if is_anew:
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
            is_anew = is_anew or lane.end < before
        return marks, limits, is_anew

    def _build(self, is_anew: bool) -> None:
        """A plane over the store as it was gathered."""
        assert self._stores is not None, "the store was gathered"
        if is_anew or self._plane is None:
            self._stores.forget_tail()
        self._close_plane()
        self._stores.rows.discard()
        wal = partial(SeenRocksdb, database=self.path / DATABASE)
        plane = StreamPlane(
            self._stores.rows,
            self._clock_ms,
            makers={Engine.MEMORY: UnseenMemory, Engine.ROCKSDB: wal, Engine.SEGMENT: self._segment_view},
        )
        self._plane = plane
        segments = plane.engines.get(Engine.SEGMENT)
        assert isinstance(segments, SegmentView), "the plane was told which engine to make"
        self._segments = segments

    def _segment_view(
        self, store: Store, shards: Shards, offsets: Offsets, clock_ms: Clock, leaders: Leaders
    ) -> SegmentView:
        assert self._stores is not None, "the store was gathered"
        return SegmentView(self._stores.tail, shards, offsets, clock_ms, path=self.path / LOG, lanes=list(self._lanes))

    def _close_plane(self) -> None:
        plane, self._plane, self._segments = self._plane, None, None
        if plane is not None:
            plane.close()


class _Stores:
    """The store as gathered, and what is kept in memory over it."""

    def __init__(self, base: RocksStore) -> None:
        self.base = base
        self.rows = OverlayStore(base)
        """For what opening a plane writes."""
        self.tail = OverlayStore(base)
        """For the index of what the log has beyond the index on disk."""
        self.frames = 0
        """Those in `tail`."""
        self._manifests: Stamp | None = None
        """Of the moment gathered; None if the tables changed meanwhile and it may be the one or the other."""

    def gathered(self, before: Stamp, after: Stamp) -> None:
        """The base was gathered again between these two looks: is the index below the same as it was?"""
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
            f"topic {name!r} is kept by the memory engine: its records are in the memory of the process that has the "
            "store open, and only that process can read them"
        )


def _epochs(marks: list[Mark | None]) -> list[int | None]:
    return [None if mark is None else mark.epoch for mark in marks]


def _manifests(stamp: Stamp) -> Stamp:
    """The part of a stamp that changes when tables come or go."""
    return tuple(each for each in stamp if each[0].startswith(MANIFEST))


def _stamp(path: Path) -> Stamp:
    """Names and sizes of the store's logs and manifests: every change of the store makes one of them longer."""
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
        # No store, or one just being made: opening it says which.
        return ()
    except OSError as error:
        raise os_error(error, path) from error
    return tuple(sorted(found))
