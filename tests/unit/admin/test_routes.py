"""Routes: found by path and method, guarded by tags, described by the same table that serves them."""

from __future__ import annotations

import msgspec
import pytest

from basaltmq.admin.http.message import HttpError, Request
from basaltmq.admin.http.openapi import document, page
from basaltmq.admin.http.routes import Access, Call, Route, RouteTable, allowed, decode_body


class Thing(msgspec.Struct):
    """A body."""

    size: int
    name: str = "<b>"


def handle(_call: Call) -> None:
    return None


ROUTES = [
    Route("GET", "/api/things", handle, "All of them.", paged=True),
    Route("GET", "/api/things/{vhost}/{name}", handle, "One of them."),
    Route("PUT", "/api/things/{vhost}/{name}", handle, "Make one.", Access.ADMINISTRATOR, takes=Thing),
    Route("GET", "/api/things/{vhost}/special", handle, "The fixed one."),
    Route("POST", "/api/things/{vhost}/special/run", handle, "Do it.", takes=Thing, optional_body=True),
    Route("GET", "/open", handle, "For everybody.", Access.PUBLIC),
]
TABLE = RouteTable(ROUTES)


def found(method: str, target: str) -> tuple[Route, dict[str, str]]:
    request = Request(method, target, {})
    request.split()
    return TABLE.find(request)


def refusal(method: str, target: str) -> HttpError:
    with pytest.raises(HttpError) as caught:
        found(method, target)
    return caught.value


@pytest.mark.parametrize(
    ("method", "target", "summary", "names"),
    [
        ("GET", "/api/things", "All of them.", {}),
        ("GET", "/api/things/", "All of them.", {}),
        ("HEAD", "/api/things?page=1#top", "All of them.", {}),
        ("GET", "/api/things/%2F/a%2Fb", "One of them.", {"vhost": "/", "name": "a/b"}),
        ("GET", "/api/things/%2F/special", "The fixed one.", {"vhost": "/"}),
        ("PUT", "/api/things/v/special", "Make one.", {"vhost": "v", "name": "special"}),
        ("GET", "/api/things/v/%F0%9F%90%87%20", "One of them.", {"vhost": "v", "name": "🐇 "}),
    ],
)
def test_paths_are_split_before_names_are_decoded(
    method: str, target: str, summary: str, names: dict[str, str]
) -> None:
    route, got = found(method, target)
    assert (route.summary, got) == (summary, names)


@pytest.mark.parametrize(
    "target", ["/", "/api", "/api/things/v", "/api/things//x", "/api/things/v/x/y", "//api/things"]
)
def test_unknown_paths_are_404(target: str) -> None:
    assert refusal("GET", target).status == 404


def test_unsupported_methods_are_405_and_list_the_allowed_ones() -> None:
    refused = refusal("DELETE", "/api/things/v/special")
    assert refused.status == 405
    assert refused.headers["Allow"] == "GET, PUT"


@pytest.mark.parametrize("target", ["/api/%ff", "/api/things?a=%ff", "/api/things?" + "&".join(["a=1"] * 101)])
def test_an_invalid_target_is_400(target: str) -> None:
    with pytest.raises(HttpError) as caught:
        found("GET", target)
    assert caught.value.status == 400


@pytest.mark.parametrize(
    ("tags", "opens"),
    [
        ((), {Access.PUBLIC}),
        (("unknown",), {Access.PUBLIC}),
        (("management",), {Access.PUBLIC, Access.MANAGEMENT}),
        (("policymaker",), {Access.PUBLIC, Access.MANAGEMENT, Access.POLICYMAKER}),
        (("monitoring",), {Access.PUBLIC, Access.MANAGEMENT, Access.MONITORING}),
        (("administrator",), set(Access)),
        (("monitoring", "policymaker"), set(Access) - {Access.ADMINISTRATOR}),
    ],
)
def test_tags_grant_the_access_of_rabbitmq(tags: tuple[str, ...], opens: set[Access]) -> None:
    assert {access for access in Access if allowed(tags, access)} == opens


def test_bodies_are_decoded_to_the_type_of_the_route() -> None:
    put, run = TABLE.routes[2], TABLE.routes[4]
    assert decode_body(put, b'{"size": 1}') == decode_body(put, b'{"size": "1", "other": 2}') == Thing(1)
    assert decode_body(TABLE.routes[0], b"anything") is None
    for raw in (b"", b"  ", b"{}", b'{"size": "many"}', b"[1]", b"\xff", b"[" * 200_000):
        with pytest.raises(HttpError) as caught:
            decode_body(put, raw)
        assert caught.value.status == 400
    with pytest.raises(HttpError, match="size"):
        decode_body(run, b"")


def test_duplicate_routes_are_an_internal_error() -> None:
    with pytest.raises(AssertionError, match="twice"):
        RouteTable([*ROUTES, ROUTES[0]])
    with pytest.raises(AssertionError, match="another route names this parameter"):
        RouteTable([*ROUTES, Route("GET", "/api/things/{other}", handle, "")])


def test_the_openapi_document_and_the_page_match_the_routes() -> None:
    described = document(ROUTES)
    assert set(described["paths"]) == {route.path for route in ROUTES}
    put = described["paths"]["/api/things/{vhost}/{name}"]["put"]
    assert put["requestBody"]["content"]["application/json"]["schema"] == {"$ref": "#/components/schemas/Thing"}
    assert [each["name"] for each in put["parameters"]] == ["vhost", "name"]
    assert "administrator" in put["description"]
    assert described["paths"]["/open"]["get"]["security"] == []
    assert {each["name"] for each in described["paths"]["/api/things"]["get"]["parameters"]} >= {"page", "page_size"}
    shown = page(ROUTES, "http://x/<script>")
    assert all(route.summary in shown for route in ROUTES)
    assert "<b>" not in shown
    assert "<script" not in shown
