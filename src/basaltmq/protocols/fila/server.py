"""The gRPC server: `fila.v1` and `basalt.v1` on one port, in the broker's loop.

    connection ──> calls.py (who, errors) ──> service ──> tick.py (enqueues of one turn: one write, one sync)
                                                     └──> takers.py, streams.py (who gets messages, who holds them)

The queue plane is called from the loop and does not wait there: whoever has to wait for the disk awaits the next sync.

TLS files are read for every connection that is made, so a renewed certificate needs no restart.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import grpc
from grpc import ServerCredentials

from basaltmq.errors import InvalidConfigError
from basaltmq.protocols.basalt_grpc.service import SERVICE as QUEUES_SERVICE
from basaltmq.protocols.basalt_grpc.service import QueuesService
from basaltmq.protocols.fila import admin, service
from basaltmq.protocols.fila.access import Access, AccessMode
from basaltmq.protocols.fila.api_keys import ApiKeys
from basaltmq.protocols.fila.calls import Calls
from basaltmq.protocols.fila.desk import Desk, PlaneDesk
from basaltmq.protocols.fila.streams import AckFrom, Streams
from basaltmq.protocols.fila.takers import Takers
from basaltmq.protocols.fila.tick import Tick
from basaltmq.queues.plane import QueuePlane
from basaltmq.store.commit import GroupCommit

REQUEST_BYTES_MAX: Final = 64 << 20
"""One request: a batch of messages. It is in memory as a whole, some times over."""

CALLS_MAX: Final = 1_000
"""Calls of one connection at once; what comes beyond waits in the client."""

KEEPALIVE_MS: Final = 30_000
"""A connection that is silent is asked for a sign of life this often, so that the leases of a dead client come back."""

KEEPALIVE_TIMEOUT_MS: Final = 10_000

STOP_GRACE_S: Final = 5.0
"""Calls that run when the server stops have this long to end."""

_log = logging.getLogger("basaltmq")


@dataclass(frozen=True, slots=True)
class TlsFiles:
    """PEM files. With `authority`, clients must show a certificate it signed."""

    certificate: Path
    key: Path
    authority: Path | None = None


@dataclass(frozen=True, slots=True)
class FilaOptions:
    """How the server listens and whom it lets in."""

    host: str = "127.0.0.1"
    port: int = 5555
    access: AccessMode = "loopback"
    ack_from: AckFrom = "holder"
    tls: TlsFiles | None = None
    request_bytes_max: int = REQUEST_BYTES_MAX


class FilaServer:
    """Serves the queues of one plane. Made, started and stopped on one loop."""

    def __init__(
        self,
        plane: QueuePlane,
        commit: GroupCommit,
        keys: ApiKeys,
        options: FilaOptions | None = None,
        *,
        desk: Desk | None = None,
        clock_ns: Callable[[], int] = time.time_ns,
    ) -> None:
        """`desk` is whoever owns the queues, by default the plane itself."""
        desk = desk or PlaneDesk(plane)
        self._options = options = options or FilaOptions()
        loop = asyncio.get_running_loop()
        self._tick = Tick(plane, commit, loop)
        self._takers = Takers(plane, loop)
        self._streams = Streams(plane, self._takers, loop, ack_from=options.ack_from)
        keys.watch(self._streams.recheck)
        access = Access(keys, options.access)
        self._calls = Calls(access, desk.failed)

        async def durable() -> None:
            await commit.durable()

        fila = service.FilaService(plane, self._tick, self._streams, desk, clock_ns)
        operators = admin.FilaAdmin(plane, self._takers, access, desk, durable)
        self._queues = QueuesService(plane, self._tick, self._takers, desk)
        self._server = grpc.aio.server(options=_channel_options(options))
        for name, methods in (
            (service.SERVICE, fila.methods(self._calls)),
            (admin.SERVICE, operators.methods(self._calls)),
            (QUEUES_SERVICE, self._queues.methods(self._calls)),
        ):
            self._server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(name, methods),))

    async def start(self) -> int:
        """Listen; the port."""
        options = self._options
        address = f"[{options.host}]:{options.port}" if ":" in options.host else f"{options.host}:{options.port}"
        try:
            if options.tls is None:
                port = self._server.add_insecure_port(address)
            else:
                port = self._server.add_secure_port(address, _credentials(options.tls))
        except RuntimeError as error:
            raise InvalidConfigError(f"cannot listen on {address} for gRPC: {error}") from None
        await self._server.start()
        if options.access == "open":
            _log.warning("gRPC on %s port %d asks nobody for a key (access is open)", options.host, port)
        return port

    async def stop(self, grace_s: float = STOP_GRACE_S) -> None:
        """Take no more calls, end streams and waits, and let what runs finish within the grace."""
        self._streams.close()
        self._queues.close()
        await self._server.stop(grace_s)

    def info(self) -> dict[str, int]:
        """Figures of this server."""
        return {
            "calls": self._calls.open,
            "streams": len(self._streams),
            "held": self._streams.held,
            "enqueue_writes": self._tick.writes,
        }


def _channel_options(options: FilaOptions) -> list[tuple[str, Any]]:
    return [
        ("grpc.so_reuseport", 0),
        ("grpc.max_receive_message_length", options.request_bytes_max),
        ("grpc.max_send_message_length", -1),
        ("grpc.max_concurrent_streams", CALLS_MAX),
        ("grpc.keepalive_time_ms", KEEPALIVE_MS),
        ("grpc.keepalive_timeout_ms", KEEPALIVE_TIMEOUT_MS),
        ("grpc.http2.min_ping_interval_without_data_ms", KEEPALIVE_TIMEOUT_MS),
    ]


def _credentials(files: TlsFiles) -> ServerCredentials:
    """Credentials that are read again for every connection; files that cannot be read leave the last ones in place."""
    current = _read(files)

    def fetch() -> grpc.ServerCertificateConfiguration | None:
        try:
            return _read(files)
        except InvalidConfigError as error:
            _log.error("TLS goes on with the certificate it has: %s", error)
            return None

    # None leaves things as they are; the types of the package do not know that.
    fetcher: Any = fetch
    return grpc.dynamic_ssl_server_credentials(
        current, fetcher, require_client_authentication=files.authority is not None
    )


def _read(files: TlsFiles) -> grpc.ServerCertificateConfiguration:
    def content(path: Path) -> bytes:
        try:
            return path.read_bytes()
        except OSError as error:
            raise InvalidConfigError(f"TLS file {path} cannot be read: {error.strerror}") from None

    authority = None if files.authority is None else content(files.authority)
    return grpc.ssl_server_certificate_configuration([(content(files.key), content(files.certificate))], authority)
