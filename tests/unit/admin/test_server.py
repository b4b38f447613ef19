"""HTTP requests of real clients: kept alive, pipelined, malformed, slow, too large, too many."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Awaitable, Callable

import pytest

from basaltmq.admin.http import server as module
from basaltmq.admin.http.message import HttpError, Request, Response
from basaltmq.admin.http.server import HEAD_BYTES_MAX, Admitted, HttpServer

WAIT_S = 60.0
BODY_MAX = 1000


class Echo:
    """Responds with the received body. /no is refused by its head, /wait responds when the test permits it."""

    def __init__(self) -> None:
        self.release = asyncio.Event()
        self.entered = asyncio.Event()
        self.bodies = 0

    async def admit(self, request: Request) -> Admitted:
        if request.path == ("no",):
            raise HttpError(403, "not here")
        return Admitted(BODY_MAX, self.answer)

    async def answer(self, request: Request) -> Response:
        self.bodies += 1
        if request.path == ("wait",):
            self.entered.set()
            await self.release.wait()
        if request.path == ("fail",):
            raise RuntimeError("a bug")
        return Response(200, request.method.encode() + b" " + request.body, "text/plain")


def serve(test: Callable[[Echo, HttpServer, int], Awaitable[None]], *, connections_max: int = 10) -> None:
    async def main() -> None:
        app = Echo()
        server = HttpServer(app, connections_max=connections_max)
        sock = socket.create_server(("127.0.0.1", 0))
        await server.listen(sock)
        try:
            async with asyncio.timeout(WAIT_S):
                await test(app, server, sock.getsockname()[1])
        finally:
            await server.close()
        assert server.connections == 0

    asyncio.run(main())


async def exchange(port: int, raw: bytes, *, end: bool = True) -> bytes:
    """Return the server's response to `raw`, until it closes the connection."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(raw)
    if end:
        writer.write_eof()
    said = await reader.read()
    writer.close()
    await writer.wait_closed()
    return said


def test_requests_of_one_connection_are_served_in_order_also_when_pipelined() -> None:
    async def test(app: Echo, server: HttpServer, port: int) -> None:
        post = b"POST /a HTTP/1.1\r\nHost: x\r\nContent-Length: 3\r\n\r\n"
        said = await exchange(port, post + b"one" + post + b"two")
        assert said.count(b"HTTP/1.1 200") == 2
        assert said.index(b"POST one") < said.index(b"POST two")
        chunked = b"POST /a HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n3\r\nabc\r\n2\r\nde\r\n0\r\n\r\n"
        assert (await exchange(port, chunked)).endswith(b"POST abcde")

    serve(test)


def test_head_has_the_length_and_no_body() -> None:
    async def test(app: Echo, server: HttpServer, port: int) -> None:
        said = await exchange(port, b"HEAD /a HTTP/1.1\r\nHost: x\r\n\r\n")
        assert said.startswith(b"HTTP/1.1 200")
        assert b"Content-Length: 5" in said
        assert said.endswith(b"\r\n\r\n")

    serve(test)


def test_expect_continue_gets_100_continue() -> None:
    async def test(app: Echo, server: HttpServer, port: int) -> None:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(b"PUT /a HTTP/1.1\r\nHost: x\r\nContent-Length: 2\r\nExpect: 100-continue\r\n\r\n")
        assert (await reader.readuntil(b"\r\n\r\n")).startswith(b"HTTP/1.1 100")
        writer.write(b"ok")
        assert b"200" in await reader.readuntil(b"\r\n\r\n")
        writer.close()

    serve(test)


@pytest.mark.promise("P8")
def test_a_request_refused_by_its_head_gets_a_response_before_its_body() -> None:
    async def test(app: Echo, server: HttpServer, port: int) -> None:
        said = await exchange(port, b"POST /no HTTP/1.1\r\nHost: x\r\nContent-Length: 999\r\n\r\nx", end=False)
        assert said.startswith(b"HTTP/1.1 403")
        assert b"Connection: close" in said
        assert app.bodies == 0

    serve(test)


@pytest.mark.promise("P8")
@pytest.mark.parametrize(
    ("raw", "status"),
    [
        (b"POST /a HTTP/1.1\r\nHost: x\r\nContent-Length: 1001\r\n\r\n", b"413"),
        (b"POST /a HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n3e9\r\n" + b"x" * 1001 + b"\r\n", b"413"),
        (b"GET /" + b"x" * HEAD_BYTES_MAX + b" HTTP/1.1\r\n", b"431"),
        (b"\x16\x03\x01 this is TLS\r\n\r\n", b"400"),
        (b"AMQP\x00\x00\x09\x01\r\n\r\n", b"400"),
        (b"GET /a HTTP/1.1\r\n\r\n", b"400"),
        (b"GET /%ff HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n", b"400"),
        (b"POST /a HTTP/1.1\r\nHost: x\r\nContent-Length: -1\r\n\r\n", b"400"),
        (b"POST /a HTTP/1.1\r\nHost: x\r\nContent-Length: 1\r\nContent-Length: 2\r\n\r\nab", b"400"),
        (b"POST /a HTTP/1.1\r\nHost: x\r\nContent-Length: 4\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n", b"400"),
        (b"PUT /a HTTP/1.1\r\nHost: x\r\nOrigin: http://evil\r\nOrigin: http://x\r\n\r\n", b"400"),
        (b"PUT /a HTTP/1.1\r\nHost: x\r\nContent-Type: text/plain\r\nContent-Type: application/json\r\n\r\n", b"400"),
        (b"GET /a HTTP/1.1\r\nHost: x\r\nAuthorization: Basic YTpi\r\nauthorization: Basic YzpkCg\r\n\r\n", b"400"),
        (b"GET x/a HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n", b"400"),
        (b"GET * HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n", b"400"),
    ],
)
def test_invalid_or_too_large_requests_get_their_status_and_close_the_connection(raw: bytes, status: bytes) -> None:
    async def test(app: Echo, server: HttpServer, port: int) -> None:
        said = await exchange(port, raw, end=False)
        assert said.split(b"\r\n")[0].split(b" ")[1] == status, said
        assert app.bodies == 0

    serve(test)


def test_a_client_that_disconnects_mid_request_leaves_no_state() -> None:
    async def test(app: Echo, server: HttpServer, port: int) -> None:
        for cut in (b"", b"GET /a HTT", b"POST /a HTTP/1.1\r\nHost: x\r\nContent-Length: 5\r\n\r\nab"):
            assert b"200" not in (await exchange(port, cut)).split(b"\r\n")[0]
        assert app.bodies == 0
        assert b"200" in await exchange(port, b"GET /a HTTP/1.1\r\nHost: x\r\n\r\n")

    serve(test)


@pytest.mark.parametrize(
    ("limit", "raw"),
    [("HEAD_TIMEOUT_S", b"GET"), ("BODY_TIMEOUT_S", b"POST /a HTTP/1.1\r\nHost: x\r\nContent-Length: 5\r\n\r\na")],
)
def test_a_slow_client_gets_a_timeout_status_and_is_disconnected(
    monkeypatch: pytest.MonkeyPatch, limit: str, raw: bytes
) -> None:
    monkeypatch.setattr(module, limit, 0.05)

    async def test(app: Echo, server: HttpServer, port: int) -> None:
        assert (await exchange(port, raw, end=False)).startswith(b"HTTP/1.1 408")

    serve(test)


def test_an_idle_connection_is_closed_without_a_response(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "IDLE_TIMEOUT_S", 0.05)

    async def test(app: Echo, server: HttpServer, port: int) -> None:
        assert await exchange(port, b"", end=False) == b""

    serve(test)


@pytest.mark.promise("P8")
def test_connections_over_the_limit_are_refused() -> None:
    async def test(app: Echo, server: HttpServer, port: int) -> None:
        held = await asyncio.open_connection("127.0.0.1", port)
        held[1].write(b"GET /a HTTP/1.1\r\nHost: x\r\n\r\n")
        await held[0].readuntil(b"\r\n\r\n")
        assert (await exchange(port, b"", end=False)).startswith(b"HTTP/1.1 503")
        held[1].close()

    serve(test, connections_max=1)


def test_closing_completes_requests_and_closes_idle_connections() -> None:
    async def test(app: Echo, server: HttpServer, port: int) -> None:
        idle = await asyncio.open_connection("127.0.0.1", port)
        busy = await asyncio.open_connection("127.0.0.1", port)
        busy[1].write(b"GET /wait HTTP/1.1\r\nHost: x\r\n\r\n")
        await app.entered.wait()
        closing = asyncio.create_task(server.close(WAIT_S))
        assert await idle[0].read() == b""
        assert not closing.done()
        app.release.set()
        assert b"HTTP/1.1 200" in await busy[0].read()
        await closing
        for each in (idle, busy):
            each[1].close()
            await each[1].wait_closed()
        with pytest.raises(OSError):
            await asyncio.open_connection("127.0.0.1", port)

    serve(test)
