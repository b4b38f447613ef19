"""Access rules of the admin API: which virtual hosts a user sees, and which operations are allowed.

Operations that exist in AMQP (declare, bind, publish, get) need the same permissions as over AMQP.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

from basaltmq.admin.http.message import HttpError
from basaltmq.admin.http.routes import Access, Call, allowed
from basaltmq.broker.config.settings import Config
from basaltmq.broker.node import Node
from basaltmq.broker.supervision import VHostState
from basaltmq.broker.vhost import VHost
from basaltmq.errors import PublishersBlockedError, StorageError, VHostNotFoundError, is_disk_full

SERIALIZED_FACTOR = 4
"""Upper estimate of the JSON overhead of a message: base64 adds a third, an escaped control character takes 6 bytes."""


class Scope:
    """The broker as handlers see it."""

    def __init__(self, node: Node, config: Callable[[], Config], ports: Mapping[str, int]) -> None:
        self.node = node
        self.ports = ports
        self.node_name = config().name
        self._config = config

    @property
    def connections(self) -> Iterable[Any]:
        return self.node.connections

    @property
    def message_bytes_max(self) -> int:
        return int(self._config().limits.message_bytes_max)

    @property
    def publish_bytes_max(self) -> int:
        return min(self.body_bytes_max, self.message_bytes_max * SERIALIZED_FACTOR)

    @property
    def body_bytes_max(self) -> int:
        return int(self._config().admin.body_bytes_max)

    def require_node(self, name: str) -> None:
        if name != self.node_name:
            raise HttpError(404, f"there is no node {name!r}; the node is {self.node_name!r}")

    def may_see(self, call: Call, vhost: str) -> bool:
        return allowed(call.who.tags, Access.MONITORING) or self.node.permissions.may_use(call.who.name, vhost)

    def vhost_name(self, call: Call) -> str:
        """Return the virtual host in the path. Raise if the user may not see it. It may be down."""
        name = call.names["vhost"]
        if name not in self.node.vhosts() or not self.may_see(call, name):
            raise VHostNotFoundError(f"there is no vhost {name!r} that you may see")
        return name

    def vhost(self, call: Call) -> VHost:
        """Like `vhost_name`, but return the running virtual host. Raise if it is down."""
        return self.node.vhost(self.vhost_name(call))

    def vhost_to_change(self, call: Call) -> VHost:
        """Like `vhost`, but raise unless the user may change it. The tag `monitoring` alone only permits reading."""
        vhost = self.vhost(call)
        if not allowed(call.who.tags, Access.ADMINISTRATOR):
            self.node.permissions.check_vhost(call.who, vhost.name)
        return vhost

    def named(self, name: str) -> VHost:
        return self.node.vhost(name)

    def require_vhost(self, name: str) -> None:
        self.node.supervised(name)

    def listed(self, call: Call) -> list[VHost]:
        """Return the virtual host in the path; without one, all running ones that the user may see."""
        if "vhost" in call.names:
            return [self.vhost(call)]
        return [vhost for vhost in self.up() if self.may_see(call, vhost.name)]

    def up(self) -> list[VHost]:
        found = [self.node.supervised(name) for name in self.node.vhosts()]
        return [each.vhost() for each in found if each.state is VHostState.RUNNING]

    def vhost_states(self) -> dict[str, str]:
        return {name: self.node.supervised(name).state.value for name in self.node.vhosts()}

    def unopenable(self) -> dict[str, str]:
        """Return the virtual hosts whose stores do not open, with the error. A full disk is not such an error."""
        found = [self.node.supervised(name) for name in self.node.vhosts()]
        return {
            each.name: str(each.error)
            for each in found
            if each.state in (VHostState.RESTARTING, VHostState.DOWN)
            and isinstance(each.error, StorageError)
            and not is_disk_full(each.error)
        }

    def description(self, name: str) -> str:
        return str(self.node.describe_vhost(name)["description"])

    async def ensure_vhost(self, name: str, description: str) -> bool:
        """Create a virtual host if it does not exist. Return whether it was created."""
        if name in self.node.vhosts():
            return False
        await self.node.create_vhost(name, description=description)
        return True

    def alarms(self) -> list[str]:
        return [text if vhost is None else f"vhost {vhost}: {text}" for vhost, _, text in self.node.alarms.all()]

    def check(self, call: Call, vhost: VHost, action: str, resource: str) -> None:
        self.node.permissions.check(call.who, vhost.name, action, resource)

    def check_topic(self, call: Call, vhost: VHost, exchange: str, action: str, routing_key: str) -> None:
        self.node.permissions.check_topic(call.who, vhost.name, exchange, action, routing_key)

    def check_not_blocked(self, vhost: VHost) -> None:
        reason = self.node.alarms.reason(vhost.name)
        if reason is not None:
            raise PublishersBlockedError(f"publishers are blocked: {reason}")
