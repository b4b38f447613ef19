"""Our HTTP/2 connection compared with `h2`, in CPU time per unary gRPC request, without sockets.

Both state machines run as a server in this process. Each receives the same calls as prepared bytes (headers, then DATA
with END_STREAM) and responds to each call with headers, data and trailers. The preparation is not timed. The client
honours the settings of each server: it sends literal header fields to ours, and fields indexed in HPACK's table to
`h2`.

`h2` is not a dependency of Basalt. Without it only our connection is measured. To compare, install it next to Basalt:

    pip install h2

`h2` is measured with its defaults, and with its checks and normalization of header fields turned off.
"""

from __future__ import annotations

import importlib
import statistics
import time
from collections.abc import Callable, Iterable
from typing import Any, Final, NamedTuple, Protocol

import hpack
from bench.row import Row
from bench.size import sized

from basaltmq.protocols.grpc.heads import RequestHead
from basaltmq.protocols.grpc.http2 import frames as f
from basaltmq.protocols.grpc.http2.connection import Connection
from basaltmq.protocols.grpc.http2.events import Data
from basaltmq.protocols.grpc.http2.frame_sender import CONNECTION_WINDOW_BYTES, STREAM_WINDOW_BYTES
from basaltmq.protocols.grpc.http2.frames import FRAME_BYTES_ACCEPTED, HEAD, HEAD_BYTES, WINDOW_DEFAULT, Setting
from basaltmq.protocols.grpc.http2.header_blocks import LIST_BYTES_MAX, HeaderCache
from basaltmq.protocols.grpc.messages import prefix
from basaltmq.protocols.grpc.server.call import OK, RESPONSE_HEADERS

ROUNDS: Final = sized(5, 3)
READ_BYTES: Final = 64 << 10
"""Bytes per call of the state machine for large messages: a read from a socket."""

REQUEST: Final = [
    (":method", "POST"),
    (":scheme", "http"),
    (":path", "/basalt.v1.Queues/EnqueueBatch"),
    (":authority", "broker.example.com:5555"),
    ("te", "trailers"),
    ("content-type", "application/grpc"),
    ("user-agent", "grpc-python/1.66.1 grpc-c/43.0.0 (linux; chttp2)"),
    ("grpc-accept-encoding", "identity, deflate, gzip"),
    ("authorization", "Bearer fila_0123456789abcdef_" + "A" * 43),
]
RESPONSE: Final = [(b":status", b"200"), (b"content-type", b"application/grpc")]
TRAILERS: Final = [(b"grpc-status", b"0")]
WINDOW_GROWTH: Final = (1 << 31) - 1 - WINDOW_DEFAULT
PREFIX_BYTES: Final = 5


class Load(NamedTuple):
    """The calls of one measurement."""

    name: str
    calls: int
    message_bytes: int
    calls_per_read: int
    """0: reads of READ_BYTES, whatever they contain."""


LOADS: Final = (
    Load("1 KB, one call per read", 4_000, 1_024, 1),
    Load("1 KB, 16 calls per read", 4_000, 1_024, 16),
    Load("1 MB", 100, 1_000_000, 0),
)


class Server(Protocol):
    """A server-side state machine that echoes the message of each call."""

    def receive(self, data: bytes) -> Iterable[bytes | memoryview[int]]:
        """Handle bytes from the socket. Return the bytes for the socket."""
        ...


class Ours:
    """`protocols/grpc/http2`, used like `ServerConnection` does."""

    uses_table = False

    def __init__(self, cache: HeaderCache[RequestHead]) -> None:
        self._core: Connection[RequestHead] = Connection(cache)
        self._parts: dict[int, list[bytes | memoryview[int]]] = {}

    def receive(self, data: bytes) -> Iterable[bytes | memoryview[int]]:
        core = self._core
        for event in core.receive(data):
            if type(event) is Data:
                stream = event.stream
                parts = self._parts.setdefault(stream.id, [])
                parts.append(event.chunk)
                core.consumed(stream, event.size_bytes)
                if event.has_ended:
                    message = b"".join(self._parts.pop(stream.id))
                    core.respond(stream, RESPONSE_HEADERS, message[:PREFIX_BYTES], message[PREFIX_BYTES:], OK)
        return core.take_parts()


class NoCache(HeaderCache[RequestHead]):
    """Decodes HPACK for every call, to show what the cache saves."""

    def keep(self, block: bytes, parsed: RequestHead) -> None:
        pass


class Library:
    """`h2`, with the windows and the frame size of our connection."""

    uses_table = True

    def __init__(self, *, checks: bool) -> None:
        h2_connection: Any = importlib.import_module("h2.connection")
        h2_settings: Any = importlib.import_module("h2.settings")
        h2_events: Any = importlib.import_module("h2.events")
        config = importlib.import_module("h2.config").H2Configuration(
            client_side=False,
            header_encoding=None,
            validate_inbound_headers=checks,
            normalize_inbound_headers=checks,
            validate_outbound_headers=checks,
            normalize_outbound_headers=checks,
        )
        codes = h2_settings.SettingCodes
        self._core = h2_connection.H2Connection(config)
        self._core.local_settings = h2_settings.Settings(
            client=False,
            initial_values={
                codes.INITIAL_WINDOW_SIZE: STREAM_WINDOW_BYTES,
                codes.MAX_FRAME_SIZE: FRAME_BYTES_ACCEPTED,
                codes.MAX_CONCURRENT_STREAMS: 1_000,
                codes.MAX_HEADER_LIST_SIZE: LIST_BYTES_MAX,
            },
        )
        self._core.max_inbound_frame_size = FRAME_BYTES_ACCEPTED
        self._core.initiate_connection()
        self._core.increment_flow_control_window(CONNECTION_WINDOW_BYTES - WINDOW_DEFAULT)
        self._data, self._ended = h2_events.DataReceived, h2_events.StreamEnded
        self._parts: dict[int, list[bytes]] = {}

    def receive(self, data: bytes) -> Iterable[bytes]:
        core = self._core
        for event in core.receive_data(data):
            kind = type(event)
            if kind is self._data:
                self._parts.setdefault(event.stream_id, []).append(event.data)
                core.acknowledge_received_data(event.flow_controlled_length, event.stream_id)
            elif kind is self._ended:
                message = b"".join(self._parts.pop(event.stream_id))
                core.send_headers(event.stream_id, RESPONSE)
                size = core.max_outbound_frame_size
                for at in range(0, len(message), size):
                    core.send_data(event.stream_id, message[at : at + size])
                core.send_headers(event.stream_id, TRAILERS, end_stream=True)
        return (core.data_to_send(),)


def run() -> list[Row]:
    cache = HeaderCache(RequestHead)
    makers: dict[str, tuple[bool, Callable[[], Server]]] = {
        "ours": (Ours.uses_table, lambda: Ours(cache)),
        "ours without header cache": (Ours.uses_table, lambda: Ours(NoCache(RequestHead))),
    }
    try:
        importlib.import_module("h2")
    except ImportError:
        print("h2 is not installed: only our connection is measured; pip install h2 to compare", flush=True)
    else:
        makers["h2"] = (Library.uses_table, lambda: Library(checks=True))
        makers["h2 without checks"] = (Library.uses_table, lambda: Library(checks=False))
    rows: list[Row] = []
    for load in LOADS:
        seen: dict[str, list[float]] = {name: [] for name in makers}
        for _ in range(ROUNDS):
            for name, (uses_table, make) in makers.items():
                seen[name].append(_cpu_us(load, make(), _reads(load, uses_table)))
        medians = {name: statistics.median(each) for name, each in seen.items()}
        rows += [Row(f"{load.name}: {name}", figure, "us/call") for name, figure in medians.items()]
        rows += [
            Row(f"{load.name}: {name} / ours", figure / medians["ours"], "ratio")
            for name, figure in medians.items()
            if name != "ours"
        ]
    return rows


def _reads(load: Load, uses_table: bool) -> list[bytes]:
    """Yield the bytes that a client sends, one item per read. The first item opens the connection."""
    opening = f.settings([(Setting.INITIAL_WINDOW_SIZE, 4 << 20), (Setting.MAX_FRAME_SIZE, FRAME_BYTES_ACCEPTED)])
    opening = f.PREFACE + opening + f.SETTINGS_ACK + f.window_update(0, WINDOW_GROWTH)
    encoder = hpack.Encoder()
    if not uses_table:
        encoder.header_table_size = 0
    payload = bytes(load.message_bytes)
    message = prefix(payload) + payload
    calls: list[bytes] = []
    for number in range(load.calls):
        stream = 2 * number + 1
        parts = [f.frame(f.HEADERS, f.END_HEADERS, stream, encoder.encode(REQUEST, huffman=True))]
        for at in range(0, len(message), FRAME_BYTES_ACCEPTED):
            is_last = at + FRAME_BYTES_ACCEPTED >= len(message)
            parts.append(
                f.frame(f.DATA, f.END_STREAM if is_last else 0, stream, message[at : at + FRAME_BYTES_ACCEPTED])
            )
        calls.append(b"".join(parts))
    if load.calls_per_read:
        step = load.calls_per_read
        return [opening, *(b"".join(calls[at : at + step]) for at in range(0, len(calls), step))]
    return [opening, *(call[at : at + READ_BYTES] for call in calls for at in range(0, len(call), READ_BYTES))]


def _cpu_us(load: Load, server: Server, reads: list[bytes]) -> float:
    """Return CPU time per call in microseconds. Raise unless every call got its complete response."""
    server.receive(reads[0])
    began_s = time.process_time()
    sent = [server.receive(data) for data in reads[1:]]
    spent_s = time.process_time() - began_s
    ended, content_bytes = _answers(b"".join(b"".join(parts) for parts in sent))
    expected = (load.calls, load.calls * (load.message_bytes + PREFIX_BYTES))
    if (ended, content_bytes) != expected:
        raise RuntimeError(f"{load.name}: {ended} responses with {content_bytes} bytes, not {expected}")
    return spent_s * 1e6 / load.calls


def _answers(raw: bytes) -> tuple[int, int]:
    """Return the number of streams that the server ended, and the bytes of DATA that it sent."""
    ended = content_bytes = at = 0
    while at < len(raw):
        high, low, kind, flags, _ = HEAD.unpack_from(raw, at)
        length = high << 8 | low
        if kind == f.DATA:
            content_bytes += length
        if kind in {f.DATA, f.HEADERS} and flags & f.END_STREAM:
            ended += 1
        at += HEAD_BYTES + length
    return ended, content_bytes
