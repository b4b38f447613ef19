"""The queue plane: all queues of a store, safe to use from any thread.

    caller ──> one lock ──> Queue (loaded when used) ──> Change ──> one batch ──> store.write ──> memory follows
                                                                         └──> group commit, outside the lock

Every operation is one change: it is written whole or not at all, and memory shows it when it is written. Operations of
several queues become one by `with plane.change():`. A publish returns when it is as durable as its queue asks (P1);
what consumers do is written, and need not be synced: a lost ack is delivered again.

Queues are caches of their rows. Up to `loaded_max` are kept, the least recently used go, if nobody waits at them and
they hold neither leases nor transient messages. So an idle queue costs disk, not memory.

Time is the caller's: `run_due(now_ns)` does what is due, a bounded piece per call, and says when to call again;
`on_deadline` tells that the next deadline moved closer.
"""

from __future__ import annotations

import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import islice
from typing import Final, Self, TypeVar

from basaltmq.errors import (
    InvalidArgumentError,
    InvalidConfigError,
    QueueExistsError,
    QueueNotFoundError,
    StaleLeaseError,
    StoreClosedError,
    TransactionError,
)
from basaltmq.ids import Ids
from basaltmq.queues import dedup, delays, expiry, fanout, limits, removal, timers
from basaltmq.queues.backing import BackingQueue
from basaltmq.queues.change import Change
from basaltmq.queues.config import Durability, QueueConfig, decode_config, encode_config
from basaltmq.queues.content import Content
from basaltmq.queues.delivery import Delivery
from basaltmq.queues.draft import Draft
from basaltmq.queues.failures import expire_lease, fail
from basaltmq.queues.fair import FairQueue, sub_queues_on_disk
from basaltmq.queues.hooks import HookCounters, QueueHooks
from basaltmq.queues.leases import LeaseExpiry, Leases, Tokens
from basaltmq.queues.message import Message
from basaltmq.queues.paging import MemoryBudget, PagingLimits
from basaltmq.queues.priority import PriorityQueue
from basaltmq.queues.queue import MS, Queue, Shared, check_visibility
from basaltmq.queues.redrive import PAGE, DueNs, Page, Wanted, move_page, origin_of
from basaltmq.queues.runtime_config import THROTTLE_PREFIX, RuntimeConfig, Setting, SettingsPage
from basaltmq.queues.stats import QueueStats
from basaltmq.queues.storage import StoreStorage
from basaltmq.queues.throttle import Limit
from basaltmq.queues.timers import Timer, Timers
from basaltmq.queues.waiters import Waiter, Waiters
from basaltmq.store.api import Store
from basaltmq.store.commit import GroupCommit
from basaltmq.store.families import Family
from basaltmq.store.keys import decode_queue_key, queue_key, queue_stats_key

LOADED_MAX: Final = 4096
"""Queues kept in memory: about 4 KiB each while idle."""

EVICT_LOOK_MAX: Final = 16
"""Queues looked at per operation to find one that can be let go."""

DUE_MAX: Final = 64
"""Leases and timers served by one `run_due`; each is a batch of its own."""

FOLLOW_UP_MAX: Final = 16
"""Batches of one operation that bring other queues back to their limits; the rest waits for `run_due`."""

T = TypeVar("T")


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
        paging: PagingLimits | None = None,
        loaded_max: int = LOADED_MAX,
        on_deadline: Callable[[], None] | None = None,
    ) -> None:
        storage = StoreStorage.open(store)
        _wipe_transient(store)
        self._settings = RuntimeConfig(storage)
        self._store = store
        self._commit = commit
        self._clock_ns = clock_ns
        self._lock = threading.RLock()
        self._loaded: OrderedDict[str, Queue] = OrderedDict()
        self._loaded_max = loaded_max
        self._waiters = Waiters()
        self._current: Change | None = None
        self._current_wants_sync = False
        self._current_broken = False
        self._over_limit: dict[str, None] = {}
        self._on_deadline = on_deadline
        self._promised_ns: int | None = None
        self._closed = False
        tokens = Tokens.open(store)
        self._shared = Shared(
            store=store,
            ids=ids or Ids(clock_ns),
            content=Content(store),
            tokens=tokens,
            lease_expiry=LeaseExpiry(store, tokens),
            timers=Timers(store),
            wake=self._wake,
            find=self._find_or_make,
            check_limits=self._note_over_limit,
            budget=budget or MemoryBudget(),
            paging=paging or PagingLimits(),
        )

        self.bad_settings: list[str] = []
        """Throttles found at open that cannot be read, each with its reason."""
        for key, limit in self._settings.throttles(self.bad_settings.append):
            self._set_throttle(key, limit)
        self._settings.watch(THROTTLE_PREFIX, self._throttle_changed)

    def set_setting(self, key: str, value: str, *, secret: bool = False) -> Setting:
        """Set a runtime setting: a throttle (`throttle.<key>` = rate,burst), or something scripts read."""
        with self._lock:
            self._require_open()
            setting = self._settings.set(key, value, secret=secret)
        self._sync()
        return setting

    def delete_setting(self, key: str) -> bool:
        with self._lock:
            self._require_open()
            existed = self._settings.delete(key)
        self._sync()
        return existed

    def settings(self, prefix: str = "", *, limit: int = 1000, after: str | None = None) -> SettingsPage:
        """Runtime settings as they may be shown."""
        with self._lock:
            self._require_open()
            return self._settings.list(prefix, limit=limit, after=after)

    def _throttle_changed(self, name: str, value: str | None) -> None:
        key = name.removeprefix(THROTTLE_PREFIX)
        if value is None:
            self._shared.buckets.remove_limit(key)
            self._shared.throttles.discard(key)
        else:
            self._set_throttle(key, Limit.parse(value))
        now_ns = self._clock_ns()
        for queue in self._loaded.values():
            if queue.throttling is not None:
                queue.throttling.limit_changed(key, now_ns)
        self._tell_deadline()

    def _set_throttle(self, key: str, limit: Limit) -> None:
        self._shared.buckets.set_limit(key, limit, self._clock_ns())
        self._shared.throttles.add(key)

    def create(self, config: QueueConfig) -> None:
        """Make a queue, and the dead-letter queue it names if that is missing, in one batch. Durable on return."""

        def make(change: Change) -> None:
            self._hooks(config)
            if self._config(config.name) is not None:
                raise QueueExistsError(f"queue {config.name!r} exists; delete it first, or use another name")
            self._make(change, config)
            dead = config.dead_letter_queue
            if dead is not None and self._config(dead) is None:
                self._make(change, QueueConfig(name=dead))

        self._do(make)
        self._sync()

    def update(self, config: QueueConfig) -> None:
        """Give a queue another configuration. What is in it stays as it is."""

        def change_it(change: Change) -> None:
            queue = self._queue(config.name)
            hooks = self._hooks(config)
            if bool(queue.config.priorities_max) != bool(config.priorities_max) and queue.stats.depth():
                raise InvalidConfigError(
                    f"queue {config.name!r} has messages; priorities can be turned on or off only while it is empty"
                )
            change.batch.put(Family.QUEUES, queue_key(config.name), encode_config(config))
            self._arm_unused(change, config)
            if bool(queue.config.priorities_max) == bool(config.priorities_max):
                change.after(lambda: queue.configure(config, hooks))
            else:
                change.after(lambda: self._unload(config.name))

        self._do(change_it)
        self._sync()

    def get(self, name: str) -> QueueConfig:
        with self._lock:
            return self._queue(name).config

    def configs(self, *, after: str = "", count: int = 1000) -> list[QueueConfig]:
        """Configurations in the order of their names, from behind `after`."""
        with self._lock:
            self._require_open()
            start = queue_key(after) + b"\0" if after else b""
            found = islice(self._store.scan(Family.QUEUES, start), count)
            return [decode_config(decode_queue_key(key), row) for key, row in found]

    def delete(self, name: str) -> None:
        """Delete a queue with all that is its. Durable on return."""
        with self._lock:
            self._require_alone("delete")
            self._do(lambda change: removal.end_leases(self._queue(name), change))
            after: bytes | None = b""
            while after is not None and self._queue(name).stats.apart:
                after = self._delete_bodies(name, after)
            self._do(lambda change: removal.delete_queue(self._queue(name), change))
            self._unload(name)
            self._waiters.wake_queue(name)
        self._sync()

    def _delete_bodies(self, name: str, after: bytes) -> bytes | None:
        return self._do(lambda change: removal.delete_bodies(self._queue(name), change, after))

    def stats(self, name: str) -> dict[str, int]:
        """Counts of a queue."""
        with self._lock:
            queue = self._queue(name)
            counts = dict(zip(QueueStats.__slots__, queue.stats.values(), strict=True))
            counts["ready"] = len(queue)
            counts["ready_bytes"] = queue.ready_bytes()
            counts["leased"] = len(queue.leases)
            return counts

    def script_counters(self, name: str) -> dict[str, HookCounters]:
        """How the queue's scripts fare."""
        with self._lock:
            hooks = self._queue(name).hooks
            if hooks is None:
                return {}
            named = {"on_enqueue": hooks.on_enqueue, "on_failure": hooks.on_failure}
            return {event: hook.counters for event, hook in named.items() if hook is not None}

    @contextmanager
    def change(self) -> Iterator[None]:
        """Make the operations inside one batch. Nothing of them is seen, by anyone, before the end.

        Other threads wait. If anything inside fails nothing happens at all.
        """
        with self._lock:
            self._require_alone("change")
            change = self._current = Change(self._clock_ns())
            self._current_wants_sync = self._current_broken = False
            try:
                yield
                if self._current_broken:
                    raise TransactionError("an operation inside the change failed; nothing of the change is done")
            except BaseException:
                change.refused()
                raise
            finally:
                self._current = None
            self._write(change)
            self._follow_up()
            wants_sync = self._current_wants_sync
        if wants_sync:
            self._commit.wait_durable()

    def enqueue(
        self, name: str, drafts: Sequence[Draft | bytes], *, durability: Durability | None = None
    ) -> list[bytes]:
        """Add messages; their ids, when they are as durable as asked (by default as the queue's configuration says)."""

        def add(change: Change) -> tuple[list[bytes], Durability]:
            queue = self._queue(name)
            return queue.enqueue(change, drafts), durability or queue.config.durability

        ids, level = self._do(add)
        if level is Durability.SYNCED:
            self._sync()
        return ids

    def publish(
        self, names: Sequence[str], draft: Draft | bytes, *, durability: Durability | None = None
    ) -> list[bytes]:
        """Add one message to several queues, all or none; its id in each. A body of some size is stored once."""

        def add(change: Change) -> tuple[list[bytes], bool]:
            queues = [self._queue(name) for name in names]
            ids = fanout.publish(queues, change, draft)
            levels = {durability or queue.config.durability for queue in queues}
            return ids, Durability.SYNCED in levels

        ids, wants_sync = self._do(add)
        if wants_sync:
            self._sync()
        return ids

    def lease(
        self, name: str, count: int = 1, *, consumer: str = "", visibility_ms: int | None = None, wait_ms: int = 0
    ) -> list[Delivery]:
        """Up to `count` ready messages, leased; waits up to `wait_ms` for the first. `visibility_ms` 0 lasts until
        it is released or the plane is opened again."""
        if count < 1:
            raise InvalidArgumentError(f"a lease is for 1 message or more, not {count}")
        if visibility_ms is not None:
            check_visibility(visibility_ms)
        until_s = time.monotonic() + wait_ms / 1000
        while True:
            with self._lock:
                deliveries = self._do(lambda change: self._queue(name).lease(change, count, consumer, visibility_ms))
                left_s = until_s - time.monotonic()
                if deliveries or left_s <= 0:
                    return deliveries
                waiter = Waiter()
                number = self._waiters.add(name, waiter.wake)
                self._tell_deadline()
            woken = waiter.wait(left_s)
            if not woken:
                with self._lock:
                    self._waiters.remove(name, number)

    def on_ready(self, name: str, wake: Callable[[], None]) -> Callable[[], None]:
        """Call `wake` once when the queue may have something ready, at once if it has; returns how to stop waiting."""
        with self._lock:
            if self._queue(name).may_have_something(self._clock_ns()):
                wake()
                return lambda: None
            number = self._waiters.add(name, wake)
            self._tell_deadline()

        def stop() -> None:
            with self._lock:
                self._waiters.remove(name, number)

        return stop

    def deliver(
        self, name: str, drafts: Sequence[Draft | bytes], *, consumer: str = "", visibility_ms: int | None = None
    ) -> list[Delivery]:
        """Hand messages straight to a consumer that waits. An ack inside the same `change` cancels the write."""
        return self._do(lambda change: self._queue(name).deliver(change, drafts, consumer, visibility_ms))

    def ack(self, name: str, token: int, ids: Sequence[bytes] | None = None) -> int:
        """Messages of a lease (all by default) are done."""
        return self._do(lambda change: self._queue(name).ack(change, token, ids))

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

        return self._do(run)

    def release(self, name: str, token: int, ids: Sequence[bytes] | None = None) -> int:
        """Messages of a lease go back to their places; no attempt is counted."""
        return self._do(lambda change: self._queue(name).release(change, token, ids))

    def release_consumer(self, name: str, consumer: str) -> int:
        """All that a consumer holds goes back to its place, as when it disconnects."""

        def run(change: Change) -> int:
            queue = self._queue(name)
            calls = [call.token for call in queue.leases.calls() if call.consumer == consumer]
            return sum(queue.release(change, token) for token in calls)

        return self._do(run)

    def extend(
        self, name: str, token: int, visibility_ms: int | None = None, ids: Sequence[bytes] | None = None
    ) -> int:
        """A lease lasts longer; the token to answer with (another one, if only a part is extended)."""
        return self._do(lambda change: self._queue(name).extend(change, token, visibility_ms, ids))

    def browse(self, name: str, count: int = 100, *, after: bytes = b"") -> list[Message]:
        """Ready messages in key order, nothing changed. Page through a queue with `browse_page`."""
        return self.browse_page(name, count, after=after)[0]

    def browse_page(self, name: str, count: int = 100, *, after: bytes = b"") -> tuple[list[Message], bytes]:
        """Ready messages in key order, nothing changed, and what to go on `after`."""
        with self._lock:
            return self._queue(name).browse(count, after)

    def purge(self, name: str) -> int:
        """Delete everything that is ready; how many that were. Leased and delayed messages stay."""
        with self._lock:
            self._require_alone("purge")
            count = len(self._queue(name))
            while not self._do(lambda change: removal.purge(self._queue(name), change)):
                pass
        return count

    def move(
        self,
        source: str,
        target: str,
        *,
        count: int | None = None,
        wanted: Wanted | None = None,
    ) -> int:
        """Move ready messages to the end of another queue; how many. Each page is a batch."""
        with self._lock:
            self._queue(target)
            return self._move(source, lambda message: self._queue(target), count, wanted, None)

    def redrive(
        self,
        name: str,
        *,
        to: str | None = None,
        count: int | None = None,
        wanted: Wanted | None = None,
        rate_per_s: float | None = None,
    ) -> int:
        """Return dead letters to the queues they came from (or `to`), attempts reset, at most so many a second."""
        if rate_per_s is not None and rate_per_s <= 0:
            raise InvalidArgumentError(f"a rate is more than 0 per second, not {rate_per_s}")

        def target_of(message: Message) -> Queue | None:
            goal = to or origin_of(message)
            return None if goal is None or self._config(goal) is None else self._queue(goal)

        with self._lock:
            if to is not None:
                self._queue(to)
            return self._move(name, target_of, count, wanted, rate_per_s)

    def _move(
        self,
        source: str,
        target_of: Callable[[Message], Queue | None],
        count: int | None,
        wanted: Wanted | None,
        rate_per_s: float | None,
    ) -> int:
        self._require_alone("move")
        moved = 0
        after: bytes | None = b""
        begin_ns = self._clock_ns()
        while after is not None and (count is None or moved < count):
            left = PAGE if count is None else count - moved

            page = self._move_page(source, after, left, target_of, wanted, self._turns(begin_ns, moved, rate_per_s))
            moved += page.moved
            after = page.after
        return moved

    def _move_page(
        self,
        source: str,
        after: bytes,
        count: int,
        target_of: Callable[[Message], Queue | None],
        wanted: Wanted | None,
        due_ns: DueNs | None,
    ) -> Page:
        return self._do(lambda change: move_page(self._queue(source), change, after, count, target_of, wanted, due_ns))

    def _turns(self, begin_ns: int, already: int, rate_per_s: float | None) -> DueNs | None:
        """When the messages of a page are ready, after so many before them."""
        if rate_per_s is None:
            return None
        step_ns = 1e9 / rate_per_s
        return lambda index: begin_ns + int((already + index) * step_ns)

    def run_due(self, now_ns: int | None = None) -> int | None:
        """Do what is due, a bounded piece of it; when to call again (at or before `now_ns`: at once), None: never."""
        with self._lock:
            self._require_alone("run_due")
            now_ns = self._clock_ns() if now_ns is None else now_ns
            self._follow_up()
            for expires_ns, name, token in self._shared.lease_expiry.due(now_ns, DUE_MAX):
                try:
                    self._expire_lease(now_ns, name, token)
                except BaseException:
                    self._shared.lease_expiry.add(expires_ns, name, token)
                    raise
            for timer in self._shared.timers.due(now_ns, DUE_MAX):
                self._serve(now_ns, timer)
            self._wake_for_tokens(now_ns)
            self._promised_ns = self.deadline_ns()
            return self._promised_ns

    def deadline_ns(self) -> int | None:
        """When something is due next."""
        if self._over_limit:
            return 0
        known = [self._shared.lease_expiry.deadline_ns(), self._shared.timers.deadline_ns()]
        known += [self._token_ns(name) for name in self._waiters.queues()]
        return min((at for at in known if at is not None), default=None)

    def _token_ns(self, name: str) -> int | None:
        """When a token comes that a message waits for, in a queue where consumers wait."""
        queue = self._loaded.get(name)
        return None if queue is None or queue.throttling is None else queue.throttling.next_wake_ns()

    def _wake_for_tokens(self, now_ns: int) -> None:
        for name in self._waiters.queues():
            at_ns = self._token_ns(name)
            if at_ns is not None and at_ns <= now_ns:
                self._wake(name)

    def _expire_lease(self, now_ns: int, name: str, token: int) -> None:
        if self._config(name) is None:
            return
        queue = self._queue(name)
        try:
            queue.leases.require(token)
        except StaleLeaseError:
            return
        self._do(lambda change: expire_lease(queue, change, token), now_ns)

    def _serve(self, now_ns: int, timer: Timer) -> None:
        def serve(change: Change) -> None:
            more = False
            if self._config(timer.queue) is not None:
                more = self._fire(change, timer)
            if not more:
                self._shared.timers.clear(change, timer)

        if timer.kind == timers.UNUSED and self._is_unused(now_ns, timer.queue):
            self.delete(timer.queue)
        self._do(serve, now_ns)

    def _fire(self, change: Change, timer: Timer) -> bool:
        queue = self._queue(timer.queue)
        if timer.kind == timers.DELAYED:
            return delays.return_due(queue, change)
        if timer.kind == timers.EXPIRY:
            return expiry.expire_due(queue, change)
        if timer.kind == timers.DEDUP:
            return dedup.sweep(queue, change)
        if timer.kind == timers.UNUSED and queue.config.expires_ms is not None:
            self._shared.timers.set(
                change, max(queue.used_ns, change.now_ns) + queue.config.expires_ms * MS, timers.UNUSED, queue.name
            )
        return False

    def _is_unused(self, now_ns: int, name: str) -> bool:
        if self._config(name) is None:
            return False
        queue = self._queue(name)
        if queue.config.expires_ms is None or len(queue.leases) or name in self._waiters:
            return False
        return queue.used_ns + queue.config.expires_ms * MS <= now_ns

    def _arm_unused(self, change: Change, config: QueueConfig) -> None:
        if config.expires_ms is not None:
            self._shared.timers.set(change, change.now_ns + config.expires_ms * MS, timers.UNUSED, config.name)

    def close(self) -> None:
        """Refuse further calls and wake everyone who waits. The store stays open."""
        with self._lock:
            self._closed = True
            self._loaded.clear()
            self._waiters.wake_all()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def _do(self, operation: Callable[[Change], T], now_ns: int | None = None) -> T:
        """Run an operation as a change of its own, or as part of the change that is open."""
        with self._lock:
            self._require_open()
            if self._current is not None:
                try:
                    return operation(self._current)
                except BaseException:
                    self._current_broken = True
                    raise
            change = Change(self._clock_ns() if now_ns is None else now_ns)
            try:
                result = operation(change)
            except BaseException:
                change.refused()
                raise
            self._write(change)
            self._follow_up()
            if change.refusal is not None:
                raise change.refusal
            return result

    def _write(self, change: Change) -> None:
        try:
            batch = change.seal()
            if batch.ops:
                self._store.write(batch)
        except BaseException:
            change.refused()
            raise
        change.applied()

    def _follow_up(self) -> None:
        """What an operation left to be done: limits of other queues, memory to be given back, deadlines to tell."""
        for _ in range(FOLLOW_UP_MAX):
            if not self._over_limit or self._current is not None:
                break
            name = next(iter(self._over_limit))
            del self._over_limit[name]
            if self._config(name) is not None:
                change = Change(self._clock_ns())
                queue = self._queue(name)
                if limits.bring_back(queue, change):
                    self._over_limit[name] = None
                self._write(change)
        self._evict()
        self._tell_deadline()

    def _tell_deadline(self) -> None:
        if self._on_deadline is not None:
            deadline = self.deadline_ns()
            if deadline is not None and (self._promised_ns is None or deadline < self._promised_ns):
                self._promised_ns = deadline
                self._on_deadline()

    def _evict(self) -> None:
        over_budget = self._shared.budget.room_bytes() < 0
        if len(self._loaded) <= self._loaded_max and not over_budget:
            return
        latest = next(reversed(self._loaded), None)
        for name in list(islice(self._loaded, EVICT_LOOK_MAX)):
            queue = self._loaded[name]
            if over_budget and queue.account.used_bytes and name != latest:
                queue.backing.shrink()
                over_budget = self._shared.budget.room_bytes() < 0
            if len(self._loaded) > self._loaded_max:
                if queue.stats.transient or len(queue.leases) or name in self._waiters:
                    self._loaded.move_to_end(name)
                else:
                    self._unload(name)

    def _unload(self, name: str) -> None:
        queue = self._loaded.pop(name, None)
        if queue is not None:
            queue.backing.purge()
            if queue.hooks is not None:
                queue.hooks.release()

    def _sync(self) -> None:
        """Wait until what was written is durable; inside a change, at its end."""
        with self._lock:
            if self._current is not None:
                self._current_wants_sync = True
                return
        self._commit.wait_durable()

    def _wake(self, name: str) -> None:
        if name in self._waiters:
            queue = self._loaded.get(name)
            if queue is None:
                self._waiters.wake_queue(name)
            else:
                self._waiters.wake(name, len(queue))

    def _note_over_limit(self, name: str) -> None:
        queue = self._loaded.get(name)
        if queue is None or queue.config.length_max is not None or queue.config.bytes_max is not None:
            self._over_limit[name] = None

    def _config(self, name: str) -> QueueConfig | None:
        queue = self._loaded.get(name)
        if queue is not None:
            return queue.config
        row = self._store.get(Family.QUEUES, queue_key(name))
        return None if row is None else decode_config(name, row)

    def _queue(self, name: str) -> Queue:
        """The queue of this name, loaded."""
        self._require_open()
        queue = self._loaded.get(name)
        if queue is not None:
            self._loaded.move_to_end(name)
            return queue
        config = self._config(name)
        if config is None:
            raise QueueNotFoundError(f"there is no queue {name!r}; create it first")
        row = self._store.get(Family.QUEUE_STATS, queue_stats_key(name))
        stats = QueueStats() if row is None else QueueStats.decode(name, row)
        queue = self._loaded[name] = self._assemble(config, stats, Leases.load(self._store, name))
        return queue

    def _assemble(self, config: QueueConfig, stats: QueueStats, leases: Leases) -> Queue:
        shared, name = self._shared, config.name
        account = shared.budget.account()
        discover = None if stats.messages == 0 else lambda: sub_queues_on_disk(self._store, name)

        def fair(discover: Callable[[], Iterator[tuple[str, bytes]]] | None = None) -> FairQueue:
            return FairQueue(self._store, name, account, shared.paging, leases, discover)

        backing: BackingQueue = PriorityQueue(name, fair, discover) if config.priorities_max else fair(discover)
        queue = Queue(shared, config, stats, leases, backing, account, self._clock_ns())
        queue.hooks = self._hooks(config)
        return queue

    def _hooks(self, config: QueueConfig) -> QueueHooks | None:
        """The scripts of a queue, compiled; ScriptError if they do not."""
        if config.on_enqueue_script is None and config.on_failure_script is None:
            return None
        return QueueHooks(
            config.name,
            on_enqueue=config.on_enqueue_script,
            on_failure=config.on_failure_script,
            clock_ns=self._clock_ns,
            read_state=self._settings.for_scripts,
        )

    def _make(self, change: Change, config: QueueConfig) -> Queue:
        """Make a queue in a change."""
        name = config.name
        change.batch.put(Family.QUEUES, queue_key(name), encode_config(config))
        change.batch.put(Family.QUEUE_STATS, queue_stats_key(name), QueueStats().encode())
        self._arm_unused(change, config)
        queue = self._loaded[name] = self._assemble(config, QueueStats(), Leases(name))
        change.undo(lambda: self._unload(name))
        return queue

    def _find_or_make(self, change: Change, name: str) -> Queue:
        return self._make(change, QueueConfig(name=name)) if self._config(name) is None else self._queue(name)

    def _require_open(self) -> None:
        if self._closed:
            raise StoreClosedError("the queue plane is closed")

    def _require_alone(self, what: str) -> None:
        self._require_open()
        if self._current is not None:
            raise TransactionError(f"{what} is many batches and cannot be part of a change; do it before or after")


def _wipe_transient(store: Store) -> None:
    """Delete what transient messages of earlier boots were paged to."""
    first = next(iter(store.scan(Family.TRANSIENT)), None)
    if first is None:
        return
    last = next(iter(store.scan(Family.TRANSIENT, reverse=True)))
    change = Change(0)
    change.batch.delete_range(Family.TRANSIENT, first[0], last[0] + b"\0")
    store.write(change.batch)
