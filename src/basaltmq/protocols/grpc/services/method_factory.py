"""Adapters from service handlers to gRPC methods: authentication, decoding of requests, encoding of responses.

A handler takes a request and its caller, and raises Basalt's errors. It returns a response, a future or a coroutine.
A streaming handler is an async generator. Handlers do not depend on gRPC.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator, Callable, Coroutine
from typing import Any, Final, TypeVar

from google.protobuf.message import DecodeError, Message

from basaltmq.errors import InvalidArgumentError
from basaltmq.protocols.grpc.http2.events import Chunk
from basaltmq.protocols.grpc.server.call import Call
from basaltmq.protocols.grpc.server.immediate_future import ImmediateFuture
from basaltmq.protocols.grpc.server.methods import BidiStreaming, Response, ServerStreaming, Unary
from basaltmq.protocols.grpc.services.access import Access, Caller

CALLERS_MAX: Final = 16
"""Cached callers per connection. A client uses one key, a proxy several."""

Q = TypeVar("Q", bound=Message)
R = TypeVar("R", bound=Message)
HandlerResult = Message | bytes | ImmediateFuture[Any] | Coroutine[Any, Any, Message | bytes]


class MethodFactory:
    """Turns handlers into methods."""

    def __init__(self, access: Access) -> None:
        self._access = access

    def unary(
        self,
        request: type[Q],
        handler: Callable[[Q, Caller], HandlerResult],
        encode: Callable[[Any], bytes] | None = None,
    ) -> Unary:
        """Make a method with one request and one response. `encode` serializes the result of a future."""

        def handle(raw: bytes, call: Call) -> Response:
            caller = self._caller(call)
            if caller is None:
                return self._handle_after_log_in(call, lambda caller: handler(read(request, raw), caller))
            reply = handler(read(request, raw), caller)
            return reply.SerializeToString() if isinstance(reply, Message) else reply

        return Unary(handle, encode or _serialized)

    def unary_of_bytes(
        self, handler: Callable[[Chunk, Caller], ImmediateFuture[Any]], encode: Callable[[Any], bytes]
    ) -> Unary:
        """Make a unary method whose handler parses the request itself. The handler must not keep the request."""

        def handle(raw: Chunk, call: Call) -> Response:
            caller = self._caller(call)
            if caller is None:
                kept = bytes(raw)
                return self._handle_after_log_in(call, lambda caller: handler(kept, caller))
            return handler(raw, caller)

        return Unary(handle, encode, takes_views=True)

    def server_streaming(
        self, request: type[Q], handler: Callable[[Q, Caller], AsyncGenerator[bytes, None]]
    ) -> ServerStreaming:
        """Make a method with one request and a stream of responses, which the handler serializes."""

        async def handle(raw: bytes, call: Call) -> AsyncGenerator[bytes, None]:
            caller = self._caller(call) or await self._log_in(call)
            responses = handler(read(request, raw), caller)
            try:
                async for response in responses:
                    yield response
            finally:
                await responses.aclose()

        return ServerStreaming(handle)

    def bidi_streaming(
        self, request: type[Q], handler: Callable[[AsyncIterator[Q], Caller], AsyncGenerator[R, None]]
    ) -> BidiStreaming:
        """Make a method with a stream of requests and a stream of responses."""

        async def handle(asked: AsyncIterator[bytes], call: Call) -> AsyncGenerator[bytes, None]:
            caller = self._caller(call) or await self._log_in(call)
            requests = (read(request, each) async for each in asked)
            responses = handler(requests, caller)
            try:
                async for response in responses:
                    yield response.SerializeToString()
            finally:
                await responses.aclose()

        return BidiStreaming(handle)

    def _caller(self, call: Call) -> Caller | None:
        """Return the caller, from the connection's cache if still valid. None if the credentials need `_log_in`."""
        known: dict[str | None, Caller] = call.connection.handler_state
        caller = known.get(call.head.authorization)
        if caller is not None and caller.is_current():
            return caller
        found = self._access.caller(call.head.fields, call.peer())
        return None if found is None else _remembered(call, found)

    async def _log_in(self, call: Call) -> Caller:
        return _remembered(call, await self._access.log_in(call.head.fields, call.peer()))

    async def _handle_after_log_in(self, call: Call, ask: Callable[[Caller], HandlerResult]) -> Any:
        """Handle a unary call after checking its credentials."""
        reply = ask(await self._log_in(call))
        if isinstance(reply, ImmediateFuture):
            done = call.connection.loop.create_future()
            reply.then(lambda known: None if done.done() else done.set_result(None))
            await done
            return reply.result()
        return await reply if isinstance(reply, Coroutine) else reply


def _remembered(call: Call, caller: Caller) -> Caller:
    known: dict[str | None, Caller] = call.connection.handler_state
    if len(known) >= CALLERS_MAX:
        known.clear()
    known[call.head.authorization] = caller
    call.connection.authenticated()
    return caller


def _serialized(response: Message | bytes) -> bytes:
    return response if isinstance(response, bytes) else response.SerializeToString()


def read(request: type[Q], raw: Chunk) -> Q:
    """Parse a request. Raise InvalidArgumentError if the bytes are malformed."""
    try:
        return request.FromString(bytes(raw))
    except DecodeError:
        raise InvalidArgumentError(f"the request is not a valid {request.DESCRIPTOR.name}") from None


def queue_name(name: str) -> str:
    """Return the queue name of a request. Raise if it is empty, which on the wire is the same as absent."""
    if not name:
        raise InvalidArgumentError("the request has no queue name")
    return name
