"""Definitions: exported from one broker, imported into another, and imported from RabbitMQ, with passwords."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest
from tests.interop.server import Broker, running

from basaltmq.errors import RemoteError
from basaltmq.http_client import path

RABBIT = Path(__file__).parents[2] / "fixtures" / "rabbitmq_definitions.json"


def without_versions(found: dict[str, Any]) -> dict[str, Any]:
    return {kind: value for kind, value in found.items() if "version" not in kind}


def by_text(entries: list[Any]) -> list[bytes]:
    return sorted(msgspec.json.encode(each, order="sorted") for each in entries)


def test_definitions_of_rabbitmq_are_imported(broker: Broker) -> None:
    done = broker.call("POST", path("definitions"), RABBIT.read_bytes())
    assert done["imported"] == {
        "vhosts": 2,
        "users": 3,
        "permissions": 2,
        "topic_permissions": 1,
        "exchanges": 3,
        "queues": 4,
        "bindings": 4,
        "policies": 2,
        "operator_policies": 1,
    }
    assert len(done["skipped"]) == 1
    assert "federation-upstream" in done["skipped"][0]
    shop = broker.api("shop", "shop-password")
    assert shop.get(path("whoami"))["tags"] == ["management", "policymaker"]
    body = {"routing_key": "order.created", "payload": "an order"}
    assert shop.post(path("exchanges", "shop", "events", "publish"), body) == {"routed": True}
    orders = broker.call("GET", path("queues", "shop", "orders"))
    assert orders["messages"] == 1
    assert orders["arguments"]["x-dead-letter-exchange"] == "dead"
    assert orders["effective_policy_definition"] == {"max-length": 1000, "message-ttl": 60000}
    assert broker.call("GET", path("queues", "shop", "audit"))["type"] == "stream"
    shop = broker.api("shop", "shop-password")
    assert shop.get(path("whoami"))["name"] == "shop", "the hash made anew works as well"
    with pytest.raises(RemoteError):
        broker.api("no-password", "").get(path("whoami"))


def test_exported_definitions_reproduce_a_broker(broker: Broker, tmp_path: Path) -> None:
    broker.call("POST", path("definitions"), RABBIT.read_bytes())
    exported = broker.call("GET", path("definitions"))
    with running(tmp_path / "second") as second:
        done = second.call("POST", path("definitions"), exported)
        assert done["skipped"] == []
        again = second.call("GET", path("definitions"))
        assert exported.keys() == again.keys()
        for kind in without_versions(exported):
            if isinstance(exported[kind], list):
                assert by_text(again[kind]) == by_text(exported[kind]), kind
        shop = second.api("shop", "shop-password")
        assert shop.get(path("whoami"))["name"] == "shop"


def test_one_virtual_host_is_exported_and_imported_under_another_name(broker: Broker) -> None:
    broker.call("POST", path("definitions"), RABBIT.read_bytes())
    exported = broker.call("GET", path("definitions", "shop"))
    assert not any("vhost" in each for each in exported["queues"])
    assert "users" not in exported
    broker.call("PUT", path("vhosts", "copy"), {})
    assert broker.call("POST", path("definitions", "copy"), exported)["skipped"] == []
    ours = {each["name"] for each in broker.call("GET", path("queues", "copy"))}
    assert ours == {each["name"] for each in broker.call("GET", path("queues", "shop"))}
    with pytest.raises(RemoteError, match="whole broker"):
        broker.call("POST", path("definitions", "copy"), {"users": [{"name": "x"}]})


def test_unsupported_definitions_are_reported_and_the_rest_is_imported(broker: Broker) -> None:
    given = {
        "users": [{"name": "odd", "password_hash": "AAAA", "hashing_algorithm": "rabbit_password_hashing_md5"}],
        "permissions": [{"user": "guest", "vhost": "nowhere", "configure": "", "write": "", "read": ""}],
        "queues": [
            {"name": "bad", "vhost": "/", "arguments": {"x-max-length": "many"}},
            {"name": "good", "vhost": "/"},
            {"name": "lost", "vhost": "nowhere"},
            {"name": "homeless"},
        ],
        "bindings": [{"source": "nothing", "vhost": "/", "destination": "good"}],
    }
    done = broker.call("POST", path("definitions"), given)
    assert done["imported"] == {"queues": 1}
    reported = "\n".join(done["skipped"])
    for part in ("user 'odd'", "md5", "queue 'bad'", "x-max-length", "'nowhere'", "has no vhost", "'nothing'"):
        assert part in reported, part
    with pytest.raises(RemoteError, match="queues"):
        broker.call("POST", path("definitions"), {"queues": "none"})
