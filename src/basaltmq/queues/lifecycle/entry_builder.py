"""Builds the entries of published messages: ids, enqueue times, message rows and their index rows.

Small payloads, with or without protocol properties, are built in bulk. Drafts with other fields are built one by one.
Callers apply limits, scripts and deduplication before or after.
"""

from __future__ import annotations

from collections.abc import Sequence
from operator import attrgetter
from typing import TYPE_CHECKING, Final, NamedTuple

from basaltmq.clock import NS_PER_MS
from basaltmq.errors import InvalidArgumentError, LimitExceededError
from basaltmq.queues.change import Change
from basaltmq.queues.content import INLINE_BYTES_MAX
from basaltmq.queues.draft import FAIRNESS_KEY_DEFAULT, Draft, to_message
from basaltmq.queues.entries import rows
from basaltmq.queues.entries.backing import APART, SHARED, TIMED, TRANSIENT, Entry
from basaltmq.queues.entries.plain import Plain
from basaltmq.queues.lifecycle.ttl import watch
from basaltmq.queues.message import FAIRNESS_KEY_BYTES_MAX, HEAD, PAYLOAD_BYTES_MAX, Message, encode_row
from basaltmq.queues.ready.fair_scheduler import WEIGHT_MAX
from basaltmq.store.families import Family
from basaltmq.store.keys.queues import timed_of

if TYPE_CHECKING:
    from basaltmq.queues.queue import Queue

ENQUEUE_MAX: Final = 10_000
"""Messages per call. A call is one batch and holds the plane's lock for a few tens of milliseconds at most."""

_ANY_ID: Final = bytes(16)
"""Placeholder id of a message that is only checked."""


_SPECIAL: Final = attrgetter(
    "headers", "fairness_key", "weight", "throttle_keys", "priority", "ttl_ms", "delay_ms", "dedup_id"
)
_ORDINARY: Final = _SPECIAL(Draft(payload=b""))
_RARE: Final = attrgetter("headers", "throttle_keys", "priority", "ttl_ms", "delay_ms", "dedup_id")
_USUAL: Final = _RARE(Draft(payload=b""))


class NewEntries(NamedTuple):
    """New messages, ready to be admitted."""

    ids: list[bytes]
    """Ids of all drafts, in their order."""
    entries: Sequence[Entry]
    delayed: list[tuple[Entry, int]]
    """Delayed entries with their due times in nanoseconds."""
    sub: str | None
    """The sub-queue of all entries; None if it is unknown or there are several."""


def build(
    queue: Queue, change: Change, drafts: Sequence[Draft | bytes], shared_body: bytes, memory: bool
) -> NewEntries:
    """Build the entries of drafts and all their rows except the message rows. `memory` makes all of them transient."""
    check_count(drafts)
    ids = queue.shared.ids.many(len(drafts))
    enqueued_ns = queue.shared.enqueue_clock.next(change)
    if not queue.config.priorities_max and shared_body == rows.NO_BODY:
        plain = _build_plain(queue, change, drafts, ids, enqueued_ns, memory)
        if plain is not None:
            return NewEntries(ids, plain, [], FAIRNESS_KEY_DEFAULT)
        keyed = _build_keyed(queue, drafts, ids, enqueued_ns, memory)
        if keyed is not None:
            return NewEntries(ids, keyed, [], None)
    entries: list[Entry] = []
    delayed: list[tuple[Entry, int]] = []
    for draft, message_id in zip(drafts, ids, strict=True):
        if isinstance(draft, bytes):
            draft = Draft(payload=draft)
        elif not isinstance(draft, Draft):
            raise _no_draft(draft)
        entry = _build_one(queue, change, draft, message_id, enqueued_ns, shared_body, memory)
        if draft.delay_ms:
            delayed.append((entry, change.now_ns + draft.delay_ms * NS_PER_MS))
        else:
            entries.append(entry)
    return NewEntries(ids, entries, delayed, None)


def check_count(drafts: Sequence[Draft | bytes]) -> None:
    if len(drafts) > ENQUEUE_MAX:
        raise LimitExceededError(
            f"{len(drafts)} messages in one call exceed the limit of {ENQUEUE_MAX}; split the batch"
        )


def checked(queue: str, drafts: Sequence[Draft | bytes]) -> list[Draft]:
    """Return the drafts after checking every limit, before any expensive work is done for them."""
    check_count(drafts)
    whole: list[Draft] = []
    for draft in drafts:
        if isinstance(draft, bytes):
            draft = Draft(payload=draft)
        elif not isinstance(draft, Draft):
            raise _no_draft(draft)
        to_message(draft, queue, _ANY_ID, 0, 0)
        whole.append(draft)
    return whole


def _no_draft(given: object) -> InvalidArgumentError:
    return InvalidArgumentError(f"a message to enqueue must be bytes or a Draft, not {type(given).__name__}")


def _build_plain(
    queue: Queue, change: Change, drafts: Sequence[Draft | bytes], ids: list[bytes], enqueued_ns: int, memory: bool
) -> Sequence[Entry] | None:
    """Build entries of drafts that have only a small payload and properties, in bulk. None if some have more."""
    payloads: list[bytes] = drafts  # type: ignore[assignment]
    properties: list[bytes] | None = None
    whole: list[Draft] = []
    flags = {TRANSIENT if memory else 0}
    if list(map(type, drafts)).count(bytes) < len(drafts):
        whole = [draft for draft in drafts if type(draft) is Draft]
        if len(whole) < len(drafts) or [draft for draft in whole if _SPECIAL(draft) != _ORDINARY]:
            return None
        payloads = [draft.payload for draft in whole]
        properties = [draft.properties for draft in whole]
        if {*map(type, payloads), *map(type, properties)} != {bytes}:
            return None
        if max(map(len, properties)) > INLINE_BYTES_MAX:
            return None
        if not memory:
            flags = {TRANSIENT if draft.transient else 0 for draft in whole}
    sizes = list(map(len, payloads))
    if max(sizes, default=0) > INLINE_BYTES_MAX:
        return None
    expires_ns = 0
    if queue.config.ttl_ms is not None:
        expires_ns = change.now_ns + queue.config.ttl_ms * NS_PER_MS
        watch(queue, change, expires_ns)
    head = queue.default_prefix + enqueued_ns.to_bytes(8, "big")
    made = rows.plain_rows(payloads, expires_ns, properties, sizes)
    message_keys = [head + message_id for message_id in ids]
    if len(flags) == 1:
        row_bytes = sum(sizes) + HEAD.size * len(sizes) if properties is None else None
        plain = Plain(message_keys, made, sizes, flags.pop(), expires_ns, row_bytes=row_bytes)
        plain.ids = ids
        plain.has_stayed = True
        return plain
    return [
        Entry(key, row, size, TRANSIENT if draft.transient or memory else 0, expires_ns)
        for key, row, size, draft in zip(message_keys, made, sizes, whole, strict=True)
    ]


def are_ordinary(drafts: Sequence[Draft | bytes]) -> bool:
    """Whether all drafts have only a payload and properties, within their size limits."""
    return all(
        type(draft) is Draft
        and _SPECIAL(draft) == _ORDINARY
        and type(draft.payload) is bytes
        and type(draft.properties) is bytes
        and len(draft.properties) <= INLINE_BYTES_MAX
        and len(draft.payload) <= PAYLOAD_BYTES_MAX
        for draft in drafts
    )


def build_for_many(
    queues: Sequence[Queue], change: Change, drafts: Sequence[Draft], body_ids: Sequence[bytes]
) -> list[Plain]:
    """Build entries of ordinary drafts for each queue. With `body_ids` the queues share the bodies by references."""
    shared = queues[0].shared
    count = len(drafts)
    ids = shared.ids.many(count * len(queues))
    enqueued = shared.enqueue_clock.next(change).to_bytes(8, "big")
    if body_ids:
        shared.content.refer_many(change, body_ids, ids)
    flags = APART | SHARED if body_ids else 0
    sizes = [len(draft.payload) for draft in drafts]
    rows_by_expiry: dict[int, tuple[list[bytes], int]] = {}
    made: list[Plain] = []
    for at, queue in enumerate(queues):
        expires_ns = 0
        if queue.config.ttl_ms is not None:
            expires_ns = change.now_ns + queue.config.ttl_ms * NS_PER_MS
            watch(queue, change, expires_ns)
        found = rows_by_expiry.get(expires_ns)
        if found is None:
            same = _rows_for_many(drafts, body_ids, expires_ns)
            found = rows_by_expiry[expires_ns] = same, sum(map(len, same))
        head = queue.default_prefix + enqueued
        own_ids = ids[at * count : (at + 1) * count]
        entries = Plain([head + each for each in own_ids], found[0], sizes, flags, expires_ns, row_bytes=found[1])
        entries.ids = own_ids
        entries.has_stayed = True
        made.append(entries)
    return made


def _rows_for_many(drafts: Sequence[Draft], body_ids: Sequence[bytes], expires_ns: int) -> list[bytes]:
    """Return the row of each draft, which is the same in every queue."""
    properties = [draft.properties for draft in drafts]
    if not body_ids:
        return rows.plain_rows([draft.payload for draft in drafts], expires_ns, properties)
    inner = rows.plain_rows([b""] * len(drafts), expires_ns, properties)
    return [
        rows.wrap(row, APART | SHARED, body_id, len(draft.payload))
        for row, body_id, draft in zip(inner, body_ids, drafts, strict=True)
    ]


def _build_keyed(
    queue: Queue, drafts: Sequence[Draft | bytes], ids: list[bytes], enqueued_ns: int, memory: bool
) -> list[Entry] | None:
    """Build entries of drafts that also have fairness keys and weights, in bulk. None if some have more."""
    whole = [draft for draft in drafts if type(draft) is Draft]
    # With a TTL, every message of a key has a row in the expiry index.
    if len(whole) < len(drafts) or queue.config.ttl_ms is not None or [d for d in whole if _RARE(d) != _USUAL]:
        return None
    payloads = [draft.payload for draft in whole]
    properties = [draft.properties for draft in whole]
    fairness_keys = [draft.fairness_key for draft in whole]
    weights = [draft.weight for draft in whole]
    if {*map(type, payloads), *map(type, properties)} != {bytes} or {*map(type, weights)} != {int}:
        return None
    if max(map(len, properties)) > INLINE_BYTES_MAX or max(map(len, payloads)) > INLINE_BYTES_MAX:
        return None
    if min(weights) < 1 or max(weights) > WEIGHT_MAX or {*map(type, fairness_keys)} != {str}:
        return None
    enqueued = enqueued_ns.to_bytes(8, "big")
    heads: dict[str, bytes] = {}
    for key in set(fairness_keys):
        # Leave keys that may be invalid to the one-by-one path, which reports errors per message.
        if not key.isascii() or len(key) > FAIRNESS_KEY_BYTES_MAX:
            return None
        heads[key] = rows.prefix_of(queue.name, key) + enqueued
    made = rows.weighted_rows(payloads, 0, properties, weights)
    return [
        Entry(heads[key] + message_id, row, len(payload), TRANSIENT if draft.transient or memory else 0)
        for key, message_id, row, payload, draft in zip(fairness_keys, ids, made, payloads, whole, strict=True)
    ]


def _build_one(
    queue: Queue,
    change: Change,
    draft: Draft,
    message_id: bytes,
    enqueued_ns: int,
    shared_body: bytes,
    memory: bool,
) -> Entry:
    ttl_ms = _ttl_ms(queue, draft.ttl_ms)
    expires_ns = 0 if ttl_ms is None else change.now_ns + (ttl_ms + draft.delay_ms) * NS_PER_MS
    message = to_message(draft, queue.name, message_id, enqueued_ns, expires_ns)
    # Delayed messages wait on disk.
    transient = (draft.transient or memory) and not draft.delay_ms
    body_id = shared_body
    if shared_body != rows.NO_BODY:
        queue.shared.content.refer(change, shared_body, message_id)
    elif len(message.payload) > INLINE_BYTES_MAX and not transient:
        queue.shared.content.put(change, message_id, message.payload)
        body_id = message_id
    return entry_of(
        queue,
        change,
        message,
        body_id=body_id,
        shared_body=shared_body != rows.NO_BODY,
        transient=transient,
        own_ttl=draft.ttl_ms is not None,
    )


def entry_of(
    queue: Queue,
    change: Change,
    message: Message,
    *,
    body_id: bytes = rows.NO_BODY,
    body_bytes: int | None = None,
    shared_body: bool = False,
    transient: bool = False,
    own_ttl: bool = False,
) -> Entry:
    """Return the entry of a message at its place in a queue, and put its expiry index row if it needs one."""
    priorities_max = queue.config.priorities_max
    sub = rows.sub_queue(message.fairness_key, min(message.priority, priorities_max) if priorities_max else None)
    key = rows.prefix_of(queue.name, sub) + message.enqueued_ns.to_bytes(8, "big") + message.id
    size_bytes = len(message.payload) if body_bytes is None else body_bytes
    flags = TRANSIENT if transient else 0
    if body_id != rows.NO_BODY:
        flags |= APART | (SHARED if shared_body else 0)
        message.payload = b""
    if message.expires_ns:
        watch(queue, change, message.expires_ns)
        if not transient and (own_ttl or sub != FAIRNESS_KEY_DEFAULT):
            # Messages expire in queue order only with one sub-queue and one TTL. All others need the index.
            flags |= TIMED
            change.batch.put(Family.MESSAGE_EXPIRY, timed_of(key, message.expires_ns), b"")
    row = encode_row(message)
    if flags & (APART | SHARED | TIMED):
        row = rows.wrap(row, flags & ~TRANSIENT, body_id, size_bytes if flags & APART else 0)
    return Entry(key, row, size_bytes, flags, message.expires_ns)


def _ttl_ms(queue: Queue, own_ms: int | None) -> int | None:
    if own_ms is None or queue.config.ttl_ms is None:
        return queue.config.ttl_ms if own_ms is None else own_ms
    return min(own_ms, queue.config.ttl_ms)
