"""From queues to consumers: who has messages and somebody to take them is served, a bounded piece per turn.

A queue is looked at when the plane says that something became ready in it, or when a consumer came, got credit or
reads again. Messages are leased for all consumers of one turn at once and dealt out in turn; so one lease serves many,
and settling goes by lease and message id. What goes to a consumer that does not acknowledge is settled in the next
batch.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable
from itertools import islice
from typing import Final

from basaltmq.broker.consumers.consumer import Consumer, share_out, wanted
from basaltmq.broker.consumers.queue import LEASE_BYTES, BrokerQueue
from basaltmq.broker.consumers.tick_batch import ACK, REQUEUE, Settlement
from basaltmq.errors import CorruptionError, QueueFailedError, QueueNotFoundError, StoreStalledError
from basaltmq.queues.leases.delivery import Delivery
from basaltmq.queues.plane import QueuePlane

QUEUES_PER_TURN: Final = 64
"""Queues served in one turn of the loop, at most."""

SERVE_S: Final = 0.005
"""Time for deliveries per turn. At least one queue is served: with a full piece of large messages some milliseconds."""

_log: Final = logging.getLogger(__name__)


class Dispatch:
    """The queues that may have something for somebody."""

    def __init__(
        self,
        plane: QueuePlane,
        *,
        settle: Callable[[Settlement], None],
        clock_s: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._plane = plane
        self._clock_s = clock_s
        self._settle = settle
        self._waiting: dict[BrokerQueue, None] = {}

    def __bool__(self) -> bool:
        return bool(self._waiting)

    def add(self, queue: BrokerQueue) -> None:
        """Look at a queue in this turn."""
        self._waiting[queue] = None

    def forget(self, queue: BrokerQueue) -> None:
        self._waiting.pop(queue, None)

    def run(self) -> bool:
        """Serve the queues that wait longest, a piece of each; the others, and who has more to give, wait on.

        False if the store is behind and somebody has to wait for it.
        """
        until_s = self._clock_s() + SERVE_S
        for number, queue in enumerate(list(islice(self._waiting, QUEUES_PER_TURN))):
            if number and self._clock_s() >= until_s:
                break
            if queue not in self._waiting:
                # Another's delivery, a moment ago, had it deleted.
                continue
            # Before it is served: a consumer may ask for it again meanwhile.
            del self._waiting[queue]
            if queue.is_stream:
                if queue.stream is not None and queue.stream.deliver():
                    self._waiting[queue] = None
                continue
            try:
                has_more = queue.has_ready and self._serve(queue)
            except StoreStalledError:
                self._waiting[queue] = None
                return False
            if has_more:
                self._waiting[queue] = None
        return True

    def _serve(self, queue: BrokerQueue) -> bool:
        """Hand out one piece; True if there may be more to hand out."""
        line = queue.consumers.first_line()
        if line is None:
            return False
        count = wanted(line, queue.lease_max)
        try:
            found = self._plane.lease(queue.name, count, visibility_ms=queue.lease_ms, size_bytes_max=LEASE_BYTES)
        except QueueNotFoundError:
            return False
        except QueueFailedError:
            # Logged where it failed. One that is not down is read again at once; one that is, when it is restarted.
            queue.has_ready = self._plane.damage.error_of(queue.name) is None
            return queue.has_ready
        except CorruptionError as error:
            # The other queues are served; this one is tried again when something happens to it.
            _log.error("queue %r cannot be served: %s", queue.name, error)
            queue.has_ready = False
            return False
        if not found:
            queue.has_ready = False
            return False
        queue.weigh(found)
        queue.delivered += len(found)
        if len(found) < count:
            # Nothing more, or the next ones exceed LEASE_BYTES.
            queue.has_ready = self._plane.has_ready(queue.name)
        self._share(queue, line, found)
        return queue.has_ready

    def hand(self, queue: BrokerQueue, found: list[Delivery]) -> None:
        """Deal out messages that were leased for consumers who can take them all."""
        line = queue.consumers.first_line()
        assert line is not None, "somebody could take them when they were leased"
        queue.delivered += len(found)
        self._share(queue, line, found)

    def _share(self, queue: BrokerQueue, line: deque[Consumer], found: list[Delivery]) -> None:
        for consumer, deliveries in share_out(line, found):
            if consumer.is_cancelled:
                # Another's delivery, a moment ago, made it go.
                self._settle(Settlement(queue.name, found[0].token, [each.id for each in deliveries], REQUEUE))
                continue
            if consumer.no_ack:
                self._settle(Settlement(queue.name, found[0].token, [each.id for each in deliveries], ACK))
            try:
                consumer.sink.deliver(consumer, deliveries)
            except Exception:
                # A bug of that channel, which still holds the messages: the other queues are served all the same.
                _log.exception("consumer %r of queue %r failed to take messages", consumer.tag, queue.name)
