"""Lifecycle events of messages, in the format of the system topic `__events`.

The value of a record is one or more blocks. A block describes what one call did to messages of one queue: a kind, a
time, and a column of messages. Common parts are stored once.

    block      | size u32 (of the other fields) | layout u8 | kind u8 | flags u8 | at ns u64 | messages u32
               | consumer bytes u16 | consumer | message ... | attempts u32 ... |
    a message  | queue bytes u16 | queue | sub-queue bytes u16 | sub-queue | enqueued ns u64 | id (16) |
    with the flag ALIKE   | head bytes u16 | a message without its id | id (16) ... |     instead of the messages

    kind       1 enqueued       the message entered the queue: published, dead-lettered or moved
               2 leased         leased to `consumer`
               3 acked          acknowledged by `consumer`
               4 nacked         negatively acknowledged
               5 expired        its time to live is over; dead_lettered or dropped follows
               6 dead_lettered  moved to the dead-letter queue, where it is enqueued
               7 lapsed         its lease expired, which counts as a failure like a nack
               8 dropped        deleted undelivered: no dead-letter queue, or a cycle of them

A message is stored as its unmodified store key, because stripping common prefixes costs more than writing them.
Messages of one sub-queue that arrived in one call differ in their ids only, and only the ids are stored (ALIKE). All
messages of a block belong to one queue.

`sub-queue` is the fairness key. In a queue with priorities (flag PRIORITIES) it is the priority in three digits, a bar,
and the fairness key. `attempts` is the number of failed deliveries per message, with the flag ATTEMPTS. Without the
flag it is unknown for enqueued and acked, and 0 for the other kinds. The latency since enqueue is max(0, `at ns` -
`enqueued ns`), by the clock of the process. A message enqueued and acked in one change has both events. Purging or
deleting a queue and releasing a lease produce no events.

Events are published after their change is written, in the order of changes. They are best effort: a killed process
loses the latest ones, and under pressure events are dropped and counted (`Recorder`).
"""

from __future__ import annotations

import enum
from collections.abc import Iterator, Sequence
from struct import Struct
from struct import error as struct_error
from typing import Final, NamedTuple

from basaltmq.errors import CorruptionError
from basaltmq.ids import ID_BYTES
from basaltmq.store.keys.parts import take_lp
from basaltmq.store.keys.queues import TIME_AND_ID_BYTES, decode_message_key

TOPIC: Final = "__events"
LAYOUT: Final = 1

ATTEMPTS: Final = 1
PRIORITIES: Final = 2
ALIKE: Final = 4

HEADS_MAX: Final = 1024
"""Cached block heads, some hundred bytes each."""

CONSUMER_CHARS_MAX: Final = 16_383
"""Longest consumer name in characters: fits the length field in any encoding."""

_SIZE: Final = Struct(">I")
_HEAD_SIZE: Final = Struct(">H")
_HEAD: Final = Struct(">BBBQIH")
_WHOLE_HEAD: Final = Struct(">IBBBQIH")
_AT_NS: Final = Struct(">IBBB").size
"""Offset of the time in a block."""


class Kind(enum.IntEnum):
    """What happened to a message."""

    ENQUEUED = 1
    LEASED = 2
    ACKED = 3
    NACKED = 4
    EXPIRED = 5
    DEAD_LETTERED = 6
    LAPSED = 7
    DROPPED = 8


ENQUEUED: Final = Kind.ENQUEUED
LEASED: Final = Kind.LEASED
ACKED: Final = Kind.ACKED
"""Constants of the hot path, because attribute lookup on an enumeration costs more than the rest."""


class Event(NamedTuple):
    """One decoded event."""

    kind: Kind
    queue: str
    message_id: bytes
    fairness_key: str
    priority: int | None
    at_ns: int
    enqueued_ns: int
    attempts: int | None
    consumer: str


def encode_block(
    kind: int, flags: int, at_ns: int, consumer: str, keys: Sequence[bytes], attempts: bytes = b""
) -> bytes:
    """Encode a block of messages with these keys."""
    flags |= ATTEMPTS if attempts else 0
    messages = b"".join(keys)
    name = _consumer_bytes(consumer)
    size = _HEAD.size + len(name) + len(messages) + len(attempts)
    head = _WHOLE_HEAD.pack(size, LAYOUT, kind, flags, at_ns, len(keys), len(name))
    return b"".join((head, name, messages, attempts))


class BlockEncoder:
    """Encodes blocks of one message, or of messages that arrived in one call. Heads are cached, because single-message
    events occur by the hundred thousand."""

    def __init__(self) -> None:
        self._heads: dict[tuple[int, str, int, int], tuple[bytes, bytes]] = {}

    def encode_one(self, kind: int, at_ns: int, consumer: str, key: bytes) -> bytes:
        """Encode a block of the message with this key."""
        known = self._heads.get((kind, consumer, len(key), 0))
        if known is None:
            known = self._make(kind, consumer, len(key), 0)
        return b"".join((known[0], at_ns.to_bytes(8, "big"), known[1], key))

    def encode_alike(self, kind: int, at_ns: int, consumer: str, head: bytes, id_bytes: bytes) -> bytes:
        """Encode a block of messages whose keys start with `head` and end with these concatenated ids."""
        known = self._heads.get((kind, consumer, len(head), len(id_bytes)))
        if known is None:
            known = self._make(kind, consumer, len(head), len(id_bytes))
        return b"".join((known[0], at_ns.to_bytes(8, "big"), known[1], head, id_bytes))

    def _make(self, kind: int, consumer: str, head_bytes: int, id_bytes: int) -> tuple[bytes, bytes]:
        """Return the parts of a block before and after the time, up to the messages."""
        name = _consumer_bytes(consumer)
        head_size = _HEAD_SIZE.pack(head_bytes) if id_bytes else b""
        size = _HEAD.size + len(name) + len(head_size) + head_bytes + id_bytes
        flags, count = (ALIKE, id_bytes // ID_BYTES) if id_bytes else (0, 1)
        whole = _WHOLE_HEAD.pack(size, LAYOUT, kind, flags, 0, count, len(name))
        if len(self._heads) == HEADS_MAX:
            self._heads.clear()
        made = whole[:_AT_NS], whole[_AT_NS + 8 :] + name + head_size
        self._heads[kind, consumer, head_bytes, id_bytes] = made
        return made


def _consumer_bytes(consumer: str) -> bytes:
    """Encode a consumer's name. Never fails, whatever the name is."""
    return consumer[:CONSUMER_CHARS_MAX].encode(errors="replace")


def decode_events(value: bytes) -> Iterator[Event]:
    """Yield the events of a record's value, in order."""
    at = 0
    while at < len(value):
        if at + _SIZE.size > len(value):
            raise _damaged(value, at)
        size: int = _SIZE.unpack_from(value, at)[0]
        begin = at + _SIZE.size
        at = begin + size
        if at > len(value):
            raise _damaged(value, begin)
        yield from _decode_block(value, begin, at)


def _decode_block(value: bytes, at: int, end: int) -> Iterator[Event]:
    begin = at
    try:
        layout, kind_number, flags, at_ns, count, consumer_bytes = _HEAD.unpack_from(value, at)
        if layout != LAYOUT or flags & ~(ATTEMPTS | PRIORITIES | ALIKE):
            raise ValueError
        kind = Kind(kind_number)
        at += _HEAD.size
        consumer = value[at : at + consumer_bytes].decode()
        keys, at = (_alike if flags & ALIKE else _keys)(value, at + consumer_bytes, count)
        attempts: Sequence[int | None] = _no_attempts(kind, count)
        if flags & ATTEMPTS:
            attempts = Struct(f">{count}I").unpack_from(value, at)
            at += 4 * count
        if at != end:
            raise ValueError
        places = [(decode_message_key(key), _split(decode_message_key(key)[1], flags)) for key in keys]
    except (struct_error, ValueError, CorruptionError):
        raise _damaged(value, begin) from None
    for ((queue, _, enqueued_ns, message_id), (priority, fairness_key)), tried in zip(places, attempts, strict=True):
        yield Event(kind, queue, message_id, fairness_key, priority, at_ns, enqueued_ns, tried, consumer)


def _keys(value: bytes, at: int, count: int) -> tuple[list[bytes], int]:
    """Return the keys of a block's messages, and where they end."""
    keys: list[bytes] = []
    for _ in range(count):
        end = take_lp(value, take_lp(value, at)[1])[1] + TIME_AND_ID_BYTES
        keys.append(value[at:end])
        at = end
    return keys, at


def _alike(value: bytes, at: int, count: int) -> tuple[list[bytes], int]:
    """Return the keys of an ALIKE block, and where they end."""
    begin = at + _HEAD_SIZE.size
    at = begin + _HEAD_SIZE.unpack_from(value, at)[0]
    end = at + count * ID_BYTES
    if end > len(value):
        raise ValueError
    head = value[begin:at]
    return [head + value[place : place + ID_BYTES] for place in range(at, end, ID_BYTES)], end


def _split(sub_queue: str, flags: int) -> tuple[int | None, str]:
    """Return priority and fairness key of a sub-queue."""
    if not flags & PRIORITIES:
        return None, sub_queue
    digits, _, fairness_key = sub_queue.partition("|")
    return int(digits), fairness_key


def _no_attempts(kind: Kind, count: int) -> list[int | None]:
    unknown = kind in (Kind.ENQUEUED, Kind.ACKED)
    return [None if unknown else 0] * count


def _damaged(value: bytes, at: int) -> CorruptionError:
    return CorruptionError(f"a record of {TOPIC} of {len(value)} bytes has a damaged block at byte {at}")
