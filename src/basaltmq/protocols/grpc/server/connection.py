"""One client connection of the gRPC server: socket, HTTP/2 state machine, and dispatch of calls to methods.

All responses of one event-loop turn go out in one write. While a client does not read, the server does not read from it
either, so the socket's output buffer is bounded. Data that waits for the client's windows is bounded by refusing calls.

Each connection handles events only for its share of the loop turn (`broker/scheduling/loop_shares.py`). The remaining
events wait for the next turn, and reading from the socket is paused meanwhile.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from typing import TYPE_CHECKING, Any, Final

from basaltmq.protocols.grpc.heads import RequestHead
from basaltmq.protocols.grpc.http2.connection import Connection
from basaltmq.protocols.grpc.http2.events import ConnectionFailed, Event, Headers, Reset
from basaltmq.protocols.grpc.http2.frames import Code
from basaltmq.protocols.grpc.http2.header_blocks import encode
from basaltmq.protocols.grpc.http2.socket import Http2Socket
from basaltmq.protocols.grpc.http2.stream import Stream
from basaltmq.protocols.grpc.server.call import RESPONSE_HEADERS, Call
from basaltmq.protocols.grpc.status import Outcome, Status, trailer

if TYPE_CHECKING:
    from basaltmq.protocols.grpc.server.server import GrpcServer

READ_BYTES_LARGE: Final = 128 << 10
"""After a read of this size, reading pauses until the next loop turn: libuv repeats reads that fill its buffer."""

RESPONSES_BYTES_MAX: Final = 64 << 20
"""Responses that wait for the client's windows before new calls are refused."""

STRANGERS_BYTES_MAX: Final = 64 << 20
"""Limit for incomplete messages of all connections without a login. The credentials of a call are checked when its
request is complete, so these bytes are anybody's."""

_log: Final = logging.getLogger("basaltmq")


class ServerConnection(Http2Socket[RequestHead]):
    """One client connection."""

    def __init__(self, server: GrpcServer) -> None:
        core: Connection[RequestHead] = Connection(
            server.header_cache, streams_max=server.calls_max, clock_s=server.loop.time
        )
        super().__init__(server.loop, core)
        self.server = server
        self.outcome_of = server.outcome_of
        self.request_bytes_max = server.request_bytes_max
        self.peer = ""
        self._is_authenticated = not server.requires_authentication
        self.handler_state: dict[Any, Any] = {}
        """Storage for handlers, kept between the calls of this connection."""
        self.connected_s = self.received_s = self.loop.time()
        self.ping_sent_s = 0.0
        """When the pending keepalive ping was sent. 0 if there is none."""
        self._events: deque[Event[RequestHead]] = deque()
        self._is_behind = False
        """Events are left over for the next loop turn."""
        self._held_bytes = 0
        self._calls: set[Call] = set()

    @property
    def calls(self) -> int:
        """Number of running calls."""
        return len(self._calls)

    @property
    def is_authenticated(self) -> bool:
        """Whether a caller presented valid credentials, or none are required."""
        return self._is_authenticated

    def authenticated(self) -> None:
        """Note that a caller presented valid credentials."""
        if not self._is_authenticated:
            self._is_authenticated = True
            self.server.strangers_bytes -= self._held_bytes

    @property
    def is_full(self) -> bool:
        """Whether incomplete messages exceed the memory limit of one connection, or of all without a login."""
        if self._is_authenticated:
            return self._held_bytes > self.server.held_bytes_max
        return self._held_bytes > self.server.held_bytes_max or self.server.strangers_bytes > STRANGERS_BYTES_MAX

    def hold(self, by_bytes: int) -> None:
        """Account for incomplete messages: add `by_bytes`, which may be negative."""
        self._held_bytes += by_bytes
        if not self._is_authenticated:
            self.server.strangers_bytes += by_bytes

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        self.peer = peer_name(transport.get_extra_info("peername"))
        refusal = self.server.joined(self)
        if refusal:
            self.core.abandon(Code.ENHANCE_YOUR_CALM, refusal)
        self._flush()
        if refusal:
            transport.close()

    def eof_received(self) -> bool:
        return self.server.shares.close_later(self._transport)

    def connection_lost(self, error: Exception | None) -> None:
        self._transport = None
        self._events.clear()
        if self._is_behind:
            self._is_behind = False
            self.server.shares.left()
        for call in list(self._calls):
            call.cancelled_by_client()
        self._wake()
        self.server.left(self)

    def pause_writing(self) -> None:
        super().pause_writing()
        if self._transport is not None:
            self._transport.pause_reading()

    def resume_writing(self) -> None:
        if self._transport is not None and not self._is_behind:
            self._transport.resume_reading()
        super().resume_writing()

    def data_received(self, data: bytes) -> None:
        self.received_s = self.loop.time()
        self.ping_sent_s = 0.0
        self._events += self.core.receive(data)
        if not self._is_behind:
            self._take(is_large=len(data) >= READ_BYTES_LARGE)

    def _take(self, *, is_large: bool = False) -> None:
        """Handle events until the connection's share of the loop turn is used up."""
        shares = self.server.shares
        shares.begin(was_behind=self._is_behind)
        was_behind, self._is_behind = self._is_behind, False
        self._is_receiving = True
        try:
            while self._events:
                self._handle(self._events.popleft())
                if shares.is_over():
                    break
        except Exception:
            # A bug on our side must affect this client only.
            _log.exception("%s: a gRPC connection failed", self.peer)
            self._events.clear()
            self.core.abandon(Code.INTERNAL_ERROR, "internal error of the broker; see its log")
            self._disconnect()
        finally:
            self._is_receiving = False
            self._is_behind = bool(self._events) or is_large
            shares.end(has_more=self._is_behind)
        if self._is_behind:
            self.loop.call_soon(self._continue)
        if was_behind != self._is_behind and self._transport is not None and not self.is_paused:
            if self._is_behind:
                self._transport.pause_reading()
            elif not self._transport.is_closing():
                self._transport.resume_reading()
        self._flush()

    def _continue(self) -> None:
        """Continue in the next loop turn."""
        if self._is_behind:
            self._take()

    def _on_headers(self, event: Headers[RequestHead]) -> None:
        stream = event.stream
        if stream.is_closed:
            return
        if stream.owner is not None:
            stream.owner.ended()
            return
        head = event.fields
        if head.http_status:
            self.core.end(stream, encode([(":status", str(head.http_status))]))
            return
        method = self.server.methods.get(head.path)
        if head.refusal is not None:
            self._refuse(stream, head.refusal)
        elif method is None:
            self._refuse(stream, Outcome(Status.UNIMPLEMENTED, f"unknown method {head.path[:200]}"))
        elif self.server.is_stopping:
            self._refuse(stream, Outcome(Status.UNAVAILABLE, "the broker is stopping; connect again"))
        elif self.core.waiting_bytes > RESPONSES_BYTES_MAX:
            self._refuse(stream, Outcome(Status.RESOURCE_EXHAUSTED, "the client does not read its responses"))
        else:
            call = stream.owner = Call(self, stream, head, method)
            self._calls.add(call)
            if event.has_ended:
                call.ended()

    def _refuse(self, stream: Stream, outcome: Outcome) -> None:
        self.core.end(stream, RESPONSE_HEADERS + trailer(outcome))

    def _on_reset(self, event: Reset) -> None:
        if event.stream.owner is not None:
            event.stream.owner.cancelled_by_client()

    def _on_failed(self, event: ConnectionFailed) -> None:
        _log.warning("%s: gRPC client violated HTTP/2: %s", self.peer, event.text)
        self._disconnect()

    def _disconnect(self) -> None:
        for call in list(self._calls):
            call.cancelled_by_client()
        self._flush()
        if self._transport is not None:
            self._transport.close()

    def call_ended(self, call: Call) -> None:
        self._calls.discard(call)
        if self.server.is_stopping and not self._calls:
            self.server.idle()

    def flush_soon(self) -> None:
        if not self._is_receiving and not self._is_scheduled and not self._calls:
            # No other call can add output.
            self._flush()
        else:
            super().flush_soon()

    def tick(self, now_s: float) -> None:
        """Enforce call deadlines, the handshake timeout and keepalive. Runs once per sweep."""
        if self._transport is None:
            return
        for call in [each for each in self._calls if 0 < each.deadline_s <= now_s]:
            call.expire()
        if not self.core.is_established:
            if now_s - self.connected_s > self.server.handshake_s:
                self.core.abandon(Code.SETTINGS_TIMEOUT, "no SETTINGS frame arrived within the handshake timeout")
                self._disconnect()
        elif not self.is_authenticated and now_s - self.connected_s > self._login_s():
            self.core.abandon(Code.NO_ERROR, "no call with valid credentials arrived within the handshake timeout")
            self._disconnect()
        elif self.ping_sent_s:
            if now_s - self.ping_sent_s > self.server.keepalive_timeout_s:
                _log.info("%s: gRPC client did not respond to a keepalive ping, closing its connection", self.peer)
                self.abort()
        elif now_s - self.received_s > self.server.keepalive_s:
            self.ping_sent_s = now_s
            self.core.ping()
            self._flush()

    def _login_s(self) -> float:
        """Return the time for a login. A call may wait for its check, because failed logins delay later ones, but a
        call that its client never finishes must not keep the connection."""
        return self.server.handshake_s * (2 if self._calls else 1)

    def leave(self, text: str) -> None:
        """Refuse new calls."""
        self.core.leave(text=text)
        self._flush()

    def close(self) -> None:
        """Close the connection after its pending output."""
        self._disconnect()


def peer_name(address: Any) -> str:
    """Return an address in gRPC notation: ipv4:127.0.0.1:4711."""
    if isinstance(address, tuple) and len(address) >= 2:
        host, port = address[:2]
        return f"ipv6:[{host}]:{port}" if ":" in host else f"ipv4:{host}:{port}"
    return f"unix:{address or ''}"
