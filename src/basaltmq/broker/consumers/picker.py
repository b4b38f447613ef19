"""Serves consumers with a selection: reads their queue in portions, and leases the messages that they accept.

A consumer reads only while it has credit. One turn reads for at most `CHOOSE_S`, so a long queue in which nothing is
accepted delays no other client. The consumers of a queue take turns.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from itertools import islice
from typing import Any, Final

from basaltmq.broker.consumers.consumer import Consumer
from basaltmq.broker.consumers.queue import LEASE_BYTES, BrokerQueue
from basaltmq.broker.consumers.selection import Selection
from basaltmq.broker.message.operations import ACK, Settlement
from basaltmq.errors import BasaltError, CorruptionError, QueueFailedError, QueueNotFoundError
from basaltmq.queues.plane import QueuePlane

CHOOSE_S: Final = 0.002
"""Time for reading per queue and turn."""

PAGE: Final = 64
"""Messages read at once. An evaluation takes 10 to 30 us, and 1 ms with the costliest selector."""

_log: Final = logging.getLogger(__name__)


class Picker:
    """Delivers to consumers with a selection."""

    def __init__(self, plane: QueuePlane, settle: Callable[[Settlement], None], clock_s: Callable[[], float]) -> None:
        self._plane = plane
        self._settle = settle
        self._clock_s = clock_s

    def serve(self, queue: BrokerQueue) -> bool:
        """Serve the consumers of a queue in turn. Return whether one of them has more to read."""
        choosing = queue.consumers.choosing
        until_s = self._clock_s() + CHOOSE_S
        for consumer in sorted(choosing, key=lambda each: -each.priority):
            if consumer.selection is None or not (consumer.can_take() and consumer.selection.is_behind):
                continue
            # The next turn begins with another consumer.
            del choosing[consumer]
            choosing[consumer] = None
            try:
                self._serve_one(queue, consumer, consumer.selection, until_s)
            except QueueNotFoundError:
                return False
            except QueueFailedError:
                # A queue that has failed is read again after its restart, any other at once.
                return self._plane.damage.error_of(queue.name) is None
            except CorruptionError as error:
                _log.error("cannot serve queue %r: %s", queue.name, error)
                return False
            if self._clock_s() >= until_s:
                break
        return any(each.can_take() and each.selection is not None and each.selection.is_behind for each in choosing)

    def _serve_one(self, queue: BrokerQueue, consumer: Consumer, selection: Selection, until_s: float) -> None:
        while consumer.can_take() and selection.is_behind:
            deliveries = (
                self._copies(queue, consumer, selection, until_s)
                if selection.is_copy
                else self._leased(queue, consumer, selection, until_s)
            )
            if deliveries:
                consumer.credit_left -= len(deliveries)
                consumer.delivered += len(deliveries)
                _deliver(consumer, deliveries)
            if self._clock_s() >= until_s:
                return

    def _accepted(self, read: list[Any], selection: Selection, until_s: float) -> list[Any]:
        """Return the messages that the consumer accepts. Messages that are not evaluated in time are read again."""
        accepts = selection.accepts
        if accepts is None:
            return read
        found = []
        for number, each in enumerate(read, 1):
            if accepts(each):
                found.append(each)
            if self._clock_s() >= until_s:
                for rest in read[number:]:
                    selection.scan.again(rest)
                break
        return found

    def _copies(self, queue: BrokerQueue, consumer: Consumer, selection: Selection, until_s: float) -> list[Any]:
        count = min(consumer.credit_left, PAGE) if selection.accepts is None else PAGE
        read = self._plane.readers.read(queue.name, selection.scan, count, LEASE_BYTES, copy=True)
        found = self._accepted(read, selection, until_s)
        for each in found[consumer.credit_left :]:
            selection.scan.again(each)
        return found[: consumer.credit_left]

    def _leased(self, queue: BrokerQueue, consumer: Consumer, selection: Selection, until_s: float) -> list[Any]:
        waiting = selection.waiting
        assert selection.accepts is not None, "a selection without a filter takes copies"
        if not waiting:
            read = self._plane.readers.read(queue.name, selection.scan, PAGE, LEASE_BYTES, copy=False)
            waiting.extend([each.key for each in self._accepted(read, selection, until_s)])
        keys = list(islice(waiting, min(consumer.credit_left, queue.lease_max)))
        if not keys:
            return []
        found = self._plane.readers.lease(queue.name, keys, LEASE_BYTES, visibility_ms=queue.lease_ms)
        for _ in keys:
            waiting.popleft()
        if found:
            queue.adapt_lease(found)
            queue.delivered += len(found)
            if consumer.no_ack:
                self._settle(Settlement(queue.name, found[0].token, [each.id for each in found], ACK))
        return found


def _deliver(consumer: Consumer, deliveries: list[Any]) -> None:
    try:
        consumer.sink.deliver(consumer, deliveries)
    except BasaltError:
        raise
    except Exception:
        # A bug in the sink, which still holds the messages. Other consumers must not be affected.
        _log.exception("delivery to consumer %r failed", consumer.tag)
