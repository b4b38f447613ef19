"""A LeaseResponse as bytes, put together from rows without an object per field.

Most messages are a payload and little else, and their rows hold it all in fixed places. Of such a row only the numbers
are looked at; what messages have in common (fairness key, weight, attempts, priority) is encoded once per answer. Any
other row is taken apart and encoded by protobuf. Both give what `proto/basalt.proto` says; a test holds them against
each other.

    LeaseResponse   1 token varint | 2 message, length-delimited, each | 3 visibility ms varint
    Message         1 id (16) | 2 payload | 4 fairness key | 5 weight | 6 attempts | 7 priority | 8 enqueued ns
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from basaltmq.queues.delivery import PRIORITY, Delivery
from basaltmq.queues.message import HEAD, LAYOUT
from basaltmq.queues.rows import split_sub_queue
from basaltmq.store.keys import decode_message_key
from basaltmq.wire import basalt_pb2 as wire

_PLACE_BYTES: Final = 24
"""Enqueue time and id, at the end of a message's key."""

_ID: Final = b"\x0a\x10"
_PAYLOAD: Final = b"\x12"
_ENQUEUED: Final = b"\x40"
_MESSAGE: Final = b"\x12"


def lease_answer(found: Sequence[Delivery], visibility_ms: int) -> bytes:
    """The answer for messages of one lease."""
    parts = [b"\x08", varint(found[0].token), b"\x18", varint(visibility_ms)]
    shared: dict[tuple[bytes, int, int, int], bytes] = {}
    times: dict[bytes, bytes] = {}
    for delivery in found:
        row = delivery.row
        if row[0] != LAYOUT or delivery.body is not None:
            parts += _whole(delivery)
            continue
        _, priority, attempts, weight, _, _, labels_bytes, properties_bytes, payload_bytes = HEAD.unpack_from(row)
        if labels_bytes:
            parts += _whole(delivery)
            continue
        key = delivery.key
        place = (key[:-_PLACE_BYTES], weight, attempts, priority)
        middle = shared.get(place)
        if middle is None:
            middle = shared[place] = _shared(delivery, weight, attempts, priority)
        at = key[-_PLACE_BYTES:-16]
        enqueued = times.get(at)
        if enqueued is None:
            enqueued = times[at] = _ENQUEUED + varint(int.from_bytes(at, "big"))
        size = varint(payload_bytes)
        length = 19 + len(size) + payload_bytes + len(middle) + len(enqueued)
        payload = row[HEAD.size + properties_bytes :]
        parts += (_MESSAGE, varint(length), _ID, delivery.id, _PAYLOAD, size, payload, middle, enqueued)
    return b"".join(parts)


def _shared(delivery: Delivery, weight: int, attempts: int, priority: int) -> bytes:
    fairness_key = decode_message_key(delivery.key)[1]
    if delivery.marks & PRIORITY:
        fairness_key = split_sub_queue(fairness_key)[1]
    return wire.Message(
        fairness_key=fairness_key, weight=weight, attempts=attempts, priority=priority
    ).SerializeToString()


def _whole(delivery: Delivery) -> tuple[bytes, ...]:
    message = delivery.message()
    encoded = wire.Message(
        id=message.id,
        payload=message.payload,
        headers=message.headers,
        fairness_key=message.fairness_key,
        weight=message.weight,
        attempts=message.attempts,
        priority=message.priority,
        enqueued_ns=message.enqueued_ns,
    ).SerializeToString()
    return _MESSAGE, varint(len(encoded)), encoded


def varint(value: int) -> bytes:
    """Protobuf's form of a number: seven bits a byte, the lowest first."""
    if value < 0x80:
        return bytes((value,))
    made = bytearray()
    while value >= 0x80:
        made.append(value & 0x7F | 0x80)
        value >>= 7
    made.append(value)
    return bytes(made)
