"""The queues of a virtual host as the gRPC services use them: create, delete, enqueue, access rules, alarms.

A queue created over gRPC is visible over AMQP too. Streams and exclusive queues are refused, and so are enqueues while
publishers are blocked. A storage error closes the virtual host, which is then reopened.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from basaltmq.broker.guard import Guard
from basaltmq.broker.message.operations import Enqueue, Waiter
from basaltmq.broker.resources.flow import Alarms
from basaltmq.broker.vhost import VHost
from basaltmq.errors import (
    CorruptionError,
    LimitExceededError,
    PreconditionFailedError,
    PublishersBlockedError,
    ResourceLockedError,
    StorageError,
    StoreClosedError,
    StoreStalledError,
)
from basaltmq.queues.config import QueueConfig
from basaltmq.queues.draft import Draft, asks_for_more, require_fit

MESSAGE_BYTES_MAX: Final = 16 << 20
"""Default size limit of one message. The setting `limits.message_bytes_max` has the same default."""


class QueueOwner:
    """The queues of one virtual host."""

    def __init__(self, vhost: VHost, alarms: Alarms, message_bytes_max: int = MESSAGE_BYTES_MAX) -> None:
        self._vhost = vhost
        self._alarms = alarms
        self._message_bytes_max = message_bytes_max

    def create(self, config: QueueConfig) -> None:
        with Guard(self._vhost):
            self._vhost.queues.adopt(config)

    def delete(self, name: str) -> None:
        self._vhost.plane.get(name)
        if name in self._vhost.queues.by_name:
            self._vhost.delete_queue(name)
        else:
            self._vhost.plane.delete(name)

    def check(self, name: str) -> None:
        """Raise if gRPC may not use this queue. A missing queue is reported elsewhere."""
        queue = self._vhost.queues.by_name.get(name)
        if queue is None:
            return
        if queue.is_stream:
            raise PreconditionFailedError(f"queue {name!r} is a stream, which is read by offset; use a stream consumer")
        if queue.owner is not None:
            raise ResourceLockedError(
                f"queue {name!r} is exclusive to the AMQP connection that declared it; use another queue"
            )

    def enqueue(self, queue: str, drafts: Sequence[Draft | bytes], waiter: Waiter[list[bytes]]) -> None:
        """Gather messages, all or none. The waiter gets their ids once they are as durable as the queue requires."""
        self.check(queue)
        reason = self._alarms.reason(self._vhost.name)
        if reason is not None:
            raise PublishersBlockedError(f"publishers are blocked: {reason}")
        if {*map(type, drafts)} == {bytes}:
            payloads: Sequence[bytes] = drafts  # type: ignore[assignment]
            sizes_bytes = [*map(len, payloads)]
        else:
            sizes_bytes = [len(each.payload) if isinstance(each, Draft) else len(each) for each in drafts]
            if asks_for_more(drafts):
                require_fit(self._vhost.plane.get(queue), drafts)
        size_bytes = sum(sizes_bytes)
        if size_bytes > self._message_bytes_max and max(sizes_bytes) > self._message_bytes_max:
            raise LimitExceededError(
                f"a message of {max(sizes_bytes)} bytes for queue {queue!r} exceeds the limit of "
                f"{self._message_bytes_max} bytes (limits.message_bytes_max)"
            )
        self._vhost.enqueue(Enqueue(queue, drafts, size_bytes, waiter))

    def failed(self, error: Exception) -> None:
        """Handle the error that ended a call."""
        # No reason to close the virtual host: a stalled store lost nothing, a closed store was closed on purpose, and
        # corruption affects only the damaged rows.
        passing = StoreStalledError | StoreClosedError | CorruptionError
        if isinstance(error, StorageError) and not isinstance(error, passing):
            self._vhost.fail(error)
