"""Servers for Fila's client, each in its own process, so that a test can kill it."""

from __future__ import annotations

import base64
import json
import signal
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import fila
import grpc
import pytest
from fila.v1 import admin_pb2, admin_pb2_grpc
from tests.interop.ports import free_port

PROCESS = Path(__file__).with_name("server_process.py")
WAIT_S = 30.0
GUEST = "Basic " + base64.b64encode(b"guest:guest").decode()


def until(holds: Callable[[], object]) -> None:
    """Wait until another process has done something."""
    end_s = time.monotonic() + 2 * WAIT_S
    while not holds():
        assert time.monotonic() < end_s, "it did not come about"
        time.sleep(0.01)


@contextmanager
def fila_client(address: str) -> Iterator[fila.Client]:
    """Return the unmodified client. It waits for messages without a limit, so it is closed if a test waits too long."""
    client = fila.Client(address)
    watch = threading.Timer(2 * WAIT_S, client.close)
    watch.start()
    try:
        yield client
    finally:
        watch.cancel()
        client.close()


class Server:
    """A server process on a directory."""

    def __init__(self, directory: Path, options: dict[str, Any]) -> None:
        self.directory = directory
        self._options = {"port": free_port(), **options}
        self.start()

    def start(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, str(PROCESS), str(self.directory), json.dumps(self._options)],
            stdout=subprocess.PIPE,
            text=True,
        )
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        assert line, "the server did not start"
        self.port = int(line)
        # The same secret after a restart, like that of a broker.
        self._options["port"] = self.port

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.port}"

    def kill(self) -> None:
        """Kill the process. Clients are not notified."""
        self._process.send_signal(signal.SIGKILL)
        self._process.wait(WAIT_S)
        assert self._process.stdout is not None
        self._process.stdout.close()

    def stop(self) -> int:
        self._process.terminate()
        code = self._process.wait(WAIT_S)
        assert self._process.stdout is not None
        self._process.stdout.close()
        return code

    def memory_bytes(self) -> int:
        """Return the resident memory of the process."""
        pages = int(Path(f"/proc/{self._process.pid}/statm").read_text().split()[1])
        return pages * 4096


class Admin:
    """Fila's admin stubs, used like an operator's tool."""

    def __init__(self, channel: grpc.Channel, api_key: str | None = None, *, is_anonymous: bool = False) -> None:
        """Use an API key, no credentials, or the administrator guest."""
        self._stub: Any = admin_pb2_grpc.FilaAdminStub(channel)
        authorization = GUEST if api_key is None else f"Bearer {api_key}"
        self._metadata = [] if is_anonymous else [("authorization", authorization)]

    def __getattr__(self, call: str) -> Callable[..., Any]:
        """Return a method such as CreateQueue(name=...)."""
        request = getattr(admin_pb2, f"{call}Request")
        return lambda **fields: getattr(self._stub, call)(request(**fields), metadata=self._metadata, timeout=WAIT_S)

    def queue(self, **config: Any) -> str:
        """Create a queue with a unique name."""
        name = f"q-{uuid.uuid4().hex[:12]}"
        self.CreateQueue(name=name, config=admin_pb2.QueueConfig(**config))
        return name


@pytest.fixture(scope="session")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """Start a server that all tests share. Each test uses its own queues."""
    running = Server(tmp_path_factory.mktemp("fila") / "store", {})
    yield running
    assert running.stop() == 0


@pytest.fixture
def channel(server: Server) -> Iterator[grpc.Channel]:
    with grpc.insecure_channel(server.address) as opened:
        yield opened


@pytest.fixture
def admin(channel: grpc.Channel) -> Admin:
    return Admin(channel)


@pytest.fixture
def serve(tmp_path: Path) -> Iterator[Callable[..., Server]]:
    """Return a function that starts a server for one test."""
    started: list[Server] = []

    def start(**options: Any) -> Server:
        started.append(Server(tmp_path / f"store-{len(started)}", options))
        return started[-1]

    yield start
    for each in started:
        each.kill()
