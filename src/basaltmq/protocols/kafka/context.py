"""What requests work with: one virtual host's stream plane, and what Kafka keeps beside it in memory.

A desk lives as long as its virtual host is open. When that fails or is restarted, the next request finds another desk;
groups then form again, and producers are known from what the log and the store hold.
"""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import Callable, Coroutine, Iterable
from typing import Any, Final, NamedTuple, Protocol
from uuid import UUID

from basaltmq.broker.guard import Guard
from basaltmq.broker.node import Node
from basaltmq.broker.vhost import VHost
from basaltmq.durability import Durability
from basaltmq.errors import InvalidConfigError, ShardNotFoundError, TopicNotFoundError
from basaltmq.protocols.kafka.arrivals import Arrivals
from basaltmq.protocols.kafka.deadline import Deadline
from basaltmq.protocols.kafka.fetch_session import FetchSession
from basaltmq.protocols.kafka.groups.classic_groups import Groups
from basaltmq.protocols.kafka.groups.consumer_groups import ConsumerGroups
from basaltmq.protocols.kafka.read_ahead import ReadAhead
from basaltmq.protocols.kafka.transactions.coordinator import Transactions
from basaltmq.protocols.kafka.transactions.producers import Producers
from basaltmq.protocols.kafka.wire.api import Request
from basaltmq.protocols.kafka.wire.schema import Fields
from basaltmq.streams.engines.segment.engine import SegmentEngine
from basaltmq.streams.plane import StreamPlane
from basaltmq.streams.topics import Topic

NODE_ID: Final = 1
"""There is one broker, and this is its number."""

UNKNOWN_BYTES: Final = 1 << 30
"""Said where it is not known how much more can be read: whoever waits looks."""

NAMES_MAX: Final = 10_000
"""Names of topics remembered by their ids, or their shards."""


class Route(NamedTuple):
    """Where a partition is."""

    topic: Topic
    engine: SegmentEngine
    shard: int


class Settings(NamedTuple):
    """What the listener was told."""

    vhost: str = "/"
    advertised_host: str = ""
    """How clients reach the broker; empty takes the address they came in by."""
    advertised_port: int = 0
    auto_create: bool = True
    partitions: int = 1
    durability: Durability = Durability.SYNCED
    access: str = "loopback"
    cluster_id: str = "basalt"
    request_bytes_max: int = 100 << 20
    connections_max: int = 10_000
    handshake_s: float = 10.0
    """Time a client has to say who it is."""


class Client(Protocol):
    """Who asks."""

    client_id: str
    host: str
    fetch_session: FetchSession | None
    deadline: Deadline
    """Of a request that holds those behind it."""

    def address(self) -> tuple[str, int]:
        """How this client reaches the broker."""
        ...

    def check(self, kind: str, resource: str) -> None:
        """AccessRefusedError unless it may configure, write or read the resource."""
        ...

    def may(self, kind: str, resource: str) -> bool: ...

    def is_administrator(self) -> bool: ...

    def unsent_bytes(self) -> int | None:
        """Of its answers; None when it is gone."""
        ...


Tell = Callable[[Fields | None, Exception | None], None]
"""Called once, by whoever has the answer: with it, with None where none is sent, or with what went wrong."""


class Later(NamedTuple):
    """An answer that is on its way; the requests after it need not wait for it. `start` is called once."""

    start: Callable[[Tell], None]


class Held(Protocol):
    """An answer that is on its way, with everything after it held; a task would hear of what it awaits a turn late."""

    def start(self, tell: Tell) -> None: ...

    def cancel(self) -> object:
        """Nobody waits for it any more."""
        ...


Answer = Fields | Later | Held | Coroutine[Any, Any, Fields | None] | None
"""At once; on its way; on its way with everything after it held; the same by a coroutine; none at all."""


async def awaited(answer: Answer) -> Fields | None:
    """An answer of any kind, for those who have a task."""
    if answer is None or isinstance(answer, dict):
        return answer
    if isinstance(answer, Coroutine):
        return await answer
    found: asyncio.Future[Fields | None] = asyncio.get_running_loop().create_future()

    def tell(body: Fields | None, error: Exception | None) -> None:
        if found.done():
            return
        if error is None:
            found.set_result(body)
        else:
            found.set_exception(error)

    answer.start(tell)
    return await found


Handler = Callable[["Desk", Client, Request], Answer]


def _now_ms() -> int:
    return time.time_ns() // 1_000_000


class Desk:
    """One virtual host, for Kafka's requests."""

    def __init__(self, node: Node, vhost: VHost, settings: Settings, clock_ms: Callable[[], int] = _now_ms) -> None:
        self.now_ms = clock_ms
        self.node = node
        self.vhost = vhost
        self.settings = settings
        self.plane: StreamPlane = vhost.streams.plane
        self.arrivals = Arrivals()
        self.ahead = ReadAhead()
        self._shard_names: dict[int, str] = {}
        self.groups = Groups()
        self.consumer_groups = ConsumerGroups(vhost, self.plane)
        self.producers = Producers(vhost.store)
        self._fetch_sessions = itertools.count(1)
        self._names: dict[UUID, str] = {}
        self._routes: dict[tuple[str, int], Route] = {}
        self._epoch = -1
        """Of the topics that names and routes are known of."""
        self.transactions = Transactions(
            self.plane, lambda: self.producers.next_id()[0], clock_ms, decided=self._decided, failed=self._failed
        )
        with self.guard():
            self.transactions.recover()
        self._stop_listening = vhost.streams.on_visible(self._came)

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

    def next_fetch_session(self) -> int:
        return next(self._fetch_sessions)

    def topic_name(self, topic_id: UUID) -> str | None:
        """The name of the topic that has this id, None if none does."""
        self._follow()
        name = self._names.get(topic_id)
        if name is not None:
            return name
        found = self.plane.topics.by_id(topic_id)
        if found is None:
            return None
        if len(self._names) >= NAMES_MAX:
            self._names.clear()
        self._names[topic_id] = found.name
        return found.name

    def route(self, name: str, partition: int) -> Route:
        """As `topic` and `engine` of it, known since the last time if no topic has changed."""
        self._follow()
        found = self._routes.get((name, partition))
        if found is None:
            topic = self.topic(name)
            found = Route(topic, *self.engine(topic, partition))
            if len(self._routes) >= NAMES_MAX:
                self._routes.clear()
            self._routes[name, partition] = found
        return found

    def _follow(self) -> None:
        """Forget what is known of topics if one has changed."""
        epoch = self.plane.topics.epoch
        if epoch != self._epoch:
            self._epoch = epoch
            self._names.clear()
            self._routes.clear()

    def engine(self, topic: Topic, partition: int) -> tuple[SegmentEngine, int]:
        """Who keeps a partition, and its shard."""
        if not 0 <= partition < len(topic.shards):
            raise TopicNotFoundError(f"topic {topic.name!r} has no partition {partition}")
        engine, shard = self.plane.drivers.route(topic, partition)
        if not isinstance(engine, SegmentEngine):
            raise InvalidConfigError(
                f"topic {topic.name!r} is kept by the engine {topic.config.engine.value}; Kafka's clients need segment"
            )
        return engine, shard

    def is_queue(self, topic: str) -> bool:
        """Does a stream queue of AMQP keep its messages in this topic?"""
        queue = self.vhost.queues.by_name.get(topic)
        return queue is not None and queue.is_stream

    def came(self, shard: int, size_bytes: int) -> None:
        """So much more can be read in a shard, by consumers of any protocol."""
        self.arrivals.came(shard, size_bytes)
        name = self._shard_names.get(shard)
        if name is None:
            name = self._named(shard)
        queue = self.vhost.queues.by_name.get(name)
        if queue is not None and queue.is_stream:
            self.vhost.streams.grew(queue)

    def _named(self, shard: int) -> str:
        """The topic of a shard, empty if it is gone; a shard has the same one all its life."""
        try:
            topic = self.plane.topics.by_id(self.plane.shards.get(shard).topic_id)
        except ShardNotFoundError:
            topic = None
        if topic is None:
            return ""
        if len(self._shard_names) >= NAMES_MAX:
            self._shard_names.clear()
        self._shard_names[shard] = topic.name
        return topic.name

    def _failed(self, error: BaseException) -> None:
        self.vhost.fail(error)

    def _decided(self, shards: Iterable[int]) -> None:
        for shard in shards:
            self.came(shard, UNKNOWN_BYTES)

    def _came(self, topic: str) -> None:
        found = self.plane.topics.find(topic)
        if found is not None:
            for shard in found.shards:
                self.arrivals.came(shard, UNKNOWN_BYTES)
