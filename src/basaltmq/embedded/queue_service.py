"""The queues of a store opened in this process: the plane, its group commit, and the thread that does timed work.

The thread does due work, then sleeps until the next deadline. A change that brings the deadline closer wakes it.
Deadlines are wall-clock times, so the thread checks every `CLOCK_LOOK_S` seconds whether the clock was set forward. It
sleeps without limit while there is no deadline.

An error in due work (a full disk, a stalled store) is logged, and the work is retried.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from enum import Enum
from typing import Any, Final

from basaltmq.embedded.queue import EmbeddedQueue
from basaltmq.errors import InvalidConfigError, QueueExistsError, QueueNotFoundError, StoreClosedError
from basaltmq.queues.config import new_config
from basaltmq.queues.events.topic import EventWriter
from basaltmq.queues.plane import QueuePlane
from basaltmq.queues.scripts.budget import EMBEDDED_CALL_MS, ScriptBudget
from basaltmq.store.api import Store
from basaltmq.store.sync.group_commit import GroupCommit

CLOCK_LOOK_S: Final = 1.0
"""Longest sleep before a deadline, in seconds: the maximum delay when the clock is set forward."""

PAUSE_S: Final = 0.0005
"""Pause between two pieces of due work, in seconds, so that other threads get the plane's lock."""

RETRY_S: Final = 1.0
"""Delay before failed work is retried, in seconds."""

PAGE: Final = 500
"""Configurations per read when listing."""

_log = logging.getLogger("basaltmq")


class QueueService:
    """An open queue plane with its thread."""

    def __init__(
        self, store: Store, clock_ns: Callable[[], int], events: EventWriter | None, admit: Callable[[], None]
    ) -> None:
        """`admit` raises an error if there is no disk space for producers."""
        self._clock_ns = clock_ns
        self._admit = admit
        self._changed = threading.Event()
        self._closing = False
        self.commit = GroupCommit(store)
        try:
            self.plane = QueuePlane(
                store,
                self.commit,
                clock_ns=clock_ns,
                on_deadline=self._changed.set,
                script_budget=ScriptBudget(EMBEDDED_CALL_MS, share=1),
            )
        except BaseException:
            self.commit.close()
            raise
        self.events = events
        if events is not None:
            self.plane.record_events(events.recorder)
        for fault in self.plane.bad_settings:
            _log.error("a setting of the queues cannot be used: %s", fault)
        self._thread = threading.Thread(target=self._run, name="basalt-queues", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Wake all waiters, stop the thread, and make pending writes durable."""
        self._closing = True
        self._changed.set()
        self.plane.close()
        self._thread.join()
        self.commit.close()
        if self.events is not None:
            self.events.close()

    def open(self, name: str, given: dict[str, Any], *, create: bool) -> EmbeddedQueue:
        """Return the queue, created with these settings if it does not exist and `create` is true."""
        wanted = new_config(name, given)
        try:
            found = self.plane.get(name)
        except QueueNotFoundError:
            if not create:
                raise
            # Another thread may have created it first; its settings are checked below.
            with suppress(QueueExistsError):
                self.plane.create(wanted)
            found = self.plane.get(name)
        for setting in given:
            has, requested = getattr(found, setting), getattr(wanted, setting)
            if has != requested:
                raise InvalidConfigError(
                    f"queue {name!r} exists with {setting}={_shown(has)}, not {_shown(requested)}; omit the setting to "
                    "use the queue as it is, or change it with alter"
                )
        return self.handle(name)

    def handle(self, name: str) -> EmbeddedQueue:
        return EmbeddedQueue(self.plane, self.commit, name, self._admit)

    def all(self) -> Iterator[EmbeddedQueue]:
        """Yield all queues, ordered by name."""
        after = ""
        while page := self.plane.configs(after=after, count=PAGE):
            for config in page:
                yield self.handle(config.name)
            after = page[-1].name

    def _run(self) -> None:
        last_error = ""
        while not self._closing:
            self._changed.clear()
            try:
                deadline_ns = self.plane.run_due()
            except StoreClosedError:
                return
            except Exception as error:
                # Users of the queues get the same error. Until then, log it once.
                if str(error) != last_error:
                    _log.exception("due work of the queues failed and is retried every %.0f s", RETRY_S)
                last_error = str(error)
                self._pause(RETRY_S)
                continue
            last_error = ""
            if deadline_ns is None:
                self._pause(None)
            else:
                left_s = (deadline_ns - self._clock_ns()) / 1e9
                self._pause(min(max(left_s, PAUSE_S), CLOCK_LOOK_S))

    def _pause(self, timeout_s: float | None) -> None:
        # The loop clears the event at its head, so `close` may have set it in between.
        if not self._closing:
            self._changed.wait(timeout_s)


def _shown(value: object) -> str:
    return str(value.value) if isinstance(value, Enum) else repr(value)
