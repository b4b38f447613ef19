"""Publisher credit: a queue with fast consumers stays short even if publishers are faster to serve (P12).

A queue limits its publishers while it has consumers and a backlog of more than `BACKLOG_MAX` messages or
`BACKLOG_BYTES_MAX`. Its publishers then get credit once per turn of the loop:

    credit = messages delivered since the last turn
             + 0              if a consumer is ready: it is served first
             + CREDIT_MIN     if all consumers wait for their own acknowledgements or do not read
             + CREDIT_SLOW    if, in addition, the queue delivered nothing: its consumers are slow

A publisher without credit is not read. It continues when a later turn gives credit, in order of arrival. There is no
timer and no rate. A turn without deliveries takes microseconds, so slow consumers do not slow down their publishers:
the queue buffers. While consumers are fast, deliveries fill the turns, and publishers get as much as was delivered.

A queue without consumers has no limit. The limit ends when the backlog falls to half of the bound.

The kernel buffers for a publisher that is not read: its receive buffer grows up to `net.ipv4.tcp_rmem`, often 6 to
32 MiB, or 100,000 small messages. So the first wait for credit fixes the buffer at `RECEIVE_BUFFER_BYTES`.
"""

from __future__ import annotations

import asyncio
import socket
from collections import deque
from collections.abc import Callable, Iterable
from typing import Final

from basaltmq.broker.consumers.queue import UNLIMITED_CREDIT, BrokerQueue
from basaltmq.errors import BasaltError
from basaltmq.queues.plane import QueuePlane

BACKLOG_MAX: Final = 1000
"""Ready messages above which publishers need credit: four leases, so consumers never wait for publishers."""

BACKLOG_BYTES_MAX: Final = 8 << 20
"""The same for large messages, in bytes: two leases."""

CREDIT_MIN: Final = 8
"""Messages per turn for a queue whose consumers are busy. More would let the queue grow: turns take up to 20 ms."""

CREDIT_SLOW: Final = 256
"""Messages per turn for a queue that delivered nothing. On a busy loop this is more than 10,000 per second."""

RECEIVE_BUFFER_BYTES: Final = 128 << 10
"""Linux doubles it for its overhead. Ten publishers without confirms had sent 70,000 messages ahead before."""


def limit_receive_buffer(transport: asyncio.BaseTransport | None) -> None:
    """Fix the receive buffer of a publisher's socket. Call it once."""
    sock = None if transport is None else transport.get_extra_info("socket")
    if sock is not None:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, RECEIVE_BUFFER_BYTES)


class PublisherCredit:
    """Limits publishers of queues whose consumers are behind. One per virtual host."""

    def __init__(self, plane: QueuePlane) -> None:
        self._plane = plane
        self._limited: dict[BrokerQueue, int] = {}
        """Limited queues, with their delivery counter at the last turn."""
        self._waiting: deque[Callable[[], None]] = deque()

    def __bool__(self) -> bool:
        """Whether a publisher waits for the next turn."""
        return bool(self._waiting)

    def check(self, queues: Iterable[BrokerQueue]) -> None:
        """Limit the queues that have consumers and a large backlog. Called after messages were written to them."""
        for queue in queues:
            if len(queue.consumers) and queue.publish_credit == UNLIMITED_CREDIT and self._is_behind(queue, 1):
                queue.publish_credit = 0
                self._limited[queue] = queue.delivered

    def wait(self, go_on: Callable[[], None]) -> None:
        """Call `go_on` in the next turn, after credit was given."""
        self._waiting.append(go_on)

    def next_turn(self) -> None:
        """Give credit for the deliveries of this turn, and let the waiting publishers continue."""
        for queue, counted in list(self._limited.items()):
            if not len(queue.consumers) or not self._is_behind(queue, 2):
                self._end(queue)
                continue
            delivered = queue.delivered - counted
            self._limited[queue] = queue.delivered
            if queue.consumers.first_rotation() is None:
                delivered += CREDIT_MIN if delivered else CREDIT_SLOW
            # Credit that nobody used expires: saved credit would let the queue grow in a burst.
            queue.publish_credit = delivered
        for _ in range(len(self._waiting)):
            self._waiting.popleft()()

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
