"""State of one virtual host that RocketMQ requests share: topics, groups, consumptions.

A host lives as long as its virtual host is open. After a restart of the virtual host the next request gets a new one,
which reads the leases from the store.

Changes of leases are gathered for one turn of the loop and written as one batch. Settlements are confirmed after the
sync that follows.
"""

from __future__ import annotations

import asyncio
import random
import secrets
from collections import OrderedDict
from collections.abc import Callable
from itertools import islice
from typing import Final, Protocol
from uuid import UUID

from basaltmq.broker.guard import Guard
from basaltmq.broker.node import Node
from basaltmq.broker.vhost import VHost
from basaltmq.catalog.kinds import Kind
from basaltmq.catalog.objects import Action, Event
from basaltmq.clock import now_ms
from basaltmq.durability import Durability
from basaltmq.errors import (
    AccessRefusedError,
    BasaltError,
    GroupNotFoundError,
    PublishersBlockedError,
    StoreStalledError,
    TopicExistsError,
    TopicNotFoundError,
)
from basaltmq.protocols.rocketmq.clients import Clients
from basaltmq.protocols.rocketmq.consumption import Consumption
from basaltmq.protocols.rocketmq.lite.subscriptions import LiteSubscriptions
from basaltmq.protocols.rocketmq.lite.topics import LiteTopics
from basaltmq.protocols.rocketmq.rules.names import LITE
from basaltmq.protocols.rocketmq.schedule import Schedule
from basaltmq.protocols.rocketmq.settings import Settings
from basaltmq.protocols.rocketmq.transactions import Transactions
from basaltmq.store.batch import Batch
from basaltmq.store.sync.group_commit import Synced
from basaltmq.streams.adapter import Append, StorageAdapter
from basaltmq.streams.engines.segment.engine import SegmentEngine
from basaltmq.streams.plane import StreamPlane
from basaltmq.streams.pop.groups import GroupConfig, SubscriptionGroups
from basaltmq.streams.pop.rows import put_changes, read_subscription
from basaltmq.streams.pop.subscription import Held
from basaltmq.streams.scheduled import Scheduled, put_scheduled
from basaltmq.streams.topics import Topic, TopicConfig

CONSUMPTIONS_MAX: Final = 10_000
"""Most consumptions in memory. Above it, those without a waiting call are dropped, least recently used first."""

GROUPS_AT_ONCE: Final = 100
"""Groups created in one batch."""

WOKEN_PER_TURN: Final = 10
"""Consumptions woken per turn of the loop. A receive call takes about 1 ms."""

STALLED_RETRY_S: Final = 0.05
"""Delay before a stalled write is repeated."""


class Waiting(Protocol):
    """Waits for records of a topic."""

    topic: Topic

    def wake(self) -> None: ...


class Host:
    """The RocketMQ state of a virtual host."""

    def __init__(self, node: Node, vhost: VHost, settings: Settings, clients: Clients) -> None:
        self.node = node
        self.vhost = vhost
        self.settings = settings
        self.clients = clients
        self.plane: StreamPlane = vhost.streams.plane
        self.groups = SubscriptionGroups(self.plane.catalog)
        self.loop = asyncio.get_running_loop()
        self.now_ms = now_ms
        self.is_stopping = False
        self.is_stalled = False
        """Whether the store refuses a write, because it is stalled. The write is repeated."""
        self._token: Final = random.Random(secrets.randbits(128))  # noqa: S311 - a fence, not a secret
        self._held = Held()
        self._consumptions: OrderedDict[tuple[str, UUID], Consumption] = OrderedDict()
        self._groups_in_use: dict[UUID, set[str]] = {}
        """Groups that have a consumption, by topic: many topics may be deleted together."""
        self._of_topic: dict[str, dict[Waiting, None]] = {}
        """Consumptions with waiting calls, and waiting pull calls, by topic."""
        self._to_wake: dict[Waiting, None] = {}
        """Those whose topic grew, until they are woken."""
        self._is_waking = False
        self._dirty: dict[Consumption, None] = {}
        self.rows = Batch()
        """Rows to write at the end of this turn, with the changes of leases."""
        self._rows_due_ms: int | None = None
        self.transactions = Transactions(self)
        self.schedule = Schedule(self, self.transactions.check)
        self._new_groups: dict[str, GroupConfig] = {}
        """Groups that calls wait for."""
        self._creating_groups = asyncio.Lock()
        self._synced: list[Synced] = []
        self._is_scheduled = False
        self.lites = LiteTopics(self)
        self.lite_subscriptions = LiteSubscriptions(self)
        self.schedule.start()
        self.lites.sweep()
        self._stops = [vhost.streams.listen(self._topic_grew), self.plane.catalog.on_change(self._object_changed)]

    def close(self) -> None:
        for stop in self._stops:
            stop()
        self.schedule.close()
        self.lites.close()
        self.lite_subscriptions.close()
        if self.vhost.is_up:
            self._write()
        for each in self._consumptions.values():
            each.close()
        self._consumptions.clear()

    def end_waits(self) -> None:
        """Answer the calls that wait, because the broker stops."""
        self.is_stopping = True
        for each in list(self._consumptions.values()):
            each.close()
        self.lite_subscriptions.close()
        for topic in list(self._of_topic):
            self._topic_grew(topic)

    def guard(self) -> Guard:
        return Guard(self.vhost)

    def check_publishing(self) -> None:
        """Raise while an alarm blocks publishers."""
        reason = self.node.alarms.reason(self.vhost.name)
        if reason is not None:
            raise PublishersBlockedError(f"publishers are blocked: {reason}")

    def topic(self, name: str) -> Topic:
        return self.plane.topics.get(name)

    async def topic_or_new(self, name: str, may_create: Callable[[], bool]) -> Topic:
        """Return a topic. Create it on first use if the settings and the caller's permissions allow it."""
        found = self.plane.topics.find(name)
        if found is not None:
            return found
        if not self.settings.auto_create or not may_create():
            raise TopicNotFoundError(f"topic {name!r} does not exist in vhost {self.vhost.name!r}; create it first")
        return await self.create_topic(name, self.settings.partitions)

    def new_topic_config(self, partitions: int) -> TopicConfig:
        """Return the settings of topics that are created on first use."""
        return TopicConfig(
            partitions=partitions,
            engine=self.vhost.streams.default_engine,
            durability=Durability(self.settings.durability),
            index_keys=False,
        )

    async def create_topic(self, name: str, partitions: int) -> Topic:
        config = self.new_topic_config(partitions)
        try:
            # In a thread, because it waits for an fsync.
            with self.guard():
                return await asyncio.to_thread(self.plane.topics.create, name, config)
        except TopicExistsError:
            return self.topic(name)

    async def group_or_new(self, name: str, config: GroupConfig, may_create: Callable[[], bool]) -> GroupConfig:
        """Return the settings of a group. Create it on first use if the settings and permissions allow it."""
        found = self.groups.find(name)
        if found is not None:
            return found
        if not self.settings.auto_create:
            raise GroupNotFoundError(f"subscription group {name!r} does not exist; create it first")
        if not may_create():
            raise AccessRefusedError(f"creating subscription group {name!r} requires configure access")
        self._new_groups[name] = config
        async with self._creating_groups:
            self._new_groups.pop(name, None)
            if self.groups.find(name) is None:
                # Those that wait are one batch: a thread and a sync for each group delay all clients.
                batch = {name: config, **dict(islice(self._new_groups.items(), GROUPS_AT_ONCE))}
                for each in batch:
                    self._new_groups.pop(each, None)
                with self.guard():
                    await asyncio.to_thread(self.groups.ensure, batch)
        return self.groups.get(name)

    def route(self, topic: Topic, partition: int) -> tuple[StorageAdapter, int]:
        return self.plane.drivers.route(topic, partition)

    def when_confirmed(
        self, engine: StorageAdapter, append: Append, callback: Callable[[BaseException | None], None]
    ) -> None:
        """Call back when an append is as durable as its topic requires."""
        if isinstance(engine, SegmentEngine):
            engine.call_when_confirmed(append, callback)
            return
        engine.confirmed(append).add_done_callback(lambda done: callback(done.exception()))

    def consumption(self, group: str, topic: Topic) -> Consumption:
        """Return a group's consumption of a topic, read from the store at the first use."""
        key = (group, topic.id)
        found = self._consumptions.get(key)
        if found is not None and len(found.topic.shards) == len(topic.shards):
            self._consumptions.move_to_end(key)
            if self._held.is_full:
                self._drop_idle()
            return found
        if found is not None:
            self._write()
        with self.guard():
            state = read_subscription(
                self.vhost.store,
                group,
                topic.id,
                len(topic.shards),
                now_ms(),
                lambda: self._token.getrandbits(63) | 1,
                self._held,
            )
        made = Consumption(self, group, topic, state)
        if found is not None:
            self._dropped(found)
        self._consumptions[key] = made
        self._groups_in_use.setdefault(topic.id, set()).add(group)
        if len(self._consumptions) > CONSUMPTIONS_MAX or self._held.is_full:
            self._drop_idle()
        return made

    def in_use(self, group: str) -> list[Consumption]:
        """Return the consumptions of a group that are in memory."""
        return [each for (name, _), each in self._consumptions.items() if name == group]

    def _drop_idle(self) -> None:
        """Drop consumptions without a waiting call, the least recently used first, until the limits are met."""
        newest = next(reversed(self._consumptions))
        for key, each in list(self._consumptions.items()):
            if len(self._consumptions) <= CONSUMPTIONS_MAX and not self._held.is_full:
                return
            if not each.is_waited and each not in self._dirty and key != newest:
                del self._consumptions[key]
                self._dropped(each)

    def _dropped(self, consumption: Consumption) -> None:
        consumption.close()
        consumption.subscription.close()
        groups = self._groups_in_use[consumption.topic.id]
        groups.discard(consumption.group)
        if not groups:
            del self._groups_in_use[consumption.topic.id]

    def new_id(self) -> bytes:
        """Return the id of a scheduled or half record."""
        return self._token.getrandbits(128).to_bytes(16, "big")

    def schedule_record(self, due_ms: int, record_id: bytes, scheduled: Scheduled) -> None:
        """Append a record when it is due. The caller calls `write_soon` or `changed`."""
        put_scheduled(self.rows, due_ms, record_id, scheduled)
        self._rows_due_ms = due_ms if self._rows_due_ms is None else min(due_ms, self._rows_due_ms)

    def changed(self, consumption: Consumption, synced: Synced | None = None) -> None:
        """Write the changes of a consumption at the end of this turn. `synced` is called after the sync."""
        self._dirty[consumption] = None
        self.write_soon(synced)

    def write_now(self, batch: Batch, synced: Synced) -> None:
        """Write rows at once. `synced` is called after the sync."""
        with self.guard():
            self.vhost.store.write(batch, wait_ms=0)
            self.vhost.commit.after_sync(self.loop, [synced])

    def write_soon(self, synced: Synced | None = None) -> None:
        """Write `rows` and changed leases at the end of this turn. `synced` is called after the sync."""
        if synced is not None:
            self._synced.append(synced)
        if not self._is_scheduled:
            self._is_scheduled = True
            self.loop.call_soon(self._write)

    def _write(self) -> None:
        self._is_scheduled = False
        dirty, self._dirty = self._dirty, {}
        callbacks, self._synced = self._synced, []
        batch, self.rows = self.rows, Batch()
        due_ms, self._rows_due_ms = self._rows_due_ms, None
        for each in dirty:
            put_changes(batch, each.group, each.topic.id, each.subscription, now_ms())
        try:
            with self.guard():
                if batch:
                    self.vhost.store.write(batch, wait_ms=0)
                if callbacks:
                    self.vhost.commit.after_sync(self.loop, callbacks)
        except StoreStalledError:
            self._repeat(batch, callbacks)
        except BasaltError as error:
            for callback in callbacks:
                callback(error)
        if due_ms is not None:
            self.schedule.due_at(due_ms)

    def _repeat(self, batch: Batch, callbacks: list[Synced]) -> None:
        """Write a batch again that the stalled store refused, ahead of later ones."""

        def write() -> None:
            try:
                with self.guard():
                    self.vhost.store.write(batch, wait_ms=0)
                    if callbacks:
                        self.vhost.commit.after_sync(self.loop, callbacks)
            except StoreStalledError:
                self.loop.call_later(STALLED_RETRY_S, write)
                return
            except BasaltError as error:
                for callback in callbacks:
                    callback(error)
            self.is_stalled = False
            self._write()

        self._is_scheduled = self.is_stalled = True
        self.loop.call_later(STALLED_RETRY_S, write)

    def waits(self, waiting: Waiting, *, is_waited: bool) -> None:
        """Register who waits for records of a topic, or remove it."""
        name = waiting.topic.name
        if is_waited:
            self._of_topic.setdefault(name, {})[waiting] = None
            return
        others = self._of_topic.get(name)
        if others is not None:
            others.pop(waiting, None)
            if not others:
                del self._of_topic[name]

    def _topic_grew(self, topic: str) -> None:
        self._to_wake.update(self._of_topic.get(topic, ()))
        if not self._is_waking:
            self._wake_some()

    def _wake_some(self) -> None:
        """Wake some of the waiting calls, and the others in later turns, because each one reads the topic."""
        for each in list(islice(self._to_wake, WOKEN_PER_TURN)):
            del self._to_wake[each]
            each.wake()
        self._is_waking = bool(self._to_wake)
        if self._is_waking:
            self.loop.call_soon(self._wake_some)

    def _object_changed(self, event: Event) -> None:
        if event.action is Action.DELETED:
            # The listener may run in a thread.
            self.loop.call_soon_threadsafe(self._forget, event.id)
            if event.kind is Kind.TOPIC and not event.name.startswith(LITE):
                self.loop.call_soon_threadsafe(self.lites.parent_deleted, event.name, event.id)

    def _forget(self, object_id: UUID) -> None:
        for group in list(self._groups_in_use.get(object_id, ())):
            gone = self._consumptions.pop((group, object_id))
            self._dirty.pop(gone, None)
            self._dropped(gone)
