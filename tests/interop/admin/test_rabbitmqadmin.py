"""Requests in the form RabbitMQ's own command line sends them: booleans and numbers as text, and selected columns."""

from __future__ import annotations

import pytest
from tests.interop.server import Broker

from basaltmq.http_client import HttpClient, path

LISTS = {
    "connections": ["name", "user", "channels"],
    "channels": ["name", "user"],
    "consumers": [],
    "exchanges": ["name", "type"],
    "queues": ["name", "messages"],
    "bindings": ["source", "destination", "routing_key"],
    "users": [],
    "vhosts": ["name", "messages"],
    "permissions": [],
    "nodes": ["name", "type", "mem_used"],
    "parameters": [],
    "policies": [],
    "operator-policies": [],
    "vhost-limits": [],
}


@pytest.fixture
def api(broker: Broker) -> HttpClient:
    return broker.api()


def test_objects_are_declared_with_boolean_text(api: HttpClient) -> None:
    exchange = {"auto_delete": "false", "durable": "true", "internal": "false", "arguments": {}, "type": "fanout"}
    api.put(path("exchanges", "/", "x"), {**exchange, "name": "x", "vhost": "/"})
    queue = {
        "auto_delete": "false",
        "durable": "true",
        "arguments": {"x-queue-type": "classic"},
        "queue_type": "classic",
    }
    api.put(path("queues", "/", "q"), {**queue, "name": "q", "vhost": "/"})
    shown = api.get(path("queues", "/", "q"))
    assert (shown["durable"], shown["auto_delete"]) == (True, False)
    binding = {"destination_type": "queue", "routing_key": "", "arguments": {}, "source": "x", "destination": "q"}
    api.post(path("bindings", "/", "e", "x", "q", "q"), {**binding, "vhost": "/"})
    message = {"properties": {}, "exchange": "x", "payload_encoding": "string", "routing_key": "k", "payload": "hi"}
    assert api.post(path("exchanges", "/", "x", "publish"), {**message, "vhost": "/"}) == {"routed": True}
    asked = {"count": "1", "ackmode": "ack_requeue_false", "encoding": "auto", "queue": "q", "vhost": "/"}
    [got] = api.post(path("queues", "/", "q", "get"), asked)
    assert (got["payload"], got["routing_key"], got["payload_bytes"]) == ("hi", "k", 2)
    api.delete(path("bindings", "/", "e", "x", "q", "q", "~"))
    api.put(path("users", "u"), {"name": "u", "password": "p", "tags": "monitoring,policymaker"})
    assert api.get(path("users", "u"))["tags"] == ["monitoring", "policymaker"]
    policy = {"priority": 0, "name": "p", "pattern": "^z", "definition": {"max-length": 5}, "vhost": "/"}
    api.put(path("policies", "/", "p"), policy)
    for kind, name in (("policies", "p"), ("queues", "q"), ("exchanges", "x")):
        api.delete(path(kind, "/", name))
    api.delete(path("users", "u"))


@pytest.mark.parametrize("kind", LISTS)
def test_every_list_returns_the_requested_columns(api: HttpClient, kind: str) -> None:
    columns = LISTS[kind]
    found = api.get(path(kind), columns=",".join(columns) or None)
    assert isinstance(found, list)
    for item in found:
        assert not columns or set(item) <= set(columns)


def test_the_overview_returns_the_requested_columns(api: HttpClient) -> None:
    columns = "rabbitmq_version,cluster_name,queue_totals.messages,object_totals.queues"
    assert api.get(path("overview"), columns=columns) == {
        "rabbitmq_version": "3.13.7",
        "cluster_name": api.get(path("cluster-name"))["name"],
        "queue_totals": {"messages": 0},
        "object_totals": {"queues": 0},
    }
