"""The sending half of a connection: builds frames within the peer's flow-control windows.

Data that does not fit a window waits in its stream. When window credit arrives, the streams send one frame each in
turn. The receive windows are also kept here, because returning credit means sending a frame.
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
"""Receive window of one stream: a large batch without a pause, at the round-trip times of a data centre."""

CONNECTION_WINDOW_BYTES: Final = 8 << 20
"""Receive window of a connection, over all its streams."""

RESET_STREAMS_MAX: Final = 1_024
"""Remembered streams that this side reset and for which frames may still arrive. More than the concurrent streams."""

BULK_BYTES: Final = 32 << 10
"""Output from this size on is written in parts, because joining it costs a copy. Chosen, not measured."""

BULK_PART_BYTES: Final = 2 << 10
"""Average size that parts must have to be written unjoined, so that the socket's cost per part is small."""

_EMPTY: Final = b""
_NO_TABLE: Final = b"\x20"
"""HPACK size update to 0, sent once, before the first block. Our blocks use no dynamic table."""


class FrameSender:
    def __init__(self, budget: Budget, *, is_client: bool) -> None:
        self._is_client = is_client
        self._budget = budget
        self._streams: dict[int, Stream] = {}
        self._reset_ids: dict[int, None] = {}
        self._blocked: dict[int, Stream] = {}
        """Streams whose data waits for window credit."""
        self._events: list[Any] = []
        self._out: list[bytes | memoryview[int]] = []
        self._table = _NO_TABLE
        self._send_window = WINDOW_DEFAULT
        self._receive_window = CONNECTION_WINDOW_BYTES
        self._frame_bytes_max = FRAME_BYTES_MIN
        """Largest frame that we send: the peer's MAX_FRAME_SIZE, capped by our own limit."""
        self._credit_bytes = 0
        self.waiting_bytes = 0
        """Bytes of all streams that wait for window credit."""

    def take(self) -> bytes:
        """Return the pending output and clear it."""
        return b"".join(self.take_parts())

    def take_parts(self) -> list[bytes | memoryview[int]]:
        """Return the pending output in parts, so that a scatter write need not copy large content."""
        out, self._out = self._out, []
        return out

    def headers(self, stream: Stream, block: bytes) -> None:
        """Send a header block of at most one frame."""
        assert len(block) < FRAME_BYTES_MIN
        if not stream.is_closed:
            self._send_block(stream.id, block, f.END_HEADERS)

    def _send_block(self, stream_id: int, block: bytes, flags: int) -> None:
        if self._table:
            block, self._table = self._table + block, _EMPTY
        self._out.append(f.head(len(block), f.HEADERS, flags, stream_id))
        self._out.append(block)

    def send(self, stream: Stream, *contents: bytes) -> bool:
        """Send contents in order as far as the windows allow. Return whether everything has been sent."""
        if stream.is_closed:
            return True
        assert not stream.sent_end
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
        """Send the final content, given in two parts, and end the stream. Client side only."""
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
            stream.sent_end = True
            return
        stream.send_window -= size_bytes
        self._send_window -= size_bytes
        self._out += (HEAD.pack(size_bytes >> 8, size_bytes & 0xFF, f.DATA, f.END_STREAM, stream.id), first, content)
        stream.sent_end = True
        self._budget.refill()
        self._ended(stream)

    def end(self, stream: Stream, trailer: bytes = _EMPTY) -> None:
        """End the stream with this trailer block, after all waiting data."""
        if stream.is_closed:
            return
        assert not stream.sent_end
        stream.sent_end = True
        if stream.waiting:
            stream.trailer = trailer
        else:
            self._finish(stream, trailer)

    def respond(self, stream: Stream, block: bytes, first: bytes, content: bytes, trailer: bytes) -> None:
        """Send headers, content (given in two parts) and trailers, and end the stream."""
        size_bytes = len(first) + len(content)
        if (
            stream.is_closed
            or self._table
            or not stream.received_end
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
        stream.sent_end = stream.is_closed = True
        del self._streams[stream_id]
        self._budget.refill()

    def _send_some(self, stream: Stream) -> bool:
        """Send one frame of the waiting data. Return whether another may follow."""
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
        self._budget.refill()
        if stream.waiting:
            return True
        self._blocked.pop(stream.id, None)
        if is_last:
            self._ended(stream)
        elif stream.trailer is not None:
            self._finish(stream, stream.trailer)
        return False

    def _pump(self) -> None:
        """Send data that waited for window credit, one frame of each stream in turn."""
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
        """Close a stream whose last frame has been sent."""
        if stream.received_end:
            self._budget.refill()
            self._close(stream)
        elif not self._is_client:
            # The response is complete before the request. The reset stops the client's request.
            self.reset(stream, Code.NO_ERROR)

    def closed(self, stream: Stream) -> None:
        """Close a stream that has ended in both directions, or cancel it. Client side only."""
        if not stream.is_closed:
            if stream.sent_end and stream.received_end and not stream.waiting:
                self._close(stream)
            else:
                self.reset(stream, Code.CANCEL)

    def reset(self, stream: Stream, code: Code) -> None:
        """Send RST_STREAM and close the stream."""
        if not stream.is_closed:
            self._out.append(f.rst_stream(stream.id, code))
            self._remember_reset(stream.id)
            self._close(stream)

    def _remember_reset(self, stream_id: int) -> None:
        if len(self._reset_ids) >= RESET_STREAMS_MAX:
            del self._reset_ids[next(iter(self._reset_ids))]
        self._reset_ids[stream_id] = None

    def _close(self, stream: Stream) -> None:
        stream.is_closed = True
        del self._streams[stream.id]
        self._blocked.pop(stream.id, None)
        self.waiting_bytes -= stream.waiting_bytes
        stream.waiting_bytes = 0
        stream.waiting.clear()

    def consumed(self, stream: Stream, size_bytes: int) -> None:
        """Return window credit for data that has been processed."""
        self._credit_bytes += size_bytes
        if self._credit_bytes >= CONNECTION_WINDOW_BYTES // 2:
            self._credit(0)
        if not stream.received_end and not stream.is_closed:
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
    """Whether writing the parts separately is cheaper than joining them."""
    return sum(map(len, parts)) >= max(BULK_BYTES, BULK_PART_BYTES * len(parts))
