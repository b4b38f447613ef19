"""One loaded queue: enqueue, lease and settle messages. All rows that an operation touches go into its change's batch.

Parts: backing queue (order of ready messages, what is in memory), `Content` (bodies), `Leases`, and the modules of
`lifecycle` (failures, delays, TTL, limits). The plane does waiting, locking and writing. Not thread-safe: callers hold
the plane's lock.

A queue in memory is a cache of its rows. It is loaded on use and evicted when idle. Leases that exist in memory only
and waiting consumers prevent eviction.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, Final

from basaltmq.clock import NS_PER_MS
from basaltmq.durability import Durability
from basaltmq.errors import CorruptionError, InvalidArgumentError, LimitExceededError
from basaltmq.queues.change import Change
from basaltmq.queues.config import QueueConfig
from basaltmq.queues.draft import FAIRNESS_KEY_DEFAULT, Draft
from basaltmq.queues.entries import rows
from basaltmq.queues.entries.backing import APART, RETURNED, SPILLED, TIMED, BackingQueue, Entry
from basaltmq.queues.entries.plain import Plain
from basaltmq.queues.events.event import ACKED, ENQUEUED
from basaltmq.queues.leases import granting
from basaltmq.queues.leases.delivery import Delivery
from basaltmq.queues.leases.table import FOREVER, LEASE_MAX, LeaseCall, Leases, check_visibility
from basaltmq.queues.lifecycle import dedup, entry_builder, failures, limits, script_results
from basaltmq.queues.lifecycle.delays import delay
from basaltmq.queues.lifecycle.entry_builder import ENQUEUE_MAX, NewEntries
from basaltmq.queues.lifecycle.ttl import expire
from basaltmq.queues.message import Message, encode_row
from basaltmq.queues.plane_context import PlaneContext
from basaltmq.queues.ready.budget import MemoryBudget
from basaltmq.queues.ready.byte_limit import fit
from basaltmq.queues.ready.fair_queue import SUB_QUEUES_MAX
from basaltmq.queues.scripts.hooks import QueueHooks
from basaltmq.queues.stats import DURABLE_FIELDS, QueueStats
from basaltmq.queues.throttle.queue_throttle import QueueThrottle
from basaltmq.store.batch import Batch
from basaltmq.store.families import Family
from basaltmq.store.keys.parts import lp
from basaltmq.store.keys.queues import queue_stats_key, timed_of, transient_counts_key

if TYPE_CHECKING:
    from basaltmq.queues.browsing.scan import Scan

FLOOR_EVERY: Final = 10_000
"""Acks between two updates of the floor. At most this many tombstones are read when the queue is loaded."""

__all__ = ["ENQUEUE_MAX", "Queue", "PlaneContext"]


class Queue:
    """A loaded queue."""

    __slots__ = (
        "_raise_floor_at",
        "_stats_key",
        "account",
        "backing",
        "config",
        "default_prefix",
        "delayed_from",
        "expiry_from",
        "has_returned",
        "has_transient_row",
        "has_unsaved",
        "hooks",
        "leases",
        "name",
        "prefix_bytes",
        "scans",
        "shared",
        "stats",
        "throttling",
        "used_ns",
    )

    def __init__(
        self,
        shared: PlaneContext,
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
        self.scans: list[Scan] = []
        self.throttling: QueueThrottle | None = None
        self.delayed_from = b""
        self.expiry_from = b""
        self._raise_floor_at = stats.acked + FLOOR_EVERY
        self.has_returned = False
        self.has_unsaved = False
        self.has_transient_row = False
        priority = 0 if config.priorities_max else None
        self.default_prefix = rows.prefix_of(self.name, rows.sub_queue(FAIRNESS_KEY_DEFAULT, priority))
        self._stats_key = queue_stats_key(self.name)

    def configure(self, config: QueueConfig, hooks: QueueHooks | None) -> None:
        """Replace the configuration and scripts."""
        self.config = config
        self.hooks = hooks

    def __len__(self) -> int:
        """Number of ready messages."""
        return self.stats.depth() - len(self.leases)

    def ready_bytes(self) -> int:
        return self.stats.depth_bytes() - self.leases.size_bytes

    def touch(self, change: Change) -> None:
        """Register with the change, so that the counts are written with it, or restored if it fails."""
        change.at = self.name
        if not change.has_before(self):
            values = self.stats.values()
            change.undo(lambda: self.stats.restore(values))
            change.before(self, lambda: self._put_stats(change, values))

    def _put_stats(self, change: Change, before: tuple[int, ...]) -> None:
        self.stats.returned_ns = self.leases.returned_ns
        if self.has_transient_row and not self.stats.transient:
            change.batch.delete(Family.TRANSIENT, transient_counts_key(self.name))
            change.after(lambda: setattr(self, "has_transient_row", False))
        if not change.batch and self.stats.values()[:DURABLE_FIELDS] == before[:DURABLE_FIELDS]:
            # Only totals that may be lost in a crash have changed, so they wait for the next write.
            self.has_unsaved = True
            return
        self.has_unsaved = False
        change.batch.put(Family.QUEUE_STATS, self._stats_key, self.stats.encode())

    def save(self, batch: Batch) -> None:
        """Add everything to the batch that memory holds and the rows do not."""
        if self.has_returned:
            self.backing.forget_returned()
        if self.has_unsaved or self.stats.returned_ns != self.leases.returned_ns:
            self.has_unsaved = False
            self.stats.returned_ns = self.leases.returned_ns
            batch.put(Family.QUEUE_STATS, self._stats_key, self.stats.encode())

    def enqueue(
        self,
        change: Change,
        drafts: Sequence[Draft | bytes],
        body_id: bytes = rows.NO_BODY,
        *,
        prepared: bool = False,
        memory: bool | None = None,
    ) -> list[bytes]:
        """Add messages and return their ids. A duplicate within the deduplication window gets the id of the first.

        With `body_id` the drafts' payload is in that shared body. `prepared` skips scripts and limits, which were
        applied when the message was prepared. `memory` makes all messages transient; by default the queue's durability
        decides. One rejected draft fails the call.
        """
        entry_builder.check_count(drafts)
        self.touch(change)
        if self.config.dedup_window_ms is None:
            return self._enqueue(change, drafts, body_id, prepared, memory)
        known = dedup.known(self, change, drafts)
        within = {i: first for i, first in dedup.within(drafts).items() if i not in known}
        repeats = known.keys() | within.keys()
        self.stats.duplicates += len(repeats)
        once = [d for i, d in enumerate(drafts) if i not in repeats]
        made = iter(self._enqueue(change, once, body_id, prepared, memory))
        ids = []
        for index in range(len(drafts)):
            if index in known:
                ids.append(known[index])
            elif index in within:
                ids.append(ids[within[index]])
            else:
                ids.append(next(made))
        if change.refusal is None:
            dedup.remember(self, change, drafts, ids, repeats)
        return ids

    def _enqueue(
        self,
        change: Change,
        drafts: Sequence[Draft | bytes],
        body_id: bytes,
        prepared: bool,
        memory: bool | None,
    ) -> list[bytes]:
        if self.config.on_enqueue_script is not None and not prepared:
            drafts = script_results.on_enqueue(self, drafts)
        ids, entries, delayed, sub = self.build_entries(change, drafts, body_id, memory=memory)
        self.stats.enqueued += len(ids)
        if sub is None and not prepared and not self.backing.has_room_for(entries):
            raise LimitExceededError(
                f"queue {self.name!r} has reached the limit of {SUB_QUEUES_MAX} fairness keys; "
                "consume messages or use fewer keys"
            )
        if self.config.length_max is not None or self.config.bytes_max is not None:
            entries = limits.admit(self, change, [*entries], prepared=prepared)
        self.admit(change, entries, sub)
        if delayed:
            delay(self, change, delayed)
            entries = [*entries, *(entry for entry, _ in delayed)]
        self.shared.events.note(change, ENQUEUED, self, entries)
        return ids

    def deliver(
        self, change: Change, drafts: Sequence[Draft | bytes], consumer: str, visibility_ms: int | None = None
    ) -> list[Delivery]:
        """Add messages and lease them to a consumer in the same change."""
        self.touch(change)
        _, entries, delayed, _ = self.build_entries(change, drafts)
        if delayed:
            raise InvalidArgumentError("a delayed message cannot be delivered at once")
        self.stats.enqueued += len(entries)
        self.count(entries, 1)
        self.backing.publish_delivered(change, entries)
        change.fresh.update(e.key for e in entries)
        self.shared.events.note(change, ENQUEUED, self, entries)
        bodies = self.bodies(change, [e for e in entries if e.flags & APART])
        return granting.grant(self, change, [*entries], consumer, visibility_ms, bodies)

    def admit(self, change: Change, entries: Sequence[Entry], sub: str | None = None) -> None:
        """Admit complete entries: published, returned from a delay, dead-lettered or moved."""
        self.count(entries, 1)
        if sub is None and self.stats.floor_ns and entries:
            # A delayed message returns to its old position, which may be below the floor.
            lowest_ns = int.from_bytes(min([e.key[-24:-16] for e in entries]), "big")
            self.stats.floor_ns = min(self.stats.floor_ns, lowest_ns)
        self.backing.publish(change, entries, sub)
        if entries:
            self.note_ready(change, entries)

    def note_ready(self, change: Change, entries: Sequence[Entry]) -> None:
        """Wake consumers for messages that the change makes ready."""
        change.ready[self.name] = None
        for scan in self.scans:
            change.after(partial(scan.note, entries))

    def build_entries(
        self,
        change: Change,
        drafts: Sequence[Draft | bytes],
        body_id: bytes = rows.NO_BODY,
        *,
        memory: bool | None = None,
    ) -> NewEntries:
        """Build the entries of drafts and all their rows except the message rows."""
        if memory is None:
            memory = self.config.durability is Durability.MEMORY
        return entry_builder.build(self, change, drafts, body_id, memory)

    def entry_of(
        self,
        change: Change,
        message: Message,
        *,
        body_id: bytes = rows.NO_BODY,
        body_bytes: int | None = None,
        shared_body: bool = False,
        transient: bool = False,
    ) -> Entry:
        """Return the entry of a message at its place in this queue, and put its expiry index row if it needs one."""
        return entry_builder.entry_of(
            self,
            change,
            message,
            body_id=body_id,
            body_bytes=body_bytes,
            shared_body=shared_body,
            transient=transient,
        )

    def lease(
        self,
        change: Change,
        count: int,
        consumer: str,
        visibility_ms: int | None = None,
        size_bytes_max: int | None = None,
    ) -> Sequence[Delivery]:
        """Lease up to `count` ready messages: the first, and those after it that fit into `size_bytes_max`."""
        change.at = self.name
        count = min(count, LEASE_MAX, self.leases.room())
        plain = granting.take_plain(self, change, count, size_bytes_max)
        if plain is not None:
            return granting.grant_plain(self, change, plain, consumer, visibility_ms)
        while entries := self.take_ready(change, count, size_bytes_max):
            apart = [e for e in entries if e.flags & APART]
            bodies = self.bodies(change, apart)
            if len(bodies) < len(apart):
                entries = [e for e in entries if not e.flags & APART or e.key in bodies]
            if entries:
                return granting.grant(self, change, entries, consumer, visibility_ms, bodies)
        return []

    def take_ready(self, change: Change, count: int, size_bytes_max: int | None = None) -> list[Entry]:
        """Take up to `count` unexpired messages off the head. They go back if the change fails."""
        ready: list[Entry] = []
        throttling = self._throttling()
        if throttling is not None:
            # Returned messages are older than those parked in this change, so unpark all to restore the order.
            change.undo(lambda: self.unpark_all(change.now_ns))
            woken, size_bytes_max = throttling.woken(change, count, size_bytes_max)
            ready = self.without_expired(change, woken)
        while len(ready) < count and not (ready and size_bytes_max == 0):
            fetched = self.backing.fetch(count - len(ready))
            if not fetched:
                break
            room_bytes = size_bytes_max
            if size_bytes_max is not None:
                fetched, room_bytes = fit(self.backing, fetched, size_bytes_max, is_first=not ready)
            going = fetched if throttling is None else throttling.admit(change, fetched)
            change.undo(partial(self.backing.put_back, going))
            going = self.without_expired(change, going)
            ready += going
            if room_bytes == 0 and len(going) == len(fetched):
                break
            if size_bytes_max is not None:
                # Parked and expired messages use no room.
                size_bytes_max = max(0, size_bytes_max - sum([e.size_bytes for e in going]))
        return ready

    def without_expired(self, change: Change, entries: list[Entry]) -> list[Entry]:
        """Expire those fetched messages whose time is up. Return the others."""
        if not [e for e in entries if e.expires_ns]:
            return entries
        now_ns = change.now_ns
        expired = [e for e in entries if e.expires_ns and e.expires_ns <= now_ns]
        if not expired:
            return entries
        expire(self, change, expired)
        return [e for e in entries if not e.expires_ns or e.expires_ns > now_ns]

    def _throttling(self) -> QueueThrottle | None:
        """Return the holder of throttled messages; None until the first throttle is set."""
        if self.throttling is None and self.shared.throttles:
            self.throttling = QueueThrottle(self, self.shared.buckets)
        return self.throttling

    def may_have_ready(self, now_ns: int) -> bool:
        """Whether a lease may succeed: messages are ready and not all known ones wait for tokens."""
        if len(self) == 0:
            return False
        if self.throttling is None or not len(self.throttling):
            return True
        token_ns = self.throttling.next_wake_ns()
        return token_ns is not None and token_ns <= now_ns

    def unpark_all(self, now_ns: int) -> None:
        """Return all parked messages to the backing queue before a full scan."""
        if self.throttling is not None:
            self.throttling.unpark(now_ns)

    def bodies(self, change: Change | None, entries: list[Entry]) -> dict[bytes, bytes]:
        """Return the bodies stored outside the rows, by message key, including bodies that this change adds. Messages
        with a missing or truncated body are noted for quarantine and left out."""
        if not entries:
            return {}
        found: dict[bytes, bytes] = {}
        ops = () if change is None else change.batch.ops
        written = {key: value for _, family, key, value in ops if family is Family.MESSAGE_CONTENT and value}
        if written:
            found = {e.key: written[body_id] for e in entries if (body_id := rows.body_of(e.row)) in written}
            entries = [e for e in entries if e.key not in found]
        for entry, body in zip(entries, self.shared.content.find_many(entries), strict=True):
            if isinstance(body, CorruptionError):
                self.shared.quarantine.note(Family.MESSAGES, entry.key, entry.row, str(body))
            else:
                found[entry.key] = body
        return found

    def lease_until(self, now_ns: int, visibility_ms: int | None) -> int:
        if visibility_ms is None:
            visibility_ms = self.config.visibility_timeout_ms
        check_visibility(visibility_ms)
        return now_ns + visibility_ms * NS_PER_MS if visibility_ms else FOREVER

    def ack(self, change: Change, token: int, ids: Sequence[bytes] | None = None) -> int:
        """Acknowledge messages of a lease (all by default). Return their number."""
        call, entries = self._settle(change, token, ids)
        self.touch(change)
        self.used_ns = change.now_ns
        self.leases.settled(change.batch, call, rewrite=False)
        if call in change.marks and call.is_settled:
            self.leases.cancel(change, call)
        self.delete(change, entries)
        self.stats.acked += len(entries)
        self.shared.events.note(change, ACKED, self, entries, call.consumer)
        if self.stats.acked >= self._raise_floor_at:
            change.last(self, self.raise_floor)
        return len(entries)

    def raise_floor(self) -> None:
        """Record the lowest enqueue time of a message, so that loading the queue skips the tombstones below it."""
        self._raise_floor_at = self.stats.acked + FLOOR_EVERY
        if len(self.leases) > FLOOR_EVERY or (self.throttling is not None and len(self.throttling)):
            return
        low = self.backing.floor()
        if low is None:
            low = (self.shared.enqueue_clock.last_ns + 1).to_bytes(8, "big")
        low = min([low, *[key[-24:-16] for key in self.leases.all_keys()]])
        self.stats.floor_ns = max(self.stats.floor_ns, int.from_bytes(low, "big"))

    def take(self, change: Change, token: int, ids: Sequence[bytes] | None) -> list[Entry]:
        """Remove messages from a lease without acknowledging them, and update the lease row. Their rows may not be in
        memory."""
        call, entries = self._settle(change, token, ids)
        self.touch(change)
        self.leases.settled(change.batch, call, rewrite=True)
        return list(entries)

    def _settle(self, change: Change, token: int, ids: Sequence[bytes] | None) -> tuple[LeaseCall, Sequence[Entry]]:
        whole = self.leases.take_plain(token, ids)
        if whole is not None:
            call, plain, all_ids = whole
            self.leases.leave(change, all_ids)
            change.undo(lambda: self.leases.restore_plain(call, plain, all_ids))
            change.after(lambda: self.shared.lease_expiry.remove(token))
            return call, plain
        call, taken = self.leases.take(token, ids)
        self.leases.leave(change, taken)
        change.undo(lambda: self.leases.restore(call, taken))
        if call.is_settled:
            change.after(lambda: self.shared.lease_expiry.remove(token))
        return call, list(taken.values())

    def release(self, change: Change, token: int, ids: Sequence[bytes] | None = None) -> int:
        """Return messages of a lease (all by default) to their places. No attempt is counted. Return their number."""
        entries = self.take(change, token, ids)
        self.return_ready(change, entries)
        return len(entries)

    def return_ready(self, change: Change, entries: list[Entry]) -> None:
        """Return unmodified messages to their places; expire those whose time is up."""
        now_ns = change.now_ns
        expired = [e for e in entries if e.expires_ns and e.expires_ns <= now_ns]
        if expired:
            expire(self, change, self.load_rows(expired))
            entries = [e for e in entries if not e.expires_ns or e.expires_ns > now_ns]
        self.has_returned = True
        if self.config.delivery_limit is None:
            for entry in entries:
                entry.flags |= RETURNED
        else:
            entries = failures.count_returns(self, change, entries, self.config.delivery_limit)
        self.requeue(change, entries)

    def requeue(self, change: Change, entries: list[Entry]) -> None:
        """Return messages to their places, and trim the queue if it exceeds its limits."""
        self.backing.requeue(change, entries)
        if entries:
            self.note_ready(change, entries)
            if self.config.length_max is not None or self.config.bytes_max is not None:
                change.after(lambda: self.shared.check_limits(self.name))

    def extend(
        self, change: Change, token: int, visibility_ms: int | None = None, ids: Sequence[bytes] | None = None
    ) -> int:
        """Extend a lease to `visibility_ms` from now. Return its token.

        Extending a part of the messages splits the lease, and the part gets a new token.
        """
        call = self.leases.require(token)
        self.touch(change)
        expires_ns = self.lease_until(change.now_ns, visibility_ms)
        self.used_ns = change.now_ns
        if ids is None or len(ids) == len(call.entries):
            if ids is not None:
                for message_id in ids:
                    if message_id not in call.entries:
                        self.leases.take(token, [message_id])
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

    def set_aside(self, change: Change, entries: Sequence[Entry]) -> None:
        """Remove the rows of fetched messages that return to their places after a retry delay."""
        self.count(entries, -1)
        self.backing.ack(change, entries)

    def delete(self, change: Change, entries: Sequence[Entry]) -> None:
        """Delete fetched messages for good, with all their rows and bodies."""
        self.count(entries, -1)
        self._clear_rows(change, entries, keep_bodies=False)
        if change.fresh:
            fresh = [e for e in entries if e.key in change.fresh]
            self.backing.discard(change, fresh)
            self.shared.content.cancel(change, [e for e in fresh if e.flags & APART])
            entries = [e for e in entries if e.key not in change.fresh]
        self.backing.ack(change, entries)

    def leave(self, change: Change, entries: Sequence[Entry]) -> None:
        """Remove fetched messages that move to another queue. Their bodies stay."""
        self.count(entries, -1)
        self._clear_rows(change, entries, keep_bodies=True)
        self.backing.ack(change, entries)

    def remove(self, change: Change, entries: Sequence[Entry], *, keep_bodies: bool) -> None:
        """Remove messages from anywhere in the queue; `keep_bodies` if they move elsewhere."""
        self.count(entries, -1)
        self._clear_rows(change, entries, keep_bodies=keep_bodies)
        self.backing.remove(change, entries)

    def _clear_rows(self, change: Change, entries: Sequence[Entry], *, keep_bodies: bool) -> None:
        """Delete the expiry index rows and, unless `keep_bodies`, the bodies of messages."""
        if isinstance(entries, Plain) and not entries.flags:
            return
        if not [e for e in entries if e.flags]:
            return
        marked = [e for e in entries if e.flags]
        for entry in marked:
            if entry.flags & TIMED:
                change.batch.delete(Family.MESSAGE_EXPIRY, timed_of(entry.key, entry.expires_ns))
        apart = [e for e in marked if e.flags & APART]
        if apart and not keep_bodies:
            apart = self.load_rows(apart, change, leaving=True)
            self.shared.content.release(change, [(rows.body_of(e.row), e.key[-16:], e.flags) for e in apart])

    def load_rows(
        self, entries: Sequence[Entry], change: Change | None = None, *, leaving: bool = False
    ) -> list[Entry]:
        """Read the rows of entries whose row is not in memory. Return the entries that have a row.

        The others are noted for quarantine, unless they are `leaving` for good.
        """
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
                fault = rows.fault_of(entry.key, row)
                if fault is None:
                    entry.row = row or b""
                elif not leaving:
                    self.shared.quarantine.note(family, entry.key, row, fault)
        return [e for e in entries if e.row]

    def count(self, entries: Sequence[Entry], sign: int) -> None:
        self.stats.count(entries, sign)

    def open(self, entry: Entry, body: bytes | None = None) -> Message:
        """Decode the message of an entry whose row is in memory."""
        message = rows.open_row(entry.key, entry.row, body)
        if self.config.priorities_max:
            message.fairness_key = rows.split_sub_queue(message.fairness_key)[1]
        return message

    def reseal(self, entry: Entry, message: Message) -> bytes:
        """Encode the row of an entry after its message has changed."""
        return rows.rewrap(entry.row, encode_row(message))
