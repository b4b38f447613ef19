"""Keys of MQTT: sessions and retained messages.

Layouts of `mqtt_sessions`:

    session          | 's' | client id |
    connection       | 'c' | client id |
    pending will     | 'w' | client id |
    subscription     | 'f' | lp(client id) | topic filter |
    inbound packet   | 'i' | lp(client id) | packet id u16 |
    outbound packet  | 'o' | lp(client id) | packet id u16 |
    due              | 'd' | due ns u64 | kind (1) | client id |
    group member     | 'g' | lp(group and filter) | client id |
    rule             | 'r' | rule name |
    rule position    | 'p' | lp(rule name) | shard u64 |

Layout of `mqtt_retained`:

    retained         | topic |
"""

from __future__ import annotations

from struct import Struct
from typing import Final

from basaltmq.store.keys.parts import U64, decode_unprefixed, lp, malformed, take_text, unprefixed

SESSION: Final = b"s"
CONNECTION: Final = b"c"
WILL: Final = b"w"
SUBSCRIPTION: Final = b"f"
INBOUND: Final = b"i"
OUTBOUND: Final = b"o"
DUE: Final = b"d"
MEMBER: Final = b"g"
RULE: Final = b"r"
RULE_POSITION: Final = b"p"

_U16: Final = Struct(">H")


def client_key(kind: bytes, client_id: str) -> bytes:
    """Return the key of a session, a connection, a pending will or, by its name, a rule."""
    return kind + unprefixed(client_id)


def decode_client_key(key: bytes) -> str:
    return decode_unprefixed(key[1:])


def subscription_key(client_id: str, topic_filter: str) -> bytes:
    return SUBSCRIPTION + lp(client_id) + unprefixed(topic_filter)


def packet_key(kind: bytes, client_id: str, packet_id: int) -> bytes:
    """Return the key of an inbound or outbound packet."""
    return kind + lp(client_id) + _U16.pack(packet_id)


def client_prefix(kind: bytes, client_id: str) -> bytes:
    """Return the prefix of all subscriptions or packets of a session."""
    return kind + lp(client_id)


def decode_subscription_key(key: bytes) -> tuple[str, str]:
    if key[:1] != SUBSCRIPTION:
        raise malformed(key)
    client_id, at = take_text(key, 1)
    return client_id, decode_unprefixed(key[at:])


def decode_packet_key(key: bytes) -> tuple[str, int]:
    client_id, at = take_text(key, 1)
    if key[:1] not in (INBOUND, OUTBOUND) or len(key) != at + _U16.size:
        raise malformed(key)
    packet_id: int = _U16.unpack_from(key, at)[0]
    return client_id, packet_id


def due_key(due_ns: int, kind: bytes, client_id: str) -> bytes:
    """`kind` says what is due, in one byte."""
    assert len(kind) == 1, f"the kind of a due row is one byte, not {kind!r}"
    return DUE + U64.pack(due_ns) + kind + unprefixed(client_id)


def decode_due_key(key: bytes) -> tuple[int, bytes, str]:
    if key[:1] != DUE or len(key) < 2 + U64.size:
        raise malformed(key)
    due_ns: int = U64.unpack_from(key, 1)[0]
    return due_ns, key[9:10], decode_unprefixed(key[10:])


def member_key(group: str, client_id: str) -> bytes:
    """`group` is the share name and the topic filter: `name/filter`."""
    return MEMBER + lp(group) + unprefixed(client_id)


def decode_member_key(key: bytes) -> tuple[str, str]:
    if key[:1] != MEMBER:
        raise malformed(key)
    group, at = take_text(key, 1)
    return group, decode_unprefixed(key[at:])


def rule_position_key(rule: str, shard: int) -> bytes:
    return rule_positions_prefix(rule) + U64.pack(shard)


def rule_positions_prefix(rule: str) -> bytes:
    return RULE_POSITION + lp(rule)


def decode_rule_position_key(key: bytes) -> tuple[str, int]:
    if key[:1] != RULE_POSITION:
        raise malformed(key)
    rule, at = take_text(key, 1)
    if len(key) != at + U64.size:
        raise malformed(key)
    shard: int = U64.unpack_from(key, at)[0]
    return rule, shard


def retained_key(topic: str) -> bytes:
    return unprefixed(topic)


def decode_retained_key(key: bytes) -> str:
    return decode_unprefixed(key)
