"""The broker's node as AMQP connections see it: users, permissions, virtual hosts, and who is connected."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Collection, Mapping
from typing import Any, Protocol

from basaltmq.broker.vhost import VHost


class User(Protocol):
    """Somebody who logged in."""

    @property
    def name(self) -> str: ...

    @property
    def tags(self) -> Collection[str]: ...


class Users(Protocol):
    """Who may come in. Checking a password takes time on purpose: it is awaited."""

    def authenticate(self, name: str, password: str, *, peer_is_loopback: bool) -> Awaitable[User]: ...

    def external(self, certificate: Mapping[str, Any], *, peer_is_loopback: bool) -> Awaitable[User]: ...


class Permissions(Protocol):
    """Who may do what; raises AccessRefusedError."""

    def check(self, user: Any, vhost: str, kind: str, resource: str) -> None: ...

    def check_topic(self, user: Any, vhost: str, exchange: str, kind: str, routing_key: str) -> None: ...

    def check_vhost(self, user: Any, vhost: str) -> None: ...


class Connections(Protocol):
    """Who is connected, for administrators."""

    def add(self, connection: Any) -> None: ...

    def remove(self, connection: Any) -> None: ...


class Node(Protocol):
    """A broker."""

    @property
    def users(self) -> Users: ...

    @property
    def permissions(self) -> Permissions: ...

    @property
    def connections(self) -> Connections: ...

    def vhost(self, name: str) -> VHost: ...

    def on_blocked(self, callback: Callable[[str | None], None]) -> object: ...
