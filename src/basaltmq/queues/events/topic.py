"""Writes lifecycle events of queues to the system topic `__events`. Off by default; all messages or a sample.

    queues ──> Recorder (bounded bytes) ──> one thread ──> __events, one record per some tens of kilobytes

The thread waits for events, collects them for a short time, and appends them (format: `events/event.py`). Queue
operations neither wait for it nor fail because of it. If the topic cannot be written, or is slower than the queues,
events are dropped and counted. Closing writes the waiting events.
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
"""How long to collect events before a write, in seconds, unless there are many."""

RECORD_BYTES: Final = 64 << 10
"""Size of a record. A reader decodes it in a few milliseconds."""

RETENTION_MS: Final = 7 * 24 * 3600 * 1000
RETENTION_BYTES: Final = 1 << 30
"""Keep events for a week or up to 1 GiB (about thirty million), whichever is less. Alter the topic for more."""

_log = logging.getLogger("basaltmq")


@dataclass(frozen=True, slots=True)
class EventSettings:
    """How to publish lifecycle events."""

    sample: float = 1.0
    """Share of messages whose events are published, chosen by id."""
    gather_s: float = GATHER_S
    engine: Engine = Engine.SEGMENT
    """Engine of the topic when it is created."""

    def __post_init__(self) -> None:
        if not self.gather_s >= 0:
            raise InvalidConfigError(f"gather_s must be 0 seconds or more, not {self.gather_s!r}")
        Recorder(sample=self.sample)


class EventWriter:
    """Writes recorded events to the topic."""

    def __init__(self, streams: StreamPlane, settings: EventSettings) -> None:
        self._streams = streams
        self._settings = settings
        self._something = threading.Event()
        self._much = threading.Event()
        self._closing = False
        self.recorder = Recorder(sample=settings.sample, on_first=self._something.set, on_full=self._much.set)
        self.written = 0
        """Events written to the topic."""
        self.failed = 0
        """Events that could not be written."""
        self._said = ""
        self._written = threading.Condition()
        self._thread = threading.Thread(target=self._run, name="basalt-events", daemon=True)
        self._thread.start()

    def counters(self) -> dict[str, int]:
        """Return counters: written, waiting bytes, dropped because of the limit, failed to be written."""
        return {
            "written": self.written,
            "waiting_bytes": self.recorder.waiting_bytes,
            "dropped": self.recorder.dropped,
            "failed": self.failed,
        }

    def flush(self, timeout_s: float | None = None) -> bool:
        """Wait until all events so far are written, or lost and counted. False after the timeout."""
        recorded = self.recorder.recorded
        self._much.set()
        self._something.set()
        with self._written:
            return self._written.wait_for(lambda: self.written + self.failed >= recorded or self._closing, timeout_s)

    def close(self) -> None:
        """Write the waiting events and stop."""
        self._closing = True
        self._much.set()
        self._something.set()
        self._thread.join()
        self._write()

    def _run(self) -> None:
        while not self._closing:
            self._something.wait()
            self._much.wait(self._settings.gather_s)
            # Clear before taking, so that events arriving during the write set it again.
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
            # A record ends with the first block that fills it.
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
