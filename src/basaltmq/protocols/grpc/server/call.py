"""One call, as the server sees it.

    data ──> messages ──> handler ──> answers ──> trailer
                                 └──> an error ──> its status

It ends once: with its answer, an error, its deadline, or because the client gave it up. Whatever comes later finds it
over and does nothing. A handler that runs when the client gives up is cancelled; one that only waits for something else
to happen is forgotten, and that happens all the same.
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
    Messages,
    MessageTooLarge,
    prefix,
)
from basaltmq.protocols.grpc.server.immediate_future import Later
from basaltmq.protocols.grpc.server.methods import AnswerStream, BothStreams, Method, Unary
from basaltmq.protocols.grpc.status import Outcome, Status, trailer

if TYPE_CHECKING:
    from basaltmq.protocols.grpc.server.connection import ServerConnection

SWEPT_S_MIN: Final = 10.0
"""A deadline this far away is looked after by the server's sweep, up to a second late: its client knows by itself, and
a timer for every call, which hardly any needs, costs as much as the frames of its answer."""

ANSWER: Final = b"\x88" + encode([("content-type", "application/grpc")])
"""Status 200, which is in HPACK's fixed table."""

OK: Final = trailer(Outcome(Status.OK))


class Call:
    """Who calls, for what, and how it goes."""

    __slots__ = (
        "_held_bytes",
        "_is_answering",
        "_messages",
        "_method",
        "_reader",
        "_task",
        "_timer",
        "_unread_bytes",
        "_writer",
        "connection",
        "deadline_s",
        "has_all",
        "head",
        "is_over",
        "stream",
    )

    def __init__(self, connection: ServerConnection, stream: Stream, head: RequestHead, method: Method) -> None:
        self.connection = connection
        self.stream = stream
        self.head = head
        self.is_over = False
        self.has_all = False
        """The client has said everything."""
        self.deadline_s = 0.0
        """When it is over at the latest, by the loop's clock; 0 if nobody has to look."""
        self._method = method
        self._messages: Messages | None = None
        self._task: asyncio.Task[Any] | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._is_answering = False
        self._held_bytes = 0
        self._unread_bytes = 0
        """Received and kept back from the window, because the handler does not read."""
        self._reader: asyncio.Future[None] | None = None
        self._writer: asyncio.Future[None] | None = None
        if type(method) is BothStreams:
            self._run(method.handle(self._requests(), self))

    def peer(self) -> str:
        """The connection, as gRPC names it: ipv4:127.0.0.1:4711."""
        return self.connection.peer

    def received(self, chunk: Chunk, size_bytes: int, has_ended: bool) -> None:
        """A part of the requests."""
        method = self._method
        if has_ended and self._messages is None and type(method) is Unary and len(chunk) >= PREFIX_BYTES:
            flag, length = PREFIX.unpack_from(chunk)
            if not flag and length == len(chunk) - PREFIX_BYTES and length <= self.connection.request_bytes_max:
                # The whole of a call in one frame, which most are.
                self.connection.core.consumed(self.stream, size_bytes)
                self.has_all = True
                request = chunk[PREFIX_BYTES:]
                self._ask(request if method.takes_views else bytes(request))
                return
        if self._messages is None:
            self._messages = Messages(self.connection.request_bytes_max, self.head.encoding)
        messages = self._messages
        try:
            messages.add(chunk)
            self._hold(messages.held_bytes)
            if has_ended:
                messages.end()
        except MessageTooLarge as error:
            self._release(size_bytes)
            self.finish(Outcome(Status.RESOURCE_EXHAUSTED, str(error)))
            return
        except BadMessage as error:
            self._release(size_bytes)
            self.finish(Outcome(Status.INTERNAL, str(error)))
            return
        if messages.ready and type(self._method) is BothStreams:
            # Not given back to the window before the handler has read them.
            self._unread_bytes += size_bytes
            self._wake_reader()
        else:
            self.connection.core.consumed(self.stream, size_bytes)
        if has_ended:
            self.ended()
        elif self.connection.is_full:
            self.finish(
                Outcome(Status.RESOURCE_EXHAUSTED, "the connection has too much on its way that is not complete")
            )

    def _hold(self, size_bytes: int) -> None:
        """So much of a message is kept until it is whole."""
        self.connection.hold(size_bytes - self._held_bytes)
        self._held_bytes = size_bytes

    def _release(self, size_bytes: int) -> None:
        self.connection.core.consumed(self.stream, size_bytes)

    def ended(self) -> None:
        """All requests are there."""
        if self.has_all or self.is_over:
            return
        self.has_all = True
        if type(self._method) is BothStreams:
            self._wake_reader()
            return
        ready = [] if self._messages is None else list(self._messages.ready)
        if len(ready) != 1:
            self.finish(Outcome(Status.INTERNAL, f"the call takes one message, not {len(ready)}"))
            return
        self._ask(ready[0])

    def _ask(self, request: Chunk) -> None:
        method = self._method
        if type(method) is AnswerStream:
            assert isinstance(request, bytes)
            self._run(method.handle(request, self))
            return
        assert type(method) is Unary
        try:
            answer = method.handle(request, self)
        except Exception as error:
            self.finish(self.connection.outcome_of(error))
            return
        if isinstance(answer, bytes):
            self._answer(answer)
            return
        if isinstance(answer, Later):
            answer.then(self._encoded)
        else:
            self._task = self.connection.loop.create_task(answer)
            self._task.add_done_callback(self._encoded)
        if not self.is_over:
            self._set_timer()

    def _set_timer(self) -> None:
        timeout_s = self.head.timeout_s
        if timeout_s is None:
            return
        if timeout_s >= SWEPT_S_MIN:
            self.deadline_s = self.connection.heard_s + timeout_s
        else:
            self._timer = self.connection.loop.call_later(timeout_s, self.expire)

    def expire(self) -> None:
        """Its client does not wait any longer."""
        self._timer = None
        self.finish(Outcome(Status.DEADLINE_EXCEEDED, "the call took longer than its client gave it"))

    def _encoded(self, known: asyncio.Task[Any] | Later[Any]) -> None:
        """What the call waited for has happened."""
        if self.is_over:
            if isinstance(known, asyncio.Task) and not known.cancelled():
                # Nobody is left to be told of it.
                known.exception()
            return
        try:
            assert type(self._method) is Unary
            answer = self._method.encode(known.result())
        except asyncio.CancelledError:
            self.finish(Outcome(Status.CANCELLED, "the broker gave the call up"))
        except Exception as error:
            self.finish(self.connection.outcome_of(error))
        else:
            self._answer(answer)

    def _answer(self, message: bytes) -> None:
        connection = self.connection
        self._over()
        connection.core.answer(self.stream, ANSWER, prefix(message), message, OK)
        connection.flush_soon()

    def _run(self, answers: AsyncGenerator[bytes, None]) -> None:
        """Send what a handler gives, one after the other, as fast as the client takes them."""
        task = self.connection.loop.create_task(self._send_all(answers))
        self._task = task
        task.add_done_callback(self._sent)
        self._set_timer()

    async def _send_all(self, answers: AsyncGenerator[bytes, None]) -> None:
        # Closed at once when the client goes away, not when the collector comes round.
        async with aclosing(answers):
            async for answer in answers:
                await self.write(answer)

    def _sent(self, task: asyncio.Task[None]) -> None:
        if task.cancelled():
            self.finish(Outcome(Status.CANCELLED, "the broker gave the call up"))
        elif (error := task.exception()) is not None:
            self.finish(self.connection.outcome_of(error))
        else:
            self.finish(Outcome(Status.OK))

    async def write(self, message: bytes) -> None:
        """Send an answer; returns when the client has room for it."""
        if self.is_over:
            return
        connection = self.connection
        if not self._is_answering:
            self._is_answering = True
            connection.core.headers(self.stream, ANSWER)
        is_sent = connection.core.send(self.stream, prefix(message), message)
        connection.flush_soon()
        if not is_sent:
            self._writer = connection.loop.create_future()
            await self._writer
        while connection.is_paused and not self.is_over:
            await connection.has_room()

    def writable(self) -> None:
        """What waited for the client's window is on its way."""
        if self._writer is not None and not self._writer.done():
            self._writer.set_result(None)

    async def _requests(self) -> AsyncIterator[bytes]:
        """Requests as they come."""
        while True:
            messages = self._messages
            while messages is not None and messages.ready:
                yield messages.ready.popleft()
            if self._unread_bytes:
                self.connection.core.consumed(self.stream, self._unread_bytes)
                self._unread_bytes = 0
                self.connection.flush_soon()
            if self.has_all:
                return
            self._reader = self.connection.loop.create_future()
            await self._reader

    def _wake_reader(self) -> None:
        if self._reader is not None and not self._reader.done():
            self._reader.set_result(None)

    def finish(self, outcome: Outcome) -> None:
        """End the call, if nothing has yet."""
        if self.is_over:
            return
        core = self.connection.core
        self._over()
        block = OK if outcome.status is Status.OK and not outcome.text else trailer(outcome)
        if not self._is_answering:
            block = ANSWER + block
        core.end(self.stream, block)
        self.connection.flush_soon()
        self._cancel()

    def given_up(self) -> None:
        """The client does not want it any more, or is gone."""
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
            self._hold(0)
        if self._unread_bytes:
            self.connection.core.consumed(self.stream, self._unread_bytes)
            self._unread_bytes = 0
        self.connection.call_over(self)

    def _cancel(self) -> None:
        """Stop a handler that runs. What it only waits for happens all the same."""
        if self._task is not None and not self._task.done():
            self._task.cancel()
