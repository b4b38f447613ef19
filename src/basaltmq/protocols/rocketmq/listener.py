"""TLS and plaintext on one port: the first byte of a connection decides.

A TLS connection begins with a handshake record, type 22. Java and Go clients use TLS by default, Python and Node.js
clients plaintext. The byte is read with MSG_PEEK and stays in the socket, so the transport gets the whole connection.
"""

from __future__ import annotations

import asyncio
import logging
import socket
import ssl
from collections.abc import Callable
from contextlib import suppress
from typing import Final

TLS_HANDSHAKE: Final = b"\x16"

BACKLOG: Final = 1024
ACCEPT_RETRY_S: Final = 0.1
"""Delay after a failed accept, for example without free file descriptors."""

_log: Final = logging.getLogger(__name__)


class Listener:
    """Accepts connections and gives each a protocol, with or without TLS."""

    def __init__(
        self,
        sock: socket.socket,
        protocol: Callable[[], asyncio.Protocol],
        tls: Callable[[], ssl.SSLContext],
        handshake_s: float,
    ) -> None:
        """`tls` returns the context for a TLS connection."""
        self._sock = sock
        self._protocol = protocol
        self._tls = tls
        self._handshake_s = handshake_s
        self._loop = asyncio.get_running_loop()
        self._tasks: set[asyncio.Task[None]] = set()
        self._accepting: asyncio.Task[None] | None = None

    def open(self) -> None:
        self._sock.setblocking(False)
        self._sock.listen(BACKLOG)
        self._accepting = self._loop.create_task(self._accept())

    async def close(self) -> None:
        tasks = [*self._tasks, *([self._accepting] if self._accepting is not None else [])]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        self._sock.close()

    async def _accept(self) -> None:
        while True:
            try:
                accepted, _ = await self._loop.sock_accept(self._sock)
            except OSError as error:
                _log.warning("cannot accept a RocketMQ client: %s", error)
                await asyncio.sleep(ACCEPT_RETRY_S)
                continue
            task = self._loop.create_task(self._enter(accepted))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def _enter(self, accepted: socket.socket) -> None:
        try:
            accepted.setblocking(False)
            with suppress(OSError):
                accepted.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            async with asyncio.timeout(self._handshake_s):
                first = await self._peek(accepted)
            if not first:
                accepted.close()
                return
            tls = self._tls() if first == TLS_HANDSHAKE else None
            await self._loop.connect_accepted_socket(
                self._protocol,
                accepted,
                ssl=tls,
                ssl_handshake_timeout=None if tls is None else self._handshake_s,
            )
        except (OSError, TimeoutError) as error:
            _log.debug("a RocketMQ client did not connect: %s", error)
            accepted.close()
        except BaseException:
            accepted.close()
            raise

    async def _peek(self, accepted: socket.socket) -> bytes:
        """Return the first byte of a connection. It stays in the socket."""
        readable: asyncio.Future[None] = self._loop.create_future()
        descriptor = accepted.fileno()
        self._loop.add_reader(descriptor, lambda: None if readable.done() else readable.set_result(None))
        try:
            await readable
        finally:
            self._loop.remove_reader(descriptor)
        return accepted.recv(1, socket.MSG_PEEK)
