"""A stored message as filters see it: header, properties and application properties of AMQP 1.0, decoded on demand.

Names in selectors, besides those of application properties:

    JMSMessageID, JMSCorrelationID, JMSType, JMSPriority, JMSDeliveryMode, JMSTimestamp, JMSExpiration, JMSReplyTo,
    JMSDestination, JMSRedelivered, JMSXGroupID, JMSXGroupSeq, JMSXUserID, JMSXDeliveryCount
    amqp.message_id, properties.message-id, p.message_id ...     a property
    header.priority, h.durable ...                               a field of the header
    a.name, application_properties.name                          an application property

The type of a message in JMS is the property `subject`, as Qpid JMS sends it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Final
from uuid import UUID

from basaltmq.broker.message import properties
from basaltmq.broker.message.properties import BARE_HEADER, PERSISTENT
from basaltmq.broker.message.text_headers import envelope_of
from basaltmq.protocols.amqp10.message import kept_sections
from basaltmq.protocols.amqp10.wire import sections as s
from basaltmq.protocols.amqp10.wire import types as t
from basaltmq.queues.leases.delivery import Delivery

PRIORITY_DEFAULT: Final = 4
"""Priority of a message without one."""

_PROPERTY: Final = {name: number for number, name in enumerate(s.PROPERTY_NAMES)}
_PROPERTY_PREFIXES: Final = ("amqp.", "properties.", "p.")
_HEADER_PREFIXES: Final = ("header.", "h.")
_APPLICATION_PREFIXES: Final = ("application_properties.", "a.")
_PLAIN: Final = (bool, int, float, str)


class MessageView:
    """One message."""

    __slots__ = ("_applied", "_attempts", "_found", "_is_redelivered", "_properties")

    def __init__(self, delivery: Any) -> None:
        envelope = delivery.properties
        self._attempts = 0
        self._is_redelivered = delivery.redelivered
        if type(delivery) is Delivery:
            self._attempts = delivery.attempts
            envelope = envelope or envelope_of(delivery.headers)
        self._found = properties.parse(properties.decode_envelope(envelope)[2])
        self._properties: list[Any] | None = None
        self._applied: Mapping[str, Any] | None = None

    def property(self, name: str) -> Any:
        """Return a property by its name in the specification, such as `message-id`; None if there is none."""
        if self._properties is None:
            self._read()
        assert self._properties is not None, "the properties are read"
        number = _PROPERTY.get(name)
        return None if number is None else self._properties[number]

    def application_property(self, name: str) -> Any:
        if self._applied is None:
            self._read()
        assert self._applied is not None, "the application properties are read"
        return self._applied.get(name)

    def has_application_property(self, name: str) -> bool:
        self.application_property(name)
        return self._applied is not None and name in self._applied

    def header(self, name: str) -> Any:
        found = self._found
        if name == "durable":
            return found.delivery_mode == PERSISTENT
        if name == "priority":
            return PRIORITY_DEFAULT if found.priority is None else found.priority
        if name == "ttl":
            return int(found.expiration) if found.expiration is not None and found.expiration.isdigit() else None
        if name == "first-acquirer":
            return not self._is_redelivered
        return self._attempts if name == "delivery-count" else None

    def annotation(self, name: str) -> Any:
        """Return a message annotation that has become a header."""
        return None if self._found.headers_raw is None else self._found.headers.get(name)

    def _read(self) -> None:
        found = self._found
        headers: Mapping[str, Any] = {} if found.headers_raw is None else found.headers
        self._properties = [None] * len(s.PROPERTY_NAMES)
        kept = kept_sections(headers.get(BARE_HEADER))
        if kept is not None:
            self._applied = {}
            for kind, _, at, end in s.walk(kept.before, 0, len(kept.before)):
                value = t.decode(kept.before, at, end)[0]
                if kind == s.PROPERTIES:
                    self._properties[: len(value)] = value
                elif kind == s.APPLICATION_PROPERTIES:
                    self._applied = value
            return
        self._applied = {
            name: value
            for name, value in headers.items()
            if name != BARE_HEADER and not (name.startswith("x-") and name.isascii())
        }
        for name, value in (
            ("message-id", found.message_id),
            ("user-id", found.user_id),
            ("reply-to", found.reply_to),
            ("correlation-id", found.correlation_id),
            ("content-type", found.content_type),
            ("content-encoding", found.content_encoding),
            ("creation-time", None if found.timestamp is None else found.timestamp * 1000),
            ("group-id", found.app_id),
        ):
            self._properties[_PROPERTY[name]] = value

    def look_up(self, name: str) -> Any:
        """Return the value of an identifier in a selector; None if it is missing or has a type that selectors lack."""
        special = _JMS.get(name)
        if special is not None:
            return special(self)
        if "." in name:
            for prefixes, read in _PREFIXES:
                for prefix in prefixes:
                    if name.startswith(prefix):
                        return _plain(read(self, name[len(prefix) :]))
        return _plain(self.application_property(name))


def _plain(value: Any) -> Any:
    if isinstance(value, bytes):
        return value.decode(errors="replace") if type(value) is bytes else None
    return value if isinstance(value, _PLAIN) else str(value) if isinstance(value, UUID) else None


_PREFIXES: Final[tuple[tuple[tuple[str, ...], Callable[[MessageView, str], Any]], ...]] = (
    (_APPLICATION_PREFIXES, MessageView.application_property),
    (_PROPERTY_PREFIXES, lambda view, name: view.property(name.replace("_", "-"))),
    (_HEADER_PREFIXES, lambda view, name: view.header(name.replace("_", "-"))),
)


def _identifier(value: Any, *, is_message: bool) -> str | None:
    """Return a message id or correlation id as clients of JMS show it."""
    if isinstance(value, str):
        return value if not is_message or value.startswith("ID:") else f"ID:AMQP_NO_PREFIX:{value}"
    if isinstance(value, UUID):
        return f"ID:AMQP_UUID:{value}"
    if isinstance(value, bytes):
        return f"ID:AMQP_BINARY:{value.hex().upper()}"
    return f"ID:AMQP_ULONG:{value}" if isinstance(value, int) else None


_JMS: Final[dict[str, Callable[[MessageView], Any]]] = {
    "JMSMessageID": lambda view: _identifier(view.property("message-id"), is_message=True),
    "JMSCorrelationID": lambda view: _identifier(view.property("correlation-id"), is_message=False),
    "JMSType": lambda view: view.property("subject"),
    "JMSPriority": lambda view: view.header("priority"),
    "JMSDeliveryMode": lambda view: "PERSISTENT" if view.header("durable") else "NON_PERSISTENT",
    "JMSTimestamp": lambda view: view.property("creation-time"),
    "JMSExpiration": lambda view: view.property("absolute-expiry-time") or 0,
    "JMSReplyTo": lambda view: view.property("reply-to"),
    "JMSDestination": lambda view: view.property("to"),
    "JMSRedelivered": lambda view: not view.header("first-acquirer"),
    "JMSXGroupID": lambda view: view.property("group-id"),
    "JMSXGroupSeq": lambda view: view.property("group-sequence"),
    "JMSXUserID": lambda view: _plain(view.property("user-id")),
    "JMSXDeliveryCount": lambda view: view.header("delivery-count") + 1,
}
