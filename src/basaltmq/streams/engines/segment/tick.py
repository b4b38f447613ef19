"""Shared sync requests: the waiters of one event loop turn request one sync at the end of the turn.

A sync that starts with the first of 16 writers of a turn covers one write, and 15 writers wait for a second sync.
Writers that were notified together run in the same turn, so a request at its end covers all of them. There is no timer:
the sync of a single writer starts in the same turn.
"""

from __future__ import annotations

import asyncio
import threading
from functools import partial

from basaltmq.errors import BasaltError, StorageError
from basaltmq.store.sync.group_commit import GroupCommit, Synced, call_all, resolve


class _Turn(threading.local):
    """The callbacks of the current turn of this thread's loop."""

    loop: asyncio.AbstractEventLoop | None = None
    callbacks: list[Synced]


class TickSync:
    """Waits for the durability of all earlier writes, for coroutines of any loop."""

    def __init__(self, group: GroupCommit) -> None:
        self._group = group
        self._turn = _Turn()

    def durable(self) -> asyncio.Future[None]:
        """Return a future of the running loop that resolves when all writes of this turn are durable."""
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.call_when_durable(partial(resolve, future))
        return future

    def call_when_durable(self, callback: Synced) -> None:
        """Call `callback` in the loop when all writes of this turn are durable."""
        loop = asyncio.get_running_loop()
        turn = self._turn
        if turn.loop is not loop:
            turn.loop = loop
            turn.callbacks = []
            loop.call_soon(self._end, loop)
        turn.callbacks.append(callback)

    def _end(self, loop: asyncio.AbstractEventLoop) -> None:
        turn = self._turn
        if turn.loop is not loop:
            return
        callbacks = turn.callbacks
        turn.loop = None
        turn.callbacks = []
        try:
            self._group.after_sync(loop, callbacks)
        except Exception as error:
            failure = error if isinstance(error, BasaltError) else StorageError(f"the sync failed: {error}")
            call_all(callbacks, failure)
