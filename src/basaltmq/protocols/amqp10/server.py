"""The AMQP 1.0 connections of a node.

Clients of AMQP 0-9-1 and 1.0 use the same ports; `protocols/amqp_version.py` decides by the protocol header.
"""

from __future__ import annotations

import secrets
from typing import Any, Final

import msgspec

from basaltmq import __version__
from basaltmq.broker.config import settings as config
from basaltmq.broker.node import Node
from basaltmq.broker.scheduling.loop_shares import LoopShares
from basaltmq.broker.vhost import VHost
from basaltmq.protocols.amqp10.connection import Connection
from basaltmq.protocols.amqp10.containers import SOLE_CONNECTION, Containers
from basaltmq.protocols.amqp10.durable_links import DurableLinks
from basaltmq.protocols.amqp10.dynamic_nodes import DynamicNodes
from basaltmq.protocols.amqp10.wire import types as t
from basaltmq.protocols.server import ConnectionServer

HANDLE_MAX: Final = 65_535
LINKS_MAX: Final = 16_384
"""Links of a connection. An idle link takes less than 4 KiB."""

PRODUCT: Final = "Basalt"
RABBITMQ: Final = "RabbitMQ"
RABBITMQ_VERSION: Final = "4.0.0"
"""Announced version: RabbitMQ's client libraries for AMQP 1.0 require at least this one."""

CAPABILITIES: Final = ("ANONYMOUS-RELAY", "DELAYED_DELIVERY", "LINK_PAIR_V1_0", "SHARED-SUBS", SOLE_CONNECTION)
FRAME_BYTES_MAX: Final = 131_072


class Limits(msgspec.Struct, frozen=True, kw_only=True):
    """Limits that the server announces and enforces."""

    frame_bytes_max: int = FRAME_BYTES_MAX
    channel_max: int = 2047
    heartbeat_s: int = 60
    message_bytes_max: int = 128 << 20
    handshake_s: int = 10

    @classmethod
    def of(cls, settings: config.Limits) -> Limits:
        """Return the limits of the configuration."""
        return cls(
            frame_bytes_max=settings.frame_bytes_max,
            channel_max=settings.channels_max,
            heartbeat_s=settings.heartbeat_s,
            message_bytes_max=min(settings.message_bytes_max, 128 << 20),
            handshake_s=-(-settings.handshake_timeout_ms // 1000),
        )


class Server(ConnectionServer[Connection]):
    """All AMQP 1.0 connections of a node."""

    handle_max = HANDLE_MAX
    links_max = LINKS_MAX

    def __init__(
        self,
        node: Node,
        *,
        limits: Limits | None = None,
        product: str = PRODUCT,
        connections_max: int = 65_536,
        shares: LoopShares | None = None,
    ) -> None:
        self.limits = limits or Limits()
        super().__init__(node, self.limits.handshake_s, shares)
        self.connections_max = connections_max
        self.container_id = f"basalt-{secrets.token_hex(8)}"
        self.capabilities = CAPABILITIES
        self.properties: dict[Any, Any] = {
            t.Symbol("product"): product,
            t.Symbol("version"): RABBITMQ_VERSION if product == RABBITMQ else __version__,
            t.Symbol("platform"): f"Basalt {__version__}",
        }
        self.containers = Containers()
        self._durable: dict[str, DurableLinks] = {}
        self._dynamic: dict[str, DynamicNodes] = {}

    def protocol(self) -> Connection:
        return Connection(self)

    def _sweep(self) -> None:
        for nodes in self._dynamic.values():
            nodes.sweep()
        super()._sweep()

    def dynamic_nodes(self, vhost: VHost) -> DynamicNodes:
        """Return the dynamic nodes of a virtual host."""
        found = self._dynamic.get(vhost.name)
        if found is None or found.vhost is not vhost:
            found = self._dynamic[vhost.name] = DynamicNodes(vhost)
        return found

    def durable_links(self, vhost: VHost) -> DurableLinks:
        """Return the durable links of a virtual host, opened if necessary."""
        found = self._durable.get(vhost.name)
        if found is None or found.vhost is not vhost:
            if found is not None:
                found.close()
            found = self._durable[vhost.name] = DurableLinks(vhost)
        return found
