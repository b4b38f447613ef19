"""A virtual host: exchanges, queues and consumers over one store (SPEC E6 to E9).

    protocols ─> declare, bind ...  executed at once, written before the reply
              ─> publish, enqueue   gathered, written as one batch at the end of the loop's turn (publishing/tick.py)
              ─> settle             the same
              <─ deliveries         a bounded batch per queue and turn (consumers/dispatch.py)
              <─ confirms           after the sync

All methods are synchronous and run on one event loop. Slow work (syncs, retention) runs in threads. Every operation
first writes what was gathered before it, so a client's operations take effect in their order.

A disk error fails the virtual host, so no partial state remains in use. No further message is confirmed, attached
connections are notified, and the supervisor reopens the store through recovery.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, Final

from basaltmq.broker.consumers.consumer import Consumer, ConsumerSink
from basaltmq.broker.consumers.queue import BrokerQueue, QueueInfo
from basaltmq.broker.consumers.selection import Selection
from basaltmq.broker.consumers.stream_queue import StreamQueues
from basaltmq.broker.consumers.stream_spool import StreamSpool
from basaltmq.broker.guard import Guard, QuietGuard
from basaltmq.broker.message.operations import ACK, REJECT, REQUEUE, Enqueue, Publish, Publisher, RowChange, Settlement
from basaltmq.broker.policy_effects import PolicyEffects
from basaltmq.broker.publishing.router import MessageRouter
from basaltmq.broker.publishing.tick import Tick
from basaltmq.broker.queue_table import QueueTable
from basaltmq.broker.routing.exchange import EXCHANGE, QUEUE, Arguments, Destination, Exchange
from basaltmq.broker.routing.policy import Policies
from basaltmq.broker.routing.topology import Topology
from basaltmq.broker.scheduling.chores import CHORES_S
from basaltmq.broker.vhost_streams import VHostStreams
from basaltmq.broker.vhost_timers import VHostTimers
from basaltmq.errors import (
    AccessRefusedError,
    BasaltError,
    ExchangeNotFoundError,
    PreconditionFailedError,
    VHostDownError,
)
from basaltmq.queues.config import QueueConfig
from basaltmq.queues.events.topic import EventSettings, EventWriter
from basaltmq.queues.message import Message
from basaltmq.queues.plane import QueuePlane
from basaltmq.queues.ready.budget import MemoryBudget
from basaltmq.queues.scripts.budget import ScriptBudget
from basaltmq.store.api import Store
from basaltmq.store.space.size import SizeGuard
from basaltmq.store.sync.loop_commit import LoopCommit

DRAIN_S: Final = 30.0
"""Maximum time that `close` waits for pending confirms."""

__all__ = ["ACK", "REJECT", "REQUEUE", "Publisher", "Settlement", "VHost"]

_log: Final = logging.getLogger(__name__)


class VHost:
    """An open virtual host. Construct it in a thread, then call `start` on its loop."""

    def __init__(
        self,
        name: str,
        store: Store,
        *,
        path: Path | None = None,
        clock_ns: Callable[[], int] = time.time_ns,
        budget: MemoryBudget | None = None,
        script_budget: ScriptBudget | None = None,
        event_sample: float = 0.0,
    ) -> None:
        """Recover the state from the store. This can take long: call it in a thread, then `start` on the loop.

        `budget` limits the memory of queues and `script_budget` the time of scripts; all virtual hosts share both.
        `event_sample` is the fraction of messages whose events are recorded in the topic `__events`.
        """
        self.name = name
        self.store = store
        self.error: BaseException | None = None
        """The error that failed this virtual host."""
        self.size_guard: SizeGuard | None = None
        """Blocks publishers while the store exceeds its size limit. Closed with the planes."""
        self.on_failed: Callable[[BaseException], None] = lambda error: None
        """Called once, when the virtual host fails."""
        self._clock_ns = clock_ns
        self._loop: asyncio.AbstractEventLoop | None = None
        self._attached: dict[object, Callable[[BaseException], None]] = {}
        self._closing = False
        self.commit = LoopCommit(store)
        try:
            self._open_planes(path, budget, script_budget)
            self._load()
        except BaseException:
            self.commit.close()
            raise
        self.events = self._record_events(event_sample) if event_sample else None

    def _open_planes(self, path: Path | None, budget: MemoryBudget | None, script_budget: ScriptBudget | None) -> None:
        self.plane = QueuePlane(
            self.store,
            self.commit,
            clock_ns=self._clock_ns,
            on_deadline=self._deadline_moved,
            budget=budget,
            script_budget=script_budget,
        )
        self.plane.dead_letter_router = self._dead_letter
        self.streams = VHostStreams(self.store, path, lambda: self._clock_ns() // 1_000_000)

    def _load(self) -> None:
        """Create the parts, and load policies, queues, exchanges and bindings from the store."""
        by_name: dict[str, BrokerQueue] = {}
        self.policies = Policies(self.store)
        self.policies.load()
        self.topology = Topology(self.store, self.name, has_queue=by_name.__contains__)
        self._exchanges = self.topology.exchanges
        self.stream_queues = StreamQueues(self.streams, by_name, failed=self.fail)
        router = MessageRouter(self.plane, self.topology, by_name, self._clock_ns)
        self.tick = Tick(self, self.plane, self.commit, router, self.stream_queues)
        self.stream_queues.listen(self.tick.serve)
        self.clock = VHostTimers(self, self.plane, self.streams, self._clock_ns)
        self.queues = QueueTable(
            self.name,
            by_name,
            self.plane,
            self.stream_queues,
            self.policies,
            self.topology,
            self.tick,
            due=self.clock.due_at,
            clock_ns=self._clock_ns,
        )
        faults = self.queues.load()
        faults += self.topology.load(by_name.__contains__, self.queues.unserved.__contains__)
        for fault in faults:
            _log.warning("vhost %r: %s", self.name, fault)
        self.spool = StreamSpool(self.plane, self.stream_queues, self.tick.settle)
        self._effects = PolicyEffects(self.policies, self.topology, self.queues)
        self.policies.changed = self._policies_changed
        self._policies_changed()
        self.plane.listen(self._ready)

    def _record_events(self, sample: float) -> EventWriter:
        writer = EventWriter(self.streams.plane, EventSettings(sample=sample, engine=self.streams.default_engine))
        self.plane.record_events(writer.recorder)
        return writer

    def start(self) -> None:
        """Start serving on the running loop."""
        self._loop = asyncio.get_running_loop()
        self.tick.start(self._loop)
        self.clock.start(self._loop, self.queues.expire)
        for queue in self.queues:
            if queue.is_stream:
                self._loop.call_soon(self._move_spooled, queue)

    @property
    def is_up(self) -> bool:
        return self.error is None and not self._closing

    def declare_exchange(
        self,
        name: str,
        kind: str,
        *,
        durable: bool = True,
        auto_delete: bool = False,
        internal: bool = False,
        arguments: Arguments | None = None,
        passive: bool = False,
    ) -> Exchange:
        self._flush_gathered()
        with Guard(self):
            exchange = self.topology.declare(
                name,
                kind,
                durable=durable,
                auto_delete=auto_delete,
                internal=internal,
                arguments=arguments,
                passive=passive,
            )
            self._effects.apply(exchange)
        return exchange

    def delete_exchange(self, name: str, *, if_unused: bool = False) -> bool:
        self._flush_gathered()
        with Guard(self):
            return self.topology.delete(name, if_unused=if_unused)

    def bind_exchange(
        self, destination: str, source: str, routing_key: str, arguments: Arguments | None = None
    ) -> bool:
        self._flush_gathered()
        with Guard(self):
            durable = self.topology.get(destination).durable
            return self.topology.bind(
                source, Destination(EXCHANGE, destination), routing_key, arguments, durable=durable
            )

    def unbind_exchange(
        self, destination: str, source: str, routing_key: str, arguments: Arguments | None = None
    ) -> bool:
        self._flush_gathered()
        with Guard(self):
            return self.topology.unbind(source, Destination(EXCHANGE, destination), routing_key, arguments) is not None

    def declare_queue(
        self,
        name: str,
        *,
        durable: bool = False,
        exclusive: bool = False,
        auto_delete: bool = False,
        arguments: Arguments | None = None,
        passive: bool = False,
        owner: object = None,
    ) -> QueueInfo:
        """Return the queue of this name, created if it is missing. For an empty name the server generates one."""
        self._flush_gathered()
        with Guard(self):
            return self.queues.declare(
                name,
                durable=durable,
                exclusive=exclusive,
                auto_delete=auto_delete,
                arguments=arguments or {},
                passive=passive,
                owner=owner,
            )

    def delete_queue(self, name: str, *, if_unused: bool = False, if_empty: bool = False, owner: object = None) -> int:
        """Delete a queue and return the number of its ready messages."""
        self._flush_gathered()
        with Guard(self):
            return self.queues.delete(name, if_unused=if_unused, if_empty=if_empty, owner=owner)

    def check_delete(self, name: str, *, if_unused: bool, if_empty: bool, owner: object) -> None:
        """Raise the error that `delete_queue` would raise, without deleting."""
        self._flush_gathered()
        with Guard(self):
            self.queues.check_delete(name, if_unused=if_unused, if_empty=if_empty, owner=owner)

    def bind_queue(
        self, queue: str, exchange: str, routing_key: str, arguments: Arguments | None = None, owner: object = None
    ) -> bool:
        self._flush_gathered()
        found = self.queues.get(queue, owner)
        with Guard(self):
            return self.topology.bind(
                exchange, Destination(QUEUE, queue), routing_key, arguments, durable=found.durable
            )

    def unbind_queue(
        self, queue: str, exchange: str, routing_key: str, arguments: Arguments | None = None, owner: object = None
    ) -> bool:
        self._flush_gathered()
        self.queues.get(queue, owner)
        with Guard(self):
            return self.topology.unbind(exchange, Destination(QUEUE, queue), routing_key, arguments) is not None

    def purging(self, name: str, owner: object = None) -> Iterator[int]:
        """Purge page by page and yield the count of each page. Messages that arrive after the first page stay."""
        self._flush_gathered()
        queue = self.queues.get(name, owner)
        if queue.is_stream:
            raise PreconditionFailedError(f"queue '{name}' in vhost '{self.name}' is a stream, which cannot be purged")
        return self._portions(self.plane.purging(name))

    def unbinding(self, kind: bytes, name: str) -> Iterator[int]:
        """Remove most bindings of a queue or exchange before its deletion, and yield the count of each batch."""
        return self._portions(self.topology.removing(Destination(kind, name)))

    def _portions(self, counts: Iterator[int]) -> Iterator[int]:
        while True:
            self._require_up()
            with Guard(self):
                count = next(counts, None)
            if count is None:
                return
            yield count

    def settle_in_portions(self, portions: Iterator[list[Settlement]]) -> None:
        """Settle the deliveries of a closed connection in the background, one portion at a time."""

        def settle() -> bool:
            if (portion := next(portions, None)) is None:
                return False
            self.settle(portion)
            self._flush_gathered()
            return True

        self.tick.add_chore(settle)

    def publish(
        self,
        publisher: Publisher,
        exchange: str,
        routing_key: str,
        properties: bytes,
        body: bytes,
        *,
        mandatory: bool = False,
        number: int = 0,
    ) -> None:
        """Gather a message. Its return and its confirm follow at the end of the turn or after the sync.

        `number` 0 requests no confirm. The caller has validated `properties` with `properties.peek`.
        """
        found = self._exchanges.get(exchange)
        if found is None or found.internal or self.error is not None or self._closing:
            self.check_exchange(exchange)
        self.tick.publish([(publisher, exchange, routing_key, properties, body, mandatory, number)])

    def publish_many(self, messages: Sequence[Publish]) -> None:
        """Gather messages. The caller has validated their exchanges with `check_exchange`."""
        self._require_up()
        self.tick.publish(messages)

    def enqueue(self, call: Enqueue) -> None:
        """Gather messages for one queue, without routing. The caller has checked that the queue is not a stream."""
        if self.error is not None or self._closing:
            self._require_up()
        self.tick.enqueue(call)

    def delays_large(self) -> bool:
        """Return whether publishers of large messages must wait, because the store is behind with flushes."""
        self._require_up()
        return self.store.is_behind()

    def write_rows(self, change: RowChange) -> None:
        """Gather rows of a protocol, to be written with the publishes and settlements gathered before them."""
        if self.error is not None or self._closing:
            self._require_up()
        self.tick.write_rows(change)

    def check_exchange(self, name: str) -> Exchange:
        """Return the exchange, or raise if clients may not publish to it."""
        if self.error is not None or self._closing:
            self._require_up()
        found = self.topology.exchanges.get(name)
        if found is None:
            raise ExchangeNotFoundError(f"no exchange '{name}' in vhost '{self.name}'")
        if found.internal:
            raise AccessRefusedError(f"cannot publish to internal exchange '{name}' in vhost '{self.name}'")
        return found

    def settle(self, settlements: Iterable[Settlement]) -> None:
        """Gather acknowledgements, requeues and rejects. Messages whose lease has ended are ignored."""
        self._require_up()
        queues = self.queues.by_name
        for settlement in settlements:
            queue = queues.get(settlement.queue)
            if queue is not None and not queue.is_stream:
                self.tick.settle(settlement)
                if settlement.outcome == ACK:
                    queue.acked += len(settlement.ids)

    def commit_tx(self, publishes: Sequence[Publish], settlements: Sequence[Settlement]) -> asyncio.Future[None]:
        """Apply publishes and settlements atomically in one batch. The future resolves when it is durable."""
        self._flush_gathered()
        known = self.queues.by_name
        chosen = [each for each in settlements if each.queue in known and not known[each.queue].is_stream]
        with Guard(self):
            return self.tick.commit_tx(list(publishes), chosen)

    def subscribe(
        self,
        queue: str,
        sink: ConsumerSink,
        *,
        tag: str,
        no_ack: bool = False,
        exclusive: bool = False,
        priority: int = 0,
        prefetch: int = 0,
        arguments: Arguments | None = None,
        owner: object = None,
        selection: Selection | None = None,
    ) -> Consumer:
        """Add a consumer. Deliveries start in the next turn of the loop. With a `selection`, it receives only some
        messages."""
        self._require_up()
        found = self.queues.get(queue, owner)
        if found.consumers.has_exclusive or (exclusive and len(found.consumers)):
            raise AccessRefusedError(f"queue '{queue}' in vhost '{self.name}' in exclusive use")
        consumer = Consumer(
            found,
            sink,
            tag,
            no_ack=no_ack,
            exclusive=exclusive,
            priority=priority,
            prefetch=prefetch,
            arguments=arguments or {},
            owner=owner,
            selection=selection,
        )
        if found.is_stream:
            if no_ack or not prefetch:
                what = "acknowledge" if no_ack else "set a prefetch"
                raise PreconditionFailedError(f"consumers of stream '{queue}' in vhost '{self.name}' must {what}")
            with Guard(self):
                found.stream.begin(consumer, self._clock_ns() // 1_000_000)
        if found.groups is not None:
            found.groups.add(consumer)
        found.has_ready = True
        self.queues.add_consumer(consumer)
        return consumer

    def get(self, queue: str, *, no_ack: bool = False, owner: object = None) -> tuple[Any, int] | None:
        """Return one message and the number of ready messages left, or None if the queue has none ready."""
        self._flush_gathered()
        found = self.queues.get(queue, owner)
        if found.is_stream:
            raise PreconditionFailedError(f"queue '{queue}' in vhost '{self.name}' is a stream; consume it instead")
        found.used_ns = self._clock_ns()
        with Guard(self):
            deliveries = self.plane.lease(queue, 1, visibility_ms=found.lease_ms)
            if not deliveries:
                return None
            found.delivered += 1
            if no_ack:
                self.tick.settle(Settlement(queue, deliveries[0].token, [deliveries[0].id], ACK))
            return deliveries[0], self.queues.ready(found)

    def counts(self, queue: BrokerQueue) -> dict[str, int]:
        """Return the counters of a queue, named as in the queue plane."""
        with Guard(self):
            if queue.is_stream:
                depth = self.stream_queues.depth(queue)
                return {"ready": depth, "messages": depth}
            return self.plane.stats(queue.name)

    def attach(self, owner: object, failed: Callable[[BaseException], None]) -> None:
        """Register a connection. `failed` is called if the virtual host fails."""
        self._require_up()
        self._attached[owner] = failed

    def detach(self, owner: object) -> None:
        """Remove a connection that owns no consumers and queues."""
        self._attached.pop(owner, None)

    def release_owner(self, owner: object) -> None:
        """Remove the consumers and exclusive queues of a closed connection, which has requeued its deliveries."""
        self._attached.pop(owner, None)
        if self.error is not None:
            return
        self._flush_gathered()
        with Guard(self):
            if self.queues.release_owner(owner):
                self.tick.add_chore(lambda: self.queues.release_owner(owner))

    async def close(self) -> None:
        """Write what was gathered, wait for pending confirms and close the planes. The store stays open."""
        if self._closing:
            return
        if self.error is None:
            self.tick.flush()
        self._closing = True
        self.tick.stop(VHostDownError(f"vhost '{self.name}' is closing"))
        self.clock.stop()
        until = time.monotonic() + DRAIN_S
        while self.error is None and self.tick.unsynced and time.monotonic() < until:
            await self.commit.durable()
            await asyncio.sleep(0)
        await self.clock.finish()
        await asyncio.to_thread(self.release_planes)

    def release_planes(self) -> None:
        """Close the planes. Blocks: call it in a thread."""
        if self.size_guard is not None:
            self.size_guard.close()
        self.plane.close()
        if self.events is not None:
            self.events.close()
        for close in (self.streams.close, self.commit.close):
            try:
                close()
            except BasaltError as error:
                if self.error is None:
                    _log.error("vhost %r did not close cleanly: %s", self.name, error)

    def fail(self, error: BaseException) -> None:
        """Stop after a disk error: poison the store, drop what was gathered and notify attached connections."""
        if self.error is not None:
            return
        self.error = error
        _log.error("vhost %r failed: %s", self.name, error)
        self.store.poison(error)
        self.clock.stop()
        self.tick.stop(VHostDownError(f"vhost '{self.name}' is down: {error}"))
        attached, self._attached = self._attached, {}
        for failed in attached.values():
            try:
                failed(error)
            except Exception:
                _log.exception("cannot notify a connection of the failure of vhost %r", self.name)
        self.on_failed(error)

    def _require_up(self) -> None:
        if self.error is not None:
            raise VHostDownError(f"vhost '{self.name}' is down: {self.error}")
        if self._closing:
            raise VHostDownError(f"vhost '{self.name}' is closing")

    def _flush_gathered(self) -> None:
        """Write what was gathered, so that the next operation sees it."""
        self._require_up()
        if self.tick.gathered:
            self.tick.flush()
            self._require_up()

    def _ready(self, name: str) -> None:
        """Handle the plane's notification that a queue has ready messages."""
        queue = self.queues.by_name.get(name) or self.queues.add_from_plane(name)
        if queue is not None:
            queue.has_ready = True
            if queue.is_stream and self._loop is not None:
                # Dead letters for a stream wait in the plane's queue. They are moved after the current change.
                self._loop.call_soon(self._move_spooled, queue)
            elif not queue.is_stream and len(queue.consumers):
                self.tick.serve(queue)

    def _move_spooled(self, queue: BrokerQueue) -> None:
        if self.is_up:
            with QuietGuard(self):
                self.spool.move(queue)

    def _policies_changed(self) -> None:
        """Apply the policies: to the first objects now, to the others in later turns."""
        has_more = self._effects.changed()
        until_s = time.perf_counter() + CHORES_S
        while has_more():
            if self._loop is not None and time.perf_counter() >= until_s:
                self.tick.add_chore(has_more)
                return

    def _dead_letter(self, config: QueueConfig, message: Message, reason: str) -> tuple[Sequence[str], bytes] | None:
        """Return the target queues and the envelope of a dead letter; None if the plane handles it."""
        queue = self.queues.by_name.get(config.name)
        if queue is None or config.dead_letter_queue is not None:
            return None
        death, targets = self.tick.router.dead_letter(queue, message.properties, reason)
        if death is None or not targets:
            return (), b""
        return [target.name for target in targets], death.envelope()

    def _deadline_moved(self) -> None:
        # The clock does not exist while the plane opens. It reads the first deadline when it starts.
        if self._loop is not None:
            self.clock.plane_deadline_changed()
