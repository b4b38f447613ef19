"""Routes for virtual hosts."""

from __future__ import annotations

from typing import Any

import msgspec

from basaltmq.admin.http.message import Response
from basaltmq.admin.http.paging import listing
from basaltmq.admin.http.routes import Access, Call, Route
from basaltmq.admin.http.scope import Scope
from basaltmq.admin.monitoring.totals import TotalsCache
from basaltmq.broker.supervision import VHostState


class VhostSpec(msgspec.Struct):
    """Body of a request to create a virtual host."""

    description: str = ""


class Vhosts:
    """Handlers of /api/vhosts."""

    def __init__(self, scope: Scope, totals: TotalsCache) -> None:
        self._scope = scope
        self._totals = totals

    def routes(self) -> list[Route]:
        one = "/api/vhosts/{vhost}"
        only = Access.ADMINISTRATOR
        return [
            Route("GET", "/api/vhosts", self.everything, "Visible virtual hosts.", paged=True),
            Route("GET", one, self.one, "A virtual host with its message counts."),
            Route("PUT", one, self.create, "Create a virtual host.", only, takes=VhostSpec, optional_body=True,
                  returns="201 if it was created, 204 if it existed."),
            Route("DELETE", one, self.delete, "Delete a virtual host with all its contents.", only),
            Route("POST", one + "/restart", self.restart, "Restart a virtual host and disconnect its clients.", only),
            Route("POST", one + "/start/{node}", self.start, "Start a virtual host that is down.", only),
        ]  # fmt: skip

    async def everything(self, call: Call) -> Any:
        names = [name for name in self._scope.node.vhosts() if self._scope.may_see(call, name)]
        for vhost in self._scope.listed(call):
            await self._totals.of(vhost)
        return await listing(call, [(name, name) for name in names], self._shown)

    async def one(self, call: Call) -> Any:
        name = self._scope.vhost_name(call)
        supervised = self._scope.node.supervised(name)
        if supervised.state is VHostState.RUNNING:
            await self._totals.of(supervised.vhost())
        return self._shown(name)

    def _shown(self, name: str) -> dict[str, Any] | None:
        if name not in self._scope.node.vhosts():
            return None
        shown = self._scope.node.describe_vhost(name)
        shown |= {"tracing": False, "cluster_state": {self._scope.node_name: shown["state"]}}
        totals = self._totals.last(name) if shown["state"] == VHostState.RUNNING else None
        if totals is not None:
            shown |= {
                "queues": totals.queues,
                "messages": totals.ready + totals.unacked,
                "messages_ready": totals.ready,
                "messages_unacknowledged": totals.unacked,
            }
        return shown

    async def create(self, call: Call) -> Response:
        made = await self._scope.ensure_vhost(call.names["vhost"], call.body.description)
        if made:
            # As in RabbitMQ, the creator gets all permissions.
            await self._scope.node.permissions.set(
                call.who.name, call.names["vhost"], configure=".*", write=".*", read=".*"
            )
        return Response(201 if made else 204)

    async def delete(self, call: Call) -> None:
        await self._scope.node.delete_vhost(self._scope.vhost_name(call))

    async def restart(self, call: Call) -> None:
        await self._scope.node.restart_vhost(self._scope.vhost_name(call))

    async def start(self, call: Call) -> None:
        self._scope.require_node(call.names["node"])
        await self._scope.node.start_vhost(self._scope.vhost_name(call))
