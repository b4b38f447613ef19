"""Being present at the broker: leases taken under an attendance end with it.

When it is closed, or the program dies, or the connection breaks, what was leased under it goes back to its queue at
once. It begins with the first lease, and again by itself when the broker was restarted.
"""

from __future__ import annotations

import threading
from collections.abc import Callable

from basaltmq.client import channel as calls
from basaltmq.client.loop_thread import Line
from basaltmq.errors import PreconditionFailedError
from basaltmq.protocols.grpc.client.call import ClientCall
from basaltmq.protocols.grpc.client.channel import Channel
from basaltmq.wire import basalt_pb2 as wire


async def begin_attendance(channel: Channel, consumer: str) -> tuple[ClientCall, int]:
    """A call that lasts as long as the attendance, and its number."""
    call = await channel.stream(calls.ATTEND)
    call.send_last(wire.AttendRequest(consumer=consumer).SerializeToString())
    async for answer in call:
        return call, wire.AttendResponse.FromString(answer).attendance
    raise PreconditionFailedError("the broker ended the attendance before it began")


class Attendance:
    """The presence of a client, or of a part of it. Safe to use from any thread."""

    def __init__(self, line: Line, consumer: str) -> None:
        self._line = line
        self._consumer = consumer
        self._lock = threading.Lock()
        self._call: ClientCall | None = None
        self._number = 0

    def number(self) -> int:
        """What leases name."""
        with self._lock:
            if not self._number:
                begun = self._line.begin(lambda channel: begin_attendance(channel, self._consumer))
                self._call, self._number = self._line.wait(begun)
            return self._number

    def forget(self, number: int) -> None:
        """The broker does not know this number; another is had with the next lease."""
        with self._lock:
            if number == self._number:
                self._end()

    def close(self) -> None:
        """Leave."""
        with self._lock:
            self._end()

    def _end(self) -> None:
        if self._call is not None:
            self._line.soon(self._call.cancel)
        self._call = None
        self._number = 0


class GiveUp:
    """A way out of a call that waits, for another thread to take."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._cancel: Callable[[], object] | None = None
        self.is_given_up = False

    def now(self) -> None:
        """End the wait, and every later one, at once."""
        with self._lock:
            self.is_given_up = True
            cancel = self._cancel
        if cancel is not None:
            cancel()

    def attach(self, cancel: Callable[[], object]) -> None:
        """A call begins that `cancel` ends."""
        with self._lock:
            self._cancel = cancel
            is_given_up = self.is_given_up
        if is_given_up:
            cancel()
