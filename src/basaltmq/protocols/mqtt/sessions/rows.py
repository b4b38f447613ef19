"""Rows of sessions and retained messages in the store. `store/keys/mqtt.py` defines their keys.

    value   | layout u8 | MessagePack array |

A session with an expiry above 0 is durable. Its rows change in the same batches as its messages:

- session: written when it is created and when its expiry or its user changes.
- connection: exists while a client is connected to a durable session, or has a will. A row that is found when the
  virtual host opens belongs to a connection that a crash ended.
- pending will: the will of a lost connection, until its delay is over.
- subscription: one per topic filter.
- inbound packet: a QoS 2 message that was received, until PUBREL.
- outbound packet: a message that was sent with QoS 1 or 2, until PUBACK or PUBCOMP.
- due: when a session expires or a pending will is published.
- group member: a session with a shared subscription.
- rule: copies messages of a topic filter to a stream (`rules.py`).
"""

from __future__ import annotations

from typing import Any, Final, TypeVar

import msgspec

from basaltmq.broker.message.operations import Row
from basaltmq.decoding import msgpack_decoder
from basaltmq.errors import CorruptionError
from basaltmq.store.api import Reader
from basaltmq.store.families import Family
from basaltmq.store.keys import mqtt as keys
from basaltmq.store.keys.parts import prefix_range

LAYOUT: Final = 1

EXPIRES: Final = b"e"
WILL_DUE: Final = b"w"
"""Kinds of due rows."""

SENT: Final = 1
RELEASED: Final = 2
"""States of an outbound packet: PUBLISH sent, PUBREL sent."""


class SessionRow(msgspec.Struct, array_like=True, gc=False):
    """A durable session."""

    expiry_s: int
    user: str
    created_ms: int
    due_ns: int = 0
    """When the session expires; 0 while a client is connected."""


class WillRow(msgspec.Struct, array_like=True, gc=False):
    """A will, with the broker's properties."""

    topic: str
    payload: bytes
    properties: bytes
    qos: int
    retain: bool
    delay_s: int
    user: str
    due_ns: int = 0
    """When it is published; 0 while the client is connected."""


class ConnectionRow(msgspec.Struct, array_like=True, gc=False):
    """A connected client with a durable session or a will."""

    expiry_s: int
    will: WillRow | None = None


class Subscription(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """Options of a subscription."""

    qos: int
    no_local: bool = False
    retain_as_published: bool = False
    identifier: int = 0
    """Subscription identifier; 0 if there is none."""


class OutboundRow(msgspec.Struct, array_like=True, gc=False):
    """A message that the client has not acknowledged completely."""

    state: int
    qos: int
    queue: str
    message_id: bytes


class RuleRow(msgspec.Struct, array_like=True, gc=False):
    """A rule that copies messages to a stream."""

    filter: str
    topic: str
    key: str


class RetainedRow(msgspec.Struct, array_like=True, gc=False):
    """A retained message, with the broker's properties."""

    payload: bytes
    properties: bytes
    stored_ns: int
    expires_ns: int = 0
    """0: never."""


R = TypeVar("R")
_ENCODE: Final = msgspec.msgpack.Encoder().encode
_DECODERS: Final[dict[type[Any], Any]] = {
    kind: msgpack_decoder(kind)
    for kind in (SessionRow, WillRow, ConnectionRow, Subscription, OutboundRow, RetainedRow, RuleRow)
}
_PREFIX: Final = bytes((LAYOUT,))


def encode(row: msgspec.Struct) -> bytes:
    return _PREFIX + _ENCODE(row)


def decode(kind: type[R], raw: bytes) -> R:
    try:
        if raw[:1] != _PREFIX:
            raise ValueError
        found: R = _DECODERS[kind](memoryview(raw)[1:])
    except (ValueError, msgspec.MsgspecError):
        raise CorruptionError(f"a {kind.__name__} of {len(raw)} bytes is damaged") from None
    return found


def put(key: bytes, row: msgspec.Struct) -> Row:
    return Family.MQTT_SESSIONS, key, encode(row)


def mark(key: bytes) -> Row:
    """Return a row without a value."""
    return Family.MQTT_SESSIONS, key, b""


def delete(key: bytes) -> Row:
    return Family.MQTT_SESSIONS, key, None


def find(store: Reader, kind: type[R], key: bytes) -> R | None:
    raw = store.get(Family.MQTT_SESSIONS, key)
    return None if raw is None else decode(kind, raw)


def all_of(store: Reader, client_id: str) -> list[Row]:
    """Return the deletion of every row of a session except its due rows and group memberships."""
    found = [delete(keys.client_key(kind, client_id)) for kind in (keys.SESSION, keys.CONNECTION, keys.WILL)]
    for kind in (keys.SUBSCRIPTION, keys.INBOUND, keys.OUTBOUND):
        start, end = prefix_range(keys.client_prefix(kind, client_id))
        found += [delete(key) for key, _ in store.scan(Family.MQTT_SESSIONS, start, end)]
    return found
