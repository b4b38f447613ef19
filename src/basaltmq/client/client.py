"""The client for threaded programs.

    with Client("localhost:5555") as client:
        client.enqueue("jobs", b"work")                     returns when the message is durable
        for message in client.lease("jobs", 10, wait=5):
            work(message.payload)
            client.ack(message)

Errors are the classes of `basaltmq.errors`; `retriable` says whether the same call may succeed later. The client is
thread-safe. Leases end with the client: when it is closed, dies or loses its connection, its leased messages return to
the queue at once.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import CancelledError
from typing import Any, Final, Self, TypeVar, Unpack, overload

from google.protobuf.message import Message

from basaltmq.client import channel as calls
from basaltmq.client.channel import ADDRESS_DEFAULT, Method, Target
from basaltmq.client.leased import Held, Leased, by_lease, extended, ids_of, leased_of, settled
from basaltmq.client.loop_thread import LoopThread
from basaltmq.client.producer import Producer
from basaltmq.client.requests import Payload, create_of, enqueue_of, lease_of, many
from basaltmq.client.worker_session import Cancellation, WorkerSession
from basaltmq.errors import PreconditionFailedError
from basaltmq.queues.config import QueueSettings
from basaltmq.wire import basalt_pb2 as wire
from basaltmq.wire import fila_wire_pb2 as fila

TIMEOUT_S: Final = 30.0
"""Timeout of calls that do not wait for messages, in seconds."""

R = TypeVar("R", bound=Message)


class Client:
    """A connection to a broker's queues."""

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
        self._target = Target(address, tls, ca_certificate, client_certificate, client_key, api_key)
        self._timeout_s = timeout
        self._consumer = consumer
        self._loop_thread = LoopThread(self._target.channel())
        self._presence = self.open_session()

    def close(self) -> None:
        """Close the connection. Leased messages return to their queues."""
        self._presence.close()
        self._loop_thread.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def create_queue(self, name: str, **settings: Unpack[QueueSettings]) -> None:
        """Create a queue with these settings, which are the same as those of `Basalt.queue`.

        Dead letters go to `<name>.dlq`, unless `dead_letter_queue` names another queue or is None. A message gets 20
        attempts by default; `attempts_max` 0 or None means no limit.
        """
        self._call(calls.CREATE_QUEUE, create_of(name, settings))

    def delete_queue(self, name: str) -> None:
        """Delete a queue with all its messages."""
        request = fila.DeleteQueueRequest(queue=name)
        self._call(calls.DELETE_QUEUE, request)

    @overload
    def enqueue(self, queue: str, message: Payload) -> bytes: ...

    @overload
    def enqueue(self, queue: str, message: list[Payload] | tuple[Payload, ...]) -> list[bytes]: ...

    @overload
    def enqueue(self, queue: str, message: list[bytes]) -> list[bytes]: ...

    def enqueue(self, queue: str, message: Any) -> Any:
        """Add one message or several (all or none). Return their ids when they are as durable as the queue requires."""
        messages, is_one = many(message)
        ids = list(self._call(calls.ENQUEUE, enqueue_of(queue, messages)).ids)
        return ids[0] if is_one else ids

    def producer(self, queue: str) -> Producer:
        """Return a stream of batches: many in flight, each confirmed when it is durable."""
        return Producer(queue, self._loop_thread)

    def open_session(self) -> WorkerSession:
        """Return a session for leases that end before the client does."""
        return WorkerSession(self._loop_thread, self._consumer)

    def lease(
        self,
        queue: str,
        count: int = 1,
        *,
        wait: float = 0,
        visibility_ms: int | None = None,
        session: WorkerSession | None = None,
        cancellation: Cancellation | None = None,
    ) -> list[Leased]:
        """Lease up to `count` messages for exclusive use.

        If none is ready, wait up to `wait` seconds for the first; `cancellation` ends the wait early, with no messages.
        The lease lasts `visibility_ms`, by default the queue's visibility timeout.
        """
        presence = session or self._presence
        number = presence.number()
        try:
            return self._ask(lease_of(queue, count, wait, visibility_ms, self._consumer, number), wait, cancellation)
        except PreconditionFailedError:
            # The broker lost the session, because it was restarted or the connection broke.
            presence.forget(number)
            number = presence.number()
            return self._ask(lease_of(queue, count, wait, visibility_ms, self._consumer, number), wait, cancellation)

    def _ask(self, request: wire.LeaseRequest, wait_s: float, cancellation: Cancellation | None) -> list[Leased]:
        raw = request.SerializeToString()
        timeout_s = self._timeout_s + wait_s
        call = self._loop_thread.submit(lambda channel: channel.unary(calls.LEASE.path, raw, timeout_s))
        if cancellation is not None:
            cancellation.attach(call.cancel)
        try:
            return leased_of(request.queue, calls.LEASE.read(self._loop_thread.wait(call)))
        except CancelledError:
            return []

    def ack(self, messages: Held) -> int:
        """Acknowledge messages. Return their number."""

        def settle(queue: str, token: int, held: list[Leased]) -> wire.SettleResponse:
            return self._call(calls.ACK, wire.AckBatchRequest(queue=queue, token=token, ids=ids_of(held)))

        return self._settle(messages, settle)

    def nack(self, messages: Held, error: str = "", *, delay_ms: int = 0, reject: bool = False) -> int:
        """Negatively acknowledge messages. They are retried after `delay_ms` until their attempts are used up.

        With `reject` they go to the dead-letter queue at once, or are dropped if there is none.
        """

        def settle(queue: str, token: int, held: list[Leased]) -> wire.SettleResponse:
            request = wire.NackBatchRequest(
                queue=queue, token=token, ids=ids_of(held), error=error, delay_ms=delay_ms, reject=reject
            )
            return self._call(calls.NACK, request)

        return self._settle(messages, settle)

    def release(self, messages: Held) -> int:
        """Return messages to their places in the queue. No attempt is counted."""

        def settle(queue: str, token: int, held: list[Leased]) -> wire.SettleResponse:
            return self._call(calls.RELEASE, wire.ReleaseBatchRequest(queue=queue, token=token, ids=ids_of(held)))

        return self._settle(messages, settle)

    def extend(self, messages: Held, visibility_ms: int | None = None) -> None:
        """Extend the leases of messages to `visibility_ms` from now (default: the queue's visibility timeout)."""
        for (queue, token), held in by_lease(messages).items():
            request = wire.ExtendRequest(queue=queue, token=token, ids=ids_of(held), visibility_ms=visibility_ms or 0)
            answer = self._call(calls.EXTEND, request)
            extended(held, answer.token)

    def extend_lease(self, queue: str, token: int, visibility_ms: int | None = None) -> None:
        """Extend the whole lease with this token."""
        self._call(calls.EXTEND, wire.ExtendRequest(queue=queue, token=token, visibility_ms=visibility_ms or 0))

    def _settle(self, messages: Held, settle: Callable[[str, int, list[Leased]], wire.SettleResponse]) -> int:
        count = 0
        for (queue, token), held in by_lease(messages).items():
            count += settle(queue, token, held).count
            settled(held)
        return count

    def _call(self, method: Method[R], request: Message | bytes) -> R:
        raw = request if isinstance(request, bytes) else request.SerializeToString()
        return method.read(
            self._loop_thread.wait(self._loop_thread.submit(lambda c: c.unary(method.path, raw, self._timeout_s)))
        )
