"""One message for several queues (SPEC E4): each gets a message of its own, the body is stored once.

Small bodies are copied into the rows as long as all copies together are no larger than a body that is kept apart would
be; beyond that the body is one value with a reference per queue.

Many messages for the same queues are made queue by queue, all at once, if neither they nor the queues ask for more
than that: about 3 us per message and queue, where one by one it is 30.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Final

from basaltmq.errors import InvalidArgumentError
from basaltmq.queues import entry_builder as making
from basaltmq.queues.change import Change
from basaltmq.queues.config import Durability
from basaltmq.queues.content import INLINE_BYTES_MAX
from basaltmq.queues.draft import FAIRNESS_KEY_DEFAULT, Draft
from basaltmq.queues.events.event import Kind

if TYPE_CHECKING:
    from basaltmq.queues.queue import Queue


SHARE_BYTES_MIN: Final = 256
"""Below this a reference costs more than the copy."""


def publish(
    queues: Sequence[Queue], change: Change, draft: Draft | bytes, durability: Durability | None = None
) -> list[bytes]:
    """Enqueue a draft in every queue; its id in each."""
    if len({queue.name for queue in queues}) != len(queues):
        raise InvalidArgumentError("a queue is named twice; a message goes to a queue once")
    if isinstance(draft, bytes):
        draft = Draft(payload=draft)
    size = len(draft.payload)
    is_shared = size >= SHARE_BYTES_MIN and size * len(queues) > INLINE_BYTES_MAX
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
    if len(drafts) > 1 and _are_plain(queues, drafts, durability):
        _publish_plain(queues, change, drafts)
        return
    for draft in drafts:
        publish(queues, change, draft, durability)


def _are_plain(queues: Sequence[Queue], drafts: Sequence[Draft], durability: Durability | None) -> bool:
    """Whether every body is to be shared and neither queues nor messages ask for anything else."""
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
    least = max(SHARE_BYTES_MIN, INLINE_BYTES_MAX // len(queues) + 1)
    return (
        1 < len(queues) == len({queue.name for queue in queues})
        and not any(draft.transient for draft in drafts)
        and making.are_ordinary(drafts)
        and min([len(draft.payload) for draft in drafts]) >= least
    )


def _publish_plain(queues: Sequence[Queue], change: Change, drafts: Sequence[Draft]) -> None:
    shared = queues[0].shared
    body_ids = shared.ids.many(len(drafts))
    for body_id, draft in zip(body_ids, drafts, strict=True):
        shared.content.put(change, body_id, draft.payload)
    for queue in queues:
        queue.touch(change)
        entries = making.make_shared(queue, change, drafts, body_ids)
        queue.stats.enqueued += len(entries)
        queue.admit(change, entries, FAIRNESS_KEY_DEFAULT)
        shared.events.note(change, Kind.ENQUEUED, queue, entries)
