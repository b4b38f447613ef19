"""One AMQP 1.0 connection: reads frames, passes them to sessions, and writes once per loop turn.

    header ─> SASL ─> header ─> open ─> begin, attach, transfer ... ─> close

Backpressure. A publisher is not read while `UNCONFIRMED_BYTES_MAX` of its messages are not confirmed. The rest is as in
`protocols/connection.py`.

Fairness. A connection handles input for its share of a turn (`LoopShares`). It keeps the rest, pauses reading, and
continues in the next turn. If a message has to wait, the input behind it waits, too.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from functools import partial
from typing import TYPE_CHECKING, Any, Final

from basaltmq.broker.message.operations import ACK, SETTLE_S
from basaltmq.errors import AuthenticationError, BasaltError
from basaltmq.protocols.amqp10 import sasl
from basaltmq.protocols.amqp10.coordinator import Coordinator
from basaltmq.protocols.amqp10.dynamic_nodes import DynamicNodes
from basaltmq.protocols.amqp10.input import Input, Wait
from basaltmq.protocols.amqp10.link import Link
from basaltmq.protocols.amqp10.message import Incoming, Outgoing
from basaltmq.protocols.amqp10.session import Session
from basaltmq.protocols.amqp10.usage import Usage
from basaltmq.protocols.amqp10.wire import performatives as p
from basaltmq.protocols.amqp10.wire import types as t
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
    IS_ACCEPTED,
    SASL,
    SASL_HEADER,
    Frame,
    FrameReader,
    frame,
    quick_descriptor,
    read_fields,
)
from basaltmq.protocols.connection import CLOSE_S, SocketConnection

if TYPE_CHECKING:
    from basaltmq.protocols.amqp10.server import Server

UNCONFIRMED_BYTES_MAX: Final = 32 << 20
"""Unconfirmed bytes of bodies at which the broker stops reading the connection: one batch of the store."""

HANDSHAKE_FRAME_BYTES_MAX: Final = 16_384
IDLE_MS_MIN: Final = 2000  # Timeouts are checked once per second.
OPEN_FAILED: Final = "amqp:connection-establishment-failed"
"""Property of an open that is followed by a close."""

VHOST_PREFIX: Final = "vhost:"
DEFAULT_VHOST: Final = "/"

_TRANSFER, _DISPOSITION, _FLOW = 0x14, 0x15, 0x13
_WAITING, _SASL, _OPENING, _RUNNING, _CLOSING, _CLOSED = range(6)
_STATES: Final = ("starting", "starting", "opening", "running", "closing", "closed")

_log: Final = logging.getLogger(__name__)


class Connection(SocketConnection):
    """An AMQP 1.0 client connection."""

    server: Server
    protocol_name = "AMQP 1.0"

    def __init__(self, server: Server) -> None:
        self.out: list[bytes] = []
        super().__init__(self.out)
        self.server = server
        self.sessions: dict[int, Session] = {}
        self.links: dict[tuple[str, bool], Link] = {}
        """Attached links by name and role of the client."""
        self.incoming = Incoming()
        self.outgoing = Outgoing()
        self.coordinator = Coordinator(self)
        self.usage = Usage(server.links_max)
        self.container_id = ""
        self.client_properties: dict[str, str] = {}
        self.frame_bytes_max = FRAME_BYTES_MIN
        """The largest frame that the client accepts."""
        self.is_publisher = False
        self.has_no_local = False
        """A link of this connection has a no-local filter, so sent messages must name their container."""
        self.delivered = 0
        self._reader = FrameReader(HANDSHAKE_FRAME_BYTES_MAX)
        self.input = Input(self._reader, server.shares)
        self._accepting: dict[Session, None] = {}
        """Sessions with deliveries that this input has accepted."""
        self._is_behind = False
        self._state = _WAITING
        self._login: sasl.Login | None = None
        self._mechanism = ""
        self._unconfirmed_bytes = 0
        self._idle_s = 0.0
        """The client's idle time-out; 0: none."""
        self._closing_s = self._quiet_s = 0

    def data_received(self, data: bytes) -> None:
        self._has_received = True
        self.received_bytes += len(data)
        self.input.add(data)
        if not self._is_behind and "step" not in self._pause_reasons:
            self._handle_input()

    def _handle_input(self) -> None:
        """Handle frames until there are no more or the connection's share of the turn is used up."""
        if self._transport is None or self._state == _CLOSED:
            self._drop_input()
            return
        shares = self.server.shares
        shares.begin(was_behind=self._is_behind)
        self._is_behind = False
        self._is_handling_input = True
        wait: Wait | None = None
        has_more = False
        try:
            try:
                has_more, wait = self.input.take(self._handle, lambda: "step" in self._pause_reasons)
            finally:
                while self._accepting:
                    self._accepting.popitem()[0].settle_accepted()
        except Exception as error:
            self._broke(error)
        finally:
            self._is_handling_input = False
            self._is_behind = has_more
            shares.end(has_more=has_more)
        if has_more:
            self.pause_reading("turn")
            if wait is not None:
                wait(self._handle_input)
            else:
                self.server.loop.call_soon(self._handle_input)
        else:
            self.resume_reading("turn")
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
            if fields[4] is IS_ACCEPTED and fields[3] is True and fields[0] is True and fields[2] in (None, fields[1]):
                # Clients that acknowledge each delivery. One settlement for all of them costs a third.
                if session.is_open and type(fields[1]) is int:
                    session.accept(fields[1])
                    self._accepting[session] = None
                    self.input.later_s = SETTLE_S[ACK]
                return None
            return self._in_session(session, descriptor, fields)
        performative, at = p.decode(raw, at, end)
        if isinstance(performative, p.Transfer | p.Disposition | p.Flow):
            # The descriptor has an unusual encoding, so decode the frame completely.
            values = [getattr(performative, name) for name in performative.__struct_fields__]
            values += [None] * (11 - len(values))
            if isinstance(performative, p.Transfer):
                return self._session(channel, values, raw, at, end)
            kind = _FLOW if isinstance(performative, p.Flow) else _DISPOSITION
            return self._in_session(self._find(channel), kind, values)
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
            self.pause_reading("blocked")
        return wait

    def _in_session(self, session: Session, descriptor: int, fields: list[Any]) -> Wait | None:
        if not session.is_open:
            return None
        try:
            if descriptor == _FLOW:
                session.flow(fields)
                return None
            return self._settle(session, session.disposition(fields))
        except SessionFault as fault:
            self._fail(session, fault)
            return None

    def _settle(self, session: Session, portions: Iterator[tuple[float, bool]]) -> Wait | None:
        """Settle a portion of the deliveries of a disposition. The next turn settles the next one."""
        try:
            self.input.later_s, has_more = next(portions)
        except SessionFault as fault:
            self._fail(session, fault)
            return None
        if not has_more:
            return None
        self.input.park(partial(self._settle, session, portions))
        return self.server.loop.call_soon

    def _fail(self, session: Session, fault: SessionFault) -> None:
        _log.info("%s: session %d: %s", self.name, session.channel, fault)
        session.fail(fault)
        self.server.shares.in_portions(self._stopping([session]), lambda: None)

    def _performative(self, channel: int, received: p.Composite) -> None:
        if isinstance(received, p.Open):
            self._open(received)
            return
        if self._state != _RUNNING:
            raise Fault(ILLEGAL_STATE, "the connection is not open")
        if isinstance(received, p.Close):
            self.run(self._stopping(list(self.sessions.values())), self._closed)
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
            self.run(self._stopping([session]), partial(self._ended, session, was_open=session.is_open))
            return
        if not session.is_open:
            return
        try:
            if isinstance(received, p.Attach):
                session.attach(received)
            elif isinstance(received, p.Detach):
                session.detach(received)
            else:
                raise Fault(DECODE_ERROR, f"{type(received).__name__.lower()} is not a performative")
        except SessionFault as fault:
            self._fail(session, fault)

    def _header(self, header: bytes) -> None:
        if header == SASL_HEADER and self._state == _WAITING and self._login is None:
            users, peer, certificate = self.server.node.users, self.peer(), self.certificate()
            self._login = sasl.Login(users, peer, certificate)
            self._state = _SASL
            offered = sasl.mechanisms(users, peer, certificate)
            self.out.append(SASL_HEADER)
            self.out.append(frame(0, p.encode(p.SaslMechanisms(mechanisms=offered)), SASL))
        elif header == AMQP_HEADER and self._state == _WAITING:
            if self._user is None:
                self._user = self.server.node.users.anonymous(self.peer())
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
        self.pause_reading("step")
        self._task = self.server.loop.create_task(self._finish_step(step))

    async def _finish_step(self, step: Any) -> None:
        try:
            await step
        except Exception as error:
            self._broke(error)
        finally:
            self._task = None
            self.resume_reading("step")
            self._flush()
            if self.input:
                self._handle_input()

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
        node.limits.check_connection(self.user.name, name)
        vhost.attach(self, self._vhost_failed)
        self._vhost = vhost
        self.container_id = received.container_id
        self.server.containers.enter(self, name, received)
        self.client_properties = {str(key): str(value) for key, value in (received.properties or {}).items()}
        self.client_properties["container_id"] = self.container_id
        limits = self.server.limits
        self.frame_bytes_max = min(asked or limits.frame_bytes_max, limits.frame_bytes_max)
        self._reader.bytes_max = limits.frame_bytes_max
        self._idle_s = (received.idle_time_out or 0) / 1000
        self._send_open()
        self._state = _RUNNING
        self._number = node.connections.add(self, user=self.user.name, vhost=name)
        self.server.watch(name)

    @property
    def dynamic_nodes(self) -> DynamicNodes:
        return self.server.dynamic_nodes(self.vhost)

    @property
    def is_connected(self) -> bool:
        return self._transport is not None and self._state == _RUNNING

    def link_ended(self, link: Link) -> None:
        """Forget a link that is not attached any more."""
        self.usage.link_ended()
        key = link.name, link.role
        if self.links.get(key) is link:
            del self.links[key]

    def _send_open(self, *, has_failed: bool = False) -> None:
        limits = self.server.limits
        properties = self.server.properties
        answer = p.Open(
            container_id=self.server.container_id,
            max_frame_size=limits.frame_bytes_max,
            channel_max=min(limits.channel_max, 0xFFFF),
            idle_time_out=limits.heartbeat_s * 500 or None,
            offered_capabilities=list(self.server.capabilities),
            properties={**properties, t.Symbol(OPEN_FAILED): True} if has_failed else properties,
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
        self.server.shares.in_portions(self._stopping(list(self.sessions.values())), self.sessions.clear)
        if self._state == _OPENING:
            self._send_open(has_failed=True)
        self.out.append(frame(0, p.encode(p.Close(error=p.error_of(fault.condition, fault.text, fault.info)))))
        self._state = _CLOSING
        self._closing_s = CLOSE_S
        self.read_until_closed()
        self.schedule_flush()

    def _broke(self, error: Exception) -> None:
        """Close the connection because of an error: of the client, of the broker, or a bug."""
        if isinstance(error, Fault):
            self.end(error)
        elif isinstance(error, BasaltError):
            self.end(Fault(condition_of(error), str(error)))
        else:
            _log.error("%s: internal error", self.name, exc_info=error)
            self.end(Fault(INTERNAL_ERROR, "internal error; see the broker log"))

    def close(self, reason: str) -> None:
        self.end(Fault(CONNECTION_FORCED, reason))

    def _vhost_failed(self, error: BaseException) -> None:
        self.close(f"vhost '{self.vhost.name}' is down: {error}")

    def run(self, steps: Iterator[None], then: Callable[[], None]) -> None:
        """Run a generator in portions, over several turns if necessary, then call `then`. Later input waits."""
        self.pause_reading("step")
        self.server.shares.in_portions(steps, partial(self._ran, then))

    def _stopping(self, sessions: list[Session]) -> Iterator[None]:
        """Stop sessions link by link.

        Several of these generators may run for one session. Each one stops the links that remain, so none finishes too
        early.
        """
        for session in sessions:
            for _ in session.stopping():
                if self.vhost.is_up:
                    # Flush after each portion. Otherwise one turn would write the requeued messages of all links.
                    self.vhost.tick.flush()
                yield

    def _ran(self, then: Callable[[], None]) -> None:
        if self._transport is None:
            return
        then()
        self.resume_reading("step")
        self._flush()
        if self.input and not self._is_handling_input:
            self._handle_input()

    def _ended(self, session: Session, *, was_open: bool) -> None:
        """Handle the end of a session by the client."""
        if self.sessions.get(session.channel) is session:
            del self.sessions[session.channel]
        if was_open:
            self.out.append(frame(session.channel, p.encode(p.End())))

    def _closed(self) -> None:
        """Handle the close of the connection by the client."""
        self.sessions.clear()
        self.out.append(frame(0, p.encode(p.Close())))
        self._finish()

    def _finish(self) -> None:
        """Write the remaining output and close the socket."""
        self._flush()
        self._state = _CLOSED
        if self._transport is not None:
            self._transport.close()

    def connection_lost(self, error: Exception | None) -> None:
        if self._task is not None:
            self._task.cancel()
        self._state = _CLOSED
        self._transport = None
        self._drop_input()
        self.server.shares.in_portions(self._stopping(list(self.sessions.values())), self.unregister)

    def unregister(self) -> None:
        super().unregister()
        if self._vhost is not None:
            self.server.containers.leave(self, self._vhost.name)
        # Break the reference cycles, so that the memory is freed without the garbage collector.
        self.sessions.clear()
        self.links.clear()
        del self.coordinator

    def count_unconfirmed(self, size: int) -> None:
        """Change the count of unconfirmed bytes."""
        self._unconfirmed_bytes += size
        if self._unconfirmed_bytes > UNCONFIRMED_BYTES_MAX:
            self.pause_reading("unconfirmed")
        elif "unconfirmed" in self._pause_reasons and self._unconfirmed_bytes <= UNCONFIRMED_BYTES_MAX >> 1:
            self.resume_reading("unconfirmed")

    def check(self, kind: str, resource: str) -> None:
        """Raise AccessRefusedError unless the user has the permission."""
        self.server.node.permissions.check(self.user, self.vhost.name, kind, resource)

    def check_topic(self, exchange: str, kind: str, key: str) -> None:
        if exchange:
            self.server.node.permissions.check_topic(self.user, self.vhost.name, exchange, kind, key)

    def _flush(self) -> None:
        if self._state == _CLOSED:
            self.out.clear()
        super()._flush()

    def pause_writing(self) -> None:
        self.is_full = True
        for session in self.sessions.values():
            session.update_full()

    def resume_writing(self) -> None:
        self.is_full = False
        self.resume_reading("unread")
        for session in self.sessions.values():
            session.go_on()
            session.update_full()

    def block_publisher(self, reason: str) -> None:
        if self.is_publisher and self._state == _RUNNING:
            self.pause_reading("blocked")

    def tick(self) -> None:
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
        self._quiet_s = 0 if self._has_sent else self._quiet_s + 1
        self._silent_s = 0 if self._has_received or self._pause_reasons else self._silent_s + 1
        self._has_sent = self._has_received = False
        if self._idle_s and self._quiet_s + 1 >= self._idle_s / 2:
            self._quiet_s = 0
            self.out.append(EMPTY_FRAME)
            self._flush()
            self._has_sent = False
        if limits.heartbeat_s and self._silent_s > limits.heartbeat_s:
            self.end(Fault(RESOURCE_LIMIT, f"the client sent nothing for {limits.heartbeat_s} s (idle-time-out)"))

    def info(self) -> dict[str, Any]:
        return {
            **super().info(),
            "state": "blocked" if "blocked" in self._pause_reasons else _STATES[self._state],
            "auth_mechanism": self._mechanism,
            "channels": len(self.sessions),
            "channel_max": self.server.limits.channel_max,
            "frame_max": self.frame_bytes_max,
            "timeout": int(self._idle_s),
            "client_properties": self.client_properties,
        }

    def channel_infos(self) -> list[dict[str, Any]]:
        return [session.info() for session in self.sessions.values()]
