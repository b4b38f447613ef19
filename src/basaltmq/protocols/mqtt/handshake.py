"""CONNECT: authentication, virtual host, session, will, and the limits that CONNACK announces."""

from __future__ import annotations

import asyncio
import secrets
from functools import partial
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from basaltmq.broker.auth.users import User
from basaltmq.broker.message.operations import RowChange
from basaltmq.errors import (
    AccessRefusedError,
    AuthenticationError,
    LimitExceededError,
    VHostDownError,
    VHostNotFoundError,
)
from basaltmq.protocols.mqtt.access import ClientAccess, authenticate
from basaltmq.protocols.mqtt.host import NEVER_S
from basaltmq.protocols.mqtt.login import METHODS, Login
from basaltmq.protocols.mqtt.sessions import message
from basaltmq.protocols.mqtt.sessions.inbound import SYS_PREFIX, Inbound
from basaltmq.protocols.mqtt.sessions.outbound import Outbound
from basaltmq.protocols.mqtt.sessions.rows import WillRow
from basaltmq.protocols.mqtt.sessions.session import CLIENT_ID_BYTES_MAX
from basaltmq.protocols.mqtt.subscribing import Subscriber
from basaltmq.protocols.mqtt.wire import packets as p
from basaltmq.protocols.mqtt.wire import reason_codes as rc
from basaltmq.protocols.mqtt.wire import topics
from basaltmq.protocols.mqtt.wire.properties import Properties

if TYPE_CHECKING:
    from basaltmq.protocols.mqtt.connection import Connection

GENERATED: Final = "auto-"
"""Prefix of client ids that the server assigns."""

_TOKEN_BYTES: Final = 12


class Refused(Exception):
    """The server does not accept a CONNECT."""

    def __init__(self, reason_code: int, text: str) -> None:
        super().__init__(text)
        self.reason_code = reason_code
        self.text = text


class Opened(NamedTuple):
    """An open session."""

    written: asyncio.Future[None] | None
    """Resolves when the rows of the session are durable; None if it has none."""
    is_present: bool
    expiry_s: int


async def accept(connection: Connection, packet: p.Connect) -> None:
    """Authenticate a client, open its session and send CONNACK. Raise Refused.

    With an authentication method, AUTH is sent instead, and `proceed` continues.
    """
    server = connection.server
    settings = server.settings
    given = packet.properties
    if packet.version == p.V5:
        connection.has_problem_information = given.request_problem_information is not False
        connection.packet_bytes_max = given.maximum_packet_size or p.PACKET_BYTES_MAX
        connection.topic_aliases_max = min(given.topic_alias_maximum or 0, settings.topic_aliases_max)
    client_id = _client_id(packet)
    if len(server.connections) > settings.connections_max:
        raise Refused(rc.SERVER_BUSY, f"the limit of {settings.connections_max} connections is reached")
    method = given.authentication_method
    if method is not None:
        if method not in METHODS:
            raise Refused(
                rc.BAD_AUTHENTICATION_METHOD,
                f"authentication method {method[:80]!r} is unknown; use {' or '.join(METHODS)}, or a password",
            )
        connection.login = Login(server.node, settings, method, connection.peer())
        connection.connecting = packet
        await proceed(connection, given.authentication_data)
        return
    try:
        user, vhost_name = await authenticate(
            server.node, settings, packet, connection.peer(), connection.certificate()
        )
    except AuthenticationError as error:
        code = rc.NOT_AUTHORIZED if packet.username is None else rc.BAD_USER_NAME_OR_PASSWORD
        raise Refused(code, str(error)) from None
    await _enter(connection, packet, client_id, user, vhost_name)


async def proceed(connection: Connection, data: bytes | None) -> None:
    """Process the data of an enhanced authentication. Raise Refused."""
    login, packet = connection.login, connection.connecting
    assert login is not None
    assert packet is not None
    try:
        challenge = await login.step(data)
    except AuthenticationError as error:
        raise Refused(rc.NOT_AUTHORIZED, str(error)) from None
    method = packet.properties.authentication_method
    if login.user is None:
        made = Properties(authentication_method=method, authentication_data=challenge or None)
        connection.send_packet(p.Auth(rc.CONTINUE_AUTHENTICATION, made))
    elif not connection.is_running:
        connection.login = None
        await _enter(connection, packet, _client_id(packet), login.user, login.vhost, challenge)
    else:
        connection.login = None
        if login.user.name != connection.session.user:
            raise Refused(
                rc.NOT_AUTHORIZED, "a client must reauthenticate as the same user; connect again to change the user"
            )
        made = Properties(authentication_method=method, authentication_data=challenge)
        connection.send_packet(p.Auth(rc.SUCCESS, made))


async def _enter(
    connection: Connection,
    packet: p.Connect,
    client_id: str,
    user: User,
    vhost_name: str,
    authentication_data: bytes | None = None,
) -> None:
    """Open the session of an authenticated client and send CONNACK."""
    server = connection.server
    settings = server.settings
    given = packet.properties
    opened: asyncio.Future[Opened | None] = asyncio.get_running_loop().create_future()
    server.shares.do(partial(_open_for, opened, connection, packet, client_id, user, vhost_name))
    found = await opened
    if found is None:
        return
    if found.written is not None:
        await found.written
    if not connection.is_running:
        return
    keep_alive_s = packet.keep_alive_s
    if settings.keep_alive_s_max and not 0 < keep_alive_s <= settings.keep_alive_s_max:
        keep_alive_s = settings.keep_alive_s_max
    # Before 5.0 the server cannot change the keep alive, so the client's value applies.
    connection.keep_alive_s = keep_alive_s if packet.version == p.V5 else packet.keep_alive_s
    expiry_s = found.expiry_s
    properties = Properties(
        session_expiry_s=expiry_s if expiry_s != (given.session_expiry_s or 0) else None,
        receive_maximum=settings.receive_maximum,
        maximum_packet_size=settings.packet_bytes_max,
        assigned_client_id=client_id if not packet.client_id else None,
        topic_alias_maximum=settings.topic_aliases_max,
        server_keep_alive_s=keep_alive_s if keep_alive_s != packet.keep_alive_s else None,
        authentication_method=given.authentication_method,
        authentication_data=authentication_data,
    )
    connection.has_connack = True
    connection.send_packet(p.Connack(found.is_present, rc.SUCCESS, properties))
    assert connection.outbound is not None
    assert connection.subscriber is not None
    connection.outbound.resume()
    connection.subscriber.resume()


def _open_for(opened: asyncio.Future[Opened | None], *given: Any) -> None:
    if opened.done():
        return  # The connection was lost.
    try:
        opened.set_result(_open(*given))
    except Exception as error:
        opened.set_exception(error)


def _open(connection: Connection, packet: p.Connect, client_id: str, user: User, vhost_name: str) -> Opened | None:
    """Open the session of an authenticated client. Return None if the connection is lost."""
    if connection.is_lost:
        return None
    server = connection.server
    settings = server.settings
    given = packet.properties
    try:
        host = server.host(vhost_name)
        server.node.permissions.check_vhost(user, vhost_name)
        # Only open connections are counted, so there must be no `await` between this check and the open.
        server.node.limits.check_connection(user.name, vhost_name)
    except LimitExceededError as error:
        raise Refused(rc.QUOTA_EXCEEDED, str(error)) from None
    except (VHostNotFoundError, AccessRefusedError) as error:
        raise Refused(rc.NOT_AUTHORIZED, str(error)) from None
    except VHostDownError as error:
        raise Refused(rc.SERVER_UNAVAILABLE, str(error)) from None
    access = ClientAccess(server.node, user, vhost_name, host.exchange, client_id)
    will = _will(packet, access, user.name)
    expiry_s = min(_expiry_s(packet), settings.session_expiry_s_max)
    try:
        before = host.find(client_id)
        session, is_present = host.open(
            connection, client_id, user.name, clean_start=packet.clean_start, expiry_s=expiry_s
        )
    except AccessRefusedError as error:
        raise Refused(rc.NOT_AUTHORIZED, str(error)) from None
    if packet.clean_start:
        before = None
    elif is_present:
        # Closing the earlier connection has changed the row.
        before = host.find(client_id)
    window = min(given.receive_maximum or p.PACKET_ID_MAX, settings.in_flight_max)
    connection.outbound = Outbound(host.vhost, session, connection, host.decoded, window, host.clock_ns)
    connection.inbound = Inbound(
        host.vhost,
        session,
        connection,
        user,
        access,
        host.retained,
        server.shares,
        exchange=host.exchange,
        receive_maximum=settings.receive_maximum,
        topic_aliases_max=settings.topic_aliases_max,
    )
    connection.subscriber = Subscriber(
        host, session, connection, access, connection.outbound, settings, server.sys_topics
    )
    connection.will = will
    connection.begin(host, session, user)
    changes = host.opening_rows(session, before, will)
    written: asyncio.Future[None] | None = None
    if changes:
        written = asyncio.get_running_loop().create_future()
        host.vhost.write_rows(RowChange(changes, written))
    return Opened(written, is_present, expiry_s)


def _client_id(packet: p.Connect) -> str:
    """Return the client id, or generate one."""
    client_id = packet.client_id
    if not client_id:
        if packet.version == p.V31 or (packet.version == p.V311 and not packet.clean_start):
            raise Refused(rc.CLIENT_IDENTIFIER_NOT_VALID, "an empty client id needs a clean session and MQTT 3.1.1")
        return GENERATED + secrets.token_hex(_TOKEN_BYTES)
    if len(client_id.encode()) > CLIENT_ID_BYTES_MAX:
        raise Refused(
            rc.CLIENT_IDENTIFIER_NOT_VALID,
            f"the client id has more than {CLIENT_ID_BYTES_MAX} bytes; use a shorter one",
        )
    return client_id


def _expiry_s(packet: p.Connect) -> int:
    if packet.version == p.V5:
        return packet.properties.session_expiry_s or 0
    return 0 if packet.clean_start else NEVER_S


def _will(packet: p.Connect, access: ClientAccess, user: str) -> WillRow | None:
    will = packet.will
    if will is None:
        return None
    key = topics.routing_key(will.topic)
    if will.topic.startswith(SYS_PREFIX):
        raise Refused(rc.TOPIC_NAME_INVALID, "the topic of the will is read-only")
    try:
        access.check_publish(will.topic, key)
    except AccessRefusedError as error:
        raise Refused(rc.NOT_AUTHORIZED, f"the will is refused: {error}") from None
    properties = message.to_properties(will, will.topic, key)
    delay_s = will.properties.will_delay_s or 0
    return WillRow(will.topic, will.payload, properties, will.qos, will.retain, delay_s, user)
