"""A LeaseResponse as bytes, put together from rows without an object per field.

Most messages are a payload and little else, and their rows hold it all in fixed places. Messages of one enqueue whose
rows begin with the same fixed part differ in id and payload only: everything around these two is encoded once for all
of them. A row that is not like that is taken apart and encoded by protobuf. Both give what `proto/basalt.proto` says; a
test holds them against each other.

    LeaseResponse   1 token varint | 2 message, length-delimited, each | 3 visibility ms varint
    Message         1 id (16) | 2 payload | 4 fairness key | 5 weight | 6 attempts | 7 priority | 8 enqueued ns

Budget: 0.6 us a message of 1 KB of one enqueue with everything in the cache, about 1 us in a server that is busy.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain, repeat
from typing import Final

from basaltmq.broker.text_headers import headers_of
from basaltmq.protocols.grpc.varints import varint
from basaltmq.queues.delivery import PRIORITY, Delivery
from basaltmq.queues.message import HEAD, LAYOUT
from basaltmq.queues.rows import split_sub_queue
from basaltmq.store.keys import decode_message_key
from basaltmq.wire import basalt_pb2 as wire

_HEAD_BYTES: Final = HEAD.size
_ID_BYTES: Final = 16
_MESSAGE: Final = b"\x12"
_ID: Final = b"\x0a\x10"
_PAYLOAD: Final = b"\x12"


class _Frame:
    """What is around the id and the payload of messages alike, and where in their rows the payload begins."""

    __slots__ = ("after", "before", "between", "start")

    def __init__(self, before: bytes, between: bytes, after: bytes, start: int) -> None:
        self.before = before
        self.between = between
        self.after = after
        self.start = start


def lease_answer(found: Sequence[Delivery], visibility_ms: int) -> bytes:
    """The answer for messages of one lease."""
    parts = [b"\x08", varint(found[0].token), b"\x18", varint(visibility_ms)]
    if not _are_alike(found):
        parts += _mixed(found)
    elif (frame := _frame(found[0])) is not None:
        start = frame.start
        ids = [each.id for each in found]
        payloads = [each.row[start:] for each in found]
        messages = zip(repeat(frame.before), ids, repeat(frame.between), payloads, repeat(frame.after), strict=False)
        parts += chain.from_iterable(messages)
    else:
        parts += chain.from_iterable(map(_whole, found))
    return b"".join(parts)


def _are_alike(found: Sequence[Delivery]) -> bool:
    """Whether messages have all in common but their ids and payloads, and these are of one size."""
    first = found[0]
    place, head = first.key[:-_ID_BYTES], first.row[:_HEAD_BYTES]
    return not [each for each in found if each.row[:_HEAD_BYTES] != head or each.key[:-_ID_BYTES] != place]


def _mixed(found: Sequence[Delivery]) -> list[bytes]:
    """Messages of several enqueues, or of several kinds."""
    parts: list[bytes] = []
    frames: dict[tuple[bytes, bytes], _Frame | None] = {}
    for delivery in found:
        row = delivery.row
        place = (delivery.key[:-_ID_BYTES], row[:_HEAD_BYTES])
        if place in frames:
            frame = frames[place]
        else:
            frame = frames[place] = _frame(delivery)
        if frame is None:
            parts += _whole(delivery)
        else:
            parts += (frame.before, delivery.id, frame.between, row[frame.start :], frame.after)
    return parts


def _frame(delivery: Delivery) -> _Frame | None:
    """The frame of messages like this one; None if they cannot be put together from their rows."""
    row = delivery.row
    if row[0] != LAYOUT:
        # In an envelope, its payload perhaps apart.
        return None
    assert delivery.body is None, "a row without an envelope holds its payload"
    _, priority, attempts, weight, _, _, labels_bytes, properties_bytes, payload_bytes = HEAD.unpack_from(row)
    if labels_bytes or properties_bytes:
        # Headers of their own, or of another protocol.
        return None
    _, fairness_key, enqueued_ns, _ = decode_message_key(delivery.key)
    if delivery.marks & PRIORITY:
        fairness_key = split_sub_queue(fairness_key)[1]
    after = wire.Message(
        fairness_key=fairness_key, weight=weight, attempts=attempts, priority=priority, enqueued_ns=enqueued_ns
    ).SerializeToString()
    between = _PAYLOAD + varint(payload_bytes)
    length = len(_ID) + _ID_BYTES + len(between) + payload_bytes + len(after)
    return _Frame(_MESSAGE + varint(length) + _ID, between, after, _HEAD_BYTES)


def _whole(delivery: Delivery) -> tuple[bytes, ...]:
    message = delivery.message()
    encoded = wire.Message(
        id=message.id,
        payload=message.payload,
        headers={**headers_of(message.properties), **message.headers},
        fairness_key=message.fairness_key,
        weight=message.weight,
        attempts=message.attempts,
        priority=message.priority,
        enqueued_ns=message.enqueued_ns,
    ).SerializeToString()
    return _MESSAGE, varint(len(encoded)), encoded
