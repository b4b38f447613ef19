"""Management over AMQP: requests for queues, exchanges and bindings, as RabbitMQ's client libraries send them.

A pair of links with the address `/management` and the same name carries requests and responses:

    request    subject: method    to: path      reply-to: $me         message-id    body: a value
    response   subject: status    correlation-id: the message-id      http:response = "1.1"   body: a value

    PUT GET DELETE /queues/:queue       DELETE /queues/:queue/messages
    PUT DELETE     /exchanges/:exchange
    POST GET       /bindings            DELETE /bindings/src=..;dstq=..;key=..;args=..    (dste: an exchange)

Names in paths are percent-encoded. The permissions are those of AMQP 0-9-1. A failed request gets an HTTP status and a
text. The links remain attached.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Generator, Iterator, Mapping
from typing import TYPE_CHECKING, Any, Final, TypeAlias
from urllib.parse import parse_qs, quote, unquote

from basaltmq import errors
from basaltmq.broker.consumers.queue import BrokerQueue
from basaltmq.broker.routing.exchange import EXCHANGE, QUEUE, Binding, Destination
from basaltmq.errors import BasaltError
from basaltmq.protocols.amqp10.link import Link
from basaltmq.protocols.amqp10.receiver import Receiver
from basaltmq.protocols.amqp10.wire import performatives as p
from basaltmq.protocols.amqp10.wire import sections as s
from basaltmq.protocols.amqp10.wire import types as t
from basaltmq.protocols.amqp10.wire.errors import INVALID_FIELD, RESOURCE_LIMIT, Fault, LinkFault
from basaltmq.protocols.amqp10.wire.frames import encode_transfer, transfer_bytes

if TYPE_CHECKING:
    from basaltmq.protocols.amqp10.session import Session

ADDRESS: Final = "/management"
RESPONSES_MAX: Final = 64
"""Responses that wait for credit."""

Answer: TypeAlias = tuple[int, Any]
"""Status and body of a response."""

_STATUS: Final[tuple[tuple[type[BasaltError], int], ...]] = (
    (errors.AccessRefusedError, 403),
    (errors.ResourceLockedError, 409),
    (errors.NotFoundError, 404),
    (errors.PreconditionFailedError, 409),
    (errors.AlreadyExistsError, 409),
    (errors.InvalidArgumentError, 400),
    (errors.LimitExceededError, 400),
    (errors.VHostDownError, 503),
    (BasaltError, 500),
)
_U32: Final = 0xFFFF_FFFF


class _BadRequest(Exception):
    """A request that cannot be understood."""


class ResponseLink(Link):
    """The link on which a client gets responses."""

    __slots__ = ("_count", "_credit", "_waiting")

    def __init__(self, session: Session, attach: p.Attach) -> None:
        super().__init__(session, attach)
        self._count = 0
        self._credit = 0
        self._waiting: deque[bytes] = deque()

    def open(self) -> None:
        assert self.attach is not None
        properties = {t.Symbol("paired"): True}
        source, target = self.attach.source, self.attach.target
        self.answer(source=source, target=target, initial_delivery_count=0, properties=properties)
        self.session.responses.append(self)

    def flow(self, fields: list[Any]) -> None:
        """Set the credit of the link."""
        given, credit, is_draining = fields[5], fields[6], fields[8]
        if isinstance(credit, int):
            room = ((given if isinstance(given, int) else 0) + credit - self._count) & _U32
            self._credit = room if room <= credit else 0
            self.send_waiting()
            if is_draining:
                self._count = (self._count + self._credit) & _U32
                self._credit = 0
        if is_draining or fields[9]:
            self.session.link_flow(
                self.handle, delivery_count=self._count, link_credit=self._credit, drain=bool(is_draining)
            )

    def respond(self, payload: bytes) -> None:
        if len(self._waiting) >= RESPONSES_MAX:
            raise LinkFault(RESOURCE_LIMIT, f"{RESPONSES_MAX} responses wait for credit")
        self._waiting.append(payload)
        self.send_waiting()

    def send_waiting(self) -> None:
        """Send responses as far as credit and window allow."""
        session, out = self.session, self.session.connection.out
        room = session.connection.frame_bytes_max - transfer_bytes(b"\0" * 8)
        while self._waiting and self._credit > 0:
            payload = self._waiting[0]
            if session.remote_window < -(-len(payload) // room):
                break
            self._waiting.popleft()
            tag = self._count.to_bytes(8, "big")
            for at in range(0, len(payload), room):
                part = payload[at : at + room]
                more = at + room < len(payload)
                encode_transfer(
                    out, session.channel, self.handle, session.next_delivery_id, tag, len(part), 1 + 2 * more
                )
                out.append(part)
                session.sent(1)
            session.next_delivery_id = (session.next_delivery_id + 1) & _U32
            self._credit -= 1
            self._count = (self._count + 1) & _U32
        session.connection.schedule_flush()

    def stop(self, *, is_closed: bool) -> None:
        self._waiting.clear()
        if self in self.session.responses:
            self.session.responses.remove(self)


class RequestLink(Receiver):
    """The link on which a client sends requests."""

    __slots__ = ()

    def open(self) -> None:
        assert self.attach is not None
        properties = {t.Symbol("paired"): True}
        self.answer(source=self.attach.source, target=self.attach.target, properties=properties)
        self.credit_for_commands(RESPONSES_MAX)

    def complete(self, delivery_id: int, payload: bytes, *, is_settled: bool) -> bool:
        """Handle a request."""
        try:
            given, body = _parse(payload)
        except Fault as fault:
            raise LinkFault(fault.condition, fault.text) from None
        responses = self.session.find(ResponseLink, self.name)
        if responses is None:
            raise LinkFault(INVALID_FIELD, f"the link pair '{self.name:.80}' has no link for responses")

        def answering() -> Iterator[None]:
            status, answer = yield from self._answer(str(given[3]), str(given[2]), body)
            if not self.session.is_open:
                return
            if not is_settled:
                self._confirm([delivery_id], p.encode(p.Accepted()))
            responses.respond(_response(status, given[0], answer))
            self.credit_for_commands(RESPONSES_MAX)

        steps = answering()
        for _ in steps:
            # The first portion was not the last one.
            self.session.connection.run(steps, lambda: None)
            break
        return True

    def _answer(self, method: str, path: str, body: Any) -> Generator[None, None, Answer]:
        try:
            found = _Request(self, body).handle(method, path)
            return found if isinstance(found, tuple) else (yield from found)
        except _BadRequest as bad:
            return 400, str(bad)
        except BasaltError as error:
            return next(status for cls, status in _STATUS if isinstance(error, cls)), str(error)


def _parse(payload: bytes) -> tuple[list[Any], Any]:
    """Return properties and body of a request. RabbitMQ's Python client sends an empty body before the properties."""
    properties: list[Any] = []
    body: Any = None
    for kind, _, at, end in s.walk(payload, 0, len(payload)):
        if kind in (s.PROPERTIES, s.VALUE):
            value = t.decode(payload, at, end)[0]
            if kind == s.VALUE:
                body = value
            elif isinstance(value, list):
                properties = value
    return properties + [None] * (len(s.PROPERTY_NAMES) - len(properties)), body


def _response(status: int, message_id: Any, body: Any) -> bytes:
    properties = [None, None, None, str(status), None, message_id]
    return b"".join(
        (
            s.section(s.PROPERTIES, t.encode(properties)),
            s.section(s.APPLICATION_PROPERTIES, t.encode({"http:response": "1.1"})),
            s.section(s.VALUE, t.encode(body)),
        )
    )


class _Request:
    """One request."""

    def __init__(self, link: Receiver, body: Any) -> None:
        self._connection = link.session.connection
        self._vhost = link.vhost
        self._body = body

    def handle(self, method: str, path: str) -> Answer | Generator[None, None, Answer]:
        """Return the answer, or a generator that works in portions and returns it."""
        path, _, query = path.partition("?")
        parts = path.removeprefix("/").split("/")
        routes: dict[tuple[str, str, int], Callable[..., Answer | Generator[None, None, Answer]]] = {
            ("PUT", "queues", 2): self._declare_queue,
            ("GET", "queues", 2): self._get_queue,
            ("DELETE", "queues", 2): self._delete_queue,
            ("DELETE", "queues", 3): self._purge_queue,
            ("PUT", "exchanges", 2): self._declare_exchange,
            ("DELETE", "exchanges", 2): self._delete_exchange,
            ("POST", "bindings", 1): self._bind,
            ("DELETE", "bindings", 2): self._unbind,
        }
        if (method, path) == ("GET", "/bindings"):
            return self._list_bindings(query)
        handler = routes.get((method, parts[0], len(parts)))
        if handler is None or (len(parts) == 3 and parts[2] != "messages"):
            return 405 if parts[0] in ("queues", "exchanges", "bindings") else 404, f"no {method} {path:.200}"
        return handler(*[_unquoted(part) for part in parts[1:2]])

    def _map(self) -> Mapping[Any, Any]:
        if self._body is None:
            return {}
        if not isinstance(self._body, dict):
            raise _BadRequest("the body of the request must be a map")
        return self._body

    def _flag(self, name: str, default: bool = False) -> bool:
        value = self._map().get(name, default)
        if not isinstance(value, bool):
            raise _BadRequest(f"{name} must be a boolean")
        return value

    def _text(self, name: str, default: str | None = None) -> str:
        value = self._map().get(name, default)
        if not isinstance(value, str):
            raise _BadRequest(f"{name} must be a string")
        return str(value)

    def _arguments(self) -> dict[str, Any]:
        value = self._map().get("arguments") or {}
        if not isinstance(value, dict):
            raise _BadRequest("arguments must be a map")
        return {str(name): _argument(each) for name, each in value.items()}

    def _declare_queue(self, name: str) -> tuple[int, Any]:
        if not name:
            raise _BadRequest("a queue needs a name")
        self._connection.check("configure", name)
        arguments = self._arguments()
        dead_letters = arguments.get("x-dead-letter-exchange")
        if isinstance(dead_letters, str):
            self._connection.check("read", name)
            self._connection.check("write", dead_letters)
        is_new = name not in self._vhost.queues.by_name
        self._vhost.declare_queue(
            name,
            durable=self._flag("durable", default=True),
            exclusive=self._flag("exclusive"),
            auto_delete=self._flag("auto_delete"),
            arguments=arguments,
            owner=self._connection,
        )
        return 201 if is_new else 200, self._describe(self._vhost.queues.get(name, self._connection))

    def _describe(self, queue: BrokerQueue) -> dict[str, Any]:
        declared = queue.declared
        return {
            "name": queue.name,
            "vhost": self._vhost.name,
            "durable": declared.durable,
            "exclusive": declared.exclusive,
            "auto_delete": declared.auto_delete,
            "type": queue.type,
            "arguments": {name: _shown(value) for name, value in declared.arguments.items()},
            "leader": self._connection.server.container_id,
            "replicas": [self._connection.server.container_id],
            "message_count": t.Ulong(self._vhost.queues.ready(queue)),
            "consumer_count": t.Uint(len(queue.consumers)),
        }

    def _get_queue(self, name: str) -> tuple[int, Any]:
        return 200, self._describe(self._vhost.queues.get(name, self._connection))

    def _delete_queue(self, name: str) -> Generator[None, None, Answer]:
        self._connection.check("configure", name)
        self._vhost.check_delete(name, if_unused=False, if_empty=False, owner=self._connection)
        for _ in self._vhost.unbinding(QUEUE, name):
            yield
        count = self._vhost.delete_queue(name, owner=self._connection)
        return 200, {"message_count": t.Ulong(count)}

    def _purge_queue(self, name: str) -> Generator[None, None, Answer]:
        self._connection.check("read", name)
        count = 0
        for purged in self._vhost.purging(name, owner=self._connection):
            count += purged
            yield
        return 200, {"message_count": t.Ulong(count)}

    def _declare_exchange(self, name: str) -> tuple[int, Any]:
        self._connection.check("configure", name)
        self._vhost.declare_exchange(
            name,
            self._text("type", "direct"),
            durable=self._flag("durable", default=True),
            auto_delete=self._flag("auto_delete"),
            internal=self._flag("internal"),
            arguments=self._arguments(),
        )
        return 204, None

    def _delete_exchange(self, name: str) -> Generator[None, None, Answer]:
        self._connection.check("configure", name)
        if not name.startswith("amq."):
            for _ in self._vhost.unbinding(EXCHANGE, name):
                yield
        self._vhost.delete_exchange(name)
        return 204, None

    def _bind(self) -> tuple[int, Any]:
        source = self._text("source")
        key = self._text("binding_key", "")
        queue = self._map().get("destination_queue")
        destination = self._text("destination_queue" if queue is not None else "destination_exchange")
        self._check_bind(destination, source, key)
        if queue is not None:
            self._vhost.bind_queue(destination, source, key, self._arguments(), owner=self._connection)
        else:
            self._vhost.bind_exchange(destination, source, key, self._arguments())
        return 204, None

    def _check_bind(self, destination: str, source: str, key: str) -> None:
        self._connection.check("write", destination)
        self._connection.check("read", source)
        self._connection.check_topic(source, "read", key)

    def _unbind(self, path: str) -> tuple[int, Any]:
        fields = dict(part.split("=", 1) for part in path.split(";") if "=" in part)
        source, key, number = fields.get("src", ""), fields.get("key", ""), fields.get("args", "")
        kind, name = (QUEUE, fields["dstq"]) if "dstq" in fields else (EXCHANGE, fields.get("dste", ""))
        self._check_bind(name, source, key)
        for each in self._bindings(source, Destination(kind, name), key):
            if (str(each.number) if each.arguments else "") != number:
                continue
            if kind == QUEUE:
                self._vhost.unbind_queue(name, source, key, each.arguments, owner=self._connection)
            else:
                self._vhost.unbind_exchange(name, source, key, each.arguments)
        return 204, None

    def _bindings(self, source: str, destination: Destination, key: str) -> list[Binding]:
        found = self._vhost.topology.bindings_to(destination)
        return [each for each in found if each.source == source and each.routing_key == key]

    def _list_bindings(self, query: str) -> tuple[int, Any]:
        fields = {name: values[-1] for name, values in parse_qs(query, keep_blank_values=True).items()}
        kind, name = (QUEUE, fields["dstq"]) if "dstq" in fields else (EXCHANGE, fields.get("dste", ""))
        source, key = fields.get("src", ""), fields.get("key", "")
        self._connection.check("read", name)
        found = self._bindings(source, Destination(kind, name), key)
        return 200, [_shown_binding(each) for each in found]


def _shown_binding(binding: Binding) -> dict[str, Any]:
    is_queue = binding.destination.kind == QUEUE
    destination = "dstq" if is_queue else "dste"
    number = str(binding.number) if binding.arguments else ""
    parts = (("src", binding.source), (destination, binding.destination.name), ("key", binding.routing_key))
    path = ";".join(f"{name}={quote(value, safe='')}" for name, value in (*parts, ("args", number)))
    return {
        "source": binding.source,
        "destination_queue" if is_queue else "destination_exchange": binding.destination.name,
        "binding_key": binding.routing_key,
        "arguments": {name: _shown(value) for name, value in binding.arguments.items()},
        "location": f"/bindings/{path}",
    }


def _unquoted(text: str) -> str:
    try:
        return unquote(text, errors="strict")
    except UnicodeDecodeError:
        raise _BadRequest(f"the path has a name that is not UTF-8: {text:.200}") from None


def _argument(value: Any) -> Any:
    """Return an argument of a declaration as a value of a header table."""
    if isinstance(value, bool) or value is None:
        return value
    if isinstance(value, int):
        return int(value)
    if isinstance(value, float):
        return float(value)
    if isinstance(value, str):
        return str(value)
    if isinstance(value, bytes):
        return bytes(value)
    if isinstance(value, list):
        return [_argument(each) for each in value]
    if isinstance(value, dict):
        return {str(name): _argument(each) for name, each in value.items()}
    raise _BadRequest(f"an argument has a type that is not supported: {type(value).__name__}")


def _shown(value: Any) -> Any:
    """Return a value of a header table as a value of AMQP 1.0."""
    if isinstance(value, bool) or value is None or isinstance(value, float | bytes):
        return value
    if isinstance(value, int):
        return int(value)
    if isinstance(value, list | tuple):
        return [_shown(each) for each in value]
    if isinstance(value, Mapping):
        return {str(name): _shown(each) for name, each in value.items()}
    return str(value)
