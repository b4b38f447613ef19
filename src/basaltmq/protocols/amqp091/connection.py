"""One AMQP connection: passes received bytes to the session and events to channels, and writes once per loop turn.

Fairness. A connection handles input for its share of a turn (`Input`, `LoopShares`). It keeps the rest, pauses reading,
and continues in the next turn.

A client that violates the protocol gets connection.close. It has `CLOSE_S` to respond, then the socket is aborted.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, Final

from basaltmq.broker.auth.sasl import EXTERNAL, PLAIN
from basaltmq.broker.consumers.queue import BrokerQueue
from basaltmq.broker.message.amqp_table import Table
from basaltmq.broker.publishing.credit import limit_receive_buffer
from basaltmq.broker.scheduling.loop_shares import DRAFT_S, TURN_S
from basaltmq.errors import AuthenticationError, BasaltError, LimitExceededError
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
from basaltmq.protocols.connection import CLOSE_S, SocketConnection

if TYPE_CHECKING:
    from basaltmq.protocols.amqp091.server import Server

READ_BYTES_LARGE: Final = 128 << 10
"""After a read of at least this size, reading pauses for one loop turn, because libuv repeats a read that fills its
buffer of 256,000 bytes up to 32 times per turn."""

DELAY_S: Final = 0.005
"""Pause of a publisher of large messages while the store is behind. A flush of a memtable takes 20 to 100 ms."""

_log: Final = logging.getLogger(__name__)


class Connection(SocketConnection):
    """An AMQP client connection."""

    server: Server
    protocol_name = "AMQP 0-9-1"

    def __init__(self, server: Server) -> None:
        self.session = Session(server.limits)
        super().__init__(self.session.outgoing)
        self.server = server
        self.handlers = server.handlers
        self.channels: dict[int, Channel] = {}
        self.checked_properties: set[bytes] = set()
        self.client = ClientCapabilities({})
        self.client_properties: Table = {}
        self.mechanism = ""
        self.is_publisher = False
        self.later_s = 0.0
        """Time in seconds that the current method will take at the end of the turn."""
        self._quiet_s = self._closing_s = 0
        self._wait: Callable[[Callable[[], None]], object] | None = None
        """Schedules the rest of the input, if the next message has to wait for more than the next turn."""
        self._input = Input(self.session, server.shares)
        self._blocked_sent = self._was_limited = False
        self._is_ending = False
        """The client has closed the connection, and its channels end. Then close-ok is sent."""

    def data_received(self, data: bytes) -> None:
        self._has_received = True
        self.received_bytes += len(data)
        if self._input.add(data):
            self._handle_input(is_large=len(data) >= READ_BYTES_LARGE)

    def _handle_input(self, *, is_large: bool = False) -> None:
        """Handle input until it ends or the connection's share of the turn is used up."""
        if self._transport is None:
            return
        self._is_handling_input = True
        has_more = False
        try:
            has_more = self._input.take(self)
        except Exception as error:
            self._input.drop()
            self.fail(error)
        finally:
            self._is_handling_input = False
        if has_more or is_large:
            self.pause_reading("turn")
            wait, self._wait = self._wait, None
            if wait is not None:
                wait(self._handle_input)
            else:
                self.server.loop.call_soon(self._handle_input)
        elif "turn" in self._pause_reasons:
            self.resume_reading("turn")
        self._flush()

    def handle(self, event: Event) -> float:
        """Handle an event. Return the time in seconds that it will take at the end of the turn."""
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
                self._end_channels(_nothing)
                self._closing_s = CLOSE_S
            case HeaderAccepted():
                properties = self.server.properties
                has_certificate = self.server.node.users.accepts(self.certificate(), self.peer())
                offered = " ".join(sasl.mechanisms(has_certificate=has_certificate))
                self.session.send(0, m.ConnectionStart(0, 9, properties, offered.encode(), b"en_US"))
            case HeaderRefused():
                _log.warning("%s: unknown protocol header %r; connection closed", self.name, event.got)
                self._finish()
        return 0.0

    def _channel_method(self, number: int, method: m.Method) -> None:
        if type(method) is m.ChannelOpen:
            try:
                self.server.node.limits.check_channel(self.user.name, self._channels_of_user)
            except LimitExceededError as error:
                self.end(ConnectionFault(NOT_ALLOWED, str(error), method.number))
                return
            self.channels[number] = Channel(number, self)
            self.session.send(number, m.ChannelOpenOk())
        elif type(method) is m.ChannelClose:
            self._end_channel(number)
            self.session.send(number, m.ChannelCloseOk())
        else:
            channel = self.channels.get(number)
            if channel is not None:
                self._do(channel, method)

    def _channels_of_user(self) -> int:
        mine = [
            each for each in self.server.connections if each._user is not None and each._user.name == self.user.name
        ]
        return sum(len(each.channels) for each in mine)

    def _publish(self, channel: Channel, event: Published) -> float:
        try:
            rest, published = channel.publish(event)
            if rest:
                self._input.put_back(Published(event.channel, rest))
            if self.server.blocked and (reason := self.server.blocked.get(self.vhost.name)) is not None:
                self.block_publisher(reason)
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

    def wait_for_credit(self, queues: Sequence[BrokerQueue]) -> None:
        """Continue when the queues of the next message give credit."""
        self._wait = partial(self.vhost.tick.wait_for_credit, queues)
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
        self.schedule_flush()

    def end(self, fault: Fault) -> None:
        """Close the connection because of a fault."""
        if self.session.phase in (Phase.CLOSING, Phase.CLOSED):
            return
        _log.warning("%s: closed: %s", self.name, fault)
        self._end_channels(_nothing)
        self.session.fail(fault)
        self._closing_s = CLOSE_S
        self.read_until_closed()
        self.schedule_flush()

    def fail(self, error: BaseException) -> None:
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
                # Clients rely on this: when close-ok arrives, their messages are requeued.
                self._is_ending = True
                self._end_channels(self._ended)

    def _start(self, step: Any) -> None:
        """Run an asynchronous step. The socket is not read until it is done."""
        self.pause_reading("step")
        self._task = self.server.loop.create_task(self._finish_step(step))

    async def _finish_step(self, step: Any) -> None:
        try:
            await step
        except Fault as fault:
            self.end(fault)
        except BasaltError as error:
            self.end(fault_of(error))
        except Exception as error:
            self.fail(error)
        finally:
            self.resume_reading("step")
            self._flush()

    async def _authenticate(self, method: m.ConnectionStartOk) -> None:
        users = self.server.node.users
        certificate = self.certificate()
        try:
            if method.mechanism in (PLAIN, sasl.AMQPLAIN):
                given = sasl.read_credentials(method.mechanism, method.response)
                user = await users.authenticate(given.name, given.password, self.peer())
            elif method.mechanism == EXTERNAL and certificate:
                user = users.external(certificate, self.peer())
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
        await users.authenticate(self.user.name, secret, self.peer())
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
            self.server.node.limits.check_connection(self.user.name, method.virtual_host)
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
        self._number = self.server.node.connections.add(self, user=self.user.name, vhost=vhost.name)
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

    def _end_channels(self, then: Callable[[], None]) -> None:
        """End all channels, over several turns if it takes long, then call `then`.

        Several of these generators may run. Each one ends the channels that remain, so none calls `then` too early.
        """
        self.server.shares.in_portions(self._ending_channels(), then)

    def _ending_channels(self) -> Iterator[None]:
        for number in list(self.channels):
            self._end_channel(number)
            if self.vhost.is_up:
                # Flush after each portion. Otherwise one turn would write the requeued messages of all channels.
                self.vhost.tick.flush()
            yield

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

    def connection_lost(self, error: Exception | None) -> None:
        if self._task is not None:
            self._task.cancel()
        self.session.phase, self._transport = Phase.CLOSED, None
        self._input.drop()
        self._end_channels(self.unregister)

    def _ended(self) -> None:
        self._is_ending = False
        self._finish()

    def _flush(self) -> None:
        if self._is_ending:
            return
        super()._flush()
        if self.session.phase is Phase.CLOSED and self._transport is not None:
            self._transport.close()

    def pause_writing(self) -> None:
        self.is_full = True
        for channel in self.channels.values():
            for subscription in channel.subscriptions.by_tag.values():
                if subscription.consumer is not None:
                    subscription.consumer.pause()

    def resume_writing(self) -> None:
        self.is_full = False
        self.resume_reading("unread")
        for channel in self.channels.values():
            for subscription in channel.subscriptions.by_tag.values():
                if subscription.consumer is not None:
                    subscription.consumer.resume()

    def block_publisher(self, reason: str) -> None:
        """Block a publishing client: send connection.blocked and stop reading."""
        if self.is_publisher and self.session.phase is Phase.RUNNING:
            if self.client.connection_blocked and not self._blocked_sent:
                self.session.send(0, m.ConnectionBlocked(shorten(reason)))
                self.schedule_flush()
            self._blocked_sent = True
            self.pause_reading("blocked")

    def unblock_publisher(self) -> None:
        if self._blocked_sent:
            self._blocked_sent = False
            if self.client.connection_blocked and self.session.phase is Phase.RUNNING:
                self.session.send(0, m.ConnectionUnblocked())
                self.schedule_flush()
            self.resume_reading("blocked")

    def tick(self) -> None:
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
        self._quiet_s = 0 if self._has_sent else self._quiet_s + 1
        self._silent_s = 0 if self._has_received or self._pause_reasons else self._silent_s + 1
        self._has_sent = self._has_received = False
        if not interval_s:
            return
        if self._quiet_s >= max(1, interval_s // 2):
            self._quiet_s = 0
            self.session.outgoing.append(HEARTBEAT_FRAME)
            self._flush()
            self._has_sent = False
        if self._silent_s > 2 * interval_s:
            _log.warning("%s: missed heartbeats from client, timeout: %d s", self.name, interval_s)
            self.abort()

    def info(self) -> dict[str, Any]:
        tuning = self.session.tuning
        return {
            **super().info(),
            "state": "blocked" if self._blocked_sent else self.session.phase.value,
            "auth_mechanism": self.mechanism,
            "channels": len(self.channels),
            "channel_max": tuning.channel_max,
            "frame_max": tuning.frame_bytes_max,
            "timeout": tuning.heartbeat_s,
            "client_properties": self.client_properties,
        }

    def channel_infos(self) -> list[dict[str, Any]]:
        return [channel.info() for channel in self.channels.values()]


def _nothing() -> None:
    """Do nothing after the end of the channels."""
