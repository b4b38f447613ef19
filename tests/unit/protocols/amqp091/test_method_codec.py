"""Methods on the wire: round trips, the same bytes as another library, and refusal of malformed ones."""

from __future__ import annotations

from typing import Any

import pika
import pytest
from hypothesis import given
from hypothesis import strategies as st

from basaltmq.protocols.amqp091.wire import methods as m
from basaltmq.protocols.amqp091.wire.errors import FRAME_ERROR, SYNTAX_ERROR, ConnectionFault, LocalProtocolError
from basaltmq.protocols.amqp091.wire.method_codec import codecs, encode_method, encode_payload, name_of

VALUES: dict[str, st.SearchStrategy[Any]] = {
    "Bit": st.booleans(),
    "Octet": st.integers(0, 0xFF),
    "Short": st.integers(0, 0xFFFF),
    "Long": st.integers(0, 0xFFFFFFFF),
    "LongLong": st.integers(0, (1 << 64) - 1),
    "ShortStr": st.text(max_size=60),
    "LongStr": st.binary(max_size=60),
    "Table": st.dictionaries(st.text(max_size=8), st.text(max_size=8) | st.booleans() | st.integers(0, 9), max_size=3),
}


def instances(cls: type[m.Method]) -> st.SearchStrategy[m.Method]:
    return st.tuples(*(VALUES[cls.__annotations__[name]] for name in cls.__struct_fields__)).map(lambda v: cls(*v))


ANY_METHOD = st.sampled_from(m.ALL).flatmap(instances)


def decode(payload: bytes) -> m.Method:
    return codecs()[int.from_bytes(payload[:4], "big")].decode(payload)


@given(ANY_METHOD)
def test_methods_round_trip(method: m.Method) -> None:
    assert decode(encode_payload(method)) == method


@given(ANY_METHOD, st.data())
def test_a_truncated_or_extended_method_is_a_frame_error(method: m.Method, data: st.DataObject) -> None:
    payload = encode_payload(method)
    wrong = [payload + b"\0"]
    if len(payload) > 4:
        wrong.append(payload[: data.draw(st.integers(4, len(payload) - 1))])
    for each in wrong:
        with pytest.raises(ConnectionFault) as caught:
            decode(each)
        assert caught.value.code in (FRAME_ERROR, SYNTAX_ERROR)
        assert caught.value.method == method.number


@given(st.sampled_from(m.ALL), st.binary(max_size=60))
def test_random_arguments_are_decoded_or_refused_with_a_code(cls: type[m.Method], arguments: bytes) -> None:
    payload = cls.number[0].to_bytes(2, "big") + cls.number[1].to_bytes(2, "big") + arguments
    code = 0
    try:
        assert isinstance(decode(payload), cls)
    except ConnectionFault as fault:
        code = fault.code
    assert code in (0, FRAME_ERROR, SYNTAX_ERROR)


def test_the_table_has_every_method_of_the_protocol() -> None:
    theirs = {method.INDEX for method in pika.spec.methods.values()}
    ours = {cls.number[0] << 16 | cls.number[1] for cls in m.ALL}
    assert theirs - ours == set()
    assert ours - theirs == {30 << 16 | 10, 30 << 16 | 11} - theirs
    assert len(ours) == len(m.ALL)


def pika_name(name: str) -> str:
    return {"global_": "global_qos"}.get(name, name)


@pytest.mark.parametrize("cls", m.ALL, ids=name_of)
def test_encoded_methods_equal_those_of_pika(cls: type[m.Method]) -> None:
    theirs = pika.spec.methods.get(cls.number[0] << 16 | cls.number[1])
    if theirs is None or cls is m.ConnectionUpdateSecret:
        pytest.skip("pika cannot read it")
    samples: dict[str, Any] = {
        "Bit": True,
        "Octet": 7,
        "Short": 513,
        "Long": 70_000,
        "LongLong": 1 << 40,
        "ShortStr": "naïve",
        "LongStr": b"long",
        "Table": {"a": "b", "n": -5, "t": True, "in": {"x": None}},
    }
    values = [samples[cls.__annotations__[name]] for name in cls.__struct_fields__]
    frame = encode_method(3, cls(*values))
    size, parsed = pika.frame.decode_frame(frame)
    assert size == len(frame)
    assert parsed.channel_number == 3
    assert type(parsed.method) is theirs
    # Their decoder reads our bytes, and their encoder writes the same bytes again.
    assert parsed.marshal() == frame


def test_consecutive_bits_share_an_octet_lowest_first() -> None:
    payload = encode_payload(m.QueueDeclare(0, "q", False, True, False, True, False, {}))
    assert payload == b"\0\x32\0\x0a\0\0\1q\x0a\0\0\0\0"


def test_method_names_match_the_specification() -> None:
    assert name_of(m.QueueDeclareOk) == "queue.declare-ok"
    assert name_of(m.BasicRecoverAsync) == "basic.recover-async"


@pytest.mark.parametrize(
    "method",
    [m.BasicAck(-1, False), m.BasicCancelOk("t" * 256), m.ConnectionTune(1 << 16, 0, 0), m.ChannelOpenOk("text")],  # type: ignore[arg-type]
)
def test_encoding_an_unknown_method_is_an_internal_error(method: m.Method) -> None:
    with pytest.raises(LocalProtocolError, match="cannot be sent"):
        encode_method(1, method)


def test_a_name_that_is_not_utf8_is_a_frame_error() -> None:
    payload = encode_payload(m.BasicCancelOk("ab")).replace(b"ab", b"\xff\xfe")
    with pytest.raises(ConnectionFault) as caught:
        decode(payload)
    assert caught.value.code == FRAME_ERROR
