"""The interface between the gRPC services and the owner of the queues: create, delete, access rules, alarms.

A bare queue plane has no rules. In a broker the virtual host owns the queues. A queue created over gRPC is then visible
over AMQP too. Streams and exclusive queues are refused, and so are enqueues while publishers are blocked. A storage
error closes the virtual host, which is then reopened.
"""

from __future__ import annotations

from typing import Protocol

from basaltmq.broker.guard import Guard
from basaltmq.broker.node import Node
from basaltmq.broker.vhost import VHost
from basaltmq.errors import (
    CorruptionError,
    PreconditionFailedError,
    PublishersHeldError,
    ResourceLockedError,
    StorageError,
    StoreClosedError,
    StoreStalledError,
)
from basaltmq.queues.config import QueueConfig


class QueueOwner(Protocol):
    """Owner of the queues that the services use."""

    def create(self, config: QueueConfig) -> None: ...

    def delete(self, name: str) -> None: ...

    def check(self, name: str) -> None:
        """Raise if gRPC may not use this queue. A missing queue is reported elsewhere."""
        ...

    def require_room(self) -> None:
        """Raise while publishers are blocked."""
        ...

    def failed(self, error: Exception) -> None:
        """Handle the error that ended a call."""
        ...


class VHostOwner:
    """A virtual host of a broker."""

    def __init__(self, node: Node, vhost: VHost) -> None:
        self._node = node
        self._vhost = vhost

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
        queue = self._vhost.queues.by_name.get(name)
        if queue is None:
            return
        if queue.is_stream:
            raise PreconditionFailedError(f"queue {name!r} is a stream, which is read by offset; use a stream consumer")
        if queue.owner is not None:
            raise ResourceLockedError(
                f"queue {name!r} is exclusive to the AMQP connection that declared it; use another queue"
            )

    def require_room(self) -> None:
        reason = self._node.alarms.reason(self._vhost.name)
        if reason is not None:
            raise PublishersHeldError(f"publishers are blocked: {reason}")

    def failed(self, error: Exception) -> None:
        # No reason to close the virtual host: a stalled store lost nothing, a closed store was closed on purpose, and
        # corruption affects only the damaged rows.
        passing = StoreStalledError | StoreClosedError | CorruptionError
        if isinstance(error, StorageError) and not isinstance(error, passing):
            self._vhost.fail(error)
