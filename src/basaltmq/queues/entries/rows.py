"""Message rows as the queue code sees them: frequently used fields are read in place, the rest stays encoded.

A row has the format of message.py, or the same in an envelope with further state:

    | layout 0x80 | flags u8 | body id (16) | body bytes u32 | returns u32 | row, with an empty payload if APART |

The flags are those of backing.py (APART, SHARED, TIMED, RETURNED). `returns` exists only with RETURNED. Without APART,
the body id is zero and the payload is in the row. Envelopes do not nest.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from struct import Struct
from typing import Final

from basaltmq.errors import CorruptionError
from basaltmq.queues.entries.backing import APART, RETURNED, SHARED, TIMED, Entry
from basaltmq.queues.entries.plain import Plain
from basaltmq.queues.message import HEAD, LAYOUT, Message, are_labels, decode_row
from basaltmq.store.keys.parts import lp

ENVELOPE: Final = 0x80
NO_BODY: Final = bytes(16)

_ENVELOPE: Final = Struct(">BB16sI")
_SIZE: Final = Struct(">I")
_SIZES: Final = Struct(">II")
_LENGTHS: Final = Struct(">II")
_FIELDS: Final = Struct(">BxI12xQIII")
"""Fields of the fixed head: layout, attempts, expires ns, bytes of labels, properties and payload."""

_PLAIN: Final = HEAD.pack(LAYOUT, 0, 0, 1, 0, 0, 0, 0, 0)[:-4]
"""Start of the row of a message with a payload only. The payload's length and the payload follow."""

_PRIORITY_DIGITS_MAX: Final = 3
"""Priorities are 0 to 255."""

_RETURNS_MAX: Final = (1 << 32) - 1


def wrap(row: bytes, flags: int, body_id: bytes = NO_BODY, body_bytes: int = 0) -> bytes:
    """Put a row into an envelope."""
    return _ENVELOPE.pack(ENVELOPE, flags, body_id, body_bytes) + row


def unwrap(row: bytes) -> tuple[bytes, int, bytes, int]:
    """Return the inner row, flags, body id and body bytes. A row without an envelope has zero values."""
    if row[:1] != b"\x80":
        return row, 0, NO_BODY, 0
    if (
        len(row) < _ENVELOPE.size + HEAD.size
        or row[1] & ~(APART | SHARED | TIMED | RETURNED)
        or len(row) < _inner_at(row[1]) + HEAD.size
    ):
        raise CorruptionError(f"a message row of {len(row)} bytes has a damaged envelope: {row[:24].hex()}")
    _, flags, body_id, body_bytes = _ENVELOPE.unpack_from(row)
    return row[_inner_at(flags) :], flags, body_id, body_bytes


def _inner_at(flags: int) -> int:
    return _ENVELOPE.size + (_SIZE.size if flags & RETURNED else 0)


def returns_of(row: bytes) -> int:
    """Return how often a message was returned without a failure, as far as that is counted."""
    if row[:1] != b"\x80" or not row[1] & RETURNED:
        return 0
    returns: int = _SIZE.unpack_from(row, _ENVELOPE.size)[0]
    return returns


def count_return(row: bytes) -> bytes:
    """Return the row with one more return counted."""
    inner, flags, body_id, body_bytes = unwrap(row)
    returns = _SIZE.pack(min(returns_of(row) + 1, _RETURNS_MAX))
    return _ENVELOPE.pack(ENVELOPE, flags | RETURNED, body_id, body_bytes) + returns + inner


def rewrap(row: bytes, inner: bytes) -> bytes:
    """Put `inner` into the envelope of `row`, if it has one."""
    return row[: len(row) - len(unwrap(row)[0])] + inner


def read_entry(key: bytes, row: bytes) -> Entry:
    """Return the entry of a row on disk. Raise CorruptionError if any field is invalid."""
    inner, flags, body_id, body_bytes = unwrap(row)
    if len(inner) < HEAD.size or inner[0] != LAYOUT:
        raise _damaged(key, row, "it is truncated" if len(inner) < HEAD.size else f"its layout is {inner[0]}")
    _, attempts, expires_ns, labels_bytes, properties_bytes, payload_bytes = _FIELDS.unpack_from(inner)
    if HEAD.size + labels_bytes + properties_bytes + payload_bytes != len(inner):
        raise _damaged(key, row, "the field lengths do not add up")
    if not are_labels(inner[HEAD.size : HEAD.size + labels_bytes]):
        raise _damaged(key, row, "the headers are invalid")
    if flags & APART:
        if payload_bytes or body_id == NO_BODY:
            raise _damaged(key, row, "the reference to its body is invalid")
    elif flags & SHARED:
        raise _damaged(key, row, "it is marked as sharing a body, but has no separate body")
    if attempts:
        flags |= RETURNED
    return Entry(key, row, body_bytes if flags & APART else payload_bytes, flags, expires_ns)


def fault_of(key: bytes, row: bytes | None) -> str | None:
    """Return what is wrong with the row of a message; None if it is valid."""
    if row is None:
        return f"the row of message {key[-16:].hex()} is missing"
    try:
        read_entry(key, row)
    except CorruptionError as error:
        return str(error)
    return None


def _damaged(key: bytes, row: bytes, what: str) -> CorruptionError:
    return CorruptionError(f"the row of message {key[-16:].hex()} is damaged ({len(row)} bytes): {what}")


def read_entries(
    found: Sequence[tuple[bytes, bytes]], damaged: Callable[[bytes, bytes, str], None] | None = None
) -> list[Entry]:
    """Return the entries of rows on disk. Plain rows take a fast path.

    `damaged` is called with key, row and reason of each invalid row, and the others are returned. Without it, an
    invalid row raises CorruptionError.
    """
    rows = [row for _, row in found]
    if _are_plain(rows, list(map(len, rows))):
        size = HEAD.size
        return [Entry(key, row, len(row) - size) for key, row in found]
    return _read_any(found, damaged)


def read_plain(keys: list[bytes], rows: list[bytes], row_sizes: list[int]) -> Plain | None:
    """Return rows as columns, if all are valid and have no attempts, expiry or envelope; otherwise None."""
    if _are_plain(rows, row_sizes):
        return Plain(keys, rows, row_sizes, overhead=HEAD.size, row_bytes=sum(row_sizes))
    if min(row_sizes) < HEAD.size:
        return None
    fields = list(map(_FIELDS.unpack_from, rows))
    head_bytes = HEAD.size
    if [
        layout
        for (layout, attempts, expires_ns, labels_bytes, properties_bytes, payload_bytes), row_bytes in zip(
            fields, row_sizes, strict=True
        )
        if labels_bytes + properties_bytes + payload_bytes + head_bytes != row_bytes
        or layout != LAYOUT
        or attempts
        or expires_ns
    ]:
        return None
    # Decode each distinct header block once: most messages of a publisher have the same headers.
    if not all(
        map(are_labels, {row[head_bytes : head_bytes + look[3]] for row, look in zip(rows, fields, strict=True)})
    ):
        return None
    return Plain(keys, rows, [look[5] for look in fields], row_bytes=sum(row_sizes))


def _are_plain(rows: list[bytes], row_sizes: list[int]) -> bool:
    """Whether all rows are a payload only, each with the right length."""
    different = set(row_sizes)
    if not different or min(different) < HEAD.size:
        return False
    heads = {size: _PLAIN + _SIZE.pack(size - HEAD.size) for size in different}
    if len(different) == 1:
        # A prefix of both the smallest and the largest row is a prefix of all.
        head = heads[row_sizes[0]]
        return min(rows).startswith(head) and max(rows).startswith(head)
    if not (min(rows).startswith(_PLAIN) and max(rows).startswith(_PLAIN)):
        return False
    return all(map(bytes.startswith, rows, map(heads.__getitem__, row_sizes)))


def _read_any(found: Sequence[tuple[bytes, bytes]], damaged: Callable[[bytes, bytes, str], None] | None) -> list[Entry]:
    look, size = _FIELDS.unpack_from, HEAD.size
    entries: list[Entry] = []
    append = entries.append
    known = {b""}
    for key, row in found:
        if len(row) >= size and row[0] == LAYOUT:
            _, attempts, expires_ns, labels_bytes, properties_bytes, payload_bytes = look(row)
            labels = row[size : size + labels_bytes] if labels_bytes else b""
            if labels not in known and are_labels(labels):
                known.add(labels)
            if labels in known and size + labels_bytes + properties_bytes + payload_bytes == len(row):
                append(Entry(key, row, payload_bytes, RETURNED if attempts else 0, expires_ns))
                continue
        if damaged is None:
            append(read_entry(key, row))
            continue
        try:
            append(read_entry(key, row))
        except CorruptionError as error:
            damaged(key, row, str(error))
    return entries


def body_of(row: bytes) -> bytes:
    """Return the id of the body stored separately; zeros if there is none."""
    return unwrap(row)[2]


def payload_of(row: bytes) -> bytes:
    """Return the payload in a row; empty if it is stored separately."""
    inner = unwrap(row)[0]
    size: int = _SIZE.unpack_from(inner, HEAD.size - _SIZE.size)[0]
    return inner[len(inner) - size :]


def properties_of(row: bytes) -> bytes:
    """Return the properties: a protocol's own encoding of metadata that text headers cannot express."""
    inner = row if row[0] == LAYOUT else unwrap(row)[0]
    labels_bytes, properties_bytes = _LENGTHS.unpack_from(inner, HEAD.size - _LENGTHS.size - _SIZE.size)
    at = HEAD.size + labels_bytes
    return inner[at : at + properties_bytes]


def attempts_of(row: bytes) -> int:
    """Return the number of failed deliveries."""
    attempts: int = HEAD.unpack_from(unwrap(row)[0])[2]
    return attempts


def weight_of(row: bytes) -> int:
    """Return the weight that the row sets for its fairness key; 1 if it sets none."""
    try:
        inner = unwrap(row)[0]
    except CorruptionError:
        return 1
    if len(inner) < HEAD.size or inner[0] != LAYOUT:
        return 1
    weight: int = HEAD.unpack_from(inner)[3]
    return max(1, weight)


def weighted_rows(
    payloads: Sequence[bytes], expires_ns: int, properties: Sequence[bytes], weights: Sequence[int]
) -> list[bytes]:
    """Encode rows of messages that have only a payload, properties and a weight."""
    cut = -2 * _SIZE.size
    starts = {weight: HEAD.pack(LAYOUT, 0, 0, weight, 0, expires_ns, 0, 0, 0)[:cut] for weight in set(weights)}
    pack = _SIZES.pack
    return [
        starts[weight] + pack(len(own), len(payload)) + own + payload
        for weight, own, payload in zip(weights, properties, payloads, strict=True)
    ]


def plain_rows(
    payloads: Sequence[bytes],
    expires_ns: int,
    properties: Sequence[bytes] | None = None,
    sizes: Sequence[int] | None = None,
) -> list[bytes]:
    """Encode rows of messages that have only a payload and properties, at a quarter of the cost of single encoding.

    `sizes` are the payload sizes, if known.
    """
    start = HEAD.pack(LAYOUT, 0, 0, 1, 0, expires_ns, 0, 0, 0)[: -_SIZE.size]
    if properties is not None:
        start = start[: -_SIZE.size]
        pack = _SIZES.pack
        return [
            start + pack(len(own), len(payload)) + own + payload
            for own, payload in zip(properties, payloads, strict=True)
        ]
    different = set(map(len, payloads) if sizes is None else sizes)
    if len(different) == 1:
        head = start + _SIZE.pack(*different)
        return [head + payload for payload in payloads]
    heads = {size: start + _SIZE.pack(size) for size in different}
    return [heads[len(payload)] + payload for payload in payloads]


def open_row(key: bytes, row: bytes, body: bytes | None = None) -> Message:
    """Decode the message of a row. `body` is the payload if it is stored separately (empty by default)."""
    message = decode_row(key, unwrap(row)[0])
    if body is not None:
        message.payload = body
    return message


def throttle_keys_of(key: bytes, row: bytes) -> tuple[str, ...]:
    """Return the throttle keys of a row. A row without labels is not decoded."""
    inner = unwrap(row)[0]
    if not HEAD.unpack_from(inner)[6]:
        return ()
    return decode_row(key, inner).throttle_keys


def sub_of(key: bytes, prefix_bytes: int) -> str:
    """Return the sub-queue in a message's key. `prefix_bytes` is the length of lp(queue)."""
    return key[prefix_bytes + 2 : -24].decode()


def sub_queue(fairness_key: str, priority: int | None) -> str:
    """Return the sub-queue of a message: its fairness key, prefixed by its priority if the queue has priorities."""
    return fairness_key if priority is None else f"{priority:03d}|{fairness_key}"


def split_sub_queue(sub: str) -> tuple[int, str]:
    """Return priority and fairness key of a sub-queue. A name without a priority has the lowest: its messages were
    enqueued when the queue had no priorities."""
    digits, bar, fairness_key = sub.partition("|")
    if not bar or not digits.isdecimal() or len(digits) > _PRIORITY_DIGITS_MAX:
        return 0, sub
    return int(digits), fairness_key


def prefix_of(queue: str, sub: str) -> bytes:
    return lp(queue) + lp(sub)
