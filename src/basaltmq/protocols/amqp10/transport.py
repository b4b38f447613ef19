"""What a connection needs to know about its transport: the peer, its certificate, addresses."""

from __future__ import annotations

import asyncio
import ssl
from typing import Any

from basaltmq.broker.peer import Peer, peer_at


def certificate_of(transport: asyncio.Transport | None) -> dict[str, Any]:
    """Return the client certificate of a TLS connection, or an empty one."""
    if transport is None or transport.get_extra_info("ssl_object") is None:
        return {}
    return transport.get_extra_info("peercert") or {}


def peer_of(transport: asyncio.Transport | None) -> Peer:
    """Return where a client connects from."""
    peer = transport.get_extra_info("peername") if transport is not None else None
    if isinstance(peer, tuple) and peer:
        return peer_at(str(peer[0]))
    # A Unix domain socket is always local.
    return Peer("", is_loopback=isinstance(peer, str | bytes))


def socket_info(transport: asyncio.Transport | None) -> dict[str, Any]:
    """Return addresses, TLS and unsent bytes for the management API."""
    peer = transport.get_extra_info("peername") if transport is not None else None
    here = transport.get_extra_info("sockname") if transport is not None else None
    tls = transport.get_extra_info("ssl_object") if transport is not None else None
    return {
        "peer_host": peer[0] if isinstance(peer, tuple) else "",
        "peer_port": peer[1] if isinstance(peer, tuple) else 0,
        "host": here[0] if isinstance(here, tuple) else "",
        "port": here[1] if isinstance(here, tuple) else 0,
        "ssl": isinstance(tls, ssl.SSLObject),
        "send_pend": 0 if transport is None else transport.get_write_buffer_size(),
    }


def address_text(address: Any) -> str:
    """Return an address as text, for names of connections."""
    if isinstance(address, tuple):
        host = f"[{address[0]}]" if ":" in str(address[0]) else address[0]
        return f"{host}:{address[1]}"
    return str(address or "local")
