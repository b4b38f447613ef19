"""The common base of AMQP and MQTT connections: the socket, its backpressure, and its description.

The output of a turn is written once, at its end.

Backpressure. While publishers are blocked (disk, memory, store stall), the connection of a publisher is not read. If a
client does not read: above `WRITE_HIGH_BYTES` of unsent data its consumers are paused, so only responses to its own
requests accumulate. Above `WRITE_STOP_BYTES` the connection is not read until the client catches up. So memory per
connection is bounded, and the two sides cannot deadlock.
"""

from __future__ import annotations

import asyncio
import logging
import socket
import ssl
import time
from typing import TYPE_CHECKING, Any, ClassVar, Final, cast

from basaltmq.broker.auth.users import User
from basaltmq.broker.peer import Peer, peer_at
from basaltmq.broker.vhost import VHost
from basaltmq.errors import BasaltError

if TYPE_CHECKING:
    from basaltmq.protocols.server import ConnectionServer

WRITE_HIGH_BYTES: Final = 1 << 20
"""Unsent bytes above which consumers are paused: one second of a 10 Mbit/s link."""

WRITE_LOW_BYTES: Final = 256 << 10
WRITE_STOP_BYTES: Final = 16 << 20
"""Unsent bytes above which the connection is not read. It leaves room for the responses to pipelined requests."""

PART_BYTES_LARGE: Final = 16 << 10
"""Mean size from which on the parts of an output are not joined before they are written."""

CLOSE_S: Final = 5
"""Seconds that a client has to respond when the broker closes the connection."""

_log: Final = logging.getLogger(__name__)


class SocketConnection(asyncio.Protocol):
    """A client connection of a `ConnectionServer`."""

    server: ConnectionServer[Any]
    protocol_name: ClassVar[str]
    """Name of the protocol for the management API."""

    def __init__(self, out: list[Any]) -> None:
        """`out` gets the output until the end of the turn, in bytes or views."""
        self.name = ""
        self.is_full = False
        """The client does not read, and its consumers are paused."""
        self.received_bytes = self.sent_bytes = 0
        self.connected_at_ms = int(time.time() * 1000)
        self._out = out
        self._user: User | None = None
        self._vhost: VHost | None = None
        self._transport: asyncio.Transport | None = None
        self._pause_reasons: set[str] = set()
        """Reasons why the socket is not read."""
        self._flush_is_due = self._is_handling_input = False
        self._task: asyncio.Task[None] | None = None
        self._number = 0
        self._age_s = self._silent_s = 0
        self._has_received = self._has_sent = False

    @property
    def vhost(self) -> VHost:
        assert self._vhost is not None
        return self._vhost

    @property
    def user(self) -> User:
        assert self._user is not None
        return self._user

    def uses(self, vhost: str) -> bool:
        return self._vhost is not None and self._vhost.name == vhost

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        transport = cast(asyncio.Transport, transport)  # uvloop's does not derive from it
        self._transport = transport
        transport.set_write_buffer_limits(high=WRITE_HIGH_BYTES, low=WRITE_LOW_BYTES)
        raw = transport.get_extra_info("socket")
        if raw is not None and raw.family in (socket.AF_INET, socket.AF_INET6):
            raw.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        peer, here = transport.get_extra_info("peername"), transport.get_extra_info("sockname")
        self.name = f"{_address(peer)} -> {_address(here)}"
        self.server.connection_opened(self)

    def eof_received(self) -> bool:
        """The client has closed its side. Thousands may do so at once, so their sockets are closed in portions."""
        return self.server.shares.close_later(self._transport)

    def close(self, reason: str) -> None:
        """Close the connection on request of the operator or the server."""
        raise NotImplementedError

    def abort(self) -> None:
        """Close the socket at once."""
        if self._transport is not None:
            self._transport.abort()

    def tick(self) -> None:
        """Handle timeouts; called once per second."""
        raise NotImplementedError

    def unregister(self) -> None:
        """Remove a connection that was lost, with its exclusive queues."""
        if self._vhost is not None:
            try:
                self._vhost.release_owner(self)
            except BasaltError as failure:
                _log.warning("%s: releasing its exclusive queues failed: %s", self.name, failure)
            self.server.node.connections.remove(self._number)
        self.server.connection_closed(self)

    def block_publisher(self, reason: str) -> None:
        """Stop reading from a publisher while the virtual host blocks publishers."""
        raise NotImplementedError

    def unblock_publisher(self) -> None:
        self.resume_reading("blocked")

    def pause_reading(self, reason: str) -> None:
        """Stop reading for a reason."""
        if not self._pause_reasons and self._transport is not None:
            self._transport.pause_reading()
        self._pause_reasons.add(reason)

    def resume_reading(self, reason: str) -> None:
        """Remove a reason, and resume reading if none is left."""
        if reason in self._pause_reasons:
            self._pause_reasons.remove(reason)
            if not self._pause_reasons and self._transport is not None and not self._transport.is_closing():
                self._transport.resume_reading()
                self._silent_s = 0

    def read_until_closed(self) -> None:
        """Resume reading until the client closes. A running step or turn still pauses it."""
        for reason in list(self._pause_reasons - {"step", "turn"}):
            self.resume_reading(reason)

    def schedule_flush(self) -> None:
        """Schedule a write for the end of the turn, for output that was not caused by received bytes."""
        if not self._flush_is_due and not self._is_handling_input:
            self._flush_is_due = True
            self.server.loop.call_soon(self._flush)

    def flush_now(self) -> None:
        """Write at once, because publishers wait for confirms. One confirm covers many messages."""
        if not self._is_handling_input:
            self._flush()

    def _flush(self) -> None:
        self._flush_is_due = False
        out, transport = self._out, self._transport
        if not out or transport is None:
            out.clear()
            return
        size = sum(map(len, out))
        self._has_sent = True
        self.sent_bytes += size
        if size >= len(out) * PART_BYTES_LARGE:
            transport.writelines(out)
        else:
            transport.write(b"".join(out))
        out.clear()
        if self.is_full and transport.get_write_buffer_size() > WRITE_STOP_BYTES:
            self.pause_reading("unread")

    def peer(self) -> Peer:
        """Return where the client connects from."""
        peer = self._transport.get_extra_info("peername") if self._transport is not None else None
        if isinstance(peer, tuple) and peer:
            return peer_at(str(peer[0]))
        # A Unix domain socket is always local.
        return Peer("", is_loopback=isinstance(peer, str | bytes))

    def certificate(self) -> dict[str, Any]:
        """Return the client certificate of a TLS connection, or an empty one."""
        if self._transport is None or self._transport.get_extra_info("ssl_object") is None:
            return {}
        return self._transport.get_extra_info("peercert") or {}

    def info(self) -> dict[str, Any]:
        """Return the connection's state for the management API."""
        transport = self._transport
        peer, here, tls = (
            None if transport is None else transport.get_extra_info(name)
            for name in ("peername", "sockname", "ssl_object")
        )
        return {
            "name": self.name,
            "protocol": self.protocol_name,
            "user": "" if self._user is None else self._user.name,
            "vhost": "" if self._vhost is None else self._vhost.name,
            "peer_host": peer[0] if isinstance(peer, tuple) else "",
            "peer_port": peer[1] if isinstance(peer, tuple) else 0,
            "host": here[0] if isinstance(here, tuple) else "",
            "port": here[1] if isinstance(here, tuple) else 0,
            "ssl": isinstance(tls, ssl.SSLObject),
            "connected_at": self.connected_at_ms,
            "recv_oct": self.received_bytes,
            "send_oct": self.sent_bytes,
            "send_pend": 0 if transport is None else transport.get_write_buffer_size(),
        }


def _address(address: Any) -> str:
    if isinstance(address, tuple):
        host = f"[{address[0]}]" if ":" in str(address[0]) else address[0]
        return f"{host}:{address[1]}"
    return str(address or "local")
