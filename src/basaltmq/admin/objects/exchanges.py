"""Routes for exchanges, and for publishing through them."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from functools import partial
from typing import Any, Final, Literal

import msgspec

from basaltmq.admin.http.message import HttpError, Response
from basaltmq.admin.http.paging import listing
from basaltmq.admin.http.routes import Call, Route
from basaltmq.admin.http.scope import Scope
from basaltmq.admin.objects.bindings import shown_binding
from basaltmq.admin.objects.json_tables import payload_of, properties_of, shown_table, table_of
from basaltmq.broker.message import properties
from basaltmq.broker.routing.exchange import EXCHANGE, Destination, Exchange
from basaltmq.broker.scheduling.turns import in_turns
from basaltmq.broker.vhost import VHost

DEFAULT: Final = "amq.default"
"""The name of the default exchange in RabbitMQ's API. Its real name is empty and cannot appear in a path."""

CONFIRM_WAIT_S: Final = 30.0
"""Time for a published message to become durable, in seconds."""


class ExchangeSpec(msgspec.Struct):
    """Body of a request to declare an exchange."""

    type: str = "direct"
    durable: bool = True
    auto_delete: bool = False
    internal: bool = False
    arguments: dict[str, Any] = {}


class PublishSpec(msgspec.Struct):
    """Body of a publish request."""

    routing_key: str
    payload: str
    payload_encoding: Literal["string", "base64"] = "string"
    properties: dict[str, Any] = {}


class _SingleMessagePublisher:
    """The publisher of one message, for the broker's publish interface."""

    def __init__(self) -> None:
        self.routed = True
        self.done: asyncio.Future[bool] = asyncio.get_running_loop().create_future()

    def returned(self, exchange: str, routing_key: str, properties: bytes, body: bytes, number: int) -> None:
        self.routed = False

    def confirmed(self, numbers: Sequence[int], ok: bool) -> None:
        if not self.done.done():
            self.done.set_result(ok)


def shown_exchange(vhost: VHost, exchange: Exchange) -> dict[str, Any]:
    return {
        "name": exchange.name,
        "vhost": vhost.name,
        "type": exchange.type.value,
        "durable": exchange.durable,
        "auto_delete": exchange.auto_delete,
        "internal": exchange.internal,
        "arguments": shown_table(exchange.arguments),
        "policy": exchange.policy,
    }


class Exchanges:
    """Handlers of /api/exchanges."""

    def __init__(self, scope: Scope) -> None:
        self._scope = scope

    def routes(self) -> list[Route]:
        one = "/api/exchanges/{vhost}/{name}"
        return [
            Route("GET", "/api/exchanges", self.listed, "Exchanges of all visible virtual hosts.", paged=True),
            Route("GET", "/api/exchanges/{vhost}", self.listed, "Exchanges of a virtual host.", paged=True),
            Route("GET", one, self.one, "An exchange. amq.default is the default exchange."),
            Route("PUT", one, self.declare, "Declare an exchange.", takes=ExchangeSpec,
                  returns="201 if it was created, 204 if it existed with the same settings."),
            Route("DELETE", one, self.delete, "Delete an exchange with its bindings.",
                  query={"if-unused": "true: only if nothing is bound to it."}),
            Route("GET", one + "/bindings/source", self.bindings_from, "Bindings whose source is an exchange."),
            Route("GET", one + "/bindings/destination", self.bindings_to, "Bindings whose destination is an exchange."),
            Route("POST", one + "/publish", self.publish, "Publish a message. The response follows when it is durable.",
                  takes=PublishSpec, body_bytes_max=self._scope.publish_bytes_max,
                  returns="{\"routed\": false} if no queue received it."),
        ]  # fmt: skip

    async def listed(self, call: Call) -> Any:
        found = [(name, (vhost, name)) for vhost in self._scope.listed(call) for name in vhost.topology.exchanges]
        return await listing(call, found, _shown)

    def one(self, call: Call) -> Any:
        vhost = self._scope.vhost(call)
        return shown_exchange(vhost, vhost.topology.get(_name(call)))

    def declare(self, call: Call) -> Response:
        vhost, name, spec = self._scope.vhost(call), _name(call), call.body
        self._scope.check(call, vhost, "configure", name)
        alternate = spec.arguments.get("alternate-exchange")
        if isinstance(alternate, str):
            self._scope.check(call, vhost, "read", name)
            self._scope.check(call, vhost, "write", alternate)
        existed = name in vhost.topology.exchanges
        vhost.declare_exchange(
            name,
            spec.type,
            durable=spec.durable,
            auto_delete=spec.auto_delete,
            internal=spec.internal,
            arguments=table_of(spec.arguments),
        )
        return Response(204 if existed else 201)

    async def delete(self, call: Call) -> None:
        vhost, name = self._scope.vhost(call), _name(call)
        self._scope.check(call, vhost, "configure", name)
        vhost.topology.get(name)
        if not (call.flag("if-unused") or name == "" or name.startswith("amq.")):
            await in_turns(vhost.unbinding(EXCHANGE, name), int)
        vhost.delete_exchange(name, if_unused=call.flag("if-unused"))

    async def bindings_from(self, call: Call) -> Any:
        vhost = self._scope.vhost(call)
        exchange = vhost.topology.get(_name(call))
        return await in_turns(list(exchange.bindings.values()), partial(shown_binding, vhost.name))

    async def bindings_to(self, call: Call) -> Any:
        vhost = self._scope.vhost(call)
        name = vhost.topology.get(_name(call)).name
        found = vhost.topology.bindings_to(Destination(EXCHANGE, name))
        return await in_turns(found, partial(shown_binding, vhost.name))

    async def publish(self, call: Call) -> Any:
        vhost, name, spec = self._scope.vhost(call), _name(call), call.body
        self._scope.check(call, vhost, "write", name)
        self._scope.check_topic(call, vhost, name, "write", spec.routing_key)
        self._scope.check_not_blocked(vhost)
        raw = properties_of(spec.properties)
        body = payload_of(spec.payload, spec.payload_encoding)
        if len(body) > self._scope.message_bytes_max:
            raise HttpError(
                413, f"a message of {len(body)} bytes exceeds the limit of {self._scope.message_bytes_max} bytes"
            )
        peeked = properties.peek(raw)
        if peeked.user_id is not None and peeked.user_id != call.who.name.encode():
            raise HttpError(400, f"the user_id of the message must be the publishing user {call.who.name!r}")
        message = _SingleMessagePublisher()
        vhost.publish(message, name, spec.routing_key, raw, body, mandatory=True, number=1)
        try:
            async with asyncio.timeout(CONFIRM_WAIT_S):
                taken = await message.done
        except TimeoutError:
            raise HttpError(503, "the message is not durable yet; it may still be accepted") from None
        if not taken:
            raise HttpError(429, "a queue is full and refused the message", code="queue_full")
        return {"routed": message.routed}


def _name(call: Call) -> str:
    name = call.names["name"]
    return "" if name == DEFAULT else name


def _shown(pair: tuple[VHost, str]) -> dict[str, Any] | None:
    vhost, name = pair
    exchange = vhost.topology.exchanges.get(name)
    return None if exchange is None else shown_exchange(vhost, exchange)
