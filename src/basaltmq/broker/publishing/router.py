"""Routes published messages to queues and groups them into the batch of a turn.

Routes are cached per exchange and routing key until the topology changes. Decoded properties are cached by their bytes.
The usual message therefore costs two look-ups and one draft.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Final

from basaltmq.broker.consumers.consumer import total_credit
from basaltmq.broker.consumers.direct import DirectSink
from basaltmq.broker.consumers.queue import UNLIMITED_CREDIT, BrokerQueue
from basaltmq.broker.message import amqp_table, properties
from basaltmq.broker.message.death import MAXLEN, Death, routing_keys
from basaltmq.broker.message.operations import Publish
from basaltmq.broker.message.properties import PERSISTENT, Peek, Properties
from basaltmq.broker.publishing.tick_batch import TickBatch
from basaltmq.broker.routing.topology import Topology
from basaltmq.broker.scheduling.loop_shares import FAN_OUT_DIRECT_S, FAN_OUT_DRAFT_S, FAN_OUT_QUEUE_S
from basaltmq.queues.config import DURATION_MS_MAX, Overflow
from basaltmq.queues.draft import FAIRNESS_KEY_DEFAULT, Draft
from basaltmq.queues.plane import QueuePlane

DELAY: Final = "x-delay"
"""Header with the delay of a message that is published to a delayed exchange."""

DELIVERY_DELAY: Final = "x-opt-delivery-delay"
DELIVERY_TIME: Final = "x-opt-delivery-time"
"""Headers that delay a message for every exchange: a delay, or a time since 1970, in milliseconds."""

_DELIVERY: Final = b"x-opt-delivery-"

ROUTES_MAX: Final = 16_384
"""Cached routes; a few MiB with usual names. A full cache is emptied."""

CACHED_KEY_CHARS_MAX: Final = 255
"""Routes of longer keys are not cached. MQTT topics have up to 65,535 bytes, and a full cache would take a gigabyte."""

PEEKED_MAX: Final = 1024
"""Cached properties. Publishers that put an id or a time into each message never hit the cache."""

PEEKED_BYTES_MAX: Final = 512
"""Longer properties are not cached."""

SHARE_BYTES_MIN: Final = 256
"""A fan-out stores larger bodies once for all queues (queues/fanout.py); smaller ones are copied."""

TOGETHER_MIN: Final = 16
"""From this number of queues on, a fan-out enqueues small bodies together, too. A message to 1,000 queues takes 22 ms
together and 77 ms queue by queue; fewer queues were not measured."""


MATCH_S_MIN: Final = 1e-4
"""Shorter matching by properties is not charged. A match with a few dozen bindings takes less."""

MATCH_COPY_S: Final = 1e-5
"""Matching time that counts like one message to one queue of a transaction."""


class Route:
    """The queues for messages of one exchange and routing key."""

    __slots__ = ("by_properties", "fan_out", "is_delayed", "match_s", "prefix", "queues", "single")

    def __init__(
        self, queues: Sequence[BrokerQueue], prefix: bytes, *, by_properties: bool = False, is_delayed: bool = False
    ) -> None:
        self.queues = tuple(queues)
        self.prefix = prefix
        """Encoded exchange and routing key: the start of the envelope."""
        self.by_properties = by_properties
        """Whether headers or properties of the message decide which queues it reaches."""
        self.is_delayed = is_delayed
        self.fan_out = len(queues)
        """Number of queues that a message reaches. If its properties decide, the number of the last message."""
        self.match_s = 0.0
        """Processor time of the last match by properties, which each message repeats; 0 if it is short."""
        only = queues[0] if len(queues) == 1 and not (by_properties or is_delayed) else None
        self.single = only if only is not None and only.is_plain else None
        """The only queue, if it needs no special handling."""

    @property
    def is_costly(self) -> bool:
        """Whether a message is charged for its fan-out or for matching its properties."""
        return self.fan_out > 1 or self.match_s > 0

    @property
    def copies(self) -> int:
        """The count of a message in a transaction: one per queue, at least one, and its matching."""
        return max(1, self.fan_out) + int(self.match_s / MATCH_COPY_S)

    def fan_out_s(self, *, is_transient: bool) -> float:
        """Return the estimated cost of a message for this route, in seconds."""
        direct = sum([queue.direct is not None for queue in self.queues]) if is_transient else 0
        queues_s = (self.fan_out - direct) * (FAN_OUT_QUEUE_S + FAN_OUT_DRAFT_S) + direct * FAN_OUT_DIRECT_S
        return queues_s + self.match_s

    @property
    def another_s(self) -> float:
        """Return the estimated cost of a message after another one for this route, in seconds."""
        return (self.fan_out * FAN_OUT_DRAFT_S if self.fan_out > 1 else 0.0) + self.match_s

    def limited(self) -> list[BrokerQueue]:
        """Return the queues whose publishers need credit."""
        return [queue for queue in self.queues if queue.publish_credit != UNLIMITED_CREDIT]


class MessageRouter:
    """Routes messages of one virtual host."""

    def __init__(
        self, plane: QueuePlane, topology: Topology, queues: dict[str, BrokerQueue], clock_ns: Callable[[], int]
    ) -> None:
        self._plane = plane
        self._topology = topology
        self._queues = queues
        self._clock_ns = clock_ns
        self._routes: dict[tuple[str, str], Route] = {}
        self._routes_version = -1
        self._peeked: dict[bytes, Peek] = {}
        self.learned = 0
        """Routes that were not cached. Each may take milliseconds, if an exchange has thousands of bindings."""

    def sort(self, publishes: Iterable[Publish]) -> TickBatch:
        """Route messages and group their drafts by queue."""
        batch = TickBatch()
        self._check_routes()
        if len(self._peeked) > PEEKED_MAX:
            self._peeked = {}
        routes, peeked = self._routes, self._peeked
        last: tuple[object, object, object, object] = (None, None, None, None)
        is_usual = transient = False
        envelope = b""
        ttl_ms: int | None = None
        drafts: list[Draft] = []
        numbers: list[int] | None = None
        for publish in publishes:
            publisher, exchange, key, raw, body, _, number = publish
            # Consecutive messages of one publisher mostly have the same route, so reuse the previous results.
            if key is not last[0] or raw != last[1] or publisher is not last[2] or exchange is not last[3]:
                last = (key, raw, publisher, exchange)
                route = routes.get((exchange, key)) or self._learn_route(exchange, key)
                peek = peeked.get(raw) or self._peek(raw)
                queue = route.single
                is_usual = (
                    queue is not None
                    and not (peek.has_headers and (b"CC" in raw or _DELIVERY in raw))
                    and peek.expiration_ms != 0
                    and (queue.direct is None or peek.delivery_mode == PERSISTENT)
                )
                if queue is not None and is_usual:
                    transient = peek.delivery_mode != PERSISTENT or not queue.durable
                    envelope = route.prefix + raw
                    ttl_ms = peek.expiration_ms
                    drafts = batch.group(queue)
                    by_publisher = batch.confirms if transient else batch.synced
                    numbers = by_publisher.setdefault(publisher, []) if number else None
            if not is_usual:
                self._sort_one(publish, route, peek, batch)
                continue
            drafts.append(Draft(payload=body, properties=envelope, transient=transient, ttl_ms=ttl_ms))
            if numbers is not None:
                numbers.append(number)
        return batch

    def _check_routes(self) -> None:
        """Empty the route cache if it is stale or too large."""
        version = self._topology.version
        if self._routes_version != version or len(self._routes) > ROUTES_MAX:
            self._routes = {}
            self._routes_version = version

    def known_route(self, exchange: str, key: str) -> Route:
        """Return the route of messages to this exchange and key. It is valid until the end of the turn."""
        self._check_routes()
        return self._routes.get((exchange, key)) or self._learn_route(exchange, key)

    def _learn_route(self, exchange: str, key: str) -> Route:
        self.learned += 1
        route = self.route(exchange, key)
        if len(key) <= CACHED_KEY_CHARS_MAX:
            self._routes[exchange, key] = route
        return route

    def _peek(self, raw: bytes) -> Peek:
        peek = properties.peek(raw)
        if len(raw) <= PEEKED_BYTES_MAX:
            self._peeked[raw] = peek
        return peek

    def route(self, exchange: str, key: str) -> Route:
        found = self._topology.exchanges.get(exchange)
        prefix = properties.encode_envelope(exchange, properties.short_key(key), b"")
        if found is None:
            return Route((), prefix)
        began_s = time.thread_time()
        reached = self._topology.route(found, [key], {})
        queues = [self._queues[name] for name in reached.queues]
        route = Route(queues, prefix, by_properties=reached.by_properties, is_delayed=reached.is_delayed)
        if reached.by_properties:
            route.match_s = _charged(time.thread_time() - began_s)
        return route

    def _sort_one(self, publish: Publish, route: Route, peek: Peek, batch: TickBatch) -> None:
        """Route a message to several queues, to none, by its headers, or to a queue with special settings."""
        publisher, exchange, key, raw, body, mandatory, number = publish
        queues: Sequence[BrokerQueue] = route.queues
        headers: dict[str, Any] = {}
        delay_ms = 0
        if peek.has_headers or route.by_properties:
            parsed = properties.parse(raw)
            headers = parsed.headers
            if route.by_properties or "CC" in headers or "BCC" in headers:
                began_s = time.thread_time()
                queues = self._queues_of(exchange, routing_keys(key, headers), headers, parsed)
                route.fan_out = len(queues)
                route.match_s = _charged(time.thread_time() - began_s)
                if "BCC" in headers:
                    raw = without_bcc(raw)
            if route.is_delayed and (delay_ms := delay_of(headers)):
                raw = with_delay_over(raw, delay_ms)
            if _DELIVERY in raw:
                delay_ms = max(delay_ms, delivery_delay_of(headers, self._clock_ns() // 1_000_000))
        if not queues:
            if mandatory:
                batch.returns.append(publish)
            if number:
                batch.confirms.setdefault(publisher, []).append(number)
            return
        accepting = [queue for queue in queues if not queue.rejects or self._has_room(queue, len(body), batch)]
        envelope = route.prefix + raw
        if peek.delivery_mode != PERSISTENT and peek.expiration_ms is None and not delay_ms:
            accepting, queues = self._deliver_direct(route, accepting, queues, envelope, body, batch)
        if len(accepting) < len(queues):
            batch.has_refused = True
            for queue in queues:
                if queue not in accepting:
                    self._overflow(queue, envelope, body, peek, batch)
            if number:
                batch.nacks.setdefault(publisher, []).append(number)
        wants_sync = self._enqueue(accepting, envelope, body, peek, headers, batch, delay_ms)
        if number and len(accepting) == len(queues):
            confirms = batch.synced if wants_sync else batch.confirms
            confirms.setdefault(publisher, []).append(number)

    def _deliver_direct(
        self,
        route: Route,
        accepting: list[BrokerQueue],
        queues: Sequence[BrokerQueue],
        envelope: bytes,
        body: bytes,
        batch: TickBatch,
    ) -> tuple[list[BrokerQueue], Sequence[BrokerQueue]]:
        """Give a transient message to the connected clients that need no queue. Return the other queues."""
        sinks: list[DirectSink] = []
        taken: set[BrokerQueue] = set()
        for queue in accepting:
            sink = queue.direct
            if sink is not None and not queue.has_ready and sink.accepts_direct():
                sinks.append(sink)
                taken.add(queue)
        if not sinks:
            return accepting, queues
        batch.add_direct(route, sinks, envelope, body)
        if len(taken) == len(queues):
            return [], []
        return [each for each in accepting if each not in taken], [each for each in queues if each not in taken]

    def _queues_of(
        self, exchange: str, keys: Sequence[str], headers: dict[str, Any], parsed: Properties
    ) -> list[BrokerQueue]:
        found = self._topology.exchanges.get(exchange)
        if found is None:
            return []
        return [self._queues[name] for name in self._topology.route(found, keys, headers, parsed).queues]

    def _enqueue(
        self,
        queues: Sequence[BrokerQueue],
        envelope: bytes,
        body: bytes,
        peek: Peek,
        headers: dict[str, Any],
        batch: TickBatch,
        delay_ms: int = 0,
    ) -> bool:
        """Add a message to the groups of its queues. Return whether its confirm waits for a sync."""
        is_persistent = peek.delivery_mode == PERSISTENT
        wants_sync = False
        alike: list[BrokerQueue] = []
        is_usual = is_persistent and peek.expiration_ms != 0 and not delay_ms
        for queue in queues:
            if is_usual and queue.is_plain and queue.durable:
                alike.append(queue)
            elif queue.is_stream:
                batch.streams.setdefault(queue, []).append((envelope, body))
                wants_sync = True
            elif not delay_ms and self._is_instant(queue, peek, batch):
                wants_sync = wants_sync or (queue.durable and is_persistent)
                batch.instant.setdefault(queue, []).append(_draft(queue, envelope, body, peek, headers))
            else:
                wants_sync = wants_sync or (queue.durable and is_persistent)
                draft = _draft(queue, envelope, body, peek, headers)
                draft.delay_ms = delay_ms
                batch.add(queue, draft)
        if alike:
            wants_sync = True
            draft = Draft(payload=body, properties=envelope, ttl_ms=peek.expiration_ms)
            if len(alike) >= (2 if len(body) >= SHARE_BYTES_MIN else TOGETHER_MIN):
                batch.add_shared(alike, draft)
            else:
                for queue in alike:
                    batch.add(queue, draft)
        return wants_sync

    def _is_instant(self, queue: BrokerQueue, peek: Peek, batch: TickBatch) -> bool:
        """Whether a message with TTL 0 has a ready consumer."""
        if peek.expiration_ms != 0 and queue.settings.ttl_ms != 0:
            return False
        rotation = queue.consumers.first_rotation()
        count = len(batch.instant.get(queue, ())) + 1
        return rotation is not None and total_credit(rotation, count) >= count

    def _has_room(self, queue: BrokerQueue, size_bytes: int, batch: TickBatch) -> bool:
        room = batch.rooms.get(queue)
        settings = queue.settings
        if room is None:
            counts = self._plane.stats(queue.name)
            room = batch.rooms[queue] = [
                (1 << 62) if settings.length_max is None else settings.length_max - counts["ready"],
                (1 << 62) if settings.bytes_max is None else settings.bytes_max - counts["ready_bytes"],
            ]
        if room[0] < 1 or room[1] < size_bytes:
            return False
        room[0] -= 1
        room[1] -= size_bytes
        return True

    def _overflow(self, queue: BrokerQueue, envelope: bytes, body: bytes, peek: Peek, batch: TickBatch) -> None:
        """Dead-letter a rejected message, if the queue's overflow mode requires it."""
        if queue.settings.overflow is not Overflow.REJECT_PUBLISH_DEAD_LETTER:
            return
        death, targets = self.dead_letter(queue, envelope, MAXLEN)
        if death is not None and targets:
            self._enqueue(targets, death.envelope(), body, peek._replace(expiration_ms=None), {}, batch)

    def dead_letter(self, queue: BrokerQueue, envelope: bytes, reason: str) -> tuple[Death | None, list[BrokerQueue]]:
        """Return the death record of a message and the queues that its dead-letter exchange routes to."""
        settings = queue.settings
        if settings.dead_letter_exchange is None:
            return None, []
        death = Death(
            envelope,
            queue.name,
            reason,
            self._clock_ns() // 1_000_000_000,
            settings.dead_letter_exchange,
            settings.dead_letter_routing_key,
        )
        exchange = settings.dead_letter_exchange
        reached = self._queues_of(exchange, death.keys, death.parsed.headers, death.parsed)
        return death, [each for each in reached if death.may_enter(each.name)]


def _charged(match_s: float) -> float:
    return match_s if match_s >= MATCH_S_MIN else 0.0


def _draft(queue: BrokerQueue, envelope: bytes, body: bytes, peek: Peek, headers: dict[str, Any]) -> Draft:
    """Return the draft of a message for a queue with special settings."""
    settings = queue.settings
    is_persistent = peek.delivery_mode == PERSISTENT and queue.durable
    draft = Draft(payload=body, properties=envelope, transient=not is_persistent, ttl_ms=peek.expiration_ms)
    if settings.priorities_max:
        draft.priority = min(peek.priority, settings.priorities_max)
    if settings.fairness_header is not None:
        draft.fairness_key = _text(headers.get(settings.fairness_header)) or FAIRNESS_KEY_DEFAULT
    if settings.throttle_header is not None:
        throttle = _text(headers.get(settings.throttle_header))
        draft.throttle_keys = (throttle,) if throttle else ()
    if settings.dedup_ms is not None:
        message_id = properties.parse(properties.decode_envelope(envelope)[2]).message_id
        draft.dedup_id = b"" if message_id is None else message_id.encode(errors="surrogateescape")
    return draft


def delay_of(headers: dict[str, Any]) -> int:
    """Return the delay in the headers of a message, in milliseconds; 0 if there is none."""
    value = headers.get(DELAY)
    return min(value, DURATION_MS_MAX) if type(value) is int and value > 0 else 0


def delivery_delay_of(headers: dict[str, Any], now_ms: int) -> int:
    """Return the delay until a message may be delivered, in milliseconds."""
    delay, time_ms = headers.get(DELIVERY_DELAY), headers.get(DELIVERY_TIME)
    delay_ms = delay if isinstance(delay, int) and not isinstance(delay, bool) else 0
    if isinstance(time_ms, int) and not isinstance(time_ms, bool):
        delay_ms = max(delay_ms, time_ms - now_ms)
    return min(max(0, delay_ms), DURATION_MS_MAX)


def with_delay_over(raw: bytes, delay_ms: int) -> bytes:
    """Return properties with a negative delay: consumers see how long it was, and a further exchange adds none."""
    parsed = properties.parse(raw)
    assert parsed.headers_raw is not None, "the delay is a header"
    parsed.headers_raw = amqp_table.edit(parsed.headers_raw, {DELAY: -delay_ms}, [])
    return properties.encode(parsed)


def _text(value: object) -> str:
    return "" if value is None else str(value)


def without_bcc(raw: bytes) -> bytes:
    """Return properties without the BCC header, which recipients must not see."""
    parsed = properties.parse(raw)
    if parsed.headers_raw is not None:
        parsed.headers_raw = amqp_table.edit(parsed.headers_raw, {}, ["BCC"])
    return properties.encode(parsed)
