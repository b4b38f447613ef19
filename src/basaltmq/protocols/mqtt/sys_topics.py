"""`$SYS`: state of the broker as read-only topics, with the names that mosquitto uses.

The topics are not published to the exchange, so bindings with `#` do not see them. A client that subscribes to a filter
below `$SYS/` gets the current values as retained messages with QoS 0, and all values again every `INTERVAL_S`.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Final

from basaltmq import __version__
from basaltmq.protocols.mqtt.sessions.inbound import SYS_PREFIX

if TYPE_CHECKING:
    from basaltmq.protocols.mqtt.server import Server

INTERVAL_S: Final = 10.0


def is_sys(topic_filter: str) -> bool:
    return topic_filter.startswith(SYS_PREFIX) or topic_filter == "$SYS"


class SysTopics:
    """The values of `$SYS`."""

    def __init__(self, server: Server, clock_s: Callable[[], float] = time.monotonic) -> None:
        self._server = server
        self._clock_s = clock_s
        self._started_s = clock_s()
        self._due_s = clock_s() + INTERVAL_S

    def values(self) -> Iterator[tuple[str, bytes]]:
        """Yield topics and payloads."""
        totals = self._server.totals()
        numbers = {
            "uptime": int(self._clock_s() - self._started_s),
            "clients/connected": totals.connected,
            "messages/received": totals.received,
            "messages/sent": totals.sent,
            "publish/messages/dropped": totals.dropped,
            "bytes/received": totals.received_bytes,
            "bytes/sent": totals.sent_bytes,
        }
        yield "$SYS/broker/version", f"Basalt {__version__}".encode()
        for name, value in numbers.items():
            yield f"$SYS/broker/{name}", str(value).encode()

    def tick(self) -> None:
        """Send the values to their subscribers, if the interval is over."""
        if self._clock_s() < self._due_s:
            return
        self._due_s = self._clock_s() + INTERVAL_S
        watching = [each for each in self._server.connections if each.is_running and each.session.watches_sys]
        if watching:
            values = list(self.values())
            for connection in watching:
                if connection.outbound is not None and not connection.is_full:
                    connection.outbound.send_direct(values)
