"""The queue plane: the thread-safe API to all queues of a store.

    caller ──> ChangeRunner (one lock, one batch) ──> Queue (loaded on use) ──> store.write ──> update memory
                                                                                 └──> group commit, outside the lock

Every operation is one change, written completely or not at all. It becomes visible in memory after the write. `with
plane.change():` merges operations on several queues into one change. A publish returns when it is as durable as its
queue's configuration requires (P1). Consumer operations are written without an fsync: after a crash, a message with a
lost ack is redelivered.

The plane delegates to `ChangeRunner` (lock and write), `LoadedQueues` (queues in memory), `Due` (timed work),
`LongOperations` (many batches), `ThrottleSettings` (runtime settings), `Waiters` (waiting consumers) and `Queue`.

The plane has no timer thread. `run_due(now_ns)` does a bounded amount of due work and returns when to call it again.
`on_deadline` is called when the next deadline moves closer.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, suppress
from typing import Self

from basaltmq.durability import Durability
from basaltmq.errors import BasaltError, InvalidArgumentError, InvalidConfigError, QueueExistsError
from basaltmq.ids import Ids
from basaltmq.queues import fanout
from basaltmq.queues.boot import EnqueueClock, check_version, wipe_transient
from basaltmq.queues.browsing.readers import Readers
from basaltmq.queues.change import Change
from basaltmq.queues.change_runner import ChangeRunner
from basaltmq.queues.config import QueueConfig, encode_config
from basaltmq.queues.content import Content
from basaltmq.queues.damage import Damage
from basaltmq.queues.draft import Draft
from basaltmq.queues.due import Due
from basaltmq.queues.entries.quarantine import Quarantine
from basaltmq.queues.events.recorder import Listener, NoListener
from basaltmq.queues.key_stats import FairnessKey, ThrottleKey, fairness_keys, throttle_keys
from basaltmq.queues.leases.delivery import Delivery
from basaltmq.queues.leases.expiry import LeaseExpiry
from basaltmq.queues.leases.table import Tokens, check_visibility
from basaltmq.queues.leases.waiters import Listen, Waiter, Waiters
from basaltmq.queues.lifecycle.dead_letters import DeadLetterRouter
from basaltmq.queues.lifecycle.failures import Edit, fail
from basaltmq.queues.lifecycle.reclaim import Reclaim
from basaltmq.queues.lifecycle.redrive import DueNs, Page, Wanted
from basaltmq.queues.lifecycle.timers import Timers
from basaltmq.queues.loaded_queues import LOADED_MAX, LoadedQueues
from basaltmq.queues.long_operations import LongOperations
from basaltmq.queues.message import Message
from basaltmq.queues.queue import PlaneContext, Queue
from basaltmq.queues.ready.budget import MemoryBudget, PagingLimits
from basaltmq.queues.ready.byte_limit import lease_bytes
from basaltmq.queues.runtime_config import RuntimeConfig, Setting, SettingsPage
from basaltmq.queues.scripts.budget import ScriptBudget
from basaltmq.queues.scripts.hooks import HookCounters
from basaltmq.queues.stats import QueueStats
from basaltmq.queues.throttle_settings import ThrottleSettings
from basaltmq.queues.transactions.transaction import QueueTransaction
from basaltmq.queues.transactions.work import Find, T
from basaltmq.queues.transactions.xa import QueueXa
from basaltmq.store.api import Store
from basaltmq.store.batch import Batch
from basaltmq.store.families import Family
from basaltmq.store.keys.queues import queue_key
from basaltmq.store.sync.group_commit import GroupCommit


class QueuePlane:
    """All queues of a store."""

    def __init__(
        self,
        store: Store,
        commit: GroupCommit,
        *,
        clock_ns: Callable[[], int] = time.time_ns,
        budget: MemoryBudget | None = None,
        script_budget: ScriptBudget | None = None,
        paging: PagingLimits | None = None,
        loaded_max: int = LOADED_MAX,
        on_deadline: Callable[[], None] | None = None,
    ) -> None:
        check_version(store)
        settings = RuntimeConfig(store)
        wipe_transient(store)
        self._store = store
        self._clock_ns = clock_ns
        self._waiters = Waiters()
        self._changes = ChangeRunner(
            store, commit, clock_ns, written=self._written, follow_up=self._follow_up, failed=self._failed
        )
        self._lock = self._changes.lock
        quarantine = Quarantine(store, clock_ns)
        tokens = Tokens.open(store, quarantine)
        content = Content(store)
        self._shared = PlaneContext(
            store=store,
            ids=Ids(clock_ns),
            content=content,
            quarantine=quarantine,
            reclaim=Reclaim(store, content, quarantine, lambda: self._shared.enqueue_clock.last_ns),
            tokens=tokens,
            enqueue_clock=EnqueueClock.open(store, quarantine, clock_ns()),
            lease_expiry=LeaseExpiry(store, tokens, quarantine),
            timers=Timers(store, quarantine),
            find=lambda change, name: self._loaded.find_or_create(change, name),
            exists=lambda name: self._loaded.config(name) is not None,
            check_limits=lambda name: self._due.note_over_limit(name),
            budget=budget or MemoryBudget(),
            script_budget=script_budget or ScriptBudget(),
            paging=paging or PagingLimits(),
        )
        self._loaded = LoadedQueues(self._shared, self._waiters, settings, clock_ns, loaded_max)
        self._long = LongOperations(self._changes, self._loaded, self._waiters)
        parts = (self._shared, self._changes, self._loaded, self._waiters)
        self._due = Due(*parts, wake=self._wake, delete=self._long.delete, on_deadline=on_deadline)
        self.xa = QueueXa.open(store, commit, self, self._lock, clock_ns, quarantine)
        """Branches of distributed transactions over these queues."""
        self._shared.holders = self.xa.holders_of
        self._shared.is_orphan = self.xa.is_orphan
        self._settings = ThrottleSettings(settings, self._shared, self._changes, self._loaded, self._due.announce_due)
        self.damage = Damage(store, self._shared, self._changes, self._loaded)
        """Quarantined rows and failed queues."""
        self.readers = Readers(self._changes, self._queue_for_read, self._was_read, clock_ns)
        self.damage.settle()

    @property
    def dead_letter_router(self) -> DeadLetterRouter | None:
        """Chooses the targets of dead letters, inside a change. None: the dead-letter queue of the message's queue."""
        return self._shared.route_dead

    @dead_letter_router.setter
    def dead_letter_router(self, route: DeadLetterRouter | None) -> None:
        with self._lock:
            self._shared.route_dead = route

    @property
    def bad_settings(self) -> list[str]:
        """Throttles that could not be read at open, each with the reason."""
        return self._settings.faults

    def set_setting(self, key: str, value: str, *, secret: bool = False) -> Setting:
        """Set a runtime setting: a throttle (`throttle.<key>` = rate,burst), or a value for scripts."""
        return self._settings.set(key, value, secret=secret)

    def delete_setting(self, key: str) -> bool:
        return self._settings.delete(key)

    def settings(self, prefix: str = "", *, limit: int = 1000, after: str | None = None) -> SettingsPage:
        """Return runtime settings with secrets masked."""
        return self._settings.list(prefix, limit=limit, after=after)

    def create(self, config: QueueConfig) -> None:
        """Create a queue, and its dead-letter queue if that is missing, in one batch. Durable on return."""

        def make(change: Change) -> None:
            self._loaded.hooks(config)
            if self._loaded.config(config.name) is not None:
                raise QueueExistsError(f"queue {config.name!r} exists; delete it first, or use another name")
            self._loaded.create(change, config)
            dead = config.dead_letter_queue
            if dead is not None and self._loaded.config(dead) is None:
                self._loaded.create(change, QueueConfig(name=dead))

        self._changes.do(make)
        self._changes.sync()

    def update(self, config: QueueConfig) -> None:
        """Change the configuration of a queue. Only messages beyond tighter limits are removed. Durable on return."""

        def change_it(change: Change) -> None:
            queue = self._queue(config.name)
            hooks = self._loaded.hooks(config)
            # Delayed messages keep their enqueue times, and return to their old positions.
            has_messages = bool(queue.stats.depth() or queue.stats.delayed)
            if bool(queue.config.priorities_max) != bool(config.priorities_max) and has_messages:
                raise InvalidConfigError(
                    f"queue {config.name!r} has messages; priorities can be turned on or off only while it is empty"
                )
            change.batch.put(Family.QUEUES, queue_key(config.name), encode_config(config))
            self._loaded.set_unused_timer(change, config)
            if bool(queue.config.priorities_max) == bool(config.priorities_max):
                change.after(lambda: queue.configure(config, hooks))
            else:
                change.after(lambda: self._loaded.unload(config.name))
            change.after(lambda: self._due.note_over_limit(config.name))

        self._changes.do(change_it)
        self._changes.sync()

    def get(self, name: str) -> QueueConfig:
        with self._lock:
            return self._queue_for_read(name).config

    def configs(self, *, after: str = "", count: int = 1000) -> list[QueueConfig]:
        """Return configurations ordered by name, starting after `after`."""
        with self._lock:
            self._changes.require_open()
            found = self._loaded.configs(after, count)
            self.damage.settle()
            return found

    def delete(self, name: str) -> None:
        """Delete a queue with all its messages. Durable on return."""
        self._long.delete(name)
        self._changes.sync()

    def stats(self, name: str) -> dict[str, int]:
        """Return the counts of a queue by name."""
        with self._lock:
            if self._loaded.failures.error_of(name) is not None:
                counts = (self._loaded.counts_on_disk(name) or QueueStats()).shown(0, 0)
            else:
                queue = self._queue_for_read(name)
                counts = queue.stats.shown(len(queue.leases), queue.leases.size_bytes)
                self.damage.settle()
            counts["quarantined"] = self._shared.quarantine.count(name)
            return counts

    def backlog(self, name: str) -> tuple[int, int]:
        """Return the number and bytes of the messages that are neither leased nor delayed."""
        with self._lock:
            queue = self._queue(name)
            return len(queue), queue.ready_bytes()

    def fairness_keys(self, name: str) -> tuple[int, list[FairnessKey]]:
        """Return how many fairness keys have ready messages, and statistics of the first `KEYS_MAX` of them."""
        with self._lock:
            queue = self._queue_for_read(name)
            found = fairness_keys(queue, self._clock_ns())
            self._was_read(queue)
            return found

    def throttle_keys(self) -> list[ThrottleKey]:
        """Return the state of the first `KEYS_MAX` throttles."""
        with self._lock:
            return throttle_keys(self._shared.buckets, self._shared.throttles, self._clock_ns())

    def script_counters(self, name: str) -> dict[str, HookCounters]:
        """Return the counters of the queue's scripts, by event."""
        with self._lock:
            hooks = self._queue_for_read(name).hooks
            if hooks is None:
                return {}
            named = {"on_enqueue": hooks.on_enqueue, "on_failure": hooks.on_failure}
            return {event: hook.counters for event, hook in named.items() if hook is not None}

    def change(self) -> AbstractContextManager[None]:
        """Merge the operations inside into one batch, visible at the end. If one fails, none takes effect. Other
        threads wait."""
        return self._changes.change()

    def transaction(self) -> QueueTransaction:
        """Return a transaction: enqueues and acks over any queues that take effect together at its commit."""
        return QueueTransaction(self, self._changes.commit)

    def apply(self, operation: Callable[[Change, Find], T]) -> T:
        """Run an operation on any queues as one change, written on return. The caller syncs if it must be durable."""
        with self._lock:
            self._changes.require_alone("a transaction")
            return self._changes.do(lambda change: operation(change, self._queue))

    def enqueue(
        self, name: str, drafts: Sequence[Draft | bytes], *, durability: Durability | None = None
    ) -> list[bytes]:
        """Add messages and return their ids, when they are as durable as `durability` (default: the queue's) requires.

        A full queue that rejects raises QueueFullError and adds nothing.
        """

        def add(change: Change) -> tuple[list[bytes], Durability]:
            queue = self._queue(name)
            level = durability or queue.config.durability
            return queue.enqueue(change, drafts, memory=level is Durability.MEMORY), level

        ids, level = self._changes.do(add)
        if level is Durability.SYNCED:
            self._changes.sync()
        return ids

    def publish(
        self, names: Sequence[str], draft: Draft | bytes, *, durability: Durability | None = None
    ) -> list[bytes]:
        """Add one message to several queues, all or none. Return its id in each. Large bodies are stored once."""

        def add(change: Change) -> tuple[list[bytes], bool]:
            queues = [self._queue(name) for name in names]
            ids = fanout.publish(queues, change, draft, durability)
            return ids, Durability.SYNCED in {durability or queue.config.durability for queue in queues}

        ids, wants_sync = self._changes.do(add)
        if wants_sync:
            self._changes.sync()
        return ids

    def publish_many(
        self, names: Sequence[str], drafts: Sequence[Draft], *, durability: Durability | None = None
    ) -> None:
        """Add messages to several queues, all or none. Large bodies are stored once."""

        def add(change: Change) -> bool:
            queues = [self._queue(name) for name in names]
            fanout.publish_many(queues, change, drafts, durability)
            return Durability.SYNCED in {durability or queue.config.durability for queue in queues}

        if self._changes.do(add):
            self._changes.sync()

    def lease(
        self,
        name: str,
        count: int = 1,
        *,
        consumer: str = "",
        visibility_ms: int | None = None,
        wait_ms: int = 0,
        size_bytes_max: int | None = None,
    ) -> list[Delivery]:
        """Lease up to `count` ready messages; wait up to `wait_ms` for the first.

        `visibility_ms` 0 means that the lease lasts until it is released or the plane is reopened. The result holds the
        first body, of any size, and those after it that fit into `size_bytes_max`; no more is read into memory.
        """
        until_s = time.monotonic() + wait_ms / 1000
        while True:
            with self._lock:
                deliveries = self.lease_ready(
                    name, count, consumer=consumer, visibility_ms=visibility_ms, size_bytes_max=size_bytes_max
                )
                left_s = until_s - time.monotonic()
                if deliveries or left_s <= 0:
                    return list(deliveries)
                waiter = Waiter()
                number = self._waiters.add(name, waiter.wake)
            try:
                # An interrupt may arrive from here on, and the waiter must still be removed.
                with self._lock:
                    self._due.announce_due()
                waiter.wait(left_s)
            finally:
                with self._lock:
                    self._waiters.remove(name, number)

    def lease_ready(
        self,
        name: str,
        count: int,
        *,
        consumer: str = "",
        visibility_ms: int | None = None,
        size_bytes_max: int | None = None,
    ) -> Sequence[Delivery]:
        """Like `lease`, without waiting. Plain messages come as columns, which saves one object per message."""
        if count < 1:
            raise InvalidArgumentError(f"count of a lease must be 1 or more, not {count}")
        if visibility_ms is not None:
            check_visibility(visibility_ms)
        bytes_max = lease_bytes(size_bytes_max)
        return self._changes.do(
            lambda change: self._queue(name).lease(change, count, consumer, visibility_ms, bytes_max)
        )

    def listen(self, callback: Listen) -> Callable[[], None]:
        """Call `callback` with a queue's name whenever messages become ready in it, once per change and queue.

        The writing thread calls it with the plane's lock held. It may record the name or schedule a callback on a loop,
        and must not fail. Return a function that stops it."""
        with self._lock:
            return self._waiters.listen(callback)

    def on_ready(self, name: str, wake: Callable[[], None]) -> Callable[[], None]:
        """Call `wake` once when the queue may have ready messages, possibly at once. Return a function that cancels."""
        with self._lock:
            if self._queue(name).may_have_ready(self._clock_ns()):
                wake()
                return lambda: None
            number = self._waiters.add(name, wake)
            self._due.announce_due()

        def stop() -> None:
            with self._lock:
                self._waiters.remove(name, number)

        return stop

    def record_events(self, listener: Listener | None) -> None:
        """Send message events to `listener` (`events/recorder.py`) from now on; None stops them."""
        with self._lock:
            self._shared.events = listener or NoListener()

    def deliver(
        self, name: str, drafts: Sequence[Draft | bytes], *, consumer: str = "", visibility_ms: int | None = None
    ) -> list[Delivery]:
        """Publish messages and lease them to a waiting consumer. An ack inside the same `change` cancels the write."""
        return self._changes.do(lambda change: self._queue(name).deliver(change, drafts, consumer, visibility_ms))

    def write_rows(self, rows: Sequence[tuple[Family, bytes, bytes | None]]) -> None:
        """Put rows of other families, or delete those without a value. Inside `change` they join its batch."""
        self._changes.do(lambda change: change.batch.put_or_delete(rows))

    def ack(self, name: str, token: int, ids: Sequence[bytes] | None = None) -> int:
        """Acknowledge messages of a lease (all by default)."""
        return self._changes.do(lambda change: self._queue(name).ack(change, token, ids))

    def nack(
        self,
        name: str,
        token: int,
        ids: Sequence[bytes] | None = None,
        *,
        error: str = "",
        delay_ms: int = 0,
        reject: bool = False,
        edit: Edit | None = None,
        is_failure: bool = True,
    ) -> int:
        """Negatively acknowledge messages of a lease: retry after `delay_ms`, or dead-letter at a limit or with
        `reject`. `edit` changes the properties. Without `is_failure` no attempt is counted."""
        if delay_ms < 0:
            raise InvalidArgumentError(f"delay_ms must be 0 or more, not {delay_ms}")

        def run(change: Change) -> int:
            queue = self._queue(name)
            entries = queue.take(change, token, ids)
            fail(queue, change, entries, error, delay_ms=delay_ms, reject=reject, edit=edit, is_failure=is_failure)
            return len(entries)

        return self._changes.do(run)

    def release(self, name: str, token: int, ids: Sequence[bytes] | None = None) -> int:
        """Return messages of a lease to their places. No attempt is counted."""
        return self._changes.do(lambda change: self._queue(name).release(change, token, ids))

    def extend(
        self, name: str, token: int, visibility_ms: int | None = None, ids: Sequence[bytes] | None = None
    ) -> int:
        """Extend a lease. Return its token, which is a new one if only a part is extended."""
        return self._changes.do(lambda change: self._queue(name).extend(change, token, visibility_ms, ids))

    def browse(self, name: str, count: int = 100, *, after: bytes = b"") -> list[Message]:
        """Return ready messages in key order, unchanged. Use `browse_page` to page through a queue."""
        return self.browse_page(name, count, after=after)[0]

    def browse_page(self, name: str, count: int = 100, *, after: bytes = b"") -> tuple[list[Message], bytes]:
        """Return ready messages in key order, unchanged, and the `after` value of the next page."""
        return self.readers.page(name, count, after)

    def purge(self, name: str) -> int:
        """Delete all ready messages and return their number. Leased and delayed messages stay."""
        return self._long.purge(name)

    def purging(self, name: str) -> Iterator[int]:
        """Like `purge`, one page per step. Yields the number of messages of each page. Later arrivals stay."""
        return self._long.purging(name)

    def move(self, source: str, target: str, *, count: int | None = None, wanted: Wanted | None = None) -> int:
        """Move ready messages to the end of another queue, one batch per page. Return their number."""
        return self._long.move(source, target, count, wanted)

    def redrive(
        self,
        name: str,
        *,
        to: str | None = None,
        count: int | None = None,
        wanted: Wanted | None = None,
        rate_per_s: float | None = None,
        stamp: Mapping[str, str] | None = None,
    ) -> int:
        """Return dead letters to their original queues (or `to`) with attempts reset and `stamp` as headers."""
        return self._long.redrive(name, to, count, wanted, rate_per_s, stamp)

    def redriving(
        self, name: str, *, to: str | None = None, count: int | None = None, wanted: Wanted | None = None
    ) -> Iterator[int]:
        """Like `redrive`, one page per step. Yields the number of messages of each page."""
        return self._long.redriving(name, to, count, wanted, None)

    def redrive_page(
        self,
        name: str,
        after: bytes,
        *,
        to: str | None,
        wanted: Wanted,
        due_ns: DueNs | None = None,
        stamp: Mapping[str, str] | None = None,
    ) -> Page:
        """Redrive one page of the queue after a key."""
        return self._long.redrive_page(name, after, to, wanted, due_ns, stamp)

    def run_due(self, now_ns: int | None = None) -> int | None:
        """Do a bounded amount of due work. Return when to call again (`now_ns` or earlier: at once), or None."""
        with self._lock:
            self._changes.require_alone("run_due")
            return self._due.run(self._clock_ns() if now_ns is None else now_ns)

    def deadline_ns(self) -> int | None:
        """Return when the next work is due; None: never."""
        with self._lock:
            return self._due.deadline_ns()

    def close(self) -> None:
        """Refuse further calls and wake all waiters. The store stays open."""
        with self._lock:
            if not self._changes.is_closed:
                self._changes.close()
                self._record_clean_shutdown()
            self._loaded.clear()
            self._waiters.wake_all()

    def _record_clean_shutdown(self) -> None:
        """Record a clean shutdown. If the store cannot be written, the next open recovers as after a crash."""
        batch = Batch()
        self._loaded.save_all(batch)
        self._shared.enqueue_clock.close(batch)
        with suppress(BasaltError):
            self._store.write(batch)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def _queue(self, name: str) -> Queue:
        """Return the queue, loading it if necessary."""
        self._changes.require_open()
        return self._loaded.require(name)

    def _queue_for_read(self, name: str) -> Queue:
        """Like `_queue`, for reads. Reads trigger no eviction afterwards, so evict first."""
        if not self._changes.is_open and self._loaded.peek(name) is None:
            # A failed eviction is retried later and must not fail the read.
            with suppress(BasaltError):
                self._loaded.evict()
        return self._queue(name)

    def _follow_up(self) -> None:
        """Finish an operation: quarantine damaged rows, enforce limits of other queues, evict, announce deadlines."""
        self.damage.settle()
        self._due.bring_back_to_limits()
        self._loaded.evict()
        self._due.announce_due()

    def _failed(self, name: str, error: Exception) -> BasaltError:
        """Unload a queue after an unexpected error, and wake its waiters so that they retry."""
        failure = self._loaded.fail(name, error)
        self._waiters.notify(name)
        self._waiters.wake_queue(name)
        return failure

    def _was_read(self, queue: Queue) -> None:
        """Wake consumers, because the read has unparked throttled messages; the next lease parks them again. Quarantine
        damaged rows."""
        if queue.throttling is not None:
            self._wake(queue.name)
        self.damage.settle()

    def _written(self, change: Change) -> None:
        """Wake waiters of the queues in which the change made messages ready."""
        for name in change.ready:
            self._wake(name)

    def _wake(self, name: str) -> None:
        self._waiters.notify(name)
        if name in self._waiters:
            queue = self._loaded.peek(name)
            if queue is None:
                self._waiters.wake_queue(name)
            else:
                self._waiters.wake(name, len(queue))
