"""Limits of virtual hosts and users: set through the API and rabbitmqadmin's requests, and their effect on clients."""

from __future__ import annotations

import signal
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from typing import Any

import pika
import pytest
from pika.exceptions import ChannelClosedByBroker, ConnectionClosedByBroker, ProbableAccessDeniedError
from tests.interop.mqtt.device import Device
from tests.interop.mqtt.raw import Raw
from tests.interop.server import Broker, running

from basaltmq.errors import RemoteError
from basaltmq.http_client import HttpClient, path
from basaltmq.protocols.mqtt.wire import packets as p
from basaltmq.protocols.mqtt.wire import reason_codes as rc


@pytest.fixture(scope="module")
def broker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Broker]:
    with running(tmp_path_factory.mktemp("broker") / "data") as started:
        started.api().put(path("vhosts", "small"))
        yield started


@pytest.fixture
def api(broker: Broker) -> Iterator[HttpClient]:
    client = broker.api()
    yield client
    for owner, name in (("vhost", "small"), ("user", "guest")):
        for limit in ("max-connections", "max-queues", "max-channels"):
            with suppress(RemoteError):
                client.delete(path(f"{owner}-limits", name, limit))


def connect(broker: Broker, vhost: str = "small") -> Any:
    return pika.BlockingConnection(pika.ConnectionParameters("127.0.0.1", broker.port("amqp"), vhost))


def refusal(broker: Broker, vhost: str = "small") -> str:
    with pytest.raises(ProbableAccessDeniedError) as caught:
        connect(broker, vhost)
    return str(caught.value)


def test_limits_are_set_listed_and_removed(api: HttpClient) -> None:
    assert api.get("/api/vhost-limits") == []
    api.put(path("vhost-limits", "small", "max-queues"), {"value": 5})
    api.put(path("vhost-limits", "small", "max-connections"), {"value": 7})
    api.put(path("user-limits", "guest", "max-channels"), {"value": 9})
    shown = [{"vhost": "small", "value": {"max-queues": 5, "max-connections": 7}}]
    assert api.get("/api/vhost-limits") == shown
    assert api.get(path("vhost-limits", "small")) == shown
    assert api.get(path("vhost-limits", "/")) == []
    assert api.get("/api/user-limits") == [{"user": "guest", "value": {"max-channels": 9}}]
    assert [each["component"] for each in api.get("/api/parameters")] == ["vhost-limits"]
    exported = api.get("/api/definitions")
    api.put(path("vhost-limits", "small", "max-queues"), {"value": -1})
    api.delete(path("vhost-limits", "small", "max-connections"))
    assert api.get("/api/vhost-limits") == []
    assert api.post("/api/definitions", exported)["imported"]["vhost_limits"] == 1
    assert api.get("/api/vhost-limits") == shown


@pytest.mark.parametrize(
    ("where", "body", "says"),
    [
        (("vhost-limits", "small", "max-foo"), {"value": 1}, "unknown limit"),
        (("vhost-limits", "small", "max-channels"), {"value": 1}, "unknown limit"),
        (("vhost-limits", "small", "max-queues"), {"value": "x"}, "value"),
        (("vhost-limits", "small", "max-queues"), {"value": 1 << 40}, "at most"),
        (("vhost-limits", "none", "max-queues"), {"value": 1}, "none"),
        (("user-limits", "none", "max-channels"), {"value": 1}, "none"),
    ],
)
def test_invalid_limits_are_refused(api: HttpClient, where: tuple[str, ...], body: Any, says: str) -> None:
    with pytest.raises(RemoteError, match=says):
        api.put(path(*where), body)


def test_the_queue_limit_counts_queues_of_all_protocols(broker: Broker, api: HttpClient) -> None:
    connection = connect(broker)
    channel = connection.channel()
    channel.queue_declare("first")
    api.put(path("vhost-limits", "small", "max-queues"), {"value": 1})
    channel.queue_declare("first")
    with pytest.raises(ChannelClosedByBroker, match=r"queue limit in vhost 'small' \(1\) is reached") as caught:
        channel.queue_declare("second")
    assert caught.value.reply_code == 406
    with pytest.raises(RemoteError, match="queue limit"):
        api.put(path("queues", "small", "second"))
    api.put(path("vhost-limits", "small", "max-queues"), {"value": 2})
    channel = connection.channel()
    channel.queue_declare("second")
    for name in ("first", "second"):
        channel.queue_delete(name)
    connection.close()


@pytest.mark.parametrize(("owner", "name"), [("vhost", "small"), ("user", "guest")])
def test_connections_beyond_the_limit_are_refused(broker: Broker, api: HttpClient, owner: str, name: str) -> None:
    api.put(path(f"{owner}-limits", name, "max-connections"), {"value": 2})
    with Device(broker.port("mqtt"), "counted", user="small:guest", password="guest"):  # noqa: S106
        first = connect(broker)
        text = refusal(broker)
        assert "(530)" in text
        assert f"connection limit of {owner} '{name}' (2) is reached" in text
        first.close()
        second = connect(broker)
    third = connect(broker)
    third.close()
    second.close()


def test_mqtt_clients_that_connect_at_once_do_not_exceed_the_limit(broker: Broker, api: HttpClient) -> None:
    api.put(path("vhost-limits", "small", "max-connections"), {"value": 60})
    with ExitStack() as stack:
        clients = [stack.enter_context(Raw(broker.port("mqtt"))) for _ in range(400)]
        broker.signal(signal.SIGSTOP)
        for number, client in enumerate(clients):
            client.send(p.Connect(f"c{number}", username="small:guest", password=b"guest"))
        broker.signal(signal.SIGCONT)
        codes = [client.expect(p.CONNACK).reason_code for client in clients]
    assert Counter(codes) == {rc.SUCCESS: 60, rc.QUOTA_EXCEEDED: 340}


def test_limits_survive_a_restart_of_the_broker(tmp_path: Any) -> None:
    with running(tmp_path / "data") as broker:
        broker.api().put(path("vhost-limits", "/", "max-connections"), {"value": 0})
        broker.api().put(path("vhost-limits", "/", "max-queues"), {"value": 0})
        broker.kill()
        broker.start()
        assert "(530)" in refusal(broker, "/")
        with pytest.raises(RemoteError, match="queue limit"):
            broker.api().put(path("queues", "/", "q"))


def test_channels_beyond_the_limit_of_a_user_close_the_connection(broker: Broker, api: HttpClient) -> None:
    api.put(path("user-limits", "guest", "max-channels"), {"value": 3})
    first, second = connect(broker), connect(broker)
    for connection in (first, first, second):
        connection.channel()
    with pytest.raises(ConnectionClosedByBroker) as caught:
        second.channel()
    assert caught.value.reply_code == 530
    assert first.is_open
    first.channel()
    first.close()
