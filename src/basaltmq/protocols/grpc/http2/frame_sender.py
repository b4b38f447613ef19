"""What one side of a connection sends: frames, within the windows the other side gives.

What does not fit a window waits with its stream, and goes out a frame of each stream in turn when there is room. The
windows given to the other side for what it sends are kept here too, because giving them back is a frame.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

from basaltmq.protocols.grpc.http2 import frames as f
from basaltmq.protocols.grpc.http2.budget import Budget
from basaltmq.protocols.grpc.http2.events import Writable
from basaltmq.protocols.grpc.http2.frames import FRAME_BYTES_MIN, HEAD, WINDOW_DEFAULT, Code
from basaltmq.protocols.grpc.http2.stream import Stream

STREAM_WINDOW_BYTES: Final = 1 << 20
"""What may be on its way to us on one stream: a large batch without a stop, at any delay a data centre has."""

CONNECTION_WINDOW_BYTES: Final = 8 << 20
"""And on all streams of a connection."""

GIVEN_UP_MAX: Final = 1_024
"""Streams given up here that frames may still come for; more than a connection has at once."""

BULK_BYTES: Final = 32 << 10
"""What is joined costs a copy; from here on parts go to the socket as they are. Chosen, not measured:"""

BULK_PART_BYTES: Final = 2 << 10
"""they have to be of this size on average, so that what the socket does for each of them is shared by many bytes."""

_EMPTY: Final = b""
_NO_TABLE: Final = b"\x20"
"""HPACK: the table has no room from here on. Said once, in the first block; what is sent needs none."""


class Sending:
    """The half of a connection that sends."""

    def __init__(self, budget: Budget, *, is_client: bool) -> None:
        self._is_client = is_client
        self._budget = budget
        self._streams: dict[int, Stream] = {}
        self._given_up: dict[int, None] = {}
        self._blocked: dict[int, Stream] = {}
        """Streams that wait for a window."""
        self._events: list[Any] = []
        self._out: list[bytes | memoryview[int]] = []
        self._table = _NO_TABLE
        self._send_window = WINDOW_DEFAULT
        self._receive_window = CONNECTION_WINDOW_BYTES
        self._frame_bytes_max = FRAME_BYTES_MIN
        """What the other side takes in one frame; less than it may say."""
        self._credit_bytes = 0
        self.waiting_bytes = 0
        """Of all streams, for want of a window."""

    def take(self) -> bytes:
        """What is to be sent."""
        return b"".join(self.take_parts())

    def take_parts(self) -> list[bytes | memoryview[int]]:
        """The same in parts, for a socket that takes several: content of some size is not copied for it."""
        out, self._out = self._out, []
        return out

    def headers(self, stream: Stream, block: bytes) -> None:
        """Send header fields; at most a frame of them."""
        assert len(block) < FRAME_BYTES_MIN
        if not stream.is_closed:
            self._send_block(stream.id, block, f.END_HEADERS)

    def _send_block(self, stream_id: int, block: bytes, flags: int) -> None:
        if self._table:
            block, self._table = self._table + block, _EMPTY
        self._out.append(f.head(len(block), f.HEADERS, flags, stream_id))
        self._out.append(block)

    def send(self, stream: Stream, *contents: bytes) -> bool:
        """Send contents, one behind the other, as far as the windows allow; whether all of it is on its way."""
        if stream.is_closed:
            return True
        assert not stream.has_ended_here
        size_bytes = sum(map(len, contents))
        if size_bytes:
            is_first = not stream.waiting
            stream.waiting += filter(None, contents)
            stream.waiting_bytes += size_bytes
            self.waiting_bytes += size_bytes
            if is_first:
                self._blocked[stream.id] = stream
                while self._send_some(stream):
                    pass
        return not stream.waiting

    def send_last(self, stream: Stream, first: bytes, content: bytes) -> None:
        """Send content in two parts that ends the stream, as the client."""
        size_bytes = len(first) + len(content)
        if (
            stream.is_closed
            or stream.waiting
            or not 0 < size_bytes <= self._frame_bytes_max
            or size_bytes > stream.send_window
            or size_bytes > self._send_window
        ):
            stream.trailer = _EMPTY
            self.send(stream, first, content)
            stream.has_ended_here = True
            return
        stream.send_window -= size_bytes
        self._send_window -= size_bytes
        self._out += (HEAD.pack(size_bytes >> 8, size_bytes & 0xFF, f.DATA, f.END_STREAM, stream.id), first, content)
        stream.has_ended_here = True
        self._budget.worked()
        self._ended(stream)

    def end(self, stream: Stream, trailer: bytes = _EMPTY) -> None:
        """Nothing more is sent on a stream but this block, behind all that waits."""
        if stream.is_closed:
            return
        assert not stream.has_ended_here
        stream.has_ended_here = True
        if stream.waiting:
            stream.trailer = trailer
        else:
            self._finish(stream, trailer)

    def answer(self, stream: Stream, block: bytes, first: bytes, content: bytes, trailer: bytes) -> None:
        """Header fields, content in two parts, and trailer in one go."""
        size_bytes = len(first) + len(content)
        if (
            stream.is_closed
            or self._table
            or not stream.has_ended_there
            or not 0 < size_bytes <= self._frame_bytes_max
            or size_bytes > stream.send_window
            or size_bytes > self._send_window
        ):
            self.headers(stream, block)
            self.send(stream, first, content)
            self.end(stream, trailer)
            return
        self._send_window -= size_bytes
        stream_id = stream.id
        pack = HEAD.pack
        self._out += (
            pack(len(block) >> 8, len(block) & 0xFF, f.HEADERS, f.END_HEADERS, stream_id),
            block,
            pack(size_bytes >> 8, size_bytes & 0xFF, f.DATA, 0, stream_id),
            first,
            content,
            pack(len(trailer) >> 8, len(trailer) & 0xFF, f.HEADERS, f.END_HEADERS | f.END_STREAM, stream_id),
            trailer,
        )
        stream.has_ended_here = stream.is_closed = True
        del self._streams[stream_id]
        self._budget.worked()

    def _send_some(self, stream: Stream) -> bool:
        """Send one frame of what waits; whether there may be another."""
        window = min(stream.send_window, self._send_window, self._frame_bytes_max)
        if window <= 0:
            return False
        waiting = stream.waiting
        parts: list[bytes | memoryview[int]] = []
        left = window
        while waiting and left:
            first = waiting[0]
            if len(first) <= left:
                parts.append(waiting.pop(0))
            else:
                view = memoryview(first)
                parts.append(view[:left])
                waiting[0] = view[left:]
            left -= len(parts[-1])
        size_bytes = window - left
        is_last = not waiting and stream.trailer == _EMPTY
        self._out.append(f.head(size_bytes, f.DATA, f.END_STREAM if is_last else 0, stream.id))
        self._out += parts
        stream.send_window -= size_bytes
        self._send_window -= size_bytes
        stream.waiting_bytes -= size_bytes
        self.waiting_bytes -= size_bytes
        self._budget.worked()
        if stream.waiting:
            return True
        self._blocked.pop(stream.id, None)
        if is_last:
            self._ended(stream)
        elif stream.trailer is not None:
            self._finish(stream, stream.trailer)
        return False

    def _pump(self) -> None:
        """Send what waited for a window, a frame of each stream in turn."""
        while self._blocked and self._send_window > 0:
            has_sent = False
            for stream in list(self._blocked.values()):
                if stream.send_window > 0 and self._send_window > 0:
                    has_sent = True
                    if not self._send_some(stream) and not stream.waiting and not stream.is_closed:
                        self._events.append(Writable(stream))
            if not has_sent:
                return

    def _finish(self, stream: Stream, trailer: bytes) -> None:
        if trailer:
            self._send_block(stream.id, trailer, f.END_HEADERS | f.END_STREAM)
        else:
            self._out.append(f.head(0, f.DATA, f.END_STREAM, stream.id))
        self._ended(stream)

    def _ended(self, stream: Stream) -> None:
        """The last of a stream is on its way."""
        if stream.has_ended_there:
            self._budget.worked()
            self._close(stream)
        elif not self._is_client:
            # Answered before all was said: the rest is not wanted.
            self.reset(stream, Code.NO_ERROR)

    def closed(self, stream: Stream) -> None:
        """Forget a stream that has ended on both sides, as the client."""
        if not stream.is_closed:
            if stream.has_ended_here and stream.has_ended_there and not stream.waiting:
                self._close(stream)
            else:
                self.reset(stream, Code.CANCEL)

    def reset(self, stream: Stream, code: Code) -> None:
        """Give a stream up."""
        if not stream.is_closed:
            self._out.append(f.rst_stream(stream.id, code))
            self._remember(stream.id)
            self._close(stream)

    def _remember(self, stream_id: int) -> None:
        if len(self._given_up) >= GIVEN_UP_MAX:
            del self._given_up[next(iter(self._given_up))]
        self._given_up[stream_id] = None

    def _close(self, stream: Stream) -> None:
        stream.is_closed = True
        del self._streams[stream.id]
        self._blocked.pop(stream.id, None)
        self.waiting_bytes -= stream.waiting_bytes
        stream.waiting_bytes = 0
        stream.waiting.clear()

    def consumed(self, stream: Stream, size_bytes: int) -> None:
        """Data of a stream is no longer held: the other side may send as much again."""
        self._credit_bytes += size_bytes
        if self._credit_bytes >= CONNECTION_WINDOW_BYTES // 2:
            self._credit(0)
        if not stream.has_ended_there and not stream.is_closed:
            stream.credit_bytes += size_bytes
            if stream.credit_bytes >= STREAM_WINDOW_BYTES // 2:
                self._out.append(f.window_update(stream.id, stream.credit_bytes))
                stream.receive_window += stream.credit_bytes
                stream.credit_bytes = 0

    def _credit(self, size_bytes: int) -> None:
        self._credit_bytes += size_bytes
        if self._credit_bytes >= CONNECTION_WINDOW_BYTES // 2:
            self._out.append(f.window_update(0, self._credit_bytes))
            self._receive_window += self._credit_bytes
            self._credit_bytes = 0


def is_bulky(parts: Sequence[bytes | memoryview[int]]) -> bool:
    """Whether parts are better written as they are than joined."""
    return sum(map(len, parts)) >= max(BULK_BYTES, BULK_PART_BYTES * len(parts))
