"""Consume streams: messages pushed to a client, and who holds which.

On this wire an ack names a queue and a message, nothing else. Who may answer for a message is therefore decided by the
connection: the one a stream runs on, as gRPC names it. A message that was delivered again, over another connection, is
fenced from the first one's late ack: it is refused with NOT_FOUND, and so is an ack for a lease that is over. What
cannot be told apart is two streams of one connection: they count as one consumer. (gRPC lets clients of one process
share a connection to one address.)

A stream leases a few messages at a time and sends one after the other; the transport takes the next when the client has
room for it. So what waits in the server for a slow client is bounded by one small lease. If the client does not take it
for `STALL_S`, what was not sent goes back to the queue, and the stream waits its turn behind those who do.

When a stream ends, for whatever reason, everything it holds goes back to its place at once. No attempt is counted.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import suppress
from typing import Final, Literal

from basaltmq.errors import BasaltError, MessageNotFoundError, NotFoundError, StaleLeaseError, StoreClosedError
from basaltmq.ids import format_id
from basaltmq.protocols.fila.access import Caller
from basaltmq.protocols.fila.takers import Party, Takers
from basaltmq.queues.delivery import Delivery
from basaltmq.queues.plane import QueuePlane

BATCH_MAX: Final = 32
"""Messages leased at once for a stream: the cost of a lease is shared, and a client that dies takes few along."""

BATCH_BYTES: Final = 1 << 20
"""What a lease for a stream should hold at most; the sizes seen last say how many messages that are."""

STALL_S: Final = 2.0
"""Without a sign of the client taking more, until what waits for it is given to others."""

AckFrom = Literal["holder", "any"]
"""Who may answer for a message: the connection it was delivered on, or any."""


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
        self.leases: OrderedDict[int, tuple[int, set[bytes]]] = OrderedDict()
        """By token: when the lease is over, and the messages that are not answered for."""
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
        clock_ns: Callable[[], int],
        *,
        ack_from: AckFrom = "holder",
    ) -> None:
        self._plane = plane
        self._takers = takers
        self._loop = loop
        self._clock_ns = clock_ns
        self._ack_from = ack_from
        self._held: dict[tuple[str, bytes], _Held] = {}
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
                batch = await self._takers.take(queue, stream.count(), consumer=stream.consumer, party=stream)
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
        self._forget_over(stream)
        visibility_ms = self._plane.get(stream.queue).visibility_timeout_ms
        stream.leases[token] = (self._clock_ns() + visibility_ms * 1_000_000, {each.id for each in batch})
        stream.load += len(batch)
        size_bytes = max(len(each.row) + len(each.body or b"") for each in batch)
        stream.size_bytes = max(size_bytes, stream.size_bytes // 2)
        for each in batch:
            place = (stream.queue, each.id)
            before = self._held.get(place)
            if before is not None:
                self._let_go(before, each.id)
            self._held[place] = _Held(stream, token)

    def _forget_over(self, stream: Stream) -> None:
        """Leases that have run out are the queue's again, and so is what nobody answered for."""
        now_ns = self._clock_ns()
        while stream.leases:
            token, (expires_ns, ids) = next(iter(stream.leases.items()))
            if expires_ns > now_ns:
                return
            del stream.leases[token]
            stream.load -= len(ids)
            for message_id in ids:
                self._drop((stream.queue, message_id), token)

    def _drop(self, place: tuple[str, bytes], token: int) -> None:
        held = self._held.get(place)
        if held is not None and held.token == token:
            del self._held[place]

    def _let_go(self, held: _Held, message_id: bytes) -> None:
        """A message is no longer with its stream."""
        stream = held.stream
        lease = stream.leases.get(held.token)
        if lease is not None and message_id in lease[1]:
            lease[1].discard(message_id)
            if not lease[1]:
                del stream.leases[held.token]
            stream.load -= 1
            self._takers.lighter(stream.queue)

    def _stalled(self, stream: Stream, batch: list[Delivery]) -> None:
        """The client takes nothing: what is behind the message it was sent goes to others."""
        stream.is_stalled = True
        rest = batch[1:]
        del batch[1:]
        if rest:
            self._release(stream.queue, rest[0].token, [each.id for each in rest])
            for each in rest:
                held = self._held.pop((stream.queue, each.id), None)
                if held is not None:
                    self._let_go(held, each.id)
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
            self._held.pop((queue, message_id), None)
            self._let_go(held, message_id)
            raise MessageNotFoundError(_not_held(queue, message_id)) from None
        del self._held[queue, message_id]
        self._let_go(held, message_id)

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
        for stream in list(self._streams):
            self._takers.refuse(stream.queue, stream, StoreClosedError("the broker is stopping; connect again"))

    def _end(self, stream: Stream) -> None:
        del self._streams[stream]
        for token, (_, ids) in stream.leases.items():
            for message_id in ids:
                self._drop((stream.queue, message_id), token)
            self._release(stream.queue, token, None)
        self._takers.leave(stream.queue, stream)

    def _release(self, queue: str, token: int, ids: Sequence[bytes] | None) -> None:
        # A lease that ran out was given back, a queue that is gone needs nothing, a store that closes gives all back.
        with suppress(StaleLeaseError, NotFoundError, StoreClosedError):
            self._plane.release(queue, token, ids)


def _not_held(queue: str, message_id: bytes) -> str:
    return (
        f"message {format_id(message_id)} of queue {queue!r} is not leased to this connection: it was answered for, "
        "its lease is over, or another consumer has it"
    )
