"""The rules of the RocketMQ protocol as a table: messages and their status codes."""

from __future__ import annotations

import zlib
from uuid import uuid4

import pytest
from hypothesis import given
from hypothesis import strategies as st

from basaltmq import errors
from basaltmq.log.batches.record import StoredRecord
from basaltmq.protocols.rocketmq.records import message_of, record_of
from basaltmq.protocols.rocketmq.rules.filters import filter_of
from basaltmq.protocols.rocketmq.rules.handles import decode_handle, encode_handle
from basaltmq.protocols.rocketmq.rules.messages import MessageLimits, check_message
from basaltmq.protocols.rocketmq.rules.names import group_name, topic_name
from basaltmq.protocols.rocketmq.rules.signature import is_signed, parse_authorization, signature_of
from basaltmq.protocols.rocketmq.rules.status import CODES, Refused, status_of
from basaltmq.streams.pop.lease import Lease
from basaltmq.wire import rocketmq_wire_pb2 as wire

pytestmark = pytest.mark.spec("G3")

NOW = 1_700_000_000_000
DAY_MS = 24 * 3_600_000


def message(body: bytes = b"x", properties: dict[str, str] | None = None, **system: object) -> wire.Message:
    made = wire.Message(body=body, user_properties=properties or {})
    made.system_properties.MergeFrom(wire.SystemProperties(**{"message_id": "m", **system}))  # type: ignore[arg-type]
    return made


def at(ms: int) -> wire.SystemProperties:
    made = wire.SystemProperties()
    made.delivery_timestamp.FromMilliseconds(ms)
    return made


def delayed(ms: int, kind: int = wire.DELAY) -> wire.Message:
    made = message(message_type=kind)
    made.system_properties.MergeFrom(at(NOW + ms))
    return made


def digest(kind: int, text: str) -> wire.Digest:
    return wire.Digest(type=kind, checksum=text)  # type: ignore[arg-type]


OK_MESSAGES = [
    message(),
    message(tag="red", keys=["k"], properties={"name": "value"}),
    message(message_type=wire.FIFO, message_group="g"),
    message(message_type=wire.FIFO, message_group="g" * 64),
    message(message_type=wire.PRIORITY, priority=0),
    message(message_type=wire.TRANSACTION),
    message(b"x" * 1_000, properties={str(each): "v" for each in range(128)}),
    delayed(1_000),
    delayed(40 * DAY_MS),
    delayed(-1_000),
    message(body_digest=digest(wire.CRC32, f"{zlib.crc32(b'x'):X}")),
    message(body_digest=digest(wire.CRC32, f"{zlib.crc32(b'x'):08x}")),
    message(body_digest=digest(wire.MD5, "9DD4E461268C8034F5C8564E155C67A6")),
    message(body_digest=digest(wire.SHA1, "11F6AD8EC52A2984ABAAFD7C3B516503785C2072")),
]

WRONG_MESSAGES = [
    (message(b""), wire.MESSAGE_BODY_EMPTY),
    (message(b"x" * 1_001), wire.MESSAGE_BODY_TOO_LARGE),
    (message(message_id=""), wire.ILLEGAL_MESSAGE_ID),
    (message(message_id=" "), wire.ILLEGAL_MESSAGE_ID),
    (message(message_id="x" * 256), wire.ILLEGAL_MESSAGE_ID),
    (message(tag=""), wire.ILLEGAL_MESSAGE_TAG),
    (message(tag="a|b"), wire.ILLEGAL_MESSAGE_TAG),
    (message(tag="a\n"), wire.ILLEGAL_MESSAGE_TAG),
    (message(keys=["ok", " "]), wire.ILLEGAL_MESSAGE_KEY),
    (message(properties={"": "x"}), wire.ILLEGAL_MESSAGE_PROPERTY_KEY),
    (message(properties={"KEYS": "x"}), wire.ILLEGAL_MESSAGE_PROPERTY_KEY),
    (message(properties={"rocketmq.id": "x"}), wire.ILLEGAL_MESSAGE_PROPERTY_KEY),
    (message(properties={"a": "x\0"}), wire.ILLEGAL_MESSAGE_PROPERTY_KEY),
    (message(properties={str(each): "" for each in range(129)}), wire.MESSAGE_PROPERTIES_TOO_LARGE),
    (message(properties={"a": "x" * (16 << 10)}), wire.MESSAGE_PROPERTIES_TOO_LARGE),
    (message(message_type=wire.FIFO), wire.ILLEGAL_MESSAGE_GROUP),
    (message(message_type=wire.FIFO, message_group=" "), wire.ILLEGAL_MESSAGE_GROUP),
    (message(message_type=wire.FIFO, message_group="g" * 65), wire.ILLEGAL_MESSAGE_GROUP),
    (message(message_group="g"), wire.MESSAGE_PROPERTY_CONFLICT_WITH_TYPE),
    (message(message_type=wire.TRANSACTION, message_group="g"), wire.MESSAGE_PROPERTY_CONFLICT_WITH_TYPE),
    (message(message_type=wire.PRIORITY), wire.MESSAGE_PROPERTY_CONFLICT_WITH_TYPE),
    (message(message_type=wire.PRIORITY, priority=-1), wire.MESSAGE_PROPERTY_CONFLICT_WITH_TYPE),
    (message(message_type=wire.DELAY), wire.ILLEGAL_DELIVERY_TIME),
    (delayed(40 * DAY_MS + 1), wire.ILLEGAL_DELIVERY_TIME),
    (delayed(1_000, wire.NORMAL), wire.MESSAGE_PROPERTY_CONFLICT_WITH_TYPE),
    (message(message_type=wire.LITE), wire.ILLEGAL_LITE_TOPIC),
    (message(body_digest=digest(wire.CRC32, "1")), wire.MESSAGE_CORRUPTED),
    (message(body_digest=digest(wire.MD5, "1")), wire.MESSAGE_CORRUPTED),
    (message(body_digest=digest(wire.SHA1, "xyz")), wire.MESSAGE_CORRUPTED),
]

LIMITS = MessageLimits(body_bytes_max=1_000)


@pytest.mark.parametrize("given", OK_MESSAGES)
def test_valid_messages(given: wire.Message) -> None:
    check_message(given, LIMITS, NOW)


@pytest.mark.parametrize(("given", "code"), WRONG_MESSAGES)
def test_messages_that_break_a_rule(given: wire.Message, code: int) -> None:
    with pytest.raises(Refused) as refused:
        check_message(given, LIMITS, NOW)
    assert refused.value.code == code


@pytest.mark.parametrize(
    ("name", "is_valid"),
    [
        *[("orders", True), ("a.b_c-d", True), ("%DLQ%g", True), ("x" * 120, True)],
        *[("", False), (" ", False), ("a b", False), ("ä", False), ("x" * 128, False), ("%RETRY%g", False)],
    ],
)
def test_topic_names(name: str, is_valid: bool) -> None:
    if is_valid:
        assert topic_name(wire.Resource(name=name)) == name
        assert topic_name(wire.Resource(resource_namespace="n", name="t")) == "n%t"
        return
    with pytest.raises(Refused) as refused:
        topic_name(wire.Resource(name=name))
    assert refused.value.code == wire.ILLEGAL_TOPIC


@pytest.mark.parametrize("name", ["", "a b", "x" * 121])
def test_illegal_group_names(name: str) -> None:
    with pytest.raises(Refused) as refused:
        group_name(wire.Resource(name=name))
    assert refused.value.code == wire.ILLEGAL_CONSUMER_GROUP


@pytest.mark.parametrize(
    ("expression", "tags", "matches"),
    [
        ("a", (b"a",), True),
        ("a", (b"b",), False),
        ("a", (), False),
        ("a || b", (b"b",), True),
        ("a||", (b"a",), True),
    ],
)
def test_tag_filters(expression: str, tags: tuple[bytes, ...], matches: bool) -> None:
    found = filter_of(wire.FilterExpression(type=wire.TAG, expression=expression))
    assert found is not None
    assert found.matches(StoredRecord(b"", tags=tags, offset=0)) is matches


@pytest.mark.parametrize("expression", ["", " ", "*", "a||*"])
def test_filters_that_select_everything(expression: str) -> None:
    assert filter_of(wire.FilterExpression(expression=expression)) is None


def test_receipt_handles_are_bound_to_their_group_and_topic() -> None:
    topic, lease = uuid4(), Lease(3, 77)
    lease.token = (1 << 63) - 1
    text = encode_handle("group", topic, lease)
    assert decode_handle(text, "group", topic) == (3, 77, lease.token)
    for group, other in (("other", topic), ("group", uuid4())):
        with pytest.raises(Refused) as refused:
            decode_handle(text, group, other)
        assert refused.value.code == wire.INVALID_RECEIPT_HANDLE


@given(st.text(max_size=80))
def test_invented_handles_are_refused(text: str) -> None:
    with pytest.raises(Refused):
        decode_handle(text, "group", uuid4())


def test_signatures() -> None:
    text = "MQv2-HMAC-SHA1 Credential=key, SignedHeaders=x-mq-date-time, Signature="
    signed = parse_authorization(text + signature_of("secret", "20260101T000000Z").upper())
    assert signed is not None
    assert signed.access_key == "key"
    assert is_signed(signed, "secret", "20260101T000000Z")
    assert not is_signed(signed, "wrong", "20260101T000000Z")
    assert not is_signed(signed, "secret", "20260101T000001Z")
    assert parse_authorization(text.replace("key", "")) is None
    with pytest.raises(errors.AuthenticationError):
        parse_authorization("Basic Zm9vOmJhcg==")


def test_the_most_specific_error_decides_the_code() -> None:
    assert status_of(errors.TopicNotFoundError("t")).code == wire.TOPIC_NOT_FOUND
    assert status_of(errors.QueueNotFoundError("q")).code == wire.NOT_FOUND
    assert status_of(errors.StoreStalledError("s")).code == wire.TOO_MANY_REQUESTS
    assert status_of(ValueError("bug")).code == wire.INTERNAL_SERVER_ERROR
    assert "bug" not in status_of(ValueError("bug")).message
    assert CODES[errors.BasaltError] == wire.INTERNAL_SERVER_ERROR


def test_a_record_keeps_what_the_message_has() -> None:
    given = message(b"body", {"a": "b"}, message_type=wire.FIFO, message_group="g", tag="t", keys=["k1", "k2"])
    given.system_properties.born_timestamp.FromMilliseconds(5)
    record = record_of(given)
    assert (record.value, record.key, record.tags) == (b"body", b"k1", (b"t",))
    stored = StoredRecord(record.value, record.key, record.headers, record.tags, 9, offset=4)
    found = message_of(stored, 1, 2, "host")
    system = found.system_properties
    assert (found.body, dict(found.user_properties)) == (b"body", {"a": "b"})
    assert (system.message_group, system.tag, list(system.keys)) == ("g", "t", ["k1", "k2"])
    assert (system.message_type, system.born_timestamp.nanos, system.queue_offset) == (wire.FIFO, 5_000_000, 4)


@given(st.lists(st.tuples(st.sampled_from(["rocketmq.type", "rocketmq.priority", "rocketmq.born", "x"]), st.binary())))
def test_records_of_other_protocols_are_messages(headers: list[tuple[str, bytes]]) -> None:
    found = message_of(StoredRecord(None, b"\xff", tuple(headers), (b"\xfe",), 7, offset=1), 16, 0, "host")
    assert found.body == b""
    assert found.system_properties.message_id == "0000000000000010" + "0000000000000001"
    assert found.SerializeToString()
