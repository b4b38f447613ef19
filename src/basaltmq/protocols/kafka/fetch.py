"""Fetch: sends record batches to the socket exactly as they are stored in the log.

A fetch that finds less than `min_bytes` waits in `Arrivals` until enough bytes arrive or its wait time ends. An error
in any partition ends the wait at once. The partitions come from the request and its fetch session. Topics are given by
name, or by id since version 13.

With isolation level read_committed, a fetch returns records up to the last stable offset: the first offset of the
earliest open transaction. The response lists the aborted transactions within.

Where all records of a range are gone (deleted, expired), the response contains an empty batch that covers the offsets.
Otherwise the consumer would fetch the same offset forever.

A batch that cannot be read is skipped by default: a consumer cannot pass it by itself and would fetch it forever. The
loss is logged once with topic, partition and offsets; metrics and the health check `store-damage` show it. With
`kafka.skip_damaged` off, the fetch returns CORRUPT_MESSAGE, as Kafka does, until the consumer seeks.

After a full response, the next batches are read ahead while the consumer processes this one (`ReadAhead`).
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Mapping
from contextlib import suppress
from typing import Final

from basaltmq.broker.auth.permissions import READ
from basaltmq.broker.scheduling.turns import Turns
from basaltmq.errors import BasaltError, DamagedFrameError, OffsetOutOfRangeError
from basaltmq.log.batches.kafka import empty_batch, read_header
from basaltmq.protocols.kafka.context import Client, Context, Respond, Response
from basaltmq.protocols.kafka.fetch_state.arrivals import Wait
from basaltmq.protocols.kafka.fetch_state.fetch_session import Plan, plan
from basaltmq.protocols.kafka.fetch_state.read_ahead import Next
from basaltmq.protocols.kafka.wire import errors as e
from basaltmq.protocols.kafka.wire.api import Request
from basaltmq.protocols.kafka.wire.schema import Fields
from basaltmq.streams.engines.segment.engine import SegmentEngine
from basaltmq.streams.engines.segment.kafka import Ahead

RESPONSE_BYTES_MAX: Final = 55 << 20
"""Limit of one response in bytes, whatever the request allows: Kafka's default."""

PARTITIONS_PER_TURN_MAX: Final = 100
"""Partitions of a fetch that are read in one turn of the loop: 10 ms. More take several turns."""

WAIT_MS_MAX: Final = 60_000
IDS_SINCE: Final = 13
READ_COMMITTED: Final = 1
_DELTA_MAX: Final = (1 << 31) - 1
_NOTHING: Final[Mapping[tuple[int, int], Ahead]] = {}


class _Found:
    """Result of reading all partitions of a fetch once."""

    __slots__ = ("ahead", "body", "following", "has_error", "shards", "size_bytes")

    def __init__(self, ahead: Mapping[tuple[int, int], Ahead]) -> None:
        self.body: Fields = {}
        self.size_bytes = 0
        self.has_error = False
        self.shards: list[int] = []
        self.ahead = ahead
        """Batches that were read ahead for this fetch."""
        self.following: list[Next] = []
        """Positions after this response in partitions that have more records."""


def fetch(context: Context, client: Client, request: Request) -> Response:
    has_ids = request.version >= IDS_SINCE
    planned = plan(client, request.body, has_ids, context.next_fetch_session)
    if isinstance(planned, int):
        return {"error_code": planned}
    body = {**request.body, "topics": planned.topics, "has_ids": has_ids}
    if sum([len(topic["partitions"]) for topic in planned.topics]) > PARTITIONS_PER_TURN_MAX:
        return _fetched_in_turns(context, client, body, planned)
    found = _look(context, client, body, context.ahead.take(client))
    if _is_enough(found, body) or body["max_wait_ms"] <= 0 or not found.shards:
        if found.following:
            context.ahead.prepare(client, found.following)
        return _response_body(found, planned)
    return _Waiting(context, client, body, found, planned)


async def _fetched_in_turns(context: Context, client: Client, body: Fields, planned: Plan) -> Fields:
    """Fetch many partitions, in short turns."""
    loop = asyncio.get_running_loop()
    until = loop.time() + min(max(0, body["max_wait_ms"]), WAIT_MS_MAX) / 1000
    found = await _look_in_turns(context, client, body, context.ahead.take(client))
    while found.shards and not _is_enough(found, body) and loop.time() < until and context.vhost.is_up:
        # Register before the reads: a batch may arrive in a partition that was already read.
        woken = asyncio.Event()
        wait = Wait(found.shards, 1, woken.set)
        context.arrivals.add(wait)
        try:
            found = await _look_in_turns(context, client, body, _NOTHING)
            if not _is_enough(found, body):
                with suppress(TimeoutError):
                    await asyncio.wait_for(woken.wait(), max(0.0, until - loop.time()))
        finally:
            context.arrivals.remove(wait)
    if found.following:
        context.ahead.prepare(client, found.following)
    return _response_body(found, planned)


def _response_body(found: _Found, planned: Plan) -> Fields:
    session = planned.session
    if session is None:
        return found.body
    changed_partitions = session.changed_partitions(found.body["topics"])
    return {"session_id": session.number, "topics": found.body["topics"] if planned.is_first else changed_partitions}


def _is_enough(found: _Found, body: Fields) -> bool:
    return found.has_error or found.size_bytes >= body["min_bytes"]


class _Waiting:
    """A fetch that waits for enough bytes or for its deadline."""

    __slots__ = ("_body", "_client", "_context", "_found", "_planned", "_respond", "_until", "_wait")

    def __init__(self, context: Context, client: Client, body: Fields, found: _Found, planned: Plan) -> None:
        self._context = context
        self._client = client
        self._body = body
        self._found = found
        self._planned = planned
        self._until = 0.0
        self._respond: Respond | None = None
        self._wait: Wait | None = None

    def start(self, respond: Respond) -> None:
        loop = asyncio.get_running_loop()
        self._respond = respond
        self._until = loop.time() + min(self._body["max_wait_ms"], WAIT_MS_MAX) / 1000
        self._client.deadline.set(self._until, self._look_again)
        self._await()

    def cancel(self) -> None:
        self._client.deadline.clear()
        self._respond = None
        if self._wait is not None:
            self._context.arrivals.remove(self._wait)

    def _await(self) -> None:
        self._wait = Wait(self._found.shards, self._body["min_bytes"] - self._found.size_bytes, self._wake)
        self._context.arrivals.add(self._wait)

    def _wake(self) -> None:
        # One loop turn later: batches that arrive in the same turn are found together, and producers are served first.
        asyncio.get_running_loop().call_soon(self._look_again)

    def _look_again(self) -> None:
        respond = self._respond
        if respond is None:
            return
        try:
            is_over = not self._look()
        except Exception as error:
            self.cancel()
            respond(None, error)
            return
        if is_over:
            self.cancel()
            respond(_response_body(self._found, self._planned), None)

    def _look(self) -> bool:
        """Read again. Return whether the fetch still has to wait."""
        context, body = self._context, self._body
        if self._wait is not None:
            context.arrivals.remove(self._wait)
        if not context.vhost.is_up:
            return False
        self._found = _look(context, self._client, body, _NOTHING)
        if _is_enough(self._found, body) or asyncio.get_running_loop().time() >= self._until:
            return False
        self._await()
        return True


def _look(context: Context, client: Client, body: Fields, ahead: Mapping[tuple[int, int], Ahead]) -> _Found:
    found = _Found(ahead)
    for _ in _read_all(context, client, body, found):
        pass
    return found


async def _look_in_turns(
    context: Context, client: Client, body: Fields, ahead: Mapping[tuple[int, int], Ahead]
) -> _Found:
    found = _Found(ahead)
    turns = Turns()
    for _ in _read_all(context, client, body, found):
        await turns.yield_if_due()
    return found


def _read_all(context: Context, client: Client, body: Fields, found: _Found) -> Iterator[None]:
    """Read the partitions of a fetch once, and yield after each."""
    left = min(body["max_bytes"], RESPONSE_BYTES_MAX)
    topics: list[Fields] = []
    found.body = {"topics": topics}
    is_committed = body["isolation_level"] == READ_COMMITTED
    for topic in body["topics"]:
        partitions: list[Fields] = []
        topics.append({"topic": topic["topic"], "topic_id": topic["topic_id"], "partitions": partitions})
        name = context.topic_name(topic["topic_id"]) if body["has_ids"] else topic["topic"]
        for each in topic["partitions"]:
            if name is None:
                response: Fields = {"partition": each["partition"], "error_code": e.UNKNOWN_TOPIC_ID}
            else:
                response = _partition(context, client, name, each, left - found.size_bytes, found, is_committed)
            found.has_error = found.has_error or "error_code" in response
            partitions.append(response)
            yield


def _partition(
    context: Context, client: Client, name: str, asked: Fields, left: int, found: _Found, is_committed: bool
) -> Fields:
    partition, offset = asked["partition"], asked["fetch_offset"]
    response: Fields = {"partition": partition, "records": b""}
    try:
        client.check(READ, name)
        _, engine, shard = context.route(name, partition)
        found.shards.append(shard)
        if left <= 0:
            return response | _marks(engine, shard)
        bytes_max = min(left, asked["partition_max_bytes"])
        ahead = found.ahead.get((shard, offset))
        is_skipping = context.settings.skip_damaged
        read = engine.read_kafka(
            shard, offset, bytes_max, is_decided=is_committed, is_skipping=is_skipping, ahead=ahead
        )
        for first, last in read.skipped:
            context.skipped(name, partition, shard, first, last)
        if offset > read.high_watermark and offset > engine.shard_info(shard).next_offset:
            raise OffsetOutOfRangeError(shard, offset, read.start_offset, read.high_watermark)
        batches = read.batches
        if read.next_offset > offset and not (batches and _last_offset(batches[-1]) >= offset):
            batches = [empty_batch(offset, min(read.next_offset - 1 - offset, _DELTA_MAX))]
        size_bytes = sum(map(len, batches))
        if found.size_bytes and size_bytes > left:
            # Only the first batch of a response may exceed the limit. This one waits for the next fetch.
            size_bytes, batches = 0, []
        elif batches and read.next_offset < read.high_watermark:
            found.following.append(Next(engine, shard, read.next_offset, bytes_max))
        found.size_bytes += size_bytes
        response |= _marks(engine, shard) | {"records": batches}
        if is_committed:
            response["aborted_transactions"] = aborted_in(engine, shard, batches)
        return response
    except OffsetOutOfRangeError as error:
        marks = {"high_watermark": error.latest, "last_stable_offset": error.latest, "log_start_offset": error.earliest}
        return response | marks | {"error_code": e.OFFSET_OUT_OF_RANGE}
    except DamagedFrameError:
        return response | {"error_code": e.CORRUPT_MESSAGE}
    except BasaltError as error:
        code = e.OFFSET_OUT_OF_RANGE if offset < 0 else e.code_of(error)
        return response | {"error_code": code}


def _last_offset(batch: bytes) -> int:
    header = read_header(batch)
    return header.base_offset + header.last_offset_delta


def _marks(engine: SegmentEngine, shard: int) -> Fields:
    state = engine.state_of(shard)
    with state.lock:
        return {
            "high_watermark": state.high_watermark,
            "last_stable_offset": state.stable_offset,
            "log_start_offset": state.start_offset,
        }


def aborted_in(engine: SegmentEngine, shard: int, batches: list[bytes]) -> list[Fields]:
    """Return the aborted transactions that have data batches in `batches`, each with its first offset there.

    From that offset on, consumers drop the producer's batches until its control batch. So transactions without a batch
    here are not listed: if the rest of one was deleted, its control batch may be deleted too.
    """
    outcomes = engine.index.outcomes
    if not outcomes.is_used:
        return []
    found = []
    known: dict[int, int] = {}
    for batch in batches:
        header = read_header(batch)
        if not header.is_transactional or header.is_control or header.base_offset < known.get(header.producer_id, 0):
            continue
        marker = outcomes.marker(shard, header.producer_id, header.base_offset)
        if marker is not None:
            known[header.producer_id], is_commit = marker
            if not is_commit:
                found.append({"producer_id": header.producer_id, "first_offset": header.base_offset})
    return found
