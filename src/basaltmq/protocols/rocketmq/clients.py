"""Connected clients: their settings, whether they are alive, and commands to them.

A client opens a telemetry stream and sends its settings, which the broker answers with its own. It sends a heartbeat
every 10 s. A client is alive if it has made a call within `ALIVE_S`. The broker extends the leases of push consumers
that are alive.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Final

from basaltmq.protocols.rocketmq.rules.status import Refused
from basaltmq.streams.pop.lease import hash_of
from basaltmq.wire import rocketmq_wire_pb2 as wire

ALIVE_S: Final = 35.0
"""Time without a call after which a client counts as dead: three heartbeats and a delay."""

CLIENTS_MAX: Final = 100_000
"""Most clients in memory. At the limit, dead clients are removed. If all are alive, new ones are refused."""

FORGET_EVERY_S: Final = 1.0
SETTINGS_BYTES_MAX: Final = 64 << 10
"""Settings of one client: about 1,000 topics."""

ALL_SETTINGS_BYTES_MAX: Final = 64 << 20

Send = Callable[[wire.TelemetryCommand], None]


class Client:
    """A client. Its user is part of its key, so a client cannot act as the client of another user."""

    __slots__ = ("client_type", "end", "group", "id", "publishes", "seen_s", "send", "settings", "settings_bytes")

    def __init__(self, client_id: str) -> None:
        self.id = client_id
        self.seen_s = 0.0
        self.settings: wire.Settings | None = None
        self.settings_bytes = 0
        self.client_type = 0
        self.group = ""
        self.publishes: dict[str, wire.Resource] = {}
        """Topics that a producer has announced, by their full names."""
        self.send: Send | None = None
        """Sends a command over the telemetry stream."""
        self.end: Callable[[], None] | None = None
        """Ends the telemetry stream."""


class Clients:
    """All clients of the listener."""

    def __init__(self, clock_s: Callable[[], float]) -> None:
        self._clock_s = clock_s
        self._by_id: dict[str, Client] = {}
        self._by_hash: dict[int, Client] = {}
        self._forgot_s = -FORGET_EVERY_S
        self._settings_bytes = 0

    def __len__(self) -> int:
        return len(self._by_id)

    def require(self, client_id: str) -> Client:
        """Return the client that makes a call, or create it. Raise Refused if there are too many."""
        now_s = self._clock_s()
        found = self._by_id.get(client_id)
        if found is None:
            if len(self._by_id) >= CLIENTS_MAX and now_s - self._forgot_s >= FORGET_EVERY_S:
                self._forgot_s = now_s
                self._forget_old()
            if len(self._by_id) >= CLIENTS_MAX:
                raise Refused(wire.TOO_MANY_REQUESTS, f"the limit of {CLIENTS_MAX} clients is reached")
            found = self._by_id[client_id] = Client(client_id)
            self._by_hash[hash_of(client_id)] = found
        found.seen_s = now_s
        return found

    def check_settings(self, client: Client, size_bytes: int) -> None:
        """Count the settings of a client. Raise Refused if they are too large."""
        total = self._settings_bytes - client.settings_bytes + size_bytes
        if size_bytes > SETTINGS_BYTES_MAX or total > ALL_SETTINGS_BYTES_MAX:
            raise Refused(
                wire.TOO_MANY_REQUESTS,
                f"the settings of a client exceed {SETTINGS_BYTES_MAX} bytes, or those of all {ALL_SETTINGS_BYTES_MAX}",
            )
        self._settings_bytes, client.settings_bytes = total, size_bytes

    def is_alive(self, holder: int) -> bool:
        """Whether the client with this hash of its id is alive."""
        found = self._by_hash.get(holder)
        return found is not None and self._clock_s() - found.seen_s < ALIVE_S

    def remove(self, client: Client) -> None:
        """Remove a client that has ended."""
        if self._by_id.pop(client.id, None) is not None:
            self._settings_bytes -= client.settings_bytes
        self._by_hash.pop(hash_of(client.id), None)

    def producers(self, topic: str) -> Iterable[Client]:
        """Yield the producers of a topic that have a telemetry stream."""
        for each in self._by_id.values():
            if each.send is not None and topic in each.publishes:
                yield each

    def end_streams(self) -> None:
        """End all telemetry streams, because the broker stops."""
        for client in list(self._by_id.values()):
            if client.end is not None:
                client.end()

    def _forget_old(self) -> None:
        limit_s = self._clock_s() - ALIVE_S
        for client in [each for each in self._by_id.values() if each.seen_s < limit_s and each.send is None]:
            self.remove(client)
