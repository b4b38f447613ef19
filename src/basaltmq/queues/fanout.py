"""Publishes one message to several queues (SPEC E4): each queue gets its own message, the body is stored once.

Small bodies are copied into the rows while all copies together are no larger than one body outside the rows. Larger
bodies are one value with a reference per queue.

Plain messages to plain queues are built in columns over queues and messages. The rows of a message are the same in
every queue, so they are built once. A batch costs about 15 us per queue and 4 us per message and queue; `publish` costs
60 us per message.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from itertools import chain, groupby
from typing import TYPE_CHECKING, Final

from basaltmq.durability import Durability
from basaltmq.errors import InvalidArgumentError
from basaltmq.queues.change import Change
from basaltmq.queues.content import INLINE_BYTES_MAX
from basaltmq.queues.draft import FAIRNESS_KEY_DEFAULT, Draft
from basaltmq.queues.entries.plain import Plain
from basaltmq.queues.events.event import ENQUEUED
from basaltmq.queues.lifecycle import entry_builder
from basaltmq.store.families import Family

if TYPE_CHECKING:
    from basaltmq.queues.queue import Queue


SHARE_BYTES_MIN: Final = 256
"""Below this size a reference costs more than the copy."""

ENTRIES_TOGETHER: Final = 4096
"""Entries built in one step, with one call for their ids and one column for their rows."""


def publish(
    queues: Sequence[Queue], change: Change, draft: Draft | bytes, durability: Durability | None = None
) -> list[bytes]:
    """Enqueue a draft in every queue. Return its id in each."""
    if len({queue.name for queue in queues}) != len(queues):
        raise InvalidArgumentError("a queue is named twice; name each queue once")
    if isinstance(draft, bytes):
        draft = Draft(payload=draft)
    is_shared = _is_shared(len(draft.payload), len(queues))
    levels = [(durability or queue.config.durability) is Durability.MEMORY for queue in queues]
    if len(queues) < 2 or draft.transient or any(levels) or not is_shared:
        return [queue.enqueue(change, [draft], memory=memory)[0] for queue, memory in zip(queues, levels, strict=True)]
    shared = queues[0].shared
    body_id = shared.ids.next()
    shared.content.put(change, body_id, draft.payload)
    ids = [queue.enqueue(change, [draft], body_id, memory=False)[0] for queue in queues]
    shared.content.put_only_if_wanted(change, body_id, draft.payload)
    return ids


def publish_many(
    queues: Sequence[Queue], change: Change, drafts: Sequence[Draft], durability: Durability | None = None
) -> None:
    """Enqueue drafts in every queue, in their order."""
    if not _are_plain(queues, drafts, durability):
        for draft in drafts:
            publish(queues, change, draft, durability)
        return
    for is_shared, alike in groupby(drafts, lambda draft: _is_shared(len(draft.payload), len(queues))):
        _publish_plain(queues, change, list(alike), is_shared=is_shared)


def _is_shared(size_bytes: int, queues: int) -> bool:
    """Whether a body of this size is stored once for so many queues."""
    return size_bytes >= SHARE_BYTES_MIN and size_bytes * queues > INLINE_BYTES_MAX


def _are_plain(queues: Sequence[Queue], drafts: Sequence[Draft], durability: Durability | None) -> bool:
    """Whether queues and messages use only payload, properties and the queue's TTL."""
    for queue in queues:
        config = queue.config
        if (
            config.priorities_max
            or config.dedup_window_ms is not None
            or config.on_enqueue_script is not None
            or config.length_max is not None
            or config.bytes_max is not None
            or (durability or config.durability) is Durability.MEMORY
        ):
            return False
    return (
        1 < len(queues) == len({queue.name for queue in queues})
        and not any(draft.transient for draft in drafts)
        and entry_builder.are_ordinary(drafts)
    )


def _publish_plain(queues: Sequence[Queue], change: Change, drafts: Sequence[Draft], *, is_shared: bool) -> None:
    shared = queues[0].shared
    size_bytes = sum([len(draft.payload) for draft in drafts])
    body_ids: list[bytes] = []
    if is_shared:
        body_ids = shared.ids.many(len(drafts))
        for body_id, draft in zip(body_ids, drafts, strict=True):
            shared.content.put(change, body_id, draft.payload)
    together = max(1, ENTRIES_TOGETHER // len(drafts))
    for at in range(0, len(queues), together):
        group = queues[at : at + together]
        made = entry_builder.build_for_many(group, change, drafts, body_ids)
        keys = list(chain.from_iterable([entries.keys for entries in made]))
        change.batch.put_many(Family.MESSAGES, keys, list(chain.from_iterable([entries.rows for entries in made])))
        change.after(partial(_append, group, made))
        for queue, entries in zip(group, made, strict=True):
            queue.touch(change)
            queue.stats.add(len(drafts), size_bytes, apart=len(body_ids))
            queue.note_ready(change, entries)
            shared.events.note(change, ENQUEUED, queue, entries)


def _append(queues: Sequence[Queue], made: Sequence[Plain]) -> None:
    for queue, entries in zip(queues, made, strict=True):
        queue.backing.append(entries, FAIRNESS_KEY_DEFAULT, 1)
