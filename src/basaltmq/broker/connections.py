"""The connections of a node, of every protocol, for those who administer it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Protocol

from basaltmq.errors import NotFoundError


class Connection(Protocol):
    """What a protocol's connection shows of itself."""

    def info(self) -> dict[str, Any]:
        """What an operator wants to know; `name`, `user`, `vhost` and `protocol` are always there. No secrets."""
        ...

    def close(self, reason: str) -> None:
        """End it, telling the client why."""
        ...


class Connections:
    """Connections by a number of their own."""

    def __init__(self) -> None:
        self._by_number: dict[int, Connection] = {}
        self._last = 0

    def add(self, connection: Connection) -> int:
        self._last += 1
        self._by_number[self._last] = connection
        return self._last

    def remove(self, number: int) -> None:
        self._by_number.pop(number, None)

    def __len__(self) -> int:
        return len(self._by_number)

    def __iter__(self) -> Iterator[Connection]:
        return iter(list(self._by_number.values()))

    def find(self, name: str) -> Connection:
        for connection in self:
            if connection.info().get("name") == name:
                return connection
        raise NotFoundError(f"there is no connection {name!r}")

    def close_all(self, reason: str, *, user: str | None = None, vhost: str | None = None) -> int:
        """End connections, of a user or of a virtual host if named; how many."""
        count = 0
        for connection in self:
            info = connection.info()
            if (user is None or info.get("user") == user) and (vhost is None or info.get("vhost") == vhost):
                connection.close(reason)
                count += 1
        return count
