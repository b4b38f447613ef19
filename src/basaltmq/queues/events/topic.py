"""Lifecycle events of queues in the system topic `__events`: off unless asked for, all or a sample, in batches.

    queues ──> Recorder (bytes that wait, bounded) ──> one thread ──> __events, a record per some tens of kilobytes

The thread sleeps until there is something, gathers for a moment, and appends; what a record holds is told in
`queues.lifecycle`. A queue operation never waits for it and never fails by it: when the topic cannot be written, or is
slower than the queues, events are dropped and counted. Closing writes what waits.
"""

from __future__ import annotations

import logging
import threading
from bisect import bisect_left
from dataclasses import dataclass
from itertools import accumulate
from typing import Final

from basaltmq.durability import Durability
from basaltmq.errors import BasaltError, InvalidConfigError, TopicExistsError
from basaltmq.log.batches.record import Record
from basaltmq.queues.events.event import TOPIC
from basaltmq.queues.events.recorder import Recorder
from basaltmq.streams.plane import StreamPlane
from basaltmq.streams.shards import Engine
from basaltmq.streams.topics import TopicConfig

GATHER_S: Final = 0.25
"""How long events gather before they are written, unless there are many."""

RECORD_BYTES: Final = 64 << 10
"""Blocks put together in one record: a reader takes it apart in a few milliseconds."""

RETENTION_MS: Final = 7 * 24 * 3600 * 1000
RETENTION_BYTES: Final = 1 << 30
"""A week or a gigabyte of events, some thirty million, whichever is less; alter the topic for more."""

_log = logging.getLogger("basaltmq")


@dataclass(frozen=True, slots=True)
class EventSettings:
    """How lifecycle events are told."""

    sample: float = 1.0
    """The share of messages whose events are told, chosen by id."""
    gather_s: float = GATHER_S
    engine: Engine = Engine.SEGMENT
    """Of the topic, when it is made."""

    def __post_init__(self) -> None:
        if not self.gather_s >= 0:
            raise InvalidConfigError(f"gather_s is 0 seconds or more, not {self.gather_s!r}")
        Recorder(sample=self.sample)


class EventWriter:
    """Brings what a recorder gathered to the topic."""

    def __init__(self, streams: StreamPlane, settings: EventSettings) -> None:
        self._streams = streams
        self._settings = settings
        self._something = threading.Event()
        self._much = threading.Event()
        self._closing = False
        self.recorder = Recorder(sample=settings.sample, on_first=self._something.set, on_full=self._much.set)
        self.written = 0
        """Events that are in the topic."""
        self.failed = 0
        """Events that could not be written."""
        self._said = ""
        self._written = threading.Condition()
        self._thread = threading.Thread(target=self._run, name="basalt-events", daemon=True)
        self._thread.start()

    def counters(self) -> dict[str, int]:
        """How the events fare: written, waiting bytes, dropped for want of room, failed to be written."""
        return {
            "written": self.written,
            "waiting_bytes": self.recorder.waiting_bytes,
            "dropped": self.recorder.dropped,
            "failed": self.failed,
        }

    def flush(self, timeout_s: float | None = None) -> bool:
        """Return when every event told so far is written, or lost and counted; False if that takes longer."""
        told = self.recorder.recorded
        self._much.set()
        self._something.set()
        with self._written:
            return self._written.wait_for(lambda: self.written + self.failed >= told or self._closing, timeout_s)

    def close(self) -> None:
        """Write what waits, and stop."""
        self._closing = True
        self._much.set()
        self._something.set()
        self._thread.join()
        self._write()

    def _run(self) -> None:
        while not self._closing:
            self._something.wait()
            self._much.wait(self._settings.gather_s)
            # Cleared before taking: what comes while we write sets them again.
            self._something.clear()
            self._much.clear()
            if not self._closing:
                self._write()

    def _write(self) -> None:
        blocks, events = self.recorder.take()
        if not blocks:
            return
        try:
            self._append(blocks)
            self.written += events
            self._said = ""
        except BasaltError as error:
            self.failed += events
            if str(error) != self._said:
                _log.error("lifecycle events are lost: %s", error)
            self._said = str(error)
        except Exception:
            self.failed += events
            _log.exception("lifecycle events are lost")
        with self._written:
            self._written.notify_all()

    def _append(self, blocks: list[bytes]) -> None:
        if self._streams.topics.find(TOPIC) is None:
            self._create()
        whole = b"".join(blocks)
        ends = list(accumulate(map(len, blocks)))
        records: list[Record] = []
        begin = 0
        while begin < len(whole):
            # A record ends where a block does, with the first that fills it.
            end = ends[min(bisect_left(ends, begin + RECORD_BYTES), len(ends) - 1)]
            records.append(Record(whole[begin:end]))
            begin = end
        self._streams.drivers.append_batch(TOPIC, records, durability=Durability.WRITTEN)

    def _create(self) -> None:
        config = TopicConfig(
            engine=self._settings.engine,
            durability=Durability.WRITTEN,
            retention_ms=RETENTION_MS,
            retention_bytes=RETENTION_BYTES,
        )
        try:
            self._streams.topics.create(TOPIC, config)
        except TopicExistsError:
            return
