"""Enhanced authentication: SCRAM over AUTH packets, computed here as a client does."""

from __future__ import annotations

import base64
import hashlib
import hmac
from collections.abc import Iterator

import pytest
from tests.interop.mqtt.raw import Answer, Raw
from tests.interop.server import Broker, running

from basaltmq.protocols.mqtt.wire import packets as p
from basaltmq.protocols.mqtt.wire.properties import Properties

METHOD = "SCRAM-SHA-256"
HASHES = {METHOD: "sha256", "SCRAM-SHA-512": "sha512"}


@pytest.fixture(scope="module")
def guarded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Broker]:
    """A broker with two users that have SCRAM credentials."""
    with running(tmp_path_factory.mktemp("scram") / "data", "--mqtt-access=users") as broker:
        broker.call("PUT", "/api/vhosts/plant", {})
        for name in ("dev", "other"):
            broker.call("PUT", f"/api/users/{name}", {"password": "unused", "tags": ""})
            for vhost in ("%2F", "plant"):
                every = {"configure": ".*", "write": ".*", "read": ".*"}
                broker.call("PUT", f"/api/permissions/{vhost}/{name}", every)
            for method in HASHES:
                broker.call("PUT", f"/api/users/{name}/scram/{method}", {"password": "pencil"})
        yield broker


class Client:
    """The client's side of SCRAM."""

    def __init__(self, name: str = "dev", password: str = "pencil", method: str = METHOD) -> None:  # noqa: S107
        self.method = method
        self._password = password
        self._first = f"n={name},r=nonce"
        self._signature = b""

    def first(self) -> Properties:
        return self.properties(f"n,,{self._first}".encode())

    def properties(self, data: bytes | None) -> Properties:
        return Properties(authentication_method=self.method, authentication_data=data)

    def final(self, answer: Answer) -> Properties:
        assert answer.kind == p.AUTH
        assert answer.reason_code == 0x18
        assert answer.properties.authentication_method == self.method
        raw = answer.properties.authentication_data
        assert raw is not None
        fields = dict(part.split("=", 1) for part in raw.decode().split(","))
        kind = HASHES[self.method]
        salted = hashlib.pbkdf2_hmac(kind, self._password.encode(), base64.b64decode(fields["s"]), int(fields["i"]))
        without_proof = f"c=biws,r={fields['r']}"
        signed = f"{self._first},{raw.decode()},{without_proof}".encode()
        key = hmac.digest(salted, b"Client Key", kind)
        proof = bytes(
            one ^ two for one, two in zip(key, hmac.digest(hashlib.new(kind, key).digest(), signed, kind), strict=True)
        )
        self._signature = hmac.digest(hmac.digest(salted, b"Server Key", kind), signed, kind)
        return self.properties(f"{without_proof},p={base64.b64encode(proof).decode()}".encode())

    def check(self, answer: Answer) -> None:
        """The server has proved that it knows the credential."""
        assert answer.properties.authentication_method == self.method
        assert answer.properties.authentication_data == b"v=" + base64.b64encode(self._signature)


def log_in(raw: Raw, client: Client, client_id: str = "scram") -> Answer:
    raw.send(p.Connect(client_id, properties=client.first()))
    raw.send(p.Auth(0x18, client.final(raw.expect(p.AUTH))))
    return raw.expect(p.CONNACK)


def log_in_again(raw: Raw, client: Client) -> Answer | None:
    raw.send(p.Auth(0x19, client.first()))
    raw.send(p.Auth(0x18, client.final(raw.expect(p.AUTH))))
    return raw.read()


@pytest.mark.spec("G1")
@pytest.mark.mqtt("MQTT-4.12.0-2", "MQTT-4.12.0-3", "MQTT-4.12.0-5", "MQTT-4.12.1-1", "MQTT-3.15.2-1")
@pytest.mark.parametrize("method", HASHES)
def test_a_client_logs_in_and_authenticates_again(guarded: Broker, method: str) -> None:
    with Raw(guarded.port("mqtt")) as raw:
        client = Client(method=method)
        answer = log_in(raw, client)
        assert answer.reason_code == 0
        client.check(answer)
        raw.send(p.Subscribe(1, (p.Subscription("scram", 1),)))
        raw.expect(p.SUBACK)
        client = Client(method=method)
        raw.send(p.Auth(0x19, client.first()))
        final = client.final(raw.expect(p.AUTH))
        raw.send(p.Publish("scram", b"between", 0))
        assert raw.expect(p.PUBLISH).publish()[2] == b"between", "the connection works meanwhile"
        raw.send(p.Auth(0x18, final))
        done = raw.expect(p.AUTH)
        assert done.reason_code == 0
        client.check(done)
        users = {each["user"] for each in guarded.call("GET", "/api/connections")}
        assert users == {"dev"}


@pytest.mark.spec("G1")
def test_the_first_message_may_follow_connect_and_name_the_virtual_host(guarded: Broker) -> None:
    with Raw(guarded.port("mqtt")) as raw:
        client = Client("plant:dev")
        raw.send(p.Connect("later", properties=client.properties(None)))
        asked = raw.expect(p.AUTH)
        assert (asked.reason_code, asked.properties.authentication_data) == (0x18, None)
        raw.send(p.Auth(0x18, client.first()))
        raw.send(p.Auth(0x18, client.final(raw.expect(p.AUTH))))
        assert raw.expect(p.CONNACK).reason_code == 0
        assert guarded.call("GET", "/api/mqtt/sessions/plant/later")["user"] == "dev"


@pytest.mark.spec("G1")
@pytest.mark.mqtt("MQTT-4.12.0-4")
@pytest.mark.parametrize("client", [Client(password="wrong"), Client("nobody"), Client("guest")])  # noqa: S106
def test_a_wrong_proof_is_refused(guarded: Broker, client: Client) -> None:
    with Raw(guarded.port("mqtt")) as raw:
        assert log_in(raw, client).reason_code == 0x87
        assert raw.read() is None


@pytest.mark.spec("G1")
@pytest.mark.mqtt("MQTT-4.12.1-2")
@pytest.mark.parametrize("client", [Client(password="wrong"), Client("other")])  # noqa: S106
def test_a_failed_second_authentication_ends_the_connection(guarded: Broker, client: Client) -> None:
    with Raw(guarded.port("mqtt")) as raw:
        assert log_in(raw, Client()).reason_code == 0
        answer = log_in_again(raw, client)
        assert answer is not None
        assert (answer.kind, answer.reason_code) == (p.DISCONNECT, 0x87)
        assert raw.read() is None


@pytest.mark.spec("G1")
@pytest.mark.mqtt("MQTT-3.1.2-30", "MQTT-4.12.0-7")
def test_unexpected_auth_packets_are_refused(guarded: Broker) -> None:
    port = guarded.port("mqtt")
    wrong: list[p.Packet] = [
        p.Publish("scram", b""),
        p.Auth(0x19, Client().first()),
        p.Auth(0x18, Client(method="SCRAM-SHA-512").first()),
    ]
    for packet in wrong:
        with Raw(port) as raw:
            raw.send(p.Connect("early", properties=Client().first()))
            raw.expect(p.AUTH)
            raw.send(packet)
            assert raw.expect(p.CONNACK).reason_code == 0x82, packet
            assert raw.read() is None
    with Raw(port) as raw:
        raw.send(p.Connect("ends", properties=Client().first()))
        raw.expect(p.AUTH)
        raw.send(p.Disconnect())
        assert raw.read() is None
    for packet in (p.Auth(0x18, Client().first()), p.Auth(0x19, Client(method="SCRAM-SHA-512").first())):
        with Raw(port) as raw:
            assert log_in(raw, Client()).reason_code == 0
            raw.send(packet)
            assert raw.expect(p.DISCONNECT).reason_code == 0x82, packet


@pytest.mark.spec("G1")
@pytest.mark.mqtt("MQTT-4.12.0-6")
def test_a_password_login_has_no_authentication_method(guarded: Broker) -> None:
    with Raw(guarded.port("mqtt")) as raw:
        answer = raw.connect("plain", username="dev", password=b"unused")
        assert answer.properties.authentication_method is None
        raw.send(p.Auth(0x19, Client().first()))
        assert raw.expect(p.DISCONNECT).reason_code == 0x82


@pytest.mark.spec("G1")
def test_a_credential_ends_with_the_password_and_can_be_removed(guarded: Broker) -> None:
    port = guarded.port("mqtt")
    guarded.call("PUT", "/api/users/brief", {"password": "one", "tags": ""})
    guarded.call("PUT", "/api/permissions/%2F/brief", {"configure": "", "write": "", "read": ""})
    changes: list[tuple[str, str, dict[str, str] | None]] = [
        ("PUT", "/api/users/brief", {"password": "two", "tags": ""}),
        ("DELETE", f"/api/users/brief/scram/{METHOD}", None),
    ]
    for method, path, body in changes:
        guarded.call("PUT", f"/api/users/brief/scram/{METHOD}", {"password": "pencil"})
        with Raw(port) as raw:
            assert log_in(raw, Client("brief"), "brief").reason_code == 0
        guarded.call(method, path, body)
        with Raw(port) as raw:
            assert log_in(raw, Client("brief"), "brief").reason_code == 0x87
