"""Conversion of a batch on the wire to drafts for the queue plane."""

from __future__ import annotations

from basaltmq.errors import InvalidArgumentError
from basaltmq.queues.draft import FAIRNESS_KEY_DEFAULT, Draft
from basaltmq.wire import basalt_pb2 as wire


def drafts_of(batch: wire.EnqueueBatchRequest) -> list[Draft | bytes]:
    """Return the messages of a batch, plain payloads first. The plane validates them."""
    drafts: list[Draft | bytes] = list(batch.payloads)
    drafts += [_draft(each) for each in batch.messages]
    if not drafts:
        raise InvalidArgumentError("the batch has no messages")
    return drafts


def _draft(message: wire.Draft) -> Draft:
    return Draft(
        payload=message.payload,
        headers=dict(message.headers),
        fairness_key=message.fairness_key or FAIRNESS_KEY_DEFAULT,
        weight=message.weight or 1,
        throttle_keys=tuple(message.throttle_keys),
        priority=message.priority,
        ttl_ms=message.ttl_ms if message.HasField("ttl_ms") else None,
        delay_ms=message.delay_ms,
        dedup_id=message.dedup_id,
        transient=message.transient,
    )
