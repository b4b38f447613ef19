"""Message properties: round trips, reads in place, and refusal of malformed ones."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from basaltmq.broker.message import amqp_table, properties
from basaltmq.broker.message.properties import EXPIRATION_MS_MAX, Peek, Properties
from basaltmq.errors import BadExpirationError, BasaltError, MalformedPropertiesError

SHORT = st.none() | st.text(max_size=40)
OCTET = st.none() | st.integers(0, 255)
PROPERTIES = st.builds(
    Properties,
    content_type=SHORT,
    content_encoding=SHORT,
    headers_raw=st.none() | st.dictionaries(st.text(max_size=5), st.text(max_size=5)).map(amqp_table.encode),
    delivery_mode=OCTET,
    priority=OCTET,
    correlation_id=SHORT,
    reply_to=SHORT,
    expiration=st.none() | st.integers(0, EXPIRATION_MS_MAX).map(str),
    message_id=SHORT,
    timestamp=st.none() | st.integers(0, (1 << 64) - 1),
    type=SHORT,
    user_id=SHORT,
    app_id=SHORT,
    cluster_id=SHORT,
)


@given(PROPERTIES)
def test_properties_round_trip_and_the_fast_reader_agrees(given_properties: Properties) -> None:
    raw = properties.encode(given_properties)
    assert properties.parse(raw) == given_properties
    seen = properties.peek(raw)
    assert seen.delivery_mode == (given_properties.delivery_mode if given_properties.delivery_mode is not None else 1)
    assert seen.priority == (given_properties.priority or 0)
    expiration = given_properties.expiration
    assert seen.expiration_ms == (None if expiration is None else int(expiration))
    assert seen.user_id == (None if given_properties.user_id is None else given_properties.user_id.encode())
    assert seen.has_headers == (given_properties.headers_raw is not None)
    assert seen.has_reply_to == (given_properties.reply_to is not None)


@given(PROPERTIES, st.data())
def test_truncated_or_extended_properties_are_refused(given_properties: Properties, data: st.DataObject) -> None:
    raw = properties.encode(given_properties)
    cut = raw[: data.draw(st.integers(0, len(raw) - 1))]
    for wrong in (cut, raw + b"\0"):
        with pytest.raises(BasaltError):
            properties.peek(wrong)
        with pytest.raises(MalformedPropertiesError):
            properties.parse(wrong)


@given(st.binary(max_size=80))
def test_properties_accepted_by_the_fast_reader_can_be_decoded(raw: bytes) -> None:
    try:
        properties.peek(raw)
    except BadExpirationError:
        properties.parse(raw)
    except MalformedPropertiesError:
        with pytest.raises(MalformedPropertiesError):
            properties.parse(raw)
    else:
        assert properties.encode(properties.parse(raw)) == raw


@pytest.mark.parametrize("raw", [b"\0\0", b"\x10\0\1", b"\x10\0\2"])
def test_cached_common_properties_equal_those_of_the_fast_reader(raw: bytes) -> None:
    assert properties.peek(raw) == properties._peek(raw)
    assert properties.peek(b"\x10\0\2") == Peek(2, 0, None, None, False)


@pytest.mark.parametrize("flags", [b"\0\1", b"\0\2", b"\x10\1"])
def test_flags_that_amqp_does_not_have_are_refused(flags: bytes) -> None:
    for read in (properties.peek, properties.parse):
        with pytest.raises(MalformedPropertiesError, match="bits 0 and 1"):
            read(flags + b"\2")


@pytest.mark.spec("E7")
@pytest.mark.parametrize("text", ["", "-1", "1.5", "+1", " 1", "abc", "１", str(EXPIRATION_MS_MAX + 1), "9" * 255])
def test_an_expiration_that_is_no_number_of_milliseconds_is_refused(text: str) -> None:
    raw = properties.encode(Properties(expiration=text))
    with pytest.raises(BadExpirationError, match="invalid expiration"):
        properties.peek(raw)


def test_text_that_is_not_utf8_round_trips() -> None:
    raw = b"\x80\0\2\xff\xfe"
    assert properties.encode(properties.parse(raw)) == raw


@pytest.mark.parametrize(
    "wrong",
    [
        Properties(priority=256),
        Properties(delivery_mode=-1),
        Properties(timestamp=-1),
        Properties(message_id="m" * 256),
        Properties(app_id="\ud900"),
    ],
)
def test_values_that_do_not_fit_are_refused(wrong: Properties) -> None:
    with pytest.raises(MalformedPropertiesError):
        properties.encode(wrong)


@given(st.text(max_size=60), st.text(max_size=60), PROPERTIES)
def test_an_envelope_round_trip_keeps_everything(exchange: str, key: str, given_properties: Properties) -> None:
    raw = properties.encode(given_properties)
    envelope = properties.encode_envelope(exchange, key, raw)
    assert properties.decode_envelope(envelope) == (exchange, key, raw)
    assert envelope[properties.properties_start(envelope) :] == raw


def test_an_empty_envelope_is_that_of_a_message_without_exchange_and_properties() -> None:
    assert properties.decode_envelope(b"") == ("", "", properties.NONE)


@pytest.mark.parametrize("envelope", [b"\5abc", b"\0", b"\0\3ab", b"\0\0", b"\0\0\0"])
def test_a_truncated_envelope_is_refused(envelope: bytes) -> None:
    with pytest.raises(MalformedPropertiesError, match="breaks off"):
        properties.decode_envelope(envelope)
