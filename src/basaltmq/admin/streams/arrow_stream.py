"""Answers that are Arrow IPC streams, made slice by slice while the client takes them.

    look in a thread ─> a slice of a few MiB ─> the socket takes it ─> the next look

The loop only hands slices on, so messages wait for no reader. Memory is bounded by the slices of the readers there may
be at once; processor time by the looks there may be at once, for which readers queue. A reader that stops taking holds
one slice until the server cuts it.

The first slice is made before the status is sent, so that what is wrong at once is told as an error. What goes wrong
later cuts the answer: the client asks again from where it is, and is told then.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Final

from basaltmq.admin.http.message import HttpError, Response
from basaltmq.broker.guard import Guard
from basaltmq.broker.vhost import VHost

if TYPE_CHECKING:
    import pyarrow as pa

CONTENT_TYPE: Final = "application/vnd.apache.arrow.stream"

STREAMS_MAX: Final = 64
"""Readers at once: with a slice of 2 MiB each and its copy in the socket's buffer, a quarter of a gigabyte."""

LOOKS_MAX: Final = 2
"""Looks into stores at once: they share the interpreter with the loop."""

END_OF_STREAM: Final = b"\xff\xff\xff\xff\0\0\0\0"
"""What ends an IPC stream: a reader that misses it has not seen all."""


class ArrowStreams:
    """Serves streams of record batches."""

    def __init__(self) -> None:
        self.looks = asyncio.Semaphore(LOOKS_MAX)
        self.open = 0

    async def answer(
        self, vhost: VHost, schema: pa.Schema, batches: Iterator[pa.RecordBatch], close: Callable[[], None]
    ) -> Response:
        """Stream batches, each of which is made in a thread. `close` is called in one when it is over."""
        stream = _Stream(self, vhost, bytes(schema.serialize()), batches, close)
        try:
            if self.open > STREAMS_MAX:
                raise HttpError(
                    503, f"{STREAMS_MAX} readers are being served already; try again", headers={"Retry-After": "1"}
                )
            await stream.begin()
        except BaseException:
            await stream.close()
            raise
        return Response(200, content_type=CONTENT_TYPE, stream=stream)


class _Stream:
    """One answer."""

    def __init__(
        self,
        streams: ArrowStreams,
        vhost: VHost,
        head: bytes,
        batches: Iterator[pa.RecordBatch],
        close: Callable[[], None],
    ) -> None:
        self._streams = streams
        self._vhost = vhost
        self._batches = batches
        self._close = close
        self._ready = [head]
        self._is_over = False
        streams.open += 1

    async def begin(self) -> None:
        self._ready.append(await self._slice())

    async def next(self) -> bytes | None:
        if self._ready:
            return self._ready.pop(0)
        return None if self._is_over else await self._slice()

    async def close(self) -> None:
        self._streams.open -= 1
        await asyncio.shield(asyncio.to_thread(self._close))

    async def _slice(self) -> bytes:
        def look() -> bytes | None:
            batch = next(self._batches, None)
            return None if batch is None else bytes(batch.serialize())

        async with self._streams.looks:
            with Guard(self._vhost):
                piece = await asyncio.to_thread(look)
        self._is_over = piece is None
        return END_OF_STREAM if piece is None else piece


def require_arrow() -> None:
    """Refuse where pyarrow is not installed."""
    try:
        import pyarrow as pa  # noqa: F401
    except ImportError:
        raise HttpError(501, "the broker lacks pyarrow: pip install 'basaltmq[arrow]' where it runs") from None
