"""The streams of a store on disk: a stream plane with the log beside the database, opened on first use.

The embedded API, the broker and bulk imports use the same class. Retention, reclamation, checkpoints and backups
exclude each other.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Final

from basaltmq.errors import ShardNotFoundError
from basaltmq.log.backup import copy_lane
from basaltmq.log.segment import SUFFIX
from basaltmq.store.api import Store
from basaltmq.store.directory import LOG, QUARANTINE
from basaltmq.store.rocks import RocksStore
from basaltmq.streams.adapter import Clock
from basaltmq.streams.engines.segment.engine import SegmentEngine
from basaltmq.streams.leaders import Leaders
from basaltmq.streams.offsets import Offsets
from basaltmq.streams.plane import EngineMaker, OffsetStrategy, StreamPlane
from basaltmq.streams.shards import Engine, Shards

FRAMES_NAMED_MAX: Final = 20
"""Damaged frames, or losses, named by a health check. A frame costs two lookups."""

CHECKPOINT_LOG_BYTES: Final = 64 << 20
"""Checkpoint the index after this growth of the log. Recovery and views of other processes replay at most this much."""

_log: Final = logging.getLogger(__name__)


class StoredStreams:
    """Owns the stream plane of one store. The store stays open."""

    def __init__(
        self,
        store: Store,
        path: Path | None,
        clock_ms: Clock,
        offset_strategy: OffsetStrategy = OffsetStrategy.PERSISTENT,
        *,
        in_loop: bool = False,
    ) -> None:
        """`path` is the directory of the store. Without it, or without RocksDB, there is no segment engine."""
        self._store = store
        self._path = path if isinstance(store, RocksStore) else None
        self._clock_ms = clock_ms
        self._offset_strategy = offset_strategy
        self._in_loop = in_loop
        self._plane: StreamPlane | None = None
        self._segments: SegmentEngine | None = None
        self._cleaning = threading.Lock()
        self._checkpointed_bytes = 0

    @property
    def plane(self) -> StreamPlane:
        if self._plane is None:
            makers: dict[Engine, EngineMaker] = {}
            if self._path is not None:
                makers[Engine.SEGMENT] = self._open_segments
            self._plane = StreamPlane(self._store, self._clock_ms, makers=makers, offset_strategy=self._offset_strategy)
        return self._plane

    @property
    def is_open(self) -> bool:
        return self._plane is not None

    @property
    def default_engine(self) -> Engine:
        """The engine of new topics: segments if there is a log."""
        return Engine.ROCKSDB if self._path is None else Engine.SEGMENT

    def segments(self) -> SegmentEngine | None:
        """The segment engine, opened if necessary; None if this store has no log."""
        if self._path is not None:
            self.plane.engines.get(Engine.SEGMENT)
        return self._segments

    def _open_segments(
        self, store: Store, shards: Shards, offsets: Offsets, clock_ms: Clock, leaders: Leaders
    ) -> SegmentEngine:
        assert isinstance(store, RocksStore)
        assert self._path is not None
        log, quarantine = self._path / LOG, self._path / QUARANTINE
        engine = SegmentEngine(
            store, shards, offsets, clock_ms, leaders, path=log, quarantine=quarantine, in_loop=self._in_loop
        )
        for fault in engine.faults:
            _log.error("the log at %s is damaged: %s", log, fault)
        self._segments = engine
        return engine

    def maintain(self) -> None:
        """Run a bounded part of retention. Checkpoint the index if the log has grown enough. Thread-safe."""
        if self._plane is None:
            return
        with self._cleaning:
            self._plane.engines.retain(self._clock_ms())
            if self._segments is not None:
                end = sum(lane.log.end for lane in self._segments.lanes)
                if end - self._checkpointed_bytes >= CHECKPOINT_LOG_BYTES:
                    self._segments.checkpoint()
                    self._checkpointed_bytes = end

    def reclaim(self, is_enough: Callable[[], bool]) -> None:
        """Free the space of deleted records, a bounded part. Thread-safe."""
        if self._segments is not None:
            with self._cleaning:
                self._segments.reclaim(is_enough)

    def backup(self, target: Path) -> None:
        """Write an openable copy of the store and its log to `target`, which must not exist. Thread-safe.

        Retention waits for the backup. The creation of topics waits until the log is copied. Otherwise the copied log
        could contain frames of a shard that the copied rows lack, and the next shard would inherit them with its
        number.
        """
        assert isinstance(self._store, RocksStore)
        if self._plane is None:
            self._store.checkpoint(target)
            return
        with self._cleaning, ExitStack() as topics_locked:
            topics_locked.enter_context(self._plane.topics.lock)

            def copy_log(draft: Path) -> None:
                engine = self.segments()
                for lane in () if engine is None else engine.lanes:
                    copy_lane(lane.log, draft / LOG / lane.log.path.name)
                topics_locked.close()

            self._store.checkpoint(target, add_files=copy_log)

    def log_bytes(self) -> int:
        """Size of the log, open or not."""
        if self._segments is not None:
            return self._segments.log_bytes()
        if self._path is None:
            return 0
        return sum(file.stat().st_size for file in (self._path / LOG).glob(f"*/*{SUFFIX}"))

    @property
    def log_path(self) -> Path | None:
        """The directory of the log, or None if there is none."""
        return None if self._path is None else self._path / LOG

    def damaged_frames(self) -> list[str]:
        """Return one line (topic, partition, offsets) per damaged frame that reads found since the start."""
        if self._segments is None:
            return []
        return [
            f"{self._named(each.shard)}, offsets {each.base_offset} to {each.last_offset}"
            for each in list(self._segments.damaged_frames.values())[:FRAMES_NAMED_MAX]
        ]

    def log_faults(self) -> list[str]:
        """Return one line per loss in the log that the last open found."""
        return [] if self._segments is None else self._segments.faults[:FRAMES_NAMED_MAX]

    def _named(self, shard: int) -> str:
        try:
            meta = self.plane.shards.get(shard)
        except ShardNotFoundError:
            return f"the deleted shard {shard}"
        topic = self.plane.catalog.get(meta.topic_id)
        return f"topic {str(meta.topic_id) if topic is None else topic.name!r}[{meta.partition}]"

    def damaged_count(self) -> int:
        return 0 if self._segments is None else len(self._segments.damaged_frames)

    def close(self) -> None:
        if self._plane is not None:
            self._plane.close()
