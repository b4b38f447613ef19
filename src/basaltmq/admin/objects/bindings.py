"""Routes for bindings.

RabbitMQ's tools identify a binding by its `properties_key`: the routing key and, if there are arguments, a hash of
them. `~` alone is the binding without both.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any
from urllib.parse import quote

import msgspec

from basaltmq.admin.http.message import HttpError, Response
from basaltmq.admin.http.paging import listing
from basaltmq.admin.http.routes import Call, Route
from basaltmq.admin.http.scope import Scope
from basaltmq.admin.objects.json_tables import shown_table, table_of
from basaltmq.broker.routing.exchange import EXCHANGE, QUEUE, Binding, Destination
from basaltmq.broker.vhost import VHost


class BindingSpec(msgspec.Struct):
    """Body of a request to bind."""

    routing_key: str = ""
    arguments: dict[str, Any] = {}


def properties_key(binding: Binding) -> str:
    key = quote(binding.routing_key, safe="")
    if binding.number:
        return f"{key}~{binding.number:016x}"
    return key or "~"


def shown_binding(vhost: str, binding: Binding) -> dict[str, Any]:
    return {
        "source": binding.source,
        "vhost": vhost,
        "destination": binding.destination.name,
        "destination_type": "queue" if binding.destination.kind == QUEUE else "exchange",
        "routing_key": binding.routing_key,
        "arguments": shown_table(binding.arguments),
        "properties_key": properties_key(binding),
    }


def default_binding(vhost: str, queue: str) -> dict[str, Any]:
    """Return the implicit binding of every queue: the default exchange routes messages with its name to it."""
    return {
        "source": "",
        "vhost": vhost,
        "destination": queue,
        "destination_type": "queue",
        "routing_key": queue,
        "arguments": {},
        "properties_key": quote(queue, safe=""),
    }


class Bindings:
    """Handlers of /api/bindings."""

    def __init__(self, scope: Scope) -> None:
        self._scope = scope

    def routes(self) -> list[Route]:
        pair = "/api/bindings/{vhost}/e/{source}/{kind}/{destination}"
        return [
            Route("GET", "/api/bindings", self.listed, "Bindings of all visible virtual hosts.", paged=True),
            Route("GET", "/api/bindings/{vhost}", self.listed, "Bindings of a virtual host.", paged=True),
            Route("GET", pair, self.between, "Bindings between an exchange and a queue (kind q) or exchange (kind e)."),
            Route("POST", pair, self.bind, "Bind a queue or exchange to an exchange.", takes=BindingSpec,
                  optional_body=True, returns="201, with the binding's address in Location."),
            Route("GET", pair + "/{properties_key}", self.one, "A binding."),
            Route("DELETE", pair + "/{properties_key}", self.unbind, "Delete a binding."),
        ]  # fmt: skip

    async def listed(self, call: Call) -> Any:
        found = [each for vhost in self._scope.listed(call) for each in _all(vhost)]
        return await listing(call, found, _shown)

    def between(self, call: Call) -> Any:
        vhost, destination = self._scope.vhost(call), _destination(call)
        return [shown_binding(vhost.name, each) for each in _between(vhost, call.names["source"], destination)]

    def one(self, call: Call) -> Any:
        vhost = self._scope.vhost(call)
        return shown_binding(vhost.name, _found(vhost, call))

    def bind(self, call: Call) -> Response:
        vhost, source, destination = self._scope.vhost(call), call.names["source"], _destination(call)
        self._allow(call, vhost)
        self._scope.check_topic(call, vhost, source, "read", call.body.routing_key)
        arguments = table_of(call.body.arguments)
        if destination.kind == QUEUE:
            vhost.bind_queue(destination.name, source, call.body.routing_key, arguments, None)
        else:
            vhost.bind_exchange(destination.name, source, call.body.routing_key, arguments)
        made = [
            each
            for each in _between(vhost, source, destination)
            if each.routing_key == call.body.routing_key and dict(each.arguments) == arguments
        ]
        where = quote(properties_key(made[0]), safe="") if made else ""
        return Response(201, headers={"Location": where})

    def unbind(self, call: Call) -> None:
        vhost = self._scope.vhost(call)
        self._allow(call, vhost)
        binding = _found(vhost, call)
        self._scope.check_topic(call, vhost, binding.source, "read", binding.routing_key)
        if binding.destination.kind == QUEUE:
            vhost.unbind_queue(binding.destination.name, binding.source, binding.routing_key, binding.arguments, None)
        else:
            vhost.unbind_exchange(binding.destination.name, binding.source, binding.routing_key, binding.arguments)

    def _allow(self, call: Call, vhost: VHost) -> None:
        self._scope.check(call, vhost, "write", call.names["destination"])
        self._scope.check(call, vhost, "read", call.names["source"])


def _all(vhost: VHost) -> Iterable[tuple[str, tuple[VHost, str | Binding]]]:
    for queue in vhost.queues.by_name:
        yield queue, (vhost, queue)
    for binding in vhost.topology.bindings():
        yield binding.source, (vhost, binding)


def _shown(pair: tuple[VHost, str | Binding]) -> dict[str, Any]:
    vhost, found = pair
    if isinstance(found, str):
        return default_binding(vhost.name, found)
    return shown_binding(vhost.name, found)


def _destination(call: Call) -> Destination:
    kinds = {"q": QUEUE, "e": EXCHANGE}
    kind = kinds.get(call.names["kind"])
    if kind is None:
        raise HttpError(400, f"the kind of a destination must be q (queue) or e (exchange), not {call.names['kind']!r}")
    return Destination(kind, call.names["destination"])


def _between(vhost: VHost, source: str, destination: Destination) -> list[Binding]:
    vhost.topology.get(source)
    return [each for each in vhost.topology.bindings_to(destination) if each.source == source]


def _found(vhost: VHost, call: Call) -> Binding:
    wanted = call.names["properties_key"]
    for each in _between(vhost, call.names["source"], _destination(call)):
        if wanted in {properties_key(each), quote(properties_key(each), safe="")} or (
            not each.number and each.routing_key == wanted
        ):
            return each
    raise HttpError(404, f"there is no binding {wanted!r} between this source and this destination")
