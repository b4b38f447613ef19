"""Routes for policies and for operator policies, which can only lower limits."""

from __future__ import annotations

from typing import Any

import msgspec

from basaltmq.admin.http.message import HttpError, Response
from basaltmq.admin.http.paging import listing
from basaltmq.admin.http.routes import Access, Call, Handler, Route
from basaltmq.admin.http.scope import Scope
from basaltmq.broker.routing.policy import Policy


class PolicySpec(msgspec.Struct, rename={"apply_to": "apply-to"}):
    """Body of a request to set a policy."""

    pattern: str
    definition: dict[str, Any]
    priority: int = 0
    apply_to: str = "all"


def shown_policy(vhost: str, policy: Policy) -> dict[str, Any]:
    return {
        "vhost": vhost,
        "name": policy.name,
        "pattern": policy.pattern,
        "apply-to": policy.apply_to,
        "definition": policy.definition,
        "priority": policy.priority,
    }


class Policies:
    """Handlers of /api/policies and /api/operator-policies."""

    def __init__(self, scope: Scope) -> None:
        self._scope = scope

    def routes(self) -> list[Route]:
        return [*self._routes("policies", False), *self._routes("operator-policies", True)]

    def _routes(self, path: str, operators: bool) -> list[Route]:
        change = Access.ADMINISTRATOR if operators else Access.POLICYMAKER
        whose = "Operator policies" if operators else "Policies"
        one = f"/api/{path}/{{vhost}}/{{name}}"

        def bound(handle: Any) -> Handler:
            return lambda call: handle(call, operators)

        return [
            Route("GET", f"/api/{path}", bound(self.listed), f"{whose} of all visible virtual hosts.", paged=True),
            Route("GET", f"/api/{path}/{{vhost}}", bound(self.listed), f"{whose} of a virtual host.", paged=True),
            Route("GET", one, bound(self.one), "A policy."),
            Route("PUT", one, bound(self.set), "Create or change a policy.", change, takes=PolicySpec),
            Route("DELETE", one, bound(self.delete), "Delete a policy.", change),
        ]

    async def listed(self, call: Call, operators: bool) -> Any:
        found = [
            (policy.name, shown_policy(vhost.name, policy))
            for vhost in self._scope.listed(call)
            for policy in vhost.policies.list(operators=operators)
        ]
        return await listing(call, found, lambda shown: shown)

    def one(self, call: Call, operators: bool) -> Any:
        vhost = self._scope.vhost(call)
        for policy in vhost.policies.list(operators=operators):
            if policy.name == call.names["name"]:
                return shown_policy(vhost.name, policy)
        raise HttpError(404, f"there is no policy {call.names['name']!r} in vhost {vhost.name!r}")

    def set(self, call: Call, operators: bool) -> Response:
        vhost, name, spec = self._scope.vhost_to_change(call), call.names["name"], call.body
        existed = any(policy.name == name for policy in vhost.policies.list(operators=operators))
        vhost.policies.set(
            Policy(name, spec.pattern, spec.definition, spec.priority, spec.apply_to), operators=operators
        )
        return Response(204 if existed else 201)

    def delete(self, call: Call, operators: bool) -> None:
        self._scope.vhost_to_change(call).policies.delete(call.names["name"], operators=operators)
