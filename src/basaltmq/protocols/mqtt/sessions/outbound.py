"""Messages to the client of a session: packet identifiers, acknowledgements, receive maximum.

    queue ─> deliver ─┬─ QoS 0: sent and acknowledged to the queue at once
                      ├─ QoS 1: sent; PUBACK acknowledges it to the queue
                      └─ QoS 2: sent when its packet identifier is durable; PUBREC acknowledges it to the queue;
                                PUBREL is sent when that is durable; PUBCOMP frees the identifier

A flight is a message of QoS 1 or 2 that was sent and is not acknowledged completely. A durable session writes a row per
flight, in the batches of the acknowledgements. A QoS 2 packet is sent after the sync of its row. Otherwise, after a
crash, the broker could send the message under another identifier, and the client would process it twice. A QoS 1 packet
does not wait, because the client may receive it twice.

The receive maximum of the client limits the flights. All queues of the session (its own and those of shared
subscriptions) share it: their consumers have as much credit as is left. Two queues may deliver in one turn before the
credit is updated. Deliveries above the limit then wait here, in order.

A message that exceeds the client's maximum packet size is acknowledged and not sent, as the standard requires.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Final, Protocol

from basaltmq.broker.consumers.consumer import Consumer
from basaltmq.broker.consumers.direct import DirectRun
from basaltmq.broker.message.operations import ACK, REQUEUE, Row, RowChange, Settlement
from basaltmq.broker.message.text_headers import envelope_of
from basaltmq.broker.vhost import VHost
from basaltmq.protocols.mqtt.sessions.message import Decoded, Message
from basaltmq.protocols.mqtt.sessions.rows import RELEASED, SENT
from basaltmq.protocols.mqtt.sessions.session import Flight, Match, Session
from basaltmq.protocols.mqtt.wire import packets as p
from basaltmq.protocols.mqtt.wire import reason_codes as rc
from basaltmq.protocols.mqtt.wire.encoder import DUP, RETAIN, encode, publish_head
from basaltmq.protocols.mqtt.wire.fields import U16, U32, write_text
from basaltmq.queues.leases.delivery import Delivery

ALIASED_BYTES_MAX: Final = 257
"""Longest topic, with its length, that gets an alias. A client may allow 65,535 aliases, 16 MiB of such topics."""

_EXPIRY: Final = b"\x02"
_ALIAS: Final = b"\x23"
_NO_TOPIC: Final = b"\0\0"
_OWNERS: Final = "owners"
_S: Final = 1_000_000_000


class Client(Protocol):
    """The part of a client's connection that sends messages."""

    version: int
    packet_bytes_max: int
    """Largest packet that the client accepts."""
    topic_aliases_max: int
    """Topic aliases that the client accepts."""
    is_full: bool

    def send(self, *parts: bytes) -> None:
        """Add bytes to the output of this turn."""
        ...

    def send_packet(self, packet: p.Packet, text: str = "") -> None:
        """Send a packet with a reason string, if it is not empty and the client wants it."""
        ...

    def end(self, reason_code: int, text: str) -> None:
        """Close the connection."""
        ...


class RowsWritten:
    """Calls a function when rows are durable, or closes the connection."""

    __slots__ = ("_client", "_written")

    def __init__(self, client: Client, written: Callable[[], None]) -> None:
        self._client = client
        self._written = written

    def done(self) -> bool:
        return False

    def set_result(self, result: None, /) -> None:
        self._written()

    def set_exception(self, error: BaseException, /) -> None:
        self._client.end(rc.IMPLEMENTATION_SPECIFIC_ERROR, f"the session cannot be stored: {error}")


class Source:
    """A queue from which a session receives."""

    __slots__ = ("consumer", "match", "queue")

    def __init__(self, queue: str, consumer: Consumer, match: Match | None) -> None:
        self.queue = queue
        self.consumer = consumer
        self.match = match
        """The shared subscription. None for the queue of the session, whose topics are matched one by one."""


class Outbound:
    """Sends messages to a connected client."""

    def __init__(
        self, vhost: VHost, session: Session, client: Client, decoded: Decoded, window: int, clock_ns: Callable[[], int]
    ) -> None:
        """`window` limits the flights: the receive maximum of the client or the limit of the server."""
        self._vhost = vhost
        self._session = session
        self._client = client
        self._decoded = decoded
        self._window = window
        self._clock_ns = clock_ns
        self._sources: dict[Consumer, Source] = {}
        self._returning: dict[bytes, int] = {}
        """Packet identifiers of flights whose messages will be delivered again, by message id."""
        self._unacknowledged = 0
        self._has_more_room = False
        """Whether a flight has ended since the credit of the consumers was updated."""
        self._held: deque[tuple[Source, Delivery]] = deque()
        self._acks: dict[tuple[str, int], list[bytes]] = {}
        self._rows: list[Row] = []
        self._aliases: dict[bytes, bytes] = {}
        self.delivered = 0
        self.dropped = 0

    def resume(self) -> None:
        """Continue after CONNACK: send PUBREL again. The queue delivers the messages of the other flights again."""
        for packet_id, flight in self._session.flights.items():
            if flight.state == RELEASED:
                self._unacknowledged += 1
                self._client.send(encode(p.Pubrel(packet_id), self._client.version))
            else:
                self._returning[flight.message_id] = packet_id

    def consume(self, queue: str, match: Match | None = None) -> None:
        """Receive from a queue. `match` is the shared subscription, if it is one."""
        consumer = self._vhost.subscribe(
            queue, self, tag=self._session.client_id, prefetch=max(1, self._room()), owner=self._session
        )
        self._sources[consumer] = Source(queue, consumer, match)
        if match is None:
            consumer.queue.direct = self
        if self._client.is_full:
            consumer.pause()
        if not self._room():
            consumer.limit(0)

    def has(self, queue: str) -> bool:
        return any(source.queue == queue for source in self._sources.values())

    def change(self, queue: str, match: Match) -> None:
        """Set the options of a shared subscription again."""
        for source in self._sources.values():
            if source.queue == queue:
                source.match = match

    def leave(self, queue: str) -> None:
        """Stop receiving from the queue of a shared subscription. Messages that were sent are still acknowledged."""
        for consumer, source in list(self._sources.items()):
            if source.queue == queue:
                del self._sources[consumer]
                consumer.cancel()
                held = [delivery for held_for, delivery in self._held if held_for is source]
                self._held = deque(each for each in self._held if each[0] is not source)
                self._vhost.settle([Settlement(queue, each.token, [each.id], REQUEUE) for each in held])

    def deliver(self, consumer: Consumer, deliveries: Sequence[Any]) -> None:
        """Send messages, as far as the receive maximum allows."""
        source = self._sources.get(consumer)
        if source is None:
            self._vhost.settle([Settlement(consumer.queue.name, each.token, [each.id], REQUEUE) for each in deliveries])
            return
        for delivery in deliveries:
            if self._held or self._unacknowledged >= self._window:
                self._held.append((source, delivery))
            else:
                self._deliver(source, delivery)
        self._update_credit()
        self.flush()

    def accepts_direct(self) -> bool:
        return not self._held and not self._client.is_full

    def deliver_direct(self, run: DirectRun) -> None:
        """Send messages with QoS 0 that are in no queue. Subscribers with the same options share their encoding."""
        topic = self._decoded.get(run.messages[0][0]).topic
        match = self._session.match(topic)
        owners = run.encoded.get(_OWNERS)
        if owners is None:
            owners = run.encoded[_OWNERS] = {self._decoded.get(envelope).client_id for envelope, _ in run.messages}
        is_v5, packet_bytes_max = self._client.version == p.V5, self._client.packet_bytes_max
        if self._session.client_id in owners:
            for each in run.messages:
                is_own = self._decoded.get(each[0]).client_id == self._session.client_id
                match = self._session.match(topic, is_own=is_own)
                self._send_encoded(_encoded([each], self._decoded, match, packet_bytes_max, is_v5=is_v5))
            return
        sort = (is_v5, match, packet_bytes_max)
        made = run.encoded.get(sort)
        if made is None:
            made = run.encoded[sort] = _encoded(run.messages, self._decoded, match, packet_bytes_max, is_v5=is_v5)
        self._send_encoded(made)

    def _send_encoded(self, made: tuple[bytes, int, int]) -> None:
        packets, count, dropped = made
        self.delivered += count
        self.dropped += dropped
        if packets:
            self._client.send(packets)

    def send_direct(self, values: Iterable[tuple[str, bytes]]) -> None:
        """Send messages that are in no queue, with QoS 0: topics and payloads."""
        for topic, payload in values:
            match = self._session.match(topic)
            if match is not None:
                message = Message(topic, write_text(topic), 0, True, True, "", b"", False)
                properties = match.identifiers if self._client.version == p.V5 else None
                self._send(RETAIN, message, 0, properties, payload)

    def cancelled(self, consumer: Consumer) -> None:
        """The queue was deleted, so the session cannot continue."""
        source = self._sources.pop(consumer, None)
        if source is not None and source.match is None:
            self._client.end(rc.ADMINISTRATIVE_ACTION, "the queue of the session was deleted")

    def _deliver(self, source: Source, delivery: Delivery) -> None:
        envelope, body = delivery.content()
        message = self._decoded.get(envelope or envelope_of(delivery.headers))
        session = self._session
        packet_id = self._returning.pop(delivery.id, 0) if self._returning else 0
        if self._returning and not packet_id and source.match is None:
            self._forget_returning()
        if packet_id:
            flight = session.flights[packet_id]
            flight.token = delivery.token
            match = source.match or session.match(message.topic) or Match(flight.qos, False, b"")
            qos = flight.qos
        else:
            found = source.match or session.match(message.topic, is_own=message.client_id == session.client_id)
            if found is None:
                self._ack(source.queue, delivery)
                return
            match = found
            qos = min(message.qos, match.qos)
        properties = self._properties(message, match, delivery, was_sent=packet_id > 0)
        if properties is None and self._client.version == p.V5:
            self._drop(source, delivery, packet_id)
            return
        flags = qos << 1
        if message.is_retained_copy or (message.retain and match.retain_as_published):
            flags |= RETAIN
        if not qos:
            if self._send(flags, message, 0, properties, body):
                self.delivered += 1
            self._ack(source.queue, delivery)
            return
        if packet_id:
            flags |= DUP
        else:
            packet_id = session.next_packet_id()
            session.flights[packet_id] = Flight(source.queue, delivery.id, qos, SENT, delivery.token)
        waits = qos == 2 and session.is_durable and not flags & DUP
        head = self._head(flags, message, packet_id, properties, len(body), has_alias=not waits)
        if head is None:
            self._drop(source, delivery, packet_id)
            return
        self._unacknowledged += 1
        self.delivered += 1
        if session.is_durable and not flags & DUP:
            row = session.flight_row(packet_id, session.flights[packet_id])
            if waits:
                self._vhost.write_rows(
                    RowChange([row], RowsWritten(self._client, lambda: self._client.send(head, body)))
                )
                return
            self._rows.append(row)
        self._client.send(head, body)

    def _properties(self, message: Message, match: Match, delivery: Delivery, *, was_sent: bool) -> bytes | None:
        """Return the properties of MQTT 5.0; None before 5.0, or if the message expired before it was sent."""
        if self._client.version != p.V5:
            return None
        expiry = b""
        if message.expires and isinstance(delivery, Delivery):
            expires_ns = delivery.message().expires_ns
            left_ns = expires_ns - self._clock_ns()
            if expires_ns and left_ns <= 0 and not was_sent:
                return None
            if expires_ns:
                expiry = _EXPIRY + U32.pack(max(0, -(-left_ns // _S)))
        return expiry + match.identifiers + message.block

    def _send(self, flags: int, message: Message, packet_id: int, properties: bytes | None, body: bytes) -> bool:
        head = self._head(flags, message, packet_id, properties, len(body))
        if head is None:
            self.dropped += 1
            return False
        self._client.send(head, body)
        return True

    def _head(
        self,
        flags: int,
        message: Message,
        packet_id: int,
        properties: bytes | None,
        body_bytes: int,
        *,
        has_alias: bool = True,
    ) -> bytes | None:
        """Encode a PUBLISH up to its payload; None if it is too large for the client."""
        topic = message.topic_raw
        new_alias = b""
        if properties is not None and has_alias and self._client.topic_aliases_max:
            alias = self._aliases.get(topic)
            if alias is not None:
                properties = alias + properties
                topic = _NO_TOPIC
            elif len(self._aliases) < self._client.topic_aliases_max and len(topic) <= ALIASED_BYTES_MAX:
                new_alias = _ALIAS + U16.pack(len(self._aliases) + 1)
                properties = new_alias + properties
        head = publish_head(flags, topic, packet_id, properties, body_bytes)
        if len(head) + body_bytes > self._client.packet_bytes_max:
            return None
        if new_alias:
            self._aliases[topic] = new_alias
        return head

    def _drop(self, source: Source, delivery: Delivery, packet_id: int) -> None:
        """Discard a message that the client cannot receive."""
        self.dropped += 1
        if packet_id:
            del self._session.flights[packet_id]
            if self._session.is_durable:
                self._rows.append(self._session.no_flight_row(packet_id))
        self._ack(source.queue, delivery)

    def _ack(self, queue: str, delivery: Delivery) -> None:
        self._acks.setdefault((queue, delivery.token), []).append(delivery.id)

    def _forget_returning(self) -> None:
        """Free the identifiers of messages that have expired or were purged: the queue delivers later ones already.

        A client keeps an identifier of QoS 2 until PUBREL. A later message with it would look like a repetition.
        """
        for packet_id in self._returning.values():
            flight = self._session.flights.get(packet_id)
            if flight is not None and flight.qos == 2:
                self._unacknowledged += 1
                self._release(packet_id, flight)
            elif flight is not None:
                del self._session.flights[packet_id]
                if self._session.is_durable:
                    self._rows.append(self._session.no_flight_row(packet_id))
        self._returning = {}

    def acknowledged(self, packet_id: int) -> None:
        """Handle PUBACK. An identifier that is not in use is ignored."""
        flight = self._session.flights.get(packet_id)
        if flight is not None and flight.qos == 1 and flight.token:
            self._settle(flight)
            self._finish(packet_id)

    def received(self, packet_id: int, reason_code: int) -> None:
        """Handle PUBREC: send PUBREL, or end the flight if the client refused the message."""
        flight = self._session.flights.get(packet_id)
        if flight is None or flight.qos != 2 or (flight.state == SENT and not flight.token):
            if reason_code < rc.FAILURE_MIN:
                self._client.send(encode(p.Pubrel(packet_id, rc.PACKET_IDENTIFIER_NOT_FOUND), self._client.version))
            return
        if flight.state == SENT:
            self._settle(flight)
        if reason_code >= rc.FAILURE_MIN:
            self._finish(packet_id)
            return
        self._release(packet_id, flight)

    def _release(self, packet_id: int, flight: Flight) -> None:
        """Send PUBREL. A durable session first writes the new state of the flight and waits for the sync."""
        release = encode(p.Pubrel(packet_id), self._client.version)
        if flight.state == SENT and self._session.is_durable:
            flight.state = RELEASED
            row = self._session.flight_row(packet_id, flight)
            self._flush_acks()
            self._vhost.write_rows(RowChange([row], RowsWritten(self._client, lambda: self._client.send(release))))
            return
        flight.state = RELEASED
        self._client.send(release)

    def completed(self, packet_id: int) -> None:
        """Handle PUBCOMP."""
        flight = self._session.flights.get(packet_id)
        if flight is not None and flight.state == RELEASED:
            self._finish(packet_id)

    def _settle(self, flight: Flight) -> None:
        self._acks.setdefault((flight.queue, flight.token), []).append(flight.message_id)
        flight.token = 0

    def _finish(self, packet_id: int) -> None:
        """Free a packet identifier."""
        del self._session.flights[packet_id]
        if self._session.is_durable:
            self._rows.append(self._session.no_flight_row(packet_id))
        self._unacknowledged -= 1
        self._has_more_room = True

    def flush(self) -> None:
        """Pass acknowledgements to the broker, and send deliveries that waited. Called after the input of a turn."""
        if not (self._acks or self._rows or self._held or self._has_more_room):
            return
        while self._held and self._unacknowledged < self._window:
            self._deliver(*self._held.popleft())
        has_changed = self._has_more_room or bool(self._acks)
        self._flush_acks()
        if self._rows:
            gathered, self._rows = self._rows, []
            self._vhost.write_rows(RowChange(gathered))
        if has_changed:
            self._has_more_room = False
            self._update_credit()

    def _flush_acks(self) -> None:
        if self._acks:
            acks, self._acks = self._acks, {}
            self._vhost.settle([Settlement(queue, token, ids, ACK) for (queue, token), ids in acks.items()])

    def _room(self) -> int:
        return max(0, self._window - self._unacknowledged - len(self._held))

    def _update_credit(self) -> None:
        room = self._room()
        for consumer in self._sources:
            if consumer.credit_left != room:
                consumer.limit(room)

    def pause(self) -> None:
        """Stop deliveries while the client does not read."""
        for consumer in self._sources:
            consumer.pause()

    def resume_reading(self) -> None:
        for consumer in self._sources:
            consumer.resume()

    def stop(self) -> None:
        """Return the messages that are not acknowledged to their places. Flights keep their packet identifiers.

        Messages of shared subscriptions go to other members, so their flights end.
        """
        self.flush()
        own = {source.queue for source in self._sources.values() if source.match is None}
        for consumer, source in self._sources.items():
            consumer.cancel()
            if source.match is None:
                consumer.queue.direct = None
        self._sources = {}
        leases: dict[tuple[str, int], list[bytes]] = {}
        for source, delivery in self._held:
            leases.setdefault((source.queue, delivery.token), []).append(delivery.id)
        self._held.clear()
        for packet_id, flight in list(self._session.flights.items()):
            if flight.token:
                leases.setdefault((flight.queue, flight.token), []).append(flight.message_id)
                flight.token = 0
            if flight.state == SENT and flight.queue not in own and flight.queue != self._session.queue:
                del self._session.flights[packet_id]
                if self._session.is_durable:
                    self._rows.append(self._session.no_flight_row(packet_id))
        if self._rows:
            self._vhost.write_rows(RowChange(self._rows))
            self._rows = []
        # Not deferred: the client may reconnect in the next turn and expects these messages before later ones.
        self._vhost.settle([Settlement(queue, token, ids, REQUEUE) for (queue, token), ids in leases.items()])

    @property
    def unacknowledged(self) -> int:
        return self._unacknowledged


def _encoded(
    messages: Sequence[tuple[bytes, bytes]], decoded: Decoded, match: Match | None, bytes_max: int, *, is_v5: bool
) -> tuple[bytes, int, int]:
    """Return the packets of messages with QoS 0, their number, and the number of those that are too large."""
    if match is None:
        return b"", 0, 0
    parts: list[bytes] = []
    dropped = 0
    for envelope, body in messages:
        message = decoded.get(envelope)
        flags = RETAIN if message.retain and match.retain_as_published else 0
        properties = match.identifiers + message.block if is_v5 else None
        head = publish_head(flags, message.topic_raw, 0, properties, len(body))
        if len(head) + len(body) > bytes_max:
            dropped += 1
        else:
            parts += (head, body)
    return b"".join(parts), len(messages) - dropped, dropped
