"""A stream of batches to one queue, confirmed one by one.

    with client.producer("jobs") as producer:
        confirms = [producer.send(batch) for batch in batches]
    ids = [confirm.result() for confirm in confirms]

`send` returns a future at once while fewer than `WINDOW` batches are in flight; otherwise it blocks until one is
confirmed. This is the backpressure of the broker's disk. Leaving the `with` block waits for all batches.
"""

from __future__ import annotations

import asyncio
import queue
import threading
from collections.abc import Sequence
from concurrent.futures import CancelledError, Future
from typing import Final, Self

from basaltmq.client import channel as calls
from basaltmq.client.error_mapping import error_of_code
from basaltmq.client.loop_thread import LoopThread
from basaltmq.client.requests import Payload, batch_of
from basaltmq.errors import BasaltError, InvalidArgumentError, UnavailableError
from basaltmq.protocols.grpc.client.call import ClientCall
from basaltmq.protocols.grpc.client.channel import Channel
from basaltmq.wire import basalt_pb2 as wire

WINDOW: Final = 64
"""Batches in flight; the server accepts as many from one stream before it waits for the disk."""


class Producer:
    """Sends batches. Thread-safe."""

    def __init__(self, queue_name: str, channel: Channel, loop_thread: LoopThread) -> None:
        self._queue = queue_name
        self._channel = channel
        self._room = threading.Semaphore(WINDOW)
        self._lock = threading.Lock()
        self._loop_thread = loop_thread
        self._outbox: asyncio.Queue[bytes | None] = asyncio.Queue()
        """Used only in the loop's thread."""
        self._inbox: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
        self._waiting: dict[int, Future[list[bytes]]] = {}
        self._last = 0
        self._error: BasaltError | None = None
        self._is_closed = False
        self._stream = loop_thread.submit(self._exchange())
        self._stream.add_done_callback(lambda _: self._inbox.put(None))
        self._thread = threading.Thread(target=self._receive, name=f"basalt-produce-{queue_name}", daemon=True)
        self._thread.start()

    def send(self, messages: Sequence[Payload]) -> Future[list[bytes]]:
        """Add messages, all or none. The future returns their ids when they are as durable as the queue requires."""
        batch = batch_of(self._queue, messages)
        self._room.acquire()
        future: Future[list[bytes]] = Future()
        with self._lock:
            if self._is_closed or self._error is not None:
                self._room.release()
                if self._is_closed:
                    raise InvalidArgumentError("the producer is closed; create another")
                assert self._error is not None
                raise self._error
            self._last += 1
            self._waiting[self._last] = future
            request = wire.ProduceRequest(number=self._last, batch=batch)
            self._loop_thread.call_soon(self._outbox.put_nowait, request.SerializeToString())
        return future

    def close(self) -> None:
        """Wait until all batches are confirmed or rejected."""
        with self._lock:
            self._is_closed = True
            self._loop_thread.call_soon(self._outbox.put_nowait, None)
        self._thread.join()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    async def _exchange(self) -> None:
        """Send requests and receive responses, in the loop's thread."""
        call = await self._channel.stream(calls.PRODUCE)
        sending = asyncio.ensure_future(self._send_all(call))
        try:
            async for response in call:
                self._inbox.put(response)
        finally:
            sending.cancel()
            call.cancel()

    async def _send_all(self, call: ClientCall) -> None:
        while (request := await self._outbox.get()) is not None:
            await call.send(request)
        call.end()

    def _receive(self) -> None:
        """Complete the futures in another thread, because their callbacks may block."""
        while (raw := self._inbox.get()) is not None:
            response = wire.ProduceResponse.FromString(raw)
            with self._lock:
                future = self._waiting.pop(response.number)
            self._room.release()
            if response.error_code:
                future.set_exception(error_of_code(response.error_code, response.error_text))
            else:
                future.set_result(list(response.ids))
        error: BasaltError = UnavailableError("the broker ended the stream")
        try:
            self._loop_thread.wait(self._stream)
        except BasaltError as failure:
            error = failure
        except CancelledError:
            error = UnavailableError("the client is closed")
        with self._lock:
            self._error = error
            left = list(self._waiting.values())
            self._waiting.clear()
        for future in left:
            # Whether the queue has the batch is unknown.
            future.set_exception(error)
            self._room.release()
