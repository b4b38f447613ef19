"""A store opened in this process, with its topics and queues.

A `Basalt` object owns the store, the stream plane and a thread for retention and cleaning. The first use of a queue
adds the queue plane with its own thread. The object is thread-safe. Closing it makes pending writes durable. A process
that dies without closing loses nothing that was confirmed.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from types import TracebackType
from typing import Any, Final, Self, Unpack

import msgspec

from basaltmq.clock import now_ms
from basaltmq.durability import Durability
from basaltmq.embedded.disk import DiskGuard, DiskLimits
from basaltmq.embedded.queue import EmbeddedQueue
from basaltmq.embedded.queue_service import QueueService
from basaltmq.embedded.topic import EmbeddedTopic
from basaltmq.embedded.transaction import Transaction, Xa
from basaltmq.embedded.waiting import Arrivals
from basaltmq.errors import BasaltError, InvalidConfigError, StoreClosedError, TopicExistsError, TopicNotFoundError
from basaltmq.log.ends import ENDS
from basaltmq.queues.config import QueueSettings
from basaltmq.queues.events.topic import EventSettings, EventWriter
from basaltmq.queues.plane import QueuePlane
from basaltmq.store.directory import LOG
from basaltmq.store.open import open_store
from basaltmq.store.options import StoreOptions
from basaltmq.store.rocks import RocksStore
from basaltmq.streams.engines.segment.index.unsynced import was_indexed
from basaltmq.streams.plane import OffsetStrategy
from basaltmq.streams.shards import Engine
from basaltmq.streams.stored import StoredStreams
from basaltmq.streams.topics import TOPICS_PER_BATCH, NewTopic, Topic, TopicConfig, in_batches, topic_config

MAINTENANCE_INTERVAL_S: Final = 1.0
"""Interval between steps of retention and cleaning. Each step is bounded."""

PAGE: Final = 500
"""Topics per catalog read when listing."""

_log = logging.getLogger("basaltmq")


@dataclass(frozen=True, slots=True)
class Settings:
    """How to open a store."""

    store: StoreOptions = field(default_factory=StoreOptions)
    offsets: OffsetStrategy = OffsetStrategy.PERSISTENT
    """Whether offset commits of groups are durable on return, or written in the background."""
    maintenance_interval_s: float = MAINTENANCE_INTERVAL_S
    clock_ms: Callable[[], int] = now_ms
    events: EventSettings | None = None
    """Publish events of queue messages to the system topic `__events`; None turns this off."""
    clock_ns: Callable[[], int] = time.time_ns
    """Clock of the queues, whose enqueue times and deadlines are in nanoseconds."""
    disk: DiskLimits = field(default_factory=DiskLimits)
    """Space limits below which producers are refused."""


class Basalt:
    """A store in this process, created by `basaltmq.open`."""

    def __init__(self, path: Path, store: RocksStore, streams: StoredStreams, settings: Settings) -> None:
        self.path = path
        self.store = store
        self.streams = streams.plane
        self._stored = streams
        self._settings = settings
        self._arrivals = Arrivals()
        self._stop = threading.Event()
        self._closing = threading.Lock()
        self._queues: QueueService | None = None
        self._disk = DiskGuard(path, store, streams, settings.disk)
        self._maintenance = threading.Thread(target=self._maintain, name="basalt-maintenance", daemon=True)
        self._maintenance.start()

    @classmethod
    def open(cls, path: str | os.PathLike[str], *, create: bool = True, settings: Settings | None = None) -> Basalt:
        settings = settings or Settings()
        settings.disk.check()
        where = Path(path)
        store = open_store(where, create=create, options=settings.store)
        try:
            streams = StoredStreams(store, where, settings.clock_ms, settings.offsets, in_loop=True)
            try:
                if (where / LOG).is_dir() or (where / ENDS).exists() or was_indexed(store):
                    # Recover now instead of at the first use, so that losses are reported at open.
                    streams.segments()
                return cls(where, store, streams, settings)
            except BaseException:
                streams.close()
                raise
        except BaseException:
            store.close()
            raise

    def topic(
        self,
        name: str,
        *,
        partitions: int | None = None,
        engine: Engine | str | None = None,
        durability: Durability | str | None = None,
        create: bool = True,
        **settings: Any,
    ) -> EmbeddedTopic:
        """Return the topic, created with these settings if it does not exist and `create` is true.

        Settings given for an existing topic must equal its own; change them with `EmbeddedTopic.alter`. `settings` are
        the fields of `TopicConfig`: retention_ms, retention_bytes, compact, ...
        """
        given = _given(partitions, engine, durability, settings)
        config = _config(f"topic {name!r}", given)
        found = self.streams.topics.find(name)
        if found is None:
            if not create:
                found = self.streams.topics.get(name)
            else:
                try:
                    found = self.streams.topics.create(name, config)
                except TopicExistsError:
                    # Another thread created it first; its settings are checked below.
                    found = self.streams.topics.get(name)
        _require_same(found, config, given)
        return self._topic(name)

    def create_topics(
        self,
        names: Iterable[str],
        *,
        partitions: int | None = None,
        engine: Engine | str | None = None,
        durability: Durability | str | None = None,
        **settings: Any,
    ) -> int:
        """Create those of the topics that do not exist, all with these settings. Return how many were created.

        250 topics share one batch and one sync. An existing topic must have the given settings, as with `topic`. An
        error of one topic is raised when the others of its batch are created; a storage error leaves none of the
        batch. The call can be repeated.
        """
        given = _given(partitions, engine, durability, settings)
        config = _config("the topics", given)
        count = 0
        for batch in in_batches(NewTopic(name, config) for name in names):
            results = self.streams.topics.create_many(batch)
            count += sum(isinstance(made, Topic) for made in results)
            for wanted, made in zip(batch, results, strict=True):
                if isinstance(made, TopicExistsError):
                    _require_same(self.streams.topics.get(wanted.name), config, given)
                elif isinstance(made, BasaltError):
                    raise made
        return count

    def _topic(self, name: str) -> EmbeddedTopic:
        return EmbeddedTopic(self.streams, name, self._arrivals, self._settings.clock_ms, self._disk.admit)

    def topics(self) -> Iterator[EmbeddedTopic]:
        """Yield all topics, ordered by name."""
        after: str | None = None
        while True:
            page = self.streams.topics.page(start_after=after, limit=PAGE)
            for topic in page.topics:
                yield self._topic(topic.name)
            if page.next_after is None:
                return
            after = page.next_after

    def delete_topic(self, name: str) -> None:
        """Delete a topic with its records and the offsets of all groups in it."""
        self.streams.topics.delete(name)
        self._arrivals.wake()

    def delete_topics(self, names: Iterable[str]) -> int:
        """Delete those of the topics that exist, 250 per batch and sync. Return how many were deleted."""
        left = iter(names)
        count = 0
        while batch := list(islice(left, TOPICS_PER_BATCH)):
            for failure in self.streams.topics.delete_many(batch):
                if failure is None:
                    count += 1
                elif not isinstance(failure, TopicNotFoundError):
                    raise failure
            self._arrivals.wake()
        return count

    def queue(self, name: str, *, create: bool = True, **settings: Unpack[QueueSettings]) -> EmbeddedQueue:
        """Return the queue, created with these settings if it does not exist and `create` is true.

        Settings given for an existing queue must equal its own; change them with `EmbeddedQueue.alter`. They are the
        fields of `QueueConfig`: visibility_timeout_ms, attempts_max, dead_letter_queue, ttl_ms, durability, ... Without
        `attempts_max`, a message gets 20 attempts and then moves to `<name>.dlq`. 0 or None means no limit.
        """
        return self._open_queues().open(name, dict(settings), create=create)

    def queues(self) -> Iterator[EmbeddedQueue]:
        """Yield all queues, ordered by name."""
        return self._open_queues().all()

    def delete_queue(self, name: str) -> None:
        """Delete a queue with all its messages. Waiting consumers get an error."""
        self.queue_plane.delete(name)

    @property
    def queue_plane(self) -> QueuePlane:
        """The queue plane: changes over several queues, fan-out, runtime settings."""
        return self._open_queues().plane

    def transaction(self) -> Transaction:
        """Return a transaction: enqueues and acks over any queues, applied all or none, to use in a `with` block."""
        queues = self._open_queues()
        return Transaction(queues.plane, queues.commit, self._disk.admit)

    @property
    def xa(self) -> Xa:
        """Branches of distributed transactions over the queues."""
        return Xa(lambda: self.queue_plane, self._disk.admit)

    def _open_queues(self) -> QueueService:
        with self._closing:
            if self._stop.is_set():
                raise StoreClosedError(f"the store at {self.path} is closed; open it again")
            if self._queues is None:
                self._queues = self._new_queues()
            return self._queues

    def _new_queues(self) -> QueueService:
        settings = self._settings.events
        events = None if settings is None else EventWriter(self.streams, settings)
        try:
            return QueueService(self.store, self._settings.clock_ns, events, self._disk.admit)
        except BaseException:
            if events is not None:
                events.close()
            raise

    def event_counters(self) -> dict[str, int]:
        """Return counters of message events: written, waiting_bytes, dropped, failed. Empty if events are off."""
        events = self._open_queues().events
        return {} if events is None else events.counters()

    def backup(self, target: str | os.PathLike[str]) -> None:
        """Write a consistent, openable copy with checksums of all files to `target`, which must not exist.

        Readers and writers continue meanwhile. Cleaning waits, and so does the creation of topics until the log is
        copied.
        """
        self._stored.backup(Path(target))

    def close(self) -> None:
        """Make pending writes durable and close. Waiting readers end. Closing twice is allowed."""
        with self._closing:
            self._stop.set()
            self._arrivals.close()
            if self._maintenance.is_alive():
                self._maintenance.join()
            with ExitStack() as last_first:
                last_first.callback(self.store.close)
                last_first.callback(self._stored.close)
                last_first.callback(self._disk.close)
                if self._queues is not None:
                    last_first.callback(self._queues.close)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _maintain(self) -> None:
        last_error = ""
        while not self._stop.wait(self._settings.maintenance_interval_s):
            try:
                self._stored.maintain()
                self._disk.maintain()
            except BasaltError as error:
                # The user's next call raises the same error. Until then, log it once.
                if str(error) != last_error:
                    _log.error("retention failed: %s", error)
                last_error = str(error)
            else:
                last_error = ""


def _given(
    partitions: int | None, engine: Engine | str | None, durability: Durability | str | None, settings: dict[str, Any]
) -> dict[str, Any]:
    """Return the settings that the caller has passed."""
    named = (("partitions", partitions), ("engine", engine), ("durability", durability))
    return settings | {name: value for name, value in named if value is not None}


def _config(what: str, given: dict[str, Any]) -> TopicConfig:
    try:
        config = topic_config(msgspec.to_builtins(given))
    except (msgspec.ValidationError, TypeError) as error:
        raise InvalidConfigError(f"{what}: {error}") from error
    config.check()
    return config


def _require_same(found: Topic, wanted: TopicConfig, given: dict[str, Any]) -> None:
    for setting in given:
        has = found.config.level if setting == "durability" else getattr(found.config, setting)
        requested = getattr(wanted, setting)
        if has != requested:
            raise InvalidConfigError(
                f"topic {found.name!r} exists with {setting}={has}, not {requested}; omit the setting to use the topic "
                "as it is, or change it with alter"
            )
