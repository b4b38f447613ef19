"""Routes for MQTT: sessions, subscriptions, retained messages, and rules that copy messages to streams."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final, Protocol

import msgspec

from basaltmq.admin.http.message import HttpError, Response
from basaltmq.admin.http.routes import Access, Call, Route
from basaltmq.admin.http.scope import Scope
from basaltmq.admin.objects.connections import REASON_CHARS_MAX

COUNT_MAX: Final = 1000
"""Items per response. Use `after` to read more."""

_PAGE: Final = {
    "after": "Start after this client id or topic.",
    "count": f"Number of items, 1 to {COUNT_MAX} (default {COUNT_MAX}).",
}


RULE_QUEUE: Final = "mqtt.rule."
"""Prefix of the queue of a rule."""


class RuleSpec(msgspec.Struct):
    """Body of a request to set a rule. `key` is none, topic, or level N of the topic."""

    filter: str
    topic: str
    key: str = "none"


class MqttState(Protocol):
    """The MQTT listeners, as the admin API uses them."""

    def sessions(self, vhost: str, after: str = "", count: int = COUNT_MAX) -> list[dict[str, Any]]: ...

    def session(self, vhost: str, client_id: str) -> dict[str, Any]: ...

    def subscriptions(self, vhost: str, client_id: str) -> list[dict[str, Any]]: ...

    def retained(self, vhost: str, topic_filter: str, after: str, count: int) -> tuple[list[dict[str, Any]], str]: ...

    def rules(self, vhost: str) -> list[dict[str, Any]]: ...

    def rule(self, vhost: str, name: str) -> dict[str, Any]: ...

    def check_rule(self, name: str, topic_filter: str, topic: str, key: str) -> None: ...

    def source_of(self, topic_filter: str) -> tuple[str, str]: ...

    async def set_rule(self, vhost: str, name: str, topic_filter: str, topic: str, key: str) -> bool: ...

    async def delete_rule(self, vhost: str, name: str) -> None: ...

    def totals(self) -> dict[str, int]: ...

    async def delete_retained(self, vhost: str, topic: str) -> None: ...

    async def disconnect(self, vhost: str, client_id: str, reason: str, *, end_session: bool) -> None: ...


class Mqtt:
    """Handlers of /api/mqtt."""

    def __init__(self, scope: Scope, state: Callable[[], MqttState | None]) -> None:
        """`state` returns None while no MQTT listener is on."""
        self._scope = scope
        self._state = state

    def routes(self) -> list[Route]:
        session = "/api/mqtt/sessions/{vhost}/{client_id}"
        retained = "/api/mqtt/retained/{vhost}"
        seen, only, change = Access.MONITORING, Access.ADMINISTRATOR, Access.POLICYMAKER
        rule = "/api/mqtt/rules/{vhost}/{name}"
        return [
            Route("GET", "/api/mqtt/sessions/{vhost}", self.sessions, "MQTT sessions, connected or not.", seen,
                  query=_PAGE),
            Route("GET", session, self.session, "An MQTT session.", seen),
            Route("GET", session + "/subscriptions", self.subscriptions, "Subscriptions of an MQTT session.", seen),
            Route("DELETE", session, self.disconnect, "Disconnect an MQTT client.", only,
                  query={"end_session": "Also delete the session with its messages.",
                         "reason": "Reason for the client."}),
            Route("GET", retained, self.retained, "Retained MQTT messages, without payloads.", seen,
                  query={"filter": "Topic filter (default #).", **_PAGE},
                  returns="items, and next: the value of `after` for the next page, or an empty text."),
            Route("DELETE", retained + "/{topic}", self.delete_retained, "Delete a retained MQTT message.", only),
            Route("GET", "/api/mqtt/rules/{vhost}", self.rules, "Rules that copy MQTT messages to streams.", seen),
            Route("GET", rule, self.rule, "A rule.", seen),
            Route("PUT", rule, self.set_rule, "Create or replace a rule. Its topic must exist.", change,
                  takes=RuleSpec),
            Route("DELETE", rule, self.delete_rule, "Delete a rule and the messages that wait for it.", change),
        ]  # fmt: skip

    def _mqtt(self) -> MqttState:
        found = self._state()
        if found is None:
            raise HttpError(404, "there is no MQTT listener; set mqtt.enabled = true")
        return found

    def sessions(self, call: Call) -> Any:
        vhost = self._scope.vhost_name(call)
        return self._mqtt().sessions(vhost, call.query.get("after", ""), self._count(call))

    def session(self, call: Call) -> Any:
        return self._mqtt().session(self._scope.vhost_name(call), call.names["client_id"])

    def subscriptions(self, call: Call) -> Any:
        return self._mqtt().subscriptions(self._scope.vhost_name(call), call.names["client_id"])

    async def disconnect(self, call: Call) -> None:
        reason = call.query.get("reason") or "closed by the operator"
        await self._mqtt().disconnect(
            self._scope.vhost_name(call),
            call.names["client_id"],
            reason[:REASON_CHARS_MAX],
            end_session=call.flag("end_session"),
        )

    def retained(self, call: Call) -> Any:
        vhost = self._scope.vhost_name(call)
        items, after = self._mqtt().retained(
            vhost, call.query.get("filter", "#"), call.query.get("after", ""), self._count(call)
        )
        return {"items": items, "next": after}

    async def delete_retained(self, call: Call) -> None:
        await self._mqtt().delete_retained(self._scope.vhost_name(call), call.names["topic"])

    def rules(self, call: Call) -> Any:
        return self._mqtt().rules(self._scope.vhost_name(call))

    def rule(self, call: Call) -> Any:
        return self._mqtt().rule(self._scope.vhost_name(call), call.names["name"])

    async def set_rule(self, call: Call) -> Response:
        vhost, spec, name = self._scope.vhost_to_change(call), call.body, call.names["name"]
        state = self._mqtt()
        self._scope.check(call, vhost, "configure", RULE_QUEUE + name)
        self._scope.check(call, vhost, "write", spec.topic)
        state.check_rule(name, spec.filter, spec.topic, spec.key)
        exchange, key = state.source_of(spec.filter)
        self._scope.check(call, vhost, "read", exchange)
        self._scope.check_topic(call, vhost, exchange, "read", key)
        is_new = await state.set_rule(vhost.name, name, spec.filter, spec.topic, spec.key)
        return Response(201 if is_new else 204)

    async def delete_rule(self, call: Call) -> None:
        vhost, name = self._scope.vhost_to_change(call), call.names["name"]
        self._scope.check(call, vhost, "configure", RULE_QUEUE + name)
        await self._mqtt().delete_rule(vhost.name, name)

    @staticmethod
    def _count(call: Call) -> int:
        return call.number("count", COUNT_MAX, low=1, high=COUNT_MAX)
