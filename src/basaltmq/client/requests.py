"""Builds the wire requests of both clients from the arguments of a call."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final, TypeAlias

import msgspec

from basaltmq.errors import InvalidArgumentError
from basaltmq.queues.config import DEAD_LETTERS, QueueSettings, new_config
from basaltmq.queues.draft import FAIRNESS_KEY_DEFAULT, Draft
from basaltmq.varints import varint
from basaltmq.wire import basalt_pb2 as wire

Payload: TypeAlias = bytes | str | Draft
"""One message: its payload, or a `Draft` with all fields. Text is sent as UTF-8."""


_QUEUE: Final = b"\x0a"
_PAYLOAD: Final = b"\x1a"
"""Tags of an EnqueueBatchRequest: fields 1 and 3, both length-delimited."""


def create_of(name: str, settings: QueueSettings) -> wire.CreateQueueRequest:
    """Build the request for a queue with the defaults of queues that programs create."""
    given: dict[str, Any] = dict(settings)
    if not name.endswith(DEAD_LETTERS):
        given.setdefault("dead_letter_queue", name + DEAD_LETTERS)
    config: dict[str, Any] = msgspec.to_builtins(new_config(name, given))
    del config["name"]
    return wire.CreateQueueRequest(
        name=name, config=wire.QueueConfig(**{field: value for field, value in config.items() if value is not None})
    )


def enqueue_of(queue: str, messages: Sequence[Payload]) -> bytes:
    """Serialize a batch. Batches of plain payloads are built by hand, because protobuf would copy them once more."""
    if not queue.isascii() or {*map(type, messages)} != {bytes}:
        return batch_of(queue, messages).SerializeToString()
    payloads: Sequence[bytes] = messages  # type: ignore[assignment]
    heads = {size: _PAYLOAD + varint(size) for size in {*map(len, payloads)}}
    parts = [_QUEUE + varint(len(queue)) + queue.encode()]
    if len(heads) == 1:
        return heads.popitem()[1].join([*parts, *payloads])
    for payload in payloads:
        parts += (heads[len(payload)], payload)
    return b"".join(parts)


def batch_of(queue: str, messages: Sequence[Payload]) -> wire.EnqueueBatchRequest:
    """Build a batch. Plain payloads are sent without a message wrapper."""
    plain = [_bytes(each) for each in messages if isinstance(each, bytes | str)]
    if len(plain) == len(messages):
        return wire.EnqueueBatchRequest(queue=queue, payloads=plain)
    return wire.EnqueueBatchRequest(queue=queue, messages=[_draft(each) for each in messages])


def _draft(message: Payload) -> wire.Draft:
    if isinstance(message, bytes | str):
        return wire.Draft(payload=_bytes(message))
    if not isinstance(message, Draft):
        raise InvalidArgumentError(f"a message must be bytes, text or a Draft, not {type(message).__name__}")
    try:
        return wire.Draft(
            payload=message.payload,
            headers=message.headers,
            fairness_key="" if message.fairness_key == FAIRNESS_KEY_DEFAULT else message.fairness_key,
            weight=message.weight,
            throttle_keys=message.throttle_keys,
            priority=message.priority,
            ttl_ms=message.ttl_ms,
            delay_ms=message.delay_ms,
            dedup_id=message.dedup_id,
            transient=message.transient,
        )
    except (TypeError, ValueError) as error:
        raise InvalidArgumentError(f"the message cannot be sent: {error}") from None


def _bytes(payload: bytes | str) -> bytes:
    if isinstance(payload, bytes):
        return payload
    try:
        return payload.encode()
    except UnicodeEncodeError as error:
        raise InvalidArgumentError(f"text to enqueue cannot be sent as UTF-8: {error}") from None


def many(message: Payload | Sequence[Payload]) -> tuple[Sequence[Payload], bool]:
    """Return the messages as a sequence, and whether a single one was given."""
    if isinstance(message, bytes | str | Draft):
        return [message], True
    if not isinstance(message, list | tuple):
        raise InvalidArgumentError(f"a message must be bytes, text, a Draft or a list, not {type(message).__name__}")
    return message, False


def lease_of(
    queue: str, count: int, wait_s: float, visibility_ms: int | None, consumer: str, session: int
) -> wire.LeaseRequest:
    if type(count) is not int or count < 1:
        raise InvalidArgumentError(f"count must be 1 or more, not {count!r:.80}")
    if isinstance(wait_s, bool) or not isinstance(wait_s, int | float) or not 0 <= wait_s < float("inf"):
        raise InvalidArgumentError(f"wait must be 0 seconds or more, not {wait_s!r:.80}")
    return wire.LeaseRequest(
        queue=queue,
        max=count,
        wait_ms=round(wait_s * 1000),
        visibility_ms=visibility_ms or 0,
        consumer=consumer,
        session=session,
    )
