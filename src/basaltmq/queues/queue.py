"""One queue: messages in, leased, settled. Everything a change touches is in the batch of the change.

The order of ready messages and what of them is in memory is the backing queue's (backing.py); bodies are content.py's,
leases leases.py's, what happens to a message that failed failures.py's, delays delays.py's, TTL expiry.py's, limits
limits.py's. Waiting, locking and writing are the plane's. Not thread-safe: the plane's lock is around every call.

A queue in memory is a cache of its rows. It is loaded when somebody uses it and let go when nobody does; only transient
messages and waiting consumers tie it down.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Final, NamedTuple

from basaltmq.errors import InvalidArgumentError, LimitExceededError
from basaltmq.ids import Ids
from basaltmq.queues import advice, dedup, limits, rows
from basaltmq.queues.backing import APART, RETURNED, SHARED, SPILLED, TIMED, TRANSIENT, BackingQueue, Entry
from basaltmq.queues.boot import Places
from basaltmq.queues.change import Change
from basaltmq.queues.config import DURATION_MS_MAX, QueueConfig
from basaltmq.queues.content import INLINE_BYTES_MAX, Content
from basaltmq.queues.delays import delay
from basaltmq.queues.delivery import PRIORITY, REDELIVERED, Delivery
from basaltmq.queues.draft import FAIRNESS_KEY_DEFAULT, Draft, to_message
from basaltmq.queues.expiry import expire, watch
from basaltmq.queues.hooks import QueueHooks
from basaltmq.queues.leases import FOREVER, LEASE_MAX, LeaseCall, LeaseExpiry, Leases, Tokens
from basaltmq.queues.message import Message, encode_row
from basaltmq.queues.paging import MemoryBudget, PagingLimits
from basaltmq.queues.stats import QueueStats
from basaltmq.queues.throttle import TokenBuckets
from basaltmq.queues.throttling import Throttling
from basaltmq.queues.timers import Timers
from basaltmq.store.api import Store
from basaltmq.store.batch import Batch
from basaltmq.store.families import Family
from basaltmq.store.keys import lp, queue_stats_key, timed_of

ENQUEUE_MAX: Final = 10_000
"""Messages of one call, so that a call is one batch and holds the plane for a few tens of milliseconds at most."""

MS: Final = 1_000_000
"""Nanoseconds in a millisecond."""


def check_visibility(visibility_ms: int) -> None:
    if type(visibility_ms) is not int or not 0 <= visibility_ms <= DURATION_MS_MAX:
        raise InvalidArgumentError(
            f"a lease lasts 0 ms (as long as its consumer) to {DURATION_MS_MAX} ms, not {visibility_ms!r:.80}"
        )


@dataclass(slots=True)
class Shared:
    """What the queues of a plane have in common."""

    store: Store
    ids: Ids
    content: Content
    tokens: Tokens
    places: Places
    lease_expiry: LeaseExpiry
    timers: Timers
    find: Callable[[Change, str], Queue]
    """The queue of this name, made in the change if it is missing: where dead letters go."""
    check_limits: Callable[[str], None]
    """The queue of this name got messages that its limits were not asked about."""
    buckets: TokenBuckets = field(default_factory=TokenBuckets)
    throttles: set[str] = field(default_factory=set)
    """Throttle keys that have a limit."""
    parked: dict[str, None] = field(default_factory=dict)
    """Queues with messages that wait for tokens, of which those who listen are to be told."""
    holders: Callable[[str], Sequence[object]] = lambda name: ()
    """Prepared branches that have messages in the queue of this name, or for it."""
    budget: MemoryBudget = field(default_factory=MemoryBudget)
    paging: PagingLimits = field(default_factory=PagingLimits)


class Made(NamedTuple):
    """Messages that are ready to be let in."""

    ids: list[bytes]
    """Of all drafts, in their order."""
    entries: list[Entry]
    delayed: list[tuple[Entry, int]]
    """Those that wait, and until when."""
    sub: str | None
    """The sub-queue all entries are of, where that is known."""


class Queue:
    """A queue that is loaded."""

    __slots__ = (
        "_default_prefix",
        "_stats_key",
        "account",
        "backing",
        "config",
        "delayed_from_ns",
        "expiry_from_ns",
        "has_returned",
        "hooks",
        "leases",
        "name",
        "prefix_bytes",
        "shared",
        "stats",
        "throttling",
        "used_ns",
    )

    def __init__(
        self,
        shared: Shared,
        config: QueueConfig,
        stats: QueueStats,
        leases: Leases,
        backing: BackingQueue,
        account: MemoryBudget,
        now_ns: int,
    ) -> None:
        self.account = account
        self.shared = shared
        self.config = config
        self.name = config.name
        self.stats = stats
        self.leases = leases
        self.backing = backing
        self.prefix_bytes = len(lp(config.name))
        self.used_ns = now_ns
        self.hooks: QueueHooks | None = None
        self.throttling: Throttling | None = None
        self.delayed_from_ns = 0
        self.expiry_from_ns = 0
        self.has_returned = False
        priority = 0 if config.priorities_max else None
        self._default_prefix = rows.prefix_of(self.name, rows.sub_queue(FAIRNESS_KEY_DEFAULT, priority))
        self._stats_key = queue_stats_key(self.name)

    def configure(self, config: QueueConfig, hooks: QueueHooks | None) -> None:
        """Behave differently from here on."""
        self.config = config
        self.hooks = hooks

    def __len__(self) -> int:
        """Messages that are ready."""
        return self.stats.depth() - len(self.leases)

    def ready_bytes(self) -> int:
        return self.stats.depth_bytes() - self.leases.size_bytes

    def touch(self, change: Change) -> None:
        """The change is about this queue: its counts are put back if it fails, and written with it if it does not."""
        if not change.has_before(self):
            values = self.stats.values()
            change.undo(lambda: self.stats.restore(values))
            change.before(self, lambda: self._put_stats(change))

    def _put_stats(self, change: Change) -> None:
        self.stats.returned_ns = self.leases.returned_ns
        change.batch.put(Family.QUEUE_STATS, self._stats_key, self.stats.encode())

    def save(self, batch: Batch) -> None:
        """Memory is about to be lost: write what it has and the row has not."""
        if self.has_returned:
            self.backing.forget_returned()
        if self.stats.returned_ns != self.leases.returned_ns:
            self.stats.returned_ns = self.leases.returned_ns
            batch.put(Family.QUEUE_STATS, self._stats_key, self.stats.encode())

    def enqueue(
        self,
        change: Change,
        drafts: Sequence[Draft | bytes],
        body_id: bytes = rows.NO_BODY,
        *,
        promised: bool = False,
    ) -> list[bytes]:
        """Add messages; their ids. A draft that repeats one of the deduplication window has the id of that one.

        With `body_id` the drafts' payload is in that shared body. What was `promised` at an earlier time asked scripts
        and limits then, and is not refused.
        """
        self.touch(change)
        if self.config.dedup_window_ms is None:
            return self._enqueue(change, drafts, body_id, promised)
        known = dedup.known(self, change, drafts)
        within = {i: first for i, first in dedup.within(drafts).items() if i not in known}
        repeats = known.keys() | within.keys()
        self.stats.duplicates += len(repeats)
        made = iter(self._enqueue(change, [d for i, d in enumerate(drafts) if i not in repeats], body_id, promised))
        ids: list[bytes] = []
        for index in range(len(drafts)):
            if index in known:
                ids.append(known[index])
            elif index in within:
                ids.append(ids[within[index]])
            else:
                ids.append(next(made))
        dedup.remember(self, change, drafts, ids, repeats)
        return ids

    def _enqueue(self, change: Change, drafts: Sequence[Draft | bytes], body_id: bytes, promised: bool) -> list[bytes]:
        if self.config.on_enqueue_script is not None and not promised:
            drafts = advice.on_enqueue(self, drafts)
        ids, entries, delayed, sub = self.make(change, drafts, body_id)
        self.stats.enqueued += len(ids)
        if self.config.length_max is not None or self.config.bytes_max is not None:
            entries = limits.let_in(self, change, entries, promised=promised)
        self.admit(change, entries, sub)
        if delayed:
            delay(self, change, delayed)
        return ids

    def deliver(
        self, change: Change, drafts: Sequence[Draft | bytes], consumer: str, visibility_ms: int | None = None
    ) -> list[Delivery]:
        """Hand messages straight to a consumer: they are leased in the change that brings them in."""
        self.touch(change)
        _, entries, delayed, _ = self.make(change, drafts)
        if delayed:
            raise InvalidArgumentError("a delayed message cannot be delivered at once")
        self.stats.enqueued += len(entries)
        self.count(entries, 1)
        self.backing.publish_delivered(change, entries)
        change.fresh.update(e.key for e in entries)
        return self._hand_out(change, entries, consumer, visibility_ms)

    def admit(self, change: Change, entries: Sequence[Entry], sub: str | None = None) -> None:
        """Let messages in that are complete: published, returned from a delay, dead-lettered, moved."""
        self.count(entries, 1)
        self.backing.publish(change, entries, sub)
        if entries:
            change.ready[self.name] = None

    def make(self, change: Change, drafts: Sequence[Draft | bytes], body_id: bytes = rows.NO_BODY) -> Made:
        """Messages of drafts with all their rows but the message's own."""
        if len(drafts) > ENQUEUE_MAX:
            raise LimitExceededError(f"{len(drafts)} messages in one call: at most {ENQUEUE_MAX}")
        ids = self.shared.ids.many(len(drafts))
        place_ns = self.shared.places.next(change)
        entries = self._make_plain(change, drafts, ids, place_ns)
        if entries is not None:
            return Made(ids, entries, [], FAIRNESS_KEY_DEFAULT)
        entries = []
        delayed: list[tuple[Entry, int]] = []
        for draft, message_id in zip(drafts, ids, strict=True):
            if isinstance(draft, bytes):
                draft = Draft(payload=draft)
            elif not isinstance(draft, Draft):
                raise InvalidArgumentError(f"a message to enqueue is bytes or a Draft, not {type(draft).__name__}")
            entry = self._make_one(change, draft, message_id, place_ns, body_id)
            if draft.delay_ms:
                delayed.append((entry, change.now_ns + draft.delay_ms * MS))
            else:
                entries.append(entry)
        return Made(ids, entries, delayed, None)

    def _make_plain(
        self, change: Change, drafts: Sequence[Draft | bytes], ids: list[bytes], place_ns: int
    ) -> list[Entry] | None:
        """Entries of drafts that are nothing but small payloads, all at once; None if they are not."""
        if self.config.priorities_max:
            return None
        payloads = [draft for draft in drafts if type(draft) is bytes]
        sizes = [len(payload) for payload in payloads]
        if len(payloads) < len(drafts) or max(sizes, default=0) > INLINE_BYTES_MAX:
            return None
        expires_ns = 0
        if self.config.ttl_ms is not None:
            expires_ns = change.now_ns + self.config.ttl_ms * MS
            watch(self, change, expires_ns)
        head = self._default_prefix + place_ns.to_bytes(8, "big")
        made = rows.plain_rows(payloads, expires_ns)
        return [
            Entry(head + message_id, row, size, 0, expires_ns)
            for message_id, row, size in zip(ids, made, sizes, strict=True)
        ]

    def _make_one(self, change: Change, draft: Draft, message_id: bytes, place_ns: int, shared_body: bytes) -> Entry:
        ttl_ms = self._ttl_ms(draft.ttl_ms)
        expires_ns = 0 if ttl_ms is None else change.now_ns + (ttl_ms + draft.delay_ms) * MS
        message = to_message(draft, self.name, message_id, place_ns, expires_ns)
        body_id = shared_body
        if shared_body != rows.NO_BODY:
            self.shared.content.refer(change, shared_body, message_id)
        elif len(message.payload) > INLINE_BYTES_MAX and not draft.transient:
            self.shared.content.put(change, message_id, message.payload)
            body_id = message_id
        return self.entry_of(
            change,
            message,
            body_id=body_id,
            shared_body=shared_body != rows.NO_BODY,
            transient=draft.transient and not draft.delay_ms,
            own_ttl=draft.ttl_ms is not None,
        )

    def entry_of(
        self,
        change: Change,
        message: Message,
        *,
        body_id: bytes = rows.NO_BODY,
        body_bytes: int | None = None,
        shared_body: bool = False,
        transient: bool = False,
        own_ttl: bool = False,
    ) -> Entry:
        """The entry of a message at its place in this queue, with its row in the expiry index where it needs one."""
        priority = min(message.priority, self.config.priorities_max) if self.config.priorities_max else None
        sub = rows.sub_queue(message.fairness_key, priority)
        key = rows.prefix_of(self.name, sub) + message.enqueued_ns.to_bytes(8, "big") + message.id
        size_bytes = len(message.payload) if body_bytes is None else body_bytes
        flags = TRANSIENT if transient else 0
        if body_id != rows.NO_BODY:
            flags |= APART | (SHARED if shared_body else 0)
            message.payload = b""
        if message.expires_ns:
            watch(self, change, message.expires_ns)
            if not transient and (own_ttl or sub != FAIRNESS_KEY_DEFAULT):
                # Only a queue of one sub-queue and one TTL expires in its order; everything else needs the index.
                flags |= TIMED
                change.batch.put(Family.MESSAGE_EXPIRY, timed_of(key, message.expires_ns), b"")
        row = encode_row(message)
        if flags & (APART | SHARED | TIMED):
            row = rows.wrap(row, flags & ~TRANSIENT, body_id, size_bytes if flags & APART else 0)
        return Entry(key, row, size_bytes, flags, message.expires_ns)

    def _ttl_ms(self, own_ms: int | None) -> int | None:
        if own_ms is None or self.config.ttl_ms is None:
            return self.config.ttl_ms if own_ms is None else own_ms
        return min(own_ms, self.config.ttl_ms)

    def lease(self, change: Change, count: int, consumer: str, visibility_ms: int | None = None) -> list[Delivery]:
        """Hand out up to `count` ready messages."""
        entries = self.take_ready(change, min(count, LEASE_MAX, self.leases.room()))
        return self._hand_out(change, entries, consumer, visibility_ms) if entries else []

    def take_ready(self, change: Change, count: int) -> list[Entry]:
        """Take up to `count` messages off the head that have not expired; they go back if the change fails."""
        ready: list[Entry] = []
        throttling = self._throttling()
        if throttling is not None:
            # Those that come back are older than those parked in this change: all line up again.
            change.undo(lambda: self.settle_down(change.now_ns))
            ready = self._without_expired(change, throttling.woken(change, count))
        while len(ready) < count:
            fetched = self.backing.fetch(count - len(ready))
            if not fetched:
                break
            if throttling is not None:
                fetched = throttling.admit(change, fetched)
            self._undo_fetch(change, fetched)
            ready += self._without_expired(change, fetched)
        return ready

    def _without_expired(self, change: Change, entries: list[Entry]) -> list[Entry]:
        """Let those of the fetched messages go that have expired; the others."""
        now_ns = change.now_ns
        expired = [e for e in entries if e.expires_ns and e.expires_ns <= now_ns]
        if not expired:
            return entries
        expire(self, change, expired)
        return [e for e in entries if not e.expires_ns or e.expires_ns > now_ns]

    def _throttling(self) -> Throttling | None:
        """What holds throttled messages; there is none before the first throttle is set."""
        if self.throttling is None and self.shared.throttles:
            self.throttling = Throttling(self, self.shared.buckets)
        return self.throttling

    def may_have_something(self, now_ns: int) -> bool:
        """Whether it is worth trying a lease: messages are ready, and those seen do not all wait for tokens."""
        if len(self) == 0:
            return False
        if self.throttling is None or not len(self.throttling):
            return True
        token_ns = self.throttling.next_wake_ns()
        return token_ns is not None and token_ns <= now_ns

    def settle_down(self, now_ns: int) -> None:
        """Have every waiting message in the backing queue, for whoever looks at the whole of it."""
        if self.throttling is not None:
            self.throttling.unpark(now_ns)

    def _undo_fetch(self, change: Change, fetched: list[Entry]) -> None:
        change.undo(lambda: self.backing.put_back(fetched))

    def _hand_out(
        self, change: Change, entries: list[Entry], consumer: str, visibility_ms: int | None
    ) -> list[Delivery]:
        token = self.shared.tokens.next()
        expires_ns = self._lease_until(change.now_ns, visibility_ms)
        ids = [e.key[-16:] for e in entries]
        call = LeaseCall(token, consumer, change.now_ns, expires_ns, dict(zip(ids, entries, strict=True)))
        self.leases.add(change.batch, call)
        change.undo(lambda: self.leases.forget(call))
        change.after(lambda: self._expect_expiry(call))
        change.marks.add(call)
        self.used_ns = change.now_ns
        returned_ns = max(self.leases.returned_ns, self.shared.places.crash_ns)
        if not returned_ns and not self.config.priorities_max and not [e for e in entries if e.flags]:
            deliveries = [Delivery(i, token, e.key, e.row) for i, e in zip(ids, entries, strict=True)]
            for entry in entries:
                entry.row = b""
            return deliveries
        apart = [e for e in entries if e.flags & APART]
        bodies = dict(zip([e.key for e in apart], self.bodies(change, apart), strict=True)) if apart else {}
        until = returned_ns.to_bytes(8, "big")
        always = PRIORITY if self.config.priorities_max else 0
        deliveries = []
        for message_id, entry in zip(ids, entries, strict=True):
            key, row = entry.key, entry.row
            came_back = entry.flags & RETURNED or key[-24:-16] <= until
            marks = always | REDELIVERED if came_back else always
            deliveries.append(Delivery(message_id, token, key, row, bodies.get(key), marks))
            if entry.flags & (TRANSIENT | SPILLED) != TRANSIENT:
                entry.row = b""
        return deliveries

    def _expect_expiry(self, call: LeaseCall) -> None:
        if call.entries:
            self.shared.lease_expiry.add(call.expires_ns, self.name, call.token)

    def bodies(self, change: Change, entries: list[Entry]) -> list[bytes]:
        """Bodies kept apart, also those that this change brings in."""
        if not change.fresh:
            return self.shared.content.get_many(entries)
        written = {key: value for _, family, key, value in change.batch.ops if family is Family.BODIES}
        return [
            written[rows.body_of(e.row)] if rows.body_of(e.row) in written else self.shared.content.get(e)
            for e in entries
        ]

    def _lease_until(self, now_ns: int, visibility_ms: int | None) -> int:
        if visibility_ms is None:
            visibility_ms = self.config.visibility_timeout_ms
        check_visibility(visibility_ms)
        return now_ns + visibility_ms * MS if visibility_ms else FOREVER

    def ack(self, change: Change, token: int, ids: Sequence[bytes] | None = None) -> int:
        """Messages of a lease (all by default) are done; how many that were."""
        call, entries = self._settle(change, token, ids)
        self.touch(change)
        self.used_ns = change.now_ns
        self.leases.settled(change.batch, call, rewrite=False)
        if call in change.marks and not call.entries:
            self.leases.cancel(change, call)
        self.delete(change, entries)
        self.stats.acked += len(entries)
        return len(entries)

    def take(self, change: Change, token: int, ids: Sequence[bytes] | None) -> list[Entry]:
        """Messages of a lease leave it without being done; the lease row says so. Their rows may not be in memory."""
        call, entries = self._settle(change, token, ids)
        self.touch(change)
        self.leases.settled(change.batch, call, rewrite=True)
        return entries

    def _settle(self, change: Change, token: int, ids: Sequence[bytes] | None) -> tuple[LeaseCall, list[Entry]]:
        call, taken = self.leases.take(token, ids)
        change.undo(lambda: self.leases.restore(call, taken))
        if not call.entries:
            change.after(lambda: self.shared.lease_expiry.remove(token))
        return call, list(taken.values())

    def release(self, change: Change, token: int, ids: Sequence[bytes] | None = None) -> int:
        """Messages of a lease (all by default) go back to their places; no attempt is counted."""
        entries = self.take(change, token, ids)
        self.return_ready(change, entries)
        return len(entries)

    def return_ready(self, change: Change, entries: list[Entry]) -> None:
        """Put messages back that are neither expired nor changed."""
        now_ns = change.now_ns
        expired = [e for e in entries if e.expires_ns and e.expires_ns <= now_ns]
        if expired:
            self.load_rows(expired)
            expire(self, change, expired)
            entries = [e for e in entries if not e.expires_ns or e.expires_ns > now_ns]
        self.has_returned = True
        for entry in entries:
            entry.flags |= RETURNED
        self.backing.requeue(change, entries)
        if entries:
            change.ready[self.name] = None

    def extend(
        self, change: Change, token: int, visibility_ms: int | None = None, ids: Sequence[bytes] | None = None
    ) -> int:
        """A lease lasts until `visibility_ms` from here; the token to answer with.

        For a part of its messages the lease is split, and the part has a token of its own.
        """
        call = self.leases.require(token)
        expires_ns = self._lease_until(change.now_ns, visibility_ms)
        self.used_ns = change.now_ns
        if ids is None or len(ids) == len(call.entries):
            if ids is not None:
                for message_id in ids:
                    self._require_held(call, message_id)
            before_ns = call.expires_ns
            self.leases.move_expiry(change.batch, call, expires_ns)
            change.undo(lambda: setattr(call, "expires_ns", before_ns))
            change.after(lambda: self.shared.lease_expiry.add(expires_ns, self.name, token))
            return token
        rest, taken = self.leases.take(token, ids)
        change.undo(lambda: self.leases.restore(rest, taken))
        part = LeaseCall(self.shared.tokens.next(), call.consumer, call.leased_ns, expires_ns, taken)
        self.leases.add(change.batch, part)
        self.leases.settled(change.batch, rest, rewrite=True)
        change.undo(lambda: self.leases.forget(part))
        change.after(lambda: self.shared.lease_expiry.add(expires_ns, self.name, part.token))
        return part.token

    def _require_held(self, call: LeaseCall, message_id: bytes) -> None:
        if message_id not in call.entries:
            self.leases.take(call.token, [message_id])

    def set_aside(self, change: Change, entries: Sequence[Entry]) -> None:
        """Messages that were fetched leave for a while and come back to their places: only their rows go."""
        self.count(entries, -1)
        self.backing.ack(change, entries)

    def delete(self, change: Change, entries: Sequence[Entry]) -> None:
        """Messages that were fetched are gone for good, with everything that is theirs."""
        self.count(entries, -1)
        self._clear_rows(change, entries, keep_bodies=False)
        if change.fresh:
            fresh = [e for e in entries if e.key in change.fresh]
            self.backing.discard(change, fresh)
            self.shared.content.cancel(change, [e for e in fresh if e.flags & APART])
            entries = [e for e in entries if e.key not in change.fresh]
        self.backing.ack(change, entries)

    def leave(self, change: Change, entries: Sequence[Entry]) -> None:
        """Messages that were fetched leave for another place and take their bodies along."""
        self.count(entries, -1)
        self._clear_rows(change, entries, keep_bodies=True)
        self.backing.ack(change, entries)

    def remove(self, change: Change, entries: Sequence[Entry], *, keep_bodies: bool) -> None:
        """Messages that wait somewhere in the queue are gone, or leave with their bodies."""
        self.count(entries, -1)
        self._clear_rows(change, entries, keep_bodies=keep_bodies)
        self.backing.remove(change, entries)

    def _clear_rows(self, change: Change, entries: Sequence[Entry], *, keep_bodies: bool) -> None:
        """Delete what a message has beside its row."""
        marked = [e for e in entries if e.flags]
        for entry in marked:
            if entry.flags & TIMED:
                change.batch.delete(Family.MESSAGE_EXPIRY, timed_of(entry.key, entry.expires_ns))
        apart = [e for e in marked if e.flags & APART]
        if apart and not keep_bodies:
            self.load_rows(apart, change)
            self.shared.content.release(change, [(rows.body_of(e.row), e.key[-16:], e.flags) for e in apart])

    def load_rows(self, entries: Iterable[Entry], change: Change | None = None) -> None:
        """Read the rows of entries that were handed out and lost theirs."""
        without = [e for e in entries if not e.row]
        if change is not None and change.fresh:
            written = {key: value for _, family, key, value in change.batch.ops if family is Family.MESSAGES}
            for entry in without:
                entry.row = written.get(entry.key, b"")
            without = [e for e in without if not e.row]
        for family, chosen in (
            (Family.MESSAGES, [e for e in without if not e.flags & SPILLED]),
            (Family.TRANSIENT, [e for e in without if e.flags & SPILLED]),
        ):
            for entry, row in zip(chosen, self.shared.store.get_many(family, [e.key for e in chosen]), strict=True):
                assert row is not None, f"the row of a leased message is missing: {entry.key.hex()}"
                entry.row = row

    def count(self, entries: Sequence[Entry], sign: int) -> None:
        stats = self.stats
        if stats.transient or stats.apart or (sign > 0 and [e for e in entries if e.flags & (TRANSIENT | APART)]):
            marked = [e for e in entries if e.flags & (TRANSIENT | APART)]
            transient = [e for e in marked if e.flags & TRANSIENT]
            stats.transient += sign * len(transient)
            stats.transient_bytes += sign * sum(e.size_bytes for e in transient)
            stats.apart += sign * (len(marked) - len(transient))
            entries = [e for e in entries if not e.flags & TRANSIENT]
        stats.messages += sign * len(entries)
        stats.size_bytes += sign * sum([e.size_bytes for e in entries])

    def open(self, entry: Entry, body: bytes | None = None) -> Message:
        """The message of an entry whose row is in memory."""
        message = rows.open_row(entry.key, entry.row, body)
        if self.config.priorities_max:
            message.fairness_key = rows.split_sub_queue(message.fairness_key)[1]
        return message

    def open_whole(self, entry: Entry) -> Message:
        """The message of an entry whose row is in memory, with its body."""
        return self.open(entry, self.shared.content.get(entry) if entry.flags & APART else None)

    def reseal(self, entry: Entry, message: Message) -> bytes:
        """The row of an entry whose message has changed."""
        return rows.rewrap(entry.row, encode_row(message))

    def browse(self, count: int, after: bytes = b"") -> tuple[list[Message], bytes]:
        """Ready messages in key order without changing anything, and the key to go on behind."""
        self.settle_down(self.used_ns)
        entries = self.backing.browse(after, count)
        apart = [e for e in entries if e.flags & APART]
        bodies = dict(zip([e.key for e in apart], self.shared.content.get_many(apart), strict=True))
        return [self.open(e, bodies.get(e.key)) for e in entries], entries[-1].key if entries else after
