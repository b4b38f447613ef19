"""Reports the broker's state to systemd (the sd_notify protocol, without libsystemd)."""

from __future__ import annotations

import contextlib
import os
import socket
import time
from collections.abc import Mapping
from typing import Final

NOTIFY_SOCKET: Final = "NOTIFY_SOCKET"


class Notifier:
    """Sends to the socket in NOTIFY_SOCKET. Does nothing without one."""

    def __init__(self, environment: Mapping[str, str]) -> None:
        address = environment.get(NOTIFY_SOCKET, "")
        self._address = "\0" + address[1:] if address.startswith("@") else address
        self._watchdog_us = 0
        with contextlib.suppress(ValueError):
            if environment.get("WATCHDOG_PID", str(os.getpid())) == str(os.getpid()):
                self._watchdog_us = int(environment.get("WATCHDOG_USEC", "0"))

    @property
    def watchdog_s(self) -> float | None:
        """Interval for `alive`, half of the watchdog timeout. None without a watchdog."""
        return self._watchdog_us / 2e6 if self._address and self._watchdog_us > 0 else None

    def ready(self, status: str) -> None:
        self._send(f"READY=1\nSTATUS={status}\nMAINPID={os.getpid()}")

    def reloading(self) -> None:
        self._send(f"RELOADING=1\nMONOTONIC_USEC={time.monotonic_ns() // 1000}")

    def stopping(self) -> None:
        self._send("STOPPING=1\nSTATUS=stopping")

    def alive(self) -> None:
        self._send("WATCHDOG=1")

    def extend(self, seconds: int) -> None:
        """Request more time to start or stop."""
        self._send(f"EXTEND_TIMEOUT_USEC={seconds * 1_000_000}")

    def _send(self, text: str) -> None:
        if not self._address:
            return
        with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sender:
            sender.sendto(text.encode(), self._address)
