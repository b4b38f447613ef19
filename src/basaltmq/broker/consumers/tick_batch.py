"""What a turn of the loop is about: messages published, deliveries settled, and the batch they become.

Order holds per queue: a draft for one queue is added to the last step of that queue, one for several queues to the last
step they have together, and whatever comes between ends that step.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, NamedTuple, Protocol, TypeAlias

from basaltmq.broker.consumers.queue import BrokerQueue
from basaltmq.queues.draft import Draft
from basaltmq.queues.leases.delivery import Delivery


class Publisher(Protocol):
    """Whoever publishes: a channel."""

    def returned(
        self, reply_code: int, reply_text: str, exchange: str, routing_key: str, properties: bytes, body: bytes
    ) -> None:
        """A mandatory message had no route. Comes before its confirm."""
        ...

    def confirmed(self, numbers: Sequence[int], ok: bool) -> None:
        """Messages of these numbers, ascending, are taken, or refused by a full queue."""
        ...


Publish: TypeAlias = tuple[Publisher, str, str, bytes, bytes, bool, int]
"""Publisher, exchange, routing key, properties, body, mandatory, number. A number of 0 asks for no confirm.

A plain tuple, because one is made for every message."""


class Settlement(NamedTuple):
    """Deliveries of one lease that are done with."""

    queue: str
    token: int
    ids: Sequence[bytes]
    outcome: str


ACK: Final = "ack"
REQUEUE: Final = "requeue"
REJECT: Final = "reject"


class TickBatch:
    """What a turn does, on its way to the plane."""

    __slots__ = (
        "confirms",
        "groups",
        "handed",
        "has_refused",
        "instant",
        "nacks",
        "returns",
        "rooms",
        "shared",
        "steps",
        "streams",
        "synced",
    )

    def __init__(self) -> None:
        self.steps: list[tuple[Sequence[BrokerQueue], list[Draft]]] = []
        """Drafts for one queue, or for several that share their bodies, in the order they were published."""
        self.groups: dict[BrokerQueue, list[Draft]] = {}
        """The drafts of the last step of a queue, where more of it can be added."""
        self.shared: dict[tuple[BrokerQueue, ...], list[Draft]] = {}
        """The same of several queues, as long as none of them has a later step."""
        self.returns: list[Publish] = []
        self.has_refused = False
        self.instant: dict[BrokerQueue, list[Draft]] = {}
        """Messages that would expire at once, for consumers who can take them at once."""
        self.handed: list[tuple[BrokerQueue, list[Delivery]]] = []
        self.streams: dict[BrokerQueue, list[tuple[bytes, bytes]]] = {}
        self.synced: dict[Publisher, list[int]] = {}
        """Confirms that wait for the sync."""
        self.confirms: dict[Publisher, list[int]] = {}
        self.nacks: dict[Publisher, list[int]] = {}
        self.rooms: dict[BrokerQueue, list[int]] = {}
        """Messages and bytes a queue that refuses has room for."""

    def group(self, queue: BrokerQueue) -> list[Draft]:
        """Where drafts of a queue are added, until one comes that it shares with others."""
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
        """One body for all; what comes to these queues later comes behind it."""
        together = tuple(queues)
        group = self.shared.get(together)
        if group is None:
            self._end_shared(together)
            group = self.shared[together] = []
            self.steps.append((together, group))
            for queue in together:
                self.groups.pop(queue, None)
        group.append(draft)

    def _end_shared(self, queues: Sequence[BrokerQueue]) -> None:
        """What comes to any of these queues together with others is a step of its own from here on."""
        for together in [each for each in self.shared if not set(queues).isdisjoint(each)]:
            del self.shared[together]
