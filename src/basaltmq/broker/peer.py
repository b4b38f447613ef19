"""Where a client connects from."""

from __future__ import annotations

import ipaddress
from typing import NamedTuple


class Peer(NamedTuple):
    """The other end of a connection."""

    address: str
    """Its IP address; empty if it has none."""
    is_loopback: bool
    """Whether it is on this machine. A client behind a proxy on this machine is not."""


def peer_at(host: str) -> Peer:
    """The peer at an IP address as sockets name it: `::1`, `fe80::1%eth0`, `::ffff:127.0.0.1`."""
    try:
        found = ipaddress.ip_address(host.partition("%")[0])
    except ValueError:
        return Peer("", is_loopback=False)
    mapped = getattr(found, "ipv4_mapped", None)
    real = mapped or found
    return Peer(str(real), is_loopback=real.is_loopback)
