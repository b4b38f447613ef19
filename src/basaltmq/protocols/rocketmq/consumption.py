"""A group's consumption of a topic: which records receive calls get, and when waiting calls are woken.

An append wakes one waiting call per group. A call that finds records wakes the next one, so a burst reaches all of them
without waking all for each record. A timer wakes one when a lease may expire. Nothing polls.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Final, NamedTuple, Protocol

from basaltmq.errors import DamagedFrameError, OffsetOutOfRangeError
from basaltmq.log.batches.record import StoredRecord
from basaltmq.protocols.rocketmq.records import dead_letter_of, message_group_of
from basaltmq.protocols.rocketmq.rules.names import dead_letter_topic
from basaltmq.store.sync.group_commit import Synced
from basaltmq.streams.pop.groups import GroupConfig
from basaltmq.streams.pop.lease import Lease
from basaltmq.streams.pop.rows import read_cursors
from basaltmq.streams.pop.subscription import Subscription
from basaltmq.streams.scheduled import Scheduled
from basaltmq.streams.shards import MessageType
from basaltmq.streams.topics import Topic

if TYPE_CHECKING:
    from basaltmq.protocols.rocketmq.host import Host

SCANNED_MAX: Final = 500
"""Records that one turn examines for a receive call: 5 ms."""

READ_BYTES: Final = 4 << 20
"""Bytes of one delivery. A single larger record is still delivered."""

RENEW_MS: Final = 60_000
"""Each extension of a lease by the broker."""

RENEWED_MS_MAX: Final = 3 * 3_600_000
"""Total time for which the broker extends a lease."""

_log: Final = logging.getLogger(__name__)


class Filter(Protocol):
    """Selects records for a group."""

    def matches(self, record: StoredRecord) -> bool: ...


class ReceiveCall(NamedTuple):
    """A receive call."""

    records_max: int
    filter: Filter | None
    invisible_ms: int
    attempt: int
    holder: int
    partition: int
    """The partition to look at first."""
    config: GroupConfig


class Delivery(NamedTuple):
    """A record with its lease."""

    lease: Lease
    record: StoredRecord
    shard: int
    consumption: Consumption


class Consumption:
    """The state of a group on a topic, and the calls that wait for records."""

    def __init__(self, host: Host, group: str, topic: Topic, subscription: Subscription) -> None:
        self.group = group
        self.topic = topic
        self.subscription = subscription
        self._host = host
        self._waiting: deque[asyncio.Future[None]] = deque()
        self._watchers: dict[Callable[[], None], None] = {}
        self._timer: asyncio.TimerHandle | None = None

    def close(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        while self._waiting:
            self._wake_first()
        self._watchers.clear()
        self._host.waits(self, is_waited=False)

    @property
    def is_waited(self) -> bool:
        return bool(self._waiting or self._watchers)

    def receive(self, call: ReceiveCall, now_ms: int) -> tuple[list[Delivery], bool]:
        """Lease records for a call. Return them, and whether another turn may find more."""
        state = self.subscription
        self.extend_alive(now_ms)
        self._follow_reset()
        found = self.again(call, now_ms) if call.attempt else []
        if found:
            return found, False
        self._redeliver(call, now_ms, found)
        has_more = self._read_on(call, now_ms, found) if len(found) < call.records_max else True
        if state.changed or state.moved:
            self._host.changed(self)
        if found and has_more:
            self.wake()
        if self.is_waited:
            self._set_timer()
        return found, has_more

    def extend_alive(self, now_ms: int) -> None:
        """Expire leases whose time has passed, and extend those of clients that are alive."""
        self.subscription.expire(now_ms, lambda lease: self._extended(lease, now_ms))

    def changed(self, synced: Synced | None = None) -> None:
        """Write the changes of a settlement. They may make a later record of the message group ready."""
        self._host.changed(self, synced)
        if self.is_waited:
            if self.subscription.has_ready:
                self.wake()
            self._set_timer()

    def wake(self) -> None:
        """Wake one waiting call, and all watchers."""
        self._wake_first()
        for each in list(self._watchers):
            each()

    def watch(self, callback: Callable[[], None]) -> Callable[[], None]:
        """Call back whenever there may be something to receive. Return a function that ends this."""
        if not self.is_waited:
            self._host.waits(self, is_waited=True)
        self._watchers[callback] = None
        self._set_timer()
        return partial(self._unwatch, callback)

    def _unwatch(self, callback: Callable[[], None]) -> None:
        self._watchers.pop(callback, None)
        if not self.is_waited:
            self._host.waits(self, is_waited=False)

    async def wait(self, timeout_s: float) -> None:
        """Wait until there may be something to receive."""
        future: asyncio.Future[None] = self._host.loop.create_future()
        if not self.is_waited:
            self._host.waits(self, is_waited=True)
        self._waiting.append(future)
        self._set_timer()
        try:
            async with asyncio.timeout(timeout_s):
                await future
        except TimeoutError:
            return
        except asyncio.CancelledError:
            if future.done() and not future.cancelled():
                # This call was woken but will not use it, so wake another one.
                self.wake()
            raise
        finally:
            if future in self._waiting:
                self._waiting.remove(future)
            if not self.is_waited:
                self._host.waits(self, is_waited=False)

    def record_at(self, lease: Lease) -> tuple[StoredRecord, int] | None:
        """Return the record of a lease with its shard, or None if it no longer exists."""
        if lease.partition >= len(self.topic.shards):
            return None
        engine, shard = self._host.route(self.topic, lease.partition)
        try:
            records = engine.read_by_offset(shard, lease.offset, 1, READ_BYTES).records()
        except (OffsetOutOfRangeError, DamagedFrameError):
            return None
        if not records or records[0].offset != lease.offset:
            return None
        return records[0], shard

    def _wake_first(self) -> None:
        while self._waiting:
            future = self._waiting.popleft()
            if not future.done():
                future.set_result(None)
                return

    def _set_timer(self) -> None:
        due_ms = self.subscription.next_due_ms()
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if due_ms is not None:
            self._timer = self._host.loop.call_later(max(0.0, (due_ms - self._host.now_ms()) / 1000), self._due)

    def _due(self) -> None:
        self._timer = None
        self.wake()

    def _extended(self, lease: Lease, now_ms: int) -> int:
        """Return until when the lease of a client is extended, or 0 if the client is dead."""
        if now_ms - lease.leased_ms >= RENEWED_MS_MAX or not self._host.clients.is_alive(lease.holder):
            return 0
        return now_ms + RENEW_MS

    def _follow_reset(self) -> None:
        """Take over cursors that an operator has reset."""
        state = self.subscription
        if self._host.is_stalled:
            # The state has changes that are not in the rows yet.
            return
        stored = read_cursors(self._host.vhost.store, self.group, self.topic.id, len(self.topic.shards))
        for partition in range(len(self.topic.shards)):
            if partition in state.moved:
                continue
            offset = stored.get(partition)
            if offset is not None and offset != state.cursors.get(partition):
                state.cursors[partition] = offset

    def again(self, call: ReceiveCall, now_ms: int) -> list[Delivery]:
        """Return what an earlier call with the same attempt id got."""
        found = []
        for lease in self.subscription.of_attempt(call.attempt):
            read = self.record_at(lease)
            if read is not None:
                self.subscription.renew(lease, now_ms + call.invisible_ms)
                found.append(Delivery(lease, *read, self))
        if found:
            self._host.changed(self)
        return found

    def _redeliver(self, call: ReceiveCall, now_ms: int, found: list[Delivery]) -> None:
        state = self.subscription
        for lease in state.ready(call.config.ordered):
            if len(found) >= call.records_max:
                state.put_back(lease, now_ms)
                return
            read = self.record_at(lease)
            if read is None:
                state.settle(lease, now_ms)
                continue
            if lease.attempts >= call.config.max_attempts:
                self.dead_letter(lease, *read, now_ms)
                continue
            self._hold(lease, call, now_ms)
            found.append(Delivery(lease, *read, self))

    def dead_letter(self, lease: Lease, record: StoredRecord, shard: int, now_ms: int) -> None:
        """Move a record to the dead-letter topic of the group: one batch settles it and schedules the copy."""
        copy = dead_letter_of(record, self.topic.name, shard)
        scheduled = Scheduled(dead_letter_topic(self.group), b"", 0, copy)
        self._host.schedule_record(now_ms, self._host.new_id(), scheduled)
        self.subscription.settle(lease, now_ms)

    def _hold(self, lease: Lease, call: ReceiveCall, now_ms: int) -> None:
        self.subscription.hold(lease, now_ms, now_ms + call.invisible_ms, call.attempt, call.holder)

    def _read_on(self, call: ReceiveCall, now_ms: int, found: list[Delivery]) -> bool:
        """Lease records from the cursors on. Return whether there may be more."""
        count = len(self.topic.shards)
        chains: set[tuple[int, bytes]] = set()
        scanned = 0
        has_priorities = self.topic.config.message_type is MessageType.PRIORITY
        for step in range(count):
            partition = count - 1 - step if has_priorities else (call.partition + step) % count
            while True:
                if len(found) >= call.records_max or scanned >= SCANNED_MAX:
                    return True
                if self.subscription.is_full:
                    return False
                examined, is_end = self._read_some(partition, call, now_ms, found, chains)
                scanned += examined
                if is_end:
                    break
        return False

    def _read_some(
        self, partition: int, call: ReceiveCall, now_ms: int, found: list[Delivery], chains: set[tuple[int, bytes]]
    ) -> tuple[int, bool]:
        """Read a partition once. Return the number of records examined, and whether the end was reached."""
        state = self.subscription
        engine, shard = self._host.route(self.topic, partition)
        cursor = state.cursors.get(partition, 0)
        count = SCANNED_MAX if call.filter is not None else call.records_max - len(found)
        try:
            batch = engine.read_by_offset(shard, cursor, count, READ_BYTES)
        except OffsetOutOfRangeError as error:
            state.advance(partition, error.earliest)
            return 1, False
        except DamagedFrameError as error:
            _log.error("group %r skips unreadable records: %s", self.group, error.within(self.topic.name, partition))
            state.advance(partition, error.last_offset + 1)
            return 1, False
        records: Sequence[StoredRecord] = batch.records()
        end, examined = batch.next_offset, 0
        for record in records:
            if len(found) >= call.records_max or state.is_full:
                end = record.offset
                break
            examined += 1
            if call.filter is not None and not call.filter.matches(record):
                continue
            self._admit(partition, record, shard, call, now_ms, found, chains)
        if end != cursor:
            state.advance(partition, end)
        return examined, end == cursor or end >= batch.high_watermark

    def _admit(
        self,
        partition: int,
        record: StoredRecord,
        shard: int,
        call: ReceiveCall,
        now_ms: int,
        found: list[Delivery],
        chains: set[tuple[int, bytes]],
    ) -> None:
        """Deliver a record, unless an earlier one of its message group is not settled."""
        state = self.subscription
        message_group = message_group_of(record)
        chain = (partition, message_group)
        must_wait = bool(message_group) and state.is_chained(partition, message_group)
        lease = state.admit(partition, record.offset, message_group)
        if must_wait and not (call.config.ordered and chain in chains):
            return
        if message_group:
            chains.add(chain)
        self._hold(lease, call, now_ms)
        found.append(Delivery(lease, record, shard, self))
