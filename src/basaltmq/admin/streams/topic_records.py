"""Topics over HTTP for people and small programs: records as JSON both ways, a topic removed, a group moved.

Records have the shape of `basalt topic read` and `append` (streams/record_lines.py). An answer is bounded; who wants
much takes the Arrow streams (admin/streams.py). Appends are as durable as the topic promises before they are answered.
"""

from __future__ import annotations

import asyncio
from typing import Any, Final

import msgspec

from basaltmq.admin.http.message import HttpError, Response
from basaltmq.admin.http.routes import Call, Route
from basaltmq.admin.http.scope import Scope
from basaltmq.admin.streams.arrow_stream import LOOKS_MAX
from basaltmq.admin.streams.topics import named, number_of, on_plane
from basaltmq.broker.auth.permissions import CONFIGURE, READ, WRITE
from basaltmq.durability import Durability
from basaltmq.errors import PreconditionFailedError
from basaltmq.streams.adapter import ReadBatch
from basaltmq.streams.groups import Reset
from basaltmq.streams.imports.record_lines import Line, encode_record, to_record

PAGE_RECORDS: Final = 1_000
PAGE_BYTES: Final = 4 << 20
"""Records of one answer: what a person reads at once is far less, and the broker's memory is for its queues."""


class AppendSpec(msgspec.Struct, forbid_unknown_fields=True):
    """Records to append."""

    records: list[Line]
    partition: int | None = None
    """By key, or in turn, if not given."""
    durability: Durability | None = None
    """The topic's if not given."""


class ResetSpec(msgspec.Struct, forbid_unknown_fields=True):
    """Where a group goes on."""

    topic: str
    to: Reset | int
    partition: int | None = None
    """All if not given."""


class StreamLines:
    """The handlers."""

    def __init__(self, scope: Scope) -> None:
        self._scope = scope
        self._looks = asyncio.Semaphore(LOOKS_MAX)

    def routes(self) -> list[Route]:
        topic = "/api/topics/{vhost}/{topic}"
        return [
            Route("POST", topic, self.append, "Append records.",
                  takes=AppendSpec, body_bytes_max=self._scope.publish_bytes_max,
                  answers="Where they went: partition, offset and last_offset of each part."),
            Route("DELETE", topic, self.delete, "Delete a topic with its records and offsets."),
            Route("GET", topic + "/{partition}/lines", self.lines, "Records by offset, as JSON.",
                  query={
                      "offset": "The first offset; what was removed since counts as 400.",
                      "limit": f"At most so many; {PAGE_RECORDS} if not given.",
                      "key": "Only records of this key.",
                      "tag": "Only records with this tag.",
                  },
                  answers="records, and next_offset, from where to go on."),
            Route("POST", "/api/groups/{vhost}/{group}/reset", self.reset, "Move a group in a topic.", takes=ResetSpec,
                  answers="The offset of each partition that was moved."),
        ]  # fmt: skip

    async def append(self, call: Call) -> Any:
        vhost, spec = self._scope.vhost(call), call.body
        name, plane = named(self._scope, call, vhost, WRITE), vhost.streams.plane
        self._scope.check_not_held(vhost)
        if not spec.records:
            raise HttpError(400, "there is no record to append")

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
        vhost.streams.came(name, vhost.queues.by_name.get(name))
        return where

    async def delete(self, call: Call) -> None:
        vhost = self._scope.vhost(call)
        name, plane = named(self._scope, call, vhost, CONFIGURE), vhost.streams.plane
        queue = vhost.queues.by_name.get(name)
        if queue is not None and queue.is_stream:
            raise PreconditionFailedError(f"'{name}' is a stream queue of AMQP; delete the queue")
        await on_plane(vhost, lambda: plane.topics.delete(name))

    async def lines(self, call: Call) -> Response:
        vhost = self._scope.vhost(call)
        name, drivers, partition = named(self._scope, call, vhost, READ), vhost.streams.plane.drivers, number_of(call)
        offset, limit = call.number("offset", 0), call.number("limit", PAGE_RECORDS, low=1)
        limit = min(limit, PAGE_RECORDS)
        key, tag = call.query.get("key"), call.query.get("tag")
        if key is not None and tag is not None:
            raise HttpError(400, "ask by key or by tag, not both")

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

        async with self._looks:
            return Response(200, await on_plane(vhost, work))

    async def reset(self, call: Call) -> Any:
        vhost, spec, group = self._scope.vhost(call), call.body, call.names["group"]
        plane = vhost.streams.plane
        self._scope.check(call, vhost, READ, group)
        self._scope.check(call, vhost, READ, spec.topic)
        moved = await on_plane(vhost, lambda: plane.groups.reset(group, spec.topic, spec.to, partition=spec.partition))
        return [{"partition": each, "offset": offset} for each, offset in moved.items()]
