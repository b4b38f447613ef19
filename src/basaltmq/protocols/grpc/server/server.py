"""The transport of the gRPC server: listening, keepalive, deadlines and graceful shutdown for any set of methods."""

from __future__ import annotations

import asyncio
import logging
import ssl
from collections.abc import Callable, Mapping
from typing import Final

from basaltmq.broker.scheduling.loop_shares import LoopShares
from basaltmq.protocols.grpc.heads import RequestHead
from basaltmq.protocols.grpc.http2.header_blocks import HeaderCache
from basaltmq.protocols.grpc.server.connection import ServerConnection
from basaltmq.protocols.grpc.server.methods import Method
from basaltmq.protocols.grpc.status import Outcome

SWEEP_S: Final = 1.0
BACKLOG: Final = 1024

CALLS_MAX: Final = 1_000
"""Concurrent calls per connection. Further calls wait in the client."""

CONNECTIONS_MAX: Final = 10_000

REQUEST_BYTES_MAX: Final = 64 << 20
"""Largest request, a batch of messages. Several copies of it are in memory at once."""

KEEPALIVE_S: Final = 30.0
"""Interval of pings on a silent connection, so that the leases of a dead client are released."""

KEEPALIVE_TIMEOUT_S: Final = 10.0
HANDSHAKE_S: Final = 10.0

INFLATED_CONCURRENTLY_MAX: Final = 2
"""Compressed requests that threads inflate at a time. It bounds their memory and leaves cores for other work."""

_log: Final = logging.getLogger("basaltmq")


class GrpcServer:
    """Serves methods to clients. Create, start and stop it on one event loop."""

    def __init__(
        self,
        methods: Mapping[str, Method],
        outcome_of: Callable[[BaseException], Outcome],
        *,
        request_bytes_max: int = REQUEST_BYTES_MAX,
        inflated_bytes_max: int = REQUEST_BYTES_MAX,
        connections_max: int = CONNECTIONS_MAX,
        calls_max: int = CALLS_MAX,
        handshake_s: float = HANDSHAKE_S,
        requires_authentication: bool = False,
        shares: LoopShares | None = None,
    ) -> None:
        """`methods` maps paths (/package.Service/Method) to methods. `outcome_of` maps a handler's error to the outcome
        of its call. With `requires_authentication`, a connection is closed unless a method calls its
        `authenticated` within `handshake_s`."""
        self.requires_authentication = requires_authentication
        self.methods = dict(methods)
        self.outcome_of = outcome_of
        self.request_bytes_max = request_bytes_max
        self.held_bytes_max = 2 * request_bytes_max
        """Limit for incomplete messages of one connection: two of the largest requests."""
        self.strangers_bytes = 0
        """Incomplete messages of connections without a login."""
        self.inflated_bytes_max = inflated_bytes_max
        """Limit of a compressed request when decompressed."""
        self.inflating = asyncio.Semaphore(INFLATED_CONCURRENTLY_MAX)
        self.calls_max = calls_max
        self.handshake_s = handshake_s
        self.keepalive_s = KEEPALIVE_S
        self.keepalive_timeout_s = KEEPALIVE_TIMEOUT_S
        self.shares = shares or LoopShares()
        self.loop = asyncio.get_running_loop()
        self.header_cache: HeaderCache[RequestHead] = HeaderCache(RequestHead)
        self.is_stopping = False
        self.connections: set[ServerConnection] = set()
        self._connections_max = connections_max
        self._listener: asyncio.AbstractServer | None = None
        self._sweeper: asyncio.TimerHandle | None = None
        self._idle = asyncio.Event()

    @property
    def calls(self) -> int:
        """Number of running calls."""
        return sum(each.calls for each in self.connections)

    async def listen(
        self,
        host: str,
        port: int,
        tls: ssl.SSLContext | None = None,
        on_accept: Callable[[], None] | None = None,
    ) -> int:
        """Listen and return the port. `on_accept` runs before each connection's handshake. Raise OSError on failure."""

        def accept() -> ServerConnection:
            if on_accept is not None:
                on_accept()
            return ServerConnection(self)

        self._listener = await self.loop.create_server(
            accept,
            host,
            port,
            ssl=tls,
            ssl_handshake_timeout=None if tls is None else self.handshake_s,
            backlog=BACKLOG,
            reuse_address=True,
        )
        self.start()
        found: int = self._listener.sockets[0].getsockname()[1]
        return found

    def start(self) -> None:
        """Enforce deadlines and keepalive of connections, which `listen` or another acceptor makes."""
        self._sweeper = self.loop.call_later(SWEEP_S, self._sweep)

    async def stop(self, grace_s: float, text: str) -> None:
        """Refuse new connections and calls, and let running calls finish for `grace_s` seconds."""
        self.is_stopping = True
        if self._listener is not None:
            self._listener.close()
        if self._sweeper is not None:
            self._sweeper.cancel()
        for connection in list(self.connections):
            connection.leave(text)
        try:
            async with asyncio.timeout(grace_s):
                while self.calls:
                    self._idle.clear()
                    await self._idle.wait()
        except TimeoutError:
            _log.warning("%d gRPC calls did not finish within the grace period and are aborted", self.calls)
        for connection in list(self.connections):
            connection.close()
        # Let cancelled handlers clean up and the transports write their output.
        for _ in range(3):
            await asyncio.sleep(0)
        if self._listener is not None:
            self._listener = None

    def joined(self, connection: ServerConnection) -> str:
        """Register a connection. Return the reason if it must be refused."""
        self.connections.add(connection)
        if len(self.connections) > self._connections_max:
            _log.warning("refusing a gRPC client: the limit of %d connections is reached", self._connections_max)
            return f"the limit of {self._connections_max} connections is reached"
        return ""

    def left(self, connection: ServerConnection) -> None:
        self.connections.discard(connection)

    def idle(self) -> None:
        """Signal `stop` that a connection has no calls left."""
        self._idle.set()

    def _sweep(self) -> None:
        self._sweeper = self.loop.call_later(SWEEP_S, self._sweep)
        now_s = self.loop.time()
        for connection in list(self.connections):
            try:
                connection.tick(now_s)
            except Exception:
                _log.exception("%s: the sweep failed", connection.peer)
