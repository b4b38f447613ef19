"""The LRU cache of loaded queues.

A queue in memory is a cache of its rows. The cache keeps up to `loaded_max` queues and evicts the least recently used
ones, except queues with waiting consumers or leases that exist in memory only. Eviction writes transient messages and
their count to the transient family, which is wiped at open. So an idle queue costs disk, not memory. Not thread-safe:
callers hold the plane's lock.
"""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial
from itertools import islice
from typing import Final

from basaltmq.clock import NS_PER_MS
from basaltmq.errors import (
    BasaltError,
    CorruptionError,
    QueueFailedError,
    QueueNotFoundError,
    ScriptError,
    StoreStalledError,
)
from basaltmq.queues.change import Change
from basaltmq.queues.config import QueueConfig, decode_config, default_row, encode_config
from basaltmq.queues.entries.backing import BackingQueue
from basaltmq.queues.leases.prepared import is_held
from basaltmq.queues.leases.table import Leases
from basaltmq.queues.leases.waiters import Waiters
from basaltmq.queues.lifecycle import timers
from basaltmq.queues.queue import PlaneContext, Queue
from basaltmq.queues.ready.fair_queue import FairQueue, sub_queues_on_disk
from basaltmq.queues.ready.on_disk import SPILL_WAIT_MS
from basaltmq.queues.ready.priority_queue import PriorityQueue
from basaltmq.queues.recovery.failed import FailedQueues
from basaltmq.queues.recovery.recount import counted
from basaltmq.queues.runtime_config import RuntimeConfig
from basaltmq.queues.scripts.hooks import QueueHooks
from basaltmq.queues.stats import QueueStats
from basaltmq.store.batch import Batch
from basaltmq.store.families import Family
from basaltmq.store.keys.parts import lp, prefix_range
from basaltmq.store.keys.queues import decode_queue_key, queue_key, queue_stats_key, transient_counts_key

LOADED_MAX: Final = 4096
"""Queues kept in memory, about 4 KiB each while idle."""

EVICT_LOOK_MAX: Final = 16
"""Queues to examine per operation to find one to evict."""

_log = logging.getLogger("basaltmq")


class LoadedQueues:
    """Queues by name, least recently used first."""

    def __init__(
        self,
        shared: PlaneContext,
        waiters: Waiters,
        settings: RuntimeConfig,
        clock_ns: Callable[[], int],
        loaded_max: int = LOADED_MAX,
    ) -> None:
        self._shared = shared
        self._store = shared.store
        self._waiters = waiters
        self._settings = settings
        self._clock_ns = clock_ns
        self._loaded_max = loaded_max
        self._queues: OrderedDict[str, Queue] = OrderedDict()
        self.failures = FailedQueues()
        self._has_paged_out = False
        """Whether a queue with transient messages was ever evicted."""

    def __len__(self) -> int:
        return len(self._queues)

    def __iter__(self) -> Iterator[Queue]:
        return iter(list(self._queues.values()))

    def peek(self, name: str) -> Queue | None:
        """Return the queue if it is in memory, without marking it as used."""
        return self._queues.get(name)

    def config(self, name: str) -> QueueConfig | None:
        """Return the configuration of a queue without loading it; None if the queue does not exist."""
        queue = self._queues.get(name)
        if queue is not None:
            return queue.config
        key = queue_key(name)
        row = self._store.get(Family.QUEUES, key)
        return None if row is None else self._read_config(key, row)

    def configs(self, after: str, count: int) -> list[QueueConfig]:
        """Return configurations ordered by name, starting after `after`."""
        rows = self._store.scan(Family.QUEUES, queue_key(after) + b"\0" if after else b"")
        found = (self._read_config(key, row) for key, row in rows)
        return list(islice((config for config in found if config is not None), count))

    def _read_config(self, key: bytes, row: bytes) -> QueueConfig | None:
        """Decode a configuration row; None if the key is not a queue name.

        An unreadable row is replaced by the defaults, so that the messages of the queue stay accessible.
        """
        try:
            return decode_config(decode_queue_key(key), row)
        except CorruptionError as error:
            default = default_row(key)
            self._shared.quarantine.note(Family.QUEUES, key, row, str(error), replacement=default)
            return None if default is None else decode_config(key.decode(), default)

    def require(self, name: str) -> Queue:
        """Return the queue, loading it if necessary."""
        queue = self._queues.get(name)
        if queue is not None:
            self._queues.move_to_end(name)
            return queue
        config = self.config(name)
        if config is None:
            raise QueueNotFoundError(f"queue {name!r} does not exist; create it first")
        self.failures.require_up(name)
        try:
            queue = self._queues[name] = self._load(config)
        except BasaltError:
            raise
        except Exception as error:
            raise self.fail(name, error) from error
        return queue

    def _load(self, config: QueueConfig) -> Queue:
        name, shared = config.name, self._shared
        stats = self._stats(name)
        counts = self._store.get(Family.TRANSIENT, transient_counts_key(name)) if self._has_paged_out else None
        if counts is not None:
            stats.restore_transient(name, counts)
        last_ns = shared.enqueue_clock.last_ns
        leases = Leases.load(
            self._store, name, shared.quarantine, stats.returned_ns, last_ns, is_orphan=shared.is_orphan
        )
        for call in leases.calls():
            if not is_held(call):
                shared.lease_expiry.expect(call, name)
        queue = self._assemble(config, stats, leases)
        queue.has_transient_row = counts is not None
        return queue

    def _stats(self, name: str) -> QueueStats:
        """Return the counts of a queue. Missing or damaged counts are recomputed from its rows."""
        key = queue_stats_key(name)
        row = self._store.get(Family.QUEUE_STATS, key)
        if row is not None:
            try:
                return QueueStats.decode(name, row)
            except CorruptionError as error:
                reason = str(error)
        else:
            reason = f"the counts of queue {name!r} are missing"
        quarantine = self._shared.quarantine
        stats = counted(self._store, name, quarantine)
        # Which messages were delivered before is unknown.
        stats.returned_ns = self._shared.enqueue_clock.last_ns
        quarantine.note(Family.QUEUE_STATS, key, row, reason, replacement=stats.encode())
        return stats

    def fail(self, name: str, error: Exception) -> QueueFailedError:
        """Unload a queue after an unexpected error, as after a crash. Return the error for callers."""
        failure = self.failures.add(name, error, self._clock_ns())
        self._discard(name)
        return failure

    def _discard(self, name: str) -> None:
        """Unload a queue whose memory may be wrong."""
        queue = self._queues.pop(name, None)
        if queue is None:
            return
        queue.account.charge(-queue.account.used_bytes)
        self._shared.parked.pop(name, None)
        if queue.hooks is not None:
            queue.hooks.release()
        batch = Batch()
        start, end = prefix_range(lp(name))
        assert end is not None, "a length-prefixed name is never all 0xff"
        batch.delete_range(Family.TRANSIENT, start, end)
        with suppress(BasaltError):
            if self.config(name) is not None:
                stats = self._stats(name)
                stats.returned_ns = self._shared.enqueue_clock.last_ns
                batch.put(Family.QUEUE_STATS, queue_stats_key(name), stats.encode())
            self._store.write(batch)

    def take_down(self, name: str) -> None:
        """Unload a queue, and refuse operations on it until `bring_up`."""
        if self.config(name) is None:
            raise QueueNotFoundError(f"queue {name!r} does not exist; create it first")
        self._discard(name)
        self.failures.take_down(name, "it is being restarted")

    def bring_up(self, change: Change, name: str, stats: QueueStats) -> None:
        """Serve a queue again after `take_down` or a failure."""
        stats.returned_ns = self._shared.enqueue_clock.last_ns
        change.batch.put(Family.QUEUE_STATS, queue_stats_key(name), stats.encode())
        change.ready[name] = None
        self.failures.forget(name)

    def counts_on_disk(self, name: str) -> QueueStats | None:
        """Return the counts in a queue's row; None if they are missing or damaged."""
        row = self._store.get(Family.QUEUE_STATS, queue_stats_key(name))
        with suppress(CorruptionError):
            return None if row is None else QueueStats.decode(name, row)
        return None

    def create(self, change: Change, config: QueueConfig) -> Queue:
        """Create a queue in a change."""
        name = config.name
        stats = QueueStats()
        stats.floor_ns = self._shared.reclaim.floor_ns(name)
        change.batch.put(Family.QUEUES, queue_key(name), encode_config(config))
        change.batch.put(Family.QUEUE_STATS, queue_stats_key(name), stats.encode())
        self.set_unused_timer(change, config)
        queue = self._queues[name] = self._assemble(config, stats, Leases(name))
        change.undo(lambda: self.unload(name))
        return queue

    def find_or_create(self, change: Change, name: str) -> Queue:
        return self.create(change, QueueConfig(name=name)) if self.config(name) is None else self.require(name)

    def set_unused_timer(self, change: Change, config: QueueConfig) -> None:
        """If the queue has `expires_ms`, set the timer that deletes it when unused."""
        if config.expires_ms is not None:
            self._shared.timers.set(change, change.now_ns + config.expires_ms * NS_PER_MS, timers.UNUSED, config.name)

    def hooks(self, config: QueueConfig) -> QueueHooks | None:
        """Compile the scripts of a queue. Raises ScriptError."""
        if config.on_enqueue_script is None and config.on_failure_script is None:
            return None
        return QueueHooks(
            config.name,
            on_enqueue=config.on_enqueue_script,
            on_failure=config.on_failure_script,
            clock_ns=self._clock_ns,
            read_state=self._settings.for_scripts,
            budget=self._shared.script_budget,
        )

    def _assemble(self, config: QueueConfig, stats: QueueStats, leases: Leases) -> Queue:
        shared, name = self._shared, config.name
        account = shared.budget.account()
        floor = stats.floor_ns.to_bytes(8, "big") if stats.floor_ns else b""
        spilled = stats.transient > 0
        discover = None
        if stats.depth():
            discover = partial(sub_queues_on_disk, self._store, name, shared.quarantine, floor, spilled=spilled)

        def fair(discover: Callable[[], Iterator[tuple[str, bytes]]] | None = None) -> FairQueue:
            return FairQueue(
                self._store,
                name,
                account,
                shared.paging,
                leases,
                shared.quarantine,
                discover,
                floor,
                spilled=spilled,
            )

        backing: BackingQueue = PriorityQueue(name, fair, discover) if config.priorities_max else fair(discover)
        queue = Queue(shared, config, stats, leases, backing, account, self._clock_ns())
        try:
            queue.hooks = self.hooks(config)
        except ScriptError as error:
            # Scripts are checked when a queue is created or altered. A bad script found on disk must not block its
            # messages.
            _log.error("queue %r: a script cannot be used, defaults apply: %s", name, error)
        return queue

    def unload(self, name: str) -> None:
        """Unload a queue; what exists in memory only is lost."""
        queue = self._queues.pop(name, None)
        if queue is not None:
            queue.backing.purge()
            if queue.hooks is not None:
                queue.hooks.release()

    def save_all(self, batch: Batch) -> None:
        """Add all state to a batch that exists in memory only and must survive."""
        for queue in self._queues.values():
            queue.leases.forget_holds()
            queue.save(batch)

    def clear(self) -> None:
        self._queues.clear()

    def evict(self) -> None:
        """Free memory above the limits, a few queues per call."""
        over_budget = self._shared.budget.room_bytes() < 0
        if len(self._queues) <= self._loaded_max and not over_budget:
            return
        latest = next(reversed(self._queues), None)
        for name in list(islice(self._queues, EVICT_LOOK_MAX)):
            queue = self._queues[name]
            if over_budget and queue.account.used_bytes and name != latest:
                queue.backing.shrink()
                over_budget = self._shared.budget.room_bytes() < 0
            if len(self._queues) > self._loaded_max:
                if queue.scans or queue.leases.has_memory_only() or name in self._waiters or not self._page_out(queue):
                    self._queues.move_to_end(name)
                else:
                    self.unload(name)

    def _page_out(self, queue: Queue) -> bool:
        """Write all of a queue to disk. Return False if the store stalls on its transient messages."""
        if not queue.stats.transient:
            self._save(queue)
            return True
        queue.unpark_all(queue.used_ns)
        queue.backing.shrink()
        if queue.backing.resident_len():
            return False
        self._save(queue)
        batch = Batch()
        batch.put(Family.TRANSIENT, transient_counts_key(queue.name), queue.stats.encode_transient())
        try:
            self._store.write(batch, wal=False, wait_ms=SPILL_WAIT_MS)
        except StoreStalledError:
            return False
        self._has_paged_out = queue.has_transient_row = True
        return True

    def _save(self, queue: Queue) -> None:
        """Write counts of a queue that no batch has written yet."""
        batch = Batch()
        queue.save(batch)
        try:
            if batch:
                self._store.write(batch)
        except BaseException:
            queue.has_unsaved = True
            raise
