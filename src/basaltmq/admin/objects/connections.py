"""Routes for connections, channels and consumers.

Users with the tag `monitoring` or `administrator` see all connections. Other users see their own.
"""

from __future__ import annotations

from typing import Any

from basaltmq.admin.http.message import HttpError
from basaltmq.admin.http.paging import listing
from basaltmq.admin.http.routes import Access, Call, Route, allowed
from basaltmq.admin.http.scope import Scope
from basaltmq.admin.objects.json_tables import shown_table
from basaltmq.broker.consumers.consumer import Consumer
from basaltmq.broker.vhost import VHost

REASON_CHARS_MAX = 200
"""An AMQP short string holds 255 bytes, including the reply code."""


def shown_connection(connection: Any) -> dict[str, Any]:
    """Return a connection for JSON, without its channels."""
    return shown_table(connection.info())


def shown_channels(connection: Any) -> list[dict[str, Any]]:
    """Return the channels of a connection, or none if its protocol has no channels."""
    infos = getattr(connection, "channel_infos", None)
    if infos is None:
        return []
    name = str(connection.info()["name"])
    return [{**shown_table(each), "connection_details": {"name": name}} for each in infos()]


def shown_consumer(vhost: VHost, consumer: Consumer) -> dict[str, Any]:
    owner = getattr(consumer.owner, "info", None)
    name = str(owner()["name"]) if callable(owner) else ""
    return {
        "queue": {"name": consumer.queue.name, "vhost": vhost.name},
        "consumer_tag": consumer.tag,
        "ack_required": not consumer.no_ack,
        "exclusive": consumer.exclusive,
        "prefetch_count": consumer.prefetch,
        "priority": consumer.priority,
        "active": consumer.active,
        "delivered": consumer.delivered,
        "arguments": shown_table(consumer.arguments),
        "channel_details": {"connection_name": name, "name": name},
    }


class Connections:
    """Handlers of connections, channels and consumers."""

    def __init__(self, scope: Scope) -> None:
        self._scope = scope

    def routes(self) -> list[Route]:
        one = "/api/connections/{name}"
        return [
            Route("GET", "/api/connections", self.everything, "Connections of all protocols.", paged=True),
            Route("GET", one, self.one, "A connection."),
            Route("DELETE", one, self.close, "Close a connection.",
                  query={"reason": "Reason for the client. The header X-Reason also sets it."}),
            Route("GET", one + "/channels", self.channels_of, "Channels of a connection."),
            Route("GET", "/api/vhosts/{vhost}/connections", self.of_vhost, "Connections to a virtual host.",
                  paged=True),
            Route("GET", "/api/channels", self.channels, "Channels of all connections.", paged=True),
            Route("GET", "/api/channels/{name}", self.channel, "A channel."),
            Route("GET", "/api/consumers", self.consumers, "Consumers of all visible virtual hosts.", paged=True),
            Route("GET", "/api/consumers/{vhost}", self.consumers, "Consumers of a virtual host.", paged=True),
        ]  # fmt: skip

    def _seen(self, call: Call) -> list[tuple[str, Any]]:
        everybody = allowed(call.who.tags, Access.MONITORING)
        found = []
        for connection in list(self._scope.connections):
            info = connection.info()
            if everybody or info.get("user") == call.who.name:
                found.append((str(info["name"]), connection))
        return found

    def _found(self, call: Call) -> Any:
        for name, connection in self._seen(call):
            if name == call.names["name"]:
                return connection
        raise HttpError(404, f"there is no connection {call.names['name']!r} that you may see")

    async def everything(self, call: Call) -> Any:
        return await listing(call, self._seen(call), shown_connection)

    async def of_vhost(self, call: Call) -> Any:
        vhost = self._scope.vhost_name(call)
        found = [each for each in self._seen(call) if each[1].info().get("vhost") == vhost]
        return await listing(call, found, shown_connection)

    def one(self, call: Call) -> Any:
        return shown_connection(self._found(call))

    def close(self, call: Call) -> None:
        reason = call.query.get("reason") or call.request.headers.get("x-reason") or "closed by the operator"
        connection = self._found(call)
        if connection.info().get("user") != call.who.name and not allowed(call.who.tags, Access.ADMINISTRATOR):
            raise HttpError(403, "only an administrator may close connections of other users")
        connection.close(reason[:REASON_CHARS_MAX])

    def channels_of(self, call: Call) -> Any:
        return shown_channels(self._found(call))

    async def channels(self, call: Call) -> Any:
        found = [each for _, connection in self._seen(call) for each in shown_channels(connection)]
        return await listing(call, [(each["name"], each) for each in found], lambda shown: shown)

    def channel(self, call: Call) -> Any:
        for _, connection in self._seen(call):
            for each in shown_channels(connection):
                if each["name"] == call.names["name"]:
                    return each
        raise HttpError(404, f"there is no channel {call.names['name']!r} that you may see")

    async def consumers(self, call: Call) -> Any:
        found = [
            (queue.name, (vhost, consumer))
            for vhost in self._scope.listed(call)
            for queue in vhost.queues
            for consumer in queue.consumers
        ]
        return await listing(call, found, lambda pair: shown_consumer(*pair))
