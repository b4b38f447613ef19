"""Every gRPC method, called by a user without permission for the named object: refused, and nothing changes."""

from __future__ import annotations

import base64
from collections.abc import Iterator
from typing import Any

import grpc
import pytest
from fila.v1 import admin_pb2, service_pb2
from tests.interop.server import Broker, running

from basaltmq.http_client import path
from basaltmq.wire import basalt_pb2 as b
from basaltmq.wire import fila_wire_pb2 as f

QUEUES, SERVICE, ADMIN = "/basalt.v1.Queues/", "/fila.v1.FilaService/", "/fila.v1.FilaAdmin/"
ID = bytes(16)
ENQUEUE = b.EnqueueBatchRequest(queue="victim", messages=[b.Draft(payload=b"forged")])
REQUESTS: dict[str, Any] = {
    QUEUES + "CreateQueue": b.CreateQueueRequest(name="victim-2"),
    QUEUES + "EnqueueBatch": ENQUEUE,
    QUEUES + "Produce": b.ProduceRequest(number=1, batch=ENQUEUE),
    QUEUES + "Lease": b.LeaseRequest(queue="victim", max=1),
    QUEUES + "AckBatch": b.AckBatchRequest(queue="victim", token=1),
    QUEUES + "NackBatch": b.NackBatchRequest(queue="victim", token=1),
    QUEUES + "ReleaseBatch": b.ReleaseBatchRequest(queue="victim", token=1),
    QUEUES + "Extend": b.ExtendRequest(queue="victim", token=1, visibility_ms=1000),
    SERVICE + "Enqueue": f.EnqueueRequest(queue="victim", payload=b"forged"),
    SERVICE + "Consume": f.ConsumeRequest(queue="victim"),
    SERVICE + "Ack": f.AckRequest(queue="victim", message_id=ID.hex()),
    SERVICE + "Nack": f.NackRequest(queue="victim", message_id=ID.hex(), error="x"),
    ADMIN + "CreateQueue": f.CreateQueueRequest(name="victim-2"),
    ADMIN + "DeleteQueue": f.DeleteQueueRequest(queue="victim"),
    ADMIN + "SetConfig": f.SetConfigRequest(key="k", value="v"),
    ADMIN + "GetConfig": f.GetConfigRequest(key="k"),
    ADMIN + "ListConfig": f.ListConfigRequest(),
    ADMIN + "GetStats": f.GetStatsRequest(queue="victim"),
    ADMIN + "Redrive": f.RedriveRequest(dlq_queue="victim"),
    ADMIN + "CreateApiKey": f.CreateApiKeyRequest(name="mine"),
    ADMIN + "RevokeApiKey": f.RevokeApiKeyRequest(key_id="none"),
    ADMIN + "ListApiKeys": f.ListApiKeysRequest(),
    ADMIN + "SetAcl": f.SetAclRequest(key_id="none"),
    ADMIN + "GetAcl": f.GetAclRequest(key_id="none"),
}
OPEN = {QUEUES + "OpenSession", ADMIN + "ListQueues"}
"""OpenSession names no queue. ListQueues leaves out what the caller may not see; a test below covers it."""


def _methods() -> set[str]:
    """All methods of the services, by their definitions."""
    services = [b.DESCRIPTOR.services_by_name["Queues"], service_pb2.DESCRIPTOR.services_by_name["FilaService"]]
    services.append(admin_pb2.DESCRIPTOR.services_by_name["FilaAdmin"])
    return {f"/{service.full_name}/{method.name}" for service in services for method in service.methods}


@pytest.fixture(scope="module")
def broker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Broker]:
    with running(tmp_path_factory.mktemp("broker") / "data") as started:
        started.call("PUT", path("queues", "/", "victim"))
        publish = {"routing_key": "victim", "payload": "kept", "properties": {}, "payload_encoding": "string"}
        started.call("POST", path("exchanges", "/", "amq.default", "publish"), publish)
        for user, pattern in (("nobody", "^$"), ("mine", "^mine")):
            started.call("PUT", path("users", user), {"password": "password", "tags": ["management", "monitoring"]})
            rights = {"configure": pattern, "write": pattern, "read": pattern}
            started.call("PUT", path("permissions", "/", user), rights)
        yield started


class Caller:
    """Calls methods as one user."""

    def __init__(self, broker: Broker, user: str) -> None:
        self.channel = grpc.insecure_channel(f"127.0.0.1:{broker.port('fila')}")
        credentials = base64.b64encode(f"{user}:password".encode()).decode()
        self._login = (("authorization", f"Basic {credentials}"),)

    def __enter__(self) -> Caller:
        return self

    def __exit__(self, *_: object) -> None:
        self.channel.close()

    def answers(self, method: str, request: Any, answer: Any = None) -> list[Any]:
        """Call a method as a stream, which unary methods accept too."""
        read = bytes if answer is None else answer.FromString
        call = self.channel.stream_stream(method, type(request).SerializeToString, read)
        return list(call(iter([request]), metadata=self._login, timeout=30))

    def status(self, method: str, request: Any) -> str:
        try:
            found = self.answers(method, request)
        except grpc.RpcError as error:
            return str(error.code().name)
        return f"ok {found}"


def _state(broker: Broker) -> Any:
    shown = broker.call("GET", path("queues", "/", "victim"))
    names = sorted(each["name"] for each in broker.call("GET", "/api/queues"))
    return shown["messages_ready"], shown["messages_unacknowledged"], names


@pytest.mark.promise("P14")
@pytest.mark.parametrize("user", ["nobody", "mine"])
def test_no_method_serves_a_user_without_permission(broker: Broker, user: str) -> None:
    assert set(REQUESTS) | OPEN == _methods(), "a new method needs a row in this table"
    before = _state(broker)
    with Caller(broker, user) as caller:
        found = {method: caller.status(method, request) for method, request in REQUESTS.items()}
        listed = caller.answers(ADMIN + "ListQueues", f.ListQueuesRequest(), f.ListQueuesResponse)
    # It reports the error of a batch in its response.
    assert "access_refused" in found.pop(QUEUES + "Produce")
    assert set(found.values()) == {"PERMISSION_DENIED"}, found
    assert not [each.name for each in listed[0].queues]
    assert _state(broker) == before


@pytest.mark.promise("P14")
def test_a_dead_letter_queue_needs_permission_to_write_to_it(broker: Broker) -> None:
    before = _state(broker)[:2]
    with Caller(broker, "mine") as caller:

        def create(name: str, target: str) -> str:
            config = b.QueueConfig(dead_letter_queue=target, ttl_ms=1)
            return caller.status(QUEUES + "CreateQueue", b.CreateQueueRequest(name=name, config=config))

        assert create("mine-1", "victim") == "PERMISSION_DENIED"
        assert create("mine-1", "not-there") == "PERMISSION_DENIED"
        assert create("mine-1", "mine-dead").startswith("ok")
        assert create("mine-2", "mine-2.dlq").startswith("ok")
    names = _state(broker)[2]
    assert "not-there" not in names
    assert {"mine-1", "mine-dead", "mine-2", "mine-2.dlq"} <= set(names)
    assert _state(broker)[:2] == before


@pytest.mark.promise("P14")
def test_redrive_returns_no_message_to_a_queue_that_the_caller_may_not_administer(broker: Broker) -> None:
    before = _state(broker)[:2]
    forged = b.Draft(payload=b"forged", headers={"x-first-death-queue": "victim"})
    with Caller(broker, "mine") as caller:
        assert caller.status(ADMIN + "CreateQueue", f.CreateQueueRequest(name="mine-3")).startswith("ok")
        enqueue = b.EnqueueBatchRequest(queue="mine-3.dlq", messages=[forged])
        assert caller.status(QUEUES + "EnqueueBatch", enqueue).startswith("ok")
        assert caller.status(ADMIN + "Redrive", f.RedriveRequest(dlq_queue="mine-3.dlq")) == "PERMISSION_DENIED"
    assert _state(broker)[:2] == before
    assert broker.call("GET", path("queues", "/", "mine-3.dlq"))["messages"] == 1
