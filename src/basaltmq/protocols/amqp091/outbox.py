"""Encoding of deliveries, returns and confirms.

    deliver   | method frame: 60, 60, consumer tag, delivery tag u64, redelivered u8, exchange, routing key |
              | header frame | body frames |

Queues store the envelope of a message (exchange, routing key, properties) in wire order. So a delivery is assembled
from byte strings. The parts that messages with equal envelope and size share are built once and cached. Each message
adds only its delivery tag and body.
"""

from __future__ import annotations

from collections.abc import Sequence
from struct import Struct
from typing import Final, TypeAlias

from basaltmq.broker.consumers.consumer import Delivered
from basaltmq.broker.message.properties import EMPTY_ENVELOPE, encode_shortstr, properties_start, visible
from basaltmq.broker.message.text_headers import envelope_of
from basaltmq.protocols.amqp091.wire import methods as m
from basaltmq.protocols.amqp091.wire.frames import (
    BASIC_CLASS,
    BODY,
    CONTENT_FIXED_BYTES,
    CONTENT_HEAD,
    END_BYTE,
    HEAD,
    HEADER,
    METHOD,
    OVERHEAD_BYTES,
    body_frames,
    encode_content,
)
from basaltmq.protocols.amqp091.wire.method_codec import encode_method
from basaltmq.queues.leases.delivery import Delivery

Output: TypeAlias = "list[bytes | memoryview[int]]"
"""What a connection sends at the end of the turn. Parts of large bodies are views."""

PIECES_MAX: Final = 128
"""Cache limit per consumer. A queue rarely has more kinds of messages at a time; about 50 KiB with usual names."""

PIECE_BYTES_MAX: Final = 1024
"""Longer envelopes are not cached, because they rarely repeat."""

_DELIVER_ID: Final = b"\0\x3c\0\x3c"
_TAG: Final = Struct(">Q")
_CONFIRM: Final = Struct(">BHIHHQBB")
_ACK_METHOD: Final = 80
_NACK_METHOD: Final = 120
_CONFIRM_BYTES: Final = 13
_END: Final = 0xCE


class DeliverWriter:
    """Encodes the deliveries of one consumer."""

    __slots__ = ("_channel", "_consumer_tag", "_piece_bytes", "_pieces")

    def __init__(self, channel: int, consumer_tag: str, frame_bytes_max: int) -> None:
        self._channel = channel
        self._consumer_tag = encode_shortstr(consumer_tag, "consumer tag")
        self._piece_bytes = frame_bytes_max - OVERHEAD_BYTES
        self._pieces: dict[tuple[bytes, int, bool], tuple[bytes, bytes]] = {}

    def write(self, out: Output, tag: int, redelivered: bool, envelope: bytes, body: bytes) -> None:
        """Append one delivery to the output."""
        size = len(body)
        pieces = self._pieces.get((envelope, size, redelivered))
        if pieces is None:
            pieces = self._make(envelope, size, redelivered)
        if 0 < size <= self._piece_bytes:
            out += (pieces[0], _TAG.pack(tag), pieces[1], body, END_BYTE)
            return
        out.append(b"".join((pieces[0], _TAG.pack(tag), pieces[1])))
        if size:
            out += body_frames(self._channel, body, self._piece_bytes)

    def write_all(self, out: Output, tag: int, deliveries: Sequence[Delivered]) -> None:
        """Append deliveries with tags from `tag` on. Adjacent messages are often alike, so parts are reused."""
        pieces_of, pack, piece_bytes = self._pieces.get, _TAG.pack, self._piece_bytes
        last_envelope, last_size, last_redelivered = b"", -1, False
        before = between = b""
        for delivery in deliveries:
            envelope, body = delivery.content()
            if not envelope and isinstance(delivery, Delivery):
                envelope = envelope_of(delivery.headers)
            redelivered = delivery.redelivered
            size = len(body)
            if size != last_size or envelope != last_envelope or redelivered is not last_redelivered:
                if not 0 < size <= piece_bytes:
                    self.write(out, tag, redelivered, envelope, body)
                    tag += 1
                    continue
                pieces = pieces_of((envelope, size, redelivered))
                before, between = pieces if pieces is not None else self._make(envelope, size, redelivered)
                last_envelope, last_size, last_redelivered = envelope, size, redelivered
            out += (before, pack(tag), between, body, END_BYTE)
            tag += 1

    def _make(self, envelope: bytes, size: int, redelivered: bool) -> tuple[bytes, bytes]:
        """Build the bytes before the delivery tag, and the bytes between it and the body."""
        envelope = visible(envelope or EMPTY_ENVELOPE)
        start = properties_start(envelope)
        method_bytes = len(_DELIVER_ID) + len(self._consumer_tag) + _TAG.size + 1 + start
        before = HEAD.pack(METHOD, self._channel, method_bytes) + _DELIVER_ID + self._consumer_tag
        header_bytes = CONTENT_FIXED_BYTES + len(envelope) - start
        between = b"".join(
            (
                b"\1" if redelivered else b"\0",
                envelope[:start],
                END_BYTE,
                CONTENT_HEAD.pack(HEADER, self._channel, header_bytes, BASIC_CLASS, 0, size),
                envelope[start:],
                END_BYTE,
                HEAD.pack(BODY, self._channel, size) if 0 < size <= self._piece_bytes else b"",
            )
        )
        if len(envelope) <= PIECE_BYTES_MAX:
            if len(self._pieces) >= PIECES_MAX:
                self._pieces.clear()
            self._pieces[envelope, size, redelivered] = (before, between)
        return before, between


def write_content(
    out: Output, channel: int, method: m.Method, properties: bytes, body: bytes, frame_bytes_max: int
) -> None:
    """Append a method with its content (basic.return, basic.get-ok) to the output."""
    out.append(encode_method(channel, method))
    out.extend(encode_content(channel, properties, body, frame_bytes_max))


def encode_confirm(channel: int, tag: int, multiple: bool, ok: bool) -> bytes:
    """Encode a confirm: basic.ack or basic.nack from the server."""
    method = _ACK_METHOD if ok else _NACK_METHOD
    return _CONFIRM.pack(METHOD, channel, _CONFIRM_BYTES, BASIC_CLASS, method, tag, multiple, _END)
