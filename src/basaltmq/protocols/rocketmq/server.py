"""The RocketMQ listener: methods of apache.rocketmq.v2.MessagingService on Basalt's gRPC server.

Listener (TLS or not) ──> GrpcServer ──> Methods (caller, statuses) ──> handlers ──> Host (topics, groups, leases)
"""

from __future__ import annotations

import asyncio
import logging
import socket
import ssl
import time
from typing import Final

from basaltmq.broker.auth.self_signed import certificate_file
from basaltmq.broker.config.settings import Tls
from basaltmq.broker.node import Node
from basaltmq.broker.scheduling.loop_shares import LoopShares
from basaltmq.broker.vhost_directory import CERTIFICATE_FILE
from basaltmq.errors import BasaltError, VHostDownError, VHostNotFoundError
from basaltmq.protocols.grpc.server.certificates import Certificates
from basaltmq.protocols.grpc.server.connection import ServerConnection
from basaltmq.protocols.grpc.server.methods import Method
from basaltmq.protocols.grpc.server.server import GrpcServer
from basaltmq.protocols.grpc.status import Outcome, Status
from basaltmq.protocols.rocketmq import decisions, offsets, recalls, receiving, routes, sending, sessions, settling
from basaltmq.protocols.rocketmq.clients import Clients
from basaltmq.protocols.rocketmq.host import Host
from basaltmq.protocols.rocketmq.listener import Listener
from basaltmq.protocols.rocketmq.methods import Methods
from basaltmq.protocols.rocketmq.settings import Settings
from basaltmq.protocols.rocketmq.subscribing import sync_lite_subscription
from basaltmq.wire import rocketmq_wire_pb2 as wire

SERVICE: Final = "/apache.rocketmq.v2.MessagingService/"
OPEN_EVERY_S: Final = 1.0
ENVELOPE_BYTES_MAX: Final = 1 << 20
"""Room for the properties of a request in addition to its bodies."""

_log: Final = logging.getLogger(__name__)


class Server:
    """The RocketMQ listener of a node."""

    def __init__(self, node: Node, settings: Settings, *, shares: LoopShares | None = None) -> None:
        self.node = node
        self.settings = settings
        self.clients = Clients(time.monotonic)
        self._host: Host | None = None
        self._listener: Listener | None = None
        self._opener: asyncio.TimerHandle | None = None
        self._failure = ""
        """Why the host does not open, as the log has it."""
        self._grpc = GrpcServer(
            methods(Methods(self, settings.access)),
            _failed,
            request_bytes_max=settings.body_bytes_max + ENVELOPE_BYTES_MAX,
            inflated_bytes_max=settings.body_bytes_max + ENVELOPE_BYTES_MAX,
            connections_max=settings.connections_max,
            handshake_s=settings.handshake_s,
            requires_authentication=True,
            shares=shares,
        )

    def host(self) -> Host:
        """Return the host of the virtual host; VHostDownError if it is down."""
        vhost = self.node.vhost(self.settings.vhost)
        if self._host is None or self._host.vhost is not vhost:
            before, self._host = self._host, None
            if before is not None:
                before.close()
            self._host = Host(self.node, vhost, self.settings, self.clients)
        return self._host

    def listen_on(self, sock: socket.socket, tls: Tls) -> None:
        """Listen on a socket that is already bound. Without a certificate in `tls` a self-signed one is used."""
        certificates: list[Certificates] = []

        def context() -> ssl.SSLContext:
            if not certificates:
                certificates.append(Certificates(self._self_signed() if tls.certificate is None else tls))
            certificates[0].refresh()
            return certificates[0].context

        self._grpc.start()
        self._listener = Listener(sock, lambda: ServerConnection(self._grpc), context, self.settings.handshake_s)
        self._listener.open()
        self._open_host()

    def _self_signed(self) -> Tls:
        file = certificate_file(self.node.directories.node_store.with_name(CERTIFICATE_FILE))
        _log.info(
            "TLS of RocketMQ clients uses the self-signed certificate %s; set tls.certificate to replace it", file
        )
        return Tls(file, file)

    def _open_host(self) -> None:
        """Open the host each time its virtual host starts, so that scheduled messages need no client."""
        self._opener = asyncio.get_running_loop().call_later(OPEN_EVERY_S, self._open_host)
        try:
            self.host()
            self._failure = ""
        except (VHostDownError, VHostNotFoundError):
            pass
        except BasaltError as error:
            # The other virtual hosts and protocols are served. Each call tries again.
            if str(error) != self._failure:
                self._failure = str(error)
                _log.error("RocketMQ cannot serve vhost %r: %s", self.settings.vhost, error)

    async def close(self, grace_s: float) -> None:
        """Refuse new calls, end long polls, and let running calls finish for `grace_s` seconds."""
        if self._opener is not None:
            self._opener.cancel()
        if self._listener is not None:
            await self._listener.close()
        stopping = asyncio.ensure_future(self._grpc.stop(grace_s, "the broker is stopping; connect again"))
        await asyncio.sleep(0)
        self.clients.end_streams()
        if self._host is not None:
            host, self._host = self._host, None
            host.end_waits()
            await stopping
            host.close()
        await stopping


def methods(make: Methods) -> dict[str, Method]:
    """Return the method of each path."""
    table: dict[str, Method] = {
        "QueryRoute": make.unary(wire.QueryRouteRequest, wire.QueryRouteResponse, routes.query_route),
        "QueryAssignment": make.unary(
            wire.QueryAssignmentRequest, wire.QueryAssignmentResponse, routes.query_assignment
        ),
        "Heartbeat": make.unary(wire.HeartbeatRequest, wire.HeartbeatResponse, sessions.heartbeat),
        "Telemetry": make.bidi_streaming(wire.TelemetryCommand, sessions.telemetry),
        "NotifyClientTermination": make.unary(
            wire.NotifyClientTerminationRequest,
            wire.NotifyClientTerminationResponse,
            sessions.notify_client_termination,
        ),
        "SendMessage": make.unary(wire.SendMessageRequest, wire.SendMessageResponse, sending.send_message),
        "ReceiveMessage": make.server_streaming(
            wire.ReceiveMessageRequest, wire.ReceiveMessageResponse, receiving.receive_message
        ),
        "AckMessage": make.unary(wire.AckMessageRequest, wire.AckMessageResponse, settling.ack_message),
        "ForwardMessageToDeadLetterQueue": make.unary(
            wire.ForwardMessageToDeadLetterQueueRequest,
            wire.ForwardMessageToDeadLetterQueueResponse,
            settling.forward_to_dead_letters,
        ),
        "EndTransaction": make.unary(
            wire.EndTransactionRequest, wire.EndTransactionResponse, decisions.end_transaction
        ),
        "PullMessage": make.server_streaming(wire.PullMessageRequest, wire.PullMessageResponse, offsets.pull_message),
        "UpdateOffset": make.unary(wire.UpdateOffsetRequest, wire.UpdateOffsetResponse, offsets.update_offset),
        "GetOffset": make.unary(wire.GetOffsetRequest, wire.GetOffsetResponse, offsets.get_offset),
        "QueryOffset": make.unary(wire.QueryOffsetRequest, wire.QueryOffsetResponse, offsets.query_offset),
        "RecallMessage": make.unary(wire.RecallMessageRequest, wire.RecallMessageResponse, recalls.recall_message),
        "SyncLiteSubscription": make.unary(
            wire.SyncLiteSubscriptionRequest, wire.SyncLiteSubscriptionResponse, sync_lite_subscription
        ),
        "ChangeInvisibleDuration": make.unary(
            wire.ChangeInvisibleDurationRequest,
            wire.ChangeInvisibleDurationResponse,
            settling.change_invisible_duration,
        ),
    }
    return {SERVICE + name: method for name, method in table.items()}


def _failed(error: BaseException) -> Outcome:
    """Return the outcome of a call whose handler has a bug. Errors of requests are statuses in responses."""
    _log.error("a RocketMQ call failed", exc_info=error)
    return Outcome(Status.INTERNAL, "internal error of the broker; see its log")
