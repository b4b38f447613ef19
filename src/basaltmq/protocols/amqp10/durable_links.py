"""Durable links of a virtual host: subscriptions that outlive their link, and deliveries that were not settled.

    link store    container, link name, role ─> source, target          survives a crash (SPEC A8)
    suspended     the leases of deliveries that the client has not settled; until the client is back, or a restart

A client that receives names its durable link by container id and link name. If the source is an exchange, its messages
wait in a queue of their own. When the client attaches again, its unsettled map has the outcome of each delivery:

    in the map, with an outcome      settled accordingly, also after a crash of the broker: the tag is the message id
    anything else                    back to its place in the queue, to be delivered again

A client that sends with receiver settle mode `second` names its durable link the same way. The tag of each message is
written in one batch with the message, and deleted when the client has settled the delivery:

    deliveries    container, link name, delivery tag ─> outcome

When the client attaches again, the unsettled map of the broker names the messages that the broker has stored. The
client settles those, or sends them again as resumed deliveries, which are not published twice. Messages that are not in
the map were lost; the client sends them as new ones.

Only a terminus with the expiry policy `never` is durable here.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Iterable
from itertools import islice
from typing import TYPE_CHECKING, Final

from basaltmq.broker.message.operations import REQUEUE, Row, RowChange, Settlement, Waiter
from basaltmq.broker.routing.exchange import QUEUE
from basaltmq.broker.vhost import VHost
from basaltmq.catalog.links import Link, LinkStore, Role, deleted_row, row_of
from basaltmq.errors import LimitExceededError
from basaltmq.protocols.amqp10.wire import performatives as p
from basaltmq.store.families import Family
from basaltmq.store.keys.catalog import link_delivery_key
from basaltmq.store.keys.parts import prefix_range

if TYPE_CHECKING:
    from basaltmq.protocols.amqp10.sender import Sender

LINKS_MAX: Final = 100_000
"""Durable links of a virtual host: about 100 MB with usual termini."""

TAGS_MAX: Final = 10_000
"""Most tags to read for one link. A link has credit for 1,000 deliveries."""

QUEUE_PREFIX: Final = "amqp10.subscription."
NAME_BYTES_MAX: Final = 200
_log: Final = logging.getLogger(__name__)


class DurableLinks:
    """The durable links of one virtual host."""

    def __init__(self, vhost: VHost) -> None:
        self.vhost = vhost
        self._attached: dict[tuple[str, str], dict[Sender, None]] = {}
        """Durable links with a receiving client, by container and name. Shared subscriptions have several, in order."""
        self._suspended: dict[tuple[str, str], tuple[str, dict[bytes, int]]] = {}
        """Queue, and lease tokens by delivery tag."""
        self._links: dict[tuple[str, str], Link] = {}
        self._targets: dict[tuple[str, str], Link] = {}
        self._store = LinkStore(vhost.store)
        report = self._store.open_and_load(self._load)
        for fault in report.faults:
            _log.warning("vhost %r: %s", vhost.name, fault.text)

    def _load(self, link: Link) -> None:
        links = self._links if link.role == Role.SENDER else self._targets
        links[link.remote_container, link.name] = link

    def close(self) -> None:
        self._store.close()

    def attached(self, container: str, name: str) -> list[Sender]:
        """Return the attached links of a durable link or a shared subscription."""
        return list(self._attached.get((container, name), ()))

    def join(self, container: str, name: str, link: Sender) -> None:
        """Add an attached link."""
        self._attached.setdefault((container, name), {})[link] = None

    def leave(self, container: str, name: str, link: Sender) -> None:
        """Remove an attached link. Idempotent."""
        links = self._attached.get((container, name), {})
        links.pop(link, None)
        if not links:
            self._attached.pop((container, name), None)

    def find(self, container: str, name: str) -> p.Source | None:
        """Return the source of a durable link."""
        link = self._links.get((container, name))
        if link is None:
            return None
        found = p.decode(link.source, 0, len(link.source))[0]
        return p.expect(found, p.Source)

    def save(self, container: str, name: str, source: p.Source, waiter: Waiter[None]) -> None:
        """Store a link, with the other changes of this turn of the loop. `waiter` gets None when it is durable."""
        self._save(self._links, Link(container, name, Role.SENDER, p.encode(source), b""), waiter)

    def save_target(self, container: str, name: str, target: p.Target, waiter: Waiter[None]) -> None:
        """Store a link on which the client sends."""
        self._save(self._targets, Link(container, name, Role.RECEIVER, b"", p.encode(target)), waiter)

    def _save(self, links: dict[tuple[str, str], Link], link: Link, waiter: Waiter[None]) -> None:
        key = link.remote_container, link.name
        if len(links) >= LINKS_MAX and key not in links:
            raise LimitExceededError(f"the limit of {LINKS_MAX} durable links in vhost '{self.vhost.name}' is reached")
        row = row_of(link)
        links[key] = link
        self.vhost.write_rows(RowChange([row], waiter))

    def delete_target(self, container: str, name: str) -> None:
        """Delete a link on which the client sends, with the tags of its deliveries."""
        link = self._targets.pop((container, name), None)
        if link is not None and self.vhost.is_up:
            tags = self.received(container, name)
            self.vhost.write_rows(RowChange([deleted_row(link), *self.tag_rows(container, name, tags, None)]))

    def received(self, container: str, name: str) -> list[bytes]:
        """Return the tags of the messages that were stored and that the client has not settled."""
        prefix = link_delivery_key(container, name, b"")
        found = self.vhost.store.scan(Family.AMQP_1_0_DELIVERIES, *prefix_range(prefix))
        return [key[len(prefix) :] for key, _ in islice(found, TAGS_MAX)]

    @staticmethod
    def tag_rows(container: str, name: str, tags: Iterable[bytes], outcome: bytes | None) -> list[Row]:
        """Return the rows of deliveries with an encoded outcome, or their deletion."""
        family = Family.AMQP_1_0_DELIVERIES
        return [(family, link_delivery_key(container, name, tag), outcome) for tag in tags]

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
