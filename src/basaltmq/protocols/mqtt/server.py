"""MQTT listeners of a node, the timer of their connections, and the MQTT state of the virtual hosts.

One sweep per second handles the timeouts of all connections. It also opens the MQTT state of virtual hosts that were
created or restarted, so that their sessions expire and their wills are published without a client.
"""

from __future__ import annotations

import asyncio
import logging
import socket
import ssl
import time
from collections import deque
from collections.abc import Callable
from copy import copy
from functools import partial
from typing import Final

from msgspec import Struct

from basaltmq.broker.auth.web_hosts import WebHosts
from basaltmq.broker.loop_shares import TURN_S, LoopShares
from basaltmq.broker.node import Node
from basaltmq.errors import BasaltError
from basaltmq.protocols.mqtt.connection import Connection
from basaltmq.protocols.mqtt.host import MqttHost
from basaltmq.protocols.mqtt.settings import Settings
from basaltmq.protocols.mqtt.sys_topics import SysTopics
from basaltmq.protocols.mqtt.websocket import WebSocketProtocol
from basaltmq.protocols.mqtt.wire.decoder import Limits

SWEEP_S: Final = 1.0
BACKLOG: Final = 1024
STOP_S: Final = 5.0
"""Seconds in which the sockets of a stopping server are closed."""

_log: Final = logging.getLogger(__name__)


class Totals(Struct):
    """Counters since the start."""

    connected: int = 0
    received: int = 0
    sent: int = 0
    dropped: int = 0
    received_bytes: int = 0
    sent_bytes: int = 0

    def add(self, connection: Connection) -> None:
        if connection.inbound is not None and connection.outbound is not None:
            self.received += connection.inbound.published
            self.sent += connection.outbound.delivered
            self.dropped += connection.outbound.dropped
        self.received_bytes += connection.received_bytes
        self.sent_bytes += connection.sent_bytes


class Server:
    """All MQTT listeners and connections of a node."""

    def __init__(self, node: Node, settings: Settings, *, shares: LoopShares | None = None) -> None:
        self.node = node
        self.settings = settings
        self.limits = Limits(packet_bytes_max=settings.packet_bytes_max)
        self.shares = shares or LoopShares()
        self.connections: set[Connection] = set()
        self.blocked: dict[str, str] = {}
        """Why publishers are blocked, by virtual host."""
        self.is_stopping = False
        self.sys_topics = SysTopics(self)
        self._ended = Totals()
        self.loop = asyncio.get_running_loop()
        self._hosts: dict[str, MqttHost] = {}
        self._listeners: list[asyncio.AbstractServer] = []
        self._sweeper: asyncio.TimerHandle | None = None
        self._emptied = asyncio.Event()
        self._watched: dict[str, Callable[[], None]] = {}
        self._lost: deque[Connection] = deque()
        """Connections whose sessions are not ended yet."""

    def start(self) -> None:
        """Open the MQTT state of all virtual hosts."""
        self._open_hosts()
        self._sweeper = self.loop.call_later(SWEEP_S, self._sweep)

    async def listen_on(self, sock: socket.socket, *, tls: ssl.SSLContext | None = None) -> None:
        """Listen on a socket that is already bound."""
        listener = await self.loop.create_server(
            lambda: Connection(self),
            sock=sock,
            ssl=tls,
            ssl_handshake_timeout=None if tls is None else self.settings.handshake_s,
            backlog=BACKLOG,
        )
        self._listeners.append(listener)

    async def listen_web(self, sock: socket.socket, hosts: WebHosts, *, tls: ssl.SSLContext | None = None) -> None:
        """Listen for MQTT over WebSocket on a socket that is already bound."""
        listener = await self.loop.create_server(
            lambda: WebSocketProtocol(
                lambda: Connection(self),
                hosts,
                self.shares,
                message_bytes_max=self.settings.packet_bytes_max,
                handshake_s=self.settings.handshake_s,
            ),
            sock=sock,
            ssl=tls,
            ssl_handshake_timeout=None if tls is None else self.settings.handshake_s,
            backlog=BACKLOG,
        )
        self._listeners.append(listener)

    def host(self, vhost_name: str) -> MqttHost:
        """Return the MQTT state of a virtual host, opened if necessary."""
        vhost = self.node.vhost(vhost_name)
        found = self._hosts.get(vhost_name)
        if found is None or found.vhost is not vhost:
            if found is not None:
                found.close()
            found = MqttHost(vhost, self.settings.exchange, offline_messages_max=self.settings.offline_messages_max)
            found.start()
            self._hosts[vhost_name] = found
        return found

    def hosts(self) -> list[MqttHost]:
        return list(self._hosts.values())

    def _open_hosts(self) -> None:
        for name in self.node.vhosts():
            try:
                self.host(name)
            except BasaltError as error:
                _log.debug("MQTT of vhost %r is not available: %s", name, error)
        for name in self._hosts.keys() - set(self.node.vhosts()):
            self._hosts.pop(name).close()

    async def close(self, reason: str = "the broker is shutting down") -> None:
        """Stop accepting, and close all connections."""
        self.is_stopping = True
        for listener in self._listeners:
            listener.close()
        for connection in list(self.connections):
            connection.close(reason)
        if self.connections:
            self._emptied.clear()
            try:
                await asyncio.wait_for(self._emptied.wait(), STOP_S)
            except TimeoutError:
                _log.warning("%d MQTT connections did not close; aborting them", len(self.connections))
        self.abort()
        if self._sweeper is not None:
            self._sweeper.cancel()
            self._sweeper = None
        for stop in self._watched.values():
            stop()
        self._watched.clear()
        for host in self._hosts.values():
            host.close()
        for listener in self._listeners:
            await listener.wait_closed()
        self._listeners.clear()

    def abort(self) -> None:
        for connection in list(self.connections):
            connection.abort()

    def joined(self, connection: Connection) -> None:
        self.connections.add(connection)

    def lost(self, connection: Connection) -> None:
        """A socket is gone. Thousands may be lost at once, so their sessions end in portions."""
        if not connection.is_running:
            self._left(connection)
            return
        if not self._lost:
            self.loop.call_soon(self._end_lost)
        self._lost.append(connection)

    def _end_lost(self) -> None:
        until_s = time.perf_counter() + TURN_S
        while self._lost and time.perf_counter() < until_s:
            connection = self._lost.popleft()
            try:
                connection.end_session()
            except Exception:
                _log.exception("%s: the session did not end", connection.name)
            self._left(connection)
        if self._lost:
            self.loop.call_soon(self._end_lost)

    def _left(self, connection: Connection) -> None:
        if connection in self.connections:
            self.connections.discard(connection)
            self._ended.add(connection)
        connection.forget()
        if not self.connections:
            self._emptied.set()

    def totals(self) -> Totals:
        """Return the counters of all connections, open and closed."""
        totals = copy(self._ended)
        for connection in self.connections:
            totals.add(connection)
            totals.connected += connection.is_running
        return totals

    def _sweep(self) -> None:
        self._sweeper = self.loop.call_later(SWEEP_S, self._sweep)
        self._open_hosts()
        self.sys_topics.tick()
        for connection in list(self.connections):
            try:
                connection.tick()
            except Exception:
                _log.exception("%s: timeout check failed", connection.name)

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
                    connection.release_publisher()
                else:
                    connection.hold_publisher()
