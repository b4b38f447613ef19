"""Flow control: alarms that block publishers while disk, memory or a store has no room. Consumers are never blocked.

Publishers are blocked while any alarm is on. Node alarms (disk, memory) block all publishers. Alarms of a virtual host
(its store is stalled or exceeds its size limit) block its own publishers. Free space and resident memory are measured
every `INTERVAL_S`; stores notify on change. An alarm clears only when the value is 5 % clear of its limit, so that it
does not oscillate. `store/space` measures free space and manages the reserve for a full disk.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Final, TypeAlias

from basaltmq.broker.resources.memory_limit import resident_bytes
from basaltmq.store.space.free_space import CLEAR, FreeSpace, free_bytes
from basaltmq.store.space.reserve import Reserve

INTERVAL_S: Final = 1.0
NEAR_INTERVAL_S: Final = 0.1
"""Interval while free space is near its limit. At 1 GB/s, publishers exceed the limit by at most 100 MB."""

Listener: TypeAlias = Callable[[str | None], None]
"""Called with the reason when publishers become blocked, and with None when they are unblocked."""

DISK: Final = "disk"
MEMORY: Final = "memory"

_log: Final = logging.getLogger(__name__)


class Alarms:
    """Alarms that block publishers, and the listeners for changes."""

    def __init__(self) -> None:
        self._reasons: dict[tuple[str | None, str], str] = {}
        """(vhost or None, name) -> text."""
        self._listeners: dict[int, tuple[str | None, Listener, str | None]] = {}
        self._last = 0

    def reason(self, vhost: str | None = None) -> str | None:
        """Return why publishers of a virtual host (None: of any) are blocked; None if they are not."""
        for (of, _), text in self._reasons.items():
            if of is None or vhost is None or of == vhost:
                return text
        return None

    def all(self) -> list[tuple[str | None, str, str]]:
        """Return (vhost or None, name, text) of every alarm that is on."""
        return [(vhost, name, text) for (vhost, name), text in self._reasons.items()]

    def set(self, name: str, text: str | None, vhost: str | None = None) -> None:
        """Turn an alarm on, or off with None."""
        key = (vhost, name)
        was = self._reasons.get(key)
        if text is None:
            self._reasons.pop(key, None)
        else:
            self._reasons[key] = text
        if (was is None) is not (text is None):
            where = "" if vhost is None else f" of vhost {vhost!r}"
            if text is None:
                _log.warning("alarm cleared, publishers%s are no longer blocked by: %s", where, name)
            else:
                _log.warning("publishers%s are blocked: %s", where, text)
            self._notify()

    def listen(self, listener: Listener, vhost: str | None = None) -> Callable[[], None]:
        """Notify `listener` of every change for a virtual host (None: for any), and now if publishers are blocked.

        Returns a function that unregisters the listener.
        """
        self._last += 1
        number = self._last
        reason = self.reason(vhost)
        self._listeners[number] = (vhost, listener, reason)
        if reason is not None:
            listener(reason)

        def stop() -> None:
            self._listeners.pop(number, None)

        return stop

    def _notify(self) -> None:
        for number, (vhost, listener, notified) in list(self._listeners.items()):
            reason = self.reason(vhost)
            if (reason is None) is not (notified is None):
                self._listeners[number] = (vhost, listener, reason)
                try:
                    listener(reason)
                except Exception:
                    _log.exception("an alarm listener failed; alarm: %r", reason)


class Watch:
    """Measures free disk space and resident memory, and sets the node's alarms."""

    def __init__(
        self,
        alarms: Alarms,
        path: Path,
        *,
        free_min_bytes: Callable[[], int],
        resident_max_bytes: Callable[[], int],
        reserve: Reserve | None = None,
        free: Callable[[Path], int] = free_bytes,
        resident: Callable[[], int] = resident_bytes,
    ) -> None:
        self._alarms = alarms
        self._resident_max_bytes = resident_max_bytes
        self._resident = resident
        self.space = FreeSpace(path, free_min_bytes=free_min_bytes, reserve=reserve, free=free)
        self.resident_bytes = 0
        self._high = False

    @property
    def interval_s(self) -> float:
        """Delay until the next measurement."""
        return NEAR_INTERVAL_S if self.space.is_near else INTERVAL_S

    def look(self) -> None:
        """Measure once, and turn alarms on or off."""
        most = self._resident_max_bytes()
        try:
            low = self.space.check()
            self.resident_bytes = self._resident()
        except OSError as error:
            _log.error("cannot measure free disk space and memory: %s", error)
            return
        self._high = self.resident_bytes > (most / CLEAR if self._high else most)
        self._alarms.set(DISK, low)
        self._alarms.set(
            MEMORY,
            f"low on memory: {self.resident_bytes} bytes resident, limit {most} bytes" if self._high else None,
        )
