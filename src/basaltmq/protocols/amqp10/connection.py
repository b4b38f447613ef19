"""One AMQP 1.0 connection: reads frames, passes them to sessions, and writes once per loop turn.

    header ─> SASL ─> header ─> open ─> begin, attach, transfer ... ─> close

Backpressure. A client that does not read gets no deliveries above `WRITE_HIGH_BYTES` of unsent data. It is not read
above `WRITE_STOP_BYTES`. A publisher is not read while the broker blocks publishers (disk, memory, store stall), and
while `UNCONFIRMED_BYTES_MAX` of its messages are not confirmed.

Fairness. A connection handles input for its share of a turn (`LoopShares`). It keeps the rest, pauses reading, and
continues in the next turn. A message that has to wait parks the input behind it.
"""

from __future__ import annotations

import asyncio
import logging
import socket
import time
from typing import TYPE_CHECKING, Any, Final, cast

from basaltmq.broker.auth.users import User
from basaltmq.broker.queue_table import GENERATED
from basaltmq.broker.vhost import VHost
from basaltmq.errors import AuthenticationError, BasaltError
from basaltmq.protocols.amqp10 import sasl
from basaltmq.protocols.amqp10.coordinator import Coordinator
from basaltmq.protocols.amqp10.input import Input, Wait
from basaltmq.protocols.amqp10.message import Incoming, Outgoing
from basaltmq.protocols.amqp10.session import Session
from basaltmq.protocols.amqp10.transport import address_text, certificate_of, peer_of, socket_info
from basaltmq.protocols.amqp10.usage import Usage
from basaltmq.protocols.amqp10.wire import performatives as p
from basaltmq.protocols.amqp10.wire.errors import (
    CONNECTION_FORCED,
    DECODE_ERROR,
    FRAMING_ERROR,
    ILLEGAL_STATE,
    INTERNAL_ERROR,
    INVALID_FIELD,
    RESOURCE_LIMIT,
    Fault,
    SessionFault,
    condition_of,
)
from basaltmq.protocols.amqp10.wire.frames import (
    AMQP_HEADER,
    EMPTY_FRAME,
    FRAME_BYTES_MIN,
    HEADER,
    SASL,
    SASL_HEADER,
    Frame,
    FrameReader,
    frame,
    quick_descriptor,
    read_fields,
)

if TYPE_CHECKING:
    from basaltmq.protocols.amqp10.server import Server

WRITE_HIGH_BYTES: Final = 1 << 20
"""Unsent bytes above which consumers are paused: one second of a 10 Mbit/s link."""

WRITE_LOW_BYTES: Final = 256 << 10
WRITE_STOP_BYTES: Final = 16 << 20
UNCONFIRMED_BYTES_MAX: Final = 32 << 20
"""Bodies that are not confirmed yet, after which the connection is not read: one batch of the store."""

HANDSHAKE_FRAME_BYTES_MAX: Final = 16_384
CLOSE_S: Final = 5
"""Seconds that a client has to answer close."""

SETTLE_S: Final = 5e-6
"""Cost of settling one delivery later in the turn."""

IDLE_MS_MIN: Final = 2000  # Timeouts are checked once per second.
VHOST_PREFIX: Final = "vhost:"
DEFAULT_VHOST: Final = "/"

_TRANSFER, _DISPOSITION, _FLOW = 0x14, 0x15, 0x13
_WAITING, _SASL, _OPENING, _RUNNING, _CLOSING, _CLOSED = range(6)
_STATES: Final = ("starting", "starting", "opening", "running", "closing", "closed")

_log: Final = logging.getLogger(__name__)


class Connection(asyncio.Protocol):
    """An AMQP 1.0 client connection."""

    def __init__(self, server: Server) -> None:
        self.server = server
        self.out: list[bytes] = []
        self.sessions: dict[int, Session] = {}
        self.incoming = Incoming()
        self.outgoing = Outgoing()
        self.coordinator = Coordinator(self)
        self.usage = Usage(server.links_max)
        self.container_id = ""
        self.client_properties: dict[str, str] = {}
        self.frame_bytes_max = FRAME_BYTES_MIN
        """The largest frame that the client accepts."""
        self.name = ""
        self.is_publisher = self.is_full = False
        self.received_bytes = self.sent_bytes = 0
        self.delivered = 0
        self.connected_at_ms = int(time.time() * 1000)
        self._reader = FrameReader(HANDSHAKE_FRAME_BYTES_MAX)
        self.input = Input(self._reader, server.shares)
        self._is_behind = False
        self._state = _WAITING
        self._login: sasl.Login | None = None
        self._mechanism = ""
        self._user: User | None = None
        self._vhost: VHost | None = None
        self._transport: asyncio.Transport | None = None
        self._holds: set[str] = set()
        self._task: asyncio.Task[None] | None = None
        self._flush_is_due = self._is_walking = False
        self._unconfirmed_bytes = 0
        self._number = 0
        self._idle_s = 0.0
        """The client's idle time-out; 0: none."""
        self._age_s = self._closing_s = self._silent_s = self._quiet_s = 0
        self._heard = self._said = False

    @property
    def vhost(self) -> VHost:
        return cast(VHost, self._vhost)

    @property
    def user(self) -> User:
        return cast(User, self._user)

    def uses(self, vhost: str) -> bool:
        return self._vhost is not None and self._vhost.name == vhost

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        transport = cast(asyncio.Transport, transport)  # uvloop's does not derive from it
        self._transport = transport
        transport.set_write_buffer_limits(high=WRITE_HIGH_BYTES, low=WRITE_LOW_BYTES)
        raw = transport.get_extra_info("socket")
        if raw is not None and raw.family in (socket.AF_INET, socket.AF_INET6):
            raw.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        peer, here = transport.get_extra_info("peername"), transport.get_extra_info("sockname")
        self.name = f"{address_text(peer)} -> {address_text(here)}"
        self.server.joined(self)

    def data_received(self, data: bytes) -> None:
        self._heard = True
        self.received_bytes += len(data)
        self.input.add(data)
        if not self._is_behind and "step" not in self._holds:
            self._walk()

    def _walk(self) -> None:
        """Handle frames until there are no more or the connection's share of the turn is used up."""
        if self._transport is None or self._state == _CLOSED:
            self._drop_input()
            return
        shares = self.server.shares
        shares.begin(was_behind=self._is_behind)
        self._is_behind = False
        self._is_walking = True
        wait: Wait | None = None
        has_more = False
        try:
            has_more, wait = self.input.take(self._handle, lambda: "step" in self._holds)
        except Exception as error:
            self._broke(error)
        finally:
            self._is_walking = False
            self._is_behind = has_more
            shares.end(has_more=has_more)
        if has_more:
            self.hold("turn")
            if wait is not None:
                wait(self._walk)
            else:
                self.server.loop.call_soon(self._walk)
        else:
            self.release("turn")
        self._flush()

    def _drop_input(self) -> None:
        self.input.drop()
        if self._is_behind:
            self._is_behind = False
            self.server.shares.left()

    def _handle(self, received: Frame) -> Wait | None:
        kind, channel, raw, at, end = received
        if self._state == _CLOSING:
            if kind == 0 and at < end and quick_descriptor(raw, at) == 0x18:
                self._finish()
            return None
        if kind == HEADER:
            self._header(raw[at:end])
            return None
        if kind == SASL:
            if self._state != _SASL or self._login is None:
                raise Fault(ILLEGAL_STATE, "a SASL frame is not expected here")
            self._start(self._authenticate(self._login, p.decode(raw, at, end)[0]))
            return None
        if self._state < _OPENING:
            raise Fault(ILLEGAL_STATE, "the client must authenticate first")
        if at == end:
            return None
        descriptor = quick_descriptor(raw, at)
        if descriptor == _TRANSFER:
            fields, at = read_fields(raw, at + 3, end)
            return self._session(channel, fields, raw, at, end)
        if descriptor in (_DISPOSITION, _FLOW):
            fields, _ = read_fields(raw, at + 3, end)
            session = self._find(channel)
            self._in_session(session, descriptor, fields)
            return None
        performative, at = p.decode(raw, at, end)
        if isinstance(performative, p.Transfer | p.Disposition | p.Flow):
            # An unusual encoding of the descriptor.
            values = [getattr(performative, name) for name in performative.__struct_fields__]
            values += [None] * (11 - len(values))
            if isinstance(performative, p.Transfer):
                return self._session(channel, values, raw, at, end)
            kind = _FLOW if isinstance(performative, p.Flow) else _DISPOSITION
            self._in_session(self._find(channel), kind, values)
            return None
        self._performative(channel, performative)
        return None

    def _find(self, channel: int) -> Session:
        session = self.sessions.get(channel)
        if session is None:
            raise Fault(ILLEGAL_STATE, f"channel {channel} has no session")
        return session

    def _session(self, channel: int, fields: list[Any], raw: bytes, at: int, end: int) -> Wait | None:
        session = self._find(channel)
        if not session.is_open:
            return None
        try:
            wait = session.transfer(fields, raw, at, end)
        except SessionFault as fault:
            self._fail(session, fault)
            return None
        if self.server.blocked and self.is_publisher and self.vhost.name in self.server.blocked:
            self.hold("blocked")
        return wait

    def _in_session(self, session: Session, descriptor: int, fields: list[Any]) -> None:
        if not session.is_open:
            return
        try:
            if descriptor == _FLOW:
                session.flow(fields)
            else:
                self.input.later_s = SETTLE_S * session.disposition(fields)
        except SessionFault as fault:
            self._fail(session, fault)

    def _fail(self, session: Session, fault: SessionFault) -> None:
        _log.info("%s: session %d: %s", self.name, session.channel, fault)
        session.end(fault)

    def _performative(self, channel: int, received: p.Composite) -> None:
        if isinstance(received, p.Open):
            self._open(received)
            return
        if self._state != _RUNNING:
            raise Fault(ILLEGAL_STATE, "the connection is not open")
        if isinstance(received, p.Close):
            self._stop_sessions()
            self.out.append(frame(0, p.encode(p.Close())))
            self._finish()
            return
        session = self.sessions.get(channel)
        if isinstance(received, p.Begin):
            if session is not None:
                raise Fault(ILLEGAL_STATE, f"channel {channel} has a session already")
            if channel > self.server.limits.channel_max:
                raise Fault(FRAMING_ERROR, f"channel {channel} exceeds the limit of {self.server.limits.channel_max}")
            if received.remote_channel is not None:
                raise Fault(INVALID_FIELD, "begin answers a session that the broker has not begun")
            self.sessions[channel] = Session(self, channel, received)
            return
        session = self._find(channel)
        if isinstance(received, p.End):
            del self.sessions[channel]
            if session.is_open:
                session.stop()
                self.out.append(frame(channel, p.encode(p.End())))
            return
        if not session.is_open:
            return
        try:
            if isinstance(received, p.Attach):
                session.attach(received)
            elif isinstance(received, p.Detach):
                session.detach(received)
            else:
                raise Fault(DECODE_ERROR, f"{type(received).__name__.lower()} is no performative")
        except SessionFault as fault:
            self._fail(session, fault)

    def _header(self, header: bytes) -> None:
        if header == SASL_HEADER and self._state == _WAITING and self._login is None:
            users, peer, certificate = self.server.node.users, peer_of(self._transport), certificate_of(self._transport)
            self._login = sasl.Login(users, peer, certificate)
            self._state = _SASL
            offered = sasl.mechanisms(users, peer, has_certificate=bool(certificate))
            self.out.append(SASL_HEADER)
            self.out.append(frame(0, p.encode(p.SaslMechanisms(mechanisms=offered)), SASL))
        elif header == AMQP_HEADER and self._state == _WAITING:
            if self._user is None:
                self._user = self.server.node.users.anonymous(peer_of(self._transport))
                self._mechanism = sasl.ANONYMOUS
            if self._user is None:
                # The client must use SASL: answer with the header that is expected, and close.
                self.out.append(SASL_HEADER)
                self._finish()
                return
            self._state = _OPENING
            self.out.append(AMQP_HEADER)
        else:
            _log.warning("%s: unexpected protocol header %r; connection closed", self.name, header)
            self.out.append(AMQP_HEADER if self._user is not None else SASL_HEADER)
            self._finish()

    def _start(self, step: Any) -> None:
        """Run an asynchronous step. The socket is not read until it is done."""
        self.hold("step")
        self._task = self.server.loop.create_task(self._finish_step(step))

    async def _finish_step(self, step: Any) -> None:
        try:
            await step
        except Exception as error:
            self._broke(error)
        finally:
            self._task = None
            self.release("step")
            self._flush()
            if self.input:
                self._walk()

    async def _authenticate(self, login: sasl.Login, received: p.Composite) -> None:
        try:
            answer = await login.handle(received)
        except AuthenticationError as error:
            _log.warning("%s: login refused: %s", self.name, error)
            self.out.append(frame(0, p.encode(p.SaslOutcome(code=sasl.AUTH)), SASL))
            self._finish()
            return
        if self._state != _SASL:
            return
        self.out.append(frame(0, p.encode(answer), SASL))
        if login.user is not None:
            self._user, self._mechanism = login.user, login.mechanism
            self._login = None
            self._state = _WAITING
            self._reader.wants_header = True

    def _open(self, received: p.Open) -> None:
        if self._state != _OPENING:
            raise Fault(ILLEGAL_STATE, "the connection is open already")
        if len(self.server.node.connections) >= self.server.connections_max:
            raise Fault(RESOURCE_LIMIT, f"the limit of {self.server.connections_max} connections is reached")
        asked = received.max_frame_size
        if asked is not None and asked < FRAME_BYTES_MIN:
            raise Fault(INVALID_FIELD, f"max-frame-size must be at least {FRAME_BYTES_MIN}, not {asked}")
        if 0 < (received.idle_time_out or 0) < IDLE_MS_MIN:
            raise Fault(INVALID_FIELD, f"idle-time-out must be at least {IDLE_MS_MIN} ms, or 0")
        name = received.hostname or ""
        name = name[len(VHOST_PREFIX) :] if name.startswith(VHOST_PREFIX) else DEFAULT_VHOST
        node = self.server.node
        vhost = node.vhost(name)
        node.permissions.check_vhost(self.user, name)
        vhost.attach(self, self._vhost_failed)
        self._vhost = vhost
        self.container_id = received.container_id
        self.client_properties = {str(key): str(value) for key, value in (received.properties or {}).items()}
        self.client_properties["container_id"] = self.container_id
        limits = self.server.limits
        self.frame_bytes_max = min(asked or limits.frame_bytes_max, limits.frame_bytes_max)
        self._reader.bytes_max = limits.frame_bytes_max
        self._idle_s = (received.idle_time_out or 0) / 1000
        self._send_open()
        self._state = _RUNNING
        self._number = node.connections.add(self)
        self.server.watch(name)

    def _send_open(self) -> None:
        limits = self.server.limits
        answer = p.Open(
            container_id=self.server.container_id,
            max_frame_size=limits.frame_bytes_max,
            channel_max=min(limits.channel_max, 0xFFFF),
            idle_time_out=limits.heartbeat_s * 500 or None,
            offered_capabilities=list(self.server.capabilities),
            properties=self.server.properties,
        )
        self.out.append(frame(0, p.encode(answer)))

    def end(self, fault: Fault) -> None:
        """Close the connection because of a fault."""
        if self._state >= _CLOSING:
            return
        _log.warning("%s: closed: %s", self.name, fault)
        if self._state < _OPENING:
            self._finish()
            return
        self._stop_sessions()
        if self._state == _OPENING:
            self._send_open()
        self.out.append(frame(0, p.encode(p.Close(error=p.error_of(fault.condition, fault.text)))))
        self._state = _CLOSING
        self._closing_s = CLOSE_S
        for why in list(self._holds - {"step", "turn"}):
            self.release(why)
        self.wrote()

    def _broke(self, error: Exception) -> None:
        """Close the connection because of an error of the client, the broker, or a bug."""
        if isinstance(error, Fault):
            self.end(error)
        elif isinstance(error, BasaltError):
            self.end(Fault(condition_of(error), str(error)))
        else:
            _log.error("%s: internal error", self.name, exc_info=error)
            self.end(Fault(INTERNAL_ERROR, "internal error; see the broker log"))

    def close(self, reason: str) -> None:
        """Close the connection on request of the operator or the server."""
        self.end(Fault(CONNECTION_FORCED, reason))

    def _vhost_failed(self, error: BaseException) -> None:
        self.close(f"vhost '{self.vhost.name}' is down: {error}")

    def _stop_sessions(self) -> None:
        for session in list(self.sessions.values()):
            try:
                session.stop()
            except BasaltError as error:
                _log.warning("%s: session %d: requeueing failed: %s", self.name, session.channel, error)
        self.sessions.clear()

    def _finish(self) -> None:
        """Write the remaining output and close the socket."""
        self._flush()
        self._state = _CLOSED
        if self._transport is not None:
            self._transport.close()

    def abort(self) -> None:
        if self._transport is not None:
            self._transport.abort()

    def connection_lost(self, error: Exception | None) -> None:
        if self._task is not None:
            self._task.cancel()
        self._state = _CLOSED
        self._transport = None
        self._drop_input()
        self._stop_sessions()
        if self._vhost is not None:
            try:
                self._vhost.release_owner(self)
            except BasaltError as failure:
                _log.warning("%s: releasing its exclusive queues failed: %s", self.name, failure)
            if self._number:
                self.server.node.connections.remove(self._number)
        self.server.left(self)

    def count_unconfirmed(self, size: int) -> None:
        """Count bytes of messages that are not confirmed yet."""
        self._unconfirmed_bytes += size
        if self._unconfirmed_bytes > UNCONFIRMED_BYTES_MAX:
            self.hold("unconfirmed")
        elif "unconfirmed" in self._holds and self._unconfirmed_bytes <= UNCONFIRMED_BYTES_MAX >> 1:
            self.release("unconfirmed")

    def check(self, kind: str, resource: str) -> None:
        """Raise AccessRefusedError unless the user has the permission."""
        self.server.node.permissions.check(self.user, self.vhost.name, kind, resource)

    def check_topic(self, exchange: str, kind: str, key: str) -> None:
        if exchange:
            self.server.node.permissions.check_topic(self.user, self.vhost.name, exchange, kind, key)

    def declare_dynamic(self) -> str:
        """Create a queue with a generated name that belongs to this connection."""
        self.check("configure", GENERATED)
        return self.vhost.declare_queue("", exclusive=True, owner=self).name

    def delete_dynamic(self, name: str) -> None:
        """Delete a generated queue."""
        if self.vhost.is_up and name in self.vhost.queues.by_name:
            self.vhost.delete_queue(name, owner=self)

    def wrote(self) -> None:
        """Schedule a write for the end of the turn, for output that was not caused by received bytes."""
        if not self._flush_is_due and not self._is_walking:
            self._flush_is_due = True
            self.server.loop.call_soon(self._flush)

    def write_now(self) -> None:
        """Write at once, because publishers wait for outcomes. One disposition covers many messages."""
        if not self._is_walking:
            self._flush()

    def _flush(self) -> None:
        self._flush_is_due = False
        out, transport = self.out, self._transport
        if not out or transport is None or self._state == _CLOSED:
            out.clear()
            return
        data = out[0] if len(out) == 1 else b"".join(out)
        out.clear()
        self._said = True
        self.sent_bytes += len(data)
        transport.write(data)
        if self.is_full and transport.get_write_buffer_size() > WRITE_STOP_BYTES:
            self.hold("unread")

    def pause_writing(self) -> None:
        self.is_full = True
        for session in self.sessions.values():
            session.update_full()

    def resume_writing(self) -> None:
        self.is_full = False
        self.release("unread")
        for session in self.sessions.values():
            session.update_full()

    def hold(self, why: str) -> None:
        """Stop reading for a reason."""
        if not self._holds and self._transport is not None:
            self._transport.pause_reading()
        self._holds.add(why)

    def release(self, why: str) -> None:
        """Remove a reason, and resume reading if none is left."""
        if why in self._holds:
            self._holds.remove(why)
            if not self._holds and self._transport is not None and not self._transport.is_closing():
                self._transport.resume_reading()
                self._silent_s = 0

    def hold_publisher(self) -> None:
        if self.is_publisher and self._state == _RUNNING:
            self.hold("blocked")

    def tick(self) -> None:
        """Handle timeouts; called once per second."""
        self._age_s += 1
        if self._state >= _CLOSING:
            self._closing_s -= 1
            if self._closing_s < 0:
                self.abort()
            return
        limits = self.server.limits
        if self._state != _RUNNING:
            if self._age_s > limits.handshake_s:
                _log.warning("%s: no handshake within %d s", self.name, limits.handshake_s)
                self.abort()
            return
        self._quiet_s = 0 if self._said else self._quiet_s + 1
        self._silent_s = 0 if self._heard or self._holds else self._silent_s + 1
        self._said = self._heard = False
        if self._idle_s and self._quiet_s + 1 >= self._idle_s / 2:
            self._quiet_s = 0
            self.out.append(EMPTY_FRAME)
            self._flush()
            self._said = False
        if limits.heartbeat_s and self._silent_s > limits.heartbeat_s:
            self.end(Fault(RESOURCE_LIMIT, f"the client sent nothing for {limits.heartbeat_s} s (idle-time-out)"))

    def info(self) -> dict[str, Any]:
        """Return the connection's state for the management API."""
        return {
            "name": self.name,
            "protocol": "AMQP 1.0",
            "state": "blocked" if "blocked" in self._holds else _STATES[self._state],
            "user": "" if self._user is None else self._user.name,
            "vhost": "" if self._vhost is None else self._vhost.name,
            "auth_mechanism": self._mechanism,
            **socket_info(self._transport),
            "channels": len(self.sessions),
            "channel_max": self.server.limits.channel_max,
            "frame_max": self.frame_bytes_max,
            "timeout": int(self._idle_s),
            "client_properties": self.client_properties,
            "connected_at": self.connected_at_ms,
            "recv_oct": self.received_bytes,
            "send_oct": self.sent_bytes,
        }

    def channel_infos(self) -> list[dict[str, Any]]:
        return [session.info() for session in self.sessions.values()]
