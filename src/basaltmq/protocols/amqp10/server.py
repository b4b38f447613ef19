"""The AMQP 1.0 connections of a node, and their timer.

Clients of AMQP 0-9-1 and 1.0 use the same ports; `protocols/amqp_door.py` decides by the protocol header. One sweep per
second handles the timeouts of all connections.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections.abc import Callable
from functools import partial
from typing import Any, Final

import msgspec

from basaltmq import __version__
from basaltmq.broker.config import settings as config
from basaltmq.broker.loop_shares import LoopShares
from basaltmq.broker.node import Node
from basaltmq.broker.vhost import VHost
from basaltmq.protocols.amqp10.connection import Connection
from basaltmq.protocols.amqp10.durable_links import DurableLinks
from basaltmq.protocols.amqp10.wire import types as t

SWEEP_S: Final = 1.0
HANDLE_MAX: Final = 65_535
LINKS_MAX: Final = 16_384
"""Links of a connection. An idle link takes less than 4 KiB."""

PRODUCT: Final = "Basalt"
RABBITMQ: Final = "RabbitMQ"
RABBITMQ_VERSION: Final = "4.0.0"
"""Version that goes with the product RabbitMQ: its client libraries for AMQP 1.0 require at least this one."""

CAPABILITIES: Final = ("ANONYMOUS-RELAY", "LINK_PAIR_V1_0", "SHARED-SUBS")
FRAME_BYTES_MAX: Final = 131_072
STOP_S: Final = 10.0

_log: Final = logging.getLogger(__name__)


class Limits(msgspec.Struct, frozen=True, kw_only=True):
    """Limits that the server announces and enforces."""

    frame_bytes_max: int = FRAME_BYTES_MAX
    channel_max: int = 2047
    heartbeat_s: int = 60
    message_bytes_max: int = 64 << 20
    handshake_s: int = 10

    @classmethod
    def of(cls, settings: config.Limits) -> Limits:
        """Return the limits of the configuration."""
        return cls(
            frame_bytes_max=settings.frame_bytes_max,
            channel_max=settings.channels_max,
            heartbeat_s=settings.heartbeat_s,
            message_bytes_max=min(settings.message_bytes_max, 64 << 20),
            handshake_s=-(-settings.handshake_timeout_ms // 1000),
        )


class Server:
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
        self.node = node
        self.limits = limits or Limits()
        self.connections_max = connections_max
        self.shares = shares or LoopShares()
        self.connections: set[Connection] = set()
        self.blocked: dict[str, str] = {}
        """Why publishers are blocked, by virtual host."""
        self.container_id = f"basalt-{secrets.token_hex(8)}"
        self.capabilities = CAPABILITIES
        self.properties: dict[Any, Any] = {
            t.Symbol("product"): product,
            t.Symbol("version"): RABBITMQ_VERSION if product == RABBITMQ else __version__,
            t.Symbol("platform"): f"Basalt {__version__}",
        }
        self.loop = asyncio.get_running_loop()
        self._sweeper = self.loop.call_later(SWEEP_S, self._sweep)
        self._emptied = asyncio.Event()
        self._durable: dict[str, DurableLinks] = {}
        self._watched: dict[str, Callable[[], None]] = {}

    def protocol(self) -> Connection:
        """Return the protocol of an accepted socket."""
        return Connection(self)

    async def close(self, reason: str = "the broker is shutting down") -> None:
        """Close all connections, and abort those that do not respond."""
        for connection in list(self.connections):
            connection.close(reason)
        if self.connections:
            self._emptied.clear()
            try:
                await asyncio.wait_for(self._emptied.wait(), STOP_S)
            except TimeoutError:
                _log.warning("%d AMQP 1.0 connections did not answer close; aborting them", len(self.connections))
        self.abort()

    def abort(self) -> None:
        """Abort all connections and stop the timer."""
        for connection in list(self.connections):
            connection.abort()
        self._sweeper.cancel()
        for stop in self._watched.values():
            stop()
        self._watched.clear()

    def joined(self, connection: Connection) -> None:
        self.connections.add(connection)

    def left(self, connection: Connection) -> None:
        self.connections.discard(connection)
        if not self.connections:
            self._emptied.set()

    def _sweep(self) -> None:
        self._sweeper = self.loop.call_later(SWEEP_S, self._sweep)
        for connection in list(self.connections):
            try:
                connection.tick()
            except Exception:
                _log.exception("%s: timeout check failed", connection.name)

    def durable_links(self, vhost: VHost) -> DurableLinks:
        """Return the durable links of a virtual host, opened if necessary."""
        found = self._durable.get(vhost.name)
        if found is None or found.vhost is not vhost:
            if found is not None:
                found.close()
            found = self._durable[vhost.name] = DurableLinks(vhost)
        return found

    def watch(self, vhost: str) -> None:
        """Subscribe to the alarms of a virtual host."""
        if vhost not in self._watched:
            self._watched[vhost] = self.node.on_blocked(partial(self._blocked_changed, vhost), vhost)

    def _blocked_changed(self, vhost: str, reason: str | None) -> None:
        """Block the publishers of a virtual host, or unblock them if `reason` is None."""
        if reason is None:
            self.blocked.pop(vhost, None)
        else:
            self.blocked[vhost] = reason
        for connection in list(self.connections):
            if connection.uses(vhost):
                if reason is None:
                    connection.release("blocked")
                else:
                    connection.hold_publisher()
