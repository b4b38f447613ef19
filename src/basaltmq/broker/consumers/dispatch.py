"""Dispatch: leases ready messages and delivers them to consumers, a bounded batch per queue and turn.

A queue is scheduled when the plane reports ready messages, or when a consumer is added, gets credit or resumes. One
lease covers all consumers of a queue in a turn, and its messages are distributed round-robin. A settlement names the
lease and the message ids. Deliveries to a consumer without acknowledgements are settled in the next batch.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable
from typing import Final

from basaltmq.broker.consumers.consumer import Consumer, distribute, total_credit
from basaltmq.broker.consumers.picker import Picker
from basaltmq.broker.consumers.queue import LEASE_BYTES, BrokerQueue
from basaltmq.broker.message.operations import ACK, REQUEUE, Settlement
from basaltmq.errors import CorruptionError, QueueFailedError, QueueNotFoundError, StoreStalledError
from basaltmq.queues.leases.delivery import Delivery
from basaltmq.queues.plane import QueuePlane

BATCHES_PER_TURN: Final = 64
"""Maximum batches in one turn of the loop."""

SERVE_S: Final = 0.005
"""Time for deliveries per turn. At least one queue is served; a full lease of large messages takes milliseconds."""

_log: Final = logging.getLogger(__name__)


class Dispatch:
    """Schedules the queues that may have deliverable messages."""

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
        self._picker = Picker(plane, settle, clock_s)
        self._waiting: dict[BrokerQueue, None] = {}

    def __bool__(self) -> bool:
        return bool(self._waiting)

    def add(self, queue: BrokerQueue) -> None:
        """Schedule a queue for this turn."""
        self._waiting[queue] = None

    def forget(self, queue: BrokerQueue) -> None:
        self._waiting.pop(queue, None)

    def run(self) -> bool:
        """Serve queues in turn, one batch each, until the time is over. Queues with more messages wait at the end.

        Return False if the store is stalled; the caller must retry later.
        """
        until_s = self._clock_s() + SERVE_S
        for number in range(BATCHES_PER_TURN):
            if not self._waiting or (number and self._clock_s() >= until_s):
                break
            queue = next(iter(self._waiting))
            # Remove it before serving, because a consumer may reschedule it meanwhile.
            del self._waiting[queue]
            try:
                has_more = self._serve_stream(queue) if queue.is_stream else self._serve(queue)
            except StoreStalledError:
                self._waiting[queue] = None
                return False
            if has_more:
                self._waiting[queue] = None
        return True

    def _serve_stream(self, queue: BrokerQueue) -> bool:
        return queue.stream is not None and bool(queue.stream.deliver())

    def _serve(self, queue: BrokerQueue) -> bool:
        """Deliver one batch to each kind of consumers; True if more messages may be ready."""
        is_choosing = bool(queue.consumers.choosing) and self._picker.serve(queue)
        return (queue.has_ready and self._serve_head(queue)) or is_choosing

    def _serve_head(self, queue: BrokerQueue) -> bool:
        rotation = queue.consumers.first_rotation()
        if rotation is None:
            return False
        count = total_credit(rotation, queue.lease_max)
        try:
            found = self._plane.lease(queue.name, count, visibility_ms=queue.lease_ms, size_bytes_max=LEASE_BYTES)
        except QueueNotFoundError:
            return False
        except QueueFailedError:
            # Already logged. A queue that has failed is read again after its restart, any other at once.
            queue.has_ready = self._plane.damage.error_of(queue.name) is None
            return queue.has_ready
        except CorruptionError as error:
            # Other queues are not affected. This one is retried after its next ready notification.
            _log.error("cannot serve queue %r: %s", queue.name, error)
            queue.has_ready = False
            return False
        if not found:
            queue.has_ready = False
            return False
        queue.adapt_lease(found)
        queue.delivered += len(found)
        if len(found) < count:
            # The queue is empty, or the next messages exceed LEASE_BYTES.
            queue.has_ready = self._plane.backlog(queue.name)[0] > 0
        self._deliver(queue, rotation, found)
        return queue.has_ready

    def deliver_leased(self, queue: BrokerQueue, found: list[Delivery]) -> None:
        """Deliver messages that were leased before. The consumers must have enough credit for all of them."""
        rotation = queue.consumers.first_rotation()
        assert rotation is not None, "a consumer was ready when the messages were leased"
        queue.delivered += len(found)
        self._deliver(queue, rotation, found)

    def _deliver(self, queue: BrokerQueue, rotation: deque[Consumer], found: list[Delivery]) -> None:
        for consumer, deliveries in distribute(rotation, found):
            if consumer.is_cancelled:
                # A delivery to another consumer in this turn cancelled it.
                self._settle(Settlement(queue.name, found[0].token, [each.id for each in deliveries], REQUEUE))
                continue
            if consumer.no_ack:
                self._settle(Settlement(queue.name, found[0].token, [each.id for each in deliveries], ACK))
            try:
                consumer.sink.deliver(consumer, deliveries)
            except Exception:
                # A bug in the channel, which still holds the messages. Other consumers must not be affected.
                _log.exception("delivery to consumer %r of queue %r failed", consumer.tag, queue.name)
