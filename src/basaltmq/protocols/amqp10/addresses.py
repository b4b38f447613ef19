"""Addresses of nodes.

    /queues/:queue            a queue                            percent-encoded, as in RabbitMQ 4
    /exchanges/:exchange/:key an exchange and a routing key
    /exchanges/:exchange      an exchange; the subject of each message is the routing key
    null                      no node; the `to` property of each message has its address

Other addresses have the forms of Qpid:

    name                      the queue of this name, or the exchange if there is no such queue
    exchange/key              an exchange and a routing key

A terminus with the capability `topic` (JMS) names a topic: the exchange of this name, or a routing key of `amq.topic`.
"""

from __future__ import annotations

import re
from typing import Final, NamedTuple
from urllib.parse import quote, unquote

from basaltmq.broker.vhost import VHost
from basaltmq.protocols.amqp10.wire.errors import INVALID_FIELD, NOT_FOUND, LinkFault

QUEUES: Final = "/queues/"
EXCHANGES: Final = "/exchanges/"
TOPICS: Final = frozenset(("topic", "temporary-topic"))
"""Capabilities of a terminus that is a topic of JMS."""

TOPIC_EXCHANGE: Final = "amq.topic"
_BAD_ESCAPE: Final = re.compile(r"%(?![0-9A-Fa-f]{2})")


class Node(NamedTuple):
    """A queue, or an exchange with a routing key. The key is None if each message has its own."""

    queue: str = ""
    exchange: str = ""
    key: str | None = None

    @property
    def is_queue(self) -> bool:
        return bool(self.queue)


def address_of(node: Node) -> str:
    """Return the address of a dynamic node."""
    return QUEUES + quote(node.queue, safe="") if node.is_queue else EXCHANGES + quote(node.exchange, safe="")


def parse(address: str, vhost: VHost, *, is_topic: bool = False) -> Node:
    """Return the node of an address. Whether it exists is not checked for the forms of RabbitMQ."""
    if address.startswith(QUEUES):
        name = _unquoted(address[len(QUEUES) :], address)
        if not name:
            raise _invalid(address)
        return Node(queue=name)
    if address.startswith(EXCHANGES):
        exchange, slash, key = address[len(EXCHANGES) :].partition("/")
        if "/" in key or not exchange:
            raise _invalid(address)
        return Node(exchange=_unquoted(exchange, address), key=_unquoted(key, address) if slash else None)
    if not address or address.startswith("/"):
        raise _invalid(address)
    has_queue, has_exchange = vhost.queues.by_name.__contains__, vhost.topology.exchanges.__contains__
    if not is_topic and has_queue(address):
        return Node(queue=address)
    if has_exchange(address):
        return Node(exchange=address)
    exchange, slash, key = address.partition("/")
    if slash and exchange and has_exchange(exchange):
        return Node(exchange=exchange, key=key)
    if is_topic:
        return Node(exchange=TOPIC_EXCHANGE, key=address)
    raise LinkFault(NOT_FOUND, f"no queue or exchange '{address:.200}' in vhost '{vhost.name}'")


def _unquoted(text: str, address: str) -> str:
    if "/" in text or _BAD_ESCAPE.search(text):
        raise _invalid(address)
    try:
        return unquote(text, errors="strict")
    except UnicodeDecodeError:
        raise _invalid(address) from None


def _invalid(address: str) -> LinkFault:
    return LinkFault(
        INVALID_FIELD,
        f"invalid address {address!r:.200}: use /queues/:queue, /exchanges/:exchange/:key or /exchanges/:exchange, "
        "percent-encoded, or the name of a queue or exchange",
    )
