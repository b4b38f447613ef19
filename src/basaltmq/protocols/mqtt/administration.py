"""The admin API for MQTT: sessions, subscriptions, retained messages and rules of a virtual host.

Lists are pages in the order of client ids or topics, because a broker may have millions of each.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, Final

from basaltmq.broker.message.operations import RowChange
from basaltmq.clock import NS_PER_MS
from basaltmq.errors import BasaltError, NotFoundError
from basaltmq.protocols.mqtt.host import NEVER_S, MqttHost
from basaltmq.protocols.mqtt.sessions import rows
from basaltmq.protocols.mqtt.sessions.rows import RetainedRow, SessionRow, Subscription
from basaltmq.protocols.mqtt.sessions.rules import Rule
from basaltmq.protocols.mqtt.sessions.session import QUEUE_PREFIX
from basaltmq.protocols.mqtt.wire import topics
from basaltmq.store.families import Family
from basaltmq.store.keys import mqtt as keys
from basaltmq.store.keys.parts import prefix_range

if TYPE_CHECKING:
    from basaltmq.protocols.mqtt.connection import Connection
    from basaltmq.protocols.mqtt.server import Server

PAGE_MAX: Final = 1000
"""Items per page."""


class Administration:
    """The MQTT state of a node for the admin API."""

    def __init__(self, server: Server) -> None:
        self._server = server

    def sessions(self, vhost: str, after: str = "", count: int = PAGE_MAX) -> list[dict[str, Any]]:
        """Return sessions in the order of their client ids."""
        host = self._server.host(vhost)
        host.vhost.tick.flush()
        found: dict[str, SessionRow | None] = {}
        for client_id, row in self._stored(host, after):
            found[client_id] = row
            if len(found) >= count:
                break
        found |= {client_id: None for client_id in host.live if client_id > after and client_id not in found}
        return [self._session(host, client_id, found[client_id]) for client_id in sorted(found)[:count]]

    def session(self, vhost: str, client_id: str) -> dict[str, Any]:
        host = self._server.host(vhost)
        row = host.find(client_id)
        if row is None and client_id not in host.live:
            raise NotFoundError(f"there is no MQTT session {client_id!r:.80} in vhost {vhost!r}")
        return self._session(host, client_id, row)

    def _stored(self, host: MqttHost, after: str) -> Iterator[tuple[str, SessionRow]]:
        start, end = prefix_range(keys.SESSION)
        if after:
            start = keys.client_key(keys.SESSION, after) + b"\0"
        for key, raw in host.vhost.store.scan(Family.MQTT_SESSIONS, start, end):
            yield keys.decode_client_key(key), rows.decode(SessionRow, raw)

    def _session(self, host: MqttHost, client_id: str, row: SessionRow | None) -> dict[str, Any]:
        connection: Connection | None = self._connection(host, client_id)
        session = None if connection is None else connection.session
        expiry_s = session.expiry_s if session is not None else row.expiry_s if row is not None else 0
        queue = host.vhost.queues.by_name.get(QUEUE_PREFIX + client_id)
        counts = {}
        if queue is not None:
            try:
                counts = host.vhost.counts(queue)
            except BasaltError:
                # The queue has failed. `basalt queue list` shows why.
                counts = {}
        outbound = None if connection is None else connection.outbound
        return {
            "client_id": client_id,
            "vhost": host.vhost.name,
            "user": session.user if session is not None else row.user if row is not None else "",
            "connected": connection is not None,
            "connection": "" if connection is None else connection.name,
            "protocol": "" if connection is None else connection.info()["protocol"],
            "durable": expiry_s > 0,
            "expiry_s": None if expiry_s == NEVER_S else expiry_s,
            "expires_at_ms": None if row is None or not row.due_ns else row.due_ns // NS_PER_MS,
            "subscriptions": len(list(self._subscriptions(host, client_id))),
            "queue": "" if queue is None else queue.name,
            "messages": counts.get("messages", counts.get("ready", 0)),
            "in_flight": 0 if outbound is None else outbound.unacknowledged,
        }

    def _connection(self, host: MqttHost, client_id: str) -> Connection | None:
        found: Any = host.live.get(client_id)
        return found  # type: ignore[no-any-return]

    def _subscriptions(self, host: MqttHost, client_id: str) -> Iterator[tuple[str, Subscription]]:
        live = host.live.get(client_id)
        if live is not None:
            yield from sorted(live.session.subscriptions.items())
            return
        start, end = prefix_range(keys.client_prefix(keys.SUBSCRIPTION, client_id))
        for key, raw in host.vhost.store.scan(Family.MQTT_SESSIONS, start, end):
            yield keys.decode_subscription_key(key)[1], rows.decode(Subscription, raw)

    def subscriptions(self, vhost: str, client_id: str) -> list[dict[str, Any]]:
        """Return the subscriptions of a session."""
        self.session(vhost, client_id)
        host = self._server.host(vhost)
        return [
            {
                "client_id": client_id,
                "filter": topic_filter,
                "shared": topic_filter.startswith(topics.SHARE_PREFIX),
                "qos": each.qos,
                "no_local": each.no_local,
                "retain_as_published": each.retain_as_published,
                "identifier": each.identifier or None,
            }
            for topic_filter, each in self._subscriptions(host, client_id)
        ]

    def retained(self, vhost: str, topic_filter: str, after: str, count: int) -> tuple[list[dict[str, Any]], str]:
        """Return retained messages without their payloads, and the topic after which the next page starts."""
        topics.check_filter(topic_filter)
        host = self._server.host(vhost)
        host.vhost.tick.flush()
        found, after = host.retained.page(topic_filter, after, count)
        return [_retained(topic, row) for topic, row in found], after

    def rules(self, vhost: str) -> list[dict[str, Any]]:
        """Return the rules that copy messages to streams."""
        host = self._server.host(vhost)
        host.vhost.tick.flush()
        return [_rule(host, each) for each in host.rules.list()]

    def rule(self, vhost: str, name: str) -> dict[str, Any]:
        host = self._server.host(vhost)
        return _rule(host, host.rules.get(name))

    def check_rule(self, name: str, topic_filter: str, topic: str, key: str) -> None:
        Rule(name, topic_filter, topic, key).check()

    def source_of(self, topic_filter: str) -> tuple[str, str]:
        """Return the exchange and the binding key of a filter."""
        return self._server.settings.exchange, topics.binding_key(topic_filter)

    async def set_rule(self, vhost: str, name: str, topic_filter: str, topic: str, key: str) -> bool:
        """Create or replace a rule. Return whether it is new."""
        host = self._server.host(vhost)
        is_new = all(each.name != name for each in host.rules.list())
        host.rules.set(Rule(name, topic_filter, topic, key))
        host.vhost.tick.flush()
        await host.vhost.commit.durable()
        return is_new

    async def delete_rule(self, vhost: str, name: str) -> None:
        host = self._server.host(vhost)
        host.rules.delete(name)
        host.vhost.tick.flush()
        await host.vhost.commit.durable()

    def totals(self) -> dict[str, int]:
        """Return counters since the start, by name."""
        found = self._server.totals()
        return {
            "messages_received": found.received,
            "messages_sent": found.sent,
            "messages_dropped": found.dropped,
            "received_bytes": found.received_bytes,
            "sent_bytes": found.sent_bytes,
        }

    async def delete_retained(self, vhost: str, topic: str) -> None:
        host = self._server.host(vhost)
        host.vhost.tick.flush()
        if host.retained.get(topic) is None:
            raise NotFoundError(f"there is no retained message {topic!r:.80} in vhost {vhost!r}")
        host.vhost.write_rows(RowChange([(Family.MQTT_RETAINED, keys.retained_key(topic), None)]))
        host.vhost.tick.flush()
        await host.vhost.commit.durable()

    async def disconnect(self, vhost: str, client_id: str, reason: str, *, end_session: bool) -> None:
        """Close the connection of a client, and delete its session if `end_session`."""
        self.session(vhost, client_id)
        host = self._server.host(vhost)
        connection = self._connection(host, client_id)
        if connection is not None:
            connection.close(reason)
        if end_session:
            host.end(client_id)
        await host.vhost.commit.durable()


def _retained(topic: str, row: RetainedRow) -> dict[str, Any]:
    return {
        "topic": topic,
        "payload_bytes": len(row.payload),
        "stored_at_ms": row.stored_ns // NS_PER_MS,
        "expires_at_ms": row.expires_ns // NS_PER_MS if row.expires_ns else None,
    }


def _rule(host: MqttHost, rule: Rule) -> dict[str, Any]:
    waiting, appended = host.rules.counts(rule.name)
    return {
        "name": rule.name,
        "vhost": host.vhost.name,
        "filter": rule.filter,
        "topic": rule.topic,
        "key": rule.key,
        "waiting": waiting,
        "appended": appended,
    }
