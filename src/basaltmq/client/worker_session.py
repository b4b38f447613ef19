"""Sessions at the broker. Leases taken in a session end with it.

When the session is closed, the program dies or the connection breaks, its leased messages return to their queues at
once. A session begins with the first lease, and begins again after a restart of the broker.
"""

from __future__ import annotations

import threading
from collections.abc import Callable

from basaltmq.client import channel as calls
from basaltmq.client.loop_thread import LoopThread
from basaltmq.errors import PreconditionFailedError
from basaltmq.protocols.grpc.client.call import ClientCall
from basaltmq.protocols.grpc.client.channel import Channel
from basaltmq.wire import basalt_pb2 as wire


async def begin_session(channel: Channel, consumer: str) -> tuple[ClientCall, int]:
    """Begin a session. Return the call that lasts as long as the session, and the session number."""
    call = await channel.stream(calls.ATTEND)
    call.send_last(wire.OpenSessionRequest(consumer=consumer).SerializeToString())
    async for answer in call:
        return call, wire.OpenSessionResponse.FromString(answer).session
    raise PreconditionFailedError("the broker ended the session before it began")


class WorkerSession:
    """The session of a client or of a part of it. Thread-safe."""

    def __init__(self, loop_thread: LoopThread, consumer: str) -> None:
        self._loop_thread = loop_thread
        self._consumer = consumer
        self._lock = threading.Lock()
        self._call: ClientCall | None = None
        self._number = 0

    def number(self) -> int:
        """Return the session number that leases refer to, and begin the session if necessary."""
        with self._lock:
            if not self._number:
                started = self._loop_thread.submit(lambda channel: begin_session(channel, self._consumer))
                self._call, self._number = self._loop_thread.wait(started)
            return self._number

    def forget(self, number: int) -> None:
        """Drop a session that the broker does not know. The next lease begins a new one."""
        with self._lock:
            if number == self._number:
                self._end()

    def close(self) -> None:
        """End the session."""
        with self._lock:
            self._end()

    def _end(self) -> None:
        if self._call is not None:
            self._loop_thread.call_soon(self._call.cancel)
        self._call = None
        self._number = 0


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
