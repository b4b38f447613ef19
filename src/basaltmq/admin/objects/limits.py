"""Routes for limits of virtual hosts and users, and the parameters that RabbitMQ's tools read them from."""

from __future__ import annotations

from typing import Any, Final

import msgspec

from basaltmq.admin.http.paging import listing
from basaltmq.admin.http.routes import Access, Call, Handler, Route
from basaltmq.admin.http.scope import Scope
from basaltmq.broker.object_limits import LIMITS
from basaltmq.catalog.kinds import Kind

COMPONENT: Final = "vhost-limits"
PARAMETER: Final = "limits"


class LimitSpec(msgspec.Struct):
    """Body of a request to set a limit."""

    value: int


class Limits:
    """Handlers of /api/vhost-limits, /api/user-limits and /api/parameters."""

    def __init__(self, scope: Scope) -> None:
        self._scope = scope
        self._limits = scope.node.limits

    def routes(self) -> list[Route]:
        return [
            *self._routes("vhost-limits", "vhost", Kind.VHOST),
            *self._routes("user-limits", "user", Kind.USER),
            Route("GET", "/api/parameters", self.parameters, "Limits of virtual hosts, as parameters.", paged=True),
        ]

    def _routes(self, path: str, owner: str, kind: Kind) -> list[Route]:
        names = " or ".join(LIMITS[kind])
        sees = Access.MONITORING if kind is Kind.VHOST else Access.ADMINISTRATOR
        one = f"/api/{path}/{{{owner}}}/{{limit}}"

        def bound(handle: Any) -> Handler:
            return lambda call: handle(call, owner, kind)

        return [
            Route("GET", f"/api/{path}", bound(self.everything), f"Limits of all {owner}s that have some.", sees,
                  paged=True),
            Route("GET", f"/api/{path}/{{{owner}}}", bound(self.one), f"Limits of a {owner}.", sees),
            Route("PUT", one, bound(self.put), f"Set a limit: {names}. A negative value removes it.",
                  Access.ADMINISTRATOR, takes=LimitSpec),
            Route("DELETE", one, bound(self.delete), "Remove a limit.", Access.ADMINISTRATOR),
        ]  # fmt: skip

    async def everything(self, call: Call, owner: str, kind: Kind) -> Any:
        node = self._scope.node
        names = node.vhosts() if kind is Kind.VHOST else [user.name for user in node.users.list()]
        found = [(name, limits) for name in names if (limits := self._limits.of(kind, name))]
        return await listing(call, [(each[0], each) for each in found], lambda each: _shown(owner, *each))

    def one(self, call: Call, owner: str, kind: Kind) -> Any:
        name = call.names[owner]
        limits = self._limits.of(kind, name)
        return [_shown(owner, name, limits)] if limits else []

    async def put(self, call: Call, owner: str, kind: Kind) -> None:
        await self._limits.set(kind, call.names[owner], call.names["limit"], call.body.value)

    async def delete(self, call: Call, owner: str, kind: Kind) -> None:
        await self._limits.set(kind, call.names[owner], call.names["limit"], None)

    async def parameters(self, call: Call) -> Any:
        names = [name for name in self._scope.node.vhosts() if self._scope.may_see(call, name)]
        found = [each for name in names for each in exported(name, self._limits.of(Kind.VHOST, name))]
        return await listing(call, [(each["vhost"], each) for each in found], lambda each: each)


def exported(vhost: str, limits: dict[str, int]) -> list[dict[str, Any]]:
    """Return the limits of a virtual host as the parameter that definitions contain."""
    return [{"vhost": vhost, "component": COMPONENT, "name": PARAMETER, "value": limits}] if limits else []


def _shown(owner: str, name: str, limits: dict[str, int]) -> dict[str, Any]:
    return {owner: name, "value": limits}
