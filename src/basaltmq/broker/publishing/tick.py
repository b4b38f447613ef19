"""The tick: all operations of clients in one turn of the loop are written as one batch, for all protocols.

    publish, enqueue, settle ─> gather ─> one change of the queue plane ─┬─> returns, confirms without a sync
                                                                         ├─> deliveries to consumers
                                                                         └─> WAL sync ─> confirms, completed calls

- `publish`: messages for an exchange. The router finds their queues; the publisher gets returns and confirms.
- `enqueue`: messages for a named queue. The waiter gets their ids.
- `settle`: deliveries that are acknowledged, requeued or rejected.
- `write_rows`: rows of a protocol that belong to the publishes and settlements of the turn.
- `commit_tx`: publishes and settlements that are one batch of their own.

A turn runs in this order: write the batch, serve consumers, run chores, give credit to publishers (see `credit`).

A message is confirmed when every queue that accepted it has stored it. If it is persistent and one of the queues is
durable, that is after the sync, otherwise after the write. A message that no queue accepted is confirmed too; a
`mandatory` one is returned first. A full queue that rejects publishes turns the confirm into a nack. An enqueue
completes when it is as durable as its queue requires.

Publishes and settlements are written at the end of the turn, with all enqueues that are gathered by then. A write with
its sync costs about 600 us, and one more call in it 50 us. So while only enqueues are gathered, they wait for more in
two cases:

- No sync is running, and the last turn brought an enqueue: wait for one more turn, up to `GATHER_TURNS_MAX`. Callers
  whose calls completed together return one by one.
- A sync is running: an enqueue cannot be durable before the next sync, so it shares the next write. The calls of the
  finished sync complete before that write. Otherwise they would wait for the next sync.

If the store is stalled, nothing of the batch is written. Everything stays gathered, publishers are blocked, and the
tick tries again. If one operation fails the batch, its halves are written instead, until only the bad operation is
refused. An error of the disk fails the virtual host. Nothing unconfirmed is confirmed, and callers that wait get the
error.

A caller that disconnects does not withdraw its operations.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Final, Protocol

from basaltmq.broker.consumers.dispatch import Dispatch
from basaltmq.broker.consumers.queue import BrokerQueue
from basaltmq.broker.guard import Failing, QuietGuard
from basaltmq.broker.message.operations import Enqueue, Publish, Publisher, RowChange, Settlement
from basaltmq.broker.publishing.credit import CHECK_S, PublisherCredit
from basaltmq.broker.publishing.gathered import BATCH_BYTES_MAX, TURN_BYTES_MAX, Gathered
from basaltmq.broker.publishing.router import MessageRouter
from basaltmq.broker.publishing.tick_batch import Completions, TickBatch
from basaltmq.broker.publishing.writer import BatchWriter, refuse
from basaltmq.broker.scheduling.chores import Chore, Chores
from basaltmq.errors import BasaltError, CorruptionError, StorageError, StoreStalledError
from basaltmq.queues.plane import QueuePlane
from basaltmq.store.sync.loop_commit import LoopCommit

GATHER_TURNS_MAX: Final = 16
"""Turns in which enqueues are gathered while each turn brings another: about 1 ms for single messages."""

GATHER_BYTES_MAX: Final = 1 << 20
"""Payload bytes of gathered enqueues above which they do not wait for more enqueues or for the running sync."""

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
    """Gathers the operations of clients of one virtual host and executes them at the end of the loop's turn."""

    def __init__(
        self, owner: Failing, plane: QueuePlane, commit: LoopCommit, router: MessageRouter, streams: StreamAppend
    ) -> None:
        """`owner` is the virtual host, which fails on a disk error."""
        self._owner = owner
        self._writer = BatchWriter(plane, router)
        self._commit = commit
        self._streams = streams
        self.router = router
        self.dispatch = Dispatch(plane, settle=self.settle)
        self.credit = PublisherCredit(plane)
        self.chores = Chores()
        self.gathered = Gathered()
        self.is_stalled = False
        self.on_stalled: Callable[[bool], None] = lambda stalled: None
        """Called when a stall of the store begins or ends."""
        self.unsynced = 0
        """Batches that are not confirmed yet."""
        self._syncs = 0
        """Running or requested syncs of the store."""
        self._has_come = False
        """Whether an enqueue arrived in this turn."""
        self._turns = 0
        """Turns for which the gathered enqueues have waited for more."""
        self._loop: asyncio.AbstractEventLoop | None = None
        self._is_scheduled = False
        self._is_checking = False
        """Whether a timer runs that checks the speed of consumers."""
        self._is_stopped = False

    def start(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop

    def stop(self, error: BasaltError) -> None:
        """Run no further turns, and discard what is still gathered. Callers that wait get the error."""
        self._is_stopped = True
        gathered, self.gathered = self.gathered, Gathered()
        refuse([gathered], error)
        self.credit.drop()

    def publish(self, messages: Sequence[Publish]) -> None:
        """Gather messages for exchanges. Returns and confirms follow at the end of the turn or after the sync."""
        self.gathered.publishes += messages
        if not self._is_scheduled:
            self.schedule()

    def enqueue(self, call: Enqueue) -> None:
        """Gather messages for one queue. The waiter gets their ids, or the error."""
        self.gathered.add_enqueue(call)
        self._has_come = True
        if not self._is_scheduled and not self._awaits_sync():
            self.schedule()

    def settle(self, settlement: Settlement) -> None:
        """Gather deliveries that a consumer has acknowledged, requeued or rejected."""
        self.gathered.settlements.append(settlement)
        if not self._is_scheduled:
            self.schedule()

    def write_rows(self, change: RowChange) -> None:
        """Gather rows of a protocol. They are written with the publishes that were gathered before them."""
        self.gathered.add_rows(change)
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

    def wait_for_credit(self, queues: Sequence[BrokerQueue], go_on: Callable[[], None]) -> None:
        """Call `go_on` in the turn in which these queues give credit to publishers."""
        self.credit.wait(queues, go_on)
        self.schedule()

    def schedule(self) -> None:
        """Run a turn soon."""
        if self._loop is not None and not self._is_scheduled:
            self._is_scheduled = True
            self._loop.call_soon(self._turn)

    def flush(self, *, for_turn: bool = False) -> None:
        """Write what was gathered. With `for_turn` only as many bytes as fit a turn, unless the rest is too large."""
        while self.gathered:
            batch, size_bytes = self.gathered.take(TURN_BYTES_MAX if for_turn else BATCH_BYTES_MAX)
            if size_bytes > SYNC_HERE_BYTES_MAX:
                self._commit.sync_in_thread()
            parts = self._writer.parts(batch)
            try:
                self._write_parts(parts)
            except StoreStalledError:
                self.gathered.put_back(reversed(parts))
                self._set_stalled(True)
                if self._loop is not None:
                    self._loop.call_later(STALL_RETRY_S, self.schedule)
                return
            except StorageError as error:
                self._owner.fail(error)
                refuse(parts, error)
                return
            self._set_stalled(False)
            if for_turn and self.gathered and self.gathered.size_bytes() <= BATCH_BYTES_MAX:
                return

    def commit_tx(self, publishes: list[Publish], settlements: list[Settlement]) -> asyncio.Future[None]:
        """Write all of it as one batch or nothing; the future resolves when it is durable."""
        batch = self._writer.write_tx(publishes, settlements)
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
        """Write the batch, deliver to consumers and run chores. Schedule the next turn if work is left."""
        try:
            can_go_on = self._work()
        finally:
            self._is_scheduled = False
        if self._is_stopped or self._loop is None:
            return
        self.credit.next_turn()
        if self.credit.needs_check and not self._is_checking:
            self._is_checking = True
            self._loop.call_later(CHECK_S, self._check_speed)
        if not can_go_on:
            self._loop.call_later(STALL_RETRY_S, self.schedule)
        elif self.dispatch or self.chores or (self.gathered and not self.is_stalled and not self._awaits_sync()):
            self.schedule()

    def _check_speed(self) -> None:
        self._is_checking = False
        self.credit.check_speed()
        if self.credit.needs_check and self._loop is not None and not self._is_stopped:
            self._is_checking = True
            self._loop.call_later(CHECK_S, self._check_speed)

    def _work(self) -> bool:
        """Return False if the store is stalled."""
        if self._is_stopped:
            return True
        if not self._is_gathering():
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
        return can_go_on

    def _awaits_sync(self) -> bool:
        """Whether only a few enqueues are gathered, and a sync is running. They are written when it is done."""
        return self._syncs > 0 and self._has_few_enqueues()

    def _is_gathering(self) -> bool:
        """Whether to leave the gathered enqueues for a later turn, because more may come."""
        if self._awaits_sync():
            return True
        if self._has_come and self._turns < GATHER_TURNS_MAX and self._has_few_enqueues():
            self._has_come = False
            self._turns += 1
            return True
        self._turns = 0
        return False

    def _has_few_enqueues(self) -> bool:
        return self.gathered.enqueue_bytes <= GATHER_BYTES_MAX and self.gathered.has_only_enqueues()

    def _set_stalled(self, is_stalled: bool) -> None:
        if is_stalled != self.is_stalled:
            self.is_stalled = is_stalled
            self.on_stalled(is_stalled)

    def _write_parts(self, parts: list[Gathered]) -> None:
        """Write parts, the last one first, and remove them. If one operation fails a part, write its halves instead.

        After an error of the store, `parts` contains what was not written.
        """
        while parts:
            try:
                batch = self._writer.write(parts[-1])
            except Exception as error:
                if isinstance(error, StorageError) and not isinstance(error, CorruptionError):
                    raise
                part = parts.pop()
                halves = part.halves()
                if halves is None:
                    self._refuse(part, error)
                else:
                    parts += reversed(halves)
                continue
            parts.pop()
            self._confirm(batch)

    def _refuse(self, part: Gathered, error: Exception) -> None:
        """Report the error of one operation. A settlement of an expired lease has no effect."""
        if not isinstance(error, BasaltError):
            _log.error("an operation failed", exc_info=error)
        for publisher, exchange, _, _, _, _, number in part.publishes:
            _log.warning("a message to exchange %r was refused: %s", exchange, error)
            if number:
                _call(publisher.confirmed, [number], False)
        refuse([part], error)

    def _deliver(self, batch: TickBatch) -> None:
        """Deliver messages with TTL 0 to their consumers, and return messages without a route."""
        for queue, deliveries in batch.delivered:
            self.dispatch.deliver_leased(queue, deliveries)
        for publisher, exchange, key, raw, body, _, number in batch.returns:
            _call(publisher.returned, exchange, key, raw, body, number)

    def _confirm(self, batch: TickBatch) -> None:
        """Finish a written batch: count, deliver, and confirm now or after the sync."""
        for queues, drafts in batch.steps:
            for queue in queues:
                queue.published += len(drafts)
            self.credit.check(queues)
        for queue, deliveries in batch.delivered:
            queue.published += len(deliveries)
        for run in batch.direct:
            for sink in run.sinks:
                _call(sink.deliver_direct, run)
        self._deliver(batch)
        for publisher, numbers in batch.nacks.items():
            _call(publisher.confirmed, numbers, False)
        if batch.confirms or batch.completions:
            # Confirm one turn later, as after a sync. Publishers confirmed at once would outrun the consumers.
            self.unsynced += 1
            asyncio.get_running_loop().call_soon(self._complete, batch.confirms, batch.completions, None)
        waits = [self._streams.append(queue, messages) for queue, messages in batch.streams.items()]
        if waits and batch.synced:
            self.unsynced += 1
            if batch.steps or batch.instant:
                waits.append(self._commit.durable())
            asyncio.gather(*waits).add_done_callback(partial(self._appended, batch.synced))
            batch.synced = {}
        if batch.synced or batch.synced_completions:
            self.unsynced += 1
            self._syncs += 1
            synced = partial(self._synced, batch.synced, batch.synced_completions)
            try:
                self._commit.after_sync(asyncio.get_running_loop(), [synced])
            except BasaltError as error:
                synced(error)

    def _appended(self, confirms: dict[Publisher, list[int]], done: asyncio.Future[Any]) -> None:
        if done.cancelled():
            self.unsynced -= 1
        else:
            self._complete(confirms, [], done.exception())

    def _synced(
        self, confirms: dict[Publisher, list[int]], completions: Completions, error: BaseException | None
    ) -> None:
        self._syncs -= 1
        self._complete(confirms, completions, error)
        if self.gathered:
            # In the next turn: by then the responses are sent, and the requests that arrived during the sync are read.
            self.schedule()

    def _complete(
        self, confirms: dict[Publisher, list[int]], completions: Completions, error: BaseException | None
    ) -> None:
        """Confirm the messages of a batch, or refuse them with the error of the sync."""
        self.unsynced -= 1
        if error is not None:
            if isinstance(error, StorageError):
                self._owner.fail(error)
                confirms = {}
            else:
                _log.warning("messages were refused: %s", error)
        for publisher, numbers in confirms.items():
            _call(publisher.confirmed, numbers, error is None)
        for waiter, ids in completions:
            if waiter.done():
                continue
            if error is None:
                waiter.set_result(ids)
            else:
                waiter.set_exception(error)


def _call(callback: Callable[..., None], *values: Any) -> None:
    """Call a publisher. Its bug must not affect other publishers: the batch is written."""
    try:
        callback(*values)
    except Exception:
        _log.exception("a publisher could not be notified about its messages")
