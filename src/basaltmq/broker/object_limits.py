"""Limits of virtual hosts and users, with RabbitMQ's names. A limit that is not set does not apply.

    virtual host   max-connections, max-queues
    user           max-connections, max-channels

They are the attribute `limits` of the virtual host or user in the node's catalog. A lower limit does not close open
connections or channels. Connections of AMQP and MQTT count, because they belong to one virtual host. Channels are those
of AMQP 0-9-1.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from typing import Final

from basaltmq.broker.connections import Connections
from basaltmq.catalog.catalog import Catalog
from basaltmq.catalog.kinds import Kind
from basaltmq.catalog.objects import CatalogObject
from basaltmq.errors import InvalidArgumentError, LimitExceededError, NotFoundError

MAX_CONNECTIONS: Final = "max-connections"
MAX_QUEUES: Final = "max-queues"
MAX_CHANNELS: Final = "max-channels"

LIMITS: Final[Mapping[Kind, tuple[str, ...]]] = {
    Kind.VHOST: (MAX_CONNECTIONS, MAX_QUEUES),
    Kind.USER: (MAX_CONNECTIONS, MAX_CHANNELS),
}
LIMIT_MAX: Final = (1 << 31) - 1


class ObjectLimits:
    """The limits of all virtual hosts and users of a node."""

    def __init__(self, catalog: Catalog, durable: Callable[[], Awaitable[None]], connections: Connections) -> None:
        self._catalog = catalog
        self._durable = durable
        self._connections = connections

    def of(self, kind: Kind, name: str) -> dict[str, int]:
        """Return the limits of a virtual host or user; none if it does not exist."""
        found = self._catalog.find(kind, name)
        return {} if found is None else _limits(found)

    async def set(self, kind: Kind, name: str, limit: str, value: int | None) -> None:
        """Set a limit, durably. None or a negative value removes it."""
        if limit not in LIMITS[kind]:
            raise InvalidArgumentError(f"unknown limit {limit!r:.80} of a {kind}; use {' or '.join(LIMITS[kind])}")
        if value is not None and value > LIMIT_MAX:
            raise InvalidArgumentError(f"{limit} must be at most {LIMIT_MAX}, not {value}")
        found = self._catalog.find(kind, name)
        if found is None:
            raise NotFoundError(f"{kind} {name!r} not found")
        limits = _limits(found)
        limits.pop(limit, None)
        if value is not None and value >= 0:
            limits[limit] = value
        self._catalog.update(found.id, {**found.attributes, "limits": limits})
        await self._durable()

    def check_connection(self, user: str, vhost: str) -> None:
        """Raise LimitExceededError if one more connection exceeds a limit."""
        for kind, name, count in (
            (Kind.VHOST, vhost, self._connections.count(vhost=vhost)),
            (Kind.USER, user, self._connections.count(user=user)),
        ):
            limit = self.of(kind, name).get(MAX_CONNECTIONS)
            if limit is not None and count >= limit:
                raise LimitExceededError(
                    f"access to vhost '{vhost}' refused for user '{user}': "
                    f"the connection limit of {kind} '{name}' ({limit}) is reached"
                )

    def check_channel(self, user: str, channels: Callable[[], int]) -> None:
        """Raise LimitExceededError if one more channel exceeds the user's limit. `channels` counts the open ones."""
        limit = self.of(Kind.USER, user).get(MAX_CHANNELS)
        if limit is not None and channels() >= limit:
            raise LimitExceededError(
                f"number of channels opened for user '{user}' has reached the maximum allowed user limit of ({limit})"
            )


def _limits(found: CatalogObject) -> dict[str, int]:
    return dict(found.attributes.get("limits") or {})
