"""The protocol of one connection without I/O: bytes in, events out, bytes to send in `outgoing`.

The parser has a fast path for publishes whose three frames (method, header, one body) are complete in the buffer. It
looks up the whole method frame in a cache, so the arguments of a route are decoded once. Following publishes with the
same method frame are only compared. Everything else (large bodies, messages split by the end of the buffer, all other
methods) is parsed frame by frame. Both paths yield the same messages in the same order.

Bounds: an incomplete frame (at most the negotiated frame size) is kept in chunks and joined once it is complete, so
byte-by-byte input costs no more. The chunks of a body frame are joined with those of the whole body. Incomplete
contents of all channels together hold at most `content_bytes_max`. After a framing error all further input is ignored.
"""

from __future__ import annotations

from collections.abc import Iterator
from struct import Struct
from typing import Final

from basaltmq.protocols.amqp091.events import (
    ChannelFailed,
    ConnectionFailed,
    Event,
    HeaderAccepted,
    HeaderRefused,
    Message,
    Published,
    Received,
)
from basaltmq.protocols.amqp091.tuning import Limits, Tuning
from basaltmq.protocols.amqp091.wire import methods as m
from basaltmq.protocols.amqp091.wire.content import ChannelState, OpenFrame, Piece, piece_of
from basaltmq.protocols.amqp091.wire.errors import (
    CHANNEL_ERROR,
    COMMAND_INVALID,
    FRAME_ERROR,
    NOT_ALLOWED,
    NOT_IMPLEMENTED,
    PRECONDITION_FAILED,
    RESOURCE_ERROR,
    UNEXPECTED_FRAME,
    ChannelFault,
    ConnectionFault,
    Fault,
    LocalProtocolError,
)
from basaltmq.protocols.amqp091.wire.frames import (
    BASIC_CLASS,
    BODY,
    CONTENT_FIXED_BYTES,
    CONTENT_HEAD,
    END,
    HEAD,
    HEAD_BYTES,
    HEADER,
    HEARTBEAT,
    METHOD,
    OVERHEAD_BYTES,
    PROTOCOL_HEADER,
)
from basaltmq.protocols.amqp091.wire.method_codec import codecs, encode_method, name_of
from basaltmq.protocols.amqp091.wire.states import ALLOWED, CLOSED, CLOSING, CONTENT, FROM_CLIENTS, OPEN, Phase
from basaltmq.protocols.frame_buffer import FrameBuffer

PUBLISH_MEMO_MAX: Final = 512
"""Cached routes per connection: more than a publisher uses at a time, and at most 100 KiB. A full cache is cleared."""

PUBLISHES_BYTES_MAX: Final = 32 << 10
"""Bytes of publishes per event: a few hundred small messages, so that the connection can stop in between."""

_METHOD_ID: Final = Struct(">I")
_SIZE: Final = Struct(">I")
_CONTENT_HEAD_BYTES: Final = CONTENT_HEAD.size
_HEADER_BYTES_MIN: Final = CONTENT_FIXED_BYTES + 2
_ACK: Final = Struct(">QB")
_ACK_ID: Final = 60 << 16 | 80
_ACK_BYTES: Final = 4 + _ACK.size
_PUBLISH_ID: Final = 60 << 16 | 40
_PUBLISH_PREFIX: Final = b"\0\x3c\0\x28"
_PUBLISH_METHOD: Final = 40
_PUBLISH_BYTES_MIN: Final = 9
_EXCHANGE_AT: Final = HEAD_BYTES + 6
_METHOD_AT: Final = HEAD_BYTES + 3
"""Position of the low byte of the method id in a method frame, enough to skip other methods."""
_CONNECTION_CLASS: Final = 10


class Session:
    """Server side of one connection."""

    def __init__(self, limits: Limits) -> None:
        self.limits = limits
        self.tuning = Tuning.before(limits)
        self.phase = Phase.HEADER
        self.channels: dict[int, ChannelState] = {}
        self.outgoing: list[Piece] = []
        self._codecs = codecs()
        self._memo: dict[bytes, tuple[ChannelState, m.BasicPublish]] = {}
        self._frame_buffer = FrameBuffer()
        self._open_frame: OpenFrame | None = None
        """The incomplete body frame. The frame buffer is empty then."""
        self._content_bytes = 0
        self._ignores_input = False

    def receive(self, data: bytes) -> Iterator[Event]:
        """Parse received bytes after those kept before. Consume all events before the next call."""
        if self._ignores_input or self.phase is Phase.CLOSED:
            return
        complete = self._frame_buffer.with_next(data)
        if complete is None:
            return
        data, at = complete, 0
        if self.phase is Phase.HEADER:
            size = len(PROTOCOL_HEADER)
            if not PROTOCOL_HEADER.startswith(data[:size]):
                self.outgoing.append(PROTOCOL_HEADER)
                self.phase = Phase.CLOSED
                yield HeaderRefused(data[:size])
                return
            if len(data) < size:
                self._hold(data, 0, size)
                return
            at = size
            self.phase = Phase.START_OK
            yield HeaderAccepted()
        try:
            if self._open_frame is not None:
                at, event = self._go_on(self._open_frame, data)
                if event is not None:
                    yield event
            yield from self._parse(data, at)
        except ConnectionFault as fault:
            # After a frame error the next frame boundary is unknown; other faults leave the framing intact.
            self._ignores_input = fault.code == FRAME_ERROR
            self.fail(fault)
            yield ConnectionFailed(fault)

    def _parse(self, data: bytes, at: int) -> Iterator[Event]:
        end = len(data)
        while at < end:
            if at + HEAD_BYTES > end:
                self._hold(data, at, HEAD_BYTES)
                return
            kind, number, size = HEAD.unpack_from(data, at)
            stop = at + HEAD_BYTES + size
            if (
                kind == METHOD
                and stop < end
                and size >= _PUBLISH_BYTES_MIN
                and data[at + _METHOD_AT] == _PUBLISH_METHOD
                and (found := self._route(number, data[at : stop + 1])) is not None
            ):
                messages, at = self._publishes(data, at, stop + 1, *found)
                if messages:
                    yield Published(number, messages)
                    continue
            if size > self.tuning.frame_bytes_max - OVERHEAD_BYTES:
                raise ConnectionFault(
                    FRAME_ERROR,
                    f"type {kind}, all octets, channel {number}: a frame of {size + OVERHEAD_BYTES} bytes exceeds the "
                    f"limit of {self.tuning.frame_bytes_max}",
                )
            if stop >= end:
                if kind not in _KINDS:
                    raise _unknown(kind)
                if kind == BODY:
                    self._open_frame = OpenFrame(number, size)
                    self._open_frame.add(data, at + HEAD_BYTES)
                else:
                    self._hold(data, at, size + OVERHEAD_BYTES)
                return
            if data[stop] != END:
                raise ConnectionFault(FRAME_ERROR, f"a frame ends with {data[stop]:#04x} instead of {END:#04x}")
            event = self._frame(kind, number, data, at, stop)
            at = stop + 1
            if event is not None:
                yield event
            if self.phase is Phase.CLOSED:
                return

    def _publishes(
        self, data: bytes, at: int, content_at: int, state: ChannelState, method: m.BasicPublish
    ) -> tuple[list[Message], int]:
        """Parse complete publishes from `at` on, on one channel and with known routes, up to the size of one event.

        Return the messages and the position after them. Anything irregular is left to the frame-by-frame path.
        """
        end = len(data)
        until = at + PUBLISHES_BYTES_MAX
        number = state.number
        method_frame = data[at:content_at]
        method_bytes = content_at - at
        body_bytes_max = min(self.limits.message_bytes_max, self.tuning.frame_bytes_max - OVERHEAD_BYTES)
        content_head_of, begins = CONTENT_HEAD.unpack_from, data.startswith
        body_head, body_head_for = b"", -1
        messages: list[Message] = []
        while at < until:
            start = at + method_bytes
            if start + _CONTENT_HEAD_BYTES > end:
                break
            kind, channel, size, class_id, weight, body_bytes = content_head_of(data, start)
            body_at = start + size + OVERHEAD_BYTES
            if kind != HEADER or channel != number or class_id != BASIC_CLASS or weight or size < _HEADER_BYTES_MIN:
                break
            if body_bytes:
                if body_bytes != body_head_for:
                    if body_bytes > body_bytes_max:
                        break
                    body_head, body_head_for = HEAD.pack(BODY, number, body_bytes), body_bytes
                last = body_at + HEAD_BYTES + body_bytes
                if last >= end or data[body_at - 1] != END or not begins(body_head, body_at) or data[last] != END:
                    break
                body = data[body_at + HEAD_BYTES : last]
            else:
                last = body_at - 1
                if last >= end or data[last] != END:
                    break
                body = b""
            messages.append((method, data[start + _CONTENT_HEAD_BYTES : body_at - 1], body))
            at = last + 1
            if begins(method_frame, at):
                continue
            if at + HEAD_BYTES + _PUBLISH_BYTES_MIN > end or data[at] != METHOD:
                break
            frame = data[at : at + OVERHEAD_BYTES + int(_SIZE.unpack_from(data, at + 3)[0])]
            found = self._route(number, frame)
            if found is None:
                break
            method, method_frame, method_bytes = found[1], frame, len(frame)
        return messages, at

    def _frame(self, kind: int, number: int, data: bytes, at: int, stop: int) -> Event | None:
        """Handle one complete frame."""
        if kind == METHOD:
            return self._method(number, data, at, stop)
        if kind == HEARTBEAT:
            if number:
                raise ConnectionFault(UNEXPECTED_FRAME, f"heartbeat on channel {number}; expected channel 0")
            if stop - at != HEAD_BYTES:
                raise ConnectionFault(FRAME_ERROR, f"heartbeat with {stop - at - HEAD_BYTES} bytes; expected none")
            return None
        if kind not in _KINDS:
            raise _unknown(kind)
        state = self._content_channel(number)
        if state is None:
            return None
        if kind == HEADER:
            return self._header(state, data, at, stop)
        at += HEAD_BYTES
        return self._body(state, [piece_of(data, at, stop)], stop - at)

    def _go_on(self, frame: OpenFrame, data: bytes) -> tuple[int, Event | None]:
        """Continue a body frame. Return the position behind what it took, and the event that it completed."""
        at = frame.add(data, 0)
        if at == len(data):
            return at, None
        self._open_frame = None
        if data[at] != END:
            raise ConnectionFault(FRAME_ERROR, f"a frame ends with {data[at]:#04x} instead of {END:#04x}")
        state = self._content_channel(frame.number)
        return at + 1, None if state is None else self._body(state, frame.pieces, frame.size)

    def _content_channel(self, number: int) -> ChannelState | None:
        """Return the channel of a content frame; None if its content is ignored."""
        if self.phase is Phase.CLOSING:
            return None
        if self.phase is not Phase.RUNNING:
            raise ConnectionFault(UNEXPECTED_FRAME, f"content frame in phase {self.phase.value} of the handshake")
        state = self.channels.get(number)
        if state is None:
            raise ConnectionFault(UNEXPECTED_FRAME, f"content frame on channel {number}, which is not open")
        return None if state.phase is CLOSING else state

    def _header(self, state: ChannelState, data: bytes, at: int, stop: int) -> Event | None:
        body_bytes = state.header(data, at, stop)
        if body_bytes > self.limits.message_bytes_max:
            fault = ChannelFault(
                PRECONDITION_FAILED,
                f"message size {body_bytes} is larger than the maximum of {self.limits.message_bytes_max}",
                m.BasicPublish.number,
            )
            self.close_channel(state.number, fault)
            return ChannelFailed(state.number, fault)
        return None if body_bytes else self._published(state)

    def _body(self, state: ChannelState, pieces: list[Piece], size: int) -> Event | None:
        if not state.body(pieces, size):
            self._content_bytes += size
            if self._content_bytes > self.limits.content_bytes_max:
                raise ConnectionFault(
                    RESOURCE_ERROR,
                    f"incomplete messages of all channels exceed {self.limits.content_bytes_max} bytes",
                )
            return None
        self._content_bytes -= state.got_bytes - size
        return self._published(state)

    def _published(self, state: ChannelState) -> Published:
        return Published(state.number, [state.take()])

    def _method(self, number: int, data: bytes, at: int, stop: int) -> Event | None:
        start = at + HEAD_BYTES
        if stop - start < 4:
            raise ConnectionFault(FRAME_ERROR, f"a method frame of {stop - start} bytes is too short")
        method_id: int = _METHOD_ID.unpack_from(data, start)[0]
        if self.phase is Phase.RUNNING and number:
            state = self.channels.get(number)
            if state is not None and state.phase is OPEN:
                if method_id == _ACK_ID and stop - start == _ACK_BYTES:
                    tag, bits = _ACK.unpack_from(data, start + 4)
                    return Received(number, m.BasicAck(tag, bits & 1 == 1))
                if method_id == _PUBLISH_ID and (found := self._route(number, data[at : stop + 1])) is not None:
                    state.method = found[1]
                    state.phase = CONTENT
                    return None
                return self._channel_method(state, self._decode(method_id, data[start:stop]))
            return self._odd_method(number, state, method_id, data[start:stop])
        if method_id >> 16 != _CONNECTION_CLASS or number:
            if self.phase is Phase.CLOSING:
                return None
            if self.phase is Phase.RUNNING:
                raise ConnectionFault(CHANNEL_ERROR, f"{self._name(method_id)} on channel 0", _pair(method_id))
            raise ConnectionFault(
                COMMAND_INVALID, f"{self._name(method_id)} received, expected {self.phase.value}", _pair(method_id)
            )
        return self._connection_method(self._decode(method_id, data[start:stop]))

    def _decode(self, method_id: int, payload: bytes) -> m.Method:
        codec = self._codecs.get(method_id)
        if codec is None:
            class_id, method = _pair(method_id)
            raise ConnectionFault(NOT_IMPLEMENTED, f"unknown method {method} of class {class_id}", _pair(method_id))
        return codec.decode(payload)

    def _route(self, number: int, frame: bytes) -> tuple[ChannelState, m.BasicPublish] | None:
        """Decode a complete basic.publish on an open channel, cached by frame.

        Decoded by hand, because a publisher with many routes sends one per message. Return None for anything else; the
        general path reports malformed frames.
        """
        found = self._memo.get(frame)
        if found is not None and found[0].phase is OPEN:
            return found
        state = self.channels.get(number)
        if state is None or state.phase is not OPEN or not frame.startswith(_PUBLISH_PREFIX, HEAD_BYTES):
            return None
        try:
            key_at = _EXCHANGE_AT + 1 + frame[_EXCHANGE_AT]
            bits_at = key_at + 1 + frame[key_at]
            bits = frame[bits_at]
            exchange, key = frame[_EXCHANGE_AT + 1 : key_at].decode(), frame[key_at + 1 : bits_at].decode()
        except (IndexError, UnicodeDecodeError):
            return None
        if bits_at + 2 != len(frame) or frame[-1] != END:
            return None
        if len(self._memo) >= PUBLISH_MEMO_MAX:
            self._memo.clear()
        found = self._memo[frame] = (state, m.BasicPublish(0, exchange, key, bits & 1 == 1, bits & 2 == 2))
        return found

    def _channel_method(self, state: ChannelState, method: m.Method) -> Event | None:
        """Handle a method on an open channel that expects no content."""
        if type(method) not in FROM_CLIENTS:
            raise ConnectionFault(COMMAND_INVALID, f"clients may not send {name_of(type(method))}", method.number)
        if type(method) is m.ChannelOpen:
            raise ConnectionFault(CHANNEL_ERROR, f"channel {state.number} is already open", method.number)
        if type(method) is m.ChannelClose:
            self._forget(state)
        elif type(method) is m.ChannelCloseOk:
            raise ConnectionFault(
                COMMAND_INVALID, f"channel.close-ok on channel {state.number}, which is not closing", method.number
            )
        return Received(state.number, method)

    def _odd_method(self, number: int, state: ChannelState | None, method_id: int, payload: bytes) -> Event | None:
        """Handle a method on a channel that is not open, is closing, or expects content."""
        if state is None:
            method = self._decode(method_id, payload)
            if type(method) is not m.ChannelOpen:
                if type(method) is m.ChannelCloseOk:
                    return None
                raise ConnectionFault(
                    CHANNEL_ERROR, f"{name_of(type(method))} on channel {number}, which is not open", method.number
                )
            if number > self.tuning.channel_max:
                raise ConnectionFault(
                    NOT_ALLOWED,
                    f"channel {number} exceeds the channel-max of {self.tuning.channel_max}",
                    method.number,
                )
            self.channels[number] = ChannelState(number)
            return Received(number, method)
        if state.phase is CLOSING:
            if method_id == _number(m.ChannelCloseOk):
                self._forget(state)
            elif method_id == _number(m.ChannelClose):
                # Both sides closed at the same time: respond, and keep waiting for the client's response.
                self.send(number, m.ChannelCloseOk())
            return None
        raise ConnectionFault(
            UNEXPECTED_FRAME,
            f"{self._name(method_id)} on channel {number}, where content was expected",
            _pair(method_id),
        )

    def _connection_method(self, method: m.Method) -> Event | None:
        if type(method) not in ALLOWED[self.phase]:
            if self.phase is Phase.CLOSING:
                return None
            # RabbitMQ uses 504 for a handshake method on a running connection.
            code = CHANNEL_ERROR if self.phase is Phase.RUNNING else COMMAND_INVALID
            text = f"{name_of(type(method))} in connection phase {self.phase.value}"
            raise ConnectionFault(code, text, method.number)
        if type(method) is m.ConnectionClose:
            self.send(0, m.ConnectionCloseOk())
            self.phase = Phase.CLOSED
        elif type(method) is m.ConnectionCloseOk:
            self.phase = Phase.CLOSED
        elif type(method) in (m.ConnectionStartOk, m.ConnectionSecureOk):
            self.phase = Phase.CHECKING
        elif isinstance(method, m.ConnectionTuneOk):
            self.tuning = self.tuning.answered(self.limits, method)
            self.phase = Phase.OPEN
        elif type(method) is m.ConnectionOpen:
            self.phase = Phase.OPENING
        return Received(0, method)

    def send(self, channel: int, method: m.Method) -> None:
        """Append a method to the output. Responses to connection methods advance the phase."""
        if self.phase is Phase.CLOSED:
            raise LocalProtocolError(f"cannot send {name_of(type(method))}: the connection is closed")
        moved = _MOVES.get((self.phase, type(method)))
        if moved is not None:
            self.phase = moved
        self.outgoing.append(encode_method(channel, method))

    def fail(self, fault: Fault) -> None:
        """Close the connection with a fault: send connection.close and wait for the response."""
        if self.phase in (Phase.CLOSING, Phase.CLOSED):
            return
        self.send(0, m.ConnectionClose(fault.code, fault.reply_text, *fault.method))
        self.phase = Phase.CLOSING
        for state in self.channels.values():
            state.phase = CLOSED
        self.channels.clear()
        self._memo.clear()
        self._content_bytes = 0

    def close_channel(self, number: int, fault: Fault) -> None:
        """Close a channel with a fault: send channel.close and ignore its input until the response."""
        state = self.channels.get(number)
        if state is None or state.phase is CLOSING:
            return
        self._drop_content(state)
        state.phase = CLOSING
        self.send(number, m.ChannelClose(fault.code, fault.reply_text, *fault.method))

    def is_open(self, number: int) -> bool:
        """Whether methods may be sent on a channel."""
        state = self.channels.get(number)
        return state is not None and state.phase is not CLOSING

    def _forget(self, state: ChannelState) -> None:
        self._drop_content(state)
        state.phase = CLOSED
        del self.channels[state.number]

    def _drop_content(self, state: ChannelState) -> None:
        self._content_bytes -= state.got_bytes
        state.drop()

    def _hold(self, data: bytes, at: int, needed_bytes: int) -> None:
        """Keep the rest of a buffer until `needed_bytes` of it have arrived."""
        self._frame_buffer.keep(data[at:], needed_bytes - (len(data) - at))

    def _name(self, method_id: int) -> str:
        codec = self._codecs.get(method_id)
        return name_of(codec.cls) if codec is not None else "method {1} of class {0}".format(*_pair(method_id))


_KINDS: Final = frozenset({METHOD, HEADER, BODY, HEARTBEAT})

_MOVES: Final[dict[tuple[Phase, type[m.Method]], Phase]] = {
    (Phase.CHECKING, m.ConnectionSecure): Phase.SECURE_OK,
    (Phase.CHECKING, m.ConnectionTune): Phase.TUNE_OK,
    (Phase.OPENING, m.ConnectionOpenOk): Phase.RUNNING,
}
"""Phase transitions caused by sending a method."""


def _unknown(kind: int) -> ConnectionFault:
    return ConnectionFault(
        FRAME_ERROR, f"unknown frame type {kind}; valid: 1 (method), 2 (header), 3 (body), 8 (heartbeat)"
    )


def _pair(method_id: int) -> tuple[int, int]:
    return method_id >> 16, method_id & 0xFFFF


def _number(cls: type[m.Method]) -> int:
    return cls.number[0] << 16 | cls.number[1]
