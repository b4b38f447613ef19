"""A channel for programs without a loop: a thread of its own runs one, and calls are handed to it.

Threads wait for their calls as for any future; the loop's thread runs nothing of the program's.
"""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Callable, Coroutine
from concurrent.futures import Future
from contextlib import suppress
from typing import Any, TypeVar

from basaltmq.client.error_mapping import fault_of
from basaltmq.errors import InvalidArgumentError, UnavailableError
from basaltmq.protocols.grpc.client.call import CallFailed
from basaltmq.protocols.grpc.client.channel import Channel

T = TypeVar("T")


class Line:
    """A channel and its thread, which begins with the first call. Safe to use from any thread."""

    def __init__(self, channel: Channel) -> None:
        self._channel = channel
        self._lock = threading.Lock()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None
        self._process = 0
        self._is_closed = False

    def begin(self, work: Callable[[Channel], Coroutine[Any, Any, T]]) -> Future[T]:
        """Have something done with the channel, in its thread."""
        loop = self._running()
        coroutine = work(self._channel)
        try:
            return asyncio.run_coroutine_threadsafe(coroutine, loop)
        except RuntimeError:
            # Closed by another thread a moment ago.
            coroutine.close()
            raise UnavailableError("the client is closed") from None

    def wait(self, future: Future[T]) -> T:
        """What was done; errors are those of the broker."""
        try:
            return future.result()
        except CallFailed as failure:
            raise fault_of(failure) from None
        finally:
            # Whoever is interrupted does not want it any more.
            future.cancel()

    def soon(self, work: Callable[..., object], *given: object) -> None:
        """Have a function called in the channel's thread, if it still runs."""
        loop = self._loop
        if loop is not None:
            with suppress(RuntimeError):
                loop.call_soon_threadsafe(work, *given)

    def _running(self) -> asyncio.AbstractEventLoop:
        if self._loop is not None and self._process == os.getpid() and not self._is_closed:
            return self._loop
        with self._lock:
            if self._is_closed:
                raise UnavailableError("the client is closed")
            if self._loop is None:
                self._loop = _loop()
                self._process = os.getpid()
                self._thread = threading.Thread(target=self._run, args=(self._loop,), name="basalt-client", daemon=True)
                self._thread.start()
            elif self._process != os.getpid():
                raise InvalidArgumentError("the client was used before the process forked; make one in each process")
            return self._loop

    def _run(self, loop: asyncio.AbstractEventLoop) -> None:
        asyncio.set_event_loop(loop)
        try:
            loop.run_forever()
        finally:
            left = asyncio.all_tasks(loop)
            for task in left:
                task.cancel()
            loop.run_until_complete(asyncio.gather(*left, return_exceptions=True))
            loop.run_until_complete(loop.shutdown_asyncgens())
            loop.close()

    def close(self) -> None:
        """End all calls, and the thread."""
        with self._lock:
            loop, thread = self._loop, self._thread
            if self._is_closed or loop is None or thread is None or self._process != os.getpid():
                self._is_closed = True
                return
            self._is_closed = True
        closing = asyncio.run_coroutine_threadsafe(self._channel.close(), loop)
        with suppress(Exception):
            closing.result()
        loop.call_soon_threadsafe(loop.stop)
        thread.join()


def _loop() -> asyncio.AbstractEventLoop:
    try:
        import uvloop
    except ImportError:
        return asyncio.new_event_loop()
    return uvloop.new_event_loop()
