"""A client's connection: moves bytes between its socket and the core, and calls between the core and their methods.

What is answered in one turn of the loop goes out in one write. A client that does not read is not read from, either, so
what waits for it in the socket is bounded; what waits for its windows is bounded by refusing calls.

Events are handled for a share of each turn of the loop (broker/loop_shares.py). The others wait for the next turn, and
the socket is not read meanwhile.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from typing import TYPE_CHECKING, Any, Final

from basaltmq.protocols.grpc.heads import RequestHead
from basaltmq.protocols.grpc.http2.connection import Connection
from basaltmq.protocols.grpc.http2.events import Broken, Data, Event, Headers, Reset, Writable
from basaltmq.protocols.grpc.http2.frame_sender import is_bulky
from basaltmq.protocols.grpc.http2.frames import Code
from basaltmq.protocols.grpc.http2.header_blocks import encode
from basaltmq.protocols.grpc.http2.stream import Stream
from basaltmq.protocols.grpc.server.call import ANSWER, Call
from basaltmq.protocols.grpc.status import Outcome, Status, trailer

if TYPE_CHECKING:
    from basaltmq.protocols.grpc.server.server import GrpcServer

READ_BYTES_LARGE: Final = 128 << 10
"""After a read of this size the socket waits for the next turn: libuv repeats reads that fill its buffer."""

WRITE_BYTES_HIGH: Final = 1 << 20
"""In the socket's buffer before a connection counts as one that does not read: some large answers."""

WRITE_BYTES_LOW: Final = 256 << 10

ANSWERS_BYTES_MAX: Final = 64 << 20
"""Answers that wait for a client's windows, before its calls are refused."""

_log: Final = logging.getLogger("basaltmq")


class ServerConnection(asyncio.Protocol):
    """One client."""

    def __init__(self, server: GrpcServer) -> None:
        self.server = server
        self.loop = server.loop
        self.outcome_of = server.outcome_of
        self.request_bytes_max = server.request_bytes_max
        self.core: Connection[RequestHead] = Connection(
            server.meanings, streams_max=server.calls_max, clock_s=self.loop.time
        )
        self.peer = ""
        self.is_admitted = not server.needs_admission
        """Whether a caller showed valid credentials, or needs none."""
        self.is_paused = False
        self.memory: dict[Any, Any] = {}
        """For handlers: what they want to find again with the next call of this connection."""
        self.began_s = self.heard_s = self.loop.time()
        self.asked_s = 0.0
        """When it was last asked for a sign of life, and has not given one since."""
        self._transport: asyncio.Transport | None = None
        self._events: deque[Event[RequestHead]] = deque()
        self._is_behind = False
        """Events are left for the next turn of the loop."""
        self._is_receiving = False
        self._is_scheduled = False
        self._held_bytes = 0
        self._calls: set[Call] = set()
        self._room: list[asyncio.Future[None]] = []

    @property
    def calls(self) -> int:
        """How many run."""
        return len(self._calls)

    @property
    def is_full(self) -> bool:
        """Whether messages that are not whole take more memory than one client may."""
        return self._held_bytes > self.server.held_bytes_max

    def hold(self, by_bytes: int) -> None:
        """Messages that are not whole take more memory, or less."""
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
            call.given_up()
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
        """Wait until the client reads, or is gone."""
        future = self.loop.create_future()
        self._room.append(future)
        await future

    def data_received(self, data: bytes) -> None:
        self.heard_s = self.loop.time()
        self.asked_s = 0.0
        self._events += self.core.receive(data)
        if not self._is_behind:
            self._take(is_large=len(data) >= READ_BYTES_LARGE)

    def _take(self, *, is_large: bool = False) -> None:
        """Handle events while the share of the turn lasts."""
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
            # Our fault, and this client's alone to feel.
            _log.exception("%s: a gRPC connection failed", self.peer)
            self._events.clear()
            self.core.abandon(Code.INTERNAL_ERROR, "the broker failed; its log says how")
            self._hang_up()
        finally:
            self._is_receiving = False
            self._is_behind = bool(self._events) or is_large
            shares.end(has_more=self._is_behind)
        if self._is_behind:
            self.loop.call_soon(self._go_on)
        if was_behind != self._is_behind and self._transport is not None and not self.is_paused:
            if self._is_behind:
                self._transport.pause_reading()
            elif not self._transport.is_closing():
                self._transport.resume_reading()
        self._flush()

    def _go_on(self) -> None:
        """The next turn of the loop."""
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
        elif kind is Broken:
            self._on_broken(event)  # type: ignore[arg-type]

    def _on_data(self, event: Data) -> None:
        call = event.stream.owner
        if call is None:
            # Answered already.
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
            self._refuse(stream, Outcome(Status.UNIMPLEMENTED, f"there is no {head.path[:200]}"))
        elif self.server.is_stopping:
            self._refuse(stream, Outcome(Status.UNAVAILABLE, "the broker is stopping; connect again"))
        elif self.core.waiting_bytes > ANSWERS_BYTES_MAX:
            self._refuse(stream, Outcome(Status.RESOURCE_EXHAUSTED, "the client does not take its answers"))
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
            event.stream.owner.given_up()

    def _on_broken(self, event: Broken) -> None:
        _log.warning("%s: a gRPC client broke the rules of HTTP/2: %s", self.peer, event.text)
        self._hang_up()

    def _hang_up(self) -> None:
        for call in list(self._calls):
            call.given_up()
        self._flush()
        if self._transport is not None:
            self._transport.close()

    def call_over(self, call: Call) -> None:
        self._calls.discard(call)
        if self.server.is_stopping and not self._calls:
            self.server.idle()

    def flush_soon(self) -> None:
        """Send what there is to send at the end of this turn, together with what else comes up in it."""
        if not self._is_receiving and not self._is_scheduled:
            if not self._calls:
                # Nothing else can come up.
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
        """Keep the time: send away who does not begin, or is dead."""
        if self._transport is None:
            return
        for call in [each for each in self._calls if 0 < each.deadline_s <= now_s]:
            call.expire()
        if not self.core.has_begun:
            if now_s - self.began_s > self.server.handshake_s:
                self.core.abandon(Code.SETTINGS_TIMEOUT, "the client does not begin")
                self._hang_up()
        elif not self.is_admitted and not self._calls and now_s - self.began_s > self.server.handshake_s:
            self.core.abandon(Code.NO_ERROR, "no call with valid credentials came in time")
            self._hang_up()
        elif self.asked_s:
            if now_s - self.asked_s > self.server.keepalive_timeout_s:
                _log.info("%s: a gRPC client is gone without a word", self.peer)
                self.abort()
        elif now_s - self.heard_s > self.server.keepalive_s:
            self.asked_s = now_s
            self.core.ping()
            self._flush()

    def leave(self, text: str) -> None:
        """Take no more calls."""
        self.core.leave(text=text)
        self._flush()

    def close(self) -> None:
        """End it, with what is still to be sent."""
        self._hang_up()

    def abort(self) -> None:
        if self._transport is not None:
            self._transport.abort()


def peer_name(address: Any) -> str:
    """An address as gRPC names it."""
    if isinstance(address, tuple) and len(address) >= 2:
        host, port = address[:2]
        return f"ipv6:[{host}]:{port}" if ":" in host else f"ipv4:{host}:{port}"
    return f"unix:{address or ''}"
