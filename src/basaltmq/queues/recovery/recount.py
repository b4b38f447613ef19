"""The counts of a queue as its rows tell them, for a queue whose counts are lost, damaged or doubted.

A recount reads every row of the queue. A row that cannot be read counts like the others, because it is in the queue
until it is moved to quarantine, and that takes it out of the counts.
"""

from __future__ import annotations

from collections.abc import Iterator
from struct import Struct
from typing import Final

from basaltmq.errors import CorruptionError
from basaltmq.queues.quarantine import Loss, Suspect, Suspects
from basaltmq.queues.ready import rows
from basaltmq.queues.ready.backing import APART, Entry
from basaltmq.queues.stats import QueueStats
from basaltmq.store.api import Reader
from basaltmq.store.families import Family
from basaltmq.store.keys import queues as keys

_FLOOR: Final = Struct(">Q")


def counted(
    store: Reader, queue: str, suspects: Suspects | None = None, before: QueueStats | None = None
) -> QueueStats:
    """The counts of a queue; totals are those of `before`, or begin with what is there.

    `suspects` takes a note of rows that cannot be read; without it they are left to whoever reads them next.
    """
    stats = QueueStats() if before is None else before
    # Below the floor of a queue that was deleted under this name are rows that wait to be taken away (reclaim.py).
    floor = store.get(Family.DELETED_QUEUES, keys.deleted_queue_key(queue)) or bytes(_FLOOR.size)
    floor_ns: int = _FLOOR.unpack(floor)[0] if len(floor) == _FLOOR.size else stats.floor_ns
    lost = Loss()
    stats.messages = stats.size_bytes = stats.delayed = stats.delayed_bytes = stats.apart = 0
    for family in (Family.MESSAGES, Family.DELAYED):
        for key, row in store.scan(family, *keys.prefix_range(keys.lp(queue))):
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


def entries_of(store: Reader, queue: str, family: Family) -> Iterator[Entry]:
    """Every message a queue has in `messages` or `delayed` that can be read."""
    for key, row in store.scan(family, *keys.prefix_range(keys.lp(queue))):
        try:
            yield _entry_of(family, key, row)
        except CorruptionError:
            continue


def _entry_of(family: Family, key: bytes, row: bytes) -> Entry:
    if family is Family.MESSAGES:
        keys.decode_message_key(key)
        return rows.read_entry(key, row)
    keys.decode_timed_message_key(key)
    return rows.read_entry(keys.message_of(key)[0], row)
