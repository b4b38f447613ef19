"""The service fila.v1.FilaService: enqueue, consume, ack and nack of single messages."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from typing import Final

from basaltmq.broker.message.text_headers import headers_of
from basaltmq.errors import LimitExceededError
from basaltmq.ids import format_id, parse_id
from basaltmq.protocols.grpc.server.immediate_future import ImmediateFuture
from basaltmq.protocols.grpc.server.methods import Method
from basaltmq.protocols.grpc.services.access import Caller
from basaltmq.protocols.grpc.services.fila.consume_streams import ConsumeStreams
from basaltmq.protocols.grpc.services.method_factory import MethodFactory, queue_name
from basaltmq.protocols.grpc.services.queue_owner import QueueOwner
from basaltmq.queues.draft import Draft
from basaltmq.queues.leases.delivery import Delivery
from basaltmq.queues.plane import QueuePlane
from basaltmq.wire import fila_wire_pb2 as wire

SERVICE: Final = "fila.v1.FilaService"

MESSAGE_BYTES_MAX: Final = (4 << 20) - (64 << 10)
"""Size limit of a message, payload and headers. gRPC clients accept responses of up to 4 MiB by default, including the
other fields. A larger message could be enqueued but never consumed."""

_SECOND_NS: Final = 1_000_000_000


class FilaService:
    """Handlers of fila.v1.FilaService."""

    def __init__(
        self,
        plane: QueuePlane,
        streams: ConsumeStreams,
        owner: QueueOwner,
        clock_ns: Callable[[], int],
    ) -> None:
        self._plane = plane
        self._streams = streams
        self._owner = owner
        self._clock_ns = clock_ns

    def methods(self, calls: MethodFactory) -> dict[str, Method]:
        return {
            "Enqueue": calls.unary(wire.EnqueueRequest, self.enqueue, _enqueued),
            "Consume": calls.server_streaming(wire.ConsumeRequest, self.consume),
            "Ack": calls.unary(wire.AckRequest, self.ack),
            "Nack": calls.unary(wire.NackRequest, self.nack),
        }

    def enqueue(self, request: wire.EnqueueRequest, caller: Caller) -> ImmediateFuture[list[bytes]]:
        queue = queue_name(request.queue)
        caller.require("produce", queue)
        headers = dict(request.headers) if request.headers else None
        payload = request.payload
        size_bytes = len(payload)
        if headers is not None or size_bytes > MESSAGE_BYTES_MAX // 2:
            size_bytes = request.ByteSize()
        if size_bytes > MESSAGE_BYTES_MAX:
            raise LimitExceededError(
                f"a message of {size_bytes} bytes exceeds the limit of this service, {MESSAGE_BYTES_MAX} bytes; "
                "clients could not receive it"
            )
        draft = payload if headers is None else Draft(payload=payload, headers=headers)
        future: ImmediateFuture[list[bytes]] = ImmediateFuture()
        self._owner.enqueue(queue, [draft], future)
        return future

    async def consume(self, request: wire.ConsumeRequest, caller: Caller) -> AsyncGenerator[bytes, None]:
        queue = queue_name(request.queue)
        caller.require("consume", queue)
        self._owner.check(queue)
        async with aclosing(self._streams.consume(queue, caller)) as deliveries:
            async for delivery in deliveries:
                yield self._respond(queue, delivery)

    def _respond(self, queue: str, delivery: Delivery) -> bytes:
        message = delivery.message()
        response = wire.ConsumeResponse(
            message=wire.Message(
                id=format_id(message.id),
                headers={**headers_of(message.properties), **message.headers},
                payload=message.payload,
                metadata=wire.Metadata(
                    fairness_key=message.fairness_key,
                    weight=message.weight,
                    throttle_keys=message.throttle_keys,
                    attempt_count=message.attempts,
                    queue_id=queue,
                ),
            )
        )
        times = response.message.timestamps
        times.enqueued_at.seconds, times.enqueued_at.nanos = divmod(message.enqueued_ns, _SECOND_NS)
        times.leased_at.seconds, times.leased_at.nanos = divmod(self._clock_ns(), _SECOND_NS)
        return response.SerializeToString()

    def ack(self, request: wire.AckRequest, caller: Caller) -> wire.AckResponse:
        queue = queue_name(request.queue)
        caller.require("consume", queue)
        message_id = parse_id(request.message_id)
        self._streams.settle(queue, message_id, caller, lambda token: self._plane.ack(queue, token, [message_id]))
        return wire.AckResponse()

    def nack(self, request: wire.NackRequest, caller: Caller) -> wire.NackResponse:
        queue = queue_name(request.queue)
        caller.require("consume", queue)
        message_id = parse_id(request.message_id)
        error = request.error
        self._streams.settle(
            queue, message_id, caller, lambda token: self._plane.nack(queue, token, [message_id], error=error)
        )
        return wire.NackResponse()


def _enqueued(ids: list[bytes]) -> bytes:
    """Encode an EnqueueResponse: field 1, a string of 36 characters."""
    return b"\x0a\x24" + format_id(ids[0]).encode()
