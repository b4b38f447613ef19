"""MQTT listeners of a node, and the MQTT state of the virtual hosts.

The sweep of each second opens the MQTT state of virtual hosts that were created or restarted. So their sessions expire
and their wills are published without a client.
"""

from __future__ import annotations

import logging
import socket
import ssl
from copy import copy
from functools import partial
from typing import Final

from msgspec import Struct

from basaltmq.broker.auth.web_hosts import WebHosts
from basaltmq.broker.node import Node
from basaltmq.broker.scheduling.loop_shares import LoopShares
from basaltmq.errors import BasaltError, VHostDownError
from basaltmq.protocols.mqtt.connection import Connection
from basaltmq.protocols.mqtt.host import MqttHost
from basaltmq.protocols.mqtt.settings import Settings
from basaltmq.protocols.mqtt.sys_topics import SysTopics
from basaltmq.protocols.mqtt.websocket import WebSocketProtocol
from basaltmq.protocols.mqtt.wire.decoder import Limits
from basaltmq.protocols.server import ConnectionServer

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


class Server(ConnectionServer[Connection]):
    """All MQTT listeners and connections of a node."""

    def __init__(self, node: Node, settings: Settings, *, shares: LoopShares | None = None) -> None:
        super().__init__(node, settings.handshake_s, shares)
        self.settings = settings
        self.limits = Limits(packet_bytes_max=settings.packet_bytes_max)
        self.is_stopping = False
        self.sys_topics = SysTopics(self)
        self._ended = Totals()
        self._hosts: dict[str, MqttHost] = {}
        self._failures: dict[str, str] = {}
        """Virtual hosts whose MQTT state does not open, and why, as the log has it."""

    def protocol(self) -> Connection:
        return Connection(self)

    async def listen_web(self, sock: socket.socket, hosts: WebHosts, *, tls: ssl.SSLContext | None = None) -> None:
        """Listen for MQTT over WebSocket on a socket that is already bound."""
        settings = self.settings

        def protocol() -> WebSocketProtocol:
            return WebSocketProtocol(
                self.protocol,
                hosts,
                self.shares,
                message_bytes_max=settings.packet_bytes_max,
                handshake_s=settings.handshake_s,
            )

        await self.listen_on(sock, tls=tls, protocol=protocol)

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

    def open_hosts(self) -> None:
        """Open the MQTT state of all virtual hosts."""
        for name in self.node.vhosts():
            try:
                self.host(name)
                self._failures.pop(name, None)
            except VHostDownError:
                pass
            except BasaltError as error:
                # The other virtual hosts and protocols are served. A later call tries again.
                if str(error) != self._failures.get(name):
                    self._failures[name] = str(error)
                    _log.error("MQTT cannot serve vhost %r: %s", name, error)
        for name in self._hosts.keys() - set(self.node.vhosts()):
            self._hosts.pop(name).close()

    async def close(self, reason: str = "the broker is shutting down") -> None:
        self.is_stopping = True
        await super().close(reason)
        for host in self._hosts.values():
            host.close()

    def lost(self, connection: Connection) -> None:
        """Handle a lost socket. Thousands may be lost at once, so their sessions end in portions."""
        if connection.is_running:
            self.shares.clean_up(partial(self._end, connection))
        else:
            self.connection_closed(connection)

    def _end(self, connection: Connection) -> None:
        try:
            connection.end_session()
        finally:
            self.connection_closed(connection)

    def connection_closed(self, connection: Connection) -> None:
        if connection in self.connections:
            self._ended.add(connection)
        connection.forget()
        super().connection_closed(connection)

    def totals(self) -> Totals:
        """Return the counters of all connections, open and closed."""
        totals = copy(self._ended)
        for connection in self.connections:
            totals.add(connection)
            totals.connected += connection.is_running
        return totals

    def _sweep(self) -> None:
        self.open_hosts()
        self.sys_topics.tick()
        super()._sweep()
