"""Drafts become entries: ids, places, rows, and the rows that a message has beside its own.

What a caller usually sends (small payloads, with a protocol's properties or without) is made many at once; whatever
else a draft may say takes the long way, one by one. Limits, scripts and deduplication are asked before or after.
"""

from __future__ import annotations

from collections.abc import Sequence
from operator import attrgetter
from typing import TYPE_CHECKING, Final, NamedTuple

from basaltmq.errors import InvalidArgumentError, LimitExceededError
from basaltmq.queues.change import Change
from basaltmq.queues.content import INLINE_BYTES_MAX
from basaltmq.queues.draft import FAIRNESS_KEY_DEFAULT, Draft, to_message
from basaltmq.queues.lifecycle.ttl import watch
from basaltmq.queues.message import FAIRNESS_KEY_BYTES_MAX, HEAD, PAYLOAD_BYTES_MAX, Message, encode_row
from basaltmq.queues.ready import rows
from basaltmq.queues.ready.backing import APART, SHARED, TIMED, TRANSIENT, Entry
from basaltmq.queues.ready.fair_scheduler import WEIGHT_MAX
from basaltmq.queues.ready.plain import Plain
from basaltmq.store.families import Family
from basaltmq.store.keys.queues import timed_of

if TYPE_CHECKING:
    from basaltmq.queues.queue import Queue

ENQUEUE_MAX: Final = 10_000
"""Messages of one call, so that a call is one batch and holds the plane for a few tens of milliseconds at most."""

_ANY_ID: Final = bytes(16)
"""Of a message that is only looked at."""

MS: Final = 1_000_000
"""Nanoseconds in a millisecond."""

_SPECIAL: Final = attrgetter(
    "headers", "fairness_key", "weight", "throttle_keys", "priority", "ttl_ms", "delay_ms", "dedup_id"
)
_ORDINARY: Final = _SPECIAL(Draft(payload=b""))
_RARE: Final = attrgetter("headers", "throttle_keys", "priority", "ttl_ms", "delay_ms", "dedup_id")
_USUAL: Final = _RARE(Draft(payload=b""))


class Made(NamedTuple):
    """Messages that are ready to be let in."""

    ids: list[bytes]
    """Of all drafts, in their order."""
    entries: Sequence[Entry]
    delayed: list[tuple[Entry, int]]
    """Those that wait, and until when."""
    sub: str | None
    """The sub-queue all entries are of, where that is known."""


def make(queue: Queue, change: Change, drafts: Sequence[Draft | bytes], shared_body: bytes, memory: bool) -> Made:
    """Messages of drafts with all their rows but the message's own. `memory`: all of them are transient."""
    check_count(drafts)
    ids = queue.shared.ids.many(len(drafts))
    place_ns = queue.shared.places.next(change)
    if not queue.config.priorities_max and shared_body == rows.NO_BODY:
        plain = _make_plain(queue, change, drafts, ids, place_ns, memory)
        if plain is not None:
            return Made(ids, plain, [], FAIRNESS_KEY_DEFAULT)
        keyed = _make_keyed(queue, drafts, ids, place_ns, memory)
        if keyed is not None:
            return Made(ids, keyed, [], None)
    entries: list[Entry] = []
    delayed: list[tuple[Entry, int]] = []
    for draft, message_id in zip(drafts, ids, strict=True):
        if isinstance(draft, bytes):
            draft = Draft(payload=draft)
        elif not isinstance(draft, Draft):
            raise _no_draft(draft)
        entry = _make_one(queue, change, draft, message_id, place_ns, shared_body, memory)
        if draft.delay_ms:
            delayed.append((entry, change.now_ns + draft.delay_ms * MS))
        else:
            entries.append(entry)
    return Made(ids, entries, delayed, None)


def check_count(drafts: Sequence[Draft | bytes]) -> None:
    if len(drafts) > ENQUEUE_MAX:
        raise LimitExceededError(f"{len(drafts)} messages in one call: at most {ENQUEUE_MAX}")


def checked(queue: str, drafts: Sequence[Draft | bytes]) -> list[Draft]:
    """Drafts that pass every limit, before something is done for them that takes time."""
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
    return InvalidArgumentError(f"a message to enqueue is bytes or a Draft, not {type(given).__name__}")


def _make_plain(
    queue: Queue, change: Change, drafts: Sequence[Draft | bytes], ids: list[bytes], place_ns: int, memory: bool
) -> Sequence[Entry] | None:
    """Entries of drafts that are nothing but small payloads and properties, all at once; None if they are not."""
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
        expires_ns = change.now_ns + queue.config.ttl_ms * MS
        watch(queue, change, expires_ns)
    head = queue.default_prefix + place_ns.to_bytes(8, "big")
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
    """Whether all of them are drafts that have a payload and properties, of a size that can be, and nothing else."""
    return all(
        type(draft) is Draft
        and _SPECIAL(draft) == _ORDINARY
        and type(draft.payload) is bytes
        and type(draft.properties) is bytes
        and len(draft.properties) <= INLINE_BYTES_MAX
        and len(draft.payload) <= PAYLOAD_BYTES_MAX
        for draft in drafts
    )


def make_shared(queue: Queue, change: Change, drafts: Sequence[Draft], body_ids: Sequence[bytes]) -> list[Entry]:
    """Entries of ordinary drafts whose bodies are shared with other queues, with a reference each."""
    ids = queue.shared.ids.many(len(drafts))
    expires_ns = 0
    if queue.config.ttl_ms is not None:
        expires_ns = change.now_ns + queue.config.ttl_ms * MS
        watch(queue, change, expires_ns)
    head = queue.default_prefix + queue.shared.places.next(change).to_bytes(8, "big")
    flags = APART | SHARED
    made = rows.plain_rows([b""] * len(drafts), expires_ns, [draft.properties for draft in drafts])
    refer = queue.shared.content.refer
    entries: list[Entry] = []
    for draft, body_id, message_id, row in zip(drafts, body_ids, ids, made, strict=True):
        size_bytes = len(draft.payload)
        refer(change, body_id, message_id)
        entries.append(
            Entry(head + message_id, rows.wrap(row, flags, body_id, size_bytes), size_bytes, flags, expires_ns)
        )
    return entries


def _make_keyed(
    queue: Queue, drafts: Sequence[Draft | bytes], ids: list[bytes], place_ns: int, memory: bool
) -> list[Entry] | None:
    """Entries of drafts that have fairness keys and weights too, all at once; None if they have anything else."""
    whole = [draft for draft in drafts if type(draft) is Draft]
    # Under a TTL every message of a key has a row in the expiry index.
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
    place = place_ns.to_bytes(8, "big")
    heads: dict[str, bytes] = {}
    for key in set(fairness_keys):
        # Whatever may be refused is looked at, and told, one by one.
        if not key.isascii() or len(key) > FAIRNESS_KEY_BYTES_MAX:
            return None
        heads[key] = rows.prefix_of(queue.name, key) + place
    made = rows.weighted_rows(payloads, 0, properties, weights)
    return [
        Entry(heads[key] + message_id, row, len(payload), TRANSIENT if draft.transient or memory else 0)
        for key, message_id, row, payload, draft in zip(fairness_keys, ids, made, payloads, whole, strict=True)
    ]


def _make_one(
    queue: Queue,
    change: Change,
    draft: Draft,
    message_id: bytes,
    place_ns: int,
    shared_body: bytes,
    memory: bool,
) -> Entry:
    ttl_ms = _ttl_ms(queue, draft.ttl_ms)
    expires_ns = 0 if ttl_ms is None else change.now_ns + (ttl_ms + draft.delay_ms) * MS
    message = to_message(draft, queue.name, message_id, place_ns, expires_ns)
    # A message that waits for its time waits on disk.
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
    """The entry of a message at its place in a queue, with its row in the expiry index where it needs one."""
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
            # Only a queue of one sub-queue and one TTL expires in its order; everything else needs the index.
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
