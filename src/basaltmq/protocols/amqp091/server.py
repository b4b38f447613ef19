"""The AMQP 0-9-1 connections of a node."""

from __future__ import annotations

import secrets
from collections.abc import Callable
from typing import Any, Final

from basaltmq.broker.node import Node
from basaltmq.broker.scheduling.loop_shares import LoopShares
from basaltmq.protocols.amqp091 import consuming, topology, transactions
from basaltmq.protocols.amqp091.capabilities import PRODUCT, server_properties
from basaltmq.protocols.amqp091.connection import Connection
from basaltmq.protocols.amqp091.reply_to import ReplyTo
from basaltmq.protocols.amqp091.tuning import Limits
from basaltmq.protocols.amqp091.wire import methods as m
from basaltmq.protocols.server import ConnectionServer

CONNECTIONS_MAX: Final = 65_536
"""Default connection limit. It exceeds the usual limit of file descriptors, which applies first."""

_TOKEN_BYTES: Final = 16


def random_token() -> str:
    """Return an unguessable token of 22 characters."""
    return secrets.token_urlsafe(_TOKEN_BYTES)


class Server(ConnectionServer[Connection]):
    """All AMQP 0-9-1 connections of a node."""

    def __init__(
        self,
        node: Node,
        *,
        limits: Limits | None = None,
        cluster_name: str = "basalt",
        product: str = PRODUCT,
        token: Callable[[], str] = random_token,
        connections_max: int = CONNECTIONS_MAX,
        shares: LoopShares | None = None,
    ) -> None:
        self.limits = limits or Limits()
        super().__init__(node, self.limits.handshake_s, shares)
        self.properties = server_properties(cluster_name, product)
        self.token = token
        self.connections_max = connections_max
        self.replies = ReplyTo(token)
        self.handlers: dict[type[m.Method], Any] = {
            **topology.HANDLERS,
            **consuming.HANDLERS,
            **transactions.HANDLERS,
        }

    def protocol(self) -> Connection:
        return Connection(self)
