"""The kinds of gRPC methods. Handlers receive and return serialized messages."""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator, Callable, Coroutine
from typing import TYPE_CHECKING, Any

from basaltmq.protocols.grpc.server.immediate_future import ImmediateFuture

if TYPE_CHECKING:
    from basaltmq.protocols.grpc.server.call import Call

Response = bytes | ImmediateFuture[Any] | Coroutine[Any, Any, Any]
"""The response itself, a future, or a coroutine that runs as its own task."""


class Unary:
    """One request, one response."""

    __slots__ = ("encode", "handle", "takes_views")

    def __init__(
        self, handle: Callable[[Any, Call], Response], encode: Callable[[Any], bytes], *, takes_views: bool = False
    ) -> None:
        """`encode` serializes the result of a future or a coroutine. With `takes_views` the handler receives a large
        request as a view, which it must not keep. Otherwise it receives bytes."""
        self.handle = handle
        self.encode = encode
        self.takes_views = takes_views


class ServerStreaming:
    """One request, a stream of responses."""

    __slots__ = ("handle",)

    def __init__(self, handle: Callable[[bytes, Call], AsyncGenerator[bytes, None]]) -> None:
        self.handle = handle


class BidiStreaming:
    """A stream of requests, a stream of responses."""

    __slots__ = ("handle",)

    def __init__(self, handle: Callable[[AsyncIterator[bytes], Call], AsyncGenerator[bytes, None]]) -> None:
        self.handle = handle


Method = Unary | ServerStreaming | BidiStreaming
