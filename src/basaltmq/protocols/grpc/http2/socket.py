"""The socket of an HTTP/2 connection: one write per loop turn, and waiting until the peer reads."""

from __future__ import annotations

import asyncio
from typing import Final, Generic, TypeVar

from basaltmq.protocols.grpc.http2.connection import Connection
from basaltmq.protocols.grpc.http2.events import ConnectionFailed, Data, Event, GoAway, Headers, Reset, Writable
from basaltmq.protocols.grpc.http2.frame_sender import is_bulky

WRITE_BYTES_HIGH: Final = 1 << 20
"""Output buffer size at which the peer counts as not reading: a few large responses."""

WRITE_BYTES_LOW: Final = 256 << 10

H = TypeVar("H")


class Http2Socket(asyncio.Protocol, Generic[H]):
    """Base of client and server connections."""

    def __init__(self, loop: asyncio.AbstractEventLoop, core: Connection[H]) -> None:
        self.loop = loop
        self.core = core
        self.is_paused = False
        self._transport: asyncio.Transport | None = None
        self._is_receiving = False
        self._is_scheduled = False
        self._room: list[asyncio.Future[None]] = []

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport  # type: ignore[assignment]
        assert self._transport is not None
        self._transport.set_write_buffer_limits(WRITE_BYTES_HIGH, WRITE_BYTES_LOW)

    def pause_writing(self) -> None:
        self.is_paused = True

    def resume_writing(self) -> None:
        self.is_paused = False
        self._wake()

    def _wake(self) -> None:
        waiting, self._room = self._room, []
        for each in waiting:
            if not each.done():
                each.set_result(None)

    def _handle(self, event: Event[H]) -> None:
        """Pass an event to its handler."""
        kind = type(event)
        if kind is Data:
            self._on_data(event)  # type: ignore[arg-type]
        elif kind is Headers:
            self._on_headers(event)  # type: ignore[arg-type]
        elif kind is Writable:
            if event.stream.owner is not None:  # type: ignore[union-attr]
                event.stream.owner.writable()  # type: ignore[union-attr]
        elif kind is Reset:
            self._on_reset(event)  # type: ignore[arg-type]
        elif kind is GoAway:
            self._on_goaway(event)  # type: ignore[arg-type]
        elif kind is ConnectionFailed:
            self._on_failed(event)  # type: ignore[arg-type]

    def _on_data(self, event: Data) -> None:
        call = event.stream.owner
        if call is None:
            # The call has ended already.
            self.core.consumed(event.stream, event.size_bytes)
        else:
            call.received(event.chunk, event.size_bytes, event.has_ended)

    def _on_headers(self, event: Headers[H]) -> None:
        raise NotImplementedError

    def _on_reset(self, event: Reset) -> None:
        raise NotImplementedError

    def _on_goaway(self, event: GoAway) -> None:
        """Clients of a server may send GOAWAY. It has no effect on calls that the client has started."""

    def _on_failed(self, event: ConnectionFailed) -> None:
        raise NotImplementedError

    async def can_write(self) -> None:
        """Wait until the peer reads again or the connection is lost."""
        future = self.loop.create_future()
        self._room.append(future)
        await future

    def flush_soon(self) -> None:
        """Send pending output at the end of this loop turn, together with other output of the turn."""
        if not self._is_receiving and not self._is_scheduled:
            self._is_scheduled = True
            self.loop.call_soon(self._flush)

    def _flush(self) -> None:
        self._is_scheduled = False
        out = self.core.take_parts()
        if out and self._transport is not None and not self._transport.is_closing():
            if is_bulky(out):
                self._transport.writelines(out)
            else:
                self._transport.write(b"".join(out))

    def abort(self) -> None:
        if self._transport is not None:
            self._transport.abort()
