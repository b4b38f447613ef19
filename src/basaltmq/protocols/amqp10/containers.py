"""The containers of clients: their connections, by virtual host and container id.

A link belongs to a container, not to a connection. So a container that attaches a link of the same name and role again
takes it over (link stealing). A JMS client with a client id requests to be the only connection of its container.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from basaltmq.protocols.amqp10.wire import performatives as p
from basaltmq.protocols.amqp10.wire import types as t
from basaltmq.protocols.amqp10.wire.errors import INVALID_FIELD, STOLEN, Fault, LinkFault

if TYPE_CHECKING:
    from basaltmq.protocols.amqp10.connection import Connection

SOLE_CONNECTION: Final = "sole-connection-for-container"
"""Capability: a client that requests it is refused if its container is connected already."""


class Containers:
    """The containers that are connected."""

    def __init__(self) -> None:
        self._connections: dict[tuple[str, str], dict[Connection, None]] = {}

    def enter(self, connection: Connection, vhost: str, received: p.Open) -> None:
        """Add a connection. Refuse it if it requests to be the only one of its container and is not."""
        others = self._connections.setdefault((vhost, received.container_id), {})
        if SOLE_CONNECTION in (received.desired_capabilities or ()) and any(each.is_connected for each in others):
            raise Fault(
                INVALID_FIELD,
                f"container '{received.container_id:.80}' is connected already",
                {t.Symbol("invalid-field"): t.Symbol("container-id")},
            )
        others[connection] = None

    def leave(self, connection: Connection, vhost: str) -> None:
        """Remove a connection. Idempotent."""
        key = vhost, connection.container_id
        others = self._connections.get(key, {})
        others.pop(connection, None)
        if not others:
            self._connections.pop(key, None)

    def steal(self, connection: Connection, attach: p.Attach) -> None:
        """End the link of the same name and role, if the container has one."""
        key = attach.name, attach.role
        for each in list(self._connections.get((connection.vhost.name, connection.container_id), ())):
            link = each.links.get(key)
            if link is not None:
                link.end(LinkFault(STOLEN, "the same container has attached the link again"))
