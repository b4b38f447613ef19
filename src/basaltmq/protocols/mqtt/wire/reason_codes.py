"""Reason codes of MQTT 5.0 (section 2.4), and the return codes of MQTT 3.1 and 3.1.1.

A code below 0x80 is a success. A code of 0x80 or above is a failure. One value may have several names: 0x00 is
"Success", "Normal disconnection" and "Granted QoS 0".

MQTT 3.x has reason codes in CONNACK (0 to 5) and SUBACK (0, 1, 2, 0x80) only. `connack_3` and `suback_3` map the codes
of MQTT 5.0 to them.
"""

from __future__ import annotations

from typing import Final

SUCCESS: Final = 0x00
NORMAL_DISCONNECTION: Final = 0x00
GRANTED_QOS_0: Final = 0x00
GRANTED_QOS_1: Final = 0x01
GRANTED_QOS_2: Final = 0x02
DISCONNECT_WITH_WILL: Final = 0x04
NO_MATCHING_SUBSCRIBERS: Final = 0x10
NO_SUBSCRIPTION_EXISTED: Final = 0x11
CONTINUE_AUTHENTICATION: Final = 0x18
REAUTHENTICATE: Final = 0x19
UNSPECIFIED_ERROR: Final = 0x80
MALFORMED_PACKET: Final = 0x81
PROTOCOL_ERROR: Final = 0x82
IMPLEMENTATION_SPECIFIC_ERROR: Final = 0x83
UNSUPPORTED_PROTOCOL_VERSION: Final = 0x84
CLIENT_IDENTIFIER_NOT_VALID: Final = 0x85
BAD_USER_NAME_OR_PASSWORD: Final = 0x86
NOT_AUTHORIZED: Final = 0x87
SERVER_UNAVAILABLE: Final = 0x88
SERVER_BUSY: Final = 0x89
BANNED: Final = 0x8A
SERVER_SHUTTING_DOWN: Final = 0x8B
BAD_AUTHENTICATION_METHOD: Final = 0x8C
KEEP_ALIVE_TIMEOUT: Final = 0x8D
SESSION_TAKEN_OVER: Final = 0x8E
TOPIC_FILTER_INVALID: Final = 0x8F
TOPIC_NAME_INVALID: Final = 0x90
PACKET_IDENTIFIER_IN_USE: Final = 0x91
PACKET_IDENTIFIER_NOT_FOUND: Final = 0x92
RECEIVE_MAXIMUM_EXCEEDED: Final = 0x93
TOPIC_ALIAS_INVALID: Final = 0x94
PACKET_TOO_LARGE: Final = 0x95
MESSAGE_RATE_TOO_HIGH: Final = 0x96
QUOTA_EXCEEDED: Final = 0x97
ADMINISTRATIVE_ACTION: Final = 0x98
PAYLOAD_FORMAT_INVALID: Final = 0x99
RETAIN_NOT_SUPPORTED: Final = 0x9A
QOS_NOT_SUPPORTED: Final = 0x9B
USE_ANOTHER_SERVER: Final = 0x9C
SERVER_MOVED: Final = 0x9D
SHARED_SUBSCRIPTIONS_NOT_SUPPORTED: Final = 0x9E
CONNECTION_RATE_EXCEEDED: Final = 0x9F
MAXIMUM_CONNECT_TIME: Final = 0xA0
SUBSCRIPTION_IDENTIFIERS_NOT_SUPPORTED: Final = 0xA1
WILDCARD_SUBSCRIPTIONS_NOT_SUPPORTED: Final = 0xA2

FAILURE_MIN: Final = 0x80
"""The lowest code of a failure."""

NAMES: Final = {
    SUCCESS: "Success",
    GRANTED_QOS_1: "Granted QoS 1",
    GRANTED_QOS_2: "Granted QoS 2",
    DISCONNECT_WITH_WILL: "Disconnect with Will Message",
    NO_MATCHING_SUBSCRIBERS: "No matching subscribers",
    NO_SUBSCRIPTION_EXISTED: "No subscription existed",
    CONTINUE_AUTHENTICATION: "Continue authentication",
    REAUTHENTICATE: "Re-authenticate",
    UNSPECIFIED_ERROR: "Unspecified error",
    MALFORMED_PACKET: "Malformed Packet",
    PROTOCOL_ERROR: "Protocol Error",
    IMPLEMENTATION_SPECIFIC_ERROR: "Implementation specific error",
    UNSUPPORTED_PROTOCOL_VERSION: "Unsupported Protocol Version",
    CLIENT_IDENTIFIER_NOT_VALID: "Client Identifier not valid",
    BAD_USER_NAME_OR_PASSWORD: "Bad User Name or Password",
    NOT_AUTHORIZED: "Not authorized",
    SERVER_UNAVAILABLE: "Server unavailable",
    SERVER_BUSY: "Server busy",
    BANNED: "Banned",
    SERVER_SHUTTING_DOWN: "Server shutting down",
    BAD_AUTHENTICATION_METHOD: "Bad authentication method",
    KEEP_ALIVE_TIMEOUT: "Keep Alive timeout",
    SESSION_TAKEN_OVER: "Session taken over",
    TOPIC_FILTER_INVALID: "Topic Filter invalid",
    TOPIC_NAME_INVALID: "Topic Name invalid",
    PACKET_IDENTIFIER_IN_USE: "Packet Identifier in use",
    PACKET_IDENTIFIER_NOT_FOUND: "Packet Identifier not found",
    RECEIVE_MAXIMUM_EXCEEDED: "Receive Maximum exceeded",
    TOPIC_ALIAS_INVALID: "Topic Alias invalid",
    PACKET_TOO_LARGE: "Packet too large",
    MESSAGE_RATE_TOO_HIGH: "Message rate too high",
    QUOTA_EXCEEDED: "Quota exceeded",
    ADMINISTRATIVE_ACTION: "Administrative action",
    PAYLOAD_FORMAT_INVALID: "Payload format invalid",
    RETAIN_NOT_SUPPORTED: "Retain not supported",
    QOS_NOT_SUPPORTED: "QoS not supported",
    USE_ANOTHER_SERVER: "Use another server",
    SERVER_MOVED: "Server moved",
    SHARED_SUBSCRIPTIONS_NOT_SUPPORTED: "Shared Subscriptions not supported",
    CONNECTION_RATE_EXCEEDED: "Connection rate exceeded",
    MAXIMUM_CONNECT_TIME: "Maximum connect time",
    SUBSCRIPTION_IDENTIFIERS_NOT_SUPPORTED: "Subscription Identifiers not supported",
    WILDCARD_SUBSCRIPTIONS_NOT_SUPPORTED: "Wildcard Subscriptions not supported",
}

_CONNECT_FAILURES: Final = frozenset({*range(0x80, 0x8B), 0x8C, 0x90, 0x95, 0x97, 0x99, 0x9A, 0x9B, 0x9C, 0x9D, 0x9F})
CONNACK: Final = frozenset({SUCCESS}) | _CONNECT_FAILURES
PUBACK: Final = frozenset({0x00, 0x10, 0x80, 0x83, 0x87, 0x90, 0x91, 0x97, 0x99})
PUBREC: Final = PUBACK
PUBREL: Final = frozenset({SUCCESS, PACKET_IDENTIFIER_NOT_FOUND})
PUBCOMP: Final = PUBREL
SUBACK: Final = frozenset({0x00, 0x01, 0x02, 0x80, 0x83, 0x87, 0x8F, 0x91, 0x97, 0x9E, 0xA1, 0xA2})
UNSUBACK: Final = frozenset({0x00, 0x11, 0x80, 0x83, 0x87, 0x8F, 0x91})
DISCONNECT_BY_CLIENT: Final = frozenset(
    {0x00, 0x04, 0x80, 0x81, 0x82, 0x83, 0x90, 0x93, 0x94, 0x95, 0x96, 0x97, 0x98, 0x99}
)
DISCONNECT_BY_SERVER: Final = frozenset(
    {0x00, 0x80, 0x81, 0x82, 0x83, 0x87, 0x89, 0x8B, 0x8D, 0x8E, 0x8F, 0x90, *range(0x93, 0xA3)}
)
AUTH: Final = frozenset({SUCCESS, CONTINUE_AUTHENTICATION, REAUTHENTICATE})
AUTH_BY_CLIENT: Final = frozenset({CONTINUE_AUTHENTICATION, REAUTHENTICATE})

REFUSED_VERSION_3: Final = 1
REFUSED_CLIENT_ID_3: Final = 2
REFUSED_UNAVAILABLE_3: Final = 3
REFUSED_LOGIN_3: Final = 4
REFUSED_NOT_AUTHORIZED_3: Final = 5

_CONNACK_3: Final = {
    SUCCESS: 0,
    UNSUPPORTED_PROTOCOL_VERSION: REFUSED_VERSION_3,
    CLIENT_IDENTIFIER_NOT_VALID: REFUSED_CLIENT_ID_3,
    BAD_USER_NAME_OR_PASSWORD: REFUSED_LOGIN_3,
    BAD_AUTHENTICATION_METHOD: REFUSED_LOGIN_3,
    NOT_AUTHORIZED: REFUSED_NOT_AUTHORIZED_3,
    BANNED: REFUSED_NOT_AUTHORIZED_3,
}


def connack_3(reason_code: int) -> int:
    """Return the CONNACK return code of MQTT 3.x. Codes without an equivalent are "Server unavailable"."""
    return _CONNACK_3.get(reason_code, REFUSED_UNAVAILABLE_3)


def suback_3(reason_code: int) -> int:
    """Return the SUBACK return code of MQTT 3.1.1: a granted QoS or 0x80."""
    return reason_code if reason_code < FAILURE_MIN else UNSPECIFIED_ERROR


def name(reason_code: int) -> str:
    """Return "0x82 Protocol Error"."""
    return f"0x{reason_code:02X} {NAMES.get(reason_code, 'unknown')}"
