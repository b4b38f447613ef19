"""What a server can be called for. Handlers get bytes and give bytes; what is in them is their business."""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator, Callable, Coroutine
from typing import TYPE_CHECKING, Any

from basaltmq.protocols.grpc.server.immediate_future import Later

if TYPE_CHECKING:
    from basaltmq.protocols.grpc.server.call import Call

Answer = bytes | Later[Any] | Coroutine[Any, Any, Any]
"""At once, when something else has happened, or by a coroutine, which runs as a task of its own."""


class Unary:
    """One request, one answer."""

    __slots__ = ("encode", "handle", "takes_views")

    def __init__(
        self, handle: Callable[[Any, Call], Answer], encode: Callable[[Any], bytes], *, takes_views: bool = False
    ) -> None:
        """`encode` makes the answer of what came later or a coroutine gave. A handler that takes views gets a large
        request as it was read, and may not keep it; others get bytes."""
        self.handle = handle
        self.encode = encode
        self.takes_views = takes_views


class AnswerStream:
    """One request, many answers."""

    __slots__ = ("handle",)

    def __init__(self, handle: Callable[[bytes, Call], AsyncGenerator[bytes, None]]) -> None:
        self.handle = handle


class BothStreams:
    """Many requests, many answers."""

    __slots__ = ("handle",)

    def __init__(self, handle: Callable[[AsyncIterator[bytes], Call], AsyncGenerator[bytes, None]]) -> None:
        self.handle = handle


Method = Unary | AnswerStream | BothStreams
