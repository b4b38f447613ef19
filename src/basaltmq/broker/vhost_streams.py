"""The stream plane of a virtual host, opened on first use.

AMQP stream queues, Kafka and the admin API use the same plane. When consumers can read new records, the writer calls
`notify` with the topic. Each protocol registers a listener that wakes its own consumers.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Final

from basaltmq.errors import ShardNotFoundError
from basaltmq.log.segment import SUFFIX
from basaltmq.store.api import Store
from basaltmq.store.directory import QUARANTINE
from basaltmq.store.rocks import RocksStore
from basaltmq.streams.adapter import Clock
from basaltmq.streams.engines.segment.engine import SegmentEngine
from basaltmq.streams.leaders import Leaders
from basaltmq.streams.offsets import Offsets
from basaltmq.streams.plane import EngineMaker, StreamPlane
from basaltmq.streams.shards import Engine, Shards
from basaltmq.streams.view import LOG

_log: Final = logging.getLogger(__name__)

FRAMES_NAMED_MAX: Final = 20
"""Damaged frames, or losses, named by a health check. A frame costs two lookups."""


class VHostStreams:
    """Owns the stream plane of a virtual host."""

    def __init__(self, store: Store, path: Path | None, clock_ms: Clock) -> None:
        """`path` is the directory of the log. Without it, or without RocksDB, there is no segment engine."""
        self._store = store
        self._path = path if isinstance(store, RocksStore) else None
        self._clock_ms = clock_ms
        self._plane: StreamPlane | None = None
        self._segments: SegmentEngine | None = None
        self._listeners: list[Callable[[str], None]] = []
        self.cleaning = threading.Lock()
        """Held during retention. A backup holds it so that no segment is deleted while it is copied."""

    @property
    def plane(self) -> StreamPlane:
        if self._plane is None:
            makers: dict[Engine, EngineMaker] = {}
            if self._path is not None:
                makers[Engine.SEGMENT] = self._open_segments
            self._plane = StreamPlane(self._store, self._clock_ms, makers=makers)
        return self._plane

    @property
    def is_open(self) -> bool:
        return self._plane is not None

    @property
    def default_engine(self) -> Engine:
        """The engine of new topics: segments if there is a log."""
        return Engine.ROCKSDB if self._path is None else Engine.SEGMENT

    def segments(self) -> SegmentEngine | None:
        """The segment engine, opened if necessary; None if this virtual host has no log."""
        if self._path is not None:
            self.plane.engines.get(Engine.SEGMENT)
        return self._segments

    def _open_segments(
        self, store: Store, shards: Shards, offsets: Offsets, clock_ms: Clock, leaders: Leaders
    ) -> SegmentEngine:
        assert isinstance(store, RocksStore)
        assert self._path is not None
        log, quarantine = self._path / LOG, self._path / QUARANTINE
        engine = SegmentEngine(store, shards, offsets, clock_ms, leaders, path=log, quarantine=quarantine)
        for fault in engine.faults:
            _log.error("the log at %s is damaged: %s", log, fault)
        self._segments = engine
        return engine

    def listen(self, listener: Callable[[str], None]) -> Callable[[], None]:
        """Register a listener for topics with new records. Return a function that removes it."""
        self._listeners.append(listener)
        return lambda: self._listeners.remove(listener)

    def notify(self, topic: str, *, source: Callable[[str], None] | None = None) -> None:
        """Notify all listeners except `source`, the one of the writer, that a topic has new records to read."""
        for listener in self._listeners:
            if listener != source:
                listener(topic)

    def retain(self) -> int:
        """Run a bounded part of retention. Thread-safe."""
        if self._plane is None:
            return 0
        with self.cleaning:
            return self._plane.engines.retain(self._clock_ms())

    def reclaim(self, is_enough: Callable[[], bool]) -> None:
        """Free the space of deleted records, a bounded part. Thread-safe."""
        if self._segments is not None:
            with self.cleaning:
                self._segments.reclaim(is_enough)

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
