"""The state of a session: subscriptions, and the messages of QoS 1 and 2 that are not acknowledged completely.

A session exists in memory while its client is connected. A durable session (expiry above 0) is loaded from its rows
when the client connects again. Its messages wait in a queue of the queue plane, which is bound to the topic exchange
once per topic filter.

A packet that was sent and not acknowledged is a `Flight`. When the connection ends, its message returns to its place in
the queue, but the flight keeps its packet identifier. The queue delivers the message again after the client has
connected, and it is sent with the same identifier and DUP.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final, NamedTuple

from basaltmq.broker.message.operations import Row
from basaltmq.broker.routing.topic_trie import TopicTrie
from basaltmq.protocols.mqtt.sessions import rows
from basaltmq.protocols.mqtt.sessions.rows import SENT, OutboundRow, SessionRow, Subscription
from basaltmq.protocols.mqtt.wire import topics
from basaltmq.protocols.mqtt.wire.packets import PACKET_ID_MAX
from basaltmq.store.api import Reader
from basaltmq.store.families import Family
from basaltmq.store.keys import mqtt as keys
from basaltmq.store.keys.parts import prefix_range
from basaltmq.varints import varint

QUEUE_PREFIX: Final = "mqtt.session."
CLIENT_ID_BYTES_MAX: Final = 240
"""The queue of a session has the client id in its name, which has at most 255 bytes."""

MATCHES_MAX: Final = 256
"""Cached topics per session. A full cache is emptied."""

CACHED_TOPIC_CHARS_MAX: Final = 255
"""Longer topics are not cached, so that the cache of a session stays below 64 KiB."""

_SUBSCRIPTION_ID: Final = b"\x0b"


class Match(NamedTuple):
    """How a session receives messages of a topic."""

    qos: int
    retain_as_published: bool
    identifiers: bytes
    """Subscription identifiers as properties of MQTT 5.0."""


class Flight:
    """A message that was sent with QoS 1 or 2."""

    __slots__ = ("message_id", "qos", "queue", "state", "token")

    def __init__(self, queue: str, message_id: bytes, qos: int, state: int = SENT, token: int = 0) -> None:
        self.queue = queue
        self.message_id = message_id
        self.qos = qos
        self.state = state
        self.token = token
        """Lease of the message; 0 while the queue holds it."""


class Session:
    """The session of one client in one virtual host."""

    def __init__(self, client_id: str, user: str, expiry_s: int, created_ms: int) -> None:
        self.client_id = client_id
        self.user = user
        self.expiry_s = expiry_s
        self.created_ms = created_ms
        self.queue = QUEUE_PREFIX + client_id
        self.has_queue = False
        self.has_rows = False
        """Whether the store has rows of this session besides that of its connection."""
        self.subscriptions: dict[str, Subscription] = {}
        """By topic filter, with `$share` if it is shared."""
        self.received: set[int] = set()
        """Packet identifiers of QoS 2 messages that the client has not released."""
        self.flights: dict[int, Flight] = {}
        """By packet identifier, in the order of sending."""
        self.stale_rows: list[Row] = []
        """Deletions of rows that `load` found and that have no meaning any more."""
        self._trie: TopicTrie[str] = TopicTrie()
        self._matches: dict[tuple[str, bool], Match | None] = {}
        self._last_packet_id = 0

    @property
    def is_durable(self) -> bool:
        return self.expiry_s > 0

    def row(self, due_ns: int = 0) -> Row:
        made = SessionRow(self.expiry_s, self.user, self.created_ms, due_ns)
        return rows.put(keys.client_key(keys.SESSION, self.client_id), made)

    @classmethod
    def load(cls, store: Reader, client_id: str, row: SessionRow) -> Session:
        """Read the subscriptions and packets of a durable session."""
        session = cls(client_id, row.user, row.expiry_s, row.created_ms)
        for key, value in _scan(store, keys.SUBSCRIPTION, client_id):
            session.subscribe(keys.decode_subscription_key(key)[1], rows.decode(Subscription, value))
        session.received = {keys.decode_packet_key(key)[1] for key, _ in _scan(store, keys.INBOUND, client_id)}
        for key, value in _scan(store, keys.OUTBOUND, client_id):
            found = rows.decode(OutboundRow, value)
            if found.state == SENT and found.queue != session.queue:
                # A crash ended the connection, so the message of a shared subscription is back in its queue.
                session.stale_rows.append(rows.delete(key))
                continue
            session.flights[keys.decode_packet_key(key)[1]] = Flight(
                found.queue, found.message_id, found.qos, found.state
            )
        return session

    def subscribe(self, topic_filter: str, subscription: Subscription) -> bool:
        """Add or replace a subscription. Return whether it is new."""
        is_new = topic_filter not in self.subscriptions
        self.subscriptions[topic_filter] = subscription
        if is_new and not topic_filter.startswith(topics.SHARE_PREFIX):
            self._trie.add(topics.binding_key(topic_filter), topic_filter)
        self._matches.clear()
        return is_new

    def unsubscribe(self, topic_filter: str) -> bool:
        """Remove a subscription. Return whether it existed."""
        if self.subscriptions.pop(topic_filter, None) is None:
            return False
        if not topic_filter.startswith(topics.SHARE_PREFIX):
            self._trie.remove(topics.binding_key(topic_filter), topic_filter)
        self._matches.clear()
        return True

    def match(self, topic: str, *, is_own: bool = False) -> Match | None:
        """Return how the session receives a topic; None if it does not. `is_own`: its client published the message."""
        cached = (topic, is_own)
        try:
            return self._matches[cached]
        except KeyError:
            pass
        filters = self._trie.match(topics.routing_key(topic))
        found = [
            self.subscriptions[each]
            for each in sorted(filters)
            if not topics.hides(each, topic) and not (is_own and self.subscriptions[each].no_local)
        ]
        match = match_of(found) if found else None
        if len(topic) <= CACHED_TOPIC_CHARS_MAX:
            if len(self._matches) >= MATCHES_MAX:
                self._matches.clear()
            self._matches[cached] = match
        return match

    @property
    def watches_sys(self) -> bool:
        """Whether a subscription is for the state of the broker."""
        return any(each.startswith("$SYS") for each in self.subscriptions)

    @property
    def excludes_own(self) -> bool:
        """Whether a subscription has the option No Local."""
        return any(each.no_local for each in self.subscriptions.values())

    def next_packet_id(self) -> int:
        """Return a packet identifier that no flight uses."""
        assert len(self.flights) < PACKET_ID_MAX, "the receive maximum limits the flights"
        packet_id = self._last_packet_id
        while True:
            packet_id = packet_id % PACKET_ID_MAX + 1
            if packet_id not in self.flights:
                self._last_packet_id = packet_id
                return packet_id

    def flight_row(self, packet_id: int, flight: Flight) -> Row:
        made = OutboundRow(flight.state, flight.qos, flight.queue, flight.message_id)
        return rows.put(keys.packet_key(keys.OUTBOUND, self.client_id, packet_id), made)

    def no_flight_row(self, packet_id: int) -> Row:
        return rows.delete(keys.packet_key(keys.OUTBOUND, self.client_id, packet_id))


def match_of(found: Iterable[Subscription]) -> Match:
    """Combine subscriptions: the highest QoS, and all identifiers."""
    found = list(found)
    identifiers = sorted({each.identifier for each in found if each.identifier})
    return Match(
        max(each.qos for each in found),
        any(each.retain_as_published for each in found),
        b"".join(_SUBSCRIPTION_ID + varint(each) for each in identifiers),
    )


def _scan(store: Reader, kind: bytes, client_id: str) -> Iterable[tuple[bytes, bytes]]:
    return store.scan(Family.MQTT_SESSIONS, *prefix_range(keys.client_prefix(kind, client_id)))
