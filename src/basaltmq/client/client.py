"""The client for programs with threads.

    with Client("localhost:5555") as client:
        client.enqueue("jobs", b"work")                     returns when it is durable
        for message in client.lease("jobs", 10, wait=5):
            work(message.payload)
            client.ack(message)

Errors are those of `basaltmq.errors`, as if the queue were in this process; `retriable` says whether the same call may
succeed later. Safe to use from any thread. Leases end with the client: when it is closed, dies or loses its connection,
what it holds goes back to the queue at once.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import CancelledError
from typing import Any, Final, Self, TypeVar, Unpack, overload

from google.protobuf.message import Message

from basaltmq.client import channel as calls
from basaltmq.client.channel import ADDRESS_DEFAULT, Method, Target
from basaltmq.client.leased import Held, Leased, by_lease, extended, ids_of, leased_of, settled
from basaltmq.client.loop_thread import Line
from basaltmq.client.producer import Producer
from basaltmq.client.requests import Payload, create_of, enqueue_of, lease_of, many
from basaltmq.client.worker_session import Attendance, GiveUp
from basaltmq.errors import PreconditionFailedError
from basaltmq.queues.config import QueueSettings
from basaltmq.wire import basalt_pb2 as wire
from basaltmq.wire import fila_wire_pb2 as fila

TIMEOUT_S: Final = 30.0
"""For an answer to a call that does not wait for messages."""

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
        """`consumer` names this program in the broker; `timeout` is in seconds."""
        self._target = Target(address, tls, ca_certificate, client_certificate, client_key, api_key)
        self._timeout_s = timeout
        self._consumer = consumer
        self._line = Line(self._target.channel())
        self._presence = self.attend()

    def close(self) -> None:
        """Leave; what is leased goes back to the queue."""
        self._presence.close()
        self._line.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def create_queue(self, name: str, **settings: Unpack[QueueSettings]) -> None:
        """Make a queue with these settings, which are those of `Basalt.queue` in a process.

        Its dead letters go to `<name>.dlq` unless `dead_letter_queue` names another queue, or None. A message is tried
        20 times unless `attempts_max` says otherwise; 0 or None tries for ever.
        """
        self._call(calls.CREATE_QUEUE, create_of(name, settings))

    def delete_queue(self, name: str) -> None:
        """Delete a queue with all that is in it."""
        request = fila.DeleteQueueRequest(queue=name)
        self._call(calls.DELETE_QUEUE, request)

    @overload
    def enqueue(self, queue: str, message: Payload) -> bytes: ...

    @overload
    def enqueue(self, queue: str, message: list[Payload] | tuple[Payload, ...]) -> list[bytes]: ...

    @overload
    def enqueue(self, queue: str, message: list[bytes]) -> list[bytes]: ...

    def enqueue(self, queue: str, message: Any) -> Any:
        """Add one message or many (all or none); their ids, once they are as durable as the queue promises."""
        messages, is_one = many(message)
        ids = list(self._call(calls.ENQUEUE, enqueue_of(queue, messages)).ids)
        return ids[0] if is_one else ids

    def producer(self, queue: str) -> Producer:
        """A stream of batches: many on their way at once, each confirmed when it is durable."""
        return Producer(queue, self._line)

    def attend(self) -> Attendance:
        """A presence of its own, for leases that end before the client does."""
        return Attendance(self._line, self._consumer)

    def lease(
        self,
        queue: str,
        count: int = 1,
        *,
        wait: float = 0,
        visibility_ms: int | None = None,
        attendance: Attendance | None = None,
        give_up: GiveUp | None = None,
    ) -> list[Leased]:
        """Up to `count` messages, for this program alone until their lease expires.

        With nothing ready waits up to `wait` seconds for the first; `give_up` ends the wait, and then there is none.
        The lease lasts `visibility_ms`, by default as long as the queue's configuration says.
        """
        presence = attendance or self._presence
        number = presence.number()
        try:
            return self._ask(lease_of(queue, count, wait, visibility_ms, self._consumer, number), wait, give_up)
        except PreconditionFailedError:
            # The broker lost sight of us: it was restarted, or the connection was.
            presence.forget(number)
            number = presence.number()
            return self._ask(lease_of(queue, count, wait, visibility_ms, self._consumer, number), wait, give_up)

    def _ask(self, request: wire.LeaseRequest, wait_s: float, give_up: GiveUp | None) -> list[Leased]:
        raw = request.SerializeToString()
        timeout_s = self._timeout_s + wait_s
        asked = self._line.begin(lambda channel: channel.unary(calls.LEASE.path, raw, timeout_s))
        if give_up is not None:
            give_up.attach(asked.cancel)
        try:
            return leased_of(request.queue, calls.LEASE.read(self._line.wait(asked)))
        except CancelledError:
            return []

    def ack(self, messages: Held) -> int:
        """Messages are done; how many."""

        def settle(queue: str, token: int, held: list[Leased]) -> wire.SettleResponse:
            return self._call(calls.ACK, wire.AckBatchRequest(queue=queue, token=token, ids=ids_of(held)))

        return self._settle(messages, settle)

    def nack(self, messages: Held, error: str = "", *, delay_ms: int = 0, reject: bool = False) -> int:
        """Messages failed: they are tried again after `delay_ms`, until their attempts are used up.

        `reject` gives them up at once: they go to the dead-letter queue, if there is one.
        """

        def settle(queue: str, token: int, held: list[Leased]) -> wire.SettleResponse:
            request = wire.NackBatchRequest(
                queue=queue, token=token, ids=ids_of(held), error=error, delay_ms=delay_ms, reject=reject
            )
            return self._call(calls.NACK, request)

        return self._settle(messages, settle)

    def release(self, messages: Held) -> int:
        """Messages go back to their places as if they had not been leased; no attempt is counted."""

        def settle(queue: str, token: int, held: list[Leased]) -> wire.SettleResponse:
            return self._call(calls.RELEASE, wire.ReleaseBatchRequest(queue=queue, token=token, ids=ids_of(held)))

        return self._settle(messages, settle)

    def extend(self, messages: Held, visibility_ms: int | None = None) -> None:
        """The leases of messages last until `visibility_ms` from this moment (by default the queue's)."""
        for (queue, token), held in by_lease(messages).items():
            request = wire.ExtendRequest(queue=queue, token=token, ids=ids_of(held), visibility_ms=visibility_ms or 0)
            answer = self._call(calls.EXTEND, request)
            extended(held, answer.token)

    def extend_lease(self, queue: str, token: int, visibility_ms: int | None = None) -> None:
        """Everything that is left of the lease with this token lasts longer."""
        self._call(calls.EXTEND, wire.ExtendRequest(queue=queue, token=token, visibility_ms=visibility_ms or 0))

    def _settle(self, messages: Held, settle: Callable[[str, int, list[Leased]], wire.SettleResponse]) -> int:
        count = 0
        for (queue, token), held in by_lease(messages).items():
            count += settle(queue, token, held).count
            settled(held)
        return count

    def _call(self, method: Method[R], request: Message | bytes) -> R:
        raw = request if isinstance(request, bytes) else request.SerializeToString()
        return method.read(self._line.wait(self._line.begin(lambda c: c.unary(method.path, raw, self._timeout_s))))
