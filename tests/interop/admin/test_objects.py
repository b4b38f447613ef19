"""The admin API of a real broker: objects are created, shown, changed and deleted, and refusals give the reason."""

from __future__ import annotations

import base64
from typing import Any

import pytest
from tests.interop.server import Broker

from basaltmq.errors import RemoteError
from basaltmq.http_client import HttpClient, path


@pytest.fixture
def api(broker: Broker) -> HttpClient:
    return broker.api()


def refused(status: int, call: Any, *arguments: Any, **named: Any) -> str:
    with pytest.raises(RemoteError) as caught:
        call(*arguments, **named)
    assert caught.value.status == status, caught.value
    return str(caught.value)


def publish(api: HttpClient, queue: str, *payloads: str, **properties: Any) -> None:
    for payload in payloads:
        body = {"routing_key": queue, "payload": payload, "properties": {"delivery_mode": 2, **properties}}
        assert api.post(path("exchanges", "/", "amq.default", "publish"), body) == {"routed": True}


def get(api: HttpClient, queue: str, mode: str, count: int = 100) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = api.post(path("queues", "/", queue, "get"), {"count": count, "ackmode": mode})
    return found


def test_a_message_is_published_browsed_and_removed(api: HttpClient) -> None:
    api.put(path("queues", "/", "taken"), {"durable": True})
    publish(api, "taken", "one", "two", headers={"n": 1, "deep": {"list": [1, "a", None]}}, expiration="600000")
    for _ in range(2):
        looked = get(api, "taken", "peek")
        assert [each["payload"] for each in looked] == ["one", "two"]
        assert not any(each["redelivered"] for each in looked), "looking changes nothing"
    assert looked[0]["properties"]["headers"] == {"n": 1, "deep": {"list": [1, "a", None]}}
    assert looked[0]["properties"]["delivery_mode"] == 2
    assert [each["payload"] for each in get(api, "taken", "reject_requeue_true")] == ["one", "two"]
    again = get(api, "taken", "ack_requeue_false", 1)
    assert (again[0]["payload"], again[0]["redelivered"], again[0]["message_count"]) == ("one", True, 1)
    assert [each["payload"] for each in get(api, "taken", "ack_requeue_false")] == ["two"]
    assert get(api, "taken", "ack_requeue_false") == []
    shown = api.get(path("queues", "/", "taken"))
    assert (shown["messages"], shown["message_stats"]["publish"]) == (0, 2)


def test_binary_payloads_are_base64(api: HttpClient) -> None:
    api.put(path("queues", "/", "raw"))
    raw = base64.b64encode(bytes(range(256))).decode()
    body = {"routing_key": "raw", "payload": raw, "payload_encoding": "base64"}
    assert api.post(path("exchanges", "/", "amq.default", "publish"), body) == {"routed": True}
    found = get(api, "raw", "ack_requeue_false")[0]
    assert (found["payload"], found["payload_encoding"], found["payload_bytes"]) == (raw, "base64", 256)


def test_unroutable_messages_are_reported_and_invalid_ones_refused(api: HttpClient) -> None:
    where = path("exchanges", "/", "amq.fanout", "publish")
    assert api.post(where, {"routing_key": "", "payload": "x"}) == {"routed": False}
    assert "unknown property" in refused(
        400, api.post, where, {"routing_key": "", "payload": "", "properties": {"x": 1}}
    )
    assert "base64" in refused(400, api.post, where, {"routing_key": "", "payload": "%", "payload_encoding": "base64"})
    assert "payload" in refused(400, api.post, where, {"routing_key": ""})
    assert "user_id" in refused(
        400, api.post, where, {"routing_key": "", "payload": "", "properties": {"user_id": "root"}}
    )
    assert "exchange" in refused(
        404, api.post, path("exchanges", "/", "none", "publish"), {"routing_key": "", "payload": ""}
    )


def test_messages_move_between_queues_and_are_purged(api: HttpClient) -> None:
    for name in ("from", "to"):
        api.put(path("queues", "/", name))
    publish(api, "from", *map(str, range(5)))
    assert api.post(path("queues", "/", "from", "move"), {"destination": "to", "count": 3}) == {"moved": 3}
    assert api.post(path("queues", "/", "from", "move"), {"destination": "to"}) == {"moved": 2}
    assert [each["payload"] for each in get(api, "to", "ack_requeue_true")] == list("01234")
    assert "another queue" in refused(400, api.post, path("queues", "/", "to", "move"), {"destination": "to"})
    assert refused(404, api.post, path("queues", "/", "to", "move"), {"destination": "nowhere"})
    api.delete(path("queues", "/", "to", "contents"))
    assert api.get(path("queues", "/", "to"))["messages"] == 0


@pytest.mark.promise("P8")
def test_browsing_and_removing_large_messages_uses_bounded_memory(api: HttpClient) -> None:
    for name in ("large", "larger"):
        api.put(path("queues", "/", name))
    publish(api, "large", *(str(number) * (3 << 20) for number in range(8)))
    looked = get(api, "large", "peek")
    assert [each["payload"][0] for each in looked] == list("012345"), "an answer ends at 16 MiB"
    assert looked[0]["message_count"] == 7
    assert api.post(path("queues", "/", "large", "move"), {"destination": "larger"}) == {"moved": 8}
    cut = api.post(path("queues", "/", "larger", "get"), {"count": 2, "truncate": 5})
    assert [(each["payload"], each["payload_bytes"]) for each in cut] == [("00000", 3 << 20), ("11111", 3 << 20)]
    taken = [each["payload"][0] for _ in range(3) for each in get(api, "larger", "ack_requeue_false")]
    assert taken == list("01234567")


def test_queues_are_declared_once_and_deleted(api: HttpClient) -> None:
    where = path("queues", "/", "one/with slash")
    api.put(where, {"arguments": {"x-message-ttl": 60000}})
    api.put(where, {"arguments": {"x-message-ttl": 60000}})
    assert "x-message-ttl" in refused(400, api.put, where, {"arguments": {"x-message-ttl": 1}})
    assert "x-max-length" in refused(400, api.put, path("queues", "/", "q"), {"arguments": {"x-max-length": -1}})
    assert api.get(where)["arguments"] == {"x-message-ttl": 60000}
    publish(api, "one/with slash", "x")
    assert "not empty" in refused(400, api.delete, where, **{"if-empty": "true"})
    api.delete(where)
    assert refused(404, api.get, where)
    assert refused(404, api.delete, where)


def test_exchanges_and_bindings_route_messages(api: HttpClient) -> None:
    api.put(path("exchanges", "/", "news"), {"type": "topic", "arguments": {"alternate-exchange": "amq.fanout"}})
    api.put(path("queues", "/", "sport"))
    between = path("bindings", "/", "e", "news", "q", "sport")
    api.post(between, {"routing_key": "sport.#"})
    api.post(between, {"routing_key": "sport.#"})
    api.post(between, {"routing_key": "a/b%c", "arguments": {"x": 1}})
    api.post(between, {"routing_key": "a/b%c", "arguments": {"x": 2}})
    api.post(between)
    keys = {each["properties_key"]: each for each in api.get(between)}
    assert sorted(each["routing_key"] for each in keys.values()) == ["", "a/b%c", "a/b%c", "sport.#"]
    body = {"routing_key": "sport.chess", "payload": "move"}
    assert api.post(path("exchanges", "/", "news", "publish"), body) == {"routed": True}
    for key, shown in keys.items():
        assert api.get(path("bindings", "/", "e", "news", "q", "sport", key)) == shown
        api.delete(path("bindings", "/", "e", "news", "q", "sport", key))
        assert shown not in api.get(between)
    assert api.get(between) == []
    assert refused(404, api.delete, path("bindings", "/", "e", "news", "q", "sport", "~"))
    assert "q" in refused(400, api.get, path("bindings", "/", "e", "news", "z", "sport"))
    assert "direct, fanout" in refused(400, api.put, path("exchanges", "/", "x"), {"type": "odd"})
    assert refused(403, api.delete, path("exchanges", "/", "amq.direct"))
    api.delete(path("exchanges", "/", "news"))
    assert refused(404, api.get, path("exchanges", "/", "news"))


def test_policies_apply_to_queues_with_matching_names(api: HttpClient) -> None:
    api.put(path("queues", "/", "tmp.one"))
    where = path("policies", "/", "short")
    api.put(where, {"pattern": "^tmp[.]", "definition": {"max-length": 2}, "apply-to": "queues", "priority": 3})
    assert api.get(where)["apply-to"] == "queues"
    shown = api.get(path("queues", "/", "tmp.one"))
    assert (shown["policy"], shown["effective_policy_definition"]) == ("short", {"max-length": 2})
    publish(api, "tmp.one", "1", "2", "3")
    assert [each["payload"] for each in get(api, "tmp.one", "ack_requeue_true")] == ["2", "3"]
    api.put(
        path("operator-policies", "/", "cap"), {"pattern": ".*", "definition": {"max-length": 1}, "apply-to": "queues"}
    )
    assert api.get(path("queues", "/", "tmp.one"))["effective_policy_definition"] == {"max-length": 1}
    api.delete(path("operator-policies", "/", "cap"))
    api.delete(where)
    assert api.get(path("queues", "/", "tmp.one"))["policy"] is None
    assert "regular expression" in refused(400, api.put, where, {"pattern": "(", "definition": {"max-length": 2}})
    assert "unknown key" in refused(400, api.put, where, {"pattern": "", "definition": {"no-such": 2}})
    mistyped = refused(400, api.put, where, {"pattern": "", "definition": {"max-lenth": 2}})
    assert "did you mean 'max-length'?" in mistyped


def test_lists_are_complete_or_paged(api: HttpClient) -> None:
    for number in range(7):
        api.put(path("queues", "/", f"paged-{number}"))
    publish(api, "paged-3", "x")
    page = api.get(path("queues", "/"), page=2, page_size=3, name="paged-", sort_reverse="true", columns="name,vhost")
    assert page["items"] == [{"name": f"paged-{number}", "vhost": "/"} for number in (3, 2, 1)]
    assert (page["page_count"], page["filtered_count"], page["item_count"]) == (3, 7, 3)
    assert page["total_count"] >= 7
    by_size = api.get(path("queues", "/"), name="paged-", sort="messages", sort_reverse="true", columns="name,messages")
    assert by_size[0] == {"name": "paged-3", "messages": 1}
    assert "last is 3" in refused(400, api.get, path("queues", "/"), page=9, page_size=3, name="paged-")
    assert "page_size" in refused(400, api.get, path("queues", "/"), page=1, page_size=100000)
    assert "part of the name" in refused(400, api.get, path("queues"), name="(a+)+$", use_regex="true")


def test_virtual_hosts_are_created_restarted_and_deleted(api: HttpClient) -> None:
    api.put(path("vhosts", "other/one"), {"description": "for tests"})
    api.put(path("vhosts", "other/one"))
    shown = api.get(path("vhosts", "other/one"))
    assert (shown["state"], shown["description"]) == ("running", "for tests")
    api.put(path("queues", "other/one", "kept"), {"durable": True})
    api.put(path("queues", "other/one", "passing"), {"durable": False})
    api.post(path("vhosts", "other/one", "restart"))
    assert [each["name"] for each in api.get(path("queues", "other/one"))] == ["kept"]
    assert {each["name"] for each in api.get(path("vhosts"))} == {"/", "other/one"}
    api.delete(path("vhosts", "other/one"))
    assert refused(404, api.get, path("vhosts", "other/one"))


@pytest.mark.spec("A10")
def test_the_store_of_a_running_virtual_host_is_managed(broker: Broker, api: HttpClient) -> None:
    api.put(path("queues", "/", "stored"))
    publish(api, "stored", "x" * 1000)
    api.put(path("queues", "/", "streamed"), {"arguments": {"x-queue-type": "stream"}})
    publish(api, "streamed", "kept in a log")
    store = path("vhosts", "/", "store")
    assert api.post(store + "/flush") is None
    assert api.post(store + "/compact")["bytes_after"] >= 0
    found = api.get(store)
    assert found["families"]["queues"]["estimated-rows"] >= 1
    assert found["total"]["estimated-rows"] >= found["families"]["queues"]["estimated-rows"]
    assert list(api.get(store, family="queues")["families"]) == ["queues"]
    api.put(store + "/options", {"options": {"disable_auto_compactions": "true"}})
    assert api.post(store + "/verify") == {"faults": []}
    target = broker.data_dir / "backups" / "first"
    assert api.post(store + "/checkpoint", {"target": "first"}) == {"target": str(target)}
    assert (target / "CHECKSUMS").exists()
    assert (target / "log").is_dir()
    assert refused(409, api.post, store + "/checkpoint", {"target": str(target)})
    outside = broker.data_dir.with_name("elsewhere")
    for elsewhere in (str(outside), "../elsewhere", "first/../../../elsewhere"):
        assert "admin.backup_dir" in refused(403, api.post, store + "/checkpoint", {"target": elsewhere})
    (broker.data_dir / "backups" / "link").symlink_to(outside.parent)
    assert "admin.backup_dir" in refused(403, api.post, store + "/checkpoint", {"target": "link/elsewhere"})
    assert not outside.exists()
    assert "nofamily" in refused(400, api.get, store, family="nofamily")
    assert "no_such_option" in refused(400, api.put, store + "/options", {"options": {"no_such_option": "1"}})
