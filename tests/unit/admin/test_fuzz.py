"""Random bytes: the server responds or closes the connection, and serves the next client."""

from __future__ import annotations

import asyncio
import socket

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from basaltmq.admin.http import server as module
from basaltmq.admin.http.message import Request, Response
from basaltmq.admin.http.server import Admitted, HttpServer

PIECES = [
    b"GET / HTTP/1.1\r\n",
    b"POST /a%2Fb?x=%ff HTTP/1.1\r\n",
    b"Host: x\r\n",
    b"Content-Length: 3\r\n",
    b"Content-Length: 99999999999\r\n",
    b"Transfer-Encoding: chunked\r\n",
    b"Connection: close\r\n",
    b"Expect: 100-continue\r\n",
    b"Authorization: Basic x\r\n",
    b"\r\n",
    b"abc",
    b"3\r\nabc\r\n",
    b"0\r\n\r\n",
    b"\x00\xff",
]
GOOD = b"GET / HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n"


class Hello:
    async def admit(self, request: Request) -> Admitted:
        return Admitted(100, self.answer)

    async def answer(self, request: Request) -> Response:
        return Response(200, request.body)


async def send(port: int, *pieces: bytes) -> bytes:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        for piece in pieces:
            writer.write(piece)
            await writer.drain()
        writer.write_eof()
        return await reader.read()
    except ConnectionError:
        return b""
    finally:
        writer.close()


@pytest.mark.promise("P8")
@settings(max_examples=150)
@given(st.lists(st.sampled_from(PIECES) | st.binary(max_size=30), max_size=8))
def test_random_requests_get_a_response_or_a_close_and_the_next_client_is_served(pieces: list[bytes]) -> None:
    async def main() -> None:
        server = HttpServer(Hello(), connections_max=10)
        sock = socket.create_server(("127.0.0.1", 0))
        await server.listen(sock)
        port = sock.getsockname()[1]
        try:
            async with asyncio.timeout(20):
                said = await send(port, *pieces)
                assert said == b"" or said.startswith(b"HTTP/1.1 ")
                assert b" 500 " not in said.split(b"\r\n")[0]
                assert (await send(port, GOOD)).startswith(b"HTTP/1.1 200 OK")
        finally:
            await server.close()
        assert server.connections == 0

    asyncio.run(main())


def test_request_limits_are_enforced() -> None:
    for name in ("HEAD_TIMEOUT_S", "IDLE_TIMEOUT_S", "BODY_TIMEOUT_S", "WRITE_TIMEOUT_S"):
        assert 1 <= getattr(module, name) <= 120
