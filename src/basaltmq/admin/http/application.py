"""The application of the admin HTTP server: host checks, routing, authentication, handlers, error responses.

Only the method and the path of a request are logged, because bodies and headers contain passwords and messages.
"""

from __future__ import annotations

import inspect
import logging
from collections.abc import Awaitable, Callable
from typing import Any, Final

from basaltmq.admin.http.auth import Authenticator
from basaltmq.admin.http.errors import http_error
from basaltmq.admin.http.host_check import SAFE_METHODS, HostCheck
from basaltmq.admin.http.message import BodySink, HttpError, Request, Response, long_json_response
from basaltmq.admin.http.paging import only_columns
from basaltmq.admin.http.routes import Access, Call, Route, RouteTable, allowed, check_content_type, decode_body
from basaltmq.admin.http.server import Admitted
from basaltmq.errors import BasaltError

LIVENESS: Final = ("healthz",)
"""Served under any host name, because load balancers use their own names. The response reveals nothing."""

_log: Final = logging.getLogger(__name__)


class AdminApplication:
    """Serves a route table."""

    def __init__(self, table: RouteTable, authenticator: Authenticator, hosts: HostCheck) -> None:
        self._table = table
        self._authenticator = authenticator
        self._hosts = hosts

    async def admit(self, request: Request) -> Admitted:
        if request.path != LIVENESS:
            self._hosts.check_host(request)
        self._hosts.check_origin(request)
        route, names = self._table.find(request)
        check_content_type(route, request)
        user = None
        if route.access is not Access.PUBLIC:
            user = await self._authenticator.user(request)
            if not allowed(user.tags, route.access):
                raise HttpError(
                    403, f"user {user.name!r} needs the tag {route.access.value}; set it with basalt user tags"
                )

        call = Call(request, names, user)
        sink = None if route.sink is None else _opened(route.sink, call)

        async def respond(received: Request) -> Response:
            call.request = received
            if sink is None:
                return await _run(route, call)
            call.body = sink
            try:
                return await _run(route, call)
            except BaseException:
                await sink.discard()
                raise

        return Admitted(route.body_bytes_max, respond, sink)


def _opened(make: Callable[[Call], BodySink], call: Call) -> BodySink:
    try:
        return make(call)
    except BasaltError as error:
        raise http_error(error) from error


async def _run(route: Route, call: Call) -> Response:
    try:
        if route.sink is None:
            call.body = decode_body(route, call.request.body)
        made: Any = route.handle(call)
        if inspect.isawaitable(made):
            made = await _finish(made)
    except HttpError:
        raise
    except BasaltError as error:
        raise http_error(error) from error
    except Exception as error:
        _log.exception("%s %s failed", route.method, route.path)
        raise HttpError(500, "internal error of the broker; see its log", code="internal") from error
    if call.request.method not in SAFE_METHODS and call.user is not None:
        _log.info("%s %s by %s", route.method, call.request.target.partition("?")[0], call.user.name)
    if made is None:
        return Response(204)
    return made if isinstance(made, Response) else await long_json_response(only_columns(call, made))


async def _finish(made: Awaitable[Any]) -> Any:
    return await made
