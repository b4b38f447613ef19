"""Headers that cross between AMQP's envelopes and protocols of text."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from basaltmq.broker.message.properties import Properties, encode, open_envelope, parse, seal
from basaltmq.broker.message.text_headers import envelope_of, headers_of


@pytest.mark.spec("C4")
@given(st.dictionaries(st.text(max_size=20), st.text(max_size=20), max_size=4))
def test_text_headers_come_back_from_the_envelope_they_are_shown_in(headers: dict[str, str]) -> None:
    envelope = envelope_of(headers)
    assert headers_of(envelope) == headers
    assert bool(envelope) == bool(headers)
    if envelope:
        exchange, routing_key, properties = open_envelope(envelope)
        assert (exchange, routing_key, parse(properties).headers) == ("", "", headers)


def test_a_name_that_amqp_cannot_say_is_left_out_and_the_others_are_not() -> None:
    long = "é" * 128
    assert headers_of(envelope_of({long: "v", "k": "v"})) == {"k": "v"}
    assert envelope_of({long: "v"}) == b""


def test_values_that_text_cannot_say_are_left_out() -> None:
    properties = Properties(content_type="text/plain")
    properties.set_headers(
        {"s": "t", "n": -5, "f": 0.5, "yes": True, "no": False, "list": [1], "table": {"a": 1}, "x": None}
    )
    shown = {"s": "t", "n": "-5", "f": "0.5", "yes": "true", "no": "false"}
    assert headers_of(seal("exchange", "key", encode(properties))) == shown


@given(st.binary(max_size=40))
def test_properties_that_are_no_envelope_have_no_headers_and_break_nothing(raw: bytes) -> None:
    found = headers_of(raw)
    assert all(type(name) is str and type(value) is str for name, value in found.items())
