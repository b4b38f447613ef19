"""The streaming Produce call: batches in, confirms out, in the same order.

    client ──> read a batch ──> gathered (`broker/publishing/tick.py`) ──> in flight ──> confirm in order ──> client
                   ^                                            │
                   └────────── read on only while the batches in flight fit the window

The window provides backpressure. Once it is full the server stops reading, the HTTP/2 window fills up, and the client's
writes block. The response to a refused batch is its error, and the stream continues.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import suppress
from typing import Final

from basaltmq.errors import BasaltError
from basaltmq.protocols.grpc.services.access import Caller
from basaltmq.protocols.grpc.services.basalt.drafts import drafts_of
from basaltmq.protocols.grpc.services.method_factory import queue_name
from basaltmq.protocols.grpc.services.queue_owner import QueueOwner
from basaltmq.wire import basalt_pb2 as wire

WINDOW_BATCHES: Final = 64
"""Batches of one stream that wait for the sync: several syncs of a busy producer."""

WINDOW_BYTES: Final = 8 << 20
"""Bytes of these batches: the memory that one stream may use in the server."""


class _InFlight:
    """A batch that waits for the sync."""

    __slots__ = ("future", "number", "size_bytes")

    def __init__(self, number: int, future: asyncio.Future[list[bytes]], size_bytes: int) -> None:
        self.number = number
        self.future = future
        self.size_bytes = size_bytes


class Produce:
    """Handler of the Produce call."""

    def __init__(self, owner: QueueOwner) -> None:
        self._owner = owner

    async def run(
        self, requests: AsyncIterator[wire.ProduceRequest], caller: Caller
    ) -> AsyncGenerator[wire.ProduceResponse, None]:
        loop = asyncio.get_running_loop()
        in_flight: asyncio.Queue[_InFlight | None] = asyncio.Queue()
        room = asyncio.Event()
        held_bytes = 0

        async def read() -> None:
            nonlocal held_bytes
            try:
                async for request in requests:
                    size_bytes = request.ByteSize()
                    try:
                        future = self._begin(request.batch, caller)
                    except BasaltError as error:
                        future = loop.create_future()
                        future.set_exception(error)
                    # Retrieve the error even if the client disconnects, so that asyncio does not log it.
                    future.add_done_callback(_retrieve_error)
                    held_bytes += size_bytes
                    in_flight.put_nowait(_InFlight(request.number, future, size_bytes))
                    while in_flight.qsize() >= WINDOW_BATCHES or held_bytes >= WINDOW_BYTES:
                        room.clear()
                        await room.wait()
            finally:
                in_flight.put_nowait(None)

        reading = asyncio.ensure_future(read())
        try:
            while (batch := await in_flight.get()) is not None:
                try:
                    yield wire.ProduceResponse(number=batch.number, ids=await batch.future)
                except BasaltError as error:
                    self._owner.failed(error)
                    yield wire.ProduceResponse(number=batch.number, error_code=error.code, error_text=str(error))
                held_bytes -= batch.size_bytes
                room.set()
            await reading
        finally:
            reading.cancel()
            with suppress(asyncio.CancelledError, Exception):
                await reading

    def _begin(self, batch: wire.EnqueueBatchRequest, caller: Caller) -> asyncio.Future[list[bytes]]:
        queue = queue_name(batch.queue)
        caller.require("produce", queue)
        future: asyncio.Future[list[bytes]] = asyncio.get_running_loop().create_future()
        self._owner.enqueue(queue, drafts_of(batch), future)
        return future


def _retrieve_error(future: asyncio.Future[list[bytes]]) -> None:
    if not future.cancelled():
        future.exception()
