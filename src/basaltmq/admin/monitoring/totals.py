"""Sums over the queues of a virtual host, for overviews and metrics.

Walking a hundred thousand queues takes about a second of a core, so the walk leaves the loop to others after every few
queues, and its result serves everybody who asks within a few seconds.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Final

import msgspec

from basaltmq.admin.http.turns import Turns
from basaltmq.broker.consumers.queue import BrokerQueue
from basaltmq.broker.vhost import VHost

FRESH_S: Final = 2.0
"""How old a sum may be; less than any interval at which metrics are taken."""


class Totals(msgspec.Struct):
    """What the queues of a virtual host hold and did."""

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


class TotalsBook:
    """Sums by virtual host, kept for a moment."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._known: dict[str, tuple[float, VHost, Totals]] = {}
        self._walks: dict[str, asyncio.Task[Totals]] = {}

    async def of(self, vhost: VHost) -> Totals:
        known = self._known.get(vhost.name)
        if known is not None and known[1] is vhost and known[0] > self._clock():
            return known[2]
        walk = self._walks.get(vhost.name)
        if walk is None:
            walk = self._walks[vhost.name] = asyncio.create_task(self._walk(vhost))
            walk.add_done_callback(lambda _: self._walks.pop(vhost.name, None))
        return await asyncio.shield(walk)

    def last(self, name: str) -> Totals | None:
        """The sums of a virtual host as they were last found."""
        known = self._known.get(name)
        return None if known is None else known[2]

    async def _walk(self, vhost: VHost) -> Totals:
        totals = Totals(**vhost.queues.retired)
        turns = Turns()
        for name in list(vhost.queues.by_name):
            queue = vhost.queues.by_name.get(name)
            if queue is not None:
                totals.add(vhost, queue)
            await turns.breathe()
        self._known[vhost.name] = (self._clock() + FRESH_S, vhost, totals)
        return totals
