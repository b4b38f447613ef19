"""`basalt serve` from start to stop: errors at the start, existing data, and shutdown."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pika
import pytest
from tests.interop.server import POLL_S, ROOT, Broker, running

from basaltmq.http_client import path
from basaltmq.store.open import open_store

WAIT_S = 60
GUEST = "Basic Z3Vlc3Q6Z3Vlc3Q="
HIDDEN = "BASALT_AUTH_DEFAULT_PASSWORD"
SECTIONS = ("amqp", "admin", "fila", "kafka", "mqtt", "mqtt-ws", "rocketmq")
FREE = tuple(f"--{section}-port=0" for section in SECTIONS)


def serve(data_dir: Path, *flags: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run a broker that fails to start."""
    return subprocess.run(
        [sys.executable, "-m", "basaltmq.cli", "serve", f"--data-dir={data_dir}", *flags],
        capture_output=True,
        text=True,
        timeout=WAIT_S,
        env={**os.environ, "PYTHONPATH": str(ROOT / "src"), **environment},
    )


def last_line(done: subprocess.CompletedProcess[str]) -> str:
    """Return the line with the reason. Before it there are only the log lines of a start."""
    lines = [line for line in done.stderr.splitlines() if " INFO " not in line]
    assert len(lines) == 1, done.stderr
    return lines[0]


def test_a_port_in_use_is_named_with_the_flag_to_change_it(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        done = serve(tmp_path / "data", f"--amqp-port={port}", *FREE[1:])
    assert done.returncode == 69
    said = last_line(done)
    assert said.startswith("error [address_unavailable]: amqp: port")
    assert f"port {port} on 127.0.0.1 is in use" in said
    assert "--amqp-port" in said
    assert not (tmp_path / "data").exists(), "the data was not touched"


def test_files_of_the_broker_are_accessible_only_to_its_user(own_broker: Broker) -> None:
    paths = [own_broker.data_dir, *own_broker.data_dir.rglob("*")]
    assert len(paths) > 20
    assert {each.stat().st_mode & 0o777 for each in paths if each.is_dir()} == {0o700}
    assert {each.stat().st_mode & 0o777 for each in paths if each.is_file()} == {0o600}
    own_broker.stop()
    own_broker.data_dir.chmod(0o755)
    own_broker.start()
    assert "from 0755 to 0700" in own_broker.log()
    assert own_broker.data_dir.stat().st_mode & 0o777 == 0o700


def test_data_in_use_by_another_broker_is_named(own_broker: Broker) -> None:
    done = serve(own_broker.data_dir, *FREE)
    assert done.returncode == 75
    assert "error [store_locked]" in last_line(done)
    assert str(own_broker.process.pid if own_broker.process else "") in last_line(done)


def test_a_directory_of_another_program_is_refused_and_unchanged(tmp_path: Path) -> None:
    letter = tmp_path / "data" / "node" / "store" / "letter.txt"
    letter.parent.mkdir(parents=True)
    letter.write_text("dear")
    done = serve(tmp_path / "data", *FREE)
    assert done.returncode == 78
    assert "error [not_a_store]" in last_line(done)
    assert list(letter.parent.iterdir()) == [letter]


def test_a_directory_with_other_files_is_refused_and_unchanged(tmp_path: Path) -> None:
    letter = tmp_path / "data" / "letter.txt"
    letter.parent.mkdir()
    letter.write_text("dear")
    done = serve(tmp_path / "data", *FREE)
    assert done.returncode == 78
    said = last_line(done)
    assert f"error [not_a_store]: {tmp_path / 'data'} is not the data directory of a broker" in said
    assert "it contains letter.txt" in said
    assert "--data-dir" in said
    assert list(letter.parent.iterdir()) == [letter]


def test_a_lost_node_store_is_named_with_the_remedy_which_works(tmp_path: Path) -> None:
    with running(tmp_path / "data") as broker:
        broker.call("PUT", "/api/vhosts/shop", {})
        broker.call("PUT", "/api/queues/shop/orders", {"durable": True})
    shutil.rmtree(tmp_path / "data" / "node")
    done = serve(tmp_path / "data", *FREE)
    assert done.returncode == 74
    assert "--recover-vhosts" in last_line(done)
    with running(tmp_path / "data", "--recover-vhosts") as broker:
        assert [each["name"] for each in broker.call("GET", "/api/queues")] == ["orders"]


def test_the_store_of_an_embedded_program_is_refused(tmp_path: Path) -> None:
    open_store(tmp_path / "data").close()
    before = sorted(tmp_path.rglob("*"))
    done = serve(tmp_path / "data", *FREE)
    assert done.returncode == 78
    assert "embedded program" in last_line(done)
    assert sorted(tmp_path.rglob("*")) == before


def test_an_unwritable_data_directory_is_named(tmp_path: Path) -> None:
    done = serve(Path("/proc/basalt"), *FREE)
    assert done.returncode in (74, 77)
    assert "/proc/basalt" in last_line(done)


@pytest.mark.parametrize(
    ("flags", "environment", "said"),
    [
        (("--amqp-port=many",), {}, "amqp.port from --amqp-port"),
        ((), {"BASALT_LOG_LEVEL": "loud"}, "variable BASALT_LOG_LEVEL"),
        (("--amqps-enabled=true",), {}, "amqps.enabled needs tls.certificate"),
        (("--config=nowhere.toml",), {}, "cannot read the settings file nowhere.toml"),
        (("--tls-certificate=nowhere.pem", "--tls-key=nowhere.key"), {}, "cannot read tls.certificate nowhere.pem"),
        (("--host=203.0.113.7",), {}, "203.0.113.7 is not an address of this machine"),
    ],
)
def test_invalid_settings_exit_with_one_line_and_a_code_without_restart(
    tmp_path: Path, flags: tuple[str, ...], environment: dict[str, str], said: str
) -> None:
    done = serve(tmp_path / "data", *FREE, *flags, **environment)
    assert done.returncode in (78, 69)
    assert said in last_line(done)
    assert "Traceback" not in done.stderr


def test_print_config_does_not_start_the_broker(tmp_path: Path) -> None:
    done = serve(tmp_path / "data", "--print-config", "--amqp-port=1234", **{HIDDEN: "hunter2"})
    assert done.returncode == 0
    assert "port = 1234" in done.stdout
    assert "hunter2" not in done.stdout + done.stderr
    assert not (tmp_path / "data").exists()


@contextlib.contextmanager
def connected(broker: Broker) -> Iterator[pika.BlockingConnection]:
    connection = pika.BlockingConnection(pika.URLParameters(broker.url()))
    try:
        yield connection
    finally:
        with contextlib.suppress(pika.exceptions.AMQPError):
            connection.close()


def serve_events(connection: pika.BlockingConnection) -> None:
    """Handle events until the broker ends the connection."""
    while True:
        connection.process_data_events(1)


@pytest.mark.promise("P1")
@pytest.mark.spec("E6")
def test_a_stop_confirms_received_messages_closes_connections_and_leaves_clean_data(own_broker: Broker) -> None:
    with connected(own_broker) as connection, connected(own_broker) as consumer:
        channel = connection.channel()
        channel.queue_declare("jobs", durable=True)
        channel.confirm_delivery()
        for number in range(50):
            channel.basic_publish("", "jobs", b"%d" % number, pika.BasicProperties(delivery_mode=2))
        taking = consumer.channel()
        taking.basic_qos(prefetch_count=5)
        taken: list[bytes] = []
        taking.basic_consume("jobs", lambda _channel, _method, _properties, body: taken.append(body))
        while len(taken) < 5:
            consumer.process_data_events(1)
        own_broker.signal(signal.SIGTERM)
        for each in (connection, consumer):
            with pytest.raises(pika.exceptions.ConnectionClosedByBroker) as reported:
                serve_events(each)
            assert reported.value.reply_code == 320
            assert "shutting down" in reported.value.reply_text
    assert own_broker.wait() == 0
    assert '"message":"stopped after' in own_broker.log()
    own_broker.start()
    assert own_broker.call("GET", path("queues", "/", "jobs"))["messages_ready"] == 50


def test_a_second_signal_does_not_wait_for_clients_that_do_not_answer(tmp_path: Path) -> None:
    with running(tmp_path / "data", "--stop-grace-ms=600000") as broker, connected(broker) as connection:
        with socket.create_connection(("127.0.0.1", broker.port("admin"))) as slow:
            head = f"PUT {path('users', 'x')} HTTP/1.1\r\nHost: localhost\r\nAuthorization: {GUEST}\r\n"
            head += "Content-Type: application/json\r\nContent-Length: 9\r\n"
            slow.sendall(head.encode() + b"Expect: 100-continue\r\n\r\n")
            slow.settimeout(WAIT_S)
            assert b"100 Continue" in slow.recv(100), "the request is under way, and its body does not come"
            broker.signal(signal.SIGTERM)
            said(broker, '"message":"stopping"')
            broker.signal(signal.SIGINT)
            assert broker.process is not None
            # The timeout of the body is one minute, the grace period ten seconds. Either would exceed the limit here.
            assert broker.process.wait(30) == 0
        assert "SIGINT received again, skipping the grace period" in broker.log()
        with pytest.raises(pika.exceptions.AMQPError):
            connection.channel()


@pytest.mark.promise("P1")
def test_confirmed_messages_survive_kill_9(own_broker: Broker) -> None:
    with connected(own_broker) as connection:
        channel = connection.channel()
        channel.queue_declare("jobs", durable=True)
        channel.confirm_delivery()
        for number in range(20):
            channel.basic_publish("", "jobs", b"%d" % number, pika.BasicProperties(delivery_mode=2))
        own_broker.kill()
    own_broker.start()
    assert own_broker.call("GET", path("queues", "/", "jobs"))["messages_ready"] == 20


def test_a_reload_applies_live_settings_or_nothing_if_one_is_invalid(tmp_path: Path) -> None:
    file = tmp_path / "basalt.toml"
    file.write_text('[log]\nlevel = "info"\n')
    with running(tmp_path / "data", f"--config={file}") as broker:
        file.write_text('[log]\nlevel = "loud"\n')
        broker.signal(signal.SIGHUP)
        said(broker, "the previous settings stay in effect")
        file.write_text('[log]\nlevel = "debug"\n[auth]\nloopback_users = []\n[limits]\nheartbeat_s = 7\n')
        broker.signal(signal.SIGHUP)
        said(broker, "reloaded: auth.loopback_users, log.level")
        assert "these settings take effect after a restart: limits.heartbeat_s" in broker.log()
        assert broker.call("GET", path("whoami"))["name"] == "guest"


def said(broker: Broker, text: str) -> None:
    """Wait for a text in the broker's log, because nothing else shows the event."""
    until = time.monotonic() + WAIT_S
    while text not in broker.log():
        assert time.monotonic() < until, f"{text!r} was not said:\n{broker.log()}"
        time.sleep(POLL_S)


def test_systemd_is_notified_of_readiness_and_stop(tmp_path: Path) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as systemd:
        systemd.bind(str(tmp_path / "notify"))
        systemd.settimeout(WAIT_S)
        heard: list[str] = []
        environment = {"NOTIFY_SOCKET": str(tmp_path / "notify"), "WATCHDOG_USEC": "2000000"}
        with running(tmp_path / "data", environment=environment) as broker:
            while not any("WATCHDOG=1" in each for each in heard):
                heard.append(systemd.recv(4096).decode())
            assert any(each.startswith("READY=1") for each in heard)
            assert broker.stop() == 0
            while not heard[-1].startswith("STOPPING=1"):
                heard.append(systemd.recv(4096).decode())


def test_a_log_of_json_lines_has_neither_payloads_nor_passwords(own_broker: Broker) -> None:
    own_broker.call("PUT", path("users", "dave"), {"password": "top-secret-1", "tags": []})
    body = {"routing_key": "none", "payload": "top-secret-2"}
    own_broker.call("POST", path("exchanges", "/", "amq.default", "publish"), body)
    with pytest.raises(pika.exceptions.ProbableAuthenticationError):
        pika.BlockingConnection(pika.URLParameters(own_broker.url().replace("guest@", "top-secret-3@")))
    assert own_broker.stop() == 0
    lines = [msgspec.json.decode(line) for line in own_broker.log().splitlines()]
    assert {"time", "level", "logger", "message"} <= lines[0].keys()
    assert "top-secret" not in own_broker.log()
