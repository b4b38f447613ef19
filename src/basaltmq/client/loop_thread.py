"""An event loop in a background thread, for threaded programs. They wait for its coroutines through futures."""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Callable, Coroutine
from concurrent.futures import Future
from contextlib import suppress
from typing import Any, TypeVar

from basaltmq.client.error_mapping import error_of_call
from basaltmq.errors import BasaltError, InvalidArgumentError, UnavailableError
from basaltmq.protocols.grpc.client.call import CallFailed

T = TypeVar("T")


class LoopThread:
    """An event loop and its thread, which starts with the first coroutine. Thread-safe."""

    def __init__(self, closing: Callable[[], Coroutine[Any, Any, None]]) -> None:
        """`closing` runs last in the loop."""
        self._closing = closing
        self._lock = threading.Lock()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None
        self._process = 0
        self._is_closed = False

    def submit(self, coroutine: Coroutine[Any, Any, T]) -> Future[T]:
        """Run a coroutine in the loop's thread."""
        try:
            return asyncio.run_coroutine_threadsafe(coroutine, self._running())
        except RuntimeError:
            # Another thread closed the client just now.
            coroutine.close()
            raise UnavailableError("the client is closed") from None
        except BasaltError:
            coroutine.close()
            raise

    def wait(self, future: Future[T]) -> T:
        """Return the result of a call, or raise the broker's error."""
        try:
            return future.result()
        except CallFailed as failure:
            raise error_of_call(failure) from None
        finally:
            # An interrupted caller no longer needs the result.
            future.cancel()

    def call_soon(self, work: Callable[..., object], *given: object) -> None:
        """Call a function in the loop's thread, if it still runs."""
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
                raise InvalidArgumentError("the client was used before the process forked; create one per process")
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
        """End all calls and the thread."""
        with self._lock:
            loop, thread = self._loop, self._thread
            if self._is_closed or loop is None or thread is None or self._process != os.getpid():
                self._is_closed = True
                return
            self._is_closed = True
        closing = asyncio.run_coroutine_threadsafe(self._closing(), loop)
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
