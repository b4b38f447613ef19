"""Applies the results of a queue's scripts (SPEC C12): changed drafts, and verdicts on failed messages.

hooks.py runs the scripts. Without a script, or when it fails, the publisher's values and the queue's configuration
apply.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, TypeAlias

import msgspec

from basaltmq.ids import format_id
from basaltmq.queues.draft import Draft
from basaltmq.queues.lifecycle.entry_builder import checked
from basaltmq.queues.message import Message

if TYPE_CHECKING:
    from basaltmq.queues.queue import Queue

Verdict: TypeAlias = tuple[bool, int | None]
"""(whether to dead-letter the message, retry delay in milliseconds or None if the script sets none)."""


def on_enqueue(queue: Queue, drafts: Sequence[Draft | bytes]) -> Sequence[Draft | bytes]:
    """Return the drafts with the script's changes. Invalid drafts are rejected before the script runs."""
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
    """Return the script's verdict for each failed message."""
    if queue.hooks is None or queue.hooks.on_failure is None:
        return [(False, None)] * len(messages)
    advised = queue.hooks.advise_failure(
        [(format_id(message.id), message.headers, message.attempts, error) for message in messages]
    )
    return [(advice.action == "dead_letter", advice.delay_ms) for advice in advised]
