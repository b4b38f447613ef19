"""One AMQP connection: passes received bytes to the session and events to channels, and writes once per loop turn.

Backpressure. While publishers are blocked (disk, memory, store stall), the connection of a publisher is not read. If a
client does not read: above `WRITE_HIGH_BYTES` of unsent data its consumers are paused, so only responses to its own
methods accumulate. Above `WRITE_STOP_BYTES` the connection is not read until the client catches up. So memory per
connection is bounded, and the two sides cannot deadlock.

Fairness. A connection handles input for its share of a turn (`Input`, `LoopShares`). It keeps the rest, pauses reading,
and continues in the next turn.

A client that violates the protocol gets connection.close. It has `CLOSE_S` to respond, then the socket is aborted.
"""

from __future__ import annotations

import asyncio
import logging
import socket
import ssl
import time
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any, Final, cast

from basaltmq.broker.auth.users import User
from basaltmq.broker.loop_shares import DRAFT_S, TURN_S
from basaltmq.broker.message.amqp_table import Table
from basaltmq.broker.peer import Peer, peer_at
from basaltmq.broker.publishing.credit import limit_receive_buffer
from basaltmq.broker.vhost import VHost
from basaltmq.errors import AuthenticationError, BasaltError
from basaltmq.protocols.amqp091 import sasl
from basaltmq.protocols.amqp091.capabilities import ClientCapabilities
from basaltmq.protocols.amqp091.channel import Channel
from basaltmq.protocols.amqp091.events import (
    ChannelFailed,
    ConnectionFailed,
    Event,
    HeaderAccepted,
    HeaderRefused,
    Published,
    Received,
)
from basaltmq.protocols.amqp091.input import Input
from basaltmq.protocols.amqp091.session import Session
from basaltmq.protocols.amqp091.wire import methods as m
from basaltmq.protocols.amqp091.wire.errors import (
    ACCESS_REFUSED,
    CONNECTION_FORCED,
    INTERNAL_ERROR,
    NOT_ALLOWED,
    ChannelFault,
    ConnectionFault,
    Fault,
    fault_of,
    shorten,
)
from basaltmq.protocols.amqp091.wire.frames import HEARTBEAT_FRAME
from basaltmq.protocols.amqp091.wire.states import Phase

if TYPE_CHECKING:
    from basaltmq.protocols.amqp091.server import Server

WRITE_HIGH_BYTES: Final = 1 << 20
"""Unsent bytes above which consumers are paused: one second of a 10 Mbit/s link."""

WRITE_LOW_BYTES: Final = 256 << 10
WRITE_STOP_BYTES: Final = 16 << 20
"""Unsent bytes above which the connection is not read. It leaves room for the responses to pipelined methods."""

READ_BYTES_LARGE: Final = 128 << 10
"""After a read of at least this size, reading pauses for one loop turn, because libuv repeats a read that fills its
buffer of 256,000 bytes up to 32 times per turn."""

DELAY_S: Final = 0.005
"""Pause of a publisher of large messages while the store is behind. A flush of a memtable takes 20 to 100 ms."""

CLOSE_S: Final = 5
"""Seconds that a client has to respond to connection.close."""

_log: Final = logging.getLogger(__name__)


class Connection(asyncio.Protocol):
    """An AMQP client connection."""

    def __init__(self, server: Server) -> None:
        self.server = server
        self.handlers = server.handlers
        self.session = Session(server.limits)
        self.channels: dict[int, Channel] = {}
        self.checked_properties: set[bytes] = set()
        self.client = ClientCapabilities({})
        self.client_properties: Table = {}
        self.mechanism = ""
        self.name = ""
        self.is_publisher = False
        self.is_full = False
        """The client does not read, and its consumers are paused."""
        self.received_bytes = self.sent_bytes = 0
        self.connected_at_ms = int(time.time() * 1000)
        self.later_s = 0.0
        """Time in seconds that the current method will cost later in the turn."""
        self.silent_s = 0
        self.heard = False
        self.said = False
        self._quiet_s = 0
        self._age_s = 0
        self._closing_s = 0
        self._number = 0
        self._vhost: VHost | None = None
        self._user: User | None = None
        self._transport: asyncio.Transport | None = None
        self._flush_is_due = False
        self._is_walking = False
        self._wait: Callable[[Callable[[], None]], object] | None = None
        """Schedules the rest of the input, if the next message has to wait for more than the next turn."""
        self._input = Input(self.session, server.shares)
        self._holds: set[str] = set()
        """Reasons why the socket is not read."""
        self._blocked_sent = self._was_limited = False
        self._task: asyncio.Task[None] | None = None

    @property
    def vhost(self) -> VHost:
        assert self._vhost is not None
        return self._vhost

    @property
    def user(self) -> User:
        assert self._user is not None
        return self._user

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
        self.name = f"{_address(peer)} -> {_address(here)}"
        self.server.joined(self)

    def data_received(self, data: bytes) -> None:
        self.heard = True
        self.received_bytes += len(data)
        if self._input.add(data):
            self._walk(is_large=len(data) >= READ_BYTES_LARGE)

    def _walk(self, *, is_large: bool = False) -> None:
        """Handle input until it ends or the connection's share of the turn is used up."""
        if self._transport is None:
            return
        self._is_walking = True
        has_more = False
        try:
            has_more = self._input.take(self)
        except Exception as error:
            self._input.drop()
            self.broke(error)
        finally:
            self._is_walking = False
        if has_more or is_large:
            self.hold("turn")
            wait, self._wait = self._wait, None
            if wait is not None:
                wait(self._walk)
            else:
                self.server.loop.call_soon(self._walk)
        elif "turn" in self._holds:
            self.release("turn")
        self._flush()

    def handle(self, event: Event) -> float:
        """Handle an event. Return the time in seconds that it will cost later in the turn."""
        match event:
            case Published():
                channel = self.channels.get(event.channel)
                if channel is not None:
                    return self._publish(channel, event)
            case Received():
                if event.channel:
                    self.later_s = 0.0
                    self._channel_method(event.channel, event.method)
                    return self.later_s
                self._connection_method(event.method)
            case ChannelFailed():
                _log.warning("%s: channel %d: %s", self.name, event.channel, event.fault)
                self._end_channel(event.channel)
            case ConnectionFailed():
                _log.warning("%s: closed: %s", self.name, event.fault)
                self._end_channels()
                self._closing_s = CLOSE_S
            case HeaderAccepted():
                properties = self.server.properties
                offered = " ".join(sasl.mechanisms(has_certificate=bool(self._certificate())))
                self.session.send(0, m.ConnectionStart(0, 9, properties, offered.encode(), b"en_US"))
            case HeaderRefused():
                _log.warning("%s: unknown protocol header %r; connection closed", self.name, event.got)
                self._finish()
        return 0.0

    def _channel_method(self, number: int, method: m.Method) -> None:
        if type(method) is m.ChannelOpen:
            self.channels[number] = Channel(number, self)
            self.session.send(number, m.ChannelOpenOk())
        elif type(method) is m.ChannelClose:
            self._end_channel(number)
            self.session.send(number, m.ChannelCloseOk())
        else:
            channel = self.channels.get(number)
            if channel is not None:
                self._do(channel, method)

    def _publish(self, channel: Channel, event: Published) -> float:
        try:
            rest, published = channel.publish(event)
            if rest:
                self._input.put_back(Published(event.channel, rest))
            if self.server.blocked and (reason := self.server.blocked.get(self.vhost.name)) is not None:
                self.hold_publisher(reason)
            return TURN_S if rest else published * DRAFT_S
        except Fault as fault:
            self.refuse(channel.number, fault)
        except BasaltError as error:
            self.refuse(channel.number, fault_of(error, m.BasicPublish.number))
        return 0.0

    def wait_for_fan_out(self) -> None:
        """Continue when a turn has room for the fan-out of the next message."""
        self._wait = self.server.shares.call_without_debt

    def wait_for_store(self) -> None:
        """Continue after a pause, because the next message is large and the store is behind."""
        self._wait = partial(self.server.loop.call_later, DELAY_S)

    def wait_for_credit(self) -> None:
        """Continue when the queue of the next message gives credit."""
        self._wait = self.vhost.tick.wait_for_credit
        if not self._was_limited:
            self._was_limited = True
            limit_receive_buffer(self._transport)

    def _do(self, channel: Channel, method: m.Method) -> None:
        try:
            work = self.handlers[type(method)](channel, method)
        except Fault as fault:
            self.refuse(channel.number, fault)
        except BasaltError as error:
            self.refuse(channel.number, fault_of(error, method.number))
        else:
            if work is not None:
                self._input.begin(channel, method, work)

    def refuse(self, number: int, fault: Fault) -> None:
        """Close a channel or the connection because of a fault."""
        if isinstance(fault, ChannelFault):
            _log.info("%s: channel %d: %s", self.name, number, fault)
            self._end_channel(number)
            self.session.close_channel(number, fault)
        else:
            self.end(fault)
        self.wrote()

    def end(self, fault: Fault) -> None:
        """Close the connection because of a fault."""
        if self.session.phase in (Phase.CLOSING, Phase.CLOSED):
            return
        _log.warning("%s: closed: %s", self.name, fault)
        self._end_channels()
        self.session.fail(fault)
        self._closing_s = CLOSE_S
        self._release_all_holds()
        self.wrote()

    def broke(self, error: BaseException) -> None:
        """Close the connection after an internal error. Other connections are not affected."""
        _log.error("%s: internal error", self.name, exc_info=error)
        self.end(ConnectionFault(INTERNAL_ERROR, "internal error; see the broker log"))

    def _connection_method(self, method: m.Method) -> None:
        match method:
            case m.ConnectionStartOk():
                self.client_properties = method.client_properties
                self.client = ClientCapabilities(method.client_properties)
                self.mechanism = method.mechanism
                self._start(self._authenticate(method))
            case m.ConnectionOpen():
                self._open(method)
            case m.ConnectionUpdateSecret():
                self._start(self._update_secret(method))
            case m.ConnectionClose() | m.ConnectionCloseOk():
                self._end_channels()
                self._finish()

    def _start(self, step: Any) -> None:
        """Run an asynchronous step. The socket is not read until it is done."""
        self.hold("step")
        self._task = self.server.loop.create_task(self._finish_step(step))

    async def _finish_step(self, step: Any) -> None:
        try:
            await step
        except Fault as fault:
            self.end(fault)
        except BasaltError as error:
            self.end(fault_of(error))
        except Exception as error:
            self.broke(error)
        finally:
            self.release("step")
            self._flush()

    async def _authenticate(self, method: m.ConnectionStartOk) -> None:
        users = self.server.node.users
        certificate = self._certificate()
        try:
            if method.mechanism == sasl.PLAIN:
                name, password = sasl.read_plain(method.response)
                user = await users.authenticate(name, password, self._peer())
            elif method.mechanism == sasl.AMQPLAIN:
                name, password = sasl.read_amqplain(method.response)
                user = await users.authenticate(name, password, self._peer())
            elif method.mechanism == sasl.EXTERNAL and certificate:
                user = users.external(certificate, self._peer())
            else:
                raise ConnectionFault(
                    NOT_ALLOWED, f"mechanism '{method.mechanism}' was not offered by the server", method.number
                )
        except AuthenticationError as error:
            self._refuse_login(method, error)
            return
        if self.session.phase is not Phase.CHECKING:
            return
        self._user = user
        limits = self.server.limits
        self.session.send(0, m.ConnectionTune(limits.channel_max, limits.frame_bytes_max, limits.heartbeat_s))

    def _refuse_login(self, method: m.ConnectionStartOk, error: AuthenticationError) -> None:
        _log.warning("%s: login refused: %s", self.name, error)
        if self.session.phase is not Phase.CHECKING:
            return
        if not self.client.authentication_failure_close:
            # Without this capability the socket is just closed, as the specification demands.
            self._finish()
            return
        self.end(
            ConnectionFault(
                ACCESS_REFUSED,
                f"Login was refused using authentication mechanism {method.mechanism}. "
                "For details see the broker logfile.",
            )
        )

    async def _update_secret(self, method: m.ConnectionUpdateSecret) -> None:
        try:
            secret = method.secret.decode()
        except UnicodeDecodeError:
            raise ConnectionFault(NOT_ALLOWED, "the secret is not UTF-8", method.number) from None
        users = self.server.node.users
        await users.authenticate(self.user.name, secret, self._peer())
        if self.session.phase is Phase.RUNNING:
            self.session.send(0, m.ConnectionUpdateSecretOk())

    def _open(self, method: m.ConnectionOpen) -> None:
        try:
            if len(self.server.connections) > self.server.connections_max:
                raise ConnectionFault(
                    NOT_ALLOWED, f"the limit of {self.server.connections_max} connections is reached", method.number
                )
            vhost = self.server.node.vhost(method.virtual_host)
            self.server.node.permissions.check_vhost(self.user, method.virtual_host)
            vhost.attach(self, self._vhost_failed)
        except Fault as fault:
            self.end(fault)
            return
        except BasaltError as error:
            answer = fault_of(error, method.number)
            # Any error here closes the connection, and clients expect code 530.
            code = NOT_ALLOWED if isinstance(answer, ChannelFault) else answer.code
            self.end(ConnectionFault(code, answer.text, method.number))
            return
        self._vhost = vhost
        self.session.send(0, m.ConnectionOpenOk())
        self._number = self.server.node.connections.add(self)
        self.server.watch(vhost.name)

    def _vhost_failed(self, error: BaseException) -> None:
        self.close(f"vhost '{self.vhost.name}' is down: {error}")

    def _end_channel(self, number: int) -> None:
        channel = self.channels.pop(number, None)
        if channel is not None:
            try:
                channel.stop()
            except BasaltError as error:
                _log.warning("%s: channel %d: requeueing its deliveries failed: %s", self.name, number, error)

    def _end_channels(self) -> None:
        for number in list(self.channels):
            self._end_channel(number)

    def close(self, reason: str) -> None:
        """Close the connection on request of the operator or the server."""
        if self.session.phase in (Phase.HEADER, Phase.START_OK):
            self._finish()
        else:
            self.end(ConnectionFault(CONNECTION_FORCED, reason))

    def _finish(self) -> None:
        """Write the remaining output and close the socket."""
        self._flush()
        self.session.phase = Phase.CLOSED
        if self._transport is not None:
            self._transport.close()

    def abort(self) -> None:
        """Close the socket at once."""
        if self._transport is not None:
            self._transport.abort()

    def connection_lost(self, error: Exception | None) -> None:
        if self._task is not None:
            self._task.cancel()
        self.session.phase, self._transport = Phase.CLOSED, None
        self._input.drop()
        self.server.shares.do(self._clean_up)

    def _clean_up(self) -> None:
        self._end_channels()
        if self._vhost is not None:
            try:
                self._vhost.release_owner(self)
            except BasaltError as failure:
                _log.warning("%s: releasing its exclusive queues failed: %s", self.name, failure)
            self.server.node.connections.remove(self._number)
        self.server.left(self)

    def wrote(self) -> None:
        """Schedule a write for the end of the turn, for output that was not caused by received bytes."""
        if not self._flush_is_due and not self._is_walking:
            self._flush_is_due = True
            self.server.loop.call_soon(self._flush)

    def write_now(self) -> None:
        """Write at once, because publishers wait for confirms. One confirm covers many messages."""
        if not self._is_walking:
            self._flush()

    def _flush(self) -> None:
        self._flush_is_due = False
        out = self.session.outgoing
        transport = self._transport
        if not out or transport is None:
            out.clear()
            return
        data = out[0] if len(out) == 1 else b"".join(out)
        out.clear()
        self.said = True
        self.sent_bytes += len(data)
        transport.write(data)
        if self.is_full and transport.get_write_buffer_size() > WRITE_STOP_BYTES:
            self.hold("unread")
        if self.session.phase is Phase.CLOSED:
            transport.close()

    def pause_writing(self) -> None:
        self.is_full = True
        for channel in self.channels.values():
            for subscription in channel.subscriptions.by_tag.values():
                if subscription.consumer is not None:
                    subscription.consumer.pause()

    def resume_writing(self) -> None:
        self.is_full = False
        self.release("unread")
        for channel in self.channels.values():
            for subscription in channel.subscriptions.by_tag.values():
                if subscription.consumer is not None:
                    subscription.consumer.resume()

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
                self.silent_s = 0

    def _release_all_holds(self) -> None:
        for why in list(self._holds - {"step", "turn"}):
            self.release(why)

    def hold_publisher(self, reason: str) -> None:
        """Block a publishing client: send connection.blocked and stop reading."""
        if self.is_publisher and self.session.phase is Phase.RUNNING:
            if self.client.connection_blocked and not self._blocked_sent:
                self.session.send(0, m.ConnectionBlocked(shorten(reason)))
                self.wrote()
            self._blocked_sent = True
            self.hold("blocked")

    def release_publisher(self) -> None:
        if self._blocked_sent:
            self._blocked_sent = False
            if self.client.connection_blocked and self.session.phase is Phase.RUNNING:
                self.session.send(0, m.ConnectionUnblocked())
                self.wrote()
            self.release("blocked")

    def tick(self) -> None:
        """Handle timeouts and heartbeats; called once per second."""
        self._age_s += 1
        phase = self.session.phase
        if phase in (Phase.CLOSING, Phase.CLOSED):
            self._closing_s -= 1
            if self._closing_s < 0:
                self.abort()
            return
        if phase is not Phase.RUNNING:
            if self._age_s > self.server.limits.handshake_s:
                _log.warning("%s: no handshake within %d s", self.name, self.server.limits.handshake_s)
                self.abort()
            return
        interval_s = self.session.tuning.heartbeat_s
        self._quiet_s = 0 if self.said else self._quiet_s + 1
        self.silent_s = 0 if self.heard or self._holds else self.silent_s + 1
        self.said = self.heard = False
        if not interval_s:
            return
        if self._quiet_s >= max(1, interval_s // 2):
            self._quiet_s = 0
            self.session.outgoing.append(HEARTBEAT_FRAME)
            self._flush()
            self.said = False
        if self.silent_s > 2 * interval_s:
            _log.warning("%s: missed heartbeats from client, timeout: %d s", self.name, interval_s)
            self.abort()

    def _certificate(self) -> dict[str, Any]:
        if self._transport is None or self._transport.get_extra_info("ssl_object") is None:
            return {}
        return self._transport.get_extra_info("peercert") or {}

    def _peer(self) -> Peer:
        peer = self._transport.get_extra_info("peername") if self._transport is not None else None
        if isinstance(peer, tuple) and peer:
            return peer_at(str(peer[0]))
        # A Unix domain socket is always local.
        return Peer("", is_loopback=isinstance(peer, str | bytes))

    def info(self) -> dict[str, Any]:
        """Return the connection's state for the management API."""
        transport = self._transport
        peer = transport.get_extra_info("peername") if transport is not None else None
        here = transport.get_extra_info("sockname") if transport is not None else None
        tls = transport.get_extra_info("ssl_object") if transport is not None else None
        tuning = self.session.tuning
        return {
            "name": self.name,
            "protocol": "AMQP 0-9-1",
            "state": "blocked" if self._blocked_sent else self.session.phase.value,
            "user": "" if self._user is None else self._user.name,
            "vhost": "" if self._vhost is None else self._vhost.name,
            "auth_mechanism": self.mechanism,
            "peer_host": peer[0] if isinstance(peer, tuple) else "",
            "peer_port": peer[1] if isinstance(peer, tuple) else 0,
            "host": here[0] if isinstance(here, tuple) else "",
            "port": here[1] if isinstance(here, tuple) else 0,
            "ssl": isinstance(tls, ssl.SSLObject),
            "channels": len(self.channels),
            "channel_max": tuning.channel_max,
            "frame_max": tuning.frame_bytes_max,
            "timeout": tuning.heartbeat_s,
            "client_properties": self.client_properties,
            "connected_at": self.connected_at_ms,
            "recv_oct": self.received_bytes,
            "send_oct": self.sent_bytes,
            "send_pend": 0 if transport is None else transport.get_write_buffer_size(),
        }

    def channel_infos(self) -> list[dict[str, Any]]:
        return [channel.info() for channel in self.channels.values()]


def _address(address: Any) -> str:
    if isinstance(address, tuple):
        host = f"[{address[0]}]" if ":" in str(address[0]) else address[0]
        return f"{host}:{address[1]}"
    return str(address or "local")
