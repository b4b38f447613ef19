"""One call on the server side.

    data ──> messages ──> handler ──> responses ──> trailers
                                 └──> error ──> status

A call ends exactly once: by its response, an error, its deadline, or cancellation by the client. Later events are
ignored. Cancellation cancels a running handler. A future that the call only waits for is not cancelled, so a write in
progress still completes.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing
from typing import TYPE_CHECKING, Any, Final

from basaltmq.protocols.grpc.heads import RequestHead
from basaltmq.protocols.grpc.http2.events import Chunk
from basaltmq.protocols.grpc.http2.header_blocks import encode
from basaltmq.protocols.grpc.http2.stream import Stream
from basaltmq.protocols.grpc.messages import (
    PREFIX,
    PREFIX_BYTES,
    BadMessage,
    Compressed,
    Messages,
    MessageTooLarge,
    prefix,
)
from basaltmq.protocols.grpc.server.immediate_future import ImmediateFuture
from basaltmq.protocols.grpc.server.methods import BidiStreaming, Method, ServerStreaming, Unary
from basaltmq.protocols.grpc.status import Outcome, Status, trailer

if TYPE_CHECKING:
    from basaltmq.protocols.grpc.server.connection import ServerConnection

SWEPT_S_MIN: Final = 10.0
"""Deadlines at least this far away are enforced by the server's sweep, up to 1 s late, because the client enforces them
itself. A timer per call costs as much CPU time as the frames of the response, and hardly any call needs it."""

LOOP_INFLATED_BYTES_MAX: Final = 1_024
"""Compressed size up to which the loop inflates a message: at most 1 MiB, 2 ms. A thread inflates larger ones."""

RESPONSE_HEADERS: Final = b"\x88" + encode([("content-type", "application/grpc")])
"""Response headers. 0x88 is `:status: 200` in HPACK's static table."""

OK: Final = trailer(Outcome(Status.OK))


class Call:
    """State of one call."""

    __slots__ = (
        "_held_bytes",
        "_is_responding",
        "_messages",
        "_method",
        "_reader",
        "_task",
        "_timer",
        "_unread_bytes",
        "_writer",
        "connection",
        "deadline_s",
        "has_all_requests",
        "head",
        "is_over",
        "stream",
    )

    def __init__(self, connection: ServerConnection, stream: Stream, head: RequestHead, method: Method) -> None:
        self.connection = connection
        self.stream = stream
        self.head = head
        self.is_over = False
        self.has_all_requests = False
        """The client has sent all requests."""
        self.deadline_s = 0.0
        """Deadline on the loop's clock for the server's sweep. 0 if the sweep has nothing to enforce."""
        self._method = method
        self._messages: Messages | None = None
        self._task: asyncio.Task[Any] | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._is_responding = False
        self._held_bytes = 0
        self._unread_bytes = 0
        """Received bytes not yet credited to the window, because the handler has not read them."""
        self._reader: asyncio.Future[None] | None = None
        self._writer: asyncio.Future[None] | None = None
        if type(method) is BidiStreaming:
            self._run(method.handle(self._requests(), self))

    def peer(self) -> str:
        """The client's address in gRPC notation: ipv4:127.0.0.1:4711."""
        return self.connection.peer

    def received(self, chunk: Chunk, size_bytes: int, has_ended: bool) -> None:
        """Handle a chunk of request data."""
        method = self._method
        if has_ended and self._messages is None and type(method) is Unary and len(chunk) >= PREFIX_BYTES:
            flag, length = PREFIX.unpack_from(chunk)
            if not flag and length == len(chunk) - PREFIX_BYTES and length <= self.connection.request_bytes_max:
                # Fast path for most calls: the whole request is in one frame.
                self.connection.core.consumed(self.stream, size_bytes)
                self.has_all_requests = True
                request = chunk[PREFIX_BYTES:]
                self._invoke(request if method.takes_views else bytes(request))
                return
        if self._messages is None:
            self._messages = Messages(self.connection.request_bytes_max, self.head.encoding)
        messages = self._messages
        try:
            messages.add(chunk)
            is_stream = type(method) is BidiStreaming
            self._account_held(messages.held_bytes if is_stream else messages.held_bytes + messages.ready_bytes())
            if has_ended:
                messages.end()
        except (MessageTooLarge, BadMessage) as error:
            self.connection.core.consumed(self.stream, size_bytes)
            self.finish(_refusal(error))
            return
        if len(messages.ready) > 1 and not is_stream:
            self.connection.core.consumed(self.stream, size_bytes)
            self.finish(Outcome(Status.INTERNAL, "the method takes exactly one message, and more arrived"))
            return
        if messages.ready and is_stream:
            # Credit the window only after the handler has read the messages.
            self._unread_bytes += size_bytes
            self._wake_reader()
        else:
            self.connection.core.consumed(self.stream, size_bytes)
        if has_ended:
            self.ended()
        elif self.connection.is_full:
            self.finish(
                Outcome(Status.RESOURCE_EXHAUSTED, "the incomplete messages of the connection exceed its limit")
            )

    def _account_held(self, size_bytes: int) -> None:
        """Account for the buffered bytes of an incomplete message."""
        self.connection.hold(size_bytes - self._held_bytes)
        self._held_bytes = size_bytes

    def ended(self) -> None:
        """Handle the end of the requests."""
        if self.has_all_requests or self.is_over:
            return
        self.has_all_requests = True
        if type(self._method) is BidiStreaming:
            self._wake_reader()
            return
        ready = [] if self._messages is None else list(self._messages.ready)
        if len(ready) != 1:
            self.finish(Outcome(Status.INTERNAL, f"the method takes exactly one message, not {len(ready)}"))
            return
        if isinstance(ready[0], bytes):
            self._invoke(ready[0])
        else:
            self._task = self.connection.loop.create_task(self._invoke_inflated(ready[0]))

    async def _invoke_inflated(self, message: Compressed) -> None:
        try:
            request = await self._inflated(message)
        except (MessageTooLarge, BadMessage) as error:
            self._task = None
            self.finish(_refusal(error))
            return
        if not self.is_over:
            self._task = None
            self._invoke(request)

    async def _inflated(self, message: Compressed) -> bytes:
        server = self.connection.server
        if len(message.raw) <= LOOP_INFLATED_BYTES_MAX:
            return message.inflated(server.inflated_bytes_max)
        async with server.inflating:
            return await asyncio.to_thread(message.inflated, server.inflated_bytes_max)

    def _invoke(self, request: Chunk) -> None:
        method = self._method
        if type(method) is ServerStreaming:
            assert isinstance(request, bytes)
            self._run(method.handle(request, self))
            return
        assert type(method) is Unary
        try:
            response = method.handle(request, self)
        except Exception as error:
            self.finish(self.connection.outcome_of(error))
            return
        if isinstance(response, bytes):
            self._respond(response)
            return
        if isinstance(response, ImmediateFuture):
            response.then(self._send_result)
        else:
            self._task = self.connection.loop.create_task(response)
            self._task.add_done_callback(self._send_result)
        if not self.is_over:
            self._set_timer()

    def _set_timer(self) -> None:
        timeout_s = self.head.timeout_s
        if timeout_s is None:
            return
        if timeout_s >= SWEPT_S_MIN:
            self.deadline_s = self.connection.received_s + timeout_s
        else:
            self._timer = self.connection.loop.call_later(timeout_s, self.expire)

    def expire(self) -> None:
        """End the call with DEADLINE_EXCEEDED."""
        self._timer = None
        self.finish(Outcome(Status.DEADLINE_EXCEEDED, "the call exceeded its deadline"))

    def _send_result(self, known: asyncio.Task[Any] | ImmediateFuture[Any]) -> None:
        """Send the result of a finished task or future."""
        if self.is_over:
            if isinstance(known, asyncio.Task) and not known.cancelled():
                # Retrieve the error, so that asyncio does not log it.
                known.exception()
            return
        try:
            assert type(self._method) is Unary
            response = self._method.encode(known.result())
        except asyncio.CancelledError:
            self.finish(Outcome(Status.CANCELLED, "the broker cancelled the call"))
        except Exception as error:
            self.finish(self.connection.outcome_of(error))
        else:
            self._respond(response)

    def _respond(self, message: bytes) -> None:
        connection = self.connection
        self._over()
        connection.core.respond(self.stream, RESPONSE_HEADERS, prefix(message), message, OK)
        connection.flush_soon()

    def _run(self, responses: AsyncGenerator[bytes, None]) -> None:
        """Send the responses of a handler, as fast as the client reads them."""
        task = self.connection.loop.create_task(self._send_all(responses))
        self._task = task
        task.add_done_callback(self._sent)
        self._set_timer()

    async def _send_all(self, responses: AsyncGenerator[bytes, None]) -> None:
        # Close the generator as soon as the client disconnects, not when it is garbage-collected.
        async with aclosing(responses):
            async for response in responses:
                await self.write(response)

    def _sent(self, task: asyncio.Task[None]) -> None:
        if task.cancelled():
            self.finish(Outcome(Status.CANCELLED, "the broker cancelled the call"))
        elif (error := task.exception()) is not None:
            self.finish(self.connection.outcome_of(error))
        else:
            self.finish(Outcome(Status.OK))

    async def write(self, message: bytes) -> None:
        """Send a response. Return when the client has room for more."""
        if self.is_over:
            return
        connection = self.connection
        if not self._is_responding:
            self._is_responding = True
            connection.core.headers(self.stream, RESPONSE_HEADERS)
        is_sent = connection.core.send(self.stream, prefix(message), message)
        connection.flush_soon()
        if not is_sent:
            self._writer = connection.loop.create_future()
            await self._writer
        while connection.is_paused and not self.is_over:
            await connection.can_write()

    def writable(self) -> None:
        """Resume `write`: the data that waited for the client's window has been sent."""
        if self._writer is not None and not self._writer.done():
            self._writer.set_result(None)

    async def _requests(self) -> AsyncIterator[bytes]:
        """Yield requests as they arrive."""
        while True:
            messages = self._messages
            while messages is not None and messages.ready:
                message = messages.ready.popleft()
                if not isinstance(message, bytes):
                    try:
                        message = await self._inflated(message)
                    except (MessageTooLarge, BadMessage) as error:
                        self.finish(_refusal(error))
                        return
                yield message
            if self._unread_bytes:
                self.connection.core.consumed(self.stream, self._unread_bytes)
                self._unread_bytes = 0
                self.connection.flush_soon()
            if self.has_all_requests:
                return
            self._reader = self.connection.loop.create_future()
            await self._reader

    def _wake_reader(self) -> None:
        if self._reader is not None and not self._reader.done():
            self._reader.set_result(None)

    def finish(self, outcome: Outcome) -> None:
        """End the call with this outcome, unless it has ended."""
        if self.is_over:
            return
        core = self.connection.core
        self._over()
        block = OK if outcome.status is Status.OK and not outcome.text else trailer(outcome)
        if not self._is_responding:
            block = RESPONSE_HEADERS + block
        core.end(self.stream, block)
        self.connection.flush_soon()
        self._cancel()

    def cancelled_by_client(self) -> None:
        """Handle cancellation by the client or loss of the connection."""
        if not self.is_over:
            self._over()
            self._cancel()

    def _over(self) -> None:
        self.is_over = True
        self.stream.owner = None
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self._held_bytes:
            self._account_held(0)
        if self._unread_bytes:
            self.connection.core.consumed(self.stream, self._unread_bytes)
            self._unread_bytes = 0
        self.connection.call_ended(self)

    def _cancel(self) -> None:
        """Cancel the handler's task, if it runs."""
        if self._task is not None and not self._task.done():
            self._task.cancel()


def _refusal(error: MessageTooLarge | BadMessage) -> Outcome:
    is_large = isinstance(error, MessageTooLarge)
    return Outcome(Status.RESOURCE_EXHAUSTED if is_large else Status.INTERNAL, str(error))
