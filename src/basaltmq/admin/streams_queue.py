"""A queue's messages as an Arrow IPC stream, looked at and left as they are: for reports, copies, repairs."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from basaltmq.admin.arrow_stream import ArrowStreams, require_arrow
from basaltmq.admin.message import HttpError, Response
from basaltmq.admin.routes import Call, Route
from basaltmq.admin.scope import Scope
from basaltmq.broker.guard import Guard
from basaltmq.broker.permissions import READ
from basaltmq.broker.vhost import VHost
from basaltmq.errors import PreconditionFailedError
from basaltmq.queues.browse import ALL_NS, FAMILIES, browse, times_of
from basaltmq.store.api import Reader

if TYPE_CHECKING:
    import pyarrow as pa


class QueueMessages:
    """The handlers."""

    def __init__(self, scope: Scope, arrow: ArrowStreams) -> None:
        self._scope = scope
        self._arrow = arrow

    def routes(self) -> list[Route]:
        one = "/api/queues/{vhost}/{name}"
        return [
            Route("GET", one + "/times", self.times, "When the oldest and the newest message in a queue came.",
                  answers="oldest_ns and newest_ns, both 0 if the queue is empty."),
            Route("GET", one + "/messages", self.messages, "Messages of a queue, left as they are, as Arrow.",
                  query={
                      "from_ns": "Enqueued at this time or later.",
                      "to_ns": "Enqueued before this time.",
                      "after": "Go on behind a message: its cursor, in hexadecimal digits.",
                  },
                  answers="application/vnd.apache.arrow.stream: key (fairness key), value, offset (enqueued ns), "
                          "timestamp, headers, messageId, attempts, priority, cursor. All of one moment; messages that "
                          "are leased or delayed included, those that are only in memory not."),
        ]  # fmt: skip

    async def times(self, call: Call) -> Any:
        vhost = self._vhost(call)

        def look() -> tuple[int, int]:
            with vhost.store.snapshot(*FAMILIES) as seen:
                return times_of(seen, call.names["name"])

        with Guard(vhost):
            oldest, newest = await asyncio.to_thread(look)
        return {"oldest_ns": oldest, "newest_ns": newest}

    async def messages(self, call: Call) -> Response:
        require_arrow()
        from basaltmq.queues.arrow import SCHEMA

        vhost = self._vhost(call)
        try:
            after = bytes.fromhex(call.query.get("after", ""))
        except ValueError:
            raise HttpError(400, "after is a cursor in hexadecimal digits") from None
        from_ns, to_ns = call.number("from_ns", 0), call.number("to_ns", ALL_NS, high=ALL_NS)
        seen = vhost.store.snapshot(*FAMILIES)
        return await self._arrow.answer(
            vhost, SCHEMA, _batches(seen, call.names["name"], from_ns, to_ns, after), seen.close
        )

    def _vhost(self, call: Call) -> VHost:
        vhost = self._scope.vhost(call)
        name = call.names["name"]
        self._scope.check(call, vhost, READ, name)
        queue = vhost.queues.by_name.get(name)
        if queue is not None and queue.is_stream:
            raise PreconditionFailedError(f"queue '{name}' is a stream: read the topic of that name")
        return vhost


def _batches(seen: Reader, queue: str, from_ns: int, to_ns: int, after: bytes) -> Iterator[pa.RecordBatch]:
    from basaltmq.queues.arrow import to_arrow

    is_last = False
    while not is_last:
        page = browse(seen, queue, from_ns, to_ns, after=after)
        is_last = page.is_last
        if page.messages:
            after = page.cursors[-1]
            yield to_arrow(page)
