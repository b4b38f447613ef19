"""What a queue's scripts say, put to use (SPEC C12): drafts with other keys and weights, verdicts on failures.

Running scripts, their limits and their breaker are hooks.py's. A script only advises: without one, or when it fails,
the publisher's values and the queue's configuration stand.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, TypeAlias

import msgspec

from basaltmq.ids import format_id
from basaltmq.queues.draft import Draft
from basaltmq.queues.entry_builder import checked
from basaltmq.queues.message import Message

if TYPE_CHECKING:
    from basaltmq.queues.queue import Queue

Verdict: TypeAlias = tuple[bool, int | None]
"""Whether the message is dead, and the delay of its retry where the script has a say in it."""


def on_enqueue(queue: Queue, drafts: Sequence[Draft | bytes]) -> Sequence[Draft | bytes]:
    """Drafts as the queue's script wants them; what no queue would take is refused before the script runs."""
    if queue.hooks is None or queue.hooks.on_enqueue is None:
        return drafts
    whole = checked(queue.name, drafts)
    advised = queue.hooks.advise_enqueue([(draft.headers, len(draft.payload)) for draft in whole])
    changed: list[Draft | bytes] = []
    for draft, advice in zip(whole, advised, strict=True):
        fields = {
            name: value
            for name in ("fairness_key", "weight", "throttle_keys")
            if (value := getattr(advice, name)) is not None
        }
        changed.append(msgspec.structs.replace(draft, **fields) if fields else draft)
    return changed


def on_failure(queue: Queue, messages: Sequence[Message], error: str) -> list[Verdict]:
    """What is to become of failed messages."""
    if queue.hooks is None or queue.hooks.on_failure is None:
        return [(False, None)] * len(messages)
    advised = queue.hooks.advise_failure(
        [(format_id(message.id), message.headers, message.attempts, error) for message in messages]
    )
    return [(advice.action == "dead_letter", advice.delay_ms) for advice in advised]
