"""Consume streams: messages pushed to a client, and who holds which.

On this wire an ack names a queue and a message, nothing else. Who may answer for a message is therefore decided by the
connection: the one a stream runs on, as gRPC names it. A message that was delivered again, over another connection, is
fenced from the first one's late ack: it is refused with NOT_FOUND, and so is an ack for a lease that is over. What
cannot be told apart is two streams of one connection: they count as one consumer. (gRPC lets clients of one process
share a connection to one address.)

A stream leases a few messages at a time and sends one after the other; the transport takes the next when the client has
room for it. So what waits in the server for a slow client is bounded by one small lease. If the client does not take it
for `STALL_S`, what was not sent goes back to the queue, and the stream waits its turn behind those who do.

When a stream ends, for whatever reason, everything it holds goes back to its place at once. No attempt is counted. So
what a stream leases needs no row: the plane holds it for as long as the process lives, and a crash of the broker, which
ends all streams, gives all of it back too. The queue's visibility timeout is kept here: a message that is not answered
for in time has failed, like one whose lease expired.
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
from basaltmq.protocols.grpc.services.waiting_consumers import Party, Takers
from basaltmq.queues.leases.delivery import Delivery
from basaltmq.queues.lifecycle.failures import LEASE_EXPIRED
from basaltmq.queues.plane import QueuePlane

BATCH_MAX: Final = 32
"""Messages leased at once for a stream: the cost of a lease is shared, and a client that dies takes few along."""

BATCH_BYTES: Final = 1 << 20
"""What a lease for a stream should hold at most; the sizes seen last say how many messages that are."""

STALL_S: Final = 2.0
"""Without a sign of the client taking more, until what waits for it is given to others."""

RETRY_S: Final = 1.0
"""Before a lease that is over and could not be ended is looked at again."""

AckFrom = Literal["holder", "any"]
"""Who may answer for a message: the connection it was delivered on, or any."""


_log = logging.getLogger("basaltmq")


class Stream(Party):
    """One Consume call."""

    __slots__ = ("caller", "consumer", "leases", "queue", "refusal", "size_bytes")

    def __init__(self, queue: str, caller: Caller, consumer: str) -> None:
        super().__init__()
        self.queue = queue
        self.caller = caller
        self.consumer = consumer
        self.refusal: BasaltError | None = None
        """Why it may not go on."""
        self.leases: dict[int, set[bytes]] = {}
        """By token: the messages that are not answered for."""
        self.size_bytes = BATCH_BYTES
        """The largest message seen of late; the first lease is for one, to see."""

    def count(self) -> int:
        """How many messages to lease."""
        return max(1, min(BATCH_MAX, BATCH_BYTES // max(1, self.size_bytes)))


class _Held:
    """Who holds a message."""

    __slots__ = ("stream", "token")

    def __init__(self, stream: Stream, token: int) -> None:
        self.stream = stream
        self.token = token


class Streams:
    """All Consume calls of a server."""

    def __init__(
        self,
        plane: QueuePlane,
        takers: Takers,
        loop: asyncio.AbstractEventLoop,
        *,
        ack_from: AckFrom = "holder",
    ) -> None:
        self._plane = plane
        self._takers = takers
        self._loop = loop
        self._ack_from = ack_from
        self._held: dict[tuple[str, bytes], _Held] = {}
        self._deadlines: list[tuple[float, int, Stream]] = []
        self._timer: asyncio.TimerHandle | None = None
        self._streams: dict[Stream, None] = {}
        self._last = 0
        self._is_closing = False

    def __len__(self) -> int:
        return len(self._streams)

    @property
    def held(self) -> int:
        """Messages that are with clients."""
        return len(self._held)

    async def consume(self, queue: str, caller: Caller) -> AsyncGenerator[Delivery, None]:
        """Messages of a queue for one client, until it goes away. Raises when the queue is gone or it may not go on."""
        self._plane.get(queue)
        self._last += 1
        stream = Stream(queue, caller, f"{caller.peer}#{self._last}")
        self._streams[stream] = None
        self._takers.join(queue, stream)
        try:
            while True:
                self._require_going_on(stream)
                batch = await self._takers.take(
                    queue, stream.count(), consumer=stream.consumer, visibility_ms=0, party=stream
                )
                self._hold(stream, batch)
                watch = self._loop.call_later(STALL_S, self._stalled, stream, batch)
                try:
                    while batch:
                        yield batch[0]
                        # The transport has taken it; while it did not, others may have got what is behind it.
                        del batch[:1]
                        self._require_going_on(stream)
                finally:
                    watch.cancel()
                    if stream.is_stalled:
                        stream.is_stalled = False
                        self._takers.lighter(queue)
        finally:
            self._end(stream)

    def _require_going_on(self, stream: Stream) -> None:
        if self._is_closing:
            raise StoreClosedError("the broker is stopping; connect again")
        if stream.refusal is not None:
            raise stream.refusal

    def _hold(self, stream: Stream, batch: Sequence[Delivery]) -> None:
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
        """Come back when the first lease is over."""
        if not self._deadlines:
            return
        if self._timer is not None:
            if self._timer.when() <= self._deadlines[0][0]:
                return
            self._timer.cancel()
        self._timer = self._loop.call_at(self._deadlines[0][0], self._expire)

    def _expire(self) -> None:
        """Messages that were not answered for in time have failed."""
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
                # Gone with its queue, or about to be with the process.
                pass
            except BasaltError as error:
                _log.warning("a lease of queue %r that is over could not be ended: %s", stream.queue, error)
                heappush(self._deadlines, (now_s + RETRY_S, token, stream))
                break
            for message_id in list(ids):
                self._let_go(stream.queue, message_id)
        self._arm()

    def _let_go(self, queue: str, message_id: bytes) -> None:
        """A message is no longer with its stream."""
        held = self._held.pop((queue, message_id))
        stream = held.stream
        ids = stream.leases[held.token]
        ids.discard(message_id)
        if not ids:
            del stream.leases[held.token]
        stream.load -= 1
        self._takers.lighter(queue)

    def _stalled(self, stream: Stream, batch: list[Delivery]) -> None:
        """The client takes nothing: what is behind the message it was sent goes to others."""
        stream.is_stalled = True
        rest = [each for each in batch[1:] if each.id in stream.leases.get(each.token, ())]
        del batch[1:]
        if rest:
            self._release(stream.queue, rest[0].token, [each.id for each in rest])
            for each in rest:
                self._let_go(stream.queue, each.id)
        self._takers.lighter(stream.queue)

    def settle(self, queue: str, message_id: bytes, caller: Caller, settle: Callable[[int], object]) -> None:
        """Answer for a message with `settle(token)`; MessageNotFoundError if it is not this caller's to answer for."""
        held = self._held.get((queue, message_id))
        if held is None or (self._ack_from == "holder" and held.stream.caller.peer != caller.peer):
            self._plane.get(queue)
            raise MessageNotFoundError(_not_held(queue, message_id))
        try:
            settle(held.token)
        except StaleLeaseError:
            self._let_go(queue, message_id)
            raise MessageNotFoundError(_not_held(queue, message_id)) from None
        self._let_go(queue, message_id)

    def recheck(self) -> None:
        """Keys may do less than before: end the streams that may not go on."""
        for stream in list(self._streams):
            try:
                stream.caller.require("consume", stream.queue)
            except BasaltError as refusal:
                stream.refusal = refusal
                self._takers.refuse(stream.queue, stream, refusal)

    def close(self) -> None:
        """End all streams."""
        self._is_closing = True
        if self._timer is not None:
            self._timer.cancel()
        for stream in list(self._streams):
            self._takers.refuse(stream.queue, stream, StoreClosedError("the broker is stopping; connect again"))

    def _end(self, stream: Stream) -> None:
        del self._streams[stream]
        for token, ids in stream.leases.items():
            for message_id in ids:
                del self._held[stream.queue, message_id]
            self._release(stream.queue, token, None)
        stream.leases.clear()
        self._takers.leave(stream.queue, stream)

    def _release(self, queue: str, token: int, ids: Sequence[bytes] | None) -> None:
        try:
            self._plane.release(queue, token, ids)
        except StoreStalledError:
            self._loop.call_later(RETRY_S, self._release, queue, token, ids)
        except BasaltError:
            # Given back already, gone with its queue, or about to be given back by a store that is opened again.
            return


def _not_held(queue: str, message_id: bytes) -> str:
    return (
        f"message {format_id(message_id)} of queue {queue!r} is not leased to this connection: it was answered for, "
        "its lease is over, or another consumer has it"
    )
