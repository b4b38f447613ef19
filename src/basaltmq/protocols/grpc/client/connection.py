"""A connection of the gRPC client: socket, HTTP/2 state machine, and dispatch of responses to calls."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Final

from basaltmq.protocols.grpc.client.call import ClientCall
from basaltmq.protocols.grpc.heads import ResponseHead
from basaltmq.protocols.grpc.http2.connection import Connection
from basaltmq.protocols.grpc.http2.events import ConnectionFailed, GoAway, Headers, Reset
from basaltmq.protocols.grpc.http2.frames import STREAM_MAX, Code
from basaltmq.protocols.grpc.http2.socket import Http2Socket
from basaltmq.protocols.grpc.status import Outcome, Status

if TYPE_CHECKING:
    from basaltmq.protocols.grpc.client.channel import Channel

KEEPALIVE_S: Final = 30.0
"""Interval of pings to a server that is silent while calls wait for responses."""

KEEPALIVE_TIMEOUT_S: Final = 20.0

STREAM_LAST: Final = STREAM_MAX - 1_000
"""A connection that has used this many stream ids is replaced."""

_CODES: Final = {
    Code.CANCEL: Status.CANCELLED,
    Code.REFUSED_STREAM: Status.UNAVAILABLE,
    Code.ENHANCE_YOUR_CALM: Status.RESOURCE_EXHAUSTED,
    Code.INADEQUATE_SECURITY: Status.PERMISSION_DENIED,
}


class ClientConnection(Http2Socket[ResponseHead]):
    """A connection to one server."""

    def __init__(self, channel: Channel, loop: asyncio.AbstractEventLoop) -> None:
        super().__init__(loop, Connection(channel.header_cache, is_client=True, clock_s=loop.time))
        self.response_bytes_max = channel.response_bytes_max
        self.is_usable = True
        """Whether new calls may start on this connection."""
        self._channel = channel
        self._established: asyncio.Future[None] = loop.create_future()
        self._gone: asyncio.Future[None] = loop.create_future()
        self._received_s = loop.time()
        self._keeper = loop.call_later(KEEPALIVE_S, self._keep)
        self._why = "the connection was closed"

    @property
    def has_room(self) -> bool:
        """Whether another call may start now."""
        return self.is_usable and len(self.core) < self.core.peer_streams_max

    async def wait_established(self) -> None:
        """Wait for the server's SETTINGS frame. Raise OSError if the connection fails before."""
        await self._established

    async def gone(self) -> None:
        await self._gone

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        self._flush()

    def connection_lost(self, error: Exception | None) -> None:
        self._transport = None
        self._keeper.cancel()
        why = str(error) if error is not None else self._why
        if not self._established.done():
            self._established.set_exception(ConnectionError(why))
        self._retire()
        for stream in self.core.streams():
            if isinstance(stream.owner, ClientCall):
                stream.is_closed = True
                stream.owner.failed(Outcome(Status.UNAVAILABLE, f"the connection to the server is lost: {why}"))
        self._wake()
        if not self._gone.done():
            self._gone.set_result(None)

    def _retire(self) -> None:
        """Accept no more calls."""
        if self.is_usable:
            self.is_usable = False
            self._channel.lost(self)

    def data_received(self, data: bytes) -> None:
        self._received_s = self.loop.time()
        self._is_receiving = True
        try:
            for event in self.core.receive(data):
                self._handle(event)
        finally:
            self._is_receiving = False
        if self.core.is_established and not self._established.done():
            self._established.set_result(None)
        self._flush()

    def _on_headers(self, event: Headers[ResponseHead]) -> None:
        if event.stream.owner is not None:
            event.stream.owner.headers_received(event.fields, event.has_ended)

    def _on_reset(self, event: Reset) -> None:
        call = event.stream.owner
        if call is not None:
            status = _CODES.get(Code(event.code), Status.INTERNAL) if event.code in set(Code) else Status.UNKNOWN
            text = event.text or f"the server reset the call (HTTP/2 code {event.code})"
            call.failed(Outcome(status, text), was_processed=event.code != Code.REFUSED_STREAM)

    def _on_goaway(self, event: GoAway) -> None:
        self._why = event.text or "the server is shutting down the connection"
        self._retire()
        for stream in self.core.streams():
            if stream.id > event.last_stream and stream.owner is not None:
                stream.owner.failed(Outcome(Status.UNAVAILABLE, self._why), was_processed=False)
        if not len(self.core):
            self.close()

    def _on_failed(self, event: ConnectionFailed) -> None:
        self._why = f"the server violated HTTP/2: {event.text}"
        self.close()

    def call_ended(self) -> None:
        if self.is_usable:
            if self.core.is_used_up(STREAM_LAST):
                self._retire()
            self._channel.has_room()
        elif not len(self.core):
            self.close()

    def _keep(self) -> None:
        silent_s = self.loop.time() - self._received_s
        if silent_s > KEEPALIVE_S + KEEPALIVE_TIMEOUT_S:
            self._why = "the server did not respond to a keepalive ping"
            self.abort()
            return
        if silent_s >= KEEPALIVE_S - 1 and len(self.core):
            self.core.ping()
            self._flush()
            self._keeper = self.loop.call_later(KEEPALIVE_TIMEOUT_S + 1, self._keep)
        else:
            self._keeper = self.loop.call_later(max(1.0, KEEPALIVE_S - silent_s), self._keep)

    def close(self) -> None:
        """Close the connection and fail all its calls."""
        self._retire()
        self._flush()
        if self._transport is not None:
            self._transport.close()
        elif not self._gone.done():
            self._gone.set_result(None)
