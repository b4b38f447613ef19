"""Every route in the API's own description, called by users without permission."""

from __future__ import annotations

import base64
import http.client
import json
import re
from collections.abc import Iterator
from typing import Any
from urllib.parse import quote

import pytest
from tests.interop.mqtt.device import Device
from tests.interop.server import Broker, running

from basaltmq.http_client import path

PUBLIC = {"/healthz", "/metrics", "/metrics/per-object"}
"""Routes without a password; /metrics has a setting and a test of its own."""

SECRET = "long enough"  # noqa: S105
ALL = {"configure": ".*", "write": ".*", "read": ".*"}
FILE = "part-00000-" + 32 * "a" + ".arrow"
NAMES = {
    "vhost": "b",
    "name": "thing",
    "topic": "thing",
    "client_id": "thing",
    "mechanism": "SCRAM-SHA-256",
    "group": "thing",
    "run": "thing",
    "user": "guest",
    "source": "amq.topic",
    "kind": "q",
    "destination": "thing",
    "properties_key": "key",
    "partition": "0",
    "batch": "0",
    "file": FILE,
    "id": "ff" * 16,
    "protocol": "amqp",
    "within": "1",
    "unit": "days",
    "limit": "max-connections",
    "xid": "1:aa:bb",
}
BODIES: dict[tuple[str, str], Any] = {
    ("PUT", "/api/users/{user}"): {"password": SECRET, "tags": []},
    ("PUT", "/api/users/{user}/tags"): {"tags": []},
    ("PUT", "/api/users/{user}/scram/{mechanism}"): {"password": SECRET},
    ("PUT", "/api/mqtt/rules/{vhost}/{name}"): {"filter": "a/#", "topic": "thing"},
    ("PUT", "/api/permissions/{vhost}/{user}"): ALL,
    ("PUT", "/api/topic-permissions/{vhost}/{user}"): {"exchange": "amq.topic", "write": ".*", "read": ".*"},
    ("PUT", "/api/vhosts/{vhost}/store/options"): {"options": {"disable_auto_compactions": "false"}},
    ("POST", "/api/vhosts/{vhost}/store/checkpoint"): {"target": "tried"},
    ("POST", "/api/queues/{vhost}/{name}/move"): {"destination": "other"},
    ("POST", "/api/queues/{vhost}/{name}/get"): {"ackmode": "ack_requeue_false"},
    ("POST", "/api/queues/{vhost}/{name}/redrive"): {"ids": []},
    ("PUT", "/api/exchanges/{vhost}/{name}"): {"type": "topic"},
    ("POST", "/api/exchanges/{vhost}/{name}/publish"): {"routing_key": "key", "payload": "x"},
    ("PUT", "/api/policies/{vhost}/{name}"): {"pattern": "x", "definition": {"max-length": 1}},
    ("PUT", "/api/operator-policies/{vhost}/{name}"): {"pattern": "x", "definition": {"max-length": 1}},
    ("POST", "/api/groups/{vhost}/{group}"): {"offsets": {"thing": {"0": 0}}},
    ("POST", "/api/groups/{vhost}/{group}/reset"): {"topic": "thing", "to": 0},
    ("PUT", "/api/subscription-groups/{vhost}/{group}"): {"ordered": True},
    ("POST", "/api/topics/{vhost}"): {"topics": [{"name": "tried"}]},
    ("POST", "/api/topics/{vhost}/{topic}"): {"records": [{"value": "y"}]},
    ("POST", "/api/imports/{vhost}/{run}/{batch}"): {"parts": []},
    ("PUT", "/api/vhost-limits/{vhost}/{limit}"): {"value": 1000},
    ("PUT", "/api/user-limits/{user}/{limit}"): {"value": 1000},
    ("POST", "/api/definitions"): {},
    ("POST", "/api/definitions/{vhost}"): {},
}


@pytest.fixture(scope="module")
def broker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Broker]:
    """Start a broker with virtual hosts a and b. All objects named `thing` exist in b."""
    with running(tmp_path_factory.mktemp("broker") / "data") as started:
        api = started.api()
        for vhost in ("a", "b"):
            api.put(path("vhosts", vhost))
        for name in ("thing", "other"):
            api.put(path("queues", "b", name))
        api.put(path("exchanges", "b", "thing"), {"type": "topic"})
        api.post(path("bindings", "b", "e", "amq.topic", "q", "thing"), {"routing_key": "key"})
        api.put(path("policies", "b", "thing"), {"pattern": "^none$", "definition": {"max-length": 1}})
        api.put(path("operator-policies", "b", "thing"), {"pattern": "^none$", "definition": {"max-length": 1}})
        api.post(path("exchanges", "b", "amq.topic", "publish"), {"routing_key": "key", "payload": "kept"})
        api.put(path("topics", "b", "thing"), {})
        api.post(path("topics", "b", "thing"), {"records": [{"value": "kept"}]})
        api.put(path("subscription-groups", "b", "thing"), {"max_attempts": 3})
        api.post(path("groups", "b", "thing"), {"offsets": {"thing": {"0": 1}}})
        with Device(started.port("mqtt"), "thing", expiry_s=3600, user="b:guest", password="guest") as device:  # noqa: S106
            device.subscribe("kept")
            device.publish("thing", b"kept", retain=True)
        api.put(path("mqtt", "rules", "b", "thing"), {"filter": "b/#", "topic": "thing"})
        users: tuple[tuple[str, list[str], str | None], ...] = (
            ("plain", [], "b"),
            ("watcher", ["monitoring"], None),
            ("neighbour", ["management", "policymaker", "monitoring"], "a"),
            ("stranger", ["management", "policymaker"], "a"),
        )
        for user, tags, where in users:
            api.put(path("users", user), {"password": SECRET, "tags": tags})
            if where is not None:
                api.put(path("permissions", where, user), ALL)
        yield started


def routes(broker: Broker) -> list[tuple[str, str]]:
    described = broker.call("GET", "/api/openapi.json")
    found = [(method.upper(), where) for where, methods in described["paths"].items() for method in methods]
    assert len(found) > 100
    return [each for each in found if each[1] not in PUBLIC]


def ask(
    broker: Broker, method: str, where: str, user: str | None, password: str = SECRET, **headers: str
) -> tuple[int, str]:
    node = broker.call("GET", "/api/cluster-name")["name"]
    names = {**NAMES, "node": node, "port": str(broker.port("admin"))} | (
        {"name": node} if where.startswith("/api/nodes/") else {}
    )
    target = re.sub(r"\{(\w+)\}", lambda match: quote(names[match[1]], safe=""), where)
    said = {name.replace("_", "-"): text for name, text in headers.items()}
    if user is not None:
        said["Authorization"] = "Basic " + base64.b64encode(f"{user}:{password}".encode()).decode()
    body = None
    if where.endswith("{file}") and method == "PUT":
        body, kind = b"no arrow", "application/octet-stream"
    elif (method, where) in BODIES:
        body, kind = json.dumps(BODIES[method, where]).encode(), "application/json"
    if body is not None:
        said["Content-Type"] = kind
    connection = http.client.HTTPConnection("127.0.0.1", broker.port("admin"), timeout=30)
    try:
        connection.request(method, target, body, said)
        response = connection.getresponse()
        return response.status, response.read().decode(errors="replace")
    finally:
        connection.close()


def state(broker: Broker) -> dict[str, Any]:
    """Return the state that a change would affect."""
    return {
        "definitions": broker.call("GET", "/api/definitions"),
        "messages": broker.call("GET", path("queues", "b", "thing"))["messages"],
        "records": broker.call("GET", path("topics", "b", "thing"))["partitions"][0]["end_offset"],
        "topics": [each["name"] for each in broker.call("GET", path("topics", "b"))["topics"]],
        "group": broker.call("GET", path("groups", "b", "thing"))[0]["committed"],
        "rules": broker.call("GET", path("mqtt", "rules", "b")),
        "subscription groups": broker.call("GET", path("subscription-groups", "b")),
        "sessions": [each["client_id"] for each in broker.call("GET", path("mqtt", "sessions", "b"))],
        "retained": [each["topic"] for each in broker.call("GET", path("mqtt", "retained", "b"))["items"]],
        "run": broker.call("GET", path("imports", "b", "thing")),
        "backups": sorted(each.name for each in broker.data_dir.glob("backups/*")),
    }


def test_every_route_requires_a_password_and_a_tag(broker: Broker) -> None:
    before = state(broker)
    for method, where in routes(broker):
        status, said = ask(broker, method, where, None)
        assert status == 401, (method, where, said)
        status, said = ask(broker, method, where, "plain")
        assert status == 403, (method, where, said)
        assert "tag" in said
    assert state(broker) == before


def test_a_monitoring_user_cannot_change_anything(broker: Broker) -> None:
    before = state(broker)
    for method, where in routes(broker):
        if method != "GET":
            status, said = ask(broker, method, where, "watcher")
            assert status in {403, 404}, (method, where, status, said)
    assert state(broker) == before


def test_a_user_of_one_virtual_host_cannot_touch_another(broker: Broker) -> None:
    before = state(broker)
    for method, where in routes(broker):
        if "{vhost}" not in where:
            continue
        status, said = ask(broker, method, where, "stranger")
        assert status in {403, 404}, (method, where, status, said)
        if method != "GET":
            # The tag `monitoring` permits reading other virtual hosts, not changing them.
            status, said = ask(broker, method, where, "neighbour")
            assert status in {403, 404}, (method, where, status, said)
    assert state(broker) == before


def test_an_administrator_with_permissions_may_use_every_route(broker: Broker) -> None:
    """This shows that the refusals above depend on the user, not on the request."""
    last = ("DELETE", "/api/vhosts/{vhost}")
    found = sorted(routes(broker), key=lambda each: (each[0] == "DELETE", each == last))
    for method, where in found:
        if where.startswith("/api/users/{user}") and method != "GET":
            continue
        if where.startswith(("/api/permissions/", "/api/topic-permissions/")) and method == "DELETE":
            continue
        status, said = ask(broker, method, where, "guest", "guest")
        # These need a query, a valid file, or the id of a row.
        is_incomplete = where.endswith(("/offset", "/records", "{file}", "{id}"))
        assert status in {200, 201, 204, 404} or (is_incomplete and status == 400), (method, where, status, said)


def test_requests_of_other_sites_change_and_read_nothing(broker: Broker) -> None:
    """DNS rebinding sends a foreign Host. A form or fetch of another page sends a foreign Origin."""
    for method, where in routes(broker):
        status, said = ask(broker, method, where, "guest", "guest", Host="evil.example")
        assert status == 421, (method, where, said)
        assert "admin.allowed_hosts" in said
        if method != "GET":
            status, said = ask(broker, method, where, "guest", "guest", Origin="http://evil.example")
            assert status == 403, (method, where, said)
    assert ask(broker, "GET", "/healthz", None, Host="lb.example")[0] == 200
    connection = http.client.HTTPConnection("127.0.0.1", broker.port("admin"), timeout=30)
    asked = {"Origin": "http://evil.example", "Access-Control-Request-Method": "PUT"}
    connection.request("OPTIONS", "/api/vhosts/evil", headers=asked)
    response = connection.getresponse()
    assert response.status == 405
    assert not [name for name, _ in response.getheaders() if name.lower().startswith("access-control")]
    connection.close()
