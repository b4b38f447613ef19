"""The streams of a virtual host, shared by AMQP stream queues, Kafka, RocketMQ and the admin API.

When consumers can read new records, the writer calls `notify` with the topic. Each protocol registers a listener that
wakes its own consumers.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from basaltmq.store.api import Store
from basaltmq.streams.adapter import Clock
from basaltmq.streams.stored import StoredStreams


class VHostStreams(StoredStreams):
    """Owns the stream plane of a virtual host."""

    def __init__(self, store: Store, path: Path | None, clock_ms: Clock) -> None:
        super().__init__(store, path, clock_ms)
        self._listeners: list[Callable[[str], None]] = []

    def listen(self, listener: Callable[[str], None]) -> Callable[[], None]:
        """Register a listener for topics with new records. Return a function that removes it."""
        self._listeners.append(listener)
        return lambda: self._listeners.remove(listener)

    def notify(self, topic: str, *, source: Callable[[str], None] | None = None) -> None:
        """Notify all listeners except `source`, the one of the writer, that a topic has new records to read."""
        for listener in self._listeners:
            if listener != source:
                listener(topic)
