"""Messages of AMQP 1.0 and the broker's: the bare message is kept byte for byte, properties are mapped both ways."""

from __future__ import annotations

import uuid
from typing import Any

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from proton import Message, symbol, timestamp
from tests.unit.protocols.amqp10.values import SCALARS, SYMBOLS, values

from basaltmq.broker.message import amqp_table, properties
from basaltmq.broker.message.properties import Properties
from basaltmq.protocols.amqp10 import message
from basaltmq.protocols.amqp10.wire import sections as s
from basaltmq.protocols.amqp10.wire import types as t
from basaltmq.protocols.amqp10.wire.errors import Fault

VALUES = values(*SCALARS)
PROPERTIES = st.tuples(
    st.one_of(st.none(), st.text(max_size=40), st.uuids(), st.binary(max_size=9), st.integers(0, 9).map(t.Ulong)),
    st.one_of(st.none(), st.binary(max_size=9)),
    st.one_of(st.none(), st.text(max_size=300)),
    st.one_of(st.none(), st.text(max_size=30)),
).map(list)
NAMES = st.text(max_size=20)


@st.composite
def messages(draw: st.DrawFn) -> tuple[bytes, bytes, bytes]:
    """Return a message, its bare part, and its footer."""
    raw = b""
    if draw(st.booleans()):
        raw += s.section(s.HEADER, t.encode([draw(st.booleans()), t.Ubyte(draw(st.integers(0, 255)))]))
    if draw(st.booleans()):
        raw += s.section(s.DELIVERY_ANNOTATIONS, t.encode(draw(st.dictionaries(SYMBOLS, VALUES, max_size=2))))
    if draw(st.booleans()):
        raw += s.section(s.MESSAGE_ANNOTATIONS, t.encode(draw(st.dictionaries(SYMBOLS, VALUES, max_size=2))))
    bare = b""
    if draw(st.booleans()):
        bare += s.section(s.PROPERTIES, t.encode(draw(PROPERTIES)))
    if draw(st.booleans()):
        bare += s.section(s.APPLICATION_PROPERTIES, t.encode(draw(st.dictionaries(NAMES, VALUES, max_size=3))))
    kind = draw(st.sampled_from(["data", "wide", "many", "value", "sequence", "none"]))
    if kind == "data":
        body = draw(st.binary(max_size=300))
        bare += s.data_head(len(body)) + body
    elif kind == "wide":
        body = draw(st.binary(max_size=300))
        bare += b"\0\x53\x75\xb0" + len(body).to_bytes(4, "big") + body
    elif kind == "many":
        bare += b"".join(s.data_head(len(each)) + each for each in draw(st.lists(st.binary(), min_size=2, max_size=3)))
    elif kind == "value":
        bare += s.section(s.VALUE, t.encode(draw(VALUES)))
    elif kind == "sequence":
        bare += s.section(s.SEQUENCE, t.encode(draw(st.lists(VALUES, max_size=3))))
    footer = s.section(s.FOOTER, t.encode({t.Symbol("x-sum"): 1})) if draw(st.booleans()) else b""
    assume(raw + bare + footer)
    return raw + bare + footer, bare, footer


@pytest.mark.spec("G2")
@settings(max_examples=60)
@given(messages(), st.booleans())
def test_the_bare_message_arrives_byte_for_byte(made: tuple[bytes, bytes, bytes], redelivered: bool) -> None:
    raw, bare, footer = made
    incoming, outgoing = message.Incoming(), message.Outgoing()
    for _ in range(2):  # the second time from the caches
        received = incoming.convert(raw)
        properties.peek(received.properties)
        envelope = properties.encode_envelope("exchange", "key", received.properties)
        sent = outgoing.encode(envelope, received.body, redelivered, 3)
        assert sent.endswith(bare + footer)
        found = s.split(sent)
        assert found.header is not None
        assert found.header[3] is not redelivered
        assert found.message_annotations is not None
        assert found.message_annotations["x-exchange"] == "exchange"


def test_properties_reach_other_protocols() -> None:
    made = Message(
        body=b"body",
        inferred=True,
        durable=True,
        id=uuid.UUID(int=7),
        correlation_id="c",
        reply_to="/queues/r",
        content_type="text/plain",
        creation_time=5.5,
        ttl=2,
        priority=7,
        group_id="g",
        user_id=b"guest",
        properties={"s": "text", "i": 5, "b": True, "f": 1.5, "t": timestamp(7000), "CC": "no"},
        annotations={symbol("x-basic-type"): "type", symbol("x-note"): 9, symbol("other"): 1},
    )
    received = message.convert(bytes(made.encode()))
    found = properties.parse(received.properties)
    assert received.body == b"body"
    assert (found.delivery_mode, found.priority, found.expiration) == (2, 7, "2000")
    assert (found.message_id, found.correlation_id, found.reply_to) == (str(uuid.UUID(int=7)), "c", "/queues/r")
    assert (found.content_type, found.timestamp, found.app_id) == ("text/plain", 5, "g")
    assert (found.user_id, found.type) == ("guest", "type")
    headers = found.headers
    headers.pop(properties.BARE_HEADER)
    assert headers == {"s": "text", "i": 5, "b": True, "f": 1.5, "t": amqp_table.Timestamp(7), "x-note": 9}
    seen = properties.parse(properties.visible(properties.encode_envelope("e", "k", received.properties))[4:])
    assert properties.BARE_HEADER not in seen.headers
    assert seen.headers["s"] == "text"


def test_messages_of_other_protocols_have_properties() -> None:
    given_ = Properties(
        delivery_mode=2,
        priority=3,
        expiration="60000",
        message_id="m",
        correlation_id="c",
        reply_to="r",
        content_type="text/plain",
        timestamp=5,
        app_id="app",
        type="kind",
        user_id="guest",
    )
    given_.set_headers({"name": "value", "x-delay": 5, "nested": {"not": "kept"}, "at": amqp_table.Timestamp(7)})
    found = Message()
    found.decode(
        message.Outgoing().encode(properties.encode_envelope("e", "k", properties.encode(given_)), b"body", True, 2)
    )
    assert (found.durable, found.priority, found.ttl, found.delivery_count) == (True, 3, 60, 2)
    assert (found.id, found.correlation_id, found.reply_to) == ("m", "c", "r")
    assert (found.content_type, found.creation_time, found.group_id) == ("text/plain", 5, "app")
    assert bytes(found.user_id) == b"guest"
    assert found.properties == {"name": "value", "at": 7000}
    assert found.annotations == {"x-exchange": "e", "x-routing-key": "k", "x-basic-type": "kind", "x-delay": 5}
    assert bytes(found.body) == b"body"


def test_a_transient_message_says_so_and_all_others_are_persistent() -> None:
    body = s.data_head(1) + b"x"
    for header, mode in (([], 2), ([False], 1), ([True], 2), ([None, t.Ubyte(4)], 2)):
        raw = s.section(s.HEADER, t.encode(header)) + body
        assert properties.parse(message.convert(raw).properties).delivery_mode == mode


@pytest.mark.parametrize(
    "forged",
    [b"", b"\1" * 40, b"\0\0\0\0\0\0\0\0\x08\0\x53\x74\x45broken", b"\0\xff\xff\xff\xff....", "text", 5],
)
def test_forged_sections_are_ignored(forged: Any) -> None:
    made = Properties(message_id="m")
    made.set_headers({properties.BARE_HEADER: forged})
    found = s.split(
        message.Outgoing().encode(properties.encode_envelope("", "q", properties.encode(made)), b"body", False)
    )
    assert found.properties is not None
    assert found.properties[0] == "m"
    assert found.application_properties is None


@pytest.mark.parametrize(
    "raw",
    [
        b"",
        b"\0",
        b"abc",
        b"\0\x53\x75\x41",
        b"\0\x53\x75\xa0\x05ab",
        s.section(s.HEADER, t.encode({})) + s.data_head(0),
        s.section(s.HEADER, t.encode(["yes"])) + s.data_head(0),
        s.section(s.APPLICATION_PROPERTIES, t.encode({1: 2})) + s.data_head(0),
        s.data_head(0) + s.section(s.VALUE, b"\x40"),
        s.section(s.VALUE, b"\x40") + s.section(s.VALUE, b"\x40"),
        s.data_head(0) + s.section(s.HEADER, b"\x45"),
    ],
)
def test_a_damaged_message_is_a_fault(raw: bytes) -> None:
    with pytest.raises(Fault):
        message.Incoming().convert(raw)
