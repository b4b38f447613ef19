"""One call on the client side."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import TYPE_CHECKING

from basaltmq.protocols.grpc.heads import ResponseHead
from basaltmq.protocols.grpc.http2.events import Chunk
from basaltmq.protocols.grpc.messages import BadMessage, Compressed, Messages, MessageTooLarge, prefix
from basaltmq.protocols.grpc.status import Outcome, Status

if TYPE_CHECKING:
    from basaltmq.protocols.grpc.client.connection import ClientConnection


class CallFailed(Exception):
    """A call ended with a status other than OK."""

    def __init__(self, outcome: Outcome) -> None:
        super().__init__(f"{outcome.status.name}: {outcome.text}")
        self.outcome = outcome


class NotProcessed(CallFailed):
    """The server guarantees that it did not process the call, so it may be retried."""


class ClientCall:
    """One call: sends requests and receives responses. It has ended once `outcome` is set."""

    __slots__ = (
        "_connection",
        "_messages",
        "_timer",
        "_unread_bytes",
        "_waiter",
        "_writer",
        "outcome",
        "stream",
        "was_processed",
    )

    def __init__(self, connection: ClientConnection, block: bytes, timeout_s: float | None) -> None:
        self._connection = connection
        self._messages: Messages | None = None
        self._unread_bytes = 0
        self._waiter: asyncio.Future[None] | None = None
        self._writer: asyncio.Future[None] | None = None
        self.outcome: Outcome | None = None
        self.was_processed = True
        """False if the server guarantees that it did not process the call."""
        self.stream = connection.core.open(block)
        self.stream.owner = self
        self._timer = None if timeout_s is None else connection.loop.call_later(timeout_s, self._expire)
        connection.flush_soon()

    def send_last(self, request: bytes) -> None:
        """Send the only request, or the last one, and end the requests."""
        self._connection.core.send_last(self.stream, prefix(request), request)
        self._connection.flush_soon()

    async def send(self, request: bytes) -> None:
        """Send one of several requests. Return when the server has room for more."""
        if self.outcome is not None:
            return
        connection = self._connection
        is_sent = connection.core.send(self.stream, prefix(request), request)
        connection.flush_soon()
        if not is_sent:
            self._writer = connection.loop.create_future()
            await self._writer
        while connection.is_paused and self.outcome is None:
            await connection.can_write()

    def end(self) -> None:
        """End the requests."""
        if self.outcome is None:
            self._connection.core.end(self.stream)
            self._connection.flush_soon()

    async def response(self) -> bytes:
        """Return the single response. Raise CallFailed if there is none."""
        try:
            while self.outcome is None:
                self._waiter = self._connection.loop.create_future()
                await self._waiter
        finally:
            self.cancel()
        self._require_ok(self.outcome)
        if self._messages is None or len(self._messages.ready) != 1:
            raise CallFailed(Outcome(Status.INTERNAL, "the server did not respond with exactly one message"))
        return self._plain(self._messages.ready[0])

    async def __aiter__(self) -> AsyncIterator[bytes]:
        """Yield responses as they arrive. Raise CallFailed at the end if the status is not OK."""
        while True:
            messages = self._messages
            while messages is not None and messages.ready:
                yield self._plain(messages.ready.popleft())
            if self._unread_bytes:
                self._connection.core.consumed(self.stream, self._unread_bytes)
                self._unread_bytes = 0
                self._connection.flush_soon()
            if self.outcome is not None:
                self._require_ok(self.outcome)
                return
            self._waiter = self._connection.loop.create_future()
            await self._waiter

    def _plain(self, message: bytes | Compressed) -> bytes:
        if isinstance(message, bytes):
            return message
        try:
            return message.inflated(self._connection.response_bytes_max)
        except (MessageTooLarge, BadMessage) as error:
            raise CallFailed(Outcome(Status.RESOURCE_EXHAUSTED, str(error))) from error

    def _require_ok(self, outcome: Outcome) -> None:
        if outcome.status is not Status.OK:
            raise CallFailed(outcome) if self.was_processed else NotProcessed(outcome)

    def _expire(self) -> None:
        self._finish(Outcome(Status.DEADLINE_EXCEEDED, "no response arrived within the timeout"))

    def cancel(self) -> None:
        """Cancel the call, unless it has ended."""
        self._finish(Outcome(Status.CANCELLED, "the call was cancelled"))

    def failed(self, outcome: Outcome, *, was_processed: bool = True) -> None:
        """End the call, because the stream or the connection failed."""
        self.was_processed = was_processed
        self._finish(outcome)

    def writable(self) -> None:
        if self._writer is not None and not self._writer.done():
            self._writer.set_result(None)

    def headers_received(self, head: ResponseHead, has_ended: bool) -> None:
        """Handle response headers or trailers."""
        if head.outcome is not None:
            self._finish(head.outcome)
        elif head.http_status and head.http_status != "200":
            self._finish(Outcome(_status_of(head.http_status), f"the server responded with HTTP {head.http_status}"))
        elif has_ended:
            self._finish(Outcome(Status.UNKNOWN, "the server ended the call without a status"))
        elif self._messages is None:
            self._messages = Messages(self._connection.response_bytes_max, head.encoding)

    def received(self, chunk: Chunk, size_bytes: int, has_ended: bool) -> None:
        if self._messages is None:
            self._finish(Outcome(Status.INTERNAL, "the server sent data before its response headers"))
            return
        try:
            self._messages.add(chunk)
        except (MessageTooLarge, BadMessage) as error:
            self._finish(Outcome(Status.RESOURCE_EXHAUSTED, str(error)))
            return
        if self._messages.ready:
            # Credit the window only after the messages are read.
            self._unread_bytes += size_bytes
            self._wake()
        else:
            self._connection.core.consumed(self.stream, size_bytes)
        if has_ended:
            self._finish(Outcome(Status.UNKNOWN, "the server ended the call without a status"))

    def _finish(self, outcome: Outcome) -> None:
        if self.outcome is not None:
            return
        self.outcome = outcome
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        self.stream.owner = None
        core = self._connection.core
        if self._unread_bytes:
            core.consumed(self.stream, self._unread_bytes)
            self._unread_bytes = 0
        if not self.stream.is_closed:
            core.closed(self.stream)
            self._connection.flush_soon()
        self._connection.call_ended()
        self._wake()
        self.writable()

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)


def _status_of(http_status: str) -> Status:
    """Return the status that gRPC defines for a plain HTTP error."""
    return {
        "400": Status.INTERNAL,
        "401": Status.UNAUTHENTICATED,
        "403": Status.PERMISSION_DENIED,
        "404": Status.UNIMPLEMENTED,
        "429": Status.UNAVAILABLE,
        "502": Status.UNAVAILABLE,
        "503": Status.UNAVAILABLE,
        "504": Status.UNAVAILABLE,
    }.get(http_status, Status.UNKNOWN)
