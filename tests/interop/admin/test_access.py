"""Access control over HTTP: users, tags, permissions, and requests without valid credentials."""

from __future__ import annotations

import base64
import contextlib
import http.client
import json
from collections.abc import Iterator
from typing import Any

import pytest
from tests.interop.server import Broker

from basaltmq.errors import RemoteError
from basaltmq.http_client import HttpClient, path

GUEST = "Basic " + base64.b64encode(b"guest:guest").decode()
ALL = {"configure": ".*", "write": ".*", "read": ".*"}


@pytest.fixture
def api(broker: Broker) -> HttpClient:
    return broker.api()


def refused(status: int, call: Any, *arguments: Any, **named: Any) -> str:
    with pytest.raises(RemoteError) as caught:
        call(*arguments, **named)
    assert caught.value.status == status, caught.value
    return str(caught.value)


@contextlib.contextmanager
def somebody(broker: Broker, api: HttpClient, name: str, *tags: str, **permission: str) -> Iterator[HttpClient]:
    """Create a user with these tags, and with these permissions in the default virtual host if they are given."""
    api.put(path("users", name), {"password": "secret", "tags": list(tags)})
    if permission:
        api.put(path("permissions", "/", name), {"configure": "^$", "write": "^$", "read": "^$", **permission})
    yield broker.api(name, "secret")
    api.delete(path("users", name))


def raw(broker: Broker, target: str, **headers: str) -> tuple[int, dict[str, str], bytes]:
    connection = http.client.HTTPConnection("127.0.0.1", broker.port("admin"), timeout=30)
    connection.request("GET", target, headers=headers)
    response = connection.getresponse()
    answer = (response.status, {name.lower(): value for name, value in response.getheaders()}, response.read())
    connection.close()
    return answer


def test_password_guesses_are_delayed_without_delaying_others(broker: Broker) -> None:
    wrong = "Basic " + base64.b64encode(b"victim:wrong").decode()
    seen = []
    for _ in range(12):
        status, answered, body = raw(broker, "/api/overview", Authorization=wrong)
        seen.append(status)
        if status == 429:
            assert int(answered["retry-after"]) >= 1
            assert "too many failed logins" in json.loads(body)["reason"]
            break
    assert seen[:3] == [401, 401, 401]
    assert seen[-1] == 429, seen
    assert raw(broker, "/api/overview", Authorization=GUEST)[0] == 200, "another user at the same address"


def test_unauthenticated_requests_get_401_and_a_challenge(broker: Broker) -> None:
    for headers in ({}, {"Authorization": "Basic !!!"}, {"Authorization": "Bearer x"}, {"Authorization": "Basic eA=="}):
        status, answered, body = raw(broker, "/api/overview", **headers)
        assert status == 401
        assert answered["www-authenticate"].startswith("Basic")
        assert json.loads(body)["error"] == "not_authorised"
    client = broker.api("guest", "wrong")
    assert "wrong" in refused(401, client.get, path("overview"))
    client = broker.api("nobody", "wrong")
    assert "wrong" in refused(401, client.get, path("overview"))


def test_loopback_only_users_cannot_log_in_through_a_proxy(broker: Broker) -> None:
    assert raw(broker, "/api/whoami", Authorization=GUEST)[0] == 200
    status, _, body = raw(broker, "/api/whoami", Authorization=GUEST, **{"X-Forwarded-For": "10.0.0.9"})
    assert status == 401
    assert b"localhost" in body


def test_requests_of_other_sites_cannot_use_stored_credentials(broker: Broker) -> None:
    connection = http.client.HTTPConnection("127.0.0.1", broker.port("admin"), timeout=30)
    headers = {"Authorization": GUEST, "Sec-Fetch-Site": "cross-site", "Content-Type": "application/json"}
    connection.request("PUT", "/api/vhosts/evil", b"{}", headers)
    assert connection.getresponse().status == 403
    connection.close()


def test_tags_grant_their_access(broker: Broker, api: HttpClient) -> None:
    with somebody(broker, api, "plain", **ALL) as plain:
        assert "management" in refused(403, plain.get, path("overview"))
    with somebody(broker, api, "manager", "management", **ALL) as manager:
        assert manager.get(path("whoami")) == {"name": "manager", "tags": ["management"]}
        assert [each["name"] for each in manager.get(path("vhosts"))] == ["/"]
        assert "monitoring" in refused(403, manager.get, path("nodes"))
        assert "policymaker" in refused(403, manager.put, path("policies", "/", "p"), {"pattern": "", "definition": {}})
        for where in (path("users"), path("permissions"), path("definitions")):
            assert "administrator" in refused(403, manager.get, where)
        assert "administrator" in refused(403, manager.put, path("vhosts", "mine"))
    with somebody(broker, api, "maker", "policymaker", **ALL) as maker:
        maker.put(path("policies", "/", "p"), {"pattern": "^none$", "definition": {"max-length": 1}})
        maker.delete(path("policies", "/", "p"))
    with somebody(broker, api, "watcher", "monitoring") as watcher:
        assert watcher.get(path("nodes"))[0]["running"]
        assert [each["name"] for each in watcher.get(path("vhosts"))] == ["/"]
        assert "access" in refused(403, watcher.put, path("queues", "/", "mine"))


def test_operations_require_the_same_permissions_as_over_amqp(broker: Broker, api: HttpClient) -> None:
    api.put(path("queues", "/", "theirs"))
    with somebody(
        broker, api, "limited", "management", configure="^mine", write="^(mine|amq[.]topic)", read="^mine"
    ) as limited:
        limited.put(path("queues", "/", "mine"))
        assert "configure" in refused(403, limited.put, path("queues", "/", "yours"))
        assert "configure" in refused(403, limited.delete, path("queues", "/", "theirs"))
        assert "read" in refused(403, limited.post, path("queues", "/", "theirs", "get"), {})
        assert "read" in refused(403, limited.delete, path("queues", "/", "theirs", "contents"))
        default = path("exchanges", "/", "amq.default", "publish")
        assert "write" in refused(403, limited.post, default, {"routing_key": "mine", "payload": ""})
        assert "read" in refused(403, limited.post, path("bindings", "/", "e", "amq.topic", "q", "mine"), {})
        topic = path("exchanges", "/", "amq.topic", "publish")
        assert limited.post(topic, {"routing_key": "a.b", "payload": ""}) == {"routed": False}
        api.put(
            path("topic-permissions", "/", "limited"), {"exchange": "amq.topic", "write": "^{username}[.]", "read": ""}
        )
        assert "topic 'a.b'" in refused(403, limited.post, topic, {"routing_key": "a.b", "payload": ""})
        assert limited.post(topic, {"routing_key": "limited.x", "payload": ""}) == {"routed": False}
        dead_letters = {"arguments": {"x-dead-letter-exchange": "amq.fanout"}}
        assert "write" in refused(403, limited.put, path("queues", "/", "mine-2"), dead_letters)
        alternate = {"arguments": {"alternate-exchange": "amq.fanout"}}
        assert "write" in refused(403, limited.put, path("exchanges", "/", "mine-x"), alternate)
        api.put(path("permissions", "/", "limited"), ALL)
        api.put(path("topic-permissions", "/", "limited"), {"exchange": "amq.topic", "write": "", "read": "^ok$"})
        binding = path("bindings", "/", "e", "amq.topic", "q", "mine")
        assert "topic 'a.b'" in refused(403, limited.post, binding, {"routing_key": "a.b"})
        limited.post(binding, {"routing_key": "ok"})
        limited.delete(path("queues", "/", "mine"))


def test_a_virtual_host_without_permission_is_404(broker: Broker, api: HttpClient) -> None:
    api.put(path("vhosts", "hidden"))
    with somebody(broker, api, "outside", "management", **ALL) as outside:
        assert "may see" in refused(404, outside.get, path("queues", "hidden"))
        assert "may see" in refused(404, outside.get, path("vhosts", "hidden"))
    api.delete(path("vhosts", "hidden"))


def test_users_can_be_changed_and_passwords_are_never_returned(broker: Broker, api: HttpClient) -> None:
    api.put(path("users", "carol"), {"password": "first", "tags": "management, monitoring"})
    shown = api.get(path("users", "carol"))
    assert shown["tags"] == ["management", "monitoring"]
    assert shown["hashing_algorithm"] == "basalt_scrypt"
    assert shown["password_hash"].startswith("scrypt$")
    api.put(path("users", "carol"), {"password": "second", "tags": ["management"]})
    client = broker.api("carol", "first")
    refused(401, client.get, path("whoami"))
    client = broker.api("carol", "second")
    assert client.get(path("whoami"))["tags"] == ["management"]
    api.put(path("users", "carol"), {"tags": ["monitoring"]})
    client = broker.api("carol", "second")
    assert client.get(path("whoami"))["tags"] == ["monitoring"]
    api.delete(path("users", "carol"))
    refused(401, client.get, path("whoami"))
    assert "your own user" in refused(400, api.delete, path("users", "guest"))
    assert refused(404, api.get, path("users", "carol"))
    assert "not both" in refused(400, api.put, path("users", "x"), {"password": "a", "password_hash": "b"})
    assert "at least one character" in refused(400, api.put, path("users", "x"), {"password": ""})
    assert "regular expression" in refused(400, api.put, path("permissions", "/", "guest"), {**ALL, "read": "("})
    assert refused(404, api.put, path("permissions", "/", "nobody"), ALL)


def test_a_body_that_is_not_declared_as_json_is_refused(broker: Broker, api: HttpClient) -> None:
    def status(method: str, target: str, body: bytes | None, **headers: str) -> int:
        connection = http.client.HTTPConnection("127.0.0.1", broker.port("admin"), timeout=30)
        said = {name.replace("_", "-"): text for name, text in headers.items()}
        connection.request(method, target, body, {"Authorization": GUEST, **said})
        response = connection.getresponse()
        response.read()
        connection.close()
        return response.status

    target = "/api/queues/%2F/typed"
    assert status("PUT", target, b"{}", Content_Type="text/plain") == 415
    assert status("PUT", target, b"{}", Content_Type="application/x-www-form-urlencoded") == 415
    assert status("PUT", target, b"{}") == 415
    refused(404, api.get, path("queues", "/", "typed"))
    assert status("PUT", target, b"{}", Content_Type="application/json; charset=utf-8") == 201
    assert status("PUT", target, None) == 204, "a declaration without a body"
    assert status("DELETE", target, None) == 204
    assert status("POST", "/api/vhosts/%2F/store/flush", None) == 204


def test_an_invalid_body_gets_a_clear_error(api: HttpClient) -> None:
    where = path("queues", "/", "never")
    for body, said in (
        (b"{", "invalid body"),
        (b"[]", "Expected `object`"),
        (b'{"durable": 3}', "durable"),
        (b"\xff", "invalid body"),
        (b"[" * 100_000, "invalid body"),
    ):
        assert said in refused(400, api.call, "PUT", where, body)
    assert "needs a JSON body" in refused(400, api.call, "PUT", path("users", "x"), b" ")
    assert refused(404, api.get, path("queues", "/", "never"))
    assert "use GET" in refused(405, api.post, path("overview"))
    assert "/api/docs" in refused(404, api.get, "/api/no/such/thing")
