"""What the gRPC services leave to whoever owns the queues: making and deleting them, who may be served, alarms.

Over a bare queue plane there is little to it. In a broker a virtual host owns them: a queue made here is seen over AMQP
too, a stream or a connection's own queue is refused, publishers wait while the broker holds them, and an error of the
disk ends the virtual host, which is then opened again.
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
from basaltmq.queues.plane import QueuePlane


class Desk(Protocol):
    """Whoever owns the queues."""

    def create(self, config: QueueConfig) -> None: ...

    def delete(self, name: str) -> None: ...

    def check(self, name: str) -> None:
        """Raise if the queue of this name is not for this protocol; that it does not exist is told elsewhere."""
        ...

    def require_room(self) -> None:
        """Raise while publishers are held."""
        ...

    def failed(self, error: Exception) -> None:
        """A call ended with this error."""
        ...


class PlaneDesk:
    """A queue plane on its own."""

    def __init__(self, plane: QueuePlane) -> None:
        self.create = plane.create
        self.delete = plane.delete

    def check(self, name: str) -> None:
        """Every queue may be used."""

    def require_room(self) -> None:
        """Nobody is held."""

    def failed(self, error: Exception) -> None:
        """Nobody is there to be told."""


class VHostDesk:
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
            raise PreconditionFailedError(
                f"queue {name!r} is a stream, which is read by offset; use a consumer that knows streams"
            )
        if queue.owner is not None:
            raise ResourceLockedError(f"queue {name!r} is exclusive to the connection that declared it")

    def require_room(self) -> None:
        reason = self._node.alarms.reason(self._vhost.name)
        if reason is not None:
            raise PublishersHeldError(f"publishers are held: {reason}")

    def failed(self, error: Exception) -> None:
        # A store that is behind has lost nothing, one that closes was told to, and damage costs what it holds.
        passing = StoreStalledError | StoreClosedError | CorruptionError
        if isinstance(error, StorageError) and not isinstance(error, passing):
            self._vhost.fail(error)
