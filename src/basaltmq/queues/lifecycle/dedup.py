"""Deduplication: one message per publisher id within a time window, also over restarts.

    dedup          | lp(queue) | lp(publisher's id) |                    ->  | expires ns u64 | message id (16) |
    dedup expiry   | lp(queue) | expires ns u64 | lp(publisher's id) |   ->  nothing

Both rows are in the message's batch. The window starts with the first publish and outlives the message: a repeat after
the ack is still a repeat. A timer (timers.py) deletes expired ids in batches, with a granularity of `timers.DEDUP_NS`.
An expired id that is not deleted yet does not match.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import islice
from struct import Struct
from typing import TYPE_CHECKING, Final

from basaltmq.clock import NS_PER_MS
from basaltmq.errors import CorruptionError
from basaltmq.queues.change import Change
from basaltmq.queues.draft import Draft
from basaltmq.queues.lifecycle import timers
from basaltmq.store.families import Family
from basaltmq.store.keys.parts import prefix_range
from basaltmq.store.keys.queues import decode_dedup_expiry_key, dedup_expiry_key, dedup_expiry_prefix, dedup_key

if TYPE_CHECKING:
    from basaltmq.queues.queue import Queue

SWEEP_MAX: Final = 5000
"""Ids deleted per batch."""

_ROW: Final = Struct(">Q16s")


def known(queue: Queue, change: Change, drafts: Sequence[Draft | bytes]) -> dict[int, bytes]:
    """Map the index of each draft that repeats an earlier publish to the id of that message."""
    named = [(i, d.dedup_id) for i, d in enumerate(drafts) if isinstance(d, Draft) and d.dedup_id]
    if not named:
        return {}
    pending = {key: row for _, family, key, row in change.batch.ops if family is Family.DEDUP}
    keys = [dedup_key(queue.name, publisher_id) for _, publisher_id in named]
    repeats: dict[int, bytes] = {}
    for (index, _), key, row in zip(named, keys, queue.shared.store.get_many(Family.DEDUP, keys), strict=True):
        row = pending.get(key, row)
        if row is not None:
            expires_ns, message_id = _read(queue, key, row)
            if expires_ns > change.now_ns:
                repeats[index] = message_id
    return repeats


def _read(queue: Queue, key: bytes, row: bytes) -> tuple[int, bytes]:
    """Return the expiry of an id and its message. An unreadable row counts as expired."""
    if len(row) != _ROW.size:
        queue.shared.quarantine.note(Family.DEDUP, key, row, f"the row has {len(row)} bytes, not {_ROW.size}")
        return 0, b""
    expires_ns, message_id = _ROW.unpack(row)
    return expires_ns, message_id


def within(drafts: Sequence[Draft | bytes]) -> dict[int, int]:
    """Map the index of each draft that repeats an earlier draft of the same call to the index of that draft."""
    first: dict[bytes, int] = {}
    repeats: dict[int, int] = {}
    for index, draft in enumerate(drafts):
        if isinstance(draft, Draft) and draft.dedup_id:
            earlier = first.setdefault(draft.dedup_id, index)
            if earlier != index:
                repeats[index] = earlier
    return repeats


def remember(
    queue: Queue, change: Change, drafts: Sequence[Draft | bytes], ids: Sequence[bytes], repeats: set[int]
) -> None:
    """Write the ids of drafts that became messages."""
    window_ms = queue.config.dedup_window_ms
    assert window_ms is not None
    expires_ns = change.now_ns + window_ms * NS_PER_MS
    due_ns = expires_ns + -expires_ns % timers.DEDUP_NS
    for index, (draft, message_id) in enumerate(zip(drafts, ids, strict=True)):
        if isinstance(draft, Draft) and draft.dedup_id and index not in repeats:
            change.batch.put(Family.DEDUP, dedup_key(queue.name, draft.dedup_id), _ROW.pack(expires_ns, message_id))
            change.batch.put(Family.DEDUP_EXPIRY, dedup_expiry_key(queue.name, expires_ns, draft.dedup_id), b"")
            queue.shared.timers.set(change, due_ns, timers.DEDUP, queue.name)


def sweep(queue: Queue, change: Change) -> bool:
    """Delete expired ids. Return whether there are more."""
    start, _ = prefix_range(dedup_expiry_prefix(queue.name))
    end = start + (change.now_ns + 1).to_bytes(8, "big")
    page = list(islice(queue.shared.store.scan(Family.DEDUP_EXPIRY, start, end), SWEEP_MAX))
    gone: list[bytes] = []
    names: list[bytes] = []
    for key, row in page:
        try:
            names.append(dedup_key(queue.name, decode_dedup_expiry_key(key)[2]))
        except CorruptionError as error:
            queue.shared.quarantine.note(Family.DEDUP_EXPIRY, key, row, str(error))
        else:
            gone.append(key)
    for key, name, found in zip(gone, names, queue.shared.store.get_many(Family.DEDUP, names), strict=True):
        change.batch.delete(Family.DEDUP_EXPIRY, key)
        if found is not None and len(found) != _ROW.size:
            _read(queue, name, found)
        elif found is not None and _ROW.unpack(found)[0] <= change.now_ns:
            change.batch.delete(Family.DEDUP, name)
    return len(page) == SWEEP_MAX
