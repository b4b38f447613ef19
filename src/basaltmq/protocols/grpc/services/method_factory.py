"""How a handler becomes a gRPC method: the caller is told apart, requests are read and answers encoded.

A handler is a function of a request and its caller, and raises Basalt's errors. It answers at once, later or as
a coroutine; a stream of answers is a generator. It knows nothing of gRPC.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator, Callable, Coroutine
from typing import Any, Final, TypeVar

from google.protobuf.message import DecodeError, Message

from basaltmq.errors import InvalidArgumentError
from basaltmq.protocols.grpc.http2.events import Chunk
from basaltmq.protocols.grpc.server.call import Call
from basaltmq.protocols.grpc.server.immediate_future import Later
from basaltmq.protocols.grpc.server.methods import Answer, AnswerStream, BothStreams, Unary
from basaltmq.protocols.grpc.services.access import Access, Caller

CALLERS_MAX: Final = 16
"""Callers remembered for one connection: clients have one key, proxies some."""

Q = TypeVar("Q", bound=Message)
R = TypeVar("R", bound=Message)
Reply = Message | bytes | Later[Any] | Coroutine[Any, Any, Message | bytes]


class Calls:
    """Makes methods of handlers."""

    def __init__(self, access: Access) -> None:
        self._access = access

    def unary(
        self, request: type[Q], handler: Callable[[Q, Caller], Reply], encode: Callable[[Any], bytes] | None = None
    ) -> Unary:
        """One request, one answer; `encode` makes it of the result a handler has later."""

        def handle(raw: bytes, call: Call) -> Answer:
            caller = self._caller(call)
            if caller is None:
                return self._logged_in(call, lambda caller: handler(read(request, raw), caller))
            reply = handler(read(request, raw), caller)
            return reply.SerializeToString() if isinstance(reply, Message) else reply

        return Unary(handle, encode or _serialized)

    def unary_of_bytes(self, handler: Callable[[Chunk, Caller], Later[Any]], encode: Callable[[Any], bytes]) -> Unary:
        """The same for a handler that reads the request itself, and does not keep it."""

        def handle(raw: Chunk, call: Call) -> Answer:
            caller = self._caller(call)
            if caller is None:
                kept = bytes(raw)
                return self._logged_in(call, lambda caller: handler(kept, caller))
            return handler(raw, caller)

        return Unary(handle, encode, takes_views=True)

    def answer_stream(
        self, request: type[Q], handler: Callable[[Q, Caller], AsyncGenerator[bytes, None]]
    ) -> AnswerStream:
        """One request, many answers, which the handler encodes itself."""

        async def handle(raw: bytes, call: Call) -> AsyncGenerator[bytes, None]:
            caller = self._caller(call) or await self._log_in(call)
            answers = handler(read(request, raw), caller)
            try:
                async for answer in answers:
                    yield answer
            finally:
                await answers.aclose()

        return AnswerStream(handle)

    def both_streams(
        self, request: type[Q], handler: Callable[[AsyncIterator[Q], Caller], AsyncGenerator[R, None]]
    ) -> BothStreams:
        """Many requests, many answers."""

        async def handle(asked: AsyncIterator[bytes], call: Call) -> AsyncGenerator[bytes, None]:
            caller = self._caller(call) or await self._log_in(call)
            requests = (read(request, each) async for each in asked)
            answers = handler(requests, caller)
            try:
                async for answer in answers:
                    yield answer.SerializeToString()
            finally:
                await answers.aclose()

        return BothStreams(handle)

    def _caller(self, call: Call) -> Caller | None:
        """Who calls; None if that takes a login. A connection's callers are remembered and checked to be current."""
        known: dict[str | None, Caller] = call.connection.memory
        caller = known.get(call.head.authorization)
        if caller is not None and caller.is_current():
            return caller
        found = self._access.caller(call.head.fields, call.peer())
        return None if found is None else _remembered(call, found)

    async def _log_in(self, call: Call) -> Caller:
        return _remembered(call, await self._access.log_in(call.head.fields, call.peer()))

    async def _logged_in(self, call: Call, ask: Callable[[Caller], Reply]) -> Any:
        """Handle a unary call after its login."""
        reply = ask(await self._log_in(call))
        if isinstance(reply, Later):
            done = call.connection.loop.create_future()
            reply.then(lambda known: None if done.done() else done.set_result(None))
            await done
            return reply.result()
        return await reply if isinstance(reply, Coroutine) else reply


def _remembered(call: Call, caller: Caller) -> Caller:
    known: dict[str | None, Caller] = call.connection.memory
    if len(known) >= CALLERS_MAX:
        known.clear()
    known[call.head.authorization] = caller
    call.connection.is_admitted = True
    return caller


def _serialized(answer: Message | bytes) -> bytes:
    return answer if isinstance(answer, bytes) else answer.SerializeToString()


def read(request: type[Q], raw: Chunk) -> Q:
    """A request; InvalidArgumentError if the bytes are none."""
    try:
        return request.FromString(bytes(raw))
    except DecodeError:
        raise InvalidArgumentError(f"the bytes of the request are no {request.DESCRIPTOR.name}") from None


def queue_name(name: str) -> str:
    """A queue's name as it is on the wire, where absent and empty are the same."""
    if not name:
        raise InvalidArgumentError("the call names no queue")
    return name
