"""Frame sizes: announced and accepted ones, sent ones, and the cost of a slow sender."""

from __future__ import annotations

import random
import sys

import pytest
from tests.unit.protocols.http2.peer import OPENING, REQUEST, Clock, data, frames, goaway, headers, served

from basaltmq.protocols.frame_buffer import PART_BYTES_MIN, FrameBuffer
from basaltmq.protocols.grpc.http2 import frames as f
from basaltmq.protocols.grpc.http2.connection import Connection
from basaltmq.protocols.grpc.http2.events import ConnectionFailed, Data, Headers
from basaltmq.protocols.grpc.http2.frames import (
    FRAME_BYTES_ACCEPTED,
    FRAME_BYTES_MAX,
    FRAME_BYTES_MIN,
    HEAD_BYTES,
    Code,
    Setting,
)
from basaltmq.protocols.grpc.http2.header_blocks import Field, HeaderCache, encode
from basaltmq.protocols.grpc.http2.stream import Stream

CONTENT = random.Random(7).randbytes(FRAME_BYTES_ACCEPTED)


def opened(core: Connection[list[Field]], stream: int = 1) -> Stream:
    (event,) = core.receive(headers(stream))
    assert isinstance(event, Headers)
    return event.stream


def sizes(core: Connection[list[Field]]) -> list[int]:
    """Return the sizes of the data frames in the output."""
    return [len(each.payload) for each in frames(core.take()) if each.kind == f.DATA]


@pytest.mark.parametrize("is_client", [False, True])
def test_both_sides_announce_a_large_max_frame_size(is_client: bool) -> None:
    core: Connection[list[Field]] = Connection(HeaderCache(list), is_client=is_client, clock_s=Clock())
    found = frames(core.take().removeprefix(f.PREFACE))[0]
    assert (Setting.MAX_FRAME_SIZE, FRAME_BYTES_ACCEPTED) in f.settings_of(found.payload)


@pytest.mark.parametrize("piece_bytes", [13, 4_095, 65_536, len(CONTENT), 1 << 20])
def test_a_frame_of_the_announced_size_is_decoded_for_any_fragmentation(piece_bytes: int) -> None:
    core = served()
    stream = opened(core)
    raw = data(1, CONTENT) + data(1, b"end", ends=True)
    events = [e for at in range(0, len(raw), piece_bytes) for e in core.receive(raw[at : at + piece_bytes])]
    first, last = events
    assert isinstance(first, Data)
    assert isinstance(last, Data)
    assert (bytes(first.chunk), first.size_bytes, first.has_ended) == (CONTENT, len(CONTENT), False)
    assert (last.chunk, last.has_ended) == (b"end", True)
    assert first.stream is stream
    assert len(core._frame_buffer) == 0


def test_a_large_frame_may_be_padded() -> None:
    core = served()
    opened(core)
    padding = 200
    content = CONTENT[: FRAME_BYTES_ACCEPTED - padding - 1]
    payload = bytes([padding]) + content + bytes(padding)
    (event,) = core.receive(f.frame(f.DATA, f.PADDED | f.END_STREAM, 1, payload))
    assert isinstance(event, Data)
    assert (bytes(event.chunk), event.size_bytes) == (content, FRAME_BYTES_ACCEPTED)


def test_a_frame_over_the_announced_size_is_refused_at_its_header() -> None:
    core = served()
    opened(core)
    (event,) = core.receive(f.head(FRAME_BYTES_ACCEPTED + 1, f.DATA, 0, 1))
    assert isinstance(event, ConnectionFailed)
    assert goaway(core.take()) is Code.FRAME_SIZE_ERROR


@pytest.mark.parametrize("kind", [f.HEADERS, f.CONTINUATION, f.SETTINGS, f.GOAWAY, f.PING, f.PRIORITY])
def test_only_data_frames_may_be_large(kind: int) -> None:
    core = served()
    (event,) = core.receive(f.head(FRAME_BYTES_MIN + 1, kind, 0, 1))
    assert isinstance(event, ConnectionFailed)
    assert goaway(core.take()) is Code.ENHANCE_YOUR_CALM


def test_a_large_frame_of_an_unknown_type_is_skipped() -> None:
    core = served()
    raw = f.frame(77, 0, 0, CONTENT) + headers(1)
    events = [e for at in range(0, len(raw), 10_000) for e in core.receive(raw[at : at + 10_000])]
    assert [type(each) for each in events] == [Headers]


def test_frames_respect_the_peers_max_frame_size_and_the_minimum_before_its_settings() -> None:
    core = served()
    stream = opened(core)
    core.receive(f.window_update(0, 1 << 30) + f.window_update(1, 1 << 30))
    core.take()
    content = bytes(600_000)
    core.send(stream, content)
    assert max(sizes(core)) == FRAME_BYTES_MIN
    for said, kept in ((100_000, 100_000), (FRAME_BYTES_MAX, FRAME_BYTES_ACCEPTED), (FRAME_BYTES_MIN, FRAME_BYTES_MIN)):
        core.receive(f.settings([(Setting.MAX_FRAME_SIZE, said)]))
        core.send(stream, content)
        found = sizes(core)
        assert max(found) == kept
        assert sum(found) == len(content)


def test_data_that_waits_for_a_window_is_split_by_the_current_max_frame_size() -> None:
    core = served()
    stream = opened(core)
    core.receive(f.settings([(Setting.MAX_FRAME_SIZE, 100_000)]))
    core.send(stream, bytes(400_000))
    core.end(stream, encode([("grpc-status", "0")]))
    before = sizes(core)
    assert max(before) > FRAME_BYTES_MIN, "one frame up to the window"
    core.receive(f.settings([(Setting.MAX_FRAME_SIZE, FRAME_BYTES_MIN)]))
    core.receive(f.window_update(1, 1 << 20) + f.window_update(0, 1 << 20))
    after = sizes(core)
    assert max(after) == FRAME_BYTES_MIN
    assert sum(before) + sum(after) == 400_000


@pytest.mark.parametrize("said", [FRAME_BYTES_MIN - 1, FRAME_BYTES_MAX + 1])
def test_an_invalid_max_frame_size_is_refused(said: int) -> None:
    core = served()
    core.receive(f.settings([(Setting.MAX_FRAME_SIZE, said)]))
    assert goaway(core.take()) is Code.PROTOCOL_ERROR


def test_a_client_with_a_small_max_frame_size_may_send_large_frames() -> None:
    core = served()
    (event, content) = core.receive(headers(1) + data(1, CONTENT, ends=True))
    assert isinstance(event, Headers)
    assert isinstance(content, Data)
    core.respond(event.stream, encode([(":status", "200")]), bytes(5), bytes(19_995), encode([("grpc-status", "0")]))
    assert sizes(core) == [FRAME_BYTES_MIN, 20_000 - FRAME_BYTES_MIN]
    event, _ = core.receive(headers(3) + data(3, b"again", ends=True))
    assert isinstance(event, Headers)
    core.respond(event.stream, encode([(":status", "200")]), bytes(5), bytes(19_995), encode([("grpc-status", "0")]))
    assert sizes(core) == [FRAME_BYTES_MIN, 20_000 - FRAME_BYTES_MIN]


def test_large_data_is_not_copied_and_small_data_is() -> None:
    core = served()
    opened(core)
    (large,) = core.receive(data(1, CONTENT))
    assert isinstance(large, Data)
    assert type(large.chunk) is memoryview
    events = core.receive(data(1, CONTENT[:100_000]) * 3)
    assert [type(each.chunk) for each in events if isinstance(each, Data)] == [bytes] * 3


def test_a_fragmented_frame_uses_no_more_memory_than_its_size() -> None:
    core = served()
    opened(core)
    raw = data(1, CONTENT[:50_000])
    for at in range(0, len(raw) - 2, 2):
        assert core.receive(raw[at : at + 2]) == []
    assert sum(map(sys.getsizeof, core._frame_buffer._parts)) < 1.1 * len(raw)
    (event,) = core.receive(raw[-2:] if len(raw) % 2 == 0 else raw[-1:])
    assert isinstance(event, Data)
    assert bytes(event.chunk) == CONTENT[:50_000]


def test_large_fragments_are_joined_once() -> None:
    rest = FrameBuffer()
    first = bytes(PART_BYTES_MIN)
    rest.keep(first, 10 * PART_BYTES_MIN)
    given = [bytes([number]) * PART_BYTES_MIN for number in range(10)]
    for each in given[:-1]:
        assert rest.with_next(each) is None
    assert all(kept is each for kept, each in zip(rest._parts, [first, *given], strict=False))
    assert rest.with_next(given[-1]) == b"".join([first, *given])
    assert rest.with_next(b"next") == b"next"


def test_a_frame_is_joined_only_when_it_is_complete() -> None:
    core = served()
    opened(core)
    raw = data(1, CONTENT)
    for at in range(0, 100_000, 10_000):
        core.receive(raw[at : at + 10_000])
    assert len(core._frame_buffer._parts) == 10


def test_an_incomplete_frame_is_dropped_when_its_connection_closes() -> None:
    core = served()
    opened(core)
    core.receive(data(1, CONTENT)[:-1])
    assert len(core._frame_buffer) == HEAD_BYTES + len(CONTENT) - 1
    core.abandon(Code.INTERNAL_ERROR, "enough")
    assert len(core._frame_buffer) == 0
    assert core.receive(CONTENT[-1:]) == []


def test_a_preface_in_pieces_is_followed_by_a_large_frame() -> None:
    core: Connection[list[Field]] = Connection(HeaderCache(list), clock_s=Clock())
    raw = OPENING + headers(1, REQUEST) + data(1, CONTENT, ends=True)
    events = [e for at in range(0, len(raw), 11) for e in core.receive(raw[at : at + 11])]
    assert [type(each) for each in events] == [Headers, Data]
