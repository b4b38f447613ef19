"""Who a client is and what it may do: user names, virtual hosts, permissions.

A user name may name a virtual host: `vhost:user`. Otherwise the setting `mqtt.vhost` applies. A client without a user
name is the user of its TLS certificate, or `auth.anonymous_user` if it connects from this machine.

Publishing needs write access to the topic exchange, subscribing needs read access. Topic permissions of the exchange
apply to the routing key of a topic and to the binding key of a filter. Their patterns may contain `{client_id}`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from basaltmq.broker.auth.permissions import READ, WRITE
from basaltmq.broker.auth.users import User
from basaltmq.broker.node import Node
from basaltmq.broker.peer import Peer
from basaltmq.errors import AuthenticationError
from basaltmq.protocols.mqtt.settings import Settings
from basaltmq.protocols.mqtt.wire.packets import Connect


async def authenticate(
    node: Node, settings: Settings, connect: Connect, peer: Peer, certificate: Mapping[str, Any]
) -> tuple[User, str]:
    """Return the user of a client and the virtual host that it requests. Raise AuthenticationError."""
    users = node.users
    if connect.username is not None:
        vhost, name = split_user(node, settings, connect.username)
        try:
            password = (connect.password or b"").decode()
        except UnicodeDecodeError:
            raise AuthenticationError(f"user '{name}' was refused: the password is not UTF-8") from None
        return await users.authenticate(name, password, peer), vhost
    if certificate:
        return users.external(certificate, peer), settings.vhost
    user = users.anonymous(peer) if settings.access == "loopback" else None
    if user is None:
        raise AuthenticationError(
            "a client without a user name was refused; it must connect from this machine, with `mqtt.access` = loopback"
        )
    return user, settings.vhost


def split_user(node: Node, settings: Settings, username: str) -> tuple[str, str]:
    """Split `vhost:user`. A colon may also be part of a user name."""
    vhost, colon, name = username.rpartition(":")
    if colon and vhost in node.vhosts():
        return vhost, name
    return settings.vhost, username


class ClientAccess:
    """The permissions of one client."""

    __slots__ = ("_client_id", "_exchange", "_permissions", "_user", "_vhost")

    def __init__(self, node: Node, user: User, vhost: str, exchange: str, client_id: str) -> None:
        self._permissions = node.permissions
        self._user = user
        self._vhost = vhost
        self._exchange = exchange
        self._client_id = client_id

    def check_publish(self, topic: str, routing_key: str) -> None:
        """Raise AccessRefusedError unless the client may publish to the topic."""
        self._check(WRITE, routing_key)

    def check_subscribe(self, binding_key: str) -> None:
        """Raise AccessRefusedError unless the client may subscribe to the filter."""
        self._check(READ, binding_key)

    def _check(self, kind: str, key: str) -> None:
        self._permissions.check(self._user, self._vhost, kind, self._exchange)
        self._permissions.check_topic(self._user, self._vhost, self._exchange, kind, key, client_id=self._client_id)
