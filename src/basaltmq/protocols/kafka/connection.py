"""One Kafka client connection: reads requests, handles them in order, and sends responses in the same order.

    | size i32 | request |        at most request_bytes_max; before authentication 512 KiB, as in Apache Kafka

A request starts after the previous one has finished. A slow request (a waiting fetch, a join) delays those behind it,
as in Apache Kafka. Each event-loop turn handles requests for a time share (`LoopShares`); the rest wait for the next
turn.

Produce requests are pipelined: while one waits for its fsync, the next is appended. Their responses keep the order.
The connection stops reading from a client that has too much in flight or does not read its responses.

A malformed request, an API version that was not announced, or an invalid size closes the connection, because Kafka has
no error response for them. ApiVersions in an unknown version gets a version 0 response, so that the client can retry.
"""

from __future__ import annotations

import asyncio
import logging
import sys
from collections import deque
from collections.abc import Coroutine
from functools import partial
from typing import TYPE_CHECKING, Any, Final

from basaltmq.broker.auth.acls import Operation, Resource
from basaltmq.broker.auth.permissions import CONFIGURE, READ, WRITE
from basaltmq.broker.auth.sasl import PLAIN, ScramLogin, read_plain
from basaltmq.broker.auth.users import User
from basaltmq.broker.peer import Peer, peer_at
from basaltmq.errors import AccessRefusedError, AuthenticationError, BasaltError, MalformedRequestError
from basaltmq.protocols.kafka.context import BlockingResponse, PipelinedResponse, awaited
from basaltmq.protocols.kafka.fetch_state.deadline import Deadline
from basaltmq.protocols.kafka.fetch_state.fetch_session import FetchSession
from basaltmq.protocols.kafka.session import MECHANISMS, api_versions
from basaltmq.protocols.kafka.wire import api as k
from basaltmq.protocols.kafka.wire import errors as e
from basaltmq.protocols.kafka.wire.inbox import SIZE, Inbox
from basaltmq.protocols.kafka.wire.schema import Fields

if TYPE_CHECKING:
    from basaltmq.protocols.kafka.server import Server

UNAUTHENTICATED_BYTES_MAX: Final = 512 << 10
IN_FLIGHT_MAX: Final = 256
"""Limit of responses in flight per connection: produce requests that wait for fsync, and responses behind them."""

IN_FLIGHT_BYTES_MAX: Final = 64 << 20
"""Limit of the bytes of these requests and responses; the last one may exceed it."""

READ_BYTES_LARGE: Final = 128 << 10
"""After a read of at least this size, reading pauses for one loop turn, because libuv repeats reads that fill its
buffer."""

WRITE_HIGH_BYTES: Final = 4 << 20
"""Unsent response bytes above which no further request is handled. One fetch response may exceed it."""

LOOP_ENCODED_ITEMS_MAX: Final = 1000
"""Topics, partitions, groups or configs in a response above which a thread encodes it. The loop encodes this many in
10 ms."""

LOOP_DECODED_BYTES_MAX: Final = 32 << 10
"""Size of a request above which a thread decodes it: a partition of a request takes 10 to 20 bytes and 3 us. A large
Produce is an exception, because its records are not decoded."""

OPERATION_OF: Final = {READ: Operation.READ, WRITE: Operation.WRITE, CONFIGURE: Operation.ALTER}
"""Operation of an ACL for each kind of permission, unless the handler names another one."""

_log: Final = logging.getLogger(__name__)


class _PendingResponse:
    """A response that waits for earlier responses."""

    __slots__ = ("chunks", "size_bytes")

    def __init__(self, size_bytes: int, chunks: list[bytes] | None) -> None:
        self.size_bytes = size_bytes
        """Size of the request while its response is pending, or of the response."""
        self.chunks = chunks
        """The encoded response; None while it is pending."""


class Connection(asyncio.Protocol):
    """A Kafka client connection."""

    def __init__(self, server: Server) -> None:
        self.server = server
        self.client_id = ""
        self.host = ""
        self.peer = Peer("", is_loopback=False)
        self.name = "kafka client"
        self.user: User | None = None
        self.fetch_session: FetchSession | None = None
        self.deadline = Deadline()
        self.requests = 0
        self.received_bytes = 0
        self._transport: asyncio.Transport | None = None
        self._inbox = Inbox()
        self._is_authenticated = False
        self._mechanism = ""
        self._is_raw_sasl = False
        """Frames are raw SASL messages without a Kafka request header (SaslHandshake version 0)."""
        self._scram: ScramLogin | None = None
        self._step: asyncio.Task[None] | BlockingResponse | None = None
        self._waiting: deque[_PendingResponse] = deque()
        self._waiting_bytes = 0
        self._is_full = False
        self._is_paused = False
        self._is_pumping = False
        self._is_behind = False
        """Unhandled requests remain for the next loop turn."""
        self._number = 0
        self._handshake_timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        self._transport = transport
        peer = transport.get_extra_info("peername") or ("", 0)
        self.host = str(peer[0])
        self.peer = peer_at(self.host)
        self.name = f"{peer[0]}:{peer[1]}"
        transport.set_write_buffer_limits(high=WRITE_HIGH_BYTES)
        self._authenticate_anonymously()
        if not self.server.joined(self):
            transport.abort()
            return
        self._number = self.server.node.connections.add(self)
        if not self._is_authenticated:
            handshake_s = self.server.settings.handshake_s
            self._handshake_timer = asyncio.get_running_loop().call_later(handshake_s, self._end_handshake)

    def eof_received(self) -> bool:
        return self.server.shares.close_later(self._transport)

    def connection_lost(self, error: Exception | None) -> None:
        self._transport = None
        self._inbox.clear()
        if self._is_behind:
            self._is_behind = False
            self.server.shares.left()
        self.server.node.connections.remove(self._number)
        if self._handshake_timer is not None:
            self._handshake_timer.cancel()
        if self._step is not None:
            self._step.cancel()
        self.deadline.close()
        # Appended batches continue to their fsync, whose callbacks complete the pending produce requests.
        self.server.left(self)

    def _end_handshake(self) -> None:
        if not self._is_authenticated:
            self._end("authentication timed out")

    def data_received(self, data: bytes) -> None:
        self.received_bytes += len(data)
        self._inbox.add(data)
        self._pump(is_large=len(data) >= READ_BYTES_LARGE)

    def pause_writing(self) -> None:
        self._is_full = True

    def resume_writing(self) -> None:
        self._is_full = False
        self._pump()

    def _pump(self, *, is_large: bool = False) -> None:
        """Handle complete frames until the connection is blocked or the time share of this turn is used up."""
        if self._is_pumping or self._is_behind:
            return
        shares = self.server.shares
        shares.begin(was_behind=False)
        self._is_pumping = True
        try:
            self._is_behind = self._take_frames() or is_large
        except Exception:
            self._failed()
        finally:
            self._is_pumping = False
            shares.end(has_more=self._is_behind)
        if self._is_behind:
            asyncio.get_running_loop().call_soon(self._continue)
        self._pause_or_resume_reading()

    def _continue(self) -> None:
        """Continue in the next loop turn."""
        if self._is_behind:
            self._is_behind = False
            self.server.shares.left()
            self._pump()

    def _take_frames(self) -> bool:
        """Handle frames. Return True if the time share is used up and more frames may be buffered."""
        while self._transport is not None and not self._transport.is_closing():
            if self._step is not None or self._is_full or self._is_at_limit():
                return False
            frame = self._next_frame()
            if frame is None:
                return False
            self._handle(frame)
            if self.server.shares.is_over():
                return True
        return False

    def _is_at_limit(self) -> bool:
        return len(self._waiting) >= IN_FLIGHT_MAX or self._waiting_bytes >= IN_FLIGHT_BYTES_MAX

    def _pause_or_resume_reading(self) -> None:
        """Read from the socket only while the data can be handled soon."""
        if self._transport is None or self._transport.is_closing():
            return
        is_blocked = self._step is not None or self._is_full or self._is_at_limit()
        should_pause = self._is_behind or (is_blocked and self._inbox.size_bytes >= UNAUTHENTICATED_BYTES_MAX)
        if should_pause != self._is_paused:
            self._is_paused = should_pause
            if should_pause:
                self._transport.pause_reading()
            else:
                self._transport.resume_reading()

    def _next_frame(self) -> bytes | None:
        size = self._inbox.request_bytes()
        if size is None:
            return None
        size_max = self.server.settings.request_bytes_max if self._is_authenticated else UNAUTHENTICATED_BYTES_MAX
        if not 0 <= size <= size_max:
            raise MalformedRequestError(f"invalid request size: {size} bytes; the limit is {size_max} bytes")
        return self._inbox.take(size)

    def _handle(self, frame: bytes) -> None:
        if self._is_raw_sasl:
            self._begin(self._raw_sasl(frame))
            return
        if len(frame) > LOOP_DECODED_BYTES_MAX and self._is_authenticated and not k.is_produce(frame):
            self._begin(self._handle_large(frame))
            return
        try:
            request = k.decode_request(frame)
        except k.UnsupportedVersionError as error:
            if error.api.key != k.API_VERSIONS:
                raise
            response = api_versions(0, e.UNSUPPORTED_VERSION)
            self._send_in_turn(k.encode_response(error.api, 0, error.correlation_id, response))
            return
        self.requests += 1
        self.client_id = request.client_id or ""
        key = request.api.key
        if key == k.API_VERSIONS:
            self._respond(request, api_versions(request.version))
        elif key == k.SASL_HANDSHAKE:
            self._handshake(request)
        elif key == k.SASL_AUTHENTICATE:
            self._begin(self._authenticate(request))
        elif not self._is_authenticated:
            raise MalformedRequestError(
                f"{request.api.name} before authentication; authenticate with SASL: {', '.join(MECHANISMS)}"
            )
        else:
            self._dispatch(request, len(frame))

    def _dispatch(self, request: k.Request, size_bytes: int) -> None:
        context = self.server.context()
        response = self.server.handlers[request.api.key](context, self, request)
        if isinstance(response, dict):
            self._respond(request, response)
        elif isinstance(response, PipelinedResponse):
            pending = _PendingResponse(size_bytes, None)
            self._waiting.append(pending)
            self._waiting_bytes += size_bytes
            response.start(partial(self._complete, request, pending))
        elif asyncio.iscoroutine(response):
            self._begin(self._awaited(request, response))
        elif response is not None:
            self._step = response
            response.start(partial(self._complete_blocking, request))

    def _chunks(self, request: k.Request, body: Fields | None) -> list[bytes]:
        if body is None or (request.api.key == k.PRODUCE and request.body["acks"] == 0):
            return []
        return k.encode_response(request.api, request.version, request.correlation_id, body)

    def _complete(
        self, request: k.Request, response: _PendingResponse, body: Fields | None, error: Exception | None
    ) -> None:
        """Complete a pipelined request. Does not raise."""
        try:
            if error is not None:
                raise error
            response.chunks = self._chunks(request, body)
            self._send_done()
        except Exception:
            self._failed()
            return
        if self._inbox.size_bytes:
            self._pump()

    def _complete_blocking(self, request: k.Request, body: Fields | None, error: Exception | None) -> None:
        """Complete a request that blocked the ones behind it. Does not raise."""
        self._step = None
        try:
            if error is not None:
                raise error
            self._send_in_turn(self._chunks(request, body))
        except Exception:
            self._failed()
            return
        if self._inbox.size_bytes:
            self._pump()

    def _send_done(self) -> None:
        """Send the completed responses at the head of the queue."""
        waiting = self._waiting
        while waiting and waiting[0].chunks is not None:
            response = waiting.popleft()
            self._waiting_bytes -= response.size_bytes
            self._send(response.chunks or [])

    def _send_in_turn(self, chunks: list[bytes]) -> None:
        """Send a response after the pending ones before it."""
        if self._waiting:
            size_bytes = sum(map(len, chunks))
            self._waiting.append(_PendingResponse(size_bytes, chunks))
            self._waiting_bytes += size_bytes
        else:
            self._send(chunks)

    def _begin(self, step: Coroutine[Any, Any, list[bytes]]) -> None:
        """Run a step that blocks the requests behind it."""
        self._step = asyncio.create_task(self._run(step))

    async def _run(self, step: Coroutine[Any, Any, list[bytes]]) -> None:
        try:
            self._send_in_turn(await step)
        except Exception:
            self._failed()
        finally:
            self._step = None
        self._pump()

    def _failed(self) -> None:
        """Close the connection because of the exception that is being handled."""
        error = sys.exception()
        if isinstance(error, BasaltError):
            self._end(str(error))
        else:
            _log.error("%s: request failed", self.name, exc_info=error)
            self._end("internal error")

    async def _handle_large(self, frame: bytes) -> list[bytes]:
        """Handle a request that takes long to decode."""
        request = await asyncio.to_thread(k.decode_request, frame)
        self.requests += 1
        self.client_id = request.client_id or ""
        handler = self.server.handlers.get(request.api.key)
        if handler is None:
            raise MalformedRequestError(
                f"{request.api.name} of {len(frame)} bytes; the limit is {LOOP_DECODED_BYTES_MAX}"
            )
        return await self._awaited(request, awaited(handler(self.server.context(), self, request)))

    async def _awaited(self, request: k.Request, response: Coroutine[Any, Any, Fields | None]) -> list[bytes]:
        body = await response
        if body is not None and _is_large(body):
            return await asyncio.to_thread(self._chunks, request, body)
        return self._chunks(request, body)

    def _respond(self, request: k.Request, body: Fields) -> None:
        self._send_in_turn(self._chunks(request, body))

    def _send(self, chunks: list[bytes]) -> None:
        if chunks and self._transport is not None and not self._transport.is_closing():
            self._transport.writelines(chunks)

    def _handshake(self, request: k.Request) -> None:
        self._mechanism = request.body["mechanism"]
        self._scram = None
        is_known = self._mechanism in MECHANISMS
        self._is_raw_sasl = is_known and request.version == 0
        code = e.NONE if is_known else e.UNSUPPORTED_SASL_MECHANISM
        self._respond(request, {"error_code": code, "mechanisms": MECHANISMS})

    async def _authenticate(self, request: k.Request) -> list[bytes]:
        if self._mechanism not in MECHANISMS:
            return self._chunks(
                request,
                {"error_code": e.ILLEGAL_SASL_STATE, "error_message": "send SaslHandshake before SaslAuthenticate"},
            )
        try:
            response = await self._log_in(request.body["auth_bytes"])
        except AuthenticationError as error:
            _log.warning("%s: %s", self.name, error)
            self._send(self._chunks(request, {"error_code": e.SASL_AUTHENTICATION_FAILED, "error_message": str(error)}))
            self._end("authentication failed")
            return []
        return self._chunks(request, {"error_message": None, "auth_bytes": response})

    async def _raw_sasl(self, raw: bytes) -> list[bytes]:
        response = await self._log_in(raw)
        self._is_raw_sasl = self._scram is not None
        return [SIZE.pack(len(response)), response]

    async def _log_in(self, raw: bytes) -> bytes:
        """Process one SASL message and return the response. The last message authenticates the client."""
        users = self.server.node.users
        if self._mechanism == PLAIN:
            given = read_plain(raw)
            if given.authorization_id not in {"", given.name}:
                raise AuthenticationError(f"user '{given.name}' may not act for another user")
            self._logged_in(await users.authenticate(given.name, given.password, self.peer))
            return b""
        if self._scram is None:
            self._scram = ScramLogin(users, self._mechanism, self.peer)
        response = await self._scram.step(raw)
        if self._scram.user is not None:
            self._logged_in(self._scram.user)
            self._scram = None
        return response

    def _logged_in(self, user: User) -> None:
        node = self.server.node
        try:
            node.permissions.check_vhost(user, self.server.settings.vhost)
        except AccessRefusedError as error:
            raise AuthenticationError(str(error)) from error
        self.user = user
        self._is_authenticated = True

    def _authenticate_anonymously(self) -> None:
        """Authenticate a client on this host as the anonymous user, if one is configured. SASL may still follow."""
        if self.server.settings.access != "loopback":
            return
        user = self.server.node.users.anonymous(self.peer)
        if user is not None and self.server.node.permissions.may_use(user.name, self.server.settings.vhost):
            self.user = user
            self._is_authenticated = True

    def check(
        self, kind: str, name: str, operation: Operation | None = None, resource: Resource = Resource.TOPIC
    ) -> None:
        node, user, vhost = self.server.node, self.user, self.server.settings.vhost
        if user is None or (user.is_anonymous and node.users.anonymous_name() != user.name):
            raise AccessRefusedError(f"{kind} access to '{name}' refused: authenticate with SASL first")
        wanted = operation or OPERATION_OF[kind]
        allowed = node.permissions.decide(user.name, vhost, resource, name, wanted)
        if allowed is None and resource is not Resource.CLUSTER:
            node.permissions.check(user, vhost, kind, name)
        elif not allowed:
            raise AccessRefusedError(f"{wanted.name} on {resource.name} '{name}' refused by ACL for user '{user.name}'")

    def is_administrator(self) -> bool:
        return self.user is not None and self.server.node.users.is_administrator(self.user)

    def may(
        self, kind: str, name: str, operation: Operation | None = None, resource: Resource = Resource.TOPIC
    ) -> bool:
        try:
            self.check(kind, name, operation, resource)
        except AccessRefusedError:
            return False
        return True

    def unsent_bytes(self) -> int | None:
        return None if self._transport is None else self._transport.get_write_buffer_size()

    def address(self) -> tuple[str, int]:
        settings = self.server.settings
        here = ("127.0.0.1", 0) if self._transport is None else self._transport.get_extra_info("sockname")
        return settings.advertised_host or str(here[0]), settings.advertised_port or int(here[1])

    def info(self) -> dict[str, Any]:
        return {
            "name": self.name,
            "user": "" if self.user is None else self.user.name,
            "vhost": self.server.settings.vhost,
            "protocol": "Kafka",
            "client_id": self.client_id,
            "requests": self.requests,
            "recv_oct": self.received_bytes,
        }

    def close(self, reason: str) -> None:
        self._end(reason)

    def abort(self) -> None:
        if self._transport is not None:
            self._transport.abort()

    def _end(self, reason: str) -> None:
        if self._transport is not None and not self._transport.is_closing():
            _log.info("%s: closed: %s", self.name, reason)
            self._inbox.clear()
            self._transport.close()


def _is_large(body: Fields) -> bool:
    """Whether a response has too many items to encode in the event loop."""
    items = 0
    for value in body.values():
        if not isinstance(value, list):
            continue
        items += len(value)
        for each in value:
            if items > LOOP_ENCODED_ITEMS_MAX:
                return True
            if isinstance(each, dict):
                items += sum([len(inner) for inner in each.values() if isinstance(inner, list)])
    return items > LOOP_ENCODED_ITEMS_MAX
