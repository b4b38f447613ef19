"""gRPC over HTTP/2: calls, responses, and the handling of malformed calls."""

from __future__ import annotations

import asyncio
import itertools
import sys
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable
from typing import Any

import pytest
from tests.fuzz.amqp091 import Transport
from tests.unit.protocols.http2.peer import data, frames, goaway, headers, prefixed, resets

from basaltmq.broker.scheduling.loop_shares import TURN_S, LoopShares
from basaltmq.errors import QueueNotFoundError
from basaltmq.protocols.grpc.client.call import CallFailed
from basaltmq.protocols.grpc.client.channel import Channel, timeout_text
from basaltmq.protocols.grpc.heads import RequestHead, ResponseHead
from basaltmq.protocols.grpc.http2 import frames as f
from basaltmq.protocols.grpc.http2.connection import Connection
from basaltmq.protocols.grpc.http2.events import Headers
from basaltmq.protocols.grpc.http2.frames import FRAME_BYTES_ACCEPTED, FRAME_BYTES_MIN, Code, Setting
from basaltmq.protocols.grpc.http2.header_blocks import HeaderCache
from basaltmq.protocols.grpc.messages import PREFIX, Messages
from basaltmq.protocols.grpc.server.call import Call
from basaltmq.protocols.grpc.server.connection import RESPONSES_BYTES_MAX, ServerConnection
from basaltmq.protocols.grpc.server.immediate_future import ImmediateFuture
from basaltmq.protocols.grpc.server.methods import BidiStreaming, ServerStreaming, Unary
from basaltmq.protocols.grpc.server.server import GrpcServer
from basaltmq.protocols.grpc.services.error_status import outcome_of
from basaltmq.protocols.grpc.status import Outcome, Status, escaped, trailer, unescaped

WAIT_S = 60
LARGE = 1 << 20


class Session:
    """A client that encodes calls by hand."""

    def __init__(self, server: GrpcServer, **settings: int) -> None:
        self.connection, self.transport = ServerConnection(server), Transport()
        self.connection.connection_made(self.transport)  # type: ignore[arg-type]
        self._reader: Connection[ResponseHead] = Connection(HeaderCache(ResponseHead), is_client=True)
        self._reader.take()
        given = [(Setting[name], value) for name, value in settings.items()]
        self.give(f.PREFACE + f.settings(given) + f.SETTINGS_ACK)

    def give(self, raw: bytes) -> None:
        self.connection.data_received(raw)

    def call(
        self,
        path: str,
        content: bytes,
        *,
        ends: bool = True,
        stream: int = 1,
        frame_bytes: int = FRAME_BYTES_MIN,
        **fields: Any,
    ) -> None:
        given = [(":method", "POST"), (":scheme", "http"), (":path", path), ("content-type", "application/grpc")]
        given += [(name.replace("_", "-"), value) for name, value in fields.items()]
        parts = [content[at : at + frame_bytes] for at in range(0, len(content), frame_bytes)]
        raw = headers(stream, given, ends=not parts and ends)
        for at, part in enumerate(parts):
            raw += data(stream, part, ends=ends and at == len(parts) - 1)
        self.give(raw)

    @property
    def raw(self) -> bytes:
        return b"".join(self.transport.written)

    def outcome(self, stream: int = 1) -> Outcome | None:
        """Return the outcome of a call; None if it has not ended."""
        reader: Connection[ResponseHead] = Connection(HeaderCache(ResponseHead), is_client=True)
        for _ in range(0, stream, 2):
            reader.open(b"")
        for event in reader.receive(self.raw):
            if isinstance(event, Headers) and event.stream.id == stream and event.fields.outcome is not None:
                return event.fields.outcome
        return None

    def responses(self, stream: int = 1) -> bytes:
        return b"".join(each.payload for each in frames(self.raw) if each.kind == f.DATA and each.stream == stream)

    async def until(self, is_so: Callable[[], bool]) -> None:
        async with asyncio.timeout(WAIT_S):
            while not is_so():  # noqa: ASYNC110
                await asyncio.sleep(0.001)


class Handlers:
    """Methods of every kind."""

    def __init__(self) -> None:
        self.cancelled = 0
        self.written = 0
        self.laters: list[ImmediateFuture[bytes]] = []

    def methods(self) -> dict[str, Any]:
        return {
            "/Echo": Unary(lambda raw, call: raw, bytes),
            "/Type": Unary(lambda raw, call: type(raw).__name__.encode(), bytes),
            "/View": Unary(lambda raw, call: type(raw).__name__.encode(), bytes, takes_views=True),
            "/Later": Unary(self.later, lambda found: b"later " + found),
            "/Fails": Unary(self.fails, bytes),
            "/Sleeps": Unary(self.sleeps, bytes),
            "/Breaks": Unary(lambda raw, call: 1 // 0, bytes),  # type: ignore[arg-type, return-value]
            "/Large": Unary(lambda raw, call: bytes(LARGE), bytes),
            "/Counts": ServerStreaming(self.counts),
            "/Doubles": BidiStreaming(self.doubles),
        }

    def later(self, raw: bytes, call: Call) -> ImmediateFuture[bytes]:
        self.laters.append(ImmediateFuture())
        return self.laters[-1]

    def fails(self, raw: bytes, call: Call) -> bytes:
        raise QueueNotFoundError("no queue 'gähn' at 100 %\n")

    async def sleeps(self, raw: bytes, call: Call) -> bytes:
        try:
            await asyncio.sleep(WAIT_S)
        except asyncio.CancelledError:
            self.cancelled += 1
            raise
        return b""

    async def counts(self, raw: bytes, call: Call) -> AsyncGenerator[bytes, None]:
        try:
            for number in range(int(raw)):
                yield b"%d" % number + bytes(1000)
                self.written += 1
        finally:
            self.cancelled += 1

    async def doubles(self, asked: AsyncIterator[bytes], call: Call) -> AsyncGenerator[bytes, None]:
        async for each in asked:
            yield each * 2


Work = Callable[[GrpcServer, Handlers], Awaitable[None]]


def run(work: Work, **options: Any) -> None:
    async def inside() -> None:
        handlers = Handlers()
        server = GrpcServer(handlers.methods(), outcome_of, shares=LoopShares(clock_s=lambda: 0.0), **options)
        async with asyncio.timeout(WAIT_S):
            await work(server, handlers)
            await server.stop(0.01, "bye")

    asyncio.run(inside())


def test_a_unary_call_completes_within_the_turn_in_one_write() -> None:
    async def work(server: GrpcServer, handlers: Handlers) -> None:
        session = Session(server)
        before = len(session.transport.written)
        raw = b"".join(
            headers(
                stream,
                [(":method", "POST"), (":scheme", "http"), (":path", "/Echo"), ("content-type", "application/grpc")],
            )
            + data(stream, prefixed(b"hello"), ends=True)
            for stream in (1, 3, 5)
        )
        session.give(raw)
        assert len(session.transport.written) == before + 1
        for stream in (1, 3, 5):
            assert session.responses(stream) == prefixed(b"hello")
            assert session.outcome(stream) == Outcome(Status.OK)

    run(work)


def test_responses_of_one_later_turn_share_a_write() -> None:
    async def work(server: GrpcServer, handlers: Handlers) -> None:
        session = Session(server)
        for stream in (1, 3):
            session.call("/Later", prefixed(b""), stream=stream)
        before = len(session.transport.written)
        for later in handlers.laters:
            later.set_result(b"x")
        await session.until(lambda: session.outcome(3) is not None)
        assert len(session.transport.written) == before + 1
        assert session.responses(1) == session.responses(3) == prefixed(b"later x")

    run(work)


def test_distant_deadlines_are_checked_by_the_sweep() -> None:
    async def work(server: GrpcServer, handlers: Handlers) -> None:
        session = Session(server)
        session.call("/Later", prefixed(b""), grpc_timeout="20S")
        session.call("/Later", prefixed(b""), stream=3)
        now_s = server.loop.time()
        session.connection.tick(now_s + 19)
        assert session.outcome(1) is None
        session.connection.tick(now_s + 21)
        await session.until(lambda: session.outcome(1) is not None)
        found = session.outcome(1)
        assert found is not None
        assert found.status is Status.DEADLINE_EXCEEDED
        assert session.outcome(3) is None, "it has no deadline"

    run(work)


def test_a_single_call_is_answered_in_the_turn_of_its_response() -> None:
    async def work(server: GrpcServer, handlers: Handlers) -> None:
        session = Session(server)
        session.call("/Later", prefixed(b""))
        handlers.laters[0].set_result(b"x")
        assert session.responses(1) == prefixed(b"later x")
        session.call("/Later", prefixed(b""), stream=3)
        handlers.laters[1].set_exception(QueueNotFoundError("gone"))
        assert session.outcome(3) is not None

    run(work)


def test_a_blocked_client_does_not_delay_responses_to_others(caplog: pytest.LogCaptureFixture) -> None:
    later: ImmediateFuture[bytes] = ImmediateFuture()
    reported: list[ImmediateFuture[bytes]] = []

    def fails(known: ImmediateFuture[bytes]) -> None:
        reported.append(known)
        raise RuntimeError("a bug")

    later.then(fails)
    later.set_result(b"x")
    assert reported == [later]
    assert "sending the response of a gRPC call failed" in caplog.text


def test_errors_arrive_with_status_text_and_code() -> None:
    async def work(server: GrpcServer, handlers: Handlers) -> None:
        session = Session(server)
        session.call("/Fails", prefixed(b""))
        assert session.outcome() == Outcome(
            Status.NOT_FOUND,
            "no queue 'gähn' at 100 %\n",
            (("content-type", "application/grpc"), ("basalt-error", "queue_not_found")),
        )
        assert b"%0A" in session.raw
        session.call("/Breaks", prefixed(b""), stream=3)
        found = session.outcome(3)
        assert found is not None
        assert found.status is Status.INTERNAL
        assert "division" not in found.text, "what broke is for the log"

    run(work)


@pytest.mark.parametrize(
    ("path", "content", "fields", "status"),
    [
        ("/None", prefixed(b""), {}, Status.UNIMPLEMENTED),
        ("/Echo", prefixed(b""), {"grpc_encoding": "snappy"}, Status.UNIMPLEMENTED),
        ("/Echo", prefixed(b""), {"grpc_timeout": "soon"}, Status.INVALID_ARGUMENT),
        ("/Echo", prefixed(b"") * 2, {}, Status.INTERNAL),
        ("/Echo", b"", {}, Status.INTERNAL),
        ("/Echo", prefixed(b"abc")[:-1], {}, Status.INTERNAL),
        ("/Echo", PREFIX.pack(1, 3) + b"abc", {}, Status.INTERNAL),
        ("/Echo", PREFIX.pack(1, 3) + b"abc", {"grpc_encoding": "gzip"}, Status.INTERNAL),
        ("/Echo", PREFIX.pack(0, 2_000_000), {}, Status.RESOURCE_EXHAUSTED),
        ("/Echo", prefixed(bytes(1_000_001)), {}, Status.RESOURCE_EXHAUSTED),
        ("/Sleeps", prefixed(b""), {"grpc_timeout": "1m"}, Status.DEADLINE_EXCEEDED),
        ("/Later", prefixed(b""), {"grpc_timeout": "1m"}, Status.DEADLINE_EXCEEDED),
        ("/Counts", prefixed(b"x"), {}, Status.INTERNAL),
    ],
)
def test_an_invalid_call_gets_its_status_and_the_next_one_is_served(
    path: str, content: bytes, fields: dict[str, Any], status: Status
) -> None:
    async def work(server: GrpcServer, handlers: Handlers) -> None:
        session = Session(server)
        session.call(path, content, **fields)
        await session.until(lambda: session.outcome() is not None)
        found = session.outcome()
        assert found is not None
        assert found.status is status
        session.call("/Echo", prefixed(b"next"), stream=3)
        await session.until(lambda: session.responses(3) == prefixed(b"next"))
        assert session.connection.calls == 0

    run(work, request_bytes_max=1_000_000)


@pytest.mark.parametrize(
    ("fields", "status"),
    [
        ([(":method", "GET"), (":scheme", "http"), (":path", "/")], b"405"),
        ([(":method", "POST"), (":scheme", "http"), (":path", "/Echo"), ("content-type", "text/html")], b"415"),
        ([(":method", "POST"), (":path", "/Echo"), ("content-type", "application/grpc")], b"400"),
        ([(":method", "POST"), (":scheme", "http"), (":path", "/Echo"), ("Upper", "x")], b"400"),
        ([(":method", "POST"), (":scheme", "http"), (":path", "/Echo"), ("connection", "close")], b"400"),
        ([("x", "y"), (":method", "POST"), (":scheme", "http"), (":path", "/Echo")], b"400"),
    ],
)
def test_requests_that_are_not_grpc_get_an_http_error(fields: list[tuple[str, str]], status: bytes) -> None:
    async def work(server: GrpcServer, handlers: Handlers) -> None:
        session = Session(server)
        session.give(headers(1, fields, ends=True))
        (response,) = [each for each in frames(session.raw) if each.kind == f.HEADERS]
        assert status in response.payload
        assert response.flags & f.END_STREAM

    run(work)


def test_a_client_that_resets_its_call_cancels_the_handler() -> None:
    async def work(server: GrpcServer, handlers: Handlers) -> None:
        session = Session(server)
        session.call("/Sleeps", prefixed(b""))
        session.call("/Counts", prefixed(b"100000"), stream=3)
        session.call("/Later", prefixed(b""), stream=5)
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        for stream in (1, 3, 5):
            session.give(f.rst_stream(stream, Code.CANCEL))
        await session.until(lambda: handlers.cancelled == 2)
        handlers.laters[0].set_result(b"nobody waits")
        assert session.connection.calls == 0

    run(work)


def test_streamed_responses_pause_at_the_window_of_the_client() -> None:
    async def work(server: GrpcServer, handlers: Handlers) -> None:
        session = Session(server, INITIAL_WINDOW_SIZE=5_000)
        session.call("/Counts", prefixed(b"100"))
        await session.until(lambda: handlers.written == 4)
        for _ in range(20):
            await asyncio.sleep(0)
        assert handlers.written == 4
        assert len(session.responses()) == 5_000
        session.give(f.window_update(1, 1 << 20) + f.window_update(0, 1 << 20))
        await session.until(lambda: session.outcome() is not None)
        assert handlers.written == 100

    run(work)


def test_reading_and_writing_pause_while_the_socket_of_a_client_is_full() -> None:
    async def work(server: GrpcServer, handlers: Handlers) -> None:
        session = Session(server, INITIAL_WINDOW_SIZE=1 << 30)
        session.give(f.window_update(0, 1 << 30))
        session.connection.pause_writing()
        session.call("/Counts", prefixed(b"100"))
        for _ in range(20):
            await asyncio.sleep(0)
        assert handlers.written == 0
        session.connection.resume_writing()
        await session.until(lambda: handlers.written == 100)

    run(work)


def test_calls_are_refused_while_a_client_does_not_read_responses() -> None:
    async def work(server: GrpcServer, handlers: Handlers) -> None:
        session = Session(server, INITIAL_WINDOW_SIZE=0)
        calls = RESPONSES_BYTES_MAX // LARGE + 20
        for number in range(calls):
            session.call("/Large", prefixed(b""), stream=1 + 2 * number)
        assert session.connection.core.waiting_bytes <= RESPONSES_BYTES_MAX + LARGE + 100
        last = session.outcome(2 * calls - 1)
        assert last is not None
        assert last.status is Status.RESOURCE_EXHAUSTED

    run(work)


def test_incomplete_messages_use_bounded_memory() -> None:
    async def work(server: GrpcServer, handlers: Handlers) -> None:
        session = Session(server)
        part = PREFIX.pack(0, 100_000) + bytes(90_000)
        for number in range(20):
            session.call("/Echo", part, stream=1 + 2 * number, ends=False)
        assert session.connection._held_bytes <= server.held_bytes_max + FRAME_BYTES_ACCEPTED
        last = session.outcome(39)
        assert last is not None
        assert last.status is Status.RESOURCE_EXHAUSTED
        assert session.connection.calls == 2
        session.connection.connection_lost(None)
        assert session.connection._held_bytes == 0

    run(work, request_bytes_max=100_000)


@pytest.mark.promise("P8")
def test_incomplete_messages_of_all_connections_without_a_login_share_one_limit(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("basaltmq.protocols.grpc.server.connection.STRANGERS_BYTES_MAX", 2 * LARGE)

    def login(raw: Any, call: Call) -> bytes:
        call.connection.authenticated()
        return b""

    async def main() -> None:
        methods = {**Handlers().methods(), "/Login": Unary(login, bytes)}
        options: dict[str, Any] = {"shares": LoopShares(clock_s=lambda: 0.0), "requires_authentication": True}
        server = GrpcServer(methods, outcome_of, request_bytes_max=4 * LARGE, **options)
        incomplete = PREFIX.pack(0, LARGE) + bytes(LARGE * 5 // 8)
        sessions = [Session(server) for _ in range(4)]
        for session in sessions[:3]:
            session.call("/Echo", incomplete, ends=False)
        known = sessions[0]
        known.call("/Login", prefixed(b""), stream=3)
        await known.until(lambda: known.connection.is_authenticated)
        sessions[3].call("/Echo", incomplete, ends=False)
        assert [each.outcome() for each in sessions] == [None, None, None, None]
        stranger = Session(server)
        stranger.call("/Echo", incomplete, ends=False)
        found = stranger.outcome()
        assert found is not None and found.status is Status.RESOURCE_EXHAUSTED  # noqa: PT018
        for session in sessions[1:]:
            session.connection.connection_lost(None)
        assert server.strangers_bytes == 0
        stranger.call("/Echo", incomplete, ends=False, stream=3)
        assert stranger.outcome(3) is None

    asyncio.run(main())


@pytest.mark.parametrize("frame_bytes", [1, FRAME_BYTES_MIN, 70_000, FRAME_BYTES_ACCEPTED])
@pytest.mark.parametrize("path", ["/Echo", "/Type", "/View", "/Doubles"])
def test_requests_are_decoded_for_any_frame_size(path: str, frame_bytes: int) -> None:
    async def work(server: GrpcServer, handlers: Handlers) -> None:
        session = Session(server, INITIAL_WINDOW_SIZE=1 << 20)
        session.give(f.window_update(0, 1 << 20))
        message = bytes(range(256)) * (8 if frame_bytes == 1 else 600)
        session.call(path, prefixed(message), frame_bytes=frame_bytes)
        await session.until(lambda: session.outcome() is not None)
        is_view = path == "/View" and len(message) + PREFIX.size <= frame_bytes and len(message) > FRAME_BYTES_MIN
        kind = b"memoryview" if is_view else b"bytes"
        expected = {"/Echo": message, "/Type": b"bytes", "/View": kind, "/Doubles": message * 2}[path]
        assert session.responses() == prefixed(expected)

    run(work)


def test_a_message_in_tiny_frames_uses_no_more_memory_than_its_size() -> None:
    messages = Messages(100_000, "identity")
    message = bytes(range(250)) * 200
    raw = prefixed(message)
    for at in range(0, len(raw) - 2, 2):
        messages.add(raw[at : at + 2])
    assert sum(map(sys.getsizeof, messages._parts)) < 1.1 * len(raw)
    messages.add(raw[-1:])
    assert list(messages.ready) == [message]


def test_idle_and_dead_connections_are_closed() -> None:
    async def work(server: GrpcServer, handlers: Handlers) -> None:
        silent, transport = ServerConnection(server), Transport()
        silent.connection_made(transport)  # type: ignore[arg-type]
        silent.tick(silent.connected_s + 9)
        was_closed = transport.closed
        silent.tick(silent.connected_s + 11)
        assert (was_closed, transport.closed) == (False, True)
        assert goaway(b"".join(transport.written)) is Code.SETTINGS_TIMEOUT
        session = Session(server)
        session.connection.tick(session.connection.received_s + 31)
        assert [each.kind for each in frames(session.raw)][-1] == f.PING
        session.give(f.ping(b"basalt  ", is_ack=True))
        received_s = session.connection.received_s
        closed = []
        for later_s in (20, 31, 40, 42):
            session.connection.tick(received_s + later_s)
            closed.append(session.transport.closed)
        assert closed == [False, False, False, True]

    run(work)


def test_connections_over_the_limit_get_an_error() -> None:
    async def work(server: GrpcServer, handlers: Handlers) -> None:
        first, second = Session(server), ServerConnection(server)
        transport = Transport()
        second.connection_made(transport)  # type: ignore[arg-type]
        assert goaway(b"".join(transport.written)) is Code.ENHANCE_YOUR_CALM
        assert transport.closed
        second.connection_lost(None)
        first.call("/Echo", prefixed(b"x"))
        assert first.responses() == prefixed(b"x")

    run(work, connections_max=1)


def test_invalid_bytes_close_only_their_connection() -> None:
    async def work(server: GrpcServer, handlers: Handlers) -> None:
        good, bad = Session(server), Session(server)
        bad.call("/Sleeps", prefixed(b""))
        await asyncio.sleep(0)
        bad.give(b"\xff" * 100)
        assert bad.transport.closed
        assert goaway(bad.raw) is Code.FRAME_SIZE_ERROR
        await good.until(lambda: handlers.cancelled == 1)
        good.call("/Echo", prefixed(b"x"))
        assert good.responses() == prefixed(b"x")
        assert not resets(good.raw)

    run(work)


def test_the_client_channel_supports_calls_streams_backpressure_and_errors() -> None:
    async def work(server: GrpcServer, handlers: Handlers) -> None:
        port = await server.listen("127.0.0.1", 0)
        channel = Channel("127.0.0.1", port)
        large = bytes(range(256)) * 12_000
        assert await channel.unary("/Echo", large, 30.0) == large
        many = await asyncio.gather(*[channel.unary("/Echo", b"%d" % number) for number in range(40)])
        assert many == [b"%d" % number for number in range(40)]
        with pytest.raises(CallFailed, match="NOT_FOUND") as failed:
            await channel.unary("/Fails", b"")
        assert ("basalt-error", "queue_not_found") in failed.value.outcome.fields
        with pytest.raises(CallFailed, match="DEADLINE_EXCEEDED"):
            await channel.unary("/Sleeps", b"", 0.01)
        assert [each async for each in channel.responses("/Counts", b"3")] == [
            b"%d" % n + bytes(1000) for n in range(3)
        ]
        call = await channel.stream("/Doubles")
        for number in range(50):
            await call.send(b"%d" % number * 1000)
        call.end()
        assert [len(each) async for each in call] == [len(b"%d" % number) * 2000 for number in range(50)]
        waiting = asyncio.ensure_future(channel.unary("/Sleeps", b""))
        await Session.until(Session.__new__(Session), lambda: server.calls == 1)
        waiting.cancel()
        await Session.until(Session.__new__(Session), lambda: server.calls == 0)
        await channel.close()
        with pytest.raises(CallFailed, match="closed"):
            await channel.unary("/Echo", b"")

    run(work, calls_max=5, request_bytes_max=4 << 20)


def test_the_client_channel_reconnects_after_a_server_restart() -> None:
    async def work(server: GrpcServer, handlers: Handlers) -> None:
        port = await server.listen("127.0.0.1", 0)
        channel = Channel("127.0.0.1", port)
        assert await channel.unary("/Echo", b"x") == b"x"
        waiting = asyncio.ensure_future(channel.unary("/Sleeps", b""))
        await Session.until(Session.__new__(Session), lambda: server.calls == 1)
        await server.stop(0, "bye")
        with pytest.raises(CallFailed, match="UNAVAILABLE"):
            await waiting
        with pytest.raises(CallFailed, match="UNAVAILABLE"):
            await channel.unary("/Echo", b"x")
        other = GrpcServer(handlers.methods(), outcome_of)
        await other.listen("127.0.0.1", port)
        assert await channel.unary("/Echo", b"y") == b"y"
        await channel.close()
        await other.stop(0, "bye")

    run(work)


@pytest.mark.parametrize("text", ["", "plain", "100 %", "zwei\nZeilen, ümlaut €", "".join(map(chr, range(300)))])
def test_any_text_round_trips_through_a_trailer(text: str) -> None:
    assert unescaped(escaped(text)) == text
    assert escaped(text).isascii()
    assert escaped(text).isprintable()
    assert trailer(Outcome(Status.INTERNAL, text))


def test_timeouts_round_trip() -> None:
    for timeout_s in (1e-6, 0.001, 0.25, 30.0, 99.0, 100.0, 86_400.0, 3e7, 1e9):
        fields = [(":method", "POST"), (":scheme", "http"), (":path", "/"), ("content-type", "application/grpc")]
        found = RequestHead([*fields, ("grpc-timeout", timeout_text(timeout_s))]).timeout_s
        assert found == pytest.approx(timeout_s, rel=1e-3)


@pytest.mark.promise("P13")
def test_many_calls_are_split_over_turns_while_other_clients_are_served() -> None:
    async def work(server: GrpcServer, handlers: Handlers) -> None:
        ticks = itertools.count()
        server.shares = LoopShares(clock_s=lambda: next(ticks) * TURN_S / 10)
        flooding, other = Session(server), Session(server)
        given = [(":method", "POST"), (":scheme", "http"), (":path", "/Echo"), ("content-type", "application/grpc")]
        streams = range(1, 401, 2)
        flooding.give(b"".join(headers(each, given) + data(each, prefixed(b"x"), ends=True) for each in streams))
        assert not flooding.responses(streams[-1])
        await asyncio.sleep(0)
        other.call("/Echo", prefixed(b"y"))
        for _ in range(3):
            await asyncio.sleep(0)
        assert other.responses() == prefixed(b"y")
        assert not flooding.responses(streams[-1])
        await flooding.until(lambda: bool(flooding.responses(streams[-1])))
        assert all(flooding.responses(each) == prefixed(b"x") for each in streams)
        assert server.shares.behind == 0

    run(work)
