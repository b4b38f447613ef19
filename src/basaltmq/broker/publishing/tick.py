"""The publishing tick: what clients publish and settle in one turn of the loop is one batch.

    publish, settle ─> gathered ─> end of the turn: route, group by queue ─> one change of the plane ─> returns,
                                                                                transient confirms ─> the WAL's sync
                                                                                                      ─> confirms

A message is confirmed when every queue that took it has it: after the sync if it is persistent and one of them is
durable, after the write otherwise. One that no queue took is confirmed as well; if it was `mandatory` it was returned
before that. A queue that is full and refuses makes the confirm a refusal.

If the store cannot take the batch for the moment, nothing of it has happened: it waits, publishers are held, and it
is tried again. If one operation of the batch cannot be done, the others are done one by one. An error of the disk is
the virtual host's: it fails, and nothing that was not confirmed is.

Routes are remembered per exchange and key until the topology changes; properties that were seen before are not looked
at again. So the usual message costs two look-ups and one draft here.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any, Final, Protocol

from basaltmq.broker.consumers.consumer import wanted
from basaltmq.broker.consumers.queue import BrokerQueue
from basaltmq.broker.consumers.tick_batch import ACK, REQUEUE, Publish, Publisher, Settlement, TickBatch
from basaltmq.broker.message import amqp_table, properties
from basaltmq.broker.message.death import MAXLEN, Death, routing_keys
from basaltmq.broker.message.properties import PERSISTENT, Peek
from basaltmq.broker.routing.topology import Topology
from basaltmq.errors import BasaltError, CorruptionError, PreconditionFailedError, StorageError, StoreStalledError
from basaltmq.queues.config import Durability, Overflow
from basaltmq.queues.draft import FAIRNESS_KEY_DEFAULT, Draft
from basaltmq.queues.leases.delivery import Delivery
from basaltmq.queues.plane import QueuePlane
from basaltmq.store.after_sync import AfterSync
from basaltmq.store.sync.loop_commit import LoopCommit

ROUTES_MAX: Final = 16_384
"""Routes remembered; with usual names a few MiB. Past it all are forgotten and found again."""

FATES_MAX: Final = 1024
"""Different properties remembered; publishers that put an id or a time into each never hit."""

FATE_BYTES_MAX: Final = 512
"""Properties longer than this are not remembered."""

BATCH_MESSAGES_MAX: Final = 5000
BATCH_BYTES_MAX: Final = 32 << 20
"""A turn that gathered more is several batches, so that none outgrows the store's limit."""

TURN_BYTES_MAX: Final = 4 << 20
"""Bodies written in one turn, or one larger message: RocksDB takes 2 to 4 ms for a megabyte and holds the GIL."""

SYNC_HERE_BYTES_MAX: Final = 512 << 10
"""Bodies in a batch that the loop may sync by itself. More take longer than a turn may: 10 MB about 50 ms."""

SHARE_BYTES_MIN: Final = 256
"""Bodies from here on are stored once for all queues of a fan-out; smaller ones are copied."""

STALL_RETRY_S: Final = 0.02
"""Between two tries while the store is behind."""

NO_ROUTE: Final = 312
_log: Final = logging.getLogger(__name__)


class Route:
    """Where messages of one exchange and key go."""

    __slots__ = ("by_headers", "fan_out", "prefix", "queues", "single")

    def __init__(self, queues: Sequence[BrokerQueue], prefix: bytes, *, by_headers: bool) -> None:
        self.queues = tuple(queues)
        self.prefix = prefix
        """Exchange and key, as they stand before the properties of a stored message."""
        self.by_headers = by_headers
        self.fan_out = len(queues)
        """How many queues a message reaches; where headers decide, how many the last one did."""
        only = queues[0] if len(queues) == 1 and not by_headers else None
        self.single = only if only is not None and only.is_plain else None
        """The one queue, if messages need nothing special there."""


class StreamAppend(Protocol):
    """Takes messages for stream queues."""

    def append(self, queue: BrokerQueue, messages: Sequence[tuple[bytes, bytes]]) -> asyncio.Future[None]:
        """Append (envelope, body) pairs; the future resolves when they are durable."""
        ...


class Publishing:
    """Gathers and applies what publishers and consumers ask for."""

    def __init__(
        self,
        plane: QueuePlane,
        commit: LoopCommit,
        topology: Topology,
        queues: dict[str, BrokerQueue],
        streams: StreamAppend,
        *,
        failed: Callable[[BaseException], None],
        stalled: Callable[[bool], None],
        hand: Callable[[BrokerQueue, list[Delivery]], None],
        now_s: Callable[[], float],
    ) -> None:
        self._plane = plane
        self._commit = commit
        self._topology = topology
        self._queues = queues
        self._streams = streams
        self._failed = failed
        self._stalled = stalled
        self._hand = hand
        self._now_s = now_s
        self._routes: dict[tuple[str, str], Route] = {}
        self._routes_version = -1
        self._fates: dict[bytes, Peek] = {}
        self.pending: list[Publish] = []
        self.settlements: list[Settlement] = []
        self.is_stalled = False
        self.unsynced = 0
        """Batches whose confirms are to come: their sync is under way, or their turn."""
        self.unroutable = 0

    def __bool__(self) -> bool:
        return bool(self.pending or self.settlements)

    def flush(self, *, for_turn: bool = False) -> bool:
        """Apply what was gathered; False if the store is behind and it has to wait.

        With `for_turn` as many bytes as a turn has time for; the rest waits for the next turn, unless it is too much.
        """
        while self.pending or self.settlements:
            publishes, rest, size_bytes = _cut(self.pending, TURN_BYTES_MAX if for_turn else BATCH_BYTES_MAX)
            if size_bytes > SYNC_HERE_BYTES_MAX:
                self._commit.sync_in_thread()
            settlements = self.settlements
            self.pending, self.settlements = rest, []
            try:
                self._apply(publishes, settlements)
            except StoreStalledError:
                self.pending = publishes + self.pending
                self.settlements = settlements + self.settlements
                if not self.is_stalled:
                    self.is_stalled = True
                    self._stalled(True)
                return False
            except StorageError as error:
                self._failed(error)
                return True
            if self.is_stalled:
                self.is_stalled = False
                self._stalled(False)
            if for_turn and rest and sum([len(each[4]) for each in rest]) <= BATCH_BYTES_MAX:
                break
        return True

    def _apply(self, publishes: list[Publish], settlements: list[Settlement]) -> None:
        """Do all of it. If the store gets behind on the way, what is left in the lists is what was not done."""
        batch = TickBatch()
        try:
            if publishes:
                self._sort(publishes, batch)
            if batch.steps or batch.instant or settlements:
                with self._plane.change():
                    self._write(batch, settlements)
        except Exception as error:
            if isinstance(error, StorageError) and not isinstance(error, CorruptionError):
                raise
            self._apart(publishes, settlements, error)
            return
        self._tell(batch)

    def _apart(self, publishes: list[Publish], settlements: list[Settlement], error: Exception) -> None:
        """One operation spoils the batch: do them one by one, and refuse the one that cannot be done."""
        if len(publishes) + len(settlements) == 1:
            self._refuse(publishes, settlements, error)
            return
        while settlements:
            self._apply([], [settlements[0]])
            del settlements[0]
        while publishes:
            self._apply([publishes[0]], [])
            del publishes[0]

    def _refuse(self, publishes: list[Publish], settlements: list[Settlement], error: Exception) -> None:
        """A publish that cannot be done is refused; a lease that is over is nobody's loss."""
        if not isinstance(error, BasaltError):
            _log.error("an operation failed", exc_info=error)
        for publisher, exchange, _, _, _, _, number in publishes:
            _log.warning("a message to exchange %r was refused: %s", exchange, error)
            if number:
                _call(publisher.confirmed, [number], False)
        for settlement in settlements:
            if len(settlement.ids) > 1:
                self._apply([], [settlement._replace(ids=[message_id]) for message_id in settlement.ids])

    def _write(self, batch: TickBatch, settlements: Iterable[Settlement]) -> None:
        """The operations of a batch, inside a change."""
        plane = self._plane
        for queues, drafts in batch.steps:
            if len(queues) == 1:
                plane.enqueue(queues[0].name, drafts, durability=Durability.WRITTEN)
            else:
                plane.publish_many([queue.name for queue in queues], drafts, durability=Durability.WRITTEN)
        for queue, drafts in batch.instant.items():
            batch.handed.append((queue, plane.deliver(queue.name, drafts, visibility_ms=queue.lease_ms)))
        for name, token, ids, outcome in settlements:
            if outcome == ACK:
                plane.ack(name, token, ids)
            elif outcome == REQUEUE:
                plane.release(name, token, ids)
            else:
                plane.nack(name, token, ids, reject=True)

    def _tell(self, batch: TickBatch) -> None:
        """The batch is written: whom that concerns."""
        for queues, drafts in batch.steps:
            for queue in queues:
                queue.published += len(drafts)
        for queue, deliveries in batch.handed:
            queue.published += len(deliveries)
            self._hand(queue, deliveries)
        for publisher, exchange, key, raw, body, _, _ in batch.returns:
            _call(publisher.returned, NO_ROUTE, "NO_ROUTE", exchange, key, raw, body)
        for publisher, numbers in batch.nacks.items():
            _call(publisher.confirmed, numbers, False)
        if batch.confirms:
            # A turn later, as after a sync: a publisher that hears first runs ahead of those who consume.
            self.unsynced += 1
            asyncio.get_running_loop().call_soon(self._synced, batch.confirms, None)
        waits: list[asyncio.Future[None]] = [
            self._streams.append(queue, messages) for queue, messages in batch.streams.items()
        ]
        if not batch.synced:
            return
        self.unsynced += 1
        if not waits:
            # A future would tell in a later turn of the loop than the one that hears of the sync.
            after: Any = AfterSync(partial(self._synced, batch.synced))
            self._commit.resolve_durable(asyncio.get_running_loop(), [after])
            return
        if batch.steps or batch.instant:
            waits.append(self._commit.durable())
        asyncio.gather(*waits).add_done_callback(partial(self._appended, batch.synced))

    def _appended(self, confirms: dict[Publisher, list[int]], done: asyncio.Future[Any]) -> None:
        if done.cancelled():
            self.unsynced -= 1
        else:
            self._synced(confirms, done.exception())

    def _synced(self, confirms: dict[Publisher, list[int]], error: BaseException | None) -> None:
        self.unsynced -= 1
        if isinstance(error, StorageError):
            self._failed(error)
            return
        if error is not None:
            _log.warning("messages were refused: %s", error)
        for publisher, numbers in confirms.items():
            _call(publisher.confirmed, numbers, error is None)

    def commit_tx(self, publishes: list[Publish], settlements: list[Settlement]) -> asyncio.Future[None]:
        """Do all of it as one batch; the future resolves when it is durable. Nothing is done if anything cannot be."""
        loop = asyncio.get_running_loop()
        batch = TickBatch()
        self._sort(publishes, batch)
        if batch.has_refused:
            raise PreconditionFailedError("the transaction publishes to a queue that is full; nothing of it is done")
        with self._plane.change():
            self._write(batch, settlements)
        for queue, deliveries in batch.handed:
            self._hand(queue, deliveries)
        for publisher, exchange, key, raw, body, _, _ in batch.returns:
            _call(publisher.returned, NO_ROUTE, "NO_ROUTE", exchange, key, raw, body)
        waits = [self._streams.append(queue, messages) for queue, messages in batch.streams.items()]
        waits.append(self._commit.durable())
        result: asyncio.Future[None] = loop.create_future()

        def finish(done: asyncio.Future[Any]) -> None:
            error = done.exception()
            if isinstance(error, StorageError):
                self._failed(error)
            if not result.done():
                if error is None:
                    result.set_result(None)
                else:
                    result.set_exception(error)

        asyncio.gather(*waits).add_done_callback(finish)
        return result

    def _sort(self, publishes: Iterable[Publish], batch: TickBatch) -> None:
        """Route messages and make drafts of them, by queue."""
        self._check_routes()
        if len(self._fates) > FATES_MAX:
            self._fates = {}
        routes, fates = self._routes, self._fates
        last: tuple[object, object, object, object] = (None, None, None, None)
        is_usual = transient = False
        envelope = b""
        ttl_ms: int | None = None
        drafts: list[Draft] = []
        told: list[int] | None = None
        for publish in publishes:
            publisher, exchange, key, raw, body, _, number = publish
            # Messages of one publisher mostly follow each other by the same route: what holds for the last one holds.
            if key is not last[0] or raw != last[1] or publisher is not last[2] or exchange is not last[3]:
                last = (key, raw, publisher, exchange)
                route = routes.get((exchange, key)) or self._learn_route(exchange, key)
                fate = fates.get(raw) or self._learn_fate(raw)
                queue = route.single
                is_usual = queue is not None and not (fate.has_headers and b"CC" in raw) and fate.expiration_ms != 0
                if queue is not None and is_usual:
                    transient = fate.delivery_mode != PERSISTENT or not queue.durable
                    envelope = route.prefix + raw
                    ttl_ms = fate.expiration_ms
                    drafts = batch.group(queue)
                    told = (batch.confirms if transient else batch.synced).setdefault(publisher, []) if number else None
            if not is_usual:
                self._sort_one(publish, route, fate, batch)
                continue
            drafts.append(Draft(payload=body, properties=envelope, transient=transient, ttl_ms=ttl_ms))
            if told is not None:
                told.append(number)

    def _check_routes(self) -> None:
        """Forget routes that may be stale, or are too many."""
        version = self._topology.version
        if self._routes_version != version or len(self._routes) > ROUTES_MAX:
            self._routes = {}
            self._routes_version = version

    def fan_out(self, exchange: str, key: str) -> int:
        """How many queues a message to this exchange and key is expected to reach, at least 1."""
        self._check_routes()
        route = self._routes.get((exchange, key)) or self._learn_route(exchange, key)
        return route.fan_out or 1

    def _learn_route(self, exchange: str, key: str) -> Route:
        route = self._routes[exchange, key] = self.route(exchange, key)
        return route

    def _learn_fate(self, raw: bytes) -> Peek:
        fate = properties.peek(raw)
        if len(raw) <= FATE_BYTES_MAX:
            self._fates[raw] = fate
        return fate

    def route(self, exchange: str, key: str) -> Route:
        found = self._topology.exchanges.get(exchange)
        names, by_headers = ([], False) if found is None else self._topology.route(found, [key], {})
        queues = [self._queues[name] for name in names]
        return Route(queues, properties.seal(exchange, key, b""), by_headers=by_headers)

    def _sort_one(self, publish: Publish, route: Route, fate: Peek, batch: TickBatch) -> None:
        """A message to several queues, to none, by its headers, or to a queue that asks for more."""
        publisher, exchange, key, raw, body, mandatory, number = publish
        queues: Sequence[BrokerQueue] = route.queues
        headers: dict[str, Any] = {}
        if fate.has_headers:
            headers = properties.parse(raw).headers
            if route.by_headers or "CC" in headers or "BCC" in headers:
                queues = self._queues_of(exchange, routing_keys(key, headers), headers)
                route.fan_out = len(queues)
                if "BCC" in headers:
                    raw = without_bcc(raw)
        if not queues:
            self.unroutable += 1
            if mandatory:
                batch.returns.append(publish)
            if number:
                batch.confirms.setdefault(publisher, []).append(number)
            return
        takers = [queue for queue in queues if not queue.rejects or self._has_room(queue, len(body), batch)]
        envelope = route.prefix + raw
        if len(takers) < len(queues):
            batch.has_refused = True
            for queue in queues:
                if queue not in takers:
                    self._overflow(queue, envelope, body, fate, batch)
            if number:
                batch.nacks.setdefault(publisher, []).append(number)
        wants_sync = self._enqueue(takers, envelope, body, fate, headers, batch)
        if number and len(takers) == len(queues):
            confirms = batch.synced if wants_sync else batch.confirms
            confirms.setdefault(publisher, []).append(number)

    def _queues_of(self, exchange: str, keys: Sequence[str], headers: dict[str, Any]) -> list[BrokerQueue]:
        found = self._topology.exchanges.get(exchange)
        if found is None:
            return []
        return [self._queues[name] for name in self._topology.route(found, keys, headers)[0]]

    def _enqueue(
        self,
        queues: Sequence[BrokerQueue],
        envelope: bytes,
        body: bytes,
        fate: Peek,
        headers: dict[str, Any],
        batch: TickBatch,
    ) -> bool:
        """Put a message into the groups of its queues; whether its confirm waits for a sync."""
        is_persistent = fate.delivery_mode == PERSISTENT
        wants_sync = False
        alike: list[BrokerQueue] = []
        for queue in queues:
            if queue.is_stream:
                batch.streams.setdefault(queue, []).append((envelope, body))
                wants_sync = True
            elif self._is_instant(queue, fate, batch):
                wants_sync = wants_sync or (queue.durable and is_persistent)
                batch.instant.setdefault(queue, []).append(_draft(queue, envelope, body, fate, headers))
            elif queue.is_plain and queue.durable and is_persistent:
                wants_sync = True
                alike.append(queue)
            else:
                wants_sync = wants_sync or (queue.durable and is_persistent)
                batch.add(queue, _draft(queue, envelope, body, fate, headers))
        if alike:
            draft = Draft(payload=body, properties=envelope, ttl_ms=fate.expiration_ms)
            if len(alike) > 1 and len(body) >= SHARE_BYTES_MIN:
                batch.add_shared(alike, draft)
            else:
                for queue in alike:
                    batch.add(queue, draft)
        return wants_sync

    def _is_instant(self, queue: BrokerQueue, fate: Peek, batch: TickBatch) -> bool:
        """Whether a message that lives for no time at all has a consumer that can take it."""
        if fate.expiration_ms != 0 and queue.settings.ttl_ms != 0:
            return False
        line = queue.consumers.first_line()
        count = len(batch.instant.get(queue, ())) + 1
        return line is not None and wanted(line, count) >= count

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

    def _overflow(self, queue: BrokerQueue, envelope: bytes, body: bytes, fate: Peek, batch: TickBatch) -> None:
        """A queue refuses a message; some want it dead-lettered."""
        if queue.settings.overflow is not Overflow.REJECT_PUBLISH_DEAD_LETTER:
            return
        death, targets = self.bury(queue, envelope, MAXLEN)
        if death is not None and targets:
            self._enqueue(targets, death.envelope(), body, fate._replace(expiration_ms=None), {}, batch)

    def bury(self, queue: BrokerQueue, envelope: bytes, reason: str) -> tuple[Death | None, list[BrokerQueue]]:
        """A message died: what it carries on, and the queues that take it."""
        settings = queue.settings
        if settings.dead_letter_exchange is None:
            return None, []
        death = Death(
            envelope,
            queue.name,
            reason,
            int(self._now_s()),
            settings.dead_letter_exchange,
            settings.dead_letter_routing_key,
        )
        exchange = settings.dead_letter_exchange
        reached = self._queues_of(exchange, death.keys, death.parsed.headers)
        return death, [each for each in reached if death.may_enter(each.name)]


def _call(tell: Callable[..., None], *told: Any) -> None:
    """Tell a publisher; what is written is written, and one channel's bug is not the others'."""
    try:
        tell(*told)
    except Exception:
        _log.exception("a publisher could not be told what became of its messages")


def _draft(queue: BrokerQueue, envelope: bytes, body: bytes, fate: Peek, headers: dict[str, Any]) -> Draft:
    """The draft of a message for a queue that asks for more than payload and properties."""
    settings = queue.settings
    is_persistent = fate.delivery_mode == PERSISTENT and queue.durable
    draft = Draft(payload=body, properties=envelope, transient=not is_persistent, ttl_ms=fate.expiration_ms)
    if settings.priorities_max:
        draft.priority = min(fate.priority, settings.priorities_max)
    if settings.fairness_header is not None:
        draft.fairness_key = _text(headers.get(settings.fairness_header)) or FAIRNESS_KEY_DEFAULT
    if settings.throttle_header is not None:
        throttle = _text(headers.get(settings.throttle_header))
        draft.throttle_keys = (throttle,) if throttle else ()
    if settings.dedup_ms is not None:
        message_id = properties.parse(properties.open_envelope(envelope)[2]).message_id
        draft.dedup_id = b"" if message_id is None else message_id.encode(errors="surrogateescape")
    return draft


def _text(value: object) -> str:
    return "" if value is None else str(value)


def without_bcc(raw: bytes) -> bytes:
    """Properties as recipients may see them."""
    parsed = properties.parse(raw)
    if parsed.headers_raw is not None:
        parsed.headers_raw = amqp_table.edit(parsed.headers_raw, {}, ["BCC"])
    return properties.encode(parsed)


def _cut(pending: list[Publish], bytes_max: int) -> tuple[list[Publish], list[Publish], int]:
    """As many messages as make one batch, the rest, and the bytes of the batch's bodies."""
    size_bytes = sum([len(each[4]) for each in pending])
    if len(pending) <= BATCH_MESSAGES_MAX and size_bytes <= bytes_max:
        return pending, [], size_bytes
    size_bytes = 0
    for index, each in enumerate(pending):
        if index and (size_bytes + len(each[4]) > bytes_max or index >= BATCH_MESSAGES_MAX):
            return pending[:index], pending[index:], size_bytes
        size_bytes += len(each[4])
    return pending, [], size_bytes
