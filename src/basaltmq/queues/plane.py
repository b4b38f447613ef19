"""The queue plane: all queues of a store, safe to use from any thread.

    caller ──> Changes (one lock, one batch) ──> Queue (loaded when used) ──> store.write ──> memory follows
                                                                                 └──> group commit, outside the lock

Every operation is one change: it is written whole or not at all, and memory shows it when it is written. Operations of
several queues become one by `with plane.change():`. A publish returns when it is as durable as its queue asks (P1);
what consumers do is written, and need not be synced: a lost ack is delivered again.

This is the face of the plane. What it stands on has files of its own: the lock and the write (changes.py), the queues
in memory (loaded.py), what is due (due.py), operations of many batches (long_operations.py), runtime settings
(throttle_settings.py), those who wait (waiters.py), one queue (queue.py).

Time is the caller's: `run_due(now_ns)` does what is due, a bounded piece per call, and says when to call again;
`on_deadline` tells that the next deadline moved closer.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, suppress
from typing import Self

from basaltmq.errors import BasaltError, InvalidArgumentError, InvalidConfigError, QueueExistsError
from basaltmq.ids import Ids
from basaltmq.queues import fanout
from basaltmq.queues.boot import Places, wipe_transient
from basaltmq.queues.change import Change
from basaltmq.queues.change_runner import Changes
from basaltmq.queues.config import Durability, QueueConfig, encode_config
from basaltmq.queues.content import Content
from basaltmq.queues.draft import Draft
from basaltmq.queues.events.recorder import Listener, Silence
from basaltmq.queues.key_stats import FairnessKey, ThrottleKey, fairness_keys, throttle_keys
from basaltmq.queues.leases.delivery import Delivery
from basaltmq.queues.leases.expiry import LeaseExpiry
from basaltmq.queues.leases.prepared import is_held
from basaltmq.queues.leases.table import Tokens, check_visibility
from basaltmq.queues.lifecycle.dead_letters import DeadLetterRouter
from basaltmq.queues.lifecycle.due import Due
from basaltmq.queues.lifecycle.failures import fail
from basaltmq.queues.lifecycle.reclaim import Reclaim
from basaltmq.queues.lifecycle.redrive import DueNs, Page, Wanted
from basaltmq.queues.lifecycle.timers import Timers
from basaltmq.queues.loaded_queues import LOADED_MAX, LoadedQueues
from basaltmq.queues.long_operations import LongOperations
from basaltmq.queues.message import Message
from basaltmq.queues.quarantine import Quarantine
from basaltmq.queues.queue import Queue, Shared
from basaltmq.queues.ready.budget import MemoryBudget, PagingLimits
from basaltmq.queues.ready.byte_limit import lease_bytes
from basaltmq.queues.recovery.damage import Damage
from basaltmq.queues.runtime_config import RuntimeConfig, Setting, SettingsPage
from basaltmq.queues.scripts.budget import ScriptBudget
from basaltmq.queues.scripts.hooks import HookCounters
from basaltmq.queues.stats import QueueStats
from basaltmq.queues.storage import StoreStorage
from basaltmq.queues.throttle.settings import ThrottleSettings
from basaltmq.queues.transactions.transaction import QueueTransaction
from basaltmq.queues.transactions.work import Find, T
from basaltmq.queues.transactions.xa import QueueXa
from basaltmq.queues.waiters import Listen, Waiter, Waiters
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
        ids: Ids | None = None,
        budget: MemoryBudget | None = None,
        script_budget: ScriptBudget | None = None,
        paging: PagingLimits | None = None,
        loaded_max: int = LOADED_MAX,
        on_deadline: Callable[[], None] | None = None,
    ) -> None:
        settings = RuntimeConfig(StoreStorage.open(store))
        wipe_transient(store)
        self._store = store
        self._clock_ns = clock_ns
        self._waiters = Waiters()
        self._changes = Changes(
            store, commit, clock_ns, written=self._written, follow_up=self._follow_up, failed=self._failed
        )
        self._lock = self._changes.lock
        quarantine = Quarantine(store, clock_ns)
        tokens = Tokens.open(store, quarantine)
        content = Content(store)
        self._shared = Shared(
            store=store,
            ids=ids or Ids(clock_ns),
            content=content,
            quarantine=quarantine,
            reclaim=Reclaim(store, content, quarantine, lambda: self._shared.places.last_ns),
            tokens=tokens,
            places=Places.open(store, quarantine, clock_ns()),
            lease_expiry=LeaseExpiry(store, tokens, quarantine),
            timers=Timers(store, quarantine),
            find=lambda change, name: self._loaded.find_or_make(change, name),
            exists=lambda name: self._loaded.config(name) is not None,
            check_limits=lambda name: self._due.note_over_limit(name),
            budget=budget or MemoryBudget(),
            script_budget=script_budget or ScriptBudget(),
            paging=paging or PagingLimits(),
        )
        self._loaded = LoadedQueues(self._shared, self._waiters, settings, clock_ns, loaded_max)
        self._long = LongOperations(self._changes, self._loaded, self._waiters)
        self._due = Due(
            self._shared,
            self._changes,
            self._loaded,
            self._waiters,
            wake=self._wake,
            delete=self._long.delete,
            on_deadline=on_deadline,
        )
        self.xa = QueueXa.open(store, commit, self, self._lock, clock_ns, quarantine)
        """Branches of distributed transactions over these queues."""
        self._shared.holders = self.xa.holders_of
        self._shared.is_orphan = self.xa.is_orphan
        self._settings = ThrottleSettings(settings, self._shared, self._changes, self._loaded, self._due.tell_deadline)
        self.damage = Damage(store, self._shared, self._changes, self._loaded)
        """Rows in quarantine, and queues that are down."""
        self.damage.settle()

    @property
    def dead_letter_router(self) -> DeadLetterRouter | None:
        """Says where dead letters go; None: to the dead-letter queue of their queue. Called inside a change."""
        return self._shared.route_dead

    @dead_letter_router.setter
    def dead_letter_router(self, route: DeadLetterRouter | None) -> None:
        with self._lock:
            self._shared.route_dead = route

    @property
    def bad_settings(self) -> list[str]:
        """Throttles found at open that cannot be read, each with its reason."""
        return self._settings.faults

    def set_setting(self, key: str, value: str, *, secret: bool = False) -> Setting:
        """Set a runtime setting: a throttle (`throttle.<key>` = rate,burst), or something scripts read."""
        return self._settings.set(key, value, secret=secret)

    def delete_setting(self, key: str) -> bool:
        return self._settings.delete(key)

    def settings(self, prefix: str = "", *, limit: int = 1000, after: str | None = None) -> SettingsPage:
        """Runtime settings as they may be shown."""
        return self._settings.list(prefix, limit=limit, after=after)

    def create(self, config: QueueConfig) -> None:
        """Make a queue, and the dead-letter queue it names if that is missing, in one batch. Durable on return."""

        def make(change: Change) -> None:
            self._loaded.hooks(config)
            if self._loaded.config(config.name) is not None:
                raise QueueExistsError(f"queue {config.name!r} exists; delete it first, or use another name")
            self._loaded.make(change, config)
            dead = config.dead_letter_queue
            if dead is not None and self._loaded.config(dead) is None:
                self._loaded.make(change, QueueConfig(name=dead))

        self._changes.do(make)
        self._changes.sync()

    def update(self, config: QueueConfig) -> None:
        """Give a queue another configuration. Its messages stay, but for those tighter limits have no room for."""

        def change_it(change: Change) -> None:
            queue = self._queue(config.name)
            hooks = self._loaded.hooks(config)
            # Those that wait for their time have their places too, and come back to them.
            has_messages = bool(queue.stats.depth() or queue.stats.delayed)
            if bool(queue.config.priorities_max) != bool(config.priorities_max) and has_messages:
                raise InvalidConfigError(
                    f"queue {config.name!r} has messages; priorities can be turned on or off only while it is empty"
                )
            change.batch.put(Family.QUEUES, queue_key(config.name), encode_config(config))
            self._loaded.arm_unused(change, config)
            if bool(queue.config.priorities_max) == bool(config.priorities_max):
                change.after(lambda: queue.configure(config, hooks))
            else:
                change.after(lambda: self._loaded.unload(config.name))
            change.after(lambda: self._due.note_over_limit(config.name))

        self._changes.do(change_it)
        self._changes.sync()

    def get(self, name: str) -> QueueConfig:
        with self._lock:
            return self._look_at(name).config

    def configs(self, *, after: str = "", count: int = 1000) -> list[QueueConfig]:
        """Configurations in the order of their names, from behind `after`."""
        with self._lock:
            self._changes.require_open()
            found = self._loaded.configs(after, count)
            self.damage.settle()
            return found

    def delete(self, name: str) -> None:
        """Delete a queue with all that is its. Durable on return."""
        self._long.delete(name)
        self._changes.sync()

    def stats(self, name: str) -> dict[str, int]:
        """Counts of a queue."""
        with self._lock:
            if self._loaded.failures.error_of(name) is not None:
                counts = (self._loaded.counts_on_disk(name) or QueueStats()).shown(0, 0)
            else:
                queue = self._look_at(name)
                counts = queue.stats.shown(len(queue.leases), queue.leases.size_bytes)
                self.damage.settle()
            counts["quarantined"] = self._shared.quarantine.count(name)
            return counts

    def has_ready(self, name: str) -> bool:
        """Whether a queue has messages that are neither leased nor delayed."""
        with self._lock:
            return len(self._queue(name)) > 0

    def fairness_keys(self, name: str) -> tuple[int, list[FairnessKey]]:
        """How many fairness keys have something ready, and how they stand (the first of them, if they are many)."""
        with self._lock:
            queue = self._look_at(name)
            found = fairness_keys(queue, self._clock_ns())
            self._line_up_again(queue)
            self.damage.settle()
            return found

    def throttle_keys(self) -> list[ThrottleKey]:
        """How throttles stand (the first of them, if they are many)."""
        with self._lock:
            return throttle_keys(self._shared.buckets, self._shared.throttles, self._clock_ns())

    def script_counters(self, name: str) -> dict[str, HookCounters]:
        """How the queue's scripts fare."""
        with self._lock:
            hooks = self._look_at(name).hooks
            if hooks is None:
                return {}
            named = {"on_enqueue": hooks.on_enqueue, "on_failure": hooks.on_failure}
            return {event: hook.counters for event, hook in named.items() if hook is not None}

    def change(self) -> AbstractContextManager[None]:
        """Make the operations inside one batch. Nothing of them is seen, by anyone, before the end.

        Other threads wait. If anything inside fails nothing happens at all.
        """
        return self._changes.change()

    def transaction(self) -> QueueTransaction:
        """Enqueues and acks over any queues that happen together at its commit, or not at all."""
        return QueueTransaction(self, self._changes.commit)

    def apply(self, operation: Callable[[Change, Find], T]) -> T:
        """Run an operation on any queues as one change. It is written on return; whoever promises more syncs."""
        with self._lock:
            self._changes.require_alone("a transaction")
            return self._changes.do(lambda change: operation(change, self._queue))

    def enqueue(
        self,
        name: str,
        drafts: Sequence[Draft | bytes],
        *,
        durability: Durability | None = None,
        refused: list[int] | None = None,
    ) -> list[bytes]:
        """Add messages; their ids, when they are as durable as asked (by default as the queue's configuration says).

        A queue that is full and rejects raises QueueFullError and takes nothing of the call. With `refused` it takes
        what it has room for, appends the indices of the other drafts there, and their ids are empty.
        """

        def add(change: Change) -> tuple[list[bytes], Durability]:
            queue = self._queue(name)
            level = durability or queue.config.durability
            return queue.enqueue(change, drafts, memory=level is Durability.MEMORY, refused=refused), level

        ids, level = self._changes.do(add)
        if level is Durability.SYNCED:
            self._changes.sync()
        return ids

    def publish(
        self, names: Sequence[str], draft: Draft | bytes, *, durability: Durability | None = None
    ) -> list[bytes]:
        """Add one message to several queues, all or none; its id in each. A body of some size is stored once."""

        def add(change: Change) -> tuple[list[bytes], bool]:
            queues = [self._queue(name) for name in names]
            ids = fanout.publish(queues, change, draft, durability)
            levels = {durability or queue.config.durability for queue in queues}
            return ids, Durability.SYNCED in levels

        ids, wants_sync = self._changes.do(add)
        if wants_sync:
            self._changes.sync()
        return ids

    def publish_many(
        self, names: Sequence[str], drafts: Sequence[Draft], *, durability: Durability | None = None
    ) -> None:
        """Add messages to several queues, all or none. Bodies of some size are stored once each."""

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
        """Up to `count` ready messages, leased; waits up to `wait_ms` for the first. `visibility_ms` 0 lasts until
        it is released or the plane is opened again. Of the bodies the first, of whatever size, and those behind it that
        fit into `size_bytes_max` (portion.py): nothing beyond is read into memory."""
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
                # The thread may be interrupted anywhere from here on; it must not stay in the line.
                self._tell_of_wait()
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
        """The same without waiting, as columns where that is what they are: whoever does not look at messages one by
        one is spared an object for each."""
        if count < 1:
            raise InvalidArgumentError(f"a lease is for 1 message or more, not {count}")
        if visibility_ms is not None:
            check_visibility(visibility_ms)
        bytes_max = lease_bytes(size_bytes_max)
        return self._changes.do(
            lambda change: self._queue(name).lease(change, count, consumer, visibility_ms, bytes_max)
        )

    def _tell_of_wait(self) -> None:
        with self._lock:
            self._due.tell_deadline()

    def listen(self, callback: Listen) -> Callable[[], None]:
        """Call `callback` with a queue's name whenever messages became ready in it, once per change and queue.

        Called from the thread that wrote, with the plane's lock held: it may take a note or hand over to a loop, and
        must not fail. What was ready before is not told. Returns how to stop listening.
        """
        with self._lock:
            return self._waiters.listen(callback)

    def on_ready(self, name: str, wake: Callable[[], None]) -> Callable[[], None]:
        """Call `wake` once when the queue may have something ready, at once if it has; returns how to stop waiting."""
        with self._lock:
            if self._queue(name).may_have_something(self._clock_ns()):
                wake()
                return lambda: None
            number = self._waiters.add(name, wake)
            self._due.tell_deadline()

        def stop() -> None:
            with self._lock:
                self._waiters.remove(name, number)

        return stop

    def record_events(self, listener: Listener | None) -> None:
        """Tell a listener (recorder.py) what happens to messages from here on, or nobody."""
        with self._lock:
            self._shared.events = listener or Silence()

    def deliver(
        self, name: str, drafts: Sequence[Draft | bytes], *, consumer: str = "", visibility_ms: int | None = None
    ) -> list[Delivery]:
        """Hand messages straight to a consumer that waits. An ack inside the same `change` cancels the write."""
        return self._changes.do(lambda change: self._queue(name).deliver(change, drafts, consumer, visibility_ms))

    def ack(self, name: str, token: int, ids: Sequence[bytes] | None = None) -> int:
        """Messages of a lease (all by default) are done."""
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
    ) -> int:
        """Messages of a lease failed; they are retried (after `delay_ms`), or dead-lettered by limit or `reject`."""
        if delay_ms < 0:
            raise InvalidArgumentError(f"a delay is 0 ms or more, not {delay_ms}")

        def run(change: Change) -> int:
            queue = self._queue(name)
            entries = queue.take(change, token, ids)
            fail(queue, change, entries, error, delay_ms=delay_ms, reject=reject)
            return len(entries)

        return self._changes.do(run)

    def release(self, name: str, token: int, ids: Sequence[bytes] | None = None) -> int:
        """Messages of a lease go back to their places; no attempt is counted."""
        return self._changes.do(lambda change: self._queue(name).release(change, token, ids))

    def release_consumer(self, name: str, consumer: str) -> int:
        """All that a consumer holds goes back to its place, as when it disconnects."""

        def run(change: Change) -> int:
            queue = self._queue(name)
            calls = [call.token for call in queue.leases.calls() if call.consumer == consumer and not is_held(call)]
            return sum(queue.release(change, token) for token in calls)

        return self._changes.do(run)

    def extend(
        self, name: str, token: int, visibility_ms: int | None = None, ids: Sequence[bytes] | None = None
    ) -> int:
        """A lease lasts longer; the token to answer with (another one, if only a part is extended)."""
        return self._changes.do(lambda change: self._queue(name).extend(change, token, visibility_ms, ids))

    def browse(self, name: str, count: int = 100, *, after: bytes = b"") -> list[Message]:
        """Ready messages in key order, nothing changed. Page through a queue with `browse_page`."""
        return self.browse_page(name, count, after=after)[0]

    def browse_page(self, name: str, count: int = 100, *, after: bytes = b"") -> tuple[list[Message], bytes]:
        """Ready messages in key order, nothing changed, and what to go on `after`."""
        with self._lock:
            queue = self._look_at(name)
            found = queue.browse(count, after)
            self._line_up_again(queue)
            self.damage.settle()
            return found

    def purge(self, name: str) -> int:
        """Delete everything that is ready; how many that were. Leased and delayed messages stay."""
        return self._long.purge(name)

    def purging(self, name: str) -> Iterator[int]:
        """As `purge`, a page per step; what comes in meanwhile stays. How many messages each page was."""
        return self._long.purging(name)

    def move(self, source: str, target: str, *, count: int | None = None, wanted: Wanted | None = None) -> int:
        """Move ready messages to the end of another queue; how many. Each page is a batch."""
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
        """Return dead letters to the queues they came from (or `to`), attempts reset, at most so many a second.

        `stamp` is added to their headers.
        """
        return self._long.redrive(name, to, count, wanted, rate_per_s, stamp)

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
        """As `redrive`, a page of the queue behind a key; for callers who give others their turn between two."""
        return self._long.redrive_page(name, after, to, wanted, due_ns, stamp)

    def run_due(self, now_ns: int | None = None) -> int | None:
        """Do what is due, a bounded piece of it; when to call again (at or before `now_ns`: at once), None: never."""
        with self._lock:
            self._changes.require_alone("run_due")
            return self._due.run(self._clock_ns() if now_ns is None else now_ns)

    def deadline_ns(self) -> int | None:
        """When something is due next."""
        with self._lock:
            return self._due.deadline_ns()

    def close(self) -> None:
        """Refuse further calls and wake everyone who waits. The store stays open."""
        with self._lock:
            if not self._changes.is_closed:
                self._changes.close()
                self._say_goodbye()
            self._loaded.clear()
            self._waiters.wake_all()

    def _say_goodbye(self) -> None:
        """Write that this is a clean end. A store that cannot be written any more is opened as after a crash."""
        batch = Batch()
        self._loaded.save_all(batch)
        self._shared.places.close(batch)
        with suppress(BasaltError):
            self._store.write(batch)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def _queue(self, name: str) -> Queue:
        """The queue of this name, loaded."""
        self._changes.require_open()
        return self._loaded.require(name)

    def _look_at(self, name: str) -> Queue:
        """The same for whoever reads: nothing follows that would make room for it, so there is made some before."""
        if not self._changes.is_open and self._loaded.peek(name) is None:
            # What does not go stays for another time; it is no failure of the one who reads.
            with suppress(BasaltError):
                self._loaded.evict()
        return self._queue(name)

    def _follow_up(self) -> None:
        """What an operation left to be done: damaged rows to be moved, limits of other queues, memory to be given
        back, deadlines to tell."""
        self.damage.settle()
        self._due.bring_back_to_limits()
        self._loaded.evict()
        self._due.tell_deadline()

    def _failed(self, name: str, error: Exception) -> BasaltError:
        """An unexpected error hit a queue: it is let go, and those who wait at it look again."""
        told = self._loaded.fail(name, error)
        self._waiters.tell(name)
        self._waiters.wake_queue(name)
        return told

    def _line_up_again(self, queue: Queue) -> None:
        """Whoever looked at the whole of a queue took its parked messages out of the line for tokens; a consumer that
        waits tries again, and they are parked again."""
        if queue.throttling is not None:
            self._wake(queue.name)

    def _written(self, change: Change) -> None:
        """Tell those who wait for the queues in which the change made messages ready."""
        for name in change.ready:
            self._wake(name)

    def _wake(self, name: str) -> None:
        self._waiters.tell(name)
        if name in self._waiters:
            queue = self._loaded.peek(name)
            if queue is None:
                self._waiters.wake_queue(name)
            else:
                self._waiters.wake(name, len(queue))
