"""The KIP-848 consumer groups of a virtual host: groups with members in memory, and persistent rows of all groups.

A group is in memory from its first member to its last. Each group has one timer for the earliest member deadline.
Heartbeats extend deadlines without touching the timer. The catalog reports topic changes from any thread, and all
changes of one loop turn are handled together, in slices. A thread searches the topics of a pattern.

Budget: a heartbeat without changes costs one or two dictionary lookups, and no timer, row or task.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Final

from basaltmq.broker.guard import QuietGuard
from basaltmq.broker.vhost import VHost
from basaltmq.catalog.kinds import Kind
from basaltmq.catalog.objects import Event
from basaltmq.errors import BasaltError
from basaltmq.protocols.kafka.groups.assignors import TopicSize
from basaltmq.protocols.kafka.groups.consumer_group import ConsumerGroup, Timing
from basaltmq.protocols.kafka.groups.consumer_member import JOINING, NEVER_MS
from basaltmq.protocols.kafka.groups.row import NOT_SET, GroupRow
from basaltmq.protocols.kafka.groups.topic_pattern import TopicPattern
from basaltmq.protocols.kafka.wire import errors as e
from basaltmq.protocols.kafka.wire.errors import Refused
from basaltmq.protocols.kafka.wire.schema import Fields
from basaltmq.store.batch import Batch
from basaltmq.store.families import Family
from basaltmq.store.keys import streams as stream_keys
from basaltmq.streams.plane import StreamPlane

MEMBERS_MAX: Final = 100_000
"""Limit of members in all groups, about 200 MB. It stops a client that keeps joining under new ids."""

PAGE: Final = 500
SLICE_S: Final = 0.002
"""Time per loop turn to notify groups of changed topics."""

_log: Final = logging.getLogger(__name__)


class ConsumerGroups:
    """The groups of one virtual host. All calls come from one event loop."""

    def __init__(self, vhost: VHost, plane: StreamPlane) -> None:
        self.by_name: dict[str, ConsumerGroup] = {}
        self._vhost = vhost
        self._plane = plane
        self._store = vhost.store
        self._members = 0
        self._timers: dict[str, tuple[int, asyncio.TimerHandle]] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        """Searches for topics, and computations of targets."""
        self._computing = asyncio.Semaphore(1)
        """One target at a time, because Python code in threads slows the event loop down."""
        self._lock = threading.Lock()
        self._changed: set[str] = set()
        """Names of changed topics that are not handled yet."""
        self._applying: asyncio.Task[None] | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        """Event loop of the members, set at the first heartbeat."""
        self._stop_listening = plane.catalog.on_change(self._on_catalog_event)

    def close(self) -> None:
        self._stop_listening()
        self._loop = None
        for _, timer in self._timers.values():
            timer.cancel()
        for search in self._tasks:
            search.cancel()
        if self._applying is not None:
            self._applying.cancel()
        self._timers.clear()
        self.by_name.clear()

    def get(self, name: str) -> ConsumerGroup | None:
        """Return a group that has members, or None."""
        return self.by_name.get(name)

    def heartbeat(self, body: Fields, client_id: str, host: str, may: Callable[[str], bool]) -> Fields:
        """Handle ConsumerGroupHeartbeat of a client with permission for the group. Raise Refused if it is invalid."""
        name = body["group_id"]
        group = self.by_name.get(name)
        self._loop = asyncio.get_running_loop()
        now_ms = self._now_ms()
        is_leaving = body["member_epoch"] < JOINING
        if group is None:
            if body["member_epoch"] != JOINING:
                # Also the case after a restart. The error makes the member revoke everything and rejoin.
                raise Refused(e.UNKNOWN_MEMBER_ID, f"group {name!r} has no members; rejoin with epoch 0")
            row = self.row(name) or GroupRow()
            group = ConsumerGroup(name, self._size_of, row.epoch, timing(row), self._compute)
        if body["member_epoch"] == JOINING and self._members >= MEMBERS_MAX:
            raise Refused(
                e.GROUP_MAX_SIZE_REACHED, f"all groups together have reached {MEMBERS_MAX} members, the limit"
            )
        before = group.epoch
        members = len(group.members)
        if is_leaving:
            response = group.leave(body, now_ms)
        else:
            response = group.heartbeat(body, client_id, host, may, now_ms)
            self.by_name[name] = group
        self._members += len(group.members) - members
        self._settle(group, before)
        member = group.members.get(response["member_id"])
        if member is not None:
            self._wake_by(group, member.deadline_ms)
        if group.patterns:
            self._search(group)
        return response

    def row(self, name: str) -> GroupRow | None:
        raw = self._store.get(Family.CONSUMER_GROUPS, stream_keys.consumer_group_key(name))
        return None if raw is None else GroupRow.decode(raw)

    def rows(self) -> Iterator[tuple[str, GroupRow]]:
        """Yield every KIP-848 group, and every group that has configs."""
        for key, raw in self._store.scan(Family.CONSUMER_GROUPS):
            yield stream_keys.decode_consumer_group_key(key), GroupRow.decode(raw)

    def is_consumer(self, name: str) -> bool:
        """Whether the group is a KIP-848 group, with or without members."""
        row = self.row(name)
        return name in self.by_name or (row is not None and row.epoch > 0)

    def forget(self, name: str) -> bool:
        """Turn an empty group into one of no protocol and keep its configs. Return whether it was a KIP-848 group."""
        row = self.row(name)
        if row is None or not row.epoch:
            return False
        self._write(name, row._replace(epoch=0))
        return True

    def set(self, name: str, row: GroupRow) -> None:
        """Write a row with changed configs, and apply them to the group in memory."""
        self._write(name, row)
        group = self.by_name.get(name)
        if group is not None:
            group.timing = timing(row)

    def _write(self, name: str, row: GroupRow) -> None:
        batch = Batch()
        key = stream_keys.consumer_group_key(name)
        if row.epoch or row.has_settings:
            batch.put(Family.CONSUMER_GROUPS, key, row.encode())
        else:
            batch.delete(Family.CONSUMER_GROUPS, key)
        self._store.write(batch)

    def _settle(self, group: ConsumerGroup, previous_epoch: int) -> None:
        """Persist a changed group epoch, and remove a group without members from memory."""
        if group.epoch != previous_epoch:
            row = self.row(group.name) or GroupRow()
            is_kept = bool(group.members) or bool(self._plane.offsets.of_group(group.name))
            self._write(group.name, row._replace(epoch=group.epoch if is_kept else 0))
        if not group.members:
            self.by_name.pop(group.name, None)
            _, timer = self._timers.pop(group.name, (0, None))
            if timer is not None:
                timer.cancel()

    def _wake_by(self, group: ConsumerGroup, deadline_ms: int) -> None:
        """Schedule the expiry check of a group for `deadline_ms` or earlier."""
        known = self._timers.get(group.name)
        if known is not None:
            if known[0] <= deadline_ms:
                return
            known[1].cancel()
        if self._loop is not None and deadline_ms != NEVER_MS:
            timer = self._loop.call_at((deadline_ms + 1) / 1000, self._expire, group)
            self._timers[group.name] = (deadline_ms, timer)

    def _expire(self, group: ConsumerGroup) -> None:
        self._timers.pop(group.name, None)
        if self.by_name.get(group.name) is not group or not self._vhost.is_up:
            return
        before = group.epoch
        with QuietGuard(self._vhost):
            gone = group.expire(self._now_ms())
            self._members -= gone
            if gone:
                _log.info("group %r: %d members timed out, %d remain", group.name, gone, len(group.members))
                self._settle(group, before)
        self._wake_by(group, group.deadline_ms())

    def _on_catalog_event(self, event: Event) -> None:
        """Handle a catalog event. Runs in any thread."""
        if event.kind is not Kind.TOPIC or event.parent != self._plane.topics.parent:
            return
        loop = self._loop
        if loop is None:
            return
        with self._lock:
            is_first = not self._changed
            self._changed.update(name for name in (event.name, event.old_name) if name is not None)
        if is_first:
            with suppress(RuntimeError):
                # The loop is closed: the broker is shutting down.
                loop.call_soon_threadsafe(self._topics_changed)

    def _topics_changed(self) -> None:
        if self._loop is not None and (self._applying is None or self._applying.done()):
            self._applying = self._loop.create_task(self._apply_changes())

    async def _apply_changes(self) -> None:
        """Notify all groups of changed topics. Yield to other clients, because there may be many slow patterns."""
        until_s = time.perf_counter() + SLICE_S
        while names := self._take_changed():
            with QuietGuard(self._vhost):
                for group in list(self.by_name.values()):
                    before = group.epoch
                    for _ in group.topics_changing(names, self._now_ms()):
                        if time.perf_counter() > until_s:
                            await asyncio.sleep(0)
                            until_s = time.perf_counter() + SLICE_S
                    if self.by_name.get(group.name) is group and self._vhost.is_up:
                        self._settle(group, before)

    def _take_changed(self) -> frozenset[str]:
        with self._lock:
            names, self._changed = frozenset(self._changed), set()
        return names if self._vhost.is_up else frozenset()

    def _size_of(self, name: str) -> TopicSize | None:
        try:
            found = self._plane.topics.find(name)
        except BasaltError:
            # An invalid topic name or an unreadable row: treat the topic as absent.
            return None
        return None if found is None else TopicSize(found.id.bytes, found.config.partitions)

    def _search(self, group: ConsumerGroup) -> None:
        """Start the topic search of patterns that have none yet."""
        for pattern in group.unsearched():
            pattern.is_searching = True
            search = asyncio.ensure_future(self._searched(group, pattern))
            self._tasks.add(search)
            search.add_done_callback(self._tasks.discard)

    async def _searched(self, group: ConsumerGroup, pattern: TopicPattern) -> None:
        try:
            with QuietGuard(self._vhost):
                names = await asyncio.to_thread(pattern.among, self._names())
                if group.patterns.get(pattern.text) is pattern and self._vhost.is_up:
                    before = group.epoch
                    group.found(pattern, names, self._now_ms())
                    self._settle(group, before)
        except BasaltError as error:
            _log.warning(
                "group %r: cannot search topics for pattern %r, will retry: %s", group.name, pattern.text, error
            )
        finally:
            pattern.is_searching = False

    def _compute(self, group: ConsumerGroup) -> None:
        """Compute the target of a group in a thread."""
        task = asyncio.ensure_future(self._computed(group))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _computed(self, group: ConsumerGroup) -> None:
        async with self._computing:
            inputs = group.inputs
            try:
                target = await asyncio.to_thread(group.assignment())
            except Exception:
                # The next heartbeat of a member tries again. Until then members keep what they have.
                group.is_computing = False
                _log.exception("group %r: the assignment failed", group.name)
                return
        if self.by_name.get(group.name) is group:
            with QuietGuard(self._vhost):
                group.assigned(inputs, target, self._now_ms())

    def _names(self) -> Iterator[str]:
        after: str | None = None
        while True:
            page = self._plane.catalog.page(Kind.TOPIC, self._plane.topics.parent, start_after=after, limit=PAGE)
            yield from (each.name for each in page.objects)
            if page.next_after is None:
                return
            after = page.next_after

    def _now_ms(self) -> int:
        assert self._loop is not None, "no heartbeat has set the event loop"
        return int(self._loop.time() * 1000)


def timing(row: GroupRow) -> Timing:
    """Return the timing of a group, with defaults for configs that are not set."""
    defaults = Timing()
    return Timing(
        defaults.session_ms if row.session_ms == NOT_SET else row.session_ms,
        defaults.heartbeat_ms if row.heartbeat_ms == NOT_SET else row.heartbeat_ms,
    )
