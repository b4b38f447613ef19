"""A virtual host: exchanges, queues and consumers over a store of its own (SPEC E6 to E9).

    protocols ─> declare, bind ...  at once, written before the answer
              ─> publish, settle    gathered, one batch at the end of the loop's turn (publishing.py)
              <─ deliveries         a piece per queue and turn (dispatch.py)
              <─ confirms           after the sync

Everything is called from one loop, synchronously; what takes long (a sync, retention) is in threads. What was published
before a call is applied before the call, so that a client's operations take effect in its order.

An error of the disk ends the virtual host: no half state goes on. Nothing that was not confirmed is confirmed, whoever
is attached is told, and whoever supervises it opens the store again, through recovery.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, Final

from basaltmq.broker.chores import Chores
from basaltmq.broker.consumers.consumer import Consumer, ConsumerSink
from basaltmq.broker.consumers.dispatch import Dispatch
from basaltmq.broker.consumers.queue import BrokerQueue, QueueInfo
from basaltmq.broker.consumers.stream_queue import StreamQueues
from basaltmq.broker.consumers.stream_spool import StreamSpool
from basaltmq.broker.consumers.tick_batch import ACK, REJECT, REQUEUE, Publish, Publisher, Settlement
from basaltmq.broker.guard import Guard, QuietGuard
from basaltmq.broker.policy_effects import PolicyEffects
from basaltmq.broker.publishing.tick import STALL_RETRY_S, Publishing
from basaltmq.broker.queue_table import QueueTable
from basaltmq.broker.routing.exchange import EXCHANGE, QUEUE, Arguments, Destination, Exchange
from basaltmq.broker.routing.policy import Policies
from basaltmq.broker.routing.topology import Topology
from basaltmq.broker.timekeeping import Timekeeper
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
from basaltmq.queues.ready.paging_queue import MemoryBudget
from basaltmq.queues.scripts.budget import ScriptBudget
from basaltmq.store.api import Store
from basaltmq.store.space.size import SizeGuard
from basaltmq.store.sync.loop_commit import LoopCommit
from basaltmq.streams.shards import Engine

DRAIN_S: Final = 30.0
"""How long closing waits for confirms that are under way."""

__all__ = ["ACK", "REJECT", "REQUEUE", "Publisher", "Settlement", "VHost"]

_log: Final = logging.getLogger(__name__)


class VHost:
    """One virtual host, open. Made by `open`, then `start`ed on its loop."""

    def __init__(
        self,
        name: str,
        store: Store,
        *,
        path: Path | None = None,
        clock_ns: Callable[[], int] = time.time_ns,
        budget: MemoryBudget | None = None,
        script_budget: ScriptBudget | None = None,
        report: Callable[[str], None] | None = None,
        event_sample: float = 0.0,
    ) -> None:
        """Open what the store holds. Takes as long as recovery does: call it in a thread, then `start` on the loop.

        `budget` is what queues may hold in memory, `script_budget` the time of scripts; other virtual hosts share both.
        `event_sample` is the share of messages whose life is told to the topic `__events`.
        """
        self.name = name
        self.store = store
        self.error: BaseException | None = None
        """Why it failed."""
        self.blocked = False
        """The store is behind; publishers wait."""
        self.size_guard: SizeGuard | None = None
        """Holds publishers while the store is over its size; closed with the planes."""
        self.on_blocked: Callable[[bool], None] = lambda blocked: None
        """Called when the store begins or ends to be behind."""
        self.on_failed: Callable[[BaseException], None] = lambda error: None
        """Called once, when an error ended it."""
        self._clock_ns = clock_ns
        self._loop: asyncio.AbstractEventLoop | None = None
        self._is_scheduled = False
        self.chores = Chores()
        self._attached: dict[object, Callable[[BaseException], None]] = {}
        self._closing = False
        report = report or _log.warning
        self.commit = LoopCommit(store)
        try:
            self.plane = QueuePlane(
                store,
                self.commit,
                clock_ns=clock_ns,
                on_deadline=self._deadline_moved,
                budget=budget,
                script_budget=script_budget,
            )
            self.plane.dead_letter_router = self._dead_letter
            self.policies = Policies(store)
            self.policies.load()
            self.streams = StreamQueues(
                store, path, lambda: clock_ns() // 1_000_000, visible=self._wake, failed=self.fail
            )
            self.queues = QueueTable(
                name,
                self.plane,
                self.streams,
                self.policies,
                clock_ns=clock_ns,
                wake=self._wake,
                gone=lambda queue: self.dispatch.forget(queue),
                due=lambda due_ns: self.clock.due_at(due_ns),
            )
            self.clock = Timekeeper(self, self.plane, self.streams, self.queues.expire, clock_ns)
            self.topology = Topology(store, name, has_queue=self.queues.by_name.__contains__)
            self.queues.topology = self.topology
            self._exchanges = self.topology.exchanges
            faults = self.queues.load()
            faults += self.topology.load(self.queues.by_name.__contains__, self.queues.unserved.__contains__)
            for fault in faults:
                report(f"vhost {name!r}: {fault}")
        except BaseException:
            self.commit.close()
            raise
        self.dispatch = Dispatch(self.plane, settle=self._gather_settlement)
        self.spool = StreamSpool(self.plane, self.streams, self._gather_settlement)
        self.publishing = Publishing(
            self.plane,
            self.commit,
            self.topology,
            self.queues.by_name,
            self.streams,
            failed=self.fail,
            stalled=self._stalled,
            hand=self.dispatch.hand,
            now_s=lambda: clock_ns() / 1e9,
        )
        self._effects = PolicyEffects(self.policies, self.topology, self.queues)
        self.policies.changed = self._policies_changed
        self._policies_changed()
        self.plane.listen(self._ready)
        self.events: EventWriter | None = None
        if event_sample:
            engine = Engine.ROCKSDB if path is None else Engine.SEGMENT
            self.events = EventWriter(self.streams.plane, EventSettings(sample=event_sample, engine=engine))
            self.plane.record_events(self.events.recorder)

    def start(self) -> None:
        """Serve, from here on, on the running loop."""
        self._loop = asyncio.get_running_loop()
        self.clock.start(self._loop)
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
        self._settle_down()
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
        self._settle_down()
        with Guard(self):
            return self.topology.delete(name, if_unused=if_unused)

    def bind_exchange(
        self, destination: str, source: str, routing_key: str, arguments: Arguments | None = None
    ) -> bool:
        self._settle_down()
        with Guard(self):
            durable = self.topology.get(destination).durable
            return self.topology.bind(
                source, Destination(EXCHANGE, destination), routing_key, arguments, durable=durable
            )

    def unbind_exchange(
        self, destination: str, source: str, routing_key: str, arguments: Arguments | None = None
    ) -> bool:
        self._settle_down()
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
        """The queue of this name, made if it is missing; an empty name lets the server choose one."""
        self._settle_down()
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
        """Delete a queue; how many messages were ready."""
        self._settle_down()
        with Guard(self):
            return self.queues.delete(name, if_unused=if_unused, if_empty=if_empty, owner=owner)

    def check_delete(self, name: str, *, if_unused: bool, if_empty: bool, owner: object) -> None:
        """Refuse what `delete_queue` would refuse."""
        self._settle_down()
        with Guard(self):
            self.queues.check_delete(name, if_unused=if_unused, if_empty=if_empty, owner=owner)

    def bind_queue(
        self, queue: str, exchange: str, routing_key: str, arguments: Arguments | None = None, owner: object = None
    ) -> bool:
        self._settle_down()
        found = self.queues.get(queue, owner)
        with Guard(self):
            return self.topology.bind(
                exchange, Destination(QUEUE, queue), routing_key, arguments, durable=found.durable
            )

    def unbind_queue(
        self, queue: str, exchange: str, routing_key: str, arguments: Arguments | None = None, owner: object = None
    ) -> bool:
        self._settle_down()
        self.queues.get(queue, owner)
        with Guard(self):
            return self.topology.unbind(exchange, Destination(QUEUE, queue), routing_key, arguments) is not None

    def purge_queue(self, name: str, owner: object = None) -> int:
        """Delete everything that is ready; how many that were."""
        return sum(self.purging(name, owner))

    def purging(self, name: str, owner: object = None) -> Iterator[int]:
        """The same page by page, with a page's count each. What comes in after the first page stays."""
        self._settle_down()
        queue = self.queues.get(name, owner)
        if queue.is_stream:
            raise PreconditionFailedError(f"queue '{name}' in vhost '{self.name}' is a stream, which cannot be purged")
        return self._portions(self.plane.purging(name))

    def unbinding(self, kind: bytes, name: str) -> Iterator[int]:
        """Remove most bindings of a queue or exchange that is about to be deleted, a portion per step."""
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
        """Settle what a connection that is gone held, a portion at a time."""

        def settle() -> bool:
            if (portion := next(portions, None)) is None:
                return False
            self.settle(portion)
            self._settle_down()
            return True

        self.chores.add(settle)
        self._schedule()

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
        """Gather a message; its return and its confirm come at the end of the turn or after the sync.

        `number` 0 asks for no confirm. `properties` have been checked by `properties.peek`.
        """
        found = self._exchanges.get(exchange)
        if found is None or found.internal or self.error is not None or self._closing:
            self.check_exchange(exchange)
        self.publishing.pending.append((publisher, exchange, routing_key, properties, body, mandatory, number))
        if not self._is_scheduled:
            self._schedule()

    def publish_many(self, messages: Sequence[Publish]) -> None:
        """The same for messages whose exchanges were asked about with `check_exchange`."""
        self._require_up()
        self.publishing.pending += messages
        if not self._is_scheduled:
            self._schedule()

    def check_exchange(self, name: str) -> Exchange:
        """The exchange, if clients may publish to it."""
        if self.error is not None or self._closing:
            self._require_up()
        found = self.topology.exchanges.get(name)
        if found is None:
            raise ExchangeNotFoundError(f"no exchange '{name}' in vhost '{self.name}'")
        if found.internal:
            raise AccessRefusedError(f"cannot publish to internal exchange '{name}' in vhost '{self.name}'")
        return found

    def settle(self, settlements: Iterable[Settlement]) -> None:
        """Gather what consumers are done with. What is no longer leased is left alone."""
        self._require_up()
        queues = self.queues.by_name
        gathered = self.publishing.settlements
        for settlement in settlements:
            queue = queues.get(settlement.queue)
            if queue is not None and not queue.is_stream:
                gathered.append(settlement)
                if settlement.outcome == ACK:
                    queue.acked += len(settlement.ids)
        if gathered and not self._is_scheduled:
            self._schedule()

    def commit_tx(self, publishes: Sequence[Publish], settlements: Sequence[Settlement]) -> asyncio.Future[None]:
        """Do all of it in one batch; the future resolves when it is durable. All or nothing."""
        self._settle_down()
        known = self.queues.by_name
        chosen = [each for each in settlements if each.queue in known and not known[each.queue].is_stream]
        with Guard(self):
            future = self.publishing.commit_tx(list(publishes), chosen)
        self._schedule()
        return future

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
    ) -> Consumer:
        """Begin to consume. Deliveries come from the next turn of the loop on."""
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
        )
        if found.is_stream:
            if no_ack or not prefetch:
                what = "acknowledge" if no_ack else "set a prefetch"
                raise PreconditionFailedError(f"consumers of stream '{queue}' in vhost '{self.name}' must {what}")
            with Guard(self):
                found.stream.begin(consumer, self._clock_ns() // 1_000_000)
        found.has_ready = True
        self.queues.consuming(consumer)
        return consumer

    def get(self, queue: str, *, no_ack: bool = False, owner: object = None) -> tuple[Any, int] | None:
        """One message and how many are left, or None if nothing is ready."""
        self._settle_down()
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
                self._gather_settlement(Settlement(queue, deliveries[0].token, [deliveries[0].id], ACK))
            return deliveries[0], self.queues.ready(found)

    def counts(self, queue: BrokerQueue) -> dict[str, int]:
        """How much a queue holds and has seen, by the queue plane's names."""
        with Guard(self):
            if queue.is_stream:
                return {"ready": self.streams.depth(queue), "messages": self.streams.depth(queue)}
            return self.plane.stats(queue.name)

    def attach(self, owner: object, failed: Callable[[BaseException], None]) -> None:
        """A connection uses this virtual host; `failed` is called if it ends by an error."""
        self._require_up()
        self._attached[owner] = failed

    def release_owner(self, owner: object) -> None:
        """A connection is gone: its consumers and exclusive queues go. What it held it has settled before (REQUEUE)."""
        self._attached.pop(owner, None)
        if self.error is not None:
            return
        self._settle_down()
        with Guard(self):
            if self.queues.release_owner(owner):
                self.chores.add(lambda: self.queues.release_owner(owner))
                self._schedule()

    async def close(self) -> None:
        """Finish what was gathered, wait for the confirms under way, and let go of the planes. The store stays open."""
        if self._closing:
            return
        if self.error is None:
            self._flush()
        self._closing = True
        self.clock.stop()
        until = time.monotonic() + DRAIN_S
        while self.error is None and self.publishing.unsynced and time.monotonic() < until:
            await self.commit.durable()
            await asyncio.sleep(0)
        await self.clock.finish()
        await asyncio.to_thread(self.release_planes)

    def release_planes(self) -> None:
        """Close the planes, in a thread."""
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
        """An error of the disk: nothing goes on here."""
        if self.error is not None:
            return
        self.error = error
        _log.error("vhost %r failed: %s", self.name, error)
        self.store.poison(error)
        self.clock.stop()
        self.publishing.pending = []
        self.publishing.settlements = []
        attached, self._attached = self._attached, {}
        for told in attached.values():
            try:
                told(error)
            except Exception:
                _log.exception("a connection of vhost %r could not be told that it failed", self.name)
        self.on_failed(error)

    def _require_up(self) -> None:
        if self.error is not None:
            raise VHostDownError(f"vhost '{self.name}' is down: {self.error}")
        if self._closing:
            raise VHostDownError(f"vhost '{self.name}' is closing")

    def _settle_down(self) -> None:
        """Apply what was gathered before anything else is done."""
        self._require_up()
        if self.publishing:
            self._flush()
            self._require_up()

    def _schedule(self) -> None:
        if self._loop is not None and not self._is_scheduled:
            self._is_scheduled = True
            self._loop.call_soon(self._turn)

    def _turn(self) -> None:
        """The end of a turn of the loop."""
        self._is_scheduled = False
        if self.error is not None or self._closing:
            return
        if self.publishing:
            self._flush(for_turn=True)
        can_go_on = True
        if self.error is None and self.dispatch:
            with QuietGuard(self):
                can_go_on = self.dispatch.run()
        if self.error is None and self.chores and can_go_on:
            can_go_on = False
            with QuietGuard(self):
                self.chores.run()
                can_go_on = True
        if self.error is not None or self._loop is None:
            return
        if not can_go_on:
            self._loop.call_later(STALL_RETRY_S, self._schedule)
        elif self.dispatch or self.chores or (self.publishing and not self.publishing.is_stalled):
            self._schedule()

    def _flush(self, *, for_turn: bool = False) -> None:
        if not self.publishing.flush(for_turn=for_turn) and self._loop is not None:
            self._loop.call_later(STALL_RETRY_S, self._schedule)

    def _stalled(self, stalled: bool) -> None:
        self.blocked = stalled
        self.on_blocked(stalled)

    def _gather_settlement(self, settlement: Settlement) -> None:
        self.publishing.settlements.append(settlement)
        self._schedule()

    def _wake(self, queue: BrokerQueue) -> None:
        self.dispatch.add(queue)
        self._schedule()

    def _ready(self, name: str) -> None:
        """The plane has something ready in a queue."""
        queue = self.queues.by_name.get(name) or self.queues.notice(name)
        if queue is not None:
            queue.has_ready = True
            if queue.is_stream and self._loop is not None:
                # Dead letters wait for a stream; they are moved outside the change that brought them.
                self._loop.call_soon(self._move_spooled, queue)
            elif not queue.is_stream and len(queue.consumers):
                self.dispatch.add(queue)
                self._schedule()

    def _move_spooled(self, queue: BrokerQueue) -> None:
        if self.is_up:
            with QuietGuard(self):
                self.spool.move(queue)

    def _policies_changed(self) -> None:
        has_more = self._effects.changed()
        if self._loop is None:
            while has_more():
                pass
        elif has_more():
            self.chores.add(has_more)
            self._schedule()

    def _dead_letter(self, config: QueueConfig, message: Message, reason: str) -> tuple[Sequence[str], bytes] | None:
        """Where a message goes that died in the plane, and with which properties; None leaves it to the plane."""
        queue = self.queues.by_name.get(config.name)
        if queue is None or config.dead_letter_queue is not None:
            return None
        death, targets = self.publishing.bury(queue, message.properties, reason)
        if death is None or not targets:
            return (), b""
        return [target.name for target in targets], death.envelope()

    def _deadline_moved(self) -> None:
        # While the plane opens there is no clock yet; it asks for the first deadline when it starts.
        if self._loop is not None:
            self.clock.plane_moved()
