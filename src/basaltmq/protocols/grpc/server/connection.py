"""One client connection of the gRPC server: socket, HTTP/2 state machine, and dispatch of calls to methods.

All answers of one event-loop turn go out in one write. While a client does not read, the server does not read from it
either, so the socket's output buffer is bounded. Data that waits for the client's windows is bounded by refusing calls.

Each connection handles events only for its share of the loop turn (`broker/loop_shares.py`). The remaining events wait
for the next turn, and reading from the socket is paused meanwhile.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from typing import TYPE_CHECKING, Any, Final

from basaltmq.protocols.grpc.heads import RequestHead
from basaltmq.protocols.grpc.http2.connection import Connection
from basaltmq.protocols.grpc.http2.events import ConnectionFailed, Data, Event, Headers, Reset, Writable
from basaltmq.protocols.grpc.http2.frame_sender import is_bulky
from basaltmq.protocols.grpc.http2.frames import Code
from basaltmq.protocols.grpc.http2.header_blocks import encode
from basaltmq.protocols.grpc.http2.stream import Stream
from basaltmq.protocols.grpc.server.call import ANSWER, Call
from basaltmq.protocols.grpc.status import Outcome, Status, trailer

if TYPE_CHECKING:
    from basaltmq.protocols.grpc.server.server import GrpcServer

READ_BYTES_LARGE: Final = 128 << 10
"""After a read of this size, reading pauses until the next loop turn: libuv repeats reads that fill its buffer."""

WRITE_BYTES_HIGH: Final = 1 << 20
"""Output buffer size at which the client counts as not reading: a few large answers."""

WRITE_BYTES_LOW: Final = 256 << 10

ANSWERS_BYTES_MAX: Final = 64 << 20
"""Answers that wait for the client's windows before new calls are refused."""

_log: Final = logging.getLogger("basaltmq")


class ServerConnection(asyncio.Protocol):
    """One client connection."""

    def __init__(self, server: GrpcServer) -> None:
        self.server = server
        self.loop = server.loop
        self.outcome_of = server.outcome_of
        self.request_bytes_max = server.request_bytes_max
        self.core: Connection[RequestHead] = Connection(
            server.header_cache, streams_max=server.calls_max, clock_s=self.loop.time
        )
        self.peer = ""
        self.is_authenticated = not server.requires_authentication
        """Whether a caller presented valid credentials, or none are required."""
        self.is_paused = False
        self.handler_state: dict[Any, Any] = {}
        """Storage for handlers, kept between the calls of this connection."""
        self.connected_s = self.received_s = self.loop.time()
        self.ping_sent_s = 0.0
        """When the unanswered keepalive ping was sent. 0 if there is none."""
        self._transport: asyncio.Transport | None = None
        self._events: deque[Event[RequestHead]] = deque()
        self._is_behind = False
        """Events are left over for the next loop turn."""
        self._is_receiving = False
        self._is_scheduled = False
        self._held_bytes = 0
        self._calls: set[Call] = set()
        self._room: list[asyncio.Future[None]] = []

    @property
    def calls(self) -> int:
        """Number of running calls."""
        return len(self._calls)

    @property
    def is_full(self) -> bool:
        """Whether incomplete messages exceed the memory limit of one connection."""
        return self._held_bytes > self.server.held_bytes_max

    def hold(self, by_bytes: int) -> None:
        """Account for incomplete messages: add `by_bytes`, which may be negative."""
        self._held_bytes += by_bytes

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport) or hasattr(transport, "write")
        self._transport = transport  # type: ignore[assignment]
        self.peer = peer_name(transport.get_extra_info("peername"))
        assert self._transport is not None
        self._transport.set_write_buffer_limits(WRITE_BYTES_HIGH, WRITE_BYTES_LOW)
        refusal = self.server.joined(self)
        if refusal:
            self.core.abandon(Code.ENHANCE_YOUR_CALM, refusal)
        self._flush()
        if refusal:
            self._transport.close()

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
        self.is_paused = True
        if self._transport is not None:
            self._transport.pause_reading()

    def resume_writing(self) -> None:
        self.is_paused = False
        if self._transport is not None and not self._is_behind:
            self._transport.resume_reading()
        self._wake()

    def _wake(self) -> None:
        waiting, self._room = self._room, []
        for each in waiting:
            if not each.done():
                each.set_result(None)

    async def has_room(self) -> None:
        """Wait until the client reads again or the connection is lost."""
        future = self.loop.create_future()
        self._room.append(future)
        await future

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

    def _handle(self, event: Event[RequestHead]) -> None:
        kind = type(event)
        if kind is Data:
            self._on_data(event)  # type: ignore[arg-type]
        elif kind is Headers:
            self._on_headers(event)  # type: ignore[arg-type]
        elif kind is Writable:
            self._on_writable(event)  # type: ignore[arg-type]
        elif kind is Reset:
            self._on_reset(event)  # type: ignore[arg-type]
        elif kind is ConnectionFailed:
            self._on_failed(event)  # type: ignore[arg-type]

    def _on_data(self, event: Data) -> None:
        call = event.stream.owner
        if call is None:
            # The call has been answered already.
            self.core.consumed(event.stream, event.size_bytes)
        else:
            call.received(event.chunk, event.size_bytes, event.has_ended)

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
        elif self.core.waiting_bytes > ANSWERS_BYTES_MAX:
            self._refuse(stream, Outcome(Status.RESOURCE_EXHAUSTED, "the client does not read its answers"))
        else:
            call = stream.owner = Call(self, stream, head, method)
            self._calls.add(call)
            if event.has_ended:
                call.ended()

    def _refuse(self, stream: Stream, outcome: Outcome) -> None:
        self.core.end(stream, ANSWER + trailer(outcome))

    def _on_writable(self, event: Writable) -> None:
        if event.stream.owner is not None:
            event.stream.owner.writable()

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
        """Send pending output at the end of this loop turn, together with other output of the turn."""
        if not self._is_receiving and not self._is_scheduled:
            if not self._calls:
                # No other call can add output.
                self._flush()
                return
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
        elif not self.is_authenticated and not self._calls and now_s - self.connected_s > self.server.handshake_s:
            self.core.abandon(Code.NO_ERROR, "no call with valid credentials arrived within the handshake timeout")
            self._disconnect()
        elif self.ping_sent_s:
            if now_s - self.ping_sent_s > self.server.keepalive_timeout_s:
                _log.info("%s: gRPC client did not answer a keepalive ping, closing its connection", self.peer)
                self.abort()
        elif now_s - self.received_s > self.server.keepalive_s:
            self.ping_sent_s = now_s
            self.core.ping()
            self._flush()

    def leave(self, text: str) -> None:
        """Refuse new calls."""
        self.core.leave(text=text)
        self._flush()

    def close(self) -> None:
        """Close the connection after its pending output."""
        self._disconnect()

    def abort(self) -> None:
        if self._transport is not None:
            self._transport.abort()


def peer_name(address: Any) -> str:
    """Return an address in gRPC notation: ipv4:127.0.0.1:4711."""
    if isinstance(address, tuple) and len(address) >= 2:
        host, port = address[:2]
        return f"ipv6:[{host}]:{port}" if ":" in host else f"ipv4:{host}:{port}"
    return f"unix:{address or ''}"
