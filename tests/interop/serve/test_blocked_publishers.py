"""Failures: blocked publishers, a virtual host that cannot be opened, and the operator's view and remedies."""

from __future__ import annotations

import contextlib
import shutil
import signal
import socket
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pika
import pytest
from click.testing import CliRunner
from tests.interop.server import POLL_S, Broker, running

from basaltmq.broker.vhost_directory import directory_name
from basaltmq.cli.main import main
from basaltmq.errors import RemoteError
from basaltmq.http_client import path

WAIT_S = 60


def refused(call: Callable[..., Any], *arguments: Any) -> RemoteError:
    with pytest.raises(RemoteError) as caught:
        call(*arguments)
    return caught.value


def eventually(is_so: Callable[[], bool], what: str) -> None:
    until = time.monotonic() + WAIT_S
    while not is_so():
        assert time.monotonic() < until, what
        time.sleep(POLL_S)


@pytest.mark.spec("A11")
@pytest.mark.promise("P8")
def test_a_nearly_full_disk_blocks_publishers_but_not_consumers(tmp_path: Path) -> None:
    file = tmp_path / "basalt.toml"
    file.write_text("")
    publish = path("exchanges", "/", "amq.default", "publish")
    body = {"routing_key": "jobs", "payload": "x", "properties": {"delivery_mode": 2}}
    with running(tmp_path / "data", f"--config={file}") as broker:
        broker.call("PUT", path("queues", "/", "jobs"), {})
        broker.call("POST", publish, body)
        file.write_text('[disk]\nfree_min = "100%"\n')
        broker.signal(signal.SIGHUP)
        eventually(lambda: "publishers are blocked" in broker.log(), broker.log())
        held = refused(broker.call, "POST", publish, body)
        assert (held.status, held.code) == (503, "publishers_blocked")
        assert "low on disk" in str(held)
        alarmed = refused(broker.call, "GET", path("health", "checks", "alarms"))
        assert alarmed.status == 503
        assert broker.call("GET", path("nodes"))[0]["disk_free_alarm"]
        with contextlib.closing(pika.BlockingConnection(pika.URLParameters(broker.url()))) as connection:
            assert connection.channel().basic_get("jobs", auto_ack=True)[2] == b"x"
        file.write_text("")
        broker.signal(signal.SIGHUP)
        eventually(lambda: "no longer blocked" in broker.log(), broker.log())
        assert broker.call("POST", publish, body) == {"routed": True}


def lose_vhost(broker: Broker, name: str) -> tuple[Path, Path]:
    """Move the directory of a virtual host away while the broker is stopped. Return (old path, new path)."""
    broker.call("PUT", path("vhosts", name), {})
    broker.call("PUT", path("queues", name, "kept"), {})
    assert broker.stop() == 0
    here = broker.data_dir / "vhosts" / directory_name(name)
    there = broker.data_dir.with_name("taken away")
    shutil.move(here, there)
    return here, there


@pytest.mark.spec("E9")
@pytest.mark.promise("P11")
def test_only_the_virtual_host_that_fails_to_open_stays_down(own_broker: Broker) -> None:
    here, there = lose_vhost(own_broker, "ill")
    own_broker.flags = ("--vhosts-restarts-max=0",)
    own_broker.start()
    eventually(lambda: own_broker.call("GET", path("vhosts", "ill"))["state"] == "down", "it is down")
    shown = own_broker.call("GET", path("vhosts", "ill"))
    assert "is missing" in shown["error"]
    assert refused(own_broker.call, "GET", path("queues", "ill")).code == "vhost_down"
    unhealthy = refused(own_broker.call, "GET", path("health", "checks", "virtual-hosts"))
    assert unhealthy.status == 503
    assert "ill" in str(unhealthy)
    own_broker.call("PUT", path("queues", "/", "served"), {})
    reported = CliRunner(env={"BASALT_SERVER": own_broker.url("admin")}).invoke(main, ["status"])
    assert reported.exit_code == 2
    assert "basalt vhost restart ill" in reported.stdout
    shutil.move(there, here)
    own_broker.call("POST", path("vhosts", "ill", "restart"))
    assert [each["name"] for each in own_broker.call("GET", path("queues", "ill"))] == ["kept"]
    assert own_broker.call("GET", path("health", "checks", "virtual-hosts"))["status"] == "ok"


@pytest.mark.spec("E9")
def test_the_broker_stops_with_a_failed_virtual_host_if_configured(own_broker: Broker) -> None:
    lose_vhost(own_broker, "ill")
    own_broker.flags = ("--vhosts-restarts-max=0", "--vhosts-on-failure=stop_node")
    own_broker.start()
    assert own_broker.wait() == 74
    assert "stays down; stopping the node" in own_broker.log()


def test_grpc_follows_its_virtual_host_through_a_restart(own_broker: Broker) -> None:
    assert listens(own_broker.port("fila"))
    own_broker.call("POST", path("vhosts", "/", "restart"))
    eventually(lambda: listens(own_broker.port("fila")), "gRPC is back")
    assert own_broker.stop() == 0
    own_broker.flags = ("--fila-vhost=later",)
    own_broker.start()
    assert "gRPC is not available: vhost 'later' not found" in own_broker.log()
    own_broker.call("PUT", path("vhosts", "later"), {})
    eventually(lambda: listens(own_broker.port("fila")), "gRPC is there")


def listens(port: int) -> bool:
    try:
        socket.create_connection(("127.0.0.1", port), WAIT_S).close()
    except ConnectionRefusedError:
        return False
    return True


def test_metrics_may_require_the_monitoring_tag(tmp_path: Path) -> None:
    with running(tmp_path / "data", "--admin-metrics-public=false", "--fila-enabled=no") as broker:
        stranger = broker.api("guest", "wrong")
        assert refused(stranger.get, "/metrics").status == 401
        broker.call("PUT", path("users", "plain"), {"password": "p", "tags": ["management"]})
        plain = broker.api("plain", "p")
        assert refused(plain.get, "/metrics/per-object").status == 403
        assert "basalt_build_info" in broker.call("GET", "/metrics")
        assert "fila" not in broker.ports
