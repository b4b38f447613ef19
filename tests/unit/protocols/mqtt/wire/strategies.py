"""Random packets that are valid in a protocol version."""

from __future__ import annotations

from typing import Any

from hypothesis import strategies as st

from basaltmq.protocols.mqtt.wire import packets as p
from basaltmq.protocols.mqtt.wire import properties as pr
from basaltmq.protocols.mqtt.wire import reason_codes as rc
from basaltmq.protocols.mqtt.wire.properties import NO_PROPERTIES, Properties

VERSIONS = st.sampled_from([p.V31, p.V311, p.V5])
LETTERS = st.characters(exclude_characters="\0", exclude_categories=["Cs"])
TEXT = st.text(LETTERS, max_size=12)
NAME_CHARACTERS = st.one_of(
    st.sampled_from("/.*%$25EAab"), st.characters(exclude_characters="\0+#", exclude_categories=["Cs"])
)
NAMES = st.text(NAME_CHARACTERS, min_size=1, max_size=12)
PACKET_IDS = st.integers(1, p.PACKET_ID_MAX)
BINARY = st.binary(max_size=20)
U16 = st.integers(0, 65_535)
U32 = st.integers(0, 0xFFFF_FFFF)


@st.composite
def filters(draw: st.DrawFn) -> str:
    levels = draw(
        st.lists(st.one_of(st.just("+"), NAMES.map(lambda name: name.replace("/", ""))), min_size=1, max_size=4)
    )
    if draw(st.booleans()):
        levels.append("#")
    topic_filter = "/".join(levels)
    return topic_filter if topic_filter and not topic_filter.startswith("$share") else "x"


FIELDS: dict[str, st.SearchStrategy[Any]] = {
    "payload_format": st.integers(0, 1),
    "message_expiry_s": U32,
    "content_type": TEXT,
    "response_topic": NAMES,
    "correlation_data": BINARY,
    "subscription_ids": st.lists(st.integers(1, 268_435_455), min_size=1, max_size=3).map(tuple),
    "session_expiry_s": U32,
    "assigned_client_id": TEXT,
    "server_keep_alive_s": U16,
    "authentication_method": TEXT,
    "authentication_data": BINARY,
    "request_problem_information": st.booleans(),
    "will_delay_s": U32,
    "request_response_information": st.booleans(),
    "response_information": TEXT,
    "server_reference": TEXT,
    "reason_string": TEXT,
    "receive_maximum": st.integers(1, 65_535),
    "topic_alias_maximum": U16,
    "topic_alias": st.integers(1, 65_535),
    "maximum_qos": st.integers(0, 1),
    "retain_available": st.booleans(),
    "user": st.lists(st.tuples(TEXT, TEXT), min_size=1, max_size=3).map(tuple),
    "maximum_packet_size": st.integers(1, 0xFFFF_FFFF),
    "wildcard_subscription_available": st.booleans(),
    "subscription_ids_available": st.booleans(),
    "shared_subscription_available": st.booleans(),
}
"""A value of each property."""


@st.composite
def properties(draw: st.DrawFn, packet: int, without: frozenset[str] = frozenset()) -> Properties:
    allowed = [kind.field for kind in pr.TABLE if packet in kind.allowed and kind.field not in without]
    chosen = draw(st.lists(st.sampled_from(allowed), unique=True, max_size=5))
    found = {field: draw(FIELDS[field]) for field in chosen}
    if "authentication_data" in found:
        found.setdefault("authentication_method", "x")
    return Properties(**found) if found else NO_PROPERTIES


@st.composite
def connects(draw: st.DrawFn, version: int) -> p.Connect:
    is_5 = version == p.V5
    will = None
    if draw(st.booleans()):
        given = draw(properties(pr.WILL)) if is_5 else NO_PROPERTIES
        will = p.Will(draw(NAMES), draw(BINARY), draw(st.integers(0, 2)), draw(st.booleans()), given)
    username = draw(st.none() | TEXT)
    return p.Connect(
        draw(st.text(LETTERS, min_size=0 if is_5 else 1, max_size=8)),
        version,
        clean_start=draw(st.booleans()),
        keep_alive_s=draw(U16),
        will=will,
        username=username,
        password=draw(st.none() | BINARY) if is_5 or username is not None else None,
        properties=draw(properties(p.CONNECT)) if is_5 else NO_PROPERTIES,
        is_bridge=not is_5 and draw(st.booleans()),
    )


@st.composite
def publishes(draw: st.DrawFn, version: int, by_server: bool = False) -> p.Publish:
    qos = draw(st.integers(0, 2))
    without = frozenset[str]() if by_server else frozenset({"subscription_ids"})
    given = draw(properties(p.PUBLISH, without)) if version == p.V5 else NO_PROPERTIES
    topic = "" if given.topic_alias is not None and draw(st.booleans()) else draw(NAMES)
    return p.Publish(
        topic,
        draw(BINARY),
        qos,
        draw(st.booleans()),
        bool(qos) and draw(st.booleans()),
        draw(PACKET_IDS) if qos else 0,
        given,
    )


@st.composite
def from_client(draw: st.DrawFn, version: int) -> p.Packet:
    """A packet that a client sends after CONNECT."""
    is_5 = version == p.V5
    kind = draw(st.sampled_from([3, 4, 5, 6, 7, 8, 10, 12, 14, *([15] if is_5 else [])]))
    if kind == p.PUBLISH:
        return draw(publishes(version))
    if kind == p.PINGREQ:
        return p.Pingreq()
    without = frozenset[str]()
    given = draw(properties(kind, without)) if is_5 else NO_PROPERTIES
    packet_id = draw(PACKET_IDS)
    if kind == p.SUBSCRIBE:
        if is_5:
            given = draw(properties(kind, frozenset({"subscription_ids"})))
        return p.Subscribe(packet_id, tuple(draw(st.lists(subscriptions(version), min_size=1, max_size=4))), given)
    if kind == p.UNSUBSCRIBE:
        return p.Unsubscribe(packet_id, tuple(draw(st.lists(filters(), min_size=1, max_size=4))), given)
    if kind == p.DISCONNECT:
        return p.Disconnect(draw(st.sampled_from(sorted(rc.DISCONNECT_BY_CLIENT))) if is_5 else 0, given)
    if kind == p.AUTH:
        known = Properties(authentication_method=draw(TEXT), authentication_data=draw(st.none() | BINARY))
        return p.Auth(draw(st.sampled_from(sorted(rc.AUTH_BY_CLIENT))), known)
    return acknowledgement(kind, packet_id, draw(reasons(kind)) if is_5 else 0, given)


@st.composite
def from_server(draw: st.DrawFn, version: int) -> p.Packet:
    """A packet that a server sends."""
    is_5 = version == p.V5
    kind = draw(st.sampled_from([2, 3, 4, 5, 6, 7, 9, 11, 13, *([14, 15] if is_5 else [])]))
    if kind == p.PUBLISH:
        return draw(publishes(version, by_server=True))
    if kind == p.PINGRESP:
        return p.Pingresp()
    given = draw(properties(kind)) if is_5 else NO_PROPERTIES
    if kind == p.CONNACK:
        code = draw(st.sampled_from(sorted(rc.CONNACK))) if is_5 else 0
        return p.Connack(not code and version != p.V31 and draw(st.booleans()), code, given)
    if kind == p.SUBACK:
        codes = rc.SUBACK if is_5 else frozenset({0, 1, 2, 0x80})
        return p.Suback(draw(PACKET_IDS), tuple(draw(st.lists(st.sampled_from(sorted(codes)), min_size=1))), given)
    if kind == p.UNSUBACK:
        drawn = draw(st.lists(st.sampled_from(sorted(rc.UNSUBACK)), min_size=1)) if is_5 else []
        return p.Unsuback(draw(PACKET_IDS), tuple(drawn), given)
    if kind == p.DISCONNECT:
        return p.Disconnect(draw(st.sampled_from(sorted(rc.DISCONNECT_BY_SERVER))), given)
    if kind == p.AUTH:
        return p.Auth(draw(st.sampled_from(sorted(rc.AUTH))), given)
    return acknowledgement(kind, draw(PACKET_IDS), draw(reasons(kind)) if is_5 else 0, given)


def reasons(kind: int) -> st.SearchStrategy[int]:
    return st.sampled_from(sorted(rc.PUBACK if kind in (p.PUBACK, p.PUBREC) else rc.PUBREL))


def acknowledgement(kind: int, packet_id: int, reason_code: int, given: Properties) -> p.Packet:
    classes: dict[int, type[p.Puback | p.Pubrec | p.Pubrel | p.Pubcomp]]
    classes = {p.PUBACK: p.Puback, p.PUBREC: p.Pubrec, p.PUBREL: p.Pubrel, p.PUBCOMP: p.Pubcomp}
    return classes[kind](packet_id, reason_code, given)


@st.composite
def subscriptions(draw: st.DrawFn, version: int) -> p.Subscription:
    topic_filter, qos = draw(filters()), draw(st.integers(0, 2))
    if version != p.V5:
        return p.Subscription(topic_filter, qos)
    is_shared = draw(st.booleans())
    return p.Subscription(
        f"$share/group/{topic_filter}" if is_shared else topic_filter,
        qos,
        not is_shared and draw(st.booleans()),
        draw(st.booleans()),
        draw(st.integers(0, 2)),
    )
