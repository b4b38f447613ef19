"""A connection of HTTP/2 without I/O, either side of it.

    bytes from the socket ──> receive() ──> events
    send(), end(), answer(), reset() ... ──> take() ──> bytes for the socket

What it holds up:

- What is received is bounded: by the windows we give (a stream's, the connection's), by the size of a frame, of a
  header block and of what it says, by the number of streams. A window is given back as its user says `consumed`.
- What is sent keeps to the other side's windows; what does not fit waits here, counted in `waiting_bytes`, and goes out
  turn by turn among the streams. Whoever sends looks at that number: nothing here stops them.
- A rule broken on a stream ends the stream, one broken on the connection ends the connection, with the code RFC 9113
  has for it. Frames that mean nothing are counted (budget.py).
- Frames that were on their way when a stream was given up here are passed over; any other frame on a stream that is
  over is a fault.

Budget: about 10 us for the frames of a unary call, both ways.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, Final, Generic, TypeVar

from basaltmq.protocols.grpc.http2 import frames as f
from basaltmq.protocols.grpc.http2.budget import Budget
from basaltmq.protocols.grpc.http2.events import Broken, Chunk, Data, Event, Headers, Leaving, PingAnswered, Reset
from basaltmq.protocols.grpc.http2.faults import ConnectionFault, StreamFault
from basaltmq.protocols.grpc.http2.frame_buffer import Rest
from basaltmq.protocols.grpc.http2.frame_sender import CONNECTION_WINDOW_BYTES, STREAM_WINDOW_BYTES, Sending
from basaltmq.protocols.grpc.http2.frames import (
    FRAME_BYTES_MIN,
    FRAME_BYTES_TAKEN,
    HEAD,
    HEAD_BYTES,
    WINDOW_DEFAULT,
    WINDOW_MAX,
    Code,
    Setting,
)
from basaltmq.protocols.grpc.http2.header_blocks import LIST_BYTES_MAX, BlockReader, Meanings
from basaltmq.protocols.grpc.http2.stream import Stream

STREAMS_MAX: Final = 1_000
"""Streams of one connection at once."""

CONTINUATIONS_MAX: Final = 8
"""Frames that go on with a header block. One is more than a call needs; a client may send small ones."""

_EMPTY: Final = b""

F = TypeVar("F")
C = TypeVar("C", bytes, Chunk)


class Connection(Sending, Generic[F]):
    """One side of a connection. `F` is what header fields are read into."""

    def __init__(
        self,
        meanings: Meanings[F],
        *,
        is_client: bool = False,
        streams_max: int = STREAMS_MAX,
        clock_s: Callable[[], float] = time.monotonic,
    ) -> None:
        super().__init__(Budget(clock_s), is_client=is_client)
        self._streams_max = streams_max
        self._last_stream = 0
        """The highest that was opened, by the client."""
        self._reader = BlockReader(meanings)
        self._rest = Rest()
        self._preface = _EMPTY if is_client else f.PREFACE
        """What is still to come of it."""
        self._has_settings = False
        self._block: list[bytes] = []
        """A header block of which more is to come."""
        self._block_stream = 0
        self._block_ends = False
        self._peer_window = WINDOW_DEFAULT
        self._is_leaving = False
        self.peer_streams_max = STREAMS_MAX
        """Streams the other side takes at once; fewer than it may say, and all there are before it has."""
        self.is_over = False
        if is_client:
            self._out.append(f.PREFACE)
        own = [
            (Setting.HEADER_TABLE_SIZE, 0),
            (Setting.INITIAL_WINDOW_SIZE, STREAM_WINDOW_BYTES),
            (Setting.MAX_FRAME_SIZE, FRAME_BYTES_TAKEN),
            (Setting.MAX_HEADER_LIST_SIZE, LIST_BYTES_MAX),
            (Setting.ENABLE_PUSH, 0) if is_client else (Setting.MAX_CONCURRENT_STREAMS, streams_max),
        ]
        self._out.append(f.settings(own))
        self._out.append(f.window_update(0, CONNECTION_WINDOW_BYTES - WINDOW_DEFAULT))

    def __len__(self) -> int:
        return len(self._streams)

    @property
    def has_begun(self) -> bool:
        """Whether the other side has shown that it speaks HTTP/2."""
        return self._has_settings

    def is_used_up(self, stream_last: int) -> bool:
        """Whether streams were opened up to this number."""
        return self._last_stream >= stream_last

    def streams(self) -> list[Stream]:
        return list(self._streams.values())

    def receive(self, data: bytes) -> list[Event[F]]:
        """What the bytes mean. After a connection is over they mean nothing."""
        if self.is_over:
            return []
        buffer = self._rest.with_next(data)
        if buffer is None:
            return []
        try:
            if self._preface:
                buffer = self._read_preface(buffer)
            self._read_frames(buffer)
        except ConnectionFault as fault:
            self._break(fault.code, str(fault))
        events: list[Event[F]] = self._events
        self._events = []
        return events

    def _read_preface(self, buffer: bytes) -> bytes:
        """What comes after the preface."""
        part = buffer[: len(self._preface)]
        if not self._preface.startswith(part):
            raise ConnectionFault(Code.PROTOCOL_ERROR, "this is HTTP/2, and the client speaks something else")
        self._preface = self._preface[len(part) :]
        return buffer[len(part) :]

    def _read_frames(self, buffer: bytes) -> None:
        """Handle whole frames, and keep what is left."""
        position, end = 0, len(buffer)
        wanted_bytes = HEAD_BYTES
        unpack = HEAD.unpack_from
        while end - position >= HEAD_BYTES:
            high, low, kind, flags, stream_id = unpack(buffer, position)
            length = high << 8 | low
            if length > FRAME_BYTES_MIN:
                _check_size(kind, length)
            start = position + HEAD_BYTES
            if start + length > end:
                wanted_bytes += length
                break
            position = start + length
            payload: Any
            if length > FRAME_BYTES_MIN and 2 * length > end:
                # Not worth a copy. What is less than half of the buffer would keep more in memory than it is.
                payload = memoryview(buffer)[start:position]
            else:
                payload = buffer[start:position]
            stream_id &= f.STREAM_MAX
            if self._block_stream or not self._has_settings:
                self._require_expected(kind, flags, stream_id)
            try:
                if kind == f.DATA:
                    self._on_data(flags, stream_id, payload)
                elif kind == f.HEADERS:
                    self._on_headers(flags, stream_id, payload)
                else:
                    self._on_other(kind, flags, stream_id, payload)
            except StreamFault as fault:
                self._end_stream(fault)
        if position < end:
            self._rest.keep(buffer[position:], wanted_bytes - (end - position))

    def _require_expected(self, kind: int, flags: int, stream_id: int) -> None:
        """Raise unless it is the frame that has to come: the rest of a header block, or the first of all."""
        if self._block_stream and (kind != f.CONTINUATION or stream_id != self._block_stream):
            raise ConnectionFault(Code.PROTOCOL_ERROR, "a header block is interrupted by another frame")
        if not self._has_settings:
            if kind != f.SETTINGS or flags & f.ACK:
                raise ConnectionFault(Code.PROTOCOL_ERROR, "the first frame has to be SETTINGS")
            self._has_settings = True

    def _on_other(self, kind: int, flags: int, stream_id: int, payload: bytes) -> None:
        handle = _HANDLERS.get(kind)
        if handle is None:
            self._spend()
        else:
            handle(self, flags, stream_id, payload)

    def _end_stream(self, fault: StreamFault) -> None:
        """A rule was broken on a stream."""
        self._spend()
        stream = self._streams.get(fault.stream_id)
        self._out.append(f.rst_stream(fault.stream_id, fault.code))
        self._remember(fault.stream_id)
        if stream is not None:
            self._close(stream)
            self._events.append(Reset(stream, fault.code, str(fault)))

    def _spend(self) -> None:
        if not self._budget.spend():
            raise ConnectionFault(Code.ENHANCE_YOUR_CALM, "too many frames that ask for nothing")

    def _break(self, code: Code, text: str) -> None:
        self._out.append(f.goaway(self._last_stream, code, text))
        self.is_over = True
        self._rest.clear()
        self._events.append(Broken(code, text))

    def _known(self, stream_id: int) -> Stream | None:
        """The stream a frame is for, None if it is over; a fault if there never was one."""
        stream = self._streams.get(stream_id)
        if stream is None and (stream_id == 0 or stream_id > self._last_stream or not stream_id & 1):
            raise ConnectionFault(Code.PROTOCOL_ERROR, f"a frame for stream {stream_id}, which was not opened")
        return stream

    def _passed_over(self, stream_id: int) -> None:
        """A frame for a stream that is over: on its way when it was given up here, or a fault."""
        if stream_id not in self._given_up and not self._is_client:
            raise ConnectionFault(Code.STREAM_CLOSED, f"stream {stream_id} is over")
        self._spend()

    def _on_data(self, flags: int, stream_id: int, payload: Chunk) -> None:
        size_bytes = len(payload)
        self._receive_window -= size_bytes
        if self._receive_window < 0:
            raise ConnectionFault(Code.FLOW_CONTROL_ERROR, "more data than the connection's window takes")
        stream = self._streams.get(stream_id)
        if stream is None:
            self._known(stream_id)
            self._passed_over(stream_id)
            self._credit(size_bytes)
            return
        has_ended = bool(flags & f.END_STREAM)
        if stream.has_ended_there:
            self._credit(size_bytes)
            raise StreamFault(stream_id, Code.STREAM_CLOSED, "data after the end of its stream")
        stream.receive_window -= size_bytes
        if stream.receive_window < 0:
            self._credit(size_bytes)
            raise StreamFault(stream_id, Code.FLOW_CONTROL_ERROR, "more data than the stream's window takes")
        chunk = _unpadded(payload) if flags & f.PADDED else payload
        if not chunk and not has_ended:
            self._spend()
        stream.has_ended_there = has_ended
        self._events.append(Data(stream, chunk, size_bytes, has_ended))

    def _on_headers(self, flags: int, stream_id: int, payload: bytes) -> None:
        if not stream_id & 1:
            raise ConnectionFault(Code.PROTOCOL_ERROR, f"headers on stream {stream_id}, which no client opens")
        if flags & f.PADDED:
            payload = _unpadded(payload)
        if flags & f.PRIORITIZED:
            if len(payload) < 5:
                raise ConnectionFault(Code.FRAME_SIZE_ERROR, "headers too short for their priority")
            payload = payload[5:]
        if flags & f.END_HEADERS:
            self._on_block(stream_id, payload, bool(flags & f.END_STREAM))
        else:
            self._block_ends = bool(flags & f.END_STREAM)
            self._block_stream = stream_id
            self._block = [payload]

    def _on_continuation(self, flags: int, stream_id: int, payload: bytes) -> None:
        if not self._block_stream:
            raise ConnectionFault(Code.PROTOCOL_ERROR, "a CONTINUATION of nothing")
        self._block.append(payload)
        if len(self._block) > CONTINUATIONS_MAX + 1 or sum(map(len, self._block)) > LIST_BYTES_MAX:
            raise ConnectionFault(Code.ENHANCE_YOUR_CALM, "a header block without end")
        if flags & f.END_HEADERS:
            block, self._block, self._block_stream = b"".join(self._block), [], 0
            self._on_block(stream_id, block, self._block_ends)

    def _on_block(self, stream_id: int, block: bytes, has_ended: bool) -> None:
        fields = self._reader.read(block)
        stream = self._streams.get(stream_id)
        if stream is None:
            stream = self._opened(stream_id)
            if stream is None:
                return
        elif stream.has_ended_there:
            raise StreamFault(stream_id, Code.STREAM_CLOSED, "headers after the end of their stream")
        elif not has_ended and not self._is_client:
            raise StreamFault(stream_id, Code.PROTOCOL_ERROR, "headers in the middle of a stream")
        stream.has_ended_there = has_ended
        self._events.append(Headers(stream, fields, has_ended))

    def _opened(self, stream_id: int) -> Stream | None:
        """A stream the client opens, if it may."""
        if stream_id <= self._last_stream:
            self._passed_over(stream_id)
            return None
        if self._is_client:
            raise ConnectionFault(Code.PROTOCOL_ERROR, f"the server answers stream {stream_id}, which was not opened")
        self._last_stream = stream_id
        if self._is_leaving or len(self._streams) >= self._streams_max:
            # The client may try again elsewhere: nothing was done with it.
            raise StreamFault(stream_id, Code.REFUSED_STREAM, "there are too many streams")
        stream = self._streams[stream_id] = Stream(stream_id, self._peer_window, STREAM_WINDOW_BYTES)
        return stream

    def _on_priority(self, flags: int, stream_id: int, payload: bytes) -> None:
        if not stream_id:
            raise ConnectionFault(Code.PROTOCOL_ERROR, "a priority of no stream")
        if len(payload) != 5:
            raise StreamFault(stream_id, Code.FRAME_SIZE_ERROR, "a priority of the wrong size")
        self._spend()

    def _on_rst_stream(self, flags: int, stream_id: int, payload: bytes) -> None:
        if len(payload) != 4:
            raise ConnectionFault(Code.FRAME_SIZE_ERROR, "an RST_STREAM of the wrong size")
        stream = self._known(stream_id)
        self._spend()
        if stream is not None:
            self._close(stream)
            self._events.append(Reset(stream, f.u32(payload)))

    def _on_settings(self, flags: int, stream_id: int, payload: bytes) -> None:
        if stream_id:
            raise ConnectionFault(Code.PROTOCOL_ERROR, "settings of a stream")
        if flags & f.ACK:
            if payload:
                raise ConnectionFault(Code.FRAME_SIZE_ERROR, "an answer to settings with a payload")
            self._reader.acked()
            return
        if len(payload) % 6:
            raise ConnectionFault(Code.FRAME_SIZE_ERROR, "settings of the wrong size")
        self._spend()
        for number, value in f.settings_of(payload):
            self._set(number, value)
        self._out.append(f.SETTINGS_ACK)
        self._pump()

    def _set(self, number: int, value: int) -> None:
        if number == Setting.INITIAL_WINDOW_SIZE:
            if value > WINDOW_MAX:
                raise ConnectionFault(Code.FLOW_CONTROL_ERROR, f"a window of {value} bytes")
            by = value - self._peer_window
            self._peer_window = value
            for stream in self._streams.values():
                stream.send_window += by
                if stream.send_window > WINDOW_MAX:
                    raise ConnectionFault(Code.FLOW_CONTROL_ERROR, "a stream's window grows beyond what it may be")
        elif number == Setting.MAX_FRAME_SIZE:
            if not FRAME_BYTES_MIN <= value <= f.FRAME_BYTES_MAX:
                raise ConnectionFault(Code.PROTOCOL_ERROR, f"frames of {value} bytes")
            self._frame_bytes_max = min(value, FRAME_BYTES_TAKEN)
        elif number == Setting.ENABLE_PUSH:
            if value > 1:
                raise ConnectionFault(Code.PROTOCOL_ERROR, f"ENABLE_PUSH is 0 or 1, not {value}")
        elif number == Setting.MAX_CONCURRENT_STREAMS:
            self.peer_streams_max = value

    def _on_push_promise(self, flags: int, stream_id: int, payload: bytes) -> None:
        raise ConnectionFault(Code.PROTOCOL_ERROR, "nobody may push here")

    def _on_ping(self, flags: int, stream_id: int, payload: bytes) -> None:
        if stream_id:
            raise ConnectionFault(Code.PROTOCOL_ERROR, "a ping of a stream")
        if len(payload) != 8:
            raise ConnectionFault(Code.FRAME_SIZE_ERROR, "a ping of the wrong size")
        if flags & f.ACK:
            self._events.append(PingAnswered())
            return
        self._spend()
        self._out.append(f.ping(payload, is_answer=True))

    def _on_goaway(self, flags: int, stream_id: int, payload: bytes) -> None:
        if stream_id:
            raise ConnectionFault(Code.PROTOCOL_ERROR, "a GOAWAY of a stream")
        if len(payload) < 8:
            raise ConnectionFault(Code.FRAME_SIZE_ERROR, "a GOAWAY that is too short")
        self._spend()
        self._events.append(Leaving(*f.goaway_of(payload)))

    def _on_window_update(self, flags: int, stream_id: int, payload: bytes) -> None:
        if len(payload) != 4:
            raise ConnectionFault(Code.FRAME_SIZE_ERROR, "a WINDOW_UPDATE of the wrong size")
        by = f.u32(payload) & WINDOW_MAX
        if not stream_id:
            if not by:
                raise ConnectionFault(Code.PROTOCOL_ERROR, "a window that grows by nothing")
            self._send_window += by
            if self._send_window > WINDOW_MAX:
                raise ConnectionFault(Code.FLOW_CONTROL_ERROR, "the window grows beyond what it may be")
            self._pump()
            return
        stream = self._known(stream_id)
        if stream is None:
            return
        if not by:
            raise StreamFault(stream_id, Code.PROTOCOL_ERROR, "a window that grows by nothing")
        stream.send_window += by
        if stream.send_window > WINDOW_MAX:
            raise StreamFault(stream_id, Code.FLOW_CONTROL_ERROR, "the window grows beyond what it may be")
        if stream.waiting:
            self._pump()

    def open(self, block: bytes) -> Stream:
        """Open a stream with these header fields, as the client."""
        assert self._is_client
        self._last_stream += 2 if self._last_stream else 1
        stream_id = self._last_stream
        stream = self._streams[stream_id] = Stream(stream_id, self._peer_window, STREAM_WINDOW_BYTES)
        self.headers(stream, block)
        return stream

    def ping(self) -> None:
        """Ask for a sign of life."""
        self._out.append(f.ping(b"basalt  "))

    def leave(self, code: Code = Code.NO_ERROR, text: str = "") -> None:
        """Take no more streams; those there are go on."""
        if not self.is_over:
            self._is_leaving = True
            self._out.append(f.goaway(self._last_stream, code, text))

    def abandon(self, code: Code, text: str) -> None:
        """End the connection at once."""
        if not self.is_over:
            self._out.append(f.goaway(self._last_stream, code, text))
            self.is_over = True
            self._rest.clear()


def _check_size(kind: int, length: int) -> None:
    """Refuse a frame that is larger than was offered, or than its kind has reasons to be."""
    if length > FRAME_BYTES_TAKEN:
        raise ConnectionFault(
            Code.FRAME_SIZE_ERROR, f"a frame of {length} bytes; at most {FRAME_BYTES_TAKEN} are taken"
        )
    if kind != f.DATA and kind in _HANDLERS:
        raise ConnectionFault(Code.ENHANCE_YOUR_CALM, f"a frame of {length} bytes that is no data")


def _unpadded(payload: C) -> C:
    """The payload of a padded frame, of which the first byte says how much padding is at its end."""
    padding = payload[0] if payload else 0
    if not payload or padding >= len(payload):
        raise ConnectionFault(Code.PROTOCOL_ERROR, "a frame is all padding")
    return payload[1 : len(payload) - padding]


_HANDLERS: Final[dict[int, Callable[[Connection[Any], int, int, Any], None]]] = {
    f.DATA: Connection._on_data,
    f.HEADERS: Connection._on_headers,
    f.PRIORITY: Connection._on_priority,
    f.RST_STREAM: Connection._on_rst_stream,
    f.SETTINGS: Connection._on_settings,
    f.PUSH_PROMISE: Connection._on_push_promise,
    f.PING: Connection._on_ping,
    f.GOAWAY: Connection._on_goaway,
    f.WINDOW_UPDATE: Connection._on_window_update,
    f.CONTINUATION: Connection._on_continuation,
}
