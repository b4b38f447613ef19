"""Registry of a node's open connections of all protocols, for the admin API."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Any, Protocol


class Connection(Protocol):
    """A connection of any protocol."""

    def info(self) -> dict[str, Any]:
        """Return details for operators: always `name`, `user`, `vhost` and `protocol`, never secrets."""
        ...

    def close(self, reason: str) -> None:
        """Close the connection and send the client the reason."""
        ...


class Connections:
    """Open connections by a number unique within the process."""

    def __init__(self) -> None:
        self._by_number: dict[int, Connection] = {}
        self._owners: dict[int, tuple[str, str]] = {}
        self._by_user: Counter[str] = Counter()
        self._by_vhost: Counter[str] = Counter()
        self._last = 0

    def add(self, connection: Connection, *, user: str = "", vhost: str = "") -> int:
        """Add a connection. It counts for the limits of its user and virtual host, if they are given."""
        self._last += 1
        self._by_number[self._last] = connection
        if user and vhost:
            self._owners[self._last] = (user, vhost)
            self._by_user[user] += 1
            self._by_vhost[vhost] += 1
        return self._last

    def remove(self, number: int) -> None:
        self._by_number.pop(number, None)
        user, vhost = self._owners.pop(number, ("", ""))
        for counts, name in ((self._by_user, user), (self._by_vhost, vhost)):
            if name:
                counts[name] -= 1
                if not counts[name]:
                    del counts[name]

    def count(self, *, user: str = "", vhost: str = "") -> int:
        """Return the number of connections of a user or virtual host that count for its limits."""
        return self._by_user[user] if user else self._by_vhost[vhost]

    def __len__(self) -> int:
        return len(self._by_number)

    def __iter__(self) -> Iterator[Connection]:
        return iter(list(self._by_number.values()))

    def close_all(self, reason: str, *, user: str | None = None, vhost: str | None = None) -> int:
        """Close all connections, or those of a user or virtual host. Return their number."""
        count = 0
        for connection in self:
            info = connection.info()
            if (user is None or info.get("user") == user) and (vhost is None or info.get("vhost") == vhost):
                connection.close(reason)
                count += 1
        return count
