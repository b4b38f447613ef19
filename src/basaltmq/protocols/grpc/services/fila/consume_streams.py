"""Consume streams: pushes messages to clients and tracks which stream holds which message.

An ack of this protocol contains only a queue and a message id. The connection therefore decides who may settle a
message: the one that its stream runs on. A late ack for a message that was redelivered over another connection gets
NOT_FOUND, and so does an ack for an expired lease. Two streams of one connection count as one
consumer. (gRPC lets clients of one process share a connection to one address.)

A stream leases a few messages at a time and sends them one by one, as the client's window allows. A slow client thus
delays at most one small lease. If the client reads nothing for `STALL_S`, the unsent messages return to the queue, and
the stream yields to consumers that read.

When a stream ends, all its messages return to their places at once, without counting an attempt. Its leases therefore
need no row: the plane keeps them in memory, and a crash of the broker also releases them. This module enforces the
queue's visibility timeout: a message that is not settled in time counts as failed, like one whose lease expired.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Callable, Sequence
from heapq import heappop, heappush
from typing import Final, Literal

from basaltmq.errors import (
    BasaltError,
    MessageNotFoundError,
    NotFoundError,
    StaleLeaseError,
    StoreClosedError,
    StoreStalledError,
)
from basaltmq.ids import format_id
from basaltmq.protocols.grpc.services.access import Caller
from basaltmq.protocols.grpc.services.waiting_consumers import PushConsumer, WaitingConsumers
from basaltmq.queues.leases.delivery import Delivery
from basaltmq.queues.lifecycle.failures import LEASE_EXPIRED
from basaltmq.queues.plane import QueuePlane

BATCH_MAX: Final = 32
"""Messages per lease of a stream: shares the cost of a lease, and a client that dies holds few messages."""

BATCH_BYTES: Final = 1 << 20
"""Target size of a stream's lease. The sizes of recent messages determine the number of messages."""

STALL_S: Final = 2.0
"""Time without progress of the client, in seconds, after which its unsent messages are released."""

RETRY_S: Final = 1.0
"""Delay before retrying to end an expired lease."""

AckFrom = Literal["holder", "any"]
"""Who may settle a message: the connection that received it, or any."""


_log = logging.getLogger("basaltmq")


class ConsumeStream(PushConsumer):
    """One Consume call."""

    __slots__ = ("caller", "consumer", "leases", "queue", "refusal", "size_bytes")

    def __init__(self, queue: str, caller: Caller, consumer: str) -> None:
        super().__init__()
        self.queue = queue
        self.caller = caller
        self.consumer = consumer
        self.refusal: BasaltError | None = None
        """The error that ends the stream, if its permission was revoked."""
        self.leases: dict[int, set[bytes]] = {}
        """Unsettled message ids by token."""
        self.size_bytes = BATCH_BYTES
        """Largest recent message size. The initial value limits the first lease to one message."""

    def count(self) -> int:
        """Return how many messages to lease."""
        return max(1, min(BATCH_MAX, BATCH_BYTES // max(1, self.size_bytes)))


class _Held:
    """The stream and the lease token of a held message."""

    __slots__ = ("stream", "token")

    def __init__(self, stream: ConsumeStream, token: int) -> None:
        self.stream = stream
        self.token = token


class ConsumeStreams:
    """All Consume calls of a server."""

    def __init__(
        self,
        plane: QueuePlane,
        consumers: WaitingConsumers,
        loop: asyncio.AbstractEventLoop,
        *,
        ack_from: AckFrom = "holder",
    ) -> None:
        self._plane = plane
        self._consumers = consumers
        self._loop = loop
        self._ack_from = ack_from
        self._held: dict[tuple[str, bytes], _Held] = {}
        self._deadlines: list[tuple[float, int, ConsumeStream]] = []
        self._timer: asyncio.TimerHandle | None = None
        self._streams: dict[ConsumeStream, None] = {}
        self._last = 0
        self._is_closing = False

    def __len__(self) -> int:
        return len(self._streams)

    @property
    def held(self) -> int:
        """Number of messages that clients hold."""
        return len(self._held)

    async def consume(self, queue: str, caller: Caller) -> AsyncGenerator[Delivery, None]:
        """Yield messages of a queue to one client. Raise when the queue is deleted or access is revoked."""
        self._plane.get(queue)
        self._last += 1
        stream = ConsumeStream(queue, caller, f"{caller.peer}#{self._last}")
        self._streams[stream] = None
        self._consumers.join(queue, stream)
        try:
            while True:
                self._require_open(stream)
                batch = await self._consumers.take(
                    queue, stream.count(), consumer=stream.consumer, visibility_ms=0, push_consumer=stream
                )
                self._hold(stream, batch)
                watch = self._loop.call_later(STALL_S, self._stalled, stream, batch)
                try:
                    while batch:
                        yield batch[0]
                        # The transport accepted the message. Meanwhile `_stalled` may have released those behind it.
                        del batch[:1]
                        self._require_open(stream)
                finally:
                    watch.cancel()
                    if stream.is_stalled:
                        stream.is_stalled = False
                        self._consumers.load_decreased(queue)
        finally:
            self._end(stream)

    def _require_open(self, stream: ConsumeStream) -> None:
        if self._is_closing:
            raise StoreClosedError("the broker is stopping; connect again")
        if stream.refusal is not None:
            raise stream.refusal

    def _hold(self, stream: ConsumeStream, batch: Sequence[Delivery]) -> None:
        token = batch[0].token
        stream.leases[token] = {each.id for each in batch}
        stream.load += len(batch)
        size_bytes = max(len(each.row) + len(each.body or b"") for each in batch)
        stream.size_bytes = max(size_bytes, stream.size_bytes // 2)
        for each in batch:
            self._held[stream.queue, each.id] = _Held(stream, token)
        visibility_s = self._plane.get(stream.queue).visibility_timeout_ms / 1000
        heappush(self._deadlines, (self._loop.time() + visibility_s, token, stream))
        self._arm()

    def _arm(self) -> None:
        """Set the timer for the first lease deadline."""
        if not self._deadlines:
            return
        if self._timer is not None:
            if self._timer.when() <= self._deadlines[0][0]:
                return
            self._timer.cancel()
        self._timer = self._loop.call_at(self._deadlines[0][0], self._expire)

    def _expire(self) -> None:
        """Nack the messages of expired leases."""
        self._timer = None
        now_s = self._loop.time()
        while self._deadlines and self._deadlines[0][0] <= now_s:
            _, token, stream = heappop(self._deadlines)
            ids = stream.leases.get(token)
            if not ids:
                continue
            try:
                self._plane.nack(stream.queue, token, list(ids), error=LEASE_EXPIRED)
            except (StaleLeaseError, NotFoundError, StoreClosedError):
                # The queue is deleted, or the store is closing.
                pass
            except BasaltError as error:
                _log.warning("cannot end an expired lease of queue %r, will retry: %s", stream.queue, error)
                heappush(self._deadlines, (now_s + RETRY_S, token, stream))
                break
            for message_id in list(ids):
                self._drop(stream.queue, message_id)
        self._arm()

    def _drop(self, queue: str, message_id: bytes) -> None:
        """Remove a message from its stream."""
        held = self._held.pop((queue, message_id))
        stream = held.stream
        ids = stream.leases[held.token]
        ids.discard(message_id)
        if not ids:
            del stream.leases[held.token]
        stream.load -= 1
        self._consumers.load_decreased(queue)

    def _stalled(self, stream: ConsumeStream, batch: list[Delivery]) -> None:
        """Release the messages behind the one that the client does not read."""
        stream.is_stalled = True
        rest = [each for each in batch[1:] if each.id in stream.leases.get(each.token, ())]
        del batch[1:]
        if rest:
            self._release(stream.queue, rest[0].token, [each.id for each in rest])
            for each in rest:
                self._drop(stream.queue, each.id)
        self._consumers.load_decreased(stream.queue)

    def settle(self, queue: str, message_id: bytes, caller: Caller, settle: Callable[[int], object]) -> None:
        """Call `settle(token)` for a message. Raise MessageNotFoundError if the caller does not hold it."""
        held = self._held.get((queue, message_id))
        if held is None or (self._ack_from == "holder" and held.stream.caller.peer != caller.peer):
            self._plane.get(queue)
            raise MessageNotFoundError(_not_held(queue, message_id))
        try:
            settle(held.token)
        except StaleLeaseError:
            self._drop(queue, message_id)
            raise MessageNotFoundError(_not_held(queue, message_id)) from None
        self._drop(queue, message_id)

    def recheck(self) -> None:
        """End the streams whose caller has lost its permission."""
        for stream in list(self._streams):
            try:
                stream.caller.require("consume", stream.queue)
            except BasaltError as refusal:
                stream.refusal = refusal
                self._consumers.refuse(stream.queue, stream, refusal)

    def close(self) -> None:
        """End all streams."""
        self._is_closing = True
        if self._timer is not None:
            self._timer.cancel()
        for stream in list(self._streams):
            self._consumers.refuse(stream.queue, stream, StoreClosedError("the broker is stopping; connect again"))

    def _end(self, stream: ConsumeStream) -> None:
        del self._streams[stream]
        for token, ids in stream.leases.items():
            for message_id in ids:
                del self._held[stream.queue, message_id]
            self._release(stream.queue, token, None)
        stream.leases.clear()
        self._consumers.leave(stream.queue, stream)

    def _release(self, queue: str, token: int, ids: Sequence[bytes] | None) -> None:
        try:
            self._plane.release(queue, token, ids)
        except StoreStalledError:
            self._loop.call_later(RETRY_S, self._release, queue, token, ids)
        except BasaltError:
            # Already released, the queue is deleted, or the store releases it when it reopens.
            return


def _not_held(queue: str, message_id: bytes) -> str:
    return (
        f"message {format_id(message_id)} of queue {queue!r} is not leased to this connection: it was already settled, "
        "its lease expired, or another consumer holds it"
    )
