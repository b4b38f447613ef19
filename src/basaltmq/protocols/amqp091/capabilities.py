"""What the server says of itself in connection.start, and what it looks for in what the client says.

`product` and `version` are not only for show: kombu (and Celery on it) reads the meaning of basic.qos from them, and
several clients the set of queue types. A server that behaves as RabbitMQ does has to answer as RabbitMQ does, or Celery
workers stop fetching when they hold enough tasks with a countdown. What the server really is stands in `platform`
and `information`; a site whose clients need no such hint can name another product.
"""

from __future__ import annotations

from typing import Final

from basaltmq import __version__
from basaltmq.broker.message.amqp_table import Table, Value

PRODUCT: Final = "RabbitMQ"
COMPATIBLE_VERSION: Final = "3.13.0"
"""The release whose behaviour of AMQP 0-9-1 is ours."""

CAPABILITIES: Final = (
    "authentication_failure_close",
    "basic.nack",
    "connection.blocked",
    "consumer_cancel_notify",
    "consumer_priorities",
    "direct_reply_to",
    "exchange_exchange_bindings",
    "per_consumer_qos",
    "publisher_confirms",
)


def server_properties(cluster_name: str, product: str = PRODUCT) -> Table:
    """The table of connection.start."""
    capabilities: dict[str, Value] = dict.fromkeys(CAPABILITIES, True)
    return {
        "capabilities": capabilities,
        "cluster_name": cluster_name,
        "product": product,
        "version": COMPATIBLE_VERSION if product == PRODUCT else __version__,
        "platform": f"Basalt {__version__}",
        "information": "Basalt: a message broker on RocksDB. Licensed under the Apache License 2.0",
        "copyright": "The Basalt authors",
    }


class ClientCapabilities:
    """What a client said it understands."""

    __slots__ = ("authentication_failure_close", "connection_blocked", "consumer_cancel_notify")

    def __init__(self, client_properties: Table) -> None:
        given = client_properties.get("capabilities")
        table = given if isinstance(given, dict) else {}
        self.authentication_failure_close = table.get("authentication_failure_close") is True
        self.connection_blocked = table.get("connection.blocked") is True
        self.consumer_cancel_notify = table.get("consumer_cancel_notify") is True
