"""Message rows: round trip and detection of damage."""

from __future__ import annotations

from contextlib import suppress
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from basaltmq.errors import BasaltError, CorruptionError, InvalidArgumentError, LimitExceededError
from basaltmq.queues.message import (
    FAIRNESS_KEY_BYTES_MAX,
    HEADERS_BYTES_MAX,
    HEADERS_MAX,
    PAYLOAD_BYTES_MAX,
    QUEUE_NAME_BYTES_MAX,
    THROTTLE_KEYS_MAX,
    Message,
    check_message,
    decode_row,
    encode_row,
)
from basaltmq.store.keys import queues as queue_keys

U64 = st.integers(0, (1 << 64) - 1)
U32 = st.integers(0, (1 << 32) - 1)
TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=30)

MESSAGES = st.builds(
    Message,
    id=st.binary(min_size=16, max_size=16),
    queue=TEXT.filter(bool),
    payload=st.binary(max_size=200),
    enqueued_ns=U64,
    fairness_key=TEXT,
    headers=st.dictionaries(TEXT, TEXT, max_size=4),
    properties=st.binary(max_size=20),
    weight=st.integers(1, (1 << 32) - 1),
    throttle_keys=st.lists(TEXT, max_size=3).map(tuple),
    attempts=U32,
    priority=st.integers(0, 255),
    leased_ns=U64,
    expires_ns=U64,
)


def message(**fields: Any) -> Message:
    return Message(**{"id": b"i" * 16, "queue": "q", "payload": b"p", "enqueued_ns": 1, **fields})


@pytest.mark.spec("C4")
@given(MESSAGES)
def test_message_row_round_trips(made: Message) -> None:
    assert decode_row(made.key(), encode_row(check_message(made))) == made


@pytest.mark.spec("C4")
@pytest.mark.promise("P7")
@given(MESSAGES, st.binary(min_size=1, max_size=3))
def test_truncated_or_extended_message_row_is_damaged(made: Message, added: bytes) -> None:
    row = encode_row(made)
    for size in range(len(row)):
        with pytest.raises(CorruptionError, match=made.id.hex()):
            decode_row(made.key(), row[:size])
    with pytest.raises(CorruptionError, match="damaged"):
        decode_row(made.key(), row + added)


@pytest.mark.spec("C4")
@given(MESSAGES, st.data())
def test_changed_byte_in_a_row_decodes_or_is_reported(made: Message, data: st.DataObject) -> None:
    row = bytearray(encode_row(made))
    row[data.draw(st.integers(0, len(row) - 1))] ^= data.draw(st.integers(1, 255))
    with suppress(CorruptionError):
        assert isinstance(decode_row(made.key(), bytes(row)), Message)


@pytest.mark.spec("C4")
@given(st.binary(max_size=60), st.binary(max_size=60))
def test_malformed_keys_and_rows_are_reported_as_damaged(key: bytes, row: bytes) -> None:
    with pytest.raises(CorruptionError):
        decode_row(key, row)


@pytest.mark.spec("C4")
def test_row_layout_is_unchanged() -> None:
    made = message(
        fairness_key="f", weight=2, attempts=3, priority=4, leased_ns=5, expires_ns=1 << 40, throttle_keys=("t",),
        headers={"h": "v"}, properties=b"\0",
    )  # fmt: skip
    row = b"\x02\x04" + (3).to_bytes(4, "big") + (2).to_bytes(4, "big") + (5).to_bytes(8, "big")
    row += (1 << 40).to_bytes(8, "big") + b"\0\0\0\x09" + b"\0\0\0\x01" + b"\0\0\0\x01"
    row += b"\x92\x81\xa1h\xa1v\x91\xa1t" + b"\0" + b"p"
    assert encode_row(made) == row
    assert decode_row(made.key(), row) == made


@pytest.mark.spec("C4", "C2")
@given(MESSAGES)
def test_key_holds_place_and_id(made: Message) -> None:
    assert queue_keys.decode_message_key(made.key()) == (made.queue, made.fairness_key, made.enqueued_ns, made.id)


@pytest.mark.spec("C4")
@pytest.mark.promise("P8")
@pytest.mark.parametrize(
    "fields",
    [
        {"id": b"short"},
        {"id": "x" * 16},
        {"queue": ""},
        {"queue": "q" * (QUEUE_NAME_BYTES_MAX + 1)},
        {"queue": "\ud800"},
        {"queue": None},
        {"fairness_key": "é" * (FAIRNESS_KEY_BYTES_MAX // 2 + 1)},
        {"payload": "text"},
        {"payload": None},
        {"payload": bytes(PAYLOAD_BYTES_MAX + 1)},
        {"properties": 7},
        {"weight": 0},
        {"weight": 1 << 32},
        {"weight": 1.5},
        {"attempts": -1},
        {"priority": 256},
        {"enqueued_ns": -1},
        {"enqueued_ns": 1 << 64},
        {"expires_ns": True},
        {"headers": [("a", "b")]},
        {"headers": {"a": 1}},
        {"headers": {str(at): "" for at in range(HEADERS_MAX + 1)}},
        {"headers": {"a": "x" * HEADERS_BYTES_MAX}},
        {"throttle_keys": ("k",) * (THROTTLE_KEYS_MAX + 1)},
        {"throttle_keys": (1,)},
    ],
    ids=lambda fields: next(iter(fields)),
)
def test_invalid_fields_are_refused_by_name(fields: dict[str, Any]) -> None:
    with pytest.raises((InvalidArgumentError, LimitExceededError)) as refused:
        check_message(message(**fields))
    assert len(str(refused.value)) < 400


@pytest.mark.spec("C4")
@pytest.mark.parametrize(
    "fields",
    [{"payload": "text"}, {"payload": None}, {"weight": 1 << 64}, {"headers": {"a": "\ud800"}}, {"priority": 256}],
)
def test_encoding_refuses_an_unchecked_invalid_message(fields: dict[str, Any]) -> None:
    with pytest.raises(BasaltError):
        encode_row(message(**fields))


@pytest.mark.spec("C4")
def test_messages_do_not_share_headers() -> None:
    first, second = message(), message()
    first.headers["a"] = "b"
    assert second.headers == {}
