"""Waiting for a sync together: those of one turn of an event loop ask for it once, at the turn's end.

A sync that begins with the first of sixteen writers of a turn covers one write, and fifteen wait for the next one: two
syncs where one would do. Writers that were told together wake up in the same turn, so asking at its end gathers them
all. There is no timer: a lone writer's sync begins in the same turn.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from typing import cast

from basaltmq.store.after_sync import AfterSync
from basaltmq.store.sync.group_commit import GroupSync


class _Turn(threading.local):
    """What the current turn of this thread's loop has gathered."""

    loop: asyncio.AbstractEventLoop | None = None
    futures: list[asyncio.Future[None]]


class TickSync:
    """Durability of everything written before, for the coroutines of any loop."""

    def __init__(self, group: GroupSync) -> None:
        self._group = group
        self._turn = _Turn()

    def durable(self) -> asyncio.Future[None]:
        """A future of the running loop that resolves when everything written in this turn is durable."""
        loop = asyncio.get_running_loop()
        future: asyncio.Future[None] = loop.create_future()
        self._gather(loop, future)
        return future

    def tell(self, told: Callable[[BaseException | None], None]) -> None:
        """As `durable`, by a call in the turn that hears of it. It must not raise."""
        self._gather(asyncio.get_running_loop(), cast("asyncio.Future[None]", AfterSync(told)))

    def _gather(self, loop: asyncio.AbstractEventLoop, future: asyncio.Future[None]) -> None:
        turn = self._turn
        if turn.loop is not loop:
            turn.loop = loop
            turn.futures = []
            loop.call_soon(self._end, loop)
        turn.futures.append(future)

    def _end(self, loop: asyncio.AbstractEventLoop) -> None:
        turn = self._turn
        if turn.loop is not loop:
            return
        futures = turn.futures
        turn.loop = None
        turn.futures = []
        try:
            self._group.resolve_durable(loop, futures)
        except Exception as error:
            _tell(futures, error)


def _tell(futures: list[asyncio.Future[None]], error: BaseException) -> None:
    for future in futures:
        if not future.done():
            future.set_exception(error)
