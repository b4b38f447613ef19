"""Routes for records as JSON, deletion of topics, and reset of groups.

Records have the format of `basalt topic read` and `append` (`streams/imports/record_lines.py`). The size of a response
is bounded; use the Arrow streams for large reads. An append is durable, as its topic requires, before the response is
sent."""

from __future__ import annotations

import asyncio
from typing import Any, Final

import msgspec

from basaltmq.admin.http.message import HttpError, Response
from basaltmq.admin.http.routes import Call, Route
from basaltmq.admin.http.scope import Scope
from basaltmq.admin.streams.arrow_stream import READS_MAX
from basaltmq.admin.streams.topics import named, number_of, on_plane
from basaltmq.broker.auth.permissions import CONFIGURE, READ, WRITE
from basaltmq.durability import Durability
from basaltmq.errors import PreconditionFailedError
from basaltmq.streams.adapter import ReadBatch
from basaltmq.streams.groups import Reset
from basaltmq.streams.imports.record_lines import Line, encode_record, to_record

PAGE_RECORDS: Final = 1_000
PAGE_BYTES: Final = 4 << 20
"""Limits of one response. People read far less at once, and the broker's memory is for its queues."""


class AppendSpec(msgspec.Struct, forbid_unknown_fields=True):
    """Body of an append request."""

    records: list[Line]
    partition: int | None = None
    """Default: chosen by key, or round-robin."""
    durability: Durability | None = None
    """Default: the topic's durability."""


class ResetSpec(msgspec.Struct, forbid_unknown_fields=True):
    """Body of a request to move the offsets of a group."""

    topic: str
    to: Reset | int
    partition: int | None = None
    """Default: all partitions."""
    timestamp_ms: int | None = None
    """Move to the first record at or after this time. `to` applies to partitions without one."""


class TopicRecords:
    """Handlers of records as JSON, and of group resets."""

    def __init__(self, scope: Scope) -> None:
        self._scope = scope
        self._reads = asyncio.Semaphore(READS_MAX)

    def routes(self) -> list[Route]:
        topic = "/api/topics/{vhost}/{topic}"
        return [
            Route("POST", topic, self.append, "Append records.",
                  takes=AppendSpec, body_bytes_max=self._scope.publish_bytes_max,
                  returns="partition, offset and last_offset of each appended part."),
            Route("DELETE", topic, self.delete, "Delete a topic with its records and offsets."),
            Route("GET", topic + "/{partition}/lines", self.lines, "Records by offset, as JSON.",
                  query={
                      "offset": "First offset (default 0). 400 if the record was removed.",
                      "limit": f"Maximum number of records, 1 to {PAGE_RECORDS} (default {PAGE_RECORDS}).",
                      "key": "Only records with this key.",
                      "tag": "Only records with this tag.",
                  },
                  returns="records, and next_offset to continue from."),
            Route("POST", "/api/groups/{vhost}/{group}/reset", self.reset, "Move the offsets of a group in a topic.",
                  takes=ResetSpec, returns="The new offset of each moved partition."),
        ]  # fmt: skip

    async def append(self, call: Call) -> Any:
        vhost, spec = self._scope.vhost(call), call.body
        name, plane = named(self._scope, call, vhost, WRITE), vhost.streams.plane
        self._scope.check_not_blocked(vhost)
        if not spec.records:
            raise HttpError(400, "the request has no records to append")

        def work() -> list[dict[str, int]]:
            records = [to_record(number, said) for number, said in enumerate(spec.records, 1)]
            done = plane.drivers.append_batch(name, records, partition=spec.partition, durability=spec.durability)
            for _, append in done:
                plane.drivers.wait(append)
            return [
                {"partition": chosen, "offset": append.base_offset, "last_offset": append.last_offset}
                for chosen, append in done
            ]

        where = await on_plane(vhost, work)
        vhost.streams.notify(name)
        return where

    async def delete(self, call: Call) -> None:
        vhost = self._scope.vhost(call)
        name, plane = named(self._scope, call, vhost, CONFIGURE), vhost.streams.plane
        queue = vhost.queues.by_name.get(name)
        if queue is not None and queue.is_stream:
            raise PreconditionFailedError(f"topic '{name}' is an AMQP stream queue; delete the queue instead")
        await on_plane(vhost, lambda: plane.topics.delete(name))

    async def lines(self, call: Call) -> Response:
        vhost = self._scope.vhost(call)
        name, drivers, partition = named(self._scope, call, vhost, READ), vhost.streams.plane.drivers, number_of(call)
        offset, limit = call.number("offset", 0), call.number("limit", PAGE_RECORDS, low=1)
        limit = min(limit, PAGE_RECORDS)
        key, tag = call.query.get("key"), call.query.get("tag")
        if key is not None and tag is not None:
            raise HttpError(400, "send key or tag, not both")

        def work() -> bytes:
            found: ReadBatch
            if key is not None:
                found = drivers.read_by_key(name, partition, key.encode(), offset, limit, PAGE_BYTES)
            elif tag is not None:
                found = drivers.read_by_tag(name, partition, tag.encode(), offset, limit, PAGE_BYTES)
            else:
                found = drivers.read(name, partition, offset, limit, PAGE_BYTES)
            lines = b",".join([encode_record(name, partition, record) for record in found.records()])
            return b'{"records":[%b],"next_offset":%d}' % (lines, found.next_offset)

        async with self._reads:
            return Response(200, await on_plane(vhost, work))

    async def reset(self, call: Call) -> Any:
        vhost, spec, group = self._scope.vhost(call), call.body, call.names["group"]
        plane = vhost.streams.plane
        self._scope.check(call, vhost, READ, group)
        self._scope.check(call, vhost, READ, spec.topic)
        moved = await on_plane(
            vhost,
            lambda: plane.groups.reset(
                group, spec.topic, spec.to, partition=spec.partition, timestamp_ms=spec.timestamp_ms
            ),
        )
        return [{"partition": each, "offset": offset} for each, offset in moved.items()]
