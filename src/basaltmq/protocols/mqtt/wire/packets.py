"""Control packets of MQTT 3.1, 3.1.1 and 5.0 as plain values.

One class per packet type, with the fields of MQTT 5.0. Fields that an older version does not have keep their defaults.
The classes hold no references to other packets, so the garbage collector need not track them.
"""

from __future__ import annotations

from typing import Final, TypeAlias

from msgspec import Struct

from basaltmq.protocols.mqtt.wire.properties import NO_PROPERTIES, Properties

V31: Final = 3
V311: Final = 4
V5: Final = 5

PACKET_ID_MAX: Final = 65_535
PACKET_BYTES_MAX: Final = 268_435_460
"""Largest packet of the standard: a remaining length of 268,435,455 and a fixed header of 5 bytes."""

CONNECT: Final = 1
CONNACK: Final = 2
PUBLISH: Final = 3
PUBACK: Final = 4
PUBREC: Final = 5
PUBREL: Final = 6
PUBCOMP: Final = 7
SUBSCRIBE: Final = 8
SUBACK: Final = 9
UNSUBSCRIBE: Final = 10
UNSUBACK: Final = 11
PINGREQ: Final = 12
PINGRESP: Final = 13
DISCONNECT: Final = 14
AUTH: Final = 15


class Will(Struct, frozen=True, gc=False):
    """Message that the server publishes when the session ends abnormally."""

    topic: str
    payload: bytes
    qos: int = 0
    retain: bool = False
    properties: Properties = NO_PROPERTIES


class Connect(Struct, frozen=True, gc=False):
    """First packet of a client."""

    client_id: str
    version: int = V5
    """3 (MQTT 3.1), 4 (MQTT 3.1.1) or 5, without the bridge bit."""
    clean_start: bool = True
    keep_alive_s: int = 0
    will: Will | None = None
    username: str | None = None
    password: bytes | None = None
    properties: Properties = NO_PROPERTIES
    is_bridge: bool = False
    """Whether the client set bit 0x80 of the protocol level. Bridges of mosquitto do so with MQTT 3.x."""


class Connack(Struct, frozen=True, gc=False):
    """Response to CONNECT. `reason_code` is one of MQTT 5.0; the encoder maps it for older versions."""

    session_present: bool = False
    reason_code: int = 0
    properties: Properties = NO_PROPERTIES


class Publish(Struct, frozen=True, gc=False):
    """Application message."""

    topic: str
    """Empty if the packet has a topic alias instead (MQTT 5.0 only)."""
    payload: bytes
    qos: int = 0
    retain: bool = False
    dup: bool = False
    packet_id: int = 0
    """0 with QoS 0, which has no packet identifier."""
    properties: Properties = NO_PROPERTIES


class Acknowledgement(Struct, frozen=True, gc=False):
    """The fields of PUBACK, PUBREC, PUBREL and PUBCOMP."""

    packet_id: int
    reason_code: int = 0
    properties: Properties = NO_PROPERTIES


class Puback(Acknowledgement, frozen=True, gc=False):
    """Acknowledges a PUBLISH of QoS 1."""


class Pubrec(Acknowledgement, frozen=True, gc=False):
    """Acknowledges a PUBLISH of QoS 2."""


class Pubrel(Acknowledgement, frozen=True, gc=False):
    """Releases the packet identifier after PUBREC."""


class Pubcomp(Acknowledgement, frozen=True, gc=False):
    """Acknowledges PUBREL. QoS 2 is complete."""


class Subscription(Struct, frozen=True, gc=False):
    """One topic filter of SUBSCRIBE with its options."""

    filter: str
    qos: int = 0
    no_local: bool = False
    retain_as_published: bool = False
    retain_handling: int = 0
    """0: send retained messages; 1: only for a new subscription; 2: never."""


class Subscribe(Struct, frozen=True, gc=False):
    """Requests subscriptions. `properties.subscription_ids` has at most one entry."""

    packet_id: int
    subscriptions: tuple[Subscription, ...]
    properties: Properties = NO_PROPERTIES


class Suback(Struct, frozen=True, gc=False):
    """Response to SUBSCRIBE: one reason code per topic filter in the same order."""

    packet_id: int
    reason_codes: tuple[int, ...]
    properties: Properties = NO_PROPERTIES


class Unsubscribe(Struct, frozen=True, gc=False):
    """Ends subscriptions."""

    packet_id: int
    filters: tuple[str, ...]
    properties: Properties = NO_PROPERTIES


class Unsuback(Struct, frozen=True, gc=False):
    """Response to UNSUBSCRIBE. Versions before 5.0 have no reason codes."""

    packet_id: int
    reason_codes: tuple[int, ...] = ()
    properties: Properties = NO_PROPERTIES


class Pingreq(Struct, frozen=True, gc=False):
    """Keep alive request."""


class Pingresp(Struct, frozen=True, gc=False):
    """Response to PINGREQ."""


class Disconnect(Struct, frozen=True, gc=False):
    """Last packet of a connection. Only MQTT 5.0 has it in both directions."""

    reason_code: int = 0
    properties: Properties = NO_PROPERTIES


class Auth(Struct, frozen=True, gc=False):
    """Step of an enhanced authentication (MQTT 5.0 only)."""

    reason_code: int = 0
    properties: Properties = NO_PROPERTIES


Packet: TypeAlias = (
    Connect
    | Connack
    | Publish
    | Puback
    | Pubrec
    | Pubrel
    | Pubcomp
    | Subscribe
    | Suback
    | Unsubscribe
    | Unsuback
    | Pingreq
    | Pingresp
    | Disconnect
    | Auth
)
