"""Conversion between MQTT messages and the broker's messages, which have an exchange, a routing key and properties.

    MQTT                       broker
    topic                      routing key of the topic exchange (`wire/topics.py`)
    QoS 0, 1, 2                delivery mode 1, 2, 2; QoS 2 also has the header x-mqtt-publish-qos
    retain                     header x-mqtt-retain
    message expiry             expiration
    content type               content-type                        (up to 255 bytes)
    response topic             reply-to, as a routing key          (up to 255 bytes)
    correlation data           correlation-id, if it is text       (up to 255 bytes)
    user properties            headers, the first value of a name
    all properties             header x-mqtt-properties, encoded as on the wire
    topic                      header x-mqtt-topic, only if its routing key has more than 255 bytes

Subscribers of MQTT 5.0 get the properties from x-mqtt-properties, so they are unchanged: names may repeat, and their
order is kept. A message without that header was published by another protocol. Its properties are converted back, with
text headers as user properties.

A publish without properties costs no encoding: its broker properties are one of two constants.
"""

from __future__ import annotations

from typing import Any, Final, NamedTuple

from basaltmq.broker.message import properties as amqp
from basaltmq.broker.message.amqp_table import NAME_BYTES_MAX, Table
from basaltmq.protocols.mqtt.wire import topics
from basaltmq.protocols.mqtt.wire.packets import Publish, Will
from basaltmq.protocols.mqtt.wire.properties import NO_PROPERTIES, Properties, property_block

QOS_HEADER: Final = "x-mqtt-publish-qos"
RETAIN_HEADER: Final = "x-mqtt-retain"
CLIENT_HEADER: Final = "x-mqtt-client-id"
PROPERTIES_HEADER: Final = "x-mqtt-properties"
TOPIC_HEADER: Final = "x-mqtt-topic"
"""Headers of the broker's message. Clients of other protocols see them."""

RETAINED_COPY: Final = "mqtt.retained"
"""Exchange in the envelope of a retained message that a subscription requested."""

DECODED_MAX: Final = 4096
"""Cached envelopes of a virtual host. A full cache is emptied."""

DECODED_BYTES_MAX: Final = 1024
"""Longer envelopes are not cached."""

_MODE: Final = (b"\x10\0\1", b"\x10\0\2")
"""Broker properties with a delivery mode only."""


class Message(NamedTuple):
    """A message for MQTT subscribers."""

    topic: str
    topic_raw: bytes
    """The topic with its length, as on the wire."""
    qos: int
    retain: bool
    """The retain flag of the publish."""
    is_retained_copy: bool
    """Sent because of a subscription, not because of a publish."""
    client_id: str
    """The publisher; only set if it must not receive its own message."""
    block: bytes
    """Properties of MQTT 5.0, encoded without length, expiry, topic alias and subscription identifiers."""
    expires: bool
    """Whether the publish had an expiry."""


def to_properties(publish: Publish | Will, topic: str, key: str, client_id: str = "") -> bytes:
    """Return the broker's properties of a publish to a topic with this routing key.

    `client_id` is set if the publisher excludes its own messages.
    """
    given, qos, retain = publish.properties, publish.qos, publish.retain
    is_long = len(key) > amqp.SHORT_BYTES_MAX >> 2 and amqp.short_key(key) is not key
    if given is NO_PROPERTIES and qos < 2 and not retain and not client_id and not is_long:
        return _MODE[qos]
    headers: Table = {}
    made = amqp.Properties(delivery_mode=2 if qos else 1)
    if given is not NO_PROPERTIES:
        _convert(given, made, headers)
    if qos == 2:
        headers[QOS_HEADER] = 2
    if retain:
        headers[RETAIN_HEADER] = True
    if client_id:
        headers[CLIENT_HEADER] = client_id
    if is_long:
        headers[TOPIC_HEADER] = topic.encode()
    if headers:
        made.set_headers(headers)
    return amqp.encode(made)


def _convert(given: Properties, made: amqp.Properties, headers: Table) -> None:
    for name, value in given.user:
        if len(name.encode()) <= NAME_BYTES_MAX:
            headers.setdefault(name, value)
    for name in ("CC", "BCC"):
        # These headers of AMQP add routes. A user property must not.
        headers.pop(name, None)
    made.content_type = _short(given.content_type)
    if given.response_topic is not None:
        made.reply_to = _short(topics.routing_key(given.response_topic))
    if given.correlation_data is not None:
        made.correlation_id = _short_text(given.correlation_data)
    if given.message_expiry_s is not None:
        made.expiration = str(min(given.message_expiry_s * 1000, amqp.EXPIRATION_MS_MAX))
    block = property_block(
        Properties(
            payload_format=given.payload_format,
            content_type=given.content_type,
            response_topic=given.response_topic,
            correlation_data=given.correlation_data,
            user=given.user,
        )
    )
    if block:
        headers[PROPERTIES_HEADER] = block


def _short(text: str | None) -> str | None:
    return text if text is not None and len(text.encode()) <= 0xFF else None


def _short_text(raw: bytes) -> str | None:
    try:
        return raw.decode() if len(raw) <= 0xFF else None
    except UnicodeDecodeError:
        return None


class Decoded:
    """Decodes envelopes of the broker's messages, with a cache, because adjacent messages often have equal
    envelopes."""

    __slots__ = ("_known",)

    def __init__(self) -> None:
        self._known: dict[bytes, Message] = {}

    def get(self, envelope: bytes) -> Message:
        found = self._known.get(envelope)
        if found is None:
            found = decode(envelope)
            if len(envelope) <= DECODED_BYTES_MAX:
                if len(self._known) >= DECODED_MAX:
                    self._known.clear()
                self._known[envelope] = found
        return found


def decode(envelope: bytes) -> Message:
    """Return the MQTT message of an envelope."""
    exchange, key, raw = amqp.decode_envelope(envelope)
    topic = topics.topic_of(key.encode(errors="surrogateescape").decode(errors="replace"))
    qos, retain, client_id, block = 0, False, "", b""
    expires = False
    if raw in _MODE:
        qos = _MODE.index(raw)
    else:
        found = amqp.parse(raw)
        qos = 1 if found.delivery_mode == amqp.PERSISTENT else 0
        expires = found.expiration is not None
        headers = found.headers
        if headers.get(QOS_HEADER) == 2:
            qos = 2
        retain = headers.get(RETAIN_HEADER) is True
        named = headers.get(CLIENT_HEADER)
        client_id = named if isinstance(named, str) else ""
        topic = _long_topic(headers.get(TOPIC_HEADER), key) or topic
        stored = headers.get(PROPERTIES_HEADER)
        block = stored if isinstance(stored, bytes) else property_block(_properties_of(found, headers))
    topic_utf8 = topic.encode()
    return Message(
        topic,
        len(topic_utf8).to_bytes(2, "big") + topic_utf8,
        qos,
        retain,
        exchange == RETAINED_COPY,
        client_id,
        block,
        expires,
    )


def _long_topic(stored: object, key: str) -> str | None:
    """Return the topic whose routing key was cut, unless an AMQP publisher made the header up."""
    try:
        topic = stored.decode() if isinstance(stored, bytes) else None
    except UnicodeDecodeError:
        return None
    return topic if topic is not None and amqp.short_key(topics.routing_key(topic)) == key else None


def _properties_of(found: amqp.Properties, headers: Table) -> Properties:
    """Convert the properties of a message that another protocol published."""
    fields: dict[str, Any] = {}
    content_type = _clean(found.content_type)
    if content_type is not None:
        fields["content_type"] = content_type
    if found.correlation_id is not None:
        fields["correlation_data"] = found.correlation_id.encode(errors="surrogateescape")
    reply_to = _clean(found.reply_to)
    if reply_to:
        fields["response_topic"] = topics.topic_of(reply_to)
    user = [
        (name, value) for name, value in headers.items() if isinstance(value, str) and not name.startswith("x-mqtt-")
    ]
    if user:
        fields["user"] = tuple((name, value) for name, value in user if _clean(name + value) is not None)
    return Properties(**fields)


def _clean(text: str | None) -> str | None:
    """Return text that MQTT can carry; None if it is not Unicode or contains U+0000."""
    if text is None or "\0" in text:
        return None
    try:
        text.encode()
    except UnicodeEncodeError:
        return None
    return text


def retained_envelope(topic: str, properties: bytes) -> bytes:
    """Return the envelope of a retained message for a session's queue."""
    return amqp.encode_envelope(RETAINED_COPY, amqp.short_key(topics.routing_key(topic)), properties)
