"""Lite topics: light, ordered topics inside a topic, created on first use.

    topic `chat` ──> lite topic `room-1` = topic `%LITE%chat$room-1` with one partition

A lite topic is a topic of the stream plane: it has offsets and leases of its own, and costs only rows when idle. It has
the id of its topic. Deleting the topic deletes its lite topics. A lite topic with the id of another topic is left over
from a deleted one. It does not exist for clients, and is replaced when its name is used.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine, Sequence
from typing import TYPE_CHECKING, Final
from uuid import UUID

import msgspec

from basaltmq.errors import BasaltError, TopicExistsError, TopicNotFoundError
from basaltmq.protocols.rocketmq.rules.names import LITE, lite_topic_of
from basaltmq.streams.topics import TOPICS_PER_BATCH, NewTopic, Topic

if TYPE_CHECKING:
    from basaltmq.protocols.rocketmq.host import Host

_log: Final = logging.getLogger(__name__)


class LiteTopics:
    """The lite topics of a virtual host."""

    def __init__(self, host: Host) -> None:
        self._host = host
        self._wanted: dict[str, tuple[Topic, asyncio.Future[Topic]]] = {}
        """Lite topics to create, which waiting calls share."""
        self._creating: asyncio.Task[None] | None = None
        self._orphaned: dict[str, str] = {}
        """Names and ids of deleted topics that may have lite topics."""
        self._sweeping: asyncio.Task[None] | None = None
        self._batches_created = 0
        self._has_any = True
        """Whether there may be lite topics. The search for the first one reads the tombstones of deleted topics."""

    def close(self) -> None:
        for task in (self._creating, self._sweeping):
            if task is not None:
                task.cancel()

    def find(self, parent: Topic, lite: str) -> Topic | None:
        found = self._host.plane.topics.find(lite_topic_of(parent.name, lite))
        return found if found is not None and found.config.lite_of == str(parent.id) else None

    def require(self, parent: Topic, lite: str) -> Topic:
        found = self.find(parent, lite)
        if found is None:
            raise TopicNotFoundError(f"topic {parent.name!r} has no lite topic {lite!r:.80}")
        return found

    async def get(self, parent: Topic, names: Sequence[str]) -> list[Topic]:
        """Return lite topics. Those that do not exist are created, with those of other calls in one batch."""
        found: list[Topic | asyncio.Future[Topic]] = [
            self.find(parent, each) or self._want(parent, each) for each in names
        ]
        return [await each if isinstance(each, asyncio.Future) else each for each in found]

    def parent_deleted(self, parent: str, parent_id: UUID) -> None:
        """Delete the lite topics of a deleted topic. A start repeats it if a crash interrupts it."""
        if not self._has_any:
            return
        self._orphaned[parent] = str(parent_id)
        self._start_sweep(self._delete_orphaned)

    def sweep(self) -> None:
        """Delete lite topics whose topic no longer exists."""
        self._start_sweep(self._sweep)

    def _want(self, parent: Topic, lite: str) -> asyncio.Future[Topic]:
        name = lite_topic_of(parent.name, lite)
        known = self._wanted.get(name)
        if known is None:
            known = self._wanted[name] = (parent, self._host.loop.create_future())
        if self._creating is None:
            self._creating = self._host.loop.create_task(self._create_wanted())
        return known[1]

    async def _create_wanted(self) -> None:
        try:
            while self._wanted:
                batch = {name: self._wanted.pop(name) for name in list(self._wanted)[:TOPICS_PER_BATCH]}
                try:
                    with self._host.guard():
                        made = await asyncio.to_thread(self._create, {name: at for name, (at, _) in batch.items()})
                except BasaltError as error:
                    made = [error] * len(batch)
                self._batches_created += 1
                self._has_any = True
                for (_, future), result in zip(batch.values(), made, strict=True):
                    if future.cancelled():
                        continue
                    if isinstance(result, BasaltError):
                        future.set_exception(result)
                    else:
                        future.set_result(result)
        finally:
            self._creating = None
            for _, future in self._wanted.values():
                future.cancel()
            self._wanted.clear()

    def _create(self, parents: dict[str, Topic]) -> list[Topic | BasaltError]:
        """Create lite topics in a thread, because it waits for an fsync."""
        topics = self._host.plane.topics
        self._delete_names([name for name, parent in parents.items() if self._is_stale(name, str(parent.id))])
        config = self._host.new_topic_config(1)
        made = topics.create_many(
            [
                NewTopic(name, msgspec.structs.replace(config, lite_of=str(parent.id), durability=parent.config.level))
                for name, parent in parents.items()
            ]
        )
        return [
            topics.get(name) if isinstance(result, TopicExistsError) else result
            for name, result in zip(parents, made, strict=True)
        ]

    def _is_stale(self, name: str, parent_id: str) -> bool:
        found = self._host.plane.topics.find(name)
        return found is not None and found.config.lite_of != parent_id

    def _delete_names(self, names: Sequence[str]) -> None:
        for error in self._host.plane.topics.delete_many(names) if names else ():
            if error is not None and not isinstance(error, TopicNotFoundError):
                raise error

    def _start_sweep(self, sweep: Callable[[], Coroutine[None, None, None]]) -> None:
        if self._sweeping is None or self._sweeping.done():
            self._sweeping = self._host.loop.create_task(self._swept(sweep))

    async def _swept(self, sweep: Callable[[], Coroutine[None, None, None]]) -> None:
        try:
            await sweep()
            # Topics may have been deleted meanwhile.
            await self._delete_orphaned()
        except BasaltError as error:
            _log.warning("the lite topics of deleted topics stay until the next start: %s", error)

    async def _delete_orphaned(self) -> None:
        while self._orphaned:
            if not await self._look() and not self._has_any:
                self._orphaned.clear()
                return
            parent, parent_id = self._orphaned.popitem()
            await self._delete(parent, parent_id)

    async def _delete(self, parent: str, parent_id: str) -> None:
        prefix = after = lite_topic_of(parent, "")
        while page := [each for each in await self._page(after, TOPICS_PER_BATCH) if each.name.startswith(prefix)]:
            with self._host.guard():
                gone = [each.name for each in page if each.config.lite_of == parent_id]
                await asyncio.to_thread(self._delete_names, gone)
            after = page[-1].name

    async def _sweep(self) -> None:
        """Look at the first lite topic of each topic."""
        page = await self._look()
        while page:
            parent = page[0].name[len(LITE) :].partition("$")[0]
            lite_of = page[0].config.lite_of
            found = self._host.plane.topics.find(parent)
            if lite_of is not None and (found is None or str(found.id) != lite_of):
                await self._delete(parent, lite_of)
            # `%` follows `$`, so this is behind all lite topics of the parent.
            page = await self._page(f"{LITE}{parent}%", 1)

    async def _look(self) -> list[Topic]:
        """Return the first lite topic. Usually a virtual host has none, and many topics may be deleted together."""
        created = self._batches_created
        found = await self._page(LITE, 1)
        if not found and self._creating is None and created == self._batches_created:
            self._has_any = False
        return found

    async def _page(self, after: str, limit: int) -> list[Topic]:
        """Return lite topics by name, after a name."""

        def read() -> list[Topic]:
            return self._host.plane.topics.page(start_after=after, limit=limit).topics

        with self._host.guard():
            return [each for each in await asyncio.to_thread(read) if each.name.startswith(LITE)]
