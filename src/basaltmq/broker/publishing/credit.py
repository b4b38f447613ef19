"""Publisher credit: a queue with fast consumers stays short even if publishers are faster to serve (P12).

A queue limits its publishers while it has consumers and a backlog of more than `BACKLOG_MAX` messages or
`BACKLOG_BYTES_MAX`. Its publishers then get credit once per turn of the loop:

    credit = messages delivered since the last turn
             + 0              if a consumer is ready: it is served first
             + CREDIT_MIN     if all consumers wait for their own acknowledgements or do not read
             or CREDIT_SLOW   if, in addition, the queue delivered nothing for `SLOW_S`: its consumers are slow

A publisher without credit is not read. It continues when a later turn gives credit, in order of arrival.

Publishers of slow consumers continue at `CREDIT_SLOW` per `SLOW_S`, so the queue buffers. The pause is necessary on a
busy machine: a loop that spins and reads publishers instead takes the processor from the consumers, which then look
slow. While consumers are fast, deliveries fill the turns, and publishers get as much as was delivered.

A queue without consumers has no limit. The limit ends when the backlog falls to half of the bound.

The kernel buffers for a publisher that is not read: its receive buffer grows up to `net.ipv4.tcp_rmem`, often 6 to
32 MiB, or 100,000 small messages. So the first wait for credit fixes the buffer at `RECEIVE_BUFFER_BYTES`.
"""

from __future__ import annotations

import asyncio
import socket
import time
from collections import deque
from collections.abc import Callable, Iterable
from typing import Final, NamedTuple

from basaltmq.broker.consumers.queue import UNLIMITED_CREDIT, BrokerQueue
from basaltmq.errors import BasaltError
from basaltmq.queues.plane import QueuePlane

BACKLOG_MAX: Final = 1000
"""Ready messages above which publishers need credit: four leases, so consumers never wait for publishers."""

BACKLOG_BYTES_MAX: Final = 8 << 20
"""The same for large messages, in bytes: two leases."""

CREDIT_MIN: Final = 8
"""Messages per turn for a queue whose consumers are busy. More would let the queue grow: turns take up to 20 ms."""

SLOW_S: Final = 0.001
CREDIT_SLOW: Final = 32
"""Messages per `SLOW_S` for a queue that delivers nothing: up to 32,000 per second, about the rate of deliveries. With
256 per turn and no pause, 100 publishers sent 69,000 and 100 consumers received 3,800 messages per second."""

RECEIVE_BUFFER_BYTES: Final = 64 << 10
"""Linux doubles it for its overhead, which is its initial size. Without the limit ten publishers without confirms were
70,000 messages ahead."""


def limit_receive_buffer(transport: asyncio.BaseTransport | None) -> None:
    """Fix the receive buffer of a publisher's socket. Call it once."""
    sock = None if transport is None else transport.get_extra_info("socket")
    if sock is not None:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, RECEIVE_BUFFER_BYTES)


class _Count(NamedTuple):
    """The delivery counter of a limited queue when it last gave credit."""

    delivered: int
    at_s: float


class PublisherCredit:
    """Limits publishers of queues whose consumers are behind. One per virtual host."""

    def __init__(self, plane: QueuePlane, clock_s: Callable[[], float] = time.monotonic) -> None:
        self._plane = plane
        self._clock_s = clock_s
        self._limited: dict[BrokerQueue, _Count] = {}
        self._waiting: deque[Callable[[], None]] = deque()

    def __bool__(self) -> bool:
        """Whether a publisher waits for credit."""
        return bool(self._waiting)

    def check(self, queues: Iterable[BrokerQueue]) -> None:
        """Limit the queues that have consumers and a large backlog. Called after messages were written to them."""
        for queue in queues:
            if len(queue.consumers) and queue.publish_credit == UNLIMITED_CREDIT and self._is_behind(queue, 1):
                queue.publish_credit = 0
                self._limited[queue] = _Count(queue.delivered, self._clock_s())

    def wait(self, go_on: Callable[[], None]) -> None:
        """Call `go_on` after credit was given."""
        self._waiting.append(go_on)

    def next_turn(self) -> bool:
        """Give credit for the deliveries of this turn, and let the waiting publishers continue.

        Return False if there is none. Publishers then wait for a delivery, at most for `SLOW_S`.
        """
        now_s = self._clock_s()
        has_credit = not self._limited
        for queue, count in list(self._limited.items()):
            if not len(queue.consumers) or not self._is_behind(queue, 2):
                self._end(queue)
                has_credit = True
                continue
            credit = queue.delivered - count.delivered
            is_ready = queue.consumers.first_rotation() is not None
            if credit:
                if not is_ready:
                    credit += CREDIT_MIN
            elif not is_ready and now_s - count.at_s >= SLOW_S:
                credit = CREDIT_SLOW
            if credit:
                self._limited[queue] = _Count(queue.delivered, now_s)
                has_credit = True
            # Credit that nobody used expires: saved credit would let the queue grow in a burst.
            queue.publish_credit = credit
        if has_credit:
            for _ in range(len(self._waiting)):
                self._waiting.popleft()()
        return has_credit

    def drop(self) -> None:
        """End all limits, because the virtual host has failed."""
        for queue in list(self._limited):
            self._end(queue)
        self._waiting.clear()

    def _end(self, queue: BrokerQueue) -> None:
        del self._limited[queue]
        queue.publish_credit = UNLIMITED_CREDIT

    def _is_behind(self, queue: BrokerQueue, divisor: int) -> bool:
        try:
            count, size_bytes = self._plane.backlog(queue.name)
        except BasaltError:
            # Deleted or damaged. Whoever publishes next gets the error.
            return False
        return count > BACKLOG_MAX // divisor or size_bytes > BACKLOG_BYTES_MAX // divisor
