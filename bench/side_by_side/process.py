"""A broker as a process with its own directory and port. It is stopped with all its children."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Final, NamedTuple

START_S: Final = 120.0
STOP_S: Final = 60.0
POLL_S: Final = 0.02
LOG_SHOWN: Final = 2000
"""Characters of a broker's output that an error shows."""


class Side(NamedTuple):
    """A running broker."""

    name: str
    port: int
    pid: int
    start_s: float

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.port}"


def free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        port: int = sock.getsockname()[1]
        return port


def accepts(port: int) -> bool:
    """Whether a server listens on the port."""
    with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), timeout=START_S):
        return True
    return False


@contextlib.contextmanager
def running(
    name: str,
    command: list[str],
    folder: Path,
    port: int,
    environment: dict[str, str] | None = None,
    answers: Callable[[int], bool] = accepts,
) -> Iterator[Side]:
    """Start a broker, wait until it accepts connections, and stop its process group at the end."""
    folder.mkdir(parents=True, exist_ok=True)
    output = folder / f"{name.replace(' ', '-').lower()}.out"
    begin = time.perf_counter()
    with output.open("wb") as log:
        process = subprocess.Popen(
            command, env=environment, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True
        )
    try:
        _await_answer(name, process, port, answers, output)
        yield Side(name, port, process.pid, time.perf_counter() - begin)
    finally:
        _stop(process)


def _await_answer(
    name: str, process: subprocess.Popen[bytes], port: int, answers: Callable[[int], bool], output: Path
) -> None:
    until = time.monotonic() + START_S
    while time.monotonic() < until and process.poll() is None:
        if answers(port):
            return
        time.sleep(POLL_S)
    state = "still runs" if process.poll() is None else f"ended with code {process.returncode}"
    said = output.read_text(errors="replace")[-LOG_SHOWN:]
    raise TimeoutError(f"{name} does not answer on port {port} and {state}; the end of its output:\n{said}")


def _stop(process: subprocess.Popen[bytes]) -> None:
    for number, patience_s in ((signal.SIGTERM, STOP_S), (signal.SIGKILL, 10.0)):
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, number)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(patience_s)
            return
    raise TimeoutError(f"process {process.pid} did not end after SIGKILL")
