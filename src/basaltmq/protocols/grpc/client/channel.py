"""A client channel: calls over one connection, which is opened on demand and reopened after it is lost.

A call that the server did not process (GOAWAY or REFUSED_STREAM) is retried once. Any other failure of a connection
ends its calls with UNAVAILABLE, because their progress is unknown. Calls beyond the server's limit of concurrent
streams wait in the channel.
"""

from __future__ import annotations

import asyncio
import ssl
from collections import deque
from collections.abc import AsyncGenerator, Sequence
from typing import Final

from basaltmq.protocols.grpc.client.call import CallFailed, ClientCall, NotProcessed
from basaltmq.protocols.grpc.client.connection import ClientConnection
from basaltmq.protocols.grpc.heads import ResponseHead
from basaltmq.protocols.grpc.http2.header_blocks import Field, HeaderCache, encode
from basaltmq.protocols.grpc.status import Outcome, Status

RESPONSE_BYTES_MAX: Final = 256 << 20
"""Largest response, a lease of many messages. It is in memory as a whole."""

CONNECT_S: Final = 20.0
"""Connect timeout in seconds, for calls with a longer timeout of their own."""

BLOCKS_MAX: Final = 256
"""Cached header blocks: one for each combination of method and timeout."""

TRIES: Final = 2


class Channel:
    """Use it in one event loop only. The first call opens the connection."""

    def __init__(
        self,
        host: str,
        port: int,
        *,
        tls: ssl.SSLContext | None = None,
        fields: Sequence[Field] = (),
        user_agent: str = "basaltmq",
        response_bytes_max: int = RESPONSE_BYTES_MAX,
    ) -> None:
        """`fields` is metadata for every call."""
        self.host = host
        self.port = port
        self.response_bytes_max = response_bytes_max
        self.header_cache: HeaderCache[ResponseHead] = HeaderCache(ResponseHead)
        self._tls = tls
        authority = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
        self._before = encode([(":method", "POST"), (":scheme", "http" if tls is None else "https")])
        self._after = encode(
            [
                (":authority", authority),
                ("te", "trailers"),
                ("content-type", "application/grpc"),
                ("user-agent", user_agent),
                ("grpc-accept-encoding", "identity,gzip"),
                *fields,
            ]
        )
        self._blocks: dict[tuple[str, float | None], bytes] = {}
        self._connection: ClientConnection | None = None
        self._connecting: asyncio.Task[ClientConnection] | None = None
        self._waiting: deque[asyncio.Future[None]] = deque()
        self._is_closed = False

    async def unary(self, path: str, request: bytes, timeout_s: float | None = None) -> bytes:
        """Call a unary method and return its response. Raise CallFailed if the status is not OK."""
        for left in reversed(range(TRIES)):
            connection = self._connection
            if connection is None or not connection.has_room:
                connection = await self._room(timeout_s)
            call = ClientCall(connection, self._block(path, timeout_s), timeout_s)
            call.send_last(request)
            try:
                return await call.response()
            except NotProcessed as error:
                if not left:
                    raise CallFailed(error.outcome) from None
        raise AssertionError("the last attempt raises")

    async def stream(self, path: str, timeout_s: float | None = None) -> ClientCall:
        """Start a call with several requests, several responses, or both."""
        connection = await self._room(timeout_s)
        return ClientCall(connection, self._block(path, timeout_s), timeout_s)

    async def responses(self, path: str, request: bytes) -> AsyncGenerator[bytes, None]:
        """Yield the responses of a server-streaming method."""
        call = await self.stream(path)
        call.send_last(request)
        try:
            async for response in call:
                yield response
        finally:
            call.cancel()

    def _block(self, path: str, timeout_s: float | None) -> bytes:
        block = self._blocks.get((path, timeout_s))
        if block is None:
            fields = [] if timeout_s is None else [("grpc-timeout", timeout_text(timeout_s))]
            block = self._before + encode([(":path", path)]) + self._after + encode(fields)
            if len(self._blocks) >= BLOCKS_MAX:
                self._blocks.clear()
            self._blocks[path, timeout_s] = block
        return block

    async def _room(self, timeout_s: float | None) -> ClientConnection:
        """Return a connection with room for another call."""
        try:
            async with asyncio.timeout(timeout_s):
                while True:
                    connection = await self._connected()
                    if connection.has_room:
                        return connection
                    turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
                    self._waiting.append(turn)
                    await turn
        except TimeoutError:
            raise CallFailed(Outcome(Status.DEADLINE_EXCEEDED, "no response arrived within the timeout")) from None

    def has_room(self) -> None:
        """Wake one waiting call, because a call or a connection ended."""
        while self._waiting:
            turn = self._waiting.popleft()
            if not turn.done():
                turn.set_result(None)
                return

    async def _connected(self) -> ClientConnection:
        if self._is_closed:
            raise CallFailed(Outcome(Status.CANCELLED, "the client is closed"))
        if self._connection is not None and self._connection.is_usable:
            return self._connection
        if self._connecting is None:
            self._connecting = asyncio.get_running_loop().create_task(self._connect())
            self._connecting.add_done_callback(self._tried)
        # Other calls may wait for the same connection, so a cancelled call must not cancel the attempt.
        return await asyncio.shield(self._connecting)

    def _tried(self, task: asyncio.Task[ClientConnection]) -> None:
        self._connecting = None
        if not task.cancelled():
            task.exception()

    async def _connect(self) -> ClientConnection:
        loop = asyncio.get_running_loop()
        try:
            async with asyncio.timeout(CONNECT_S):
                _, made = await loop.create_connection(
                    lambda: ClientConnection(self, loop),
                    self.host,
                    self.port,
                    ssl=self._tls,
                    server_hostname=self.host if self._tls else None,
                )
                await made.wait_established()
        except TimeoutError:
            raise self._unreachable("no response") from None
        except OSError as error:
            # SSL errors, such as an untrusted certificate, are OSErrors too.
            raise self._unreachable(str(error)) from None
        if self._is_closed:
            made.close()
        self._connection = made
        return made

    def _unreachable(self, why: str) -> CallFailed:
        text = f"cannot connect to {self.host} port {self.port}: {why}; start the broker, or use its gRPC port (5555)"
        return CallFailed(Outcome(Status.UNAVAILABLE, text))

    def lost(self, connection: ClientConnection) -> None:
        """Forget a connection that accepts no more calls."""
        if connection is self._connection:
            self._connection = None
        self.has_room()

    async def close(self) -> None:
        """Close the connection and fail all calls."""
        self._is_closed = True
        if self._connecting is not None:
            self._connecting.cancel()
        if self._connection is not None:
            connection, self._connection = self._connection, None
            connection.close()
            await connection.gone()
        while self._waiting:
            self.has_room()


def timeout_text(timeout_s: float) -> str:
    """Return a timeout in gRPC notation, with at most eight digits."""
    for unit, per_s in (("u", 1e6), ("m", 1e3), ("S", 1.0)):
        number = max(1, round(timeout_s * per_s))
        if number < 100_000_000:
            return f"{number}{unit}"
    return f"{min(99_999_999, round(timeout_s / 3600))}H"
