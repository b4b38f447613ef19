"""The common base of AMQP and MQTT servers: listeners, connections, their timer, and blocked publishers.

One sweep per second handles the timeouts and heartbeats of all connections. A timer per connection would cost memory
for each idle one, and no timeout needs more precision. asyncio accepts the sockets. TLS contexts are passed in.
"""

from __future__ import annotations

import asyncio
import logging
import socket
import ssl
from collections.abc import Callable
from functools import partial
from typing import Final, Generic, TypeVar

from basaltmq.broker.node import Node
from basaltmq.broker.scheduling.loop_shares import LoopShares, taken
from basaltmq.protocols.connection import SocketConnection

SWEEP_S: Final = 1.0
BACKLOG: Final = 1024
STOP_S: Final = 10.0
"""Seconds that clients have to respond when the server closes their connections."""

C = TypeVar("C", bound=SocketConnection)

_log: Final = logging.getLogger(__name__)


class ConnectionServer(Generic[C]):
    """All connections of one protocol."""

    def __init__(self, node: Node, handshake_s: float, shares: LoopShares | None) -> None:
        self.node = node
        self.shares = shares or LoopShares()
        self.connections: set[C] = set()
        self.blocked: dict[str, str] = {}
        """Why publishers are blocked, by virtual host."""
        self.loop = asyncio.get_running_loop()
        self._handshake_s = handshake_s
        self._listeners: list[asyncio.AbstractServer] = []
        self._sweeper = self.loop.call_later(SWEEP_S, self._sweep)
        self._emptied = asyncio.Event()
        self._is_closed = False
        self._watched: dict[str, Callable[[], None]] = {}

    def protocol(self) -> asyncio.Protocol:
        """Return the protocol of an accepted socket."""
        raise NotImplementedError

    async def listen_on(
        self,
        sock: socket.socket,
        *,
        tls: ssl.SSLContext | None = None,
        protocol: Callable[[], asyncio.Protocol] | None = None,
    ) -> None:
        """Listen on a socket that is already bound. `protocol` makes the protocol of an accepted socket."""
        listener = await self.loop.create_server(
            protocol or self.protocol,
            sock=sock,
            ssl=tls,
            ssl_handshake_timeout=None if tls is None else self._handshake_s,
            backlog=BACKLOG,
        )
        self._listeners.append(listener)

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
                _log.warning("%d connections did not close; aborting them", len(self.connections))
            finally:
                for connection in list(self.connections):
                    connection.abort()
        self._is_closed = True
        self._sweeper.cancel()
        for stop in self._watched.values():
            stop()
        self._watched.clear()
        for listener in self._listeners:
            await listener.wait_closed()
        self._listeners.clear()

    def connection_opened(self, connection: C) -> None:
        self.connections.add(connection)

    def connection_closed(self, connection: C) -> None:
        self.connections.discard(connection)
        if not self.connections:
            self._emptied.set()

    def _sweep(self) -> None:
        """Check all connections, in portions. The next sweep begins a second after the end of this one."""
        self.shares.in_portions(map(self._check, taken(list(self.connections))), self._sweep_later)

    def _sweep_later(self) -> None:
        if not self._is_closed:
            self._sweeper = self.loop.call_later(SWEEP_S, self._sweep)

    def _check(self, connection: C) -> None:
        if connection in self.connections:
            connection.tick()

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
        self.shares.in_portions(map(partial(self._pass_on, vhost), taken(list(self.connections))), lambda: None)

    def _pass_on(self, vhost: str, connection: C) -> None:
        """Block or unblock a publisher. The state may have changed again since this was scheduled."""
        if connection not in self.connections or not connection.uses(vhost):
            return
        reason = self.blocked.get(vhost)
        if reason is None:
            connection.unblock_publisher()
        else:
            connection.block_publisher(reason)
