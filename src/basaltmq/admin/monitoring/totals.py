"""Sums over the queues of a virtual host, for the overview and the metrics.

Summing 100,000 queues takes about 1 s of CPU time. The work therefore yields to the event loop after every few queues,
and all requests within `FRESH_S` share its result.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Final

import msgspec

from basaltmq.broker.consumers.queue import BrokerQueue
from basaltmq.broker.scheduling.turns import Turns
from basaltmq.broker.vhost import VHost

FRESH_S: Final = 2.0
"""Maximum age of a result in seconds, below any usual scrape interval."""


class Totals(msgspec.Struct):
    """Contents and counters of a virtual host's queues."""

    queues: int = 0
    consumers: int = 0
    ready: int = 0
    unacked: int = 0
    bytes: int = 0
    published: int = 0
    delivered: int = 0
    redelivered: int = 0
    acked: int = 0
    expired: int = 0
    dead_lettered: int = 0
    dropped: int = 0
    quarantined: int = 0
    down: int = 0

    def add(self, vhost: VHost, queue: BrokerQueue) -> None:
        counts = vhost.counts(queue)
        self.queues += 1
        self.consumers += len(queue.consumers)
        self.ready += counts.get("ready", 0)
        self.unacked += counts.get("leased", 0)
        self.bytes += counts.get("size_bytes", 0) + counts.get("transient_bytes", 0)
        self.published += queue.published
        self.delivered += queue.delivered
        self.redelivered += queue.redelivered
        self.acked += queue.acked
        self.expired += counts.get("expired", 0)
        self.dead_lettered += counts.get("dead_lettered", 0)
        self.dropped += counts.get("dropped", 0)
        self.quarantined += counts.get("quarantined", 0)
        self.down += vhost.plane.damage.error_of(queue.name) is not None

    def plus(self, other: Totals) -> Totals:
        return Totals(*(getattr(self, name) + getattr(other, name) for name in self.__struct_fields__))


class TotalsCache:
    """Cached sums by virtual host."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._cached: dict[str, tuple[float, VHost, Totals]] = {}
        self._running: dict[str, asyncio.Task[Totals]] = {}

    async def of(self, vhost: VHost) -> Totals:
        cached = self._cached.get(vhost.name)
        if cached is not None and cached[1] is vhost and cached[0] > self._clock():
            return cached[2]
        running = self._running.get(vhost.name)
        if running is None:
            running = self._running[vhost.name] = asyncio.create_task(self._sum(vhost))
            running.add_done_callback(lambda _: self._running.pop(vhost.name, None))
        return await asyncio.shield(running)

    def last(self, name: str) -> Totals | None:
        """Return the last computed sums of a virtual host, of any age."""
        cached = self._cached.get(name)
        return None if cached is None else cached[2]

    async def _sum(self, vhost: VHost) -> Totals:
        totals = Totals(**vhost.queues.retired)
        turns = Turns()
        for name in list(vhost.queues.by_name):
            queue = vhost.queues.by_name.get(name)
            if queue is not None:
                totals.add(vhost, queue)
            await turns.yield_if_due()
        self._cached[vhost.name] = (self._clock() + FRESH_S, vhost, totals)
        return totals
