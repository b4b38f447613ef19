"""The route table: handler, access, body, query and documentation of every path.

Dispatch, the OpenAPI document and the HTML page all use this table, so they cannot diverge.
"""

from __future__ import annotations

import enum
import re
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, TypeAlias

import msgspec

from basaltmq.admin.http.message import BodySink, HttpError, Request
from basaltmq.broker.auth.users import User
from basaltmq.decoding import json_decoder

BODY_BYTES_MAX: Final = 1 << 20
"""Default size limit of a body: names and arguments, not message contents."""

JSON: Final = "application/json"

GROUPS: Final = {
    "overview": "broker",
    "cluster-name": "broker",
    "nodes": "broker",
    "whoami": "broker",
    "parameters": "broker",
    "global-parameters": "broker",
    "vhost-limits": "broker",
    "user-limits": "broker",
    "extensions": "broker",
    "permissions": "users",
    "topic-permissions": "users",
    "operator-policies": "policies",
    "channels": "connections",
    "consumers": "connections",
    "healthz": "health",
    "aliveness-test": "health",
}
"""Documentation group by first path segment, where the two differ."""

_PARAMETER: Final = re.compile(r"\{(\w+)\}")


class Access(enum.Enum):
    """The user tag that a route requires. Names and inclusion follow RabbitMQ."""

    PUBLIC = "public"
    MANAGEMENT = "management"
    POLICYMAKER = "policymaker"
    MONITORING = "monitoring"
    ADMINISTRATOR = "administrator"


INCLUDED: Final[dict[str, frozenset[Access]]] = {
    "management": frozenset({Access.MANAGEMENT}),
    "policymaker": frozenset({Access.MANAGEMENT, Access.POLICYMAKER}),
    "monitoring": frozenset({Access.MANAGEMENT, Access.MONITORING}),
    "administrator": frozenset(Access),
}


def allowed(tags: Collection[str], access: Access) -> bool:
    return access is Access.PUBLIC or any(access in INCLUDED.get(tag, ()) for tag in tags)


@dataclass(slots=True)
class Call:
    """One request to a route."""

    request: Request
    names: dict[str, str]
    """Values of the {parameters} in the path."""
    user: User | None
    body: Any = None

    @property
    def query(self) -> dict[str, str]:
        return self.request.query

    @property
    def who(self) -> User:
        assert self.user is not None, "a public route has no user"
        return self.user

    def flag(self, name: str) -> bool:
        return self.request.flag(name)

    def number(self, name: str, default: int, *, low: int = 0, high: int = 1 << 62) -> int:
        text = self.query.get(name)
        if text is None or text == "":
            return default
        if not text.isascii() or not text.isdigit() or not low <= int(text[:20]) <= high:
            raise HttpError(400, f"{name} must be an integer from {low} to {high}, not {text[:40]!r}")
        return int(text)


Handler: TypeAlias = Callable[[Call], Any]
"""Returns None (204), a Response, a value to encode as JSON (200), or an awaitable of one of these."""


@dataclass(frozen=True, slots=True)
class Route:
    method: str
    path: str
    handle: Handler
    summary: str
    access: Access = Access.MANAGEMENT
    takes: Any = None
    """Type of the body, or None if the route takes none."""
    optional_body: bool = False
    query: dict[str, str] = field(default_factory=dict)
    """Descriptions of the query parameters by name."""
    paged: bool = False
    sink: Callable[[Call], BodySink] | None = None
    """Creates the sink of a streamed body once the request is admitted. The handler finds it in `Call.body`."""
    content_types: tuple[str, ...] = (JSON,)
    """Accepted content types of a body."""
    body_bytes_max: int = BODY_BYTES_MAX
    returns: str = ""
    """Description of the response, where the summary is not enough."""
    decode: Callable[[bytes], Any] = field(init=False, repr=False, compare=False)
    """Decodes a body of the type `takes`. Numbers and booleans may be strings."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "decode", json_decoder(self.takes, strict=False))

    @property
    def group(self) -> str:
        """Documentation group."""
        if "/store" in self.path:
            return "stores"
        parts = self.path.split("/")
        first = parts[2] if len(parts) > 2 and parts[1] == "api" else parts[1]
        return GROUPS.get(first, first)

    @property
    def parameters(self) -> list[str]:
        return _PARAMETER.findall(self.path)

    @property
    def identifier(self) -> str:
        words = [part.strip("{}") for part in self.path.split("/") if part and part != "api"]
        return "_".join([self.method.lower(), *words]).replace("-", "_").replace(".", "_")


@dataclass(slots=True)
class _Node:
    fixed: dict[str, _Node] = field(default_factory=dict)
    any_name: tuple[str, _Node] | None = None
    routes: dict[str, Route] = field(default_factory=dict)


class RouteTable:
    """Finds the route of a request. Fixed path segments win over parameters."""

    def __init__(self, routes: Sequence[Route]) -> None:
        self.routes = tuple(routes)
        self._root = _Node()
        for route in self.routes:
            self._add(route)

    def _add(self, route: Route) -> None:
        node = self._root
        for part in route.path.split("/")[1:]:
            if part.startswith("{"):
                if node.any_name is None:
                    node.any_name = (part[1:-1], _Node())
                name, node = node.any_name
                assert name == part[1:-1], f"{route.path}: another route names this parameter {{{name}}}"
            else:
                node = node.fixed.setdefault(part, _Node())
        assert route.method not in node.routes, f"{route.method} {route.path} is registered twice"
        node.routes[route.method] = route

    def find(self, request: Request) -> tuple[Route, dict[str, str]]:
        """Return the route and its path parameters. Raise HttpError 404 or 405 if there is none."""
        path = request.path
        if len(path) > 1 and path[-1] == "":
            path = path[:-1]
        matches = list(_match(self._root, path))
        method = "GET" if request.method == "HEAD" else request.method
        for node, names in matches:
            if route := node.routes.get(method):
                return route, names
        if not matches:
            raise HttpError(404, f"there is no resource /{'/'.join(path)}; see /api/docs")
        methods = sorted({each for node, _ in matches for each in node.routes})
        raise HttpError(
            405, f"{method} is not allowed here; use {', '.join(methods)}", headers={"Allow": ", ".join(methods)}
        )


def _match(node: _Node, path: tuple[str, ...], at: int = 0) -> Iterator[tuple[_Node, dict[str, str]]]:
    if at == len(path):
        if node.routes:
            yield node, {}
        return
    if (fixed := node.fixed.get(path[at])) is not None:
        yield from _match(fixed, path, at + 1)
    if node.any_name is not None and path[at]:
        name, below = node.any_name
        for found, names in _match(below, path, at + 1):
            yield found, {name: path[at], **names}


def check_content_type(route: Route, request: Request) -> None:
    """Raise HttpError 415 if the body has a content type that the route does not accept.

    A page of another origin can send text/plain and forms without a CORS preflight, but not application/json.
    """
    if request.method in {"GET", "HEAD"}:
        return
    headers = request.headers
    if headers.get("content-length", "0") == "0" and "transfer-encoding" not in headers:
        return
    given = headers.get("content-type", "").partition(";")[0].strip().lower()
    if given not in route.content_types:
        wanted = " or ".join(route.content_types)
        said = f"not {given[:80]!r}" if given else "and this request has none"
        raise HttpError(415, f"send the body with Content-Type: {wanted}, {said}", headers={"Accept": wanted})


def decode_body(route: Route, raw: bytes) -> Any:
    """Decode the body to the type that the route takes.

    Numbers and booleans may be strings ("true", "1"), because RabbitMQ's command-line tool sends them so.
    """
    if route.takes is None:
        return None
    if not raw.strip():
        if not route.optional_body:
            raise HttpError(400, "the request needs a JSON body")
        raw = b"{}"
    try:
        return route.decode(raw)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise HttpError(400, f"invalid body: {error}") from error
