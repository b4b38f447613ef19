"""Writes gathered operations to the queue plane, as one change if possible."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from basaltmq.broker.message.operations import ACK, REJECT, REQUEUE, Publish, Settlement, Waiter
from basaltmq.broker.publishing.gathered import Gathered
from basaltmq.broker.publishing.router import MessageRouter
from basaltmq.broker.publishing.tick_batch import TickBatch
from basaltmq.durability import Durability
from basaltmq.errors import CorruptionError, PreconditionFailedError, StorageError
from basaltmq.queues.config import Overflow
from basaltmq.queues.plane import QueuePlane


class BatchWriter:
    """Writes to the queues of one virtual host."""

    def __init__(self, plane: QueuePlane, router: MessageRouter) -> None:
        self._plane = plane
        self._router = router

    def parts(self, batch: Gathered) -> list[Gathered]:
        """Split a batch into parts that are each written as one change. Return them in reverse order.

        A call to a queue that rejects messages at its limit is a part of its own, because the refusal concerns one
        call. A call to a missing queue is refused at once.
        """
        if not batch.enqueues:
            return [batch]
        alone: list[Gathered] = []
        for queue in {call.queue for call in batch.enqueues}:
            try:
                if self._plane.get(queue).overflow is Overflow.DROP_HEAD:
                    continue
            except Exception as error:
                if isinstance(error, StorageError) and not isinstance(error, CorruptionError):
                    # The write raises the same error.
                    continue
                refuse([Gathered(enqueues=[call for call in batch.enqueues if call.queue == queue])], error)
            else:
                alone += [Gathered(enqueues=[call]) for call in reversed(batch.enqueues) if call.queue == queue]
            batch.enqueues = [call for call in batch.enqueues if call.queue != queue]
        return [*alone, batch] if batch else alone

    def write(self, part: Gathered) -> TickBatch:
        """Write a part completely or not at all. Return the confirms and the completed calls."""
        batch = self._router.sort(part.publishes) if part.publishes else TickBatch()
        for call in part.enqueues:
            batch.enqueues.setdefault(call.queue, []).append(call)
        if len(batch.enqueues) == 1 and part.has_only_enqueues():
            # One operation of the plane. A change would not report that a full queue dead-lettered the messages.
            self._enqueue(batch)
        elif batch.steps or batch.instant or batch.enqueues or part.settlements or part.rows:
            with self._plane.change():
                self._apply(batch, part.settlements)
                for _, change in part.rows:
                    self._plane.write_rows(change.rows)
        batch.synced_completions += [(change.waiter, None) for _, change in part.rows if change.waiter is not None]
        return batch

    def write_tx(self, publishes: Sequence[Publish], settlements: Sequence[Settlement]) -> TickBatch:
        """Write a transaction as one change, or raise."""
        batch = self._router.sort(publishes)
        if batch.has_refused:
            raise PreconditionFailedError("the transaction publishes to a full queue; nothing was applied")
        with self._plane.change():
            self._apply(batch, settlements)
        return batch

    def _apply(self, batch: TickBatch, settlements: Iterable[Settlement]) -> None:
        """Apply the operations of a batch to the plane, inside a change."""
        plane = self._plane
        for queues, drafts in batch.steps:
            if len(queues) == 1:
                plane.enqueue(queues[0].name, drafts, durability=Durability.WRITTEN)
            else:
                plane.publish_many([queue.name for queue in queues], drafts, durability=Durability.WRITTEN)
        if batch.enqueues:
            self._enqueue(batch)
        for queue, drafts in batch.instant.items():
            batch.delivered.append((queue, plane.deliver(queue.name, drafts, visibility_ms=queue.lease_ms)))
        acked: dict[tuple[str, int], list[bytes]] = {}
        for name, token, ids, outcome, edit in settlements:
            if outcome == ACK:
                # Most clients acknowledge each message alone. One call per lease costs a fraction of one per message.
                acked.setdefault((name, token), []).extend(ids)
            elif outcome == REQUEUE and edit is None:
                plane.release(name, token, ids)
            else:
                plane.nack(name, token, ids, reject=outcome == REJECT, edit=edit, is_failure=outcome != REQUEUE)
        for (name, token), ids in acked.items():
            plane.ack(name, token, ids)

    def _enqueue(self, batch: TickBatch) -> None:
        for queue, calls in batch.enqueues.items():
            drafts = calls[0].drafts if len(calls) == 1 else [draft for call in calls for draft in call.drafts]
            ids = self._plane.enqueue(queue, drafts, durability=Durability.WRITTEN)
            config = self._plane.get(queue)
            # With `extra` the broker manages the queue. `durability` then says when the broker is done with a message,
            # not when the message is durable, so wait for the sync.
            is_synced = bool(config.extra) or config.durability is Durability.SYNCED
            completions = batch.synced_completions if is_synced else batch.completions
            at = 0
            for call in calls:
                completions.append((call.waiter, ids[at : at + len(call.drafts)]))
                at += len(call.drafts)


def refuse(parts: Iterable[Gathered], error: BaseException) -> None:
    """Report an error to the callers of enqueues and row changes that still wait."""
    for part in parts:
        waiters: list[Waiter[Any]] = [call.waiter for call in part.enqueues]
        waiters += [change.waiter for _, change in part.rows if change.waiter is not None]
        for waiter in waiters:
            if not waiter.done():
                waiter.set_exception(error)
