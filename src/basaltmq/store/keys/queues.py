"""Keys of the queue plane: messages, leases, bodies, timers, deduplication and transactions.

Layouts:

    queue            | queue name |
    queue stats      | queue name |
    deleted queue    | queue name |
    state            | name |
    message          | lp(queue) | lp(fairness key) | enqueued ns u64 | id (16) |
    timed message    | lp(queue) | at ns u64 | lp(fairness key) | enqueued ns u64 | id (16) |
    body             | body id (16) |
    content ref      | body id (16) | message id (16) |
    lease            | lp(queue) | token u64 |
    lease expiry     | expires ns u64 | lp(queue) | token u64 |
    timer            | due ns u64 | kind (1) | lp(queue) |
    dedup            | lp(queue) | lp(publisher's id) |
    dedup expiry     | lp(queue) | expires ns u64 | lp(publisher's id) |
    quarantine       | lp(queue, empty if it is unknown) | found ns u64 | number u64 |
    xid              | format i64, sign flipped | lp(global id) | lp(branch id) |
    branch draft     | as xid | number u64 |
"""

from __future__ import annotations

from functools import lru_cache
from struct import Struct
from typing import Final

from basaltmq.errors import InvalidArgumentError
from basaltmq.ids import ID_BYTES
from basaltmq.store.keys.parts import (
    SIGN,
    U64,
    decode_unprefixed,
    exactly,
    lp,
    malformed,
    sized_id,
    take_lp,
    take_text,
    unprefixed,
)

PREFIXES_KEPT: Final = 4096
"""Cached message key prefixes: under 1 MiB with names of usual length."""

_TWO_U64: Final = Struct(">QQ")
_TIME_ID: Final = Struct(">Q16s")

TIME_AND_ID_BYTES: Final = _TIME_ID.size
"""Size of the enqueue time and the message id at the end of a message's key."""


def xid_key(format_id: int, global_id: bytes, branch_id: bytes) -> bytes:
    if not -SIGN <= format_id < SIGN:
        raise InvalidArgumentError(f"the format {format_id} of a transaction id does not fit 64 bits")
    return U64.pack(format_id + SIGN) + lp(global_id) + lp(branch_id)


def decode_xid_key(key: bytes) -> tuple[int, bytes, bytes]:
    if len(key) < 8:
        raise malformed(key)
    global_id, at = take_lp(key, 8)
    branch_id, at = take_lp(key, at)
    exactly(key, at)
    return int.from_bytes(key[:8], "big") - SIGN, global_id, branch_id


def branch_draft_key(format_id: int, global_id: bytes, branch_id: bytes, number: int) -> bytes:
    return xid_key(format_id, global_id, branch_id) + U64.pack(number)


def branch_draft_prefix(format_id: int, global_id: bytes, branch_id: bytes) -> bytes:
    return xid_key(format_id, global_id, branch_id)


def decode_branch_draft_key(key: bytes) -> tuple[int, bytes, bytes, int]:
    return (*decode_xid_key(key[:-8]), int.from_bytes(key[-8:], "big"))


def message_key(queue: str, fairness_key: str, enqueued_ns: int, message_id: bytes) -> bytes:
    assert len(message_id) == ID_BYTES, f"a message id has 16 bytes, not {len(message_id)}"
    return _known_prefix(queue, fairness_key) + _TIME_ID.pack(enqueued_ns, message_id)


def message_prefix(queue: str, fairness_key: str | None = None) -> bytes:
    return lp(queue) if fairness_key is None else lp(queue) + lp(fairness_key)


@lru_cache(PREFIXES_KEPT)
def _known_prefix(queue: str, fairness_key: str) -> bytes:
    """Cached, because many messages share this prefix and it is the expensive part of a key."""
    return message_prefix(queue, fairness_key)


def decode_message_key(key: bytes) -> tuple[str, str, int, bytes]:
    queue, at = take_text(key, 0)
    fairness_key, at = take_text(key, at)
    exactly(key, at + _TIME_ID.size)
    enqueued_ns, message_id = _TIME_ID.unpack_from(key, at)
    return queue, fairness_key, enqueued_ns, message_id


def lease_expiry_bound(expires_ns: int) -> bytes:
    """Return the end (exclusive) of the rows of leases that expire before `expires_ns`."""
    return U64.pack(expires_ns)


def queue_key(queue: str) -> bytes:
    return unprefixed(queue)


def decode_queue_key(key: bytes) -> str:
    return decode_unprefixed(key)


def state_key(name: str) -> bytes:
    return unprefixed(name)


def decode_state_key(key: bytes) -> str:
    return decode_unprefixed(key)


def body_key(body_id: bytes) -> bytes:
    return sized_id(body_id)


def decode_body_key(key: bytes) -> bytes:
    exactly(key, ID_BYTES)
    return key


def content_ref_key(body_id: bytes, message_id: bytes) -> bytes:
    return sized_id(body_id) + sized_id(message_id)


def content_ref_prefix(body_id: bytes) -> bytes:
    return sized_id(body_id)


def decode_content_ref_key(key: bytes) -> tuple[bytes, bytes]:
    exactly(key, 2 * ID_BYTES)
    return key[:ID_BYTES], key[ID_BYTES:]


def queue_stats_key(queue: str) -> bytes:
    return unprefixed(queue)


def decode_queue_stats_key(key: bytes) -> str:
    return decode_unprefixed(key)


def deleted_queue_key(queue: str) -> bytes:
    return unprefixed(queue)


def decode_deleted_queue_key(key: bytes) -> str:
    return decode_unprefixed(key)


def lease_key(queue: str, token: int) -> bytes:
    return lp(queue) + U64.pack(token)


def lease_prefix(queue: str) -> bytes:
    return lp(queue)


def lease_key_of(prefix: bytes, token: int) -> bytes:
    """Return `lease_key` from the encoded queue prefix. Faster for many keys of one queue."""
    return prefix + U64.pack(token)


def decode_lease_key(key: bytes) -> tuple[str, int]:
    queue, at = take_text(key, 0)
    exactly(key, at + 8)
    return queue, int.from_bytes(key[at:], "big")


def lease_expiry_key(expires_ns: int, queue: str, token: int) -> bytes:
    return U64.pack(expires_ns) + lp(queue) + U64.pack(token)


def lease_expiry_key_of(expires_ns: int, prefix: bytes, token: int) -> bytes:
    """Return the same key from the `lease_prefix` of its queue."""
    return U64.pack(expires_ns) + prefix + U64.pack(token)


def decode_lease_expiry_key(key: bytes) -> tuple[int, str, int]:
    queue, at = take_text(key, 8)
    exactly(key, at + 8)
    return int.from_bytes(key[:8], "big"), queue, int.from_bytes(key[at:], "big")


def timed_message_key(queue: str, at_ns: int, fairness_key: str, enqueued_ns: int, message_id: bytes) -> bytes:
    return lp(queue) + U64.pack(at_ns) + lp(fairness_key) + _TIME_ID.pack(enqueued_ns, message_id)


def timed_message_prefix(queue: str) -> bytes:
    return lp(queue)


def timed_message_bound(queue: str, at_ns: int) -> bytes:
    """Return the end (exclusive) of a queue's rows before `at_ns`."""
    return lp(queue) + U64.pack(at_ns)


def decode_timed_message_key(key: bytes) -> tuple[str, int, str, int, bytes]:
    queue, at = take_text(key, 0)
    fairness_key, end = take_text(key, at + 8)
    exactly(key, end + _TIME_ID.size)
    enqueued_ns, message_id = _TIME_ID.unpack_from(key, end)
    return queue, int.from_bytes(key[at : at + 8], "big"), fairness_key, enqueued_ns, message_id


def timed_of(message: bytes, at_ns: int) -> bytes:
    """Return the timed key of the message with this key, without decoding the key."""
    middle = 2 + int.from_bytes(message[:2], "big")
    return message[:middle] + U64.pack(at_ns) + message[middle:]


def message_of(timed: bytes) -> tuple[bytes, int]:
    """Return the message key in a timed key, and the time."""
    middle = 2 + int.from_bytes(timed[:2], "big")
    return timed[:middle] + timed[middle + 8 :], int.from_bytes(timed[middle : middle + 8], "big")


def timer_key(due_ns: int, kind: bytes, queue: str) -> bytes:
    return U64.pack(due_ns) + kind + lp(queue)


def timer_bound(due_ns: int) -> bytes:
    """Return the end (exclusive) of the timers due before `due_ns`."""
    return U64.pack(due_ns)


def decode_timer_key(key: bytes) -> tuple[int, bytes, str]:
    queue, at = take_text(key, 9)
    exactly(key, at)
    return int.from_bytes(key[:8], "big"), key[8:9], queue


def dedup_key(queue: str, publisher_id: bytes) -> bytes:
    return lp(queue) + lp(publisher_id)


def decode_dedup_key(key: bytes) -> tuple[str, bytes]:
    queue, at = take_text(key, 0)
    publisher_id, at = take_lp(key, at)
    exactly(key, at)
    return queue, publisher_id


def dedup_expiry_key(queue: str, expires_ns: int, publisher_id: bytes) -> bytes:
    return lp(queue) + U64.pack(expires_ns) + lp(publisher_id)


def dedup_expiry_prefix(queue: str) -> bytes:
    return lp(queue)


def decode_dedup_expiry_key(key: bytes) -> tuple[str, int, bytes]:
    queue, at = take_text(key, 0)
    publisher_id, end = take_lp(key, at + 8)
    exactly(key, end)
    return queue, int.from_bytes(key[at : at + 8], "big"), publisher_id


def quarantine_key(queue: str, found_ns: int, number: int) -> bytes:
    return lp(queue) + _TWO_U64.pack(found_ns, number)


def quarantine_prefix(queue: str) -> bytes:
    return lp(queue)


def decode_quarantine_key(key: bytes) -> tuple[str, int, int]:
    queue, at = take_text(key, 0)
    exactly(key, at + _TWO_U64.size)
    return queue, *_TWO_U64.unpack_from(key, at)


def transient_counts_key(queue: str) -> bytes:
    """Return the key of the count of transient messages on disk. It sorts before these messages in their family."""
    return lp(queue)
