"""Cancels waiting calls from other threads."""

from __future__ import annotations

import threading
from collections.abc import Callable


class Cancellation:
    """Cancels a waiting call from another thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._cancel: Callable[[], object] | None = None
        self.is_cancelled = False

    def cancel(self) -> None:
        """Cancel the current wait and every later one."""
        with self._lock:
            self.is_cancelled = True
            cancel = self._cancel
        if cancel is not None:
            cancel()

    def attach(self, cancel: Callable[[], object]) -> None:
        """Register `cancel` for the call that begins."""
        with self._lock:
            self._cancel = cancel
            is_cancelled = self.is_cancelled
        if is_cancelled:
            cancel()
