"""The batch of one turn of the loop: operations grouped for the queue plane.

The batch keeps the order per queue. A draft for one queue joins the last step of that queue. A draft for several queues
joins the last step of the same set of queues, unless one of them has a later step.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeAlias

from basaltmq.broker.consumers.direct import DirectRun, DirectSink
from basaltmq.broker.consumers.queue import BrokerQueue
from basaltmq.broker.message.operations import Enqueue, Publish, Publisher, Waiter
from basaltmq.queues.draft import Draft
from basaltmq.queues.leases.delivery import Delivery

Completions: TypeAlias = list[tuple[Waiter[Any], Any]]
"""Waiters with their results."""


class TickBatch:
    """The operations of one turn, ready for the plane."""

    __slots__ = (
        "completions",
        "confirms",
        "delivered",
        "direct",
        "direct_route",
        "enqueues",
        "groups",
        "has_refused",
        "instant",
        "nacks",
        "returns",
        "rooms",
        "shared",
        "steps",
        "streams",
        "synced",
        "synced_completions",
    )

    def __init__(self) -> None:
        self.steps: list[tuple[Sequence[BrokerQueue], list[Draft]]] = []
        """Drafts for one queue, or for several queues that share the bodies, in publish order."""
        self.groups: dict[BrokerQueue, list[Draft]] = {}
        """The last step of each queue that accepts more drafts."""
        self.shared: dict[tuple[BrokerQueue, ...], list[Draft]] = {}
        """The last step of each set of queues, while none of them has a later step."""
        self.returns: list[Publish] = []
        self.has_refused = False
        self.instant: dict[BrokerQueue, list[Draft]] = {}
        """Messages with TTL 0, for consumers that are ready now."""
        self.delivered: list[tuple[BrokerQueue, list[Delivery]]] = []
        self.direct: list[DirectRun] = []
        """Transient messages for connected clients, in publish order."""
        self.direct_route: object = None
        """The route of the last run."""
        self.streams: dict[BrokerQueue, list[tuple[bytes, bytes]]] = {}
        self.enqueues: dict[str, list[Enqueue]] = {}
        """Calls that name their queue, by queue."""
        self.synced: dict[Publisher, list[int]] = {}
        """Confirms to send after the sync."""
        self.synced_completions: Completions = []
        """Calls that complete after the sync, with their results."""
        self.confirms: dict[Publisher, list[int]] = {}
        self.completions: Completions = []
        self.nacks: dict[Publisher, list[int]] = {}
        self.rooms: dict[BrokerQueue, list[int]] = {}
        """Remaining capacity of queues that reject publishes: messages and bytes."""

    def group(self, queue: BrokerQueue) -> list[Draft]:
        """Return the list to which drafts for this queue are appended. A shared step ends it."""
        group = self.groups.get(queue)
        if group is None:
            group = self.groups[queue] = []
            self.steps.append(((queue,), group))
            if self.shared:
                self._end_shared((queue,))
        return group

    def add(self, queue: BrokerQueue, draft: Draft) -> None:
        self.group(queue).append(draft)

    def add_shared(self, queues: Sequence[BrokerQueue], draft: Draft) -> None:
        """Add a draft for several queues that share its body. It ends the current step of each of them."""
        together = tuple(queues)
        group = self.shared.get(together)
        if group is None:
            self._end_shared(together)
            group = self.shared[together] = []
            self.steps.append((together, group))
            for queue in together:
                self.groups.pop(queue, None)
        group.append(draft)

    def add_direct(self, route: object, sinks: list[DirectSink], envelope: bytes, body: bytes) -> None:
        """Add a message to the last run, if it has the same route and sinks, or to a new one."""
        if self.direct_route is not route or self.direct[-1].sinks != sinks:
            self.direct_route = route
            self.direct.append(DirectRun(sinks))
        self.direct[-1].messages.append((envelope, body))

    def _end_shared(self, queues: Sequence[BrokerQueue]) -> None:
        """End the shared steps that contain any of these queues."""
        for together in [each for each in self.shared if not set(queues).isdisjoint(each)]:
            del self.shared[together]
