"""A connection's protocol without I/O: bytes in, events out, bytes to send gathered in `outgoing`.

The walk over a buffer has a fast path: publishes whose three frames (method, header, one body) lie in the buffer as a
whole. A method frame is looked up whole in a small memo, so that the arguments of a publisher's usual routes are
decoded once, and those that follow with the same bytes are only compared. Everything else (long bodies, messages cut by
the end of the buffer, all other methods) goes frame by frame. Both ways give the same messages in the same order.

Bounds: an unfinished frame (at most the negotiated frame size) waits in pieces and is joined once it is whole, so that
a client that sends byte by byte costs no more than one that does not. Unfinished contents of all channels together hold
at most `content_bytes_max`. Once the peer broke the framing nothing it sends is looked at.
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
from basaltmq.protocols.amqp091.wire.content import ChannelState
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

PUBLISH_MEMO_MAX: Final = 512
"""Routes remembered per connection: more than a publisher uses at a time; a full memo is emptied, 100 KiB at most."""

PUBLISHES_BYTES_MAX: Final = 32 << 10
"""Publishes that one event holds: a few hundred small ones, so that their connection can stop in between."""

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
"""Where in a method frame the low byte of the method's number lies: enough to leave other methods alone."""
_CONNECTION_CLASS: Final = 10


class Session:
    """The server's side of one connection."""

    def __init__(self, limits: Limits) -> None:
        self.limits = limits
        self.tuning = Tuning.before(limits)
        self.phase = Phase.HEADER
        self.channels: dict[int, ChannelState] = {}
        self.outgoing: list[bytes] = []
        self._codecs = codecs()
        self._memo: dict[bytes, tuple[ChannelState, m.BasicPublish]] = {}
        self._held: list[bytes] = []
        self._held_bytes = 0
        self._needed_bytes = len(PROTOCOL_HEADER)
        self._content_bytes = 0
        self._deaf = False

    def receive(self, data: bytes) -> Iterator[Event]:
        """Walk over what came, together with what was left before. Take every event before the next call."""
        if self._deaf or self.phase is Phase.CLOSED:
            return
        if self._held:
            self._held.append(data)
            self._held_bytes += len(data)
            if self._held_bytes < self._needed_bytes:
                return
            data = b"".join(self._held)
            self._held = []
            self._held_bytes = 0
        at = 0
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
            yield from self._walk(data, at)
        except ConnectionFault as fault:
            # A frame that lies gives no place to go on from; all other faults leave the frames in order.
            self._deaf = fault.code == FRAME_ERROR
            self.fail(fault)
            yield ConnectionFailed(fault)

    def _walk(self, data: bytes, at: int) -> Iterator[Event]:
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
                    f"type {kind}, all octets, channel {number}: a frame of {size + OVERHEAD_BYTES} bytes is over the "
                    f"limit of {self.tuning.frame_bytes_max}",
                )
            if stop >= end:
                if kind not in _KINDS:
                    raise _unknown(kind)
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
        """The publishes from `at` on, on one channel and by known routes, that lie in the buffer as a whole, and where
        they end: as many as make one event. Whatever is not quite as it should be is left to the walk frame by
        frame."""
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
        """Take one whole frame."""
        if kind == METHOD:
            return self._method(number, data, at, stop)
        if kind == HEARTBEAT:
            if number:
                raise ConnectionFault(UNEXPECTED_FRAME, f"a heartbeat came on channel {number}")
            if stop - at != HEAD_BYTES:
                raise ConnectionFault(FRAME_ERROR, f"a heartbeat of {stop - at - HEAD_BYTES} bytes: it is empty")
            return None
        if kind not in _KINDS:
            raise _unknown(kind)
        if self.phase is Phase.CLOSING:
            return None
        if self.phase is not Phase.RUNNING:
            raise ConnectionFault(UNEXPECTED_FRAME, f"a content frame came where {self.phase.value} was due")
        state = self.channels.get(number)
        if state is None:
            raise ConnectionFault(UNEXPECTED_FRAME, f"a content frame came on channel {number}, which is not open")
        if state.phase is CLOSING:
            return None
        return self._content(state, kind, data, at, stop)

    def _content(self, state: ChannelState, kind: int, data: bytes, at: int, stop: int) -> Event | None:
        if kind == HEADER:
            body_bytes = state.header(data, at, stop)
            if body_bytes > self.limits.message_bytes_max:
                fault = ChannelFault(
                    PRECONDITION_FAILED,
                    f"message size {body_bytes} is larger than the maximum of {self.limits.message_bytes_max}",
                    m.BasicPublish.number,
                )
                self.close_channel(state.number, fault)
                return ChannelFailed(state.number, fault)
            if body_bytes:
                return None
        else:
            size = stop - at - HEAD_BYTES
            if not state.body(data[at + HEAD_BYTES : stop]):
                self._content_bytes += size
                if self._content_bytes > self.limits.content_bytes_max:
                    raise ConnectionFault(
                        RESOURCE_ERROR,
                        f"unfinished messages of all channels are over {self.limits.content_bytes_max} bytes",
                    )
                return None
            self._content_bytes -= state.got_bytes - size
        method, properties, body = state.take()
        return Published(state.number, [(method, properties, body)])

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
                raise ConnectionFault(CHANNEL_ERROR, f"{self._name(method_id)} came on channel 0", _pair(method_id))
            raise ConnectionFault(
                COMMAND_INVALID, f"{self._name(method_id)} came where {self.phase.value} was due", _pair(method_id)
            )
        return self._connection_method(self._decode(method_id, data[start:stop]))

    def _decode(self, method_id: int, payload: bytes) -> m.Method:
        codec = self._codecs.get(method_id)
        if codec is None:
            class_id, method = _pair(method_id)
            raise ConnectionFault(
                NOT_IMPLEMENTED, f"method {method} of class {class_id} is not known", _pair(method_id)
            )
        return codec.decode(payload)

    def _route(self, number: int, frame: bytes) -> tuple[ChannelState, m.BasicPublish] | None:
        """A whole basic.publish on an open channel, its arguments by hand because a publisher to many routes sends one
        for every message. None for anything else, the malformed included: the general way says what is wrong."""
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
        """A method on a channel that is open and between contents."""
        if type(method) not in FROM_CLIENTS:
            raise ConnectionFault(COMMAND_INVALID, f"{name_of(type(method))} is not for clients to send", method.number)
        if type(method) is m.ChannelOpen:
            raise ConnectionFault(CHANNEL_ERROR, f"channel {state.number} is open already", method.number)
        if type(method) is m.ChannelClose:
            self._forget(state)
        elif type(method) is m.ChannelCloseOk:
            raise ConnectionFault(COMMAND_INVALID, f"nobody closed channel {state.number}", method.number)
        return Received(state.number, method)

    def _odd_method(self, number: int, state: ChannelState | None, method_id: int, payload: bytes) -> Event | None:
        """A method on a channel that is not open, is closing, or waits for content."""
        if state is None:
            method = self._decode(method_id, payload)
            if type(method) is not m.ChannelOpen:
                if type(method) is m.ChannelCloseOk:
                    return None
                raise ConnectionFault(
                    CHANNEL_ERROR, f"{name_of(type(method))} came on channel {number}, which is not open", method.number
                )
            if number > self.tuning.channel_max:
                raise ConnectionFault(
                    NOT_ALLOWED,
                    f"channel {number} is beyond the channel-max of {self.tuning.channel_max}",
                    method.number,
                )
            self.channels[number] = ChannelState(number)
            return Received(number, method)
        if state.phase is CLOSING:
            if method_id == _number(m.ChannelCloseOk):
                self._forget(state)
            elif method_id == _number(m.ChannelClose):
                # Both sides closed at once: answer theirs, go on waiting for the answer to ours.
                self.send(number, m.ChannelCloseOk())
            return None
        raise ConnectionFault(
            UNEXPECTED_FRAME,
            f"{self._name(method_id)} came on channel {number} in the middle of a content",
            _pair(method_id),
        )

    def _connection_method(self, method: m.Method) -> Event | None:
        if type(method) not in ALLOWED[self.phase]:
            if self.phase is Phase.CLOSING:
                return None
            # An open connection is no phase of the handshake: the method is one too many, and RabbitMQ says 504.
            code = CHANNEL_ERROR if self.phase is Phase.RUNNING else COMMAND_INVALID
            text = f"{name_of(type(method))} came in connection state {self.phase.value}"
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
        """Put a method out. Answers to connection methods move the connection on."""
        if self.phase is Phase.CLOSED:
            raise LocalProtocolError(f"{name_of(type(method))} after the end of the connection")
        moved = _MOVES.get((self.phase, type(method)))
        if moved is not None:
            self.phase = moved
        self.outgoing.append(encode_method(channel, method))

    def fail(self, fault: Fault) -> None:
        """End the connection with a fault: say connection.close and wait for the answer."""
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
        """End a channel with a fault: say channel.close and drop what comes on it until the answer."""
        state = self.channels.get(number)
        if state is None or state.phase is CLOSING:
            return
        self._drop_content(state)
        state.phase = CLOSING
        self.send(number, m.ChannelClose(fault.code, fault.reply_text, *fault.method))

    def is_open(self, number: int) -> bool:
        """Whether things may be sent on a channel."""
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
        """Keep the rest of a buffer until `needed_bytes` of it are there."""
        rest = data[at:]
        self._held = [rest]
        self._held_bytes = len(rest)
        self._needed_bytes = needed_bytes

    def _name(self, method_id: int) -> str:
        codec = self._codecs.get(method_id)
        return name_of(codec.cls) if codec is not None else "method {1} of class {0}".format(*_pair(method_id))


_KINDS: Final = frozenset({METHOD, HEADER, BODY, HEARTBEAT})

_MOVES: Final[dict[tuple[Phase, type[m.Method]], Phase]] = {
    (Phase.CHECKING, m.ConnectionSecure): Phase.SECURE_OK,
    (Phase.CHECKING, m.ConnectionTune): Phase.TUNE_OK,
    (Phase.OPENING, m.ConnectionOpenOk): Phase.RUNNING,
}
"""What sending a method does to the phase."""


def _unknown(kind: int) -> ConnectionFault:
    return ConnectionFault(
        FRAME_ERROR, f"a frame of type {kind}: 1 (method), 2 (header), 3 (body) and 8 (heartbeat) exist"
    )


def _pair(method_id: int) -> tuple[int, int]:
    return method_id >> 16, method_id & 0xFFFF


def _number(cls: type[m.Method]) -> int:
    return cls.number[0] << 16 | cls.number[1]
