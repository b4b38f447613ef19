"""paho-mqtt over WebSocket."""

from __future__ import annotations

import paho.mqtt.client as paho
import pytest
from tests.interop.mqtt.device import Device
from tests.interop.server import Broker


@pytest.mark.spec("G1")
def test_a_client_over_websocket_exchanges_messages_with_one_over_tcp(broker: Broker) -> None:
    with Device(broker.port("mqtt")) as plain, Device(broker.port("mqtt_ws"), "web", transport="websockets") as web:
        assert isinstance(web.client, paho.Client)
        web.subscribe("web/#", 2)
        plain.subscribe("plain", 2)
        plain.publish("web/1", b"x" * 100_000, 2)
        web.publish("plain", b"from a page", 2)
        assert web.wait(1)[0].payload == b"x" * 100_000
        assert plain.wait(1)[0].payload == b"from a page"
