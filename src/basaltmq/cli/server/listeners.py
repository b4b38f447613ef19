"""The listeners of a broker, one class per protocol.

`start` listens on a socket that was bound before. `close` stops accepting connections and closes the existing ones.
"""

from __future__ import annotations

import asyncio
import logging
import socket
import ssl
from collections.abc import Callable
from contextlib import suppress
from typing import Final, Protocol

from msgspec import structs

from basaltmq.admin.api import AdminApi
from basaltmq.admin.http.server import HttpServer
from basaltmq.broker.auth.web_hosts import WebHosts
from basaltmq.broker.config.settings import Config
from basaltmq.broker.node import Node
from basaltmq.broker.vhost import VHost
from basaltmq.errors import BasaltError
from basaltmq.protocols.amqp091.server import Server as AmqpServer
from basaltmq.protocols.amqp091.tuning import Limits
from basaltmq.protocols.amqp10.server import Limits as Amqp10Limits
from basaltmq.protocols.amqp10.server import Server as Amqp10Server
from basaltmq.protocols.amqp_version import AmqpVersionDetector
from basaltmq.protocols.kafka.context import Settings as KafkaSettings
from basaltmq.protocols.kafka.server import Server as KafkaServer
from basaltmq.protocols.mqtt.server import Server as MqttServer
from basaltmq.protocols.mqtt.settings import Settings as MqttSettings

FOLLOW_S: Final = 0.5
"""Interval at which the gRPC listener checks whether its virtual host was restarted."""

CLOSE_S_MIN: Final = 0.1
"""Minimum time to send close frames when there is no grace period."""

MQTT_SECTIONS: Final = ("mqtt", "mqtts", "mqtt_ws")

_log: Final = logging.getLogger(__name__)


class Listener(Protocol):
    """Serves one protocol on one or two ports."""

    async def start(self) -> None: ...

    async def close(self, grace_s: float) -> None: ...


class AmqpListener:
    """AMQP 0-9-1 and 1.0 on the same ports, plain and with TLS."""

    def __init__(
        self, node: Node, config: Config, sockets: dict[str, socket.socket], tls: ssl.SSLContext | None
    ) -> None:
        self._server = AmqpServer(
            node,
            limits=Limits.of(config.limits),
            cluster_name=config.name,
            connections_max=config.limits.connections_max,
            shares=node.shares,
        )
        self._amqp10 = Amqp10Server(
            node,
            limits=Amqp10Limits.of(config.limits),
            product=config.amqp.product,
            connections_max=config.limits.connections_max,
            shares=node.shares,
        )
        self._waiting: set[AmqpVersionDetector] = set()
        self._handshake_s = config.limits.handshake_timeout_ms / 1000
        self._sockets = {section: sockets[section] for section in ("amqp", "amqps") if section in sockets}
        self._tls = tls

    async def start(self) -> None:
        for section, sock in self._sockets.items():
            tls = self._tls if section == "amqps" else None
            await self._server.listen_on(sock, tls=tls, protocol=self._version_detector)

    def _version_detector(self) -> AmqpVersionDetector:
        return AmqpVersionDetector(self._server.protocol, self._amqp10.protocol, self._handshake_s, self._waiting)

    async def close(self, grace_s: float) -> None:
        for detector in list(self._waiting):
            detector.abort()
        with suppress(TimeoutError):
            async with asyncio.timeout(max(grace_s, CLOSE_S_MIN)):
                await asyncio.gather(self._server.close(), self._amqp10.close())


class AdminListener:
    """The admin API over HTTP."""

    def __init__(self, api: AdminApi, config: Config, sock: socket.socket, tls: ssl.SSLContext | None) -> None:
        self._server = HttpServer(api.application, connections_max=config.admin.connections_max)
        self._sock = sock
        self._tls = tls if config.admin.tls else None
        self._handshake_s = config.limits.handshake_timeout_ms / 1000

    async def start(self) -> None:
        await self._server.listen(self._sock, self._tls, handshake_s=self._handshake_s)

    async def close(self, grace_s: float) -> None:
        await self._server.close(grace_s)


class FilaListener:
    """gRPC for the queues of one virtual host. It starts again when that virtual host is restarted."""

    def __init__(self, node: Node, config: Config, sock: socket.socket) -> None:
        self._node = node
        self._config = config
        self._host, self._port = sock.getsockname()[:2]
        self._sock: socket.socket | None = sock
        self._serving: tuple[VHost, Callable[[float], asyncio.Future[None]]] | None = None
        self._following: asyncio.Task[None] | None = None
        self._missing = ""
        self._failure = ""

    async def start(self) -> None:
        await self._try_follow()
        self._following = asyncio.create_task(self._follow())

    async def close(self, grace_s: float) -> None:
        if self._following is not None:
            self._following.cancel()
            await asyncio.wait([self._following])
        await self._stop(grace_s)
        if self._sock is not None:
            self._sock.close()

    async def _follow(self) -> None:
        while True:
            await asyncio.sleep(FOLLOW_S)
            await self._try_follow()

    async def _try_follow(self) -> None:
        """Follow the virtual host. If its data is damaged, the other virtual hosts and protocols are served."""
        try:
            await self._follow_once()
            self._failure = ""
        except BasaltError as error:
            if str(error) != self._failure:
                self._failure = str(error)
                _log.error("gRPC cannot serve vhost %r: %s", self._config.fila.vhost, error)

    async def _follow_once(self) -> None:
        vhost: VHost | None = None
        try:
            vhost = self._node.vhost(self._config.fila.vhost)
            self._missing = ""
        except BasaltError as error:
            if str(error) != self._missing:
                self._missing = str(error)
                _log.warning("gRPC is not available: %s (setting fila.vhost)", error)
        if self._serving is not None and self._serving[0] is not vhost:
            await self._stop(0)
        if self._serving is None and vhost is not None:
            await self._serve(vhost)

    async def _serve(self, vhost: VHost) -> None:
        # The gRPC dependencies are needed only if gRPC is enabled.
        from basaltmq.protocols.grpc.services.access import Accounts
        from basaltmq.protocols.grpc.services.api_keys import ApiKeys
        from basaltmq.protocols.grpc.services.queue_server import QueueServer, QueueServerOptions, TlsFiles

        files = self._config.tls
        tls = None
        if self._config.fila.tls and files.certificate is not None and files.key is not None:
            tls = TlsFiles(files.certificate, files.key, files.authority, files.clients, files.version_min)

        settings, limits = self._config.fila, self._config.limits
        options = QueueServerOptions(
            self._host,
            self._port,
            settings.access,
            settings.ack_from,
            tls,
            message_bytes_max=limits.message_bytes_max,
            connections_max=limits.connections_max,
            handshake_s=limits.handshake_timeout_ms / 1000,
        )
        accounts = Accounts(self._node.users, self._node.permissions, vhost.name)
        keys = ApiKeys(vhost.store)
        server = QueueServer(vhost, self._node.alarms, keys, accounts, options, shares=self._node.shares)
        if self._sock is not None:
            self._sock.close()
            self._sock = None
        await server.start()
        self._serving = (vhost, lambda grace_s: asyncio.ensure_future(server.stop(grace_s)))

    async def _stop(self, grace_s: float) -> None:
        if self._serving is not None:
            stop = self._serving[1]
            self._serving = None
            await stop(grace_s)


class KafkaListener:
    """The Kafka protocol for the streams of one virtual host."""

    def __init__(self, node: Node, config: Config, sock: socket.socket, tls: ssl.SSLContext | None) -> None:
        self._server = KafkaServer(
            node,
            KafkaSettings(
                **structs.asdict(config.kafka),
                cluster_id=config.name,
                connections_max=config.limits.connections_max,
                handshake_s=config.limits.handshake_timeout_ms / 1000,
            ),
            shares=node.shares,
        )
        self._sock = sock
        self._tls = tls if config.kafka.tls else None

    async def start(self) -> None:
        await self._server.listen_on(self._sock, tls=self._tls)

    async def close(self, grace_s: float) -> None:
        await self._server.close("the broker is shutting down")


class RocketmqListener:
    """The RocketMQ protocol for the streams of one virtual host."""

    def __init__(self, node: Node, config: Config, sock: socket.socket) -> None:
        # The gRPC dependencies are needed only if gRPC is enabled.
        from basaltmq.protocols.rocketmq.server import Server
        from basaltmq.protocols.rocketmq.settings import Settings as RocketmqSettings

        self._server = Server(
            node,
            RocketmqSettings(
                **structs.asdict(config.rocketmq),
                connections_max=config.limits.connections_max,
                handshake_s=config.limits.handshake_timeout_ms / 1000,
            ),
            shares=node.shares,
        )
        self._sock = sock
        self._tls = config.tls

    async def start(self) -> None:
        self._server.listen_on(self._sock, self._tls)

    async def close(self, grace_s: float) -> None:
        await self._server.close(grace_s)


class MqttListener:
    """MQTT, plain, with TLS, and over WebSocket."""

    def __init__(
        self, node: Node, config: Config, sockets: dict[str, socket.socket], tls: ssl.SSLContext | None
    ) -> None:
        self.server = MqttServer(
            node,
            MqttSettings(
                **structs.asdict(config.mqtt),
                connections_max=config.limits.connections_max,
                handshake_s=config.limits.handshake_timeout_ms / 1000,
            ),
            shares=node.shares,
        )
        self._sockets = {section: sockets[section] for section in MQTT_SECTIONS if section in sockets}
        self._tls = tls
        self._web_tls = tls if config.mqtt_ws.tls else None
        self._web_hosts = WebHosts(config.mqtt_ws.host or config.host, lambda: node.config.mqtt_ws.allowed_hosts)

    async def start(self) -> None:
        self.server.open_hosts()
        for section, sock in self._sockets.items():
            if section == "mqtt_ws":
                await self.server.listen_web(sock, self._web_hosts, tls=self._web_tls)
            else:
                await self.server.listen_on(sock, tls=self._tls if section == "mqtts" else None)

    async def close(self, grace_s: float) -> None:
        with suppress(TimeoutError):
            async with asyncio.timeout(max(grace_s, CLOSE_S_MIN)):
                await self.server.close()
