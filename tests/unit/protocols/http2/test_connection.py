"""HTTP/2 without I/O: input, output, and the errors for protocol violations."""

from __future__ import annotations

import pytest
from hpack import Encoder
from tests.unit.protocols.http2.peer import (
    OPENING,
    REQUEST,
    Clock,
    Frame,
    data,
    frames,
    goaway,
    headers,
    resets,
    served,
)

from basaltmq.protocols.grpc.http2 import frames as f
from basaltmq.protocols.grpc.http2.budget import ALLOWANCE, PER_SECOND
from basaltmq.protocols.grpc.http2.connection import CONTINUATIONS_MAX, Connection
from basaltmq.protocols.grpc.http2.events import ConnectionFailed, Data, Headers, Reset, Writable
from basaltmq.protocols.grpc.http2.frame_sender import CONNECTION_WINDOW_BYTES, STREAM_WINDOW_BYTES
from basaltmq.protocols.grpc.http2.frames import (
    FRAME_BYTES_ACCEPTED,
    FRAME_BYTES_MIN,
    WINDOW_DEFAULT,
    WINDOW_MAX,
    Code,
    Setting,
)
from basaltmq.protocols.grpc.http2.header_blocks import LIST_BYTES_MAX, Field, HeaderCache, encode
from basaltmq.protocols.grpc.http2.stream import Stream

BLOCK = encode([(":status", "200")])
TRAILER = encode([("grpc-status", "0")])


def opened(core: Connection[list[Field]], stream: int = 1) -> Stream:
    (event,) = core.receive(headers(stream))
    assert isinstance(event, Headers)
    return event.stream


def sent(core: Connection[list[Field]], kind: int = f.DATA) -> list[Frame]:
    return [each for each in frames(core.take()) if each.kind == kind]


def test_a_request_is_decoded_and_its_response_encoded() -> None:
    core = served()
    first, second = core.receive(headers(1) + data(1, b"question", ends=True))
    assert isinstance(first, Headers)
    assert first.fields == REQUEST
    assert isinstance(second, Data)
    assert (second.chunk, second.has_ended) == (b"question", True)
    core.respond(first.stream, BLOCK, b"ans", b"wer", TRAILER)
    head, content, end = frames(core.take())
    assert head == Frame(f.HEADERS, f.END_HEADERS, 1, b"\x20" + BLOCK), "the first block says that there is no table"
    assert content == Frame(f.DATA, 0, 1, b"answer")
    assert end == Frame(f.HEADERS, f.END_HEADERS | f.END_STREAM, 1, TRAILER)
    assert len(core) == 0


def test_events_do_not_depend_on_fragmentation() -> None:
    raw = OPENING + headers(1) + data(1, b"x" * 100, ends=True)
    for size in (1, 2, 7, 50):
        core: Connection[list[Field]] = Connection(HeaderCache(list), clock_s=Clock())
        events = [e for at in range(0, len(raw), size) for e in core.receive(raw[at : at + size])]
        assert [type(each) for each in events] == [Headers, Data]


def test_basalts_client_and_server_interoperate() -> None:
    client: Connection[list[Field]] = Connection(HeaderCache(list), is_client=True, clock_s=Clock())
    server: Connection[list[Field]] = Connection(HeaderCache(list), clock_s=Clock())
    content = bytes(range(256)) * 2_000
    stream = client.open(encode(REQUEST))
    client.send_last(stream, content[:3], content[3:])
    got = b""
    theirs: Stream | None = None
    for _ in range(100):
        for event in server.receive(client.take()):
            if isinstance(event, Headers):
                theirs = event.stream
            elif isinstance(event, Data):
                got += event.chunk
                server.consumed(event.stream, event.size_bytes)
                if event.has_ended:
                    server.respond(event.stream, BLOCK, content[:7], content[7:], TRAILER)
        back = server.take()
        if not back:
            break
        for answer in client.receive(back):
            if isinstance(answer, Data):
                client.consumed(answer.stream, answer.size_bytes)
    assert got == content
    assert theirs is not None
    assert theirs.is_closed
    assert stream.received_end


def test_entries_of_a_header_table_older_than_the_settings_are_decoded() -> None:
    core = served()
    encoder = Encoder()
    for stream in (1, 3):
        block = bytes(encoder.encode(REQUEST))
        (event,) = core.receive(f.frame(f.HEADERS, f.END_HEADERS, stream, block))
        assert isinstance(event, Headers)
        assert event.fields == REQUEST
    core.receive(f.SETTINGS_ACK)
    encoder.header_table_size = 0
    for stream in (5, 7, 9):
        (event,) = core.receive(f.frame(f.HEADERS, f.END_HEADERS, stream, bytes(encoder.encode(REQUEST))))
        assert isinstance(event, Headers)
        assert event.fields == REQUEST


def test_header_blocks_are_cached_only_without_a_dynamic_table() -> None:
    reads = 0

    def read(fields: list[Field]) -> list[Field]:
        nonlocal reads
        reads += 1
        return fields

    header_cache = HeaderCache(read)
    core: Connection[list[Field]] = Connection(header_cache, clock_s=Clock())
    core.receive(OPENING)
    for stream in (1, 3):
        core.receive(headers(stream))
    assert reads == 2
    core.receive(f.SETTINGS_ACK + f.frame(f.HEADERS, f.END_HEADERS, 5, b"\x20" + encode(REQUEST)))
    for stream in (7, 9, 11):
        core.receive(headers(stream))
    assert reads == 4, "the size update, and the first block after it"


def test_a_header_table_update_above_the_limit_is_refused() -> None:
    core = served()
    core.receive(f.SETTINGS_ACK + f.frame(f.HEADERS, f.END_HEADERS, 1, b"\x20" + encode(REQUEST)))
    core.receive(f.frame(f.HEADERS, f.END_HEADERS, 3, b"\x3f\xe1\x1f" + encode(REQUEST)))
    assert goaway(core.take()) is Code.COMPRESSION_ERROR


def test_data_waits_for_the_flow_control_windows() -> None:
    core = served()
    stream = opened(core)
    content = b"x" * (WINDOW_DEFAULT + 100)
    assert not core.send(stream, content)
    core.end(stream, TRAILER)
    assert sum(len(each.payload) for each in sent(core)) == WINDOW_DEFAULT
    assert core.waiting_bytes == 100
    assert core.receive(f.window_update(1, 100)) == [], "the connection's window is used up too"
    assert core.take() == b""
    core.receive(f.window_update(0, 60))
    core.receive(f.window_update(0, 40))
    assert [(each.kind, len(each.payload)) for each in frames(core.take())][:3] == [
        (f.DATA, 60),
        (f.DATA, 40),
        (f.HEADERS, len(TRAILER) + 1),
    ]
    assert core.waiting_bytes == 0


def test_consecutive_writes_share_frames_in_order() -> None:
    core = served()
    stream = opened(core)
    core.take()
    contents = (b"prefix", b"", b"m" * FRAME_BYTES_MIN, b"t" * (WINDOW_DEFAULT - FRAME_BYTES_MIN))
    assert not core.send(stream, *contents)
    assert core.waiting_bytes == len(b"prefix")
    assert not core.send(stream, b"later")
    core.receive(f.window_update(0, 100))
    core.receive(f.window_update(1, 100))
    payloads = [each.payload for each in sent(core)]
    assert b"".join(payloads) == b"".join(contents) + b"later"
    assert payloads[0] == b"prefix" + b"m" * (FRAME_BYTES_MIN - len(b"prefix"))
    assert payloads[-1] == b"t" * len(b"prefix") + b"later"
    assert core.waiting_bytes == 0


def test_blocked_streams_are_served_round_robin_and_notified() -> None:
    core = served()
    first, second = opened(core, 1), opened(core, 3)
    core.send(first, b"f" * (WINDOW_DEFAULT + 2 * FRAME_BYTES_MIN))
    core.send(second, b"s" * 2 * FRAME_BYTES_MIN)
    core.take()
    core.receive(f.settings([(Setting.INITIAL_WINDOW_SIZE, 1 << 20)]))
    events = core.receive(f.window_update(0, 1 << 20))
    assert [each.payload[:1] for each in sent(core)] == [b"f", b"s", b"f", b"s"]
    assert {each.stream.id for each in events if isinstance(each, Writable)} == {1, 3}


def test_a_window_may_become_negative() -> None:
    core = served()
    stream = opened(core)
    core.send(stream, b"x" * 100)
    core.take()
    core.receive(f.settings([(Setting.INITIAL_WINDOW_SIZE, 0)]))
    assert not core.send(stream, b"y")
    core.receive(f.window_update(1, 100))
    assert not sent(core), "a hundred bytes were owed"
    core.receive(f.window_update(1, 1))
    assert [each.payload for each in sent(core)] == [b"y"]


def test_windows_are_updated_as_data_is_consumed() -> None:
    core = served()
    stream = opened(core)
    size = FRAME_BYTES_MIN
    count = CONNECTION_WINDOW_BYTES // size * 3
    for _ in range(count):
        (event,) = core.receive(data(1, b"x" * size))
        assert isinstance(event, Data)
        core.consumed(stream, event.size_bytes)
    given = {0: 0, 1: 0}
    for each in sent(core, f.WINDOW_UPDATE):
        given[each.stream] += f.u32(each.payload)
    assert given[0] >= count * size - CONNECTION_WINDOW_BYTES // 2
    assert given[1] >= count * size - STREAM_WINDOW_BYTES // 2


def test_data_beyond_the_window_of_a_stream_resets_only_that_stream() -> None:
    core = served()
    opened(core, 1)
    opened(core, 3)
    for _ in range(STREAM_WINDOW_BYTES // FRAME_BYTES_MIN):
        core.receive(data(1, b"x" * FRAME_BYTES_MIN))
    core.take()
    (event,) = core.receive(data(1, b"x"))
    assert isinstance(event, Reset)
    raw = core.take()
    assert resets(raw) == {1: Code.FLOW_CONTROL_ERROR}
    assert goaway(raw) is None
    assert [type(each) for each in core.receive(data(3, b"x"))] == [Data]


def test_data_beyond_the_window_of_the_connection_closes_it() -> None:
    core = served()
    streams = range(1, 2 * CONNECTION_WINDOW_BYTES // STREAM_WINDOW_BYTES + 2, 2)
    for stream in streams:
        opened(core, stream)
    for stream in streams:
        for _ in range(STREAM_WINDOW_BYTES // FRAME_BYTES_MIN):
            core.receive(data(stream, b"x" * FRAME_BYTES_MIN))
    assert core.is_over
    assert goaway(core.take()) is Code.FLOW_CONTROL_ERROR


def padded(kind: int, flags: int, stream: int, payload: bytes) -> bytes:
    return f.frame(kind, flags | f.PADDED, stream, payload)


FAULTS: list[tuple[str, bytes, Code]] = [
    ("a frame that is too large", f.head(FRAME_BYTES_ACCEPTED + 1, f.DATA, 0, 1), Code.FRAME_SIZE_ERROR),
    ("data of no stream", data(0, b"x"), Code.PROTOCOL_ERROR),
    ("data of a stream that was not opened", data(5, b"x"), Code.PROTOCOL_ERROR),
    ("a stream with an even number", headers(2), Code.PROTOCOL_ERROR),
    ("a stream that was over", headers(1, ends=True) + headers(5) + headers(3), Code.STREAM_CLOSED),
    ("padding that is all there is", headers(1) + padded(f.DATA, 0, 1, b"\x05abc"), Code.PROTOCOL_ERROR),
    ("padding without a length", headers(1) + padded(f.DATA, 0, 1, b""), Code.PROTOCOL_ERROR),
    ("a priority cut short", f.frame(f.HEADERS, f.PRIORITIZED | f.END_HEADERS, 1, b"abc"), Code.FRAME_SIZE_ERROR),
    ("a block that is interrupted", f.frame(f.HEADERS, 0, 1, encode(REQUEST)) + data(1, b""), Code.PROTOCOL_ERROR),
    (
        "a block that goes on elsewhere",
        f.frame(f.HEADERS, 0, 1, b"") + f.frame(f.CONTINUATION, 0, 3, b""),
        Code.PROTOCOL_ERROR,
    ),
    ("a continuation of nothing", f.frame(f.CONTINUATION, f.END_HEADERS, 1, b""), Code.PROTOCOL_ERROR),
    ("a block that is none", f.frame(f.HEADERS, f.END_HEADERS, 1, b"\xff\xff\xff\xff\xff\xff"), Code.COMPRESSION_ERROR),
    ("an index of nothing", f.frame(f.HEADERS, f.END_HEADERS, 1, b"\xbf"), Code.COMPRESSION_ERROR),
    ("a block cut short", f.frame(f.HEADERS, f.END_HEADERS, 1, encode(REQUEST)[:-3]), Code.COMPRESSION_ERROR),
    ("settings of a stream", f.frame(f.SETTINGS, 0, 1), Code.PROTOCOL_ERROR),
    ("settings of the wrong size", f.frame(f.SETTINGS, 0, 0, b"12345"), Code.FRAME_SIZE_ERROR),
    ("an answer to settings that says something", f.frame(f.SETTINGS, f.ACK, 0, b"123456"), Code.FRAME_SIZE_ERROR),
    ("a window beyond all", f.settings([(Setting.INITIAL_WINDOW_SIZE, 1 << 31)]), Code.FLOW_CONTROL_ERROR),
    ("frames of nothing", f.settings([(Setting.MAX_FRAME_SIZE, 1)]), Code.PROTOCOL_ERROR),
    ("push, half", f.settings([(Setting.ENABLE_PUSH, 2)]), Code.PROTOCOL_ERROR),
    ("a push", f.frame(f.PUSH_PROMISE, 0, 1, b"1234"), Code.PROTOCOL_ERROR),
    ("a ping of a stream", f.frame(f.PING, 0, 1, b"12345678"), Code.PROTOCOL_ERROR),
    ("a ping of the wrong size", f.frame(f.PING, 0, 0, b"1234567"), Code.FRAME_SIZE_ERROR),
    ("a goaway of a stream", f.frame(f.GOAWAY, 0, 1, b"12345678"), Code.PROTOCOL_ERROR),
    ("a goaway too short", f.frame(f.GOAWAY, 0, 0, b"1234567"), Code.FRAME_SIZE_ERROR),
    ("a window that grows by nothing", f.window_update(0, 0), Code.PROTOCOL_ERROR),
    ("a window that grows beyond all", f.window_update(0, WINDOW_MAX), Code.FLOW_CONTROL_ERROR),
    ("a window of the wrong size", f.frame(f.WINDOW_UPDATE, 0, 0, b"123"), Code.FRAME_SIZE_ERROR),
    ("a window of a stream that was not opened", f.window_update(7, 1), Code.PROTOCOL_ERROR),
    ("a reset of a stream that was not opened", f.rst_stream(7, 0), Code.PROTOCOL_ERROR),
    ("a reset of the wrong size", headers(1) + f.frame(f.RST_STREAM, 0, 1, b"12"), Code.FRAME_SIZE_ERROR),
    ("a priority of no stream", f.frame(f.PRIORITY, 0, 0, b"12345"), Code.PROTOCOL_ERROR),
    (
        "settings that make a stream's window too large",
        headers(1) + f.window_update(1, WINDOW_MAX - WINDOW_DEFAULT) + f.settings([(4, WINDOW_DEFAULT + 1)]),
        Code.FLOW_CONTROL_ERROR,
    ),
]


@pytest.mark.parametrize(("raw", "code"), [pytest.param(raw, code, id=name) for name, raw, code in FAULTS])
def test_a_connection_error_closes_the_connection_with_its_code(raw: bytes, code: Code) -> None:
    core = served()
    events = core.receive(raw)
    assert isinstance(events[-1], ConnectionFailed)
    assert goaway(core.take()) is code
    assert core.receive(headers(99)) == [], "nothing is heard after the end"
    assert core.take() == b""


STREAM_FAULTS: list[tuple[str, bytes, Code]] = [
    ("data after its end", data(1, b"x", ends=True) + data(1, b"x"), Code.STREAM_CLOSED),
    ("headers after its end", data(1, b"x", ends=True) + headers(1, ends=True), Code.STREAM_CLOSED),
    ("headers in its middle", headers(1), Code.PROTOCOL_ERROR),
    ("a window that grows by nothing", f.window_update(1, 0), Code.PROTOCOL_ERROR),
    ("a window that grows beyond all", f.window_update(1, WINDOW_MAX), Code.FLOW_CONTROL_ERROR),
    ("a priority of the wrong size", f.frame(f.PRIORITY, 0, 1, b"1"), Code.FRAME_SIZE_ERROR),
]


@pytest.mark.parametrize(("raw", "code"), [pytest.param(raw, code, id=name) for name, raw, code in STREAM_FAULTS])
def test_a_stream_error_resets_only_that_stream(raw: bytes, code: Code) -> None:
    core = served()
    opened(core, 1)
    opened(core, 3)
    events = core.receive(raw)
    assert isinstance(events[-1], Reset)
    answer = core.take()
    assert resets(answer) == {1: code}
    assert goaway(answer) is None
    assert [type(each) for each in core.receive(data(3, b"x"))] == [Data]
    assert core.receive(data(1, b"was on its way")) == []


@pytest.mark.parametrize(
    "raw",
    [b"GET / HTTP/1.1\r\n\r\n", b"\x16\x03\x01\x02\x00", f.PREFACE + headers(1), f.PREFACE + f.SETTINGS_ACK],
    ids=["HTTP/1.1", "TLS", "no settings", "an answer to settings"],
)
def test_a_wrong_preface_closes_the_connection(raw: bytes) -> None:
    core: Connection[list[Field]] = Connection(HeaderCache(list), clock_s=Clock())
    core.take()
    assert [type(each) for each in core.receive(raw)] == [ConnectionFailed]
    assert goaway(core.take()) is Code.PROTOCOL_ERROR


USELESS: list[tuple[str, bytes]] = [
    ("pings", f.ping(b"12345678")),
    ("settings", f.settings([])),
    ("empty data", data(1, b"")),
    ("priorities", f.frame(f.PRIORITY, 0, 1, b"12345")),
    ("unknown frames", f.frame(77, 0, 0, b"x")),
]


@pytest.mark.parametrize("raw", [pytest.param(raw, id=name) for name, raw in USELESS])
def test_a_flood_of_useless_frames_closes_the_connection(raw: bytes) -> None:
    clock = Clock()
    core = served(clock)
    opened(core)
    is_over = []
    for count in (ALLOWANCE // 2, ALLOWANCE + 1):
        core.receive(raw * count)
        is_over.append(core.is_over)
    assert is_over == [False, True]
    assert goaway(core.take()) is Code.ENHANCE_YOUR_CALM


def test_a_low_rate_of_useless_frames_is_accepted() -> None:
    clock = Clock()
    core = served(clock)
    for _ in range(50):
        clock.now_s += 1
        core.receive(f.ping(b"12345678") * (PER_SECOND - 1))
    assert not core.is_over
    assert len(sent(core, f.PING)) == 50 * (PER_SECOND - 1)


def test_pings_between_requests_are_not_limited() -> None:
    core = served()
    for number in range(1, 3 * ALLOWANCE, 2):
        event = core.receive(headers(number) + data(number, b"x", ends=True) + f.ping(b"12345678"))[0]
        assert isinstance(event, Headers)
        core.respond(event.stream, BLOCK, b"y", b"", TRAILER)
        core.take()
    assert not core.is_over


def test_rapid_resets_close_the_connection() -> None:
    core = served()
    for number in range(1, 4 * ALLOWANCE, 2):
        core.receive(headers(number) + f.rst_stream(number, Code.CANCEL))
        if core.is_over:
            break
    assert core.is_over
    assert number < 2 * ALLOWANCE + 10
    assert goaway(core.take()) is Code.ENHANCE_YOUR_CALM


def test_provoked_resets_count_like_resets() -> None:
    core = served()
    for number in range(1, 4 * ALLOWANCE, 2):
        core.receive(headers(number) + f.window_update(number, 0))
    assert core.is_over
    assert goaway(core.take()) is Code.ENHANCE_YOUR_CALM


def test_streams_over_the_limit_are_refused_and_others_continue() -> None:
    core = served(streams_max=2)
    first = opened(core, 1)
    opened(core, 3)
    assert core.receive(headers(5)) == []
    assert resets(core.take()) == {5: Code.REFUSED_STREAM}
    core.receive(data(1, b"", ends=True))
    core.respond(first, BLOCK, b"x", b"", TRAILER)
    assert opened(core, 7).id == 7


def test_an_endless_header_block_closes_the_connection() -> None:
    core = served()
    core.receive(f.frame(f.HEADERS, 0, 1, b""))
    core.receive(f.frame(f.CONTINUATION, 0, 1, b"") * CONTINUATIONS_MAX)
    assert not core.is_over
    core.receive(f.frame(f.CONTINUATION, 0, 1, b""))
    assert goaway(core.take()) is Code.ENHANCE_YOUR_CALM


def test_a_header_block_over_the_limit_closes_the_connection() -> None:
    core = served()
    core.receive(f.frame(f.HEADERS, 0, 1, bytes(LIST_BYTES_MAX)))
    core.receive(f.frame(f.CONTINUATION, f.END_HEADERS, 1, b"x"))
    assert goaway(core.take()) is Code.ENHANCE_YOUR_CALM


def test_a_header_block_that_decompresses_over_the_limit_is_refused() -> None:
    core = served()
    bomb = b"\x40\x01a\x7f\xa1\x1e" + bytes(4_000) + b"\xbe" * 200
    core.receive(f.frame(f.HEADERS, f.END_HEADERS, 1, bomb))
    assert goaway(core.take()) is Code.ENHANCE_YOUR_CALM


def test_an_early_response_resets_the_request_without_an_error() -> None:
    core = served()
    stream = opened(core)
    core.headers(stream, BLOCK)
    core.end(stream, TRAILER)
    assert resets(core.take()) == {1: Code.NO_ERROR}
    assert core.receive(data(1, b"x" * 100)) == []
    assert not core.is_over


def test_no_streams_are_accepted_after_goaway() -> None:
    core = served()
    stream = opened(core)
    core.leave(text="bye")
    assert goaway(core.take()) is Code.NO_ERROR
    core.receive(headers(3))
    assert resets(core.take()) == {3: Code.REFUSED_STREAM}
    core.receive(data(1, b"", ends=True))
    core.respond(stream, BLOCK, b"x", b"", TRAILER)
    assert [each.payload for each in sent(core)] == [b"x"]


def test_pending_data_of_a_reset_stream_is_dropped() -> None:
    core = served()
    stream = opened(core)
    core.send(stream, bytes(1 << 20))
    assert core.waiting_bytes
    assert [type(each) for each in core.receive(f.rst_stream(1, Code.CANCEL))] == [Reset]
    assert core.waiting_bytes == 0
    core.take()
    core.receive(f.window_update(0, 1 << 20))
    assert core.take() == b""


def test_the_header_block_cache_does_not_affect_the_tables_of_other_connections() -> None:
    header_cache: HeaderCache[list[Field]] = HeaderCache(list)
    cores: list[Connection[list[Field]]] = [Connection(header_cache, clock_s=Clock()) for _ in range(2)]
    indexed = b"\x40\x01a\x01b"
    for core in cores:
        core.receive(OPENING)
    known, other = cores
    known.receive(f.SETTINGS_ACK + f.frame(f.HEADERS, f.END_HEADERS, 1, b"\x20" + indexed))
    known.receive(f.frame(f.HEADERS, f.END_HEADERS, 3, indexed))
    other.receive(f.frame(f.HEADERS, f.END_HEADERS, 1, indexed))
    (event,) = other.receive(f.frame(f.HEADERS, f.END_HEADERS, 3, b"\xbe"))
    assert isinstance(event, Headers)
    assert event.fields == [("a", "b")], "the first entry of its own table"
