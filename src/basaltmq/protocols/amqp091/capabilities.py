"""Server properties of connection.start, and the client capabilities that the server uses.

`product` and `version` matter: kombu (and so Celery) derives the semantics of basic.qos from them, and several clients
the available queue types. Basalt behaves like RabbitMQ, so it must identify as RabbitMQ. Otherwise Celery workers stop
fetching when they hold enough tasks with a countdown. `platform` and `information` name the real server. The product is
configurable for sites whose clients need no such hint.
"""

from __future__ import annotations

from typing import Final

from basaltmq import __version__
from basaltmq.broker.message.amqp_table import Table, Value

PRODUCT: Final = "RabbitMQ"
COMPATIBLE_VERSION: Final = "3.13.0"
"""RabbitMQ release whose AMQP 0-9-1 behaviour Basalt implements."""

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
    """Return the server properties of connection.start."""
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
    """The client capabilities that the server uses."""

    __slots__ = ("authentication_failure_close", "connection_blocked", "consumer_cancel_notify")

    def __init__(self, client_properties: Table) -> None:
        given = client_properties.get("capabilities")
        table = given if isinstance(given, dict) else {}
        self.authentication_failure_close = table.get("authentication_failure_close") is True
        self.connection_blocked = table.get("connection.blocked") is True
        self.consumer_cancel_notify = table.get("consumer_cancel_notify") is True
