"""Encoded deliveries, decoded by another library, at every size around the limits of a frame."""

from __future__ import annotations

import pika
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.unit.protocols.amqp091.wire import Message, frames, messages

from basaltmq.broker.consumers.stream_queue import StreamDelivery
from basaltmq.broker.message.properties import Properties, encode, encode_envelope
from basaltmq.protocols.amqp091.outbox import PIECES_MAX, DeliverWriter, write_content
from basaltmq.protocols.amqp091.wire import methods as m

FRAME_MAX = 4096
SIZES = st.sampled_from([0, 1, 5, 4087, 4088, 4089, 8176, 8177, 10_000])


@given(
    st.lists(
        st.tuples(
            SIZES,
            st.booleans(),
            st.sampled_from(["", "ex"]),
            st.sampled_from(["k", "ключ"]),
            st.sampled_from([None, "x"]),
        ),
        min_size=1,
        max_size=8,
    ),
    st.integers(1, 1 << 40),
)
def test_a_delivery_is_encoded_with_all_its_parts(
    given_messages: list[tuple[int, bool, str, str, str | None]], tag: int
) -> None:
    writer = DeliverWriter(5, "ctag", FRAME_MAX)
    one_by_one: list[bytes | memoryview[int]] = []
    deliveries = []
    expected = []
    for index, (size, redelivered, exchange, key, app_id) in enumerate(given_messages):
        raw = encode(Properties(app_id=app_id, delivery_mode=2))
        body = bytes((index,)) * size
        writer.write(one_by_one, tag + index, redelivered, encode_envelope(exchange, key, raw), body)
        deliveries.append(StreamDelivery(b"id", encode_envelope(exchange, key, raw), body, redelivered=redelivered))
        expected.append(Message(m.BasicDeliver("ctag", tag + index, redelivered, exchange, key), raw, body))
    found = list(frames(b"".join(one_by_one)))
    assert messages(found) == expected
    together: list[bytes | memoryview[int]] = []
    writer.write_all(together, tag, deliveries)
    assert b"".join(together) == b"".join(one_by_one)
    assert {frame.channel for frame in found} == {5}
    assert all(len(frame.payload) + 8 <= FRAME_MAX for frame in found)


def test_pika_decodes_a_delivery() -> None:
    out: list[bytes | memoryview[int]] = []
    properties = encode(Properties(content_type="text/plain", delivery_mode=2, message_id="m"))
    DeliverWriter(1, "tag", FRAME_MAX).write(out, 9, True, encode_envelope("ex", "key", properties), b"hello")
    raw = b"".join(out)
    parsed = []
    while raw:
        size, frame = pika.frame.decode_frame(raw)
        parsed.append(frame)
        raw = raw[size:]
    deliver, header, body = parsed
    assert (deliver.method.consumer_tag, deliver.method.delivery_tag, deliver.method.redelivered) == ("tag", 9, True)
    assert (deliver.method.exchange, deliver.method.routing_key) == ("ex", "key")
    assert (header.body_size, header.properties.content_type, header.properties.message_id) == (5, "text/plain", "m")
    assert body.fragment == b"hello"


def test_the_cache_of_encoded_parts_is_bounded() -> None:
    writer = DeliverWriter(1, "tag", FRAME_MAX)
    for size in range(3 * PIECES_MAX):
        writer.write([], 1, False, encode_envelope("", "q", b"\0\0"), b"x" * size)
    assert len(writer._pieces) <= PIECES_MAX
    writer.write([], 1, False, encode_envelope("", "q", b"\x20\0" + b"\0" * 2000), b"x")
    assert all(len(envelope) <= 1024 for envelope, _, _ in writer._pieces)


@pytest.mark.parametrize("size", [0, 1, 4088, 4089])
def test_basic_return_and_get_ok_carry_their_content(size: int) -> None:
    out: list[bytes | memoryview[int]] = []
    answer = m.BasicGetOk(1, False, "", "q", 3)
    write_content(out, 2, answer, b"\0\0", b"b" * size, FRAME_MAX)
    assert messages(frames(b"".join(out))) == [Message(answer, b"\0\0", b"b" * size)]
