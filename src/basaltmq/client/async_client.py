"""The client for programs with an event loop; the twin of `Client`.

    async with AsyncClient("localhost:5555") as client:
        await client.enqueue("jobs", b"work")
        for message in await client.lease("jobs", 10, wait=5):
            await work(message.payload)
            await client.ack(message)

A cancelled `lease` gives back what it was given; a cancelled `enqueue` may have happened.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any, Final, Self, TypeVar, Unpack, overload

from google.protobuf.message import Message

from basaltmq.client import channel as calls
from basaltmq.client.channel import ADDRESS_DEFAULT, Method, Target
from basaltmq.client.error_mapping import fault_of
from basaltmq.client.leased import Held, Leased, by_lease, extended, ids_of, leased_of, settled
from basaltmq.client.requests import Payload, create_of, enqueue_of, lease_of, many
from basaltmq.client.worker_session import begin_attendance
from basaltmq.errors import PreconditionFailedError
from basaltmq.protocols.grpc.client.call import CallFailed, ClientCall
from basaltmq.protocols.grpc.client.channel import Channel
from basaltmq.queues.config import QueueSettings
from basaltmq.wire import basalt_pb2 as wire
from basaltmq.wire import fila_wire_pb2 as fila

TIMEOUT_S: Final = 30.0
"""For an answer to a call that does not wait for messages."""

R = TypeVar("R", bound=Message)


class AsyncAttendance:
    """The presence of a client, or of a part of it: leases taken under it end with it."""

    def __init__(self, channel: Channel, consumer: str) -> None:
        self._channel = channel
        self._consumer = consumer
        self._lock = asyncio.Lock()
        self._call: ClientCall | None = None
        self._number = 0

    async def number(self) -> int:
        """What leases name."""
        if self._number:
            return self._number
        async with self._lock:
            if not self._number:
                try:
                    self._call, self._number = await begin_attendance(self._channel, self._consumer)
                except CallFailed as failure:
                    raise fault_of(failure) from None
            return self._number

    def forget(self, number: int) -> None:
        """The broker does not know this number; another is had with the next lease."""
        if number == self._number:
            self.close()

    def close(self) -> None:
        """Leave; what was leased goes back."""
        if self._call is not None:
            self._call.cancel()
        self._call = None
        self._number = 0


class AsyncClient:
    """A connection to a broker's queues. Belongs to the loop it was made in."""

    def __init__(
        self,
        address: str = ADDRESS_DEFAULT,
        *,
        tls: bool = False,
        ca_certificate: bytes | None = None,
        client_certificate: bytes | None = None,
        client_key: bytes | None = None,
        api_key: str | None = None,
        consumer: str = "",
        timeout: float = TIMEOUT_S,
    ) -> None:
        """`consumer` names this program in the broker; `timeout` is in seconds."""
        self._target = Target(address, tls, ca_certificate, client_certificate, client_key, api_key)
        self._timeout_s = timeout
        self._consumer = consumer
        self._channel = self._target.channel()
        self._presence = self.attend()

    async def close(self) -> None:
        """Leave; what is leased goes back to the queue."""
        self._presence.close()
        await self._channel.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self.close()

    async def create_queue(self, name: str, **settings: Unpack[QueueSettings]) -> None:
        """Make a queue with these settings, which are those of `Basalt.queue` in a process.

        Its dead letters go to `<name>.dlq` unless `dead_letter_queue` names another queue, or None. A message is tried
        20 times unless `attempts_max` says otherwise; 0 or None tries for ever.
        """
        await self._call(calls.CREATE_QUEUE, create_of(name, settings))

    async def delete_queue(self, name: str) -> None:
        """Delete a queue with all that is in it."""
        request = fila.DeleteQueueRequest(queue=name)
        await self._call(calls.DELETE_QUEUE, request)

    @overload
    async def enqueue(self, queue: str, message: Payload) -> bytes: ...

    @overload
    async def enqueue(self, queue: str, message: list[Payload] | tuple[Payload, ...]) -> list[bytes]: ...

    @overload
    async def enqueue(self, queue: str, message: list[bytes]) -> list[bytes]: ...

    async def enqueue(self, queue: str, message: Any) -> Any:
        """Add one message or many (all or none); their ids, once they are as durable as the queue promises."""
        messages, is_one = many(message)
        ids = list((await self._call(calls.ENQUEUE, enqueue_of(queue, messages))).ids)
        return ids[0] if is_one else ids

    def attend(self) -> AsyncAttendance:
        """A presence of its own, for leases that end before the client does."""
        return AsyncAttendance(self._channel, self._consumer)

    async def lease(
        self,
        queue: str,
        count: int = 1,
        *,
        wait: float = 0,
        visibility_ms: int | None = None,
        attendance: AsyncAttendance | None = None,
    ) -> list[Leased]:
        """Up to `count` messages, for this program alone until their lease expires.

        With nothing ready waits up to `wait` seconds for the first. The lease lasts `visibility_ms`, by default as long
        as the queue's configuration says.
        """
        presence = attendance or self._presence
        number = await presence.number()
        timeout_s = self._timeout_s + wait
        try:
            request = lease_of(queue, count, wait, visibility_ms, self._consumer, number)
            return leased_of(queue, await self._call(calls.LEASE, request, timeout_s))
        except PreconditionFailedError:
            # The broker lost sight of us: it was restarted, or the connection was.
            presence.forget(number)
            number = await presence.number()
            request = lease_of(queue, count, wait, visibility_ms, self._consumer, number)
            return leased_of(queue, await self._call(calls.LEASE, request, timeout_s))

    async def ack(self, messages: Held) -> int:
        """Messages are done; how many."""

        def settle(queue: str, token: int, held: list[Leased]) -> Awaitable[wire.SettleResponse]:
            return self._call(calls.ACK, wire.AckBatchRequest(queue=queue, token=token, ids=ids_of(held)))

        return await self._settle(messages, settle)

    async def nack(self, messages: Held, error: str = "", *, delay_ms: int = 0, reject: bool = False) -> int:
        """Messages failed: they are tried again after `delay_ms`, until their attempts are used up.

        `reject` gives them up at once: they go to the dead-letter queue, if there is one.
        """

        def settle(queue: str, token: int, held: list[Leased]) -> Awaitable[wire.SettleResponse]:
            request = wire.NackBatchRequest(
                queue=queue, token=token, ids=ids_of(held), error=error, delay_ms=delay_ms, reject=reject
            )
            return self._call(calls.NACK, request)

        return await self._settle(messages, settle)

    async def release(self, messages: Held) -> int:
        """Messages go back to their places as if they had not been leased; no attempt is counted."""

        def settle(queue: str, token: int, held: list[Leased]) -> Awaitable[wire.SettleResponse]:
            return self._call(calls.RELEASE, wire.ReleaseBatchRequest(queue=queue, token=token, ids=ids_of(held)))

        return await self._settle(messages, settle)

    async def extend(self, messages: Held, visibility_ms: int | None = None) -> None:
        """The leases of messages last until `visibility_ms` from this moment (by default the queue's)."""
        for (queue, token), held in by_lease(messages).items():
            request = wire.ExtendRequest(queue=queue, token=token, ids=ids_of(held), visibility_ms=visibility_ms or 0)
            answer = await self._call(calls.EXTEND, request)
            extended(held, answer.token)

    async def extend_lease(self, queue: str, token: int, visibility_ms: int | None = None) -> None:
        """Everything that is left of the lease with this token lasts longer."""
        await self._call(calls.EXTEND, wire.ExtendRequest(queue=queue, token=token, visibility_ms=visibility_ms or 0))

    async def _settle(
        self, messages: Held, settle: Callable[[str, int, list[Leased]], Awaitable[wire.SettleResponse]]
    ) -> int:
        count = 0
        for (queue, token), held in by_lease(messages).items():
            count += (await settle(queue, token, held)).count
            settled(held)
        return count

    async def _call(self, method: Method[R], request: Message | bytes, timeout_s: float | None = None) -> R:
        raw = request if isinstance(request, bytes) else request.SerializeToString()
        try:
            answer = await self._channel.unary(method.path, raw, timeout_s or self._timeout_s)
        except CallFailed as failure:
            raise fault_of(failure) from None
        return method.read(answer)
