"""Conversion of headers between AMQP envelopes and protocols with text headers."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from basaltmq.broker.message.properties import Properties, decode_envelope, encode, encode_envelope, parse
from basaltmq.broker.message.text_headers import envelope_of, headers_of


@pytest.mark.spec("C4")
@given(st.dictionaries(st.text(max_size=20), st.text(max_size=20), max_size=4))
def test_text_headers_round_trip_through_the_envelope(headers: dict[str, str]) -> None:
    envelope = envelope_of(headers)
    assert headers_of(envelope) == headers
    assert bool(envelope) == bool(headers)
    if envelope:
        exchange, routing_key, properties = decode_envelope(envelope)
        assert (exchange, routing_key, parse(properties).headers) == ("", "", headers)


def test_header_names_that_amqp_cannot_represent_are_omitted() -> None:
    long = "é" * 128
    assert headers_of(envelope_of({long: "v", "k": "v"})) == {"k": "v"}
    assert envelope_of({long: "v"}) == b""


def test_values_without_a_text_form_are_omitted() -> None:
    properties = Properties(content_type="text/plain")
    properties.set_headers(
        {"s": "t", "n": -5, "f": 0.5, "yes": True, "no": False, "list": [1], "table": {"a": 1}, "x": None}
    )
    shown = {"s": "t", "n": "-5", "f": "0.5", "yes": "true", "no": "false"}
    assert headers_of(encode_envelope("exchange", "key", encode(properties))) == shown


@given(st.binary(max_size=40))
def test_invalid_envelopes_have_no_text_headers(raw: bytes) -> None:
    found = headers_of(raw)
    assert all(type(name) is str and type(value) is str for name, value in found.items())
