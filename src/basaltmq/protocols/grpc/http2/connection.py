"""The HTTP/2 state machine of one connection, client or server side, without I/O.

    bytes from the socket ──> receive() ──> events
    send(), end(), response(), reset() ... ──> take() ──> bytes for the socket

Invariants:

- Received data is bounded by the stream and connection windows, the frame size, the header block size and the number
  of streams. Window credit is returned when the user calls `consumed`.
- Sent data respects the peer's windows. Data that does not fit waits here, counted in `waiting_bytes`, and is sent
  round-robin over the streams. Nothing here blocks the sender: senders check `waiting_bytes` themselves.
- A protocol violation on a stream resets the stream. A violation on the connection ends the connection. Both use the
  error code that RFC 9113 defines. Frames without useful work are counted by `Budget`.
- Frames that were in flight when this side reset a stream are ignored. Any other frame on a closed stream is an error.

Budget: about 10 us of CPU time for all frames of a unary call, both directions.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, Final, Generic, TypeVar

from basaltmq.protocols.frame_buffer import FrameBuffer
from basaltmq.protocols.grpc.http2 import frames as f
from basaltmq.protocols.grpc.http2.budget import Budget
from basaltmq.protocols.grpc.http2.events import Chunk, ConnectionFailed, Data, Event, GoAway, Headers, PingAcked, Reset
from basaltmq.protocols.grpc.http2.faults import ConnectionFault, StreamFault
from basaltmq.protocols.grpc.http2.frame_sender import CONNECTION_WINDOW_BYTES, STREAM_WINDOW_BYTES, FrameSender
from basaltmq.protocols.grpc.http2.frames import (
    FRAME_BYTES_ACCEPTED,
    FRAME_BYTES_MIN,
    HEAD,
    HEAD_BYTES,
    WINDOW_DEFAULT,
    WINDOW_MAX,
    Code,
    Setting,
)
from basaltmq.protocols.grpc.http2.header_blocks import LIST_BYTES_MAX, BlockReader, HeaderCache
from basaltmq.protocols.grpc.http2.stream import Stream

STREAMS_MAX: Final = 1_000
"""Concurrent streams per connection."""

CONTINUATIONS_MAX: Final = 8
"""CONTINUATION frames per header block. A gRPC call needs none, but some clients send small frames."""

_EMPTY: Final = b""

F = TypeVar("F")
C = TypeVar("C", bytes, Chunk)


class Connection(FrameSender, Generic[F]):
    """One side of an HTTP/2 connection. `F` is the type that header fields are parsed into."""

    def __init__(
        self,
        header_cache: HeaderCache[F],
        *,
        is_client: bool = False,
        streams_max: int = STREAMS_MAX,
        clock_s: Callable[[], float] = time.monotonic,
    ) -> None:
        super().__init__(Budget(clock_s), is_client=is_client)
        self._streams_max = streams_max
        self._last_stream = 0
        """The highest stream id that the client has opened."""
        self._reader = BlockReader(header_cache)
        self._frame_buffer = FrameBuffer()
        self._preface = _EMPTY if is_client else f.PREFACE
        """The part of the client preface that has not arrived yet."""
        self._has_settings = False
        self._block: list[bytes] = []
        """Fragments of an incomplete header block."""
        self._block_stream = 0
        self._block_ends = False
        self._peer_window = WINDOW_DEFAULT
        self._is_leaving = False
        self.peer_streams_max = STREAMS_MAX
        """MAX_CONCURRENT_STREAMS of the peer, or our default until its SETTINGS arrive."""
        self.is_over = False
        if is_client:
            self._out.append(f.PREFACE)
        own = [
            (Setting.HEADER_TABLE_SIZE, 0),
            (Setting.INITIAL_WINDOW_SIZE, STREAM_WINDOW_BYTES),
            (Setting.MAX_FRAME_SIZE, FRAME_BYTES_ACCEPTED),
            (Setting.MAX_HEADER_LIST_SIZE, LIST_BYTES_MAX),
            (Setting.ENABLE_PUSH, 0) if is_client else (Setting.MAX_CONCURRENT_STREAMS, streams_max),
        ]
        self._out.append(f.settings(own))
        self._out.append(f.window_update(0, CONNECTION_WINDOW_BYTES - WINDOW_DEFAULT))

    def __len__(self) -> int:
        return len(self._streams)

    @property
    def is_established(self) -> bool:
        """Whether the peer's first SETTINGS frame has arrived."""
        return self._has_settings

    def is_used_up(self, stream_last: int) -> bool:
        """Whether stream ids up to this one have been used."""
        return self._last_stream >= stream_last

    def streams(self) -> list[Stream]:
        return list(self._streams.values())

    def receive(self, data: bytes) -> list[Event[F]]:
        """Parse bytes from the socket and return the resulting events. Return none once the connection has ended."""
        if self.is_over:
            return []
        buffer = self._frame_buffer.with_next(data)
        if buffer is None:
            return []
        try:
            if self._preface:
                buffer = self._read_preface(buffer)
            self._read_frames(buffer)
        except ConnectionFault as fault:
            self._fail_connection(fault.code, str(fault))
        events: list[Event[F]] = self._events
        self._events = []
        return events

    def _read_preface(self, buffer: bytes) -> bytes:
        """Consume the preface and return the bytes after it."""
        part = buffer[: len(self._preface)]
        if not self._preface.startswith(part):
            raise ConnectionFault(Code.PROTOCOL_ERROR, "the client does not speak HTTP/2: the preface is wrong")
        self._preface = self._preface[len(part) :]
        return buffer[len(part) :]

    def _read_frames(self, buffer: bytes) -> None:
        """Handle all complete frames and buffer the incomplete one."""
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
                # Pass large payloads as views. A view keeps the whole buffer alive, so copy payloads below half of it.
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
                self._fail_stream(fault)
        if position < end:
            self._frame_buffer.keep(buffer[position:], wanted_bytes - (end - position))

    def _require_expected(self, kind: int, flags: int, stream_id: int) -> None:
        """Raise unless this frame continues the open header block or is the initial SETTINGS frame."""
        if self._block_stream and (kind != f.CONTINUATION or stream_id != self._block_stream):
            raise ConnectionFault(Code.PROTOCOL_ERROR, "another frame interrupts a header block")
        if not self._has_settings:
            if kind != f.SETTINGS or flags & f.ACK:
                raise ConnectionFault(Code.PROTOCOL_ERROR, "the first frame must be SETTINGS")
            self._has_settings = True

    def _on_other(self, kind: int, flags: int, stream_id: int, payload: bytes) -> None:
        handle = _HANDLERS.get(kind)
        if handle is None:
            self._charge()
        else:
            handle(self, flags, stream_id, payload)

    def _fail_stream(self, fault: StreamFault) -> None:
        """Reset a stream after a protocol violation."""
        self._charge()
        stream = self._streams.get(fault.stream_id)
        self._out.append(f.rst_stream(fault.stream_id, fault.code))
        self._remember_reset(fault.stream_id)
        if stream is not None:
            self._close(stream)
            self._events.append(Reset(stream, fault.code, str(fault)))

    def _charge(self) -> None:
        if not self._budget.charge():
            raise ConnectionFault(Code.ENHANCE_YOUR_CALM, "too many frames that do no useful work")

    def _fail_connection(self, code: Code, text: str) -> None:
        self._out.append(f.goaway(self._last_stream, code, text))
        self.is_over = True
        self._frame_buffer.clear()
        self._events.append(ConnectionFailed(code, text))

    def _existing(self, stream_id: int) -> Stream | None:
        """Return the stream of a frame, or None if it is closed. Raise if it was never opened."""
        stream = self._streams.get(stream_id)
        if stream is None and (stream_id == 0 or stream_id > self._last_stream or not stream_id & 1):
            raise ConnectionFault(Code.PROTOCOL_ERROR, f"a frame for stream {stream_id}, which was never opened")
        return stream

    def _on_closed_stream(self, stream_id: int) -> None:
        """Ignore a frame for a stream that this side reset. Raise if the peer should know that it is closed."""
        if stream_id not in self._reset_ids and not self._is_client:
            raise ConnectionFault(Code.STREAM_CLOSED, f"a frame for stream {stream_id}, which is closed")
        self._charge()

    def _on_data(self, flags: int, stream_id: int, payload: Chunk) -> None:
        size_bytes = len(payload)
        self._receive_window -= size_bytes
        if self._receive_window < 0:
            raise ConnectionFault(Code.FLOW_CONTROL_ERROR, "data exceeds the connection's window")
        stream = self._streams.get(stream_id)
        if stream is None:
            self._existing(stream_id)
            self._on_closed_stream(stream_id)
            self._credit(size_bytes)
            return
        has_ended = bool(flags & f.END_STREAM)
        if stream.received_end:
            self._credit(size_bytes)
            raise StreamFault(stream_id, Code.STREAM_CLOSED, "data after END_STREAM")
        stream.receive_window -= size_bytes
        if stream.receive_window < 0:
            self._credit(size_bytes)
            raise StreamFault(stream_id, Code.FLOW_CONTROL_ERROR, "data exceeds the stream's window")
        chunk = _unpadded(payload) if flags & f.PADDED else payload
        if not chunk and not has_ended:
            self._charge()
        stream.received_end = has_ended
        self._events.append(Data(stream, chunk, size_bytes, has_ended))

    def _on_headers(self, flags: int, stream_id: int, payload: bytes) -> None:
        if not stream_id & 1:
            raise ConnectionFault(Code.PROTOCOL_ERROR, f"headers on stream {stream_id}: client streams have odd ids")
        if flags & f.PADDED:
            payload = _unpadded(payload)
        if flags & f.PRIORITIZED:
            if len(payload) < 5:
                raise ConnectionFault(Code.FRAME_SIZE_ERROR, "a HEADERS frame is too short for its priority field")
            payload = payload[5:]
        if flags & f.END_HEADERS:
            self._on_block(stream_id, payload, bool(flags & f.END_STREAM))
        else:
            self._block_ends = bool(flags & f.END_STREAM)
            self._block_stream = stream_id
            self._block = [payload]

    def _on_continuation(self, flags: int, stream_id: int, payload: bytes) -> None:
        if not self._block_stream:
            raise ConnectionFault(Code.PROTOCOL_ERROR, "a CONTINUATION frame without an open header block")
        self._block.append(payload)
        if len(self._block) > CONTINUATIONS_MAX + 1 or sum(map(len, self._block)) > LIST_BYTES_MAX:
            raise ConnectionFault(Code.ENHANCE_YOUR_CALM, "a header block is too large or has too many frames")
        if flags & f.END_HEADERS:
            block, self._block, self._block_stream = b"".join(self._block), [], 0
            self._on_block(stream_id, block, self._block_ends)

    def _on_block(self, stream_id: int, block: bytes, has_ended: bool) -> None:
        fields = self._reader.read(block)
        stream = self._streams.get(stream_id)
        if stream is None:
            stream = self._accept(stream_id)
            if stream is None:
                return
        elif stream.received_end:
            raise StreamFault(stream_id, Code.STREAM_CLOSED, "headers after END_STREAM")
        elif not has_ended and not self._is_client:
            raise StreamFault(stream_id, Code.PROTOCOL_ERROR, "a second HEADERS frame must end the stream")
        stream.received_end = has_ended
        self._events.append(Headers(stream, fields, has_ended))

    def _accept(self, stream_id: int) -> Stream | None:
        """Open a stream for the client. Return None if the frame belongs to a stream that this side has reset."""
        if stream_id <= self._last_stream:
            self._on_closed_stream(stream_id)
            return None
        if self._is_client:
            raise ConnectionFault(Code.PROTOCOL_ERROR, f"a response on stream {stream_id}, which was never opened")
        self._last_stream = stream_id
        if self._is_leaving or len(self._streams) >= self._streams_max:
            # REFUSED_STREAM guarantees that nothing was processed, so the client may retry.
            raise StreamFault(stream_id, Code.REFUSED_STREAM, "too many concurrent streams")
        stream = self._streams[stream_id] = Stream(stream_id, self._peer_window, STREAM_WINDOW_BYTES)
        return stream

    def _on_priority(self, flags: int, stream_id: int, payload: bytes) -> None:
        if not stream_id:
            raise ConnectionFault(Code.PROTOCOL_ERROR, "a PRIORITY frame on stream 0")
        if len(payload) != 5:
            raise StreamFault(stream_id, Code.FRAME_SIZE_ERROR, "a PRIORITY frame of the wrong size")
        self._charge()

    def _on_rst_stream(self, flags: int, stream_id: int, payload: bytes) -> None:
        if len(payload) != 4:
            raise ConnectionFault(Code.FRAME_SIZE_ERROR, "an RST_STREAM frame of the wrong size")
        stream = self._existing(stream_id)
        self._charge()
        if stream is not None:
            self._close(stream)
            self._events.append(Reset(stream, f.u32(payload)))

    def _on_settings(self, flags: int, stream_id: int, payload: bytes) -> None:
        if stream_id:
            raise ConnectionFault(Code.PROTOCOL_ERROR, "a SETTINGS frame on a stream other than 0")
        if flags & f.ACK:
            if payload:
                raise ConnectionFault(Code.FRAME_SIZE_ERROR, "a SETTINGS acknowledgement with a payload")
            self._reader.acked()
            return
        if len(payload) % 6:
            raise ConnectionFault(Code.FRAME_SIZE_ERROR, "a SETTINGS frame of the wrong size")
        self._charge()
        for number, value in f.settings_of(payload):
            self._set(number, value)
        self._out.append(f.SETTINGS_ACK)
        self._pump()

    def _set(self, number: int, value: int) -> None:
        if number == Setting.INITIAL_WINDOW_SIZE:
            if value > WINDOW_MAX:
                raise ConnectionFault(Code.FLOW_CONTROL_ERROR, f"INITIAL_WINDOW_SIZE {value} exceeds {WINDOW_MAX}")
            by = value - self._peer_window
            self._peer_window = value
            for stream in self._streams.values():
                stream.send_window += by
                if stream.send_window > WINDOW_MAX:
                    raise ConnectionFault(Code.FLOW_CONTROL_ERROR, f"a stream's window exceeds {WINDOW_MAX} bytes")
        elif number == Setting.MAX_FRAME_SIZE:
            if not FRAME_BYTES_MIN <= value <= f.FRAME_BYTES_MAX:
                raise ConnectionFault(Code.PROTOCOL_ERROR, f"MAX_FRAME_SIZE {value} is out of range")
            self._frame_bytes_max = min(value, FRAME_BYTES_ACCEPTED)
        elif number == Setting.ENABLE_PUSH:
            if value > 1:
                raise ConnectionFault(Code.PROTOCOL_ERROR, f"ENABLE_PUSH must be 0 or 1, not {value}")
        elif number == Setting.MAX_CONCURRENT_STREAMS:
            self.peer_streams_max = value

    def _on_push_promise(self, flags: int, stream_id: int, payload: bytes) -> None:
        raise ConnectionFault(Code.PROTOCOL_ERROR, "server push is disabled")

    def _on_ping(self, flags: int, stream_id: int, payload: bytes) -> None:
        if stream_id:
            raise ConnectionFault(Code.PROTOCOL_ERROR, "a PING frame on a stream other than 0")
        if len(payload) != 8:
            raise ConnectionFault(Code.FRAME_SIZE_ERROR, "a PING frame of the wrong size")
        if flags & f.ACK:
            self._events.append(PingAcked())
            return
        self._charge()
        self._out.append(f.ping(payload, is_ack=True))

    def _on_goaway(self, flags: int, stream_id: int, payload: bytes) -> None:
        if stream_id:
            raise ConnectionFault(Code.PROTOCOL_ERROR, "a GOAWAY frame on a stream other than 0")
        if len(payload) < 8:
            raise ConnectionFault(Code.FRAME_SIZE_ERROR, "a GOAWAY frame is too short")
        self._charge()
        self._events.append(GoAway(*f.goaway_of(payload)))

    def _on_window_update(self, flags: int, stream_id: int, payload: bytes) -> None:
        if len(payload) != 4:
            raise ConnectionFault(Code.FRAME_SIZE_ERROR, "a WINDOW_UPDATE frame of the wrong size")
        by = f.u32(payload) & WINDOW_MAX
        if not stream_id:
            if not by:
                raise ConnectionFault(Code.PROTOCOL_ERROR, "a WINDOW_UPDATE frame with an increment of 0")
            self._send_window += by
            if self._send_window > WINDOW_MAX:
                raise ConnectionFault(Code.FLOW_CONTROL_ERROR, f"the connection's window exceeds {WINDOW_MAX} bytes")
            self._pump()
            return
        stream = self._existing(stream_id)
        if stream is None:
            return
        if not by:
            raise StreamFault(stream_id, Code.PROTOCOL_ERROR, "a WINDOW_UPDATE frame with an increment of 0")
        stream.send_window += by
        if stream.send_window > WINDOW_MAX:
            raise StreamFault(stream_id, Code.FLOW_CONTROL_ERROR, f"the stream's window exceeds {WINDOW_MAX} bytes")
        if stream.waiting:
            self._pump()

    def open(self, block: bytes) -> Stream:
        """Open a stream with this header block. Client side only."""
        assert self._is_client
        self._last_stream += 2 if self._last_stream else 1
        stream_id = self._last_stream
        stream = self._streams[stream_id] = Stream(stream_id, self._peer_window, STREAM_WINDOW_BYTES)
        self.headers(stream, block)
        return stream

    def ping(self) -> None:
        self._out.append(f.ping(b"basalt  "))

    def leave(self, code: Code = Code.NO_ERROR, text: str = "") -> None:
        """Send GOAWAY: refuse new streams and let open streams finish."""
        if not self.is_over:
            self._is_leaving = True
            self._out.append(f.goaway(self._last_stream, code, text))

    def abandon(self, code: Code, text: str) -> None:
        """Send GOAWAY and end the connection at once."""
        if not self.is_over:
            self._out.append(f.goaway(self._last_stream, code, text))
            self.is_over = True
            self._frame_buffer.clear()


def _check_size(kind: int, length: int) -> None:
    """Raise if a frame exceeds our MAX_FRAME_SIZE, or is large and not DATA."""
    if length > FRAME_BYTES_ACCEPTED:
        raise ConnectionFault(
            Code.FRAME_SIZE_ERROR, f"a frame of {length} bytes exceeds the limit of {FRAME_BYTES_ACCEPTED} bytes"
        )
    if kind != f.DATA and kind in _HANDLERS:
        raise ConnectionFault(Code.ENHANCE_YOUR_CALM, f"a frame of {length} bytes that is not DATA")


def _unpadded(payload: C) -> C:
    """Return the payload of a padded frame. Its first byte is the length of the padding at the end."""
    padding = payload[0] if payload else 0
    if not payload or padding >= len(payload):
        raise ConnectionFault(Code.PROTOCOL_ERROR, "the padding fills the whole frame")
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
