"""Routes for prepared branches of distributed transactions that wait for their coordinator (SPEC A6).

An operator decides a branch whose coordinator does not respond. The decision stays recorded until it is forgotten.
"""

from __future__ import annotations

from typing import Any

from basaltmq.admin.http.routes import Access, Call, Route
from basaltmq.admin.http.scope import Scope
from basaltmq.broker.guard import Guard
from basaltmq.queues.transactions.xa import parse_xid


class Branches:
    """Handlers of /api/xa."""

    def __init__(self, scope: Scope) -> None:
        self._scope = scope

    def routes(self) -> list[Route]:
        branches, one = "/api/xa/{vhost}", "/api/xa/{vhost}/{xid}"
        only = Access.ADMINISTRATOR
        return [
            Route("GET", branches, self.all, "List the prepared branches of distributed transactions.",
                  Access.MONITORING, returns="held: messages that the branch acknowledges on commit."),
            Route("POST", one + "/commit", self.commit, "Commit a prepared branch. The decision is recorded.", only),
            Route("POST", one + "/rollback", self.roll_back, "Roll back a prepared branch. The decision is recorded.",
                  only),
            Route("DELETE", one, self.forget, "Delete the recorded decision of a branch.", only),
        ]  # fmt: skip

    def all(self, call: Call) -> Any:
        vhost = self._scope.vhost(call)
        with Guard(vhost):
            found = vhost.plane.xa.in_doubt()
        return [each.shown() for each in found]

    def commit(self, call: Call) -> None:
        self._decide(call, commit=True)

    def roll_back(self, call: Call) -> None:
        self._decide(call, commit=False)

    def _decide(self, call: Call, *, commit: bool) -> None:
        vhost = self._scope.vhost(call)
        with Guard(vhost):
            vhost.plane.xa.decide(parse_xid(call.names["xid"]), commit=commit)

    def forget(self, call: Call) -> None:
        vhost = self._scope.vhost(call)
        with Guard(vhost):
            vhost.plane.xa.forget(parse_xid(call.names["xid"]))
