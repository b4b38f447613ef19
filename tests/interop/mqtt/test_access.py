"""Permissions to connect, publish and subscribe."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.interop.mqtt.device import V311, Device
from tests.interop.server import Broker, running

FILES = Path(__file__).parents[2] / "fixtures" / "tls"


@pytest.fixture(scope="module")
def guarded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Broker]:
    """A broker where everybody must log in, with a user whose topics begin with its client id."""
    with running(tmp_path_factory.mktemp("guarded") / "data", "--mqtt-access=users") as broker:
        broker.call("PUT", "/api/vhosts/plant", {})
        broker.call("PUT", "/api/users/dev", {"password": "secret", "tags": ""})
        for vhost in ("%2F", "plant"):
            broker.call("PUT", f"/api/permissions/{vhost}/dev", {"configure": "", "write": ".*", "read": ".*"})
        topics = {"exchange": "amq.topic", "write": "^{client_id}\\.", "read": "^({client_id}|all)\\."}
        broker.call("PUT", "/api/topic-permissions/%2F/dev", topics)
        yield broker


def device(broker: Broker, client_id: str, user: str | None = "dev", **options: object) -> Device:
    return Device(broker.port("mqtt"), client_id, user=user, password="secret", **options)  # type: ignore[arg-type]  # noqa: S106


@pytest.mark.spec("G1")
@pytest.mark.promise("P14")
def test_a_client_without_credentials_is_refused_unless_the_setting_allows_it(guarded: Broker) -> None:
    anonymous = device(guarded, "nobody", user=None)
    assert anonymous.connack[1].value == 0x87
    anonymous.drop()


@pytest.mark.spec("G1")
def test_topic_permissions_may_name_the_client_id(guarded: Broker) -> None:
    with device(guarded, "d1") as one:
        assert one.subscribe("d1/#", 1) == 1
        assert one.subscribe("all/+", 1) == 1
        assert one.subscribe("d2/#", 1) == 0x87
        assert one.publish("d1/x", b"mine") == 0
        assert one.publish("d2/x", b"not mine") == 0x87
        assert one.wait(1)[0].payload == b"mine"
        one.client.publish("d2/x", b"QoS 0 has no answer", 0)
        one.until(lambda: one.disconnect_code is not None)
        assert one.disconnect_code.value == 0x87
    refused = device(guarded, "d1", will={"topic": "d2/will", "payload": b"x"})
    assert refused.connack[1].value == 0x87
    refused.drop()


@pytest.mark.spec("G1")
def test_versions_before_5_0_are_closed_instead(guarded: Broker) -> None:
    with device(guarded, "d3", version=V311) as old:
        assert old.subscribe("other/#", 1) == 0x80
        old.client.publish("other/x", b"x", 1)
        old.until(lambda: old.disconnect_code is not None)


@pytest.mark.spec("G1")
def test_a_user_name_may_name_the_virtual_host(guarded: Broker) -> None:
    with device(guarded, "d4", user="plant:dev") as there, device(guarded, "d4") as here:
        assert there.disconnect_code is None, "sessions of virtual hosts are separate"
        there.subscribe("d4/#", 1)
        here.subscribe("d4/#", 1)
        here.publish("d4/a", b"here")
        there.publish("d4/a", b"there")
        here.wait(1)
        there.wait(1)
        assert (here.settle(), there.settle()) == ([b"here"], [b"there"])


@pytest.mark.spec("G1")
def test_a_client_certificate_identifies_its_user(tmp_path: Path) -> None:
    flags = [
        "--mqtts-enabled=true",
        "--mqtts-port=0",
        f"--tls-certificate={FILES / 'server.pem'}",
        f"--tls-key={FILES / 'server.key'}",
        f"--tls-authority={FILES / 'authority.pem'}",
        "--tls-clients=ask",
    ]
    with running(tmp_path / "data", *flags) as broker:
        broker.call("PUT", "/api/users/alice", {"password": "unused", "tags": ""})
        broker.call("PUT", "/api/permissions/%2F/alice", {"configure": ".*", "write": ".*", "read": ".*"})
        certificate = {"certfile": str(FILES / "client.pem"), "keyfile": str(FILES / "client.key")}
        with Device(
            broker.port("mqtts"), "secure", tls={"ca_certs": str(FILES / "authority.pem"), **certificate}
        ) as one:
            one.subscribe("secure", 1)
            one.publish("secure", b"x" * 200_000)
            assert len(one.wait(1)[0].payload) == 200_000
            users = {
                each["client_properties"]["client_id"]: each["user"] for each in broker.call("GET", "/api/connections")
            }
            assert users == {"secure": "alice"}
