"""Flow control: publishers are held while the disk, memory or a store has no room. Consumers never are.

Alarms are named; publishers are held while any is on. Those of the node (disk, memory) hold everybody, that of a
virtual host (its store is behind, or over its size) those who publish there. Free space and resident memory are looked
at every `INTERVAL_S`; a store tells by itself. An alarm goes out only when the value is clear of its limit by a
twentieth, so that it does not flicker. Free space and the reserve for a full disk are in `store.free_space`.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Final, TypeAlias

from basaltmq.broker.memory_limit import resident_bytes
from basaltmq.store.space.free_space import CLEAR, FreeSpace, free_bytes
from basaltmq.store.space.reserve import Reserve

INTERVAL_S: Final = 1.0
NEAR_INTERVAL_S: Final = 0.1
"""The same where free space is near its limit: publishers that write 1 GB/s pass it by 100 MB."""

Listener: TypeAlias = Callable[[str | None], None]
"""Called with the reason publishers are held, None when they are not any more."""

DISK: Final = "disk"
MEMORY: Final = "memory"

_log: Final = logging.getLogger(__name__)


class Alarms:
    """What holds publishers, and who is told."""

    def __init__(self) -> None:
        self._reasons: dict[tuple[str | None, str], str] = {}
        """(vhost or None, name) -> text."""
        self._listeners: dict[int, tuple[str | None, Listener, str | None]] = {}
        self._last = 0

    def reason(self, vhost: str | None = None) -> str | None:
        """Why publishers of a virtual host (None: of any) are held."""
        for (of, _), text in self._reasons.items():
            if of is None or vhost is None or of == vhost:
                return text
        return None

    def all(self) -> list[tuple[str | None, str, str]]:
        """(vhost or None, name, text) of every alarm that is on."""
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
                _log.warning("publishers%s are no longer held for: %s", where, name)
            else:
                _log.warning("publishers%s are held: %s", where, text)
            self._tell()

    def listen(self, listener: Listener, vhost: str | None = None) -> Callable[[], None]:
        """Tell `listener` of every change for a virtual host (None: for any), at once if publishers are held."""
        self._last += 1
        number = self._last
        reason = self.reason(vhost)
        self._listeners[number] = (vhost, listener, reason)
        if reason is not None:
            listener(reason)

        def stop() -> None:
            self._listeners.pop(number, None)

        return stop

    def _tell(self) -> None:
        for number, (vhost, listener, told) in list(self._listeners.items()):
            reason = self.reason(vhost)
            if (reason is None) is not (told is None):
                self._listeners[number] = (vhost, listener, reason)
                try:
                    listener(reason)
                except Exception:
                    _log.exception("a listener failed on alarm %r", reason)


class Watch:
    """Looks at disk and memory."""

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
        """Until the next look."""
        return NEAR_INTERVAL_S if self.space.is_near else INTERVAL_S

    def look(self) -> None:
        """Look once, and turn alarms on or off."""
        most = self._resident_max_bytes()
        try:
            low = self.space.look()
            self.resident_bytes = self._resident()
        except OSError as error:
            _log.error("free space and memory cannot be told: %s", error)
            return
        self._high = self.resident_bytes > (most / CLEAR if self._high else most)
        self._alarms.set(DISK, low)
        self._alarms.set(
            MEMORY,
            f"low on memory: {self.resident_bytes} bytes are resident, the limit is {most}" if self._high else None,
        )
