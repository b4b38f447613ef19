"""MQTT over WebSocket (section 6 of the standard): makes a WebSocket look like a TCP connection.

    asyncio transport <──> WebSocketProtocol ──> inner protocol (the MQTT connection)
           ^                                          │
           └────────────── _Transport <───────────────┘

The inner protocol is created after the handshake and gets the payload of binary frames as a stream of bytes. Each of
its writes becomes one binary frame. wsproto does the framing; h11 reads the HTTP request.

- Handshake: GET /mqtt with the subprotocol `mqtt` or `mqttv3.1`. No extensions: compression costs memory per client.
- Pages: browsers send an Origin. It must be the host of the request or a configured name, and the Host must be a name
  of this listener. Other clients send no Origin and are not checked, because MQTT authenticates them.
- Frames: payload is passed on as it arrives, so a large frame needs no buffer. A text frame ends the connection (1003).
  A message over the limit ends it (1009). Of several pings in one read only the last gets a pong, and none while the
  client does not read. RFC 6455 allows both, and it bounds the write buffer.
- Small frames cost about 12 us each, so frames are handled within the connection's share of the turn (P13).
- Close: the server sends a close frame and waits `CLOSE_S` for that of the client, so that browsers report a clean
close."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Generator, Iterable
from typing import Any, Final, cast

import h11
from wsproto.connection import Connection, ConnectionState, ConnectionType
from wsproto.events import AcceptConnection, BytesMessage, CloseConnection, Event, Message, Ping, Pong, RejectConnection
from wsproto.frame_protocol import CloseReason
from wsproto.handshake import H11Handshake
from wsproto.utilities import RemoteProtocolError

from basaltmq.broker.auth.web_hosts import WebHosts
from basaltmq.broker.scheduling.loop_shares import LoopShares

PATH: Final = b"/mqtt"
SUBPROTOCOLS: Final = ("mqtt", "mqttv3.1")

REQUEST_BYTES_MAX: Final = 16 * 1024
"""Limit for the HTTP request of the handshake, because its sender is not authenticated yet."""

CLOSE_S: Final = 1.0
"""Time that the client has to return a close frame."""


class _Refused(Exception):
    """The handshake is refused with an HTTP error."""

    def __init__(self, status: int, text: str, headers: Iterable[tuple[bytes, bytes]] = ()) -> None:
        super().__init__(text)
        self.status = status
        self.text = text
        self.headers = list(headers)


class WebSocketProtocol(asyncio.Protocol):
    """The outer protocol of a connection."""

    def __init__(
        self,
        make_inner: Callable[[], asyncio.Protocol],
        hosts: WebHosts,
        shares: LoopShares,
        *,
        message_bytes_max: int,
        handshake_s: float,
    ) -> None:
        self._make_inner = make_inner
        self._hosts = hosts
        self._shares = shares
        self._message_bytes_max = message_bytes_max
        self._handshake_s = handshake_s
        self._http: h11.Connection | None = h11.Connection(h11.SERVER, max_incomplete_event_size=REQUEST_BYTES_MAX)
        self._frames: Connection | None = None
        self._events: Generator[Event, None, None] | None = None
        self._raw: asyncio.Transport | None = None
        self._inner: asyncio.Protocol | None = None
        self._timer: asyncio.TimerHandle | None = None
        """Ends a handshake, or a close that the client does not confirm."""
        self._step_handle: asyncio.Handle | None = None
        self._message_bytes = 0
        self._pong: bytes | None = None
        """Payload of the next pong."""
        self._is_behind = False
        """Whether frames wait for the next turn."""
        self._is_held = False
        """Whether the inner protocol has paused reading."""
        self._is_paused = False
        """Whether the socket is not read, for one of the two reasons."""
        self._is_full = False
        """Whether the write buffer is over its limit."""
        self.is_closing = False

    # Callbacks of the transport.

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._raw = cast(asyncio.Transport, transport)  # uvloop's does not derive from it
        self._timer = asyncio.get_running_loop().call_later(self._handshake_s, self._raw.abort)

    def data_received(self, data: bytes) -> None:
        if self._frames is None:
            self._handshake(data)
        elif self._frames.state is not ConnectionState.CLOSED:
            self._frames.receive_data(data)
            if not self._is_behind:
                self._step()

    def eof_received(self) -> bool:
        return self._shares.close_later(self._raw)

    def connection_lost(self, error: Exception | None) -> None:
        for handle in (self._timer, self._step_handle):
            if handle is not None:
                handle.cancel()
        if self._is_behind:
            self._is_behind = False
            self._shares.left()
        self.is_closing = True
        self._raw = self._http = self._events = None
        if self._inner is not None:
            self._inner.connection_lost(error)
            self._inner = None

    def pause_writing(self) -> None:
        self._is_full = True
        if self._inner is not None:
            self._inner.pause_writing()

    def resume_writing(self) -> None:
        self._is_full = False
        self._send_pong()
        if self._inner is not None:
            self._inner.resume_writing()

    # Handshake.

    def _handshake(self, data: bytes) -> None:
        http = self._http
        assert self._raw is not None
        if http is None:
            return  # The request was refused; the response is being sent.
        try:
            http.receive_data(data)
            request = http.next_event()
            if request is h11.NEED_DATA:
                return
            if not isinstance(request, h11.Request):
                raise _Refused(400, "the client closed before its request was complete")
            response = self._accepted(request)
            if not isinstance(http.next_event(), h11.EndOfMessage):
                raise _Refused(400, "the handshake request has a body")
        except h11.RemoteProtocolError as error:
            self._refuse(_Refused(error.error_status_hint, f"the HTTP request is invalid: {error}"))
        except _Refused as error:
            self._refuse(error)
        else:
            self._open(response, http.trailing_data[0])

    def _accepted(self, request: h11.Request) -> bytes:
        """Check the request. Return the HTTP response."""
        headers = dict(request.headers)
        if request.target.partition(b"?")[0] != PATH:
            raise _Refused(404, f"MQTT over WebSocket is at {PATH.decode()}")
        if request.method != b"GET":
            raise _Refused(405, "use GET", [(b"Allow", b"GET")])
        self._check_page(headers)
        handshake = H11Handshake(ConnectionType.SERVER)
        try:
            handshake.initiate_upgrade_connection(list(request.headers), request.target)
            offered = [each.strip() for each in headers.get(b"sec-websocket-protocol", b"").decode("ascii").split(",")]
            chosen = next((each for each in SUBPROTOCOLS if each in offered), None)
            if chosen is None:
                raise _Refused(400, "offer the WebSocket subprotocol 'mqtt' (or 'mqttv3.1')")
            response = handshake.send(AcceptConnection(subprotocol=chosen))
        except RemoteProtocolError as error:
            hint = error.event_hint if isinstance(error.event_hint, RejectConnection) else RejectConnection()
            raise _Refused(hint.status_code, f"not a WebSocket handshake: {error}", hint.headers) from None
        except UnicodeError:
            raise _Refused(400, "a header of the handshake is not ASCII") from None
        self._frames = handshake.connection
        return response

    def _check_page(self, headers: dict[bytes, bytes]) -> None:
        origin = headers.get(b"origin")
        if origin is None:
            return
        host = headers.get(b"host", b"").decode("latin-1")
        given = origin.decode("latin-1")
        local = self._raw.get_extra_info("sockname") if self._raw is not None else None
        if not self._hosts.serves(host, local[0] if isinstance(local, tuple) else ""):
            raise _Refused(421, f"host {host[:80]!r} is not served to web pages; add it to the allowed hosts")
        if not self._hosts.is_own_origin(given, host):
            raise _Refused(403, f"pages of origin {given[:80]!r} may not connect; add its host to the allowed hosts")

    def _open(self, response: bytes, early: bytes) -> None:
        assert self._raw is not None
        assert self._timer is not None
        self._timer.cancel()
        self._http = None
        self._raw.write(response)
        self._inner = self._make_inner()
        self._inner.connection_made(_Transport(self, self._raw))
        if early:
            self.data_received(early)

    def _refuse(self, error: _Refused) -> None:
        assert self._http is not None
        assert self._raw is not None
        self._frames = None
        body = error.text.encode() + b"\n"
        length = str(len(body)).encode()
        headers = [(b"Content-Type", b"text/plain"), (b"Content-Length", length), (b"Connection", b"close")]
        http, self._http = self._http, None
        for event in (
            h11.Response(status_code=error.status, headers=headers + error.headers),
            h11.Data(data=body),
            h11.EndOfMessage(),
        ):
            self._raw.write(http.send(event) or b"")
        self._raw.close()

    # Frames.

    def _step(self) -> None:
        """Handle frames until there are no more or the connection's share of the turn is used up."""
        self._step_handle = None
        if self._frames is None or self._raw is None:
            return
        self._shares.begin(was_behind=self._is_behind)
        if self._events is None:
            self._events = self._frames.events()
        payloads: list[bytes] = []
        has_more = True
        while True:
            event = next(self._events, None)
            if event is None:
                self._events, has_more = None, False
                break
            self._handle(event, payloads)
            if self._shares.is_over():
                break
        self._is_behind = has_more
        self._shares.end(has_more=has_more)
        self._send_pong()
        if payloads and self._inner is not None and not self.is_closing:
            self._inner.data_received(b"".join(payloads))
        self._read_on()

    def _handle(self, event: Event, payloads: list[bytes]) -> None:
        match event:
            case BytesMessage():
                if self.is_closing:
                    return
                payloads.append(bytes(event.data))
                self._message_bytes += len(event.data)
                if self._message_bytes > self._message_bytes_max:
                    self._fail(CloseReason.MESSAGE_TOO_BIG, "the message is over the limit", payloads)
                elif event.message_finished:
                    self._message_bytes = 0
            case Message():
                self._fail(CloseReason.UNSUPPORTED_DATA, "MQTT uses binary frames", payloads)
            case Ping():
                self._pong = bytes(event.payload)
            case CloseConnection():
                self._closed_by_client(event)

    def _fail(self, code: CloseReason, text: str, payloads: list[bytes]) -> None:
        """Close with an error. What the client sent before is not delivered."""
        payloads.clear()
        self.close(code, text)

    def _closed_by_client(self, event: CloseConnection) -> None:
        assert self._frames is not None
        if self._frames.state is ConnectionState.REMOTE_CLOSING:
            self._write(self._frames.send(event.response()))
        elif self._frames.state is ConnectionState.OPEN:
            # wsproto reports an invalid frame as this event.
            self._write(self._frames.send(CloseConnection(code=event.code, reason=event.reason)))
        self.is_closing = True
        if self._raw is not None:
            self._raw.close()

    def _send_pong(self) -> None:
        if self._pong is not None and not self._is_full and not self.is_closing and self._frames is not None:
            self._write(self._frames.send(Pong(payload=self._pong)))
            self._pong = None

    def _read_on(self) -> None:
        """Read from the socket, or continue with the frames that wait, unless the inner protocol has paused."""
        if self._raw is None or self._raw.is_closing():
            return
        is_paused = self._is_held or self._is_behind
        if is_paused != self._is_paused:
            self._is_paused = is_paused
            if is_paused:
                self._raw.pause_reading()
            else:
                self._raw.resume_reading()
        if self._is_behind and not self._is_held and self._step_handle is None:
            self._step_handle = asyncio.get_running_loop().call_soon(self._step)

    def _write(self, data: bytes) -> None:
        if self._raw is not None:
            self._raw.write(data)

    # Called by the inner transport.

    def send(self, data: bytes) -> None:
        """Send bytes as one binary frame."""
        if data and not self.is_closing and self._frames is not None:
            self._write(self._frames.send(BytesMessage(data=data)))

    def hold(self, is_held: bool) -> None:
        self._is_held = is_held
        if is_held and self._step_handle is not None:
            self._step_handle.cancel()
            self._step_handle = None
        self._read_on()

    def close(self, code: CloseReason = CloseReason.NORMAL_CLOSURE, text: str = "") -> None:
        """Send a close frame, and close the socket when the client has sent one or `CLOSE_S` has passed."""
        if self.is_closing or self._frames is None or self._raw is None:
            return
        self.is_closing = True
        if self._frames.state is ConnectionState.OPEN:
            self._write(self._frames.send(CloseConnection(code=code, reason=text or None)))
        self._is_held = False
        self._timer = asyncio.get_running_loop().call_later(CLOSE_S, self._raw.close)
        self._read_on()


class _Transport(asyncio.Transport):
    """The transport of the inner protocol."""

    def __init__(self, socket: WebSocketProtocol, raw: asyncio.Transport) -> None:
        super().__init__()
        self._socket = socket
        self._raw = raw

    def get_extra_info(self, name: str, default: Any = None) -> Any:
        return self._raw.get_extra_info(name, default)

    def write(self, data: bytes | bytearray | memoryview) -> None:
        self._socket.send(bytes(data))

    def writelines(self, list_of_data: Iterable[bytes | bytearray | memoryview]) -> None:
        self._socket.send(b"".join(list_of_data))

    def can_write_eof(self) -> bool:
        return False

    def is_closing(self) -> bool:
        return self._socket.is_closing or self._raw.is_closing()

    def close(self) -> None:
        self._socket.close()

    def abort(self) -> None:
        self._raw.abort()

    def is_reading(self) -> bool:
        return self._raw.is_reading()

    def pause_reading(self) -> None:
        self._socket.hold(True)

    def resume_reading(self) -> None:
        self._socket.hold(False)

    def set_write_buffer_limits(self, high: int | None = None, low: int | None = None) -> None:
        self._raw.set_write_buffer_limits(high, low)

    def get_write_buffer_limits(self) -> tuple[int, int]:
        return self._raw.get_write_buffer_limits()

    def get_write_buffer_size(self) -> int:
        return self._raw.get_write_buffer_size()
