"""The tick: what AMQP clients publish and settle in one turn of the loop is written as one batch.

    publish, settle ─> gather ─> one change of the queue plane ─┬─> returns, confirms of transient messages
                                                                ├─> deliveries to consumers
                                                                └─> WAL sync ─> confirms

A turn runs in this order: write the batch, serve consumers, run chores. There is no timer.

A message is confirmed when every queue that accepted it has it: after the sync if it is persistent and one of the
queues is durable, otherwise after the write. A message that no queue accepted is confirmed too; a `mandatory` one is
returned first. A full queue that rejects publishes turns the confirm into a nack.

If the store is stalled, nothing of the batch is written. Publishes and settlements stay gathered, publishers are
blocked, and the tick tries again. If one operation of the batch fails, all operations are done one by one, so that only
the bad one is refused. An error of the disk fails the virtual host, and nothing unconfirmed is confirmed.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any, Final, Protocol

from basaltmq.broker.chores import Chore, Chores
from basaltmq.broker.consumers.dispatch import Dispatch
from basaltmq.broker.consumers.queue import BrokerQueue
from basaltmq.broker.guard import Failing, QuietGuard
from basaltmq.broker.message.operations import ACK, REQUEUE, Publish, Publisher, Settlement
from basaltmq.broker.publishing.router import MessageRouter
from basaltmq.broker.publishing.tick_batch import TickBatch
from basaltmq.durability import Durability
from basaltmq.errors import BasaltError, CorruptionError, PreconditionFailedError, StorageError, StoreStalledError
from basaltmq.queues.plane import QueuePlane
from basaltmq.store.sync.loop_commit import LoopCommit

BATCH_MESSAGES_MAX: Final = 5000
BATCH_BYTES_MAX: Final = 32 << 20
"""Larger turns are written as several batches, so that none exceeds the store's limit."""

TURN_BYTES_MAX: Final = 4 << 20
"""Bodies written per turn, or one larger message. RocksDB takes 2 to 4 ms per megabyte and holds the GIL."""

SYNC_HERE_BYTES_MAX: Final = 512 << 10
"""Bodies in a batch that the loop may sync itself. Larger batches take too long: 10 MB about 50 ms."""

STALL_RETRY_S: Final = 0.02
"""Delay between tries while the store is stalled."""

_log: Final = logging.getLogger(__name__)


class StreamAppend(Protocol):
    """Accepts messages for stream queues."""

    def append(self, queue: BrokerQueue, messages: Sequence[tuple[bytes, bytes]]) -> asyncio.Future[None]:
        """Append (envelope, body) pairs; the future resolves when they are durable."""
        ...


class Tick:
    """Gathers the work of clients of one virtual host and does it at the end of the loop's turn."""

    def __init__(
        self, owner: Failing, plane: QueuePlane, commit: LoopCommit, router: MessageRouter, streams: StreamAppend
    ) -> None:
        """`owner` is the virtual host, which fails on a disk error."""
        self._owner = owner
        self._plane = plane
        self._commit = commit
        self._streams = streams
        self.router = router
        self.dispatch = Dispatch(plane, settle=self.settle)
        self.chores = Chores()
        self.pending: list[Publish] = []
        self.settlements: list[Settlement] = []
        self.is_stalled = False
        self.on_stalled: Callable[[bool], None] = lambda stalled: None
        """Called when a stall of the store begins or ends."""
        self.unsynced = 0
        """Batches that are not confirmed yet."""
        self._loop: asyncio.AbstractEventLoop | None = None
        self._is_scheduled = False
        self._is_stopped = False

    def start(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop

    def stop(self) -> None:
        """Run no further turns."""
        self._is_stopped = True

    def drop(self) -> None:
        """Stop, and discard what was gathered, after the virtual host has failed."""
        self.stop()
        self.pending = []
        self.settlements = []

    def has_gathered(self) -> bool:
        return bool(self.pending or self.settlements)

    def publish(self, messages: Sequence[Publish]) -> None:
        """Gather messages. Returns and confirms follow at the end of the turn or after the sync."""
        self.pending += messages
        if not self._is_scheduled:
            self.schedule()

    def settle(self, settlement: Settlement) -> None:
        """Gather deliveries that a consumer has acknowledged, requeued or rejected."""
        self.settlements.append(settlement)
        if not self._is_scheduled:
            self.schedule()

    def serve(self, queue: BrokerQueue) -> None:
        """Deliver from a queue in the next turn."""
        self.dispatch.add(queue)
        if not self._is_scheduled:
            self.schedule()

    def add_chore(self, chore: Chore) -> None:
        self.chores.add(chore)
        self.schedule()

    def schedule(self) -> None:
        """Run a turn soon."""
        if self._loop is not None and not self._is_scheduled:
            self._is_scheduled = True
            self._loop.call_soon(self._turn)

    def flush(self, *, for_turn: bool = False) -> None:
        """Write what was gathered. With `for_turn` only as many bytes as fit a turn, unless the rest is too large."""
        while self.pending or self.settlements:
            publishes, rest, size_bytes = _cut(self.pending, TURN_BYTES_MAX if for_turn else BATCH_BYTES_MAX)
            if size_bytes > SYNC_HERE_BYTES_MAX:
                self._commit.sync_in_thread()
            settlements = self.settlements
            self.pending, self.settlements = rest, []
            try:
                self._apply(publishes, settlements)
            except StoreStalledError:
                self.pending = publishes + self.pending
                self.settlements = settlements + self.settlements
                self._set_stalled(True)
                if self._loop is not None:
                    self._loop.call_later(STALL_RETRY_S, self.schedule)
                return
            except StorageError as error:
                self._owner.fail(error)
                return
            self._set_stalled(False)
            if for_turn and rest and sum([len(each[4]) for each in rest]) <= BATCH_BYTES_MAX:
                return

    def commit_tx(self, publishes: list[Publish], settlements: list[Settlement]) -> asyncio.Future[None]:
        """Write all of it as one batch or nothing; the future resolves when it is durable."""
        batch = self.router.sort(publishes)
        if batch.has_refused:
            raise PreconditionFailedError("the transaction publishes to a full queue; nothing was applied")
        with self._plane.change():
            self._write(batch, settlements)
        self._deliver(batch)
        waits = [self._streams.append(queue, messages) for queue, messages in batch.streams.items()]
        waits.append(self._commit.durable())
        result: asyncio.Future[None] = asyncio.get_running_loop().create_future()

        def finish(done: asyncio.Future[Any]) -> None:
            error = done.exception()
            if isinstance(error, StorageError):
                self._owner.fail(error)
            if not result.done():
                if error is None:
                    result.set_result(None)
                else:
                    result.set_exception(error)

        asyncio.gather(*waits).add_done_callback(finish)
        self.schedule()
        return result

    def _turn(self) -> None:
        """Write the batch, deliver to consumers and run chores."""
        self._is_scheduled = False
        if self._is_stopped:
            return
        self.flush(for_turn=True)
        can_go_on = True
        if not self._is_stopped and self.dispatch:
            with QuietGuard(self._owner):
                can_go_on = self.dispatch.run()
        if not self._is_stopped and self.chores and can_go_on:
            can_go_on = False
            with QuietGuard(self._owner):
                self.chores.run()
                can_go_on = True
        if self._is_stopped or self._loop is None:
            return
        if not can_go_on:
            self._loop.call_later(STALL_RETRY_S, self.schedule)
        elif self.dispatch or self.chores or (self.has_gathered() and not self.is_stalled):
            self.schedule()

    def _set_stalled(self, is_stalled: bool) -> None:
        if is_stalled != self.is_stalled:
            self.is_stalled = is_stalled
            self.on_stalled(is_stalled)

    def _apply(self, publishes: list[Publish], settlements: list[Settlement]) -> None:
        """Write one batch. After a stall halfway, the lists contain what was not written."""
        try:
            batch = self.router.sort(publishes)
            if batch.steps or batch.instant or settlements:
                with self._plane.change():
                    self._write(batch, settlements)
        except Exception as error:
            if isinstance(error, StorageError) and not isinstance(error, CorruptionError):
                raise
            self._apply_apart(publishes, settlements, error)
            return
        self._confirm(batch)

    def _apply_apart(self, publishes: list[Publish], settlements: list[Settlement], error: Exception) -> None:
        """One operation failed the batch: do them one by one, and refuse the one that fails."""
        if len(publishes) + len(settlements) == 1:
            self._refuse(publishes, settlements, error)
            return
        while settlements:
            self._apply([], [settlements[0]])
            del settlements[0]
        while publishes:
            self._apply([publishes[0]], [])
            del publishes[0]

    def _refuse(self, publishes: list[Publish], settlements: list[Settlement], error: Exception) -> None:
        """Nack a publish that fails. A settlement of an expired lease has no effect."""
        if not isinstance(error, BasaltError):
            _log.error("an operation failed", exc_info=error)
        for publisher, exchange, _, _, _, _, number in publishes:
            _log.warning("a message to exchange %r was refused: %s", exchange, error)
            if number:
                _call(publisher.confirmed, [number], False)
        for settlement in settlements:
            if len(settlement.ids) > 1:
                self._apply([], [settlement._replace(ids=[message_id]) for message_id in settlement.ids])

    def _write(self, batch: TickBatch, settlements: Iterable[Settlement]) -> None:
        """Apply the operations of a batch to the plane, inside a change."""
        plane = self._plane
        for queues, drafts in batch.steps:
            if len(queues) == 1:
                plane.enqueue(queues[0].name, drafts, durability=Durability.WRITTEN)
            else:
                plane.publish_many([queue.name for queue in queues], drafts, durability=Durability.WRITTEN)
        for queue, drafts in batch.instant.items():
            batch.delivered.append((queue, plane.deliver(queue.name, drafts, visibility_ms=queue.lease_ms)))
        for name, token, ids, outcome in settlements:
            if outcome == ACK:
                plane.ack(name, token, ids)
            elif outcome == REQUEUE:
                plane.release(name, token, ids)
            else:
                plane.nack(name, token, ids, reject=True)

    def _deliver(self, batch: TickBatch) -> None:
        """Deliver messages with TTL 0 to their consumers, and return messages without a route."""
        for queue, deliveries in batch.delivered:
            self.dispatch.deliver_leased(queue, deliveries)
        for publisher, exchange, key, raw, body, _, _ in batch.returns:
            _call(publisher.returned, exchange, key, raw, body)

    def _confirm(self, batch: TickBatch) -> None:
        """The batch is written: count, deliver, and confirm now or after the sync."""
        for queues, drafts in batch.steps:
            for queue in queues:
                queue.published += len(drafts)
        for queue, deliveries in batch.delivered:
            queue.published += len(deliveries)
        self._deliver(batch)
        for publisher, numbers in batch.nacks.items():
            _call(publisher.confirmed, numbers, False)
        if batch.confirms:
            # Confirm one turn later, as after a sync. Publishers confirmed at once would outrun the consumers.
            self.unsynced += 1
            asyncio.get_running_loop().call_soon(self._synced, batch.confirms, None)
        waits = [self._streams.append(queue, messages) for queue, messages in batch.streams.items()]
        if not batch.synced:
            return
        self.unsynced += 1
        if not waits:
            self._commit.after_sync(asyncio.get_running_loop(), [partial(self._synced, batch.synced)])
            return
        if batch.steps or batch.instant:
            waits.append(self._commit.durable())
        asyncio.gather(*waits).add_done_callback(partial(self._appended, batch.synced))

    def _appended(self, confirms: dict[Publisher, list[int]], done: asyncio.Future[Any]) -> None:
        if done.cancelled():
            self.unsynced -= 1
        else:
            self._synced(confirms, done.exception())

    def _synced(self, confirms: dict[Publisher, list[int]], error: BaseException | None) -> None:
        self.unsynced -= 1
        if isinstance(error, StorageError):
            self._owner.fail(error)
            return
        if error is not None:
            _log.warning("messages were refused: %s", error)
        for publisher, numbers in confirms.items():
            _call(publisher.confirmed, numbers, error is None)


def _call(callback: Callable[..., None], *values: Any) -> None:
    """Call a publisher. Its bug must not affect other publishers: the batch is written."""
    try:
        callback(*values)
    except Exception:
        _log.exception("a publisher could not be notified about its messages")


def _cut(pending: list[Publish], bytes_max: int) -> tuple[list[Publish], list[Publish], int]:
    """Split off one batch: its messages, the rest, and the bytes of the batch's bodies."""
    size_bytes = sum([len(each[4]) for each in pending])
    if len(pending) <= BATCH_MESSAGES_MAX and size_bytes <= bytes_max:
        return pending, [], size_bytes
    size_bytes = 0
    for index, each in enumerate(pending):
        if index and (size_bytes + len(each[4]) > bytes_max or index >= BATCH_MESSAGES_MAX):
            return pending[:index], pending[index:], size_bytes
        size_bytes += len(each[4])
    return pending, [], size_bytes
