"""The protocol without I/O: order, split input, limits, and the reply code of every violation."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.unit.protocols.amqp091.wire import (
    FRAME_MAX,
    drain,
    frames,
    handshake,
    publish,
    published,
    running,
    sent,
)

from basaltmq.protocols.amqp091.events import (
    ChannelFailed,
    ConnectionFailed,
    HeaderAccepted,
    HeaderRefused,
    Published,
    Received,
)
from basaltmq.protocols.amqp091.session import PUBLISH_MEMO_MAX, Session
from basaltmq.protocols.amqp091.tuning import Limits
from basaltmq.protocols.amqp091.wire import methods as m
from basaltmq.protocols.amqp091.wire.errors import (
    CHANNEL_ERROR,
    COMMAND_INVALID,
    FRAME_ERROR,
    NOT_ALLOWED,
    NOT_IMPLEMENTED,
    PRECONDITION_FAILED,
    RESOURCE_ERROR,
    SYNTAX_ERROR,
    UNEXPECTED_FRAME,
    ChannelFault,
    ConnectionFault,
    LocalProtocolError,
)
from basaltmq.protocols.amqp091.wire.frames import (
    BODY,
    CONTENT_HEAD,
    HEAD,
    HEADER,
    HEARTBEAT_FRAME,
    METHOD,
    PROTOCOL_HEADER,
    encode_frame,
)
from basaltmq.protocols.amqp091.wire.method_codec import encode_method, encode_payload
from basaltmq.protocols.amqp091.wire.states import Phase

PUBLISH = encode_method(1, m.BasicPublish(0, "", "q", False, False))
ACK = encode_method(1, m.BasicAck(7, True))


def header(body_bytes: int, *, channel: int = 1, class_id: int = 60, weight: int = 0, rest: bytes = b"\0\0") -> bytes:
    return CONTENT_HEAD.pack(HEADER, channel, 12 + len(rest), class_id, weight, body_bytes) + rest + b"\xce"


def body(raw: bytes, channel: int = 1) -> bytes:
    return encode_frame(BODY, channel, raw)


def test_a_connection_opens_step_by_step() -> None:
    session = Session(Limits())
    header_bytes, start_ok, tune_ok, open_vhost = handshake(frame_max=8192, channel_max=5, heartbeat=7)
    assert drain(session, header_bytes) == [HeaderAccepted()]
    (event,) = drain(session, start_ok)
    assert isinstance(event, Received)
    assert isinstance(event.method, m.ConnectionStartOk)
    session.send(0, m.ConnectionTune(2047, 131072, 60))
    drain(session, tune_ok)
    assert (session.tuning.frame_bytes_max, session.tuning.channel_max, session.tuning.heartbeat_s) == (8192, 5, 7)
    drain(session, open_vhost)
    session.send(0, m.ConnectionOpenOk())
    assert session.phase is Phase.RUNNING
    assert [type(method) for method in sent(session)] == [m.ConnectionTune, m.ConnectionOpenOk]


@pytest.mark.parametrize(
    "got", [b"AMQP\0\0\x08\0", b"AMQP\1\1\0\x09", b"HTTP/1.1", b"GET", b"AMQP\0\1", b"\x16\x03\x01\x02\0\1\0\1", b"x"]
)
def test_an_unsupported_protocol_header_gets_the_supported_header_and_the_connection_closes(got: bytes) -> None:
    session = Session(Limits())
    assert drain(session, got) == [HeaderRefused(got[:8])]
    assert b"".join(session.outgoing) == PROTOCOL_HEADER
    assert session.phase is Phase.CLOSED
    assert drain(session, b"more") == []


CLOSED_CHANNEL = encode_method(2, m.BasicAck(1, False))
CODES = {
    "an unknown frame type": (encode_frame(5, 1, b"x"), FRAME_ERROR),
    "an unknown frame type, before it is whole": (HEAD.pack(9, 1, 50), FRAME_ERROR),
    "a frame over the limit, by its head alone": (HEAD.pack(METHOD, 1, FRAME_MAX - 7), FRAME_ERROR),
    "a frame of 4 GiB": (HEAD.pack(BODY, 1, 0xFFFFFFFF), FRAME_ERROR),
    "a wrong frame end": (ACK[:-1] + b"\0", FRAME_ERROR),
    "a wrong end of a publish": (PUBLISH[:-1] + b"\0" + publish(b"x")[len(PUBLISH) :], FRAME_ERROR),
    "a wrong end of a header": (PUBLISH + header(1)[:-1] + b"\0" + body(b"x"), FRAME_ERROR),
    "a wrong end of a header without a body": (PUBLISH + header(0)[:-1] + b"\0", FRAME_ERROR),
    "a wrong end of a body": (PUBLISH + header(1) + body(b"x")[:-1] + b"\0", FRAME_ERROR),
    "a body on another channel": (PUBLISH + header(1) + body(b"x", 2), UNEXPECTED_FRAME),
    "a method frame without a method": (encode_frame(METHOD, 1, b"\0\x3c"), FRAME_ERROR),
    "arguments that break off": (encode_frame(METHOD, 1, encode_payload(m.BasicAck(1, False))[:-3]), FRAME_ERROR),
    "arguments that go on": (encode_frame(METHOD, 1, encode_payload(m.TxSelect()) + b"\0"), FRAME_ERROR),
    "a name that is not UTF-8": (
        encode_frame(METHOD, 1, encode_payload(m.BasicCancel("ab", False)).replace(b"ab", b"\xff\xff")),
        FRAME_ERROR,
    ),
    "a malformed table": (
        encode_frame(METHOD, 1, encode_payload(m.QueueBind(0, "q", "e", "k", False, {}))[:-4] + b"\0\0\0\1\5"),
        SYNTAX_ERROR,
    ),
    "an unknown method": (encode_frame(METHOD, 1, b"\0\x3c\0\x63"), NOT_IMPLEMENTED),
    "an unknown class": (encode_frame(METHOD, 1, b"\0\x63\0\x0a"), NOT_IMPLEMENTED),
    "a method that servers send": (encode_method(1, m.BasicGetEmpty()), COMMAND_INVALID),
    "a delivery from a client": (encode_method(1, m.BasicDeliver("t", 1, False, "", "")), COMMAND_INVALID),
    "a method of a channel on channel 0": (encode_method(0, m.BasicAck(1, False)), CHANNEL_ERROR),
    "a method of the connection on a channel": (encode_method(1, m.ConnectionOpen("/")), COMMAND_INVALID),
    "start-ok in the middle of things": (handshake()[1], CHANNEL_ERROR),
    "tune-ok in the middle of things": (handshake()[2], CHANNEL_ERROR),
    "connection.close-ok unasked": (encode_method(0, m.ConnectionCloseOk()), CHANNEL_ERROR),
    "channel.close-ok unasked": (encode_method(1, m.ChannelCloseOk()), COMMAND_INVALID),
    "a heartbeat on a channel": (encode_frame(8, 1, b""), UNEXPECTED_FRAME),
    "a heartbeat with something in it": (encode_frame(8, 0, b"x"), FRAME_ERROR),
    "a method on a channel that is not open": (CLOSED_CHANNEL, CHANNEL_ERROR),
    "a body on a channel that is not open": (body(b"x", 2), UNEXPECTED_FRAME),
    "a content on channel 0": (header(1, channel=0), UNEXPECTED_FRAME),
    "a channel opened twice": (encode_method(1, m.ChannelOpen()), CHANNEL_ERROR),
    "a channel beyond channel-max": (encode_method(11, m.ChannelOpen()), NOT_ALLOWED),
    "a header without a method": (header(1), UNEXPECTED_FRAME),
    "a body without a method": (body(b"x"), UNEXPECTED_FRAME),
    "a body without a header": (PUBLISH + body(b"x"), UNEXPECTED_FRAME),
    "a method where a header is due": (PUBLISH + ACK, UNEXPECTED_FRAME),
    "a method where a body is due": (PUBLISH + header(3) + ACK, UNEXPECTED_FRAME),
    "a publish where a body is due": (PUBLISH + header(3) + body(b"a") + PUBLISH, UNEXPECTED_FRAME),
    "a second header": (PUBLISH + header(3) + header(3), UNEXPECTED_FRAME),
    "a header of another class": (PUBLISH + header(3, class_id=50), UNEXPECTED_FRAME),
    "a header with a weight": (PUBLISH + header(3, weight=1), UNEXPECTED_FRAME),
    "a header that is too short": (PUBLISH + header(3, rest=b"\0"), FRAME_ERROR),
    "more body than announced": (PUBLISH + header(3) + body(b"abcd"), FRAME_ERROR),
    "more body than announced, in pieces": (PUBLISH + header(3) + body(b"ab") + body(b"cd"), FRAME_ERROR),
}


@pytest.mark.parametrize("what", CODES)
def test_a_protocol_error_closes_the_connection_with_its_code(what: str) -> None:
    raw, code = CODES[what]
    session = running()
    before = ACK + publish(b"fine")
    events = drain(session, before + raw)
    assert [type(event).__name__ for event in events] == ["Received", "Published", "ConnectionFailed"]
    failed = events[-1]
    assert isinstance(failed, ConnectionFailed)
    assert failed.fault.code == code, failed.fault
    (close,) = sent(session)
    assert isinstance(close, m.ConnectionClose)
    assert close.reply_code == code
    assert close.reply_text.startswith(failed.fault.reply_text[:20])
    assert session.phase is Phase.CLOSING
    # Further input of this client has no effect.
    assert published(drain(session, publish(b"late"))) == []
    assert sent(session) == []


@pytest.mark.parametrize("what", CODES)
def test_the_error_code_does_not_depend_on_fragmentation(what: str) -> None:
    raw, code = CODES[what]
    session = running()
    events = [event for each in raw for event in session.receive(bytes((each,)))]
    assert [event.fault.code for event in events if isinstance(event, ConnectionFailed)] == [code]


@pytest.mark.parametrize(
    ("phase", "raw"),
    [
        (1, handshake()[2]),
        (1, handshake()[3]),
        (1, encode_method(1, m.ChannelOpen())),
        (1, PUBLISH),
        (2, handshake()[3]),
        (3, encode_method(1, m.ChannelOpen())),
        (3, handshake()[1]),
    ],
)
def test_handshake_methods_out_of_order_are_refused(phase: int, raw: bytes) -> None:
    session = Session(Limits())
    for step, each in enumerate(handshake()[:phase]):
        drain(session, each)
        if step == 1:
            session.send(0, m.ConnectionTune(2047, 131072, 60))
    (failed,) = drain(session, raw)
    assert isinstance(failed, ConnectionFailed)
    assert failed.fault.code == COMMAND_INVALID


def test_content_before_connection_open_is_an_unexpected_frame() -> None:
    session = Session(Limits())
    drain(session, PROTOCOL_HEADER)
    (failed,) = drain(session, body(b"x"))
    assert isinstance(failed, ConnectionFailed)
    assert failed.fault.code == UNEXPECTED_FRAME


def test_frames_before_tuning_have_the_minimum_size_limit() -> None:
    session = Session(Limits())
    drain(session, PROTOCOL_HEADER)
    (failed,) = drain(session, HEAD.pack(METHOD, 0, 100_000))
    assert isinstance(failed, ConnectionFailed)
    assert failed.fault.code == FRAME_ERROR


@pytest.mark.parametrize(
    ("frame_max", "channel_max", "said"),
    [
        (0, 10, "frame_max = 0"),
        (131073, 10, "131073"),
        (4095, 10, "lower than"),
        (4096, 0, "channel_max = 0"),
        (4096, 2048, "2048"),
    ],
)
def test_tune_ok_above_the_limits_of_the_server_is_refused(frame_max: int, channel_max: int, said: str) -> None:
    session = Session(Limits())
    steps = handshake(frame_max, channel_max)
    drain(session, steps[0])
    drain(session, steps[1])
    session.send(0, m.ConnectionTune(2047, 131072, 60))
    (failed,) = drain(session, steps[2])
    assert isinstance(failed, ConnectionFailed)
    assert failed.fault.code == NOT_ALLOWED
    assert said in failed.fault.text


MESSAGE = st.builds(
    lambda channel, key, exchange, mandatory, properties, body: (channel, exchange, key, mandatory, properties, body),
    st.integers(1, 2),
    st.sampled_from(["q", "other", "ключ"]),
    st.sampled_from(["", "ex"]),
    st.booleans(),
    st.sampled_from([b"\0\0", b"\x10\0\2", b"\x80\0\3abc"]),
    st.binary(max_size=40) | st.sampled_from([b"", b"z" * 4088, b"z" * 4089, b"z" * 9000]),
)


@given(st.lists(MESSAGE, max_size=12), st.lists(st.integers(1, 6000), max_size=8), st.integers(0, 3))
def test_messages_are_decoded_unchanged_for_any_fragmentation(
    sent_messages: list[tuple[int, str, str, bool, bytes, bytes]], cuts: list[int], acks: int
) -> None:
    raw = b""
    for index, (channel, exchange, key, mandatory, properties, payload) in enumerate(sent_messages):
        raw += publish(payload, channel=channel, exchange=exchange, key=key, mandatory=mandatory, properties=properties)
        if index < acks:
            raw += ACK + HEARTBEAT_FRAME
    session = running(channels=2)
    events = []
    at = 0
    for size in [*cuts, len(raw)]:
        events += drain(session, raw[at : at + size])
        at += size
    assert published(events) == sent_messages
    got_acks = [event for event in events if isinstance(event, Received)]
    assert len(got_acks) == min(acks, len(sent_messages))
    assert session._content_bytes == 0


@settings(max_examples=30)
@given(st.lists(MESSAGE, min_size=1, max_size=6))
def test_messages_sent_byte_by_byte_are_decoded_unchanged(
    sent_messages: list[tuple[int, str, str, bool, bytes, bytes]],
) -> None:
    raw = b"".join(
        publish(each[5][:100], channel=each[0], exchange=each[1], key=each[2], mandatory=each[3], properties=each[4])
        for each in sent_messages
    )
    session = running(channels=2)
    events = [event for each in raw for event in session.receive(bytes((each,)))]
    assert published(events) == [(*each[:5], each[5][:100]) for each in sent_messages]


def test_consecutive_messages_of_a_channel_are_one_event() -> None:
    session = running(channels=2)
    raw = publish(b"a") + publish(b"b", properties=b"\x10\0\2") + publish(b"", key="other") + publish(b"c")
    events = [
        event for event in drain(session, raw + publish(b"d", channel=2) + publish(b"e")) if type(event) is Published
    ]
    assert [len(event.messages) for event in events] == [4, 1, 1]
    assert [each[5] for each in published(events)] == [b"a", b"b", b"", b"c", b"d", b"e"]
    assert events[0].messages[0][0] is events[0].messages[1][0], "an owner tells a route it knows by its object"


@pytest.mark.parametrize("what", CODES)
def test_an_error_after_messages_in_the_same_buffer_keeps_its_code(what: str) -> None:
    raw, code = CODES[what]
    session = running()
    events = drain(session, publish(b"1") + publish(b"2") + raw)
    assert isinstance(events[-1], ConnectionFailed)
    assert events[-1].fault.code == code
    assert len(published(events)) == 2


def test_frames_of_two_channels_may_interleave() -> None:
    session = running(channels=2)
    second = encode_method(2, m.BasicPublish(0, "", "q", False, False))
    raw = PUBLISH + second + header(2) + header(2, channel=2) + body(b"A") + body(b"B", 2) + body(b"a") + body(b"b", 2)
    assert [each[5] for each in published(drain(session, raw))] == [b"Aa", b"Bb"]


def test_a_channel_closed_by_the_server_drops_input_until_close_ok() -> None:
    session = running(channels=2)
    drain(session, publish(b"remembered"))
    fault = ChannelFault(PRECONDITION_FAILED, "no", (60, 80))
    session.close_channel(1, fault)
    session.close_channel(1, fault)
    (close,) = sent(session)
    assert close == m.ChannelClose(406, "PRECONDITION_FAILED - no", 60, 80)
    events = drain(session, publish(b"late") + ACK + PUBLISH + publish(b"other", channel=2))
    assert [each[5] for each in published(events)] == [b"other"]
    assert len(events) == 1
    drain(session, encode_method(1, m.ChannelCloseOk()))
    assert drain(session, encode_method(1, m.ChannelOpen())) == [Received(1, m.ChannelOpen())]
    assert [each[5] for each in published(drain(session, publish(b"again")))] == [b"again"]


def test_simultaneous_channel_closes_are_confirmed() -> None:
    session = running()
    session.close_channel(1, ChannelFault(PRECONDITION_FAILED, "no"))
    sent(session)
    close = encode_method(1, m.ChannelClose(200, "bye", 0, 0))
    assert drain(session, close + encode_method(1, m.ChannelCloseOk())) == []
    assert sent(session) == [m.ChannelCloseOk()]
    assert not session.is_open(1)
    session.fail(ConnectionFault(NOT_ALLOWED, "out"))
    sent(session)
    drain(session, encode_method(0, m.ConnectionClose(200, "bye", 0, 0)))
    assert sent(session) == [m.ConnectionCloseOk()]
    assert session.phase is Phase.CLOSED


def test_a_channel_closed_while_an_event_is_handled_drops_the_rest_of_the_buffer() -> None:
    session = running()
    events = []
    for event in session.receive(publish(b"1") + publish(b"2") + ACK + publish(b"3", key="k") + publish(b"4", key="k")):
        events.append(event)
        if isinstance(event, Received):
            session.close_channel(1, ChannelFault(PRECONDITION_FAILED, "unknown delivery tag 7", (60, 80)))
    assert [each[5] for each in published(events)] == [b"1", b"2"]


def test_an_incomplete_message_is_dropped_when_its_channel_closes() -> None:
    session = running(Limits(content_bytes_max=1000))
    for _ in range(5):
        drain(session, PUBLISH + header(900) + body(b"x" * 800))
        session.close_channel(1, ChannelFault(PRECONDITION_FAILED, "no"))
        assert session._content_bytes == 0, "what nobody will ask for is not kept until the client answers"
        drain(session, encode_method(1, m.ChannelCloseOk()))
        drain(session, encode_method(1, m.ChannelOpen()))
    assert session.phase is Phase.RUNNING
    assert session._content_bytes == 0


def test_the_total_size_of_incomplete_messages_is_bounded() -> None:
    session = running(Limits(content_bytes_max=2000), channels=3)
    raw = b"".join(
        encode_method(number, m.BasicPublish(0, "", "q", False, False)) + header(1000, channel=number)
        for number in (1, 2, 3)
    )
    assert drain(session, raw + body(b"x" * 900, 1) + body(b"x" * 900, 2)) == []
    (failed,) = drain(session, body(b"x" * 900, 3))
    assert isinstance(failed, ConnectionFailed)
    assert failed.fault.code == RESOURCE_ERROR


@pytest.mark.promise("P8")
def test_an_incomplete_message_of_tiny_frames_uses_few_objects() -> None:
    session = running()
    count = 20_000
    assert drain(session, PUBLISH + header(2 * count) + (body(b"xy") + body(b"")) * (count - 1)) == []
    assert len(session.channels[1].pieces) < 30
    (event,) = drain(session, body(b"xy"))
    assert isinstance(event, Published)
    assert event.messages[0][2] == b"xy" * count


def test_a_message_over_the_limit_closes_its_channel_before_its_body_arrives() -> None:
    session = running(Limits(message_bytes_max=100), channels=2)
    events = drain(session, publish(b"x" * 100) + publish(b"x" * 101) + publish(b"y", channel=2))
    assert isinstance(events[1], ChannelFailed)
    assert events[1].fault.code == PRECONDITION_FAILED
    assert [each[5] for each in published(events)] == [b"x" * 100, b"y"]
    # The same on the fast path, where the route is known.
    session = running(Limits(message_bytes_max=100))
    assert published(drain(session, publish(b"1")))
    events = drain(session, publish(b"x" * 100) + publish(b"x" * 101))
    assert [type(event).__name__ for event in events] == ["Published", "ChannelFailed"]


def test_the_pieces_of_an_incomplete_body_frame_are_joined_once() -> None:
    """Sent byte by byte, the work grows with the bytes, not with their square."""
    session = running(frame_max=131072)
    raw = body(b"x" * 100_000)
    drain(session, PUBLISH + header(100_000) + raw[:10])
    for at in range(10, 1000):
        drain(session, raw[at : at + 1])
    assert session._open_frame is not None
    assert [len(piece) for piece in session._open_frame.pieces] == [993]
    assert [len(each[5]) for each in published(drain(session, raw[1000:]))] == [100_000]
    assert session._open_frame is None


@pytest.mark.parametrize("read_bytes", [7, 8, 9, 4_103, 65_536, 131_071, 131_072, 256_000])
def test_a_body_of_many_frames_arrives_as_it_was_sent_however_it_is_read(read_bytes: int) -> None:
    session = running(frame_max=131072)
    content = bytes(range(251)) * 2_000
    frames = b"".join(body(content[at : at + 131_064]) for at in range(0, len(content), 131_064))
    raw = PUBLISH + header(len(content)) + frames + publish(b"small")
    found = []
    for at in range(0, len(raw), read_bytes):
        found += published(drain(session, raw[at : at + read_bytes]))
    assert [each[5] for each in found] == [content, b"small"]
    assert all(type(each[5]) is bytes for each in found)


def test_a_body_frame_in_pieces_must_end_with_the_frame_end() -> None:
    session = running(frame_max=131072)
    raw = body(b"x" * 100_000)
    drain(session, PUBLISH + header(100_000) + raw[:50_000])
    drain(session, raw[50_000:-1])
    (failed,) = drain(session, b"\0")
    assert isinstance(failed, ConnectionFailed)
    assert failed.fault.code == FRAME_ERROR


def test_small_pieces_of_a_body_do_not_keep_whole_reads_in_memory() -> None:
    session = running(frame_max=131072)
    heartbeats = HEARTBEAT_FRAME * 10_000
    drain(session, PUBLISH + header(100_000) + body(b"x" * 5_000) + heartbeats)
    assert [type(piece) for piece in session.channels[1].pieces] == [bytes]
    drain(session, body(b"x" * 60_000) + body(b"x" * 35_000)[:30_000])
    assert [type(piece) for piece in session.channels[1].pieces] == [bytes, memoryview]


def test_the_cache_of_routes_is_bounded() -> None:
    session = running()
    raw = b"".join(publish(b"x", key=f"key-{number}") for number in range(3 * PUBLISH_MEMO_MAX))
    assert len(published(drain(session, raw))) == 3 * PUBLISH_MEMO_MAX
    assert len(session._memo) <= PUBLISH_MEMO_MAX


def test_nothing_is_sent_after_the_connection_closed() -> None:
    session = running()
    drain(session, encode_method(0, m.ConnectionClose(200, "bye", 0, 0)))
    assert sent(session) == [m.ConnectionCloseOk()]
    with pytest.raises(LocalProtocolError, match="the connection is closed"):
        session.send(1, m.BasicQosOk())


def test_long_texts_are_truncated_to_a_short_string() -> None:
    session = running()
    session.fail(ConnectionFault(NOT_ALLOWED, "ü" * 300))
    (close,) = sent(session)
    assert isinstance(close, m.ConnectionClose)
    assert len(close.reply_text.encode()) <= 255
    assert close.reply_text.endswith("...")


def test_the_output_consists_of_complete_frames() -> None:
    session = running()
    session.send(1, m.QueueDeclareOk("q", 1, 2))
    session.close_channel(1, ChannelFault(PRECONDITION_FAILED, "x"))
    assert len(list(frames(b"".join(session.outgoing)))) == 2
