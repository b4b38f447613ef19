"""Runtime settings of the plane, and the throttles among them (SPEC C11, C14).

runtime_config.py stores the settings. If a throttle setting is unreadable at open, it is ignored and listed in
`faults`.
"""

from __future__ import annotations

from collections.abc import Callable

from basaltmq.queues.change_runner import ChangeRunner
from basaltmq.queues.loaded_queues import LoadedQueues
from basaltmq.queues.queue import PlaneContext
from basaltmq.queues.runtime_config import THROTTLE_PREFIX, RuntimeConfig, Setting, SettingsPage
from basaltmq.queues.throttle.token_buckets import Limit


class ThrottleSettings:
    """Applies changed settings to the token buckets."""

    def __init__(
        self,
        settings: RuntimeConfig,
        shared: PlaneContext,
        changes: ChangeRunner,
        loaded: LoadedQueues,
        announce_due: Callable[[], None],
    ) -> None:
        self._settings = settings
        self._shared = shared
        self._changes = changes
        self._loaded = loaded
        self._announce_due = announce_due
        self.faults: list[str] = []
        """Throttles that were unreadable at open, with the reason."""
        for key, limit in settings.throttles(self.faults.append):
            self._set(key, limit)
        settings.watch(THROTTLE_PREFIX, self._changed)

    def set(self, key: str, value: str, *, secret: bool) -> Setting:
        with self._changes.lock:
            self._changes.require_open()
            setting = self._settings.set(key, value, secret=secret)
        self._changes.sync()
        return setting

    def delete(self, key: str) -> bool:
        with self._changes.lock:
            self._changes.require_open()
            existed = self._settings.delete(key)
        self._changes.sync()
        return existed

    def list(self, prefix: str, *, limit: int, after: str | None) -> SettingsPage:
        with self._changes.lock:
            self._changes.require_open()
            return self._settings.list(prefix, limit=limit, after=after)

    def _changed(self, name: str, value: str | None) -> None:
        key = name.removeprefix(THROTTLE_PREFIX)
        if value is None:
            self._shared.buckets.remove_limit(key)
            self._shared.throttles.discard(key)
        else:
            self._set(key, Limit.parse(value))
        now_ns = self._changes.clock_ns()
        for queue in self._loaded:
            if queue.throttling is not None:
                queue.throttling.limit_changed(key, now_ns)
        self._announce_due()

    def _set(self, key: str, limit: Limit) -> None:
        self._shared.buckets.set_limit(key, limit, self._changes.clock_ns())
        self._shared.throttles.add(key)
