"""The service basalt.v1.Queues: batches, leases with fencing tokens, long polls."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine, Sequence
from contextlib import suppress
from typing import Any, Final

from basaltmq.clock import NS_PER_MS
from basaltmq.errors import BasaltError, InvalidArgumentError, LimitExceededError, StaleLeaseError, StoreClosedError
from basaltmq.ids import ID_BYTES
from basaltmq.protocols.grpc.http2.events import Chunk
from basaltmq.protocols.grpc.server.immediate_future import ImmediateFuture
from basaltmq.protocols.grpc.server.methods import Method
from basaltmq.protocols.grpc.services.access import Caller, require_dead_letters
from basaltmq.protocols.grpc.services.basalt.drafts import drafts_of
from basaltmq.protocols.grpc.services.basalt.lease_response import lease_response
from basaltmq.protocols.grpc.services.basalt.payloads import payloads_of
from basaltmq.protocols.grpc.services.basalt.produce import Produce
from basaltmq.protocols.grpc.services.basalt.queue_config import config_of
from basaltmq.protocols.grpc.services.basalt.worker_sessions import WorkerSession, WorkerSessions
from basaltmq.protocols.grpc.services.method_factory import MethodFactory, queue_name, read
from basaltmq.protocols.grpc.services.queue_owner import QueueOwner
from basaltmq.protocols.grpc.services.waiting_consumers import WaitingConsumers
from basaltmq.queues.config import DURATION_MS_MAX
from basaltmq.queues.draft import Draft
from basaltmq.queues.leases.delivery import Delivery
from basaltmq.queues.leases.table import LEASE_MAX
from basaltmq.queues.plane import QueuePlane
from basaltmq.wire import basalt_pb2 as wire

SERVICE: Final = "basalt.v1.Queues"

WAIT_MS_MAX: Final = 24 * 3600 * 1000
"""One day. Longer polls are capped."""

CONSUMER_CHARACTERS_MAX: Final = 255
ERROR_CHARACTERS_MAX: Final = 64 << 10


class QueuesService:
    """Handlers of basalt.v1.Queues."""

    def __init__(
        self,
        plane: QueuePlane,
        consumers: WaitingConsumers,
        owner: QueueOwner,
        durable: Callable[[], Awaitable[None]],
        clock_ns: Callable[[], int] = time.time_ns,
    ) -> None:
        """`durable` waits until all previous writes are durable."""
        self._durable = durable
        self._plane = plane
        self._consumers = consumers
        self._owner = owner
        self._clock_ns = clock_ns
        self._sessions = WorkerSessions(plane, clock_ns())
        self._closing = asyncio.Event()

    def methods(self, calls: MethodFactory) -> dict[str, Method]:
        produce = Produce(self._owner)
        return {
            "CreateQueue": calls.unary(wire.CreateQueueRequest, self.create_queue),
            "EnqueueBatch": calls.unary_of_bytes(self.enqueue_batch, _enqueued),
            "Produce": calls.bidi_streaming(wire.ProduceRequest, produce.run),
            "Lease": calls.unary(wire.LeaseRequest, self.lease),
            "AckBatch": calls.unary(wire.AckBatchRequest, self.ack_batch),
            "NackBatch": calls.unary(wire.NackBatchRequest, self.nack_batch),
            "ReleaseBatch": calls.unary(wire.ReleaseBatchRequest, self.release_batch),
            "Extend": calls.unary(wire.ExtendRequest, self.extend),
            "OpenSession": calls.server_streaming(wire.OpenSessionRequest, self.open_session),
        }

    def close(self) -> None:
        """End worker sessions and long polls."""
        self._closing.set()

    async def create_queue(self, request: wire.CreateQueueRequest, caller: Caller) -> wire.CreateQueueResponse:
        name = queue_name(request.name)
        caller.require("admin", name)
        config = config_of(name, request.config)
        require_dead_letters(caller, config, self._plane.get)
        self._owner.create(config)
        await self._durable()
        return wire.CreateQueueResponse()

    def enqueue_batch(self, raw: Chunk, caller: Caller) -> ImmediateFuture[list[bytes]]:
        plain = payloads_of(raw)
        if plain is not None:
            return self._enqueue(*plain, caller)
        request = read(wire.EnqueueBatchRequest, raw)
        return self._enqueue(request.queue, drafts_of(request), caller)

    def _enqueue(self, name: str, drafts: Sequence[Draft | bytes], caller: Caller) -> ImmediateFuture[list[bytes]]:
        queue = queue_name(name)
        caller.require("produce", queue)
        future: ImmediateFuture[list[bytes]] = ImmediateFuture()
        self._owner.enqueue(queue, drafts, future)
        return future

    def lease(self, request: wire.LeaseRequest, caller: Caller) -> bytes | Coroutine[Any, Any, bytes]:
        queue = queue_name(request.queue)
        caller.require("consume", queue)
        self._owner.check(queue)
        count = request.max or 1
        if count > LEASE_MAX:
            raise LimitExceededError(f"a lease of {count} messages exceeds the limit of {LEASE_MAX} per call")
        if len(request.consumer) > CONSUMER_CHARACTERS_MAX:
            raise InvalidArgumentError(f"a consumer name must have at most {CONSUMER_CHARACTERS_MAX} characters")
        session = self._sessions.require(request.session, caller.peer) if request.session else None
        visibility_ms = _visibility_ms(request.visibility_ms) or self._plane.get(queue).visibility_timeout_ms
        consumer = request.consumer or caller.peer
        found = self._consumers.take_ready(queue, count, consumer=consumer, visibility_ms=visibility_ms)
        if found or not request.wait_ms:
            return self._leased(queue, found, session, visibility_ms)
        wait_ms = min(request.wait_ms, WAIT_MS_MAX)
        return self._lease_later(queue, count, consumer, session, visibility_ms, wait_ms)

    async def _lease_later(
        self,
        queue: str,
        count: int,
        consumer: str,
        session: WorkerSession | None,
        visibility_ms: int,
        wait_ms: int,
    ) -> bytes:
        found = await self._wait(queue, count, consumer, visibility_ms, wait_ms)
        return self._leased(queue, found, session, visibility_ms)

    def _leased(
        self, queue: str, found: Sequence[Delivery], session: WorkerSession | None, visibility_ms: int
    ) -> bytes:
        if not found:
            return b""
        token = found[0].token
        if session is not None:
            if session.number not in self._sessions:
                with suppress(BasaltError):
                    self._plane.release(queue, token)
                return b""
            now_ns = self._clock_ns()
            self._sessions.sweep(session, now_ns)
            self._sessions.leased(session, queue, token, len(found), now_ns + visibility_ms * NS_PER_MS)
        return lease_response(found, visibility_ms)

    async def _wait(self, queue: str, count: int, consumer: str, visibility_ms: int, wait_ms: int) -> list[Delivery]:
        taking = asyncio.ensure_future(
            self._consumers.take(queue, count, consumer=consumer, visibility_ms=visibility_ms, timeout_s=wait_ms / 1000)
        )
        closing = asyncio.ensure_future(self._closing.wait())
        try:
            await asyncio.wait((taking, closing), return_when=asyncio.FIRST_COMPLETED)
            if not taking.done():
                raise StoreClosedError("the broker is stopping; connect again")
            return taking.result()
        except asyncio.CancelledError:
            if taking.done() and not taking.cancelled() and taking.exception() is None:
                for delivery in taking.result()[:1]:
                    with suppress(BasaltError):
                        self._plane.release(queue, delivery.token)
            raise
        finally:
            closing.cancel()
            taking.cancel()

    def ack_batch(self, request: wire.AckBatchRequest, caller: Caller) -> wire.SettleResponse:
        ids = _ids(request.ids)
        return self._settle(
            request.queue, request.token, caller, lambda queue: self._plane.ack(queue, request.token, ids)
        )

    def nack_batch(self, request: wire.NackBatchRequest, caller: Caller) -> wire.SettleResponse:
        ids = _ids(request.ids)
        if request.delay_ms > DURATION_MS_MAX:
            raise InvalidArgumentError(f"the delay must be 0 to {DURATION_MS_MAX} ms, not {request.delay_ms}")
        error = request.error[:ERROR_CHARACTERS_MAX]
        return self._settle(
            request.queue,
            request.token,
            caller,
            lambda queue: self._plane.nack(
                queue, request.token, ids, error=error, delay_ms=request.delay_ms, reject=request.reject
            ),
        )

    def release_batch(self, request: wire.ReleaseBatchRequest, caller: Caller) -> wire.SettleResponse:
        ids = _ids(request.ids)
        return self._settle(
            request.queue, request.token, caller, lambda queue: self._plane.release(queue, request.token, ids)
        )

    def _settle(self, name: str, token: int, caller: Caller, settle: Callable[[str], int]) -> wire.SettleResponse:
        queue = queue_name(name)
        caller.require("consume", queue)
        try:
            count = settle(queue)
        except StaleLeaseError:
            self._plane.get(queue)
            raise
        self._sessions.settled(queue, token, count)
        return wire.SettleResponse(count=count)

    def extend(self, request: wire.ExtendRequest, caller: Caller) -> wire.ExtendResponse:
        queue = queue_name(request.queue)
        caller.require("consume", queue)
        ids = _ids(request.ids)
        visibility_ms = _visibility_ms(request.visibility_ms) or self._plane.get(queue).visibility_timeout_ms
        token = self._plane.extend(queue, request.token, visibility_ms, ids)
        expires_ns = self._clock_ns() + visibility_ms * NS_PER_MS
        self._sessions.extended(queue, request.token, token, None if ids is None else len(ids), expires_ns)
        return wire.ExtendResponse(token=token)

    async def open_session(self, request: wire.OpenSessionRequest, caller: Caller) -> AsyncGenerator[bytes, None]:
        session = self._sessions.begin(caller.peer)
        try:
            yield wire.OpenSessionResponse(session=session.number).SerializeToString()
            await self._closing.wait()
            raise StoreClosedError("the broker is stopping; connect again")
        finally:
            self._sessions.end(session)


def _visibility_ms(asked_ms: int) -> int:
    if asked_ms > DURATION_MS_MAX:
        raise InvalidArgumentError(f"the visibility timeout must be 0 to {DURATION_MS_MAX} ms, not {asked_ms}")
    return asked_ms


def _ids(given: Sequence[bytes]) -> list[bytes] | None:
    """Return the given message ids, or None for all messages of the lease."""
    ids = list(given)
    for each in ids:
        if len(each) != ID_BYTES:
            raise InvalidArgumentError(f"a message id must have {ID_BYTES} bytes, not {len(each)}")
    return ids or None


def _enqueued(ids: list[bytes]) -> bytes:
    """Encode an EnqueueBatchResponse: field 1, 16 bytes, repeated."""
    return b"\x0a\x10" + b"\x0a\x10".join(ids)
