"""Stream spool: moves dead letters from the queue plane into streams.

Dead-lettering is one atomic batch, and a stream's log cannot be part of it. So the batch puts a dead letter for a
stream into the plane's queue of the same name. The spool appends it to the stream and removes it from that queue when
the append is durable. A crash in between appends it twice but loses nothing.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from functools import partial
from typing import Final

from basaltmq.broker.consumers.queue import BrokerQueue
from basaltmq.broker.consumers.stream_queue import StreamQueues
from basaltmq.broker.message.operations import ACK, Settlement
from basaltmq.queues.plane import QueuePlane

LEASE_MAX: Final = 64
"""Messages moved per batch."""


class StreamSpool:
    """Moves waiting messages from the plane's queue of a stream into the stream."""

    def __init__(self, plane: QueuePlane, streams: StreamQueues, settle: Callable[[Settlement], None]) -> None:
        self._plane = plane
        self._streams = streams
        self._settle = settle
        self._busy: set[str] = set()

    def move(self, queue: BrokerQueue) -> None:
        """Move one batch. The next one follows when it is durable."""
        if queue.name in self._busy or queue.stream is None:
            return
        found = self._plane.lease(queue.name, LEASE_MAX, visibility_ms=0)
        if not found:
            return
        self._busy.add(queue.name)
        settlement = Settlement(queue.name, found[0].token, [each.id for each in found], ACK)
        done = self._streams.append(queue, [(each.properties, each.payload) for each in found])
        done.add_done_callback(partial(self._moved, queue, settlement))

    def _moved(self, queue: BrokerQueue, settlement: Settlement, done: asyncio.Future[None]) -> None:
        self._busy.discard(queue.name)
        if not done.cancelled() and done.exception() is None and queue.stream is not None:
            self._settle(settlement)
            self.move(queue)
