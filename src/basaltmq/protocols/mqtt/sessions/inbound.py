"""Messages from the client: topic aliases, permissions, QoS 2 identifiers, and acknowledgements after the sync.

    PUBLISH QoS 0 ─> tick
            QoS 1 ─> tick ─> sync ─> PUBACK
            QoS 2 ─> tick, with the packet identifier in the same batch ─> sync ─> PUBREC
    PUBREL        ─> tick deletes the identifier ─> sync ─> PUBCOMP

A packet identifier of QoS 2 stays in use until PUBREL. A PUBLISH with an identifier in use is a repetition, and only
PUBREC is sent. PUBCOMP waits for the sync, because the client may then reuse the identifier. Without the sync, a crash
could bring the old row back, and the new message would be taken for a repetition.

A retained message is a row in the same batch. Its acknowledgement waits for both.

Acknowledgements of one QoS are sent in the order of their messages, as the standard requires. A message without a
durable queue is confirmed before the sync, so its acknowledgement may wait for that of an earlier message.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from typing import Final, Protocol, TypeAlias

from basaltmq.broker.auth.users import User
from basaltmq.broker.message.operations import Row, RowChange
from basaltmq.broker.scheduling.loop_shares import LoopShares
from basaltmq.broker.vhost import VHost
from basaltmq.errors import AccessRefusedError, BasaltError
from basaltmq.protocols.mqtt.sessions import message, rows
from basaltmq.protocols.mqtt.sessions.outbound import Client, RowsWritten
from basaltmq.protocols.mqtt.sessions.session import Session
from basaltmq.protocols.mqtt.wire import packets as p
from basaltmq.protocols.mqtt.wire import reason_codes as rc
from basaltmq.protocols.mqtt.wire import topics
from basaltmq.protocols.mqtt.wire.encoder import ACKNOWLEDGEMENT_BYTES, acknowledgement, encode
from basaltmq.protocols.mqtt.wire.errors import ProtocolViolation
from basaltmq.store.keys import mqtt as keys

SYS_PREFIX: Final = "$SYS/"

Wait: TypeAlias = Callable[[Callable[[], None]], None]
"""Calls a function when a publisher may continue."""

LARGE_BYTES_MIN: Final = 16 << 10
"""Payloads from this size wait while the store is behind with flushes. The store writes them to body files."""

LONG_TOPIC_CHARS: Final = 255
ALIASED_CHARS_MAX: Final = 128 << 10
"""Topics behind the aliases of a connection, if one of them is long: two of the longest."""

DELAY_S: Final = 0.002
"""Pause of a publisher while the store is behind."""

_Acknowledgement: TypeAlias = type[p.Puback] | type[p.Pubrec]
_CODE: Final[dict[_Acknowledgement, int]] = {p.Puback: p.PUBACK, p.Pubrec: p.PUBREC}


class Access(Protocol):
    """Checks the permissions of a client."""

    def check_publish(self, topic: str, routing_key: str) -> None:
        """Raise AccessRefusedError unless the client may publish to the topic."""
        ...


class Retaining(Protocol):
    """Creates the rows of retained messages."""

    def row(self, topic: str, properties: bytes, payload: bytes) -> Row: ...


class Inbound:
    """Publishes the messages of a connected client."""

    def __init__(
        self,
        vhost: VHost,
        session: Session,
        client: Client,
        user: User,
        access: Access,
        retained: Retaining,
        shares: LoopShares,
        *,
        exchange: str,
        receive_maximum: int,
        topic_aliases_max: int,
    ) -> None:
        self._vhost = vhost
        self._session = session
        self._client = client
        self._user = user
        self._access = access
        self._retained = retained
        self._shares = shares
        self._exchange = exchange
        self._receive_maximum = receive_maximum
        self._topic_aliases_max = topic_aliases_max
        self._aliases: dict[int, str] = {}
        self._last = 0
        self._waiting: dict[int, tuple[_Acknowledgement, int, int]] = {}
        """Packet identifiers and reason codes of publishes that are not confirmed, by number."""
        self._order: dict[_Acknowledgement, deque[int]] = {p.Puback: deque(), p.Pubrec: deque()}
        """Packet identifiers that are not acknowledged, in the order of the messages."""
        self._confirmed: dict[_Acknowledgement, dict[int, tuple[int, str]]] = {p.Puback: {}, p.Pubrec: {}}
        """Reason codes and texts of acknowledgements that wait for an earlier one, by packet identifier."""
        self._parts: dict[int, int] = {}
        """For publishes that also write rows: how many of their two parts (message, rows) are not durable yet."""
        self._unreceived: set[int] = set()
        """QoS 2 identifiers whose PUBREC is not sent yet."""
        self._unacknowledged_1 = 0
        self.published = 0

    def publish(self, packet: p.Publish) -> Wait | None:
        """Publish a message. If it must wait, return a function that schedules the retry. A message waits for time in
        the turn if it reaches many queues, for credit if a queue has a backlog, and for the store if it is large.
        """
        topic = packet.topic
        alias = packet.properties.topic_alias
        if alias is not None:
            topic = self._resolve(alias, topic)
        qos, packet_id = packet.qos, packet.packet_id
        if qos:
            if qos == 2 and packet_id in self._session.received:
                self._repeat(packet_id)
                return None
            if self._client.version == p.V5 and self._unacknowledged >= self._receive_maximum:
                raise ProtocolViolation(
                    rc.RECEIVE_MAXIMUM_EXCEEDED, f"more than {self._receive_maximum} messages are not acknowledged"
                )
        key = self._check(topic, packet)
        if key is None:
            return None
        route = self._vhost.tick.router.known_route(self._exchange, key)
        limited = route.limited()
        if limited and min([queue.publish_credit for queue in limited]) < 1:
            return partial(self._vhost.tick.wait_for_credit, limited)
        if len(packet.payload) >= LARGE_BYTES_MIN and self._vhost.delays_large():
            return _after_pause
        if route.is_costly:
            fan_out_s = route.fan_out_s(is_transient=not qos)
            if not self._shares.has_room(fan_out_s):
                return self._shares.call_without_debt
            self._shares.add_debt(fan_out_s)
        for queue in limited:
            queue.publish_credit -= 1
        self._publish(packet, topic, key, rc.SUCCESS if route.fan_out else rc.NO_MATCHING_SUBSCRIBERS)
        return None

    @property
    def _unacknowledged(self) -> int:
        return self._unacknowledged_1 + len(self._session.received)

    def _resolve(self, alias: int, topic: str) -> str:
        """Return the topic of an alias. If the packet also has a topic, assign the alias to it."""
        if alias > self._topic_aliases_max:
            raise ProtocolViolation(
                rc.TOPIC_ALIAS_INVALID, f"topic alias {alias} exceeds the maximum of {self._topic_aliases_max}"
            )
        if topic:
            self._aliases[alias] = topic
            if len(topic) > LONG_TOPIC_CHARS and sum(map(len, self._aliases.values())) > ALIASED_CHARS_MAX:
                raise ProtocolViolation(
                    rc.QUOTA_EXCEEDED, f"the topics behind aliases exceed {ALIASED_CHARS_MAX:,} characters"
                )
            return topic
        known = self._aliases.get(alias)
        if known is None:
            raise ProtocolViolation(rc.PROTOCOL_ERROR, f"topic alias {alias} has no topic")
        return known

    def _check(self, topic: str, packet: p.Publish) -> str | None:
        """Return the routing key, or refuse the message."""
        key = topics.routing_key(topic)
        if topic.startswith(SYS_PREFIX):
            self._refuse(packet, rc.NOT_AUTHORIZED, f"topics below {SYS_PREFIX} are read-only")
            return None
        try:
            self._access.check_publish(topic, key)
            self._vhost.check_exchange(self._exchange)
        except AccessRefusedError as error:
            self._refuse(packet, rc.NOT_AUTHORIZED, str(error))
            return None
        except BasaltError as error:
            self._refuse(packet, rc.IMPLEMENTATION_SPECIFIC_ERROR, str(error))
            return None
        return key

    def _refuse(self, packet: p.Publish, reason_code: int, text: str) -> None:
        """Refuse a message in its acknowledgement. QoS 0 and versions before 5.0 have no such code, so close the
        connection."""
        if self._client.version != p.V5 or not packet.qos:
            raise ProtocolViolation(reason_code, text)
        kind: _Acknowledgement = p.Puback if packet.qos == 1 else p.Pubrec
        self._order[kind].append(packet.packet_id)
        self._send_acknowledgement(kind, packet.packet_id, reason_code, text)

    def _publish(self, packet: p.Publish, topic: str, key: str, reason_code: int) -> None:
        session = self._session
        own = session.client_id if session.subscriptions and session.excludes_own else ""
        properties = message.to_properties(packet, topic, key, own)
        number = 0
        changes: list[Row] = []
        if packet.retain:
            changes.append(self._retained.row(topic, properties, packet.payload))
        if packet.qos:
            number = self._last = self._last + 1
            self._order[p.Puback if packet.qos == 1 else p.Pubrec].append(packet.packet_id)
            if packet.qos == 1:
                self._waiting[number] = (p.Puback, packet.packet_id, reason_code)
                self._unacknowledged_1 += 1
            else:
                self._waiting[number] = (p.Pubrec, packet.packet_id, reason_code)
                session.received.add(packet.packet_id)
                self._unreceived.add(packet.packet_id)
                if session.is_durable:
                    changes.append(self._inbound_row(packet.packet_id))
        self._vhost.publish_many([(self, self._exchange, key, properties, packet.payload, False, number)])
        self.published += 1
        if changes:
            waiter = None
            if number:
                self._parts[number] = 2
                waiter = RowsWritten(self._client, lambda: self._written(number))
            self._vhost.write_rows(RowChange(changes, waiter))

    def _inbound_row(self, packet_id: int) -> Row:
        return rows.mark(keys.packet_key(keys.INBOUND, self._session.client_id, packet_id))

    def _repeat(self, packet_id: int) -> None:
        """Acknowledge a repeated QoS 2 message. If the first one is not durable yet, its PUBREC follows anyway."""
        if packet_id not in self._unreceived:
            self._client.send_packet(p.Pubrec(packet_id))

    def released(self, packet_id: int) -> None:
        """Handle PUBREL."""
        session = self._session
        if packet_id not in session.received:
            self._client.send(encode(p.Pubcomp(packet_id, rc.PACKET_IDENTIFIER_NOT_FOUND), self._client.version))
            return
        complete = encode(p.Pubcomp(packet_id), self._client.version)
        if not session.is_durable:
            session.received.discard(packet_id)
            self._client.send(complete)
            return

        def written() -> None:
            session.received.discard(packet_id)
            self._client.send(complete)

        key = keys.packet_key(keys.INBOUND, session.client_id, packet_id)
        self._vhost.write_rows(RowChange([rows.delete(key)], RowsWritten(self._client, written)))

    def returned(self, exchange: str, routing_key: str, properties: bytes, body: bytes, number: int) -> None:
        """Messages without a route are not returned: MQTT does not require a subscriber."""

    def confirmed(self, numbers: Sequence[int], ok: bool) -> None:
        """Acknowledge messages that are durable, or refuse those that a full queue rejected."""
        for number in numbers:
            if ok and number in self._parts:
                self._written(number)
                continue
            kind, packet_id, reason_code = self._waiting.pop(number)
            self._parts.pop(number, None)
            if ok:
                self._acknowledge(kind, packet_id, reason_code)
            else:
                self._reject(kind, packet_id)

    def _written(self, number: int) -> None:
        """Acknowledge a message if both of its parts are durable."""
        left = self._parts.get(number)
        if left is None:
            return
        if left > 1:
            self._parts[number] = left - 1
            return
        del self._parts[number]
        self._acknowledge(*self._waiting.pop(number))

    def _acknowledge(self, kind: _Acknowledgement, packet_id: int, reason_code: int) -> None:
        if kind is p.Puback:
            self._unacknowledged_1 -= 1
        else:
            self._unreceived.discard(packet_id)
        self._send_acknowledgement(kind, packet_id, reason_code)

    def _reject(self, kind: _Acknowledgement, packet_id: int) -> None:
        """Refuse a message because a queue is full. Versions before 5.0 have no code for this; the client sends the
        message again when it reconnects."""
        if kind is p.Puback:
            self._unacknowledged_1 -= 1
        else:
            self._unreceived.discard(packet_id)
            self._session.received.discard(packet_id)
            if self._session.is_durable:
                key = keys.packet_key(keys.INBOUND, self._session.client_id, packet_id)
                self._vhost.write_rows(RowChange([rows.delete(key)]))
        if self._client.version == p.V5:
            self._send_acknowledgement(kind, packet_id, rc.QUOTA_EXCEEDED, "a queue is full")
        else:
            self._client.end(rc.QUOTA_EXCEEDED, "a queue is full")

    def _send_acknowledgement(
        self, kind: _Acknowledgement, packet_id: int, reason_code: int = 0, text: str = ""
    ) -> None:
        """Send an acknowledgement and those that waited for it. If an earlier one is not sent yet, keep it until
        then."""
        order, confirmed = self._order[kind], self._confirmed[kind]
        if not order or order[0] != packet_id:
            confirmed[packet_id] = (reason_code, text)
            return
        order.popleft()
        if reason_code or text or self._client.packet_bytes_max < ACKNOWLEDGEMENT_BYTES:
            self._client.send_packet(kind(packet_id, reason_code), text)
        else:
            self._client.send(acknowledgement(_CODE[kind], packet_id))
        while order and order[0] in confirmed:
            self._client.send_packet(kind(order[0], confirmed[order[0]][0]), confirmed.pop(order[0])[1])
            order.popleft()


def _after_pause(go_on: Callable[[], None]) -> None:
    asyncio.get_running_loop().call_later(DELAY_S, go_on)
