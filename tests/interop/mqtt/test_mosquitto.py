"""mosquitto_pub and mosquitto_sub in all protocol versions and QoS."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from tests.interop.server import Broker

WAIT_S = 30
VERSIONS = ("mqttv31", "mqttv311", "mqttv5")


@contextmanager
def subscriber(port: int, *arguments: str) -> Iterator[subprocess.Popen[str]]:
    """A running mosquitto_sub that has subscribed."""
    command = ["stdbuf", "-oL", "mosquitto_sub", "-d", "-p", str(port), "-W", str(WAIT_S), *arguments]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    try:
        assert process.stdout is not None
        for line in process.stdout:
            if "Subscribed" in line:
                break
        yield process
    finally:
        process.kill()
        process.wait()


def publish(port: int, *arguments: str) -> None:
    subprocess.run(["mosquitto_pub", "-p", str(port), *arguments], check=True, timeout=WAIT_S, capture_output=True)


@pytest.mark.spec("G1")
@pytest.mark.parametrize("version", VERSIONS)
def test_messages_of_every_qos_arrive(broker: Broker, version: str) -> None:
    port = broker.port("mqtt")
    topic = f"mosquitto/{version}"
    with subscriber(port, "-V", version, "-i", f"sub-{version}", "-q", "2", "-t", topic, "-C", "3") as process:
        for qos in "012":
            publish(port, "-V", version, "-i", f"pub-{version}", "-q", qos, "-t", topic, "-m", f"message {qos}")
        lines = process.communicate(timeout=WAIT_S)[0].splitlines()
    received = [line for line in lines if line.startswith("message")]
    assert received == ["message 0", "message 1", "message 2"]
    publishes = [line for line in lines if "received PUBLISH" in line]
    assert [f"q{qos}" in line for qos, line in enumerate(publishes)] == [True] * 3, publishes


@pytest.mark.spec("G1")
def test_a_wrong_password_is_refused(broker: Broker) -> None:
    command = ["mosquitto_pub", "-p", str(broker.port("mqtt")), "-u", "guest", "-P", "wrong", "-t", "a", "-m", "b"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=WAIT_S, check=False)
    assert done.returncode
    assert "Connection Refused: bad user name or password" in done.stderr + done.stdout
