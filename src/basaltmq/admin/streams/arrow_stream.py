"""Responses that are Arrow IPC streams, produced slice by slice as the client reads.

    read in a thread ─> a slice of a few MiB ─> the socket accepts it ─> the next read

The event loop only forwards slices. Memory is bounded by the number of concurrent readers, CPU time by the number of
concurrent store reads. A reader that stops reading holds one slice until the server disconnects it.

The first slice is read before the status is sent, so that immediate errors get an error response. A later error cuts
the response. The client then requests the rest and gets the error."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Final

from basaltmq.admin.http.message import HttpError, Response
from basaltmq.broker.guard import Guard
from basaltmq.broker.vhost import VHost
from basaltmq.errors import install_hint

if TYPE_CHECKING:
    import pyarrow as pa

CONTENT_TYPE: Final = "application/vnd.apache.arrow.stream"

STREAMS_MAX: Final = 64
"""Concurrent readers. With a slice of 2 MiB each and its copy in the socket's buffer, 256 MiB."""

READS_MAX: Final = 2
"""Concurrent store reads, because they share the GIL with the event loop."""

END_OF_STREAM: Final = b"\xff\xff\xff\xff\0\0\0\0"
"""The end marker of an IPC stream. A stream without it is incomplete."""


class ArrowStreams:
    """Serves streams of record batches."""

    def __init__(self) -> None:
        self.reads = asyncio.Semaphore(READS_MAX)
        self.open = 0

    async def respond(
        self, vhost: VHost, schema: pa.Schema, batches: Iterator[pa.RecordBatch], close: Callable[[], None]
    ) -> Response:
        """Stream batches, each read in a thread. `close` runs in a thread when the stream ends."""
        stream = _Stream(self, vhost, bytes(schema.serialize()), batches, close)
        try:
            if self.open > STREAMS_MAX:
                raise HttpError(
                    503, f"the limit of {STREAMS_MAX} readers is reached; retry", headers={"Retry-After": "1"}
                )
            await stream.begin()
        except BaseException:
            await stream.close()
            raise
        return Response(200, content_type=CONTENT_TYPE, stream=stream)


class _Stream:
    """One streamed response."""

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
        def read() -> bytes | None:
            batch = next(self._batches, None)
            return None if batch is None else bytes(batch.serialize())

        async with self._streams.reads:
            with Guard(self._vhost):
                piece = await asyncio.to_thread(read)
        self._is_over = piece is None
        return END_OF_STREAM if piece is None else piece


def require_arrow() -> None:
    """Raise HttpError 501 if pyarrow is not installed."""
    try:
        import pyarrow as pa  # noqa: F401
    except ImportError:
        raise HttpError(501, f"the broker needs pyarrow for this: {install_hint('arrow')}") from None
