"""The gRPC server: `fila.v1` and `basalt.v1` on one port, in the broker's loop.

    connection ──> calls.py (who, errors) ──> service ──> tick.py (enqueues of one turn: one write, one sync)
                                                     └──> takers.py, streams.py (who gets messages, who holds them)

The queue plane is called from the loop and does not wait there: whoever has to wait for the disk awaits the next sync.

TLS files are read for every connection that is made, so a renewed certificate needs no restart.
"""

from __future__ import annotations

import asyncio
import logging
import os
import ssl
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Literal

from basaltmq.broker.auth.tls import reload_files, server_context
from basaltmq.broker.config.settings import Tls
from basaltmq.broker.loop_shares import LoopShares
from basaltmq.errors import InvalidConfigError
from basaltmq.protocols.grpc.server.server import CONNECTIONS_MAX, HANDSHAKE_S, REQUEST_BYTES_MAX, GrpcServer
from basaltmq.protocols.grpc.services.access import Access, AccessMode, Accounts
from basaltmq.protocols.grpc.services.api_keys import ApiKeys
from basaltmq.protocols.grpc.services.basalt.service import SERVICE as QUEUES_SERVICE
from basaltmq.protocols.grpc.services.basalt.service import QueuesService
from basaltmq.protocols.grpc.services.error_status import outcome_of
from basaltmq.protocols.grpc.services.fila import admin, service
from basaltmq.protocols.grpc.services.fila.consume_streams import AckFrom, Streams
from basaltmq.protocols.grpc.services.method_factory import Calls
from basaltmq.protocols.grpc.services.queue_owner import Desk, PlaneDesk
from basaltmq.protocols.grpc.services.tick import MESSAGE_BYTES_MAX, Tick
from basaltmq.protocols.grpc.services.waiting_consumers import Takers
from basaltmq.protocols.grpc.status import Outcome
from basaltmq.queues.plane import QueuePlane
from basaltmq.store.sync.group_commit import GroupCommit

STOP_GRACE_S: Final = 5.0
"""Calls that run when the server stops have this long to end."""

ENVELOPE_BYTES_MAX: Final = 1 << 20
"""What is around the payload of the largest message: its headers, keys and names."""

_log = logging.getLogger("basaltmq")


@dataclass(frozen=True, slots=True)
class TlsFiles:
    """PEM files, and what is asked of clients: by default a certificate, if there is an authority to check it with."""

    certificate: Path
    key: Path
    authority: Path | None = None
    clients: Literal["ignore", "ask", "require"] | None = None
    version_min: Literal["1.2", "1.3"] = "1.2"

    def settings(self) -> Tls:
        clients = self.clients or ("ignore" if self.authority is None else "require")
        return Tls(self.certificate, self.key, self.authority, clients, self.version_min)


@dataclass(frozen=True, slots=True)
class FilaOptions:
    """How the server listens and whom it lets in."""

    host: str = "127.0.0.1"
    port: int = 5555
    access: AccessMode = "loopback"
    ack_from: AckFrom = "holder"
    tls: TlsFiles | None = None
    request_bytes_max: int = REQUEST_BYTES_MAX
    message_bytes_max: int = MESSAGE_BYTES_MAX
    connections_max: int = CONNECTIONS_MAX
    handshake_s: float = HANDSHAKE_S


class FilaServer:
    """Serves the queues of one plane. Made, started and stopped on one loop."""

    def __init__(
        self,
        plane: QueuePlane,
        commit: GroupCommit,
        keys: ApiKeys,
        accounts: Accounts,
        options: FilaOptions | None = None,
        *,
        desk: Desk | None = None,
        clock_ns: Callable[[], int] = time.time_ns,
        shares: LoopShares | None = None,
    ) -> None:
        """`desk` is whoever owns the queues, by default the plane itself; `shares` are the loop's, if it serves others
        too."""
        desk = desk or PlaneDesk(plane)
        self._options = options = options or FilaOptions()
        loop = asyncio.get_running_loop()
        self._tick = Tick(plane, commit, loop, message_bytes_max=options.message_bytes_max)
        self._takers = Takers(plane, loop)
        self._streams = Streams(plane, self._takers, loop, ack_from=options.ack_from)
        keys.watch(self._streams.recheck)
        self._unwatch = accounts.permissions.watch(self._streams.recheck)
        access = Access(keys, accounts, options.access)
        calls = Calls(access)

        async def durable() -> None:
            await commit.durable()

        def ended(error: BaseException) -> Outcome:
            if isinstance(error, Exception):
                desk.failed(error)
            return outcome_of(error)

        fila = service.FilaService(plane, self._tick, self._streams, desk, clock_ns)
        operators = admin.FilaAdmin(plane, self._takers, access, desk, durable)
        self._queues = QueuesService(plane, self._tick, self._takers, desk, durable)
        services = (
            (service.SERVICE, fila.methods(calls)),
            (admin.SERVICE, operators.methods(calls)),
            (QUEUES_SERVICE, self._queues.methods(calls)),
        )
        self._server = GrpcServer(
            {f"/{name}/{method}": made for name, methods in services for method, made in methods.items()},
            ended,
            request_bytes_max=max(options.request_bytes_max, options.message_bytes_max + ENVELOPE_BYTES_MAX),
            connections_max=options.connections_max,
            handshake_s=options.handshake_s,
            needs_admission=True,
            shares=shares,
        )

    async def start(self) -> int:
        """Listen; the port."""
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
        """Take no more calls, end streams and waits, and let what runs finish within the grace."""
        self._unwatch()
        self._streams.close()
        self._queues.close()
        await self._server.stop(grace_s, "the broker is stopping; connect again")

    def info(self) -> dict[str, int]:
        """Figures of this server."""
        return {
            "connections": len(self._server.connections),
            "calls": self._server.calls,
            "streams": len(self._streams),
            "held": self._streams.held,
            "enqueue_writes": self._tick.writes,
        }


class Certificates:
    """A TLS context whose files are looked at again for every connection."""

    def __init__(self, settings: Tls) -> None:
        self._settings = settings
        self._files = [file for file in (settings.certificate, settings.key, settings.authority) if file is not None]
        self._seen = self._look()
        self.context: ssl.SSLContext = server_context(settings)
        self.context.set_alpn_protocols(["h2"])

    def refresh(self) -> None:
        """Read files that changed; those that cannot be used leave the last ones in place."""
        look = self._look()
        if look == self._seen:
            return
        try:
            reload_files(self.context, self._settings)
        except InvalidConfigError as error:
            _log.error("TLS goes on with the certificate it has: %s", error)
        self._seen = look

    def _look(self) -> list[tuple[int, int, int] | None]:
        """What tells a file from its successor."""
        found: list[tuple[int, int, int] | None] = []
        for file in self._files:
            try:
                status = os.stat(file)
            except OSError:
                found.append(None)
            else:
                found.append((status.st_mtime_ns, status.st_size, status.st_ino))
        return found
