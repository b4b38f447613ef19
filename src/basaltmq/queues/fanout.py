"""One message for several queues (SPEC E4): each gets a message of its own, the body is stored once.

Small bodies are copied into the rows as long as all copies together are no larger than a body that is kept apart would
be; beyond that the body is one value with a reference per queue.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Final

from basaltmq.errors import InvalidArgumentError
from basaltmq.queues.change import Change
from basaltmq.queues.config import Durability
from basaltmq.queues.content import INLINE_BYTES_MAX
from basaltmq.queues.draft import Draft

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
    shared.content.put_only_if_wanted(change, body_id)
    return ids
