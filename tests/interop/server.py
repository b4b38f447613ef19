"""A real broker process for tests: `basalt serve` on free ports, which always ends with the test.

    with running(tmp_path / "data") as broker:
        broker.url("amqp"), broker.port("admin"), broker.api(...)

The process is started once per `running`; tests that need a restart call `kill`, `stop` and `start` on it.
`broker.log()` returns its log, which is also shown if it does not start.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from tests.interop.ports import free_port

from basaltmq.http_client import GUEST, HttpClient, Login

ROOT = Path(__file__).parents[2]
START_S = 60.0
STOP_S = 60.0
PATIENCE_S = 1.0
POLL_S = 0.02
READY = re.compile(r'"ports":\s*(\{[^}]*\})')
LISTENERS = ("amqp", "admin", "fila", "kafka", "mqtt", "mqtt_ws", "rocketmq")


class Broker:
    """A data directory and the process that serves it."""

    def __init__(self, data_dir: Path, *, flags: tuple[str, ...] = (), environment: Mapping[str, str] | None = None):
        self.data_dir = data_dir
        self.ports: dict[str, int] = {}
        self.process: subprocess.Popen[bytes] | None = None
        self.flags = flags
        self._environment = dict(environment or {})
        self._log = data_dir.with_name(data_dir.name + ".log")
        self._seen = 0

    def start(self) -> Broker:
        """Start the process and wait until it listens. Ports stay the same over restarts."""
        assert self.process is None, "it runs"
        self._seen = self._log.stat().st_size if self._log.exists() else 0
        ports = [f"--{name.replace('_', '-')}-port={self.ports.get(name) or free_port()}" for name in LISTENERS]
        command = [sys.executable, "-m", "basaltmq.cli", "serve", f"--data-dir={self.data_dir}", "--log-format=json"]
        inherited = {name: value for name, value in os.environ.items() if not name.startswith("BASALT_")}
        with open(self._log, "ab") as log:
            self.process = subprocess.Popen(
                [*command, *ports, *self.flags],
                stdout=log,
                stderr=log,
                cwd=self.data_dir.parent,
                env={**inherited, "PYTHONPATH": str(ROOT / "src"), **self._environment},
            )
        self.ports |= self._wait_ready()
        return self

    def _wait_ready(self) -> dict[str, int]:
        assert self.process is not None
        until = time.monotonic() + START_S
        while time.monotonic() < until:
            found = READY.search(self.log())
            if found:
                ports: dict[str, int] = json.loads(found[1])
                return ports
            if self.process.poll() is not None:
                break
            time.sleep(POLL_S)
        code = self.process.poll()
        self.end()
        raise AssertionError(f"the broker did not start (exit code {code}):\n{self.log()}")

    def log(self) -> str:
        """Return the log of this run of the process."""
        with open(self._log, "rb") as log:
            log.seek(self._seen)
            return log.read().decode(errors="replace")

    def port(self, listener: str = "amqp") -> int:
        return self.ports[listener]

    def url(self, listener: str = "amqp", *, user: str = GUEST, password: str = GUEST, vhost: str = "%2F") -> str:
        if listener == "admin":
            return f"http://127.0.0.1:{self.port('admin')}"
        return f"{listener}://{user}:{password}@127.0.0.1:{self.port(listener)}/{vhost}"

    def api(self, user: str = GUEST, password: str = GUEST) -> HttpClient:
        return HttpClient(Login(self.url("admin"), user, password))

    def call(self, method: str, path: str, body: Any = None, **query: str | int) -> Any:
        """Make a request to the admin API as guest."""
        return self.api().call(method, path, body, query=query)

    def signal(self, number: int) -> None:
        assert self.process is not None
        self.process.send_signal(number)

    def wait(self) -> int:
        """Wait until the process ends, and return its exit code."""
        assert self.process is not None
        code = self.process.wait(STOP_S)
        self.process = None
        return code

    def stop(self) -> int:
        """Send SIGTERM and wait. Return the exit code."""
        self.signal(signal.SIGTERM)
        return self.wait()

    def kill(self) -> None:
        """kill -9."""
        self.signal(signal.SIGKILL)
        self.wait()

    def end(self) -> None:
        """End the process: with SIGTERM, with a second one that skips the grace period, and finally with SIGKILL."""
        if self.process is not None:
            for wait_s in (PATIENCE_S, STOP_S):
                self.process.terminate()
                with contextlib.suppress(subprocess.TimeoutExpired):
                    self.process.wait(wait_s)
                    break
            else:
                self.process.kill()
                self.process.wait(STOP_S)
            self.process = None


@contextlib.contextmanager
def running(data_dir: Path, *flags: str, environment: Mapping[str, str] | None = None) -> Iterator[Broker]:
    """Run a broker during the block."""
    broker = Broker(data_dir, flags=flags, environment=environment)
    try:
        yield broker.start()
    finally:
        broker.end()
