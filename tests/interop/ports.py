"""Ports for servers that are killed and started again on the same port.

A port that the kernel chooses is in the range of outgoing connections. While a killed server is away, any connection of
any process may get its port. These ports are below that range, and processes of one test run take them from parts of
their own.
"""

from __future__ import annotations

import itertools
import os
import random
import socket
from pathlib import Path
from typing import Final

FIRST: Final = 10_000
EPHEMERAL: Final = Path("/proc/sys/net/ipv4/ip_local_port_range")
PARTS: Final = 16
PART_MIN: Final = 100


def _part() -> range:
    """Return the ports of this process: its part by the number of its xdist worker, or else by its process id."""
    end = min(32_768, int(EPHEMERAL.read_text().split()[0]))
    size = (end - FIRST) // PARTS
    worker = os.environ.get("PYTEST_XDIST_WORKER", "").removeprefix("gw")
    number = (int(worker) if worker.isdecimal() else os.getpid()) % PARTS
    return range(FIRST + number * size, FIRST + (number + 1) * size)


class _Ports:
    """Takes the ports of the part in turn, from a random one on."""

    def __init__(self) -> None:
        self._pid = 0
        self._numbers = itertools.cycle([0])

    def take(self) -> int:
        if self._pid != os.getpid():
            part = _part()
            if len(part) < PART_MIN:
                return 0
            self._pid = os.getpid()
            begin = random.SystemRandom().randrange(len(part))
            self._numbers = itertools.cycle([*part[begin:], *part[:begin]])
        for port in self._numbers:
            with socket.socket() as probe:
                probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                try:
                    probe.bind(("127.0.0.1", port))
                except OSError:
                    continue
                return port
        raise AssertionError("cycle does not end")


_ports: Final = _Ports()


def free_port() -> int:
    """Return a port that nobody listens on. 0 if all ports of this machine are in the range of outgoing connections."""
    return _ports.take()
