"""Publisher credit: a queue with fast consumers stays short even if publishers are faster to serve (P12).

A queue limits its publishers while it has consumers and a backlog of more than `BACKLOG_MAX` messages or
`BACKLOG_BYTES_MAX`. Each delivery then gives credit for one message. A publisher without credit is not read. It
continues when its queue delivers, in order of arrival, so a turn costs nothing for publishers that keep waiting.
Deliveries are the clock. A busy client slows its publishers down by itself, without a timer that would wake them.

Unused credit is kept up to `CREDIT_MAX`. A client that publishes each message it has consumed gets as much credit as
it needs, although its publishes arrive some turns after the deliveries.

Consumers are slow if they all wait for their own acknowledgements, or do not read, and took fewer than `SLOW_MESSAGES`
in `CHECK_S`. Their queue buffers: it gives credit for `SLOW_CREDIT` messages at each check. So a consumer that works
for a minute on each message, or never acknowledges, does not stop its publishers.

A queue without consumers has no limit. The limit ends when the backlog falls to half of the bound.

The kernel buffers for a publisher that is not read: its receive buffer grows up to `net.ipv4.tcp_rmem`, often 6 to
32 MiB, or 100,000 small messages. So the first wait for credit fixes the buffer at `RECEIVE_BUFFER_BYTES`.
"""

from __future__ import annotations

import asyncio
import socket
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import Final

from basaltmq.broker.consumers.queue import UNLIMITED_CREDIT, BrokerQueue
from basaltmq.errors import BasaltError
from basaltmq.queues.plane import QueuePlane

BACKLOG_MAX: Final = 1000
"""Ready messages above which publishers need credit: four leases, so consumers never wait for publishers."""

BACKLOG_BYTES_MAX: Final = 8 << 20
"""The same for large messages, in bytes: two leases."""

CREDIT_MAX: Final = 256
"""Unused credit that a queue keeps: the largest lease."""

CHECK_S: Final = 0.25
"""Time in which a queue shows whether its consumers are slow. A garbage collection of a client is shorter."""

SLOW_MESSAGES: Final = 250
"""Deliveries per `CHECK_S` below which consumers are slow: 1,000 per second."""

SLOW_CREDIT: Final = 2500
SLOW_CREDIT_BYTES: Final = 16 << 20
"""Credit per `CHECK_S` of a queue with slow consumers: 10,000 messages and 64 MiB per second."""

RECEIVE_BUFFER_BYTES: Final = 64 << 10
"""Linux doubles it for its overhead, which is its initial size. Without the limit ten publishers without confirms were
70,000 messages ahead."""


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
        """Limited queues, with their number of deliveries when they last gave credit."""
        self._checked: dict[BrokerQueue, int] = {}
        """Limited queues, with their number of deliveries at the last check."""
        self._waiting: dict[BrokerQueue, deque[Callable[[], None]]] = {}
        """Waiting publishers, by the queue whose credit they need."""

    def __bool__(self) -> bool:
        """Whether a publisher waits for credit."""
        return bool(self._waiting)

    @property
    def needs_check(self) -> bool:
        """Whether to call `check_speed` every `CHECK_S`."""
        return bool(self._limited)

    def check(self, queues: Iterable[BrokerQueue]) -> None:
        """Limit the queues that have consumers and a large backlog. Called after messages were written to them."""
        for queue in queues:
            if len(queue.consumers) and queue.publish_credit == UNLIMITED_CREDIT and self._is_behind(queue, 1):
                queue.publish_credit = 0
                self._limited[queue] = queue.delivered

    def wait(self, queues: Sequence[BrokerQueue], go_on: Callable[[], None]) -> None:
        """Call `go_on` when the first of these queues without credit has given some."""
        queue = next((each for each in queues if each.publish_credit < 1), queues[0])
        self._waiting.setdefault(queue, deque()).append(go_on)

    def next_turn(self) -> None:
        """Give credit for the deliveries of this turn, and let as many publishers continue as it is enough for."""
        for queue, delivered in list(self._limited.items()):
            if not len(queue.consumers):
                self._end(queue)
            elif queue.delivered != delivered:
                if self._is_behind(queue, 2):
                    self._limited[queue] = queue.delivered
                    credit = queue.publish_credit
                    queue.publish_credit = max(credit, min(CREDIT_MAX, credit) + queue.delivered - delivered)
                else:
                    self._end(queue)
        self._let_go_on()

    def check_speed(self) -> None:
        """Give credit for slow consumers, and end limits that deliveries do not end."""
        before, self._checked = self._checked, {}
        for queue in list(self._limited):
            if not len(queue.consumers) or not self._is_behind(queue, 2):
                self._end(queue)
                continue
            self._checked[queue] = queue.delivered
            is_slow = queue in before and queue.delivered - before[queue] < SLOW_MESSAGES
            if is_slow and queue.consumers.first_rotation() is None:
                count, size_bytes = self._plane.backlog(queue.name)
                room = SLOW_CREDIT_BYTES * count // max(1, size_bytes)
                queue.publish_credit = max(queue.publish_credit, 1, min(SLOW_CREDIT, room))
        self._let_go_on()

    def drop(self) -> None:
        """End all limits, because the virtual host has failed."""
        for queue in list(self._limited):
            self._end(queue)
        self._waiting.clear()

    def _let_go_on(self) -> None:
        for queue, waiting in list(self._waiting.items()):
            # Those that wait again are last in line.
            for _ in range(len(waiting)):
                if queue.publish_credit < 1:
                    break
                waiting.popleft()()
            if not waiting:
                del self._waiting[queue]

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
