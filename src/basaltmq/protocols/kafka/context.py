"""State of one virtual host that the Kafka request handlers share: the stream plane, groups, transactions, caches.

A context lives as long as its virtual host is open. After a failure or a restart of the virtual host, the next request
gets a new context. Consumer groups then rebalance, and producer state is read from the log and the store.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections.abc import Callable, Coroutine, Iterable
from typing import Any, Final, NamedTuple, Protocol
from uuid import UUID

from basaltmq.broker.auth.acls import Operation, Resource
from basaltmq.broker.config.settings import KafkaListener
from basaltmq.broker.guard import Guard
from basaltmq.broker.node import Node
from basaltmq.broker.vhost import VHost
from basaltmq.clock import now_ms
from basaltmq.durability import Durability
from basaltmq.errors import InvalidConfigError, ShardNotFoundError, TopicNotFoundError
from basaltmq.protocols.kafka.fetch_state.arrivals import Arrivals
from basaltmq.protocols.kafka.fetch_state.deadline import Deadline
from basaltmq.protocols.kafka.fetch_state.fetch_session import FetchSession
from basaltmq.protocols.kafka.fetch_state.read_ahead import ReadAhead
from basaltmq.protocols.kafka.groups.classic_requests import ClassicGroups
from basaltmq.protocols.kafka.groups.consumer_group_table import ConsumerGroups
from basaltmq.protocols.kafka.transactions.coordinator import Transactions
from basaltmq.protocols.kafka.transactions.producers import Producers
from basaltmq.protocols.kafka.wire.api import Request
from basaltmq.protocols.kafka.wire.schema import Fields
from basaltmq.streams.engines.segment.engine import SegmentEngine
from basaltmq.streams.engines.segment.reader import DAMAGED_FRAMES_MAX
from basaltmq.streams.plane import StreamPlane
from basaltmq.streams.shards import Engine
from basaltmq.streams.topics import Topic

_log: Final = logging.getLogger(__name__)

NODE_ID: Final = 1
"""Node id of the only broker."""

UNKNOWN_BYTES: Final = 1 << 30
"""Size reported when the number of new bytes is unknown. It wakes every waiting fetch."""

NAMES_MAX: Final = 10_000
"""Limit of each cache: topic names by topic id, topic names by shard, and routes."""


class Route(NamedTuple):
    """Location of a partition."""

    topic: Topic
    engine: SegmentEngine
    shard: int


class Settings(KafkaListener, frozen=True, kw_only=True):
    """Settings of the Kafka listener: the section `kafka` and the limits of all protocols."""

    cluster_id: str = "basalt"
    connections_max: int = 10_000
    handshake_s: float = 10.0
    """Time limit for authentication, in seconds."""

    @property
    def topic_durability(self) -> Durability:
        """The durability of topics that do not set one."""
        return Durability(self.durability)


class Client(Protocol):
    """The connection that sent a request, as handlers use it."""

    client_id: str
    host: str
    fetch_session: FetchSession | None
    deadline: Deadline
    """Timer of the request that blocks the ones behind it."""

    def address(self) -> tuple[str, int]:
        """Return the host and port that Metadata responses name to this client."""
        ...

    def check(
        self, kind: str, name: str, operation: Operation | None = None, resource: Resource = Resource.TOPIC
    ) -> None:
        """Raise AccessRefusedError unless an ACL or a permission (configure, write or read) allows an operation.

        The default operation is READ for read, WRITE for write, and ALTER for configure.
        """
        ...

    def may(
        self, kind: str, name: str, operation: Operation | None = None, resource: Resource = Resource.TOPIC
    ) -> bool: ...

    def is_administrator(self) -> bool: ...

    def unsent_bytes(self) -> int | None:
        """Return the bytes of responses not yet sent; None after the connection closed."""
        ...


Respond = Callable[[Fields | None, Exception | None], None]
"""Callback for a response, called once: with the body, with None if no response is sent, or with the error."""


class PipelinedResponse(NamedTuple):
    """A pending response that does not block the requests behind it. `start` is called once."""

    start: Callable[[Respond], None]


class BlockingResponse(Protocol):
    """A pending response that blocks the requests behind it. Unlike a task, it completes without an extra loop turn."""

    def start(self, respond: Respond) -> None: ...

    def cancel(self) -> object:
        """Stop: the connection is closed."""
        ...


Response = Fields | PipelinedResponse | BlockingResponse | Coroutine[Any, Any, Fields | None] | None
"""Immediate response; pending; pending and blocking; a blocking coroutine; or no response."""


async def awaited(response: Response) -> Fields | None:
    """Await a response of any kind."""
    if response is None or isinstance(response, dict):
        return response
    if isinstance(response, Coroutine):
        return await response
    found: asyncio.Future[Fields | None] = asyncio.get_running_loop().create_future()

    def respond(body: Fields | None, error: Exception | None) -> None:
        if found.done():
            return
        if error is None:
            found.set_result(body)
        else:
            found.set_exception(error)

    response.start(respond)
    try:
        return await found
    except asyncio.CancelledError:
        if not isinstance(response, PipelinedResponse):
            response.cancel()
        raise


Handler = Callable[["Context", Client, Request], Response]


class Context:
    """State of one virtual host for Kafka requests."""

    def __init__(self, node: Node, vhost: VHost, settings: Settings, clock_ms: Callable[[], int] = now_ms) -> None:
        self.now_ms = clock_ms
        self.node = node
        self.vhost = vhost
        self.settings = settings
        self.plane: StreamPlane = vhost.streams.plane
        self.arrivals = Arrivals()
        self.ahead = ReadAhead()
        self._shard_names: dict[int, str] = {}
        self.groups = ClassicGroups()
        self.consumer_groups = ConsumerGroups(vhost, self.plane)
        self.producers = Producers(vhost.store)
        self._fetch_sessions = itertools.count(1)
        self._names: dict[UUID, str] = {}
        self._routes: dict[tuple[str, int], Route] = {}
        self._skipped: dict[tuple[int, int], None] = {}
        """Shard and last offset of batches whose loss is logged."""
        self._epoch = -1
        """Topic epoch for which the cached names and routes are valid."""
        self.transactions = Transactions(
            vhost.streams, lambda: self.producers.next_id()[0], clock_ms, decided=self._decided, failed=self._failed
        )
        with self.guard():
            self.transactions.recover()
        self._stop_listening = vhost.streams.listen(self._topic_grew)

    def close(self) -> None:
        self._stop_listening()
        self.ahead.close()
        self.groups.close()
        self.consumer_groups.close()
        self.transactions.close()
        if self.vhost.is_up:
            with self.guard():
                self.producers.close()

    def guard(self) -> Guard:
        return Guard(self.vhost)

    def topic(self, name: str) -> Topic:
        return self.plane.topics.get(name)

    def skipped(self, topic: str, partition: int, shard: int, first: int, last: int) -> None:
        """Log, once for each batch, that fetches skip it."""
        if (shard, last) in self._skipped:
            return
        if len(self._skipped) >= DAMAGED_FRAMES_MAX:
            self._skipped.pop(next(iter(self._skipped)))
        self._skipped[shard, last] = None
        _log.error(
            "topic %r, partition %d: offsets %d to %d cannot be read; consumers skip them",
            topic,
            partition,
            first,
            last,
        )

    def next_fetch_session(self) -> int:
        return next(self._fetch_sessions)

    def topic_name(self, topic_id: UUID) -> str | None:
        """Return the name of the topic with this id, or None."""
        self._refresh_caches()
        name = self._names.get(topic_id)
        if name is not None:
            return name
        found = self.plane.topics.summary_of(topic_id)
        if found is None:
            return None
        if len(self._names) >= NAMES_MAX:
            self._names.clear()
        self._names[topic_id] = found.name
        return found.name

    def route(self, name: str, partition: int) -> Route:
        """Return the location of a partition, cached until any topic changes."""
        self._refresh_caches()
        found = self._routes.get((name, partition))
        if found is None:
            topic = self.topic(name)
            found = Route(topic, *self.engine(topic, partition))
            if len(self._routes) >= NAMES_MAX:
                self._routes.clear()
            self._routes[name, partition] = found
        return found

    def _refresh_caches(self) -> None:
        """Clear the caches if a topic has changed."""
        epoch = self.plane.topics.epoch
        if epoch != self._epoch:
            self._epoch = epoch
            self._names.clear()
            self._routes.clear()

    def engine(self, topic: Topic, partition: int) -> tuple[SegmentEngine, int]:
        """Return the engine and the shard of a partition."""
        if not 0 <= partition < len(topic.shards):
            raise TopicNotFoundError(f"topic {topic.name!r} has no partition {partition}")
        shard = topic.shards[partition]
        kind = self.plane.shards.get(shard).engine
        segments = self.vhost.streams.segments()
        if segments is None or kind is not Engine.SEGMENT:
            raise InvalidConfigError(
                f"topic {topic.name!r} uses the engine {kind.value}; Kafka clients need engine segment"
            )
        return segments, shard

    def is_queue(self, topic: str) -> bool:
        """Whether an AMQP stream queue stores its messages in this topic."""
        queue = self.vhost.queues.by_name.get(topic)
        return queue is not None and queue.is_stream

    def notify_appended(self, shard: int, size_bytes: int) -> None:
        """Notify consumers of all protocols that `size_bytes` became readable in a shard."""
        self.arrivals.notify_appended(shard, size_bytes)
        name = self._shard_names.get(shard)
        if name is None:
            name = self._topic_of_shard(shard)
        self.vhost.streams.notify(name, source=self._topic_grew)

    def _topic_of_shard(self, shard: int) -> str:
        """Return the topic name of a shard, or "" if the shard is deleted. A shard never changes its topic."""
        try:
            name = self.topic_name(self.plane.shards.get(shard).topic_id)
        except ShardNotFoundError:
            name = None
        if name is None:
            return ""
        if len(self._shard_names) >= NAMES_MAX:
            self._shard_names.clear()
        self._shard_names[shard] = name
        return name

    def _failed(self, error: BaseException) -> None:
        self.vhost.fail(error)

    def _decided(self, shards: Iterable[int]) -> None:
        for shard in shards:
            self.notify_appended(shard, UNKNOWN_BYTES)

    def _topic_grew(self, topic: str) -> None:
        found = self.plane.topics.find(topic)
        if found is not None:
            for shard in found.shards:
                self.arrivals.notify_appended(shard, UNKNOWN_BYTES)
