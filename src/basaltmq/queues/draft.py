"""A message as the publisher passes it, before the queue adds its id, enqueue time and expiry."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import msgspec

from basaltmq.errors import InvalidArgumentError
from basaltmq.queues.config import DURATION_MS_MAX, QueueConfig
from basaltmq.queues.message import Message, check_message

DEDUP_ID_BYTES_MAX: Final = 256
"""Fits a UUID, a hash or an order number. The id is stored for the whole window."""

FAIRNESS_KEY_DEFAULT: Final = "default"


class Draft(msgspec.Struct, kw_only=True, gc=False):
    """A message to enqueue."""

    payload: bytes
    headers: dict[str, str] = {}
    properties: bytes = b""
    fairness_key: str = FAIRNESS_KEY_DEFAULT
    weight: int = 1
    throttle_keys: tuple[str, ...] = ()
    priority: int = 0
    ttl_ms: int | None = None
    delay_ms: int = 0
    dedup_id: bytes = b""
    """Two drafts with the same id within the queue's window are one message."""
    transient: bool = False
    """Kept in memory and lost at restart."""


def require_fit(config: QueueConfig, drafts: Sequence[Draft | bytes]) -> None:
    """Raise an error for fields that the queue would ignore: a deduplication id or a priority."""
    for draft in drafts:
        if isinstance(draft, Draft):
            if draft.dedup_id and config.dedup_window_ms is None:
                raise InvalidArgumentError(
                    f"queue {config.name!r} has no deduplication window, so dedup_id would be ignored; "
                    "create or alter it with dedup_window_ms"
                )
            if draft.priority and not config.priorities_max:
                raise InvalidArgumentError(
                    f"queue {config.name!r} has no priorities, so priority would be ignored; "
                    "create it with priorities_max"
                )


def asks_for_more(drafts: Sequence[Draft | bytes]) -> bool:
    """Whether a draft has a field that `require_fit` checks."""
    return bool([draft for draft in drafts if isinstance(draft, Draft) and (draft.priority or draft.dedup_id)])


def to_message(draft: Draft, queue: str, message_id: bytes, enqueued_ns: int, expires_ns: int) -> Message:
    """Return the checked message of a draft."""
    for name, value in (("ttl_ms", draft.ttl_ms), ("delay_ms", draft.delay_ms)):
        if value is not None and (type(value) is not int or not 0 <= value <= DURATION_MS_MAX):
            raise InvalidArgumentError(f"{name} of a message must be 0 to {DURATION_MS_MAX}, not {value!r:.80}")
    if not isinstance(draft.dedup_id, bytes) or len(draft.dedup_id) > DEDUP_ID_BYTES_MAX:
        raise InvalidArgumentError(
            f"a deduplication id must be at most {DEDUP_ID_BYTES_MAX} bytes, not {draft.dedup_id!r:.80}"
        )
    return check_message(
        Message(
            id=message_id,
            queue=queue,
            payload=draft.payload,
            enqueued_ns=enqueued_ns,
            fairness_key=draft.fairness_key,
            headers=draft.headers,
            properties=draft.properties,
            weight=draft.weight,
            throttle_keys=draft.throttle_keys,
            priority=draft.priority,
            expires_ns=expires_ns,
        )
    )
