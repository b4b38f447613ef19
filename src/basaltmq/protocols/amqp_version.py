"""Detects the AMQP version of a connection by its protocol header.

    "AMQP" | id u8 | major u8 | minor u8 | revision u8        1.0: id 0 or 3 (SASL), version 1 0 0

All other bytes, including invalid headers, go to AMQP 0-9-1.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Final, cast

HEADERS: Final = (b"AMQP\0\1\0\0", b"AMQP\3\1\0\0")
"""The headers of AMQP 1.0. TLS within the connection (id 2) is not supported."""


class AmqpVersionDetector(asyncio.Protocol):
    """Waits for the protocol header and passes the connection on."""

    def __init__(
        self,
        amqp091: Callable[[], asyncio.Protocol],
        amqp10: Callable[[], asyncio.Protocol],
        handshake_s: float,
        waiting: set[AmqpVersionDetector],
    ) -> None:
        """`waiting` gets this object as long as the header has not arrived."""
        self._amqp091 = amqp091
        self._amqp10 = amqp10
        self._handshake_s = handshake_s
        self._waiting = waiting
        self._transport: asyncio.Transport | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._read = b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's does not derive from it
        self._timer = asyncio.get_running_loop().call_later(self._handshake_s, self.abort)
        self._waiting.add(self)

    def abort(self) -> None:
        if self._transport is not None:
            self._transport.abort()

    def data_received(self, data: bytes) -> None:
        self._read += data
        head = self._read[:8]
        if len(head) < 8 and any(header.startswith(head) for header in HEADERS):
            return
        self._stop_waiting()
        transport = self._transport
        assert transport is not None
        protocol = (self._amqp10 if head in HEADERS else self._amqp091)()
        transport.set_protocol(protocol)
        protocol.connection_made(transport)
        protocol.data_received(self._read)

    def connection_lost(self, error: Exception | None) -> None:
        self._stop_waiting()

    def _stop_waiting(self) -> None:
        self._waiting.discard(self)
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
