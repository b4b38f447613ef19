"""Dynamic nodes: queues and exchanges with generated names, and their lifetime policies.

    delete-on-close                  until the link that has created it ends; also the default
    delete-on-no-links               until its last link ends
    delete-on-no-messages            until the link that has created it has ended and the queue is empty
    delete-on-no-links-or-messages   until there are neither links nor messages

A queue with the first policy is exclusive: it ends with its connection. The others are transient, so they end with the
broker at the latest. An exchange has no messages. An empty queue is noticed within a second.
"""

from __future__ import annotations

import secrets
from typing import TYPE_CHECKING, Any, Final

from basaltmq.broker.queue_table import GENERATED
from basaltmq.broker.vhost import VHost
from basaltmq.protocols.amqp10.addresses import Node
from basaltmq.protocols.amqp10.wire.errors import INVALID_FIELD, LinkFault
from basaltmq.protocols.amqp10.wire.types import Described

if TYPE_CHECKING:
    from basaltmq.protocols.amqp10.connection import Connection

TOPIC_PREFIX: Final = "amqp10.topic."
"""Prefix of the exchanges of temporary topics."""

POLICY: Final = "lifetime-policy"
ON_CLOSE, ON_NO_LINKS, ON_NO_MESSAGES, ON_NO_LINKS_OR_MESSAGES = range(0x2B, 0x2F)
_POLICIES: Final[dict[Any, int]] = {
    key: number
    for number, name in (
        (ON_CLOSE, "amqp:delete-on-close:list"),
        (ON_NO_LINKS, "amqp:delete-on-no-links:list"),
        (ON_NO_MESSAGES, "amqp:delete-on-no-messages:list"),
        (ON_NO_LINKS_OR_MESSAGES, "amqp:delete-on-no-links-or-messages:list"),
    )
    for key in (number, name)
}

CHECKS_MAX: Final = 1000
"""Queues that are checked for messages per second."""


class _Dynamic:
    """A dynamic node that may outlive the link which has created it."""

    __slots__ = ("links", "node", "policy")

    def __init__(self, node: Node, policy: int) -> None:
        self.node = node
        self.policy = policy
        self.links = 0


class DynamicNodes:
    """The dynamic nodes of a virtual host."""

    def __init__(self, vhost: VHost) -> None:
        self.vhost = vhost
        self._nodes: dict[Node, _Dynamic] = {}
        """Nodes with other policies than `ON_CLOSE`. The key of an exchange has no routing key."""
        self._emptying: dict[Node, _Dynamic] = {}
        """Nodes that end as soon as they have no messages."""

    def create(self, connection: Connection, properties: dict[Any, Any] | None, *, is_topic: bool = False) -> Node:
        """Create a node for a link, which calls `ended` when it ends."""
        policy = _policy(properties)
        if is_topic:
            name = f"{TOPIC_PREFIX}{secrets.token_urlsafe(16)}"
            connection.check("configure", name)
            self.vhost.declare_exchange(name, "fanout", durable=False)
            node = Node(exchange=name, key="")
        else:
            connection.check("configure", GENERATED)
            is_exclusive = policy == ON_CLOSE
            node = Node(queue=self.vhost.declare_queue("", exclusive=is_exclusive, owner=connection).name)
        if policy != ON_CLOSE:
            self._nodes[_key(node)] = made = _Dynamic(node, policy)
            made.links = 1
        return node

    def joined(self, node: Node) -> None:
        """Count an attached link to or from a node."""
        found = self._nodes.get(_key(node)) if self._nodes else None
        if found is not None:
            found.links += 1
            if found.policy == ON_NO_LINKS_OR_MESSAGES:
                self._emptying.pop(_key(node), None)

    def left(self, node: Node) -> None:
        """Count the end of a link that `joined` has counted."""
        found = self._nodes.get(_key(node)) if self._nodes else None
        if found is not None:
            found.links -= 1
            self._check_links(found)

    def ended(self, node: Node) -> None:
        """Handle the end of the link that has created a node."""
        found = self._nodes.get(_key(node))
        if found is None:
            self._delete(node)
            return
        found.links -= 1
        if found.policy == ON_NO_MESSAGES:
            self._delete_if_empty(found)
        else:
            self._check_links(found)

    def _check_links(self, found: _Dynamic) -> None:
        if found.links > 0 or found.policy == ON_NO_MESSAGES:
            return
        if found.policy == ON_NO_LINKS:
            self._delete(found.node)
        else:
            self._delete_if_empty(found)

    def sweep(self) -> None:
        """Delete the queues that have become empty."""
        for key, found in list(self._emptying.items())[:CHECKS_MAX]:
            del self._emptying[key]
            self._delete_if_empty(found)

    def _delete_if_empty(self, found: _Dynamic) -> None:
        if found.node.queue in self.vhost.queues.by_name and self.vhost.queues.holds_messages(found.node.queue):
            self._emptying[_key(found.node)] = found
        else:
            self._delete(found.node)

    def _delete(self, node: Node) -> None:
        self._nodes.pop(_key(node), None)
        if not self.vhost.is_up:
            return
        if not node.is_queue:
            self.vhost.delete_exchange(node.exchange)
            return
        queue = self.vhost.queues.by_name.get(node.queue)
        if queue is not None:
            self.vhost.delete_queue(node.queue, owner=queue.owner)


def _key(node: Node) -> Node:
    return node if node.key is None else node._replace(key=None)


def _policy(properties: dict[Any, Any] | None) -> int:
    given = (properties or {}).get(POLICY)
    if given is None:
        return ON_CLOSE
    key = given.descriptor if isinstance(given, Described) else given
    found = _POLICIES.get(key) if isinstance(key, int | str) else None
    if found is None:
        raise LinkFault(INVALID_FIELD, f"unknown {POLICY} {given!r:.80}")
    return found
