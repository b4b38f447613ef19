"""Binds the broker's sockets. This happens before the data is opened, so that a port in use is reported at once."""

from __future__ import annotations

import contextlib
import errno
import resource
import socket
from typing import Final

from basaltmq.broker.config.settings import Config
from basaltmq.errors import AddressUnavailableError

FILES_OF_STORES: Final = 1_024
"""File handles for SST files, segments and logs."""


def bind_all(config: Config) -> dict[str, socket.socket]:
    """Return a bound socket per enabled listener, by section. If one fails, all are closed."""
    bound: dict[str, socket.socket] = {}
    try:
        for section, host, port in config.endpoints():
            bound[section] = _bind(section, host, port)
    except BaseException:
        for each in bound.values():
            each.close()
        raise
    return bound


def _bind(section: str, host: str, port: int) -> socket.socket:
    try:
        kind, _, _, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE | socket.AI_NUMERICSERV
        )[0]
    except OSError as error:
        raise AddressUnavailableError(
            f"{section}: {host!r} is not an address of this machine ({error.strerror}); change {section}.host"
        ) from error
    sock = socket.socket(kind, socket.SOCK_STREAM)
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if kind == socket.AF_INET6:
            # Accept IPv4 on "::" too, whatever the default of the machine is.
            sock.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
        sock.bind(address)
        sock.setblocking(False)
    except OSError as error:
        sock.close()
        raise AddressUnavailableError(_advice(section, host, port, error)) from error
    return sock


def _advice(section: str, host: str, port: int, error: OSError) -> str:
    flag = f"--{section.replace('_', '-')}-port"
    if error.errno == errno.EADDRINUSE:
        return (
            f"{section}: port {port} on {host} is in use; stop the process that uses it, or choose "
            f"another port with {flag}"
        )
    if error.errno in (errno.EACCES, errno.EPERM):
        return f"{section}: port {port} needs root; choose one above 1023 with {flag}"
    if error.errno == errno.EADDRNOTAVAIL:
        return f"{section}: {host} is not an address of this machine; change {section}.host or --host"
    return f"{section}: port {port} on {host} cannot be used: {error.strerror}"


def files_needed(config: Config) -> int:
    return config.limits.connections_max + config.admin.connections_max + FILES_OF_STORES


def raise_file_limit(config: Config) -> int:
    """Raise the limit of open files to what the settings need, within the hard limit. Return the new limit."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    needed = files_needed(config)
    wanted = needed if hard == resource.RLIM_INFINITY else min(needed, hard)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        with contextlib.suppress(ValueError, OSError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
    return resource.getrlimit(resource.RLIMIT_NOFILE)[0]
