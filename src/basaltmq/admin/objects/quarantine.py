"""Routes for damaged queue data: rows in quarantine, and restart of failed queues (SPEC A12, P7, P11)."""

from __future__ import annotations

import asyncio
from base64 import b64encode
from typing import Any, Final

from basaltmq.admin.http.message import HttpError
from basaltmq.admin.http.routes import Access, Call, Route
from basaltmq.admin.http.scope import Scope
from basaltmq.broker.guard import Guard

COUNT_MAX: Final = 1000
"""Records per response. Use `after` to read more."""


class QuarantinedRows:
    """Handlers of /api/quarantine, and of queue restarts."""

    def __init__(self, scope: Scope) -> None:
        self._scope = scope

    def routes(self) -> list[Route]:
        rows = "/api/quarantine/{vhost}"
        only = Access.ADMINISTRATOR
        return [
            Route("GET", rows, self.all, "List the damaged rows in quarantine.", Access.MONITORING,
                  query={"queue": "Only rows of this queue.", "after": "Start after this id.",
                         "count": f"Number of rows, 1 to {COUNT_MAX} (default {COUNT_MAX})."}),
            Route("GET", rows + "/{id}", self.one, "A row in quarantine with its bytes.", only,
                  returns="key and value are in base64."),
            Route("DELETE", rows + "/{id}", self.delete, "Permanently delete a row in quarantine.", only),
            Route("POST", "/api/queues/{vhost}/{name}/restart", self.restart,
                  "Reload a queue from disk, and serve it again if it has failed. Transient messages are lost."),
        ]  # fmt: skip

    def all(self, call: Call) -> Any:
        vhost = self._scope.vhost(call)
        asked = call.query.get("count", str(COUNT_MAX))
        if not asked.isdecimal() or not 1 <= int(asked) <= COUNT_MAX:
            raise HttpError(400, f"count must be 1 to {COUNT_MAX}, not {asked!r:.80}")
        with Guard(vhost):
            found = vhost.plane.damage.records(
                call.query.get("queue"), after=call.query.get("after", ""), count=int(asked)
            )
        return [record.summary() for record in found]

    def one(self, call: Call) -> Any:
        vhost = self._scope.vhost(call)
        with Guard(vhost):
            record = vhost.plane.damage.record(call.names["id"])
        bytes_of = {"key": b64encode(record.key).decode(), "value": b64encode(record.value).decode()}
        return record.summary() | bytes_of

    async def delete(self, call: Call) -> None:
        vhost = self._scope.vhost(call)
        with Guard(vhost):
            vhost.plane.damage.delete(call.names["id"])
        await vhost.commit.durable()

    async def restart(self, call: Call) -> None:
        vhost, name = self._scope.vhost(call), call.names["name"]
        self._scope.check(call, vhost, "configure", name)
        with Guard(vhost):
            vhost.plane.damage.begin_restart(name)
        found = await asyncio.to_thread(vhost.plane.damage.count, name)
        with Guard(vhost):
            vhost.plane.damage.finish_restart(name, found)
        await vhost.commit.durable()
