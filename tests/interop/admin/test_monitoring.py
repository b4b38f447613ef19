"""Monitoring: health checks, metrics, documentation, and the overview."""

from __future__ import annotations

import http.client
import re
import time
from collections.abc import Callable

import msgspec
from tests.interop.server import POLL_S, Broker

from basaltmq.http_client import path

SAMPLE = re.compile(r'^([a-z_]+)(\{(?:[a-z_]+="(?:[^"\\\n]|\\.)*",?)*\})? (-?[0-9.e+-]+)$')
GUEST = "Basic Z3Vlc3Q6Z3Vlc3Q="


def fetch(broker: Broker, target: str, authorization: str | None = None) -> tuple[int, str, str]:
    connection = http.client.HTTPConnection("127.0.0.1", broker.port("admin"), timeout=30)
    headers = {} if authorization is None else {"Authorization": authorization}
    connection.request("GET", target, headers=headers)
    response = connection.getresponse()
    answer = (response.status, response.getheader("Content-Type") or "", response.read().decode())
    connection.close()
    return answer


def metrics(broker: Broker, target: str, authorization: str | None = None) -> dict[str, float]:
    status, kind, text = fetch(broker, target, authorization)
    assert (status, kind) == (200, "text/plain; version=0.0.4; charset=utf-8")
    found: dict[str, float] = {}
    typed: set[str] = set()
    for line in text.splitlines():
        if line.startswith("# TYPE"):
            name = line.split(" ")[2]
            assert name not in typed, f"{name} is there twice"
            typed.add(name)
        elif not line.startswith("#"):
            sample = SAMPLE.match(line)
            assert sample, line
            assert sample[1] in typed
            key = sample[1] + (sample[2] or "")
            assert key not in found, key
            found[key] = float(sample[3])
    return found


def eventually(is_so: Callable[[], bool]) -> None:
    until = time.monotonic() + 30
    while not is_so():
        assert time.monotonic() < until
        time.sleep(POLL_S)


def test_health_checks_pass_and_name_what_fails(broker: Broker) -> None:
    assert fetch(broker, "/healthz")[0] == 200
    checks = path("health", "checks")
    for check in ("alarms", "local-alarms", "virtual-hosts", f"port-listener/{broker.port('amqp')}",
                  "protocol-listener/amqp", "certificate-expiration/1/months", "node-is-quorum-critical"):  # fmt: skip
        assert broker.call("GET", f"{checks}/{check}")["status"] == "ok", check
    assert broker.call("GET", path("aliveness-test", "/")) == {"status": "ok"}
    for check, said in (("port-listener/1", "port 1"), ("protocol-listener/amqps", "does not listen for amqps")):
        with_reason = fetch_as_guest(broker, f"{checks}/{check}")
        assert with_reason[0] == 503
        assert said in with_reason[1]


def fetch_as_guest(broker: Broker, target: str) -> tuple[int, str]:
    connection = http.client.HTTPConnection("127.0.0.1", broker.port("admin"), timeout=30)
    connection.request("GET", target, headers={"Authorization": "Basic Z3Vlc3Q6Z3Vlc3Q="})
    response = connection.getresponse()
    answer = (response.status, response.read().decode())
    connection.close()
    return answer


def test_metrics_are_per_virtual_host_and_per_object_on_request(broker: Broker) -> None:
    broker.call("PUT", path("vhosts", 'odd"\\\n'), {})
    broker.call("PUT", path("queues", 'odd"\\\n', "q"), {})
    for _ in range(3):
        body = {"routing_key": "q", "payload": "x" * 10, "properties": {"delivery_mode": 2}}
        broker.call("POST", path("exchanges", 'odd"\\\n', "amq.default", "publish"), body)
    broker.call("POST", path("queues", 'odd"\\\n', "q", "get"), {"ackmode": "ack_requeue_false"})
    labels = r'{vhost="odd\"\\\n"}'
    found = metrics(broker, "/metrics")
    assert found["basalt_messages_published_total" + labels] == 3
    assert found["basalt_queue_messages_ready" + labels] == 2
    assert found["basalt_messages_delivered_total" + labels] == 1
    assert found["basalt_messages_acked_total" + labels] == 1
    assert found["basalt_queues" + labels] == 1
    assert found["basalt_vhost_up" + labels] == 1
    assert found["process_resident_memory_bytes"] > 1 << 20
    assert found["basalt_publishers_blocked"] == 0
    assert not any("queue=" in key for key in found)
    broker.call("DELETE", path("queues", 'odd"\\\n', "q"))
    broker.call("PUT", path("queues", 'odd"\\\n', "q"), {})
    eventually(lambda: metrics(broker, "/metrics")["basalt_queue_messages_ready" + labels] == 0)
    found = metrics(broker, "/metrics")
    assert found["basalt_messages_published_total" + labels] == 3, "a counter never falls"
    assert found["basalt_messages_acked_total" + labels] == 1
    assert fetch(broker, "/metrics/per-object")[0] == 401, "names of queues are not for everybody"
    each = metrics(broker, "/metrics/per-object", GUEST)
    assert each[r'basalt_detailed_queue_messages_ready{vhost="odd\"\\\n",queue="q"}'] == 0
    assert each["basalt_objects_left_out"] == 0
    broker.call("DELETE", path("vhosts", 'odd"\\\n'))


def test_the_documentation_covers_every_route_without_external_resources(broker: Broker) -> None:
    status, kind, text = fetch(broker, "/api/openapi.json")
    assert (status, kind) == (200, "application/json")
    document = msgspec.json.decode(text)
    assert document["openapi"].startswith("3.1")
    operations = [(path_, method) for path_, methods in document["paths"].items() for method in methods]
    assert len(operations) > 80
    identifiers = [document["paths"][path_][method]["operationId"] for path_, method in operations]
    assert len(set(identifiers)) == len(identifiers)
    for reference in re.findall(r'"\$ref":"#/components/schemas/(\w+)"', text):
        assert reference in document["components"]["schemas"]
    status, kind, page = fetch(broker, "/api/docs")
    assert (status, kind) == (200, "text/html; charset=utf-8")
    for path_, _ in operations:
        assert path_.replace("&", "&amp;") in page, path_
    assert "<script" not in page
    assert not re.search(r'(src|href)="?https?:', page)
    assert fetch(broker, "/")[0] == 302


def test_the_overview_has_the_fields_that_tools_of_rabbitmq_use(broker: Broker) -> None:
    overview = broker.call("GET", path("overview"))
    for field in ("rabbitmq_version", "management_version", "node", "queue_totals", "object_totals", "exchange_types"):
        assert field in overview
    ports = {each["protocol"]: each["port"] for each in overview["listeners"]}
    assert ports == broker.ports
    node = broker.call("GET", path("nodes", overview["node"]))
    assert node["mem_used"] > 0
    assert node["disk_free"] > 0
    assert not node["mem_alarm"]
