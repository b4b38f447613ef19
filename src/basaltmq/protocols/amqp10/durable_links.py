"""Durable links of a virtual host: subscriptions that outlive their link, and deliveries that were not settled.

    link store    container, link name, role ─> source, target          survives a crash (SPEC A8)
    suspended     the leases of deliveries that the client has not settled; until the client is back, or a restart

A client that receives names its durable link by container id and link name. If the source is an exchange, its messages
wait in a queue of their own. When the client attaches again, its unsettled map says what became of each delivery:

    in the map, with an outcome      settled accordingly, also after a crash of the broker: the tag is the message id
    anything else                    back to its place in the queue, to be delivered again

Only a terminus that never expires is durable here.
"""

from __future__ import annotations

import hashlib
import logging
from typing import TYPE_CHECKING, Final

from basaltmq.broker.message.operations import REQUEUE, RowChange, Settlement, Waiter
from basaltmq.broker.routing.exchange import QUEUE
from basaltmq.broker.vhost import VHost
from basaltmq.catalog.links import Link, LinkStore, Role, deleted_row, row_of
from basaltmq.errors import LimitExceededError
from basaltmq.protocols.amqp10.wire import performatives as p

if TYPE_CHECKING:
    from basaltmq.protocols.amqp10.sender import Sender

LINKS_MAX: Final = 100_000
"""Durable links of a virtual host: about 100 MB with usual termini."""

QUEUE_PREFIX: Final = "amqp10.subscription."
NAME_BYTES_MAX: Final = 200
_log: Final = logging.getLogger(__name__)


class DurableLinks:
    """The durable links of one virtual host on which clients receive."""

    def __init__(self, vhost: VHost) -> None:
        self.vhost = vhost
        self.attached: dict[tuple[str, str], Sender] = {}
        """Durable links with a client, by container and name."""
        self._suspended: dict[tuple[str, str], tuple[str, dict[bytes, int]]] = {}
        """Queue, and lease tokens by delivery tag."""
        self._links: dict[tuple[str, str], Link] = {}
        self._store = LinkStore(vhost.store)
        report = self._store.open_and_load(self._load)
        for fault in report.faults:
            _log.warning("vhost %r: %s", vhost.name, fault.text)

    def _load(self, link: Link) -> None:
        if link.role == Role.SENDER:
            self._links[link.remote_container, link.name] = link

    def close(self) -> None:
        self._store.close()

    def find(self, container: str, name: str) -> p.Source | None:
        """Return the source of a durable link."""
        link = self._links.get((container, name))
        if link is None:
            return None
        found = p.decode(link.source, 0, len(link.source))[0]
        return p.expect(found, p.Source)

    def save(self, container: str, name: str, source: p.Source, waiter: Waiter[None]) -> None:
        """Store a link, with the other changes of this turn of the loop. `waiter` gets None when it is durable."""
        if len(self._links) >= LINKS_MAX and (container, name) not in self._links:
            raise LimitExceededError(f"the limit of {LINKS_MAX} durable links in vhost '{self.vhost.name}' is reached")
        link = Link(container, name, Role.SENDER, p.encode(source), b"")
        row = row_of(link)
        self._links[container, name] = link
        self.vhost.write_rows(RowChange([row], waiter))

    def delete(self, container: str, name: str) -> None:
        """Delete a link with its subscription."""
        link = self._links.pop((container, name), None)
        if link is None or not self.vhost.is_up:
            return
        self.release(container, name)
        self.vhost.write_rows(RowChange([deleted_row(link)]))
        queue = subscription_queue(container, name)
        if queue in self.vhost.queues.by_name:
            for _ in self.vhost.unbinding(QUEUE, queue):
                pass
            self.vhost.delete_queue(queue)

    def suspend(self, container: str, name: str, queue: str, unsettled: dict[bytes, int]) -> None:
        """Keep the deliveries of a link that has lost its client."""
        if unsettled:
            self._suspended[container, name] = (queue, unsettled)

    def resume(self, container: str, name: str) -> dict[bytes, int]:
        """Return the deliveries that were kept for a link."""
        return self._suspended.pop((container, name), ("", {}))[1]

    def release(self, container: str, name: str) -> None:
        """Return the deliveries that were kept for a link to their queue."""
        queue, unsettled = self._suspended.pop((container, name), ("", {}))
        groups: dict[int, list[bytes]] = {}
        for tag, token in unsettled.items():
            groups.setdefault(token, []).append(tag)
        if groups and self.vhost.is_up:
            self.vhost.settle([Settlement(queue, token, ids, REQUEUE) for token, ids in groups.items()])


def subscription_queue(container: str, name: str) -> str:
    """Return the name of the queue of a durable subscription."""
    joined = f"{container}/{name}"
    if len(joined.encode()) > NAME_BYTES_MAX:
        joined = hashlib.sha256(joined.encode()).hexdigest()
    return QUEUE_PREFIX + joined
