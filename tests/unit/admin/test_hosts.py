"""Hosts, origins and content types that the admin API accepts."""

from __future__ import annotations

from pathlib import Path

import pytest

from basaltmq.admin.http.host_check import HostCheck
from basaltmq.admin.http.message import HttpError, Request
from basaltmq.admin.http.routes import Call, Route, check_content_type
from basaltmq.admin.objects.store import _backup_path


def hosts(*configured: str, listener: str = "0.0.0.0") -> HostCheck:  # noqa: S104
    return HostCheck(listener, lambda: configured)


def host_status(checked: HostCheck, host: str | None, local: str = "10.1.2.3") -> int:
    request = Request("GET", "/api/queues", {} if host is None else {"host": host}, local=local)
    try:
        checked.check_host(request)
    except HttpError as error:
        return error.status if "admin.allowed_hosts" in error.reason else 0
    return 200


@pytest.mark.parametrize(
    "host",
    [
        None,
        "localhost",
        "LocalHost:15672",
        "localhost.",
        "app.localhost:1",
        "127.0.0.1",
        "127.9.9.9:15672",
        "[::1]:15672",
        "[::ffff:127.0.0.1]",
        "10.1.2.3:15672",
        "[::ffff:10.1.2.3]:15672",
        "mq.example.com",
        "MQ.Example.Com:8443",
        "only.example.com:9000",
    ],
)
def test_own_and_configured_hosts_are_served(host: str | None) -> None:
    assert host_status(hosts("mq.example.com", "only.example.com:9000"), host) == 200


@pytest.mark.parametrize(
    "host",
    [
        "evil.example",
        "evil.example:15672",
        "localhost.evil.example",
        "127.0.0.1.evil.example",
        "10.1.2.4",
        "[2001:db8::1]:15672",
        "only.example.com:9001",
        "sub.mq.example.com",
        "",
        "user@localhost",
        "localhost:port",
        "[::1",
        "a b",
    ],
)
def test_another_host_is_421_and_names_the_setting(host: str) -> None:
    assert host_status(hosts("mq.example.com", "only.example.com:9000"), host) == 421


def test_the_listeners_own_name_and_a_wildcard_are_served() -> None:
    assert host_status(hosts(listener="broker.internal"), "broker.internal:15672") == 200
    assert host_status(hosts(), "2001:db8::1") == 421
    assert host_status(hosts(), "[2001:db8::1]", local="2001:db8::1") == 200
    assert host_status(hosts("*"), "anything.example") == 200


@pytest.mark.parametrize(
    ("target", "host", "path"),
    [
        ("http://evil.example/api/users", "evil.example", ("api", "users")),
        ("HTTPS://localhost:15672/api/users?page=1", "localhost:15672", ("api", "users")),
        ("http://evil.example?x", "evil.example", ("",)),
        ("http://evil.example", "evil.example", ("",)),
        ("/api/users?next=http://evil.example/", "localhost", ("api", "users")),
    ],
)
def test_the_host_of_an_absolute_target_replaces_the_header(target: str, host: str, path: tuple[str, ...]) -> None:
    request = Request("GET", target, {"host": "localhost"})
    request.split()
    assert (request.headers["host"], request.path) == (host, path)


@pytest.mark.parametrize("header", ["forwarded", "x-forwarded-for", "x-real-ip", "via", "x-forwarded-proto"])
def test_a_client_behind_a_proxy_on_this_machine_is_not_local(header: str) -> None:
    assert Request("GET", "/", {}, "127.0.0.1").is_loopback
    assert not Request("GET", "/", {header: "x"}, "127.0.0.1").is_loopback


def origin_status(origin: str | None, *configured: str, method: str = "POST", **more: str) -> int:
    headers = {"host": "127.0.0.1:15672", **{name.replace("_", "-"): text for name, text in more.items()}}
    if origin is not None:
        headers["origin"] = origin
    try:
        hosts(*configured).check_origin(Request(method, "/api/queues", headers))
    except HttpError as error:
        return error.status if "admin.allowed_hosts" in error.reason else 0
    return 200


def test_a_change_comes_from_a_program_or_from_the_same_origin() -> None:
    assert origin_status(None) == 200
    assert origin_status("http://127.0.0.1:15672") == 200
    assert origin_status("http://127.0.0.1:15672", sec_fetch_site="same-origin") == 200
    assert origin_status("https://mq.example.com", "mq.example.com") == 200
    assert origin_status("http://[::1]:15672", host="[::1]:15672") == 200
    assert origin_status("https://mq.example.com", host="mq.example.com") == 200
    for origin in ("http://evil.example", "null", "http://127.0.0.1:8080", "http://localhost:15672", "file://", ""):
        for method in ("POST", "PUT", "DELETE", "PATCH"):
            assert origin_status(origin, method=method) == 403, origin
        assert origin_status(origin, method="GET") == 200
    assert origin_status("http://evil.example", "*") == 403, "any host is not any origin"
    assert origin_status(None, sec_fetch_site="cross-site") == 403
    assert origin_status(None, sec_fetch_site="same-site") == 403
    assert origin_status("http://127.0.0.1:15672", sec_fetch_site="cross-site") == 403


def handle(_call: Call) -> None:
    return None


@pytest.mark.parametrize(
    ("headers", "is_taken"),
    [
        ({}, True),
        ({"content-length": "0"}, True),
        ({"content-length": "0", "content-type": "text/plain"}, True),
        ({"content-length": "2", "content-type": "application/json"}, True),
        ({"content-length": "2", "content-type": "Application/JSON; charset=utf-8"}, True),
        ({"transfer-encoding": "chunked", "content-type": "application/json"}, True),
        ({"content-length": "2"}, False),
        ({"transfer-encoding": "chunked"}, False),
        ({"content-length": "2", "content-type": "text/plain"}, False),
        ({"content-length": "2", "content-type": "text/plain; application/json"}, False),
        ({"content-length": "2", "content-type": "application/x-www-form-urlencoded"}, False),
        ({"content-length": "2", "content-type": "multipart/form-data; boundary=x"}, False),
    ],
)
def test_a_body_is_declared_as_json(headers: dict[str, str], is_taken: bool) -> None:
    route = Route("POST", "/api/things", handle, "Make one.")
    request = Request("POST", "/api/things", headers)
    if is_taken:
        check_content_type(route, request)
        return
    with pytest.raises(HttpError, match="application/json") as caught:
        check_content_type(route, request)
    assert caught.value.status == 415


def test_backups_stay_below_their_directory(tmp_path: Path) -> None:
    root, outside = tmp_path / "backups", tmp_path / "outside"
    root.mkdir()
    outside.mkdir()
    (root / "link").symlink_to(outside)
    (root / "inner").mkdir()
    (root / "home").symlink_to(root / "inner")
    for given in ("one", "a/b", str(root / "one"), "./one", "home/one"):
        assert _backup_path(root, given).is_relative_to(root), given
    refused = ("", ".", "..", "../x", "a/../../x", "link/x", str(outside / "x"), "/etc/x", "/", str(root), "a\0b")
    for given in refused:
        with pytest.raises(HttpError, match=r"admin\.backup_dir") as caught:
            _backup_path(root, given)
        assert caught.value.status == 403, given
    (root / "one").mkdir()
    (root / "one" / "STORE").write_bytes(b"")
    for given in ("one/sub", "one/a/b"):
        with pytest.raises(HttpError, match="inside the backup"):
            _backup_path(root, given)
