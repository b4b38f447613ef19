"""The gRPC listener of the broker: `fila.v1` and `basalt.v1` on one port, in the broker's event loop.

    connection ──> MethodFactory (authentication) ──> service ──> QueueOwner (enqueues: the tick of the vhost)
                                                             └──> WaitingConsumers (distribution), ConsumeStreams

The queue plane is called on the loop and never blocks it. Calls that need durability await the next sync.

Changed TLS files are reloaded when a client connects, so a renewed certificate needs no restart.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Literal

from basaltmq.broker.config.settings import Tls
from basaltmq.broker.resources.flow import Alarms
from basaltmq.broker.scheduling.loop_shares import LoopShares
from basaltmq.broker.vhost import VHost
from basaltmq.errors import InvalidConfigError
from basaltmq.protocols.grpc.server.certificates import Certificates
from basaltmq.protocols.grpc.server.server import CONNECTIONS_MAX, HANDSHAKE_S, REQUEST_BYTES_MAX, GrpcServer
from basaltmq.protocols.grpc.services.access import Access, AccessMode, Accounts
from basaltmq.protocols.grpc.services.api_keys import ApiKeys
from basaltmq.protocols.grpc.services.basalt.service import SERVICE as QUEUES_SERVICE
from basaltmq.protocols.grpc.services.basalt.service import QueuesService
from basaltmq.protocols.grpc.services.error_status import outcome_of
from basaltmq.protocols.grpc.services.fila import admin, service
from basaltmq.protocols.grpc.services.fila.consume_streams import AckFrom, ConsumeStreams
from basaltmq.protocols.grpc.services.method_factory import MethodFactory
from basaltmq.protocols.grpc.services.queue_owner import MESSAGE_BYTES_MAX, QueueOwner
from basaltmq.protocols.grpc.services.waiting_consumers import WaitingConsumers
from basaltmq.protocols.grpc.status import Outcome

STOP_GRACE_S: Final = 5.0
"""Grace period in seconds for running calls when the server stops."""

ENVELOPE_BYTES_MAX: Final = 1 << 20
"""Room for the headers, keys and names of the largest message, in addition to its payload."""

_log = logging.getLogger("basaltmq")


@dataclass(frozen=True, slots=True)
class TlsFiles:
    """PEM files. If `clients` is unset, client certificates are required when there is an `authority`, else ignored."""

    certificate: Path
    key: Path
    authority: Path | None = None
    clients: Literal["ignore", "ask", "require"] | None = None
    version_min: Literal["1.2", "1.3"] = "1.2"

    def settings(self) -> Tls:
        clients = self.clients or ("ignore" if self.authority is None else "require")
        return Tls(self.certificate, self.key, self.authority, clients, self.version_min)


@dataclass(frozen=True, slots=True)
class QueueServerOptions:
    """Where the server listens, whom it admits, and its limits."""

    host: str = "127.0.0.1"
    port: int = 5555
    access: AccessMode = "loopback"
    ack_from: AckFrom = "holder"
    tls: TlsFiles | None = None
    request_bytes_max: int = REQUEST_BYTES_MAX
    message_bytes_max: int = MESSAGE_BYTES_MAX
    connections_max: int = CONNECTIONS_MAX
    handshake_s: float = HANDSHAKE_S


class QueueServer:
    """Serves the queues of one virtual host. Create, start and stop it on one event loop."""

    def __init__(
        self,
        vhost: VHost,
        alarms: Alarms,
        keys: ApiKeys,
        accounts: Accounts,
        options: QueueServerOptions | None = None,
        *,
        clock_ns: Callable[[], int] = time.time_ns,
        shares: LoopShares | None = None,
    ) -> None:
        """`alarms` block publishers. `shares` is the loop's scheduler, if other listeners use the loop too."""
        self._options = options = options or QueueServerOptions()
        loop = asyncio.get_running_loop()
        plane, commit = vhost.plane, vhost.commit
        owner = QueueOwner(vhost, alarms, options.message_bytes_max)
        self._consumers = WaitingConsumers(plane, loop)
        self._streams = ConsumeStreams(plane, self._consumers, loop, ack_from=options.ack_from)
        keys.watch(self._streams.recheck)
        self._unwatch = accounts.permissions.watch(self._streams.recheck)
        access = Access(keys, accounts, options.access)
        calls = MethodFactory(access)

        async def durable() -> None:
            await commit.durable()

        def ended(error: BaseException) -> Outcome:
            if isinstance(error, Exception):
                owner.failed(error)
            return outcome_of(error)

        fila = service.FilaService(plane, self._streams, owner, clock_ns)
        operators = admin.FilaAdmin(plane, self._consumers, access, owner, durable)
        self._queues = QueuesService(plane, self._consumers, owner, durable)
        services = (
            (service.SERVICE, fila.methods(calls)),
            (admin.SERVICE, operators.methods(calls)),
            (QUEUES_SERVICE, self._queues.methods(calls)),
        )
        self._server = GrpcServer(
            {f"/{name}/{method}": made for name, methods in services for method, made in methods.items()},
            ended,
            request_bytes_max=max(options.request_bytes_max, options.message_bytes_max + ENVELOPE_BYTES_MAX),
            inflated_bytes_max=options.message_bytes_max + ENVELOPE_BYTES_MAX,
            connections_max=options.connections_max,
            handshake_s=options.handshake_s,
            requires_authentication=True,
            shares=shares,
        )

    async def start(self) -> int:
        """Listen and return the port."""
        options = self._options
        tls = None if options.tls is None else Certificates(options.tls.settings())
        try:
            port = await self._server.listen(
                options.host,
                options.port,
                None if tls is None else tls.context,
                None if tls is None else tls.refresh,
            )
        except OSError as error:
            raise InvalidConfigError(
                f"cannot listen on {options.host} port {options.port} for gRPC: {error.strerror or error}"
            ) from None
        return port

    async def stop(self, grace_s: float = STOP_GRACE_S) -> None:
        """Refuse new calls, end streams and long polls, and let running calls finish for `grace_s` seconds."""
        self._unwatch()
        self._streams.close()
        self._queues.close()
        await self._server.stop(grace_s, "the broker is stopping; connect again")

    def info(self) -> dict[str, int]:
        """Return the server's statistics."""
        return {
            "connections": len(self._server.connections),
            "calls": self._server.calls,
            "streams": len(self._streams),
            "held": self._streams.held,
        }
