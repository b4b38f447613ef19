"""SUBSCRIBE and UNSUBSCRIBE: bindings of the session's queue, shared subscriptions, and retained messages."""

from __future__ import annotations

from functools import partial
from typing import Final

from basaltmq.broker.message.operations import Row, RowChange
from basaltmq.errors import AccessRefusedError, BasaltError, InvalidArgumentError
from basaltmq.protocols.mqtt.access import ClientAccess
from basaltmq.protocols.mqtt.host import MqttHost
from basaltmq.protocols.mqtt.sessions import rows
from basaltmq.protocols.mqtt.sessions.outbound import Client, Outbound, RowsWritten
from basaltmq.protocols.mqtt.sessions.rows import Subscription
from basaltmq.protocols.mqtt.sessions.session import Session, match_of
from basaltmq.protocols.mqtt.sessions.shared_subscriptions import QOS_MAX, queue_of
from basaltmq.protocols.mqtt.settings import Settings
from basaltmq.protocols.mqtt.sys_topics import SysTopics, is_sys
from basaltmq.protocols.mqtt.wire import packets as p
from basaltmq.protocols.mqtt.wire import reason_codes as rc
from basaltmq.protocols.mqtt.wire import topics
from basaltmq.protocols.mqtt.wire.errors import MqttError, ProtocolViolation
from basaltmq.store.keys import mqtt as keys

ALWAYS: Final = 0
IF_NEW: Final = 1
"""Retain handling: send retained messages always, or for a new subscription; 2 is never."""


LONG_FILTER_CHARS: Final = 255
FILTER_CHARS_MAX: Final = 1 << 20
"""All filters of a session, before another long one is refused. Each is stored in several rows and objects."""


class _Refusal(Exception):
    """A subscription is refused."""

    def __init__(self, reason_code: int, text: str) -> None:
        super().__init__(text)
        self.reason_code = reason_code


class Subscriber:
    """Changes the subscriptions of a connected client."""

    def __init__(
        self,
        host: MqttHost,
        session: Session,
        client: Client,
        access: ClientAccess,
        outbound: Outbound,
        settings: Settings,
        sys_topics: SysTopics,
    ) -> None:
        self._host = host
        self._session = session
        self._client = client
        self._access = access
        self._outbound = outbound
        self._settings = settings
        self._sys_topics = sys_topics
        self._is_stopped = False

    def resume(self) -> None:
        """Receive from the queues of the subscriptions of an earlier connection."""
        if self._session.has_queue:
            self._outbound.consume(self._session.queue)
        for given, subscription in self._session.subscriptions.items():
            share, topic_filter = topics.split_share(given)
            if share is not None:
                queue, changes = self._host.shared_subscriptions.join(self._session.client_id, share, topic_filter)
                self._host.vhost.write_rows(RowChange(changes))
                self._outbound.consume(queue, match_of([subscription]))

    def stop(self) -> None:
        self._is_stopped = True

    def subscribe(self, packet: p.Subscribe) -> None:
        identifiers = packet.properties.subscription_ids
        identifier = identifiers[0] if identifiers else 0
        codes: list[int] = []
        changes: list[Row] = []
        retained: list[str] = []
        text = ""
        for wanted in packet.subscriptions:
            try:
                codes.append(self._subscribe(wanted, identifier, changes, retained))
            except _Refusal as refusal:
                codes.append(refusal.reason_code)
                text = text or str(refusal)
            except MqttError as error:
                if self._client.version != p.V5 and error.reason_code == rc.TOPIC_FILTER_INVALID:
                    raise
                codes.append(error.reason_code)
                text = text or error.text
        suback = p.Suback(packet.packet_id, tuple(codes))
        if not changes:
            self._subscribed(suback, text, retained)
            return
        written = partial(self._subscribed, suback, text, retained)
        self._host.vhost.write_rows(RowChange(changes, RowsWritten(self._client, written)))

    def _subscribed(self, suback: p.Suback, text: str, retained: list[str]) -> None:
        """Send SUBACK, then the retained messages."""
        if self._is_stopped:
            return
        self._client.send_packet(suback, text)
        for topic_filter in retained:
            if is_sys(topic_filter):
                self._outbound.send_direct(self._sys_topics.values())
                continue
            self._host.retained.send(self._session, topic_filter, lambda: self._is_stopped)

    def _subscribe(self, wanted: p.Subscription, identifier: int, changes: list[Row], retained: list[str]) -> int:
        """Make one subscription. Return the reason code."""
        topics.check_filter(wanted.filter)
        share, topic_filter = topics.split_share(wanted.filter)
        if share is not None and wanted.no_local:
            raise ProtocolViolation(rc.PROTOCOL_ERROR, "a shared subscription cannot have the option No Local")
        session = self._session
        is_new = wanted.filter not in session.subscriptions
        if is_new and len(session.subscriptions) >= self._settings.subscriptions_max:
            raise _Refusal(
                rc.QUOTA_EXCEEDED, f"the limit of {self._settings.subscriptions_max} subscriptions is reached"
            )
        if is_new and len(wanted.filter) > LONG_FILTER_CHARS and self._filter_chars() > FILTER_CHARS_MAX:
            raise _Refusal(rc.QUOTA_EXCEEDED, f"the filters of the session exceed {FILTER_CHARS_MAX:,} characters")
        key = topics.binding_key(topic_filter)
        qos = wanted.qos if share is None else min(wanted.qos, QOS_MAX)
        made = Subscription(qos, wanted.no_local, wanted.retain_as_published, identifier)
        try:
            self._access.check_subscribe(key)
            if is_sys(topic_filter):
                if share is not None:
                    raise _Refusal(rc.TOPIC_FILTER_INVALID, "$SYS has no shared subscriptions")
            elif share is None:
                self._bind(key)
            else:
                changes += self._join(share, topic_filter, made)
        except AccessRefusedError as error:
            raise _Refusal(rc.NOT_AUTHORIZED, str(error)) from None
        except InvalidArgumentError as error:
            raise _Refusal(rc.TOPIC_FILTER_INVALID, str(error)) from None
        except BasaltError as error:
            raise _Refusal(rc.IMPLEMENTATION_SPECIFIC_ERROR, str(error)) from None
        session.subscribe(wanted.filter, made)
        if session.is_durable:
            changes.append(rows.put(keys.subscription_key(session.client_id, wanted.filter), made))
        if share is None and (wanted.retain_handling == ALWAYS or (wanted.retain_handling == IF_NEW and is_new)):
            retained.append(topic_filter)
        return qos

    def _filter_chars(self) -> int:
        return sum(map(len, self._session.subscriptions))

    def _bind(self, key: str) -> None:
        session, host = self._session, self._host
        host.require_queue(session)
        host.vhost.bind_queue(session.queue, host.exchange, key, owner=session)
        if not self._outbound.has(session.queue):
            self._outbound.consume(session.queue)

    def _join(self, share: str, topic_filter: str, made: Subscription) -> list[Row]:
        queue, changes = self._host.shared_subscriptions.join(self._session.client_id, share, topic_filter)
        match = match_of([made])
        if self._outbound.has(queue):
            self._outbound.change(queue, match)
        else:
            self._outbound.consume(queue, match)
        return changes

    def unsubscribe(self, packet: p.Unsubscribe) -> None:
        codes: list[int] = []
        changes: list[Row] = []
        session, host = self._session, self._host
        for given in packet.filters:
            topics.check_filter(given)
            if not session.unsubscribe(given):
                codes.append(rc.NO_SUBSCRIPTION_EXISTED)
                continue
            share, topic_filter = topics.split_share(given)
            if is_sys(topic_filter):
                pass
            elif share is None:
                host.retained.stop(session.client_id, topic_filter)
                host.vhost.unbind_queue(session.queue, host.exchange, topics.binding_key(topic_filter), owner=session)
            else:
                self._outbound.leave(queue_of(f"{share}/{topic_filter}"))
                changes += host.shared_subscriptions.leave(session.client_id, share, topic_filter)
            if session.is_durable:
                changes.append(rows.delete(keys.subscription_key(session.client_id, given)))
            codes.append(rc.SUCCESS)
        unsuback = p.Unsuback(packet.packet_id, tuple(codes))
        if not changes:
            self._client.send_packet(unsuback)
            return
        waiter = RowsWritten(self._client, lambda: self._client.send_packet(unsuback))
        host.vhost.write_rows(RowChange(changes, waiter))
