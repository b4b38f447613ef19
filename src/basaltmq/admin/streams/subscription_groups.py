"""Routes for subscription groups: the settings of groups that receive records under leases (RocketMQ)."""

from __future__ import annotations

from typing import Any, Final

import msgspec

from basaltmq.admin.http.message import Response, json_response
from basaltmq.admin.http.routes import Call, Route
from basaltmq.admin.http.scope import Scope
from basaltmq.admin.streams.topics import on_plane
from basaltmq.broker.auth.permissions import CONFIGURE, READ
from basaltmq.streams.pop.groups import GroupConfig, SubscriptionGroups

PAGE: Final = 500
"""Maximum groups per response."""


class SubscriptionGroupRoutes:
    """Handlers of /api/subscription-groups."""

    def __init__(self, scope: Scope) -> None:
        self._scope = scope

    def routes(self) -> list[Route]:
        group = "/api/subscription-groups/{vhost}/{group}"
        return [
            Route("GET", "/api/subscription-groups/{vhost}", self.groups, "Subscription groups that you may read.",
                  query={"after": f"Only names after this one. A response has at most {PAGE} groups."}),
            Route("GET", group, self.one, "Settings of a subscription group."),
            Route("PUT", group, self.put, "Create a subscription group, or change its settings.", takes=GroupConfig,
                  optional_body=True),
            Route("DELETE", group, self.delete, "Delete the settings of a subscription group."),
        ]  # fmt: skip

    async def groups(self, call: Call) -> Any:
        vhost = self._scope.vhost(call)
        groups = SubscriptionGroups(vhost.streams.plane.catalog)
        found = await on_plane(vhost, lambda: groups.page(call.query.get("after") or None, PAGE))
        may = self._scope.node.permissions.may
        return [_shown(name, config) for name, config in found if may(call.who, vhost.name, READ, name)]

    async def one(self, call: Call) -> Any:
        vhost, name = self._scope.vhost(call), call.names["group"]
        self._scope.check(call, vhost, READ, name)
        groups = SubscriptionGroups(vhost.streams.plane.catalog)
        return _shown(name, await on_plane(vhost, lambda: groups.get(name)))

    async def put(self, call: Call) -> Response:
        vhost, name, config = self._scope.vhost_to_change(call), call.names["group"], call.body
        self._scope.check(call, vhost, CONFIGURE, name)
        groups = SubscriptionGroups(vhost.streams.plane.catalog)
        is_new = await on_plane(vhost, lambda: groups.set(name, config))
        return json_response(_shown(name, config), 201) if is_new else Response(204)

    async def delete(self, call: Call) -> None:
        vhost, name = self._scope.vhost_to_change(call), call.names["group"]
        self._scope.check(call, vhost, CONFIGURE, name)
        groups = SubscriptionGroups(vhost.streams.plane.catalog)
        await on_plane(vhost, lambda: groups.delete(name))


def _shown(name: str, config: GroupConfig) -> dict[str, Any]:
    return {
        "name": name,
        "ordered": config.ordered,
        "max_attempts": config.max_attempts,
        "backoff_s": msgspec.to_builtins(config.backoff_s),
    }
