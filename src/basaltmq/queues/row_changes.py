"""The rows of messages in a change: written, deleted, taken back before they are written."""

from __future__ import annotations

from collections.abc import Sequence

from basaltmq.queues.backing import SPILLED, TRANSIENT, Entry
from basaltmq.queues.change import Change
from basaltmq.queues.plain import Plain
from basaltmq.store.families import Family


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
