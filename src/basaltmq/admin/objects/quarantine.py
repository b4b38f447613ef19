"""Damage in the queues of a virtual host over HTTP: rows in quarantine, queues that are down (SPEC A12, P7, P11)."""

from __future__ import annotations

import asyncio
from base64 import b64encode
from typing import Any, Final

from basaltmq.admin.http.message import HttpError
from basaltmq.admin.http.routes import Access, Call, Route
from basaltmq.admin.http.scope import Scope
from basaltmq.broker.guard import Guard
from basaltmq.queues.quarantine import Record

COUNT_MAX: Final = 1000
"""Records in one answer; ask with `after` for more."""


def shown_record(record: Record) -> dict[str, Any]:
    """A record as JSON, without the bytes of its row."""
    return {
        "id": record.id,
        "queue": record.queue or None,
        "family": record.family,
        "message_id": record.message_id or None,
        "reason": record.reason,
        "found_ns": record.found_ns,
        "missing": record.is_missing,
        "value_bytes": len(record.value),
    }


class QuarantinedRows:
    """The handlers."""

    def __init__(self, scope: Scope) -> None:
        self._scope = scope

    def routes(self) -> list[Route]:
        rows = "/api/quarantine/{vhost}"
        only = Access.ADMINISTRATOR
        return [
            Route("GET", rows, self.all, "Damaged rows of queues that are kept in quarantine.", Access.MONITORING,
                  query={"queue": "Of one queue.", "after": "Begin after this id.", "count": f"1 to {COUNT_MAX}."}),
            Route("GET", rows + "/{id}", self.one, "A row in quarantine with its bytes.", only,
                  answers="key and value are in base64."),
            Route("DELETE", rows + "/{id}", self.delete, "Delete a row in quarantine for good.", only),
            Route("POST", "/api/queues/{vhost}/{name}/restart", self.restart,
                  "Read a queue again from disk, and serve it if it was down. Transient messages are lost."),
        ]  # fmt: skip

    def all(self, call: Call) -> Any:
        vhost = self._scope.vhost(call)
        asked = call.query.get("count", str(COUNT_MAX))
        if not asked.isdecimal() or not 1 <= int(asked) <= COUNT_MAX:
            raise HttpError(400, f"count is 1 to {COUNT_MAX}, not {asked!r:.80}")
        with Guard(vhost):
            found = vhost.plane.damage.records(
                call.query.get("queue"), after=call.query.get("after", ""), count=int(asked)
            )
        return [shown_record(record) for record in found]

    def one(self, call: Call) -> Any:
        vhost = self._scope.vhost(call)
        with Guard(vhost):
            record = vhost.plane.damage.record(call.names["id"])
        bytes_of = {"key": b64encode(record.key).decode(), "value": b64encode(record.value).decode()}
        return shown_record(record) | bytes_of

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
