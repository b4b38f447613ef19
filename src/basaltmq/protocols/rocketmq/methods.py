"""Adapters from handlers to gRPC methods: the caller, decoding, encoding, and errors as statuses in the response.

A handler takes a request and its caller. It returns the response, a future, or a coroutine, and raises `Refused` or
Basalt's errors.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator, Callable, Coroutine
from typing import Any, Final, Protocol, TypeVar

from google.protobuf.message import DecodeError, Message

from basaltmq.broker.auth.permissions import CONFIGURE, READ, WRITE
from basaltmq.broker.auth.users import User
from basaltmq.broker.node import Node
from basaltmq.broker.peer import peer_at
from basaltmq.errors import AuthenticationError
from basaltmq.protocols.grpc.http2.events import Chunk
from basaltmq.protocols.grpc.server.call import Call
from basaltmq.protocols.grpc.server.immediate_future import ImmediateFuture
from basaltmq.protocols.grpc.server.methods import BidiStreaming, Response, ServerStreaming, Unary
from basaltmq.protocols.rocketmq.clients import Client, Clients
from basaltmq.protocols.rocketmq.host import Host
from basaltmq.protocols.rocketmq.rules.signature import is_signed, parse_authorization
from basaltmq.protocols.rocketmq.rules.status import Refused, status_of
from basaltmq.wire import rocketmq_wire_pb2 as wire

CLIENT_ID: Final = "x-mq-client-id"
DATE_TIME: Final = "x-mq-date-time"
CLIENT_ID_CHARACTERS_MAX: Final = 255

Q = TypeVar("Q", bound=Message)
R = TypeVar("R", bound=Message)


class Caller:
    """The client and the user of a call."""

    __slots__ = ("_node", "client", "deadline_s", "host", "user")

    def __init__(self, node: Node, host: Host, user: User, client: Client, deadline_s: float | None) -> None:
        self._node = node
        self.host = host
        self.user = user
        self.client = client
        self.deadline_s = deadline_s
        """Time that the client waits for the response, if the call has a timeout."""

    def check_write(self, topic: str) -> None:
        self._node.permissions.check(self.user, self.host.vhost.name, WRITE, topic)

    def check_read(self, name: str) -> None:
        """Check the permission to read a topic or as a group."""
        self._node.permissions.check(self.user, self.host.vhost.name, READ, name)

    def may(self, kind: str, name: str) -> bool:
        """Whether the caller has a permission (configure, write or read)."""
        return self._node.permissions.may(self.user, self.host.vhost.name, kind, name)

    def may_configure(self, name: str) -> bool:
        return self.may(CONFIGURE, name)


class Hosts(Protocol):
    """Provides the state of the virtual host."""

    node: Node
    clients: Clients

    def host(self) -> Host: ...


class Methods:
    """Turns handlers into methods."""

    def __init__(self, hosts: Hosts, access: str) -> None:
        self._hosts = hosts
        self._access = access

    def unary(
        self,
        request: type[Q],
        response: Callable[..., R],
        handler: Callable[[Q, Caller], R | ImmediateFuture[R] | Coroutine[Any, Any, R]],
    ) -> Unary:
        """Make a method with one request and one response."""

        def failed(error: BaseException) -> bytes:
            return response(status=status_of(error)).SerializeToString()

        def handle(raw: Chunk, call: Call) -> Response:
            try:
                reply = handler(_read(request, raw), self.caller(call))
            except Exception as error:
                return failed(error)
            if isinstance(reply, Message):
                return reply.SerializeToString()
            return reply if isinstance(reply, ImmediateFuture) else awaited(reply)

        async def awaited(reply: Coroutine[Any, Any, R]) -> bytes:
            try:
                return (await reply).SerializeToString()
            except Exception as error:
                return failed(error)

        return Unary(handle, _serialized)

    def server_streaming(
        self, request: type[Q], response: Callable[..., R], handler: Callable[[Q, Caller], AsyncGenerator[R, None]]
    ) -> ServerStreaming:
        """Make a method with one request and a stream of responses."""

        async def handle(raw: bytes, call: Call) -> AsyncGenerator[bytes, None]:
            try:
                answers = handler(_read(request, raw), self.caller(call))
            except Exception as error:
                yield response(status=status_of(error)).SerializeToString()
                return
            try:
                async for answer in answers:
                    yield answer.SerializeToString()
            except Exception as error:
                yield response(status=status_of(error)).SerializeToString()
            finally:
                await answers.aclose()

        return ServerStreaming(handle)

    def bidi_streaming(
        self, request: type[Q], handler: Callable[[AsyncIterator[Q], Caller], AsyncGenerator[R, None]]
    ) -> BidiStreaming:
        """Make a method with a stream of requests and a stream of responses."""

        async def handle(asked: AsyncIterator[bytes], call: Call) -> AsyncGenerator[bytes, None]:
            try:
                caller = self.caller(call)
            except Exception as error:
                yield wire.TelemetryCommand(status=status_of(error)).SerializeToString()
                return
            answers = handler((_read(request, each) async for each in asked), caller)
            try:
                async for answer in answers:
                    yield answer.SerializeToString()
            except Refused as error:
                yield wire.TelemetryCommand(status=status_of(error)).SerializeToString()
            finally:
                await answers.aclose()

        return BidiStreaming(handle)

    def caller(self, call: Call) -> Caller:
        """Return the client and the user of a call. Raise if the credentials are missing or wrong."""
        fields = dict(call.head.fields)
        client_id = fields.get(CLIENT_ID, "")
        user = self._user(call, fields.get(DATE_TIME, ""))
        host = self._hosts.host()
        self._hosts.node.permissions.check_vhost(user, host.vhost.name)
        call.connection.authenticated()
        if not client_id.strip() or len(client_id) > CLIENT_ID_CHARACTERS_MAX:
            raise Refused(wire.CLIENT_ID_REQUIRED, f"a call needs the header {CLIENT_ID} with 1 to 255 characters")
        return Caller(
            self._hosts.node, host, user, self._hosts.clients.require(f"{user.name}\0{client_id}"), call.head.timeout_s
        )

    def _user(self, call: Call, date_time: str) -> User:
        users = self._hosts.node.users
        peer = peer_at(call.peer().partition(":")[2].rpartition(":")[0].strip("[]"))
        text = call.head.authorization
        signed = None if text is None else parse_authorization(text)
        if signed is not None:
            secret = users.access_secret(signed.access_key)
            if secret is None or not is_signed(signed, secret, date_time):
                raise AuthenticationError("the access key or the signature of the call is wrong")
            return users.with_access_key(signed.access_key, peer)
        found = users.anonymous(peer) if self._access == "loopback" else None
        if found is None:
            raise AuthenticationError("the call has no access key; set an access key and its secret in the client")
        return found


def _read(request: type[Q], raw: Chunk) -> Q:
    try:
        return request.FromString(bytes(raw))
    except DecodeError:
        raise Refused(wire.BAD_REQUEST, f"the request is not a valid {request.DESCRIPTOR.name}") from None


def _serialized(answer: Message | bytes) -> bytes:
    return answer if isinstance(answer, bytes) else answer.SerializeToString()
