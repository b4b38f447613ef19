"""The remote end of a connection: its address and whether it is local."""

from __future__ import annotations

import ipaddress
from typing import NamedTuple


class Peer(NamedTuple):
    """The remote end of a connection."""

    address: str
    """The IP address; empty if there is none."""
    is_loopback: bool
    """Whether the client is on this machine. A client behind a local proxy is not."""


def peer_at(host: str) -> Peer:
    """Return the peer at a socket address such as `::1`, `fe80::1%eth0` or `::ffff:127.0.0.1`."""
    try:
        found = ipaddress.ip_address(host.partition("%")[0])
    except ValueError:
        return Peer("", is_loopback=False)
    mapped = getattr(found, "ipv4_mapped", None)
    real = mapped or found
    return Peer(str(real), is_loopback=real.is_loopback)
