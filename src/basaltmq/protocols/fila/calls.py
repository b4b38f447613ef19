"""How a handler becomes a gRPC method: the caller is told apart, errors become status codes.

A handler is a coroutine (or a generator, for a stream) of a request and its caller, and raises Basalt's errors. It
knows nothing of gRPC.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable
from contextlib import aclosing
from typing import Any, Protocol, TypeVar

import grpc
from google.protobuf.message import DecodeError, Message
from grpc import RpcMethodHandler
from grpc.aio import ServicerContext

from basaltmq.errors import InvalidArgumentError
from basaltmq.protocols.fila.access import Access, Caller
from basaltmq.protocols.fila.status import abort, is_abort

Q = TypeVar("Q", bound=Message)
R = TypeVar("R", bound=Message)
Q_contra = TypeVar("Q_contra", bound=Message, contravariant=True)


class Unary(Protocol[Q_contra]):
    """One request, one answer, which the handler may have encoded itself."""

    def __call__(self, request: Q_contra, caller: Caller, /) -> Awaitable[Message | bytes]: ...


class Calls:
    """Makes methods of handlers."""

    def __init__(self, access: Access, failed: Callable[[Exception], None]) -> None:
        """`failed` is told of every error a call ends with."""
        self._access = access
        self._failed = failed
        self.open = 0
        """Calls that run."""

    def unary(self, request: type[Q], handler: Unary[Q]) -> RpcMethodHandler[Any, Any]:
        async def call(asked: bytes, context: ServicerContext[Any, Any]) -> Message | bytes:
            self.open += 1
            try:
                return await handler(_read(request, asked), self._caller(context))
            except Exception as error:
                if is_abort(error):
                    raise
                self._failed(error)
                await abort(context, error)
            finally:
                self.open -= 1

        return grpc.unary_unary_rpc_method_handler(call, None, _serialized)

    def answer_stream(
        self, request: type[Q], handler: Callable[[Q, Caller], AsyncGenerator[bytes, None]]
    ) -> RpcMethodHandler[Any, Any]:
        """One request, many answers, which the handler encodes itself."""

        async def call(asked: bytes, context: ServicerContext[Any, Any]) -> None:
            self.open += 1
            try:
                # Closed at once when the client goes away, not when the collector comes round.
                async with aclosing(handler(_read(request, asked), self._caller(context))) as answers:
                    async for answer in answers:
                        await context.write(answer)
            except Exception as error:
                if is_abort(error):
                    raise
                self._failed(error)
                await abort(context, error)
            finally:
                self.open -= 1

        return grpc.unary_stream_rpc_method_handler(call, None, None)

    def both_streams(
        self, request: type[Q], handler: Callable[[AsyncIterator[Q], Caller], AsyncGenerator[R, None]]
    ) -> RpcMethodHandler[Any, Any]:
        """Many requests, many answers."""

        async def call(asked: AsyncIterator[bytes], context: ServicerContext[Any, Any]) -> None:
            self.open += 1
            try:
                requests = (_read(request, each) async for each in asked)
                async with aclosing(handler(requests, self._caller(context))) as answers:
                    async for answer in answers:
                        await context.write(answer)
            except Exception as error:
                if is_abort(error):
                    raise
                self._failed(error)
                await abort(context, error)
            finally:
                self.open -= 1

        return grpc.stream_stream_rpc_method_handler(call, None, _serialized)

    def _caller(self, context: ServicerContext[Any, Any]) -> Caller:
        return self._access.caller(context.invocation_metadata(), context.peer)


def _serialized(answer: Message | bytes) -> bytes:
    return answer if isinstance(answer, bytes) else answer.SerializeToString()


def _read(request: type[Q], raw: bytes) -> Q:
    # Not left to gRPC, which would answer UNKNOWN and put a stack trace into the log.
    try:
        return request.FromString(raw)
    except DecodeError:
        raise InvalidArgumentError(f"the bytes of the request are no {request.DESCRIPTOR.name}") from None


def queue_name(name: str) -> str:
    """A queue's name as it is on the wire, where absent and empty are the same."""
    if not name:
        raise InvalidArgumentError("the call names no queue")
    return name
