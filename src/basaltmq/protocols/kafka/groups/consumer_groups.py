"""The consumer groups of a virtual host: those that have members in memory, and what is kept of all of them in rows.

A group is here from its first member to its last. One timer for each looks for members whose time is over; heartbeats
put that off without touching it. Topics that come, go or grow are told by the catalog, from whatever thread changed
them; all names of one turn of the loop are looked at together. The topics of a pattern are searched for in a thread.

Budget: a heartbeat that changes nothing is a dictionary or two, no timer, no row, no task.
"""

from __future__ import annotations

import asyncio
import logging
import threading
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
from basaltmq.store.keys import queues as keys
from basaltmq.streams.plane import StreamPlane

MEMBERS_MAX: Final = 100_000
"""In all groups, some 200 MB: a client that joins under ever other names is refused before memory is short."""

PAGE: Final = 500

_log: Final = logging.getLogger(__name__)


class ConsumerGroups:
    """The groups of one virtual host. All calls from one loop."""

    def __init__(self, vhost: VHost, plane: StreamPlane) -> None:
        self.by_name: dict[str, ConsumerGroup] = {}
        self._vhost = vhost
        self._plane = plane
        self._store = vhost.store
        self._members = 0
        self._timers: dict[str, tuple[int, asyncio.TimerHandle]] = {}
        self._searches: set[asyncio.Task[None]] = set()
        self._lock = threading.Lock()
        self._changed: set[str] = set()
        """Names of topics that changed and were not looked at."""
        self._loop: asyncio.AbstractEventLoop | None = None
        """The one that serves members, known from the first of them on."""
        self._stop_listening = plane.catalog.on_change(self._heard)

    def close(self) -> None:
        self._stop_listening()
        self._loop = None
        for _, timer in self._timers.values():
            timer.cancel()
        for search in self._searches:
            search.cancel()
        self._timers.clear()
        self.by_name.clear()

    def get(self, name: str) -> ConsumerGroup | None:
        """A group that has members."""
        return self.by_name.get(name)

    def heartbeat(self, asked: Fields, client_id: str, host: str, may: Callable[[str], bool]) -> Fields:
        """ConsumerGroupHeartbeat of somebody who may use the group; Refused if it cannot be."""
        name = asked["group_id"]
        group = self.by_name.get(name)
        self._loop = asyncio.get_running_loop()
        now_ms = self._now_ms()
        is_leaving = asked["member_epoch"] < JOINING
        if group is None:
            if asked["member_epoch"] != JOINING:
                # After a restart, too: a member that hears this lets go of everything and joins.
                raise Refused(e.UNKNOWN_MEMBER_ID, f"group {name!r} has no members; join with epoch 0")
            row = self.row(name) or GroupRow()
            group = ConsumerGroup(name, self._size_of, row.epoch, timing(row))
        if asked["member_epoch"] == JOINING and self._members >= MEMBERS_MAX:
            raise Refused(e.GROUP_MAX_SIZE_REACHED, f"the groups here have {MEMBERS_MAX} members, and take no more")
        before = group.epoch
        members = len(group.members)
        if is_leaving:
            answer = group.leave(asked, now_ms)
        else:
            answer = group.heartbeat(asked, client_id, host, may, now_ms)
            self.by_name[name] = group
        self._members += len(group.members) - members
        self._settle(group, before)
        member = group.members.get(answer["member_id"])
        if member is not None:
            self._wake_by(group, member.due_ms)
        if group.patterns:
            self._search(group)
        return answer

    def row(self, name: str) -> GroupRow | None:
        raw = self._store.get(Family.CONSUMER_GROUPS, keys.consumer_group_key(name))
        return None if raw is None else GroupRow.decode(raw)

    def rows(self) -> Iterator[tuple[str, GroupRow]]:
        """Every group of this protocol, and those with settings."""
        for key, raw in self._store.scan(Family.CONSUMER_GROUPS):
            yield keys.decode_consumer_group_key(key), GroupRow.decode(raw)

    def is_consumer(self, name: str) -> bool:
        """Is the group one of this protocol, be it empty?"""
        row = self.row(name)
        return name in self.by_name or (row is not None and row.epoch > 0)

    def forget(self, name: str) -> bool:
        """An empty group is none of this protocol any more; whether it was one. Its settings stay."""
        row = self.row(name)
        if row is None or not row.epoch:
            return False
        self._write(name, row._replace(epoch=0))
        return True

    def set(self, name: str, row: GroupRow) -> None:
        """Give a group other settings; `row` is what it has with them."""
        self._write(name, row)
        group = self.by_name.get(name)
        if group is not None:
            group.timing = timing(row)

    def _write(self, name: str, row: GroupRow) -> None:
        batch = Batch()
        key = keys.consumer_group_key(name)
        if row.epoch or row.has_settings:
            batch.put(Family.CONSUMER_GROUPS, key, row.encode())
        else:
            batch.delete(Family.CONSUMER_GROUPS, key)
        self._store.write(batch)

    def _settle(self, group: ConsumerGroup, epoch_before: int) -> None:
        """After something happened in a group: keep its epoch, and let go of it if nobody is left."""
        if group.epoch != epoch_before:
            row = self.row(group.name) or GroupRow()
            is_kept = bool(group.members) or bool(self._plane.offsets.of_group(group.name))
            self._write(group.name, row._replace(epoch=group.epoch if is_kept else 0))
        if not group.members:
            self.by_name.pop(group.name, None)
            _, timer = self._timers.pop(group.name, (0, None))
            if timer is not None:
                timer.cancel()

    def _wake_by(self, group: ConsumerGroup, due_ms: int) -> None:
        """Look at a group's members at that time, if not before."""
        known = self._timers.get(group.name)
        if known is not None:
            if known[0] <= due_ms:
                return
            known[1].cancel()
        if self._loop is not None and due_ms != NEVER_MS:
            timer = self._loop.call_at((due_ms + 1) / 1000, self._expire, group)
            self._timers[group.name] = (due_ms, timer)

    def _expire(self, group: ConsumerGroup) -> None:
        self._timers.pop(group.name, None)
        if self.by_name.get(group.name) is not group or not self._vhost.is_up:
            return
        before = group.epoch
        with QuietGuard(self._vhost):
            gone = group.expire(self._now_ms())
            self._members -= gone
            if gone:
                _log.info("group %r: %d members are gone, %d are left", group.name, gone, len(group.members))
                self._settle(group, before)
        self._wake_by(group, group.due_ms())

    def _heard(self, event: Event) -> None:
        """The catalog changed; in any thread."""
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
                # The loop is closed: nobody is served any more.
                loop.call_soon_threadsafe(self._topics_changed)

    def _topics_changed(self) -> None:
        with self._lock:
            names, self._changed = frozenset(self._changed), set()
        if not self._vhost.is_up:
            return
        now_ms = self._now_ms()
        with QuietGuard(self._vhost):
            for group in list(self.by_name.values()):
                before = group.epoch
                group.topics_changed(names, now_ms)
                self._settle(group, before)

    def _size_of(self, name: str) -> TopicSize | None:
        try:
            found = self._plane.topics.find(name)
        except BasaltError:
            # No name a topic can have, or a row that cannot be read: it has nothing to give.
            return None
        return None if found is None else TopicSize(found.id.bytes, found.config.partitions)

    def _search(self, group: ConsumerGroup) -> None:
        """Find the topics of patterns that were not searched for."""
        for pattern in group.unsearched():
            pattern.is_searching = True
            search = asyncio.ensure_future(self._searched(group, pattern))
            self._searches.add(search)
            search.add_done_callback(self._searches.discard)

    async def _searched(self, group: ConsumerGroup, pattern: TopicPattern) -> None:
        try:
            with QuietGuard(self._vhost):
                names = await asyncio.to_thread(pattern.among, self._names())
                if group.patterns.get(pattern.text) is pattern and self._vhost.is_up:
                    before = group.epoch
                    group.found(pattern, names, self._now_ms())
                    self._settle(group, before)
        except BasaltError as error:
            _log.warning("group %r: the topics of %r are searched for later: %s", group.name, pattern.text, error)
        finally:
            pattern.is_searching = False

    def _names(self) -> Iterator[str]:
        after: str | None = None
        while True:
            page = self._plane.catalog.page(Kind.TOPIC, self._plane.topics.parent, start_after=after, limit=PAGE)
            yield from (each.name for each in page.objects)
            if page.next_after is None:
                return
            after = page.next_after

    def _now_ms(self) -> int:
        assert self._loop is not None, "groups have members only while somebody is served"
        return int(self._loop.time() * 1000)


def timing(row: GroupRow) -> Timing:
    """What a group's members are held to."""
    usual = Timing()
    return Timing(
        usual.session_ms if row.session_ms == NOT_SET else row.session_ms,
        usual.heartbeat_ms if row.heartbeat_ms == NOT_SET else row.heartbeat_ms,
    )
