"""The queues of a store opened in this process: the plane, its group commit, and the thread that keeps its time.

The thread does what is due, then sleeps until the next deadline; a change that brings a deadline closer wakes it.
Deadlines are times of day, sleeping is not: a clock that is set forward is noticed within `CLOCK_LOOK_S`. While there
is no deadline at all the thread sleeps until there is one.

An error while something is due (a full disk, a stalled store) is logged and tried again: what was due stays due.
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
"""The longest sleep before a deadline: how late we are when the clock is set forward."""

BREATH_S: Final = 0.0005
"""Between two pieces of what is due, so that others get the plane's lock in between."""

RETRY_S: Final = 1.0
"""Before what failed is tried again."""

PAGE: Final = 500
"""Configurations read at once when listing."""

_log = logging.getLogger("basaltmq")


class OpenQueues:
    """An open queue plane with its thread."""

    def __init__(
        self, store: Store, clock_ns: Callable[[], int], events: EventWriter | None, admit: Callable[[], None]
    ) -> None:
        """`admit` raises if there is no room for what producers write."""
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
        """Wake everyone who waits, and stop; what was written is made durable."""
        self._closing = True
        self._changed.set()
        self.plane.close()
        self._thread.join()
        self.commit.close()
        if self.events is not None:
            self.events.close()

    def open(self, name: str, given: dict[str, Any], *, create: bool) -> EmbeddedQueue:
        """The queue of this name, made with these settings if there is none and `create` is on."""
        wanted = new_config(name, given)
        try:
            found = self.plane.get(name)
        except QueueNotFoundError:
            if not create:
                raise
            # Where another thread was faster, what it made is checked below.
            with suppress(QueueExistsError):
                self.plane.create(wanted)
            found = self.plane.get(name)
        for setting in given:
            has, asked = getattr(found, setting), getattr(wanted, setting)
            if has != asked:
                raise InvalidConfigError(
                    f"queue {name!r} exists with {setting}={_shown(has)}, not {_shown(asked)}; leave it out to use "
                    "the queue as it is, or change it with alter"
                )
        return self.handle(name)

    def handle(self, name: str) -> EmbeddedQueue:
        return EmbeddedQueue(self.plane, self.commit, name, self._admit)

    def all(self) -> Iterator[EmbeddedQueue]:
        """Every queue, in the order of names."""
        after = ""
        while page := self.plane.configs(after=after, count=PAGE):
            for config in page:
                yield self.handle(config.name)
            after = page[-1].name

    def _run(self) -> None:
        said = ""
        while not self._closing:
            self._changed.clear()
            try:
                deadline_ns = self.plane.run_due()
            except StoreClosedError:
                return
            except Exception as error:
                # Whoever uses the queues meets the same error; until then the log has it, once.
                if str(error) != said:
                    _log.exception("what is due in queues is tried again every %.0f s: it failed", RETRY_S)
                said = str(error)
                self._pause(RETRY_S)
                continue
            said = ""
            if deadline_ns is None:
                self._pause(None)
            else:
                left_s = (deadline_ns - self._clock_ns()) / 1e9
                self._pause(min(max(left_s, BREATH_S), CLOCK_LOOK_S))

    def _pause(self, timeout_s: float | None) -> None:
        # Cleared at the head of the loop: closing may have been said in between.
        if not self._closing:
            self._changed.wait(timeout_s)


def _shown(value: object) -> str:
    return str(value.value) if isinstance(value, Enum) else repr(value)
