"""HTTP/1.1 server on asyncio. h11 implements the protocol; this module does I/O and enforces limits.

    accept ─> head (bounded size and time) ─> admit ─┬─> body (bounded by what admit allows) ─> response ─> next request
                                                      └─> refuse: send the error; close if a body follows

A body is read only after its head was admitted, so unauthenticated clients cannot fill memory. Large bodies go to a
sink piece by piece, and large responses are streams whose next piece is produced when the client has read the previous
one. Neither is ever completely in memory. Every phase has a timeout and every input has a size limit. Clients beyond
the connection limit get 503. On `close`, idle connections end at once, and busy ones after their response or the grace
period.

Routing is up to the application.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
import ssl
from collections.abc import AsyncIterator, Awaitable, Callable
from http import HTTPStatus
from typing import Final, NamedTuple, Protocol

import h11

from basaltmq.admin.http.message import BodySink, BodyStream, HttpError, Request, Response

HEAD_BYTES_MAX: Final = 32 * 1024
"""Request line with long names, and headers. Browsers send 2 KiB."""

HEAD_TIMEOUT_S: Final = 20.0
"""Time from the first byte of a request to the end of its head, in seconds."""

IDLE_TIMEOUT_S: Final = 75.0
"""Time between two requests of one connection, in seconds. Most proxies drop idle connections after 60 s."""

BODY_TIMEOUT_S: Final = 60.0
"""Time without progress of a body, in seconds."""

WRITE_TIMEOUT_S: Final = 60.0
"""Time for a client to read a piece of the response, in seconds."""

READ_BYTES: Final = 64 * 1024

LINGER_S: Final = 1.0
"""Time for a refused client to stop sending and read the error, in seconds."""

LINGER_READS: Final = 64
"""4 MiB: the data in flight in a fast network. A client that sends more is disconnected."""

SINGLE: Final = frozenset({b"authorization", b"content-type", b"origin", b"sec-fetch-site"})
"""Headers that checks depend on. If one is repeated, a proxy and this server could read different values."""

_log: Final = logging.getLogger(__name__)


class Admitted(NamedTuple):
    """A request that passed the checks of its head."""

    body_bytes_max: int
    respond: Callable[[Request], Awaitable[Response]]
    sink: BodySink | None = None
    """Receives the body. `Request.body` is then empty."""


class Application(Protocol):
    """What the server serves."""

    async def admit(self, request: Request) -> Admitted:
        """Decide by the head alone. Raise HttpError to refuse the request."""
        ...


class HttpServer:
    """Listens and serves every connection in a task."""

    def __init__(self, application: Application, *, connections_max: int, name: str = "Basalt") -> None:
        self._application = application
        self._connections_max = connections_max
        self._name = name
        self._server: asyncio.Server | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self._idle: set[asyncio.Task[None]] = set()
        self._closing = False

    async def listen(
        self, sock: socket.socket, tls: ssl.SSLContext | None = None, *, handshake_s: float = HEAD_TIMEOUT_S
    ) -> None:
        """Serve connections of a bound socket. `handshake_s` is the timeout of a TLS handshake."""
        self._server = await asyncio.start_server(
            self._connected,
            sock=sock,
            ssl=tls,
            ssl_handshake_timeout=None if tls is None else handshake_s,
            limit=READ_BYTES,
        )

    async def close(self, grace_s: float = 0.0) -> None:
        """Stop listening, let running requests finish for `grace_s` seconds, then disconnect the rest."""
        self._closing = True
        if self._server is not None:
            self._server.close()
        for task in list(self._idle):
            task.cancel()
        if self._tasks and grace_s > 0:
            await asyncio.wait(self._tasks, timeout=grace_s)
        for task in list(self._tasks):
            task.cancel()
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=1.0)

    @property
    def connections(self) -> int:
        return len(self._tasks)

    async def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        try:
            connection = _Connection(reader, writer, self._name)
            if self._closing or len(self._tasks) > self._connections_max:
                await connection.refuse(HttpError(503, "too many connections; try again later"))
                return
            while not self._closing:
                self._idle.add(task)
                try:
                    began = await connection.wait()
                finally:
                    self._idle.discard(task)
                if not began or not await connection.serve(self._application):
                    return
        except (ConnectionError, TimeoutError, ssl.SSLError):
            pass
        except asyncio.CancelledError:
            # The server is closing. The client sees the connection end.
            if not self._closing:
                raise
        except Exception:
            _log.exception("admin API connection failed")
        finally:
            self._tasks.discard(task)
            writer.close()
            with contextlib.suppress(Exception, asyncio.CancelledError):
                await asyncio.wait_for(writer.wait_closed(), 1.0)


class _Connection:
    """One client connection."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, name: str) -> None:
        self._reader = reader
        self._writer = writer
        self._name = name
        self._http = h11.Connection(h11.SERVER, max_incomplete_event_size=HEAD_BYTES_MAX)
        peer = writer.get_extra_info("peername")
        self._peer = peer[0] if isinstance(peer, tuple) else ""
        local = writer.get_extra_info("sockname")
        self._local = local[0] if isinstance(local, tuple) else ""

    async def wait(self) -> bool:
        """Wait for the first bytes of a request. Return False on disconnect or idle timeout."""
        if self._http.trailing_data[0]:
            return True
        try:
            async with asyncio.timeout(IDLE_TIMEOUT_S):
                raw = await self._reader.read(READ_BYTES)
        except TimeoutError:
            return False
        if raw:
            self._http.receive_data(raw)
        return bool(raw)

    async def serve(self, application: Application) -> bool:
        """Serve one request. Return whether another may follow on the connection."""
        try:
            request = await self._head()
            if request is None:
                return False
            try:
                request.split()
                admitted = await application.admit(request)
                request.body = await self._body(admitted, request.headers)
                response = await admitted.respond(request)
            except HttpError as error:
                response = error.response()
            if response.stream is None:
                await self._send(response, is_head=request.method == "HEAD")
            else:
                await self._send_stream(response, response.stream, is_head=request.method == "HEAD")
        except h11.RemoteProtocolError as error:
            await self.refuse(HttpError(error.error_status_hint, f"malformed HTTP request: {error}"))
            return False
        except TimeoutError:
            await self.refuse(HttpError(408, "the request took too long to arrive"))
            return False
        if self._http.our_state is h11.DONE and self._http.their_state is h11.DONE:
            self._http.start_next_cycle()
            return True
        await self._linger()
        return False

    async def refuse(self, error: HttpError) -> None:
        """Send an error as the last response, if a response can still be sent."""
        if self._http.our_state in {h11.IDLE, h11.SEND_RESPONSE}:
            await self._send(error.response(), is_head=False, last=True)
            await self._linger()

    async def _linger(self) -> None:
        """Read what the client still sends, because closing with unread bytes would discard the response."""
        with contextlib.suppress(OSError, TimeoutError, NotImplementedError):
            if self._writer.can_write_eof():
                self._writer.write_eof()
            async with asyncio.timeout(LINGER_S):
                for _ in range(LINGER_READS):
                    if not await self._reader.read(READ_BYTES):
                        return

    async def _head(self) -> Request | None:
        async with asyncio.timeout(HEAD_TIMEOUT_S):
            event = await self._next()
        if not isinstance(event, h11.Request):
            return None
        _check_names([name for name, _ in event.headers])
        headers = {name.decode("latin-1"): value.decode("latin-1") for name, value in event.headers}
        return Request(event.method.decode(), event.target.decode("latin-1"), headers, self._peer, local=self._local)

    async def _body(self, admitted: Admitted, headers: dict[str, str]) -> bytes:
        if admitted.sink is None:
            return b"".join([data async for data in self._pieces(admitted.body_bytes_max, headers)])
        try:
            async for data in self._pieces(admitted.body_bytes_max, headers):
                await admitted.sink.write(data)
        except BaseException:
            await admitted.sink.discard()
            raise
        return b""

    async def _pieces(self, size_bytes_max: int, headers: dict[str, str]) -> AsyncIterator[bytes]:
        too_large = HttpError(413, f"the body exceeds the limit of {size_bytes_max} bytes")
        if int(headers.get("content-length", "0")) > size_bytes_max:
            raise too_large
        size_bytes = 0
        if self._http.they_are_waiting_for_100_continue:
            await self._write(
                self._http.send(h11.InformationalResponse(status_code=100, headers=[], reason="Continue"))
            )
        while True:
            async with asyncio.timeout(BODY_TIMEOUT_S):
                event = await self._next()
            if isinstance(event, h11.Data):
                size_bytes += len(event.data)
                if size_bytes > size_bytes_max:
                    raise too_large
                yield bytes(event.data)
            elif isinstance(event, h11.EndOfMessage):
                return
            else:
                raise ConnectionResetError("the client disconnected within a body")

    async def _next(self) -> object:
        """Return the next h11 event."""
        while True:
            event = self._http.next_event()
            if event is not h11.NEED_DATA:
                return event
            self._http.receive_data(await self._reader.read(READ_BYTES))

    async def _send(self, response: Response, *, is_head: bool, last: bool = False) -> None:
        has_body = response.status not in {204, 304}
        about = [("Content-Type", response.content_type), ("Content-Length", str(len(response.body)))]
        raw = self._head_of(response, about if has_body else [], last=last)
        if has_body and response.body and not is_head:
            raw += self._http.send(h11.Data(data=response.body)) or b""
        raw += self._http.send(h11.EndOfMessage()) or b""
        await self._write(raw)

    async def _send_stream(self, response: Response, stream: BodyStream, *, is_head: bool) -> None:
        try:
            await self._write(self._head_of(response, [("Content-Type", response.content_type)]))
            while not is_head and (piece := await stream.next()) is not None:
                await self._write(self._http.send(h11.Data(data=piece)))
            await self._write(self._http.send(h11.EndOfMessage()))
        except (ConnectionError, TimeoutError, asyncio.CancelledError):
            raise
        except Exception as error:
            # The status is already sent. A missing end of the body tells the client that the response is incomplete.
            _log.warning("admin API response aborted: %s", error)
            raise ConnectionAbortedError(str(error)) from error
        finally:
            await stream.close()

    def _head_of(self, response: Response, about: list[tuple[str, str]], *, last: bool = False) -> bytes:
        headers = [("Server", self._name), ("Cache-Control", "no-store"), ("X-Content-Type-Options", "nosniff")]
        headers += [*about, *response.headers.items()]
        if last or self._http.their_state is not h11.DONE:
            # The rest of the request will not be read.
            headers.append(("Connection", "close"))
        reason = HTTPStatus(response.status).phrase
        return self._http.send(h11.Response(status_code=response.status, headers=headers, reason=reason)) or b""

    async def _write(self, raw: bytes | None) -> None:
        self._writer.write(raw or b"")
        async with asyncio.timeout(WRITE_TIMEOUT_S):
            await self._writer.drain()


def _check_names(names: list[bytes]) -> None:
    """Raise RemoteProtocolError for headers that a proxy before this server may read differently."""
    for name in SINGLE:
        if names.count(name) > 1:
            raise h11.RemoteProtocolError(f"header {name.decode()} is repeated")
    if b"transfer-encoding" in names and b"content-length" in names:
        # RFC 9112, 6.1: a sign of request smuggling.
        raise h11.RemoteProtocolError("both Content-Length and Transfer-Encoding are present")
