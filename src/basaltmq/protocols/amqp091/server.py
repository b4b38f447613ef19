"""AMQP 0-9-1 listeners, and the timer of their connections.

One sweep per second handles the timeouts and heartbeats of all connections. A timer per connection would cost memory
for each idle one, and no timeout needs more precision. asyncio accepts the sockets. TLS contexts are passed in.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import socket
import ssl
from collections.abc import Callable
from functools import partial
from typing import Any, Final

from basaltmq.broker.loop_shares import LoopShares
from basaltmq.broker.node import Node
from basaltmq.protocols.amqp091 import consuming, topology, transactions
from basaltmq.protocols.amqp091.capabilities import PRODUCT, server_properties
from basaltmq.protocols.amqp091.connection import Connection
from basaltmq.protocols.amqp091.reply_to import ReplyTo
from basaltmq.protocols.amqp091.tuning import Limits
from basaltmq.protocols.amqp091.wire import methods as m

SWEEP_S: Final = 1.0
CONNECTIONS_MAX: Final = 65_536
"""Default connection limit. It exceeds the usual limit of file descriptors, which applies first."""

BACKLOG: Final = 1024
STOP_S: Final = 10.0
"""Seconds that clients have to respond to connection.close at shutdown."""

_TOKEN_BYTES: Final = 16

_log: Final = logging.getLogger(__name__)


def random_token() -> str:
    """Return an unguessable token of 22 characters."""
    return secrets.token_urlsafe(_TOKEN_BYTES)


class Server:
    """All AMQP 0-9-1 listeners and connections of a node."""

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
        self.node = node
        self.limits = limits or Limits()
        self.properties = server_properties(cluster_name, product)
        self.token = token
        self.connections_max = connections_max
        self.shares = shares or LoopShares()
        self.replies = ReplyTo(token)
        self.connections: set[Connection] = set()
        self.blocked: dict[str, str] = {}
        """Why publishers are blocked, by virtual host."""
        self.handlers: dict[type[m.Method], Any] = {
            **topology.HANDLERS,
            **consuming.HANDLERS,
            **transactions.HANDLERS,
        }
        self.protocol: Callable[[], asyncio.Protocol] = lambda: Connection(self)
        """Makes the protocol of an accepted socket."""
        self.loop = asyncio.get_running_loop()
        self._listeners: list[asyncio.AbstractServer] = []
        self._sweeper: asyncio.TimerHandle | None = None
        self._emptied = asyncio.Event()
        self._watched: dict[str, Callable[[], None]] = {}

    async def listen(self, host: str, port: int, *, tls: ssl.SSLContext | None = None) -> list[tuple[str, int]]:
        """Listen on an address. Return the bound addresses (port 0 selects a free port)."""
        listener = await self.loop.create_server(
            self.protocol,
            host,
            port,
            ssl=tls,
            ssl_handshake_timeout=self._handshake_s(tls),
            backlog=BACKLOG,
            reuse_address=True,
        )
        self._add(listener)
        return [(each.getsockname()[0], each.getsockname()[1]) for each in listener.sockets]

    async def listen_on(self, sock: socket.socket, *, tls: ssl.SSLContext | None = None) -> None:
        """Listen on a socket that is already bound."""
        listener = await self.loop.create_server(
            self.protocol,
            sock=sock,
            ssl=tls,
            ssl_handshake_timeout=self._handshake_s(tls),
            backlog=BACKLOG,
        )
        self._add(listener)

    def _handshake_s(self, tls: ssl.SSLContext | None) -> float | None:
        """Return the timeout of the TLS handshake. The AMQP handshake after it has the same timeout."""
        return None if tls is None else float(self.limits.handshake_s)

    def _add(self, listener: asyncio.AbstractServer) -> None:
        self._listeners.append(listener)
        if self._sweeper is None:
            self._sweeper = self.loop.call_later(SWEEP_S, self._sweep)

    async def close(self, reason: str = "the broker is shutting down") -> None:
        """Stop accepting, close all connections, and abort those that do not respond."""
        for listener in self._listeners:
            listener.close()
        for connection in list(self.connections):
            connection.close(reason)
        if self.connections:
            self._emptied.clear()
            try:
                await asyncio.wait_for(self._emptied.wait(), STOP_S)
            except TimeoutError:
                _log.warning("%d connections did not respond to connection.close; aborting them", len(self.connections))
        for connection in list(self.connections):
            connection.abort()
        if self._sweeper is not None:
            self._sweeper.cancel()
            self._sweeper = None
        for stop in self._watched.values():
            stop()
        self._watched.clear()
        for listener in self._listeners:
            await listener.wait_closed()
        self._listeners.clear()

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
                _log.exception("%s: timeout and heartbeat check failed", connection.name)

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
            if not connection.uses(vhost):
                continue
            if reason is None:
                connection.release_publisher()
            else:
                connection.hold_publisher(reason)
