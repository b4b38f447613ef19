"""Recounts a queue from its rows, if its counts are lost, damaged or doubtful.

A recount reads every row of the queue. Unreadable rows count too, because they are in the queue until their move to
quarantine subtracts them.
"""

from __future__ import annotations

from contextlib import suppress

from basaltmq.errors import CorruptionError
from basaltmq.queues.entries import rows
from basaltmq.queues.entries.backing import APART, Entry
from basaltmq.queues.entries.quarantine import Loss, Suspect, Suspects
from basaltmq.queues.lifecycle.reclaim import decode_floor
from basaltmq.queues.stats import QueueStats
from basaltmq.store.api import Reader
from basaltmq.store.families import Family
from basaltmq.store.keys import parts as key_parts
from basaltmq.store.keys import queues as queue_keys


def counted(
    store: Reader, queue: str, suspects: Suspects | None = None, before: QueueStats | None = None
) -> QueueStats:
    """Return the counts of a queue. Totals are those of `before`, or start with the current messages.

    `suspects` receives unreadable rows; without it, the next reader finds them.
    """
    stats = QueueStats() if before is None else before
    # Rows below the floor belong to a deleted queue with this name and wait for deletion (`Reclaim`).
    floor_ns = stats.floor_ns
    with suppress(CorruptionError):
        tombstone = store.get(Family.DELETED_QUEUES, queue_keys.deleted_queue_key(queue))
        floor_ns = 0 if tombstone is None else decode_floor(queue, tombstone)
    lost = Loss()
    stats.messages = stats.size_bytes = stats.delayed = stats.delayed_bytes = stats.apart = 0
    for family in (Family.MESSAGES, Family.DELAYED):
        for key, row in store.scan(family, *key_parts.prefix_range(key_parts.lp(queue))):
            if int.from_bytes(key[-24:-16], "big") < floor_ns:
                continue
            try:
                entry = _entry_of(family, key, row)
            except CorruptionError as error:
                lost.add(Suspect(family, key, row, str(error), None, queue, True))
                if suspects is not None:
                    suspects.note(family, key, row, str(error))
                continue
            stats.apart += bool(entry.flags & APART)
            if family is Family.MESSAGES:
                stats.messages += 1
                stats.size_bytes += entry.size_bytes
            else:
                stats.delayed += 1
                stats.delayed_bytes += entry.size_bytes
    stats.messages += lost.messages
    stats.size_bytes += lost.size_bytes
    stats.delayed += lost.delayed
    stats.delayed_bytes += lost.delayed_bytes
    stats.apart += lost.apart
    stats.enqueued = max(stats.enqueued, stats.messages + stats.delayed)
    stats.floor_ns = floor_ns
    return stats


def _entry_of(family: Family, key: bytes, row: bytes) -> Entry:
    if family is Family.MESSAGES:
        queue_keys.decode_message_key(key)
        return rows.read_entry(key, row)
    queue_keys.decode_timed_message_key(key)
    return rows.read_entry(queue_keys.message_of(key)[0], row)
