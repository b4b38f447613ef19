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

from collections.abc import Coroutine
from concurrent.futures import CancelledError
from typing import Any, Self, TypeVar, Unpack, overload

from basaltmq.client.async_client import TIMEOUT_S, AsyncClient, Session
from basaltmq.client.cancellation import Cancellation
from basaltmq.client.channel import ADDRESS_DEFAULT
from basaltmq.client.leased import Held, Leased
from basaltmq.client.loop_thread import LoopThread
from basaltmq.client.producer import Producer
from basaltmq.client.requests import Payload
from basaltmq.queues.config import QueueSettings

T = TypeVar("T")


class Client:
    """A connection to a broker's queues: an `AsyncClient` in a thread of its own."""

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
        self._client = AsyncClient(
            address,
            tls=tls,
            ca_certificate=ca_certificate,
            client_certificate=client_certificate,
            client_key=client_key,
            api_key=api_key,
            consumer=consumer,
            timeout=timeout,
        )
        self._loop_thread = LoopThread(self._client.close)

    def close(self) -> None:
        """Close the connection. Leased messages return to their queues."""
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
        self._run(self._client.create_queue(name, **settings))

    def delete_queue(self, name: str) -> None:
        """Delete a queue with all its messages."""
        self._run(self._client.delete_queue(name))

    @overload
    def enqueue(self, queue: str, message: Payload) -> bytes: ...

    @overload
    def enqueue(self, queue: str, message: list[Payload] | tuple[Payload, ...]) -> list[bytes]: ...

    @overload
    def enqueue(self, queue: str, message: list[bytes]) -> list[bytes]: ...

    def enqueue(self, queue: str, message: Any) -> Any:
        """Add one message or several (all or none). Return their ids when they are as durable as the queue requires."""
        return self._run(self._client.enqueue(queue, message))

    def producer(self, queue: str) -> Producer:
        """Return a stream of batches: many in flight, each confirmed when it is durable."""
        return Producer(queue, self._client.channel, self._loop_thread)

    def open_session(self) -> Session:
        """Return a session for leases that end before the client does. `end_session` ends it."""
        return self._client.open_session()

    def end_session(self, session: Session) -> None:
        """End a session. Its leased messages return to their queues."""
        self._loop_thread.call_soon(session.close)

    def lease(
        self,
        queue: str,
        count: int = 1,
        *,
        wait: float = 0,
        visibility_ms: int | None = None,
        session: Session | None = None,
        cancellation: Cancellation | None = None,
    ) -> list[Leased]:
        """Lease up to `count` messages for exclusive use.

        If none is ready, wait up to `wait` seconds for the first; `cancellation` ends the wait early, with no messages.
        The lease lasts `visibility_ms`, by default the queue's visibility timeout.
        """
        leasing = self._client.lease(queue, count, wait=wait, visibility_ms=visibility_ms, session=session)
        future = self._loop_thread.submit(leasing)
        if cancellation is not None:
            cancellation.attach(future.cancel)
        try:
            return self._loop_thread.wait(future)
        except CancelledError:
            return []

    def ack(self, messages: Held) -> int:
        """Acknowledge messages. Return their number."""
        return self._run(self._client.ack(messages))

    def nack(self, messages: Held, error: str = "", *, delay_ms: int = 0, reject: bool = False) -> int:
        """Negatively acknowledge messages. They are retried after `delay_ms` until their attempts are used up.

        With `reject` they go to the dead-letter queue at once, or are dropped if there is none.
        """
        return self._run(self._client.nack(messages, error, delay_ms=delay_ms, reject=reject))

    def release(self, messages: Held) -> int:
        """Return messages to their places in the queue. No attempt is counted."""
        return self._run(self._client.release(messages))

    def extend(self, messages: Held, visibility_ms: int | None = None) -> None:
        """Extend the leases of messages to `visibility_ms` from now (default: the queue's visibility timeout)."""
        self._run(self._client.extend(messages, visibility_ms))

    def extend_lease(self, queue: str, token: int, visibility_ms: int | None = None) -> None:
        """Extend the whole lease with this token."""
        self._run(self._client.extend_lease(queue, token, visibility_ms))

    def _run(self, call: Coroutine[Any, Any, T]) -> T:
        return self._loop_thread.wait(self._loop_thread.submit(call))
