"""The asyncio counterpart of `Client`.

    async with AsyncClient("localhost:5555") as client:
        await client.enqueue("jobs", b"work")
        for message in await client.lease("jobs", 10, wait=5):
            await work(message.payload)
            await client.ack(message)

A cancelled `lease` returns its messages to the queue. A cancelled `enqueue` may have taken effect.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any, Final, Self, TypeVar, Unpack, overload

from google.protobuf.message import Message

from basaltmq.client import channel as calls
from basaltmq.client.channel import ADDRESS_DEFAULT, Method, Target
from basaltmq.client.error_mapping import error_of_call
from basaltmq.client.leased import Held, Leased, by_lease, extended, ids_of, leased_of, settled
from basaltmq.client.requests import Payload, create_of, enqueue_of, lease_of, many
from basaltmq.errors import PreconditionFailedError
from basaltmq.protocols.grpc.client.call import CallFailed, ClientCall
from basaltmq.protocols.grpc.client.channel import Channel
from basaltmq.queues.config import QueueSettings
from basaltmq.wire import basalt_pb2 as wire
from basaltmq.wire import fila_wire_pb2 as fila

TIMEOUT_S: Final = 30.0
"""Timeout of calls that do not wait for messages, in seconds."""

R = TypeVar("R", bound=Message)


class Session:
    """A session at the broker. Leases taken in the session end with it.

    When the session is closed, the program dies or the connection breaks, its leased messages return to their queues at
    once. A session begins with the first lease, and begins again after a restart of the broker.
    """

    def __init__(self, channel: Channel, consumer: str) -> None:
        self._channel = channel
        self._consumer = consumer
        self._lock = asyncio.Lock()
        self._call: ClientCall | None = None
        self._number = 0

    async def number(self) -> int:
        """Return the session number that leases refer to, and begin the session if necessary."""
        if self._number:
            return self._number
        async with self._lock:
            if not self._number:
                try:
                    self._call, self._number = await self._begin()
                except CallFailed as failure:
                    raise error_of_call(failure) from None
            return self._number

    async def _begin(self) -> tuple[ClientCall, int]:
        """Begin the session. Return the call that lasts as long as the session, and the session number."""
        call = await self._channel.stream(calls.OPEN_SESSION)
        call.send_last(wire.OpenSessionRequest(consumer=self._consumer).SerializeToString())
        async for response in call:
            return call, wire.OpenSessionResponse.FromString(response).session
        raise PreconditionFailedError("the broker ended the session before it began")

    def forget(self, number: int) -> None:
        """Drop a session that the broker does not know. The next lease begins a new one."""
        if number == self._number:
            self.close()

    def close(self) -> None:
        """End the session. Its leased messages return to their queues."""
        if self._call is not None:
            self._call.cancel()
        self._call = None
        self._number = 0


class AsyncClient:
    """A connection to a broker's queues. Usable only in the event loop that created it."""

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
        """`consumer` identifies this program to the broker. `timeout` is in seconds."""
        self._timeout_s = timeout
        self._consumer = consumer
        self.channel = Target(address, tls, ca_certificate, client_certificate, client_key, api_key).channel()
        self._session = self.open_session()
        """Session of leases that name no other."""

    async def close(self) -> None:
        """Close the connection. Leased messages return to their queues."""
        self._session.close()
        await self.channel.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self.close()

    async def create_queue(self, name: str, **settings: Unpack[QueueSettings]) -> None:
        """Create a queue with these settings, which are the same as those of `Basalt.queue`.

        Dead letters go to `<name>.dlq`, unless `dead_letter_queue` names another queue or is None. A message gets 20
        attempts by default; `attempts_max` 0 or None means no limit.
        """
        await self._call(calls.CREATE_QUEUE, create_of(name, settings))

    async def delete_queue(self, name: str) -> None:
        """Delete a queue with all its messages."""
        request = fila.DeleteQueueRequest(queue=name)
        await self._call(calls.DELETE_QUEUE, request)

    @overload
    async def enqueue(self, queue: str, message: Payload) -> bytes: ...

    @overload
    async def enqueue(self, queue: str, message: list[Payload] | tuple[Payload, ...]) -> list[bytes]: ...

    @overload
    async def enqueue(self, queue: str, message: list[bytes]) -> list[bytes]: ...

    async def enqueue(self, queue: str, message: Any) -> Any:
        """Add one message or several (all or none). Return their ids when they are as durable as the queue requires."""
        messages, is_one = many(message)
        ids = list((await self._call(calls.ENQUEUE, enqueue_of(queue, messages))).ids)
        return ids[0] if is_one else ids

    def open_session(self) -> Session:
        """Return a session for leases that end before the client does."""
        return Session(self.channel, self._consumer)

    async def lease(
        self,
        queue: str,
        count: int = 1,
        *,
        wait: float = 0,
        visibility_ms: int | None = None,
        session: Session | None = None,
    ) -> list[Leased]:
        """Lease up to `count` messages for exclusive use.

        If none is ready, wait up to `wait` seconds for the first. The lease lasts `visibility_ms`, by default the
        queue's visibility timeout.
        """
        leasing_session = session or self._session
        number = await leasing_session.number()
        timeout_s = self._timeout_s + wait
        try:
            request = lease_of(queue, count, wait, visibility_ms, self._consumer, number)
            return leased_of(queue, await self._call(calls.LEASE, request, timeout_s))
        except PreconditionFailedError:
            # The broker lost the session, because it was restarted or the connection broke.
            leasing_session.forget(number)
            number = await leasing_session.number()
            request = lease_of(queue, count, wait, visibility_ms, self._consumer, number)
            return leased_of(queue, await self._call(calls.LEASE, request, timeout_s))

    async def ack(self, messages: Held) -> int:
        """Acknowledge messages. Return their number."""

        def settle(queue: str, token: int, held: list[Leased]) -> Awaitable[wire.SettleResponse]:
            return self._call(calls.ACK, wire.AckBatchRequest(queue=queue, token=token, ids=ids_of(held)))

        return await self._settle(messages, settle)

    async def nack(self, messages: Held, error: str = "", *, delay_ms: int = 0, reject: bool = False) -> int:
        """Negatively acknowledge messages. They are retried after `delay_ms` until their attempts are used up.

        With `reject` they go to the dead-letter queue at once, or are dropped if there is none.
        """

        def settle(queue: str, token: int, held: list[Leased]) -> Awaitable[wire.SettleResponse]:
            request = wire.NackBatchRequest(
                queue=queue, token=token, ids=ids_of(held), error=error, delay_ms=delay_ms, reject=reject
            )
            return self._call(calls.NACK, request)

        return await self._settle(messages, settle)

    async def release(self, messages: Held) -> int:
        """Return messages to their places in the queue. No attempt is counted."""

        def settle(queue: str, token: int, held: list[Leased]) -> Awaitable[wire.SettleResponse]:
            return self._call(calls.RELEASE, wire.ReleaseBatchRequest(queue=queue, token=token, ids=ids_of(held)))

        return await self._settle(messages, settle)

    async def extend(self, messages: Held, visibility_ms: int | None = None) -> None:
        """Extend the leases of messages to `visibility_ms` from now (default: the queue's visibility timeout)."""
        for (queue, token), held in by_lease(messages).items():
            request = wire.ExtendRequest(queue=queue, token=token, ids=ids_of(held), visibility_ms=visibility_ms or 0)
            response = await self._call(calls.EXTEND, request)
            extended(held, response.token)

    async def extend_lease(self, queue: str, token: int, visibility_ms: int | None = None) -> None:
        """Extend the whole lease with this token."""
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
            response = await self.channel.unary(method.path, raw, timeout_s or self._timeout_s)
        except CallFailed as failure:
            raise error_of_call(failure) from None
        return method.read(response)
