"""Routes for reading a queue's messages as an Arrow IPC stream, without changing them, and for redrive."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated, Any, Final

import msgspec

from basaltmq.admin.http.message import HttpError, Response
from basaltmq.admin.http.routes import Call, Route
from basaltmq.admin.http.scope import Scope
from basaltmq.admin.streams.arrow_stream import ArrowStreams, require_arrow
from basaltmq.broker.auth.permissions import READ, WRITE
from basaltmq.broker.guard import Guard
from basaltmq.broker.vhost import VHost
from basaltmq.errors import PreconditionFailedError
from basaltmq.queues.browsing.browse import ALL_NS, FAMILIES, browse, times_of
from basaltmq.queues.lifecycle.redrive import origin_of
from basaltmq.queues.long_operations import turns_of
from basaltmq.queues.message import Message
from basaltmq.store.api import Reader

if TYPE_CHECKING:
    import pyarrow as pa


REDRIVE_MAX: Final = 10_000
"""Dead letters per request, about 330 KB of ids. One request scans the queue once."""

REDRIVE_BYTES_MAX: Final = 1 << 20


class RedriveSpec(msgspec.Struct):
    """Body of a redrive request."""

    ids: list[str]
    """Message ids in hexadecimal."""
    to: str | None = None
    """Target queue. None: the queue that each message came from."""
    stamp: dict[str, str] = {}
    """Headers to set. Messages that already have all of them are skipped."""
    rate_per_s: Annotated[float, msgspec.Meta(gt=0)] | None = None
    begin_ns: int = 0
    """With a rate: the ready time of the first message, as the first response reported it."""
    before: Annotated[int, msgspec.Meta(ge=0)] = 0
    """With a rate: the number of messages moved by earlier requests."""


class QueueMessages:
    """Handlers of queue contents and redrive."""

    def __init__(self, scope: Scope, arrow: ArrowStreams) -> None:
        self._scope = scope
        self._arrow = arrow

    def routes(self) -> list[Route]:
        one = "/api/queues/{vhost}/{name}"
        return [
            Route("GET", one + "/times", self.times, "Enqueue times of the oldest and the newest message of a queue.",
                  returns="oldest_ns and newest_ns, both 0 if the queue is empty."),
            Route("GET", one + "/messages", self.messages, "Messages of a queue as an Arrow IPC stream, unchanged.",
                  query={
                      "from_ns": "Enqueued at or after this time.",
                      "to_ns": "Enqueued before this time.",
                      "after": "Continue after a message: its cursor, in hexadecimal.",
                  },
                  returns="application/vnd.apache.arrow.stream: key (fairness key), value, offset (enqueued ns), "
                          "timestamp, headers, messageId, attempts, priority, cursor. The response is a snapshot. It "
                          "includes leased and delayed messages, but no transient messages in memory."),
            Route("POST", one + "/redrive", self.redrive, "Move dead letters back to the queues they came from.",
                  takes=RedriveSpec, body_bytes_max=REDRIVE_BYTES_MAX,
                  returns="moved, and begin_ns. Leased, delayed and missing messages are skipped. Repeating a request "
                          "moves no message twice."),
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
        from basaltmq.queues.browsing.arrow import SCHEMA

        vhost = self._vhost(call)
        try:
            after = bytes.fromhex(call.query.get("after", ""))
        except ValueError:
            raise HttpError(400, "after must be a cursor in hexadecimal") from None
        from_ns, to_ns = call.number("from_ns", 0), call.number("to_ns", ALL_NS, high=ALL_NS)
        seen = vhost.store.snapshot(*FAMILIES)
        return await self._arrow.respond(
            vhost, SCHEMA, _batches(seen, call.names["name"], from_ns, to_ns, after), seen.close
        )

    async def redrive(self, call: Call) -> Any:
        vhost, name, spec = self._vhost(call), call.names["name"], call.body
        if len(spec.ids) > REDRIVE_MAX:
            raise HttpError(413, f"{len(spec.ids)} message ids exceed the limit of {REDRIVE_MAX} per request")
        if spec.to is not None:
            self._scope.check(call, vhost, WRITE, spec.to)
        try:
            ids = {bytes.fromhex(each) for each in spec.ids}
        except ValueError:
            raise HttpError(400, "message ids must be in hexadecimal") from None

        def wanted(message: Message) -> bool:
            is_one = message.id in ids and not (
                spec.stamp and all(message.headers.get(header) == text for header, text in spec.stamp.items())
            )
            origin = origin_of(message)
            if is_one and spec.to is None and origin is not None:
                self._scope.check(call, vhost, WRITE, origin)
            return is_one

        begin_ns = spec.begin_ns or time.time_ns()
        moved = 0
        after: bytes | None = b""
        while after is not None and moved < len(ids):
            due_ns = turns_of(begin_ns, spec.before + moved, spec.rate_per_s)
            with Guard(vhost):
                page = vhost.plane.redrive_page(name, after, to=spec.to, wanted=wanted, due_ns=due_ns, stamp=spec.stamp)
            moved += page.moved
            after = page.after
            await asyncio.sleep(0)
        await vhost.commit.durable()
        return {"moved": moved, "begin_ns": begin_ns}

    def _vhost(self, call: Call) -> VHost:
        vhost = self._scope.vhost(call)
        name = call.names["name"]
        self._scope.check(call, vhost, READ, name)
        queue = vhost.queues.by_name.get(name)
        if queue is not None and queue.is_stream:
            raise PreconditionFailedError(f"queue '{name}' is a stream; read the topic of that name instead")
        return vhost


def _batches(seen: Reader, queue: str, from_ns: int, to_ns: int, after: bytes) -> Iterator[pa.RecordBatch]:
    from basaltmq.queues.browsing.arrow import to_arrow

    is_last = False
    while not is_last:
        page = browse(seen, queue, from_ns, to_ns, after=after)
        is_last = page.is_last
        if page.messages:
            after = page.cursors[-1]
            yield to_arrow(page)
