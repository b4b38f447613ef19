"""One call, as the client sees it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import TYPE_CHECKING

from basaltmq.protocols.grpc.heads import ResponseHead
from basaltmq.protocols.grpc.http2.events import Chunk
from basaltmq.protocols.grpc.messages import BadMessage, Messages, MessageTooLarge, prefix
from basaltmq.protocols.grpc.status import Outcome, Status

if TYPE_CHECKING:
    from basaltmq.protocols.grpc.client.connection import ClientConnection


class CallFailed(Exception):
    """A call ended with another status than OK."""

    def __init__(self, outcome: Outcome) -> None:
        super().__init__(f"{outcome.status.name}: {outcome.text}")
        self.outcome = outcome


class NotBegun(CallFailed):
    """The server did nothing with the call."""


class ClientCall:
    """Requests out, answers in. It is over when its outcome is there."""

    __slots__ = (
        "_connection",
        "_messages",
        "_timer",
        "_unread_bytes",
        "_waiter",
        "_writer",
        "outcome",
        "stream",
        "was_begun",
    )

    def __init__(self, connection: ClientConnection, block: bytes, timeout_s: float | None) -> None:
        self._connection = connection
        self._messages: Messages | None = None
        self._unread_bytes = 0
        self._waiter: asyncio.Future[None] | None = None
        self._writer: asyncio.Future[None] | None = None
        self.outcome: Outcome | None = None
        self.was_begun = True
        """False when the server said that it did nothing with the call."""
        self.stream = connection.core.open(block)
        self.stream.owner = self
        self._timer = None if timeout_s is None else connection.loop.call_later(timeout_s, self._expire)
        connection.flush_soon()

    def send_last(self, request: bytes) -> None:
        """The only request, or the last."""
        self._connection.core.send_last(self.stream, prefix(request), request)
        self._connection.flush_soon()

    async def send(self, request: bytes) -> None:
        """One of many requests; returns when the server has room for it."""
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
        """There are no more requests."""
        if self.outcome is None:
            self._connection.core.end(self.stream)
            self._connection.flush_soon()

    async def answer(self) -> bytes:
        """The one answer; CallFailed if there is none."""
        try:
            while self.outcome is None:
                self._waiter = self._connection.loop.create_future()
                await self._waiter
        finally:
            self.cancel()
        self._require_ok(self.outcome)
        if self._messages is None or len(self._messages.ready) != 1:
            raise CallFailed(Outcome(Status.INTERNAL, "the server answered with no message, or with several"))
        return self._messages.ready[0]

    async def __aiter__(self) -> AsyncIterator[bytes]:
        """Answers as they come; CallFailed at their end if it is not a good one."""
        while True:
            messages = self._messages
            while messages is not None and messages.ready:
                yield messages.ready.popleft()
            if self._unread_bytes:
                self._connection.core.consumed(self.stream, self._unread_bytes)
                self._unread_bytes = 0
                self._connection.flush_soon()
            if self.outcome is not None:
                self._require_ok(self.outcome)
                return
            self._waiter = self._connection.loop.create_future()
            await self._waiter

    def _require_ok(self, outcome: Outcome) -> None:
        if outcome.status is not Status.OK:
            raise CallFailed(outcome) if self.was_begun else NotBegun(outcome)

    def _expire(self) -> None:
        self._finish(Outcome(Status.DEADLINE_EXCEEDED, "there was no answer in time"))

    def cancel(self) -> None:
        """Give the call up, if it is not over."""
        self._finish(Outcome(Status.CANCELLED, "the call was given up"))

    def failed(self, outcome: Outcome, *, was_begun: bool = True) -> None:
        """The stream or the connection is gone."""
        self.was_begun = was_begun
        self._finish(outcome)

    def writable(self) -> None:
        if self._writer is not None and not self._writer.done():
            self._writer.set_result(None)

    def headed(self, head: ResponseHead, has_ended: bool) -> None:
        """The beginning of an answer, or its end."""
        if head.outcome is not None:
            self._finish(head.outcome)
        elif head.http_status and head.http_status != "200":
            self._finish(Outcome(_status_of(head.http_status), f"the server answered HTTP {head.http_status}"))
        elif has_ended:
            self._finish(Outcome(Status.UNKNOWN, "the server ended the call without a status"))
        elif self._messages is None:
            self._messages = Messages(self._connection.answer_bytes_max, head.encoding)

    def received(self, chunk: Chunk, size_bytes: int, has_ended: bool) -> None:
        if self._messages is None:
            self._finish(Outcome(Status.INTERNAL, "the server sent data before it answered"))
            return
        try:
            self._messages.add(chunk)
        except (MessageTooLarge, BadMessage) as error:
            self._finish(Outcome(Status.RESOURCE_EXHAUSTED, str(error)))
            return
        if self._messages.ready:
            # Not given back to the window before they are read.
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
        self._connection.call_over()
        self._wake()
        self.writable()

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)


def _status_of(http_status: str) -> Status:
    """What gRPC makes of an answer that is only HTTP."""
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
