"""Clients of other projects, unmodified: aiomqtt, gmqtt, MQTT.js in Node and in Chromium, HiveMQ's Java client.

Each runs one scenario: every QoS, properties of MQTT 5.0, a retained message, and a session that is resumed. TCP, TLS
and WebSocket are spread over them. `clients/install` installs those that are not Python packages.
"""

from __future__ import annotations

import asyncio
import os
import shutil
import ssl
import subprocess
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from queue import Queue
from typing import Any

import aiomqtt
import pytest
from gmqtt import Client as GmqttClient
from paho.mqtt.packettypes import PacketTypes
from tests.interop.mqtt.device import properties
from tests.interop.server import Broker, running

TLS = Path(__file__).parents[2] / "fixtures" / "tls"
AUTHORITY = TLS / "authority.pem"
SCENARIOS = Path(__file__).parent / "clients"
INSTALLED = Path(os.environ.get("BASALT_MQTT_CLIENTS", Path.home() / ".cache" / "basalt" / "mqtt-clients"))
WAIT_S = 60.0
RESPONSE = {"ContentType": "text/plain", "ResponseTopic": "answers", "CorrelationData": b"17"}


def needs(*tools: str, installed: str) -> pytest.MarkDecorator:
    """Skip where a tool is missing. In `.ci/run` nothing is missing, so nothing is skipped."""
    missing = [tool for tool in tools if shutil.which(tool) is None]
    if not (INSTALLED / installed).exists():
        missing.append(str(INSTALLED / installed))
    reason = f"missing: {', '.join(missing)}; run tests/interop/mqtt/clients/install, or .ci/run"
    return pytest.mark.skipif(bool(missing) and not os.environ.get("TESTS_COMPLETE"), reason=reason)


@pytest.fixture(scope="module")
def broker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Broker]:
    """A broker with TLS, which all clients share."""
    certificates = [f"--tls-certificate={TLS / 'server.pem'}", f"--tls-key={TLS / 'server.key'}"]
    flags = ["--mqtts-enabled=true", "--mqtts-port=0", f"--tls-authority={AUTHORITY}", *certificates]
    # The page of the test is not served by the broker, so its origin is configured.
    flags.append("--mqtt-ws-allowed-hosts=127.0.0.1")
    with running(tmp_path_factory.mktemp("clients") / "data", *flags) as started:
        yield started


def run(*command: str | Path) -> None:
    done = subprocess.run([str(each) for each in command], capture_output=True, text=True, timeout=WAIT_S, check=False)
    assert done.stdout.strip() == "passed", done.stdout + done.stderr


@pytest.mark.spec("G1")
def test_aiomqtt_over_tls(broker: Broker) -> None:
    asyncio.run(asyncio.wait_for(_aiomqtt(broker.port("mqtts")), WAIT_S))


async def _aiomqtt(port: int) -> None:
    context = ssl.create_default_context(cafile=str(AUTHORITY))
    given: dict[str, Any] = {
        "hostname": "127.0.0.1",
        "port": port,
        "protocol": aiomqtt.ProtocolVersion.V5,
        "tls_context": context,
    }
    durable: dict[str, Any] = {
        **given,
        "identifier": "aiomqtt",
        "clean_start": False,
        "properties": properties(PacketTypes.CONNECT, SessionExpiryInterval=300),
    }
    fields = properties(PacketTypes.PUBLISH, UserProperty=[("unit", "K")], **RESPONSE)
    async with aiomqtt.Client(**given) as other:
        async with aiomqtt.Client(**durable) as client:
            await other.publish("aiomqtt-kept", b"retained", qos=1, retain=True)
            await client.subscribe([("aiomqtt/#", 2), ("aiomqtt-kept", 1)])
            kept = await anext(client.messages)
            assert (kept.payload, kept.retain) == (b"retained", True)
            for qos in range(3):
                await client.publish(f"aiomqtt/{qos}", b"message", qos=qos, properties=fields)
                found = await anext(client.messages)
                assert (str(found.topic), found.payload, found.qos) == (f"aiomqtt/{qos}", b"message", qos)
                received: Any = found.properties
                assert received.UserProperty == [("unit", "K")]
                assert {name: getattr(received, name) for name in RESPONSE} == RESPONSE
        await other.publish("aiomqtt/offline", b"while away", qos=1)
        async with aiomqtt.Client(**durable) as client:
            assert (await anext(client.messages)).payload == b"while away"


@pytest.mark.spec("G1")
def test_gmqtt(broker: Broker) -> None:
    asyncio.run(asyncio.wait_for(_gmqtt(broker.port("mqtt")), WAIT_S))


async def _gmqtt(port: int) -> None:
    messages: asyncio.Queue[tuple[str, bytes, int, Any]] = asyncio.Queue()
    subscribed = asyncio.Event()

    async def received(_: Any, topic: str, payload: bytes, qos: int, given: Any) -> int:
        messages.put_nowait((topic, payload, qos, given))
        return 0

    def client(name: str, **options: Any) -> Any:
        made: Any = GmqttClient(name, **options)
        made.on_message = received
        made.on_subscribe = lambda *_: subscribed.set()
        return made

    first = client("gmqtt", clean_session=False, session_expiry_interval=300)
    await first.connect("127.0.0.1", port)
    first.subscribe("gmqtt/#", qos=2)
    await subscribed.wait()
    for qos in range(3):
        first.publish(
            f"gmqtt/{qos}",
            b"message",
            qos=qos,
            content_type="text/plain",
            response_topic="answers",
            correlation_data=b"17",
            user_property=("unit", "K"),
        )
        topic, payload, received_qos, given = await messages.get()
        assert (topic, payload, received_qos) == (f"gmqtt/{qos}", b"message", qos)
        assert given["content_type"] == ["text/plain"]
        assert given["response_topic"] == ["answers"]
        assert given["correlation_data"] == [b"17"]
        assert given["user_property"] == [("unit", "K")]
    await first.disconnect()
    other = client("gmqtt-other")
    await other.connect("127.0.0.1", port)
    other.publish("gmqtt-kept", b"retained", qos=1, retain=True)
    other.publish("gmqtt/offline", b"while away", qos=1)
    await first.connect("127.0.0.1", port, raise_exc=True)
    assert (await messages.get())[1] == b"while away"
    subscribed.clear()
    first.subscribe("gmqtt-kept", qos=1)
    _, payload, _, given = await messages.get()
    assert (payload, given["retain"]) == (b"retained", 1)
    await first.disconnect()
    await other.disconnect()


@pytest.mark.spec("G1")
@needs("node", installed="node_modules/mqtt")
def test_mqtt_js_in_node_over_tls(broker: Broker) -> None:
    run("node", SCENARIOS / "node.js", INSTALLED, f"mqtts://127.0.0.1:{broker.port('mqtts')}", "node", AUTHORITY)


@pytest.mark.spec("G1")
@needs("java", installed="classes/HiveMqScenario.class")
def test_the_java_client_of_hivemq_over_tls(broker: Broker) -> None:
    classes = f"{INSTALLED / 'jars'}/*:{INSTALLED / 'classes'}"
    quick = ("-XX:TieredStopAtLevel=1", "-XX:+UseSerialGC")
    run("java", *quick, "-cp", classes, "HiveMqScenario", str(broker.port("mqtts")), AUTHORITY)


@pytest.mark.spec("G1")
@needs("chromium", installed="node_modules/mqtt")
def test_mqtt_js_in_a_browser_over_websocket(broker: Broker, tmp_path: Path) -> None:
    with pages() as (port, results):
        url = f"http://127.0.0.1:{port}/page.html?url=ws://127.0.0.1:{broker.port('mqtt_ws')}/mqtt"
        # The sandbox needs privileges that containers do not have.
        options = ["--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--no-first-run"]
        command = ["chromium", *options, "--remote-debugging-port=0", f"--user-data-dir={tmp_path / 'profile'}", url]
        with open(tmp_path / "log", "wb") as log:
            browser = subprocess.Popen(command, stdout=log, stderr=log)
        try:
            assert results.get(timeout=WAIT_S) == "passed"
        finally:
            browser.terminate()
            browser.wait(WAIT_S)


@contextmanager
def pages() -> Iterator[tuple[int, Queue[str]]]:
    """Serve the page of the test and its scripts. Return the port, and the results that the page reports."""
    results: Queue[str] = Queue()
    files = {
        "/page.html": (SCENARIOS / "page.html", "text/html"),
        "/scenario.js": (SCENARIOS / "scenario.js", "text/javascript"),
        "/mqtt.min.js": (INSTALLED / "node_modules/mqtt/dist/mqtt.min.js", "text/javascript"),
    }

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            path, kind = files.get(self.path.partition("?")[0], (None, ""))
            body = b"" if path is None else path.read_bytes()
            self.send_response(404 if path is None else 200)
            self.send_header("Content-Type", kind)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def do_POST(self) -> None:
            results.put(self.rfile.read(int(self.headers["Content-Length"])).decode())
            self.send_response(204)
            self.end_headers()

        def log_message(self, *given: object) -> None: ...

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield server.server_address[1], results
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
