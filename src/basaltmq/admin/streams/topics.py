"""Routes for topics: metadata, records as Arrow IPC streams, offsets of groups.

They serve programs that read much at once, such as Spark tasks and scripts with pyarrow. Permissions: `read` on a topic
to see it, `configure` to create it, `read` on a group name to commit for it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, Final, TypeVar

import msgspec

from basaltmq.admin.http.message import HttpError, Response, json_response
from basaltmq.admin.http.routes import Call, Route
from basaltmq.admin.http.scope import Scope
from basaltmq.admin.streams.arrow_stream import ArrowStreams, require_arrow
from basaltmq.broker.auth.permissions import CONFIGURE, READ
from basaltmq.broker.guard import Guard
from basaltmq.broker.vhost import VHost
from basaltmq.errors import AccessRefusedError, BasaltError, InvalidArgumentError
from basaltmq.streams.adapter import IfAllOlder
from basaltmq.streams.drivers import Drivers
from basaltmq.streams.offsets import Commit, TopicPartition
from basaltmq.streams.plane import StreamPlane
from basaltmq.streams.topics import PARTITIONS_PER_BATCH, TOPICS_PER_BATCH, NewTopic, Topic, TopicConfig

if TYPE_CHECKING:
    import pyarrow as pa

SLICE_RECORDS: Final = 16_384
SLICE_BYTES: Final = 2 << 20
"""Limits of one store read: large enough to spread its cost, small enough for many concurrent readers."""

PAGE: Final = 500
"""Maximum topics or groups per response."""

COLUMNS: Final = ("offset", "timestamp", "key", "value")
OFFSET_MAX: Final = (1 << 63) - 1

Result = TypeVar("Result")


class CommitSpec(msgspec.Struct):
    """Offsets to commit: the next ones to read."""

    offsets: dict[str, dict[str, int]]
    """By topic and partition."""
    metadata: str = ""


class TopicSpec(msgspec.Struct, forbid_unknown_fields=True):
    """A topic of a batch."""

    name: str
    config: TopicConfig = TopicConfig()


class TopicsSpec(msgspec.Struct, forbid_unknown_fields=True):
    """Topics to create together."""

    topics: list[TopicSpec]


class Topics:
    """Handlers of topics and groups."""

    def __init__(self, scope: Scope, arrow: ArrowStreams) -> None:
        self._scope = scope
        self._arrow = arrow

    def routes(self) -> list[Route]:
        topic = "/api/topics/{vhost}/{topic}"
        partition = topic + "/{partition}"
        group = "/api/groups/{vhost}/{group}"
        after = {"after": f"Only names after this one. A response has at most {PAGE} names."}
        return [
            Route("GET", "/api/topics/{vhost}", self.topics, "Topics that you may read, by name.", query=after,
                  returns="topics, and next_after if there are more."),
            Route("GET", topic, self.one, "A topic: settings, and offsets and sizes of its partitions."),
            Route("PUT", topic, self.create, "Create a topic.", takes=TopicConfig, optional_body=True,
                  returns="201 if it was created, 204 if it existed with these settings."),
            Route("POST", "/api/topics/{vhost}", self.create_many, f"Create up to {TOPICS_PER_BATCH} topics together.",
                  takes=TopicsSpec,
                  returns="topics: for each its name and created, or the error for which it was refused. The others "
                          "are created."),
            Route("GET", partition + "/offset", self.offset_at, "The first offset at or after a time.",
                  query={"timestamp_ms": "Milliseconds since 1970."}),
            Route("GET", partition + "/records", self.records, "Records by offset, as an Arrow IPC stream.",
                  query={
                      "offset": "First offset. 400 if the record was removed.",
                      "end": "End offset, exclusive (default: the end of the partition).",
                      "headers": "true: include the column headers.",
                  },
                  returns="application/vnd.apache.arrow.stream: offset, timestamp, key, value. A response without the "
                          "end of the stream is incomplete: request again after the last offset."),
            Route("GET", "/api/groups/{vhost}", self.groups, "Groups with committed offsets.", query=after,
                  returns="groups, and next_after if there are more."),
            Route("GET", group, self.lag, "Committed offset and lag of a group in each partition."),
            Route("POST", group, self.commit, "Commit offsets of a group. They are durable before the response.",
                  takes=CommitSpec),
        ]  # fmt: skip

    async def topics(self, call: Call) -> Any:
        vhost, plane = self._plane(call)
        page = await on_plane(vhost, lambda: plane.topics.page(start_after=call.query.get("after") or None, limit=PAGE))
        seen = [each for each in page.topics if self._may(call, vhost, each.name)]
        return {"topics": [_topic(each) for each in seen], "next_after": page.next_after}

    async def one(self, call: Call) -> Any:
        vhost, plane = self._plane(call)
        name = self._named(call, vhost)

        def look() -> dict[str, Any]:
            topic = plane.topics.get(name)
            return {**_topic(topic), "partitions": [_partition(plane.drivers, topic, n) for n in _numbers(topic)]}

        return await on_plane(vhost, look)

    async def create(self, call: Call) -> Response:
        vhost, plane = self._plane(call)
        name, config = call.names["topic"], call.body
        self._scope.check(call, vhost, CONFIGURE, name)
        config.check()
        found = await on_plane(vhost, lambda: plane.topics.find(name))
        if found is None:
            await on_plane(vhost, lambda: plane.topics.create(name, config))
            return json_response({"name": name}, 201)
        if found.config != config:
            raise HttpError(
                409, f"topic {name!r} exists with other settings; request the same settings, or use another name"
            )
        return Response(204)

    async def create_many(self, call: Call) -> Any:
        vhost, plane = self._plane(call)
        wanted = [NewTopic(each.name, each.config) for each in call.body.topics]
        partitions = sum(each.config.partitions for each in wanted)
        if len(wanted) > TOPICS_PER_BATCH or (len(wanted) > 1 and partitions > PARTITIONS_PER_BATCH):
            raise HttpError(
                400,
                f"{len(wanted)} topics with {partitions} partitions exceed the limits of one request, "
                f"{TOPICS_PER_BATCH} and {PARTITIONS_PER_BATCH}; send several requests",
            )
        for each in wanted:
            self._scope.check(call, vhost, CONFIGURE, each.name)
        made = await on_plane(vhost, lambda: plane.topics.create_many(wanted))
        return {"topics": [_outcome(each.name, result) for each, result in zip(wanted, made, strict=True)]}

    async def offset_at(self, call: Call) -> Any:
        vhost, plane = self._plane(call)
        name, number = self._named(call, vhost), number_of(call)
        at_ms = call.number("timestamp_ms", -1)
        if at_ms < 0:
            raise HttpError(400, "the query parameter timestamp_ms is missing")
        offset = await on_plane(vhost, lambda: plane.drivers.offset_at(name, number, at_ms, IfAllOlder.LATEST))
        return {"offset": offset}

    async def records(self, call: Call) -> Response:
        require_arrow()
        vhost, plane = self._plane(call)
        name, number = self._named(call, vhost), number_of(call)
        begin, end = call.number("offset", -1), call.number("end", OFFSET_MAX)
        if begin < 0:
            raise HttpError(400, "the query parameter offset is missing")
        columns = [*COLUMNS, "headers"] if call.flag("headers") else [*COLUMNS]
        batches = _records(plane.drivers, name, number, begin, end, columns)
        return await self._arrow.respond(vhost, _schema(columns), batches, lambda: None)

    async def groups(self, call: Call) -> Any:
        vhost, plane = self._plane(call)
        after = call.query.get("after") or None
        page = await on_plane(vhost, lambda: plane.groups.page(start_after=after, limit=PAGE))
        seen = [each for each in page if self._may(call, vhost, each)]
        return {"groups": seen, "next_after": page[-1] if len(page) == PAGE else None}

    async def lag(self, call: Call) -> Any:
        vhost, plane = self._plane(call)
        group = call.names["group"]
        self._scope.check(call, vhost, READ, group)
        found = await on_plane(vhost, lambda: plane.groups.lag(group))
        return [each for each in found if self._may(call, vhost, each.topic)]

    async def commit(self, call: Call) -> None:
        vhost, plane = self._plane(call)
        group, spec = call.names["group"], call.body
        self._scope.check(call, vhost, READ, group)
        for name in spec.offsets:
            self._scope.check(call, vhost, READ, name)
        await on_plane(vhost, lambda: plane.offsets.commit(group, _commits(plane, spec)))

    def _plane(self, call: Call) -> tuple[VHost, StreamPlane]:
        vhost = self._scope.vhost(call)
        return vhost, vhost.streams.plane

    def _named(self, call: Call, vhost: VHost) -> str:
        return named(self._scope, call, vhost, READ)

    def _may(self, call: Call, vhost: VHost, name: str) -> bool:
        try:
            self._scope.check(call, vhost, READ, name)
        except AccessRefusedError:
            return False
        return True


def named(scope: Scope, call: Call, vhost: VHost, action: str) -> str:
    """Return the topic of a request. Raise unless the user has the permission."""
    name = call.names["topic"]
    scope.check(call, vhost, action, name)
    return name


async def on_plane(vhost: VHost, work: Callable[[], Result]) -> Result:
    """Run stream plane work in a thread. A storage error closes the virtual host."""
    with Guard(vhost):
        return await asyncio.to_thread(work)


def number_of(call: Call) -> int:
    text = call.names["partition"]
    if not (text.isascii() and text.isdigit() and len(text) < 10):
        raise HttpError(400, f"the partition must be a non-negative integer, not {text[:40]!r}")
    return int(text)


def _numbers(topic: Topic) -> range:
    return range(len(topic.shards))


def _outcome(name: str, made: Topic | BasaltError) -> dict[str, Any]:
    if isinstance(made, BasaltError):
        return {"name": name, "created": False, "error": made.code, "reason": str(made)}
    return {"name": name, "created": True, "id": str(made.id)}


def _topic(topic: Topic) -> dict[str, Any]:
    return {
        "name": topic.name,
        "id": str(topic.id),
        "config": {
            **msgspec.to_builtins(topic.config),
            "partitions": topic.config.partitions,
            "engine": topic.config.engine.value,
            "durability": topic.config.level.value,
        },
        "shards": list(topic.shards),
    }


def _partition(drivers: Drivers, topic: Topic, number: int) -> dict[str, Any]:
    info = drivers.info(topic.name, number)
    return {
        "partition": number,
        "shard": info.meta.number,
        "start_offset": info.start_offset,
        "end_offset": info.high_watermark,
        "records": info.records,
        "size_bytes": info.size_bytes,
    }


def _schema(columns: list[str]) -> pa.Schema:
    import pyarrow as pa

    from basaltmq.log.arrow import SCHEMA

    return pa.schema([SCHEMA.field(name) for name in columns])


def _records(
    drivers: Drivers, topic: str, partition: int, offset: int, end: int, columns: list[str]
) -> Iterator[pa.RecordBatch]:
    schema = _schema(columns)
    while offset < end:
        found = drivers.read(topic, partition, offset, min(SLICE_RECORDS, end - offset), SLICE_BYTES)
        if len(found):
            batch = found.arrow().select(columns)
            if found.next_offset > end:
                # Offsets have gaps, so the batch may extend beyond `end`.
                offsets = batch.column(0)
                batch = batch.slice(0, sum(1 for each in offsets if each.as_py() < end))
            if batch.num_rows:
                yield batch.cast(schema) if batch.schema != schema else batch
        if found.next_offset <= offset:
            return
        offset = found.next_offset


def _commits(plane: StreamPlane, spec: CommitSpec) -> dict[TopicPartition, int | Commit]:
    commits: dict[TopicPartition, int | Commit] = {}
    for name, by_partition in spec.offsets.items():
        topic = plane.topics.get(name)
        for text, offset in by_partition.items():
            number = int(text) if text.isascii() and text.isdigit() and len(text) < 10 else -1
            if not 0 <= number < len(topic.shards):
                raise InvalidArgumentError(f"topic {name!r} has partitions 0 to {len(topic.shards) - 1}, not {text}")
            commits[topic.id, number] = Commit(offset, metadata=spec.metadata)
    if not commits:
        raise InvalidArgumentError("the request has no offsets to commit")
    return commits
