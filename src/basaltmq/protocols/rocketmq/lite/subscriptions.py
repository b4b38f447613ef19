"""Subscriptions of clients to lite topics.

Each client of a group chooses its lite topics, and a receive call gets messages of those. A receive call reads only
lite topics that may have messages. The consumption of a lite topic reports that after an append, when a lease expires,
and when an earlier message is settled. Clients with the same lite topic in a group share its messages in order.

Subscriptions are in memory, as in Apache's broker: clients send all of theirs every 30 s.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Callable, Iterable
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, Final
from uuid import UUID

from basaltmq.protocols.rocketmq.consumption import Delivery, ReceiveCall
from basaltmq.protocols.rocketmq.rules.status import Refused
from basaltmq.streams.pop.lease import hash_of
from basaltmq.streams.topics import Topic
from basaltmq.wire import rocketmq_wire_pb2 as wire

if TYPE_CHECKING:
    from basaltmq.protocols.rocketmq.host import Host

CLIENT_QUOTA: Final = 1_000
"""Lite topics of one client."""

ALL_QUOTA: Final = 20_000
"""Lite topics of all clients: about 3 kB each."""

LOOKED_AT_MAX: Final = 50
"""Lite topics that one turn reads: 5 ms."""

ATTEMPTS_KEPT: Final = 100
"""Receive calls of a client that a repeated call may name."""


class LiteSubscription:
    """The lite topics of one client in a group and a topic."""

    def __init__(self, host: Host, group: str, parent: Topic) -> None:
        self.parent = parent
        self._host = host
        self._group = group
        self._stops: dict[str, Callable[[], None]] = {}
        self._pending: dict[str, None] = {}
        """Lite topics that may have messages, the longest waiting first."""
        self._attempts: OrderedDict[int, list[str]] = OrderedDict()
        self._woken = asyncio.Event()

    def __len__(self) -> int:
        return len(self._stops)

    @property
    def names(self) -> set[str]:
        return set(self._stops)

    def add(self, name: str, topic: Topic) -> None:
        self.remove(name)
        # Each name has a callback of its own, because a consumption knows its watchers by them.
        self._stops[name] = self._host.consumption(self._group, topic).watch(partial(self._may_have, name))
        self._may_have(name)

    def remove(self, name: str) -> None:
        stop = self._stops.pop(name, None)
        self._pending.pop(name, None)
        if stop is not None:
            stop()

    def close(self) -> None:
        for name in list(self._stops):
            self.remove(name)
        self._woken.set()

    def receive(self, call: ReceiveCall, now_ms: int) -> tuple[list[Delivery], bool]:
        """Lease messages for a call. Return them, and whether another turn may find more."""
        found: list[Delivery] = []
        for name in self._attempts.get(call.attempt, ()):
            topic = self._host.lites.find(self.parent, name)
            if topic is not None:
                found += self._host.consumption(self._group, topic).again(call, now_ms)
        if found:
            return found, False
        names = []
        for name in list(self._pending)[:LOOKED_AT_MAX]:
            left = call.records_max - len(found)
            if not left:
                break
            del self._pending[name]
            topic = self._host.lites.find(self.parent, name)
            if topic is None:
                continue
            here, has_more = self._host.consumption(self._group, topic).receive(call._replace(records_max=left), now_ms)
            if here:
                found += here
                names.append(name)
            if has_more or here:
                self._pending[name] = None
        if call.attempt and names:
            self._attempts[call.attempt] = names
            if len(self._attempts) > ATTEMPTS_KEPT:
                self._attempts.popitem(last=False)
        return found, bool(self._pending)

    async def wait(self, timeout_s: float) -> None:
        """Wait until there may be something to receive."""
        self._woken.clear()
        with suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                await self._woken.wait()

    def _may_have(self, name: str) -> None:
        if name in self._stops:
            self._pending[name] = None
        self._woken.set()


class LiteSubscriptions:
    """The subscriptions of all clients of a virtual host."""

    def __init__(self, host: Host) -> None:
        self._host = host
        self._by_client: dict[str, dict[tuple[str, UUID], LiteSubscription]] = {}

    def find(self, client_id: str, group: str, parent: Topic) -> LiteSubscription:
        """Return the subscription of a client, which is empty at first."""
        mine = self._by_client.setdefault(client_id, {})
        key = (group, parent.id)
        found = mine.get(key)
        if found is None:
            found = mine[key] = LiteSubscription(self._host, group, parent)
        return found

    def check_quota(self, subscription: LiteSubscription, wanted: int) -> None:
        """Raise LITE_SUBSCRIPTION_QUOTA_EXCEEDED if a client wants too many lite topics."""
        if wanted > CLIENT_QUOTA:
            raise Refused(
                wire.LITE_SUBSCRIPTION_QUOTA_EXCEEDED,
                f"a client subscribes to at most {CLIENT_QUOTA} lite topics, not {wanted}",
            )
        if self._total() - len(subscription) + wanted > ALL_QUOTA:
            self._drop_gone()
            if self._total() - len(subscription) + wanted > ALL_QUOTA:
                raise Refused(
                    wire.LITE_SUBSCRIPTION_QUOTA_EXCEEDED,
                    f"all clients together have {ALL_QUOTA} lite topics, the limit; unsubscribe from some",
                )

    def client_gone(self, client_id: str) -> None:
        for each in self._by_client.pop(client_id, {}).values():
            each.close()

    def close(self) -> None:
        for client_id in list(self._by_client):
            self.client_gone(client_id)

    def all(self) -> Iterable[LiteSubscription]:
        return [each for mine in self._by_client.values() for each in mine.values()]

    def _total(self) -> int:
        return sum(len(each) for each in self.all())

    def _drop_gone(self) -> None:
        for client_id in [each for each in self._by_client if not self._host.clients.is_alive(hash_of(each))]:
            self.client_gone(client_id)
