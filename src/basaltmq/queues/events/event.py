"""Lifecycle events of messages, as they are written to the system topic `__events`.

The value of a record there is one block or many, back to back. A block is what one call did to messages of one queue:
a kind, a moment, and a column of messages; what is the same for all of them is said once.

    block      | size u32, of what follows | layout u8 | kind u8 | flags u8 | at ns u64 | messages u32
               | consumer bytes u16 | consumer | message ... | attempts u32 ... |
    a message  | queue bytes u16 | queue | sub-queue bytes u16 | sub-queue | enqueued ns u64 | id (16) |
    with the flag ALIKE   | head bytes u16 | a message without its id | id (16) ... |     instead of the messages

    kind       1 enqueued       a message is in the queue: published, or come from another one (dead letter, move)
               2 leased         it was handed to `consumer`
               3 acked          `consumer` is done with it
               4 nacked         a consumer failed
               5 expired        its time to live is over; dead_lettered or dropped follows
               6 dead_lettered  it left for the dead-letter queue, where it is enqueued
               7 lapsed         its lease ran out, which is a failure like a nack
               8 dropped        it is gone undelivered: no dead-letter queue, or a cycle of them

What is said of a message is its key in the store as it is: nothing is done per message but to copy it (cutting out what
keys have in common costs more than writing it). Messages that are of one sub-queue and came in one call differ by their
ids only, and where those are at hand they are all that is said (ALIKE). All messages of a block are of one queue.
`sub-queue` is the fairness key; in a queue with priorities (flag PRIORITIES) it is the priority in three digits, a bar,
and the fairness key. `attempts` are deliveries that failed so far, one per message if there is the flag ATTEMPTS; a
block without them says nothing of them if its kind is enqueued or acked, and that there were none otherwise. The
latency since enqueue is `at ns` less `enqueued ns`, but not less than 0. Times are those of the clock of the process. A
message that is enqueued and acked in one change has both events. Purging or deleting a queue and releasing a lease have
no events.

Events are told after the change they are of was written, in the order of changes. They are not promised: a process
that is killed loses those of the last moments, and under pressure events are dropped and counted (recorder.py).
"""

from __future__ import annotations

import enum
from collections.abc import Iterator, Sequence
from struct import Struct
from struct import error as struct_error
from typing import Final, NamedTuple

from basaltmq.errors import CorruptionError
from basaltmq.store.keys.queues import decode_message_key, take_lp

TOPIC: Final = "__events"
LAYOUT: Final = 1

ATTEMPTS: Final = 1
PRIORITIES: Final = 2
ALIKE: Final = 4

HEADS_MAX: Final = 1024
"""Beginnings of blocks that are kept: some hundred bytes each."""

CONSUMER_CHARS_MAX: Final = 16_383
"""Of a consumer's name: as many as fit into its length whatever they are."""

_SIZE: Final = Struct(">I")
_HEAD_SIZE: Final = Struct(">H")
_HEAD: Final = Struct(">BBBQIH")
_WHOLE_HEAD: Final = Struct(">IBBBQIH")
_AT_NS: Final = Struct(">IBBB").size
"""Where in a block its moment is."""
_PLACE_BYTES: Final = 24
_ID_BYTES: Final = 16


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
"""Those of every message, by names that are looked up at once: of an enumeration that takes longer than the rest."""


class Event(NamedTuple):
    """One event, taken apart."""

    kind: Kind
    queue: str
    message_id: bytes
    fairness_key: str
    priority: int | None
    at_ns: int
    enqueued_ns: int
    attempts: int | None
    consumer: str

    @property
    def latency_ns(self) -> int:
        """Since it was enqueued."""
        return max(0, self.at_ns - self.enqueued_ns)


def encode_block(
    kind: int, flags: int, at_ns: int, consumer: str, keys: Sequence[bytes], attempts: bytes = b""
) -> bytes:
    """A block of messages with these keys."""
    flags |= ATTEMPTS if attempts else 0
    messages = b"".join(keys)
    name = _consumer_bytes(consumer)
    size = _HEAD.size + len(name) + len(messages) + len(attempts)
    head = _WHOLE_HEAD.pack(size, LAYOUT, kind, flags, at_ns, len(keys), len(name))
    return b"".join((head, name, messages, attempts))


class BlockEncoder:
    """Encodes blocks of one message, or of messages that came in one call. What is the same from block to block is made
    once: events of one message at a time are told by the hundred thousand."""

    def __init__(self) -> None:
        self._heads: dict[tuple[int, str, int, int], tuple[bytes, bytes]] = {}

    def encode_one(self, kind: int, at_ns: int, consumer: str, key: bytes) -> bytes:
        """A block of the message with this key."""
        known = self._heads.get((kind, consumer, len(key), 0))
        if known is None:
            known = self._make(kind, consumer, len(key), 0)
        return b"".join((known[0], at_ns.to_bytes(8, "big"), known[1], key))

    def encode_alike(self, kind: int, at_ns: int, consumer: str, head: bytes, id_bytes: bytes) -> bytes:
        """A block of messages whose keys begin with `head` and end with these ids, one behind the other."""
        known = self._heads.get((kind, consumer, len(head), len(id_bytes)))
        if known is None:
            known = self._make(kind, consumer, len(head), len(id_bytes))
        return b"".join((known[0], at_ns.to_bytes(8, "big"), known[1], head, id_bytes))

    def _make(self, kind: int, consumer: str, head_bytes: int, id_bytes: int) -> tuple[bytes, bytes]:
        """What is before the moment and behind it, up to the messages."""
        name = _consumer_bytes(consumer)
        head_size = _HEAD_SIZE.pack(head_bytes) if id_bytes else b""
        size = _HEAD.size + len(name) + len(head_size) + head_bytes + id_bytes
        flags, count = (ALIKE, id_bytes // _ID_BYTES) if id_bytes else (0, 1)
        whole = _WHOLE_HEAD.pack(size, LAYOUT, kind, flags, 0, count, len(name))
        if len(self._heads) == HEADS_MAX:
            self._heads.clear()
        made = whole[:_AT_NS], whole[_AT_NS + 8 :] + name + head_size
        self._heads[kind, consumer, head_bytes, id_bytes] = made
        return made


def _consumer_bytes(consumer: str) -> bytes:
    """A consumer's name as events tell it. Whatever a consumer calls itself, telling of it does not fail."""
    return consumer[:CONSUMER_CHARS_MAX].encode(errors="replace")


def decode_events(value: bytes) -> Iterator[Event]:
    """The events of a record's value, in order."""
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
    """The keys of a block's messages, and where they end."""
    keys: list[bytes] = []
    for _ in range(count):
        end = take_lp(value, take_lp(value, at)[1])[1] + _PLACE_BYTES
        keys.append(value[at:end])
        at = end
    return keys, at


def _alike(value: bytes, at: int, count: int) -> tuple[list[bytes], int]:
    """The same of messages that differ by their ids."""
    begin = at + _HEAD_SIZE.size
    at = begin + _HEAD_SIZE.unpack_from(value, at)[0]
    end = at + count * _ID_BYTES
    if end > len(value):
        raise ValueError
    head = value[begin:at]
    return [head + value[place : place + _ID_BYTES] for place in range(at, end, _ID_BYTES)], end


def _split(sub_queue: str, flags: int) -> tuple[int | None, str]:
    """Priority and fairness key of a sub-queue."""
    if not flags & PRIORITIES:
        return None, sub_queue
    digits, _, fairness_key = sub_queue.partition("|")
    return int(digits), fairness_key


def _no_attempts(kind: Kind, count: int) -> list[int | None]:
    unknown = kind in (Kind.ENQUEUED, Kind.ACKED)
    return [None if unknown else 0] * count


def _damaged(value: bytes, at: int) -> CorruptionError:
    return CorruptionError(f"a record of {TOPIC} of {len(value)} bytes has a damaged block at byte {at}")
