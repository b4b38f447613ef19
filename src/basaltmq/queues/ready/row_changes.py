"""The rows of messages in a change: written, deleted, taken back before they are written.

Messages of one call that are deleted together go by a range, one entry of the log and the table instead of one each,
which is a sixth of what their whole life costs. Only where it is certain that nothing else lies between them: they have
their place in common, which no other call has, and their ids count up without a gap. And only where they never left
memory: ranges slow down whoever reads the family, by 0.15 us each that was written since the last flush, and those of
rows as young as these are as few as the calls that fit a write buffer. A backlog that is drained goes row by row, which
tells RocksDB what to compact.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from typing import Final

from basaltmq.ids import ID_BYTES, are_gapless
from basaltmq.queues.change import Change
from basaltmq.queues.ready.backing import SPILLED, TRANSIENT, Entry
from basaltmq.queues.ready.plain import SMALL, Plain
from basaltmq.store.batch import Batch
from basaltmq.store.families import Family

RANGE_MIN: Final = SMALL
"""Messages of a call that go by a range: of fewer, more ranges than calls of this size would fit a write buffer."""

_ABOVE: Final = b"\xff" * (ID_BYTES + 1)
"""Behind every id."""


def put_rows(change: Change, entries: Sequence[Entry]) -> None:
    """Write the rows of persistent messages."""
    if isinstance(entries, Plain):
        if not entries.flags & TRANSIENT:
            change.batch.put_many(Family.MESSAGES, entries.keys, entries.rows)
        return
    if [e for e in entries if e.flags]:
        entries = [e for e in entries if not e.flags & TRANSIENT]
    change.batch.put_many(Family.MESSAGES, [e.key for e in entries], [e.row for e in entries])


def delete_rows(change: Change, entries: Sequence[Entry]) -> None:
    """Delete the rows of messages, persistent and spilled."""
    if isinstance(entries, Plain) and not entries.flags:
        if entries.has_stayed:
            _delete_calls(change.batch, entries.keys)
        else:
            change.batch.delete_many(Family.MESSAGES, entries.keys)
        return
    if not [e for e in entries if e.flags]:
        change.batch.delete_many(Family.MESSAGES, [e.key for e in entries])
        return
    change.batch.delete_many(Family.MESSAGES, [e.key for e in entries if not e.flags & TRANSIENT])
    change.batch.delete_many(Family.TRANSIENT, [e.key for e in entries if e.flags & SPILLED])


def cancel_rows(change: Change, entries: Sequence[Entry]) -> None:
    """Forget the rows of messages that this change brought in."""
    for entry in entries:
        if not entry.flags & TRANSIENT:
            change.cancel(Family.MESSAGES, entry.key)


def _delete_calls(batch: Batch, keys: list[bytes]) -> None:
    """Delete rows in key order, those of a call by a range if they are many."""
    begin, count = 0, len(keys)
    while begin < count:
        place = keys[begin][:-ID_BYTES]
        end = count if keys[-1].startswith(place) else bisect_left(keys, place + _ABOVE, begin)
        first, last = keys[begin], keys[end - 1]
        if end - begin >= RANGE_MIN and are_gapless(first[-ID_BYTES:], last[-ID_BYTES:], end - begin):
            batch.delete_range(Family.MESSAGES, first, last + b"\0")
        else:
            batch.delete_many(Family.MESSAGES, keys[begin:end])
        begin = end
